"""LongMemEval's loader: a made file of its schema, and bad ones."""

from __future__ import annotations

import json

import pytest
from conftest import asked_of
from test_locomo import names_field, refused, write
from test_readers import GONE, changed
from typer.testing import CliRunner

import cli
from agents.search import recall
from agents.store import Entry
from tasks import episodes
from tasks.conversations import Memory, Utterance
from tasks.episodes import word_f1
from tasks.longmemeval import ABSTENTION, TYPES, load_longmemeval, says_unknown


def user(text: str, **other) -> dict:
    return {"role": "user", "content": text, **other}


def assistant(text: str, **other) -> dict:
    return {"role": "assistant", "content": text, **other}


def asked(name: str = "q1", **other) -> dict:
    """Make a question whose history is not in order of time and has one session twice."""
    return {
        "question_id": name,
        "question_type": "knowledge-update",
        "question": "How many pears do I have?",
        "answer": 7,
        "question_date": "2024/06/30 (Sun) 08:00",
        "haystack_session_ids": ["answer_2", "filler", "answer_1", "filler"],
        "haystack_dates": [
            "2024/06/12 (Wed) 09:30", "2024/06/03 (Mon) 16:05", "2024/06/03 (Mon) 09:05",
            "2024/06/20 (Thu) 11:00",
        ],
        "haystack_sessions": [
            [user("Seven pears now.", has_answer=True), assistant("Good.", has_answer=False)],
            [user("Hello."), assistant("\n")],
            [user("I have"), assistant("Yes?"), user("three pears.", has_answer=True)],
            [user("Hello."), assistant("\n")],
        ],
        "answer_session_ids": ["answer_1", "answer_2"],
        **other,
    }  # fmt: skip


@pytest.fixture
def load(tmp_path):
    return lambda *questions: load_longmemeval(write(tmp_path / "made.json", [*questions]))


def test_one_conversation_for_each_question_in_order_of_time(load):
    c, other = load(asked("q1"), asked("q2"))
    assert [[p.id for p in each.probes] for each in (c, other)] == [["q1"], ["q2"]]
    assert c.speakers == ("user", "assistant") and other.id == "q2"
    assert [(s.number, s.date, s.when) for s in c.sessions] == [
        (1, "2024-06-03", "2024/06/03 (Mon) 09:05"),
        (2, "2024-06-03", "2024/06/03 (Mon) 16:05"),
        (3, "2024-06-12", "2024/06/12 (Wed) 09:30"),
        (4, "2024-06-20", "2024/06/20 (Thu) 11:00"),
    ]
    assert c.sessions[0].utterances[2] == Utterance("D1:3", "user", "three pears.")
    assert c.text.startswith("Session 1, 2024/06/03 (Mon) 09:05\nuser: I have\nassistant: Yes?\n")
    assert c.memories["empty"] == () and {*c.memories} == {"empty", "sessions"}
    turns = c.memories["sessions"]  # of nine turns two are blank
    assert len(turns) == 7 and turns[0] == Memory("I have", "user", "2024-06-03", 1, ("D1:1",))


def test_a_question_as_a_probe(load):
    (c,) = load(asked())
    (probe,) = c.probes
    assert probe.answers == ("7",) and probe.category == 0 and not probe.abstains
    assert probe.kind == "knowledge-update" and probe.when == "2024/06/30 (Sun) 08:00"
    assert word_f1("7 pears", probe) == pytest.approx(2 / 3)
    # the marked turns, in the order of the answer sessions
    assert probe.evidence == ("D1:3", "D3:1") and probe.sessions == (1, 3)
    # without marks the session, and without a session its id
    (c,) = load(asked(answer_session_ids=["filler", "lost"]))
    (probe,) = c.probes
    assert probe.evidence == ("S2", "S4", "lost") and probe.sessions == (2, 4)
    assert recall([Entry("m1", "x", evidence=("D4:1",))], probe.evidence) == pytest.approx(1 / 3)


UNKNOWN = """\
You did not mention this information. You mentioned your cat Luna but not your hamster.
The information provided is not enough. You did not mention owning a violin.
You haven’t mentioned a hamster.
You only mentioned your cat.
You mentioned your cat Luna but not your hamster.
None mentioned.
We have not talked about a hamster.
I couldn't find that in our conversation history.
You didn't tell me the name of your hamster.
Not mentioned in the conversation
NO INFORMATION AVAILABLE
**No Information Available**
"Not mentioned"
There's no mention of a hamster in our chats.
I'm sorry, but I don't have that information.
I do not have any record of your hamster's name.
There is not enough information to tell.
Insufficient information.
It is not specified.
The price was never stated.
This cannot be determined from the conversation.
It can't be answered.
I am unable to determine the name.
It is impossible to say.
I don't know the name of your hamster.
I have no idea.
The conversation does not say how many plums you have.
The provided information does not include it.
The name was not provided.
Unknown.
N/A
The name of your hamster is unknown.
It remains unclear from the chats."""
KNOWN = """\
Your hamster is called Unknown.
Your hamster is called unknown.
Your hamster's name is Unknown.
It was an unknown band from Oslo.
You visited the Tomb of the Unknown Soldier.
The band is called No Information.
Your boat's name is Not Mentioned.
Your playlist is called "not mentioned".
You bought Unknown Pleasures by Joy Division.
A man unknown to you paid.
Luna
7 pears
Only 3 records.
No.
You do not have a hamster.
You were not at the party.
It is not Luna, you said Max.
You never left the state."""


