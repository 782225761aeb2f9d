"""Run folders: what a run leaves behind, written so that a run killed at any moment can go on from its last checkpoint.

Holds: `Writer` (trajectories.jsonl.gz), `StepCSV` (metrics.csv), `Keeper` (all of them and the
checkpoints), `save_checkpoint`, `load_checkpoint`, `best`, `summary`.
Leaves out: what is trained (grpo.py), what is measured (eval.py).
Exercise it: `python cli.py train --help`. Read next: cli.py.

    runs/NAME/config.yaml          resolved settings; `--config` replays it
              metrics.csv          one line per training step; tensorboard/ beside it
              checkpoints/step-20/  trained weights and optimizer in shards, counters, position in the file beside it
              validation.csv       score on the validation tasks at each checkpoint
              trajectories.jsonl.gz  every trajectory of training, one JSON object a line
              trained_on.csv       the questions of a file that were trained on: digest, step, id; the export keeps the digests
              model/               the export: loads with from_pretrained
              summary.json, report.html   of the training (`summary`), or of the evaluation (eval.py, report.py)
              rows.jsonl           one line per question of an evaluation
"""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers.logger import Logger

import data
import ranks
from memagent import Trajectory
from rollout import record
from text import UserError, replacing


class Writer:
    """trajectories.jsonl.gz: each call of `write` appends gzip members, so that the file can be cut at any earlier `position`."""

    def __init__(self, path: Path, position: int = 0):
        self.path = path
        with path.open("ab") as file:
            self.position = min(position, file.seek(0, 2))  # shorter, if somebody has cut it: it is not filled up
            file.truncate(self.position)

    def write(self, parts: Iterable[bytes]) -> None:
        """What `packed` gives, one part after the other."""
        with self.path.open("ab") as file:
            file.writelines(parts)
            self.position = file.tell()


def packed(trajectories: Iterable[Trajectory], step: int, form: str = "", temperature: float | None = None) -> bytes:
    """Lines of trajectories.jsonl.gz (`rollout.record`) as one gzip member, so that such members can be joined and cut."""
    text = "".join(json.dumps(record(t, step, form, temperature), ensure_ascii=False) + "\n" for t in trajectories)
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
                kept = [row for row in csv.DictReader(file) if row.get("step", "").isdigit() and int(row["step"]) < resumed_at]
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
        metrics = {name: int(x) if x == x // 1 else x for name, x in metrics.items()}  # counts are whole, summed over ranks too
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
        self, folder: Path, save_every: int, keep_trajectories: int, steps: int, keep_checkpoints: int = 1,
        dtype: str = "float32", begin=lambda: None, questions: bool = False,
    ):  # fmt: skip
        """questions: whether those that are trained on are remembered (`data.TRAINED_ON`)."""
        self.folder, self.save_every, self.keep_trajectories, self.steps = folder, save_every, keep_trajectories, steps
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
            for left in (self.folder / "checkpoints").glob(".step-*.tmp"):  # of a run that was killed
                shutil.rmtree(left)
            self.begin()
            self.writer = Writer(self.folder / "trajectories.jsonl.gz", position)
            keep = [row for row in validations(self.folder) if row["step"] <= module.done_steps]
            if (path := self.folder / "validation.csv").exists():
                _write_csv(path, keep)
            self.asked = data.trained_on(self.folder, before=module.done_steps)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        step = module.done_steps
        for logger in trainer.loggers:
            logger.log_metrics(module.metrics, step - 1)
        if self.keep_trajectories and (step - 1) % self.keep_trajectories == 0:
            level = int(module.metrics["level"])  # of the step; the module may have gone on to the next
            temperature = module.config.temperature[min(level, len(module.config.temperature) - 1)]
            trajectories = (t for group in module.groups for t in group.trajectories)
            parts = ranks.everywhere(packed(trajectories, step - 1, module.agent_config.form, temperature))
            if self.writer:
                self.writer.write(parts)
        if self.questions:
            asked = ranks.everywhere([(group.task.question_digest, group.task.id) for group in module.groups])
            self.remember((question for of_rank in asked for question in of_rank), step - 1)
        if step % self.save_every == 0 or step == self.steps:
            if module.validation:
                score = module.validate()
                if ranks.rank() == 0:
                    _write_csv(self.folder / "validation.csv", [*validations(self.folder), {"step": step} | score])
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
            data.write_trained_on(self.folder, ((digest, *known) for digest, known in self.asked.items()))

    def save(self, module) -> None:
        step = module.done_steps
        path = self.folder / "checkpoints" / f"step-{step}"
        state = module.counters | {"position": self.writer.position if self.writer else 0, "dtype": self.dtype}
        save_checkpoint(path, module.model, module.optimizers().optimizer, state)
        if ranks.rank() == 0:
            saved = checkpoints(self.folder)
            keep = {*sorted(saved)[-self.keep_checkpoints :], best(self.folder)}
            for number in set(saved) - keep:
                shutil.rmtree(saved[number], ignore_errors=True)


