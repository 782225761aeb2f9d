"""LoCoMo's loader and splits: a made file with all of its dirt, bad files, the published counts."""

from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from config.errors import UserError
from tasks.conversations import Memory, Probe, Session, Utterance
from tasks.episodes import word_f1
from tasks.locomo import (
    CATEGORIES,
    NOT_MENTIONED,
    PRINT_ORDER,
    SPLITS,
    category_label,
    day_of,
    load_locomo,
    split,
)
from tasks.locomo_score import official_em, official_score

LOCOMO = Path(__file__).parents[3] / "shared" / "data" / "locomo10.json.gz"
published = pytest.mark.skipif(not LOCOMO.is_file(), reason=f"needs {LOCOMO}, which is not there")


def sample(name: str = "made-1", speakers: tuple[str, str] = ("Ada", "Bo")) -> dict:
    """Make a conversation of LoCoMo's schema: every category, and every kind of dirt.

    Sessions 1, 2 and 10 have four turns each, alternating; dates 11 and 12 have no session.
    """
    ada, bo = speakers
    talk: dict = {"speaker_a": ada, "speaker_b": bo}
    for number, day in ((10, "28 February"), (1, "3 January"), (2, "17 January")):
        talk[f"session_{number}_date_time"] = f"4:05 pm on {day}, 2024"
        talk[f"session_{number}"] = [
            {"speaker": speakers[n % 2], "dia_id": f"D{number}:{n + 1}", "text": f"Line {n + 1}."}
            for n in range(4)
        ]
    talk["session_2"][1] |= {
        "img_url": ["https://example.org/1.jpg"],
        "blip_caption": "a bowl of pears",
        "query": "pears",
        "re-download": True,
    }
    talk["session_11_date_time"] = "10:30 am on 1 March, 2024"
    talk["session_12_date_time"] = "11:30 am on 2 March, 2024"
    facts = [[f"{ada} grows pears.", "D1:1"], [f"{ada} sells them.", ["D1:1", "D1:3"]]]
    events = {ada: [f"{ada} picks pears.", ""], bo: [], "date": "3 January, 2024"}
    return {
        "sample_id": name,
        "conversation": talk,
        "observation": {
            "session_1_observation": {ada: facts, bo: []},
            "session_10_observation": {bo: [[f"{bo} cooks.", "D10:2, D10:4"]]},
        },
        "session_summary": {f"session_{n}_summary": f"They met, {n}." for n in (1, 2, 10)},
        "event_summary": {"events_session_1": events},
        "qa": [
            question(1, answer="pears, plums", evidence=["D1:1", "D2:2"]),
            question(2, answer=2024, evidence=["D1:1"]),
            question(3, answer="Yes; she likes them", evidence=[]),
            question(4, answer="pears", evidence=["D10:04"]),
            question(5, adversarial_answer="plums", evidence=["D2:1"]),
            question(1, answer="a", evidence=["D1:1; D10:2", "D", "D:1:2", "D2:3 D2:4"]),
            question(4, answer="b", evidence=["D2:9", "D2:1"]),
            question(5, adversarial_answer="Yes", answer="No", evidence=["D1:2"]),
        ],
    }


def question(category: int, **fields) -> dict:
    return {"question": f"Asked in category {category}?", "category": category, **fields}


def write(path: Path, content: object) -> Path:
    raw = json.dumps(content).encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture
def loaded(tmp_path):
    samples = [sample("made-1"), sample("made-2", ("Cy", "Di"))]
    return load_locomo(write(tmp_path / "made.json", samples))


# ---------------------------------------------------------------- good files


def test_sessions_are_in_order_of_their_numbers_and_dates_without_one_are_passed_over(loaded):
    sessions = loaded[0].sessions
    assert [s.number for s in sessions] == [1, 2, 10]
    assert [s.date for s in sessions] == ["2024-01-03", "2024-01-17", "2024-02-28"]
    assert sessions[0].when == "4:05 pm on 3 January, 2024"
    assert [c.speakers for c in loaded] == [("Ada", "Bo"), ("Cy", "Di")]


