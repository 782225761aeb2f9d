"""LoCoMo: a made file with all its dirt, bad files, the published counts, the official metric."""

import copy
import gzip
import json
import random
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path

import nltk
import pytest
from nltk.stem import PorterStemmer

from config.errors import UserError
from suites import locomo
from suites.locomo import SPLITS, load_locomo, official_em, official_score, split
from suites.own import word_f1
from tasks.conversations import CATEGORIES, NOT_MENTIONED, Memory, Probe, Utterance

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


def test_sessions_are_in_order_and_a_caption_is_part_of_its_turn(loaded):
    sessions = loaded[0].sessions
    dated = [(s.number, s.date) for s in sessions]
    assert dated == [(1, "2024-01-03"), (2, "2024-01-17"), (10, "2024-02-28")]
    text = "Line 2. (shares a picture: a bowl of pears)"
    assert sessions[1].utterances[1] == Utterance("D2:2", "Bo", text)
    assert loaded[0].text.split("\n\n")[1] == (
        f"Session 2, 4:05 pm on 17 January, 2024\nAda: Line 1.\nBo: {text}\nAda: Line 3.\n"
        "Bo: Line 4."
    )


def test_questions_of_every_category(loaded):
    probes = loaded[0].probes
    assert [(p.id, p.heading, p.abstains, p.answers, p.evidence, p.distractor) for p in probes] == [
        ("made-1-q1", "1 multi-hop", False, ("pears, plums",), ("D1:1", "D2:2"), ""),
        ("made-1-q2", "2 temporal", False, ("2024",), ("D1:1",), ""),
        ("made-1-q3", "3 open-domain", False, ("Yes; she likes them",), (), ""),
        ("made-1-q4", "4 single-hop", False, ("pears",), ("D10:4",), ""),
        ("made-1-q5", "5 adversarial", True, (NOT_MENTIONED,), ("D2:1",), "plums"),
        # found in any wording, and kept where no turn has it
        ("made-1-q6", "1 multi-hop", False, ("a",), ("D1:1", "D10:2", "D2:3", "D2:4"), ""),
        ("made-1-q7", "4 single-hop", False, ("b",), ("D2:9", "D2:1"), ""),
        # whether or not it has an answer
        ("made-1-q8", "5 adversarial", True, (NOT_MENTIONED,), ("D1:2",), "Yes"),
    ]
    assert (probes[5].sessions, probes[2].sessions) == ((1, 2, 10), ())


def test_what_a_store_can_start_with(loaded):
    memories, jan = loaded[0].memories, "2024-01-03"
    assert {name: len(entries) for name, entries in memories.items()} == {
        "empty": 0, "sessions": 12, "observations": 3, "summaries": 3, "events": 1,
    }  # fmt: skip
    assert memories["observations"] == (
        Memory("Ada grows pears.", "Ada", jan, 1, ("D1:1",)),
        Memory("Ada sells them.", "Ada", jan, 1, ("D1:1", "D1:3")),
        Memory("Bo cooks.", "Bo", "2024-02-28", 10, ("D10:2", "D10:4")),
    )
    assert memories["events"] == (Memory("Ada picks pears.", "Ada", jan, 1, ("S1",)),)
    assert memories["summaries"][2] == Memory("They met, 10.", None, "2024-02-28", 10, ("S10",))
    assert memories["sessions"][0] == Memory("Line 1.", "Ada", jan, 1, ("D1:1",))


GONE = object()


def changed(tree, at, value):
    """A copy with another value at a place, or without the field."""
    part = tree = copy.deepcopy(tree)
    for step in at[:-1]:
        part = part[step]
    if value is GONE:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    return tree


