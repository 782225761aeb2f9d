"""Say the result of an evaluation in one sentence.

Holds: `headline`, `nothing_right`, `reader`, `temperatures_of`. Leaves out: the numbers
(report/summary.py), the page (report/page.py), words for kinds of questions (tasks/words.py). No
torch.
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


def _longest(records: Iterable[Cell], lead: str) -> list[Cell]:
    """Return an agent's longest cell of each kind of question, at its `temperatures_of`.

    If other agents share kinds of question with it, only those kinds.
    """
    ours, temperatures = [cell for cell in records if cell.agent == lead], temperatures_of(records)
    shared = {cell.question for cell in ours} & {c.question for c in records if c.agent != lead}
    longest: dict[str, Cell] = {}
    for cell in ours:
        if cell.temperature == temperatures[lead, cell.question]:
            if not shared or cell.question in shared:
                best = longest.setdefault(cell.question, cell)
                longest[cell.question] = max(best, cell, key=lambda cell: cell.length)
    return [*longest.values()]


@cache
def reads_all(agent: str) -> bool:
    """Whether an agent is shown the whole document at once; of one that is not known it is not."""
    return (find.known(agent) or Agent).whole


@cache
def reader(agent: str) -> str:
    """Return what an agent is called in a sentence, by the name that rows have.

    >>> reader("full"), reader("memagent@untrained"), reader("mine")
    ('whole document in the prompt', 'memagent before training', 'mine')
    """
    name, at, weights = agent.partition("@")
    words = (find.known(name) or Agent).in_words or name
    return f"{words} before training" if weights == "untrained" else words + at + weights


def _of_others(agents: Sequence[str], records: dict, places: Sequence[Cell]) -> str:
    """Return what the other agents get in these cells, on average; "" without others."""
    words = []
    for agent in agents:
        found = [records.get(replace(cell, agent=agent)) for cell in places]
        share = f"{fmean(r['mean'] for r in found):.0%}" if all(found) else "not asked"
        words.append(f"{reader(agent)} {share.replace('%', ' %')}")
    return f" ({', '.join(words)})" if words else ""


def _of_training(summary: dict) -> str:
    """Return the result of a training that nothing has been asked after."""
    measure = "loss" if "loss" in summary else "reward"
    if measure not in summary:
        return "Nothing has been evaluated yet."
    if summary[measure] is None:
        return f"{summary['steps']} training steps, none with a {measure}."
    steps = "steps on demonstrations" if measure == "loss" else "training steps"
    change, gain = "", summary.get("gain")
    if gain:
        change = f", {gain['last'] - gain['first']:+.2f} on that of the first {gain['steps']}"
        if gain["low"] is not None:
            change += f" (95 % interval {gain['low']:+.2f} to {gain['high']:+.2f})"
    return (
        f"{summary['steps']} {steps}; the mean {measure} of the last ones is "
        f"{summary[measure]:.2f}{change}. Nothing has been evaluated yet."
    )


NOTHING = {
    "failed": "All readings failed, so this measures nothing: `show RUN` has their errors.",
    "empty": "All answers are empty: raise --final-tokens, or switch thinking off (--no-thinking).",
    "unformed": "No answer has the form that was asked for: ask for another one (--form plain), or "
    "give a --model that keeps to it.",
    "": "No answer was right: the model cannot do this kind of question (the embedded policy knows "
    "generated English alone). Give another --model, or train one on such tasks.",
}
"""What is said of an evaluation without a right answer: share that is nearly 1 -> the remedy."""


def nothing_right(summary: dict, rows: Sequence[dict]) -> str:
    """Say what it means that no answer of an evaluation was right; "" if one was, or of none."""
    if not rows or any((row.get(summary["metric"]) or 0) > 0 for row in rows):
        return ""
    records = summary["cells"]
    return next(
        words
        for name, words in NOTHING.items()
        if not name or all(record.get(name, 0) > 0.95 for record in records)
    )


def headline(summary: dict, trained_on: int | None = None) -> str:
    """Return the result in one sentence and what it holds for: the leading agent at its longest
    documents, the others at the same ones.

    trained_on: the longest documents of training, in the summary's unit.
    """
    # kinds that papers report as one, where there are any; the others stand apart
    records = dict(cells({"cells": summary.get("pooled") or summary["cells"]}))
    if not records:
        return _of_training(summary)
    lead, unit = lead_of(records), summary["unit"]
    others = [agent for agent in dict.fromkeys(c.agent for c in records) if agent != lead]
    places = _longest(records, lead)
    averaged = len(places) > 3  # RULER's tasks
    lengths = [*dict.fromkeys(cell.length for cell in places)]
    parts = []
    if averaged:
        mean = 100 * fmean(records[cell]["mean"] for cell in places)
        among = " and ".join(f"{n:,}" for n in lengths)
        against = _of_others(others, records, places)
        parts.append(f"{mean:.0f} % of {len(places)} kinds of questions in {among} {unit}{against}")
    for cell in places if not averaged else ():
        where = "" if parts and len(lengths) == 1 else f" in {cell.length:,} {unit}"
        mean, low, high = (100 * records[cell][name] for name in ("mean", "low", "high"))
        share, against = (
            f"{mean:.0f} % [{low:.0f}, {high:.0f}]",
            _of_others(others, records, [cell]),
        )
        parts.append(f"{share} of {in_words(cell.question)}{where}{against}")
    temperatures = [*dict.fromkeys(cell.temperature for cell in places)]
    compared = [records.get(replace(c, agent=agent)) for c in places for agent in (lead, *others)]
    remarks = [f"n = {span(record['n'] for record in compared if record)}"]
    if not averaged:
        remarks.append("95 % intervals in brackets")
    greedy = temperatures == ["0.0"]
    remarks.append("greedy" if greedy else f"temperature {' and '.join(temperatures)}")
    if trained_on and lead == "trained":
        remarks.append(f"training saw at most {trained_on:,} {unit}")
    # a reward of conversations is a score of their own
    right = summary.get("metric") != "reward" or unit == "sections"
    verb = "correctly answers" if right else "scores on"
    subject = "Trained, it" if lead == "trained" else lead
    return f"{subject} {verb} {' and '.join(parts)}. ({'; '.join(remarks)})"
