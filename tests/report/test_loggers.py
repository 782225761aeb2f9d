"""Loggers of the user's: told every step once, whatever happens to the run or to them."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Stop, random_policy, stop_at
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import train
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from embedded import tiny
from report.loggers import Guarded, open_loggers

GRPO = GRPOConfig(steps=7, tasks_per_step=(2,), group_size=2, lr=1e-2, warmup=2)
LOGGERS = "lightning.pytorch.loggers"
OWN = "loggers/Heard"  # its folder in a run's


class Heard(Logger):
    """Write what it is told into a file, and fail at the step in a file beside it."""

    def __init__(self, save_dir, name="none"):
        super().__init__()
        self.folder, self.called = Path(save_dir), name

    @property
    def name(self):
        return self.called

    @property
    def version(self):
        return 0

    def log_hyperparams(self, params):
        self._write({"settings": params})

    def log_metrics(self, metrics, step):
        fail = self.folder / "fail.json"
        if fail.exists() and step == json.loads(fail.read_text()):
            raise ConnectionError("the server is gone")
        self._write({"step": step} | metrics)

    def _write(self, record):
        with (self.folder / "heard.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory, codec):
    """Settings of a short run of a random policy."""
    folder = tmp_path_factory.mktemp("model")
    random_policy(codec).save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    own = dict(model=str(folder), lengths=(1,), save_every=3, validation="world", validation_n=1)
    return RunConfig(logger=("test_loggers.Heard",), **own)


def go(run, resume=False, steps=7, stop=0):
    agent = tiny.agent(memory_tokens=4, final_tokens=4)
    stops = [stop_at(stop)] if stop else []
    return train.train(run, replace(GRPO, steps=steps), agent, resume, stops)


def heard(folder, name="train/reward"):
    """Return (step, value) of everything told under a name, in order."""
    lines = (folder / OWN / "heard.jsonl").read_text().splitlines()
    return [(m["step"], m[name]) for m in map(json.loads, lines) if name in m and "step" in m]


def written(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["reward"])) for row in csv.DictReader(file)]


def test_every_step_is_told_once_though_the_run_is_killed_and_resumed(run, tmp_path):
    run = replace(run, runs=str(tmp_path), name="killed")
    for stop in (2, 4, 5):  # the steps after the checkpoint at 3 are made three times
        with pytest.raises(Stop):
            go(run, resume=stop > 2, stop=stop)
    folder = go(run, resume=True)
    assert [step for step, _ in written(folder)] == [*range(7)]
    assert heard(folder) == written(folder)
    assert [step for step, _ in heard(folder, "train/validation")] == [2, 5, 6]


def test_a_logger_that_fails_is_left_out_and_one_that_comes_later_is_told_all(
    run, tmp_path, capsys
):
    run = replace(run, runs=str(tmp_path), name="failing", save_every=2)
    go(replace(run, logger=()), steps=2)
    folder = tmp_path / "failing"
    (folder / OWN).mkdir(parents=True)
    (folder / OWN / "fail.json").write_text("3")
    go(run, resume=True, steps=5)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("has failed") == 1 and "ConnectionError: the server is gone" in printed
    assert len(written(folder)) == 5 and [step for step, _ in heard(folder)] == [0, 1, 2]
    (folder / OWN / "fail.json").unlink()
    go(run, resume=True, steps=6)  # the step at which it failed is lost, no other
    assert [step for step, _ in heard(folder)] == [0, 1, 2, 4, 5]


def test_lightnings_own_loggers(run, tmp_path):
    names = f"{LOGGERS}.CSVLogger", f"{LOGGERS}.TensorBoardLogger"
    run = replace(run, runs=str(tmp_path), name="own", logger=names)
    with pytest.raises(Stop):
        go(run, steps=4, stop=2)
    folder = go(run, resume=True, steps=4)
    rows = []
    for file in sorted((folder / "loggers/CSVLogger/own").glob("version_*/metrics.csv")):
        rows += csv.DictReader(file.open(newline=""))
    told = [(int(r["step"]), float(r["train/reward"])) for r in rows if r["train/reward"]]
    assert told == written(folder)
    points = []
    for events in sorted((folder / "loggers/TensorBoardLogger/own").glob("version_*/events*")):
        points += EventAccumulator(str(events)).Reload().Scalars("train/reward")
    assert [p.step for p in points] == [*range(4)]
    assert [p.value for p in points] == pytest.approx([value for _, value in told])


def test_no_address_of_a_server_is_told(tmp_path):
    settings = {"agent.embedder": "openai:https://user:key@host/v1#name", "grpo.lr": 1e-3}
    (logger,) = open_loggers(["test_loggers.Heard"], tmp_path, settings)
    (told,) = map(json.loads, (tmp_path / OWN / "heard.jsonl").read_text().splitlines())
    assert told == {"settings": {"agent.embedder": "openai:#name", "grpo.lr": 1e-3}}
    assert logger.inner.called == tmp_path.name


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\n\nclass Mine(CSVLogger): ...\n"
    )
    assert isinstance(Guarded(f"{tmp_path}/mine.py:Mine", tmp_path).inner, CSVLogger)


@pytest.mark.parametrize("place", [
    "nowhere.to.be.Found", f"{LOGGERS}.Nope", "CSVLogger", f"{LOGGERS}.CometLogger",
    "collections.Counter", f"{__file__}:Nothing",
])  # fmt: skip
def test_a_logger_that_is_none_is_refused(tmp_path, place):
    with pytest.raises(UserError):
        open_loggers([place], tmp_path, {})
    assert [*tmp_path.iterdir()] == []
