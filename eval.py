"""Evaluation: an agent over tasks, one row a trajectory.

Holds: `Cell`, what is remembered of a trajectory while it reads, `row_of`, `evaluate` (rows written as they finish, resume).
Leaves out: which agents are asked what (suites.py), the file of rows (rows.py), graders (graders.py), what the rows say (tally.py).
Exercise it: `python cli.py eval --n 8`. Read next: tally.py.

Failures and empty answers are rows like the others: they score 0 and stay in every denominator.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from agents import AGENTS, LOOKING_BACK, SECTIONWISE, USES
from data import Task
from graders import phrases, score, stand, strip_thinking
from memagent import TEMPLATES, Agent, AgentConfig, Finish, Prompt, Trajectory, Turn
from rememr1 import Looks
from rows import Rows
from text import Codec, UserError, clip

if TYPE_CHECKING:  # torch comes with it
    from rollout import Engine, Sampling


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an evaluation: who was asked what, how it was sampled, how long the documents were."""

    agent: str  # the name it is shown by, e.g. trained, untrained, full
    question: str  # kind of question, e.g. one_fact
    temperature: str  # e.g. "1.0"; "0.0" is greedy
    length: int  # sections of a generated document, documents of a RULER-HQA task, tokens of a RULER task


# ---------------------------------------------------------------- while it reads

EDGE = 128  # turns at either end of a trajectory that a transcript keeps with the text of their sections
BINS = 16  # of `occupancy`


def resident_mib() -> float:
    """Memory of this process now (its highest so far where the system does not say), and what torch holds of a GPU on top of it."""
    try:
        own = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, ValueError):
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    torch = sys.modules.get("torch")
    return own + (torch.cuda.memory_reserved() / 2**20 if torch and torch.cuda.is_initialized() else 0.0)


