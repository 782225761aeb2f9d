"""Summarise rows: means with intervals, paired differences, where answers were lost, tables.

Holds: `summarise`, `bootstrap`, `wilson`, `calibration`, `compare`; `Overlap` and `overlaps`,
questions seen in training; `cells`, and tables for the terminal, Markdown and CSV. Leaves out: how
rows are made (eval.py), the page (report/page.py), published numbers (report/published.py). No
torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from config.errors import UserError, clean
from config.files import replacing
from config.realmodels import settings_folder
from data import Task, strip_thinking
from memagent import Agent
from report.counted import counted
from report.rows import FATES, Cell, fate
from tasks.episodes import pool_of
from tasks.seen import trained_on

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


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
    low: float  # of the 95 % interval, Wilson's
    high: float
    error: float | None  # None: no answer says how sure it is
    n: int


def calibration(rows: Iterable[tuple[float | None, bool]], size: int = 100) -> Calibration:
    """Return accuracy and RMS calibration error of answers: (confidence in percent, right?).

    The error is that of Hendrycks et al. (arXiv 1812.04606): answers in the order of their
    confidence, in bins of `size`, the rest with the last bin; in each the square of the mean
    confidence less the share that is right, averaged over answers. Here every bin counts; their
    code, which Humanity's Last Exam uses, leaves out the last one, the most confident answers. An
    answer without a confidence (None) counts for the accuracy alone. ValueError: no rows.

    >>> round(calibration([(90.0, True), (70.0, False)]).error, 6)
    0.3
    """
    rows = [*rows]
    if not rows:
        raise ValueError("no answers")
    accuracy = fmean(right for _, right in rows)
    sure = sorted((row for row in rows if row[0] is not None), key=lambda row: row[0])
    squares = 0.0
    for start in range(0, max(1, len(sure) // size) * size, size):
        last = start + 2 * size > len(sure)
        part = sure[start:] if last else sure[start : start + size]
        if part:
            gap = fmean(c / 100 for c, _ in part) - fmean(right for _, right in part)
            squares += len(part) * gap * gap
    error = (squares / len(sure)) ** 0.5 if sure else None
    return Calibration(accuracy, *wilson(accuracy, len(rows)), error, len(rows))


def bootstrap(
    values: Sequence[float],
    documents: Sequence[str] = (),
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the middle 95 % of the means of `resamples` draws with replacement.

    Drawn are values or, where several belong to one document, whole documents: questions about one
    text are not independent. documents: of each value, () if they are all different. With fewer
    than some twenty documents such an interval is still too narrow.
    Equal values would give an interval of width 0, however few they are: theirs is Wilson's.
    """
    import numpy as np

    values = np.asarray(values, dtype=float)
    if (values == values[0]).all():
        return wilson(float(values[0]), len(values))
    sums, sizes = values, np.ones(len(values))
    if 1 < len({*documents}) < len(values):
        _, of = np.unique(np.asarray(documents), return_inverse=True)
        sums, sizes = np.bincount(of, weights=values), np.bincount(of)
    # not all draws at once: a set may have thousands of questions
    at_once = max(1, 2**20 // len(sums))
    rng, means = np.random.default_rng(seed), []
    for start in range(0, resamples, at_once):
        draws = rng.integers(0, len(sums), (min(at_once, resamples - start), len(sums)))
        means.append(sums[draws].sum(axis=1) / sizes[draws].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975)).tolist()
    return low, high


METRICS = (
    "sub_em", "em", "f1", "reward", "bleu1", "official_em", "sub_em_upstream", "failed", "unformed",
    "empty", "tokens_read", "tokens_written", "document_tokens", "seconds", "mib",
    "memory_tokens", "memory_cut", "memory_empty", "cut", "model_calls",
)  # fmt: skip
COSTS = ("tokens_read", "tokens_written", "model_calls", "seconds")
# rates of an agent that are of one search: its seconds, and texts that an embedder has cut
SEARCH = {"search_s", "search_cut"}
OF_SEARCHES = {"search_ms": "ms a search", "search_cut": "texts cut a search"}
DEPTHS = 10  # bins of evidence depth, and of the places where answers were lost

