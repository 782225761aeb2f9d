"""Training with experiences: a few steps of GRPO, from the command line to the bank's file."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
from conftest import Stop, stop_at
from test_train import assert_same, model, outcome, varied_reward  # noqa: F401
from typer.testing import CliRunner

import cli
from agents import find
from agents.bank import Bank, BankConfig
from commands import train
from config.options import GRPOConfig, RunConfig
from engines.open import give_embedder

STEPS, TASKS, MEMBERS = 3, 2, 3
READING = dict(chunk_tokens=24, memory_tokens=6, final_tokens=6, lesson_tokens=4, delta=0.0)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Leave the page out: its plots take longer than the steps."""
    monkeypatch.setattr("report.page.write_report", lambda *_, **__: None)


def content(path) -> tuple:
    with closing(Bank(path, BankConfig(), frozen=True)) as bank:
        assert bank._value("PRAGMA integrity_check") == "ok"
        return bank.entries(), bank.events(), bank.digest


def learner(path=""):
    return find.make(find.learner().name, READING | {"bank": str(path)})


def settings(model, runs, name, **fields) -> tuple[RunConfig, GRPOConfig]:  # noqa: F811
    run = RunConfig(
        name=name, runs=str(runs), model=str(model), agent=find.learner().name, device="cpu",
        lengths=(1, 2), **fields,
    )  # fmt: skip
    own = dict(steps=STEPS, tasks_per_step=(TASKS,), group_size=MEMBERS, lr=1e-2, in_flight=4)
    return run, GRPOConfig(**own)


def test_a_resumed_run_has_the_bank_of_one_that_was_never_stopped(model, tmp_path):  # noqa: F811
    """Stopped before its first checkpoint, at it, and where the bank's file is ahead of it."""

    def trained(name, *rest, resume=False):
        path = tmp_path / f"{name}.db"
        run, config = settings(model, tmp_path, name, save_every=2)
        config = replace(config, steps=4)
        return train.train(run, config, learner(path), resume, rest), content(path)

    def begun(name):  # what the bank knew before
        with closing(Bank(tmp_path / f"{name}.db", BankConfig())) as bank:
            bank.write("Where is Anna?", "It stood in the last section.", success=True, task_id="x")

    begun("whole")
    folder, bank = trained("whole")
    begun("parts")
    for step in (1, 2, 3):
        with pytest.raises(Stop):
            trained("parts", stop_at(step), resume=step > 1)
    parts, again = trained("parts", resume=True)
    assert again == bank and len(bank[0]) == 1 + 4 * TASKS
    assert_same(outcome(parts), outcome(folder))


@pytest.mark.parametrize("retrieve", ["bm25", "dense"])
def test_a_model_is_evaluated_with_the_bank_of_its_training_and_writes_nothing(
    model, tmp_path, retrieve  # noqa: F811
):  # fmt: skip
    """Its answers are graded, though a lesson may follow them; the file may have gone on since."""
    path, given = tmp_path / "r.db", {"retrieve": retrieve, "embedder": "hash:64"}
    agent = find.make(find.learner().name, READING | given | {"bank": str(path)})
    give_embedder([agent])
    with closing(agent.opened()):
        folder = train.train(*settings(model, tmp_path, "r"), agent)
    path.write_bytes(b"gone on")
    words = f"--agents {find.learner().name} --data world --lengths 1 --kinds one_fact --n 4"
    words += " --temperatures 1"
    words = [*words.split(), "--model", folder / "model", "--runs", tmp_path, "--device", "cpu"]
    result = CliRunner().invoke(cli.app, ["eval", "--name", "e", *map(str, words)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "e" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and not any(row["error"] for row in rows)
    assert all(row["response"] and row["model_calls"] == 2 for row in rows)  # and no lesson
    assert all(row["counts"]["shown"] for row in rows)
    assert path.read_bytes() == b"gone on"
    words = [*words, "--name", "f", "--bank", tmp_path / "none.db"]
    (folder / "model" / find.STATE).unlink()
    result = CliRunner().invoke(cli.app, ["eval", *map(str, words)])
    assert result.exit_code == 2 and "There is no bank at" in " ".join(result.output.split())
    assert not (tmp_path / "none.db").exists()
