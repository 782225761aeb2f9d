"""What is shown of a training: its reward and what else metrics.csv says of each step.

Holds: `Training`, `read_training`, `amiss`, the sections of the page about it; `whole_rows`.
Leaves out: who writes these files (report/runlog.py), plots (report/plots.py). No torch.
Exercise it: `python cli.py train --steps 3`. Read next: report/page.py.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from report import plots
from report.markup import Markup, Section, figures

Rewards = Sequence[tuple[int, float, str]]  # (step, reward, sections of the tasks or "")

# title of a plot -> line -> column of metrics.csv; of memory the first one that is there
SIGNAL = "Share of groups with signal"
MEMORY = "Memory, tokens a turn"
PLOTS = {
    SIGNAL: {"with signal": "groups_without_signal"},
    "Sampler and trainer, difference of log-probs": {
        "at most": "mismatch",
        "on average": "mismatch_mean",
    },
    MEMORY: {"memory": "memory_length", "written": "memory_tokens"},
    "Tokens of a step": {
        "read": "read_tokens",
        "written": "written_tokens",
        "computed by the trainer": "computed_tokens",
    },
    "Seconds of a step": {"rollout": "rollout_s", "switch": "switch_s", "update": "update_s"},
    "GPU memory, GiB at most": {"peak": "peak_gib"},
}
LOGARITHMIC = ("Sampler and trainer, difference of log-probs", "Tokens of a step")


@dataclass(frozen=True, slots=True)
class Training:
    """What the files of a training say, step by step."""

    measure: str  # reward or, on demonstrations, loss
    rewards: Rewards = ()
    errors: Sequence[float] = ()  # standard error of each reward; nan: unknown
    validation: Sequence[tuple[int, float]] = ()  # (step, score)
    rows: Sequence[dict[str, str]] = ()  # of metrics.csv

    @property
    def lengths(self) -> set[int]:
        """Document lengths, in sections, that it went through."""
        return {int(sections) for _, _, sections in self.rewards if sections.isdigit()}

    def drawn(self) -> Markup:
        """Draw the reward by step; "" without any."""
        if not self.rewards:
            return Markup()
        return plots.reward(self.rewards, self.validation, self.measure, self.errors)

    @property
    def note(self) -> str:
        """How to read what is drawn."""
        band = any(map(isfinite, self.errors))
        parts = [
            "Band: the 95 % interval of a step's mean, by the spread of its groups."
            if band
            else "",
            "Dotted lines: training goes on to longer documents." if len(self.lengths) > 1 else "",
        ]
        return " ".join(filter(None, parts))


def amiss(metrics: Mapping[str, float]) -> list[str]:
    """Say what of a step, or of all, was not learnt from: updates skipped, trajectories without a
    reward."""
    skipped, unrewarded = (int(metrics.get(name, 0)) for name in ("skipped_updates", "unrewarded"))
    updates = "update" if skipped == 1 else "updates"
    trajectories = "trajectory" if unrewarded == 1 else "trajectories"
    return [
        *([f"{skipped} {updates} skipped: the gradient is not finite"] if skipped else []),
        *([f"{unrewarded} {trajectories} left out, without a reward"] if unrewarded else []),
    ]


def rewards_section(training: Training, drawn: Markup) -> Section:
    return Section(
        f"{training.measure.capitalize()} by training step", figures(drawn), training.note
    )


def steps_section(training: Training) -> Section:
    """Show what else is known of each step."""
    panels = {title: _lines(training.rows, columns) for title, columns in PLOTS.items()}
    if (memory := panels[MEMORY]) and "memory" in memory:
        panels[MEMORY] = {"memory": memory["memory"]}
    if signal := panels[SIGNAL].get("with signal"):
        panels[SIGNAL] = {"with signal": [(step, 1 - without) for step, without in signal]}
    panels = {title: lines for title, lines in panels.items() if lines}
    return Section(
        "Training, step by step",
        figures(plots.by_step(panels, LOGARITHMIC)),
        "A group without signal, whose trajectories all have the same reward, teaches nothing. "
        "Sampler and trainer: by how much the log-probs of sampled tokens differ between the two.",
    )


def _lines(
    rows: Sequence[dict[str, str]], columns: dict[str, str]
) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each line; a line that is 0 everywhere or unknown is left out."""
    lines = {}
    for name, column in columns.items():
        points = []
        for row in rows:
            try:
                points.append((int(row["step"]), float(row[column])))
            except (KeyError, ValueError):
                continue
        points = [(step, value) for step, value in points if isfinite(value)]
        if any(value for _, value in points) or (points and column == "groups_without_signal"):
            lines[name] = points
    return lines


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


def read_training(folder: Path, settings: dict, measure: str) -> Training:
    """Read metrics.csv and validation.csv of a run's folder as far as they are there.

    settings: of config.yaml. measure: the column of metrics.csv that is drawn.
    """
    rows = whole_rows(folder / "metrics.csv")
    rewards, errors = load_rewards(rows, level_lengths(settings), measure)
    return Training(measure, rewards, errors, load_validation(folder), rows)


def load_rewards(
    rows: Sequence[dict[str, str]], lengths: Sequence[int], column: str = "reward"
) -> tuple[list[tuple[int, float, str]], list[float]]:
    """Return (step, reward, sections of the tasks or "") and the standard error of each.

    Rows without step or reward are skipped. column: another measure. lengths: sections by level,
    for files that have only the level.
    """

    def of_level(level: int) -> str:
        return str(lengths[level]) if level < len(lengths) else ""

    rewards, errors = [], []
    for row in rows:
        try:
            step, reward, level = int(row["step"]), float(row[column]), int(row.get("level") or 0)
            error = float(row.get(f"{column}_se") or "nan")
        except (KeyError, TypeError, ValueError):
            continue
        if isfinite(reward):
            rewards.append((step, reward, row.get("sections") or of_level(level)))
            errors.append(error)
    return rewards, errors


def load_validation(folder: Path) -> list[tuple[int, float]]:
    """Return (step, score) from validation.csv; torn or foreign lines are skipped."""
    scores = []
    for row in whole_rows(folder / "validation.csv"):
        try:
            scores.append((int(row["step"]), float(row["score"])))
        except (KeyError, TypeError, ValueError):
            continue
    return [(step, score) for step, score in scores if isfinite(score)]


def level_lengths(settings: dict) -> list[int]:
    """Return the sections of the tasks of each level.

    [] if the settings do not say, or if the training was not on generated English.
    """
    try:
        run = settings["run"]
        return [int(n) for n in run["lengths"]] if run["data"] == "world" else []
    except (KeyError, TypeError, ValueError):
        return []
