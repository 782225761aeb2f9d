"""A run has one writer, and whatever ends it, what is whole is kept and said.

A training is a command in a forked child, as small as it can be.
"""

import csv
import gzip
import json
import os
import resource
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import forked
from typer.testing import CliRunner

import cli
import memagent
from commands import export, train
from config.locks import is_written
from config.terminal import command_line
from engines.hf import TransformersEngine
from engines.rehearsed import RehearsedEngine
from grpo import GRPO
from report import runlog

SMALL = (
    "train --tasks-per-step 2 --group-size 2 --lengths 1 --chunk-tokens 30 --memory-tokens 8 "
    "--final-tokens 4 --in-flight 4 --lr 0.01 --name a"
).split()
SMALL_SFT = "sft --tasks-per-step 2 --lengths 1 --chunk-tokens 30 --name a".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def varied_reward(monkeypatch):
    """Make the reward of a trajectory's tokens, so that there is something to learn."""

    def by_tokens(agent, trajectory, outcome="exact"):
        return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97

    monkeypatch.setattr(memagent.Agent, "reward", by_tokens)


def run(words, code=0):
    """Run a command in this process; returns what it has said, on one line."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@contextmanager
def doing(act, steps=0, owner=train.TrainingProgress, place="on_train_batch_end"):
    """Let a training do something when so many steps are done, by the callback after all others;
    or another class where it does something, before it."""
    real = getattr(owner, place)

    def then(self, *rest, **more):
        if not steps:
            act()
        found = real(self, *rest, **more)
        if steps and rest[1].done_steps == steps:
            act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, place, then)
        yield


@contextmanager
def halted(words, *where, **how):
    """Yield a command in a process of its own that waits for ever at one place, as in `doing`."""
    ours, theirs = os.pipe()

    def halt():
        os.write(theirs, b"here")
        while True:
            time.sleep(1)

    with doing(halt, *where):
        process = forked(words, **how)
    assert os.read(ours, 4) == b"here"
    try:
        yield process
    finally:
        process.kill()
        process.join()
        os.close(ours)
        os.close(theirs)


def tree(folder):
    """Return what a folder holds: path -> bytes.

    TensorBoard's files are left out: a thread writes them, also while its process is halted.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "tensorboard"
    }


# ---------------------------------------------------------------- one writer


def test_a_run_that_is_trained_is_written_by_nobody_else():
    words = [*SMALL, "--steps", 3, "--save-every", 1]
    with halted(words, 2) as process:
        before = tree(Path("runs"))
        for again in (
            [words[0], "--resume", "--name", "a"],
            [words[0], "--resume", "--name", "../runs/a/../a", "--steps", 4],
            ["export", "runs/a"],
        ):
            assert f"is being written by process {process.pid} on " in run(again, 2)
        run(words, 2)  # there already
        run(["eval", "--name", "a", "--n", 1], 2)
        assert tree(Path("runs")) == before
        run(["export", "runs/a", "--out", "elsewhere"])  # which reads alone
    run([words[0], "--resume", "--name", "a"])
    assert len(Path("runs/a/metrics.csv").read_text().splitlines()) == 4


def test_a_stream_that_goes_on_is_written_by_nobody_else():
    words = "stream --engine rehearsed --epochs 2 --n 20 --arms rag --name s".split()
    with halted(words, 0, RehearsedEngine, "respond") as process:
        before = tree(Path("runs"))
        assert f"is being written by process {process.pid} on " in run(words, 2)
        assert tree(Path("runs")) == before and is_written(Path("runs/s"))
    assert not is_written(Path("runs/s"))
    run(words)


def test_a_demo_that_trains_is_replaced_by_nobody_else():
    with halted([*SMALL, "--steps", 3], 1) as process:
        Path("runs/a/.demo").touch()  # as if it were one
        before = tree(Path("runs"))
        said = run(["demo", "--short", "--name", "a"], 2)
        assert f"is being written by process {process.pid} on " in said
        assert tree(Path("runs")) == before


# ---------------------------------------------------------------- Ctrl-C and SIGTERM


def numbers(name):
    """What must be equal: metrics without times, trajectories and exported weights."""
    with Path("runs", name, "metrics.csv").open(newline="") as file:
        rows = [
            {k: v for k, v in row.items() if not k.endswith("_s")} for row in csv.DictReader(file)
        ]
    with gzip.open(Path("runs", name, "trajectories.jsonl.gz"), "rt") as file:
        told = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in file]
    return rows, told, Path("runs", name, "model", "model.safetensors").read_bytes()


def stopped_by(number, words, *where, times=1):
    """Let a training send itself a signal so many times; returns its exit status and all that it
    has printed."""
    left = [number] * times

    def act():
        while left:
            signal.raise_signal(left.pop())

    with doing(act, *where):
        process = forked(words, "said")
    process.join()
    return process.exitcode, " ".join(Path("said").read_text().split())


