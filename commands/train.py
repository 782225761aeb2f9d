"""The body of `train` and `sft`: settings in, the folder of a run out. The algorithm is grpo.py's;
what a run's folder holds, and how it is resumed, is report/runlog.py's.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from agents import find
from agents.rewards import Reward
from commands import contents
from commands.export import export
from commands.sft import SFT
from config import files, stops
from config.errors import UserError, kept
from config.files import check_folder
from config.locks import writing
from config.options import TINY, RunConfig, SFTConfig, TrainConfig
from config.plugins import load_function
from config.terminal import bar, command_line, next_step, say
from engines import vllm_colocated
from engines.open import check_frozen, open_sampler
from grpo import GRPO
from memagent import Agent, Trajectory
from models import ranks
from models.checkpoints import base_fingerprints, checkpoints, newest, read_state
from models.dtypes import check_device
from models.load import check_architecture, inner, settle_threads
from models.logprobs import mask_head
from models.packaged import ready
from models.policy import LR, Policy, adapt_training, check_stored, divide_adapter
from report.loggers import logger_class, make_logger
from report.runlog import RunRecorder, StepCSV
from report.training import TROUBLES, WATCHED, amiss, troubles
from rollout import advance
from rollout import start as begin
from suites._training import GENERATED, never_trained, training_tasks, validation_tasks
from tasks import hub

RewardFunction = Callable[[Trajectory], object]


# ---------------------------------------------------------------- what can be trained


def check(
    run: RunConfig, config: TrainConfig, agent: Agent, policy: Policy, here: bool = True
) -> None:
    """Refuse settings that cannot go together, or that this machine cannot do (`here`)."""
    if not agent.trains:
        raise UserError(
            f"The agent {agent.label} makes no turn that could be trained: name another one."
        )
    check_frozen(run, config.lora_rank, agent)
    check_stored(run.model, policy.quantise)
    for place in run.logger:
        logger_class(place)
    if run.engine == "vllm":
        vllm_colocated.check_settings("1" if run.sleep == "auto" else run.sleep, config.lora_rank)
        if run.device == "mps" or (here and run.device == "cpu" and torch.cuda.is_available()):
            raise UserError("vLLM computes on CUDA's GPU where there is one: leave --device out.")
    if min(config.tasks_per_step) < policy.ranks:
        raise UserError(
            f"A step has {min(config.tasks_per_step)} tasks and there are {policy.ranks} ranks: "
            "each needs one of its own."
        )
    if here:
        check_device(policy.device)
        if policy.on_gpu and torch.cuda.device_count() < run.devices:
            raise UserError(f"This machine has {torch.cuda.device_count()} GPUs.")
    if policy.sharded and (policy.device == "mps" or config.optimizer == "adamw8bit"):
        raise UserError("Weights are not sharded on mps, nor under AdamW in 8 bits.")
    if policy.dtype == "bfloat16" and not config.lora_rank:
        # one of .02, a usual one, stays where it is unless it moves by 6e-5: AdamW moves it by --lr
        raise UserError(
            "Weights in bfloat16 would round most of their own updates away, step after step: "
            "train adapters by --lora-rank, or all weights with --dtype float32 or mixed."
        )


def resolved(
    run: RunConfig, config: TrainConfig, agent: Agent, here: bool = True
) -> tuple[RunConfig, TrainConfig, Policy]:
    """Resolve what a training uses, and refuse what cannot be, before anything is fetched."""
    run = divide_adapter(run)
    config = adapt_training(config, run)
    policy = Policy.of_training(run, config, agent)
    check(run, config, agent, policy, here)
    return run, config, policy


def build(
    run: RunConfig,
    config: TrainConfig,
    agent: Agent,
    reward: RewardFunction | None = None,
    policy: Policy | None = None,
) -> GRPO:
    """Make model, engine, tasks and module of a training, and write nothing; without a policy the
    settings are resolved first."""
    if policy is None:
        run, config, policy = resolved(run, config, agent)
    tasks, validation = training_tasks(run, config), validation_tasks(run)
    batch = tasks.batch(0, 0, config.tasks_per_step[0])  # fails now, if it fails at all
    if run.reward:
        reward = Reward(load_function(run.reward, "--reward"), run.reward)
    codec = policy.codec()
    if codec.end_id is None:
        raise UserError(
            "Neither the tokenizer nor a config of the model names a token that ends a response "
            "(eos_token_id), so none could be learnt: name one in its config.json."
        )
    # the weights are read once, on rank 0, and go to the GPUs as shards; those in 4 bits have none
    loaded, here = policy, True
    if policy.sharded and not policy.quantise:
        loaded, here = replace(policy, device="cpu"), ranks.rank() == 0
    model, reference = loaded.load_trainable(config, weights=here), None
    check_architecture(inner(model))
    warm = isinstance(config, SFTConfig)
    if not warm and config.kl and (policy.adapter or not config.lora_rank):
        reference = loaded.load_trainable(config, policy.compute_dtype, here).requires_grad_(False)
    for each in filter(None, (model, reference)):
        mask_head(inner(each), codec)
    settle_threads(inner(model), run.devices)
    engine = open_sampler(run, config, agent, policy, model, codec)
    agent = rewarded(agent, reward)
    reader = agent.on(codec, engine.window)
    for task in (*batch, *validation):  # what the agent refuses is said now
        reader.check(task)
    advance(reader, begin(reader, batch[0]))  # the first prompt likewise
    kind = SFT if warm else GRPO
    return kind(model, engine, agent, tasks, config, reference, policy.sharding, validation)


def rewarded(agent: Agent, reward: RewardFunction | None) -> Agent:
    """Return an agent whose reward is a function of the finished trajectory."""
    if reward is None:
        return agent
    agent = copy.copy(agent)
    agent.reward = reward if isinstance(reward, Reward) else Reward(reward)
    return agent


# ---------------------------------------------------------------- the command


def run_and_report(
    run: RunConfig, config: TrainConfig, agent: Agent, resume: bool, say: Callable[[str], None]
) -> None:
    """Train, then write summary and report; `say` is told where everything is."""
    from report.folder import reading
    from report.page import finish_report
    from report.runlog import summary
    from report.summary import write_summary

    run = _name(hub.pinned(run, say))
    folder = files.run_path(run.runs, run.name)
    shown = [TrainingPage(folder, run.save_every), TrainingProgress(config.steps, run.data)]
    try:
        with stops.stoppable():
            train(run, config, agent, resume, callbacks=shown)
    except stops.Stopped as stop:
        raise stops.Stopped(stop.number, f"stopped. {_whole(run, config, agent)}") from None
    if not ranks.is_first():  # one of torchrun's other processes
        return
    if not _is_demo(folder):
        with reading(folder / "metrics.csv"):
            write_summary(folder / "summary.json", summary(folder))
        finish_report(folder, f"The training is over and whole in {folder}")
    say(f"The training is in {folder / 'report.html'}.")
    if run.keep_checkpoints:
        say(f"The policy is in {folder / 'model'}.")
    _next(run, config, agent, folder)


def _is_demo(folder: Path) -> bool:
    """Tell whether summary and page of a run are an evaluation's."""
    return (folder / "rows.jsonl").exists()


