"""Keep of a trajectory what its row and its transcript need, turn by turn.

Holds: `Reading`, `begins`, `slim`, `thin`, `row_of`, `settings_of_row`. Leaves out: the
file of rows (report/rows.py), the evaluation (eval.py).
Exercise it: `python cli.py eval --n 8`. Read next: report/summary.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import psutil

from agents.rewards import reward_of
from config.errors import clip
from config.gone import as_before
from config.options import settings_of_rows
from config.plugins import is_path
from data import Task, grade, strip_thinking
from memagent import Agent, Finish, Trajectory, Turn
from report.rows import Cell
from rollout import Sampling
from tasks.mentions import count_phrases, phrases

# ---------------------------------------------------------------- while it reads

EDGE = 32  # turns at either end of a trajectory whose sections a transcript keeps as text
BINS = 16  # of `occupancy`
COUNTED = ("model_calls", "tokens_read", "tokens_written")  # costs, beside seconds


def resident_mib() -> float:
    """Return the memory in use, in MiB: of this process and, on a GPU, reserved by torch."""
    torch = sys.modules.get("torch")
    on_gpu = torch and torch.cuda.is_initialized()
    reserved = torch.cuda.memory_reserved() if on_gpu else 0
    return (psutil.Process().memory_info().rss + reserved) / 2**20


def begins(turn: Turn, section: str | None) -> bool:
    """Tell whether a turn reads another section than the one before it, not only an equal one."""
    prompt = turn.prompt
    if prompt.final or prompt.aside or prompt.frozen:
        return False
    return prompt.section is not section if prompt.section else prompt.after is None


class Reading:
    """Running statistics of one trajectory, so that its document is not held a second time.

    Accepted answers are searched as whole words, normalised, in the sections and in the memory that
    the next prompt shows. Answers such as yes and no, which occur everywhere, are not searched.
    """

    def __init__(self, task: Task, agent: Agent, spent: Counter[str] | None = None):
        """spent: costs that the row has beside its own (`costs`): of tries that failed."""
        self.task, self.agent, self.spent = task, agent, spent or Counter()
        self.counts: Counter[str] = Counter()  # of `Agent.count`
        self.answers, self.all_asked = phrases(task.answers), task.asks_for_all
        self.needed = len(self.answers) if self.all_asked else min(1, len(self.answers))
        self.sections = self.tokens_read = self.tokens_written = self.document_tokens = 0
        self.model_calls, self.section = 0, None  # the latest one
        self.memory_cut = self.memory_empty = self.cut = 0
        self.memory_tokens: list[int] = []  # after each section
        self.seen: list[int] = []  # sections, from 1, that contain an accepted answer
        # [section, accepted answers in the memory after it], where that number changes
        self.held: list[list[int]] = []
        self.mib = resident_mib()
        self.memory, self.in_memory = "", 0  # the latest one, and the accepted answers in it

    def _count_answers(self, text: str) -> int:
        """Count the accepted answers in a text, at most as many as are asked for."""
        n = count_phrases(self.answers, text)
        return n if self.all_asked else min(1, n)

    def costs(self, seconds: float) -> Counter[str]:
        """Return what the trajectory has cost, for the row of its next try."""
        return Counter({name: getattr(self, name) for name in COUNTED}, seconds=seconds)

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        prompt = turn.prompt
        # asking the system every time would cost a tenth of a turn
        if prompt.final or not self.sections % 16:
            self.mib = max(self.mib, resident_mib())
        counts = self.agent.count(self.task, turn)
        for name, value in counts.items():
            self.counts[name] += value
        self.model_calls += prompt.given is None
        self.tokens_read += len(turn.prompt_ids)
        self.tokens_written += len(turn.response_ids)
        self.cut = max(self.cut, prompt.cut)
        if self.sections:
            self._add_memory(prompt.memory, counted=not prompt.frozen)
        self.document_tokens += len(getattr(prompt.section, "ids", ()))
        if begins(turn, self.section):
            self.sections, self.section = self.sections + 1, prompt.section
            if self._count_answers(prompt.section):
                self.seen.append(self.sections)
        if not (prompt.final or prompt.aside):
            self.memory_cut += turn.finish is Finish.LENGTH or bool(counts.get("memory_capped"))
            self.memory_empty += not strip_thinking(turn.response).strip()

    def _add_memory(self, memory: str, counted: bool) -> None:
        """Count the memory after the latest section, as the next prompt shows it.

        counted: whether all of it is shown; a question to the policy as it was before training is
        shown what it needs.
        """
        if counted:
            del self.memory_tokens[self.sections - 1 :]  # of a turn before, after the same section
            self.memory_tokens.append(len(getattr(memory, "ids", ())))
        if memory != self.memory:  # most sections change nothing
            self.memory, self.in_memory = memory, self._count_answers(memory)
        if self.in_memory != (self.held[-1][1] if self.held else 0):
            self.held.append([self.sections, self.in_memory])

    @property
    def occupancy(self) -> list[float]:
        """Mean tokens of the memory in each sixteenth of the sections, in each section if fewer."""
        n, bins = len(self.memory_tokens), min(BINS, len(self.memory_tokens))
        edges = [k * n // bins for k in range(bins + 1)] if n else []
        return [round(fmean(self.memory_tokens[a:b]), 1) for a, b in pairwise(edges)]

    def row(self) -> dict:
        """Return the fields of the trajectory's row that come from reading."""
        return (
            {
                "sections": self.sections,
                **{name: getattr(self, name) + self.spent[name] for name in COUNTED},
                "document_tokens": self.document_tokens,  # read by the agent
                "cut": self.cut,  # tokens of the document that it never read
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
            | ({"counts": dict(self.counts)} if self.counts else {})
        )


def slim(turn: Turn, whole: bool = False, section: str = "") -> Turn:
    """Drop a turn's text, token ids and log-probs.

    Memory, response and notes stay in the final turn and, if `whole`, in any. section: what of its
    section stays.
    """
    keep = whole or turn.prompt.final
    prompt = replace(
        turn.prompt,
        pieces=(),
        section=str(section),  # without its token ids
        memory=turn.prompt.memory if keep else "",
        tools=(),
        after=None,
    )
    return replace(
        turn,
        prompt=prompt,
        prompt_ids=[],
        response_ids=[],
        logprobs=[],
        response=turn.response if keep else "",
        notes=turn.notes if keep else None,
    )


SECTION_CHARACTERS = 20_000  # of a section in a transcript
# of what a row keeps as text, to be searched and shown
WORDING_CHARACTERS, MEMORY_CHARACTERS = 500, 2000


def thin(record: dict) -> dict:
    """Return a record as a transcript: no token ids or log-probs, long sections clipped."""
    dropped = ("prompt_ids", "response_ids", "logprobs")
    turns = [
        {name: value for name, value in turn.items() if name not in dropped}
        | {"section": clip(turn["section"], SECTION_CHARACTERS)}
        for turn in record["turns"]
    ]
    return record | {"turns": turns}


def row_of(
    trajectory: Trajectory, cell: Cell, agent: Agent, reading: Reading | None = None
) -> dict:
    """Return a trajectory's row; a failed trajectory is graded as having no answer.

    reading: of its turns, where they were slimmed; else computed here.
    """
    task, turns = trajectory.task, trajectory.turns
    if reading is None:
        reading = Reading(task, agent)
        for turn in turns:
            reading.add(turn)
    reward = reward_of(agent, trajectory)
    answer = "" if trajectory.error else trajectory.answer
    scores = grade(answer, task.answers, agent.config.form, task.asks_for_all)
    return (
        asdict(cell)
        | {
            "id": task.id,
            "sample": trajectory.sample,
            "wording": clip(task.question, WORDING_CHARACTERS),
            "memory": clip(reading.memory, MEMORY_CHARACTERS),  # that the last prompt showed
            "response": trajectory.answer,
            # None: nothing of the required form; what was answered instead is the response
            "prediction": scores.pred,
            "answers": list(task.answers),
            "asked": task.question_digest,  # by which dev/reader.py knows it again
            "finish": str(turns[-1].finish) if turns else "",
            "error": trajectory.error,  # after the reward was given, which may have failed
            "reward": 0.0 if trajectory.error else reward,
            "em": scores.em,
            "f1": scores.f1,
            "sub_em": scores.sub_em,
            "sub_em_upstream": scores.sub_em_upstream,
            # from first prompt to answer, beside the others in flight
            "seconds": round(trajectory.seconds + reading.spent["seconds"], 4),
            "gold": list(task.gold),
            "depths": [round(depth, 4) for depth in task.depths],
        }
        | task.beside(scores.pred)
        | reading.row()
    )


def settings_of_row(
    cell: Cell, agent: Agent, told_date: str, sampling: Sampling, seed: int, model: str
) -> str:
    """Hash everything that a row depends on beside the task, a user's file of the agent included.

    told_date: what the codec tells the model. model: a fingerprint of what answers.
    """
    reading = as_before(agent.had, settings_of_rows(agent.config, told_date))
    if not agent.by_section:  # cut to the engine's window, which therefore counts
        reading["window"] = agent.window
    templates = [agent.template(name) for name in agent.prompts]
    if is_path(agent.name):
        reading["code"] = hashlib.blake2b(Path(agent.name).read_bytes()).hexdigest()
    parts = asdict(cell), agent.name, reading, templates, asdict(sampling), seed, model
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
