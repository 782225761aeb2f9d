"""Evaluation: agents over tasks, one row per trajectory.

Holds: `Conditions`, `evaluate` (one cell: rows written as they finish, resume, retries),
`run_suite` (every agent at every length and temperature). Leaves out: which questions are asked
(suites/), the file of rows (report/rows.py), grading (data.py), what the rows say
(report/summary.py).
Exercise it: `python cli.py eval --n 8`. Read next: cli.py.

Failures and empty answers are rows like the others: they score 0 and stay in every denominator.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text as Styled

import suites
from agents import find
from config.errors import UserError, clean
from config.options import EvalConfig, settings_of_rows
from config.terminal import bar, console
from data import Task
from engines.open import engine_fingerprint, most_in_flight, open_reader, policy_folder, weights_of
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from models.packaged import located
from models.setup import Setup
from report.evaluation import begin_evaluation, evaluation_folder
from report.live import Live
from report.reading import EDGE, Reading, row_of, slim, thin
from report.records import record
from report.rows import Cell, Rows, labels_of
from report.summary import Overlap
from rollout import Sampling, rollout, start

if TYPE_CHECKING:
    from rollout import Engine

POLL_S, PAGE_S = 0.3, 20.0  # between two looks at rows of another process; between two pages


# ---------------------------------------------------------------- one cell


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a cell is filled."""

    model: str = ""  # the caller's fingerprint of the weights
    seed: int = 0
    samples: int = 1  # of every task
    in_flight: int = 256
    retries: int = 1  # of a trajectory that failed in the engine, before its failure is written
    redo_failed: bool = False  # make rows with an error again that the file has
    wait: bool = True  # for rows that another process is making; else they are missing
    record_to: Path | None = None  # transcripts: sample 0 of the first `n_records` tasks
    n_records: int = 1


