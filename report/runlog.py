"""Write the folder of a training run, so that a run killed at any moment can be resumed.

runs/NAME/config.yaml            resolved settings; `--config` replays it
          metrics.csv            one line per training step; tensorboard/ beside it
          loggers/               what further loggers write (report/loggers.py)
          checkpoints/step-20/   trained weights and optimizer in shards, counters, and the
                                 position in trajectories.jsonl.gz
          validation.csv         score on the validation tasks at each checkpoint
          trajectories.jsonl.gz  every trajectory of training, one JSON object a line
          agent_state.json       what an agent with a state of its own began with
          trained_on.csv         the questions of a file that were trained on: digest, step,
                                 id; the export keeps the digests
          model/                 the export: loads with from_pretrained
          summary.json           of the training (`summary`), or of the evaluation (eval.py)
          report.html            report/page.py
          rows.jsonl             one line per question of an evaluation
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import fmean

import lightning
from lightning.pytorch.loggers.logger import Logger

from agents.find import STATE
from config import stops
from config.errors import UserError, clip
from config.files import replacing, sync
from config.foreign import read_json
from config.terminal import say
from memagent import Agent, Trajectory
from models import checkpoints, ranks
from report.folder import reading
from report.loggers import tagged
from report.records import record
from report.summary import write_text
from report.training import AMISS, whole_rows
from tasks import seen


class TrajectoryWriter:
    """Append to trajectories.jsonl.gz, in gzip members: it can be cut at any earlier `position`, in
    bytes, as it is at first. UserError: it is shorter."""

    def __init__(self, path: Path, position: int = 0):
        self.path, self.position = path, position
        with path.open("a+b") as file:
            if (size := file.seek(0, 2)) < position:
                raise UserError(
                    f"{path} has {size:,} bytes, its checkpoint {position:,}: it is torn. Put back "
                    "the whole file, or train anew under another --name."
                )
            file.truncate(position)

    def write(self, parts: Iterable[bytes]) -> None:
        """Append gzip members, each made by `packed`."""
        with self.path.open("ab") as file:
            file.writelines(parts)
            self.position = file.tell()


def packed(
    trajectories: Iterable[Trajectory], agent: Agent, step: int, temperature: float | None = None
) -> bytes:
    """Return trajectories as lines of trajectories.jsonl.gz (`records.record`), one gzip member."""
    records = (record(t, agent, step, temperature) for t in trajectories)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
    return gzip.compress(text.encode(), 5, mtime=0)


class StepCSV(Logger):
    """Log to metrics.csv: one line per step, flushed at once.

    On resume the lines past the checkpoint are dropped and written anew, and a last line that is
    torn is cut off. Lightning's own CSVLogger starts the file over when a run is resumed.
    UserError: the file is torn elsewhere.
    """

    name, version = "csv", 0

    def __init__(self, path: Path, resumed_at: int = 0):
        super().__init__()
        self.path, self.columns = path, None
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        whole, newline, torn = text.rpartition("\n")
        with reading(path):
            lines = csv.DictReader((whole + newline).splitlines())
            rows = [row for row in lines if int(row["step"]) < resumed_at]
            if damaged := [r["step"] for r in rows if None in r or None in r.values()]:
                raise ValueError(f"the line of step {damaged[0]} is torn")
        if torn:
            say(f"The last line of {path} was torn ({clip(torn, 40)}) and is cut off.", "red")
        with replacing(path) as temporary:
            temporary.touch()
            self._append(temporary, rows)

    def _append(self, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
        with path.open("a", newline="") as file:
            for row in rows:
                if self.columns is None:
                    self.columns = [*row]
                    csv.writer(file).writerow(row)
                # a run of an earlier version goes on with the columns that it has
                csv.DictWriter(file, self.columns, extrasaction="ignore").writerow(row)

    def log_hyperparams(self, *args, **kwargs) -> None:
        """They stand in config.yaml."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        # counts are whole numbers, but come as floats once they are summed over ranks
        row = {name: int(x) if x == x // 1 else x for name, x in metrics.items()}
        self._append(self.path, [row])


@dataclass(eq=False)
class RunRecorder(lightning.Callback):
    """Write the run's folder during training, and resume from its last checkpoint.

    Before the first step the last checkpoint is loaded, if there is one, and the files are cut back
    to it. After each step come the metrics, trajectories and questions; then, every `save_every`
    steps and after the last one, the validation and at last the checkpoint, since it relies on all
    files before it. A run that is asked to stop writes a checkpoint, too. Rank 0 writes everything
    but the weights.
    """

    folder: Path
    save_every: int
    keep_trajectories: int  # steps from one that is kept to the next; 0: none is kept
    steps: int  # of the whole run
    keep_checkpoints: int = 1  # beside the best one; 0: none is written
    dtype: str = "float32"
    begin: Callable[[], None] = lambda: None
    """called on rank 0 before the first step, once a checkpoint has been loaded without an error"""
    questions: bool = False  # whether to write `seen.TRAINED_ON`
    base: Mapping[str, str] = field(default_factory=dict)  # `checkpoints.base_fingerprints`

    def __post_init__(self):
        self.trained_on: dict[str, tuple[int, str]] = {}  # digest -> (first step, id)
        self.writer: TrajectoryWriter | None = None  # of rank 0

    def on_fit_start(self, trainer, module) -> None:
        position = self._load(module)
        if ranks.rank() == 0:
            # a killed run leaves them behind
            for unfinished in (self.folder / "checkpoints").glob(".step-*.tmp"):
                shutil.rmtree(unfinished)
            self.begin()
            self._keep_state(module)
            self._cut_back(position, module.done_steps)

    def on_train_start(self, trainer, module) -> None:
        stops.heed()  # Lightning has a handler of SIGTERM, which would end no step as a whole

    def _load(self, module) -> int:
        """Load the last checkpoint, if any; return its position in trajectories.jsonl.gz."""
        saved = checkpoints.checkpoints(self.folder)
        if not saved:
            if (path := self.folder / STATE).exists():
                with reading(path):
                    module.agent.load_state(read_json(path))
            return 0
        optimizer = module.optimizers().optimizer
        state = checkpoints.load_checkpoint(saved[max(saved)], module.model, optimizer, self.base)
        for name in module.counters:
            setattr(module, name, state[name])
        if state.get("agent") is not None:
            module.agent.load_state(state["agent"])
        return state["position"]

    def _keep_state(self, module) -> None:
        """Keep what the agent knew before the first step: a file of its own goes on with it, and
        would be ahead of a run that is resumed without a checkpoint."""
        path = self.folder / STATE
        if not path.exists() and (state := module.agent.state()) is not None:
            write_text(path, json.dumps(state))

    def _cut_back(self, position: int, done_steps: int) -> None:
        """Drop the contents of the files that belong to steps after the checkpoint."""
        self.writer = TrajectoryWriter(self.folder / "trajectories.jsonl.gz", position)
        earlier = [row for row in checkpoints.validations(self.folder) if row["step"] <= done_steps]
        if (path := self.folder / "validation.csv").exists():
            checkpoints.write_validations(path, earlier)
        self.trained_on = seen.trained_on(self.folder, before=done_steps)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        done = module.done_steps
        for logger in trainer.loggers:
            _tell(logger, module.metrics, done - 1)
        if self.keep_trajectories and (done - 1) % self.keep_trajectories == 0:
            self._write_trajectories(module)
        if self.questions:
            self._write_questions(module)
        due = done % self.save_every == 0 or done == self.steps
        if due and module.validation:
            self._validate(trainer, module)
        stop = int(ranks.all_reduce_max(stops.requested()))  # no rank goes on without the others
        if (due or stop) and self.keep_checkpoints:
            self._save(module)
        if stop:
            raise stops.Stopped(stop)

    def _write_trajectories(self, module) -> None:
        """Append the step's trajectories of all ranks, in the order of the ranks."""
        # the level of the step: the module may have gone on to the next
        temperature = module.temperature_at(int(module.metrics["level"]))
        trajectories = (t for group in module.groups for t in group.sampled)
        step = module.done_steps - 1
        parts = ranks.all_gather_object(packed(trajectories, module.agent, step, temperature))
        if self.writer:
            self.writer.write(parts)

    def _write_questions(self, module) -> None:
        questions = seen.questions_of(group.task for group in module.groups)
        by_rank = ranks.all_gather_object(questions)
        if self.writer:
            questions = chain.from_iterable(by_rank)
            seen.add_trained_on(self.folder, self.trained_on, module.done_steps - 1, questions)

    def _validate(self, trainer, module) -> None:
        """Score the validation tasks on all ranks, and log the score to all but metrics.csv."""
        score, done = module.validate(), module.done_steps
        if ranks.rank() == 0:
            rows = [*checkpoints.validations(self.folder), {"step": done} | score]
            checkpoints.write_validations(self.folder / "validation.csv", rows)
            for logger in trainer.loggers:
                if not isinstance(logger, StepCSV):
                    _tell(logger, {"validation": score["score"]}, done - 1)

    def _save(self, module) -> None:
        """Save a checkpoint, then delete all but the last `keep_checkpoints` and the best one."""
        path = self.folder / "checkpoints" / f"step-{module.done_steps}"
        position = self.writer.position if self.writer else 0
        state = module.counters | {"position": position, "dtype": self.dtype, "base": self.base}
        if (known := module.agent.state()) is not None:
            state["agent"] = known
        if ranks.rank() == 0:
            # it relies on them; the mark is no such file, and would be given up
            for written in filter(Path.is_file, self.folder.glob("[!.]*")):
                sync(written)
        checkpoints.save_checkpoint(path, module.model, module.optimizers().optimizer, state)
        if ranks.rank() == 0:
            saved = checkpoints.checkpoints(self.folder)
            keep = {*sorted(saved)[-self.keep_checkpoints :], checkpoints.best_step(self.folder)}
            for number in set(saved) - keep:
                shutil.rmtree(saved[number], ignore_errors=True)


def _tell(logger: Logger, metrics: dict[str, float], step: int) -> None:
    logger.log_metrics(metrics if isinstance(logger, StepCSV) else tagged(metrics), step)


def gain(rewards: Sequence[float], each: int = 10) -> dict | None:
    """Compare the mean reward of the first `each` steps and of the last; None if these overlap.

    low, high: 95 % interval of the difference, Welch's over steps, whose tasks are drawn anew: of
    chance in the tasks and samples of one run, not of its seed.
    """
    from scipy.stats import ttest_ind

    if each < 2 or len(rewards) < 2 * each:
        return None
    first, last = rewards[:each], rewards[-each:]
    low = high = None
    if len({*first}) > 1 or len({*last}) > 1:  # else no spread at all: as of a toy
        ends = ttest_ind(last, first, equal_var=False).confidence_interval()
        low, high = map(float, ends)
    means = {"first": fmean(first), "last": fmean(last)}
    return {"steps": each, **means, "low": low, "high": high}


def summary(folder: Path, last: int = 10) -> dict:
    """Return the result of a training run, from its metrics.csv, as a summary without cells.

    reward, or of a warm start the loss: the mean of the last `last` steps that have one, None
    without any; gain: where the documents do not grow; the columns of `training.AMISS`: sums.
    """
    rows = whole_rows(folder / "metrics.csv")

    def total(name: str) -> float:
        return sum(float(row.get(name) or 0) for row in rows)

    name = "reward" if "reward" in rows[-1] else "loss"  # of demonstrations
    # a step may have no reward at all, and an update that is skipped may have no loss
    values = [value for row in rows if isfinite(value := float(row[name]))]
    found = {"unit": "sections", "cells": [], "steps": len(rows)}
    found[name] = fmean(values[-last:]) if values else None
    one_level = len({row.get("level") for row in [*rows[:last], *rows[-last:]]}) == 1
    if name == "reward" and one_level:
        found["gain"] = gain(values, min(last, len(values) // 2))
    found |= {name: n for name in AMISS if (n := int(total(name)))}
    tokens = int(total("read_tokens") + total("written_tokens"))
    return found | {"seconds": round(total("step_s"), 1), "tokens": tokens}
