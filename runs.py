"""Run folders: what a run leaves behind, written so that a run killed at any moment can go on from its last checkpoint.

Holds: `record` (a trajectory as plain data), `Writer` (trajectories.jsonl.gz), `StepCSV` (metrics.csv), `Keeper` (all of them and the
checkpoints), `read_checkpoint`, `summary`.
Leaves out: what is trained (grpo.py), what is measured (eval.py).
Exercise it: `python cli.py train --help`. Read next: cli.py.

    runs/NAME/config.yaml          resolved settings; `--config` replays it
              metrics.csv          one line per training step; tensorboard/ beside it
              checkpoints/last.ckpt  weights, optimizer, counters, positions in the files beside it
              trajectories.jsonl.gz  every trajectory of training, one JSON object a line
              model/               the export: loads with from_pretrained
              summary.json, report.html   of the training (`summary`), or of the evaluation (eval.py, report.py)
              rows.jsonl           one line per question of an evaluation
"""

from __future__ import annotations

import csv
import gzip
import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers.logger import Logger

from memagent import Trajectory
from text import UserError


def record(trajectory: Trajectory, step: int | None = None) -> dict:
    """A trajectory as JSON-able data: what `show` prints, the report quotes, and a replay of the loss needs."""
    task = trajectory.task
    return {
        "id": task.id,
        "step": step,
        "sample": trajectory.sample,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 4),
        "turns": [
            {
                "final": turn.prompt.final,
                "section": turn.prompt.section,
                "memory": turn.prompt.memory,
                "response": str(turn.response),
                "finish": str(turn.finish),
                "prompt_ids": turn.prompt_ids,
                "response_ids": turn.response_ids,
                "logprobs": [round(x, 7) for x in turn.logprobs],
            }
            for turn in trajectory.turns
        ],
    }


class Writer:
    """trajectories.jsonl.gz: each call of `write` appends one gzip member, so that the file can be cut at any earlier `position`."""

    def __init__(self, path: Path, position: int = 0):
        self.path = path
        with path.open("ab") as file:
            file.truncate(position)
        self.position = position

    def write(self, trajectories: Iterable[Trajectory], step: int) -> None:
        text = "".join(json.dumps(record(t, step), ensure_ascii=False) + "\n" for t in trajectories)
        with self.path.open("ab") as file:
            file.write(gzip.compress(text.encode(), 5, mtime=0))
            self.position = file.tell()


class StepCSV(Logger):
    """metrics.csv: one line per step, flushed at once; on resume the lines past the checkpoint are dropped and written anew.

    Lightning's own CSVLogger starts the file over when a run is resumed.
    """

    def __init__(self, path: Path, resumed_at: int = 0):
        super().__init__()
        self.path, self.columns = path, None
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if row.get("step", "").isdigit() and int(row["step"]) < resumed_at]
            temporary = path.with_suffix(".tmp")
            with temporary.open("w", newline="") as file:
                if kept:
                    self.columns = list(kept[0])
                    writer = csv.DictWriter(file, self.columns)
                    writer.writeheader()
                    writer.writerows(kept)
            temporary.replace(path)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params, *args, **kwargs) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a", newline="") as file:
            if self.columns is None:
                self.columns = list(metrics)
                csv.DictWriter(file, self.columns).writeheader()
            csv.DictWriter(file, self.columns).writerow(metrics)


class Keeper(lightning.Callback):
    """After each step: metrics to the loggers, trajectories to their file, now and then a checkpoint; the last step always gets one.

    The checkpoint is written to a temporary file and renamed, after everything it counts on has been written.
    """

    def __init__(self, folder: Path, save_every: int, keep_trajectories: int, steps: int):
        self.last = folder / "checkpoints" / "last.ckpt"
        self.trajectories = folder / "trajectories.jsonl.gz"
        self.save_every, self.keep_trajectories, self.steps = save_every, keep_trajectories, steps
        self.writer: Writer | None = None
        self._position = 0

    def on_fit_start(self, trainer, module) -> None:
        self.last.parent.mkdir(exist_ok=True)

    def on_train_start(self, trainer, module) -> None:
        self.writer = Writer(self.trajectories, self._position)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        step = module.done_steps
        for logger in trainer.loggers:
            logger.log_metrics(module.metrics, step - 1)
        if self.keep_trajectories and (step - 1) % self.keep_trajectories == 0:
            self.writer.write((t for group in module.groups for t in group.trajectories), step - 1)
        if step % self.save_every == 0 or step == self.steps:
            self.save(trainer)

    def save(self, trainer) -> None:
        temporary = self.last.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
        except (OSError, RuntimeError) as error:  # torch says with a RuntimeError that the disk is full
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{self.last} cannot be written, the one before it is kept; --resume when it can: {reason}") from error
        temporary.replace(self.last)

    def state_dict(self) -> dict:
        return {"position": self.writer.position if self.writer else 0}

    def load_state_dict(self, state: dict) -> None:
        self._position = state["position"]

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        # The module counts its steps itself. Lightning's own counters say after the last step that its loop is at its end: with them a
        # finished run could not be given more steps.
        checkpoint.pop("loops", None)


def read_checkpoint(path: Path, module: lightning.LightningModule) -> int:
    """The weights of a checkpoint into the module; returns how many steps were done. UserError if it is damaged or another model's."""
    try:
        state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        if set(state["state_dict"]) != module.saved:
            raise ValueError(f"its weights have other names, such as {min(set(state['state_dict']) ^ module.saved)}")
        module.load_state_dict(state["state_dict"], strict=False)
        return int(state["memagent"]["done_steps"])
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0] or "it is empty"
        raise UserError(f"{path} is damaged or is no checkpoint of this model, give another --name: {reason}") from error


def summary(folder: Path, last: int = 10) -> dict:
    """What a training came to, from its metrics.csv; with the keys of an evaluation's summary, empty, so that the report takes it."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def total(name: str) -> float:
        return sum(float(row[name]) for row in rows)

    return {
        "unit": "sections", "accuracy": {}, "metrics": {}, "steps": len(rows),
        "reward": sum(float(row["reward"]) for row in rows[-last:]) / len(rows[-last:]),  # mean of the last steps
        "seconds": round(total("step_s"), 1), "tokens": int(total("read_tokens") + total("written_tokens")),
    }  # fmt: skip
