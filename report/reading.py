"""What an evaluation keeps of a trajectory while it goes on.

Holds: `Reading`, `slim`, `row_of`. Leaves out: the file of rows (report/rows.py), the evaluation (eval.py).
Exercise it: `python cli.py eval --n 8`. Read next: report/summary.py.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from config.errors import clip
from data import Task, count_phrases, grade, phrases, strip_thinking
from memagent import Agent, Finish, Trajectory, Turn
from report.rows import Cell

# ---------------------------------------------------------------- while it reads

EDGE = 128  # turns at either end of a trajectory that a transcript keeps with the text of their sections
BINS = 16  # of `occupancy`


def resident_mib() -> float:
    """Memory of this process now (its highest so far where the system does not say), and what torch holds of a GPU on top of it."""
    try:
        own = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, ValueError):
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            2**20 if sys.platform == "darwin" else 2**10
        )
    torch = sys.modules.get("torch")
    return own + (
        torch.cuda.memory_reserved() / 2**20 if torch and torch.cuda.is_initialized() else 0.0
    )


class Reading:
    """What an evaluation remembers of a trajectory as it goes on, so that the trajectory need not hold its document a second time.

    Accepted answers are looked for as whole words, normalised, in the sections and in the memory that the next prompt shows. Answers such
    as yes and no stand everywhere and are not looked for.
    """

    def __init__(self, task: Task, agent: Agent):
        self.task, self.agent = task, agent
        self.counts: Counter[str] = Counter()  # of `Agent.count`
        self.golds, self.all_asked = phrases(task.answers), task.asks_for_all
        self.needed = len(self.golds) if self.all_asked else min(1, len(self.golds))
        self.sections = self.tokens_read = self.tokens_written = self.document_tokens = 0
        self.memory_cut = self.memory_empty = self.cut = 0
        self.memory_tokens: list[int] = []  # after each section
        self.seen: list[int] = []  # sections, from 1, that hold an accepted answer
        self.held: list[
            list[int]
        ] = []  # [section, accepted answers in the memory after it], where that changes
        self.mib = resident_mib()
        self.memory, self.holds = "", 0  # the latest one, and the accepted answers in it

    def _found(self, text: str) -> int:
        found = count_phrases(self.golds, text)
        return found if self.all_asked else min(1, found)

    def add(self, turn: Turn) -> None:
        prompt = turn.prompt
        if (
            prompt.final or not self.sections % 16
        ):  # asking the system takes as long as a tenth of a turn
            self.mib = max(self.mib, resident_mib())
        counts = self.agent.count(self.task, turn)
        for name, value in counts.items():
            self.counts[name] += value
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
            self.memory_cut += turn.finish is Finish.LENGTH or bool(counts.get("memory_capped"))
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
            | ({"counts": dict(self.counts)} if self.counts else {})
        )


def slim(turn: Turn, whole: bool = False) -> Turn:
    """The turn without its prompt's text and ids; the memory and what was answered stay if `whole`, or if it is the final one."""
    memory, response = (
        (turn.prompt.memory, turn.response) if whole or turn.prompt.final else ("", "")
    )
    kept = whole or turn.prompt.final
    prompt = replace(
        turn.prompt,
        pieces=(),
        section="",
        memory=memory,
        tools=(),
        after=None,
    )
    return replace(
        turn,
        prompt=prompt,
        prompt_ids=[],
        response_ids=[],
        logprobs=[],
        response=response,
        notes=turn.notes if kept else None,
    )


SHOWN = 20_000  # characters of a section that a transcript keeps


def thin(record: dict) -> dict:
    """A transcript for people: without token ids and log-probs, long sections without their middle."""
    left_out = ("prompt_ids", "response_ids", "logprobs")
    turns = [
        {k: v for k, v in turn.items() if k not in left_out}
        | {"section": clip(turn["section"], SHOWN)}
        for turn in record["turns"]
    ]
    return record | {"turns": turns}


def row_of(
    trajectory: Trajectory, cell: Cell, agent: Agent, reading: Reading | None = None
) -> dict:
    """Return what an evaluation keeps of a trajectory; a failed one is graded as no answer at all."""
    task, turns = trajectory.task, trajectory.turns
    if reading is None:
        reading = Reading(task, agent)
        for turn in turns:
            reading.add(turn)
    answer = "" if trajectory.error else trajectory.answer
    scores = grade(answer, task.answers, agent.config.form, task.asks_for_all)
    return (
        asdict(cell)
        | {
            "id": task.id,
            "sample": trajectory.sample,
            "response": trajectory.answer,
            "prediction": scores.pred,  # None: no answer of the form asked for
            "answers": list(task.answers),
            "finish": str(turns[-1].finish) if turns else "",
            "error": trajectory.error,
            "reward": 0.0 if trajectory.error else agent.reward(trajectory),
            "em": scores.em,
            "f1": scores.f1,
            "sub_em": scores.sub_em,
            "sub_em_upstream": scores.sub_em_upstream,
            "seconds": round(
                trajectory.seconds, 4
            ),  # from first prompt to answer, beside the others in flight
            "gold": list(task.gold),
            "depths": [round(depth, 4) for depth in task.depths],
        }
        | reading.row()
    )