Questions = Mapping[str, Sequence[dict]]  # id of a question -> its rows, one per sample


def summarise(
    rows: Iterable[dict],
    unit: str = "sections",
    metric: str = "sub_em",
    paired: bool = True,
    agents: Mapping[str, Agent] | None = None,
) -> dict:
    """Return {unit, metric, cells, paired, settings} of the rows that `evaluate` returned.

    unit: what lengths count: sections, documents or tokens. agents: by name, for their rates and
    splits. cells is a flat list, one record per cell, as `pandas.DataFrame(summary["cells"])`
    takes it:

    agent, question, temperature, length
        the cell
    n, mean, low, high
        questions; the mean of `metric` over them, the samples of a question averaged first; its
        95 % interval by bootstrap over the questions, or over their documents, see `bootstrap`
    documents, low_questions, high_questions
        where several questions share a document: how many these are, and the interval over the
        questions, as if these were independent
    each of `METRICS`
        the mean over the same questions, where all rows have it. failed: the trajectory has an
        error. Of the others, unformed: the response lacks the required form; empty: nothing
        follows the thinking. memory_cut, memory_empty: turns. tokens, seconds, model_calls: of one
        trajectory. cut: tokens of the document that a cap or a window kept from the agent. mib:
        the maximum instead of the mean
    depths, fates, occupancy
        where there are any. {n, mean}: trajectories and their mean by tenths of the document, by
        the depth of the first piece of evidence. {wrong, one count for each of `rows.FATES`, left}:
        of the trajectories that are not entirely right; left: where answers were lost, by tenths.
        {mean, most}: tokens of the memory by parts of the document, and the maximum
    counts, rates, splits
        of agents that count something: sums over the trajectories; the agent's own rates of them;
        {count: {with, without: {n, mean}}}, the trajectories with and without any
    episodes, tallies, curves
        of agents that list counts: see `counted.counted`. Of an agent that keeps what it makes of
        a document, the trajectories that have read one
    first, later
        of such an agent, if some of its trajectories found their document read: {n, each of
        `COSTS`}, means over the trajectories that paid for reading it, and over the others
    search_ms, search_cut
        of one search, of agents with the rates `SEARCH`: milliseconds; texts that the embedder did
        not read to their end, if there were any

    pooled is a list of records of the kinds that are pooled, see `episodes.pool_of`: the cell, n,
    mean, and the intervals as above.
    paired is a list of {a, b, question, temperature, length, mean, n, low, high}: differences on
    the same questions, see `_paired`.
    """
    groups: dict[Cell, dict[str, list[dict]]] = {}
    settings: set[str] = set()
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
        cell = Cell.of(row)
        groups.setdefault(cell, {}).setdefault(row["id"], []).append(row)
        settings.add(row["settings"])
    by_length = sorted(groups, key=lambda cell: cell.length)  # stable: else the order of the rows
    agents = agents or {}
    return {
        "unit": unit,
        "metric": metric,
        "cells": [
            _cell_record(cell, groups[cell], metric, agents.get(cell.agent)) for cell in by_length
        ],
        "pooled": _pooled(groups, metric),
        "paired": _paired(groups, metric) if paired else [],
        "settings": sorted(settings),
    }


def _cell_record(cell: Cell, questions: Questions, metric: str, agent: Agent | None) -> dict:
    """Return the record of one cell; parts without content are left out."""
    samples = questions.values()
    record = asdict(cell) | _mean(samples, metric)
    rows = [row for of_question in samples for row in of_question]
    for name in METRICS:
        average = max if name == "mib" else fmean
        # rows of an earlier version lack some, and an agent may give none of its own
        if all(row.get(name) is not None for row in rows):
            record[name] = average(average(row[name] for row in rows) for rows in samples)
    counts = _counts(rows)
    keeps = agent is not None and agent.keeps
    reading = [row for row in rows if row.get("sections")] if keeps else rows
    later = [row for row in rows if not (row.get("sections") or row["error"])] if keeps else []
    parts = {
        "depths": _by_depth(rows, metric),
        "fates": _fates(rows, metric),
        "occupancy": _occupancy(rows),
        "counts": counts,
        "rates": _rates(counts, agent),
        "splits": _splits(rows, agent, metric),
        "first": _paid(reading) if later else {},
        "later": _paid(later),
        "search_ms": _of_search(counts, agent, "search_s", 1000),
        "search_cut": _of_search(counts, agent, "search_cut"),
    } | counted([row.get("counts") or {} for row in reading], agent)
    return record | {name: part for name, part in parts.items() if part}