def _next(run: RunConfig, config: TrainConfig, agent: Agent, folder: Path) -> None:
    """Say what to do with the policy: train one that is warm, else evaluate it on tasks that it has
    not seen; without either see what was read."""
    named = () if agent.label == find.DEFAULT else ("--agent", agent.name)
    usual = run.data in ("", RunConfig().data)
    unseen = run.data if run.data in GENERATED else run.validation
    if run.keep_checkpoints and isinstance(config, SFTConfig):
        kind, place = ("lora", "adapter") if (folder / "adapter").exists() else ("full", "model")
        data = () if usual else ("--data", run.data)
        real = run.model not in ("", TINY)
        settings = ("--lr", LR[kind]) if real else ("--preset", "demo")
        why, words = "train it with rewards", ("train", "--name", f"{run.name}-grpo")
        words += ("--model", folder / place, *named, *data, *settings)
    elif run.keep_checkpoints and (usual or unseen):
        why, words = "evaluate it on unseen questions", ("eval", "--name", f"{run.name}-eval")
        words += ("--model", folder / "model", *(() if usual else ("--data", unseen)))
        words += ("--agents", f"{agent.name},full") if named else ()
    else:
        return next_step("see what it read", "show", folder)
    next_step(why, *words, runs=run.runs)


def _whole(run: RunConfig, config: TrainConfig, agent: Agent) -> str:
    """Say what is whole of a run that has ended early, and by which command it goes on.

    The command repeats what no file may name (`find.check_reach`).
    """
    folder = files.run_path(run.runs, run.name)
    step, saved = newest(folder), checkpoints(folder)
    if not (run.keep_checkpoints and (folder / "config.yaml").exists()):
        return "No step of it is whole, so that there is nothing to go on from."
    words = "sft" if isinstance(config, SFTConfig) else "train", "--resume", "--name", run.name
    runs = () if run.runs == RunConfig().runs else ("--runs", run.runs)
    settings = asdict(run) | asdict(config) | asdict(agent.config) | {"bank": ""}
    reach = " ".join(dict.fromkeys(flag for _, flag, _, _ in find.reach(settings, loaded=True)))
    whole = (
        f"Step {step} of {config.steps} is whole in {saved[step]}"
        if saved
        else "No step is whole yet"
    )
    return f"{whole}; go on with: {command_line(*words, *runs)} {reach}".rstrip()


