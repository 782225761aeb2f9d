"""LoCoMo's loader and splits: a made file with all of its dirt, bad files, the published counts."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from test_readers import GONE, changed

from config.errors import UserError
from tasks.conversations import Conversation, Memory, Probe, Utterance
from tasks.episodes import word_f1
from tasks.locomo import (
    CATEGORIES,
    NOT_MENTIONED,
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
    found = load_locomo(write(tmp_path / "made.json", samples))
    assert load_locomo(write(tmp_path / "made.json.gz", samples)) == found
    return found


# ---------------------------------------------------------------- good files


def test_sessions_are_in_order_and_a_caption_is_part_of_its_turn(loaded):
    assert [c.speakers for c in loaded] == [("Ada", "Bo"), ("Cy", "Di")]
    sessions = loaded[0].sessions
    assert [(s.number, s.date) for s in sessions] == [
        (1, "2024-01-03"), (2, "2024-01-17"), (10, "2024-02-28"),
    ]  # fmt: skip
    text = "Line 2. (shares a picture: a bowl of pears)"
    assert sessions[1].utterances[1] == Utterance("D2:2", "Bo", text)
    parts = loaded[0].text.split("\n\n")
    assert parts[1] == (
        f"Session 2, 4:05 pm on 17 January, 2024\nAda: Line 1.\nBo: {text}\nAda: Line 3.\n"
        "Bo: Line 4."
    )
    assert [part.partition("\n")[2] for part in parts] == [s.text for s in sessions]


def test_questions_of_every_category(loaded):
    probes = loaded[0].probes
    assert [(p.id, p.category, p.kind, p.abstains, p.answers, p.evidence) for p in probes[:5]] == [
        ("made-1-q1", 1, "multi-hop", False, ("pears, plums",), ("D1:1", "D2:2")),
        ("made-1-q2", 2, "temporal", False, ("2024",), ("D1:1",)),
        ("made-1-q3", 3, "open-domain", False, ("Yes; she likes them",), ()),
        ("made-1-q4", 4, "single-hop", False, ("pears",), ("D10:4",)),
        ("made-1-q5", 5, "adversarial", True, (NOT_MENTIONED,), ("D2:1",)),
    ]
    assert len({p.id for c in loaded for p in c.probes}) == 16
    # found in any wording, and kept where no turn has it
    assert probes[5].evidence == ("D1:1", "D10:2", "D2:3", "D2:4")
    assert (probes[5].sessions, probes[2].sessions) == ((1, 2, 10), ())
    assert dangling(loaded[0]) == {"made-1-q7": ("D2:9",)}
    # whether or not it has an answer
    assert [p.distractor for p in probes] == ["", "", "", "", "plums", "", "", "Yes"]
    assert probes[7].answers == (NOT_MENTIONED,)


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
    assert [category_label(c) for c in (4, 5)] == ["4 single-hop", "5 adversarial"]


# ---------------------------------------------------------------- bad files

BAD = [  # where in the sample, what stands there
    *((("conversation",), bad) for bad in (GONE, [1], {"speaker_a": "A"})),
    (("conversation", "speaker_b"), GONE),
    (("conversation", "session_2"), "text"),
    *(
        (("conversation", "session_2_date_time"), bad)
        for bad in (GONE, "2024-06-03", "1:00 am on 31 April, 2024", "4:05 pm on 3 Juni, 2024", "")
    ),
    (("conversation", "session_2", 1), "Hi"),
    *((("conversation", "session_2", 1, "text"), bad) for bad in (GONE, "\ud800")),
    (("conversation", "session_2", 1, "dia_id"), "2-1"),
    (("conversation", "session_2", 1, "blip_caption"), 3),
    (("observation",), GONE),
    (("observation", "session_1_observation"), "x"),
    (("observation", "session_1_observation", "Ada", 0), "fact"),
    (("observation", "session_1_observation", "Ada", 0, 1), 3),
    (("session_summary", "session_1_summary"), ["x"]),
    (("event_summary", "events_session_1", "Ada"), "x"),
    (("event_summary", "events_session_1", "Ada", 0), 1),
    (("qa",), {}),
    (("qa", 1), 7),
    (("qa", 1, "question"), GONE),
    *((("qa", 1, "category"), bad) for bad in (6, 0, "2", True)),
    *((("qa", 1, "answer"), bad) for bad in (GONE, ["2024"])),
    (("qa", 1, "evidence"), [3]),
    (("qa", 4, "adversarial_answer"), GONE),
]


def dangling(c: Conversation) -> dict[str, tuple[str, ...]]:
    """Return the evidence that is not in a conversation: id of the probe -> ids."""
    known = {turn.id for session in c.sessions for turn in session.utterances}
    missing = {p.id: tuple(e for e in p.evidence if e not in known) for p in c.probes}
    return {name: ids for name, ids in missing.items() if ids}


def refused(path: Path, load=load_locomo) -> str:
    """Return what loading says, which must be one sentence that names the file."""
    with pytest.raises(UserError) as caught:
        load(path)
    said = str(caught.value)
    assert str(path) in said and said.endswith(".") and "\n" not in said
    said.encode()  # no half of a surrogate pair in it
    return said


def names_field(said: str, at: tuple) -> bool:
    """Whether a sentence names the field, or the object in a list, where something is wrong."""
    name = [step for step in at if isinstance(step, str)][-1]
    place = f"{at[-2]} {at[-1] + 1}" if isinstance(at[-1], int) else f"'{name}'"
    return place in said or f"'{name}'" in said


@pytest.mark.parametrize(("at", "value"), BAD)
def test_an_error_names_file_sample_and_field(tmp_path, at, value):
    broken = changed(sample("made-2"), at, value)
    said = refused(write(tmp_path / "made.json", [sample("made-1"), broken]))
    assert "made-2" in said and "made-1" not in said and names_field(said, at)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        *(("x.json", raw) for raw in (b"[1, 2", b"\xff\xfe[", b"[" * 100_000, b"")),
        *(("x.json", raw) for raw in (b'{"data": []}', b"[]", b"[[]]", b'[{"question": "Who?"}]')),
        ("x.json", b'[{"sample_id": 3}]'),
        ("x.json.gz", b"no gzip"),
        ("x.json.gz", gzip.compress(b"[1, 2, 3]" * 99, mtime=0)[:-9]),
        ("x.json", json.dumps([sample("made-1"), sample("made-1")]).encode()),
        ("none", b""),
    ],
)
def test_a_file_that_is_something_else(tmp_path, name, raw):
    if name != "none":
        (tmp_path / name).write_bytes(raw)
    refused(tmp_path / name)


# ---------------------------------------------------------------- splits


def named(*names: str, tmp_path: Path) -> list:
    return load_locomo(write(tmp_path / "made.json", [sample(name) for name in names]))


def test_splits_keep_conversations_whole(tmp_path):
    names = [f"made-{n}" for n in range(10)]
    conversations = named(*names, tmp_path=tmp_path)
    parts = split(conversations, "seven-three")
    assert [*parts] == ["train", "validation", "test"]
    assert [len(part) for part in parts.values()] == [7, 0, 3]
    assert sorted(c.id for part in parts.values() for c in part) == names
    # the same every time, and under the name that was published
    assert parts == split(conversations, "seven-three") == split(conversations, "memupdate")
    small = split(conversations[:2], "seven-three")
    assert [len(part) for part in small.values()] == [1, 0, 1]
    parts = split(named("conv-50", "conv-30", "conv-26", tmp_path=tmp_path), "memory-r1")
    found = {name: [c.id for c in part] for name, part in parts.items()}
    assert found == {"train": ["conv-26"], "validation": ["conv-30"], "test": ["conv-50"]}
    for rule, some in (("memory-r1", conversations), ("seven-three", small["test"])):
        with pytest.raises(UserError):
            split(some, rule)


@pytest.mark.parametrize("rule", SPLITS)
def test_category_5_is_left_out_unless_wanted(tmp_path, rule):
    conversations = named("conv-26", "conv-30", tmp_path=tmp_path)
    for adversarial, fives in ((True, {5: 4}), (False, {})):
        parts = split(conversations, rule, adversarial=adversarial).values()
        asked = Counter(p.category for part in parts for c in part for p in c.probes)
        assert asked == {1: 4, 2: 2, 3: 2, 4: 4} | fives
    assert len(conversations[0].probes) == 8  # the conversations given are as they were


# ---------------------------------------------------------------- category 5, a choice


def test_category_5_is_asked_as_a_choice_whose_order_is_drawn_by_its_id(loaded):
    five = [p for c in loaded for p in c.probes if p.category == 5]
    for p in five:
        assert {*p.choices} == {NOT_MENTIONED, p.distractor}
        asked, choose, *answers = p.problem.splitlines()
        assert (asked, choose) == (p.question, "Choose one of the two answers:")
        assert answers == [f"(a) {p.choices[0]}", f"(b) {p.choices[1]}"]
        assert replace(p, question="Who?").choices == p.choices
    first = Counter(replace(five[0], id=f"q{n}").choices[0] for n in range(400))
    assert {*first} == {NOT_MENTIONED, "plums"} and 150 < first["plums"] < 250
    assert all(p.problem == p.question for c in loaded for p in c.probes if p.category != 5)


@pytest.mark.parametrize("form", ["{}", "({})", "({}).", "{}.", "{})", " ({}):\n"])
def test_a_letter_stands_for_its_answer(loaded, form):
    """In a file of one's own, where the grading is ours."""
    for p in (p for c in loaded for p in c.probes if p.category == 5):
        for letter, text in zip("abAB", 2 * p.choices, strict=True):
            said = form.format(letter)
            assert p.chosen(said) == text and p.chosen(text) == text
            assert word_f1(said, p) == word_f1(text, p) == (text == NOT_MENTIONED)
    four = loaded[0].probes[5]  # gold "a", and nothing to choose
    assert four.choices == () and four.chosen("(a)") == "(a)" and official_score("a", four) == 0
    five = next(p for p in loaded[0].probes if p.category == 5)
    for said in ("c", "(ab)", "a plum", "", "(a) or (b)"):
        assert five.chosen(said) == said and word_f1(said, five) == 0
    assert official_score("(b) Not mentioned in the conversation", five) == 1


