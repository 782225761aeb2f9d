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
from collections.abc import Callable, Iterator, Sequence
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
    """A training, in any process."""

    run: RunConfig
    grpo: GRPOConfig
    settings: dict  # of the agent `run.agent`

    def __call__(self, **how) -> list[dict]:
        """Train; there are no rows."""
        from commands.train import train

        train(self.run, self.grpo, find.make(self.run.agent, self.settings), **how)
        return []


@dataclass(frozen=True, slots=True)
class Plan:
    """What a demo trains and then asks; one training alone is done in this process."""

    title: str
    trainings: Sequence[Training]
    questions: Sequence[Questions]  # the trained agents' first, in the order of the report
    unit: str = "sections"


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
    questions = [
        replace(asked, sections=n, asks=((1.0, sampled[n]), (0.0, greedy[n])))
        for asked in (trained, untrained, replace(untrained, label="full", agent="full"))
        for sampled, greedy in [AMOUNTS[size][asked.label]]
        for n in sampled
    ]
    return Plan("memagent: the demo", [Training(run, grpo, settings)], questions)


def compared(name: str, demo: Demo, size: str, seed: int, folder: Path) -> Plan:
    """Plan an agent's own demo: the same base policy, steps, trajectories and questions for all
    that are trained; seed: the first of the trainings."""
    amount, base = demo.sizes[size], str(EMBEDDED.parent / demo.model if demo.model else EMBEDDED)

    def ask(label: str, agent: str, settings: dict, model: str, trained: int) -> list[Questions]:
        where = folder / "rows" / str(trained)
        questions = Questions(label, agent, settings, model, (demo.kind,), seed + 1_000_000, where)
        questions = replace(questions, trained=trained, base=base)
        return [
            replace(questions, sections=sections, asks=((1.0, n), (0.0, n)))
            for sections, n in amount.questions.items()
        ]

    trainings, own, others = [], [], []
    for trained in range(seed, seed + amount.seeds):
        for arm in (name, *demo.beside):
            run = RunConfig(
                name=f"{arm}-{trained}",
                runs=str(folder),
                model=base if demo.model else "",
                data=demo.data,
                agent=arm,
                kinds=(demo.kind,) if demo.data == "world" else RunConfig().kinds,
                lengths=amount.lengths[arm],
                keep_trajectories=5,
            )
            fields = amount.training[arm] | {"seed": trained}
            grpo, agent = find.resolve("demo", base, fields, {}, arm)
            settings, model = asdict(agent.config), str(folder / run.name / "model")
            trainings.append(Training(run, grpo, settings))
            own += ask(arm, arm, settings, model, trained)
            # the first trained agent answers with other settings, too
            if (arm, trained) == (name, seed):
                for label, changes in demo.variants.items():
                    others += ask(label, arm, settings | changes, model, trained)
    settings = find.of_model(base)
    untrained = {f"untrained {arm}": arm for arm in (name, *demo.beside)}
    for label, agent in (untrained | {agent: agent for agent in demo.baselines}).items():
        others += ask(label, agent, settings, base, seed)
    unit = "sessions" if demo.data == ledger.KIND else "sections"
    return Plan(demo.title, trainings, own + others, unit)


@stops.saying("A demo does not go on: the same command begins it anew.")
def run_demo(size: str, seed: int, name: str, runs: str, agent: str = find.DEFAULT) -> Path:
    """Train an agent, evaluate it, write the report; return the folder. size: default or short."""
    start, extras = time.perf_counter(), find.find(agent).extras
    folder = _make_folder(name, runs)
    if "arms" in extras:  # a stream, without a model and in seconds
        from commands.stream import run_stream

        config = StreamConfig(name=name, runs=runs, seed=seed, arms=tuple(extras["arms"]))
        config = replace(config, epochs=2 if size == "short" else 10)
        return run_stream(config, {})
    own = extras.get("demo")
    plan = compared(agent, own, size, seed, folder) if own else usual(agent, size, seed, folder)
    if size == "short":
        console.print("A short demo shows that everything runs: its figures say nothing more.")
    rows, training_s = _work(plan)
    seconds = {"seconds": time.perf_counter() - start, "training_seconds": training_s}
    facts = {"seed": seed, "size": size} | {name: round(s, 1) for name, s in seconds.items()}
    _report(folder, plan, rows, facts)
    if size == "short":
        next_step("train it in full, in some five minutes", "demo", runs=runs)
    elif own:
        next_step("see what was wrong", "show", folder, "--wrong")
    else:
        words = "ask", "-", "Where is Anna?", "--model", folder / "model"
        text = "Anna joined Boris. Clara met Felix. Boris toured Oslo."
        next_step("ask it about a text of yours", *words, runs=runs, given=text)
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
    """Train, then ask; return all rows, and the seconds of the trainings."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.perf_counter()
    if len(plan.trainings) == 1:
        from commands.train import TrainingProgress

        (training,) = plan.trainings
        training(resume=True, callbacks=[TrainingProgress(training.grpo.steps)])
    else:
        _in_processes(plan.trainings, "trainings")
    seconds = time.perf_counter() - start
    longest_first = sorted(plan.questions, key=lambda part: -part.sections)
    return _in_processes(longest_first, "parts"), seconds


def _in_processes(parts: Sequence[Callable[[], list[dict]]], unit: str) -> list[dict]:
    """Do parts side by side; return their rows. An exception of any part, and Ctrl-C, end all
    processes."""
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(min(8, os.cpu_count() or 1), context, _begin)
    rows = list[dict]()
    try:
        with bar(unit) as progress:
            shown = progress.add_task(f"all {unit}", total=len(parts), note="")
            for future in as_completed([pool.submit(part) for part in parts]):
                rows += future.result()
                progress.advance(shown)
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return rows


def _report(folder: Path, plan: Plan, rows: list[dict], facts: dict) -> None:
    """Write rows, summary and report, and print the table."""
    from report.page import write_report
    from report.summary import summarise, table, write_summary

    agents = {questions.label: find.find(questions.agent)() for questions in plan.questions}
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
    console.print(
        f"{facts['seconds']:.0f} s in all, {facts['training_seconds']:.0f} s of them training. "
        f"Differences with their intervals: {folder / 'summary.json'}; {folder / 'report.html'}."
    )
