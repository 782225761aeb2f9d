"""Training with experiences: a few steps of GRPO, from the command line to the bank's file."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from statistics import fmean

import pytest
from conftest import Stop, stop_at
from hashes import HASHES
from test_train import assert_same, model, outcome, varied_reward  # noqa: F401
from typer.testing import CliRunner

import cli
import grpo
from agents import find
from agents.bank import Bank, BankConfig
from agents.memrl import REFLECT, SCRIPT, SHOWN
from commands import train
from config.options import GRPOConfig, RunConfig
from engines.open import give_embedder

STEPS, TASKS, MEMBERS = 2, 2, 2
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


@pytest.fixture
def watched(model, tmp_path, monkeypatch):  # noqa: F811
    """What a training has asked of its bank, in order; the groups of every step with the rows that
    are trained on; and the bank's file."""
    calls, steps, real = [], [], grpo.training_rows

    def counted(name, real):
        return lambda self, *args, **kwargs: calls.append(name) or real(self, *args, **kwargs)

    def recorded(groups, *rest):
        steps.append((groups, real(groups, *rest)))
        return steps[-1][1]

    for name in ("retrieve", "feedback", "write"):
        monkeypatch.setattr(Bank, name, counted(name, getattr(Bank, name)))
    monkeypatch.setattr(grpo, "training_rows", recorded)
    train.train(*settings(model, tmp_path, "r"), learner(tmp_path / "bank.db"))
    return calls, steps, tmp_path / "bank.db"


def test_a_group_retrieves_once_feeds_back_once_and_leaves_one_entry(watched):
    calls, steps, path = watched
    # both groups of a step retrieve before either teaches anything
    assert calls == STEPS * [*TASKS * ["retrieve"], *TASKS * ["feedback", "write"]]
    entries, events, _ = content(path)
    groups = [group for step, _ in steps for group in step]
    assert [entry.task_id for entry in entries] == [group.task.id for group in groups]
    # what a group was shown, all of it, has learnt its mean
    expected = Counter()
    for group in groups:
        tried = [trajectory.turns[-1].notes for trajectory in group.trajectories]
        shown = [[each["id"] for each in one.shown] for one in tried]
        assert len(tried) == MEMBERS and shown.count(shown[0]) == MEMBERS
        reward = fmean(1.0 if one.success else -1.0 for one in tried)
        expected.update((group.task.id, id, reward) for id in shown[0])
    assert Counter((event[1], event[2], event[6]) for event in events) == expected
    assert sum(expected.values()) >= 2 * (STEPS - 1) * TASKS  # two or more a group


def test_what_was_retrieved_is_read_and_never_trained_on(watched):
    with_block = 0
    for groups, rows in watched[1]:
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        acted = [turn for turn in turns if turn.prompt.trained]
        lessons = [turn for turn in turns if not turn.prompt.trained]
        assert all(turn.prompt.text.startswith((SCRIPT[:40], REFLECT[:40])) for turn in lessons)
        assert len(lessons) == TASKS * MEMBERS
        trained = [(row.prompt_ids, row.response_ids) for row in rows]
        assert trained == [(turn.prompt_ids, turn.response_ids) for turn in acted]
        with_block += sum(turn.prompt.text.startswith(SHOWN) for turn in acted)
        assert not any(SHOWN in turn.response for turn in acted)
        assert all(
            t.answer and t.turns[-1] in lessons for group in groups for t in group.trajectories
        )
    assert with_block == (STEPS - 1) * len(acted)  # every prompt, but those of an empty bank


def test_a_resumed_run_has_the_bank_of_one_that_was_never_stopped(model, tmp_path):  # noqa: F811
    """Stopped before its first checkpoint, at it, and where the bank's file is ahead of it."""

    def trained(name, *rest, resume=False):
        path = tmp_path / f"{name}.db"
        run, config = settings(model, tmp_path, name, save_every=2)
        config = replace(config, steps=3)
        return train.train(run, config, learner(path), resume, rest), content(path)

    def begun(name):  # what the bank knew before
        with closing(Bank(tmp_path / f"{name}.db", BankConfig())) as bank:
            bank.write("Where is Anna?", "It stood in the last section.", success=True, task_id="x")

    begun("whole")
    folder, bank = trained("whole")
    begun("parts")
    for step in (1, 2):
        with pytest.raises(Stop):
            trained("parts", stop_at(step), resume=step > 1)
    parts, again = trained("parts", resume=True)
    assert again == bank and len(bank[0]) == 1 + 3 * TASKS
    assert_same(outcome(parts), outcome(folder))


def test_a_model_is_evaluated_with_the_bank_of_its_training_and_writes_nothing(
    model, tmp_path  # noqa: F811
):  # fmt: skip
    """Its answers are graded, though a lesson may follow them; the file may have gone on since."""
    path, given = tmp_path / "r.db", {"retrieve": "dense", "embedder": HASHES}
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
