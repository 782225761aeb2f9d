"""Say the result of an evaluation in one sentence.

Holds: `headline`. Leaves out: the numbers (report/summary.py), the page (report/page.py). No torch.
Exercise it: `pytest tests/report/test_page.py -k headline`. Read next: report/page.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from report.rows import Cell
from report.summary import cells


def _longest_cells(records: dict[Cell, dict], agent: str) -> list[Cell]:
    """Return an agent's longest cell of each kind of question, at temperature 1.0 if it has that.

    If other agents share kinds of question with it, only those kinds.
    """
    own = [cell for cell in records if cell.agent == agent]
    shared = {cell.question for cell in own} & {
        cell.question for cell in records if cell.agent != agent
    }
    longest = []
    for question in dict.fromkeys(cell.question for cell in own):
        if shared and question not in shared:
            continue
        of_question = [cell for cell in own if cell.question == question]
        sampled = any(cell.temperature == "1.0" for cell in of_question)
        temperature = "1.0" if sampled else of_question[0].temperature
        same = [cell for cell in of_question if cell.temperature == temperature]
        longest.append(max(same, key=lambda cell: cell.length))
    return longest


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _of_lead(places: Sequence[Cell], records: Sequence[dict], averaged: bool) -> str:
    """Return the shares of the leading agent, one by one with their intervals, or their mean."""
    if averaged:
        return f"{_percent(fmean(r['mean'] for r in records))} of {len(records)} kinds of"
    return " and ".join(
        f"{_percent(r['mean'])} [{100 * r['low']:.0f}, {100 * r['high']:.0f}] of the {c.question}"
        for c, r in zip(places, records, strict=True)
    )


def _of_another(records: Sequence[dict | None], averaged: bool) -> str:
    """Return the shares of another agent, or their mean. None: it was not asked that cell."""
    if not averaged:
        return " and ".join(_percent(r["mean"]) if r else "not asked" for r in records)
    if not all(records):
        return "not asked all of it"
    return _percent(fmean(record["mean"] for record in records))


def _gain(record: dict | None) -> str:
    if not record:
        return ""
    change, low, high = record["last"] - record["first"], record["low"], record["high"]
    limits = "" if low is None else f" (95 % interval {low:+.2f} to {high:+.2f})"
    return f", {change:+.2f} on that of the first {record['steps']}{limits}"


def headline(summary: dict, trained_on: int | None = None) -> str:
    """Return the result in one sentence: the leading agent at its longest documents, the others
    at the same ones. The leading agent is the one named trained, else the first.

    trained_on: the longest documents of training, in the summary's unit.
    """
    records = dict(cells(summary))
    if pooled := summary.get("pooled"):  # kinds that papers report as one; the others stand apart
        records = dict(cells({"cells": pooled}))
    if not records and "reward" in summary:
        return (
            f"{summary['steps']} training steps; the mean reward of the last ones is "
            f"{summary['reward']:.2f}{_gain(summary.get('gain'))}. Nothing has been evaluated yet."
        )
    if not records and "loss" in summary:
        return (
            f"{summary['steps']} steps on demonstrations; the mean loss of the last ones is "
            f"{summary['loss']:.2f}. Nothing has been evaluated yet."
        )
    if not records:
        return "Nothing has been evaluated yet."
    agents = list(dict.fromkeys(cell.agent for cell in records))
    lead = "trained" if "trained" in agents else agents[0]
    places = _longest_cells(records, lead)
    own = [records[cell] for cell in places]
    averaged = len(own) > 3  # RULER's tasks
    shares = _of_lead(places, own, averaged)
    others = "".join(
        f"; {agent}: "
        + _of_another([records.get(replace(cell, agent=agent)) for cell in places], averaged)
        for agent in agents
        if agent != lead
    )

    def joined(values: Iterable) -> str:
        return " and ".join(dict.fromkeys(map(str, values)))

    unit = summary["unit"]
    remarks = [
        "" if averaged else "95 % intervals in brackets",
        f"n = {joined(record['n'] for record in own)} questions",
        f"temperature {joined(cell.temperature for cell in places)}",
        f"training saw at most {trained_on:,} {unit}" if trained_on and lead == "trained" else "",
    ]
    return (
        f"At {joined(f'{cell.length:,}' for cell in places)} {unit} the {lead} agent answers "
        f"{shares} questions right{others} ({', '.join(filter(None, remarks))})."
    )
