"""What an episode that edits a store is paid: parts of its reward, and what has changed answers.

Holds: `Editing`, an episode under way; `worth`, `gains`, `parts`, `compared`. Leaves out: who
answers the probes (agents/memupdate.py). No torch.
Exercise it: `pytest tests/agents/test_memupdate.py`. Read next: agents/notes.py.

A state of the store is worth how much better the probes are answered from it than from the first.
The worth of the last state is what the episode is paid for; a turn's gain is what the states
before and after it differ in worth, so that the gains of an episode add up to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from agents.store import Snapshot, Store
from agents.tools import Scope
from data import Task
from memagent import ReadConfig, Turn

SIZE_WEIGHT = 0.1  # budget soft: of the tokens over the budget, as a share of it


@dataclass(slots=True)
class Editing:
    """An episode while its store is edited."""

    task: Task
    store: Store
    scope: Scope
    budget: int | None  # in tokens; None: in entries, or none
    source: int  # tokens of what was read, or of the store at the start
    turns: list[Turn] = field(default_factory=list)  # that edit
    states: list[Snapshot] = field(default_factory=list)  # before the first turn, after each
    calls: Counter[str] = field(default_factory=Counter)  # ok, failed
    invalid: int = 0  # turns in a row, up to now, without a call of the right form
    unread: set[int | None] = field(default_factory=set)  # sessions not shown, or not to their end

    @property
    def last(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    @property
    def shown_probes(self) -> list:
        """The probes whose evidence was shown, as far as it is known where that stands."""
        return [p for p in self.task.probes if not self.unread & {*p.sessions}]

    @property
    def share(self) -> float:
        """How many of the probes these are."""
        return len(self.shown_probes) / len(self.task.probes)


class Scored(NamedTuple):
    """A state of a store, and what the answers from it are worth."""

    snapshot: Snapshot
    scores: Sequence[float]  # of each probe


def worth(editing: Editing, first: Scored, now: Scored) -> float:
    """Return what a state is worth over the first one: the gain in score; 0 if no probe is asked.

    A probe whose evidence was not shown is not asked and has gained nothing: all members of a
    group are paid for the same probes, and whoever fills the window early is paid less, not more.
    """
    if not editing.shown_probes:
        return 0.0
    return editing.share * fmean(b - a for a, b in zip(first.scores, now.scores, strict=True))


def gains(editing: Editing, states: Sequence[Scored]) -> list[float]:
    """Return what each turn has added to the worth. states: before the first turn, after each."""
    worths = [worth(editing, states[0], state) for state in states]
    return [after - before for before, after in pairwise(worths)]


def parts(
    c: ReadConfig,
    editing: Editing,
    first: Scored,
    last: Scored,
    tokens_of: Callable[[Snapshot], int],
) -> dict[str, float]:
    """Return the parts of an episode's reward by name, `reward` among them. c: of MemUpdate.

    unread: the probes that are not asked, because their evidence was never shown; the scores are
    means of the others, `delta` counts them as unchanged.
    """
    n, tokens, probes = editing.calls.total(), tokens_of(last.snapshot), editing.shown_probes
    valid = editing.calls["ok"] / n if n else 0.0
    pairs = [*zip(first.scores, last.scores, strict=True)]
    found = {
        "score_before": _mean(first.scores),
        "score_after": _mean(last.scores),
        "valid": valid,
        "tokens_before": float(tokens_of(first.snapshot)),
        "tokens_after": float(tokens),
    }
    if unread := len(editing.task.probes) - len(probes):
        found["unread"] = float(unread)
    known = [after for before, after in pairs if before > 0]
    if known:
        found["retained"] = fmean(known)  # of what could be answered at the start
    for category in sorted({probe.category for probe in probes} - {0}):
        won = [b - a for probe, (a, b) in zip(probes, pairs, strict=True)
              if probe.category == category]  # fmt: skip
        found[f"delta_{category}"] = fmean(won)
    won = worth(editing, first, last)
    size = compression = 0.0
    if c.budget == "soft":
        most = c.budget_entries or editing.budget
        used = len(last.snapshot) if c.budget_entries else tokens
        size = -SIZE_WEIGHT * max(0.0, used / most - 1)
    if c.mode == "build" and editing.turns:
        compression = c.compression_weight * max(0.0, 1 - tokens / max(1, editing.source))
    found |= {
        "delta": won,
        "format": c.format_weight * valid,
        "size": size,
        "compression": compression,
    }
    return found | {"reward": won + found["format"] + size + compression}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def compared(
    editing: Editing, found_before: Sequence[str], found_after: Sequence[str]
) -> dict[str, list[str]]:
    """Return what has changed an answer that was found in other entries after than before.

    found_before, found_after: lines of entries. caused: replies of the operations. entries: what
    these have changed of the entries, a line that went after "- ", one that came after "+ ".
    """
    ids = [_id(line) for line in dict.fromkeys((*found_before, *found_after))
           if (line in found_before) != (line in found_after)]  # fmt: skip
    ops = [op for turn in editing.turns for op in turn.notes.ops if op["ok"]]
    first, last = editing.states[0], editing.states[-1]
    changed = []
    for id in dict.fromkeys(ids):  # some were only displaced by others
        sides = [state.get(id).line if id in state else "" for state in (first, last)]
        if sides[0] != sides[1]:
            changed += [f"{sign} {line}" for sign, line in zip("-+", sides, strict=True) if line]
    caused = [op["message"] for op in ops if {*ids} & {*op["ids"]}]
    return {"caused": caused, "entries": changed}


def _id(line: str) -> str:
    return line.partition("]")[0][1:]
