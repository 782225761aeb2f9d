"""The body of `train`: settings in, the folder of a run out.

Holds: `train`, `build`, `check`, the progress in the terminal. Leaves out: the algorithm (grpo.py), flags (cli.py).
Exercise it: `python cli.py train --steps 3 --name try`. Read next: commands/export.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from agents import find
from commands.export import export
from config import files
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.plugins import load_function
from config.terminal import bar
from engines import vllm_colocated
from engines.open import engine_for
from grpo import GRPO
from memagent import Agent, Trajectory
from models import ranks
from models.checkpoints import done_steps
from models.load import dtype_of, inner, on_gpu, policy_of, settle_threads, sharded
from report.runlog import RunRecorder, StepCSV
from tasks.sources import training_tasks, validation_tasks
from tokens.codec import Codec

Reward = Callable[[Trajectory], float]


class Steps:
    """What Lightning iterates over: one item a step, as many as are still to do."""

    def __init__(self, module: GRPO):
        self.module = module

    def __iter__(self):
        yield from range(self.module.done_steps, self.module.config.steps)


def check(run: RunConfig, config: GRPOConfig, here: bool = True) -> None:
    """UserError for settings that cannot go together, or not `here`, on this machine."""
    find.find(run.agent)
    if run.engine == "vllm":
        vllm_colocated.check_settings("1" if run.sleep == "auto" else run.sleep, config.lora_rank)
        if here and run.device == "cpu" and torch.cuda.is_available():
            raise UserError(
                "vLLM computes on the GPU where there is one: leave --device cpu out, or use --engine transformers."
            )
    ranks_wanted = run.devices * run.num_nodes
    if min(config.tasks_per_step) < ranks_wanted:
        raise UserError(
            f"A step has {min(config.tasks_per_step)} tasks and there are {ranks_wanted} ranks: each needs one of its own."
        )
    if here and run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is at hand; use --device cpu.")
    if here and on_gpu(run) and torch.cuda.device_count() < run.devices:
        raise UserError(
            f"--devices {run.devices}, and this machine has {torch.cuda.device_count()}."
        )
    if sharded(run, config) and config.optimizer == "adamw8bit":
        raise UserError(
            "AdamW in 8 bits takes no weights in shards: use one device and --dtype float32 or bfloat16, or --optimizer adamw."
        )


def build(run: RunConfig, config: GRPOConfig, agent: Agent, reward: Reward | None = None) -> GRPO:
    """Make model, engine, tasks and module, before anything is written."""
    check(run, config)
    tasks = training_tasks(run, config)
    tasks.batch(0, 0, config.tasks_per_step[0])  # fails now, if it fails at all
    if run.reward:
        reward = load_function(run.reward, "--reward")
    codec = Codec.load(
        run.model or EMBEDDED,
        trust_remote_code=run.trust_remote_code,
        thinking=agent.config.thinking,
    )
    shards = sharded(run, config)
    # the weights are read once, on rank 0, and go to the GPUs as shards; those in 4 bits have none
    where = ("unset" if ranks.rank() else "cpu") if shards and not config.quantise else ""
    model, reference, validation = policy_of(run, config, where), None, validation_tasks(run)
    if config.kl and not config.lora_rank:
        reference = policy_of(run, config, where, mixed="bfloat16").requires_grad_(False)
    settle_threads(inner(model))
    sharding = "none" if not shards else "mixed" if dtype_of(run, config) == "mixed" else "same"
    engine = engine_for(run, config, agent, model, codec)
    return GRPO(
        model, engine, rewarded(agent, reward), tasks, config, reference, sharding, validation
    )


def rewarded(agent: Agent, reward: Reward | None) -> Agent:
    """Return an agent whose reward is a function of the finished trajectory."""
    if reward is None:
        return agent
    agent = copy.copy(agent)
    agent.reward = lambda trajectory, outcome="exact": reward(trajectory)  # type: ignore[method-assign]
    return agent


def quiet() -> None:
    """Lightning's hints about settings that are on purpose here are not for the user."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*is not supported when strategy.*")
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # a checkpoint of one process


def check_folder(folder: Path, resume: bool) -> None:
    """UserError if a run's results cannot lie there, or are another run's."""
    try:
        if folder.exists() and not resume:
            raise UserError(
                f"The run {folder} is there already: give another --name, or go on with it by --resume."
            )
        if resume and not folder.exists():
            raise UserError(f"There is no run {folder} to resume.")
    except OSError as error:
        raise UserError(f"The run {folder} cannot be there: {error.strerror}.") from error