def _mean(samples: Collection[Sequence[dict]], metric: str) -> dict:
    """Return n, mean and intervals of questions, each a list of its rows."""
    values = [fmean(row[metric] for row in rows) for rows in samples]
    documents = [_document(rows[0]) for rows in samples]
    low, high = bootstrap(values, documents)
    mean = {"n": len(values), "mean": fmean(values), "low": low, "high": high}
    if 1 < len({*documents}) < len(values):
        low, high = bootstrap(values)
        mean |= {"documents": len({*documents}), "low_questions": low, "high_questions": high}
    return mean


def _pooled(groups: Mapping[Cell, Questions], metric: str) -> list[dict]:
    """Return the records of the kinds that are pooled, where there are several of them."""
    pools: dict[Cell, list[Questions]] = {}
    for cell, questions in groups.items():
        if name := pool_of(cell.question):
            pools.setdefault(replace(cell, question=name), []).append(questions)
    return [
        asdict(cell) | _mean([rows for questions in of for rows in questions.values()], metric)
        for cell, of in pools.items()
        if len(of) > 1
    ]


def with_pooled(summary: dict) -> dict:
    """Return a summary with the pooled records as further cells, for tables of means.

    One whose questions share documents comes twice, the second time with the other interval.
    """
    records = []
    for record in summary.get("pooled", ()):  # an earlier version's summary has none
        records.append(record)
        if "documents" in record:
            low, high = record["low_questions"], record["high_questions"]
            name = f"{record['question']}, interval over questions"
            records.append(record | {"question": name, "low": low, "high": high})
    return summary | {"cells": [*summary["cells"], *records]}


def _document(row: dict) -> str:
    """Return what the questions about one document have in common; of older rows, nothing."""
    return row.get("document") or f"{row['id']} {row['task']}"


def _by_depth(rows: Sequence[dict], metric: str) -> dict:
    """Return trajectories and their mean by the depth of their first piece of evidence."""
    bins: list[list[float]] = [[] for _ in range(DEPTHS)]
    for row in rows:
        if row.get("depths"):
            bins[min(DEPTHS - 1, int(min(row["depths"]) * DEPTHS))].append(row[metric])
    if not any(bins):
        return {}
    return {"n": [len(b) for b in bins], "mean": [fmean(b) if b else None for b in bins]}


def _fates(rows: Sequence[dict], metric: str) -> dict:
    """Count what became of the answers of the trajectories that are not entirely right."""
    wrong = [row for row in rows if row[metric] < 1 and not row["error"] and row.get("sections")]
    if not wrong:
        return {}
    left = [0] * DEPTHS
    for row in wrong:
        if fate(row) == "lost":
            depth = (row["held"][-1][0] - 1) / row["sections"]
            left[min(DEPTHS - 1, int(depth * DEPTHS))] += 1
    counts = Counter(map(fate, wrong))
    return {"wrong": len(wrong)} | {name: counts[name] for name in FATES} | {"left": left}


def _occupancy(rows: Sequence[dict]) -> dict:
    """Average the memory's tokens by parts of the document, over curves of the usual length."""
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


def _paid(rows: Sequence[dict]) -> dict:
    """Return how many rows there are and the means of what they cost; {} without any."""
    if not rows:
        return {}
    known = (name for name in COSTS if all(name in row for row in rows))
    return {"n": len(rows)} | {name: fmean(row[name] for row in rows) for name in known}


def _of_search(counts: dict, agent: Agent | None, rate: str, times: int = 1) -> float | None:
    """Return a rate of one search, so many times; None for an agent that does not count it."""
    above, below = agent.rates.get(rate, ("", "")) if agent else ("", "")
    return round(times * counts.get(above, 0) / counts[below], 4) if counts.get(below) else None


