"""Write a checkpoint as a model folder that transformers, peft and vLLM load, with its card."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from agents import find
from commands.card import write_card
from config import files
from config.errors import UserError, first_line
from config.locks import writing
from config.options import EMBEDDED, RunConfig
from config.realmodels import PACKAGED, settings_folder
from config.terminal import next_step, say
from models.checkpoints import (
    base_fingerprints,
    best_step,
    checkpoints,
    load_checkpoint,
    newest,
    read_state,
)
from models.load import merge_adapters, share_kept, start_weights, stored_dtype
from models.policy import Policy
from tasks import seen
from tokens.codec import Codec

KEPT = 0.95  # share of what was learnt; an export that keeps less of it says so
ABOUT = ("agent.yaml", find.STATE, seen.TRAINED_ON, "templates")  # of a policy, adapters' too


def export(
    folder: Path,
    step: int | None = None,
    out: Path | None = None,
    dtype: str = "auto",
    best: bool = False,
    trusted: bool = False,
) -> Path:
    """Write the policy of a checkpoint as transformers, peft and vLLM load it; returns its folder.

    step: of the checkpoint; None = the last one, or with best the best by validation. out:
    a new folder; None = `model` in the run's folder, which is replaced. Adapters are written as
    well, to OUT-adapter, or `adapter` in the run's folder. dtype: of the written weights; auto =
    that of the base model, or float32 where that would round most of what was learnt away. Any
    number of ranks may have trained the run: the export is one process on the host, computes in
    float32, and writes the folder atomically. trusted: the code that the run's settings name may
    run.
    UserError: no such checkpoint, a given folder that exists.
    """
    find.check_trained(folder, step, out)
    run = find.begun(folder, None)["run"]
    code = {name: run.get(name) for name in ("agent", "trust_remote_code")}
    find.check_reach(folder / "config.yaml", code, {"trust_remote_code": True} if trusted else {})
    find.find(code["agent"] or find.DEFAULT)
    stored = find.begun(folder, None)  # with the settings of a file's agent
    if best and step is not None:
        raise UserError("Give --step or --best, not both.")
    if best and (step := best_step(folder)) is None:
        raise UserError(f"{folder} has no validation: train with --validation, or give --step.")
    step = newest(folder) if step is None else step
    if out:
        out = out.absolute()
        adapter, alone = out.with_name(f"{out.name}-adapter"), contextlib.nullcontext()
    else:
        out, adapter = folder / "model", folder / "adapter"
        alone = writing(folder, f"The run {folder}")
    places = [out, adapter] if find.training_of(stored).lora_rank else [out]
    files.make_folder(out.parent)
    with alone, contextlib.ExitStack() as made:
        weights = [made.enter_context(files.making_folder(place)) for place in places]
        _write_export(checkpoints(folder)[step], stored, *weights, dtype=dtype)
        # the questions of this run, and those that what it started from was trained on before
        before = filter(None, (run.get("model") or EMBEDDED, run.get("adapter")))
        lists = map(seen.trained_on, map(settings_folder, before))
        seen.pass_on([seen.trained_on(folder, before=step), *lists], weights[0])
        for place in weights:
            if place is not weights[0]:
                _copy_about(weights[0], place)
            write_card(place, stored, folder, step, place is not weights[0], weights)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    return out


def finish(run: Path, folder: Path) -> None:
    """Say where the policy of a run is, and what is next."""
    say(f"The policy is in {folder}.")
    agent = find.begun(run, None)["run"].get("agent") or find.DEFAULT
    agents = () if agent == find.DEFAULT else ("--agents", f"{agent},full")
    words = ("--name", f"{run.name}-eval", "--model", folder, *agents)
    next_step("evaluate it", "eval", *words, runs=str(run.parent))


def _copy_about(folder: Path, adapter: Path) -> None:
    """Give an adapter's folder what a model folder says of its policy."""
    for source in (folder / name for name in ABOUT):
        if source.is_dir():
            shutil.copytree(source, adapter / source.name)
        elif source.exists():
            shutil.copy(source, adapter)


def _save(model, folder: Path, **settings) -> None:
    logging.disable_progress_bar()  # of transformers, which writes over lines in a pipe, too
    try:
        model.save_pretrained(folder, **settings)
    except SafetensorError as error:  # the system's own, such as of a full disk
        raise OSError(f"{folder} cannot be written ({first_line(error)})") from error


def _write_export(
    checkpoint: Path, stored: dict, folder: Path, adapter: Path | None = None, dtype: str = "auto"
) -> None:
    """Fill a model folder, and one for adapters, from a checkpoint and the settings that its run
    began with."""
    run, config = RunConfig(**stored["run"]), find.training_of(stored)
    agent, state = find.make(run.agent or find.DEFAULT, stored["agent"]), read_state(checkpoint)
    # The base weights as in training: of the same type, and quantised on the same kind of
    # processor, because each kind rounds in its own way.
    device = run.device if config.quantise else "cpu"
    run = replace(run, dtype=state["dtype"], device=device)
    policy = Policy.of_training(run, config, agent)
    model = policy.load_trainable(config)
    target = stored_dtype(policy.folder, run.trust_remote_code) if dtype == "auto" else dtype
    # mixed: what was sampled from, and validated, were these weights in bfloat16; those of 4 bits
    # are no numbers of bfloat16, so that rounding takes no change away
    rounds = target == "bfloat16" and state["dtype"] != "mixed" and not config.quantise
    start = start_weights(model) if rounds else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_checkpoint(checkpoint, model, base=base_fingerprints(run, config.lora_rank))
    if adapter:
        if run.model in PACKAGED:  # the folder that it lies in is this machine's own
            model.active_peft_config.base_model_name_or_path = run.model
        _save(model, adapter, save_embedding_layers=False)  # else peft asks the hub for the base
        model = merge_adapters(model)
    if rounds and (share := share_kept(start, model)) < KEPT:
        of_it = f"{share:.0%} of what was learnt"
        if dtype == "auto" and share < 0.5:
            target = "float32"
            say(f"Written in float32: in bfloat16, the base's type, it has {of_it}.", "yellow")
        else:
            say(f"In bfloat16 it has {of_it}; `export --dtype float32` writes all.", "yellow")
    del start
    _save(model.to(getattr(torch, target)), folder)
    codec = Codec.load(policy.folder, trust_remote_code=run.trust_remote_code)
    codec.tokenizer.save_pretrained(folder)
    # max_sections is a cap of training; the exported policy reads whole documents by default
    reading = find.of_model(run.model or EMBEDDED)  # of other agents, such as a window
    reading |= asdict(agent.config) | {"max_sections": None}
    if templates := agent.config.templates:
        reading["templates"] = "templates"
        (folder / "templates").mkdir()
        for name in agent.prompts:
            if (path := Path(templates, f"{name}.txt")).is_file():
                shutil.copy(path, folder / "templates")
    if state.get("agent") is not None:
        (folder / find.STATE).write_text(json.dumps(state["agent"]), encoding="utf-8")
    files.dump(folder / "agent.yaml", run={"agent": run.agent}, agent=reading)