def test_a_caption_is_part_of_the_turn_and_nothing_else_of_the_picture(loaded):
    text = "Line 2. (shares a picture: a bowl of pears)"
    assert loaded[0].sessions[1].utterances[1] == Utterance("D2:2", "Bo", text)
    assert loaded[0].sessions[1].text == f"Ada: Line 1.\nBo: {text}\nAda: Line 3.\nBo: Line 4."
    assert "example.org" not in loaded[0].text


def test_the_text_of_a_conversation_has_each_session_under_its_date(loaded):
    parts = loaded[0].text.split("\n\n")
    assert [part.partition("\n")[0] for part in parts] == [
        "Session 1, 4:05 pm on 3 January, 2024",
        "Session 2, 4:05 pm on 17 January, 2024",
        "Session 10, 4:05 pm on 28 February, 2024",
    ]
    assert [part.partition("\n")[2] for part in parts] == [s.text for s in loaded[0].sessions]


def test_questions_of_every_category(loaded):
    probes = loaded[0].probes
    assert [(p.category, p.kind, p.abstains) for p in probes[:5]] == [
        (1, "multi-hop", False),
        (2, "temporal", False),
        (3, "open-domain", False),
        (4, "single-hop", False),
        (5, "adversarial", True),
    ]
    assert probes[1].answers == ("2024",)  # a number in the file
    assert probes[2].answers == ("Yes; she likes them",) and probes[2].evidence == ()
    assert [p.id for p in probes[:2]] == ["made-1-q1", "made-1-q2"]
    assert len({p.id for c in loaded for p in c.probes}) == 16


def test_category_5_abstains_whether_or_not_it_has_an_answer(loaded):
    five = [p for p in loaded[0].probes if p.category == 5]
    assert [(p.answers, p.distractor) for p in five] == [
        ((NOT_MENTIONED,), "plums"),
        ((NOT_MENTIONED,), "Yes"),
    ]
    assert {p.distractor for p in loaded[0].probes if p.category != 5} == {""}


def test_evidence_is_found_in_any_wording_and_normalised(loaded):
    probes = loaded[0].probes
    assert probes[3].evidence == ("D10:4",)
    assert probes[5].evidence == ("D1:1", "D10:2", "D2:3", "D2:4")
    assert probes[5].sessions == (1, 2, 10)
    assert probes[2].sessions == ()


def test_evidence_that_no_turn_has_is_kept_and_named(loaded):
    assert loaded[0].probes[6].evidence == ("D2:9", "D2:1")
    assert loaded[0].dangling == {"made-1-q7": ("D2:9",)}


def test_what_a_store_can_start_with(loaded):
    memories, jan = loaded[0].memories, "2024-01-03"
    assert memories["empty"] == ()
    assert memories["observations"] == (
        Memory("Ada grows pears.", "Ada", jan, 1, ("D1:1",)),
        Memory("Ada sells them.", "Ada", jan, 1, ("D1:1", "D1:3")),
        Memory("Bo cooks.", "Bo", "2024-02-28", 10, ("D10:2", "D10:4")),
    )
    assert memories["events"] == (Memory("Ada picks pears.", "Ada", jan, 1, ("S1",)),)
    assert [m.evidence for m in memories["summaries"]] == [("S1",), ("S2",), ("S10",)]
    assert memories["summaries"][2] == Memory("They met, 10.", None, "2024-02-28", 10, ("S10",))
    turns = memories["sessions"]
    assert len(turns) == 12 and turns[0] == Memory("Line 1.", "Ada", jan, 1, ("D1:1",))
    assert "pears" in turns[5].text


def test_packed_and_plain_files_are_the_same(tmp_path, loaded):
    samples = [sample("made-1"), sample("made-2", ("Cy", "Di"))]
    assert load_locomo(write(tmp_path / "made.json.gz", samples)) == loaded


def test_categories_are_printed_with_their_number():
    assert [category_label(c) for c in PRINT_ORDER] == [
        "4 single-hop", "1 multi-hop", "2 temporal", "3 open-domain", "5 adversarial",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "when", ["4:05 pm on 31 February, 2024", "3 June 2024", "4:05 pm on 3 Juni, 2024", ""]
)
def test_no_day_is_guessed(when):
    with pytest.raises(ValueError):
        day_of(when)


# ---------------------------------------------------------------- bad files

