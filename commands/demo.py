"""The demos: GRPO on the embedded policy, then the trained agent beside others on unseen facts.

Holds: `Plan` and its sizes, `run_demo` (an agent beside its untrained self and full context);
`Comparison`, `run_comparison` (several agents, trained alike). Leaves out: what agents' own demos
train and ask (agents/demos.py), training (commands/train.py), evaluation (eval.py), report/.
Exercise it: `python cli.py demo --short`. Read next: dev/LOG.md.

Training reads facts of the train split in documents of at most 16 sections; evaluation asks for
facts of the test split, in documents of up to 1,024. Two processes train while the other cores
evaluate the baselines; then all of them evaluate the trained agent.
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
from config.locks import writing
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.terminal import bar, console
from data import Task
from memagent import Agent
from tasks import ledger, worlds

if TYPE_CHECKING:
    from rollout import Engine


KINDS = ("one_fact", "two_hop")
FULL = "full"  # the agent, and its label
MARK = ".demo"  # a folder with this file is a demo's: the next demo of its name replaces it


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a demo: steps of GRPO, and for every agent sections -> questions of each kind."""

    steps: int
    sampled: dict[int, int]  # trained, temperature 1
    greedy: dict[int, int]  # trained, temperature 0
    untrained: dict[int, int]  # both temperatures
    full_context: dict[int, int]  # both temperatures
    reverse: dict[int, int] = field(default_factory=dict)  # two_hop_reverse, trained, temperature 1
    # work of training and evaluation, as tokens that one core would read and write in that time at
    # the rate that `speed` measures (dev/LOG.md)
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
    """The cells of one agent at one length, to be evaluated in any process."""

    agent: str  # trained, untrained, full
    model: str
    # kinds of question, and (temperature, questions of each kind), all side by side: few long
    # documents alone leave the engine half empty, and both temperatures read the same documents
    kinds: tuple[str, ...]
    asks: tuple[tuple[float, int], ...]
    sections: int
    seed: int
    folder: str
    settings: dict  # of the agent
    reader: str  # the agent's name
    trained: int = 0  # the seed of its training
    then: tuple = ()  # jobs that may start once this one is done
    data: str = "world"
    base: str = ""  # the policy that answers frozen prompts; "" = the model itself

    @property
    def cost(self) -> int:
        """Sections to read."""
        return sum(n for _, n in self.asks) * self.sections * len(self.kinds)

    def __call__(self) -> list[dict]:
        return fill(self)


@dataclass(frozen=True, slots=True)
class Training:
    """A training, to be run in any process."""

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
    from models.packaged import located
    from models.setup import Setup

    return open_engine(located(Setup(model, "cpu", "float32"))), fingerprint(model)


def fill(job: Job) -> list[dict]:
    """Evaluate a job's cells; return their rows."""
    import torch

    from engines.frozen import WithFrozen
    from engines.sharing import share_engine
    from eval import Conditions, evaluate
    from report.rows import Cell
    from rollout import Sampling

    torch.set_num_threads(1)
    engine, model = _engine(job.model)
    if job.base not in ("", job.model):
        engine = WithFrozen(engine, _engine(job.base)[0])
    Path(job.folder).mkdir(exist_ok=True)

    def ask(temperature: float, n: int, engine: Engine) -> list[dict]:
        name = f"{job.agent}-{'+'.join(job.kinds)}-{temperature:g}-{job.sections}"
        by_kind = [_questions(job, n, kind) for kind in job.kinds]
        baseline = job.agent.startswith(("untrained", FULL))
        recorded = not baseline and temperature > 0 and job.sections in (4, 16, 64)
        transcripts = Path(job.folder, f"{name}.transcripts") if recorded else None
        return evaluate(
            engine,
            find.make(job.reader, job.settings),
            (task for tasks in zip(*by_kind, strict=True) for task in tasks),
            Sampling(temperature),
            Cell(job.agent, "", "", job.sections),
            Path(job.folder, f"{name}.jsonl"),
            Conditions(model, job.seed, record_to=transcripts, n_records=2 * len(job.kinds)),
        )

    rows_of_asks = share_engine(engine, [partial(ask, *each) for each in job.asks])
    return [row | {"trained": job.trained} for rows in rows_of_asks for row in rows]


