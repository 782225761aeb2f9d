"""What a training says of itself while it goes on: what goes wrong, once, with the remedy."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console
from run_folders import shown, training

from commands import train
from commands.sft import SFT
from config import terminal
from report.page import write_report
from report.training import TROUBLES, WATCHED, troubles

FINE = {
    "step": 1, "reward": 0.4, "groups_without_signal": 0.5, "memory_cut": 0.1, "answer_empty": 0.0,
    "skipped_updates": 0, "read_tokens": 10, "written_tokens": 5, "step_s": 2.0, "rollout_s": 1.0,
    "update_s": 1.0,
}  # fmt: skip
ALIKE = {"groups_without_signal": 1.0}
WRONG = {  # what all of the last steps have
    "wrong": ALIKE | {"reward": 0.0},
    "right": ALIKE | {"reward": 1.0},
    "alike": ALIKE,
    "cut": {"memory_cut": 1.0},
    "empty": {"answer_empty": 1.0},
    "unpaid": ALIKE | {"reward": math.nan},
    "skipped": {"skipped_updates": 1},
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_what_goes_wrong_in_all_of_the_last_steps_is_found(kind):
    rows = [FINE] * 3 + [FINE | WRONG[kind]] * WATCHED
    assert troubles(rows) == [kind]
    # as metrics.csv has it, of earlier versions without the column too
    assert troubles([{k: str(v) for k, v in row.items()} for row in rows]) == [kind]
    assert not troubles([{"step": "1", "memory_cut": "x"}] * 9) and not troubles([])
    one = [FINE | WRONG[kind]] * (WATCHED - 1) + [FINE]
    assert bool(troubles(one)) is (kind == "skipped")  # one of which is one too many


def steps_that_say(word, rows, monkeypatch, proofs=("one",), samples=True):
    """Return at which steps a terminal is told of something by a word."""
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(train, "bar", lambda unit: terminal.bar(unit, console))
    progress = train.TrainingProgress(40)
    module = SimpleNamespace(validated={}, progress="", proofs=proofs, samples=samples)
    module.done_steps = 0
    progress.on_train_start(None, module)
    for metrics in rows:
        module.done_steps, module.metrics = module.done_steps + 1, metrics
        progress.on_train_batch_end(None, module, None, None, 0)
    return [int(x.split()[1]) for x in console.file.getvalue().splitlines() if word in x]


DEAD = FINE | WRONG["wrong"]


@pytest.mark.parametrize(("word", "rows", "how", "steps"), [
    ("No answer", [DEAD] * 8 + [FINE] * 2 + [DEAD] * 6, {}, [5, 15]),  # again when it returns
    ("proven", [DEAD] * 3, {}, []),
    ("proven", [FINE] * 3, {"proofs": ()}, [1]),
    ("proven", [FINE] * 3, {"proofs": (), "samples": SFT.samples}, []),  # which samples nothing
    ("part of", [FINE | {"documents_cut": 3}] * 3, {}, [1]),
])  # fmt: skip
def test_it_is_said_once(monkeypatch, word, rows, how, steps):
    assert steps_that_say(word, rows, monkeypatch, **how) == steps


def test_it_stands_in_the_page_as_well(tmp_path):
    folder = training(tmp_path / "run", steps=WATCHED, memory_cut=1.0)
    assert "raise --memory-tokens" in shown(write_report(folder)).text