MISSING = b"missing"  # in no JSON; a bare object would have another name in every process
BAD = [  # where in the sample, what stands there, what the error says
    (["conversation"], MISSING, "the field 'conversation' is missing"),
    (["conversation"], [1], "'conversation' must be an object, this is a list"),
    (["conversation"], {"speaker_a": "A"}, "'conversation' has no field session_1"),
    (["conversation", "speaker_b"], MISSING, "the field 'speaker_b' is missing"),
    (["conversation", "session_2"], "text", "'session_2' must be a list"),
    (["conversation", "session_2_date_time"], MISSING, "'session_2_date_time' is missing"),
    (["conversation", "session_2_date_time"], "2024-06-03", "'session_2_date_time' must look like"),
    (["conversation", "session_2_date_time"], "1:00 am on 31 April, 2024", "must look like"),
    (["conversation", "session_2", 1], "Hi", "'session_2' must be an object"),
    (["conversation", "session_2", 1, "text"], MISSING, "session_2, turn 2: the field 'text'"),
    (["conversation", "session_2", 1, "text"], "\ud800", "'text' holds half of a surrogate pair"),
    (["conversation", "session_2", 1, "dia_id"], "2-1", "session_2, turn 2: 'dia_id' must be one"),
    (["conversation", "session_2", 1, "blip_caption"], 3, "'blip_caption' must be a text"),
    (["observation"], MISSING, "the field 'observation' is missing"),
    (["observation", "session_1_observation"], "x", "'session_1_observation' must be an object"),
    (["observation", "session_1_observation", "Ada", 0], "fact", "'Ada' must be a list of pairs"),
    (["observation", "session_1_observation", "Ada", 0, 1], 3, "'Ada' must be ids of turns"),
    (["session_summary", "session_1_summary"], ["x"], "'session_1_summary' must be a text"),
    (["event_summary", "events_session_1", "Ada"], "x", "'Ada' must be a list, this is a text"),
    (["event_summary", "events_session_1", "Ada", 0], 1, "'Ada' must be a text"),
    (["qa"], {}, "'qa' must be a list"),
    (["qa", 1], 7, "'qa' must be an object, this is a whole number"),
    (["qa", 1, "question"], MISSING, "question 2: the field 'question' is missing"),
    (["qa", 1, "category"], 6, "question 2: 'category' must be 1 to 5, this is 6"),
    (["qa", 1, "category"], 0, "question 2: 'category' must be 1 to 5, this is 0"),
    (["qa", 1, "category"], "2", "question 2: 'category' must be a whole number"),
    (["qa", 1, "category"], True, "question 2: 'category' must be a whole number"),
    (["qa", 1, "answer"], MISSING, "question 2: the field 'answer' is missing"),
    (["qa", 1, "answer"], ["2024"], "question 2: 'answer' must be a text"),
    (["qa", 1, "evidence"], [3], "question 2: 'evidence' must be ids of turns"),
    (["qa", 4, "adversarial_answer"], MISSING, "question 5: the field 'adversarial_answer'"),
]  # fmt: skip


def message(path: Path) -> str:
    """Return what loading says, which must be one sentence that names the file."""
    with pytest.raises(UserError) as caught:
        load_locomo(path)
    said = str(caught.value)
    assert str(path) in said and said.endswith(".") and "\n" not in said
    return said


@pytest.mark.parametrize("at, value, expected", BAD, ids=lambda value: str(value)[:60])
def test_an_error_names_file_sample_and_field(tmp_path, at, value, expected):
    broken = copy.deepcopy(sample("made-2"))
    *way, last = at
    inner = broken
    for key in way:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    said = message(write(tmp_path / "made.json", [sample("made-1"), broken]))
    assert "made-2" in said and "made-1" not in said and expected in said


@pytest.mark.parametrize(
    "name, raw, expected",
    [
        ("x.json", b"[1, 2", "this is not JSON"),
        ("x.json", b"\xff\xfe[", "this is not JSON"),
        ("x.json", b"[" * 100_000, "this is not JSON"),
        ("x.json", b"", "this is not JSON"),
        ("x.json.gz", b"no gzip", "cannot be read"),
        ("x.json.gz", gzip.compress(b"[1, 2, 3]" * 99, mtime=0)[:-9], "cannot be read"),
        ("x.json", b'{"data": []}', "must hold a list of objects, each with the field 'sample_id'"),
        ("x.json", b"[]", "must hold a list of objects"),
        ("x.json", b"[[]]", "item 1: it must be an object with the field 'sample_id'"),
        ("x.json", b'[{"question": "Who?"}]', "item 1: the field 'sample_id' is missing"),
        ("x.json", b'[{"sample_id": 3}]', "item 1: 'sample_id' must be a text"),
    ],
)
def test_a_file_that_is_something_else(tmp_path, name, raw, expected):
    (tmp_path / name).write_bytes(raw)
    assert expected in message(tmp_path / name)


