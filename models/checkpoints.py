"""Checkpoints of a run: written by all ranks, read by any number of them.

A checkpoint is a folder `checkpoints/step-N`:

    .metadata, __RANK_0.distcp   trained weights and optimizer state (torch.distributed.checkpoint)
    state.json                   counters, dtype, position in the trajectories, base's fingerprints
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from math import isnan
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from config.errors import UserError, first_line
from config.files import replacing, sync
from config.foreign import read_json
from config.options import RunConfig
from config.realmodels import titled
from config.terminal import say
from models import ranks
from models.policy import WEIGHTS, fingerprint
from models.shards import Loading, Reader

# ---------------------------------------------------------------- what a run's folder holds


def checkpoints(folder: Path) -> dict[int, Path]:
    """List the checkpoints of a run: steps done -> folder."""
    paths = (folder / "checkpoints").glob("step-*")
    numbered = {path.name.removeprefix("step-"): path for path in paths}
    return {int(number): path for number, path in numbered.items() if number.isdigit()}


def newest(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 where there is none."""
    return max(checkpoints(folder), default=0)


COLUMNS = {"step": int, "score": float, "n": int}  # of validation.csv


def validations(folder: Path) -> list[dict]:
    """Read the scores on the validation tasks: step, score, n; empty where there are none."""
    path = folder / "validation.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{n: kind(row[n]) for n, kind in COLUMNS.items()} for row in csv.DictReader(file)]


def write_validations(path: Path, rows: list[dict]) -> None:
    """Write such rows as CSV, atomically."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
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

# what a damaged or foreign checkpoint raises, in many ways; the last is no Exception
_UNREADABLE = Exception, dcp.CheckpointException
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


def save_checkpoint(path: Path, model, optimizer, state: dict) -> None:
    """Write trained weights, optimizer state and `state` (plain numbers) to a folder, atomically.

    A collective: each rank writes its shards, and any number of ranks can read them. OSError, on
    all ranks, where the folder cannot be written; the checkpoint before it is whole then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if ranks.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            path.parent.mkdir(exist_ok=True)  # never the run's folder, which may be gone
            temporary.mkdir()
        ranks.barrier()
        state_dict: dict[str, dict] = {"weights": _trained_weights(model)}
        if optimizer.state:  # before the first step torch would make one to fill the state
            state_dict["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        dcp.save(state_dict, checkpoint_id=temporary, no_dist=ranks.world() == 1)
        if ranks.rank() == 0:
            (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
            # a power cut must not leave the new name with empty files behind it
            for part in (*temporary.iterdir(), temporary):
                sync(part)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            sync(path.parent)
    except _UNREADABLE as error:
        raise OSError(f"{path} cannot be written ({_reason(error)})") from error
    finally:
        if ranks.rank() == 0:  # also where a signal has ended it
            shutil.rmtree(temporary, ignore_errors=True)
    ranks.barrier()


def load_checkpoint(path: Path, model, optimizer=None, base: Mapping[str, str] = {}) -> dict:
    """Load weights, and optimizer state if an optimizer is given, in place; returns `state`.

    base: `base_fingerprints` as they are now. UserError if the checkpoint is damaged, belongs to
    another model, or to another base.
    """
    state = read_state(path)
    known = state["base"] if isinstance(state["base"], dict) else {}
    for name in base.keys() & known.keys():
        if re.fullmatch("[0-9a-f]{64}", str(known[name])):  # made in another way
            if ranks.rank() == 0:
                say(f"Not checked: whether {name} is the base of {path}, of an earlier version.")
        elif known[name] != base[name]:
            raise UserError(
                f"The weights of {name} are not those that {path} was trained with: put these "
                "back, or train anew by another --name."
            )
    try:
        reader, weights = Reader(path), _trained_weights(model)
        saved = reader.read_metadata().state_dict_metadata
        names = {name.removeprefix("weights.") for name in saved}
        if other := {name for name in names if not name.startswith("optimizer.")} ^ set(weights):
            raise ValueError(f"its weights have other names, such as {min(other)}")

        alone = ranks.world() == 1
        load = partial(dcp.load, storage_reader=reader, planner=Loading(), no_dist=alone)
        load({"weights": weights})
        if optimizer and len(names) > len(weights):
            moments = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
            load({"optimizer": moments})
            set_optimizer_state_dict(model, optimizer, moments, options=_OPTIONS)
        return state
    except _UNREADABLE as error:
        raise _damage(path, error) from error


def read_state(path: Path) -> dict:
    """Read a checkpoint's plain numbers: counters, `position`, `dtype`, `base`; else UserError."""
    try:
        state = read_json(path / "state.json")
        required = {"base", "dtype", "position", "done_steps"}
        if not isinstance(state, dict) or not required <= state.keys():
            raise ValueError("state.json does not hold what it should")
        return state
    except (OSError, ValueError) as error:
        raise _damage(path, error) from error


def _damage(path: Path, error: BaseException) -> UserError:
    others = checkpoints(path.parents[1])
    before = max((step for step in others if f"step-{step}" != path.name), default=None)
    way = f"remove it to go on from step {before}" if before else "train anew by another --name"
    return UserError(
        f"{path} is damaged or is no checkpoint of this model ({_reason(error)}): {way}."
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, of one rank's error where several ranks failed."""
    if isinstance(error, dcp.CheckpointException):  # rank -> (error, trace)
        error = next(iter(error.failures.values()))[0]
    return first_line(error) or "it is empty"


def _trained_weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def base_fingerprints(run: RunConfig, adapters: bool, reference: bool = False) -> dict[str, str]:
    """Fingerprint the weights that a training needs and no checkpoint holds, by their model's name.

    They are the base's, beneath adapters or as the reference of a KL term, to which the adapters
    belong that the training began with.
    """
    needed = {titled(run.model): run.model} if adapters or reference else {}
    if reference and run.adapter:
        needed[run.adapter] = run.adapter
    return {name: fingerprint(model, suffixes=WEIGHTS) for name, model in needed.items()}
