"""The demo: GRPO on the embedded policy, then the trained agent beside the untrained one and full context, on facts nobody has seen.

Holds: `Plan` and its three sizes, `run_demo`. Leaves out: training (train.py), evaluation (eval.py), the report (report.py).
Exercise it: `python cli.py demo --short`. Read next: dev/LOG.md.

Training reads facts of the train split in documents of at most 16 sections; evaluation asks for facts of the test split, in documents
of up to 1,024. The baselines are evaluated in a second process while the first one trains; afterwards both evaluate the trained agent.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import settings
import worlds
from memagent import AgentConfig
from progress import bar, console
from settings import EMBEDDED, GRPOConfig, RunConfig
from text import UserError

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


PLANS = {
    "default": Plan(
        steps=80,
        sampled={4: 128, 16: 128, 64: 128, 256: 64, 1024: 24},
        greedy={4: 128, 16: 128, 64: 64, 256: 16, 1024: 8},
        untrained={4: 128, 16: 128, 64: 32, 256: 8, 1024: 4},
        full_context={4: 128, 16: 128, 64: 32, 256: 32, 1024: 32},
        reverse={4: 64, 16: 64},
    ),
    "long": Plan(
        steps=150,
        sampled={4: 512, 16: 512, 64: 256, 256: 128, 1024: 96},
        greedy={4: 512, 16: 256, 64: 128, 256: 64, 1024: 32},
        untrained={4: 512, 16: 256, 64: 64, 256: 32, 1024: 8},
        full_context={4: 256, 16: 256, 64: 128, 256: 64, 1024: 64},
        reverse={4: 128, 16: 128, 64: 128},
    ),
    "short": Plan(steps=3, sampled={2: 8, 4: 8}, greedy={2: 8, 4: 8}, untrained={2: 8, 4: 8}, full_context={2: 8, 4: 8}, reverse={2: 8}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """The cells of one agent, temperature and length, to fill in whatever process."""

    agent: str  # trained, untrained, full
    model: str
    kinds: tuple[str, ...]  # of question, side by side: a few long documents alone leave the engine half empty
    temperature: float
    sections: int
    n: int  # questions of each kind
    seed: int
    folder: str
    config: AgentConfig

    @property
    def cost(self) -> int:
        return self.n * self.sections * len(self.kinds)


@lru_cache(maxsize=2)
def _engine(model: str):
    from commands import fingerprint, open_engine

    return open_engine(model, "cpu", "float32", False), fingerprint(model)


def fill(job: Job) -> list[dict]:
    """Evaluate the cells; returns their rows."""
    import torch

    from agents import full_context
    from eval import evaluate
    from memagent import memagent
    from rollout import Sampling

    torch.set_num_threads(1)
    engine, model = _engine(job.model)
    name = f"{job.agent}-{'+'.join(job.kinds)}-{job.temperature:g}-{job.sections}"
    by_kind = [worlds.make_tasks(job.seed, job.n, job.sections, kind, "test") for kind in job.kinds]
    keep = job.agent == "trained" and job.temperature > 0 and job.sections in (4, 16, 64)
    return evaluate(
        engine, full_context if job.agent == "full" else memagent,
        (task for tasks in zip(*by_kind, strict=True) for task in tasks), job.config, Sampling(job.temperature),
        name=job.agent, length=job.sections, rows=Path(job.folder, "rows", f"{name}.jsonl"), model=model,
        seed=job.seed, record_to=Path(job.folder, "rows", f"{name}.transcripts") if keep else None, n_records=2 * len(job.kinds),
    )  # fmt: skip


def jobs_of(plan: Plan, seed: int, folder: Path, config: AgentConfig) -> tuple[list[Job], list[Job]]:
    """(baselines, trained), the dearest first."""
    model, where = str(folder / "model"), str(folder)

    def cells(agent: str, model: str, temperature: float, questions: dict[int, int], kinds=KINDS) -> Iterator[Job]:
        for sections, n in questions.items():
            yield Job(agent, model, kinds, temperature, sections, n, seed, where, config)

    base = [
        job
        for agent, questions in (("untrained", plan.untrained), ("full", plan.full_context))
        for temperature in (1.0, 0.0)
        for job in cells(agent, str(EMBEDDED), temperature, questions)
    ]
    trained = [
        *cells("trained", model, 1.0, plan.sampled),
        *cells("trained", model, 0.0, plan.greedy),
        *cells("trained", model, 1.0, plan.reverse, ("two_hop_reverse",)),
    ]
    return sorted(base, key=lambda j: -j.cost), sorted(trained, key=lambda j: -j.cost)


class Workers:
    """Single processes that take jobs one at a time, so that the dearest start first and none waits behind another's queue."""

    def __init__(self, n: int):
        self.context = multiprocessing.get_context("spawn")
        self.idle: list[ProcessPoolExecutor] = []
        self.busy: dict[Future, ProcessPoolExecutor] = {}
        self.waiting: list[Job] = []
        self.rows: list[dict] = []
        self.done = 0
        self.hire(n)

    def hire(self, n: int) -> None:
        self.idle += [ProcessPoolExecutor(1, mp_context=self.context) for _ in range(n)]
        self.assign()

    def add(self, jobs: list[Job]) -> None:
        self.waiting += jobs
        self.assign()

    def assign(self) -> None:
        while self.idle and self.waiting:
            worker = self.idle.pop()
            self.busy[worker.submit(fill, self.waiting.pop(0))] = worker

    def collect(self, timeout: float | None = 0) -> None:
        """Take in what is finished and hand out what waits."""
        finished, _ = wait(self.busy, timeout, FIRST_COMPLETED)
        for future in finished:
            self.rows += future.result()
            self.idle.append(self.busy.pop(future))
            self.done += 1
        self.assign()

    def close(self) -> None:
        for worker in [*self.idle, *self.busy.values()]:
            for process in list((worker._processes or {}).values()):
                process.terminate()
            worker.shutdown(wait=False, cancel_futures=True)