def run_and_report(
    run: RunConfig, config: GRPOConfig, agent: Agent, resume: bool, say: Callable[[str], None]
) -> None:
    """Train, then write summary and report; `say` is told where everything is."""
    from report.page import write_report
    from report.runlog import summary
    from report.summary import write_summary

    folder = train(run, config, agent, resume, callbacks=[TrainingProgress(config.steps)])
    if not ranks.is_first():  # one of torchrun's other processes
        return
    if not (folder / "rows.jsonl").exists():  # a demo's folder has the numbers of its evaluation
        write_summary(folder / "summary.json", summary(folder))
        write_report(folder, title=f"Training {folder.name}")
    report = folder / "report.html"
    if run.keep_checkpoints:
        say(
            f"The policy is in {folder / 'model'}, its training in {report} and the files beside it."
        )
    else:
        say(f"Neither checkpoint nor policy was kept; see {report}.")


def train(
    run: RunConfig,
    config: GRPOConfig,
    agent: Agent,
    resume: bool = False,
    callbacks=(),
    reward: Reward | None = None,
) -> Path:
    """Train and export; returns the run's folder. With `resume`, goes on from the folder's last checkpoint.

    With run.keep_checkpoints = 0 neither a checkpoint nor an export is written.

    A run is resumed with the settings it began with, but for `settings.MAY_CHANGE`; with more steps it goes on past its end (to the same
    numbers as if it had had them from the beginning, unless the learning rate falls: it falls by the share of the steps). A UserError
    before the end of the first step leaves no new folder. reward: instead of the agent's own. With several devices this process starts one for
    each and waits for them; `callbacks` and `reward` are pickled then. Several machines are started by torchrun.
    """
    quiet()
    check(run, config)
    if ranks.is_launched() and ranks.launched_world() != run.devices * run.num_nodes:
        raise UserError(
            f"torchrun has started {ranks.launched_world()} processes; --devices times --num-nodes must be as many."
        )
    if ranks.is_launched() and not run.name:
        raise UserError("A run that torchrun starts needs a --name: every rank must know it.")
    if run.num_nodes > 1 and not ranks.is_launched():
        raise UserError(
            f"On {run.num_nodes} machines torchrun starts the command, on each of them (docs/engines.md)."
        )
    name = run.name or datetime.now().strftime("%Y%m%d-%H%M%S")
    run = replace(run, name=name, agent=agent.name or run.agent)
    folder = files.run_path(run.runs, run.name)
    if ranks.is_first():
        check_folder(folder, resume)
        if resume and (
            wrong := find.changed(find.begun(folder), run=run, grpo=config, agent=agent.config)
        ):
            which = ", ".join(wrong[:3]) + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
            raise UserError(
                f"The run {folder} began with other settings ({which}): leave these out, or give another --name."
            )
    if run.devices > 1 and not ranks.is_launched():
        return ranks.launch(
            _train_rank,
            run.devices,
            run,
            config,
            asdict(agent.config),
            folder,
            resume,
            callbacks,
            reward,
        )
    return _train(run, config, agent, folder, resume, callbacks, reward)


def _train_rank(run: RunConfig, config: GRPOConfig, settings: dict, *rest) -> Path:
    """Be one of several processes: an agent of the user's file is loaded in each of them."""
    return _train(run, config, find.make(run.agent, settings), *rest)


def _train(
    run: RunConfig,
    config: GRPOConfig,
    agent: Agent,
    folder: Path,
    resume: bool,
    callbacks,
    reward: Reward | None,
) -> Path:
    """One rank's part of it."""
    quiet()
    shards = sharded(run, config)
    with ranks.process_group(on_gpu(run)) if shards else contextlib.nullcontext():
        module = build(run, config, agent, reward)
        with contextlib.closing(module.engine):
            start = done_steps(folder)
            if start > config.steps:
                raise UserError(
                    f"The run {folder} has done {start} steps already: give --steps {start} or more."
                )
            ranks.barrier()  # nobody looks at the folder any more
            if start < config.steps:
                _fit(module, run, config, agent, folder, resume, start, callbacks)
            elif ranks.rank() == 0:
                files.dump(folder / "config.yaml", run=run, grpo=config, agent=agent.config)
            ranks.barrier()  # vLLM ends the process group when it is closed
        del module
    if ranks.is_first() and run.keep_checkpoints:  # alone, with the GPU's memory given back
        export(folder)
    return folder


