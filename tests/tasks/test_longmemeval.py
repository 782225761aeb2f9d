"""LongMemEval's loader: a made file of its schema, and bad ones."""

from __future__ import annotations

import copy
import json

import pytest
from conftest import asked_of
from test_locomo import MISSING, write
from typer.testing import CliRunner

import cli
from agents.search import recall
from agents.store import Entry
from config.errors import UserError
from tasks import episodes
from tasks.conversations import Memory, Utterance
from tasks.episodes import validation_episodes, word_f1
from tasks.longmemeval import ABSTENTION, load_longmemeval, says_unknown, time_of


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
            "2024/06/12 (Wed) 09:30",
            "2024/06/03 (Mon) 16:05",
            "2024/06/03 (Mon) 09:05",
            "2024/06/20 (Thu) 11:00",
        ],
        "haystack_sessions": [
            [
                user("Now I have seven pears.", has_answer=True),
                assistant("Good.", has_answer=False),
            ],
            [user("Hello."), assistant("\n")],
            [user("I have"), assistant("Yes?"), user("three pears.", has_answer=True)],
            [user("Hello."), assistant("\n")],
        ],
        "answer_session_ids": ["answer_1", "answer_2"],
        **other,
    }


@pytest.fixture
def load(tmp_path):
    return lambda *questions: load_longmemeval(write(tmp_path / "made.json", [*questions]))


def test_one_conversation_for_each_question_in_order_of_time(load):
    conversations = load(asked("q1"), asked("q2"))
    assert [(c.id, [p.id for p in c.probes]) for c in conversations] == [
        ("q1", ["q1"]),
        ("q2", ["q2"]),
    ]
    c = conversations[0]
    assert c.speakers == ("user", "assistant")
    assert [(s.number, s.date, s.when) for s in c.sessions] == [
        (1, "2024-06-03", "2024/06/03 (Mon) 09:05"),
        (2, "2024-06-03", "2024/06/03 (Mon) 16:05"),
        (3, "2024-06-12", "2024/06/12 (Wed) 09:30"),
        (4, "2024-06-20", "2024/06/20 (Thu) 11:00"),
    ]
    assert c.sessions[0].utterances[2] == Utterance("D1:3", "user", "three pears.")
    assert c.text.startswith("Session 1, 2024/06/03 (Mon) 09:05\nuser: I have\nassistant: Yes?\n")


def test_a_question_as_a_probe(load):
    (probe,) = load(asked())[0].probes
    assert probe.answers == ("7",) and probe.category == 0 and not probe.abstains
    assert probe.kind == "knowledge-update" and probe.when == "2024/06/30 (Sun) 08:00"
    assert word_f1("7 pears", probe) == pytest.approx(2 / 3)


def test_evidence_is_the_marked_turns_in_the_order_of_the_answer_sessions(load):
    (conversation,) = load(asked())
    (probe,) = conversation.probes
    assert probe.evidence == ("D1:3", "D3:1") and probe.sessions == (1, 3)
    assert conversation.dangling == {}


def test_evidence_without_marks_is_the_session_and_without_a_session_its_id(load):
    (conversation,) = load(asked(answer_session_ids=["filler", "lost"]))
    (probe,) = conversation.probes
    assert probe.evidence == ("S2", "S4", "lost") and probe.sessions == (2, 4)
    assert conversation.dangling == {"q1": ("lost",)}
    assert recall([Entry("m1", "x", evidence=("D4:1",))], probe.evidence) == pytest.approx(1 / 3)


def test_abstention_is_a_kind_of_its_own_beside_each_type_of_question(load):
    gold = "You did not tell how many plums."
    (conversation,) = load(asked("q1_abs", answer=gold, answer_session_ids=[]))
    (probe,) = conversation.probes
    assert probe.abstains and probe.kind == f"knowledge-update, {ABSTENTION}"
    assert probe.answers == (gold,)
    assert probe.evidence == ()
    assert word_f1(gold, probe) == word_f1("It was not mentioned.", probe) == 1
    assert word_f1("7", probe) == 0


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


def test_the_own_answer_of_the_file_is_right_whatever_its_words(load):
    for gold in ("Your trip to Rome lies ahead.", *UNKNOWN.splitlines()):
        (conversation,) = load(asked("q1_abs", answer=gold, answer_session_ids=[]))
        assert word_f1(gold, conversation.probes[0]) == 1


