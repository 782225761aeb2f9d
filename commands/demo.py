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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents import find
from agents.demos import Demo, Size
from config import files
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.terminal import bar, console
from memagent import Agent
from tasks import worlds

if TYPE_CHECKING:
    from rollout import Engine


KINDS = ("one_fact", "two_hop")
FULL = "full"  # the agent, and its label
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
    settings: dict  # of the agent
    reader: str  # the agent's name
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
    settings: dict  # of the agent `run.agent`
    then: tuple[Job, ...] = ()

    def __call__(self) -> list[dict]:
        import torch

        from commands.train import train
        from report.page import write_report
        from report.runlog import summary
        from report.summary import write_summary

        torch.set_num_threads(1)
        folder = train(self.run, self.grpo, find.make(self.run.agent, self.settings))
        write_summary(folder / "summary.json", summary(folder))
        write_report(folder, title=f"Training {folder.name}")
        return []


@lru_cache(maxsize=2)
def _engine(model: str):
    from engines.open import fingerprint, open_engine
    from models.setup import Setup

    return open_engine(Setup(model, "cpu", "float32")), fingerprint(model)


def fill(job: Job) -> list[dict]:
    """Evaluate the cells; returns their rows."""
    import torch

    from engines.sharing import share_engine
    from eval import Conditions, evaluate
    from report.rows import Cell
    from rollout import Sampling

    torch.set_num_threads(1)
    engine, model = _engine(job.model)
    Path(job.folder).mkdir(exist_ok=True)

    def ask(temperature: float, n: int, engine: Engine) -> list[dict]:
        name = f"{job.agent}-{'+'.join(job.kinds)}-{temperature:g}-{job.sections}"
        by_kind = [worlds.make_tasks(job.seed, n, job.sections, kind, "test") for kind in job.kinds]
        keep = (
            not job.agent.startswith(("untrained", FULL))
            and temperature > 0
            and job.sections in (4, 16, 64)
        )
        transcripts = Path(job.folder, f"{name}.transcripts") if keep else None
        return evaluate(
            engine,
            find.make(job.reader, job.settings),
            (task for tasks in zip(*by_kind, strict=True) for task in tasks),
            Sampling(temperature),
            Cell(job.agent, "", "", job.sections),
            Path(job.folder, f"{name}.jsonl"),
            Conditions(model, job.seed, record_to=transcripts, n_records=2 * len(job.kinds)),
        )

    rows = share_engine(engine, [partial(ask, *asked) for asked in job.asks])
    return [row | {"trained": job.trained} for some in rows for row in some]


