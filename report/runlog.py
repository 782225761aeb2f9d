"""Run folders: what a run leaves behind, written so that a run killed at any moment can go on from its last checkpoint.

Holds: `Writer` (trajectories.jsonl.gz), `StepCSV` (metrics.csv), `Keeper` (all of them and the
checkpoints), `save_checkpoint`, `load_checkpoint`, `best_step`, `summary`.
Leaves out: what is trained (grpo.py), what is measured (eval.py).
Exercise it: `python cli.py train --help`. Read next: cli.py.

    runs/NAME/config.yaml          resolved settings; `--config` replays it
              metrics.csv          one line per training step; tensorboard/ beside it
              checkpoints/step-20/  trained weights and optimizer in shards, counters, position in the file beside it
              validation.csv       score on the validation tasks at each checkpoint
              trajectories.jsonl.gz  every trajectory of training, one JSON object a line
              trained_on.csv       the questions of a file that were trained on: digest, step, id; the export keeps the digests
              model/               the export: loads with from_pretrained
              summary.json, report.html   of the training (`summary`), or of the evaluation (eval.py, report/page.py)
              rows.jsonl           one line per question of an evaluation
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import lightning
from lightning.pytorch.loggers.logger import Logger

from config.files import replacing
from memagent import Trajectory
from models import ranks
from models.checkpoints import (
    best_step,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
    validations,
    write_validations,
)
from report.records import record
from tasks import seen


class Writer:
    """trajectories.jsonl.gz: each call of `write` appends gzip members, so that the file can be cut at any earlier `position`."""

    def __init__(self, path: Path, position: int = 0):
        self.path = path
        with path.open("ab") as file:
            self.position = min(
                position, file.seek(0, 2)
            )  # shorter, if somebody has cut it: it is not filled up
            file.truncate(self.position)

    def write(self, parts: Iterable[bytes]) -> None:
        """What `packed` gives, one part after the other."""
        with self.path.open("ab") as file:
            file.writelines(parts)
            self.position = file.tell()


def packed(
    trajectories: Iterable[Trajectory], step: int, form: str = "", temperature: float | None = None
) -> bytes:
    """Lines of trajectories.jsonl.gz (`rollout.record`) as one gzip member, so that such members can be joined and cut."""
    text = "".join(
        json.dumps(record(t, step, form, temperature), ensure_ascii=False) + "\n"
        for t in trajectories
    )
    return gzip.compress(text.encode(), 5, mtime=0)


class StepCSV(Logger):
    """metrics.csv: one line per step, flushed at once; on resume the lines past the checkpoint are dropped and written anew.

    Lightning's own CSVLogger starts the file over when a run is resumed.
    """

    def __init__(self, path: Path, resumed_at: int = 0):
        super().__init__()
        self.path, self.columns = path, None
        if path.exists():
            with path.open(newline="") as file:
                kept = [
                    row
                    for row in csv.DictReader(file)
                    if row.get("step", "").isdigit() and int(row["step"]) < resumed_at
                ]
            with replacing(path) as temporary, temporary.open("w", newline="") as file:
                if kept:
                    self.columns = list(kept[0])
                    writer = csv.DictWriter(file, self.columns)
                    writer.writeheader()
                    writer.writerows(kept)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params, *args, **kwargs) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        metrics = {
            name: int(x) if x == x // 1 else x for name, x in metrics.items()
        }  # counts are whole, summed over ranks too
        with self.path.open("a", newline="") as file:
            if self.columns is None:
                self.columns = list(metrics)
                csv.DictWriter(file, self.columns).writeheader()
            csv.DictWriter(file, self.columns).writerow(metrics)


class Keeper(lightning.Callback):
    """After each step: metrics to the loggers, trajectories to their file, now and then a validation and a checkpoint; the last step always
    gets both. Before the first step, the last checkpoint is loaded if there is one. With
    keep_checkpoints = 0 none is written.

    A checkpoint is written after everything it counts on. Rank 0 writes what is not the weights.
    """

    def __init__(
        self,
        folder: Path,
        save_every: int,
        keep_trajectories: int,
        steps: int,
        keep_checkpoints: int = 1,
        dtype: str = "float32",
        begin=lambda: None,
        questions: bool = False,
    ):
        """questions: whether those that are trained on are remembered (`data.TRAINED_ON`)."""
        self.folder, self.save_every, self.keep_trajectories, self.steps = (
            folder,
            save_every,
            keep_trajectories,
            steps,
        )
        self.keep_checkpoints, self.dtype, self.begin = keep_checkpoints, dtype, begin
        self.questions, self.asked = questions, {}  # digest -> (first step, id)
        self.writer: Writer | None = None

    def on_fit_start(self, trainer, module) -> None:
        position = 0
        if saved := checkpoints(self.folder):
            state = load_checkpoint(saved[max(saved)], module.model, module.optimizers().optimizer)
            position = state["position"]
            for name in module.counters:
                setattr(module, name, state[name])
        if ranks.rank() == 0:
            for left in (self.folder / "checkpoints").glob(
                ".step-*.tmp"
            ):  # of a run that was killed
                shutil.rmtree(left)
            self.begin()
            self.writer = Writer(self.folder / "trajectories.jsonl.gz", position)
            keep = [row for row in validations(self.folder) if row["step"] <= module.done_steps]
            if (path := self.folder / "validation.csv").exists():
                write_validations(path, keep)
            self.asked = seen.trained_on(self.folder, before=module.done_steps)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        step = module.done_steps
        for logger in trainer.loggers:
            logger.log_metrics(module.metrics, step - 1)
        if self.keep_trajectories and (step - 1) % self.keep_trajectories == 0:
            level = int(
                module.metrics["level"]
            )  # of the step; the module may have gone on to the next
            temperature = module.config.temperature[min(level, len(module.config.temperature) - 1)]
            trajectories = (t for group in module.groups for t in group.trajectories)
            parts = ranks.all_gather_object(
                packed(trajectories, step - 1, module.agent_config.form, temperature)
            )
            if self.writer:
                self.writer.write(parts)
        if self.questions:
            asked = ranks.all_gather_object(
                [(group.task.question_digest, group.task.id) for group in module.groups]
            )
            self.remember((question for of_rank in asked for question in of_rank), step - 1)
        if step % self.save_every == 0 or step == self.steps:
            if module.validation:
                score = module.validate()
                if ranks.rank() == 0:
                    write_validations(
                        self.folder / "validation.csv",
                        [*validations(self.folder), {"step": step} | score],
                    )
                    for logger in trainer.loggers:
                        if not isinstance(logger, StepCSV):
                            logger.log_metrics({"validation": score["score"]}, step - 1)
            if self.keep_checkpoints:
                self.save(module)

    def remember(self, questions: Iterable[tuple[str, str]], step: int) -> None:
        """Keep the questions (digest, id) of a step that are new; on rank 0."""
        new = {digest: (step, name) for digest, name in questions if digest not in self.asked}
        if new and self.writer:
            self.asked |= new
            seen.write_trained_on(
                self.folder, ((digest, *known) for digest, known in self.asked.items())
            )

    def save(self, module) -> None:
        step = module.done_steps
        path = self.folder / "checkpoints" / f"step-{step}"
        state = module.counters | {
            "position": self.writer.position if self.writer else 0,
            "dtype": self.dtype,
        }
        save_checkpoint(path, module.model, module.optimizers().optimizer, state)
        if ranks.rank() == 0:
            saved = checkpoints(self.folder)
            keep = {*sorted(saved)[-self.keep_checkpoints :], best_step(self.folder)}
            for number in set(saved) - keep:
                shutil.rmtree(saved[number], ignore_errors=True)


def summary(folder: Path, last: int = 10) -> dict:
    """What a training came to, from its metrics.csv; with the keys of an evaluation's summary, empty, so that the report takes it."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def total(name: str) -> float:
        return sum(float(row[name]) for row in rows)

    return {
        "unit": "sections",
        "cells": [],
        "steps": len(rows),
        "reward": sum(float(row["reward"]) for row in rows[-last:])
        / len(rows[-last:]),  # mean of the last steps
        "seconds": round(total("step_s"), 1),
        "tokens": int(total("read_tokens") + total("written_tokens")),
    }
