"""Sort what agents count into tables and curves, of the trajectories of a cell or of a step.

Holds: `counted`, `counts_of`, `ends_of` (a training's first and last recorded step). Leaves out:
how they are shown (report/page.py, report/plots.py). No torch.
Exercise it: `pytest tests/report/test_counted.py`. Read next: report/summary.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agents import find
from memagent import Agent, Trajectory
from report.records import step_records


def total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add counts up, name by name."""
    sums: Counter[str] = Counter()
    for each in counts:
        sums.update(each)
    return dict(sums)


def counts_of(trajectory: Trajectory, agent: Agent) -> dict[str, float]:
    """Sum what an agent counts of a trajectory's turns."""
    return total(agent.count(trajectory.task, turn) for turn in trajectory.turns)


def counted(counts: Sequence[Mapping[str, float]], agent: Agent | type[Agent]) -> dict:
    """Return {episodes, tallies, curves} of the counts of trajectories; {} where nothing is listed.

    episodes: how many trajectories. tallies: title -> count without its prefix -> sum. curves:
    title -> {at: numbers in order, mean, n: what was added up for each}.
    """
    sums = total(counts)
    tallies = {title: _tally(sums, prefix) for title, prefix in agent.tallies.items()}
    curves = {title: _curve(sums, *prefixes) for title, prefixes in agent.curves.items()}
    parts = {
        "tallies": {title: tally for title, tally in tallies.items() if tally},
        "curves": {title: curve for title, curve in curves.items() if curve["at"]},
    }
    parts = {name: part for name, part in parts.items() if part}
    return {"episodes": len(counts)} | parts if parts else {}


def _tally(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counts with a prefix, without it."""
    return {
        name.removeprefix(prefix): n for name, n in sums.items() if name.startswith(prefix) and n
    }


def _curve(sums: Mapping[str, float], above: str, below: str) -> dict[str, list[float]]:
    """Return the means of sums by the number that the names of counts end in."""
    n = {int(at): x for at, x in _tally(sums, below).items() if at.isdecimal()}
    at = sorted(n)
    return {
        "at": at,
        "mean": [round(sums.get(f"{above}{k}", 0.0) / n[k], 4) for k in at],
        "n": [n[k] for k in at],
    }


def ends_of(folder: Path) -> list[dict]:
    """Return {step} and what is `counted` of the first and the last step that a training recorded.

    Nothing of an agent that is not one of ours, or that lists nothing.
    """
    ends: dict[int, dict] = {}
    for last in (False, True):
        records = [record for record in step_records(folder, last) if "counts" in record]
        for step, agent in {(record["step"], record["agent"]) for record in records[-1:]}:
            found = counted([record["counts"] for record in records], find.known(agent) or Agent)
            if found:
                ends[step] = {"step": step} | found
    return list(ends.values())


def pooled(curves: Iterable[Mapping[str, Sequence[float]]]) -> list[tuple[float, float]]:
    """Return the points (number, mean) of several curves added up."""
    sums: Counter[int] = Counter()
    n: Counter[int] = Counter()
    for curve in curves:
        for at, mean, added in zip(curve["at"], curve["mean"], curve["n"], strict=True):
            sums[at] += mean * added
            n[at] += added
    return [(at, sums[at] / n[at]) for at in sorted(n)]