def _questions(job: Job, n: int, kind: str) -> Iterator[Task]:
    if job.data == ledger.KIND:
        return ledger.make_questions(job.seed, n, job.sections, "test")
    return worlds.make_tasks(job.seed, n, job.sections, kind, "test")


def speed() -> float:
    """Measure the tokens a second that one process reads and writes with the embedded policy.

    That takes about a second, after loading it.
    """
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
        trajectories = rollout(engine, agent, jobs, Sampling(1.0), seed)
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        tokens = sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns)
        return tokens / (time.perf_counter() - start)

    return max(once(seed) for seed in range(3))


START = 18.0  # seconds for processes to start, and for the report at the end


def expected(plan: Plan, rate: float, ranks: int, cores: int) -> float:
    """Estimate a demo's seconds; 0 for a size that was not measured.

    rate: tokens a second that one core reads and writes. ranks: processes that train.
    """
    if not plan.training:
        return 0.0
    return START + (plan.training / ranks + plan.evaluating / min(cores, 4 + ranks)) / rate


def jobs_of(plan: Plan, seed: int, folder: Path, agent: Agent) -> tuple[list[Job], list[Job]]:
    """Return the jobs of the baselines and of the trained agent, each most expensive first."""
    settings = find.of_model(EMBEDDED) | asdict(agent.config)  # full context reads with them too

    def cells(label: str, asks: dict[float, dict[int, int]], kinds=KINDS) -> list[Job]:
        """Return one job a length; asks: temperature -> sections -> questions of each kind."""
        job = Job(
            label,
            str(folder / "model") if label == "trained" else str(EMBEDDED),
            kinds,
            asks=(),
            sections=0,
            seed=seed,
            folder=str(folder / "rows"),
            settings=settings,
            reader=FULL if label == FULL else agent.name,
        )
        lengths = {sections for questions in asks.values() for sections in questions}
        return [
            replace(
                job,
                asks=tuple((t, asks[t][sections]) for t in asks if sections in asks[t]),
                sections=sections,
            )
            for sections in sorted(lengths, reverse=True)
        ]

    baselines = [
        *cells("untrained", {1.0: plan.untrained, 0.0: plan.untrained}),
        *cells(FULL, {1.0: plan.full_context, 0.0: plan.full_context}),
    ]
    trained = [
        *cells("trained", {1.0: plan.sampled, 0.0: plan.greedy}),
        *cells("trained", {1.0: plan.reverse}, ("two_hop_reverse",)),
    ]
    return sorted(baselines, key=lambda j: -j.cost), sorted(trained, key=lambda j: -j.cost)


Work = Job | Training