def _fit(
    module: GRPO,
    run: RunConfig,
    config: GRPOConfig,
    agent: Agent,
    folder: Path,
    resume: bool,
    start: int,
    callbacks,
) -> None:
    """The steps from `start` on."""
    first = ranks.rank() == 0
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=resume)
        except FileExistsError:
            raise UserError(f"The run {folder} has begun meanwhile: give another --name.") from None
        except OSError as error:
            raise UserError(f"The folder {folder} cannot be made: {error.strerror}.") from error

    def begin() -> None:
        files.dump(folder / "config.yaml", run=run, grpo=config, agent=agent.config)

    # of generated English none is kept: its facts are split, and no fact that is trained on is ever asked for in an evaluation
    questions = run.data != "world"
    recorder = RunRecorder(
        folder,
        run.save_every,
        run.keep_trajectories,
        config.steps,
        run.keep_checkpoints,
        dtype_of(run, config),
        begin,
        questions,
    )
    on_cpu, strategy = not on_gpu(run), "auto"
    if sharded(run, config):
        strategy = ModelParallelStrategy(
            data_parallel_size=run.devices * run.num_nodes,
            tensor_parallel_size=1,
            process_group_backend="gloo" if on_cpu else "nccl",
        )
    trainer = lightning.Trainer(
        accelerator="cpu" if on_cpu else "cuda",
        devices=run.devices,
        num_nodes=run.num_nodes,
        strategy=strategy,
        max_epochs=1,
        logger=[
            StepCSV(folder / "metrics.csv", start),
            TensorBoardLogger(folder, name="tensorboard", version="", purge_step=start),
        ]
        if first
        else False,
        callbacks=[recorder, *(callbacks if first else ())],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, Steps(module))
    except UserError:
        if (
            not resume and first and not module.done_steps
        ):  # nothing was learnt: only the mistake would be left
            shutil.rmtree(folder)
        raise
    if module.done_steps != config.steps:
        raise RuntimeError(f"Training ended after {module.done_steps} of {config.steps} steps.")


# ---------------------------------------------------------------- in the terminal


class TrainingProgress(lightning.Callback):
    """One bar for the steps, and every `every` steps a line that stays."""

    def __init__(self, steps: int, every: int = 10):
        self.steps, self.every = steps, every
        self.validated: dict[str, float] = {}
        self.proofs = 0  # shown so far
        self.progress = None  # until training starts: an error before that has no bar to stop

    def on_train_start(self, trainer, module) -> None:
        self.validated = module.validated
        self.progress = bar("steps")
        self.task = self.progress.add_task(
            "training", total=self.steps, completed=module.done_steps, note=""
        )
        self.progress.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        m = module.metrics
        rate = (m["read_tokens"] + m["written_tokens"]) / m["step_s"]
        note = f"reward {m['reward']:.2f}  turns {m['turns']:.0f}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=module.done_steps, note=note)
        for step, found in module.proofs[self.proofs :]:
            new, old = found.new**0.5, found.old**0.5
            self.progress.print(
                f"step {step:>4}  weights reach the sampler: {new:.1g} off, the old ones {old:.1g}"
            )
        self.proofs = len(module.proofs)
        if module.validated is not self.validated:
            self.validated = module.validated
            score, n = self.validated["score"], self.validated["n"]
            self.progress.print(f"step {module.done_steps:>4}  validation {score:.3f} (n {n})")
        if module.done_steps % self.every == 0:
            self.progress.print(
                f"step {module.done_steps:>4}  reward {m['reward']:.3f}  turns {m['turns']:>5.1f}  memory {m.get('memory_length', m['memory_tokens']):>5.1f} tokens"
                f"  no signal {m['groups_without_signal']:.0%}  rollout {m['rollout_s']:.1f} s  update {m['update_s']:.1f} s"
            )

    def on_train_end(self, trainer, module) -> None:
        self.progress.stop()

    def on_exception(self, trainer, module, exception) -> None:
        if self.progress:
            self.progress.stop()