# ---------------------------------------------------------------- checkpoints


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run: steps done -> folder."""
    found = (folder / "checkpoints").glob("step-*")
    return {int(number): path for path in found if (number := path.name.removeprefix("step-")).isdigit()}


def done_steps(folder: Path) -> int:
    """Steps of the last checkpoint, 0 without one."""
    return max(checkpoints(folder), default=0)


def validations(folder: Path) -> list[dict]:
    """What was measured on the validation tasks: step, score, n."""
    path = folder / "validation.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{"step": int(row["step"]), "score": float(row["score"]), "n": int(row["n"])} for row in csv.DictReader(file)]


def _write_csv(path: Path, rows: list[dict]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "score", "n"])
        writer.writeheader()
        writer.writerows(rows)


def best(folder: Path) -> int | None:
    """The step with the best validation of those that there is a checkpoint of, the last of equals; None without any."""
    saved = checkpoints(folder)
    scores = [(row["score"], row["step"]) for row in validations(folder) if row["step"] in saved]
    return max(scores)[1] if scores else None


def _trained(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def base_mark(model) -> list[float]:
    """A few numbers that tell one set of frozen weights from another, in whatever type they are: [] if all are trained."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.ndim > 1 and p.is_floating_point()]
    return [ranks.whole(p)[:64].double().abs().mean().item() for p in frozen[:1] + frozen[-1:]]


def _alone(model) -> bool:
    """Whether this process has all weights itself, and reads or writes a checkpoint without the others."""
    return not any(hasattr(p, "full_tensor") for p in model.parameters())


def _optimizer_state(model, optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))


def save_checkpoint(path: Path, model, optimizer, state: dict) -> None:
    """A folder with the trained weights, the optimizer's state and `state`, plain numbers: whole or not at all. Each rank writes its
    shards; any number of ranks reads them. UserError, on all ranks, where it cannot be written."""
    import torch.distributed.checkpoint as dcp

    temporary, base = path.with_name(f".{path.name}.tmp"), base_mark(model)
    try:
        if ranks.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        ranks.barrier()
        state_dict = {"weights": _trained(model)}
        if optimizer.state:  # asked for earlier, the library would make a step to have one
            state_dict["optimizer"] = _optimizer_state(model, optimizer)
        dcp.save(state_dict, checkpoint_id=temporary, no_dist=_alone(model))
        if ranks.rank() == 0:
            (temporary / "state.json").write_text(json.dumps(state | {"base": base}), encoding="utf-8")
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:  # torch says with a RuntimeError that the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{path} cannot be written, the one before it is kept; --resume when it can: {_reason(error)}.") from error
    ranks.barrier()


def load_checkpoint(path: Path, model, optimizer=None) -> dict:
    """The weights, and the optimizer's state if one is given, into place; returns `state`. UserError if it is damaged or another model's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state = read_state(path)
    try:
        there = {name.removeprefix("weights.") for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata}
        weights = _trained(model)
        if other := {name for name in there if not name.startswith("optimizer.")} ^ set(weights):
            raise ValueError(f"its weights have other names, such as {min(other)}")
        was, now = state["base"], base_mark(model)
        if len(was) != len(now) or any(abs(a - b) > 0.02 * abs(a) for a, b in zip(was, now, strict=True)):
            raise ValueError("its adapters belong to other base weights")
        dcp.load({"weights": weights}, checkpoint_id=path, no_dist=_alone(model))
        if optimizer and len(there) > len(weights):
            moments = {"optimizer": _optimizer_state(model, optimizer)}
            dcp.load(moments, checkpoint_id=path, no_dist=_alone(model))
            set_optimizer_state_dict(model, optimizer, moments["optimizer"], options=StateDictOptions(ignore_frozen_params=True))
        return state
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError,
            dcp.CheckpointException) as error:  # fmt: skip
        raise UserError(f"{path} is damaged or is no checkpoint of this model, give another --name: {_reason(error)}.") from error


def read_state(path: Path) -> dict:
    """What a checkpoint holds beside weights and optimizer: counters, the trajectories' position, the type and a mark of the base weights."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not {"base", "dtype", "position", "done_steps"} <= state.keys():
            raise ValueError("state.json does not hold what it should")
        return state
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or is no checkpoint, give another --name: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    failures = getattr(error, "failures", None)  # of the ranks: rank -> (exception, trace)
    cause = next(iter(failures.values()))[0] if failures else error
    return str(cause).strip().split("\n")[0].rstrip(".") or "it is empty"


def summary(folder: Path, last: int = 10) -> dict:
    """What a training came to, from its metrics.csv; with the keys of an evaluation's summary, empty, so that the report takes it."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def total(name: str) -> float:
        return sum(float(row[name]) for row in rows)

    return {
        "unit": "sections", "cells": [], "steps": len(rows),
        "reward": sum(float(row["reward"]) for row in rows[-last:]) / len(rows[-last:]),  # mean of the last steps
        "seconds": round(total("step_s"), 1), "tokens": int(total("read_tokens") + total("written_tokens")),
    }  # fmt: skip
