"""The demos: GRPO on the embedded policy, then the trained agent beside others on unseen facts.

Holds: `run_demo`; `Plan`: what a demo trains and asks; `usual`, that of an agent beside its
untrained self and full context, and `compared`, that of an agent with a demo of its own. Leaves
out: what these train and ask (agents/demos.py), training (commands/train.py), evaluation (eval.py).
Exercise it: `python cli.py demo --short`. Read next: dev/LESSONS.md.

Training reads facts of the train split in documents of at most 16 sections; evaluation asks for
facts of the test split, in documents of up to 1,024. Two processes train the one agent of the usual
demo; then all cores evaluate.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from agents import find
from agents.demos import Demo
from config import files, stops
from config.errors import UserError
from config.locks import writing
from config.options import EMBEDDED, GRPOConfig, RunConfig, StreamConfig
from config.terminal import bar, console, next_step
from data import Task
from suites import ledger
from tasks import worlds

if TYPE_CHECKING:
    from rollout import Engine

FULL = "full"  # the agent, and its label
MARK = ".demo"  # a folder with this file is a demo's: the next demo of its name replaces it


@dataclass(frozen=True, slots=True)
class Amount:
    """Size of the usual demo: steps of GRPO, and for every policy sections -> questions of each
    kind."""

    steps: int
    sampled: dict[int, int]  # trained, temperature 1
    greedy: dict[int, int]  # trained, temperature 0
    untrained: dict[int, int]  # both temperatures
    full_context: dict[int, int]  # both temperatures


AMOUNTS = {
    "default": Amount(
        steps=110,
        sampled={4: 128, 16: 128, 64: 128, 256: 64, 1024: 24},
        greedy={4: 128, 16: 128, 64: 64, 256: 16, 1024: 8},
        untrained={4: 128, 16: 128, 64: 32, 256: 8, 1024: 4},
        full_context={4: 128, 16: 128, 64: 32, 256: 32, 1024: 32},
    ),
    "long": Amount(
        steps=150,
        sampled={4: 512, 16: 512, 64: 256, 256: 128, 1024: 96},
        greedy={4: 512, 16: 256, 64: 128, 256: 64, 1024: 32},
        untrained={4: 512, 16: 256, 64: 64, 256: 32, 1024: 8},
        full_context={4: 256, 16: 256, 64: 128, 256: 64, 1024: 64},
    ),
    "short": Amount(3, {2: 8, 4: 8}, {2: 8, 4: 8}, {2: 8, 4: 8}, {2: 8, 4: 8}),
}


# ---------------------------------------------------------------- the parts, done in any process


@dataclass(frozen=True, slots=True)
class Questions:
    """What one policy is asked at one length."""

    label: str  # of their rows
    agent: str
    settings: dict  # of the agent
    model: str
    kinds: tuple[str, ...]
    seed: int
    folder: Path
    asks: tuple[tuple[float, int], ...] = ()  # (temperature, questions of each kind)
    sections: int = 0
    trained: int = 0  # the seed of its training
    base: str = ""  # the policy that answers frozen prompts; "" = the model itself

    def of_each_length(self, sampled: Mapping, greedy: Mapping) -> list[Questions]:
        """Return one of these a length; sections -> questions at temperature 1 and 0."""
        found = []
        for sections in sorted({*sampled, *greedy}):
            counts = (1.0, sampled.get(sections)), (0.0, greedy.get(sections))
            asks = tuple((temperature, n) for temperature, n in counts if n)
            found.append(replace(self, sections=sections, asks=asks))
        return found

    def __call__(self) -> list[dict]:
        """Ask; return the rows."""
        from engines.frozen import WithFrozen

        engine, model = _engine(self.model)
        if self.base not in ("", self.model):
            engine = WithFrozen(engine, _engine(self.base)[0])
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [row for each in self.asks for row in self._ask(engine, model, *each)]
        return [row | {"trained": self.trained} for row in rows]

    def _ask(self, engine: Engine, model: str, temperature: float, n: int) -> list[dict]:
        from eval import Conditions, evaluate
        from report.rows import Cell
        from rollout import Sampling

        name = f"{self.label}-{'+'.join(self.kinds)}-{temperature:g}-{self.sections}"
        by_kind = [self._tasks(kind, n) for kind in self.kinds]
        transcripts = self.folder / f"{name}.transcripts"
        return evaluate(
            engine,
            find.make(self.agent, self.settings),
            (task for tasks in zip(*by_kind, strict=True) for task in tasks),
            Sampling(temperature),
            Cell(self.label, "", "", self.sections),
            self.folder / f"{name}.jsonl",
            Conditions(
                *(model, "float32", self.seed),
                record_to=transcripts,
                n_records=2 * len(self.kinds),
            ),
        )

    def _tasks(self, kind: str, n: int) -> Iterator[Task]:
        if kind == ledger.KIND:
            return ledger.make_questions(self.seed, n, self.sections, "test")
        return worlds.make_tasks(self.seed, n, self.sections, kind, "test")


@lru_cache(maxsize=2)
def _engine(model: str):
    from engines.open import open_engine
    from models.policy import Policy, fingerprint

    return open_engine(Policy(model)), fingerprint(model)


@dataclass(frozen=True, slots=True)
class Training:
    """A training, with the questions that follow."""

    run: RunConfig
    grpo: GRPOConfig
    settings: dict  # of the agent `run.agent`
    then: tuple[Questions, ...] = ()

    def train(self, **how) -> Path:
        from commands.train import train

        return train(self.run, self.grpo, find.make(self.run.agent, self.settings), **how)

    def __call__(self) -> list[dict]:
        """Train, and write the page of that; there are no rows."""
        from report.page import write_report
        from report.runlog import summary
        from report.summary import write_summary

        folder = self.train()
        write_summary(folder / "summary.json", summary(folder))
        write_report(folder, title=f"Training {folder.name}")
        return []


# ---------------------------------------------------------------- what a demo does


@dataclass(frozen=True, slots=True)
class Plan:
    """What a demo trains and asks."""

    title: str
    about: str
    trainings: list[Training]
    baselines: list[Questions]
    alone: bool = False  # the one training is done in this process, which shows its steps
    unit: str = "sections"
    rivals: tuple[str, ...] = ()  # labels of what the trained agent is compared with


def usual(agent: str, size: str, seed: int, folder: Path) -> Plan:
    """Plan the demo of an agent beside its untrained self and full context."""
    import torch

    amount = AMOUNTS[size]
    # two ranks on a CPU; a GPU is one device
    devices = 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)
    run = RunConfig(
        name=folder.name, runs=str(folder.parent), agent=agent, keep_trajectories=5, devices=devices
    )
    grpo, reader = find.resolve("demo", EMBEDDED, {"steps": amount.steps, "seed": seed}, {}, agent)
    settings = find.of_model(EMBEDDED) | asdict(reader.config)  # full context reads with them too
    rest = ("one_fact", "two_hop"), seed + 1_000_000, folder / "rows"
    trained = Questions("trained", agent, settings, str(folder / "model"), *rest)
    untrained = replace(trained, label="untrained", model=str(EMBEDDED))
    full = replace(untrained, label=FULL, agent=FULL)
    then = tuple(trained.of_each_length(amount.sampled, amount.greedy))
    baselines = [
        *untrained.of_each_length(amount.untrained, amount.untrained),
        *full.of_each_length(amount.full_context, amount.full_context),
    ]
    about = (
        f"Demo, seed {seed}: {amount.steps} steps of GRPO on documents of {run.lengths[0]} to "
        f"{run.lengths[-1]} sections, then questions about unseen facts in documents of up to "
        f"{max(amount.sampled):,} sections."
    )
    training = Training(run, grpo, settings, then)
    return Plan("memagent: the demo", about, [training], baselines, alone=True)


def compared(name: str, demo: Demo, size: str, seed: int, folder: Path) -> Plan:
    """Plan an agent's own demo: the same base policy, steps, trajectories and questions for all
    that are trained; seed: the first of the trainings."""
    amount, base = demo.sizes[size], str(EMBEDDED.parent / demo.model if demo.model else EMBEDDED)
    arms, seeds = (name, *demo.beside), range(seed, seed + amount.seeds)
    ablations = demo.ablations if amount.ablate else {}

    def ask(label: str, agent: str, settings: dict, model: str, trained: int) -> list[Questions]:
        rest = (demo.kind,), seed + 1_000_000, folder / "rows" / str(trained)
        questions = Questions(label, agent, settings, model, *rest, trained=trained, base=base)
        return questions.of_each_length(amount.questions, amount.questions)

    def training(arm: str, seed: int, ablation: str = "") -> Training:
        run = RunConfig(
            name=ablation.replace(" ", "-") or f"{arm}-{seed}",
            runs=str(folder),
            model=base if demo.model else "",
            data=demo.data,
            agent=arm,
            kinds=(demo.kind,) if demo.data == "world" else RunConfig().kinds,
            lengths=amount.lengths[arm],
            keep_trajectories=5,
        )
        fields, changed = amount.training[arm] | {"seed": seed}, ablations.get(ablation, {})
        grpo, agent = find.resolve("demo", base, fields, changed, arm)
        settings, model = asdict(agent.config), str(folder / run.name / "model")
        # the first trained agent answers with other settings, too
        variants = demo.variants if not ablation and (arm, seed) == (name, seeds[0]) else {}
        then = [
            questions
            for label, changes in ({ablation or arm: {}} | variants).items()
            for questions in ask(label, arm, settings | changes, model, seed)
        ]
        return Training(run, grpo, settings, tuple(then))

    trainings = [training(arm, each) for each in seeds for arm in arms]
    trainings += [training(name, seed, ablation) for ablation in ablations]
    others = {f"untrained {arm}": arm for arm in arms} | {agent: agent for agent in demo.baselines}
    settings = find.of_model(base)
    baselines = [q for label, arm in others.items() for q in ask(label, arm, settings, base, seed)]
    unit = "sessions" if demo.data == ledger.KIND else "sections"
    about = (
        f"{' beside '.join(arms)}, {len(seeds)} seeds from {seed} on: {trainings[0].grpo.steps} "
        f"steps of GRPO each from the same policy, on {demo.about}; then questions about unseen "
        f"facts in documents of up to {max(amount.questions):,} {unit}."
    )
    rivals = arms[1:2] or tuple(others)
    return Plan(demo.title, about, trainings, baselines, unit=unit, rivals=rivals)


@stops.saying("A demo does not go on: the same command begins it anew.")
def run_demo(size: str, seed: int, name: str, runs: str, agent: str = find.DEFAULT) -> Path:
    """Train an agent, evaluate it, write the report; return the folder."""
    start, kind = time.perf_counter(), find.find(agent)
    if "arms" in kind.extras:
        return _stream(size, seed, name, runs)
    folder = _folder(name, runs)
    plan = (
        compared(agent, kind.extras["demo"], size, seed, folder)
        if "demo" in kind.extras
        else usual(agent, size, seed, folder)
    )
    console.print(f"{plan.about}\nResults go to {folder}.")
    if size == "short":
        console.print("A short demo shows that everything runs: its figures say nothing more.")
    rows, training_s = _work(plan)
    facts: dict = {"seed": seed, "size": size, "seconds": round(time.perf_counter() - start, 1)}
    if plan.alone:
        facts["training_seconds"] = round(training_s, 1)
    _report(folder, plan, rows, facts)
    if size == "short":
        next_step("train it in full, in some five minutes", "demo", runs=runs)
    elif plan.alone:
        words = "ask", "-", "Where is Anna?", "--model", folder / "model"
        text = "Anna joined Boris. Clara met Felix. Boris toured Oslo."
        next_step("ask it about a text of yours", *words, runs=runs, given=text)
    else:
        next_step("see what was wrong", "show", folder, "--wrong")
    return folder


def _stream(size: str, seed: int, name: str, runs: str) -> Path:
    """Show in seconds, without a model, what utilities are good for; return the folder."""
    from commands.stream import run_stream

    _folder(name, runs)
    epochs = {"short": 2, "default": 10, "long": 30}[size]
    arms = tuple(find.learner().extras["arms"])
    config = StreamConfig(name=name, runs=runs, suite="bandit", epochs=epochs, seed=seed,
                          engine="rehearsed", arms=arms)  # fmt: skip
    return run_stream(config, {})


def _folder(name: str, runs: str) -> Path:
    """Make an empty folder for a demo's results; an earlier demo of this name is deleted."""
    folder = files.run_path(runs, name)
    if folder.exists():
        if not (folder / MARK).exists():
            raise UserError(f"{folder} exists and is not a demo's: give another --name.")
        with writing(folder, f"The demo {folder}"):
            shutil.rmtree(folder)
    files.make_folder(folder)
    (folder / MARK).touch()
    return folder