def speed() -> float:
    """Measure how many tokens a second one process reads and writes here with the embedded policy (about a second, after its loading)."""
    import torch

    from rollout import Sampling, rollout

    torch.set_num_threads(1)
    agent = find.resolve("demo", EMBEDDED, {}, {})[1]
    engine, _ = _engine(str(EMBEDDED))
    jobs = [
        (task, sample)
        for task in worlds.make_tasks(0, 8, 8, KINDS[0], "train")
        for sample in range(16)
    ]

    def once(seed: int) -> float:
        start = time.perf_counter()
        turns = [
            turn for t in rollout(engine, agent, jobs, Sampling(1.0), seed) for turn in t.turns
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


def jobs_of(plan: Plan, seed: int, folder: Path, agent: Agent) -> tuple[list[Job], list[Job]]:
    """(baselines, trained), the dearest first."""
    model, where = str(folder / "model"), str(folder / "rows")

    settings = find.of_model(EMBEDDED) | asdict(agent.config)  # full context reads with them too

    def cells(label: str, model: str, asked: dict[float, dict[int, int]], kinds=KINDS) -> list[Job]:
        """One job a length, the dearest first. asked: temperature -> sections -> questions of each kind."""
        lengths = sorted(
            {sections for by_length in asked.values() for sections in by_length}, reverse=True
        )
        return [
            Job(
                label,
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
                settings,
                FULL if label == FULL else agent.name,
            )
            for sections in lengths
        ]

    base = [
        *cells("untrained", str(EMBEDDED), {1.0: plan.untrained, 0.0: plan.untrained}),
        *cells(FULL, str(EMBEDDED), {1.0: plan.full_context, 0.0: plan.full_context}),
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


def run_demo(size: str, seed: int, name: str, runs: str, agent: str = find.DEFAULT) -> Path:
    """Train an agent, evaluate it, write the report; return the folder."""
    if demo := find.find(agent).demo:
        return run_comparison(Comparison(agent, demo, demo.sizes[size], seed), size, name, runs)
    start = time.perf_counter()
    import torch

    plan, folder = PLANS[size], _folder(name, runs)
    cores = os.cpu_count() or 1
    # two ranks on a CPU; a GPU is one device
    run = RunConfig(
        name=name,
        runs=runs,
        agent=agent,
        keep_trajectories=5,
        devices=1 if torch.cuda.is_available() else min(2, cores),
    )
    grpo, reader = find.resolve("demo", EMBEDDED, dict(steps=plan.steps, seed=seed), {}, agent)
    baselines, trained = jobs_of(plan, seed + 1_000_000, folder, reader)
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
        train_s = _train(run, grpo, reader, workers)
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
    facts = {
        "seed": seed,
        "size": size,
        "seconds": round(time.perf_counter() - start, 1),
        "training_seconds": round(train_s, 1),
    }
    agents = {label: reader for label in ("trained", "untrained")}
    _write(folder, _collect(folder, workers.rows, agents) | facts, "memagent: the demo")
    console.print(
        f"{facts['seconds']:.0f} s in all, {train_s:.0f} s of them training. {_where(folder)}"
    )
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


def _train(run: RunConfig, grpo: GRPOConfig, agent: Agent, workers: Workers) -> float:
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
        train(run, grpo, agent, resume=True, callbacks=[TrainingProgress(grpo.steps)])
    finally:
        over.set()
        feeding.join()
    return time.perf_counter() - start


def _where(folder: Path) -> str:
    return f"Numbers: {folder / 'summary.json'}; report: {folder / 'report.html'}"


def _collect(folder: Path, rows: list[dict], agents: Mapping[str, Agent]) -> dict:
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
    return summarise(rows, metric="reward", agents=agents) | {"machine": machine}


def _write(folder: Path, summary: dict, title: str) -> None:
    from report.page import write_report
    from report.summary import table, write_summary

    write_summary(folder / "summary.json", summary)
    write_report(folder, title=title)
    console.print(table(summary))


# ---------------------------------------------------------------- several agents, trained alike


@dataclass(frozen=True, slots=True)
class Comparison:
    """A demo of an agent beside others, at one size, from one seed on."""

    agent: str
    demo: Demo
    size: Size
    seed: int

    @property
    def arms(self) -> tuple[str, ...]:
        return self.agent, *self.demo.beside

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.size.seeds)

    def questions(self, job: Job) -> Iterator[Job]:
        """Yield the questions to one policy: the same for all of them."""
        for sections, n in self.size.questions.items():
            yield replace(job, sections=sections, asks=((1.0, n), (0.0, n)))

    def job(self, label: str, reader: str, settings: dict, folder: Path, trained: int) -> Job:
        return Job(
            label,
            str(EMBEDDED),
            (self.demo.kind,),
            (),
            0,
            self.seed + 1_000_000,
            str(folder / "rows" / str(trained)),
            settings,
            reader,
            trained,
        )

    def trainings(self, folder: Path) -> list[Training]:
        """List all agents with every seed, each followed by its evaluation.

        The same base policy, steps, trajectories and questions for all of them.
        """
        return [self.training(arm, seed, folder) for seed in self.seeds for arm in self.arms]

    def training(self, arm: str, seed: int, folder: Path) -> Training:
        run = RunConfig(
            name=f"{arm}-{seed}",
            runs=str(folder),
            agent=arm,
            kinds=(self.demo.kind,),
            lengths=self.size.lengths[arm],
            keep_trajectories=5,
        )
        fields = self.size.training[arm] | {"seed": seed}
        grpo, agent = find.resolve("demo", EMBEDDED, fields, {}, arm)
        settings = asdict(agent.config)
        job = self.job(arm, arm, settings, folder, seed)
        jobs = [replace(job, model=str(folder / run.name / "model"))]
        if arm == self.agent and seed == self.seed:  # the trained agent with other settings
            jobs += [
                replace(jobs[0], agent=label, settings=settings | fields)
                for label, fields in self.demo.variants.items()
            ]
        then = tuple(question for job in jobs for question in self.questions(job))
        return Training(run, grpo, settings, then)

    def baselines(self, folder: Path) -> list[Job]:
        """List the questions to the untrained policy, read by every agent and by the baselines."""
        settings = find.of_model(EMBEDDED)
        names = {f"untrained {arm}": arm for arm in self.arms}
        names |= {name: name for name in self.demo.baselines}
        return [
            question
            for label, reader in names.items()
            for question in self.questions(self.job(label, reader, settings, folder, self.seed))
        ]

    def agents(self) -> dict[str, Agent]:
        """Map the labels of rows to agents."""
        own = find.find(self.agent)()
        found: dict[str, Agent] = dict.fromkeys(self.demo.variants, own)
        for arm in self.arms:
            found |= dict.fromkeys((arm, f"untrained {arm}"), find.find(arm)())
        return found


def run_comparison(comparison: Comparison, size: str, name: str, runs: str) -> Path:
    """Train all agents, evaluate them, write the report; return the folder."""
    start, folder = time.perf_counter(), _folder(name, runs)
    work, others = comparison.trainings(folder), comparison.baselines(folder)
    first = work[0]
    console.print(
        f"{' beside '.join(comparison.arms)}, {len(comparison.seeds)} seeds from {comparison.seed} on: "
        f"{first.grpo.steps} steps of GRPO each from the same policy, on {comparison.demo.about}; then "
        "questions about unseen facts in documents of up to "
        f"{max(comparison.size.questions):,} sections."
    )
    if axes := find.axes(find.make(first.run.agent, first.settings), first.grpo):
        console.print(axes)
    workers = Workers(max(1, min(8, os.cpu_count() or 1)))
    try:
        workers.add([*work, *others])
        parts = len(work) + len(others) + sum(len(t.then) for t in work)
        _watch(workers, work, folder, parts)
    finally:
        workers.close()
    _report(folder, workers.rows, comparison, size, time.perf_counter() - start)
    return folder


def _watch(workers: Workers, work: Sequence[Training], folder: Path, parts: int) -> None:
    """Show the progress of trainings and evaluations until all are done."""
    with bar("steps") as progress:
        training = progress.add_task("training", total=sum(t.grpo.steps for t in work), note="")
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


def _pair(
    rows: Sequence[dict], arms: Sequence[str], seed: int | None, length: int, temperature: str
) -> dict:
    """Compare two agents in one cell; seed None: all seeds, averaged question by question."""
    from report.summary import compare

    cell = [row for row in rows if (row["length"], row["temperature"]) == (length, temperature)]
    sides = (
        [row for row in cell if row["agent"] == arm and seed in (None, row["trained"])]
        for arm in arms
    )
    difference = compare(*sides, metric="reward")
    return {"seed": seed, "length": length, "temperature": temperature} | difference


def _report(
    folder: Path, rows: list[dict], comparison: Comparison, size: str, seconds: float
) -> None:
    """Write summary and report of a comparison; print the differences of the first two agents."""
    arms = comparison.arms[:2]
    order = [*comparison.arms, *dict.fromkeys(row["agent"] for row in rows)]
    rows.sort(  # they have come in any order
        key=lambda row: (
            order.index(row["agent"]),
            row["length"],
            -float(row["temperature"]),
            row["trained"],
            row["id"],
        )
    )
    cells = [
        (length, temperature)
        for length in comparison.size.questions
        for temperature in ("1.0", "0.0")
    ]
    seeds = [_pair(rows, arms, seed, *cell) for cell in cells for seed in (None, *comparison.seeds)]
    facts = {"seed": comparison.seed, "size": size, "seconds": round(seconds, 1), "seeds": seeds}
    summary = _collect(folder, rows, comparison.agents()) | facts
    _write(folder, summary, comparison.demo.title)
    for length, temperature in cells:
        here = [d for d in seeds if (d["length"], d["temperature"]) == (length, temperature)]
        whole, *each = here
        interval = f"{whole['low']:+.3f} to {whole['high']:+.3f}, n {whole['n']}"
        console.print(
            f"{length:>4} sections, T {temperature}: {' - '.join(arms)} {whole['mean']:+.3f} "
            f"({interval}), seed by seed " + ", ".join(f"{d['mean']:+.3f}" for d in each)
        )
    console.print(f"{seconds:.0f} s in all. {_where(folder)}; a report of each training beside it.")


def main() -> None:  # for `python commands/demo.py`, without flags
    run_demo("default", 0, "demo", "runs")


if __name__ == "__main__":
    main()
