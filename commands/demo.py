"""The demos: GRPO on the embedded policy, then the trained agent beside others on facts nobody has seen.

Holds: `Plan` and its sizes, `run_demo` (MemAgent beside the untrained agent and full context); `Versus`, `run_versus` (ReMemR1 beside MemAgent,
trained alike, where looking back pays). Leaves out: training (commands/train.py), evaluation (eval.py), the report (report/page.py).
Exercise it: `python cli.py demo --short`. Read next: dev/LOG.md.

Training reads facts of the train split in documents of at most 16 sections; evaluation asks for facts of the test split, in documents
of up to 1,024. Two processes train; those that the machine has besides evaluate the baselines meanwhile, and all of them the trained agent.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents import find
from config import files
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.terminal import bar, console
from memagent import AgentConfig
from tasks import worlds

if TYPE_CHECKING:
    from rollout import Engine


KINDS = ("one_fact", "two_hop")
MARK = ".demo"  # a folder with this file is a demo's: the next demo of its name replaces it


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each part of the demo is: steps of GRPO, and sections -> questions (of each kind) for every agent."""

    steps: int
    sampled: dict[int, int]  # trained, temperature 1
    greedy: dict[int, int]  # trained, temperature 0
    untrained: dict[int, int]  # both temperatures
    full_context: dict[int, int]  # both temperatures
    reverse: dict[int, int] = field(default_factory=dict)  # two_hop_reverse, trained, temperature 1
    # what training and evaluation take of one core, in tokens that `speed` could read and write in that time; measured (dev/LOG.md)
    training: float = 0.0
    evaluating: float = 0.0


