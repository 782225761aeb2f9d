"""InfMem: MemAgent that plans before each section, searches the document, stops when it knows.

arXiv 2602.02704; rewards and settings by its code (UCMP13753/InfMem at 4f4de32): of the paper we
could read abstract and introduction alone. Other than there, passages are indexed by words (there
by letters: a string for a list), not found while being read, and STOP in thoughts does not count.

Holds: everything of this agent. Leaves out: MemAgent (memagent.py), search (agents/mem1.py).
Exercise it: `python cli.py eval --agents infmem,memagent --n 8`. Read next: agents/mem1.py.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import memagent
from agents.mem1 import DocumentSearch
from agents.rememr1 import EvidenceSearch, parse_step
from config.options import COUNT, LIMIT
from data import Task, places, strip_thinking
from memagent import NO_MEMORY, Finish, Limits, Line, Prompt, Trajectory, Turn, Wording
from memory import overwrite
from tokens.codec import Sections

PLAN = Wording(
    "What does the memory of the sections read so far lack to solve the problem? To look words up "
    "in the whole document write <recall>words</recall>; to read no further write STOP.",
    ("problem", "history", "memory"),
    cue="Your plan:",
)
WRITE = Wording(
    "Below are the next section of a long document and passages that were looked up in it. Write "
    "the memory anew from both: keep what helps to solve the problem, leave out the rest.",
    ("section", "problem", "passages", "memory"),
    cue="Updated memory:",
    needs=("section", "passages"),
)


@dataclass(frozen=True, slots=True)
class InfMemConfig(memagent.MemAgentConfig):
    """How InfMem reads."""

    empty: Literal["placeholder", "keep", "empty"] = "keep"
    """what an empty memory becomes: as for MemAgent, but the previous memory is kept"""
    plan_tokens: Annotated[int, COUNT] = 64
    """most tokens of a plan: what to look for, or STOP"""
    passages_k: Annotated[int, COUNT] = 1
    """most passages that are looked up"""
    passage_tokens: Annotated[int | None, LIMIT] = None
    """tokens of a passage; 0 or None = a section"""


GAMMA, STOP, CALLS, MEMORIES = 0.6, 0.6, 0.5, 0.5  # decay and weights of the rewards
PUBLISHED = {  # alpha: 0.6 for the answer to 1 for these rewards; max_chunks is not in the script
    "grpo": dict(tasks_per_step=(128,), group_size=4, updates_per_rollout=16, normalisation="mean",
                 clip_low=0.2, clip_high=0.2, kl=1e-3, lr=1e-6, warmup=20, alpha=0.375),
    "agent": dict(chunk_tokens=5000, memory_tokens=1536, final_tokens=1536, plan_tokens=1536,
                  passage_tokens=500, passages_k=5, thinking=True)}  # fmt: skip


@dataclass(slots=True)
class InfMemNotes:
    """What is kept of a turn."""

    counts: dict[str, float]
    query: str = ""
    found: tuple[int, ...] = ()  # passages, from 1, the best first


class InfMem(memagent.MemAgent):
    """MemAgent that looks passages up in the document, and stops when its memory suffices."""

    Config, presets = InfMemConfig, {"infmem": PUBLISHED}
    prompts = memagent.MemAgent.prompts | {"plan": PLAN, "write": WRITE}
    rates = {"writes": ("writes", "updates"), "unfinished": ("unfinished", "updates"),
             "search_hits": ("hits", "searches"), "sections_unread": ("unread", "to_read"),
             "stopped": ("stopped", "ends"), "tokens_saved": ("saved", "ends")}  # fmt: skip
    tallies = {"What the plans say": "plan_"}

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        c, codec, sections, evidence = (
            self.config,
            self.codec,
            self.sections(task),
            EvidenceSearch(task),
        )
        size, n, chunk = c.passage_tokens or c.chunk_tokens, len(sections), c.chunk_tokens
        passages = Sections(sections.ids, size, 0, codec.decode)
        search, read, queries = DocumentSearch(passages), 0, []
        base = dict(problem=task.question, cut=sections.left_out, memory=codec.text(NO_MEMORY))
        for k, section in enumerate(sections):
            history = f"{k} of {n} sections read; looked for: {'; '.join(queries[-8:]) or '-'}"
            turn = yield self.prompt("plan", c.plan_tokens, history=history, **base)
            query, plan = read_plan(turn.response, task.question)
            # passages that overlap the section are read in a moment, so that they are not found
            here = range(k * chunk // size, -(-(k + 1) * chunk // size))
            found = [i for i, _ in search.top_k(query, c.passages_k, here)]
            counts = {f"plan_{plan}": 1, "searches": bool(query), "hits": bool(found)}
            turn.notes = InfMemNotes(counts, query, tuple(i + 1 for i in found))
            if plan == "stop":
                break
            queries += [query[:100]] * (plan == "search")
            more = dict(section=section, passages="\n\n".join(passages[i] for i in found))
            turn = yield self.prompt("write" if found else "update", c.memory_tokens, **more | base)
            old, text, read = base["memory"], codec.after_thinking(turn.response), k + 1
            base["memory"] = new = overwrite(old, text, NO_MEMORY, c.empty)
            cut, held = turn.finish is Finish.LENGTH, evidence.in_text(new) == "answer"
            turn.notes = InfMemNotes(dict(updates=1, writes=new != old, unfinished=cut, held=held))
        turn = yield self.prompt("final", c.final_tokens, final=True, **base)
        saved = len(sections.ids[read * chunk :])
        turn.notes = InfMemNotes(
            dict(ends=1, stopped=read < n, to_read=n, unread=n - read, saved=saved)
        )

    def prompt(self, *args, **slots) -> Prompt:  # late places may have one turn alone
        return replace(super().prompt(*args, **slots), place="any", aside=args[0] == "plan")

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]]:
        """Reward each turn for no fault, and a stop: STOP * GAMMA ** sections read after the first
        memory with an accepted answer, whether or not it stopped. (The code compares the sum of
        these and 0.6 * right. It takes step 0 for "never": where the answer stood in the first
        section's memory and nothing stopped, it pays 0 for the stop.)"""
        counts = [turn.notes.counts for turn in trajectory.turns if turn.notes]
        held = [n["held"] for n in counts if "held" in n]
        stop = STOP * GAMMA ** (len(held) - 1 - held.index(True)) if True in held else 0.0
        calls = CALLS * (not any(n.get("plan_fault") for n in counts))
        memories = MEMORIES * (not any(n.get("unfinished") for n in counts))
        return [dict(stop=stop, calls=calls, memories=memories)] * len(trajectory.turns)

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Look for what the memory says until it says all; else write as MemAgent does."""
        if prompt.final or prompt.section or not task.notes:
            return super().demonstrate(task, replace(prompt, section=prompt.text))
        known = [any(places(words, prompt.memory)) for words, _ in task.notes]
        words = prompt.memory if any(known) else task.question
        return "STOP" if all(known) else f"<recall>{words}</recall>"

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        return turn.notes.counts if turn.notes else {}

    def lines(self, turn: dict) -> list[Line]:
        n = turn.get("notes") or {}
        return [Line("looks for", n["query"], f"passages {n['found']}")] if n.get("query") else []

    def limits(self) -> Limits:
        c = self.config
        shown = c.memory_tokens + c.passages_k * (c.passage_tokens or c.chunk_tokens)
        return Limits(shown, max(c.memory_tokens, c.plan_tokens))


def read_plan(response: str, question: str) -> tuple[str, str]:
    """Return the words to look for, and the kind of a plan: search, fault, stop or silent."""
    step = parse_step(text := strip_thinking(response))
    if step.query:
        return step.query, "search"
    if {"unclosed_recall", "empty_recall"} & {*step.errors}:
        return question, "fault"  # a call without words, or without its end
    return "", "stop" if any(places("STOP", text)) else "silent"