BAD = [  # where in the sample, what stands there
    *((("conversation",), bad) for bad in (GONE, [1], {"speaker_a": "A", "speaker_b": "B"})),
    (("conversation", "session_2"), "text"),
    *((("conversation", "session_2_date_time"), bad) for bad in (GONE, "2024-06-03", "")),
    *((("conversation", "session_2", 1, "text"), bad) for bad in (GONE, "\ud800", " ")),
    (("conversation", "session_2", 1, "dia_id"), "2-1"),
    (("observation",), GONE),
    (("observation", "session_1_observation", "Ada", 0, 1), 3),
    (("session_summary", "session_1_summary"), ["x"]),
    *(
        (name, {str(k): 7 for k in range(1001)})
        for name in (("observation",), ("session_summary",))
    ),
    *((("qa",), bad) for bad in ({}, [])),
    *((("qa", 1, "category"), bad) for bad in (6, 0, "2", True)),
    *((("qa", 1, "answer"), bad) for bad in (GONE, ["2024"])),
    (("qa", 1, "evidence"), [3]),
    (("qa", 4, "adversarial_answer"), GONE),
]


def refused(path: Path, load=load_locomo) -> str:
    """What loading says, which must be one sentence that names the file."""
    with pytest.raises(UserError) as caught:
        load(path)
    said = str(caught.value)
    assert str(path) in said and said.endswith(".") and "\n" not in said
    said.encode()  # no half of a surrogate pair in it
    return said


@pytest.mark.parametrize(("at", "value"), BAD)
def test_an_error_names_file_and_item(tmp_path, at, value):
    broken = changed(sample("made-2"), at, value)
    said = refused(write(tmp_path / "made.json", [sample("made-1"), broken]))
    assert "item 2" in said


def test_a_file_that_is_something_else(tmp_path):
    twice = json.dumps([sample("made-1"), sample("made-1")]).encode()
    for raw in (b"[1, 2", b"\xff\xfe[", b"", b'{"data": []}', b"[]", b"[[]]", twice):
        (tmp_path / "x.json").write_bytes(raw)
        refused(tmp_path / "x.json")
    refused(tmp_path / "none")


def test_splits_keep_conversations_whole(loaded):
    names = [f"made-{n}" for n in range(10)]
    conversations = [replace(loaded[0], id=name) for name in names]
    parts = split(conversations, "seven-three")
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 7, "validation": 0, "test": 3,
    }  # fmt: skip
    assert sorted(c.id for part in parts.values() for c in part) == names
    assert [c.id for c in parts["test"]] == ["made-4", "made-0", "made-1"]
    # the same every time, and under the name that was published
    assert parts == split(conversations, "seven-three") == split(conversations, "memupdate")
    small = split(conversations[:2], "seven-three")
    assert [len(part) for part in small.values()] == [1, 0, 1]
    named = [replace(loaded[0], id=name) for name in ("conv-50", "conv-30", "conv-26")]
    found = {name: [c.id for c in part] for name, part in split(named, "memory-r1").items()}
    assert found == {"train": ["conv-26"], "validation": ["conv-30"], "test": ["conv-50"]}
    for rule, some in (("memory-r1", conversations), ("seven-three", small["test"])):
        with pytest.raises(UserError):
            split(some, rule)


@pytest.mark.parametrize("rule", SPLITS)
def test_category_5_is_left_out_unless_wanted(loaded, rule):
    conversations = [replace(loaded[0], id=name) for name in ("conv-26", "conv-30")]
    for adversarial, fives in ((True, {5: 4}), (False, {})):
        parts = split(conversations, rule, adversarial=adversarial).values()
        asked = Counter(p.category for part in parts for c in part for p in c.probes)
        assert asked == {1: 4, 2: 2, 3: 2, 4: 4} | fives


def test_category_5_is_asked_as_a_choice_whose_order_is_drawn_by_its_id(loaded):
    *open_ones, five = sorted(loaded[0].probes, key=lambda p: p.category)
    assert {*five.choices} == {NOT_MENTIONED, five.distractor}
    assert five.problem.splitlines() == [
        five.question, "Choose one of the two answers:", f"(a) {five.choices[0]}",
        f"(b) {five.choices[1]}",
    ]  # fmt: skip
    assert replace(five, question="Who?").choices == five.choices
    first = Counter(replace(five, id=f"q{n}").choices[0] for n in range(400))
    assert {*first} == {NOT_MENTIONED, "Yes"} and 150 < first["Yes"] < 250
    assert all(p.problem == p.question for p in open_ones[:-1])


