"""Evaluation: agents over tasks, one row per reading.

Failures and empty answers are rows like the others: they score 0 and stay in every denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import suites
from agents import find
from config.errors import UserError
from config.files import run_path
from config.locks import writing
from config.options import EvalConfig
from config.plugins import failure, is_path
from config.terminal import bar, say
from data import Task
from engines.open import engine_fingerprint, open_reader
from memagent import Agent, Prompt, Trajectory, Turn
from models.dtypes import settle_dtype
from models.plan import geometry
from models.policy import Policy
from report.evaluation import (
    begin_evaluation,
    dtype_before,
    evaluation_folder,
    joined,
    key_of,
    known_weights,
)
from report.reading import EDGE, Reading, row_of, settings_of_row, slim, thin
from report.records import record
from report.rows import Cell, Rows, labels_of, latest, read_rows
from report.summary import Overlap
from rollout import Engine, Sampling, rollout, start

# ---------------------------------------------------------------- one cell

TRANSCRIPTS = 32 << 20  # bytes of an evaluation's transcripts, past which no wrong reading has one
N_RECORDS = 2  # first tasks of a cell that have a transcript, however they end
Key = tuple[str, int]  # id of a task and the number of a sample


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a cell is filled."""

    model: str = ""  # the caller's fingerprint of the weights
    dtype: str = ""  # that they are computed with; "" = a server's
    seed: int = 0
    samples: int = 1  # of every task
    in_flight: int = 256
    redo_failed: bool = False  # make rows with an error again that the file has
    record_to: Path | None = None  # transcripts: sample 0 of the first `n_records` tasks, and all
    n_records: int = N_RECORDS  # that was not fully right, until the file has so many bytes:
    record_bytes: int = TRANSCRIPTS // 64


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
    engine. A row is appended to the file `rows`, which nobody else writes, as soon as its reading
    ends. A row that is there already is not made again if everything it depends on is the same:
    cell, agent, its settings and templates, sampling, seed, model and the task itself.

    tasks: with unique ids, taken one by one as the engine gets to them. The engine has its weights.
    progress: called with every row, old or new.
    """
    c, agent = conditions, agent.on(engine.codec, engine.window)
    cell = replace(cell, temperature=str(float(sampling.temperature)))
    settings = settings_of_row(cell, agent, engine.codec.told_date, sampling, c.seed, c.model)
    there = {
        (row["id"], row["sample"], row["task"]): row
        for row in read_rows(rows, settings)
        if not (c.redo_failed and row["error"])
    }
    found: dict[Key, dict | None] = {}  # the row of each job, in order
    recorded: set[Key] = set()  # which have a transcript, however they end
    readings: dict[Key, Reading] = {}  # of what is in flight
    kept = _Kept(agent)

    def jobs() -> Iterator[tuple[Task, int]]:
        for number, task in enumerate(tasks):
            if (task.id, 0) in found:
                raise UserError(f"Two tasks have the id {task.id!r}; ids must be unique.")
            if number < c.n_records:
                recorded.add((task.id, 0))
            digest = task.digest
            for sample in range(c.samples):
                row = found[task.id, sample] = there.get((task.id, sample, digest))
                if row:
                    progress(row)
                yield task, sample

    def is_missing(task: Task, sample: int) -> bool:
        return found[task.id, sample] is None

    def steps(agent: Agent, task: Task, sample: int) -> Generator[Prompt, Turn, None]:
        """Start an agent, whose own exceptions fail its reading and not the evaluation."""
        readings[task.id, sample] = Reading(task, agent)
        try:
            yield from kept.start(task, sample)
        except UserError:
            raise
        except Exception as error:
            raise failure(error) from error

    def keep(trajectory: Trajectory, turn: Turn) -> Turn:
        """Count a turn, and drop what a row and a transcript do not need of it."""
        readings[trajectory.task.id, trajectory.sample].add(turn)
        if c.record_to is None:
            return slim(turn)
        if len(turns := trajectory.turns) >= 2 * EDGE:  # of the middle no section stays
            turns[-EDGE] = slim(turns[-EDGE], whole=True)
        return slim(turn, whole=True, section=turn.prompt.section)

    def read(jobs: Iterable[tuple[Task, int]]) -> None:
        for done in rollout(engine, agent, jobs, sampling, c.seed, c.in_flight, keep, steps):
            task, key = done.task, (done.task.id, done.sample)
            reading = readings.pop(key)
            if not is_missing(task, done.sample):
                continue  # it was read for what it makes
            here = replace(cell, question=cell.question or task.kind)
            row = found[key] = row_of(done, here, agent, reading) | {
                "settings": settings,
                "dtype": c.dtype,
                "task": task.digest,
                "document": task.document_digest,
            }
            # before the row: killed between the two, there is one too many, which the report drops
            if c.record_to is not None and (key in recorded or _is_wanted(row, c)):
                done.reward = row["reward"]
                transcript = thin(record(done, agent, temperature=sampling.temperature))
                with Rows(c.record_to) as records:
                    records.append(transcript | {"cell": asdict(here), "settings": settings})
            file.append(row)
            progress(row)

    todo = jobs()
    with Rows(rows) as file, engine.awake():
        if agent.keeps:
            todo = [*todo]
            read(kept.makers_of(todo, is_missing))
        read(job for job in todo if is_missing(*job))
    return [row for row in found.values() if row]


def _is_wanted(row: dict, c: Conditions) -> bool:
    """Tell whether a reading that was not fully right has room for its transcript."""
    size = c.record_to.stat().st_size if c.record_to.exists() else 0
    return min(row["sub_em"], row["reward"] or 0) < 1 and size < c.record_bytes


class _Kept:
    """What an agent makes of a document once and keeps for several questions about it."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self.makers: dict[Key, str] = {}  # (source, sample) -> the id of the task that makes it
        self.made: dict[Key, object] = {}

    def makers_of(
        self, jobs: Iterable[tuple[Task, int]], is_missing: Callable[[Task, int], bool]
    ) -> list[tuple[Task, int]]:
        """Return the first job of every source that has rows missing: it makes what is kept.

        It does so even if its row is there already: what is made then depends on no row.
        """
        groups: dict[Key, list[tuple[Task, int]]] = {}
        for task, sample in jobs:
            if (source := self.agent.source(task)) is not None:
                groups.setdefault((source, sample), []).append((task, sample))
        self.makers = {key: group[0][0].id for key, group in groups.items()}
        return [group[0] for group in groups.values() if any(is_missing(*job) for job in group)]

    def start(self, task: Task, sample: int) -> Generator[Prompt, Turn, None]:
        """Start the agent, which makes what it keeps if this task is to make it."""
        if (source := self.agent.source(task)) is None:
            yield from start(self.agent, task)
            return
        if (key := (source, sample)) not in self.made:
            if task.id != (maker := self.makers[key]):
                raise UserError(f"what {self.agent.label} keeps was not made: see task {maker}")
            self.made[key] = yield from self.agent.make(task)
        yield from self.agent.answer(task, self.made[key])