def evaluate(
    engine: Engine,
    agent: Agent,
    tasks: Iterable[Task],
    sampling: Sampling,
    cell: Cell,
    rows: Path,
    conditions: Conditions = Conditions(),
    progress: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Fill one cell: one row (`row_of`) per task and sample, returned in that order.

    A cell without a question is several, one for each kind of the tasks, side by side in the
    engine.

    A row is appended to the file `rows` as soon as its trajectory finishes. A row that the file has
    already is not made again if everything it depends on is the same: cell, agent, its settings and
    templates, sampling, seed, model and the task itself. Rows of other settings play no part.

    Several processes may fill the same cell: the one that claims a row makes it. With
    `conditions.wait` the rows of others are waited for, and made here if their owners end without
    them.

    tasks: with unique ids, taken one by one as the engine gets to them. The engine has its weights.
    progress: called with every row, old or new.
    """
    return _Filling(engine, agent, cell, sampling, conditions, progress).run(tasks, rows)


class _Filling:
    """A cell while it is filled."""

    def __init__(self, engine: Engine, agent: Agent, cell: Cell, sampling: Sampling,
                 conditions: Conditions, progress: Callable[[dict], None]):  # fmt: skip
        self.engine, self.agent = engine, agent.on(engine.codec, engine.window)
        self.cell = replace(cell, temperature=str(float(sampling.temperature)))
        self.sampling, self.conditions, self.progress = sampling, conditions, progress
        self.settings = self._fingerprint()
        self.rows: dict[tuple[str, int], dict | None] = {}  # in the order of tasks and samples
        self.digests: dict[str, str] = {}  # id -> the task's
        self.readings: dict[tuple[str, int], Reading] = {}
        self.failures: Counter = Counter()
        self.made: dict[tuple[str, int], object] = {}  # (source, sample) -> what the agent keeps
        # (id, sample) of a row -> the making of what it needs, where no earlier row has its costs
        self.owed: dict[tuple[str, int], Trajectory] = {}
        self.elsewhere: list[tuple[Task, int]] = []  # claimed by another process
        self.written: dict[tuple[str, int, str], dict] = {}  # rows of this cell in the file

    def _fingerprint(self) -> str:
        """Hash everything that the rows depend on beside the task."""
        agent, c = self.agent, self.conditions
        own = settings_of_rows(agent.config, self.engine.codec.told_date)
        if not agent.by_section:  # cut to the engine's window, which therefore counts
            own["window"] = agent.window
        templates = [agent.template(name) for name in agent.prompts]
        return _hash(
            asdict(self.cell), agent.name, own, templates, asdict(self.sampling), c.seed, c.model
        )

    def run(self, tasks: Iterable[Task], rows: Path) -> list[dict]:
        with Rows(rows) as file:
            self._refresh(file, self.conditions.redo_failed)
            todo: Iterable[tuple[Task, int]] = self._first(tasks)
            with self.engine.awake():
                if self.agent.keeps:
                    todo = [*todo]
                    self._make(file, todo)
                    todo = [(task, k) for task, k in todo if self.rows[task.id, k] is None]
                while True:
                    self._roll_out(file, todo)
                    todo = self.elsewhere if self.conditions.wait else ()
                    if not todo:
                        break
                    self.elsewhere = []
                    time.sleep(POLL_S)
                    self._refresh(file)
        return [row for row in self.rows.values() if row is not None]

    def _first(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, int]]:
        for task in tasks:
            if task.id in self.digests:
                two = f"Two tasks of one evaluation have the id {task.id!r}"
                raise UserError(f"{two}; ids must be unique.")
            self.digests[task.id] = task.digest
            for sample in range(self.conditions.samples):
                self.rows[task.id, sample] = None
                yield task, sample

    def _make(self, file: Rows, jobs: Sequence[tuple[Task, int]]) -> None:
        """Make what an agent keeps of every source that has rows missing, once for each sample.

        The first question in order makes it, even if its own row is there already or another
        process's: what is made then depends neither on the rows that are there nor on who asks.
        That row has the costs; if all rows so far have failed, the next one has those of making it
        again.
        """
        first: dict[tuple[str, int], tuple[Task, int]] = {}
        needed: dict[tuple[str, int], list[tuple[Task, int]]] = {}  # -> whose rows are missing
        paid: set[tuple[str, int]] = set()
        for task, k in jobs:
            if (source := self.agent.source(task)) is not None:
                first.setdefault((source, k), (task, k))
                row = self.written.get((task.id, k, task.digest))
                if row is None:
                    needed.setdefault((source, k), []).append((task, k))
                elif not row["error"]:
                    paid.add((source, k))
        self._roll_out(file, [first[key] for key in needed])
        again = [first[key] for key in needed if key not in self.made]
        payers: dict[tuple[str, int], tuple[str, int]] = {}
        for task, k in again:
            failed, key = self.rows[task.id, k], (self.agent.source(task), k)
            left = [(t.id, k) for t, k in needed[key] if self.rows[t.id, k] is None]
            if failed and failed["error"] and key not in paid and left:
                payers[task.id, k] = left[0]

        def keep(trajectory: Trajectory, turn: Turn) -> Turn:
            return turn if (trajectory.task.id, trajectory.sample) in payers else slim(turn)

        for trajectory in self._trajectories(again, keep):  # its row is not ours to write
            if payer := payers.get((trajectory.task.id, trajectory.sample)):
                self.owed[payer] = trajectory
        self.elsewhere = []  # those are asked for with all others

    def _trajectories(self, jobs: Iterable[tuple[Task, int]], keep) -> Iterator[Trajectory]:
        c, own = self.conditions, (self.engine, self.agent, jobs, self.sampling)
        return rollout(*own, c.seed, c.in_flight, keep, self._steps)

    def _steps(self, agent: Agent, task: Task, sample: int) -> Generator[Prompt, Turn, None]:
        """Start an agent, whose own exceptions fail the trajectory and not the evaluation."""
        try:
            if (source := agent.source(task)) is None:
                yield from start(agent, task)
                return
            if (key := (source, sample)) not in self.made:
                made = yield from agent.make(task)
                self.made.setdefault(key, made)
            yield from agent.answer(task, self.made[key])
        except UserError:
            raise
        except Exception as error:
            raise UserError(" ".join(f"{type(error).__name__}: {error}".split())) from error

    def _roll_out(self, file: Rows, todo: Iterable[tuple[Task, int]]) -> None:
        """Write the rows of jobs; those that fail in passing are begun anew."""
        while todo:
            again: list[tuple[Task, int]] = []
            for trajectory in self._trajectories(self._unclaimed(file, todo), self._keep):
                key = trajectory.task.id, trajectory.sample
                # what does not fit, and an agent's own mistake, would fail again in the same way
                passing = bool(trajectory.turns) and trajectory.turns[-1].finish is Finish.ERROR
                if passing and self.failures[key] < self.conditions.retries:
                    self.failures[key] += 1
                    self.readings[key].fail(trajectory.seconds)
                    again.append((trajectory.task, trajectory.sample))
                else:
                    self._finish(file, trajectory)
            todo = again

    def _unclaimed(
        self, file: Rows, todo: Iterable[tuple[Task, int]]
    ) -> Iterator[tuple[Task, int]]:
        """Yield the jobs that are neither in the file nor claimed by another process, and claim
        them."""
        for task, sample in todo:
            key = task.id, sample, self.digests[task.id]
            if self._take(self.written.get(key)):
                continue
            claim = repr((self.settings, key))
            if not file.claim(claim):
                self.elsewhere.append((task, sample))
                continue
            self._refresh(file)  # its owner may just have written it
            if self._take(self.written.get(key)):
                file.release(claim)
                continue
            self.readings[key[:2]] = reading = Reading(task, self.agent, self.readings.get(key[:2]))
            if owed := self.owed.get((task.id, sample)):
                for turn in owed.turns:
                    if not turn.prompt.final:  # that answers another question
                        reading.add(turn, owed=True)
            yield task, sample

    def _keep(self, trajectory: Trajectory, turn: Turn) -> Turn:
        """Count a turn, and drop what a row does not need of it."""
        task, turns = trajectory.task, trajectory.turns
        self.readings[task.id, trajectory.sample].add(turn)
        if not self._recorded(task, trajectory.sample):
            return slim(turn)
        if len(turns) >= 2 * EDGE:
            turns[-EDGE] = slim(turns[-EDGE], whole=True)
        return turn

    def _recorded(self, task: Task, sample: int) -> bool:
        c = self.conditions
        return bool(c.record_to) and sample == 0 and task.id in islice(self.digests, c.n_records)

    def _finish(self, file: Rows, trajectory: Trajectory) -> None:
        """Write a trajectory's transcript and row."""
        task, sample = trajectory.task, trajectory.sample
        cell = replace(self.cell, question=self.cell.question or task.kind)
        if owed := self.owed.get((task.id, sample)):
            trajectory.seconds += owed.seconds
        row = row_of(trajectory, cell, self.agent, self.readings.pop((task.id, sample)))
        row |= {
            "tries": self.failures[task.id, sample] + 1,
            "settings": self.settings,
            "task": self.digests[task.id],
            "document": task.document_digest,
        }
        trajectory.reward = row["reward"]
        # the transcript goes first: killed between the two, there is one too many, which the
        # report drops
        if self._recorded(task, sample):
            transcript = thin(record(trajectory, self.agent, temperature=self.sampling.temperature))
            with Rows(self.conditions.record_to) as records:
                records.append(transcript | {"cell": asdict(cell), "settings": self.settings})
        file.append(row)
        file.release(repr((self.settings, (task.id, sample, self.digests[task.id]))))
        self._take(row)

    def _refresh(self, file: Rows, redo: bool = False) -> None:
        """Read the rows of this cell that others have written meanwhile."""
        mark = self.settings.encode()
        for row in file.new(lambda line: mark in line):
            if row.get("settings") == self.settings and not (redo and row["error"]):
                self.written[row["id"], row["sample"], row["task"]] = row

    def _take(self, row: dict | None) -> bool:
        if row is not None:
            self.rows[row["id"], row["sample"]] = row
            self.progress(row)
        return row is not None


def _hash(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- all cells

# most characters of the documents in flight together; each is held as ids, about one byte a
# character, and a few sections as text
DOCUMENT_CHARACTERS = 1 << 29


def run_suite(
    config: EvalConfig, agents: Mapping[str, Agent], suite: suites.Suite | None = None
) -> Path:
    """Ask every agent at every length and temperature; return the folder with rows, summary and
    report.

    agents: by their names, without @untrained. suite: None: the one that is named, as it
    is by default. Several calls may fill one folder at the same time:
    each row is made by one of them, and each writes the summary when all rows are there.
    """
    evaluation = _Evaluation(config, agents, suite or suites.of(config))
    with evaluation.page:
        for wait in (False, True):  # first the rows that nobody claims, then other processes'
            for untrained in evaluation.groups:
                evaluation.ask(untrained, wait)
    return evaluation.report()


class _Evaluation:
    """An evaluation while it runs."""

    def __init__(self, config: EvalConfig, agents: Mapping[str, Agent], suite: suites.Suite):
        self.config, self.agents, self.suite = config, agents, suite
        self.groups = weights_of(config)
        self.samplings = [Sampling(t, config.top_p) for t in config.temperatures]
        self.folder = evaluation_folder(config, suite)
        self.page = Live(self.folder, f"Evaluation {config.name}", PAGE_S)
        if config.endpoint and not config.model and suite.unit == "tokens" and suite.lengths:
            lengths = f"The lengths of {suite.label} are tokens of the model that is asked"
            raise UserError(f"{lengths}: say by --model whose tokenizer the server has.")
        setup = located(Setup.of_evaluation(config, [*agents.values()]))
        self.in_flight = most_in_flight(config, setup)
        scope = suites.scope_of(suite, config.data, config, setup.codec)
        self.columns = suites.columns(suite, scope)
        # generated English is not looked up: its splits share no fact, and all questions have the
        # same words
        self.overlaps = {
            untrained: Overlap(policy_folder(config, untrained), names, suite.unit != "sections")
            for untrained, names in self.groups.items()
        }
        self.labels = labels_of(config.agents)
        self.done: dict[tuple[str, float, int], list[dict]] = {}  # (agent, temperature, column)

    def ask(self, untrained: bool, wait: bool) -> None:
        """Ask all agents that answer with one policy."""
        names = self.groups[untrained]
        if wait and not any(self._left(names, k) for k in range(len(self.columns))):
            return
        agents = [self._agent(name) for name in names]
        engine = open_reader(self.config, agents, untrained)
        model = engine_fingerprint(self.config, engine, untrained)
        self._write_settings({"untrained" if untrained else "model": model})
        self.page.begin()
        with contextlib.closing(engine), engine.awake(), bar("answers") as progress:
            if not (wait or self.done):
                self._check(engine)
            for k, column in enumerate(self.columns):
                left = self._left(names, k)
                tasks = column.make() if left else []
                if warning := self.overlaps[untrained].add(column.question, tasks):
                    progress.console.print(Styled(clean(warning), style="bold red"))
                for name, sampling in left:
                    conditions = self._conditions(tasks, sampling, model, wait)
                    cell = Cell(self.labels[name], column.question, "", column.length)
                    title = f"{name} T={sampling.temperature:g} {column.question} {column.length}"
                    n = len(tasks) * conditions.samples
                    shown = progress.add_task(escape(title), total=n, note="")
                    rows = evaluate(
                        *(engine, self._agent(name), tasks, sampling, cell),
                        *(self.folder / "rows.jsonl", conditions),
                        lambda row, shown=shown: (progress.advance(shown), self.page.refresh()),
                    )
                    if len(rows) == n:
                        self.done[name, sampling.temperature, k] = rows
                tasks = []  # one column's documents at a time

    def _check(self, engine: Engine) -> None:
        """Let every agent refuse tasks, before any row is made."""
        agents = [a for a in self.agents.values() if type(a).check is not Agent.check]
        for agent in agents:
            reader = agent.on(engine.codec, engine.window)
            for column in self.columns:
                for task in column.make():
                    reader.check(task)

    def _agent(self, name: str) -> Agent:
        return self.agents[name.partition("@")[0]]

    def _left(self, names: Sequence[str], column: int) -> list[tuple[str, Sampling]]:
        return [
            (name, sampling)
            for name in names
            for sampling in self.samplings
            if (name, sampling.temperature, column) not in self.done
        ]

    def _conditions(self, tasks: Sequence[Task], sampling: Sampling, model: str, wait: bool):
        config = self.config
        longest = max((task.characters for task in tasks), default=1)
        return Conditions(
            model=model,
            seed=config.seed,
            samples=config.samples if sampling.temperature > 0 else 1,  # greedy: all the same
            in_flight=min(self.in_flight, max(1, DOCUMENT_CHARACTERS // max(1, longest))),
            retries=config.retries,
            redo_failed=config.redo_failed and not wait,
            wait=wait,
            record_to=self.folder / "transcripts.jsonl",
            n_records=config.transcripts,
        )

    def _write_settings(self, weights: Mapping[str, str]) -> None:
        agents = find.settings_of(self.agents.values())
        begin_evaluation(self.folder, self.config, self.suite, agents, weights)

    def report(self) -> Path:
        """Write summary and report, and print the table."""
        from report.summary import overlaps, summarise, table, write_summary

        rows = [
            row
            for name in self.config.agents
            for sampling in self.samplings
            for k in range(len(self.columns))
            for row in self.done[name, sampling.temperature, k]
        ]
        agents = {self.labels[n]: self._agent(n) for n in self.labels}
        metric = self.suite.measured_by([column.question for column in self.columns])
        summary = summarise(rows, self.suite.unit, metric, agents=agents)
        summary["altered"] = find.altered(agents, self.config)
        summary["trained_on"] = [o.summary() for o in self.overlaps.values() if o.known]
        self._write_settings({})  # again: another call may have come in between
        write_summary(self.folder / "summary.json", summary)
        console.print(table(summary, console.width))
        for sentence in overlaps(summary):
            console.print(Styled(clean(sentence), style="bold red"))
        self.page.finish(f"All answers are in {self.folder / 'rows.jsonl'}, summary.json beside")
        return self.folder
