"""Conversations of the user's own: read whole, or refused with line and field."""

import gzip
import json
import re
from pathlib import Path

import pytest
from conftest import asked_of
from test_locomo import GONE, changed, refused

from agents import find
from agents.search import Search
from agents.store import Store
from agents.tools import Scope, apply
from config.errors import UserError
from suites._conversations import ConversationTasks, conversations_of, validation_episodes
from suites.own import load_own, says_unknown, word_f1
from tasks.conversations import NOT_MENTIONED, Memory, Probe, Utterance


def talk(name: str = "talk-1", **other) -> dict:
    """Make a conversation with every field."""
    return {
        "id": name,
        "sessions": [
            {"date": "2024-01-03", "when": "in the evening of 3 January 2024",
             "turns": [{"speaker": "Ada", "text": "I moved to Oslo."},
                       {"speaker": "Bo", "text": "Oh!\n\n\tReally?"}]},
            {"date": "2024-01-03", "turns": [{"text": "It rained."}]},
            {"date": "2024-02-29", "turns": [{"speaker": "Ada", "text": "Now I live in Lima."}]},
        ],
        "memories": [
            {"text": "Ada moved to Oslo.", "speaker": "Ada", "date": "2024-01-03", "session": 1,
             "evidence": ["D1:1"]},
            {"text": "Ada moved twice.", "evidence": ["D1:1", "S3"]},
            {"text": "Bo is Ada's brother.", "kind": "semantic", "id": "m2", "speaker": None},
        ],
        "qa": [
            {"question": "Where does Ada live?", "answer": "Lima", "category": "where",
             "distractor": "Rome", "evidence": ["D3:1"]},
            {"question": "How often did she move?", "answer": ["2", "twice"], "category": 1,
             "evidence": ["D1:1", "S3"]},
            {"question": "When did it rain?", "answer": 2024},
            {"question": "Where does Bo live?", "abstains": True, "distractor": "Oslo",
             "evidence": ["S1"]},
            {"question": "Why?", "category": 5},
        ],
        **other,
    }  # fmt: skip


def write(path: Path, *talks: object) -> Path:
    """Write a line for each; bytes as they are."""
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in talks]
    raw = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_every_field_is_kept(tmp_path, name):
    bare = {"sessions": [], "memories": [{"text": "It rained."}], "qa": talk()["qa"][2:3]}
    c, other = load_own(write(tmp_path / name, talk(), talk("talk-2", **bare)))
    assert other.sessions == () and other.memories["memories"] == (Memory("It rained."),)
    assert c.id == "talk-1"
    assert [(s.number, s.date, s.when) for s in c.sessions] == [
        (1, "2024-01-03", "in the evening of 3 January 2024"),
        (2, "2024-01-03", "2024-01-03"),
        (3, "2024-02-29", "2024-02-29"),
    ]
    assert c.sessions[0].utterances[1] == Utterance("D1:2", "Bo", "Oh!\n\n\tReally?")
    assert c.sessions[1].text == "It rained."
    assert c.memories["memories"] == (
        Memory("Ada moved to Oslo.", "Ada", "2024-01-03", 1, ("D1:1",)),
        Memory("Ada moved twice.", None, None, 3, ("D1:1", "S3")),  # known after session 3
        Memory("Bo is Ada's brother.", kind="semantic", id="m2"),
    )
    assert len(c.memories["sessions"]) == 4 and c.memories["empty"] == ()
    assert c.probes == (
        Probe("talk-1-q1", "Where does Ada live?", ("Lima",), 0, ("D3:1",), kind="where"),
        Probe("talk-1-q2", "How often did she move?", ("2", "twice"), 1, ("D1:1", "S3"),
              kind="multi-hop"),
        Probe("talk-1-q3", "When did it rain?", ("2024",), 0, kind="questions"),
        Probe("talk-1-q4", "Where does Bo live?", (NOT_MENTIONED,), 0, ("S1",), True,
              "questions, abstention", "Oslo"),
        Probe("talk-1-q5", "Why?", (NOT_MENTIONED,), 5, (), True, "adversarial"),
    )  # fmt: skip


def test_the_example_of_the_documentation_can_be_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (c,) = load_own(write(tmp_path / "own.jsonl", json.loads(example)))
    assert c.probes[0].answers == ("Oslo", "in Oslo") and len(c.probes[1].choices) == 2


