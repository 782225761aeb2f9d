"""When the page of a run is written, and what a failure of it does."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import eval
from cli import app
from commands import train
from config.errors import Unshown
from report import page

TRAIN = "train --name t --steps 3 --save-every 2 --tasks-per-step 1 --group-size 2 --lengths 1"
EVAL = "eval --name e --agents none --lengths 1 --n 2 --temperatures 0"


@pytest.fixture
def written(monkeypatch):
    """Return the status of each page that was written."""
    read, found = page.read_run, []

    def noted(folder, running=None):
        found.append((run := read(folder, running)).status.rstrip("."))
        return run

    monkeypatch.setattr(page, "read_run", noted)
    return found


def go(words, runs, code=0):
    told = CliRunner().invoke(app, [*words.split(), "--runs", str(runs)])
    assert told.exit_code == code, told.output


def test_a_training_has_a_page_at_each_checkpoint_and_at_its_end(written, tmp_path):
    go(TRAIN, tmp_path)
    assert written == ["Running: step 2 of 3", ""]


def test_a_training_that_fails_has_a_page_of_its_steps(written, tmp_path, monkeypatch):
    monkeypatch.setattr(train.TrainingProgress, "on_train_batch_end", lambda *_: 1 / 0)
    go(TRAIN, tmp_path, code=1)
    assert written == ["Stopped: step 1 of 3"]


def test_an_evaluation_has_a_page_at_its_end_and_where_it_was_stopped(
    written, tmp_path, monkeypatch
):
    go(EVAL, tmp_path)
    assert written == [""]

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval, "rollout", stopped)
    go(f"{EVAL} --seed 0 --n 3", tmp_path, code=130)
    assert written == ["", ""]  # it says no less than before
    go(EVAL.replace("--name e", "--name f"), tmp_path, code=130)
    assert written == ["", "", "Stopped: 0 answers"]


def test_a_page_that_cannot_be_written_ends_no_run(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(page, "write_report", fail)
    assert "the disk is full" in page.try_report(tmp_path)
    with pytest.raises(Unshown, match=r"the disk is full\)\. All is kept; once .* report "):
        page.finish_report(tmp_path, "All is kept")


def test_ctrl_c_while_the_page_loads_a_library_is_no_failure_of_the_page(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(page, "write_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        page.try_report(tmp_path)
