"""What a training says of itself while it goes on: what goes wrong, once, with the remedy."""

import csv
import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

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
WRONG = {  # what all of the last steps have -> what is said, and the remedy
    "all wrong": (
        ALIKE | {"reward": 0.0},
        "No answer of the last steps was right, so nothing is learnt: warm",
    ),
    "all right": (ALIKE | {"reward": 1.0}, "nothing is left to learn: go on with longer documents"),
    "all alike": (ALIKE, "so nothing is learnt: sample hotter (--temperature)"),
    "cut": ({"memory_cut": 1.0}, "Nearly all memories are cut at their limit and lose"),
    "empty": ({"answer_empty": 1.0}, "Nearly all answers are empty: raise --final-tokens"),
    "no rewards": (
        ALIKE | {"reward": math.nan},
        "No reading of the last steps had a reward, so nothing is learnt",
    ),
    "skipped": ({"skipped_updates": 1}, "Updates are skipped since their gradients are not finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_goes_wrong_in_all_of_the_last_steps_is_said_with_the_remedy(kind):
    changed, said = WRONG[kind]
    rows = [FINE] * 3 + [FINE | changed] * WATCHED
    (found,) = troubles(rows)
    assert said in TROUBLES[found]
    # as metrics.csv has it, of earlier versions without the column too
    assert troubles([{k: str(v) for k, v in row.items()} for row in rows]) == [found]
    assert not troubles([{"step": "1", "memory_cut": "x"}] * 9) and not troubles([])
    one = [FINE | changed] * (WATCHED - 1) + [FINE]
    assert bool(troubles(one)) is (kind == "skipped")  # one of which is one too many


def lines_of(rows, proofs, monkeypatch, samples=True):
    """What a terminal shows of the steps with these metrics."""
    shown = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(train, "bar", lambda unit: terminal.bar(unit, shown))
    progress = train.TrainingProgress(40)
    module = SimpleNamespace(
        done_steps=0, validated={}, progress="reward 0.4", proofs=proofs, samples=samples
    )
    progress.on_train_start(None, module)
    for metrics in rows:
        module.done_steps, module.metrics = module.done_steps + 1, metrics
        progress.on_train_batch_end(None, module, None, None, 0)
    return shown.file.getvalue().splitlines()


def test_it_is_said_once_and_again_when_it_returns(monkeypatch):
    dead = FINE | ALIKE | {"reward": 0.0}
    lines = lines_of([dead] * 8 + [FINE] * 2 + [dead] * 6, ["one"], monkeypatch)
    said = [line.split()[1] for line in lines if "No answer of the last" in line]
    assert said == ["5", "15"]
    assert not any("proven" in line for line in lines)


def test_a_sampler_that_nothing_was_proven_of_is_said_once(monkeypatch):
    lines = lines_of([FINE] * 3, [], monkeypatch)
    said = [line for line in lines if "could not be proven" in line]
    assert [line.split()[1] for line in said] == ["1"]
    lines = lines_of([FINE] * 3, [], monkeypatch, samples=SFT.samples)
    assert not any("proven" in line for line in lines)  # a warm start samples nothing


def test_documents_that_are_read_in_part_are_said_once(monkeypatch):
    lines = lines_of([FINE | {"documents_cut": 3}] * 3, ["one"], monkeypatch)
    assert [line[:36] for line in lines if "part of" in line] == [
        "step    1  3 readings leave out a pa"
    ]


def test_it_stands_in_the_page_as_well(tmp_path):
    rows = [FINE | {"step": k, "level": 0, "memory_cut": 1.0} for k in range(WATCHED)]
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "config.yaml").write_text("run: {}\ngrpo: {steps: 9}\n")
    assert "raise --memory-tokens" in write_report(tmp_path).read_text()