def test_a_suite_asks_its_questions_over_stores_with_the_ids_that_are_given(tmp_path):
    """What names no id gets the next one; the same ids in two conversations are two entries."""
    path = write(tmp_path / "own.jsonl", talk(), talk("talk-2"))
    unit, (column,) = asked_of(lambda: None, suite="own", data=(str(path),))
    tasks = column.make()
    assert unit == "sessions" and column.length == 3 and len(tasks) == 10
    assert [task.kind for task in tasks[:5]] == [
        "where, word F1", "1 multi-hop, word F1", "questions, word F1",
        "questions, abstention, word F1", "5 adversarial, word F1",
    ]  # fmt: skip
    assert tasks[0].score("in Lima") == pytest.approx(2 / 3) and tasks[1].score("twice") == 1
    _, (column,) = asked_of(suite="own", data=(str(path),), source_split="sessions")
    assert len(column.make()[0].memories) == 4
    for task in tasks:
        store = Store(find.make("memupdate", {"mode": "refine"}).start(task))
        lines = [(entry.id, entry.text, entry.kind) for entry in store.snapshot().entries]
        assert lines == [
            ("m2", "Bo is Ada's brother.", "semantic"),
            ("m3", "Ada moved to Oslo.", None),
            ("m4", "Ada moved twice.", None),
        ]
        scope = Scope(search=Search(), measure=len)
        op = apply(store, "search_memory", {"query": "Ada", "kind": "semantic"}, scope)
        assert op.message.startswith("1 of 3 memories:\n[m2] ")


def test_memories_without_sessions_are_one_stretch_and_a_document_of_their_own(tmp_path):
    def memories(name, text):
        asked = {"question": "Where?", "answer": "Oslo", "evidence": ["note 7"]}
        return {"id": name, "memories": [{"text": text, "evidence": ["note 7"]}], "qa": [asked]}

    path = write(tmp_path / "own.jsonl", memories("a", "In Oslo."), memories("b", "In Lima."))
    tasks = ConversationTasks(f"own:{path}", (4,), seed=0).batch(0, 0, 8)
    assert {t.memories[0].text for t in tasks} == {"In Oslo.", "In Lima."}
    assert all(len(t.probes) == 1 for t in tasks)
    (column,) = asked_of(lambda: None, suite="own", data=(str(path),))[1]
    a, b = column.make()
    assert a.document == "In Oslo." and a.document_digest != b.document_digest


UNKNOWN = """\
You did not mention this information. You mentioned your cat Luna but not your hamster.
The information provided is not enough. You did not mention owning a violin.
You haven’t mentioned a hamster. | You only mentioned your cat.
You mentioned your cat Luna but not your hamster. | None mentioned.
We have not talked about a hamster. | I couldn't find that in our conversation history.
You didn't tell me the name of your hamster. | Not mentioned in the conversation
NO INFORMATION AVAILABLE | **No Information Available** | "Not mentioned"
There's no mention of a hamster in our chats. | I'm sorry, but I don't have that information.
I do not have any record of your hamster's name. | There is not enough information to tell.
Insufficient information. | It is not specified. | The price was never stated.
This cannot be determined from the conversation. | It can't be answered.
I am unable to determine the name. | It is impossible to say.
I don't know the name of your hamster. | I have no idea.
The conversation does not say how many plums you have.
The provided information does not include it. | The name was not provided. | Unknown. | N/A
The name of your hamster is unknown. | It remains unclear from the chats."""
KNOWN = """\
Your hamster is called Unknown. | Your hamster is called unknown.
Your hamster's name is Unknown. | It was an unknown band from Oslo.
You visited the Tomb of the Unknown Soldier. | The band is called No Information.
Your boat's name is Not Mentioned. | Your playlist is called "not mentioned".
You bought Unknown Pleasures by Joy Division. | A man unknown to you paid. | Luna | 7 pears
Only 3 records. | No. | You do not have a hamster. | You were not at the party.
It is not Luna, you said Max. | You never left the state."""


def test_an_answer_that_says_that_nothing_is_known():
    unknown, known = (re.split(r" \| |\n", texts) for texts in (UNKNOWN, KNOWN))
    assert [says_unknown(answer) for answer in unknown] == [True] * 33
    assert [says_unknown(answer) for answer in ["", *known]] == [False] * 19