@pytest.mark.parametrize("answer", UNKNOWN.splitlines())
def test_an_answer_that_says_that_nothing_is_known(answer):
    assert says_unknown(answer)


@pytest.mark.parametrize("answer", ["", *KNOWN.splitlines()])
def test_an_answer_that_says_something_though_its_words_may_be_those_of_a_refusal(answer):
    assert not says_unknown(answer)


def test_abstention_is_a_kind_of_its_own_and_the_answer_of_the_file_is_right(load):
    for gold in ("Your trip to Rome lies ahead.", *UNKNOWN.splitlines()):
        (conversation,) = load(asked("q1_abs", answer=gold, answer_session_ids=[]))
        (probe,) = conversation.probes
        assert probe.abstains and probe.kind == f"knowledge-update, {ABSTENTION}"
        assert probe.answers == (gold,) and probe.evidence == ()
        assert word_f1(gold, probe) == word_f1("It was not mentioned.", probe) == 1
        assert word_f1("7", probe) == 0


def test_types_and_abstention_are_reported_apart(tmp_path):
    """And with --n 1 one question of each is asked."""
    types = 2 * ["knowledge-update", "multi-session"]
    ends = ("", "_abs")
    made = [asked(f"q{k}{e}", question_type=name) for k, name in enumerate(types) for e in ends]
    path = write(tmp_path / "made.json", made)
    _, (column,) = asked_of(suite="longmemeval", data=(str(path),), n=1)
    assert [(task.id, task.kind) for task in column.make()] == [
        ("q0", "knowledge-update, word F1"),
        ("q0_abs", "knowledge-update, abstention, word F1"),
        ("q1", "multi-session, word F1"),
        ("q1_abs", "multi-session, abstention, word F1"),
    ]


def test_the_table_of_an_evaluation_has_types_and_abstention_apart(tmp_path, monkeypatch):
    """From the file to the summary; who finds nothing is right where there is nothing to find."""
    monkeypatch.setattr("report.page.write_report", lambda *_, **__: None)
    made = [
        asked("q1"),
        asked("q2", question_type="multi-session"),
        asked("q3_abs", question="Any violins?", answer_session_ids=[]),
    ]
    words = f"eval --suite longmemeval --data {write(tmp_path / 'made.json', made)} --name e"
    words += f" --engine extractive --agents none,facts --temperatures 0 --runs {tmp_path}"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    found = {(c["agent"], c["question"]): (c["n"], c["mean"]) for c in summary["cells"]}
    for kind in ("knowledge-update", "multi-session", "knowledge-update, abstention"):
        assert f"{kind}, word F1" in done.output
        assert found["none", f"{kind}, word F1"] == (1, float("abstention" in kind))
    assert len(found) == 6 and summary["pooled"] == []


BAD = [  # where in the question, what stands there
    (("question",), GONE),
    (("question_type",), 3),
    *((("answer",), bad) for bad in (["7"], GONE)),
    (("question_date",), GONE),
    (("question_id",), GONE),
    (("haystack_session_ids",), GONE),
    *((("haystack_sessions",), bad) for bad in ({}, [[user("Hello.")]])),
    *(
        (("haystack_dates", 1), bad)
        for bad in ("3 June 2024", "2024/06/03", "2024/02/30 (Fri) 10:00", "2024/06/03 (Mon) 25:00")
    ),
    (("haystack_sessions", 1, 0, "role"), GONE),
    *((("haystack_sessions", 1, 0, "content"), bad) for bad in (None, "\udc00", 7)),
    *((("answer_session_ids",), bad) for bad in ("answer_1", [3])),
]


@pytest.mark.parametrize(("at", "value"), BAD)
def test_an_error_names_file_question_and_field(tmp_path, at, value):
    path = write(tmp_path / "m.json", [asked("good-1"), changed(asked("bad-2"), at, value)])
    said = refused(path, load_longmemeval)
    assert names_field(said, at) and "good-1" not in said
    assert "bad-2" in said or at == ("question_id",)


@pytest.mark.parametrize("bad", ["Hello", ["Hello"], None])
def test_sessions_that_are_no_turns_are_named(tmp_path, bad):
    broken = changed(asked("bad-2"), ("haystack_sessions", 1), bad)
    assert "bad-2, session D2" in refused(write(tmp_path / "m.json", [broken]), load_longmemeval)


def test_types_without_a_question_are_said_at_the_start(tmp_path, capsys):
    """By an evaluation, by a training that shows few sessions in a row, and by its validation."""
    types = ("knowledge-update", "single-session-user")
    made = [asked(f"q{k}", question_type=kind) for k, kind in enumerate(types)]
    path = tmp_path / "made.json"
    others = ", ".join(name for name in TYPES if name not in types)
    # evidence in sessions 1 and 3: not in two in a row, but for a type that has it in one
    later = changed(made, (1, "answer_session_ids"), ["answer_2"])
    last = [*later, asked("q2_abs", question_type="multi-session")]
    for records, begin, kinds in (
        (made, lambda: asked_of(lambda: None, suite="longmemeval", data=(str(path),)),
         f"{others}, abstention"),
        (later, lambda: episodes.ConversationTasks(f"longmemeval:{path}", (2,), seed=0),
         f"{others}, knowledge-update"),
        (last, lambda: episodes.validation_episodes(f"longmemeval:{path}#adversarial", 9), others),
    ):  # fmt: skip
        write(path, records)
        begin()
        (said,) = capsys.readouterr().out.splitlines()
        assert f"no question of {kinds} is " in said