@pytest.mark.parametrize(
    ("said", "place"),
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
def ten():
    return load_locomo(LOCOMO)


def categories(conversations) -> dict[int, int]:
    return Counter(probe.category for c in conversations for probe in c.probes)


def turns(conversations) -> list[Utterance]:
    return [turn for c in conversations for session in c.sessions for turn in session.utterances]


@published
def test_published_counts(ten):
    found = {}
    for c in ten:
        asked = categories([c])
        counts = len(c.sessions), len(turns([c])), len(c.memories["observations"])
        found[c.id] = (*counts, tuple(asked[n] for n in CATEGORIES))
    assert found == COUNTS and [*found] == [*COUNTS]
    assert sum(" (shares a picture: " in turn.text for turn in turns(ten)) == 1226
    sizes = {name: sum(len(c.memories[name]) for c in ten) for name in ten[0].memories}
    # one of the 669 published events is blank, and no memory
    expected = {"observations": 2541, "sessions": 5882, "summaries": 272, "events": 668, "empty": 0}
    assert sizes == expected
    talks = [sample["conversation"] for sample in json.loads(gzip.decompress(LOCOMO.read_bytes()))]
    whens = [value for talk in talks for key, value in talk.items() if key.endswith("_date_time")]
    assert len(whens) == 288 and all(day_of(when) for when in whens)  # of 272 sessions


@published
def test_published_dirt_and_answers(ten):
    missing = {name: names for c in ten for name, names in dangling(c).items()}
    assert missing == {"conv-42-q59": ("D10:19",), "conv-47-q39": ("D4:36",)}
    probes: list[Probe] = [probe for c in ten for probe in c.probes]
    without = [p for p in probes if not p.evidence]
    assert len(without) == 4 and {p.category for p in without} == {3}
    assert all(isinstance(answer, str) and answer for p in probes for answer in p.answers)
    assert all(p.abstains == bool(p.distractor) == (p.category == 5) for p in probes)
    assert sum("," in p.answers[0] for p in probes if p.category == 1) == 169
    assert sum(";" in p.answers[0] for p in probes if p.category == 3) == 11


@published
def test_published_splits(ten):
    parts = split(ten, "seven-three")
    assert [c.id for c in parts["train"]] == [
        "conv-48", "conv-42", "conv-41", "conv-49", "conv-44", "conv-47", "conv-50",
    ]  # fmt: skip
    assert [c.id for c in parts["test"]] == ["conv-43", "conv-26", "conv-30"]
    train, test = categories(parts["train"]), categories(parts["test"])
    assert (train.total(), test.total(), parts["validation"]) == (1129, 411, [])
    parts = split(ten, "seven-three", adversarial=True)
    assert categories(parts["train"]) == {1: 208, 2: 232, 3: 69, 4: 620, 5: 311}
    assert categories(parts["test"]) == {1: 74, 2: 89, 3: 27, 4: 221, 5: 135}
    parts = split(ten, "memory-r1")
    counts = {name: categories(part).total() for name, part in parts.items()}
    assert counts == {"train": 152, "validation": 81, "test": 1307}
    # the denominators behind the percentages of Memory-R1's tables
    assert categories(parts["test"]) == {1: 239, 2: 258, 3: 83, 4: 727}
