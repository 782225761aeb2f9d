"""What metrics.csv and validation.csv say of a training, step by step, and what is amiss in it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path

SIGNAL = "Groups whose readings all have the same reward, from which nothing is learnt"
SERIES_OF_STEPS = {  # title of a plot -> line -> column of metrics.csv
    SIGNAL: {"without signal": "groups_without_signal"},
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


@dataclass(frozen=True, slots=True)
class Training:
    """What the files of a training say, step by step."""

    values: Sequence[tuple[int, float]] = ()  # (step, reward or loss)
    errors: Sequence[float] = ()  # standard error of each; nan: unknown
    validation: Sequence[tuple[int, float]] = ()  # (step, score)
    rows: Sequence[dict[str, str]] = ()  # of metrics.csv


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


AMISS = ("skipped_updates", "unrewarded", "faults", "not_shown")  # columns of metrics.csv


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
    least_reward, most_reward = min(rewards, default=0.0), max(rewards, default=0.0)
    paid = dead and bool(rewards)
    holds = {
        "wrong": paid and most_reward < 0.05,
        "right": paid and least_reward > 0.95,
        "alike": paid and most_reward >= 0.05 and least_reward <= 0.95,
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


def numbers(rows: Sequence[Mapping[str, str]], column: str) -> list[tuple[int, float]]:
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


def read_training(folder: Path, measure: str) -> Training:
    """Read metrics.csv and validation.csv of a run's folder as far as they are there.

    measure: the column of metrics.csv that is drawn.
    """
    rows = whole_rows(folder / "metrics.csv")
    values, errors = numbers(rows, measure), dict(numbers(rows, f"{measure}_se"))
    validation = numbers(whole_rows(folder / "validation.csv"), "score")
    return Training(values, [errors.get(step, nan) for step, _ in values], validation, rows)