# ---------------------------------------------------------------- a run


def train(
    run: RunConfig,
    config: TrainConfig,
    agent: Agent,
    resume: bool = False,
    callbacks=(),
    reward: RewardFunction | None = None,
) -> Path:
    """Train and export; return the run's folder. With `resume`, go on from its last checkpoint.

    With run.keep_checkpoints = 0 neither a checkpoint nor an export is written.

    A run is resumed with the settings that it began with, except those in `find.MAY_CHANGE`, and
    with the same data and code, wherever these files lie now. With more steps it goes on past its
    end, to the same numbers as if it had had them from the beginning (unless the learning rate
    decays, which goes by the share of the steps). A UserError before the end of the first step
    leaves no new folder.

    reward: instead of the agent's own. With several devices this process starts one for each and
    waits for them; `callbacks` and `reward` are pickled then. Several machines are started by
    torchrun.
    """
    find.find(run.agent)
    if resume and run.dtype == "auto":
        began = _began(files.run_path(run.runs, run.name)).get("run", {})
        run = replace(run, dtype=began.get("dtype", "auto"))
    run, config, policy = resolved(run, config, agent)
    run = replace(_name(run), agent=agent.name or run.agent, dtype=policy.dtype)
    folder = files.run_path(run.runs, run.name)
    if ranks.is_first():
        check_folder(folder, resume)
        if resume:
            _check_same(folder, run, config, agent)
    # Converted now if it has to be: in a process group transformers writes on rank 0 alone
    ready(policy.model)
    rest = policy, folder, resume, callbacks, reward
    if run.devices == 1 or ranks.is_launched():
        return _train(run, config, agent, *rest)
    with kept(lambda: _whole(run, config, agent)):
        return ranks.launch(_train_rank, run.devices, run, config, asdict(agent.config), *rest)


def _name(run: RunConfig) -> RunConfig:
    """Return the settings with a name of the run.

    UserError: they do not fit the way in which this process was started.
    """
    world = run.devices * run.num_nodes
    if not ranks.is_launched() and run.num_nodes > 1:
        raise UserError(
            f"On {run.num_nodes} machines torchrun starts the command, on each of them "
            "(docs/train.md)."
        )
    if ranks.is_launched() and not (run.name and ranks.launched_world() == world):
        raise UserError(
            f"torchrun has started {ranks.launched_world()} processes: --devices times num_nodes "
            "must be as many, and every rank must know a --name."
        )
    return replace(run, name=files.name_or_now(run.name))


def _sections(run: RunConfig, config: TrainConfig, agent: Agent) -> dict[str, object]:
    """Return the sections of a run's config.yaml."""
    return {"run": run, find.section_of(config): config, "agent": agent.config}


def _began(folder: Path) -> dict[str, dict]:
    """Return the settings that a run began with: where an earlier version wrote `auto`, the dtype
    that its checkpoint has, if there is one."""
    stored = find.begun(folder, None)
    if stored.get("run", {}).get("dtype") == "auto":
        del stored["run"]["dtype"]
        if saved := checkpoints(folder):
            stored["run"]["dtype"] = read_state(saved[max(saved)])["dtype"]
    return stored


