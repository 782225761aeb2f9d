"""Say the result of an evaluation in one sentence.

Holds: `headline`, `reader`, `temperatures_of`. Leaves out: the numbers (report/summary.py), the
page (report/page.py), words for kinds of questions (tasks/words.py). No torch.
Exercise it: `pytest tests/report/test_page.py -k headline`. Read next: report/page.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

from agents import find
from memagent import Agent
from report.rows import Cell
from report.summary import cells, span
from tasks.words import in_words


def lead_of(records: Iterable[Cell]) -> str:
    """Return the leading agent: the one named trained, else the first; "" without any."""
    agents = [cell.agent for cell in records]
    return "trained" if "trained" in agents else agents[0] if agents else ""


def temperatures_of(records: Iterable[Cell]) -> dict[tuple[str, str], str]:
    """Return at which temperature an agent is shown where one is: 1.0, or else its first one, by
    agent and kind of question."""
    shown: dict[tuple[str, str], str] = {}
    for cell in records:
        key = cell.agent, cell.question
        shown[key] = "1.0" if cell.temperature == "1.0" else shown.get(key, cell.temperature)
    return shown


def longest_cells(records: dict[Cell, dict], agent: str) -> list[Cell]:
    """Return an agent's longest cell of each kind of question, at its `temperatures_of`.

    If other agents share kinds of question with it, only those kinds.
    """
    ours = [cell for cell in records if cell.agent == agent]
    shared = {cell.question for cell in ours} & {
        cell.question for cell in records if cell.agent != agent
    }
    longest, temperatures = [], temperatures_of(ours)
    for question in dict.fromkeys(cell.question for cell in ours):
        if shared and question not in shared:
            continue
        temperature = temperatures[agent, question]
        same = [c for c in ours if (c.question, c.temperature) == (question, temperature)]
        longest.append(max(same, key=lambda cell: cell.length))
    return longest


@cache
def reads_all(agent: str) -> bool:
    """Whether an agent is shown the whole document at once; of one that is not known it is not."""
    return (find.known(agent) or Agent).whole


@cache
def reader(agent: str) -> str:
    """Return what an agent is called in a sentence, by the name that rows have.

    >>> reader("full"), reader("memagent@untrained"), reader("mine")
    ('reading everything at once', 'memagent before training', 'mine')
    """
    name, at, weights = agent.partition("@")
    words = (find.known(name) or Agent).in_words or name
    return f"{words} before training" if weights == "untrained" else words + at + weights


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _answers(summary: dict, lead: str) -> str:
    """Return subject and verb. A reward of conversations is a score of their own."""
    right = summary.get("metric") != "reward" or summary["unit"] == "sections"
    verb = "correctly answers" if right else "scores on"
    return f"Trained, it {verb}" if lead == "trained" else f"{lead} {verb}"


def _of_others(agents: Sequence[str], records: dict, places: Sequence[Cell]) -> str:
    """Return what the other agents get in these cells, on average; "" without others."""

    def share(agent: str) -> str:
        found = [records.get(replace(cell, agent=agent)) for cell in places]
        return _percent(fmean(r["mean"] for r in found)) if all(found) else "not asked"

    words = ", ".join(f"{reader(agent)} {share(agent)}" for agent in agents)
    return f" ({words})" if words else ""


def _of_training(summary: dict) -> str:
    """Return the result of a training that nothing has been asked after."""
    measure = "loss" if "loss" in summary else "reward"
    if measure in summary and summary[measure] is None:
        return f"{summary['steps']} training steps, none with a {measure}."
    if "reward" in summary:
        return (
            f"{summary['steps']} training steps; the mean reward of the last ones is "
            f"{summary['reward']:.2f}{_gain(summary.get('gain'))}. Nothing has been evaluated yet."
        )
    if "loss" in summary:
        return (
            f"{summary['steps']} steps on demonstrations; the mean loss of the last ones is "
            f"{summary['loss']:.2f}. Nothing has been evaluated yet."
        )
    return "Nothing has been evaluated yet."


def _gain(record: dict | None) -> str:
    if not record:
        return ""
    change, low, high = record["last"] - record["first"], record["low"], record["high"]
    limits = "" if low is None else f" (95 % interval {low:+.2f} to {high:+.2f})"
    return f", {change:+.2f} on that of the first {record['steps']}{limits}"


def headline(summary: dict, trained_on: int | None = None) -> str:
    """Return the result in one sentence and what it holds for: the leading agent at its longest
    documents, the others at the same ones.

    trained_on: the longest documents of training, in the summary's unit.
    """
    records = dict(cells(summary))
    if pooled := summary.get("pooled"):  # kinds that papers report as one; the others stand apart
        records = dict(cells({"cells": pooled}))
    if not records:
        return _of_training(summary)
    lead, unit = lead_of(records), summary["unit"]
    others = [agent for agent in dict.fromkeys(c.agent for c in records) if agent != lead]
    places = longest_cells(records, lead)
    averaged = len(places) > 3  # RULER's tasks
    lengths = [*dict.fromkeys(cell.length for cell in places)]
    if averaged:
        mean = fmean(records[cell]["mean"] for cell in places)
        among = " and ".join(f"{n:,}" for n in lengths)
        parts = [
            f"{_percent(mean)} of {len(places)} kinds of questions in {among} {unit}"
            + _of_others(others, records, places)
        ]
    else:
        parts = []
        for cell in places:
            where = "" if parts and len(lengths) == 1 else f" in {cell.length:,} {unit}"
            share = "{mean:.0f} % [{low:.0f}, {high:.0f}]".format(
                **{name: 100 * records[cell][name] for name in ("mean", "low", "high")}
            )
            against = _of_others(others, records, [cell])
            parts.append(f"{share} of {in_words(cell.question)}{where}{against}")
    temperatures = [*dict.fromkeys(cell.temperature for cell in places)]
    compared = [records.get(replace(c, agent=agent)) for c in places for agent in (lead, *others)]
    remarks = [
        f"n = {span(record['n'] for record in compared if record)}",
        "" if averaged else "95 % intervals in brackets",
        "greedy" if temperatures == ["0.0"] else f"temperature {' and '.join(temperatures)}",
        f"training saw at most {trained_on:,} {unit}" if trained_on and lead == "trained" else "",
    ]
    return f"{_answers(summary, lead)} {' and '.join(parts)}. ({'; '.join(filter(None, remarks))})"