PRELOADED = (
    "engines.hf",
    "engines.open",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


class Workers:
    """Processes that take jobs from one list, one at a time: no job waits in another's queue."""

    def __init__(self, n: int):
        self.context = multiprocessing.get_context("spawn")
        if "forkserver" in multiprocessing.get_all_start_methods():
            # one process imports what all workers and ranks need, and is forked
            from models import ranks

            self.context = multiprocessing.get_context("forkserver")
            self.context.set_forkserver_preload([*ranks.PRELOADED, *PRELOADED])
        self.idle: list[ProcessPoolExecutor] = []
        self.busy: dict[Future, tuple[Work, ProcessPoolExecutor]] = {}
        self.waiting: list[Work] = []
        self.rows: list[dict] = []
        self.done = 0
        self.hire(n)

    def hire(self, n: int) -> None:
        """Start n more processes."""
        self.idle += [ProcessPoolExecutor(1, mp_context=self.context) for _ in range(n)]
        self.assign()

    def add(self, jobs: Sequence[Work]) -> None:
        """Append jobs to the list."""
        self.waiting += jobs
        self.assign()

    def assign(self) -> None:
        while self.idle and self.waiting:
            worker, job = self.idle.pop(), self.waiting.pop(0)
            self.busy[worker.submit(job)] = job, worker

    def collect(self, timeout: float | None = 0) -> None:
        """Collect the rows of finished jobs and assign waiting ones; timeout: seconds to block."""
        finished, _ = wait(self.busy, timeout, FIRST_COMPLETED)
        for future in finished:
            self.rows += future.result()
            job, worker = self.busy.pop(future)
            self.idle.append(worker)
            self.done += 1
            self.waiting += job.then
        self.assign()

    def close(self) -> None:
        """End all processes: idle ones clean up after themselves, busy ones are terminated."""
        busy = [worker for _, worker in self.busy.values()]
        for worker in busy:
            for process in list((worker._processes or {}).values()):
                process.terminate()
        for worker in [*self.idle, *busy]:
            worker.shutdown(cancel_futures=True)


def run_demo(size: str, seed: int, name: str, runs: str, agent: str = find.DEFAULT) -> Path:
    """Train an agent, evaluate it, write the report; return the folder."""
    if getattr(find.find(agent), "arms", None):
        from commands.stream import demo_streams

        return demo_streams(name, runs, seed, size)
    if demo := find.find(agent).demo:
        return run_comparison(Comparison(agent, demo, demo.sizes[size], seed), size, name, runs)
    start = time.perf_counter()
    import torch

    plan, folder = PLANS[size], _folder(name, runs)
    # two ranks on a CPU; a GPU is one device
    devices = 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)
    run = RunConfig(name=name, runs=runs, agent=agent, keep_trajectories=5, devices=devices)
    grpo, reader = find.resolve("demo", EMBEDDED, dict(steps=plan.steps, seed=seed), {}, agent)
    baselines, trained = jobs_of(plan, seed + 1_000_000, folder, reader)
    console.print(
        f"Demo, seed {seed}: {plan.steps} steps of GRPO on documents of {run.lengths[0]} to "
        f"{run.lengths[-1]} sections, then questions about unseen facts in documents of up to "
        f"{max(plan.sampled):,} sections."
    )
    workers = Workers(1)
    try:
        _print_estimate(plan, devices, workers)
        train_s = _train_and_evaluate(run, grpo, reader, workers, baselines, trained)
    finally:
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


def _print_estimate(plan: Plan, devices: int, workers: Workers) -> None:
    """Print how long the demo will take on this machine, measured by the first worker."""
    measurement = workers.idle[0].submit(speed) if plan.training else None
    from commands import train  # noqa: F401, it takes as long as the measurement

    if not measurement:
        return
    cores, rate = os.cpu_count() or 1, measurement.result()
    console.print(
        f"About {expected(plan, rate, devices, cores) / 60:.1f} minutes here if nothing else runs, "
        "and half as much again if it learns to write long memories: one core reads and writes "
        f"{rate:,.0f} tokens a second, {min(cores, 4 + devices)} will be at work."
    )


def _train_and_evaluate(
    run: RunConfig,
    grpo: GRPOConfig,
    agent: Agent,
    workers: Workers,
    baselines: Sequence[Job],
    trained: Sequence[Job],
) -> float:
    """Train while spare cores evaluate the baselines, then evaluate; return training seconds."""
    spare = min(4, (os.cpu_count() or 1) - run.devices)
    resting = [] if spare else [workers.idle.pop()]  # on two cores both train
    try:
        workers.hire(spare - 1)
        workers.add(baselines)
        train_s = _train(run, grpo, agent, workers)
        workers.waiting = sorted([*workers.waiting, *trained], key=lambda job: -job.cost)
        workers.hire(run.devices - len(resting))
    finally:
        workers.idle += resting
    workers.assign()
    with bar("parts") as progress:
        task = progress.add_task("evaluating", total=len(baselines) + len(trained), note="")
        while workers.busy:
            workers.collect(timeout=1.0)
            progress.update(task, completed=workers.done)
    return train_s


def _folder(name: str, runs: str) -> Path:
    """Make an empty folder for a demo's results; an earlier demo of this name is deleted."""
    folder = files.run_path(runs, name)
    if folder.exists():
        if not (folder / MARK).exists():
            raise UserError(f"{folder} exists and is not a demo's: give another --name.")
        with writing(folder, f"The demo {folder}"):
            shutil.rmtree(folder)
    try:
        (folder / "rows").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.") from error
    (folder / MARK).touch()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the worker processes: one thread each
    return folder


