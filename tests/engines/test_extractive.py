"""The engine that answers with words of what it is shown."""

import subprocess
import sys
from pathlib import Path

from agents import find
from engines.extractive import NOTHING, ExtractiveEngine, extract
from memagent import Prompt
from rollout import Sampling, rollout
from tasks import ledger
from tasks.conversations import Probe
from tasks.locomo_score import official_score

LINES = ["2023-05-08 Ann: I moved to Rome with my sister.", "2023-06-01 Bob: My dog is ill."]


def test_the_line_that_shares_the_rarest_words_answers():
    assert extract("When was Bob's dog ill?", LINES) == "1 June 2023"
    assert extract("Who moved to Rome?", LINES) == "my sister"
    assert extract("What is a violin?", LINES) == NOTHING == extract("Who?", [])


TIES = """
from engines.extractive import extract
for n in range(20):  # two lines whose words are equally rare; other lines make them so
    one, two = ([f"{side}{n}x{k}" for k in range(8)] for side in ("ann", "bob"))
    more = [words[k] for words in (one, two) for k in range(8) for _ in range(k * (n + 1))]
    lines = [" ".join(["first", *one]), " ".join(["second", *two]), *more]
    print(extract(" ".join(one + two), lines))
"""


def test_which_of_several_lines_answers_is_the_same_in_every_process():
    """Sets of words have another order in each, and sums of floats depend on theirs."""
    printed = set()
    for seed in "12":
        how = dict(env={"PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2])
        printed.add(subprocess.check_output([sys.executable, "-c", TIES], **how))
    assert printed == {b"first\n" * 20}


def test_it_answers_whole_tasks_in_the_form_that_is_asked_for():
    agent = find.make("facts", {"form": "boxed", "answer_order": "newest"})
    tasks = [*ledger.make_questions(0, 12, 6)]
    done = list(rollout(ExtractiveEngine("boxed"), agent, ((t, 0) for t in tasks), Sampling(0.0)))
    assert all(not t.error and t.answer.startswith("\\boxed{") for t in done)
    assert len(done) == 12


def test_words_of_the_answers_to_choose_from_find_no_line():
    """The question shares no word with a line: it refuses, though the distractor is said there."""
    asked = Probe("q", "What is a violin?", ("-",), 5, abstains=True, distractor="My dog is ill")
    pieces = (("\n".join(LINES), False), (asked.problem, False))
    said = ExtractiveEngine("plain").respond(Prompt(pieces, 9, final=True, memory="\n".join(LINES)))
    assert "dog" in asked.problem and said == NOTHING and official_score(said, asked) == 1
