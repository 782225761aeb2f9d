"""A run has one writer, and whatever ends it, what is whole is kept and said."""

import shutil
from pathlib import Path

import pytest
from run_faults import SMALL, SMALL_SFT, halted, tree
from typer.testing import CliRunner

import cli
from engines.rehearsed import RehearsedEngine
from report.status import is_running


def run(words, code=0):
    """Run a command in this process; returns what it has said, on one line."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


# ---------------------------------------------------------------- one writer


@pytest.mark.parametrize("words", [SMALL, SMALL_SFT], ids=["train", "sft"])
def test_a_run_that_is_trained_is_written_by_nobody_else(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    words = [*words, "--steps", 3, "--save-every", 1, "--name", "a"]
    with halted(words, 2) as process:
        before = tree(Path("runs"))
        who = f"is being written by process {process.pid} on "
        for again in (
            [words[0], "--resume", "--name", "a"],
            [words[0], "--resume", "--name", "a", "--steps", 4],
            [words[0], "--resume", "--name", "../runs/a/../a"],
            ["export", "runs/a"],
        ):
            said = run(again, 2)
            assert said.startswith("memagent: The run ") and who in said, said
            assert said.endswith("wait for it, or end it.")
        assert "is there already" in run(words, 2)
        assert "no evaluation" in run(["eval", "--name", "a", "--n", 1], 2)
        assert tree(Path("runs")) == before
        run(["export", "runs/a", "--out", "elsewhere"])  # which reads alone
    assert "The policy is in" in run([words[0], "--resume", "--name", "a"])
    assert len(Path("runs/a/metrics.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("words", ["stream --engine rehearsed --epochs 2 --n 20 --arms rag"])
def test_a_stream_that_goes_on_is_written_by_nobody_else(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    words = [*words.split(), "--name", "s"]
    with halted(words, 0, RehearsedEngine, "respond") as process:
        before = tree(Path("runs"))
        assert f"is being written by process {process.pid} on " in run(words, 2)
        assert tree(Path("runs")) == before and is_running(Path("runs/s"))
    assert not is_running(Path("runs/s"))
    run(words)


def test_a_demo_that_trains_is_replaced_by_nobody_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with halted([*SMALL, "--steps", 3, "--name", "x"], 1) as process:
        shutil.move("runs/x", "runs/y")
        shutil.move("runs/.x.writing", "runs/.y.writing")  # as if it were one
        Path("runs/y/.demo").touch()
        before = tree(Path("runs"))
        said = run(["demo", "--short", "--name", "y"], 2)
        assert f"The demo runs/y is being written by process {process.pid} on " in said
        assert tree(Path("runs")) == before
