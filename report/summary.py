"""What rows say: means with intervals, paired differences, tables.

Means are over questions, their 95 % intervals over documents.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from config.errors import UserError, clean
from config.files import replacing
from config.realmodels import settings_folder
from data import Task, strip_thinking
from memagent import Agent
from report.rows import Cell
from report.words import lead_of
from tasks.episodes import pool_of
from tasks.seen import trained_on
from tasks.words import METRICS as WORDS

if TYPE_CHECKING:
    from rich.console import Group

# ---------------------------------------------------------------- statistics

ROUNDING = 1e-9  # of means of scores


def wilson(mean: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % interval of a share of n right answers (Wilson 1927).

    >>> [round(x, 3) for x in wilson(0.5, 10)], [round(x, 3) for x in wilson(0.0, 20)]
    ([0.237, 0.763], [0.0, 0.161])
    """
    centre, spread = mean + z * z / (2 * n), z * ((mean * (1 - mean) + z * z / (4 * n)) / n) ** 0.5
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


class Calibration(NamedTuple):
    """How often answers are right, and how far what they say of it is off; all but `n` shares."""

    accuracy: float
    low: float  # of the 95 % interval
    high: float
    error: float | None  # None: no answer says how sure it is
    n: int


def calibration(rows: Iterable[tuple[float | None, bool]], size: int = 100) -> Calibration:
    """Return accuracy and RMS calibration error of answers: (confidence in percent, right?).

    The error is Hendrycks et al.'s (arXiv 1812.04606), over bins of `size` answers of like
    confidence, the rest with the last bin. Their code, which Humanity's Last Exam uses, leaves out
    the last bin, the most confident answers; here it counts. An answer without a confidence (None)
    counts for the accuracy alone.

    >>> round(calibration([(90.0, True), (70.0, False)]).error, 6)
    0.3
    """
    rows = [*rows]
    sure = sorted((row for row in rows if row[0] is not None), key=itemgetter(0))
    starts = [*range(0, max(1, len(sure) - size + 1), size)]
    squares = 0.0
    for start, end in zip(starts, [*starts[1:], len(sure)], strict=True):
        if part := sure[start:end]:
            gap = fmean(c / 100 for c, _ in part) - fmean(right for _, right in part)
            squares += len(part) * gap * gap
    error = (squares / len(sure)) ** 0.5 if sure else None
    right = [right for _, right in rows]
    return Calibration(fmean(right), *interval(right), error, len(rows))


def interval(
    values: Sequence[float], documents: Sequence[object] = (), least: float = 0.0
) -> tuple[float, float]:
    """Return the 95 % interval of a mean over questions, some of which may share a document.

    Answers about one text are not independent. So the variance is the cluster-robust one of least
    squares on a constant, documents as clusters, times G / (G - 1) for G of them, with Student's t
    of G - 1. Of documents with a question each, that is the usual t interval; of a single document,
    which tells nothing about others, too. Where no document differs from the others the variance is
    0: then it is Wilson's interval of G answers, mirrored for negative differences and to both
    sides for none.

    documents: of each value, () if they are all different. least: 0 for shares, -1 for differences
    of shares; the interval ends there and at 1. Scores outside are no shares: then it ends nowhere.
    """
    import numpy as np
    from scipy.special import stdtrit

    values = np.asarray(values, dtype=float)
    mean, size = float(values.mean()), len(values)
    numbers = {name: k for k, name in enumerate(dict.fromkeys(documents))}
    groups = [*map(numbers.get, documents)] if len(numbers) > 1 else range(size)
    sums = np.bincount(groups, weights=values - mean)
    n, share = len(sums), least <= values.min() and values.max() <= 1
    spread = float(sums @ sums * n / max(1, n - 1)) ** 0.5 / size
    if spread > ROUNDING or not share:
        half = float(stdtrit(n - 1, 0.975)) * spread if n > 1 else 0.0
        low, high = mean - half, mean + half
    else:
        low, high = wilson(abs(mean), n)
        if mean < -ROUNDING:
            low, high = -high, -low
        elif least < 0 and mean < ROUNDING:
            low = -high
    return (max(low, least), min(high, 1.0)) if share else (low, high)


# ---------------------------------------------------------------- the summary

METRICS = (
    "sub_em", "em", "f1", "reward", "official_em", "sub_em_upstream", "failed", "unformed",
    "empty", "tokens_read", "tokens_written", "document_tokens", "seconds",
    "memory_tokens", "memory_cut", "memory_empty", "cut", "model_calls",
)  # fmt: skip