def test_types_and_abstention_are_reported_apart(tmp_path):
    """And with --n 1 one question of each is asked."""
    types = ["knowledge-update", "multi-session"]
    made = [
        asked(f"q{k}{end}", question_type=name)
        for k, name in enumerate(2 * types)
        for end in ("", "_abs")
    ]
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
    made[1]["haystack_sessions"][0][0]["content"] = 7
    write(tmp_path / "made.json", made)
    done = CliRunner().invoke(cli.app, words.split())
    said = f"{tmp_path / 'made.json'}, q2, turn D3:1: 'content' must be a text"
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_turns_are_memories_unless_they_are_blank(load):
    memories = load(asked())[0].memories
    assert memories["empty"] == () and {*memories} == {"empty", "sessions"}
    assert len(memories["sessions"]) == 7  # of nine turns two are blank
    first = Memory("I have", "user", "2024-06-03", 1, ("D1:1",))
    assert memories["sessions"][0] == first
    assert all(memory.text for memory in memories["sessions"])


@pytest.mark.parametrize("when", ["2024/06/03", "2024/02/30 (Fri) 10:00", "2024/06/03 (Mon) 25:00"])
def test_no_time_is_guessed(when):
    with pytest.raises(ValueError):
        time_of(when)


BAD = [  # where in the question, what stands there, what the error says
    (["question"], MISSING, "the field 'question' is missing"),
    (["question_type"], 3, "'question_type' must be a text"),
    (["answer"], ["7"], "'answer' must be a text, this is a list"),
    (["answer"], MISSING, "the field 'answer' is missing"),
    (["question_date"], MISSING, "the field 'question_date' is missing"),
    (["haystack_session_ids"], MISSING, "the field 'haystack_session_ids' is missing"),
    (["haystack_dates"], ["2024/06/03 (Mon) 09:05"], "there are 4 ids, 1 dates and 4 sessions"),
    (["haystack_dates", 1], "3 June 2024", "'haystack_dates' must be dates such as"),
    (["haystack_sessions"], {}, "'haystack_sessions' must be a list, this is an object"),
    (["haystack_sessions", 1], "Hello", "'haystack_sessions' must be a list of lists of turns"),
    (["haystack_sessions", 1, 0], "Hello", "'haystack_sessions' must be an object"),
    (["haystack_sessions", 1, 0, "role"], MISSING, "turn D2:1: the field 'role' is missing"),
    (["haystack_sessions", 1, 0, "content"], None, "turn D2:1: the field 'content' is missing"),
    (["haystack_sessions", 1, 0, "content"], "\udc00", "'content' holds half of a surrogate"),
    (["answer_session_ids"], "answer_1", "'answer_session_ids' must be a list"),
    (["answer_session_ids", 0], 3, "'answer_session_ids' must be a text"),
]


@pytest.mark.parametrize("at, value, expected", BAD, ids=lambda value: str(value)[:60])
def test_an_error_names_file_question_and_field(load, at, value, expected):
    broken = copy.deepcopy(asked("bad-2"))
    *way, last = at
    inner = broken
    for key in way:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(UserError) as caught:
        load(asked("good-1"), broken)
    said = str(caught.value)
    assert "made.json, bad-2" in said and expected in said and "good-1" not in said
    assert said.endswith(".") and "\n" not in said


def test_a_file_that_is_something_else(tmp_path, load):
    with pytest.raises(UserError, match="item 1: the field 'question_id' is missing"):
        load({"sample_id": "conv-1"})
    with pytest.raises(UserError, match="No file at"):
        load_longmemeval(tmp_path / "missing.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match="this is not JSON"):
        load_longmemeval(tmp_path / "x.json")


def test_types_without_a_question_are_said_at_the_start(tmp_path, capsys):
    """By an evaluation, by a training that shows few sessions in a row, and by its validation."""
    types = ("knowledge-update", "single-session-user")
    made = [asked(f"q{k}", question_type=kind) for k, kind in enumerate(types)]
    path = write(tmp_path / "made.json", made)
    others = (
        "single-session-assistant, single-session-preference, multi-session, temporal-reasoning"
    )
    asked_of(lambda: None, suite="longmemeval", data=(str(path),))
    (said,) = capsys.readouterr().out.splitlines()
    assert said == (
        f"longmemeval:{path}: no question of {others}, abstention is in it, none will be asked."
    )
    # evidence in sessions 1 and 3: not in two in a row, but for a type that has it in one
    made[1]["answer_session_ids"] = ["answer_2"]
    episodes.ConversationTasks(f"longmemeval:{write(path, made)}", (2,), seed=0)
    (said,) = capsys.readouterr().out.splitlines()
    assert f": no question of {others}, knowledge-update is about 2 sessions" in said
    made.append(asked("q2_abs", question_type="multi-session"))
    path = write(path, made)
    validation_episodes(f"longmemeval:{path}#adversarial", 9)
    (said,) = capsys.readouterr().out.splitlines()
    known = "single-session-assistant, single-session-preference, multi-session, temporal-reasoning"
    assert said.endswith(f"no question of {known} is in it, none will be validated.")