@pytest.mark.parametrize("form", ["{}", "({})", "({}).", "{}.", "{})", " ({}):\n"])
def test_a_letter_stands_for_its_answer(loaded, form):
    """In a file of one's own, where the grading is ours."""
    for p in (p for p in loaded[0].probes if p.category == 5):
        for letter, text in zip("abAB", 2 * p.choices, strict=True):
            said = form.format(letter)
            assert p.chosen(said) == text and p.chosen(text) == text
            assert word_f1(said, p) == word_f1(text, p) == (text == NOT_MENTIONED)
        for said in ("c", "(ab)", "a plum", "", "(a) or (b)"):
            assert p.chosen(said) == said and word_f1(said, p) == 0
    four = loaded[0].probes[5]  # gold "a", and nothing to choose
    assert four.choices == () and four.chosen("(a)") == "(a)" and official_score("a", four) == 0


@pytest.mark.parametrize(("said", "place"), [
    ("a", 0), ("A", 0), (" (a)\n", 0), ("(A)", 0),
    ("b", 1), ("(B)", 1), ("c", 1), ("7", 1), ("(c)", 1), ("a).", 1), ("Jon", 1),
    ("a.", None), ("b)", None), ("(b).", None), ("", None), ("yes!", None),
    ("No information available", 0), ("There is no INFORMATION available on that.", 0),
    ("It is not mentioned.", 0), (f"(b) {NOT_MENTIONED}", 0), ("Nothing is known", None),
    ("no information is available", None), ("plums", None),
])  # fmt: skip
def test_the_official_metric_reads_a_choice_as_the_original_does(loaded, said, place):
    """`get_cat_5_answer`: one or three characters are a choice, the first one by `a` and `(a)`;
    else a refusal in one of two fixed phrases."""
    p = loaded[0].probes[4]
    phrase = len(said.strip()) > 4
    for first, right in ((NOT_MENTIONED, 0), (p.distractor, 1)):
        name = next(f"q{n}" for n in range(99) if replace(p, id=f"q{n}").choices[0] == first)
        probe = replace(p, id=name)
        expected = place == 0 if phrase else place == right
        assert official_score(said, probe) == official_em(said, probe) == expected
    if phrase:
        elsewhere = Probe("q", "What?", ("You did not say.",), 0, abstains=True)
        assert official_score(said, elsewhere) == (place == 0)
        assert official_score(said, Probe("q", "What?", ("pears",), 4)) == 0


def probe(gold, category=4):
    return Probe("q", "What?", (gold,) if isinstance(gold, str) else gold, category)


OF = {2: (2, 4, 0), 1: (1,), 3: (3,), 4: (4,)}  # 2: all that have the plain F1


@pytest.mark.parametrize(("category", "prediction", "gold", "expected"), [
    (2, "red pears", "red pears", 1),
    (2, "pears red", "red pears", 1),  # order is nothing
    (2, "red", "red pears", 2 / 3),
    (2, "red red", "red pears", 1 / 2),  # each occurrence counts once
    (2, "red red", "red red pears", 4 / 5), (2, "plums", "red pears", 0), (2, "", "red pears", 0),
    (2, "the", "a", 0),  # nothing in common, though both are empty
    (2, "running runners", "runs runner", 1),  # stems
    (2, "dies", "die", 1),  # only by NLTK's extension of Porter's rules
    (2, "The Red PEARS.", "red, pears", 1),
    (2, "x", "x, y", 2 / 3),  # only category 1 cuts at commas
    (2, "yes", "Yes; she likes them; often", 2 / 6),  # and only category 3 the gold at a semicolon
    (3, "yes", "Yes; she likes them; often", 1),
    (3, "Yes; she", "Yes; she likes them; often", 2 / 3),
    (3, "x", "x, y", 2 / 3), (1, "x", "x, y", 1 / 2), (1, "x, y", "x, y", 1),
    (1, "y, x", "x, y", 1),
    (1, "x y", "x, y", 2 / 3),  # one part that shares a word with each
    (1, "x, q, r, s", "x, y", 1 / 2),  # more parts cost nothing
    (1, "x", "x", 1),
    (1, "x", "x,", 1 / 2),  # the part after the last comma is one too
    (1, "red pears, plums", "pears, plums", (2 / 3 + 1) / 2),
    (4, "pears", ("plums", "red pears", "pears"), 1),  # the best of several
])  # fmt: skip
def test_the_score_by_category(category, prediction, gold, expected):
    for each in OF[category]:
        assert official_score(prediction, probe(gold, each)) == pytest.approx(expected)


