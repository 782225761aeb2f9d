"""The line in which every command ends: it can be pasted, and what it names is there."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from agents import find
from commands import train
from config import terminal
from config.options import GRPOConfig, RunConfig, SFTConfig
from report.training import WATCHED

TRAINED = "train --steps 2 --tasks-per-step 2 --group-size 2 --lengths 1 --chunk-tokens 30"


def run(words: str):
    result = CliRunner().invoke(cli.app, shlex.split(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def following(words: str) -> str:
    """Run a command; return the words of the one in which it ends."""
    why, line = run(words).stderr.splitlines()[-2:]
    assert why.startswith("Next, ") and why.endswith(":")
    python, script, *rest = shlex.split(line)
    assert Path(python).name.startswith("python") and script == "cli.py"
    return shlex.join(rest)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files of tasks, whose names need quotes."""
    monkeypatch.chdir(tmp_path)
    task = {"question": "Where is Anna?", "answer": "Lima", "context": "Anna reached Lima."}
    lines = (json.dumps(task | {"id": str(i)}) + "\n" for i in range(3))
    Path("my tasks.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "then"),
    [
        ("data look 'my tasks.jsonl'", "train --data 'my tasks.jsonl' --tasks-per-step 3"),
        ("data look world", "train"),
    ],
)  # fmt: skip
def test_a_command_ends_in_one_that_works(here, words, then):
    assert following(words) == then
    if not then.startswith("train"):
        run(then)


def test_a_training_ends_in_its_evaluation_or_in_what_helps_it(here, monkeypatch):
    runs = "--runs 'my runs'"
    assert following(f"{TRAINED} --name a {runs}") == (
        f"eval --name a-eval --model 'my runs/a/model' {runs}"
    )
    small = "--chunk-tokens 30 --tasks-per-step 2 --lengths 1 --agent full"
    assert following(f"sft --steps 1 --name w {small}") == (
        "train --name w-grpo --model runs/w/model --agent full --preset demo"
    )
    assert following("show 'my runs/a' --n 1").startswith("show 'my runs/a' --wrong")
    assert (
        following("export 'my runs/a' --out m") == "eval --name a-eval --model m --runs 'my runs'"
    )
    words = f"{TRAINED} --name d --dry-run"
    monkeypatch.setattr(sys, "argv", ["cli.py", *words.split()])
    assert following(words) == f"{TRAINED} --name d"


@pytest.mark.parametrize(
    ("run", "rank", "reward", "then"),
    [
        ({}, 0, 0, "sft --name a-warm"),
        ({"model": "m"}, 0, 0, "sft --name a-warm --model m --lr 1e-05"),
        ({"model": "m", "agent": "rememr1"}, 8, 0,
         "sft --name a-warm --model m --agent rememr1 --lora-rank 8"),
        ({}, 0, 0.5, "eval --name a-eval --model a/model"),
        ({"data": "ledger"}, 0, 0.5, "eval --name a-eval --model a/model --data ledger"),
        ({"data": "d", "validation": "v"}, 0, 1, "eval --name a-eval --model a/model --data v"),
        ({"keep_checkpoints": 0}, 0, 0, "show a"),
    ],
)  # fmt: skip
def test_what_follows_a_training_goes_by_what_it_learnt(run, rank, reward, then, here, capsys):
    """One whose answers were never right is warmed up; one without a policy is looked at."""
    Path("a").mkdir()
    head, row = "step,reward,groups_without_signal", f"{reward},{int(not reward)}"
    lines = (f"{k},{row}" for k in range(WATCHED))
    Path("a/metrics.csv").write_text("\n".join((head, *lines, "")))
    settings = RunConfig(name="a", **run)
    config = GRPOConfig(lora_rank=rank)
    train._next(settings, config, find.make(settings.agent, {}), Path("a"))
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])[2:]
    assert shlex.join(words) == then


@pytest.mark.parametrize(
    ("model", "left", "then"),
    [
        ("", "model", "--model a/model --preset demo"),
        ("tiny", "adapter", "--model a/adapter --preset demo"),
        ("m", "model", "--model a/model --lr 1e-06"),
        ("m", "adapter", "--model a/adapter --lr 2e-05"),
    ],
)
def test_a_warm_start_ends_in_a_training_that_fits_its_model(model, left, then, here, capsys):
    """Adapters are trained on as such, and a real model at a rate of its own."""
    Path("a", left).mkdir(parents=True)
    settings = RunConfig(name="a", model=model)
    train._next(settings, SFTConfig(), find.make(settings.agent, {}), Path("a"))
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])[2:]
    assert shlex.join(words) == f"train --name a-grpo {then}"


def test_a_command_is_that_of_this_python(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr(terminal.shutil, "which", lambda name: "/usr/bin/python")
    assert terminal.command_line("show", "a b") == ".venv/bin/python cli.py show 'a b'"
    monkeypatch.setattr(sys, "argv", ["/opt/memagent/cli.py"])
    monkeypatch.setattr(terminal.shutil, "which", lambda name: str(tmp_path / ".venv/bin/python"))
    assert terminal.command_line("show") == "python /opt/memagent/cli.py show"
    terminal.next_step("ask", "ask", "-", "Where?", given="It's here.")
    shown = capsys.readouterr()
    assert not shown.out  # which other programs may read
    line = """echo 'It'"'"'s here.' | python /opt/memagent/cli.py ask - 'Where?'"""
    assert shown.err == f"Next, ask:\n{line}\n"


def test_evaluations_comparisons_and_reports_end_in_what_was_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "eval --agents none --lengths 1 --n 2 --temperatures 0 --name"
    assert following(f"{small} e") == "show runs/e --wrong"
    run(f"{small} f")
    assert following("report runs/e runs/f") == "show runs/e"
    assert following("report runs/e") == "show runs/e"