def _train(run: RunConfig, grpo: GRPOConfig, agent: Agent, workers: Workers) -> float:
    """Train, and keep the workers busy meanwhile; return the seconds."""
    from commands.train import TrainingProgress, train

    over = threading.Event()

    def feed() -> None:
        while not over.wait(0.5):
            try:
                workers.collect()
            except Exception:  # a job's; its future stays, so the next `collect` raises it again
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


def _collect(
    folder: Path, rows: list[dict], agents: Mapping[str, Agent], unit: str = "sections"
) -> dict:
    """Summarise all rows, with the machine; merge jobs' rows and transcripts into one file each."""
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
    return summarise(rows, unit, "reward", agents=agents) | {"machine": machine}


def _write(folder: Path, summary: dict, title: str) -> None:
    from report.page import write_report
    from report.summary import table, write_summary

    write_summary(folder / "summary.json", summary)
    write_report(folder, title=title)
    console.print(table(summary))


# ---------------------------------------------------------------- several agents, trained alike


@dataclass(frozen=True, slots=True)
class Comparison:
    """A demo of an agent beside others, at one size; seed: the first of its trainings."""

    agent: str
    demo: Demo
    size: Size
    seed: int

    @property
    def arms(self) -> tuple[str, ...]:
        return self.agent, *self.demo.beside

    @property
    def ablations(self) -> dict[str, dict]:
        """Label -> settings, of the ablations of this size."""
        return self.demo.ablations if self.size.ablate else {}

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.size.seeds)

    @property
    def unit(self) -> str:
        """What lengths count."""
        return "sessions" if self.demo.data == ledger.KIND else "sections"

    @property
    def model(self) -> str:
        """The folder of the base policy."""
        return str(EMBEDDED.parent / self.demo.model if self.demo.model else EMBEDDED)

    @property
    def others(self) -> dict[str, str]:
        """Label -> agent, of those that answer with the untrained policy."""
        return {f"untrained {arm}": arm for arm in self.arms} | {
            name: name for name in self.demo.baselines
        }

    def questions(self, job: Job) -> Iterator[Job]:
        """Yield a job's evaluation, one job a length: the same questions for every policy."""
        for sections, n in self.size.questions.items():
            yield replace(job, sections=sections, asks=((1.0, n), (0.0, n)))

    def job(self, label: str, reader: str, settings: dict, folder: Path, trained: int) -> Job:
        """Return a job of the untrained policy, without questions yet."""
        return Job(
            label,
            model=self.model,
            kinds=(self.demo.kind,),
            asks=(),
            sections=0,
            seed=self.seed + 1_000_000,
            folder=str(folder / "rows" / str(trained)),
            settings=settings,
            reader=reader,
            trained=trained,
            data=self.demo.data,
            base=self.model,
        )

    def trainings(self, folder: Path) -> list[Training]:
        """List all agents with every seed, each followed by its evaluation.

        The same base policy, steps, trajectories and questions for all of them.
        """
        return [
            *(self.training(arm, seed, folder) for seed in self.seeds for arm in self.arms),
            *(self.training(self.agent, self.seed, folder, name) for name in self.ablations),
        ]

    def training(self, arm: str, seed: int, folder: Path, ablation: str = "") -> Training:
        """Return the training of one agent with one seed."""
        run = RunConfig(
            name=ablation.replace(" ", "-") or f"{arm}-{seed}",
            runs=str(folder),
            model=self.model if self.demo.model else "",
            data=self.demo.data,
            agent=arm,
            kinds=(self.demo.kind,) if self.demo.data == "world" else RunConfig().kinds,
            lengths=self.size.lengths[arm],
            keep_trajectories=5,
        )
        fields = self.size.training[arm] | {"seed": seed}
        own = self.ablations.get(ablation, {})
        grpo, agent = find.resolve("demo", self.model, fields, own, arm)
        settings = asdict(agent.config)
        job = self.job(ablation or arm, arm, settings, folder, seed)
        jobs = [replace(job, model=str(folder / run.name / "model"))]
        if (
            arm == self.agent and seed == self.seed and not ablation
        ):  # the trained agent with other settings
            jobs += [
                replace(jobs[0], agent=label, settings=settings | fields)
                for label, fields in self.demo.variants.items()
            ]
        then = tuple(question for job in jobs for question in self.questions(job))
        return Training(run, grpo, settings, then)

    def baselines(self, folder: Path) -> list[Job]:
        """List the questions to the untrained policy, read by every agent and by the baselines."""
        settings = find.of_model(self.model)
        return [
            question
            for label, reader in self.others.items()
            for question in self.questions(self.job(label, reader, settings, folder, self.seed))
        ]

    def agents(self) -> dict[str, Agent]:
        """Map the labels of rows to agents."""
        own = find.find(self.agent)()
        labels = [*self.demo.variants, *self.ablations]
        agents: dict[str, Agent] = dict.fromkeys(labels, own)
        for arm in self.arms:
            agents |= dict.fromkeys((arm, f"untrained {arm}"), find.find(arm)())
        agents |= {name: find.find(name)() for name in self.demo.baselines}
        return agents