# ---------------------------------------------------------------- the work

# what every process needs is imported by the one that they are forked from
PRELOADED = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "engines.hf",
    "engines.open",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def _pool() -> ProcessPoolExecutor:
    """Return processes that train and ask, each with one thread; none starts before its work."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    # a terminal sends Ctrl-C to all of them, and this process alone heeds it
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    return ProcessPoolExecutor(min(8, os.cpu_count() or 1), context, _begin)


def _begin() -> None:
    """Begin a process of the pool, which leaves no semaphore of tqdm's behind when it is ended."""
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())


def _work(plan: Plan) -> tuple[list[dict], float]:
    """Train and ask; return all rows, and the seconds of a training in this process.

    An exception of any part, and Ctrl-C, end all processes.
    """
    pool, rows, seconds = _pool(), list[dict](), 0.0
    trained = [part for training in plan.trainings for part in training.then]
    stages = [[*plan.trainings, *plan.baselines], trained]
    try:
        if plan.alone:
            from commands.train import TrainingProgress

            (training,), start = plan.trainings, time.perf_counter()
            training.train(resume=True, callbacks=[TrainingProgress(training.grpo.steps)])
            seconds = time.perf_counter() - start
            # the longest first
            stages = [sorted([*trained, *plan.baselines], key=lambda part: -part.sections)]
        with bar("parts") as progress:
            shown = progress.add_task("all parts", total=sum(map(len, stages)), note="")
            for parts in stages:
                for future in as_completed([pool.submit(part) for part in parts]):
                    rows += future.result()
                    progress.advance(shown)
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return rows, seconds


