"""What an episode that edits a store is paid: parts of its reward, and what has changed answers.

A state of the store is worth how much better the probes are answered from it than from the first.
The worth of the last state is what the episode is paid for; a turn's gain is what the states
before and after it differ in worth, so that the gains of an episode add up to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

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
    def shown_probes(self) -> list:
        """The probes whose evidence was shown, as far as it is known where that stands.

        The others are not asked and have gained nothing: all members of a group are paid for the
        same probes, and whoever fills the window early is paid less, not more.
        """
        return [p for p in self.task.probes if not self.unread & {*p.sessions}]


Scores = Sequence[float]  # of the shown probes, answered from one state


def worth(editing: Editing, first: Scores, now: Scores) -> float:
    """Return what a state is worth over the first one: the gain in score, over all probes."""
    share = len(editing.shown_probes) / len(editing.task.probes)
    return share * _mean([b - a for a, b in zip(first, now, strict=True)])


def gains(editing: Editing, scores: Sequence[Scores]) -> list[float]:
    """Return what each turn has added to the worth. scores: before the first turn, after each."""
    worths = [worth(editing, scores[0], now) for now in scores]
    return [after - before for before, after in pairwise(worths)]


def parts(
    c: ReadConfig, editing: Editing, first: Scores, last: Scores, tokens: Sequence[int]
) -> dict[str, float]:
    """Return the parts of an episode's reward by name, `reward` among them.

    c: of MemUpdate. tokens: of the store before the first turn and after the last. unread: the
    probes that are not asked; the scores are means of the others, `delta` counts them as unchanged.
    """
    n, probes = editing.calls.total(), editing.shown_probes
    valid = editing.calls["ok"] / n if n else 0.0
    found = {
        "score_before": _mean(first),
        "score_after": _mean(last),
        "valid": valid,
        "tokens_before": float(tokens[0]),
        "tokens_after": float(tokens[-1]),
    }
    if unread := len(editing.task.probes) - len(probes):
        found["unread"] = float(unread)
    pairs = [*zip(first, last, strict=True)]
    if known := [after for before, after in pairs if before > 0]:
        found["retained"] = fmean(known)  # of what could be answered at the start
    for category in sorted({probe.category for probe in probes} - {0}):
        found[f"delta_{category}"] = fmean(
            b - a for probe, (a, b) in zip(probes, pairs, strict=True) if probe.category == category
        )
    won = worth(editing, first, last)
    size = compression = 0.0
    if c.budget == "soft":
        most = c.budget_entries or editing.budget
        used = len(editing.states[-1]) if c.budget_entries else tokens[-1]
        size = -SIZE_WEIGHT * max(0.0, used / most - 1)
    if c.mode == "build" and editing.turns:
        compression = c.compression_weight * max(0.0, 1 - tokens[-1] / max(1, editing.source))
    found |= {
        "delta": won,
        "format": c.format_weight * valid,
        "size": size,
        "compression": compression,
    }
    return found | {"reward": won + found["format"] + size + compression}


def _mean(values: Scores) -> float:
    return fmean(values) if values else 0.0


def compared(
    editing: Editing, found_before: Sequence[str], found_after: Sequence[str]
) -> Mapping[str, list[str]]:
    """Return what has changed an answer that was found in other entries after than before.

    found_before, found_after: lines of entries. caused: replies of the operations. entries: what
    these have changed of the entries, a line that went after "- ", one that came after "+ ".
    """
    ids = [
        line.partition("]")[0][1:]
        for line in dict.fromkeys((*found_before, *found_after))
        if (line in found_before) != (line in found_after)
    ]
    changed = []
    for id in dict.fromkeys(ids):  # some were only displaced by others
        first, last = editing.states[0], editing.states[-1]
        sides = [state.get(id).line if id in state else "" for state in (first, last)]
        if sides[0] != sides[1]:
            changed += [f"{sign} {line}" for sign, line in zip("-+", sides, strict=True) if line]
    ops = [op for turn in editing.turns for op in turn.notes.ops if op["ok"]]
    caused = [op["message"] for op in ops if {*ids} & {*op["ids"]}]
    return {"caused": caused, "entries": changed}
