"""What an episode that edits a store is paid: parts of its reward, and what has changed answers.

Holds: `Editing`, an episode under way; `worth`, `gains`, `parts`, `compared`, by the settings of
MemUpdate, c; the original's formula: `context`, `overlap_score`, `sizes`, `efficiency`. Leaves out:
who answers the probes (agents/memupdate.py). No torch.
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

from agents.store import Entry, Snapshot, Store
from agents.tools import Scope
from data import Task
from memagent import ReadConfig, Turn

SIZE_WEIGHT = 0.1  # budget soft: of the tokens over the budget, as a share of it
SIZE_CAP = 100  # compat: entries above which a store counts as too large


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


def worth(c: ReadConfig, editing: Editing, first: Scored, now: Scored) -> float:
    """Return what a state is worth over the first one; 0 if no probe is asked.

    compat: the gain in shared words times the efficiency of getting from the first state to this
    one. Else the gain in score; where the question is visible, its own and that of all probes, so
    that unrelated memories may not be lost.
    A probe whose evidence was not shown is not asked and has gained nothing: all members of a
    group are paid for the same probes, and whoever fills the window early is paid less, not more.
    """
    probes = editing.shown_probes
    if not probes:
        return 0.0
    share = editing.share
    if c.pay == "compat":
        gain = share * gained(probes, first.snapshot, now.snapshot)
        return gain * efficiency(sizes(first.snapshot), sizes(now.snapshot))
    won = [b - a for a, b in zip(first.scores, now.scores, strict=True)]
    if c.target == "hidden":
        return share * fmean(won)
    visible = won[0] if probes[0] is editing.task.probes[0] else 0.0
    return visible + share * fmean(won)


def gains(c: ReadConfig, editing: Editing, states: Sequence[Scored]) -> list[float]:
    """Return what each turn has added to the worth. states: before the first turn, after each."""
    worths = [worth(c, editing, states[0], state) for state in states]
    return [after - before for before, after in pairwise(worths)]


def parts(
    c: ReadConfig,
    editing: Editing,
    first: Scored,
    last: Scored,
    tokens_of: Callable[[Snapshot], int],
) -> dict[str, float]:
    """Return the parts of an episode's reward by name, `reward` among them.

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
    if known and c.pay == "answer":
        found["retained"] = fmean(known)  # of what could be answered at the start
    for category in sorted({probe.category for probe in probes} - {0}):
        won = [b - a for probe, (a, b) in zip(probes, pairs, strict=True)
              if probe.category == category]  # fmt: skip
        found[f"delta_{category}"] = fmean(won)
    won = worth(c, editing, first, last)
    if c.pay == "compat":
        factor = efficiency(sizes(first.snapshot), sizes(last.snapshot))
        delta = editing.share * gained(probes, first.snapshot, last.snapshot)
        return found | {"delta": delta, "efficiency": factor, "reward": won}
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


# ---------------------------------------------------------------- the original's formula


def gained(probes: Sequence, first: Snapshot, now: Snapshot) -> float:
    """Return how much more of the answers' words is found in a state than in the first one."""

    def score(state: Snapshot, probe) -> float:
        return overlap_score(probe.answers[0], context(state.entries, probe.question))

    return _mean([score(now, probe) - score(first, probe) for probe in probes])


def context(entries: Sequence[Entry], question: str, k: int = 5) -> str:
    """Return what the original's keyword search finds: shared words over the longer of both."""
    wanted = {*question.lower().split()}

    def score(entry: Entry) -> float:
        words = {*entry.text.lower().split()}
        return len(wanted & words) / max(len(wanted), len(words), 1)

    best = sorted((e for e in entries if score(e) > 0), key=score, reverse=True)[:k]
    lines = [f"Memory: {entry.text}" for entry in best]
    return "\n".join(lines) or "No relevant information found."


def overlap_score(answer: str, context: str) -> float:
    """Return the share of the answer's words that a context has, in [0.1, 1]; 0.5 without any."""
    wanted, found = {*answer.lower().split()}, {*context.lower().split()}
    return max(0.1, min(1.0, len(wanted & found) / len(wanted))) if wanted else 0.5


def sizes(snapshot: Snapshot) -> tuple[int, int]:
    """Return the number of entries and their characters."""
    return len(snapshot), sum(len(entry.text) for entry in snapshot.entries)


def efficiency(old: tuple[int, int], new: tuple[int, int]) -> float:
    """Return the factor on the gain of a store, in [0.1, 1.5]. old, new: of `sizes`."""
    (n_old, chars_old), (n_new, chars_new) = old, new
    size = 1.0 if n_new <= SIZE_CAP else max(0.1, 1 - (n_new - SIZE_CAP) / SIZE_CAP)
    density = 1.0
    if n_old:
        density = min(1.2, (chars_new / max(n_new, 1)) / max(chars_old / n_old, 1))
    change = max(0.8, 1 - 0.5 * abs(n_new - n_old) / max(n_old, 1))
    return min(1.5, max(0.1, size * density * change))
