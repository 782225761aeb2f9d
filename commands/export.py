"""Write a checkpoint as a model folder that transformers, peft and vLLM load.

Holds: `export`. Leaves out: training (commands/train.py).
Exercise it: `python cli.py export RUN`. Read next: models/checkpoints.py.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from agents import find
from config import files
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from memagent import TEMPLATES, AgentConfig
from models.checkpoints import best_step, checkpoints, load_checkpoint, read_state
from models.load import merge_adapters, policy_of, stored_dtype
from tasks import seen
from tokens.codec import Codec


def export(
    folder: Path,
    step: int | None = None,
    out: Path | None = None,
    dtype: str = "auto",
    of_best: bool = False,
) -> Path:
    """The policy of a run's checkpoint as transformers, peft and vLLM load it; returns its folder.

    step: which one, the last if None, or with of_best the best by validation. out: a new folder; None = `model` in the run's folder, which
    is replaced. A policy with adapters leaves them in OUT-adapter, or in `adapter` in the run's folder. Any number of ranks may have
    trained it: this is one process, on the host. All arithmetic is in float32, and then the weights are rounded to `dtype`; auto = the
    type of the base's. Written beside and renamed.
    """
    saved, stored = checkpoints(folder), find.begun(folder)
    if not saved or not stored:
        raise UserError(f"{folder} is no run with a checkpoint.")
    if of_best and step is not None:
        raise UserError("Give --step or --best, not both.")
    if of_best and (step := best_step(folder)) is None:
        raise UserError(f"{folder} has no validation: train with --validation, or give --step.")
    step = max(saved) if step is None else step
    if step not in saved:
        raise UserError(
            f"{folder} has no checkpoint of step {step}; there are {', '.join(map(str, sorted(saved)))}."
        )
    out = out and out.absolute()
    adapter = out.with_name(f"{out.name}-adapter") if out else folder / "adapter"
    if there := [path for path in (out, adapter) if out and path.exists()]:
        raise UserError(f"{there[0]} is there already: give another --out.")
    out = out or folder / "model"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"The folder {out} cannot be made: {error.strerror}.") from error
    try:
        _write_export(saved[step], stored, temporary, adapter, dtype)
        # with those of the policy that the run began with
        if asked := {
            *seen.trained_on(folder, before=step),
            *seen.trained_on(stored["run"].get("model") or EMBEDDED),
        }:
            seen.write_trained_on(temporary, sorted(asked))
        temporary.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write_export(checkpoint: Path, stored: dict, folder: Path, adapter: Path, dtype: str) -> None:
    """A run's checkpoint, with the settings that it began with, as a model folder."""
    run, config, agent = (
        RunConfig(**stored["run"]),
        GRPOConfig(**stored["grpo"]),
        AgentConfig(**stored["agent"]),
    )
    # the base weights as they were in training: of the same type, and quantised on the same kind of processor, which rounds in its own way
    was = read_state(checkpoint)["dtype"]
    model = policy_of(
        replace(run, dtype="float32" if was == "mixed" else was),
        config,
        "" if config.quantise else "cpu",
    )
    load_checkpoint(checkpoint, model)
    if config.lora_rank:
        model.save_pretrained(adapter)
        model = merge_adapters(model)
    dtype = stored_dtype(run.model or EMBEDDED, run.trust_remote_code) if dtype == "auto" else dtype
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    Codec.load(
        run.model or EMBEDDED, trust_remote_code=run.trust_remote_code
    ).tokenizer.save_pretrained(folder)
    agent = replace(
        agent, max_sections=None
    )  # a cap of training: who reads with the policy reads all, unless told not to
    if agent.templates:
        (folder / "templates").mkdir()
        for turn in TEMPLATES:
            if (path := Path(agent.templates, f"{turn}.txt")).is_file():
                shutil.copy(path, folder / "templates")
    own = asdict(agent) | {"templates": "templates" if agent.templates else ""}
    files.dump(folder / "agent.yaml", run={"agent": run.agent}, agent=own)
