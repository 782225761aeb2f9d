"""Checkpoints of a run: written by all ranks, read by any number of them.

Holds: `save_checkpoint`, `load_checkpoint`, `read_state`, `checkpoints`, `best_step`. Leaves out: when they are written
(report/runlog.py).
Exercise it: `python cli.py train --name NAME --resume`. Read next: commands/export.py.
"""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from pathlib import Path

import torch

from config.errors import UserError
from config.files import replacing
from models import ranks

# ---------------------------------------------------------------- checkpoints


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run: steps done -> folder."""
    found = (folder / "checkpoints").glob("step-*")
    return {
        int(number): path for path in found if (number := path.name.removeprefix("step-")).isdigit()
    }


def done_steps(folder: Path) -> int:
    """Steps of the last checkpoint, 0 without one."""
    return max(checkpoints(folder), default=0)


def validations(folder: Path) -> list[dict]:
    """What was measured on the validation tasks: step, score, n."""
    path = folder / "validation.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {"step": int(row["step"]), "score": float(row["score"]), "n": int(row["n"])}
            for row in csv.DictReader(file)
        ]


def _write_csv(path: Path, rows: list[dict]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "score", "n"])
        writer.writeheader()
        writer.writerows(rows)


def best_step(folder: Path) -> int | None:
    """The step with the best validation of those that there is a checkpoint of, the last of equals; None without any."""
    saved = checkpoints(folder)
    scores = [(row["score"], row["step"]) for row in validations(folder) if row["step"] in saved]
    return max(scores)[1] if scores else None


def _trained(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def base_mark(model) -> list[float]:
    """A few numbers that tell one set of frozen weights from another, in whatever type they are: [] if all are trained."""
    frozen = [
        p
        for p in model.parameters()
        if not p.requires_grad and p.ndim > 1 and p.is_floating_point()
    ]
    return [
        ranks.full_tensor(p)[:64].double().abs().mean().item() for p in frozen[:1] + frozen[-1:]
    ]


def _alone(model) -> bool:
    """Whether this process has all weights itself, and reads or writes a checkpoint without the others."""
    return not any(hasattr(p, "full_tensor") for p in model.parameters())


def _optimizer_state(model, optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(ignore_frozen_params=True)
    )


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
            (temporary / "state.json").write_text(
                json.dumps(state | {"base": base}), encoding="utf-8"
            )
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
    except (
        OSError,
        RuntimeError,
        dcp.CheckpointException,
    ) as error:  # torch says with a RuntimeError that the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{path} cannot be written, the one before it is kept; --resume when it can: {_reason(error)}."
        ) from error
    ranks.barrier()


def load_checkpoint(path: Path, model, optimizer=None) -> dict:
    """The weights, and the optimizer's state if one is given, into place; returns `state`. UserError if it is damaged or another model's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state = read_state(path)
    try:
        there = {
            name.removeprefix("weights.")
            for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        }
        weights = _trained(model)
        if other := {name for name in there if not name.startswith("optimizer.")} ^ set(weights):
            raise ValueError(f"its weights have other names, such as {min(other)}")
        was, now = state["base"], base_mark(model)
        if len(was) != len(now) or any(
            abs(a - b) > 0.02 * abs(a) for a, b in zip(was, now, strict=True)
        ):
            raise ValueError("its adapters belong to other base weights")
        dcp.load({"weights": weights}, checkpoint_id=path, no_dist=_alone(model))
        if optimizer and len(there) > len(weights):
            moments = {"optimizer": _optimizer_state(model, optimizer)}
            dcp.load(moments, checkpoint_id=path, no_dist=_alone(model))
            set_optimizer_state_dict(
                model,
                optimizer,
                moments["optimizer"],
                options=StateDictOptions(ignore_frozen_params=True),
            )
        return state
    except (
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        dcp.CheckpointException,
    ) as error:
        raise UserError(
            f"{path} is damaged or is no checkpoint of this model, give another --name: {_reason(error)}."
        ) from error


def read_state(path: Path) -> dict:
    """What a checkpoint holds beside weights and optimizer: counters, the trajectories' position, the type and a mark of the base weights."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if (
            not isinstance(state, dict)
            or not {"base", "dtype", "position", "done_steps"} <= state.keys()
        ):
            raise ValueError("state.json does not hold what it should")
        return state
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged or is no checkpoint, give another --name: {_reason(error)}."
        ) from error


def _reason(error: Exception) -> str:
    failures = getattr(error, "failures", None)  # of the ranks: rank -> (exception, trace)
    cause = next(iter(failures.values()))[0] if failures else error
    return str(cause).strip().split("\n")[0].rstrip(".") or "it is empty"
