"""Evaluation: an agent over tasks, one row a trajectory.

Holds: `Cell`, what is remembered of a trajectory while it reads, `row_of`, `evaluate` (rows written as they finish, resume).
Leaves out: which agents are asked what (tasks/suites.py), the file of rows (report/rows.py), graders (data.py), what the rows say (report/summary.py).
Exercise it: `python cli.py eval --n 8`. Read next: report/summary.py.

Failures and empty answers are rows like the others: they score 0 and stay in every denominator.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text as Styled

from agents.baselines import AGENTS, LOOKING_BACK, SECTIONWISE, USES
from agents.find import pick
from config import files
from config.errors import UserError, clean
from config.files import make_folder
from config.options import EMBEDDED, EvalConfig
from config.terminal import bar, console
from data import Task
from engines.open import codec_of, fingerprint, open_endpoint, open_engine, reserved
from memagent import TEMPLATES, Agent, AgentConfig, Finish, Prompt, Trajectory, Turn
from report.reading import EDGE, Reading, _thin, row_of, slim
from report.rows import Cell, Rows
from report.summary import Overlap
from tokens.codec import Codec

if TYPE_CHECKING:
    from rollout import Engine, Sampling


def guarded(agent: Agent) -> Agent:
    """The agent, whose own mistakes fail the trajectory and not the evaluation."""

    def steps(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
        try:
            yield from agent(task, config, codec)
        except UserError:
            raise
        except Exception as error:
            raise UserError(" ".join(f"{type(error).__name__}: {error}".split())) from error

    return steps


# ---------------------------------------------------------------- rows


def _hash(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def evaluate(
    engine: Engine,
    agent: Agent,
    tasks: Iterable[Task],
    agent_config: AgentConfig,
    sampling: Sampling,
    *,
    name: str,
    question: str = "",
    length: int,
    rows: Path,
    model: str = "",
    seed: int = 0,
    samples: int = 1,
    in_flight: int = 256,
    retries: int = 1,
    redo_failed: bool = False,
    wait: bool = True,
    record_to: Path | None = None,
    n_records: int = 1,
    progress: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Fill one cell: every task `samples` times, one row each (`row_of`), returned in the order of tasks and samples.

    Without `question` it is several cells, one for each kind of the tasks, side by side in the engine.

    A row is appended to the file `rows` the moment its trajectory finishes. A row that the file has already is not made again if
    all it depends on is the same: cell, agent, its settings and templates, sampling, seed, `model` (the caller's fingerprint of the
    weights) and the task itself. Rows of other settings stay in the file and play no part.

    Several processes may fill the same cell: a row is made by the one that claims it first. With `wait` the rows that others are at
    are waited for, and made here if their owners end without them; without, they are missing from what is returned.

    tasks: with ids of their own, taken one by one as the engine gets to them. The engine has the weights already.
    retries: how often a trajectory with a turn that failed in the engine is begun anew before its failure is written. redo_failed: rows
    with an error that the file has are made again (the last row of a name counts).
    record_to: sample 0 of the first `n_records` tasks is kept there whole (`rollout.record`, with `cell` and `settings`).
    progress: called with every row, found or new. A `UserError` of an agent's first step becomes a failed row.
    """
    from report.records import record
    from rollout import fitted, rollout

    cell = Cell(name, question, str(float(sampling.temperature)), length)
    named = next((known for known, other in AGENTS.items() if other is agent), "")
    # who reads at once is cut to the engine's window; of an agent that reads by sections the window decides nothing but failures
    effective = asdict(agent_config if named in SECTIONWISE else fitted(agent_config, engine))
    effective = {
        field: value
        for field, value in effective.items()
        if named in ("", "rememr1") or field not in LOOKING_BACK
    }
    templates = [agent_config.template(turn) for turn in USES.get(named, TEMPLATES)]
    settings = _hash(
        asdict(cell),
        getattr(agent, "__qualname__", ""),
        effective,
        templates,
        asdict(sampling),
        seed,
        model,
    )
    found: dict[tuple[str, int], dict | None] = {}
    digests: dict[str, str] = {}  # id -> the task's
    readings: dict[tuple[str, int], Reading] = {}
    failures: Counter = Counter()
    again: list[tuple[Task, int]] = []  # failed, and to be begun anew
    elsewhere: list[tuple[Task, int]] = []  # claimed by another process
    marked = settings.encode()
    have: dict[tuple[str, int, str], dict] = {}

    def first() -> Iterator[tuple[Task, int]]:
        for task in tasks:
            if task.id in digests:
                raise UserError(
                    f"Two tasks of one evaluation have the id {task.id!r}; ids must be unique."
                )
            digests[task.id] = task.digest
            for sample in range(samples):
                found[task.id, sample] = None
                yield task, sample

    def recorded(task: Task, sample: int) -> bool:
        return record_to is not None and sample == 0 and task.id in islice(digests, n_records)

    def keep(trajectory: Trajectory, turn: Turn) -> Turn:
        task, turns = trajectory.task, trajectory.turns
        readings[task.id, trajectory.sample].add(turn)
        if not recorded(task, trajectory.sample):
            return slim(turn)
        if len(turns) >= 2 * EDGE:
            turns[-EDGE] = slim(turns[-EDGE], whole=True)
        return turn

    with Rows(rows) as file:

        def refresh(redo: bool = False) -> None:
            for row in file.new(lambda line: marked in line):
                if row.get("settings") == settings and not (redo and row["error"]):
                    have[row["id"], row["sample"], row["task"]] = row

        def take(row: dict | None) -> bool:
            if row is not None:
                found[row["id"], row["sample"]] = row
                progress(row)
            return row is not None

        def jobs(todo: Iterable[tuple[Task, int]]) -> Iterator[tuple[Task, int]]:
            for task, sample in todo:
                key = task.id, sample, digests[task.id]
                if take(have.get(key)):
                    continue
                claim = repr((settings, key))
                if not file.claim(claim):
                    elsewhere.append((task, sample))
                    continue
                refresh()  # its owner may just have written it
                if take(have.get(key)):
                    file.release(claim)
                    continue
                readings[task.id, sample] = Reading(task, agent_config)
                yield task, sample

        refresh(redo_failed)
        todo: Iterable[tuple[Task, int]] = first()
        with engine.awake():
            while True:
                for trajectory in rollout(
                    engine,
                    guarded(agent),
                    jobs(todo),
                    agent_config,
                    sampling,
                    seed,
                    in_flight,
                    keep,
                ):
                    task, sample = trajectory.task, trajectory.sample
                    reading = readings.pop((task.id, sample))
                    # what does not fit, and an agent's own mistake, would fail again the same way
                    passing = bool(trajectory.turns) and trajectory.turns[-1].finish is Finish.ERROR
                    if passing and failures[task.id, sample] < retries:
                        failures[task.id, sample] += 1
                        again.append((task, sample))
                        continue
                    of_kind = replace(cell, question=question or task.kind)
                    row = row_of(trajectory, of_kind, agent_config.form, reading)
                    row |= {
                        "tries": failures[task.id, sample] + 1,
                        "settings": settings,
                        "task": digests[task.id],
                    }
                    trajectory.reward = row["reward"]
                    # the transcript goes first: killed between the two, there is one too many, which the report drops
                    if recorded(task, sample):
                        with Rows(record_to) as records:
                            kept = record(
                                trajectory, form=agent_config.form, temperature=sampling.temperature
                            )
                            records.append(
                                _thin(kept) | {"cell": asdict(of_kind), "settings": settings}
                            )
                    file.append(row)
                    file.release(repr((settings, (task.id, sample, digests[task.id]))))
                    take(row)
                todo = again or (elsewhere if wait else ())
                if not todo:
                    break
                if not again:
                    time.sleep(POLL_S)
                    refresh()
                todo, again, elsewhere = [*todo], [], [] if not again else elsewhere
    return [row for row in found.values() if row is not None]


