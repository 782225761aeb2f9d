"""What metrics.csv and validation.csv say of a training, step by step, and what is amiss in it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from report.plots import plot

SERIES_OF_STEPS = {  # title of a plot -> line -> column of metrics.csv
    "Groups whose readings all have the same reward, from which nothing is learnt": {
        "without signal": "groups_without_signal"
    },
    "Sampler and trainer, difference of log-probs": {
        "at most": "mismatch",
        "on average": "mismatch_mean",
    },
    "Memory, tokens a turn": {"memory": "memory_length", "written": "memory_tokens"},
    "Tokens of a step": {
        "read": "read_tokens",
        "written": "written_tokens",
        "computed by the trainer": "computed_tokens",
    },
    "Seconds of a step": {"rollout": "rollout_s", "switch": "switch_s", "update": "update_s"},
    "GPU memory, GiB at most": {"peak": "peak_gib"},
}

# ---------------------------------------------------------------- what is amiss

AMISS = ("skipped_updates", "unrewarded", "faults", "not_shown")  # columns of metrics.csv


def amiss(metrics: Mapping[str, float]) -> list[str]:
    """Say what of a step, or of all, was not learnt from: updates skipped, no reward."""
    skipped, unrewarded, faults, not_shown = (int(metrics.get(name, 0)) for name in AMISS)
    counts = {
        "update{s} skipped: the gradient is not finite": skipped,
        "reading{s} left out, without a reward": unrewarded - faults,
        "reading{s} left out: an engine or a server failed": faults,
        "task{s} left out: not to be demonstrated": not_shown,
    }
    return [f"{n} {words.format(s='s' * (n > 1))}" for words, n in counts.items() if n]


WATCHED = 5  # last steps: what holds in all of them is no accident
TROUBLES = {
    "wrong": "No answer of the last steps was right, so nothing is learnt: warm the policy up by "
    "`sft` first and train what that leaves (--model), or begin with shorter --lengths.",
    "right": "All answers of the last steps were right, so nothing is left to learn: go on with "
    "longer documents (--lengths), or stop here.",
    "alike": "The answers to a question were all alike in the last steps, so nothing is learnt: "
    "sample hotter (--temperature), or more of each (--group-size).",
    "cut": "Nearly all memories are cut at their limit and lose their ends: raise --memory-tokens.",
    "empty": "Nearly all answers are empty: raise --final-tokens, switch thinking off "
    "(--no-thinking), or warm the policy up by `sft` first.",
    "unpaid": "No reading of the last steps had a reward, so nothing is learnt: `show RUN` has the "
    "errors of those that failed.",
    "skipped": "Updates are skipped since their gradients are not finite: lower --lr, or compute "
    "in --dtype float32.",
}
"""What may go wrong, and the remedy."""


def troubles(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return which of `TROUBLES` all of the last `WATCHED` steps have (skipped updates: any).

    rows: of metrics.csv, or metrics as they come.
    """

    def last(column: str) -> list[float]:
        return [value for _, value in numbers(rows[-WATCHED:], column)]

    def least(column: str) -> float:
        return min(values) if len(values := last(column)) == WATCHED else 0.0

    dead, rewards = least("groups_without_signal") == 1, last("reward")
    wrong, right = dead and max(rewards, default=1) < 0.05, dead and min(rewards, default=0) > 0.95
    holds = {
        "wrong": wrong,
        "right": right,
        "alike": dead and rewards and not wrong and not right,
        "unpaid": dead and not rewards,
        "cut": least("memory_cut") > 0.95,
        "empty": least("answer_empty") > 0.95,
        "skipped": any(last("skipped_updates")),
    }
    return [kind for kind, is_so in holds.items() if is_so]


# ---------------------------------------------------------------- the files of a run


def whole_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file that have all columns; [] if there is no such file.

    What follows the last newline is torn: a row may end in the middle of a number.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [row for row in rows if None not in row and None not in row.values()]


def numbers(rows: Sequence[Mapping[str, object]], column: str) -> list[tuple[int, float]]:
    """Return (step, value) of a column; rows without a step or a finite number are skipped."""
    points = []
    for row in rows:
        try:
            step, value = int(row["step"]), float(row[column])
        except (KeyError, ValueError):
            continue
        if isfinite(value):
            points.append((step, value))
    return points


# ---------------------------------------------------------------- the page


def draw_training(folder: Path, rows: Sequence[Mapping[str, str]], measure: str) -> list[Markup]:
    """Draw the measure of a training with its band and its validation, and then what else its
    metrics say. rows: of metrics.csv."""
    values, errors = numbers(rows, measure), dict(numbers(rows, f"{measure}_se"))
    # of shares the band ends at 0 and 1
    low, high = (0, 1) if all(0 <= y <= 1 for _, y in values) else (-inf, inf)
    steps = [
        (x, y, max(low, y - 2 * errors.get(x, 0)), min(high, y + 2 * errors.get(x, 0)))
        for x, y in values
    ]
    window = max(5, len(values) // 15)
    means = [
        (x, fmean(y for _, y in values[max(0, k + 1 - window) : k + 1]))
        for k, (x, _) in enumerate(values)
    ]
    validation = numbers(whole_rows(folder / "validation.csv"), "score")
    lines = {"one step": steps, f"mean of {window}": means, "validation": validation}
    measured = (measure.capitalize(), "training step", f"mean {measure}")
    plots = [plot(lines, *measured, band=True)] if values else []
    for title, columns in SERIES_OF_STEPS.items():
        lines = {name: numbers(rows, column) for name, column in columns.items()}
        plots.append(plot(lines, title, "training step"))
    return [drawn for drawn in plots if drawn]


def gain_in_words(gain: Mapping[str, float]) -> str:
    """Say by how much the last steps differ from the first. gain: of a run's summary."""
    n, change = gain["steps"], gain["last"] - gain["first"]
    interval = ""
    if gain["low"] is not None:
        interval = f" (95 % interval {gain['low']:+.2f} to {gain['high']:+.2f}, over steps)"
    return (
        f"From the first {n} steps to the last {n} the reward changed by {change:+.2f}{interval}."
    )