# ---------------------------------------------------------------- all cells

# most characters of the documents in flight together; each is held as ids, about one byte a
# character, and a few sections as text
DOCUMENT_CHARACTERS = 1 << 29


def run_suite(
    config: EvalConfig, agents: Mapping[str, Agent], suite: suites.Suite | None = None
) -> Path:
    """Ask every agent at every length and temperature; return the folder with rows, summary and
    report.

    agents: by their names, without @untrained. suite: None: the one that is named, as it is by
    default.
    """
    evaluation = _Evaluation(config, agents, suite or suites.from_config(config))
    with writing(evaluation.folder, f"The evaluation {evaluation.folder}"):
        try:
            for untrained in evaluation.groups:
                evaluation.ask(untrained)
            return evaluation.report()
        except BaseException:
            evaluation.stop()
            raise


def weights_of(config: EvalConfig) -> dict[bool, list[str]]:
    """Group the names of --agents by whether the policy before training answers (@untrained)."""
    groups: dict[bool, list[str]] = {}
    for name in config.agents:
        _, at, weights = name.partition("@")
        if at and (weights != "untrained" or not config.untrained):
            raise UserError(
                f"{name!r}: after an agent's name only @untrained may stand, with --untrained to "
                "say which policy that is."
            )
        groups.setdefault(bool(at), []).append(name)
    return groups


