"""The training command's body: settings in, a run folder out.

Holds: loading of models, training tasks of either source, `train`, its progress in the terminal. Leaves out: the algorithm (grpo.py), flags (cli.py).
Exercise it: `python cli.py train --steps 3 --name try`. Read next: eval.py.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file

import colocated
import data
import ranks
import settings
import worlds
from agents import AGENTS, STATES
from data import Task
from graders import score
from grpo import GRPO, Tasks
from memagent import TEMPLATES, AgentConfig, Trajectory, window_of
from models import inner, load_model, merged, settle_threads, stored_dtype, with_lora
from plan import GRAPHS_GIB, geometry, plan
from progress import bar
from rollout import Engine, seed_of
from runs import Keeper, StepCSV, best, checkpoints, done_steps, load_checkpoint, read_state
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
    """Tasks of a file, in an order shuffled anew for every pass over it, or as they stand there."""

    levels = 0

    def __init__(self, tasks: list[Task], seed: int, shuffle: bool = True):
        self.tasks, self.seed, self.shuffle = tasks, seed, shuffle

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        if n > len(self.tasks):
            raise UserError(f"A step wants {n} tasks and the file has {len(self.tasks)}; lower --tasks-per-step.")
        per_pass = len(self.tasks) // n  # the remainder of a pass is left out, so that no task comes twice in a step
        order = list(range(len(self.tasks)))
        if self.shuffle:
            random.Random(seed_of(self.seed, step // per_pass)).shuffle(order)
        start = step % per_pass * n
        return [self.tasks[i] for i in order[start : start + n]]


def reward(form: str, outcome: str = "exact"):
    """The outcome reward: the final answer's box (or sentence) equals an accepted answer, or the share of the answers it holds where all
    are asked for; nothing else counts (spec memagent.md 4). outcome: `GRPOConfig.outcome`."""
    name = {"exact": "reward"}.get(outcome, outcome)

    def of(trajectory: Trajectory) -> float:
        scores = score(trajectory.answer, trajectory.task.answers, form, trajectory.task.asks_for_all)
        return scores.reward if trajectory.task.asks_for_all else getattr(scores, name)

    return of


def states_of(run: RunConfig, config: GRPOConfig, form: str):
    """The rewards of single turns, of agents that have such."""
    if run.agent not in STATES:
        return None
    return partial(
        STATES[run.agent], form=form, memory=config.memory_reward, callback=config.callback_reward, tags=config.format_reward,
        match=config.recall_match, words=config.recall_words,
    )  # fmt: skip


class Steps:
    """What Lightning iterates over: one item a step, as many as are still to do."""

    def __init__(self, module: GRPO):
        self.module = module

    def __iter__(self):
        yield from range(self.module.done_steps, self.module.config.steps)


def on_gpu(run: RunConfig) -> bool:
    return run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available())


def dtype_of(run: RunConfig, config: GRPOConfig) -> str:
    """float32, bfloat16 or mixed, where the setting is auto."""
    if run.dtype != "auto":
        return run.dtype
    return "float32" if not on_gpu(run) else "bfloat16" if config.lora_rank else "mixed"


def tasks_of(run: RunConfig, config: GRPOConfig) -> Tasks:
    if run.data == "world":
        return WorldTasks(run.lengths, run.kinds, config.seed)
    return FileTasks(data.read(run.data), config.seed, run.shuffle)


def validation_of(run: RunConfig) -> list[Task]:
    """The tasks that a policy is validated on; of generated English the longest documents, about facts of the dev split."""
    if run.validation != "world":
        return data.read(run.validation)[: run.validation_n] if run.validation else []
    each = -(-run.validation_n // len(run.kinds))
    made = [task for kind in run.kinds for task in worlds.make_tasks(0, each, run.lengths[-1], kind, split="dev")]
    return made[: run.validation_n]


def policy_of(run: RunConfig, config: GRPOConfig, device: str = "", mixed: str = "float32"):
    """The untrained policy: a causal LM, in a peft model if it has adapters. mixed: the type of its weights where the setting is mixed."""
    dtype = dtype_of(run, config)
    dtype = mixed if dtype == "mixed" else dtype
    model = load_model(run.model or EMBEDDED, dtype, device or run.device, run.trust_remote_code, config.quantise)
    return with_lora(model, config) if config.lora_rank else model


def check(run: RunConfig, config: GRPOConfig, here: bool = True) -> None:
    """UserError for settings that cannot go together, or not `here`, on this machine."""
    if run.agent not in AGENTS:
        raise UserError(f"Unknown agent {run.agent!r}: choose one of {', '.join(AGENTS)}.")
    if run.engine == "vllm":
        colocated.check("1" if run.sleep == "auto" else run.sleep, config.lora_rank)
        if here and run.device == "cpu" and torch.cuda.is_available():
            raise UserError("vLLM computes on the GPU where there is one: leave --device cpu out, or use --engine transformers.")
    ranks_wanted = run.devices * run.num_nodes
    if min(config.tasks_per_step) < ranks_wanted:
        raise UserError(
            f"A step has {min(config.tasks_per_step)} tasks and there are {ranks_wanted} ranks: each needs one of its own."
        )
    if here and run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is at hand; use --device cpu.")
    if here and on_gpu(run) and torch.cuda.device_count() < run.devices:
        raise UserError(f"--devices {run.devices}, and this machine has {torch.cuda.device_count()}.")
    if sharded(run, config) and config.optimizer == "adamw8bit":
        raise UserError(
            "AdamW in 8 bits takes no weights in shards: use one device and --dtype float32 or bfloat16, or --optimizer adamw."
        )


def sharded(run: RunConfig, config: GRPOConfig) -> bool:
    """Whether FSDP2 holds the weights: on several ranks, and where they are computed with in another type."""
    return run.devices * run.num_nodes > 1 or dtype_of(run, config) == "mixed"


def build(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, rewards=None) -> GRPO:
    """Model, engine, tasks and module, before anything is written."""
    check(run, config)
    tasks = tasks_of(run, config)
    tasks.batch(0, 0, config.tasks_per_step[0])  # fails now, if it fails at all
    codec = Codec.load(run.model or EMBEDDED, trust_remote_code=run.trust_remote_code, thinking=agent_config.thinking)
    shards = sharded(run, config)
    # the weights are read once, on rank 0, and go to the GPUs as shards; those in 4 bits have none
    where = ("unset" if ranks.rank() else "cpu") if shards and not config.quantise else ""
    model, reference, validation = policy_of(run, config, where), None, validation_of(run)
    if config.kl and not config.lora_rank:
        reference = policy_of(run, config, where, mixed="bfloat16").requires_grad_(False)
    settle_threads(inner(model))
    engine = engine_for(run, config, agent_config, model, codec)
    return GRPO(
        model, engine, AGENTS[run.agent], (rewards or partial(reward, outcome=config.outcome))(agent_config.form), tasks, config, agent_config, reference,
        shards=shards, mixed=dtype_of(run, config) == "mixed", validation=validation, states=states_of(run, config, agent_config.form),
    )  # fmt: skip


def engine_for(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, policy, codec: Codec) -> Engine:
    """What samples for the trainer of `policy`."""
    dtype = dtype_of(run, config)
    dtype = "bfloat16" if dtype == "mixed" else dtype
    if run.engine == "transformers":
        shards = sharded(run, config)
        model = policy_of(run, config, mixed=dtype).requires_grad_(False) if shards else policy
        return TransformersEngine(inner(model), codec, max_rows=config.in_flight, copy=shards)
    window = min(run.engine_window or window_of(agent_config, run.agent), inner(policy).config.max_position_embeddings)
    sleep, kv_gib, share = run.sleep, run.kv_gib, 0.9
    if on_gpu(run):
        gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        mode = "qlora" if config.quantise else "lora" if config.lora_rank else "full"
        p = plan(geometry(run.model), mode, gpu_gib, run.devices * run.num_nodes, config, agent_config, reader=run.agent)
        if not p.fits and (sleep == "auto" or not kv_gib):
            raise UserError(
                f"By the plan this does not fit the GPU's {gpu_gib:.0f} GiB (cli.py plan); --sleep and --kv-gib try it all the same."
            )
        sleep, kv_gib = p.sleep if sleep == "auto" else sleep, kv_gib or p.cache
        share = min(0.95, (p.sampler + kv_gib + GRAPHS_GIB) / gpu_gib)
    elif sleep == "auto":
        sleep = "1"  # nothing is given up on a CPU, but the calls are the same
    with unpacked(policy, dtype) if config.quantise else contextlib.nullcontext(run.model or EMBEDDED) as weights:
        return colocated.ColocatedEngine(
            weights, codec, window, config.in_flight, kv_gib or 1.0, share, dtype, config.lora_rank, sleep, run.trust_remote_code
        )


@contextlib.contextmanager
def unpacked(policy, dtype: str) -> Iterator[Path]:
    """A folder with the weights that a 4-bit policy's stand for: vLLM would round its own, and not to the same."""
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        model = rounded(merged(policy), getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
        model.config.save_pretrained(folder)  # the model's own save_pretrained writes on rank 0 alone
        save_file({name: p.detach() for name, p in model.named_parameters()}, Path(folder, "model.safetensors"), {"format": "pt"})
        yield Path(folder)


def rounded(model, dtype: torch.dtype = torch.bfloat16):
    """The model with its weights, and nothing else, in `dtype`: the angles of the positions stay exact."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def quiet() -> None:
    """Lightning's hints about settings that are on purpose here are not for the user."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*is not supported when strategy.*")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a checkpoint of one process


def check_folder(folder: Path, resume: bool) -> None:
    """UserError if a run's results cannot lie there, or are another run's."""
    try:
        if folder.exists() and not resume:
            raise UserError(f"The run {folder} is there already: give another --name, or go on with it by --resume.")
        if resume and not folder.exists():
            raise UserError(f"There is no run {folder} to resume.")
    except OSError as error:
        raise UserError(f"The run {folder} cannot be there: {error.strerror}.") from error


def train(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, resume: bool = False, callbacks=(), rewards=None) -> Path:
    """Train and export; returns the run's folder. With `resume`, goes on from the folder's last checkpoint.

    With run.keep_checkpoints = 0 neither a checkpoint nor an export is written.

    A run is resumed with the settings it began with, but for `settings.MAY_CHANGE`; with more steps it goes on past its end (to the same
    numbers as if it had had them from the beginning, unless the learning rate falls: it falls by the share of the steps). A UserError
    before the end of the first step leaves no new folder. rewards: instead of `reward`. With several devices this process starts one for
    each and waits for them; `callbacks` and `rewards` are pickled then. Several machines are started by torchrun.
    """
    quiet()
    check(run, config)
    if ranks.launched() and ranks.started() != run.devices * run.num_nodes:
        raise UserError(f"torchrun has started {ranks.started()} processes; --devices times --num-nodes must be as many.")
    if ranks.launched() and not run.name:
        raise UserError("A run that torchrun starts needs a --name: every rank must know it.")
    if run.num_nodes > 1 and not ranks.launched():
        raise UserError(f"On {run.num_nodes} machines torchrun starts the command, on each of them (README, section Engines).")
    run = replace(run, name=run.name or datetime.now().strftime("%Y%m%d-%H%M%S"))
    folder = settings.run_path(run.runs, run.name)
    if ranks.first():
        check_folder(folder, resume)
        if resume and (wrong := settings.changed(settings.begun(folder), run=run, grpo=config, agent=agent_config)):
            which = ", ".join(wrong[:3]) + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
            raise UserError(f"The run {folder} began with other settings ({which}): leave these out, or give another --name.")
    if run.devices > 1 and not ranks.launched():
        return ranks.launch(_train, run.devices, run, config, agent_config, folder, resume, callbacks, rewards)
    return _train(run, config, agent_config, folder, resume, callbacks, rewards)


def _train(run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, folder: Path, resume: bool, callbacks, rewards) -> Path:
    """One rank's part of it."""
    quiet()
    shards = sharded(run, config)
    with ranks.joined(on_gpu(run)) if shards else contextlib.nullcontext():
        module = build(run, config, agent_config, rewards)
        with contextlib.closing(module.engine):
            start = done_steps(folder)
            if start > config.steps:
                raise UserError(f"The run {folder} has done {start} steps already: give --steps {start} or more.")
            ranks.barrier()  # nobody looks at the folder any more
            if start < config.steps:
                _fit(module, run, config, agent_config, folder, resume, start, callbacks)
            elif ranks.rank() == 0:
                settings.dump(folder / "config.yaml", run=run, grpo=config, agent=agent_config)
            ranks.barrier()  # vLLM ends the process group when it is closed
        del module
    if ranks.first() and run.keep_checkpoints:  # alone, with the GPU's memory given back
        export(folder)
    return folder


def _fit(
    module: GRPO, run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, folder: Path, resume: bool, start: int, callbacks
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
        settings.dump(folder / "config.yaml", run=run, grpo=config, agent=agent_config)

    # of generated English none is kept: its facts are split, and no fact that is trained on is ever asked for in an evaluation
    questions = run.data != "world"
    keeper = Keeper(
        folder, run.save_every, run.keep_trajectories, config.steps, run.keep_checkpoints, dtype_of(run, config), begin, questions
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
        ] if first else False,
        callbacks=[keeper, *(callbacks if first else ())],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, Steps(module))
    except UserError:
        if not resume and first and not module.done_steps:  # nothing was learnt: only the mistake would be left
            shutil.rmtree(folder)
        raise
    if module.done_steps != config.steps:
        raise RuntimeError(f"Training ended after {module.done_steps} of {config.steps} steps.")


def export(folder: Path, step: int | None = None, out: Path | None = None, dtype: str = "auto", of_best: bool = False) -> Path:
    """The policy of a run's checkpoint as transformers, peft and vLLM load it; returns its folder.

    step: which one, the last if None, or with of_best the best by validation. out: a new folder; None = `model` in the run's folder, which
    is replaced. A policy with adapters leaves them in OUT-adapter, or in `adapter` in the run's folder. Any number of ranks may have
    trained it: this is one process, on the host. All arithmetic is in float32, and then the weights are rounded to `dtype`; auto = the
    type of the base's. Written beside and renamed.
    """
    saved, stored = checkpoints(folder), settings.begun(folder)
    if not saved or not stored:
        raise UserError(f"{folder} is no run with a checkpoint.")
    if of_best and step is not None:
        raise UserError("Give --step or --best, not both.")
    if of_best and (step := best(folder)) is None:
        raise UserError(f"{folder} has no validation: train with --validation, or give --step.")
    step = max(saved) if step is None else step
    if step not in saved:
        raise UserError(f"{folder} has no checkpoint of step {step}; there are {', '.join(map(str, sorted(saved)))}.")
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
        if asked := {*data.trained_on(folder, before=step), *data.trained_on(stored["run"].get("model") or EMBEDDED)}:
            data.write_trained_on(temporary, sorted(asked))
        temporary.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write_export(checkpoint: Path, stored: dict, folder: Path, adapter: Path, dtype: str) -> None:
    """A run's checkpoint, with the settings that it began with, as a model folder."""
    run, config, agent = RunConfig(**stored["run"]), GRPOConfig(**stored["grpo"]), AgentConfig(**stored["agent"])
    # the base weights as they were in training: of the same type, and quantised on the same kind of processor, which rounds in its own way
    was = read_state(checkpoint)["dtype"]
    model = policy_of(replace(run, dtype="float32" if was == "mixed" else was), config, "" if config.quantise else "cpu")
    load_checkpoint(checkpoint, model)
    if config.lora_rank:
        model.save_pretrained(adapter)
        model = merged(model)
    dtype = stored_dtype(run.model or EMBEDDED, run.trust_remote_code) if dtype == "auto" else dtype
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    Codec.load(run.model or EMBEDDED, trust_remote_code=run.trust_remote_code).tokenizer.save_pretrained(folder)
    agent = replace(agent, max_sections=None)  # a cap of training: who reads with the policy reads all, unless told not to
    if agent.templates:
        (folder / "templates").mkdir()
        for turn in TEMPLATES:
            if (path := Path(agent.templates, f"{turn}.txt")).is_file():
                shutil.copy(path, folder / "templates")
    own = asdict(agent) | {"templates": "templates" if agent.templates else ""}
    settings.dump(folder / "agent.yaml", run={"agent": run.agent}, agent=own)


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
        self.task = self.progress.add_task("training", total=self.steps, completed=module.done_steps, note="")
        self.progress.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        m = module.metrics
        rate = (m["read_tokens"] + m["written_tokens"]) / m["step_s"]
        note = f"reward {m['reward']:.2f}  turns {m['turns']:.0f}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=module.done_steps, note=note)
        for step, found in module.proofs[self.proofs :]:
            new, old = found.new**0.5, found.old**0.5
            self.progress.print(f"step {step:>4}  weights reach the sampler: {new:.1g} off, the old ones {old:.1g}")
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