POLL_S = 0.3  # between two looks at rows that another process is making


def evaluation_folder(config: EvalConfig) -> Path:
    """Where an evaluation's results lie; refused if something else lies there, such as a training run."""
    import yaml

    folder = files.run_path(config.runs, config.name)
    path = folder / "config.yaml"
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {"eval": {}}
    except (OSError, ValueError, yaml.YAMLError):
        there = None
    if not (isinstance(there, dict) and "eval" in there):
        raise UserError(
            f"{folder} holds a run that is no evaluation: give this one another --name."
        )
    return folder


def weights_of(config: EvalConfig) -> dict[bool, list[str]]:
    """Whether it is the policy before training -> the agents that answer with it, as they are named in --agents."""
    groups: dict[bool, list[str]] = {}
    for name in config.agents:
        plain, at, weights = name.partition("@")
        pick(plain)
        if at and weights != "untrained":
            raise UserError(f"{name!r}: after an agent's name only @untrained may stand.")
        if at and not config.untrained:
            raise UserError(
                f"{name!r} answers with the policy before training: say by --untrained which that is."
            )
        groups.setdefault(bool(at), []).append(name)
    return groups


def open_for(config: EvalConfig, agent_config: AgentConfig, untrained: bool, agents: Sequence[str]):
    """The engine that answers with the one or the other weights, and the fingerprint of what answers."""
    if config.endpoint:  # the policy before training is another model of the same server
        served = config.untrained if untrained else config.served_as
        engine = open_endpoint(
            config.endpoint,
            served,
            config.chat,
            config.model,
            config.in_flight,
            agent_config.thinking,
            config.trust_remote_code,
        )  # which replica answers plays no part
        route = "chat" if config.chat or not config.model else "completions"
        return engine, f"{route} {engine.model} {engine.codec.fingerprint}"
    model = config.untrained if untrained else config.model
    engine = open_engine(
        model,
        config.device,
        config.dtype,
        config.trust_remote_code,
        config.in_flight,
        agent_config.thinking,
        config.engine,
        reserved([name.partition("@")[0] for name in agents], agent_config),
        config.kv_gib,
    )
    return engine, f"{config.engine} {fingerprint(model, engine.dtype)}"


