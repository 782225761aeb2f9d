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


def following(words: str) -> str:
    """Run a command; return the words of the one in which it ends."""
    done = CliRunner().invoke(cli.app, shlex.split(words))
    assert done.exit_code == 0, done.output
    why, line = done.stderr.splitlines()[-2:]
    assert why.startswith("Next, ") and why.endswith(":")
    python, script, *rest = shlex.split(line)
    assert Path(python).name.startswith("python") and script == "cli.py"
    return shlex.join(rest)


def test_commands_end_in_one_that_works(tmp_path, monkeypatch):
    """The names of files and folders need quotes."""
    monkeypatch.chdir(tmp_path)
    task = {"question": "Where is Anna?", "answer": "Lima", "context": "Anna reached Lima."}
    lines = (json.dumps(task | {"id": str(i)}) + "\n" for i in range(3))
    Path("my tasks.jsonl").write_text("".join(lines))
    small = "--steps 1 --tasks-per-step 2 --lengths 1 --chunk-tokens 30"
    runs = "--runs 'my runs'"
    dry = f"train --group-size 2 {small} --name d"
    monkeypatch.setattr(sys, "argv", ["cli.py", *dry.split(), "--dry-run"])
    evaluate = "eval --agents none --lengths 1 --n 2 --temperatures 0 --name e"
    for words, then in {
        "data look 'my tasks.jsonl'": "train --data 'my tasks.jsonl' --tasks-per-step 3",
        "data look world": "train",
        f"train --group-size 2 {small} --name a {runs}": f"eval --name a-eval --model "
        f"'my runs/a/model' {runs}",
        "show 'my runs/a' --n 1": "show 'my runs/a' --wrong",
        "export 'my runs/a' --out m": "eval --name a-eval --model m --runs 'my runs'",
        f"sft --name w {small} --agent full": "train --name w-grpo --model runs/w/model "
        "--agent full --preset demo",
        f"{dry} --dry-run": dry,
        evaluate: "show runs/e --wrong",
        "report runs/e": "show runs/e",
    }.items():
        assert following(words) == then


@pytest.mark.parametrize(("run", "config", "left", "then"), [
    ({}, GRPOConfig(), "model", "eval --name a-eval --model a/model"),
    ({"data": "ledger"}, GRPOConfig(), "model",
     "eval --name a-eval --model a/model --data ledger"),
    ({"data": "d", "validation": "v", "agent": "rememr1"}, GRPOConfig(), "model",
     "eval --name a-eval --model a/model --data v --agents rememr1,full"),
    ({"data": "d"}, GRPOConfig(), "model", "show a"),
    ({"keep_checkpoints": 0}, SFTConfig(), "model", "show a"),
    ({}, SFTConfig(), "model", "train --name a-grpo --model a/model --preset demo"),
    # adapters are trained on as such, and a real model at a rate of its own
    ({"model": "tiny"}, SFTConfig(), "adapter",
     "train --name a-grpo --model a/adapter --preset demo"),
    ({"model": "m"}, SFTConfig(), "model", "train --name a-grpo --model a/model --lr 1e-06"),
    ({"model": "m"}, SFTConfig(), "adapter", "train --name a-grpo --model a/adapter --lr 2e-05"),
])  # fmt: skip
def test_a_training_ends_in_what_fits_its_model(
    run, config, left, then, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("a", left).mkdir(parents=True)
    settings = RunConfig(name="a", **run)
    train._next(settings, config, find.make(settings.agent, {}), Path("a"))
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])[2:]
    assert shlex.join(words) == then


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
