"""Questions with choices: what is shown, and what counts as the right one."""

from __future__ import annotations

import pytest
from test_readers import OWN, fails, lines

from data import grade
from memagent import Finish, MemAgent, Prompt, Trajectory, Turn
from report.reading import row_of
from report.rows import Cell
from tasks import writers
from tasks.choices import Choice
from tasks.readers import read
from tokens.codec import Text

NAMES = ["Ada", "Bo", "Cleo", "the mayor"]
LONGBENCH = {
    "_id": "66f2", "question": "Who keeps bees?", "choice_A": "Ada", "choice_B": "Bo",
    "choice_C": "Cleo", "choice_D": "the mayor", "answer": "B", "context": "Bo keeps bees.",
    "difficulty": "easy", "length": "short",
}  # fmt: skip
LONGBENCH_CHOICES = [name for name in LONGBENCH if name.startswith("choice")]
SHOWN = "Who keeps bees?\n(A) Ada\n(B) Bo\n(C) Cleo\n(D) the mayor"
PLAIN = {"question": "Who keeps bees?", "context": "Bo keeps bees."}


@pytest.mark.parametrize(
    "record",
    [
        LONGBENCH,
        PLAIN | {"options": NAMES, "answer": "B"},
        PLAIN | {"choices": NAMES, "answer": "Bo"},
        PLAIN | {"Options": dict(zip("ABCD", NAMES, strict=True)), "answer": ["B", "Bo"]},
        PLAIN | {"choices": {"text": NAMES, "label": [*"ABCD"]}, "answer": "B"},
        PLAIN | {"choices": {"text": NAMES}, "answer": "bo."},
        PLAIN | {"choices": [{"label": a, "text": b} for a, b in zip("ABCD", NAMES, strict=True)],
                 "answer": "B"},
        PLAIN | dict(zip("ABCD", NAMES, strict=True)) | {"answer": "B"},
        PLAIN | {f"op{a}": b for a, b in zip("abcd", NAMES, strict=True)} | {"answer": "B"},
        PLAIN | {"metadata": {"answer_choices": NAMES}, "answer": "B"},
        PLAIN | {"question": SHOWN, "options": NAMES, "answer": "B"},  # it shows them itself
        {"prompt": "Who keeps bees?", "label": "B",
         "metadata": {"context": "Bo keeps bees.", "options": NAMES}},
    ],
)  # fmt: skip
def test_choices_are_shown_and_known(tmp_path, record):
    (task,) = read(lines(tmp_path / "x.jsonl", [record]))
    assert (task.question, task.answers) == (SHOWN, ("Bo", "B"))
    assert task.choices == tuple(zip("ABCD", NAMES, strict=True))
    writers.write_eval_json(tmp_path / "y.json", [task])
    (again,) = read(tmp_path / "y.json")
    assert isinstance(again, Choice) and again == task


def test_an_open_question_may_have_empty_choices(tmp_path):
    (task,) = read(lines(tmp_path / "x.jsonl", [OWN | {"options": None, "choice_A": ""}]))
    assert type(task).__name__ == "Task" and task.question == OWN["question"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answer": "Dora"}, "the answer 'Dora' names none of the choices (A) Ada | (B) Bo"),
        ({"answer": 1}, "the answer '1' names none"),  # of 0 or of 1: nobody knows
        ({"choice_A": "B"}, "names more than one of the choices"),
        ({"choice_B": ["Bo"]}, "'choices' looks like choices, but it is no list of two or more"),
        ({"endings": "x"}, "'endings' looks like choices"),
        (
            {"distractors": ["Ada", "Cleo"], "answer": "Bo"} | dict.fromkeys(LONGBENCH_CHOICES),
            "names none",
        ),
    ],
)
def test_choices_that_cannot_be_read_are_refused(tmp_path, change, reason):
    fails(lines(tmp_path / "x.jsonl", [LONGBENCH | change]), "line 1: ", reason)


@pytest.mark.parametrize(
    ("said", "right", "sub"),
    [
        # the letter, however it is given
        ("B", 1, 1), ("b", 1, 1), ("(B)", 1, 1), ("B.", 1, 1), ("**B**", 1, 1), ("B) Bo", 1, 1),
        ("(B) Bo", 1, 1), ("B: Bo.", 1, 1), ("Option B", 1, 1), ("choice (B)", 1, 1),
        (r"\text{B}", 1, 1), ("Answer: B", 1, 1), ("B Bo", 1, 1),
        # the text, however it is spelt
        ("Bo", 1, 1), ("bo.", 1, 1), (r"\text{Bo}", 1, 1), ("The answer is Bo.", 1, 1),
        # a text that contains the right one's alone
        ("It is Bo who does", 0, 1), ("Bo or Cleo", 0, 0), ("Bob", 0, 1),
        # other choices, and letters within words
        ("A", 0, 0), ("Ada", 0, 0), ("(B) Ada", 0, 0), ("A) Bo", 0, 0), ("bad", 0, 0), ("", 0, 0),
        ("the mayor", 0, 0), ("mayor", 0, 0), ("B or C", 0, 0), (None, 0, 0), ("ABCD", 0, 0),
    ],
)  # fmt: skip
def test_the_letter_and_the_text_are_right(tmp_path, said, right, sub):
    (task,) = read(lines(tmp_path / "x.jsonl", [LONGBENCH]))
    values = task.beside(said)
    assert (task.score(said), values["em"], values["sub_em"]) == (right, right, sub)
    assert values["f1"] == 1 if right else values["f1"] < 1


def test_choices_that_differ_by_punctuation_are_told_apart(tmp_path):
    record = PLAIN | {"choices": ["C++", "C#", "-5", "5"], "answer": "C#"}
    (task,) = read(lines(tmp_path / "x.jsonl", [record]))
    assert [task.score(said) for said in ("C#", "c#", "B", "C++", "C", "A")] == [1, 1, 1, 0, 0, 0]
    (task,) = read(lines(tmp_path / "x.jsonl", [record | {"answer": "5"}]))
    assert [task.score(said) for said in ("5", "-5", "D")] == [1, 0, 1]


def test_the_article_is_a_letter(tmp_path):
    (task,) = read(lines(tmp_path / "x.jsonl", [LONGBENCH | {"answer": "A"}]))
    assert [task.score(said) for said in ("A", "a.", "(A)", "The", "...", "Ada")] == [
        1,
        1,
        1,
        0,
        0,
        1,
    ]


def test_rows_and_rewards_are_graded_so(tmp_path):
    """`sub_em` alone would find the letter b in Bob, and in bad."""
    (task,) = read(lines(tmp_path / "x.jsonl", [LONGBENCH]))
    agent = MemAgent()
    for said, right in ((r"\boxed{bad}", 0), (r"\boxed{B}", 1), (r"\boxed{(B) Bo}", 1)):
        turn = Turn(Prompt((), 4, final=True), [1], [2], [-1.0], Finish.STOP, Text(said, ()))
        trajectory = Trajectory(task, [turn])
        row = row_of(trajectory, Cell("memagent", "", "", 0), agent)
        assert [row[name] for name in ("reward", "em", "f1", "sub_em")] == [right] * 4
        assert all(agent.reward(trajectory, outcome) == right for outcome in ("exact", "em", "f1"))
    assert grade(r"\boxed{bad}", task.answers).sub_em == 1