def of_searches(summary: dict) -> list[str]:
    """Return which columns of `OF_SEARCHES` there are."""
    return [name for name in OF_SEARCHES if any(True for _ in cells(summary, name))]


def _splits(rows: Sequence[dict], agent: Agent | None, metric: str) -> dict:
    """Return, for each of the agent's `splits`, the means of trajectories with and without any."""
    rows = [row for row in rows if row.get("counts") and row.get("needed", 1)]
    if not rows or agent is None:
        return {}
    splits = {}
    for name in agent.splits:
        for side, wanted in (("with", True), ("without", False)):
            values = [row[metric] for row in rows if (row["counts"].get(name, 0) > 0) == wanted]
            mean = fmean(values) if values else None
            splits.setdefault(name, {})[side] = {"n": len(values), "mean": mean}
    return splits


def _paired(groups: Mapping[Cell, Questions], metric: str) -> list[dict]:
    """Compare agents cell by cell.

    The leading agent (trained, else the first one) is compared with every other agent, and each
    other agent with itself before training.
    """
    agents = list(dict.fromkeys(cell.agent for cell in groups))
    lead = "trained" if "trained" in agents else agents[0] if agents else ""
    differences = []
    for cell, questions in groups.items():
        rivals = [agent for agent in agents if agent != lead]
        if cell.agent != lead:
            before_training = (f"{cell.agent}@untrained", f"untrained {cell.agent}")
            rivals = [agent for agent in rivals if agent in before_training]
        place = {name: value for name, value in asdict(cell).items() if name != "agent"}
        for rival in rivals:
            if against := groups.get(replace(cell, agent=rival)):
                a, b = (
                    [row for rows in side.values() for row in rows] for side in (questions, against)
                )
                if difference := compare(a, b, metric=metric, fail=False):
                    differences.append({"a": cell.agent, "b": rival} | place | difference)
    return differences


