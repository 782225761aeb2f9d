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
    title -> {at: the numbers that names of counts end in, in order, mean, n: what was added up for
    each}.
    """
    sums, parts = total(counts), {"tallies": {}, "curves": {}}
    for title, prefix in agent.extras.get("tallies", {}).items():
        if tally := _tally(sums, prefix):
            parts["tallies"][title] = tally
    for title, (above, below) in agent.extras.get("curves", {}).items():
        n = {int(at): x for at, x in _tally(sums, below).items() if at.isdecimal()}
        if at := sorted(n):
            means = [round(sums.get(f"{above}{k}", 0.0) / n[k], 4) for k in at]
            parts["curves"][title] = {"at": at, "mean": means, "n": [n[k] for k in at]}
    parts = {name: part for name, part in parts.items() if part}
    return {"episodes": len(counts)} | parts if parts else {}


def _tally(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counts with a prefix, without it."""
    return {
        name.removeprefix(prefix): n for name, n in sums.items() if name.startswith(prefix) and n
    }


def ends_of(folder: Path) -> list[dict]:
    """Return {step} and what is `counted` of the first and the last step that a training recorded.

    Nothing of an agent that is not one of ours, or that lists nothing.
    """
    ends: dict[int, dict] = {}
    for last in (False, True):
        if records := [record for record in step_records(folder, last) if "counts" in record]:
            step, agent = records[-1]["step"], find.known(records[-1]["agent"]) or Agent
            if found := counted([record["counts"] for record in records], agent):
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