def run_comparison(comparison: Comparison, size: str, name: str, runs: str) -> Path:
    """Train all agents, evaluate them, write the report; return the folder."""
    start, folder = time.perf_counter(), _folder(name, runs)
    work, others = comparison.trainings(folder), comparison.baselines(folder)
    first = work[0]
    console.print(
        f"{' beside '.join(comparison.arms)}, {len(comparison.seeds)} seeds from "
        f"{comparison.seed} on: {first.grpo.steps} steps of GRPO each from the same policy, on "
        f"{comparison.demo.about}; then questions about unseen facts in documents of up to "
        f"{max(comparison.size.questions):,} {comparison.unit}."
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
    """Return the steps that a training has done, and the reward of the last one."""
    path = folder / "metrics.csv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if len(lines) < 2:
        return 0, 0.0
    last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=False))
    return len(lines) - 1, float(last.get("reward") or "nan")  # the line may be half written


def _pair(
    rows: Sequence[dict], arms: Sequence[str], seed: int | None, length: int, temperature: str
) -> dict:
    """Compare two agents in one cell; seed None: all seeds, averaged question by question."""
    from report.summary import compare

    cell = [row for row in rows if (row["length"], row["temperature"]) == (length, temperature)]
    of_arm = [[row for row in cell if row["agent"] == arm] for arm in arms]
    sides = (  # what was not trained has answered once
        [row for row in own if seed in (None, row["trained"])] or own for own in of_arm
    )
    difference = compare(*sides, metric="reward")
    about = {"seed": seed, "length": length, "temperature": temperature}
    return about | {"against": arms[1]} | difference


def _report(
    folder: Path, rows: list[dict], comparison: Comparison, size: str, seconds: float
) -> None:
    """Write summary and report of a comparison; print how the agent differs from the one beside it
    or, if there is none, from what answers with the untrained policy."""
    rivals = comparison.arms[1:2] or tuple(comparison.others)
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
    cells = [(n, temperature) for n in comparison.size.questions for temperature in ("1.0", "0.0")]
    seeds = [
        _pair(rows, (comparison.agent, rival), seed, *cell)
        for cell in cells
        for rival in rivals
        for seed in (None, *comparison.seeds)
    ]
    facts = {"seed": comparison.seed, "size": size, "seconds": round(seconds, 1), "seeds": seeds}
    summary = _collect(folder, rows, comparison.agents(), comparison.unit) | facts
    _write(folder, summary, comparison.demo.title)

    def place(pair: dict) -> tuple:
        return pair["length"], pair["temperature"], pair["against"]

    for whole in (d for d in seeds if d["seed"] is None):
        each = [d for d in seeds if d["seed"] is not None and place(d) == place(whole)]
        interval = f"{whole['low']:+.3f} to {whole['high']:+.3f}, n {whole['n']}"
        console.print(
            f"{whole['length']:>4} {comparison.unit}, T {whole['temperature']}: "
            f"{comparison.agent} - {whole['against']} {whole['mean']:+.3f} ({interval}), seed by "
            "seed " + ", ".join(f"{d['mean']:+.3f}" for d in each)
        )
    console.print(f"{seconds:.0f} s in all. {_where(folder)}; a report of each training beside it.")


def main() -> None:  # for `python commands/demo.py`, without flags
    run_demo("default", 0, "demo", "runs")


if __name__ == "__main__":
    main()