@pytest.mark.parametrize(("prediction", "gold", "category", "expected"), [
    ("red pears", "pears, red", 4, 1),  # a set of words
    ("red red pears", "The red pears", 4, 1),
    ("red pear", "red pears", 4, 0),  # not stemmed
    ("red", "red pears", 4, 0),
    ("x", "x, y", 1, 0),  # the whole gold, also in category 1
    ("yes", "Yes; she likes them", 3, 1), ("yes", "Yes; she likes them", 4, 0),
])  # fmt: skip
def test_exact_match(prediction, gold, category, expected):
    assert official_em(prediction, probe(gold, category)) == expected


def plain(prediction, gold, category):
    """Score as the rules say, one obvious step after the other."""

    def stems(text):
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        words = [word for word in kept.split() if word not in ("a", "an", "the", "and")]
        return [PorterStemmer().stem(word) for word in words]

    def f1(prediction, gold):
        left, wanted, hits = stems(prediction), stems(gold), 0
        n = len(left)
        for stem in wanted:
            if stem in left:
                left.remove(stem)
                hits += 1
        return 2 / (n / hits + len(wanted) / hits) if hits else 0

    if category == 3:
        gold = gold.split(";")[0]
    if category != 1:
        return f1(prediction, gold)
    best = [max(f1(part, wanted) for part in prediction.split(",")) for wanted in gold.split(",")]
    return sum(best) / len(best)


def test_both_versions_agree_and_no_data_of_nltk_is_needed(monkeypatch):
    def find(*_, **__):
        raise AssertionError("NLTK looks for data that would have to be downloaded")

    monkeypatch.setattr(nltk.data, "find", find)
    locomo._stemmer.cache_clear()
    rng = random.Random(0)
    words = "a the and pears pear Running runs red, plums, 3,000 co-op; U.S. dies , ;".split()
    scores = []
    for _ in range(300):
        prediction, gold = (" ".join(rng.choices(words, k=rng.randrange(7))) for _ in range(2))
        for category in (1, 2, 3, 4):
            score = official_score(prediction, probe(gold, category))
            assert score == pytest.approx(plain(prediction, gold, category)), (prediction, gold)
            scores.append(score)
    assert len(scores) == 1200 and sum(0 < score < 1 for score in scores) > 300


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


def categories(conversations):
    return Counter(probe.category for c in conversations for probe in c.probes)


@published
def test_published_counts_and_dirt(ten):
    found, missing = {}, {}
    for c in ten:
        turns = [turn for session in c.sessions for turn in session.utterances]
        counts = len(c.sessions), len(turns), len(c.memories["observations"])
        found[c.id] = (*counts, tuple(categories([c])[n] for n in CATEGORIES))
        ids = {turn.id for turn in turns}
        lost = {p.id: tuple(e for e in p.evidence if e not in ids) for p in c.probes}
        missing |= {name: names for name, names in lost.items() if names}
    assert found == COUNTS and [*found] == [*COUNTS]
    sizes = {name: sum(len(c.memories[name]) for c in ten) for name in ten[0].memories}
    # one of the 669 published events is blank, and no memory
    expected = {"observations": 2541, "sessions": 5882, "summaries": 272, "events": 668, "empty": 0}
    assert sizes == expected
    shared = [m for c in ten for m in c.memories["sessions"] if " (shares a picture: " in m.text]
    assert len(shared) == 1226
    assert missing == {"conv-42-q59": ("D10:19",), "conv-47-q39": ("D4:36",)}
    probes = [probe for c in ten for probe in c.probes]
    assert [p.category for p in probes if not p.evidence] == [3] * 4
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
