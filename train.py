"""The training command's body: settings in, a run folder out.

Holds: loading of models, training tasks of either source, `train`. Leaves out: the algorithm (grpo.py), flags (cli.py).
Exercise it: `python cli.py train --steps 3 --name try`. Read next: eval.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import shutil
import warnings
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger

import data
import settings
import worlds
from data import Task
from graders import score
from grpo import GRPO, Tasks
from memagent import AGENTS, TEMPLATES, AgentConfig, window_of
from models import inner, load_model, merged, with_lora
from rollout import Engine, seed_of
from runs import Keeper, StepCSV, read_checkpoint
from settings import EMBEDDED, GRPOConfig, RunConfig
from slots import TransformersEngine
from text import Codec, UserError


class WorldTasks:
    """Generated English: step by step anew, each level one of the given lengths."""

    def __init__(self, lengths: tuple[int, ...], kinds: tuple[str, ...], seed: int):
        if not lengths or min(lengths) < 1:
            raise UserError("The lengths of generated documents must be at least 1 section.")
        if unknown := set(kinds) - set(worlds.KINDS):
            raise UserError(f"Unknown kind of question {sorted(unknown)[0]!r}: choose among {', '.join(worlds.KINDS)}.")
        self.lengths, self.kinds, self.seed = lengths, kinds, seed
        self.levels = len(lengths) - 1

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        kinds = [self.kinds[(step * n + i) % len(self.kinds)] for i in range(n)]
        return [worlds.make_task(f"{self.seed}.{step}.{i}", self.lengths[level], kind) for i, kind in enumerate(kinds)]


class FileTasks:
    """Tasks of a file, in an order shuffled anew for every pass over it."""

    levels = 0

    def __init__(self, tasks: list[Task], seed: int):
        self.tasks, self.seed = tasks, seed

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        if n > len(self.tasks):
            raise UserError(f"A step wants {n} tasks and the file has {len(self.tasks)}; lower --tasks-per-step.")
        per_pass = len(self.tasks) // n  # the remainder of a pass is left out, so that no task comes twice in a step
        order = list(range(len(self.tasks)))
        random.Random(seed_of(self.seed, step // per_pass)).shuffle(order)
        start = step % per_pass * n
        return [self.tasks[i] for i in order[start : start + n]]


def reward(form: str):
    """The outcome reward: the final answer's box (or sentence) equals an accepted answer, or the share of the answers it holds where all
    are asked for; nothing else counts (spec memagent.md 4)."""
    return lambda trajectory: score(trajectory.answer, trajectory.task.answers, form, trajectory.task.asks_for_all).reward


class Steps:
    """What Lightning iterates over: one item a step, as many as are still to do."""

    def __init__(self, module: GRPO):
        self.module = module

    def __iter__(self):
        yield from range(self.module.done_steps, self.module.config.steps)


def build(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig) -> GRPO:
    """Model, engine, tasks and module, before anything is written."""
    if run.agent not in AGENTS:
        raise UserError(f"Unknown agent {run.agent!r}: choose one of {', '.join(AGENTS)}.")
    path = run.model or EMBEDDED
    tasks: Tasks = (
        WorldTasks(run.lengths, run.kinds, config.seed) if run.data == "world" else FileTasks(data.read(run.data), config.seed)
    )
    codec = Codec.load(path, trust_remote_code=run.trust_remote_code, thinking=agent_config.thinking)
    dtype = run.dtype
    if dtype == "auto":
        dtype = "bfloat16" if config.lora_rank and torch.cuda.is_available() and run.device != "cpu" else "float32"
    if config.quantise and run.engine == "vllm":
        raise UserError("vLLM is not given 4-bit weights yet: train with --engine transformers, or without --quantise.")
    model = load_model(path, dtype, run.device, run.trust_remote_code, config.quantise)
    reference = None
    if config.lora_rank:
        model = with_lora(model, config)
    elif config.kl:
        reference = copy.deepcopy(model).requires_grad_(False)
    engine = engine_for(run, config, agent_config, inner(model), codec)
    return GRPO(model, engine, AGENTS[run.agent], reward(agent_config.form), tasks, config, agent_config, reference)


def engine_for(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, model, codec: Codec) -> Engine:
    """What samples for the trainer of `model`."""
    if run.engine == "transformers":
        return TransformersEngine(model, codec, max_rows=config.in_flight)
    from colocated import ColocatedEngine

    window = min(run.engine_window or window_of(agent_config), model.config.max_position_embeddings)
    kv_gib = run.kv_gib or (0.0 if model.device.type == "cuda" else 1.0)
    return ColocatedEngine(
        run.model or EMBEDDED, codec, window, config.in_flight, kv_gib, run.gpu_share, str(model.dtype).removeprefix("torch."),
        config.lora_rank, run.sleep, run.trust_remote_code,
    )  # fmt: skip


def quiet() -> None:
    """Lightning's hints about settings that are on purpose here are not for the user."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*is not supported when strategy.*")


