"""Checkpoints of a run: written by all ranks, read by any number of them.

Holds: `save_checkpoint`, `load_checkpoint`, `read_state`, `checkpoints`, `newest`, `best_step`, and
the table of validations. Leaves out: when they are written (report/runlog.py).
Exercise it: `python cli.py train --name NAME --resume`. Read next: commands/export.py.

A checkpoint is a folder `checkpoints/step-N`:

    .metadata, __RANK_0.distcp   trained weights and optimizer state (torch.distributed.checkpoint)
    state.json                   counters, dtype, position in the trajectories, base fingerprint
"""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from math import isnan
from pathlib import Path

import torch

from config.errors import UserError, first_line
from config.files import replacing, sync
from config.foreign import from_json
from models import ranks

# ---------------------------------------------------------------- what a run's folder holds


def checkpoints(folder: Path) -> dict[int, Path]:
    """List the checkpoints of a run: steps done -> folder."""
    paths = (folder / "checkpoints").glob("step-*")
    numbered = {path.name.removeprefix("step-"): path for path in paths}
    return {int(number): path for number, path in numbered.items() if number.isdigit()}


def newest(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 where there is none."""
    return max(checkpoints(folder), default=0)


def validations(folder: Path) -> list[dict]:
    """Read the scores on the validation tasks: step, score, n; empty where there are none."""
    path = folder / "validation.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {"step": int(row["step"]), "score": float(row["score"]), "n": int(row["n"])}
            for row in csv.DictReader(file)
        ]


def write_validations(path: Path, rows: list[dict]) -> None:
    """Write such rows as CSV, atomically."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "score", "n"])
        writer.writeheader()
        writer.writerows(rows)


def best_step(folder: Path) -> int | None:
    """Return the step with the best validation score among the checkpoints, the last of equals.

    None where no checkpoint was validated, or none of the answers had a reward.
    """
    saved = checkpoints(folder)
    rows = (row for row in validations(folder) if row["step"] in saved)
    scores = [(row["score"], row["step"]) for row in rows if not isnan(row["score"])]
    return max(scores)[1] if scores else None


# ---------------------------------------------------------------- save and load

# Errors of a damaged or foreign checkpoint; torch unpickles parts of it, which fails in many ways.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)


def save_checkpoint(path: Path, model, optimizer, state: dict) -> None:
    """Write trained weights, optimizer state and `state` (plain numbers) to a folder, atomically.

    A collective: each rank writes its shards, and any number of ranks can read them. OSError, on
    all ranks, where the folder cannot be written; the checkpoint before it is whole then.
    """
    import torch.distributed.checkpoint as dcp

    temporary = path.with_name(f".{path.name}.tmp")
    state = state | {"base": base_fingerprint(model)}
    try:
        if ranks.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        ranks.barrier()
        state_dict = {"weights": _trained_weights(model)}
        if optimizer.state:  # before the first step torch would make one to fill the state
            state_dict["optimizer"] = _optimizer_state(model, optimizer)
        dcp.save(state_dict, checkpoint_id=temporary, no_dist=_has_all_weights(model))
        if ranks.rank() == 0:
            (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
            # a power cut must not leave the new name with empty files behind it
            for part in (*temporary.iterdir(), temporary):
                sync(part)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            sync(path.parent)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise OSError(f"{path} cannot be written ({_reason(error)})") from error
    finally:
        if ranks.rank() == 0:  # also where a signal has ended it
            shutil.rmtree(temporary, ignore_errors=True)
    ranks.barrier()


def load_checkpoint(path: Path, model, optimizer=None) -> dict:
    """Load weights, and optimizer state if an optimizer is given, in place; returns `state`.

    UserError if the checkpoint is damaged or belongs to another model.
    """
    import torch.distributed.checkpoint as dcp

    state = read_state(path)
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        names = {name.removeprefix("weights.") for name in saved}
        weights = _trained_weights(model)
        _check_same_model(names, weights, state["base"], base_fingerprint(model))
        alone = _has_all_weights(model)
        dcp.load({"weights": weights}, checkpoint_id=path, no_dist=alone)
        if optimizer and len(names) > len(weights):
            moments = {"optimizer": _optimizer_state(model, optimizer)}
            dcp.load(moments, checkpoint_id=path, no_dist=alone)
            _set_optimizer_state(model, optimizer, moments["optimizer"])
        return state
    except (*_UNREADABLE, dcp.CheckpointException) as error:
        raise _unreadable(path, error) from error


def read_state(path: Path) -> dict:
    """Read a checkpoint's plain numbers: counters, `position`, `dtype`, `base`; else UserError."""
    try:
        state = from_json((path / "state.json").read_text(encoding="utf-8"))
        required = {"base", "dtype", "position", "done_steps"}
        if not isinstance(state, dict) or not required <= state.keys():
            raise ValueError("state.json does not hold what it should")
        return state
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is damaged or is no checkpoint of this model ({_reason(error)}): remove it to go "
        "on from an earlier one, or give another --name."
    )


def base_fingerprint(model) -> list[float]:
    """Return mean magnitudes of the first and last frozen weight: [] if all weights are trained.

    They tell one base model from another, whatever type its weights have been cast to.
    """
    frozen = [
        p
        for p in model.parameters()
        if not p.requires_grad and p.ndim > 1 and p.is_floating_point()
    ]
    first_and_last = frozen[:1] + frozen[-1:]
    return [ranks.full_tensor(p)[:64].double().abs().mean().item() for p in first_and_last]


def _check_same_model(
    names: set[str], weights: dict, base: list[float], our_base: list[float]
) -> None:
    """Raise ValueError if a checkpoint's names or base fingerprint are not the model's."""
    saved_weights = {name for name in names if not name.startswith("optimizer.")}
    if other := saved_weights ^ set(weights):
        raise ValueError(f"its weights have other names, such as {min(other)}")
    # within 2 %: the base may have been cast to another type
    if len(base) != len(our_base) or any(
        abs(a - b) > 0.02 * abs(a) for a, b in zip(base, our_base, strict=True)
    ):
        raise ValueError("its adapters belong to other base weights")


def _trained_weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _has_all_weights(model) -> bool:
    """Return whether nothing is sharded: this process then reads and writes without the others."""
    return not any(hasattr(p, "full_tensor") for p in model.parameters())


def _optimizer_state(model, optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(ignore_frozen_params=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def _set_optimizer_state(model, optimizer, state: dict) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    options = StateDictOptions(ignore_frozen_params=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _reason(error: Exception) -> str:
    """Return the first line of an error, of one rank's error where several ranks failed."""
    failures = getattr(error, "failures", None)  # of a CheckpointException: rank -> (error, trace)
    error = next(iter(failures.values()))[0] if failures else error
    return first_line(error) or "it is empty"
