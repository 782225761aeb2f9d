"""When the page of a run is written, and what it says of the run."""

import pytest
from typer.testing import CliRunner

import eval
from cli import app
from commands import train
from report import page

TRAIN = "train --name t --steps 2 --save-every 1 --tasks-per-step 1 --group-size 2 --lengths 1"
EVAL = "eval --agents none --lengths 1 --temperatures 0"


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
    assert written == ["Running: step 1 of 2", ""]


def test_a_training_that_fails_has_a_page_of_its_steps(written, tmp_path, monkeypatch):
    monkeypatch.setattr(train.TrainingProgress, "on_train_batch_end", lambda *_: 1 / 0)
    go(TRAIN, tmp_path, code=1)
    assert written == ["Running: step 1 of 2", "Stopped: step 1 of 2"]


def test_an_evaluation_has_a_page_at_its_end_and_where_it_was_stopped(
    written, tmp_path, monkeypatch
):
    def stopped(*_):
        raise KeyboardInterrupt

    go(f"{EVAL} --name e --n 2", tmp_path)
    monkeypatch.setattr(eval, "rollout", stopped)
    go(f"{EVAL} --name e --n 3", tmp_path, code=130)
    go(f"{EVAL} --name f --n 2", tmp_path, code=130)
    assert written == ["", "", "Stopped: 0 answers"]  # of the first it says no less than before