def _check_same(folder: Path, run: RunConfig, config: TrainConfig, agent: Agent) -> None:
    """Refuse to resume a run with other settings, data or code than it began with."""
    changed, same = contents.compare(folder, contents.of_training(run, config, agent))
    settings = find.changed(_began(folder), **_sections(run, config, agent))
    wrong = [words for words in settings if words.partition(" ")[0] not in same]
    if wrong := wrong + [f"the content of {file}" for file in changed]:
        place = folder / ("adapter" if (folder / "adapter").exists() else "model")
        raise UserError(
            f"The run {folder} began with other settings ({', '.join(wrong)}): leave these as they "
            f"were, or go on from what it has learnt by another --name and --model {place}."
        )


def _train_rank(run: RunConfig, config: TrainConfig, settings: dict, *rest) -> Path:
    """Be one of several processes: an agent of the user's file is loaded in each of them."""
    return _train(run, config, find.make(run.agent, settings), *rest)


def _train(
    run: RunConfig,
    config: TrainConfig,
    agent: Agent,
    policy: Policy,
    folder: Path,
    resume: bool,
    callbacks,
    reward: RewardFunction | None,
) -> Path:
    """Do one rank's part of a training."""
    _silence_lightning()
    with kept(lambda: _whole(run, config, agent)), contextlib.ExitStack() as open_ones:
        if ranks.is_first():
            open_ones.enter_context(writing(folder, f"The run {folder}"))
        if policy.sharded:
            open_ones.enter_context(ranks.process_group(policy.on_gpu))
        first = ranks.rank() == 0
        dtype = ranks.all_gather_object(policy.dtype)[0]  # each may have timed a machine of its own
        run, policy = replace(run, dtype=dtype), replace(policy, dtype=dtype)
        module = build(run, config, agent, reward, policy)
        open_ones.callback(module.engine.close)
        open_ones.callback(module.agent.close)
        start = ranks.all_gather_object(newest(folder))[0]
        if start > config.steps:
            raise UserError(
                f"The run {folder} has done {start} steps already: give --steps {start} or more."
            )
        sections = _sections(run, config, agent)
        if first:
            folder.mkdir(parents=True, exist_ok=resume)
            if start == config.steps:
                say(f"Step {start} of {start} is done: a larger --steps goes on.")
            read = contents.section(contents.of_training(run, config, agent))
        base = base_fingerprints(run, config.lora_rank, getattr(config, "kl", 0)) if first else {}
        recorder = RunRecorder(
            folder,
            run.save_every,
            run.keep_trajectories,
            config.steps,
            run.keep_checkpoints,
            policy.dtype,
            begin=lambda: files.dump(folder / "config.yaml", **sections, **read),
            # questions of generated English are not kept: its facts are split, and no fact
            # that is trained on is ever asked for in an evaluation
            questions=run.data not in GENERATED,
            base=ranks.all_gather_object(base)[0],
        )
        loggers = _loggers(run, sections, folder, start) if first else False
        shown = [recorder, *(callbacks if first else ())]
        _fit(_trainer(run, policy, loggers, shown), module, start, folder, resume)
        ranks.barrier()  # vLLM ends the process group when it is closed
    del module
    if ranks.is_first() and run.keep_checkpoints:  # alone, with the GPU's memory released
        with kept(lambda: _whole(run, config, agent)):
            export(folder, newest(folder), trusted=True)
    return folder


def _silence_lightning() -> None:
    """Hide Lightning's hints about settings that are on purpose here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*is not supported when strategy.*")
    # a checkpoint of one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # TensorBoard writes in a thread, whose errors are raised in this one as well
    threading.excepthook = lambda hook: (
        None if isinstance(hook.exc_value, OSError) else threading.__excepthook__(hook)
    )


def _fit(trainer: lightning.Trainer, module: GRPO, start: int, folder: Path, resume: bool) -> None:
    """Do the steps from `start` on, none where all are done."""
    try:
        with stops.waiting():
            trainer.fit(module, range(start, module.config.steps))  # an item a step
    except (UserError, OSError, stops.Stopped):
        if ranks.rank() == 0 and not resume and not module.done_steps:
            shutil.rmtree(folder)  # nothing was learnt: only the mistake would be left
        raise
    if (steps := module.config.steps) != module.done_steps:
        raise RuntimeError(f"Training ended after {module.done_steps} of {steps} steps.")


def _trainer(run: RunConfig, policy: Policy, loggers, callbacks) -> lightning.Trainer:
    """Make Lightning's trainer: it counts steps, shards weights and calls the recorder."""
    strategy = "auto"
    if policy.sharded:
        strategy = ModelParallelStrategy(
            data_parallel_size=policy.ranks,
            tensor_parallel_size=1,
            process_group_backend="nccl" if policy.on_gpu else "gloo",
        )
    return lightning.Trainer(
        accelerator=policy.device,
        devices=run.devices,
        num_nodes=run.num_nodes,
        strategy=strategy,
        max_epochs=1,
        logger=loggers,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _loggers(run: RunConfig, sections: dict[str, object], folder: Path, start: int) -> list:
    """Make all loggers of a run that has done `start` steps; metrics.csv is told first."""
    settings = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in asdict(values).items()
    }
    return [
        StepCSV(folder / "metrics.csv", start),
        TensorBoardLogger(folder, name="tensorboard", version="", purge_step=start),
        *(make_logger(place, folder, settings) for place in run.logger),
    ]