def run_folder(run: RunConfig, resume: bool) -> Path:
    """Where the run's results lie. UserError if that cannot be, or is another run's."""
    folder = settings.run_path(run.runs, run.name)
    try:
        if folder.exists() and not resume:
            raise UserError(f"The run {folder} is there already: give another --name, or go on with it by --resume.")
        if resume and not folder.exists():
            raise UserError(f"There is no run {folder} to resume.")
    except OSError as error:
        raise UserError(f"The run {folder} cannot be there: {error.strerror}.") from error
    return folder


def train(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, resume: bool = False, callbacks=()) -> Path:
    """Train and export; returns the run's folder. With `resume`, goes on from the folder's last checkpoint.

    A run is resumed with the settings it began with, but for `settings.MAY_CHANGE`; with more steps it goes on past its end (to the same
    numbers as if it had had them from the beginning, unless the learning rate falls: it falls by the share of the steps). A UserError
    before the end of the first step leaves no new folder.
    """
    quiet()
    run = replace(run, name=run.name or datetime.now().strftime("%Y%m%d-%H%M%S"))
    folder = run_folder(run, resume)
    if resume and (wrong := settings.changed(settings.begun(folder), run=run, grpo=config, agent=agent_config)):
        which = ", ".join(wrong[:3]) + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        raise UserError(f"The run {folder} began with other settings ({which}): leave these out, or give another --name.")
    module = build(run, config, agent_config)
    with contextlib.closing(module.engine):
        module.tasks.batch(0, 0, module.n_tasks)  # fails now, before a folder is made, if it fails at all
        checkpoint = folder / "checkpoints" / "last.ckpt"
        start = read_checkpoint(checkpoint, module) if checkpoint.exists() else 0
        if start > config.steps:
            raise UserError(f"The run {folder} has done {start} steps already: give --steps {start} or more.")
        try:
            folder.mkdir(parents=True, exist_ok=resume)
        except OSError as error:
            raise UserError(f"The folder {folder} cannot be made: {error.strerror}.") from error
        settings.dump(folder / "config.yaml", run=run, grpo=config, agent=agent_config)
        if start < config.steps:
            keeper = Keeper(folder, run.save_every, run.keep_trajectories, config.steps)
            trainer = lightning.Trainer(
                accelerator="cpu" if module.model.device.type == "cpu" else "auto",
                devices=1,
                max_epochs=1,
                logger=[
                    StepCSV(folder / "metrics.csv", start),
                    TensorBoardLogger(folder, name="tensorboard", version="", purge_step=start),
                ],
                callbacks=[keeper, *callbacks],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            try:
                trainer.fit(module, Steps(module), ckpt_path=checkpoint if start else None, weights_only=True)
            except UserError:
                if not resume and not module.done_steps:  # nothing was learnt: only the mistake would be left
                    shutil.rmtree(folder)
                raise
            if module.done_steps != config.steps:
                raise RuntimeError(f"Training ended after {module.done_steps} of {config.steps} steps.")
    export(module, folder / "model")
    return folder


def export(module: GRPO, folder: Path) -> None:
    """The policy as transformers loads it; a LoRA policy also as its adapter. Written beside and renamed."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model = module.model
    if module.config.lora_rank:
        adapter = folder.with_name("adapter")
        model.save_pretrained(adapter)
        model = merged(model)
    model.save_pretrained(temporary)
    module.engine.codec.tokenizer.save_pretrained(temporary)
    agent = replace(
        module.agent_config, max_sections=None
    )  # a cap of training: who reads with the policy reads all, unless told not to
    if agent.templates:
        (temporary / "templates").mkdir()
        for turn in TEMPLATES:
            if (path := Path(agent.templates, f"{turn}.txt")).is_file():
                shutil.copy(path, temporary / "templates")
    settings.dump(temporary / "agent.yaml", agent=asdict(agent) | {"templates": "templates" if agent.templates else ""})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
