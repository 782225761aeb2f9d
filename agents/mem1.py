"""MEM1: one internal state, consolidated at every turn; everything else is pruned.

arXiv 2506.15841, by its code (MIT-MI/MEM1 at 31a8285); of the paper we could read the abstract. A
prompt has the question, the latest state and query and what that has found, nothing older: this is
the masked trajectory, without a mask. As there the reward is the exact match of the answer, nothing
for form. Other than there a task is one question, and the reward 0 or 1: there it is two questions,
answered between semicolons, and the reward the sum of their matches, 0 to 2. The world is the
document: nothing is found twice, the first turn has what the question finds, a turn without query
or answer reads on (there it ends all), an answer ends the reading and is given once more in the
form that is graded; GRPO, no critic.

Holds: everything of this agent. Leaves out: MemAgent (memagent.py), search (agents/retrieval.py).
Exercise it: `python cli.py eval --agents mem1,memagent --n 8`. Read next: agents/memoryr1.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import memagent
from agents.rememr1 import parse_step
from agents.retrieval import Items, Lucene
from config.options import COUNT, LIMIT
from data import Task, formed, places
from memagent import NO_MEMORY, Limits, Line, Prompt, Turn, Wording
from memory import overwrite

TURN = Wording(
    "You solve the problem by reading a document piece by piece, and remember nothing but your "
    "state. Below is a piece that your query has found. Write:\n"
    "- the state anew, as <update>...</update>: what is known so far and what is missing;\n"
    "- then either what to look for next, as <recall>...</recall>, or, once all is known or no "
    "turn is left, the answer, as <answer>...</answer>.",
    ("section", "problem", "memory", "query", "turns_left"),
    cue="Your state, and query or answer:",
    needs=("section", "memory"),
)


@dataclass(frozen=True, slots=True)
class Mem1Config(memagent.MemAgentConfig):
    """How MEM1 reads."""

    empty: Literal["placeholder", "keep", "empty"] = "keep"
    """what a missing or empty state becomes: as MemAgent's memory, but the previous one is kept"""
    action_tokens: Annotated[int, COUNT] = 64
    """most tokens of a turn beside those of its state (memory_tokens): tags, query or answer"""
    pieces_k: Annotated[int, COUNT] = 1
    """sections that a turn reads"""
    most_turns: Annotated[int | None, LIMIT] = None
    """most turns that read; 0 or None = until everything is read"""


PUBLISHED = {  # three passages with 1,000 tokens in all and six turns; 500 steps
    "grpo": dict(steps=500, tasks_per_step=(128,), updates_per_rollout=2, kl=1e-3, lr=1e-6,
                 warmup=25, temperature=(1.0,)),
    "agent": dict(chunk_tokens=333, pieces_k=3, memory_tokens=800, action_tokens=200,
                  final_tokens=200, most_turns=6)}  # fmt: skip


@dataclass(slots=True)
class Mem1Notes:
    """What is kept of a turn."""

    counts: dict[str, float]  # see `count`
    query: str = ""  # that it asks
    read: tuple[int, ...] = ()  # numbers of sections, from 1


class Mem1(memagent.MemAgent):
    """One state, rewritten at every turn, that decides what is read next and when to answer."""

    Config, presets = Mem1Config, {"mem1": PUBLISHED}
    prompts = {"turn": TURN, "final": memagent.FINAL}
    rates = {"no_state": ("no_state", "turns"), "memory_capped": ("memory_capped", "turns"),
             "queries": ("queries", "turns"), "query_hits": ("hits", "asked"),
             "stopped": ("stopped", "ends"), "sections_unread": ("unread", "to_read"),
             "tokens_saved": ("saved", "ends")}  # fmt: skip
    tallies = {"Faults of form": "error_"}

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        c, codec, sections = self.config, self.codec, self.sections(task)
        search, n, seen, turns = DocumentSearch(sections), len(sections), set(), 0
        state, query, answer = codec.text(NO_MEMORY), task.question, ""
        known = dict(problem=task.question, cut=sections.left_out)
        while len(seen) < n and turns < (c.most_turns or n) and not answer:
            # what the query finds in what was not read yet, else the next in order
            hits = [i for i, _ in search.top_k(query, c.pieces_k, seen)]
            read = sorted(hits or [i for i in range(n) if i not in seen][: c.pieces_k])
            seen, turns = seen | {*read}, turns + 1
            left = min((c.most_turns or n) - turns, -(-(n - len(seen)) // c.pieces_k))
            text = codec.decode([i for k in read for i in sections[k].ids])
            slots = known | dict(section=text, memory=state, query=query or "-")
            room = c.memory_tokens + c.action_tokens
            turn = yield self.prompt("turn", room, turns_left=str(left), **slots)
            response = codec.after_thinking(turn.response)
            step, queried = parse_step(response, turn.finish), bool(query)
            new = codec.text(step.memory or "")
            capped = len(new.ids) > c.memory_tokens
            new = codec.decode(new.ids[: c.memory_tokens]) if capped else new
            state = overwrite(state, new, NO_MEMORY, c.empty)
            query = step.query or ""
            answer = "".join(re.findall("<answer>(.+?)</answer>", response, re.DOTALL)[:1]).strip()
            counts = {f"error_{error}": 1 for error in step.errors} | {
                "turns": 1, "no_state": not new.strip(), "memory_capped": capped,
                "queries": bool(query), "asked": queried, "hits": bool(hits)}  # fmt: skip
            turn.notes = Mem1Notes(counts, query, tuple(k + 1 for k in read))
        state = f"{state}\n\nAnswer: {answer}" if answer else state
        turn = yield self.prompt("final", c.final_tokens, final=True, memory=state, **known)
        rest = [len(sections[k].ids) for k in range(n) if k not in seen]
        ends = dict(stopped=bool(answer and rest), unread=len(rest), saved=sum(rest))
        turn.notes = Mem1Notes(ends | dict(ends=1, to_read=n))

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Write MemAgent's notes as the state, look for what they say, answer once all is noted."""
        state = super().demonstrate(task, prompt) or prompt.memory
        if prompt.final or not task.notes:
            return super().demonstrate(task, prompt)
        known = [any(places(words, state)) for words, _ in task.notes]
        query = state if any(known) else task.question
        done = f"<answer>{formed(task.answers[0], 'plain')}</answer>"
        return f"<update>{state}</update>" + (done if all(known) else f"<recall>{query}</recall>")

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        return turn.notes.counts if turn.notes else {}

    def lines(self, turn: dict) -> list[Line]:
        return [Line("looks for", q)] if (q := (turn.get("notes") or {}).get("query")) else []

    def limits(self) -> Limits:
        c = self.config
        shown = c.memory_tokens + c.action_tokens + (c.pieces_k - 1) * c.chunk_tokens
        return Limits(shown, c.memory_tokens + c.action_tokens)


class DocumentSearch(Items):
    """BM25 in a document: indexed once, for what a word weighs depends on all of it."""

    @cached_property
    def index(self) -> Lucene:
        return Lucene(self.items)

    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        return dict(enumerate(self.index.scores(query).tolist()))
