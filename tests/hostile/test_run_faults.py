"""A run has one writer, and whatever ends it, what is whole is kept and said."""

import csv
import gzip
import json
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from conftest import forked
from run_faults import SMALL, SMALL_SFT, doing, halted, tree
from typer.testing import CliRunner

import cli
import memagent
from commands import export, train
from commands.sft import SFT
from config.locks import is_written
from config.terminal import command_line
from engines.hf import TransformersEngine
from engines.rehearsed import RehearsedEngine
from grpo import GRPO
from report import runlog


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
            assert "memagent: The run " in said and who in said, said
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
        assert tree(Path("runs")) == before and is_written(Path("runs/s"))
    assert not is_written(Path("runs/s"))
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


def stopped_by(number, words, *where):
    """Let a training send itself a signal; returns its exit status and all that it has printed."""
    left = [number]
    with doing(lambda: left and signal.raise_signal(left.pop()), *where):
        process = forked(words, "said")
    process.join()
    return process.exitcode, " ".join(Path("said").read_text().split())


@pytest.mark.parametrize("words", [SMALL, SMALL_SFT], ids=["train", "sft"])
def test_a_training_that_is_stopped_goes_on_to_the_same_numbers(tmp_path, monkeypatch, words):
    """In a step, between steps and while a checkpoint is written; by the command that it says."""
    monkeypatch.chdir(tmp_path)
    words = [*words, "--steps", 8, "--save-every", 3]
    last = SFT if words[0] == "sft" else GRPO
    run([*words, "--name", "whole"])
    status, said = stopped_by(signal.SIGINT, [*words, "--name", "it's"], 1)
    assert status == 130 and "Traceback" not in said
    again, step = [words[0], "--resume", "--name", "it's"], Path("runs/it's/checkpoints/step-2")
    assert said.endswith(
        f"memagent: stopped. Step 2 of 8 is whole in {step}; go on with: " + command_line(*again)
    )
    assert step.is_dir() and Path("runs/it's/report.html").exists()
    # within the step, before the optimizer's; when it has done it; and in the midst of saving
    for number, where, done in (
        (signal.SIGTERM, (0, last, "clip_and_step"), 3),
        (signal.SIGINT, (0, last, "add_times"), 4),
        (signal.SIGTERM, (0, runlog.RunRecorder, "_save"), 7),  # of step 6
    ):
        status, said = stopped_by(number, again, *where)
        assert status == 128 + number and f"Step {done} of 8 is whole" in said, said
        (kept,) = Path("runs/it's/checkpoints").iterdir()
        assert kept.name == f"step-{done}"
    run(again)
    assert numbers("it's") == numbers("whole")


def test_one_that_is_stopped_before_its_first_step_says_so_and_leaves_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--steps", 2, "--name", "a", "--runs", "my runs"]
    said = "memagent: stopped. Before the end of the first step nothing is trained yet."
    for where in ((0, TransformersEngine, "__init__"), (0, runlog.RunRecorder, "on_fit_start")):
        twice = 1 if where[1] is TransformersEngine else 2

        def act(twice=twice):
            for _ in range(twice):
                signal.raise_signal(signal.SIGTERM)

        with doing(act, *where):
            process = forked(words, "said")
        process.join()
        assert process.exitcode == 143 and Path("said").read_text().endswith(f"{said}\n")
        assert not Path("my runs").exists()
    run([*words, "--save-every", 1])
    again = [*words[:1], "--resume", "--name", "a", "--runs", "my runs", "--steps", 5]
    status, said = stopped_by(signal.SIGINT, again, 0, TransformersEngine, "__init__")
    assert status == 130 and said.endswith(
        "memagent: stopped. Step 2 of 5 is whole in my runs/a/checkpoints/step-2; go on with: "
        + command_line("train", "--resume", "--name", "a", "--runs", "my runs")
    )


def test_the_second_signal_ends_a_step_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--steps", 3, "--save-every", 1, "--name", "a"]

    def act():
        if Path("runs/a/checkpoints/step-1").exists():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it goes on")

    with doing(act, 0, GRPO, "clip_and_step"):
        process = forked(words, "said")
    process.join()
    said = Path("said").read_text()
    assert process.exitcode == 130, said
    assert "Step 1 of 3 is whole" in said and "goes on" not in said
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