@pytest.mark.parametrize("words", [SMALL, SMALL_SFT], ids=["train", "sft"])
def test_a_training_that_is_stopped_goes_on_to_the_same_numbers(words):
    """In a step, between steps and while a checkpoint is written; by the command that it says."""
    words = [*words, "--save-every", 2]
    again = [words[0], "--resume", "--name", "it's"]
    stops = [(signal.SIGINT, [*words, "--steps", 6, "--name", "it's"], (1,), 2)]
    if words[0] == "train":
        stops += [
            # before the optimizer's step, and when it has been done; in the midst of saving step 4
            (signal.SIGTERM, again, (0, GRPO, "clip_and_step"), 3),
            (signal.SIGTERM, again, (0, runlog.RunRecorder, "_save"), 5),
            (signal.SIGINT, again, (0, GRPO, "add_times"), 6),
        ]
    for number, command, where, done in stops:
        status, said = stopped_by(number, command, *where)
        assert status == 128 + number and "Traceback" not in said, said
        (kept,) = Path("runs/it's/checkpoints").iterdir()
        assert kept.name == f"step-{done}"
        assert f"is whole in {kept}" in said and said.endswith(command_line(*again))
        assert Path("runs/it's/report.html").exists()
    run([*words, "--steps", 6, "--name", "whole"])
    run(again)
    assert numbers("it's") == numbers("whole")


def test_one_that_is_stopped_before_its_first_step_says_so_and_leaves_nothing():
    words = [*SMALL, "--steps", 2, "--runs", "my runs"]
    for n, where in ((1, (TransformersEngine, "__init__")), (2, (runlog.RunRecorder, "_load"))):
        status, said = stopped_by(signal.SIGTERM, words, 0, *where, times=n)
        assert status == 143 and "nothing to go on from" in said and not Path("my runs").exists()


def test_the_second_signal_ends_a_step_at_once():
    words = [*SMALL, "--steps", 3, "--save-every", 1]

    def act():
        if Path("runs/a/checkpoints/step-1").exists():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it goes on")

    with doing(act, 0, GRPO, "clip_and_step"):
        process = forked(words, "said")
    process.join()
    said = Path("said").read_text()
    assert process.exitcode == 130 and "Step 1 of 3 is whole" in said, said
    run([*words[:1], "--resume", "--name", "a"])
    assert len(numbers("a")[0]) == 3


# ---------------------------------------------------------------- a full disk


def full(words, most, *where):
    """Run a command whose files may not be longer than so many bytes, from one place on; returns
    what it has said last."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    ours, theirs = os.pipe()  # a pipe has no length
    with doing(limit, *where):
        process = forked(words, f"/dev/fd/{theirs}")
    os.close(theirs)
    with os.fdopen(ours) as file:
        said = file.read()
    process.join()
    assert process.exitcode == 2 and "Traceback" not in said, said
    assert not [*Path("runs").rglob("*.tmp")]
    return said.rstrip("\n").rpartition("\n")[2]


def test_a_full_disk_leaves_the_last_checkpoint_and_says_where_it_is():
    words = [*SMALL, "--steps", 4, "--save-every", 1]
    said = full(words, 10, 0, runlog.RunRecorder, "on_fit_start")
    assert said.endswith("nothing to go on from.") and not Path("runs").exists()
    run([*words, "--name", "whole"])
    again = ["train", "--resume", "--name", "a"]
    for command, step, most, where in (
        (words, 1, 20_000, (1,)),  # the checkpoint
        (again, 2, 500, (2,)),  # the table of the metrics
        (again, 4, 20_000, (0, export, "_write_export")),
    ):
        said = full(command, most, *where)
        assert f"Step {step} of 4 is whole in runs/a/checkpoints/step-{step}" in said, said
        assert said.endswith(command_line(*again))
    run(again)
    assert numbers("a") == numbers("whole")


@pytest.mark.parametrize("most", [10_000, 3_000])  # the bank's file, and the rows'
def test_a_stream_on_a_full_disk_goes_on_from_its_last_batch(most):
    words = "stream --engine rehearsed --epochs 2 --n 20 --batch 8 --arms rag --name".split()
    full([*words, "s"], most, 0, RehearsedEngine, "respond")
    run([*words, "s"])
    run([*words, "whole"])
    assert Path("runs/s/rag.jsonl").read_bytes() == Path("runs/whole/rag.jsonl").read_bytes()


def test_an_evaluation_on_a_full_disk_keeps_its_rows():
    words = "eval --agents memagent --data world --lengths 2 --kinds one_fact --n 10 --name e"
    said = full(words.split(), 2_000, 0, TransformersEngine, "__init__")
    assert said.endswith("the rows so far are kept.")
    run(words.split())
    assert len(Path("runs/e/rows.jsonl").read_text().splitlines()) == 20


@pytest.mark.parametrize(("words", "where"), [
    ("demo --short", (0, train, "check_folder")),
    ("train --dry-run", (0, train, "check_folder")),
    ("train --dry-run", (0, GRPO, "clip_and_step")),
])  # fmt: skip
def test_a_demo_and_a_dry_run_that_are_stopped_say_how_to_begin_anew(
    tmp_path, monkeypatch, words, where
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status, told = stopped_by(signal.SIGINT, words.split(), *where)
    assert status == 130 and "Traceback" not in told, told
    assert told.endswith("the same command begins it anew.")
    assert not [*tmp_path.glob("memagent-*")]
