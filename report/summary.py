"""What rows say together: means with intervals, paired differences, where answers were lost; the table in the terminal.

Holds: `summarise`, `bootstrap`, `wilson`, `compare`, `overlaps`, `cells`, `table`. Leaves out: how rows are made (eval.py), the page (report/page.py),
published numbers (report/published.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from config.errors import UserError, clean
from config.files import replacing
from data import Task
from memagent import Agent
from report.rows import FATES, Cell, fate
from tasks.seen import trained_on

if TYPE_CHECKING:
    from rich.table import Table


def wilson(mean: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share of n right answers (Wilson 1927).

    >>> [round(x, 3) for x in wilson(0.5, 10)], [round(x, 3) for x in wilson(0.0, 20)]
    ([0.237, 0.763], [0.0, 0.161])
    """
    centre, spread = mean + z * z / (2 * n), z * ((mean * (1 - mean) + z * z / (4 * n)) / n) ** 0.5
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(
        1.0, (centre + spread) / (1 + z * z / n)
    )


def bootstrap(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of `resamples` draws, with replacement, of as many values.

    Values that are all the same would give an interval without width, however few they are: theirs is Wilson's.
    """
    import numpy as np

    values = np.asarray(values, dtype=float)
    if (values == values[0]).all():
        return wilson(float(values[0]), len(values))
    rng, means = np.random.default_rng(seed), []
    for start in range(
        0, resamples, some := max(1, 2**20 // len(values))
    ):  # not all draws at once: a set may have thousands of questions
        draws = rng.integers(0, len(values), (min(some, resamples - start), len(values)))
        means.append(values[draws].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975)).tolist()
    return low, high


METRICS = (
    "sub_em",
    "em",
    "f1",
    "reward",
    "sub_em_upstream",
    "failed",
    "empty",
    "tokens_read",
    "tokens_written",
    "document_tokens",
    "seconds",
    "mib",
    "memory_tokens",
    "memory_cut",
    "memory_empty",
    "cut",
)
DEPTHS = 10  # bins of evidence depth, and of where an answer was lost


def summarise(
    rows: Iterable[dict],
    unit: str = "sections",
    metric: str = "sub_em",
    paired: bool = True,
    agents: Mapping[str, Agent] | None = None,
) -> dict:
    """All that is reported, from the rows that `evaluate` returned. unit: what lengths count, sections, documents or tokens.

    cells is a flat list, one record a cell, so that `pandas.DataFrame(summary["cells"])` is a table of all of it:
    - agent, question, temperature, length; n questions; mean of `metric`, the samples of a question averaged first; low and high, its 95 %
      interval by bootstrap over the questions.
    - one field for each of `METRICS`, the mean over the same questions. failed = the trajectory has an error; empty = it ended well
      without an answer of the form asked for; memory_cut and memory_empty count turns; tokens and seconds are those of one
      trajectory; cut = tokens of the document that a cap or a window kept the agent from; mib = the most of any.
    - where there is such: depths = {n, mean}, trajectories and their mean by tenths of the document, by where the first piece of
      evidence stands in it; fates = {wrong, and counts of `eval.fate` among the trajectories that are not wholly right, left: by
      tenths, where it was lost}; occupancy = {mean: tokens of the memory by parts of the document, most}.
    - of agents that count something: counts = their sums over the trajectories; rates = the agent's own
      rates of them; splits = {count: {with, without: {n, mean}}}, the trajectories with and without any.
    paired = [{a, b, question, temperature, length, mean, n, low, high}]: the agent named trained (else the first) minus every other, and
    every other one minus itself before training, on the same questions.
    """
    groups: dict[Cell, dict[str, list[dict]]] = {}
    settings: set[str] = set()
    for row in rows:
        row = row | {
            "failed": float(bool(row["error"])),
            "empty": float(not row["error"] and not row["prediction"]),
        }
        cell = Cell(row["agent"], row["question"], row["temperature"], row["length"])
        groups.setdefault(cell, {}).setdefault(row["id"], []).append(row)
        settings.add(row["settings"])
    records = []
    for cell in sorted(
        groups, key=lambda cell: cell.length
    ):  # all else keeps the order in which it came
        questions = groups[cell].values()
        values = [fmean(row[metric] for row in rows) for rows in questions]
        low, high = bootstrap(values)
        record = asdict(cell) | {"n": len(values), "mean": fmean(values), "low": low, "high": high}
        for name in METRICS:
            most = max if name == "mib" else fmean
            record[name] = most(most(row[name] for row in rows) for rows in questions)
        every = [row for rows in questions for row in rows]
        agent = (agents or {}).get(cell.agent)
        parts = {
            "depths": _by_depth(every, metric),
            "fates": _fates(every, metric),
            "occupancy": _occupancy(every),
            "counts": (counts := _counts(every)),
            "rates": _rates(counts, agent),
            "splits": _splits(every, agent, metric),
        }
        records.append(record | {name: part for name, part in parts.items() if part})
    differences = _paired(groups, metric) if paired else []
    return {
        "unit": unit,
        "metric": metric,
        "cells": records,
        "paired": differences,
        "settings": sorted(settings),
    }


def _by_depth(rows: Sequence[dict], metric: str) -> dict:
    bins: list[list[float]] = [[] for _ in range(DEPTHS)]
    for row in rows:
        if row.get("depths"):
            bins[min(DEPTHS - 1, int(min(row["depths"]) * DEPTHS))].append(row[metric])
    return (
        {"n": [len(b) for b in bins], "mean": [fmean(b) if b else None for b in bins]}
        if any(bins)
        else {}
    )


def _fates(rows: Sequence[dict], metric: str) -> dict:
    wrong = [row for row in rows if row[metric] < 1 and not row["error"] and row.get("sections")]
    if not wrong:
        return {}
    left = [0] * DEPTHS
    for row in wrong:
        if fate(row) == "lost":
            left[min(DEPTHS - 1, int((row["held"][-1][0] - 1) / row["sections"] * DEPTHS))] += 1
    counts = Counter(map(fate, wrong))
    return {"wrong": len(wrong)} | {name: counts[name] for name in FATES} | {"left": left}


def _occupancy(rows: Sequence[dict]) -> dict:
    curves = [row["occupancy"] for row in rows if row.get("occupancy")]
    if not curves:
        return {}
    size = Counter(map(len, curves)).most_common(1)[0][0]
    same = [curve for curve in curves if len(curve) == size]
    return {
        "mean": [round(fmean(part), 1) for part in zip(*same, strict=True)],
        "most": max(row["memory_most"] for row in rows),
    }


def _counts(rows: Sequence[dict]) -> dict:
    """Sum what the agent counted (`Agent.count`)."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.get("counts") or {})
    return dict(counts)


def _rates(counts: dict, agent: Agent | None) -> dict:
    """Return the agent's rates of its counts; None where there is nothing to divide by."""
    if not counts or agent is None:
        return {}
    return {
        column: round(counts.get(above, 0) / counts[below], 4) if counts.get(below) else None
        for column, (above, below) in agent.rates.items()
        if above in counts or below in counts
    }


def _splits(rows: Sequence[dict], agent: Agent | None, metric: str) -> dict:
    """Return the mean of the trajectories with and without any of a count, for the agent's `splits`."""
    rows = [row for row in rows if row.get("counts") and row.get("needed", 1)]
    if not rows or agent is None:
        return {}
    found = {}
    for name in agent.splits:
        for side, wanted in (("with", True), ("without", False)):
            values = [row[metric] for row in rows if (row["counts"].get(name, 0) > 0) == wanted]
            mean = fmean(values) if values else None
            found.setdefault(name, {})[side] = {"n": len(values), "mean": mean}
    return found


def _paired(groups: dict[Cell, dict[str, list[dict]]], metric: str) -> list[dict]:
    """The agent named trained (else the first) against each other one, and each other one against itself before training, cell by cell."""
    agents, found = list(dict.fromkeys(cell.agent for cell in groups)), []
    lead = "trained" if "trained" in agents else agents[0] if agents else ""
    for cell, questions in groups.items():
        others = [agent for agent in agents if agent != lead]
        if cell.agent != lead:
            others = [
                agent
                for agent in others
                if agent in (f"{cell.agent}@untrained", f"untrained {cell.agent}")
            ]
        for other in others:
            if against := groups.get(replace(cell, agent=other)):
                sides = (
                    [row for rows in side.values() for row in rows] for side in (questions, against)
                )
                if difference := compare(*sides, metric=metric, fail=False):
                    found.append(
                        {"a": cell.agent, "b": other}
                        | {k: v for k, v in asdict(cell).items() if k != "agent"}
                        | difference
                    )
    return found


def cells(summary: dict, name: str = "") -> Iterator[tuple[Cell, object]]:
    """Each cell of a summary with its record or, given a name, with what the record has by that name, where it has it."""
    for record in summary["cells"]:
        if not name or name in record:
            yield (
                Cell(*(record[part] for part in Cell.__dataclass_fields__)),
                record[name] if name else record,
            )


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_summary(path: Path, summary: dict) -> None:
    write_text(path, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def compare(
    a: Iterable[dict], b: Iterable[dict], metric: str = "sub_em", fail: bool = True
) -> dict:
    """Mean of `a` minus that of `b` on the questions both were asked: {mean, n, low, high}.

    Paired: the difference is taken question by question (kind, length, id), samples averaged first, with a 95 % interval by bootstrap over
    the questions. Give rows of one agent and one temperature on either side. Without a common question: {}, or a `UserError` if `fail`.
    """

    def by_question(rows: Iterable[dict]) -> dict[tuple, list[float]]:
        values: dict[tuple, list[float]] = {}
        for row in rows:
            values.setdefault((row["question"], row["length"], row["id"], row["task"]), []).append(
                row[metric]
            )
        return values

    left, right = by_question(a), by_question(b)
    if not (both := [key for key in left if key in right]):
        if fail:
            raise UserError(
                "The two sides have no question in common, there is nothing to compare."
            )
        return {}
    differences = [fmean(left[key]) - fmean(right[key]) for key in both]
    if (
        len(alike := {*differences}) == 1 and (same := alike.pop()) <= 0
    ):  # shares have one side, differences two
        low, high = (
            (-wilson(0.0, len(both))[1], wilson(0.0, len(both))[1])
            if same == 0
            else (-x for x in wilson(-same, len(both))[::-1])
        )
    else:
        low, high = bootstrap(differences)
    return {"mean": fmean(differences), "n": len(both), "low": low, "high": high}


class Overlap:
    """How many of the questions that are asked a policy was trained on, by their text, whatever their ids."""

    def __init__(self, policy: str, agents: Sequence[str], look: bool = True):
        self.policy, self.agents = policy, agents
        self.known = trained_on(policy) if policy and look else {}
        self.asked: dict[
            str, set[str]
        ] = {}  # name of the questions -> digests; the same questions stand in documents of every length

    def add(self, question: str, tasks: Sequence[Task]) -> str:
        """Count a column's questions; returns a warning, "" if none is called for or these questions have had theirs."""
        if not self.known or not tasks:
            return ""
        before = self.summary()["questions"].get(question, {"seen": 0})["seen"]
        self.asked.setdefault(question, set()).update(task.question_digest for task in tasks)
        return "" if before else overlap(self.summary(), question)

    def summary(self) -> dict:
        """{policy, agents, known: questions it was trained on, questions: {name: {asked, seen}}}"""
        counts = {
            name: {"asked": len(asked), "seen": len(asked & self.known.keys())}
            for name, asked in self.asked.items()
        }
        return {
            "policy": self.policy,
            "agents": [*self.agents],
            "known": len(self.known),
            "questions": counts,
        }


def overlap(policy: dict, question: str) -> str:
    """The sentence on the questions of this name that a policy (an entry of summary["trained_on"]) was trained on, "" if on none."""
    n = policy["questions"][question]
    if not n["seen"]:
        return ""
    agents = ", ".join(policy["agents"])
    return f"Warning: {n['seen']:,} of the {n['asked']:,} questions {question!r} are among those that {policy['policy']} ({agents}) was trained on."


def overlaps(summary: dict) -> list[str]:
    """Those sentences of a whole evaluation."""
    found = (
        overlap(policy, question)
        for policy in summary.get("trained_on", ())
        for question in policy["questions"]
    )
    return [sentence for sentence in found if sentence]


def markdown_of(summary: dict) -> str:
    """The table for a paper: a row per kind of question, agent and temperature, a column per length, percent with 95 % interval."""
    leaves = dict(cells(summary))
    lengths = sorted({cell.length for cell in leaves})
    sizes = sorted({leaf["n"] for leaf in leaves.values()}) or [0]
    lines = [
        f"| question | agent | T | {' | '.join(f'{n:,}' for n in lengths)} |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for question, agent, temperature in dict.fromkeys(
        (cell.question, cell.agent, cell.temperature) for cell in leaves
    ):
        row = [leaves.get(Cell(agent, question, temperature, n)) for n in lengths]
        shares = [
            f"{100 * v['mean']:.1f} [{100 * v['low']:.1f}, {100 * v['high']:.1f}]" if v else ""
            for v in row
        ]
        names = (name.replace("|", "\\|").replace("\n", " ") for name in (question, agent))
        lines.append(f"| {' | '.join((*names, temperature, *shares))} |")
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    lost = sum(share > 0 for _, share in cells(summary, "failed"))
    said = f"{summary['metric']} in percent by {summary['unit']}, 95 % interval by bootstrap over questions; n = {n} questions a cell; failures count as wrong"
    said = " ".join(
        [f"{said} (there are some in {lost} of {len(leaves)} cells).", *overlaps(summary)]
    )
    return clean("\n".join([*lines, "", said, ""]))


def csv_of(summary: dict) -> str:
    """Every cell as a line: agent, question, temperature, length, n, mean, low, high and all metrics."""
    import csv
    import io

    file = io.StringIO()
    writer = csv.writer(file)
    others = [name for name in METRICS if name != summary["metric"]]
    writer.writerow(
        [
            "agent",
            "question",
            "temperature",
            summary["unit"],
            "n",
            summary["metric"],
            "low",
            "high",
            *others,
        ]
    )
    for cell, leaf in cells(summary):
        writer.writerow(
            [
                *astuple(cell),
                leaf["n"],
                leaf["mean"],
                leaf["low"],
                leaf["high"],
                *(leaf[name] for name in others),
            ]
        )
    return clean(file.getvalue())


def _short(share: float) -> str:
    """Two decimals without the leading 0, all of one width: .97, 1.0"""
    return "1.0" if share >= 0.995 else f"{share:.2f}"[1:]


def table(summary: dict, width: int = 80) -> Table:
    """Accuracy by length for the terminal: a line per question, agent and temperature; where intervals do not fit (five lengths in 80
    columns), means alone."""
    from rich.table import Table
    from rich.text import Text

    leaves = dict(cells(summary))
    lengths = sorted({cell.length for cell in leaves})
    sizes = sorted({leaf["n"] for leaf in leaves.values()}) or [0]
    n = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    lost = sum(leaf > 0 for _, leaf in cells(summary, "failed"))
    failed = f"; failures, counted as wrong, in {lost} of {len(leaves)} cells" if lost else ""
    cut = sum(leaf > 0 for _, leaf in cells(summary, "cut"))
    failed += (
        f"; documents not read whole, by a cap or a window, in {cut} of {len(leaves)} cells"
        if cut
        else ""
    )
    names = (
        max((max(len(cell.question), len(cell.agent) + 1) for cell in leaves), default=0) + 5
    )  # and the temperature
    whole = names + 12 * len(lengths) <= max(width, 80)
    shown = Table(
        title=f"{summary['metric']} by {summary['unit']}",
        box=None,
        padding=(0, 1, 0, 0),
        caption=f"mean{' and 95 % interval' if whole else ' (intervals: table.md)'}, n = {n} questions a cell{failed}",
    )
    shown.add_column("", no_wrap=True)
    shown.add_column("T", no_wrap=True)
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right", no_wrap=True)
    for question in dict.fromkeys(cell.question for cell in leaves):
        shown.add_row(Text(clean(question), "bold"))
        for agent, temperature in dict.fromkeys(
            (cell.agent, cell.temperature) for cell in leaves if cell.question == question
        ):
            values = [leaves.get(Cell(agent, question, temperature, length)) for length in lengths]
            texts = [
                Text.assemble(
                    _short(v["mean"]), (f" {_short(v['low'])}-{_short(v['high'])}" * whole, "dim")
                )
                if v
                else ""
                for v in values
            ]
            shown.add_row(Text(f" {clean(agent)}"), Text(clean(temperature)), *texts)
    return shown