def test_where_there_is_no_answer_it_is_right_to_say_so_in_any_words_or_by_the_letter():
    probe = Probe("q", "Who?", (NOT_MENTIONED,), 0, abstains=True, distractor="Ada")
    letters = dict(zip(("(a)", "b"), probe.choices, strict=True))
    for answer in (NOT_MENTIONED, "I have no idea.", "Ada", "(a)", "b"):
        right = letters.get(answer, answer) != "Ada"
        assert word_f1(answer, probe) == right, answer
    assert word_f1("Ada", Probe("q", "Who?", ("Ada Lovelace",), 0)) == pytest.approx(2 / 3)


BAD = [  # where in the conversation, what stands there
    *((("id",), bad) for bad in (GONE, 7, "a\nb", "talk-1")),
    (("note",), "x"),
    *((("sessions", 1, "date"), bad) for bad in (GONE, "20240103", "2024-02-30", "2023-12-31")),
    (("sessions", 1, "when"), "a\x07"),
    *((("sessions", 1, "turns"), bad) for bad in (GONE, [], ["Hi"])),
    *((("sessions", 0, "turns", 1, "text"), bad) for bad in (GONE, "a\x00b", "\ud800", " ")),
    (("sessions", 0, "turns", 1, "role"), "user"),
    *((("memories", 0, "text"), bad) for bad in ("a\nb", "\udfff")),
    *((("memories", 0, "session"), bad) for bad in (4, 0, True)),
    *((("memories", 0, "evidence"), bad) for bad in (["D1:3"], "D1:1")),
    *((("memories", 0, "id"), bad) for bad in ("17", "m2")),
    (("memories", 0, "kind"), "fact"),
    (("memories", 0, "kinds"), "semantic"),
    *((("qa",), bad) for bad in (GONE, [])),
    (("qa", 1, "question"), "a\u2028b"),
    *((("qa", 1, "answer"), bad) for bad in (GONE, [], ["a", 2], ["a", "\x1b[31m"])),
    *((("qa", 1, "category"), bad) for bad in (6, True)),
    *((("qa", 1, "evidence"), bad) for bad in (["D1:1", None], ["S4"], ["S0"])),
    (("qa", 1, "abstains"), "no"),
    (("qa", 4), {"question": "Why?", "answer": "A", "category": 5, "abstains": False}),
]


@pytest.mark.parametrize(("at", "value"), BAD)
def test_an_error_names_file_line_and_field(tmp_path, at, value):
    path = write(tmp_path / "own.jsonl", talk(), b"", changed(talk("talk-2"), at, value), talk("3"))
    assert "own.jsonl, line 3" in refused(path, load_own)


@pytest.mark.parametrize(("at", "value"), [
    (("sessions",), ["x"] * 1000), (("sessions", 0, "turns"), [{}] * 1000), (("qa",), [7] * 1000),
    (("memories",), [7] * 1000), (("memories", 0, "evidence"), [7] * 1000),
    (("qa", 0, "evidence"), [7] * 1000),
])  # fmt: skip
def test_of_many_mistakes_the_first_is_told(tmp_path, at, value):
    with pytest.raises(UserError) as error:
        load_own(write(tmp_path / "own.jsonl", changed(talk(), at, value)))
    assert error.value.__cause__.error_count() == 1


def test_a_file_that_is_something_else(tmp_path):
    for raw in (b"7", b'{"id": "x"', talk("b", sessions=[], memories=[])):
        assert "line 2" in refused(write(tmp_path / "own.jsonl", talk(), raw), load_own)
    refused(write(tmp_path / "own.jsonl"), load_own)
    with pytest.raises(UserError):  # parts are LoCoMo's
        conversations_of(f"own:{write(tmp_path / 'own.jsonl', talk())}#seven-three/train")


def test_kinds_of_your_own_that_are_never_paid_for_are_said_at_the_start(tmp_path, capsys):
    """What names no evidence, or is about more sessions in a row than there are shown."""
    name = f"own:{write(tmp_path / 'talks.jsonl', talk())}"
    asked_of(lambda: None, suite="own", data=(name.partition(":")[2],))
    assert not capsys.readouterr().out  # there all are asked
    for begin, kinds in (
        (lambda: ConversationTasks(name, (1, 2), seed=0), "1 multi-hop, questions"),
        (lambda: ConversationTasks(f"{name}#adversarial", (3,), seed=0), "questions"),
        (lambda: validation_episodes(name, 9), "questions"),
    ):
        begin()
        (said,) = capsys.readouterr().out.splitlines()
        assert said.startswith(name) and f": no question of {kinds} is " in said
