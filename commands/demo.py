"""The demos: GRPO on an embedded policy, then questions about unseen facts, to the trained agent
and to others. Training reads facts of the train split in documents of at most 16 sections,
evaluation asks for facts of the test split, in up to 1,024.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

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

MARK = ".demo"  # a folder with this file is a demo's: the next demo of its name replaces it
# of the usual demo: steps of GRPO, and label -> sections -> questions of each kind, at temperature
# 1 and 0
STEPS = {"default": 110, "short": 3}
AMOUNTS = {
    "default": {
        "trained": (
            {4: 128, 16: 128, 64: 128, 256: 64, 1024: 24},
            {4: 128, 16: 128, 64: 64, 256: 16, 1024: 8},
        ),
        "untrained": ({4: 128, 16: 128, 64: 32, 256: 8, 1024: 4},) * 2,
        "full": ({4: 128, 16: 128, 64: 32, 256: 32, 1024: 32},) * 2,
    },
    "short": dict.fromkeys(("trained", "untrained", "full"), ({2: 8, 4: 8},) * 2),
}


@dataclass(frozen=True, slots=True)
class Questions:
    """What one policy is asked at one length, in any process."""

    label: str  # of their rows
    agent: str
    settings: dict  # of the agent
    model: str
    kinds: tuple[str, ...]
    seed: int
    folder: Path
    sections: int = 0
    asks: tuple[tuple[float, int], ...] = ()  # (temperature, questions of each kind)
    trained: int = 0  # the seed of its training
    base: str = ""  # the policy that answers frozen prompts; "" = the model itself

    def of_each_length(self, sampled: Mapping, greedy: Mapping) -> list[Questions]:
        """Return one of these a length; sections -> questions at temperature 1 and at 0."""
        return [
            replace(self, sections=n, asks=((1.0, sampled[n]), (0.0, greedy[n])))
            for n in sorted(sampled)
        ]

    def __call__(self) -> list[dict]:
        """Ask, and return the rows."""
        from engines.frozen import WithFrozen
        from eval import Conditions, evaluate
        from report.rows import Cell
        from rollout import Sampling

        engine, weights = _engine(self.model)
        if self.base not in ("", self.model):
            engine = WithFrozen(engine, _engine(self.base)[0])
        self.folder.mkdir(parents=True, exist_ok=True)
        agent, rows = find.make(self.agent, self.settings), []
        for temperature, n in self.asks:
            name = f"{self.label}-{'+'.join(self.kinds)}-{temperature:g}-{self.sections}"
            by_kind = [self._tasks(kind, n) for kind in self.kinds]
            conditions = Conditions(
                *(weights, "float32", self.seed),
                record_to=self.folder / f"{name}.transcripts",
                n_records=2 * len(self.kinds),
            )
            cell, path = Cell(self.label, "", "", self.sections), self.folder / f"{name}.jsonl"
            tasks = (task for tasks in zip(*by_kind, strict=True) for task in tasks)
            rows += evaluate(engine, agent, tasks, Sampling(temperature), cell, path, conditions)
        return [row | {"trained": self.trained} for row in rows]

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
    then: tuple[Questions, ...]

    def __call__(self, **how) -> list[dict]:
        """Train; there are no rows."""
        from commands.train import train

        train(self.run, self.grpo, find.make(self.run.agent, self.settings), **how)
        return []


@dataclass(frozen=True, slots=True)
class Plan:
    """What a demo trains and asks."""

    title: str
    trainings: list[Training]
    baselines: list[Questions]
    alone: bool = False  # the one training is done in this process, which shows its steps
    unit: str = "sections"
    rivals: tuple[str, ...] = ()  # labels of what the trained agent is compared with


def usual(agent: str, size: str, seed: int, folder: Path) -> Plan:
    """Plan the demo of an agent beside its untrained self and full context."""
    import torch

    # two ranks on a CPU; a GPU is one device
    devices = 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)
    run = RunConfig(
        name=folder.name, runs=str(folder.parent), agent=agent, keep_trajectories=5, devices=devices
    )
    grpo, reader = find.resolve("demo", EMBEDDED, {"steps": STEPS[size], "seed": seed}, {}, agent)
    settings = find.of_model(EMBEDDED) | asdict(reader.config)  # full context reads with them too
    rest = ("one_fact", "two_hop"), seed + 1_000_000, folder / "rows"
    trained = Questions("trained", agent, settings, str(folder / "model"), *rest)
    untrained = replace(trained, label="untrained", model=str(EMBEDDED))
    asked = trained, untrained, replace(untrained, label="full", agent="full")
    then, without, full = (q.of_each_length(*AMOUNTS[size][q.label]) for q in asked)
    training = Training(run, grpo, settings, tuple(then))
    return Plan("memagent: the demo", [training], without + full, alone=True)


def compared(name: str, demo: Demo, size: str, seed: int, folder: Path) -> Plan:
    """Plan an agent's own demo: the same base policy, steps, trajectories and questions for all
    that are trained; seed: the first of the trainings."""
    amount, base = demo.sizes[size], str(EMBEDDED.parent / demo.model if demo.model else EMBEDDED)
    arms, seeds = (name, *demo.beside), range(seed, seed + amount.seeds)

    def ask(label: str, agent: str, settings: dict, model: str, trained: int) -> list[Questions]:
        rest = (demo.kind,), seed + 1_000_000, folder / "rows" / str(trained)
        questions = Questions(label, agent, settings, model, *rest, trained=trained, base=base)
        return questions.of_each_length(amount.questions, amount.questions)

    def training(arm: str, seed: int) -> Training:
        run = RunConfig(
            name=f"{arm}-{seed}",
            runs=str(folder),
            model=base if demo.model else "",
            data=demo.data,
            agent=arm,
            kinds=(demo.kind,) if demo.data == "world" else RunConfig().kinds,
            lengths=amount.lengths[arm],
            keep_trajectories=5,
        )
        grpo, agent = find.resolve("demo", base, amount.training[arm] | {"seed": seed}, {}, arm)
        settings, model = asdict(agent.config), str(folder / run.name / "model")
        # the first trained agent answers with other settings, too
        variants = demo.variants if (arm, seed) == (name, seeds[0]) else {}
        then = [
            questions
            for label, changes in ({arm: {}} | variants).items()
            for questions in ask(label, arm, settings | changes, model, seed)
        ]
        return Training(run, grpo, settings, tuple(then))

    trainings = [training(arm, each) for each in seeds for arm in arms]
    others = {f"untrained {arm}": arm for arm in arms} | {agent: agent for agent in demo.baselines}
    settings = find.of_model(base)
    baselines = [q for label, arm in others.items() for q in ask(label, arm, settings, base, seed)]
    unit = "sessions" if demo.data == ledger.KIND else "sections"
    rivals = arms[1:2] or tuple(others)
    return Plan(demo.title, trainings, baselines, unit=unit, rivals=rivals)


@stops.saying("A demo does not go on: the same command begins it anew.")
def run_demo(size: str, seed: int, name: str, runs: str, agent: str = find.DEFAULT) -> Path:
    """Train an agent, evaluate it, write the report; return the folder. size: default or short."""
    start, extras = time.perf_counter(), find.find(agent).extras
    folder = _make_folder(name, runs)
    if "arms" in extras:  # a stream, without a model and in seconds
        from commands.stream import run_stream

        config = StreamConfig(
            name=name, runs=runs, epochs=2 if size == "short" else 10, seed=seed,
            arms=tuple(extras["arms"]),
        )  # fmt: skip
        return run_stream(config, {})
    if "demo" in extras:
        plan = compared(agent, extras["demo"], size, seed, folder)
    else:
        plan = usual(agent, size, seed, folder)
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


def _make_folder(name: str, runs: str) -> Path:
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


def _begin() -> None:
    """Begin a process of the pool with one thread. Ctrl-C, which a terminal sends to all of them,
    is left to the parent, and no semaphore of tqdm's is left behind."""
    import torch
    from tqdm import tqdm

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())


