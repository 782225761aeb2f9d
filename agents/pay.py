"""What an episode that edits a store is paid: parts of its reward, and what has changed answers.

A state of the store is worth how much better the probes are answered from it than from the first.
The worth of the last state is what the episode is paid for; a turn's gain is what the states
before and after it differ in worth, so that the gains of an episode add up to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from agents.store import Snapshot, Store
from agents.tools import Scope
from data import Task
from memagent import ReadConfig, Turn
from tasks.conversations import Probe

SIZE_WEIGHT = 0.1  # budget soft: of the tokens over the budget, as a share of it


@dataclass(slots=True)
class Editing:
    """An episode while its store is edited."""

    task: Task
    store: Store
    scope: Scope
    budget: int | None  # in tokens; None: in entries, or none
    source: int  # tokens of what was read, or of the store at the start
    states: list[Snapshot]  # before the first turn, after each
    unread: set[int | None]  # sessions not shown, or not to their end
    turns: list[Turn] = field(default_factory=list)  # that edit
    calls: Counter[str] = field(default_factory=Counter)  # ok, failed
    invalid: int = 0  # turns in a row, up to now, without a call of the right form

    @property
    def shown_probes(self) -> list[Probe]:
        """The probes whose evidence was shown, as far as it is known where that stands.

        The others are not asked and have gained nothing: all members of a group are paid for the
        same probes, and whoever fills the window early is paid less, not more.
        """
        return [p for p in self.task.probes if not self.unread & {*p.sessions}]


class Answer(NamedTuple):
    """What one of the shown probes was answered from one state of the store."""

    said: str
    found: list[str]  # lines of the entries that it was answered from
    score: float


def worth(editing: Editing, first: Sequence[Answer], now: Sequence[Answer]) -> float:
    """Return what a state is worth over the first one: the gain in score, over all probes."""
    share = len(first) / len(editing.task.probes)
    return share * _mean([b.score - a.score for a, b in zip(first, now, strict=True)])


def gains(editing: Editing, answered: Sequence[Sequence[Answer]]) -> list[float]:
    """Return what each turn has added to the worth. answered: before the first turn, after each."""
    worths = [worth(editing, answered[0], now) for now in answered]
    return [after - before for before, after in pairwise(worths)]


def parts(
    c: ReadConfig,
    editing: Editing,
    first: Sequence[Answer],
    last: Sequence[Answer],
    tokens: tuple[int, int],
) -> dict[str, float]:
    """Return the parts of an episode's reward by name, `reward` among them.

    c: of MemUpdate. tokens: of the store before the first turn and after the last. unread: the
    probes that are not asked; the scores are means of the others, `delta` counts them as unchanged.
    """
    n, n_probes = editing.calls.total(), len(editing.task.probes)
    valid = editing.calls["ok"] / n if n else 0.0
    pairs = [(a.score, b.score) for a, b in zip(first, last, strict=True)]
    found = {
        "score_before": _mean([before for before, _ in pairs]),
        "score_after": _mean([after for _, after in pairs]),
        "valid": valid,
        "tokens_before": float(tokens[0]),
        "tokens_after": float(tokens[1]),
    }
    if len(pairs) < n_probes:
        found["unread"] = float(n_probes - len(pairs))
    if known := [after for before, after in pairs if before > 0]:
        found["retained"] = fmean(known)  # of what could be answered at the start
    won: dict[int, list[float]] = {}
    for probe, (before, after) in zip(editing.shown_probes, pairs, strict=True):
        won.setdefault(probe.category, []).append(after - before)
    found |= {f"delta_{k}": fmean(won[k]) for k in sorted(won) if k}
    terms = {
        "delta": worth(editing, first, last),
        "format": c.format_weight * valid,
        "size": 0.0,
        "compression": 0.0,
    }
    if c.budget == "soft":
        most = c.budget_entries or editing.budget
        used = len(editing.states[-1]) if c.budget_entries else tokens[1]
        terms["size"] = -SIZE_WEIGHT * max(0.0, used / most - 1)
    if c.mode == "build":
        terms["compression"] = c.compression_weight * max(0.0, 1 - tokens[1] / editing.source)
    return found | terms | {"reward": sum(terms.values())}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def compare(editing: Editing, first: Sequence[Answer], last: Sequence[Answer]) -> list[dict]:
    """Return of each shown probe what it was answered before and after, and what has changed that.

    caused: replies of the operations on entries that were found on one side alone. entries: what
    these have changed, a line that went after "- ", one that came after "+ ".
    """
    rows = []
    for probe, before, after in zip(editing.shown_probes, first, last, strict=True):
        lines = dict.fromkeys((*before.found, *after.found))
        moved = [line for line in lines if (line in before.found) != (line in after.found)]
        ids = [*dict.fromkeys(line.partition("]")[0][1:] for line in moved)]
        changed = []
        for id in ids:  # some were only displaced by others
            ends = editing.states[0], editing.states[-1]
            old, new = (state.get(id).line if id in state else "" for state in ends)
            if old != new:
                changed += [f"{sign} {line}" for sign, line in (("-", old), ("+", new)) if line]
        ops = [op for turn in editing.turns for op in turn.notes.ops if op["ok"]]
        rows.append(
            {
                "question": probe.question,
                "expected": probe.answers[0],
                "before": before.said,
                "after": after.said,
                "score_before": round(before.score, 4),
                "score_after": round(after.score, 4),
                "won": round(after.score - before.score, 4),
                "found_before": before.found,
                "found_after": after.found,
                "caused": [op["message"] for op in ops if {*ids} & {*op["ids"]}],
                "entries": changed,
            }
        )
    return rows
