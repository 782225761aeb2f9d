"""What is shown of a training: its reward and what else metrics.csv says of each step.

Holds: `Training`, `read_training`, `amiss`, `troubles`, `steps_section`; `whole_rows`. Leaves out:
who writes these files (report/runlog.py), plots (report/plots.py). No torch.
Exercise it: `python cli.py train --steps 3`. Read next: report/page.py.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from report import plots
from report.markup import Markup, Section, figures

# title of a plot -> line -> column of metrics.csv
SIGNAL, MISMATCH = (
    "Groups whose readings have different rewards",
    "Sampler and trainer, difference of log-probs",
)
PLOTS = {
    SIGNAL: {"with signal": "groups_without_signal"},
    MISMATCH: {"at most": "mismatch", "on average": "mismatch_mean"},
    "Memory, tokens a turn": {"memory": "memory_length", "written": "memory_tokens"},
    "Tokens of a step": {
        "read": "read_tokens",
        "written": "written_tokens",
        "computed by the trainer": "computed_tokens",
    },
    "Seconds of a step": {"rollout": "rollout_s", "switch": "switch_s", "update": "update_s"},
    "GPU memory, GiB at most": {"peak": "peak_gib"},
}
LOGARITHMIC = (MISMATCH, "Tokens of a step")


@dataclass(frozen=True, slots=True)
class Training:
    """What the files of a training say, step by step."""

    measure: str  # reward or, on demonstrations, loss
    rewards: Sequence[tuple[int, float, str]] = ()  # (step, reward, sections of the tasks or "")
    errors: Sequence[float] = ()  # standard error of each reward; nan: unknown
    validation: Sequence[tuple[int, float]] = ()  # (step, score)
    rows: Sequence[dict[str, str]] = ()  # of metrics.csv

    @property
    def lengths(self) -> set[int]:
        """Document lengths, in sections, that it went through."""
        return {int(sections) for _, _, sections in self.rewards if sections}

    def drawn(self) -> Markup:
        """Draw the reward by step; "" without any."""
        if not self.rewards:
            return Markup()
        return plots.reward(self.rewards, self.validation, self.measure, self.errors)

    @property
    def note(self) -> str:
        """How to read what is drawn."""
        parts = [TROUBLES[kind] for kind in troubles(self.rows)]
        if any(map(isfinite, self.errors)):
            parts.append("Band: two standard errors of a step's mean, by the spread of its groups.")
        if len(self.lengths) > 1:
            parts.append("Dotted lines: training goes on to longer documents.")
        return " ".join(parts)


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


def steps_section(training: Training) -> Section:
    """Show what else is known of each step; a line that is 0 everywhere or unknown is left out."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, columns in PLOTS.items():
        for name, column in columns.items():
            points = numbers(training.rows, column)
            if title == SIGNAL:
                points = [(step, 1 - without) for step, without in points]
            if any(value for _, value in points) or (points and title == SIGNAL):
                panels.setdefault(title, {})[name] = points
    return Section(
        "Training, step by step",
        figures(plots.curves(panels, "training step", "", [SIGNAL], LOGARITHMIC)),
        "A group whose readings all have the same reward teaches nothing. "
        "Sampler and trainer: by how much the log-probs of sampled tokens differ between the two.",
    )


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


def read_training(folder: Path, settings: dict, measure: str) -> Training:
    """Read metrics.csv and validation.csv of a run's folder as far as they are there.

    settings: of config.yaml. measure: the column of metrics.csv that is drawn.
    """
    rows = whole_rows(folder / "metrics.csv")
    levels, errors = dict(numbers(rows, "level")), dict(numbers(rows, f"{measure}_se"))
    sections = _sections_of(settings)
    rewards = [
        (step, value, sections(int(levels.get(step, 0)))) for step, value in numbers(rows, measure)
    ]
    validation = numbers(whole_rows(folder / "validation.csv"), "score")
    known = [errors.get(step, float("nan")) for step, *_ in rewards]
    return Training(measure, rewards, known, validation, rows)


def _sections_of(settings: dict) -> Callable[[int], str]:
    """Return what gives the sections of the tasks of a level; "" if the settings do not say, or if
    the training was not on generated English."""
    try:
        run = settings["run"]
        lengths = [int(n) for n in run["lengths"]] if run["data"] == "world" else []
    except (KeyError, TypeError, ValueError):
        lengths = []
    return lambda level: str(lengths[level]) if level < len(lengths) else ""