def run_demo(size: str, seed: int, name: str, runs: str) -> Path:
    """Train, evaluate, report; returns the run's folder."""
    start = time.perf_counter()
    plan, folder = PLANS[size], settings.run_path(runs, name)  # what lies there is removed
    run = RunConfig(name=name, runs=runs, keep_trajectories=5)
    grpo, agent = settings.resolve("demo", EMBEDDED, dict(steps=plan.steps, seed=seed), {})
    if folder.exists():
        if not (folder / MARK).exists():
            raise UserError(f"{folder} is there and is not a demo's: give another --name.")
        shutil.rmtree(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the worker processes: one thread each
    baselines, trained = jobs_of(plan, seed + 1_000_000, folder, agent)
    console.print(
        f"Demo, seed {seed}: {plan.steps} steps of GRPO on documents of {run.lengths[0]} to {run.lengths[-1]} sections, then questions about "
        f"unseen facts in documents of up to {max(plan.sampled):,} sections."
    )
    try:
        (folder / "rows").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.") from error
    (folder / MARK).touch()
    workers = Workers(max(1, min(4, (os.cpu_count() or 1) - 1)))
    try:
        workers.add(baselines)
        train_s = _train(run, grpo, agent, plan.steps, workers)
        workers.hire(1)
        workers.add(trained)
        with bar("parts") as progress:
            shown = progress.add_task("evaluating", total=len(baselines) + len(trained), note="")
            while workers.busy:
                workers.collect(timeout=1.0)
                progress.update(shown, completed=workers.done)
    finally:
        workers.close()
    _report(folder, workers.rows, seed, size, time.perf_counter() - start, train_s)
    return folder


def _train(run: RunConfig, grpo: GRPOConfig, agent: AgentConfig, steps: int, workers: Workers) -> float:
    import lightning
    import torch

    from train import TrainingProgress, train

    class Feed(lightning.Callback):
        """After each step the baselines' process gets its next cell."""

        def on_train_batch_end(self, *_) -> None:
            workers.collect()

    torch.set_num_threads(1)
    start = time.perf_counter()
    train(run, grpo, agent, resume=True, callbacks=[TrainingProgress(steps), Feed()])
    return time.perf_counter() - start


def _report(folder: Path, rows: list[dict], seed: int, size: str, seconds: float, train_s: float) -> None:
    import torch

    from report import write_report
    from tally import summarise, table, write_summary

    summary = summarise(rows, metric="reward") | {
        "seed": seed, "size": size, "seconds": round(seconds, 1), "training_seconds": round(train_s, 1),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()},
    }  # fmt: skip
    for kind, name in (("*.jsonl", "rows.jsonl"), ("*.transcripts", "transcripts.jsonl")):
        (folder / name).write_bytes(b"".join(path.read_bytes() for path in sorted((folder / "rows").glob(kind))))
    write_summary(folder / "summary.json", summary)
    write_report(folder, title="memagent: the demo")
    shutil.rmtree(folder / "rows")
    console.print(table(summary))
    console.print(
        f"{seconds:.0f} s in all, {train_s:.0f} s of them training. Numbers: {folder / 'summary.json'}; report: {folder / 'report.html'}"
    )


def main() -> None:  # for `python demo.py`, without flags
    run_demo("default", 0, "demo", "runs")


if __name__ == "__main__":
    main()