# ---------------------------------------------------------------- in the terminal


class TrainingPage(lightning.Callback):
    """The run's page, written at every checkpoint and where the run ends before its time."""

    def __init__(self, folder: Path, save_every: int):
        self.folder, self.save_every = folder, save_every

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if module.done_steps % self.save_every == 0 and module.done_steps < module.config.steps:
            self._write(running=True)

    def on_exception(self, trainer, module, exception) -> None:
        if module.done_steps and not isinstance(exception, stops.StoppedNow):
            self._write(running=False)

    def _write(self, running: bool) -> None:
        from report.page import try_report

        if self.folder.exists() and not _is_demo(self.folder):
            if why := try_report(self.folder, running):
                say(why, "red")


LINE_EVERY = 10  # steps, in a terminal


class TrainingProgress(lightning.Callback):
    """One bar for the steps, and now and then a line that stays; outside a terminal no bar and a
    line every step. What goes wrong is said once each time that it begins."""

    def __init__(self, steps: int, data: str = ""):
        """data: what is trained on, of which it is said what no step reaches; "": not said."""
        self.steps, self.data = steps, data
        self.last = deque[dict[str, float]](maxlen=WATCHED)  # metrics of steps
        self.known: list[str] = []  # the troubles of the last step
        self.validated: dict[str, float] = {}
        self.progress = None  # until training starts: an error before that has no bar to stop

    def on_train_start(self, trainer, module) -> None:
        self.validated = module.validated
        if self.data and (words := never_trained(module.tasks, self.data, module.config)):
            say(words, "yellow")
        self.progress = bar("steps")
        self.task = self.progress.add_task(
            "training", total=self.steps, completed=module.done_steps, note=""
        )
        self.progress.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        m, done, to = module.metrics, module.done_steps, self.progress.console
        if module.validated is not self.validated:
            self.validated = module.validated
            score, n = self.validated["score"], self.validated["n"]
            self._print(done, f"validation {score:.3f} (n {n} of {len(module.validation)})")
        if (wrong := amiss(m)) or done % LINE_EVERY == 0 or not to.is_terminal:
            times = f"rollout {m['rollout_s']:.1f} s", f"update {m['update_s']:.1f} s"
            self._print(done, *wrong, module.progress, *times)  # what fits, from the left
        warnings = [] if self.last else self._of_first_step(module)
        self.last.append(m)
        found = troubles([*self.last])
        for words in warnings + [TROUBLES[kind] for kind in found if kind not in self.known]:
            say(f"step {done:>4}  {words}", "yellow", to)
        self.known = found
        rate = (m["read_tokens"] + m["written_tokens"]) / m["step_s"]
        note = f"{module.progress.partition('  ')[0]}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=done, note=note)

    def _of_first_step(self, module) -> list[str]:
        warnings = []
        if cut := int(module.metrics.get("documents_cut", 0)):
            warnings.append(
                f"{cut} readings leave out a part of their document, by --max-sections or the "
                "model's window: what stands there is not trained on."
            )
        if module.samples and not module.proofs:
            warnings.append(
                "That new weights reach the sampler could not be proven (docs/train.md)."
            )
        return warnings

    def _print(self, step: int, *parts: str) -> None:
        self.progress.print("  ".join((f"step {step:>4}", *parts)))

    def on_train_end(self, trainer, module) -> None:
        self.progress.stop()

    def on_exception(self, trainer, module, exception) -> None:
        if self.progress:
            self.progress.stop()