def summarise(
    rows: Iterable[dict],
    unit: str = "sections",
    metric: str = "sub_em",
    paired: bool = True,
    agents: Mapping[str, Agent] | None = None,
) -> dict:
    """Return {unit, metric, cells, pooled, paired, settings} of the rows that `evaluate` returned.

    unit: what lengths count: sections, documents or tokens. agents: by name, for what they count.

    cells: records of agent, question, temperature, length; n, mean, low, high (`_mean`); of each of
        `METRICS` that all rows have the mean over the same questions.
        failed: the trajectory has an error; of the others, unformed: the response lacks the
        required form, empty: nothing follows the thinking. cut: tokens of the document that a cap
        or a window kept from the agent. counts: sums of what an agent counts, rates: of these
    pooled: records of the kinds that are pooled (`episodes.pool_of`): the cell and its `_mean`
    paired: {a, b, question, temperature, length, n, mean, low, high}, a minus b (`compare`)
    """
    groups: dict[Cell, list[dict]] = {}
    for row in rows:
        failed, formed = bool(row["error"]), bool(row["prediction"])
        answered = formed or bool(strip_thinking(row.get("response", "")).strip())
        row = row | {
            "failed": float(failed),
            "unformed": float(not failed and answered and not formed),
            "empty": float(not failed and not answered),
        }
        if row[metric] is None:
            raise UserError(
                f"The agent {row['agent']} gave its answer to {row['id']!r} no reward (None), and "
                "the reward is what is measured here."
            )
        groups.setdefault(Cell.from_row(row), []).append(row)
    ordered = sorted(groups, key=lambda cell: cell.length)  # stable: else the order of the rows
    return {
        "unit": unit,
        "metric": metric,
        "cells": [
            _cell_record(cell, groups[cell], metric, (agents or {}).get(cell.agent, Agent))
            for cell in ordered
        ],
        "pooled": _pooled(groups, metric),
        "paired": _paired(groups, metric) if paired else [],
        "settings": sorted({row["settings"] for rows in groups.values() for row in rows}),
    }


def _cell_record(cell: Cell, rows: Sequence[dict], metric: str, agent: Agent | type[Agent]) -> dict:
    record, questions = asdict(cell) | _mean_of(rows, metric), _by_question(rows).values()
    for name in METRICS:
        # rows of an earlier version lack some, and an agent may give none of its own
        if all(row.get(name) is not None for row in rows):
            record[name] = fmean(fmean(row[name] for row in samples) for samples in questions)
    counts = Counter()
    for row in rows:
        counts.update(row.get("counts") or {})
    rates = {
        name: round(counts[above] / counts[below], 4) if counts[below] else None
        for name, (above, below) in agent.rates.items()
        if {above, below} & {*counts}
    }
    found = {"counts": dict(counts), "rates": rates}
    return record | {name: values for name, values in found.items() if values}


def question_key(row: dict) -> tuple:
    """Return what tells a question from others: kind, length, id, task."""
    return row["question"], row["length"], row["id"], row["task"]