# ---------------------------------------------------------------- the results


def _report(folder: Path, plan: Plan, rows: list[dict], facts: dict) -> None:
    """Write rows, summary and report, and print the table and how the agent differs from others."""
    from report.page import write_report
    from report.summary import summarise, table, write_summary

    # the trained agents' own first, then with other settings
    firsts = [training.then[0] for training in plan.trainings]
    others = [part for training in plan.trainings for part in training.then]
    agents = {q.label: find.find(q.agent)() for q in (*firsts, *others, *plan.baselines)}
    order = [*agents]
    rows.sort(  # they have come in any order
        key=lambda row: (
            *(order.index(row["agent"]), row["length"], -float(row["temperature"])),
            *(row["trained"], row["id"]),
        )
    )
    for kind, name in (("*.jsonl", "rows.jsonl"), ("*.transcripts", "transcripts.jsonl")):
        parts = sorted((folder / "rows").rglob(kind))
        (folder / name).write_bytes(b"".join(path.read_bytes() for path in parts))
    shutil.rmtree(folder / "rows")
    if plan.rivals:
        facts["seeds"] = _pairs(plan, rows)
    summary = summarise(rows, plan.unit, "reward", agents=agents) | facts
    write_summary(folder / "summary.json", summary)
    write_report(folder, title=plan.title)
    console.print(table(summary))
    for pair in facts.get("seeds", ()):
        if pair["seed"] is None:
            console.print(
                f"{pair['length']:>4} {plan.unit}, temperature {pair['temperature']}: {order[0]} - "
                f"{pair['against']} {pair['mean']:+.3f} ({pair['low']:+.3f} to "
                f"{pair['high']:+.3f}, n {pair['n']})"
            )
    training = f", {facts['training_seconds']:.0f} s of them training" if plan.alone else ""
    console.print(
        f"{facts['seconds']:.0f} s in all{training}. Figures: {folder / 'summary.json'}; report: "
        f"{folder / 'report.html'}."
    )


def _pairs(plan: Plan, rows: Sequence[dict]) -> list[dict]:
    """Compare the first trained agent with each rival in every cell: all its seeds, averaged
    question by question, then seed by seed."""
    from report.summary import compare

    label = plan.trainings[0].then[0].label
    seeds = dict.fromkeys(row["trained"] for row in rows if row["agent"] == label)
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        cell = cells.setdefault((row["length"], row["temperature"]), {})
        cell.setdefault(row["agent"], []).append(row)
    pairs = []
    for (length, temperature), by_agent in cells.items():
        for rival in plan.rivals:
            for seed in (None, *seeds):
                # what was not trained has answered once
                sides = [
                    [row for row in by_agent[name] if seed in (None, row["trained"])]
                    or by_agent[name]
                    for name in (label, rival)
                ]
                about = {"seed": seed, "length": length, "temperature": temperature}
                pairs.append(about | {"against": rival} | compare(*sides, metric="reward"))
    return pairs