def policy_folder(config: EvalConfig, untrained: bool) -> str:
    """Where the policy that answers lies, or what it is called elsewhere; "" where a server of nobody knows which is asked."""
    return (config.untrained if untrained else config.model) or (
        "" if config.endpoint else str(EMBEDDED)
    )


# most of the documents in flight together; each is held as ids, about one byte a character, and a few sections as text
DOCUMENT_CHARACTERS = 1 << 29


def run_suite(config: EvalConfig, agent_config: AgentConfig) -> Path:
    """Every agent on every length at every temperature; rows, summary and report in the evaluation's folder.

    Several calls may fill one folder at the same time: each row is made by one of them, and each writes the summary when all are there.
    """
    from eval import evaluate
    from report.page import write_report
    from report.summary import overlaps, summarise, table, write_summary
    from rollout import Sampling
    from tasks.suites import columns_of

    groups = weights_of(config)
    samplings = [Sampling(temperature, config.top_p) for temperature in config.temperatures]
    folder = evaluation_folder(config)
    if config.endpoint and not config.model and config.suite == "ruler":
        raise UserError(
            "The lengths of RULER are tokens of the model that is asked: say by --model whose tokenizer the server has."
        )
    unit, asked = columns_of(
        config, lambda: codec_of(config.model, agent_config.thinking, config.trust_remote_code)
    )
    # of generated English nothing is looked up: its splits share no fact that is asked for, and its questions are all of the same words
    overlap = {
        untrained: Overlap(policy_folder(config, untrained), agents, unit != "sections")
        for untrained, agents in groups.items()
    }
    done: dict[tuple[str, float, int], list[dict]] = {}  # (agent, temperature, column) -> rows
    # first what nobody else is at, then what others have been at
    for wait in (False, True):
        for untrained, agents in groups.items():
            if wait and all(
                (name, s.temperature, k) in done
                for name in agents
                for s in samplings
                for k in range(len(asked))
            ):
                continue
            engine, fingerprinted = open_for(config, agent_config, untrained, agents)
            make_folder(folder)
            files.dump(folder / "config.yaml", eval=config, agent=agent_config)
            with contextlib.closing(engine), engine.awake(), bar("answers") as progress:
                for k, column in enumerate(asked):
                    left = [
                        (name, s)
                        for name in agents
                        for s in samplings
                        if (name, s.temperature, k) not in done
                    ]
                    tasks = column.make() if left else []
                    if said := overlap[untrained].add(column.question, tasks):
                        progress.console.print(Styled(clean(said), style="bold red"))
                    most = max((task.characters for task in tasks), default=1)
                    for name, sampling in left:
                        samples = (
                            config.samples if sampling.temperature > 0 else 1
                        )  # greedy answers are all the same
                        shown = progress.add_task(
                            escape(
                                f"{name} T={sampling.temperature:g} {column.question} {column.length}"
                            ),
                            total=len(tasks) * samples,
                            note="",
                        )
                        rows = evaluate(
                            engine,
                            pick(name.partition("@")[0]),
                            tasks,
                            agent_config,
                            sampling,
                            name=name,
                            question=column.question,
                            length=column.length,
                            rows=folder / "rows.jsonl",
                            model=fingerprinted,
                            seed=config.seed,
                            samples=samples,
                            in_flight=min(
                                config.in_flight, max(1, DOCUMENT_CHARACTERS // max(1, most))
                            ),
                            retries=config.retries,
                            redo_failed=config.redo_failed and not wait,
                            wait=wait,
                            record_to=folder / "transcripts.jsonl",
                            n_records=config.transcripts,
                            progress=lambda row, shown=shown: progress.advance(shown),
                        )
                        if len(rows) == len(tasks) * samples:
                            done[name, sampling.temperature, k] = rows
                    tasks = []  # one column's documents at a time
    rows = [
        row
        for name in config.agents
        for s in samplings
        for k in range(len(asked))
        for row in done[name, s.temperature, k]
    ]
    summary = summarise(rows, unit) | {
        "trained_on": [found.summary() for found in overlap.values() if found.known]
    }
    files.dump(
        folder / "config.yaml", eval=config, agent=agent_config
    )  # again: another call may have come in between
    write_summary(folder / "summary.json", summary)
    write_report(folder, title=f"Evaluation {config.name}")
    console.print(table(summary, console.width))
    for sentence in overlaps(summary):
        console.print(Styled(clean(sentence), style="bold red"))
    return folder