def _by_question(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(question_key(row), []).append(row)
    return found


def _mean_of(rows: Iterable[dict], metric: str) -> dict:
    """Return the `_mean` over the questions of rows, the samples of each averaged first."""
    questions = _by_question(rows).values()
    return _mean([fmean(row[metric] for row in samples) for samples in questions], questions)


def _mean(values: Sequence[float], rows: Iterable[Sequence[dict]], least: float = 0.0) -> dict:
    """Return n, mean, low and high of values, each of some rows; where several share a document,
    documents, too: how many of these there are, over which the interval is then."""
    documents = _documents(rows)
    low, high = interval(values, documents, least)
    found = {"n": len(values), "mean": fmean(values), "low": low, "high": high}
    n = len({*documents})
    return found | ({"documents": n} if n < len(documents) else {})


def _documents(questions: Iterable[Sequence[dict]]) -> list[object]:
    """Return for each question, given by its rows, a name of its document.

    One that was asked about several documents, as at several lengths, makes these one, since its
    answers are not independent. Rows of an early version name no document: each has its own.
    """
    parents: dict[object, object] = {}

    def root(name: object) -> object:
        while (parent := parents.setdefault(name, name)) != name:
            name = parent
        return name

    asked = []
    for rows in questions:
        asked.append((rows[0]["question"], rows[0]["id"]))
        for row in rows:
            if document := row.get("document"):
                parents[root(asked[-1])] = root(document)
    return [*map(root, asked)]


def _pooled(groups: Mapping[Cell, Sequence[dict]], metric: str) -> list[dict]:
    """Return the records of the kinds that are pooled, where there are several of them."""
    pools: dict[Cell, list[Sequence[dict]]] = {}
    for cell, rows in groups.items():
        if name := pool_of(cell.question):
            pools.setdefault(replace(cell, question=name), []).append(rows)
    return [
        asdict(cell) | _mean_of(chain.from_iterable(kinds), metric)
        for cell, kinds in pools.items()
        if len(kinds) > 1
    ]


def _paired(groups: Mapping[Cell, Sequence[dict]], metric: str) -> list[dict]:
    """Compare the leading agent with every other one, and each other one with itself before
    training, cell by cell."""
    agents = dict.fromkeys(cell.agent for cell in groups)
    lead = lead_of(agents)
    differences = []
    for cell, rows in groups.items():
        before_training = (f"{cell.agent}@untrained", f"untrained {cell.agent}")
        for rival in agents:
            if rival != lead and (cell.agent == lead or rival in before_training):
                against = groups.get(replace(cell, agent=rival), ())
                if difference := compare(rows, against, metric):
                    place = {"a": cell.agent, "b": rival} | asdict(cell)
                    del place["agent"]
                    differences.append(place | difference)
    return differences


def compare(a: Iterable[dict], b: Iterable[dict], metric: str = "sub_em") -> dict:
    """Return the `_mean` of `a` minus `b`, question by question, on those that they have in common;
    {} without any. Each side has rows of one agent and one temperature."""
    left, right = _by_question(a), _by_question(b)
    pairs = [(left[key], right[key]) for key in left if key in right]
    differences = [
        fmean(row[metric] for row in ours) - fmean(row[metric] for row in theirs)
        for ours, theirs in pairs
    ]
    return _mean(differences, [ours + theirs for ours, theirs in pairs], -1.0) if pairs else {}


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_summary(path: Path, summary: dict) -> None:
    """Write a summary as JSON; ValueError for NaN and infinities."""
    write_text(path, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


# ---------------------------------------------------------------- questions seen in training


class Overlap:
    """Count how many of the questions asked a policy was trained on, by their text, not their id.

    look: False skips the search for the questions of the policy's training.
    """

    def __init__(self, policy: str, agents: Sequence[str], look: bool = True):
        self.known = trained_on(settings_folder(policy)) if policy and look else {}
        self.about = {"policy": policy, "agents": [*agents], "known": len(self.known)}
        # name of the questions -> digests: documents of every length ask the same questions
        self.asked: dict[str, set[str]] = {}

    def add(self, question: str, tasks: Sequence[Task]) -> str:
        """Count the questions of a column; return a warning when the first of them was seen."""
        asked = self.asked.setdefault(question, set())
        warned = bool(asked & self.known.keys())
        asked.update(task.question_digest for task in tasks)
        return "" if warned else _warning(self.summary(), question)

    def summary(self) -> dict:
        """Return {policy, agents, known: questions of its training, questions: {name: {asked,
        seen}}}."""
        counts = {
            name: {"asked": len(asked), "seen": len(asked & self.known.keys())}
            for name, asked in self.asked.items()
        }
        return self.about | {"questions": counts}


def _warning(policy: dict, question: str) -> str:
    """Warn about the questions of this name, by an entry of summary["trained_on"]; "" of none."""
    n = policy["questions"][question]
    if not n["seen"]:
        return ""
    return (
        f"Warning: {n['seen']:,} of the {n['asked']:,} questions {question!r} are among those that "
        f"{policy['policy']} ({', '.join(policy['agents'])}) was trained on."
    )


def overlaps(summary: dict) -> list[str]:
    """Return the warnings on questions seen in training."""
    policies = summary.get("trained_on", ())
    return [
        text for policy in policies for n in policy["questions"] if (text := _warning(policy, n))
    ]


# ---------------------------------------------------------------- how numbers are written

FEW = 8  # questions: what fewer say is faint


def percent(share: float, sign: str = "") -> str:
    """Write a share, or with a sign + the difference of two, on the one scale of all reports.

    >>> percent(0.375), percent(-0.125, "+"), percent(-0.0)
    ('37.5', '-12.5', '0.0')
    """
    return f"{round(100 * share, 1) + 0.0:{sign}.1f}"  # + 0.0: no -0.0


def bounds(record: Mapping[str, float], between: str = "–", sign: str = "") -> str:
    """Write the interval of a record, in whole per cent.

    >>> bounds({"low": 0.118, "high": 0.766}), bounds({"low": -0.1, "high": 0.004}, " … ", "+")
    ('12–77', '-10 … +0')
    """
    return between.join(f"{round(100 * record[end]) + 0:{sign}d}" for end in ("low", "high"))


def count(record: Mapping[str, float]) -> str:
    """Write how many questions a record is about, and where they share a single document, that.

    >>> count({"n": 1540, "documents": 10}), count({"n": 16, "documents": 1})
    ('n 1,540', 'n 16, one document')
    """
    return f"n {record['n']:,}" + ", one document" * (record.get("documents") == 1)


def measured(summary: dict) -> str:
    """Return what the mean over questions is of, in words and by its name in the files."""
    return f"{WORDS.get(summary['metric'], 'mean')} ({summary['metric']})"


# ---------------------------------------------------------------- tables


def labelled(summary: dict, agent: str) -> str:
    """Return an agent's name with its settings that are not the usual ones: "bm25 (top_k 2)"."""
    altered = summary.get("altered", {}).get(agent)
    return f"{agent} ({altered})" if altered else agent


def by_length(summary: dict) -> dict[str, dict[tuple[str, str], dict[int, dict]]]:
    """Return the records of a summary, pooled ones last, as a table for each kind of question:
    (agent, temperature) -> length -> record."""
    tables: dict[str, dict[tuple[str, str], dict[int, dict]]] = {}
    for record in (*summary["cells"], *summary.get("pooled", ())):
        names = labelled(summary, record["agent"]), record["temperature"]
        table = tables.setdefault(record["question"], {})
        table.setdefault(names, {})[record["length"]] = record
    return tables


def _lengths(summary: dict) -> list[int]:
    return sorted({record["length"] for record in summary["cells"]})


def markdown_of(summary: dict) -> str:
    """Return table.md: accuracy in percent with 95 % intervals by length, a row per kind of
    question, agent and temperature; no text leaves its cell."""
    lengths = _lengths(summary)
    rows = [
        ["question", "agent", "temp.", *(f"{n:,}" for n in lengths)],
        ["---"] * (3 + len(lengths)),
    ]
    for question, table in by_length(summary).items():
        for names, records in table.items():
            texts = {
                n: "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * r[x] for x in ("mean", "low", "high")))
                for n, r in records.items()
            }
            rows.append([question, *names, *(texts.get(n, "") for n in lengths)])
    lines = ([text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows)
    caption = f"{measured(summary)} in per cent by {summary['unit']}, 95 % interval; "
    caption += " ".join([f"{_about(summary)}.", *overlaps(summary)])
    return clean("\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", caption, ""]))


def _about(summary: dict) -> str:
    """Say what a table's intervals are over, and how often something went wrong."""

    def span(numbers: Iterable[int]) -> str:
        sizes = sorted({*numbers}) or [0]
        return f"{sizes[0]:,}" + f" to {sizes[-1]:,}" * (len(sizes) > 1)

    records = summary["cells"]
    parts = [f"n = {span(record['n'] for record in records)} questions a cell"]
    if documents := {record["documents"] for record in records if "documents" in record}:
        over = "intervals over documents where questions share one"
        parts.append(f"{over} ({span(documents)} a cell)")
        if 1 in documents:
            parts.append("of a single document over its questions, as if they were independent")
    n = sum(record["n"] for record in records)
    wrong = {"failed": "failures", "unformed": "answers without the form asked for"}
    for name, words in wrong.items():
        if times := sum(record.get(name, 0) * record["n"] for record in records):
            parts.append(f"{words}, counted as wrong: {times:,.4g} of {n:,}")
    if n := sum(record.get("cut", 0) > 0 for record in records):
        parts.append(f"documents not read whole in {n} of {len(records)} cells")
    return "; ".join(parts)


def table(summary: dict, width: int = 80) -> Group:
    """Build the table of accuracy in per cent by length for a terminal of `width` columns.

    Where intervals do not fit (five lengths in 80 columns), it shows means alone.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    tables, lengths = by_length(summary), _lengths(summary)
    names = [f" {name}" for each in tables.values() for name, _ in each]
    longest = max(map(len, [*tables, *names]), default=0)
    intervals = longest + 5 + 12 * len(lengths) <= max(width, 80)

    def shown(record: dict | None) -> Text | str:
        if record is None:
            return ""
        ends = f" {bounds(record, '-')}" * intervals
        return Text.assemble(f"{100 * record['mean']:.0f}", (ends, "dim"))

    result = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("", "T"):
        result.add_column(name, no_wrap=True)
    for length in lengths:
        result.add_column(f"{length:,}", justify="right", no_wrap=True)
    for question, each in tables.items():
        result.add_row(Text(clean(question), "bold"))
        for (name, temperature), records in each.items():
            row = (shown(records.get(length)) for length in lengths)
            result.add_row(Text(f" {clean(name)}"), Text(clean(temperature)), *row)
    title = f"{measured(summary)} in per cent by {summary['unit']}"
    about = " and 95 % interval" if intervals else " (intervals: table.md)"
    about = f"mean{about}; T: temperature, 0.0 is greedy; {_about(summary)}"
    # a title or a caption of the table would be as narrow as the table
    return Group(Text(clean(title), "italic"), result, Text(clean(about), "dim italic"))