def test_a_file_that_is_not_there_and_a_sample_that_is_there_twice(tmp_path):
    assert "No file at" in message(tmp_path / "missing.json")
    assert "No file at" in message(tmp_path)
    twice = message(write(tmp_path / "made.json", [sample("made-1"), sample("made-1")]))
    assert "made-1: 'sample_id' was there before" in twice


# ---------------------------------------------------------------- splits


def named(*names: str, tmp_path: Path) -> list:
    return load_locomo(write(tmp_path / "made.json", [sample(name) for name in names]))


def test_seven_three_keeps_conversations_whole_and_is_the_same_every_time(tmp_path):
    names = [f"made-{n}" for n in range(10)]
    conversations = named(*names, tmp_path=tmp_path)
    parts = split(conversations, "seven-three")
    assert [*parts] == ["train", "validation", "test"]
    assert [len(part) for part in parts.values()] == [7, 0, 3]
    assert sorted(c.id for part in parts.values() for c in part) == names
    assert parts == split(conversations, "seven-three")
    small = split(conversations[:2], "seven-three")
    assert [len(part) for part in small.values()] == [1, 0, 1]


def test_memory_r1_goes_by_name(tmp_path):
    parts = split(named("conv-50", "conv-30", "conv-26", tmp_path=tmp_path), "memory-r1")
    ids = {name: [c.id for c in part] for name, part in parts.items()}
    assert ids == {"train": ["conv-26"], "validation": ["conv-30"], "test": ["conv-50"]}


@pytest.mark.parametrize("rule", SPLITS)
def test_category_5_is_left_out_unless_wanted(tmp_path, rule):
    conversations = named("conv-26", "conv-30", tmp_path=tmp_path)

    def categories(adversarial: bool) -> Counter:
        parts = split(conversations, rule, adversarial=adversarial).values()
        return Counter(p.category for part in parts for c in part for p in c.probes)

    assert categories(True) == {1: 4, 2: 2, 3: 2, 4: 4, 5: 4}
    assert categories(False) == {1: 4, 2: 2, 3: 2, 4: 4}
    assert len(conversations[0].probes) == 8  # the conversations given are as they were


def test_the_published_name_of_seven_three_is_the_same_rule(tmp_path):
    conversations = named(*(f"made-{n}" for n in range(10)), tmp_path=tmp_path)
    assert split(conversations, "memupdate") == split(conversations, "seven-three")


# ---------------------------------------------------------------- category 5, a choice


def test_category_5_is_asked_as_a_choice_whose_order_is_drawn_by_its_id(loaded):
    five = [p for c in loaded for p in c.probes if p.category == 5]
    for p in five:
        assert {*p.choices} == {NOT_MENTIONED, p.distractor}
        assert p.problem.splitlines() == [
            p.question, "Choose one of the two answers:",
            f"(a) {p.choices[0]}", f"(b) {p.choices[1]}",
        ]  # fmt: skip
        assert replace(p, question="Who?").choices == p.choices
    first = Counter(replace(five[0], id=f"q{n}").choices[0] for n in range(400))
    assert {*first} == {NOT_MENTIONED, "plums"} and 150 < first["plums"] < 250
    assert all(p.problem == p.question for c in loaded for p in c.probes if p.category != 5)


@pytest.mark.parametrize("form", ["{}", "({})", "({}).", "{}.", "{})", " ({}):\n"])
@pytest.mark.parametrize("upper", [False, True])
def test_a_letter_stands_for_its_answer(loaded, form, upper):
    """In a file of one's own, where the grading is ours."""
    for p in (p for c in loaded for p in c.probes if p.category == 5):
        for letter, text in zip("ab", p.choices, strict=True):
            said = form.format(letter.upper() if upper else letter)
            assert p.chosen(said) == text and p.chosen(text) == text
            assert word_f1(said, p) == word_f1(text, p) == (text == NOT_MENTIONED)