def _work(plan: Plan) -> tuple[list[dict], float]:
    """Train and ask; return all rows, and the seconds of a training in this process.

    An exception of any part, and Ctrl-C, end all processes.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(min(8, os.cpu_count() or 1), context, _begin)
    rows, seconds = list[dict](), 0.0
    trained = [part for training in plan.trainings for part in training.then]
    stages = [[*plan.trainings, *plan.baselines], trained]
    try:
        if plan.alone:
            from commands.train import TrainingProgress

            (training,), start = plan.trainings, time.perf_counter()
            training(resume=True, callbacks=[TrainingProgress(training.grpo.steps)])
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


def _report(folder: Path, plan: Plan, rows: list[dict], facts: dict) -> None:
    """Write rows, summary and report, and print the table and how the agent differs from others."""
    from report.page import write_report
    from report.summary import bounds, percent, summarise, table, write_summary

    # the trained agents' own first, then with other settings
    asked = [training.then[0] for training in plan.trainings]
    asked += [part for training in plan.trainings for part in training.then] + plan.baselines
    agents = {q.label: find.find(q.agent)() for q in asked}
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
    summary = summarise(rows, plan.unit, "reward", agents=agents) | facts
    write_summary(folder / "summary.json", summary)
    write_report(folder, title=plan.title)
    console.print(table(summary))
    for pair in summary["paired"]:
        if pair["b"] in plan.rivals and pair["a"] == order[0]:
            console.print(
                f"{pair['length']:>4} {plan.unit}, temperature {pair['temperature']}: {order[0]} - "
                f"{pair['b']} {percent(pair['mean'], '+')} ({bounds(pair, ' to ', '+')}) points, "
                f"n {pair['n']}"
            )
    training = f", {facts['training_seconds']:.0f} s of them training" if plan.alone else ""
    console.print(
        f"{facts['seconds']:.0f} s in all{training}. Figures: {folder / 'summary.json'}; report: "
        f"{folder / 'report.html'}."
    )