class Reading:
    """What an evaluation remembers of a trajectory as it goes on, so that the trajectory need not hold its document a second time.

    Accepted answers are looked for as whole words, normalised, in the sections and in the memory that the next prompt shows. Answers such
    as yes and no stand everywhere and are not looked for.
    """

    def __init__(self, task: Task, config: AgentConfig = AgentConfig()):
        self.looks = Looks(task, config)
        self.golds, self.all_asked = phrases(task.answers), task.asks_for_all
        self.needed = len(self.golds) if self.all_asked else min(1, len(self.golds))
        self.sections = self.tokens_read = self.tokens_written = self.document_tokens = 0
        self.memory_cut = self.memory_empty = self.cut = 0
        self.memory_tokens: list[int] = []  # after each section
        self.seen: list[int] = []  # sections, from 1, that hold an accepted answer
        self.held: list[list[int]] = []  # [section, accepted answers in the memory after it], where that changes
        self.mib = resident_mib()
        self.memory, self.holds = "", 0  # the latest one, and the accepted answers in it

    def _found(self, text: str) -> int:
        found = stand(self.golds, text)
        return found if self.all_asked else min(1, found)

    def add(self, turn: Turn) -> None:
        prompt = turn.prompt
        if prompt.final or not self.sections % 16:  # asking the system takes as long as a tenth of a turn
            self.mib = max(self.mib, resident_mib())
        self.looks.add(turn)
        self.tokens_read += len(turn.prompt_ids)
        self.tokens_written += len(turn.response_ids)
        self.cut = max(self.cut, prompt.cut)
        if self.sections:
            self.memory_tokens.append(len(getattr(prompt.memory, "ids", ())))
            if prompt.memory != self.memory:  # most sections change nothing
                self.memory, self.holds = prompt.memory, self._found(prompt.memory)
            held = self.holds
            if held != (self.held[-1][1] if self.held else 0):
                self.held.append([self.sections, held])
        self.document_tokens += len(getattr(prompt.section, "ids", ()))
        if not prompt.final:
            self.sections += 1
            self.memory_cut += turn.finish is Finish.LENGTH or bool(turn.step and turn.step.memory_cut)
            self.memory_empty += not strip_thinking(turn.response).strip()
            if self._found(prompt.section):
                self.seen.append(self.sections)

    @property
    def occupancy(self) -> list[float]:
        """Mean tokens of the memory in each sixteenth of the sections; fewer where there are fewer sections."""
        n, bins = len(self.memory_tokens), min(BINS, len(self.memory_tokens))
        edges = [k * n // bins for k in range(bins + 1)] if n else []
        return [round(fmean(self.memory_tokens[a:b]), 1) for a, b in pairwise(edges)]

    def row(self) -> dict:
        return (
            {
                "sections": self.sections,
                "tokens_read": self.tokens_read,
                "tokens_written": self.tokens_written,
                "document_tokens": self.document_tokens,  # that the agent has read
                "cut": self.cut,  # tokens of the document that were never read
                "memory_cut": self.memory_cut,
                "memory_empty": self.memory_empty,
                "memory_tokens": round(fmean(self.memory_tokens), 2) if self.memory_tokens else 0.0,
                "memory_most": max(self.memory_tokens, default=0),
                "occupancy": self.occupancy,
                "seen": self.seen[:8],
                "held": self.held[:16] + self.held[16:][-1:],
                "needed": self.needed,
                "mib": round(self.mib),
            }
            | ({"recalls": dict(self.looks.n)} if self.looks.n["updates"] else {})
        )


def slim(turn: Turn, whole: bool = False) -> Turn:
    """The turn without its prompt's text and ids; the memory and what was answered stay if `whole`, or if it is the final one."""
    memory, response = (turn.prompt.memory, turn.response) if whole or turn.prompt.final else ("", "")
    kept = whole or turn.prompt.final
    prompt = replace(turn.prompt, pieces=(), section="", memory=memory, recalled=turn.prompt.recalled if kept else None)
    return replace(
        turn, prompt=prompt, prompt_ids=[], response_ids=[], logprobs=[], response=response, step=turn.step if kept else None
    )


SHOWN = 20_000  # characters of a section that a transcript keeps


def _thin(record: dict) -> dict:
    """A transcript for people: without token ids and log-probs, long sections without their middle."""
    left_out = ("prompt_ids", "response_ids", "logprobs")
    turns = [
        {k: v for k, v in turn.items() if k not in left_out} | {"section": clip(turn["section"], SHOWN)} for turn in record["turns"]
    ]
    return record | {"turns": turns}


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


FATES = ("unknown", "not shown", "never kept", "lost", "kept in part", "kept")


def fate(row: dict) -> str:
    """What became of the accepted answers: unknown (none to look for, or the agent has no memory), not shown (in no section that was
    read), never kept, lost (once in the memory, not at the end), kept in part, kept."""
    if not row["needed"] or not row["sections"]:
        return "unknown"
    held = [n for _, n in row["held"]]
    if held and held[-1] == row["needed"]:
        return "kept"
    if held and held[-1] < max(held):
        return "lost"
    return "kept in part" if held else "never kept" if row["seen"] else "not shown"


# ---------------------------------------------------------------- rows


def _hash(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def row_of(trajectory: Trajectory, cell: Cell, form: str, reading: Reading | None = None) -> dict:
    """What an evaluation keeps of a trajectory. A failed one is graded as no answer at all. form: boxed or sentence."""
    task, turns = trajectory.task, trajectory.turns
    if reading is None:
        reading = Reading(task)
        for turn in turns:
            reading.add(turn)
    scores = score("" if trajectory.error else trajectory.answer, task.answers, form, task.asks_for_all)
    return asdict(cell) | {
        "id": task.id,
        "sample": trajectory.sample,
        "response": trajectory.answer,
        "prediction": scores.pred,  # None: no answer of the form asked for
        "answers": list(task.answers),
        "finish": str(turns[-1].finish) if turns else "",
        "error": trajectory.error,
        "reward": scores.reward,
        "em": scores.em,
        "f1": scores.f1,
        "sub_em": scores.sub_em,
        "sub_em_upstream": scores.sub_em_upstream,
        "seconds": round(trajectory.seconds, 4),  # from first prompt to answer, beside the others in flight
        "gold": list(task.gold),
        "depths": [round(depth, 4) for depth in task.depths],
    } | reading.row()  # fmt: skip


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
    from rollout import fitted, record, rollout

    cell = Cell(name, question, str(float(sampling.temperature)), length)
    named = next((known for known, other in AGENTS.items() if other is agent), "")
    # who reads at once is cut to the engine's window; of an agent that reads by sections the window decides nothing but failures
    effective = asdict(agent_config if named in SECTIONWISE else fitted(agent_config, engine))
    effective = {field: value for field, value in effective.items() if named in ("", "rememr1") or field not in LOOKING_BACK}
    templates = [agent_config.template(turn) for turn in USES.get(named, TEMPLATES)]
    settings = _hash(asdict(cell), getattr(agent, "__qualname__", ""), effective, templates, asdict(sampling), seed, model)
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
                raise UserError(f"Two tasks of one evaluation have the id {task.id!r}; ids must be unique.")
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
                for trajectory in rollout(engine, guarded(agent), jobs(todo), agent_config, sampling, seed, in_flight, keep):
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
                    row |= {"tries": failures[task.id, sample] + 1, "settings": settings, "task": digests[task.id]}
                    trajectory.reward = row["reward"]
                    # the transcript goes first: killed between the two, there is one too many, which the report drops
                    if recorded(task, sample):
                        with Rows(record_to) as records:
                            kept = record(trajectory, form=agent_config.form, temperature=sampling.temperature)
                            records.append(_thin(kept) | {"cell": asdict(of_kind), "settings": settings})
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