@pytest.mark.parametrize(
    "said, place",
    [
        ("a", 0), ("A", 0), (" (a)\n", 0), ("(A)", 0),
        ("b", 1), ("(B)", 1), ("c", 1), ("7", 1), ("(c)", 1), ("a).", 1), ("Jon", 1),
        ("a.", None), ("b)", None), ("(b).", None), ("", None), ("yes!", None),
    ],
)  # fmt: skip
def test_the_official_metric_reads_a_choice_as_the_original_does(loaded, said, place):
    """`get_cat_5_answer`: one or three characters are a choice, the first one by `a` and `(a)`."""
    for p in (p for c in loaded for p in c.probes if p.category == 5):
        for first, right in ((NOT_MENTIONED, 0), (p.distractor, 1)):
            name = next(f"q{n}" for n in range(99) if replace(p, id=f"q{n}").choices[0] == first)
            probe = replace(p, id=name)
            assert official_score(said, probe) == official_em(said, probe) == (place == right)
            assert official_score(NOT_MENTIONED, probe) == 1


def test_a_letter_is_a_letter_where_nothing_is_to_choose(loaded):
    four = loaded[0].probes[5]  # gold "a"
    assert four.choices == () and four.chosen("(a)") == "(a)" and official_score("a", four) == 0
    five = next(p for p in loaded[0].probes if p.category == 5)
    for said in ("c", "(ab)", "a plum", "", "(a) or (b)"):
        assert five.chosen(said) == said and word_f1(said, five) == 0
    assert official_score("(b) Not mentioned in the conversation", five) == 1


# ---------------------------------------------------------------- splits that cannot be


def test_splits_that_cannot_be(tmp_path):
    conversations = named("conv-26", "made", tmp_path=tmp_path)
    with pytest.raises(UserError, match="must be one of seven-three, memory-r1, memupdate, not"):
        split(conversations, "official")
    with pytest.raises(UserError, match="memory-r1 needs conv-30"):
        split(conversations, "memory-r1")
    with pytest.raises(UserError, match="at least two"):
        split(conversations[:1], "seven-three")


# ---------------------------------------------------------------- the published file

# id -> sessions, turns, observations, questions by category 1 to 5
COUNTS = {
    "conv-26": (19, 419, 184, (32, 37, 13, 70, 47)),
    "conv-30": (19, 369, 169, (11, 26, 0, 44, 24)),
    "conv-41": (32, 663, 324, (31, 27, 8, 86, 41)),
    "conv-42": (29, 629, 266, (37, 40, 11, 111, 61)),
    "conv-43": (29, 680, 267, (31, 26, 14, 107, 64)),
    "conv-44": (28, 675, 277, (30, 24, 7, 62, 35)),
    "conv-47": (31, 689, 268, (20, 34, 13, 83, 40)),
    "conv-48": (30, 681, 291, (21, 42, 10, 118, 48)),
    "conv-49": (25, 509, 240, (37, 33, 13, 73, 40)),
    "conv-50": (30, 568, 255, (32, 32, 7, 87, 46)),
}


@pytest.fixture(scope="module")
def raw():
    return json.loads(gzip.decompress(LOCOMO.read_bytes()))


@pytest.fixture(scope="module")
def ten():
    return load_locomo(LOCOMO)


def categories(conversations) -> dict[int, int]:
    return Counter(probe.category for c in conversations for probe in c.probes)


def turns(conversations) -> list[Utterance]:
    return [turn for c in conversations for session in c.sessions for turn in session.utterances]


@published
def test_published_counts_of_each_conversation(ten):
    found = {}
    for c in ten:
        asked = categories([c])
        counts = len(c.sessions), len(turns([c])), len(c.memories["observations"])
        found[c.id] = (*counts, tuple(asked[n] for n in CATEGORIES))
    assert found == COUNTS and [*found] == [*COUNTS]


@published
def test_published_counts_of_all(ten):
    assert sum(len(c.sessions) for c in ten) == 272
    assert len(turns(ten)) == 5882
    assert sum(" (shares a picture: " in turn.text for turn in turns(ten)) == 1226
    sizes = {name: sum(len(c.memories[name]) for c in ten) for name in ten[0].memories}
    # one of the 669 published events is blank, and no memory
    expected = {"observations": 2541, "sessions": 5882, "summaries": 272, "events": 668, "empty": 0}
    assert sizes == expected
    assert categories(ten) == {1: 282, 2: 321, 3: 96, 4: 841, 5: 446}
    assert all(isinstance(session, Session) for c in ten for session in c.sessions)


