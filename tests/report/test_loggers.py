"""Lightning's own loggers, by dotted path, beside metrics.csv."""

import csv
from dataclasses import replace

import pytest
from conftest import Stop, random_policy, stop_at
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import train
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from embedded import tiny
from report.loggers import make_logger

GRPO = GRPOConfig(steps=4, tasks_per_step=(2,), group_size=2, lr=1e-2, warmup=2)
LOGGERS = "lightning.pytorch.loggers"


def test_lightnings_own_loggers_are_told_every_step_and_validation(codec, tmp_path):
    """A run that is resumed makes them anew, and tells them again what it repeats."""
    random_policy(codec).save_pretrained(tmp_path / "model")
    codec.tokenizer.save_pretrained(tmp_path / "model")
    run = RunConfig(
        model=str(tmp_path / "model"), lengths=(1,), save_every=2, validation="world",
        validation_n=1, runs=str(tmp_path), name="own", keep_trajectories=0,
        logger=(f"{LOGGERS}.CSVLogger", f"{LOGGERS}.TensorBoardLogger"),
    )  # fmt: skip
    agent = tiny.agent(memory_tokens=4, final_tokens=4)
    with pytest.raises(Stop):
        train.train(run, GRPO, agent, callbacks=[stop_at(3)])
    folder = train.train(run, replace(GRPO, steps=4), agent, resume=True)
    rows = []
    for file in sorted((folder / "loggers/own").glob("version_*/metrics.csv")):
        rows += csv.DictReader(file.open(newline=""))
    told = [(int(r["step"]), float(r["train/reward"])) for r in rows if r["train/reward"]]
    with (folder / "metrics.csv").open(newline="") as file:
        written = [(int(row["step"]), float(row["reward"])) for row in csv.DictReader(file)]
    assert [step for step, _ in told] == [0, 1, 2, 2, 3] and {*told} == {*written}
    assert [int(r["step"]) for r in rows if r["train/validation"]] == [1, 3]
    points = []
    for events in sorted((folder / "loggers/own").glob("version_*/events*")):
        points += EventAccumulator(str(events)).Reload().Scalars("train/reward")
    assert [(p.step, p.value) for p in points] == [(n, pytest.approx(r)) for n, r in told]


def test_no_address_of_a_server_is_told(tmp_path):
    settings = {"agent.embedder": "openai:https://user:key@host/v1#name", "grpo.lr": 1e-3}
    logger = make_logger(f"{LOGGERS}.CSVLogger", tmp_path / "run", settings)
    assert logger.experiment.hparams == {"agent.embedder": "openai:#name", "grpo.lr": 1e-3}
    assert (logger.root_dir, logger.name) == (str(tmp_path / "run/loggers/run"), "run")


@pytest.mark.parametrize("place", [
    "nowhere.to.be.Found", f"{LOGGERS}.Nope", "CSVLogger", f"{LOGGERS}.CometLogger",
    "collections.Counter", f"{__file__}:GRPO", "tests/report/test_loggers.py:CSVLogger",
])  # fmt: skip
def test_a_logger_that_is_none_is_refused(tmp_path, place):
    with pytest.raises(UserError):
        make_logger(place, tmp_path, {})
    assert [*tmp_path.iterdir()] == []