PLANS = {
    "default": Plan(
        steps=110,
        sampled={4: 128, 16: 128, 64: 128, 256: 64, 1024: 24},
        greedy={4: 128, 16: 128, 64: 64, 256: 16, 1024: 8},
        untrained={4: 128, 16: 128, 64: 32, 256: 8, 1024: 4},
        full_context={4: 128, 16: 128, 64: 32, 256: 32, 1024: 32},
        reverse={4: 64, 16: 64},
        training=28e6,
        evaluating=28e6,
    ),
    "long": Plan(
        steps=150,
        sampled={4: 512, 16: 512, 64: 256, 256: 128, 1024: 96},
        greedy={4: 512, 16: 256, 64: 128, 256: 64, 1024: 32},
        untrained={4: 512, 16: 256, 64: 64, 256: 32, 1024: 8},
        full_context={4: 256, 16: 256, 64: 128, 256: 64, 1024: 64},
        reverse={4: 128, 16: 128, 64: 128},
        training=49e6,
        evaluating=93e6,
    ),
    "short": Plan(
        steps=3,
        sampled={2: 8, 4: 8},
        greedy={2: 8, 4: 8},
        untrained={2: 8, 4: 8},
        full_context={2: 8, 4: 8},
        reverse={2: 8},
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """The cells of one agent, temperature and length, to fill in whatever process."""

    agent: str  # trained, untrained, full
    model: str
    kinds: tuple[
        str, ...
    ]  # of question, side by side: a few long documents alone leave the engine half empty
    asks: tuple[
        tuple[float, int], ...
    ]  # temperature, questions of each kind; side by side too, they read the same documents
    sections: int
    seed: int
    folder: str
    config: AgentConfig
    reader: str = "memagent"  # which of `agents.AGENTS`
    trained: int = 0  # the seed of its training
    then: tuple = ()  # jobs that may begin once this one is done

    @property
    def cost(self) -> int:
        return sum(n for _, n in self.asks) * self.sections * len(self.kinds)

    def __call__(self) -> list[dict]:
        return fill(self)


@dataclass(frozen=True, slots=True)
class Training:
    """A training in whatever process."""

    run: RunConfig
    grpo: GRPOConfig
    config: AgentConfig
    then: tuple[Job, ...] = ()

    def __call__(self) -> list[dict]:
        import torch

        from commands.train import train
        from report.page import write_report
        from report.runlog import summary
        from report.summary import write_summary

        torch.set_num_threads(1)
        folder = train(self.run, self.grpo, self.config)
        write_summary(folder / "summary.json", summary(folder))
        write_report(folder, title=f"Training {folder.name}")
        return []


@lru_cache(maxsize=2)
def _engine(model: str):
    from engines.open import fingerprint, open_engine

    return open_engine(model, "cpu", "float32", False), fingerprint(model)


def fill(job: Job) -> list[dict]:
    """Evaluate the cells; returns their rows."""
    import torch

    from agents.baselines import AGENTS
    from engines.sharing import share_engine
    from eval import evaluate
    from rollout import Sampling

    torch.set_num_threads(1)
    engine, model = _engine(job.model)
    Path(job.folder).mkdir(exist_ok=True)

    def ask(temperature: float, n: int, engine: Engine) -> list[dict]:
        name = f"{job.agent}-{'+'.join(job.kinds)}-{temperature:g}-{job.sections}"
        by_kind = [worlds.make_tasks(job.seed, n, job.sections, kind, "test") for kind in job.kinds]
        keep = (
            not job.agent.startswith(("untrained", "full"))
            and temperature > 0
            and job.sections in (4, 16, 64)
        )
        return evaluate(
            engine,
            AGENTS[job.reader],
            (task for tasks in zip(*by_kind, strict=True) for task in tasks),
            job.config,
            Sampling(temperature),
            name=job.agent,
            length=job.sections,
            rows=Path(job.folder, f"{name}.jsonl"),
            model=model,
            seed=job.seed,
            record_to=Path(job.folder, f"{name}.transcripts") if keep else None,
            n_records=2 * len(job.kinds),
        )

    rows = share_engine(engine, [partial(ask, *asked) for asked in job.asks])
    return [row | {"trained": job.trained} for some in rows for row in some]


def speed() -> float:
    """Measure how many tokens a second one process reads and writes here with the embedded policy (about a second, after its loading)."""
    import torch

    from memagent import memagent
    from rollout import Sampling, rollout

    torch.set_num_threads(1)
    config = find.resolve("demo", EMBEDDED, {}, {})[1]
    engine, _ = _engine(str(EMBEDDED))
    jobs = [
        (task, sample)
        for task in worlds.make_tasks(0, 8, 8, KINDS[0], "train")
        for sample in range(16)
    ]

    def once(seed: int) -> float:
        start = time.perf_counter()
        turns = [
            turn
            for t in rollout(engine, memagent, jobs, config, Sampling(1.0), seed)
            for turn in t.turns
        ]
        return sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns) / (
            time.perf_counter() - start
        )

    return max(once(seed) for seed in range(3))


START = 18.0  # seconds that processes take to begin, and the report at the end


def expected(plan: Plan, rate: float, ranks: int, cores: int) -> float:
    """Seconds that a demo takes if a core reads and writes `rate` tokens a second; 0 if that is not known of this size."""
    return (
        START + (plan.training / ranks + plan.evaluating / min(cores, 4 + ranks)) / rate
        if plan.training
        else 0.0
    )


def jobs_of(
    plan: Plan, seed: int, folder: Path, config: AgentConfig
) -> tuple[list[Job], list[Job]]:
    """(baselines, trained), the dearest first."""
    model, where = str(folder / "model"), str(folder / "rows")

    def cells(agent: str, model: str, asked: dict[float, dict[int, int]], kinds=KINDS) -> list[Job]:
        """One job a length, the dearest first. asked: temperature -> sections -> questions of each kind."""
        lengths = sorted(
            {sections for by_length in asked.values() for sections in by_length}, reverse=True
        )
        return [
            Job(
                agent,
                model,
                kinds,
                tuple(
                    (t, by_length[sections])
                    for t, by_length in asked.items()
                    if sections in by_length
                ),
                sections,
                seed,
                where,
                config,
                "full" if agent == "full" else "memagent",
            )
            for sections in lengths
        ]

    base = [
        *cells("untrained", str(EMBEDDED), {1.0: plan.untrained, 0.0: plan.untrained}),
        *cells("full", str(EMBEDDED), {1.0: plan.full_context, 0.0: plan.full_context}),
    ]
    trained = [
        *cells("trained", model, {1.0: plan.sampled, 0.0: plan.greedy}),
        *cells("trained", model, {1.0: plan.reverse}, ("two_hop_reverse",)),
    ]
    return sorted(base, key=lambda j: -j.cost), sorted(trained, key=lambda j: -j.cost)


Work = Job | Training


class Workers:
    """Single processes that take jobs one at a time, so that the dearest start first and none waits behind another's queue."""

    def __init__(self, n: int):
        self.context = multiprocessing.get_context("spawn")
        if (
            "forkserver" in multiprocessing.get_all_start_methods()
        ):  # one process imports what all of them need, and is copied
            self.context = multiprocessing.get_context("forkserver")
            self.context.set_forkserver_preload(
                [
                    "engines.hf",
                    "engines.open",
                    "transformers.models.auto.modeling_auto",
                    "transformers.models.auto.tokenization_auto",
                    "transformers.models.llama.modeling_llama",
                ]
            )
        self.idle: list[ProcessPoolExecutor] = []
        self.busy: dict[Future, tuple[Work, ProcessPoolExecutor]] = {}
        self.waiting: list[Work] = []
        self.rows: list[dict] = []
        self.done = 0
        self.hire(n)

    def hire(self, n: int) -> None:
        self.idle += [ProcessPoolExecutor(1, mp_context=self.context) for _ in range(n)]
        self.assign()

    def add(self, jobs: Sequence[Work]) -> None:
        self.waiting += jobs
        self.assign()

    def assign(self) -> None:
        while self.idle and self.waiting:
            worker, job = self.idle.pop(), self.waiting.pop(0)
            self.busy[worker.submit(job)] = job, worker

    def collect(self, timeout: float | None = 0) -> None:
        """Take in what is finished and hand out what waits."""
        finished, _ = wait(self.busy, timeout, FIRST_COMPLETED)
        for future in finished:
            self.rows += future.result()
            job, worker = self.busy.pop(future)
            self.idle.append(worker)
            self.done += 1
            self.waiting += job.then
        self.assign()

    def close(self) -> None:
        for worker in [*self.idle, *(worker for _, worker in self.busy.values())]:
            for process in list((worker._processes or {}).values()):
                process.terminate()
            worker.shutdown(wait=False, cancel_futures=True)


def run_demo(size: str, seed: int, name: str, runs: str) -> Path:
    """Train, evaluate, report; returns the run's folder."""
    start = time.perf_counter()
    import torch

    plan, folder = PLANS[size], _folder(name, runs)
    cores = os.cpu_count() or 1
    # two ranks on a CPU; a GPU is one device
    run = RunConfig(
        name=name,
        runs=runs,
        keep_trajectories=5,
        devices=1 if torch.cuda.is_available() else min(2, cores),
    )
    grpo, agent = find.resolve("demo", EMBEDDED, dict(steps=plan.steps, seed=seed), {})
    baselines, trained = jobs_of(plan, seed + 1_000_000, folder, agent)
    console.print(
        f"Demo, seed {seed}: {plan.steps} steps of GRPO on documents of {run.lengths[0]} to {run.lengths[-1]} sections, then questions about "
        f"unseen facts in documents of up to {max(plan.sampled):,} sections."
    )
    workers, aside = Workers(1), []
    try:
        measured = workers.idle[0].submit(speed) if plan.training else None
        from commands import train  # noqa: F401, it takes as long as the measurement

        if measured:
            rate = measured.result()
            console.print(
                f"About {expected(plan, rate, run.devices, cores) / 60:.1f} minutes here if nothing else runs, and half as much again if it learns "
                f"to write long memories: one core reads and writes {rate:,.0f} tokens a second, {min(cores, 4 + run.devices)} will be at work."
            )
        spare = min(4, cores - run.devices)
        if not spare:  # on two cores both train, and the worker waits until they have
            aside.append(workers.idle.pop())
        workers.hire(spare - 1)
        workers.add(baselines)
        train_s = _train(run, grpo, agent, plan.steps, workers)
        workers.waiting = sorted([*workers.waiting, *trained], key=lambda job: -job.cost)
        workers.hire(run.devices - len(aside))
        workers.idle, aside = workers.idle + aside, []
        workers.assign()
        with bar("parts") as progress:
            shown = progress.add_task("evaluating", total=len(baselines) + len(trained), note="")
            while workers.busy:
                workers.collect(timeout=1.0)
                progress.update(shown, completed=workers.done)
    finally:
        workers.idle += aside
        workers.close()
    _report(folder, workers.rows, seed, size, time.perf_counter() - start, train_s)
    return folder


def _folder(name: str, runs: str) -> Path:
    """An empty folder for a demo's results; an earlier demo of this name goes."""
    folder = files.run_path(runs, name)
    if folder.exists():
        if not (folder / MARK).exists():
            raise UserError(f"{folder} is there and is not a demo's: give another --name.")
        shutil.rmtree(folder)
    try:
        (folder / "rows").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.") from error
    (folder / MARK).touch()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the worker processes: one thread each
    return folder


def _train(
    run: RunConfig, grpo: GRPOConfig, agent: AgentConfig, steps: int, workers: Workers
) -> float:
    from commands.train import TrainingProgress, train

    over = threading.Event()

    def feed() -> None:
        """Meanwhile a worker that is done with a cell gets its next one."""
        while not over.wait(0.5):
            try:
                workers.collect()
            except Exception:  # of a cell, which stays where it is: whoever collects after the training comes upon it
                return

    feeding = threading.Thread(target=feed)
    start = time.perf_counter()
    feeding.start()
    try:
        train(run, grpo, agent, resume=True, callbacks=[TrainingProgress(steps)])
    finally:
        over.set()
        feeding.join()
    return time.perf_counter() - start


def _report(
    folder: Path, rows: list[dict], seed: int, size: str, seconds: float, train_s: float
) -> None:
    summary = _collect(folder, rows) | {
        "seed": seed,
        "size": size,
        "seconds": round(seconds, 1),
        "training_seconds": round(train_s, 1),
    }
    _write(folder, summary, "memagent: the demo")
    console.print(
        f"{seconds:.0f} s in all, {train_s:.0f} s of them training. Numbers: {folder / 'summary.json'}; report: {folder / 'report.html'}"
    )


def _collect(folder: Path, rows: list[dict]) -> dict:
    """The summary of all rows, with the machine; rows and transcripts of the single jobs each in one file."""
    import torch

    from report.summary import summarise

    for kind, name in (("*.jsonl", "rows.jsonl"), ("*.transcripts", "transcripts.jsonl")):
        (folder / name).write_bytes(
            b"".join(path.read_bytes() for path in sorted((folder / "rows").rglob(kind)))
        )
    shutil.rmtree(folder / "rows")
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    return summarise(rows, metric="reward") | {"machine": machine}


def _write(folder: Path, summary: dict, title: str) -> None:
    from report.page import write_report
    from report.summary import table, write_summary

    write_summary(folder / "summary.json", summary)
    write_report(folder, title=title)
    console.print(table(summary))


# ---------------------------------------------------------------- ReMemR1 beside MemAgent

KIND = "two_hop_reverse"  # the fact that answers comes first; which one it was turns out later
ARMS = ("rememr1", "memagent")


@dataclass(frozen=True, slots=True)
class Versus:
    """How long each part of it is: the settings of either training over the preset demo, and sections -> questions for every agent."""

    seeds: int
    training: dict[str, dict]  # arm -> fields of GRPOConfig
    lengths: dict[str, tuple[int, ...]]
    questions: dict[int, int]


# chosen on the dev split (dev/LOG.md), each arm's for itself: MemAgent learns nothing at 4 sections and more before it has learnt 2
TRAINING = {
    "rememr1": dict(steps=60, grow_at=0.7, grow_steps=10, temperature=(1.2, 1.3)),
    "memagent": dict(steps=60, grow_at=0.6, grow_steps=10, temperature=(1.0, 1.1, 1.2)),
}
LENGTHS = {"rememr1": (4, 8), "memagent": (2, 4, 8)}
VERSUS = {
    "default": Versus(3, TRAINING, LENGTHS, {4: 64, 16: 128, 64: 24}),
    "long": Versus(5, TRAINING, LENGTHS, {4: 256, 16: 256, 64: 128, 256: 32}),
    "short": Versus(
        1,
        {arm: dict(steps=2, tasks_per_step=(2,), group_size=4) for arm in ARMS},
        dict.fromkeys(ARMS, (4,)),
        {4: 4},
    ),
}


def trainings(plan: Versus, seed: int, folder: Path) -> list[Training]:
    """Both arms with every seed, each followed by its evaluation: the same base policy, steps, trajectories and questions."""
    found = []
    for s in range(seed, seed + plan.seeds):
        for arm in ARMS:
            run = RunConfig(
                name=f"{arm}-{s}",
                runs=str(folder),
                agent=arm,
                kinds=(KIND,),
                lengths=plan.lengths[arm],
                keep_trajectories=5,
            )
            grpo, config = find.resolve("demo", EMBEDDED, plan.training[arm] | {"seed": s}, {}, arm)
            model = folder / run.name / "model"
            then = [*asked(plan, arm, arm, model, s, seed, folder, config)]
            if arm == "rememr1" and s == seed:  # what is left of it if it may not look back
                then += asked(
                    plan,
                    "rememr1, not looking back",
                    arm,
                    model,
                    s,
                    seed,
                    folder,
                    replace(config, callback="off"),
                )
            found.append(Training(run, grpo, config, tuple(then)))
    return found


def asked(
    plan: Versus,
    agent: str,
    arm: str,
    model: Path,
    s: int,
    seed: int,
    folder: Path,
    config: AgentConfig,
) -> Iterator[Job]:
    """The questions to one policy: the same for all of them."""
    for sections, n in plan.questions.items():
        yield Job(
            agent,
            str(model),
            (KIND,),
            ((1.0, n), (0.0, n)),
            sections,
            seed + 1_000_000,
            str(folder / "rows" / str(s)),
            config,
            reader=arm,
            trained=s,
        )


def run_versus(size: str, seed: int, name: str, runs: str) -> Path:
    """Train both, evaluate, report; returns the folder."""
    start, plan, folder = time.perf_counter(), VERSUS[size], _folder(name, runs)
    work = trainings(plan, seed, folder)
    config = work[0].config
    others = [
        *asked(plan, "untrained rememr1", "rememr1", EMBEDDED, seed, seed, folder, config),
        *asked(plan, "untrained memagent", "memagent", EMBEDDED, seed, seed, folder, config),
        *asked(plan, "full", "full", EMBEDDED, seed, seed, folder, config),
    ]
    steps = sum(t.grpo.steps for t in work)
    console.print(
        f"ReMemR1 beside MemAgent, {plan.seeds} seeds from {seed} on: {work[0].grpo.steps} steps of GRPO each from the same policy, "
        f"on documents that show only later which of the facts before matters; then questions about unseen facts in documents of up to {max(plan.questions):,} sections."
    )
    console.print(find.axes(config, work[0].grpo))
    workers = Workers(max(1, min(8, os.cpu_count() or 1)))
    try:
        workers.add([*work, *others])
        with bar("steps") as progress:
            training = progress.add_task("training", total=steps, note="")
            parts = len(work) + len(others) + sum(len(t.then) for t in work)
            evaluating = progress.add_task("all parts", total=parts, note="")
            while workers.busy:
                workers.collect(timeout=1.0)
                done = [_progress(folder / t.run.name) for t in work]
                note = "  ".join(
                    f"{t.run.name} {reward:.2f}"
                    for t, (n, reward) in zip(work, done, strict=True)
                    if 0 < n < t.grpo.steps
                )
                progress.update(training, completed=sum(n for n, _ in done), note=note)
                progress.update(evaluating, completed=workers.done)
    finally:
        workers.close()
    _report_versus(folder, workers.rows, plan, seed, size, time.perf_counter() - start)
    return folder


def _progress(folder: Path) -> tuple[int, float]:
    """Steps that a training has done, and the reward of the last one."""
    path = folder / "metrics.csv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if len(lines) < 2:
        return 0, 0.0
    reward = (
        dict(zip(lines[0].split(","), lines[-1].split(","), strict=False)).get("reward") or "nan"
    )
    return len(lines) - 1, float(reward)


def _report_versus(
    folder: Path, rows: list[dict], plan: Versus, seed: int, size: str, seconds: float
) -> None:
    from report.summary import compare

    def pair(s: int | None, length: int, temperature: str) -> dict:
        sides = (
            [
                row
                for row in rows
                if row["agent"] == arm
                and row["length"] == length
                and row["temperature"] == temperature
                and s in (None, row["trained"])
            ]
            for arm in ARMS
        )
        return {"seed": s, "length": length, "temperature": temperature} | compare(
            *sides, metric="reward"
        )

    order = [*ARMS, *dict.fromkeys(row["agent"] for row in rows)]
    # they have come in any order
    rows.sort(
        key=lambda row: (
            order.index(row["agent"]),
            row["length"],
            -float(row["temperature"]),
            row["trained"],
            row["id"],
        )
    )
    cells = [(length, temperature) for length in plan.questions for temperature in ("1.0", "0.0")]
    seeds = [
        pair(s, *cell) for cell in cells for s in (None, *range(seed, seed + plan.seeds))
    ]  # None: all, averaged question by question
    summary = _collect(folder, rows) | {
        "seed": seed,
        "size": size,
        "seconds": round(seconds, 1),
        "seeds": seeds,
    }
    _write(folder, summary, "memagent: looking back")
    for length, temperature in cells:
        (whole, *each) = (
            d for d in seeds if (d["length"], d["temperature"]) == (length, temperature)
        )
        console.print(
            f"{length:>4} sections, T {temperature}: rememr1 - memagent {whole['mean']:+.3f} ({whole['low']:+.3f} to {whole['high']:+.3f}, n {whole['n']}), "
            "seed by seed " + ", ".join(f"{d['mean']:+.3f}" for d in each)
        )
    console.print(
        f"{seconds:.0f} s in all. Numbers: {folder / 'summary.json'}; report: {folder / 'report.html'}; a report of each training beside it."
    )


def main() -> None:  # for `python commands/demo.py`, without flags
    run_demo("default", 0, "demo", "runs")


if __name__ == "__main__":
    main()