@published
def test_published_counts_that_only_the_file_shows(raw):
    """What the loader passes over: checked here so that the counts above are of the same file."""
    talks = [sample["conversation"] for sample in raw]
    said = [
        turn
        for talk in talks
        for value in talk.values()
        if isinstance(value, list)
        for turn in value
    ]
    assert sum("img_url" in turn for turn in said) == 910
    whens = [value for talk in talks for key, value in talk.items() if key.endswith("_date_time")]
    assert len(whens) == 288 and all(day_of(when) for when in whens)
    events = [
        event
        for sample in raw
        for by_speaker in sample["event_summary"].values()
        for speaker, events in by_speaker.items()
        if speaker != "date"
        for event in events
    ]
    assert len(events) == 669 and events.count("") == 1
    facts = [
        fact
        for sample in raw
        for by_speaker in sample["observation"].values()
        for facts in by_speaker.values()
        for fact in facts
    ]
    assert Counter(type(evidence).__name__ for _, evidence in facts) == {"str": 2531, "list": 10}


@published
def test_published_dirt(raw, ten):
    evidence = [
        (name, text)
        for c, sample in zip(ten, raw, strict=True)
        for name, qa in zip((p.id for p in c.probes), sample["qa"], strict=True)
        for text in qa["evidence"]
    ]
    known = {c.id: {turn.id for turn in turns([c])} for c in ten}
    as_written = [
        (name, text) for name, text in evidence if text not in known[name.rpartition("-q")[0]]
    ]
    # 6 are no id, 3 are the id of no turn, one of which for its leading zero only
    assert sorted(text for _, text in as_written if text.count(":") == 1 and " " not in text) == [
        "D10:19", "D30:05", "D4:36",
    ]  # fmt: skip
    assert len(as_written) == 9
    dangling = {name: ids for c in ten for name, ids in c.dangling.items()}
    assert dangling == {"conv-42-q59": ("D10:19",), "conv-47-q39": ("D4:36",)}
    without = [p for c in ten for p in c.probes if not p.evidence]
    assert len(without) == 4 and {p.category for p in without} == {3}


@published
def test_published_answers(raw, ten):
    ints = [qa for sample in raw for qa in sample["qa"] if type(qa.get("answer")) is int]
    assert len(ints) == 6
    probes: list[Probe] = [probe for c in ten for probe in c.probes]
    assert all(isinstance(answer, str) and answer for p in probes for answer in p.answers)
    assert all(p.abstains == bool(p.distractor) == (p.category == 5) for p in probes)
    first = [p.answers[0] for p in probes if p.category == 1]
    assert sum("," in answer for answer in first) == 169
    third = [p.answers[0] for p in probes if p.category == 3]
    assert sum(";" in answer for answer in third) == 11


@published
def test_published_split_seven_three(ten):
    parts = split(ten, "seven-three")
    assert [c.id for c in parts["train"]] == [
        "conv-48", "conv-42", "conv-41", "conv-49", "conv-44", "conv-47", "conv-50",
    ]  # fmt: skip
    assert [c.id for c in parts["test"]] == ["conv-43", "conv-26", "conv-30"]
    train, test = categories(parts["train"]), categories(parts["test"])
    assert (train.total(), test.total(), parts["validation"]) == (1129, 411, [])
    parts = split(ten, "seven-three", adversarial=True)
    train, test = categories(parts["train"]), categories(parts["test"])
    assert train == {1: 208, 2: 232, 3: 69, 4: 620, 5: 311} and train.total() == 1440
    assert test == {1: 74, 2: 89, 3: 27, 4: 221, 5: 135} and test.total() == 546


@published
def test_published_split_memory_r1(ten):
    parts = split(ten, "memory-r1")
    counts = {name: categories(part).total() for name, part in parts.items()}
    assert counts == {"train": 152, "validation": 81, "test": 1307}
    # the denominators behind the percentages of Memory-R1's tables
    assert categories(parts["test"]) == {1: 239, 2: 258, 3: 83, 4: 727}