def cells(summary: dict, name: str = "") -> Iterator[tuple[Cell, object]]:
    """Yield (cell, its record) of a summary.

    name: yield this field of the record instead, for the cells that have it.
    """
    for record in summary["cells"]:
        if not name or name in record:
            cell = Cell.of(record)
            yield cell, record[name] if name else record


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_summary(path: Path, summary: dict) -> None:
    """Write a summary as JSON, atomically; ValueError for NaN and infinities."""
    write_text(path, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


# ---------------------------------------------------------------- paired differences


def compare(
    a: Iterable[dict], b: Iterable[dict], metric: str = "sub_em", fail: bool = True
) -> dict:
    """Return the mean of `a` minus that of `b` on their common questions: {mean, n, low, high}.

    Each side has rows of one agent and one temperature. The difference is taken question by
    question (kind, length, id, task), samples averaged first, with a 95 % interval by bootstrap
    over the questions, or their documents. Without a common question: {}, or a `UserError` if
    `fail`.
    """
    a = list(a)
    left, right = _values_by_question(a, metric), _values_by_question(b, metric)
    if not (common := [key for key in left if key in right]):
        if fail:
            raise UserError(
                "The two sides have no question in common, there is nothing to compare."
            )
        return {}
    differences = [fmean(left[key]) - fmean(right[key]) for key in common]
    document = {question_key(row): _document(row) for row in a}
    low, high = difference_interval(differences, [document[key] for key in common])
    return {"mean": fmean(differences), "n": len(common), "low": low, "high": high}


def _values_by_question(rows: Iterable[dict], metric: str) -> dict[tuple, list[float]]:
    """Map (kind, length, id, task) to the metric of each sample."""
    values: dict[tuple, list[float]] = {}
    for row in rows:
        values.setdefault(question_key(row), []).append(row[metric])
    return values


def question_key(row: dict) -> tuple:
    return row["question"], row["length"], row["id"], row["task"]


def difference_interval(
    differences: Sequence[float], documents: Sequence[str]
) -> tuple[float, float]:
    """Return the bootstrap interval of a mean difference.

    Of equal differences it is Wilson's, as in `bootstrap`: mirrored for negative ones, and to both
    sides of 0, because a difference, unlike a share, may err in both directions.
    """
    first, n = differences[0], len(differences)
    if first > 0 or any(difference != first for difference in differences):
        return bootstrap(differences, documents)
    if first == 0:
        return -wilson(0.0, n)[1], wilson(0.0, n)[1]
    low, high = wilson(-first, n)
    return -high, -low


# ---------------------------------------------------------------- questions seen in training


class Overlap:
    """Count how many of the questions asked a policy was trained on, by their text, not their id.

    look: False skips the search for the questions of the policy's training.
    """

    def __init__(self, policy: str, agents: Sequence[str], look: bool = True):
        self.policy, self.agents = policy, agents
        self.known = trained_on(settings_folder(policy)) if policy and look else {}
        # name of the questions -> digests: documents of every length ask the same questions
        self.asked: dict[str, set[str]] = {}

    def add(self, question: str, tasks: Sequence[Task]) -> str:
        """Count the questions of a column; return a warning when the first of them was seen."""
        if not self.known or not tasks:
            return ""
        before = self.summary()["questions"].get(question, {"seen": 0})["seen"]
        self.asked.setdefault(question, set()).update(task.question_digest for task in tasks)
        return "" if before else _warning(self.summary(), question)

    def summary(self) -> dict:
        """Return {policy, agents, known, questions: {name: {asked, seen}}}.

        known: number of questions that the policy was trained on.
        """
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


def _warning(policy: dict, question: str) -> str:
    """Return the warning on questions of this name that a policy was trained on, "" if none.

    policy: an entry of summary["trained_on"].
    """
    n = policy["questions"][question]
    if not n["seen"]:
        return ""
    return (
        f"Warning: {n['seen']:,} of the {n['asked']:,} questions {question!r} are among those that "
        f"{policy['policy']} ({', '.join(policy['agents'])}) was trained on."
    )


def overlaps(summary: dict) -> list[str]:
    """Return the warnings on questions seen in training, of a whole evaluation."""
    warnings = (
        _warning(policy, question)
        for policy in summary.get("trained_on", ())
        for question in policy["questions"]
    )
    return [warning for warning in warnings if warning]


# ---------------------------------------------------------------- tables

UNFORMED = "answers without the form asked for, counted as wrong"
PAYS = (
    "Where what an agent makes of a document serves all questions about it, the first of them that "
    "is asked pays for reading it: these and the later ones are also shown apart."
)


def labelled(summary: dict, agent: str) -> str:
    """Return an agent's name with its settings that are not the usual ones: "bm25 (top_k 2)"."""
    own = summary.get("altered", {}).get(agent)
    return f"{agent} ({own})" if own else agent


def markdown_of(summary: dict) -> str:
    """Return the table for a paper, in percent with 95 % intervals.

    A row per kind of question, agent and temperature, a column per length.
    """
    records, shown = dict(cells(summary)), dict(cells(with_pooled(summary)))
    lengths = sorted({cell.length for cell in records})
    lines = [
        f"| question | agent | T | {' | '.join(f'{n:,}' for n in lengths)} |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for question, agent, temperature in dict.fromkeys(
        (cell.question, cell.agent, cell.temperature) for cell in shown
    ):
        row = [shown.get(Cell(agent, question, temperature, n)) for n in lengths]
        first = _plain(question), _plain(labelled(summary, agent)), temperature
        lines.append(f"| {' | '.join((*first, *map(_percent, row)))} |")
    with_failures = sum(share > 0 for _, share in cells(summary, "failed"))
    caption = (
        f"{summary['metric']} in percent by {summary['unit']}, 95 % interval by bootstrap over "
        f"{_drawn(records)}; n = {_n_questions(records)} questions a cell; failures count as wrong "
        f"(there are some in {with_failures} of {len(records)} cells)."
    )
    if with_unformed := sum(share > 0 for _, share in cells(summary, "unformed")):
        caption += f" {UNFORMED.capitalize()}, in {with_unformed} of {len(records)} cells."
    caption = " ".join([caption, *overlaps(summary)])
    return clean("\n".join([*lines, "", caption, "", *_cost_lines(summary), ""]))


def _cost_lines(summary: dict) -> list[str]:
    """Return the lines of a second table, of what the questions of each cell cost."""
    searched = of_searches(summary)
    head = ["question", "agent", "T", summary["unit"], f"{summary['metric']} %", "n"]
    head += ["tokens read", "tokens written", "model calls", "seconds"]
    head += [OF_SEARCHES[name] for name in searched]
    body = []
    for cell, record in cells(summary | {"cells": summary["cells"] + together(summary)}):
        own = [f"{record[name]:.2f}" if name in record else "" for name in searched]
        lines = [("", f"{100 * record['mean']:.1f}" if "mean" in record else "", record, own)]
        lines += [(f", {name}", "", part, [""] * len(own)) for name, part in shares(record)]
        for name, score, of, more in lines:
            about = [_plain(cell.question), _plain(cell.agent) + name, cell.temperature]
            about += [f"{cell.length:,}", score, f"{of['n']:,}"]
            body.append([*about, *costs(of), *more])
    said = "What a question costs, on average."
    if any(shares(record) for _, record in cells(summary)):
        said += f" {PAYS}"
    first, *rows = (f"| {' | '.join(row)} |" for row in (head, *body))
    return [said, "", first, "|" + "---|" * len(head), *rows] if body else []


def shares(record: dict) -> list[tuple[str, dict]]:
    """Return (name, means of `COSTS`) of a cell's trajectories that read their document, and of
    those that found it read; [] where all read it."""
    names = {"first": "first of a document", "later": "later ones"}
    return [(name, record[part]) for part, name in names.items() if part in record]


def together(summary: dict) -> list[dict]:
    """Return a record for each agent, temperature and length with `COSTS` of all kinds of question.

    Only where a document that was read for a question of one kind serves those of others: no kind
    by itself says what a question costs. [] else.
    """
    groups: dict[Cell, list[dict]] = {}
    for cell, record in cells(summary):
        groups.setdefault(replace(cell, question="all kinds together"), []).append(record)
    if not any(shares(record) for _, record in cells(summary)):
        return []
    return [
        asdict(cell)
        | {"n": (n := sum(record["n"] for record in of))}
        | {
            name: sum(record[name] * record["n"] for record in of) / n
            for name in COSTS
            if all(name in record for record in of)
        }
        for cell, of in groups.items()
        if len(of) > 1
    ]


def costs(record: dict) -> list[str]:
    """Format each of `COSTS`; "" for one that is not known."""
    digits = dict(zip(COSTS, (0, 0, 1, 2), strict=True))
    return [f"{record[name]:,.{digits[name]}f}" if name in record else "" for name in COSTS]


def _plain(name: str) -> str:
    """Return a name as a cell of a Markdown table may hold it."""
    return name.replace("|", "\\|").replace("\n", " ")


def _percent(record: dict | None) -> str:
    """Format a mean and its interval in percent, as 97.0 [95.1, 98.2]; "" for an empty cell."""
    if not record:
        return ""
    return f"{100 * record['mean']:.1f} [{100 * record['low']:.1f}, {100 * record['high']:.1f}]"


def _drawn(records: Mapping[Cell, dict]) -> str:
    """Say what intervals are a bootstrap over."""
    numbers = sorted({record["documents"] for record in records.values() if "documents" in record})
    if not numbers:
        return "questions"
    few = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return f"documents where questions share one ({few} a cell)"


def _n_questions(records: Mapping[Cell, dict]) -> str:
    """Return the number of questions of a cell, as "64" or "64 to 128"."""
    sizes = sorted({record["n"] for record in records.values()}) or [0]
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def csv_of(summary: dict) -> str:
    """Return one line per cell, pooled ones too: the cell, n, mean, low, high, all other metrics
    and, of agents that have such, `OF_SEARCHES` and the costs of the `first` and `later`
    trajectories."""
    import csv
    import io

    file = io.StringIO()
    writer = csv.writer(file)
    others = [name for name in METRICS if name != summary["metric"]]
    cell_columns = ["agent", "question", "temperature", summary["unit"]]
    others += of_searches(summary)
    parts = [part for part in ("first", "later") if any(True for _ in cells(summary, part))]
    of_parts = [(part, name) for part in parts for name in ("n", *COSTS)]
    apart = [f"{part}_{name}" for part, name in of_parts]
    writer.writerow([*cell_columns, "n", summary["metric"], "low", "high", *others, *apart])
    for cell, record in cells(with_pooled(summary)):
        columns = ("n", "mean", "low", "high", *others)
        # an earlier version's summary lacks a metric
        line = [*astuple(cell), *(record.get(name, "") for name in columns)]
        writer.writerow([*line, *(record.get(part, {}).get(name, "") for part, name in of_parts)])
    return clean(file.getvalue())


def table(summary: dict, width: int = 80) -> Table:
    """Build the table of accuracy by length for a terminal of `width` columns.

    A line per question, agent and temperature. Where intervals do not fit (five lengths in 80
    columns), it shows means alone.
    """
    from rich.table import Table
    from rich.text import Text

    records, shown = dict(cells(summary)), dict(cells(with_pooled(summary)))
    lengths = sorted({cell.length for cell in records})
    names = {cell.agent: labelled(summary, cell.agent) for cell in shown}
    if max(map(len, names.values()), default=0) + 6 + 12 * len(lengths) > max(width, 80):
        names = {agent: agent for agent in names}  # settings stand in table.md then
    longest = max((max(len(c.question), len(names[c.agent]) + 1) for c in shown), default=0)
    names_and_temperature = longest + 5
    intervals = names_and_temperature + 12 * len(lengths) <= max(width, 80)
    result = Table(
        title=f"{summary['metric']} by {summary['unit']}",
        box=None,
        padding=(0, 1, 0, 0),
        caption=_caption(summary, records, intervals),
    )
    result.add_column("", no_wrap=True)
    result.add_column("T", no_wrap=True)
    for length in lengths:
        result.add_column(f"{length:,}", justify="right", no_wrap=True)
    for question in dict.fromkeys(cell.question for cell in shown):
        result.add_row(Text(clean(question), "bold"))
        for agent, temperature in dict.fromkeys(
            (cell.agent, cell.temperature) for cell in shown if cell.question == question
        ):
            row = [shown.get(Cell(agent, question, temperature, length)) for length in lengths]
            texts = [_table_cell(record, intervals) for record in row]
            result.add_row(Text(f" {clean(names[agent])}"), Text(clean(temperature)), *texts)
    return result


def _caption(summary: dict, records: Mapping[Cell, dict], intervals: bool) -> str:
    """Say below the table what its cells are, and in how many of them something went wrong."""
    about = " and 95 % interval" if intervals else " (intervals: table.md)"
    caption = f"mean{about}, n = {_n_questions(records)} questions a cell"
    if (drawn := _drawn(records)) != "questions":
        caption += f"; intervals over {drawn}"
    with_failures = sum(share > 0 for _, share in cells(summary, "failed"))
    if with_failures:
        caption += f"; failures, counted as wrong, in {with_failures} of {len(records)} cells"
    if with_unformed := sum(share > 0 for _, share in cells(summary, "unformed")):
        caption += f"; {UNFORMED}, in {with_unformed} of {len(records)} cells"
    with_cuts = sum(tokens > 0 for _, tokens in cells(summary, "cut"))
    if with_cuts:
        caption += (
            f"; documents not read whole, by a cap or a window, in {with_cuts} of {len(records)} "
            "cells"
        )
    return caption


def _table_cell(record: dict | None, interval: bool) -> Text | str:
    """Format a mean and, if `interval`, its interval, as .97 .95-.98; "" for an empty cell."""
    from rich.text import Text

    if not record:
        return ""
    low_to_high = f" {_short(record['low'])}-{_short(record['high'])}" if interval else ""
    return Text.assemble(_short(record["mean"]), (low_to_high, "dim"))


def _short(share: float) -> str:
    """Format a share with two decimals and without the leading 0, always three wide: .97, 1.0."""
    return "1.0" if share >= 0.995 else f"{share:.2f}"[1:]
