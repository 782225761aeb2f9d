"""Lightning's own loggers, by dotted path, beside metrics.csv."""

import csv

import pytest
from conftest import random_policy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import train
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from embedded import tiny
from report.loggers import make_logger

GRPO = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2, lr=1e-2, warmup=2)
LOGGERS = "lightning.pytorch.loggers"


def test_lightnings_own_loggers_are_told_every_step_and_validation(codec, tmp_path):
    random_policy(codec).save_pretrained(tmp_path / "model")
    codec.tokenizer.save_pretrained(tmp_path / "model")
    run = RunConfig(
        model=str(tmp_path / "model"), lengths=(1,), validation="world", validation_n=1,
        runs=str(tmp_path), name="own", keep_trajectories=0,
        logger=(f"{LOGGERS}.CSVLogger", f"{LOGGERS}.TensorBoardLogger"),
    )  # fmt: skip
    folder = train.train(run, GRPO, tiny.agent(memory_tokens=4, final_tokens=4))
    with (folder / "metrics.csv").open(newline="") as file:
        (written,) = csv.DictReader(file)
    (path,) = (folder / "loggers/own").glob("version_*/metrics.csv")
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    told = [(row["step"], float(row["train/reward"])) for row in rows if row["train/reward"]]
    assert told == [(written["step"], float(written["reward"]))]
    assert [row["step"] for row in rows if row["train/validation"]] == ["0"]
    (events,) = (folder / "loggers/own").glob("version_*/events*")
    (point,) = EventAccumulator(str(events)).Reload().Scalars("train/reward")
    assert (point.step, point.value) == (0, pytest.approx(float(written["reward"])))


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