@pytest.mark.parametrize("words", [SMALL, SMALL_SFT], ids=["train", "sft"])
def test_a_full_disk_leaves_the_last_checkpoint_and_says_where_it_is(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    words = [*words, "--steps", 4, "--save-every", 1, "--name"]
    run([*words, "whole"])
    kept = "Step {} of 4 is whole in runs/a/checkpoints/step-{}; go on with: "
    again = command_line(words[0], "--resume", "--name", "a")
    said = full([*words, "a"], 20_000, 1)  # the checkpoint
    assert said.startswith("memagent: runs/a/checkpoints/step-2 cannot be written (")
    assert said.endswith(f"). {kept.format(1, 1)}{again}")
    resume = [words[0], "--resume", "--name", "a"]
    said = full(resume, 500, 2)  # the table of the metrics
    assert said.endswith(f"File too large. {kept.format(2, 2)}{again}")
    said = full(resume, 20_000, 0, export, "_write_export")
    assert "File too large" in said and said.endswith(f"). {kept.format(4, 4)}{again}")
    run(resume)
    assert numbers("a") == numbers("whole")


def test_a_full_disk_before_the_first_step_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = full([*SMALL, "--steps", 2, "--name", "a"], 10, 0, runlog.RunRecorder, "on_fit_start")
    assert said.endswith("File too large. Before the end of the first step nothing is trained yet.")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (10_000, "s/rag.db cannot be used: disk I/O error"),
        (3_000, "make room and call"),
    ],
)
def test_a_stream_on_a_full_disk_goes_on_from_its_last_batch(tmp_path, monkeypatch, most, said):
    monkeypatch.chdir(tmp_path)
    words = "stream --engine rehearsed --epochs 2 --n 20 --batch 8 --arms rag --name".split()
    told = full([*words, "s"], most, 0, RehearsedEngine, "respond")
    assert said in told, told
    run([*words, "s"])
    run([*words, "whole"])
    assert Path("runs/s/rag.jsonl").read_bytes() == Path("runs/whole/rag.jsonl").read_bytes()


def test_an_evaluation_on_a_full_disk_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "eval --agents memagent --data world --lengths 2 --kinds one_fact --n 10 --name e".split()
    )
    said = full(words, 2_000, 0, TransformersEngine, "__init__")
    assert said.endswith("make room and call again, the rows so far are kept.")
    said = run(words)
    assert len(Path("runs/e/rows.jsonl").read_text().splitlines()) == 20


def test_an_evaluation_whose_page_alone_finds_no_room_says_what_is_safe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "eval --agents memagent --data world --lengths 2 --kinds one_fact --n 4 --name e".split()
    )
    run(words)
    rows = Path("runs/e/rows.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = Path("runs/e/report.html").stat().st_size - 200  # its times may have fewer digits
    assert most > max(
        path.stat().st_size for path in Path("runs/e").glob("*.*") if path.suffix != ".html"
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        said = run(words, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "memagent" in said and said.endswith(
        "File too large). All answers are in runs/e/rows.jsonl, summary.json beside; "
        "once that is mended, python cli.py report runs/e writes it."
    )
    assert Path("runs/e/rows.jsonl").read_bytes() == rows
    run(["report", "runs/e"])


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        ("demo --short", (0, train, "check_folder"), "A demo does not go on"),
        ("train --dry-run", (0, train, "check_folder"), "A dry run leaves nothing"),
        ("train --dry-run", (0, GRPO, "clip_and_step"), "A dry run leaves nothing"),
    ],
)
def test_a_demo_and_a_dry_run_that_are_stopped_say_how_to_begin_anew(
    tmp_path, monkeypatch, words, where, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status, told = stopped_by(signal.SIGINT, words.split(), *where)
    assert status == 130 and "Traceback" not in told, told
    assert told.endswith(f"memagent: stopped. {said}: the same command begins it anew.")
    assert not [*tmp_path.glob("memagent-*")]


# ---------------------------------------------------------------- a folder that is gone


@pytest.mark.parametrize(
    "where",
    [
        (2,),  # between steps
        (0, runlog.StepCSV, "log_metrics"),
        (0, runlog.TrajectoryWriter, "write"),
        (0, runlog.RunRecorder, "_save"),
        (0, train.TrainingPage, "_write"),
    ],
    ids=["between steps", "metrics", "trajectories", "checkpoint", "page"],
)
def test_a_folder_that_is_gone_ends_the_training_in_one_sentence(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)

    def remove():
        if any(Path("runs/a/checkpoints").glob("step-*")):
            Path("runs/a").rename("elsewhere")  # at once: TensorBoard's thread goes on to write

    with doing(remove, *where):
        process = forked([*SMALL, "--steps", 4, "--save-every", 1, "--name", "a"], "said")
    process.join()
    said = Path("said").read_text()
    assert process.exitcode == 2 and not Path("runs/a").exists(), said
    assert said.endswith(
        "\nmemagent: The folder runs/a is gone: bring it back and give --resume, or train anew.\n"
    )
    assert "Traceback" not in said and "could not be written" not in said