def most_in_flight(config: EvalConfig, policy: Policy) -> int:
    """Return how many readings are in flight: few on a CPU, where our engine is no faster with
    more, so that rows come as documents are read, and not all at the end."""
    if config.engine != "transformers" or config.endpoint or policy.device != "cpu":
        return config.in_flight
    most = 16
    with suppress(UserError):  # an architecture whose sizes are not known
        most = 64 if geometry(str(policy.base_folder)).weights < 10_000_000 else 16
    return min(config.in_flight, most)


class _Evaluation:
    """An evaluation while it runs."""

    def __init__(self, config: EvalConfig, agents: Mapping[str, Agent], suite: suites.Suite):
        folder = run_path(config.runs, config.name)
        config = settle_dtype(config, dtype_before(folder))
        self.config, self.suite = config, suite
        self.groups, self.labels = weights_of(config), labels_of(config.agents)
        self.agents = {name: agents[name.partition("@")[0]] for name in config.agents}
        self.samplings = [Sampling(t, config.top_p) for t in config.temperatures]
        self.folder = evaluation_folder(config, suite)
        self.rows = self.folder / "rows.jsonl"
        if config.endpoint and not config.model and suite.unit == "tokens" and suite.lengths:
            lengths = f"The lengths of {suite.label} are tokens of the model that is asked"
            raise UserError(f"{lengths}: say by --model whose tokenizer the server has.")
        policy = Policy.of_evaluation(config, [*agents.values()])
        self.in_flight = most_in_flight(config, policy)
        scope = suites.scope_of(suite, config.data, config, policy.codec)
        self.columns = suites.columns(suite, scope)
        # not of generated English: its splits share no fact, and all questions have the same words
        looks = suite.unit != "sections"
        self.overlaps = {
            untrained: Overlap(config.untrained if untrained else config.model, names, looks)
            for untrained, names in self.groups.items()
        }
        self.begun = False  # whether the folder is this evaluation's
        # (agent, temperature, column) -> the keys of its rows
        self.places: dict[tuple[str, float, int], list[tuple]] = {}

    def ask(self, untrained: bool) -> None:
        """Ask all agents that answer with one policy."""
        config, suite, names = self.config, self.suite, self.groups[untrained]
        engine = open_reader(config, [self.agents[name] for name in names], untrained)
        model = engine_fingerprint(config, engine, untrained)
        weights = {"untrained" if untrained else "model": model}
        known_weights(self.folder, config, suite, weights)
        self._check_settings(names, engine, model)
        settings = find.settings_of(self.agents.values())
        begin_evaluation(self.folder, config, suite, settings, weights)
        self.begun = True
        with closing(engine), engine.awake(), bar("answers") as progress:
            if not self.places:
                self._check(engine)
            for k, column in enumerate(self.columns):
                tasks = column.make()
                if warning := self.overlaps[untrained].add(column.question, tasks):
                    say(warning, "bold red", progress.console)
                longest = max(1, *(task.characters for task in tasks))
                for name, sampling in product(names, self.samplings):
                    # greedy answers are all the same
                    samples = config.samples if sampling.temperature > 0 else 1
                    # what earlier cells have left over of the transcripts goes to the later ones
                    cells = len(self.columns) * len(self.samplings) * len(config.agents)
                    conditions = Conditions(
                        model=model,
                        dtype="" if config.endpoint else config.dtype,
                        seed=config.seed,
                        samples=samples,
                        in_flight=max(1, min(self.in_flight, DOCUMENT_CHARACTERS // longest)),
                        redo_failed=config.redo_failed,
                        record_to=self.folder / "transcripts.jsonl",
                        record_bytes=TRANSCRIPTS * (len(self.places) + 1) // cells,
                    )
                    cell = Cell(self.labels[name], column.question, "", column.length)
                    title = f"{name} T={sampling.temperature:g} {column.question} {column.length}"
                    shown = progress.add_task(title, total=len(tasks) * samples, note="")
                    rows = evaluate(
                        *(engine, self.agents[name], tasks, sampling, cell, self.rows, conditions),
                        lambda row, shown=shown: progress.advance(shown),
                    )
                    self.places[name, sampling.temperature, k] = [*map(key_of, rows)]
                tasks = []  # one column's documents at a time

    def _check(self, engine: Engine) -> None:
        """Let every agent refuse tasks, before any row is made."""
        for agent in {agent.name: agent for agent in self.agents.values()}.values():
            if type(agent).check is not Agent.check:
                reader = agent.on(engine.codec, engine.window)
                for column in self.columns:
                    for task in column.make():
                        reader.check(task)

    def _check_settings(self, names: Sequence[str], engine: Engine, model: str) -> None:
        """Refuse agents whose rows are there under other settings, before any row is made."""
        agents = {self.labels[n]: self.agents[n].on(engine.codec, engine.window) for n in names}
        rows = latest(read_rows(self.rows))
        for settings, cell in {row["settings"]: Cell.from_row(row) for row in rows}.items():
            if agent := agents.get(cell.agent):
                sampling = Sampling(float(cell.temperature), self.config.top_p)
                parts = agent, engine.codec.told_date, sampling, self.config.seed, model
                # of a column without a question the cells are kinds of tasks
                columns = cell, replace(cell, question="")
                if settings not in [settings_of_row(column, *parts) for column in columns]:
                    stored = find.begun(self.folder, None).get("agent", {})
                    others = "; ".join(find.changed({"agent": stored}, agent=agent.config))
                    others = others or "its file may have been edited" * is_path(agent.name)
                    raise UserError(
                        f"{self.folder} holds answers of {cell.agent} under other settings"
                        f"{others and f' ({others})'}: give this evaluation another --name."
                    )

    def stop(self) -> None:
        """Write the page of what there is, where the evaluation has begun and cannot go on."""
        if self.begun:
            from report.page import try_report

            if why := try_report(self.folder):
                say(why, "red")

    def report(self) -> Path:
        """Write summary and report, and print the table."""
        from report.folder import agents_of, stored_summary, tell
        from report.page import finish_report
        from report.summary import summarise, write_summary

        order = product(self.config.agents, self.config.temperatures, range(len(self.columns)))
        wanted = [key for place in order for key in self.places[place]]
        before = {}  # of agents that earlier calls have asked
        with suppress(UserError):  # it is damaged, and made anew
            before = stored_summary(self.folder / "summary.json") or {}
        rows = joined(self.folder, wanted, (cell["agent"] for cell in before.get("cells", ())))
        agents = {self.labels[name]: agent for name, agent in self.agents.items()}
        made_by = agents_of(rows) | agents
        summary = summarise(rows, self.suite.unit, self.suite.metric, agents=made_by)
        altered = dict.fromkeys(agents, "") | find.altered(agents, self.config)
        summary["altered"] = before.get("altered", {}) | altered
        seen = [o.summary() for o in self.overlaps.values() if o.known]
        earlier = [each for each in before.get("trained_on", ()) if each not in seen]
        summary["trained_on"] = earlier + seen
        write_summary(self.folder / "summary.json", summary)
        tell(self.folder, summary, rows)
        finish_report(self.folder, f"All answers are in {self.rows}, summary.json beside")
        return self.folder
