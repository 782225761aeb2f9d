"""What is shown of a training: its reward by step, from the files of its folder.

Holds: `rewards_section`, `load_rewards`, `load_validation`, `level_lengths`. Leaves out: who writes
these files (report/runlog.py), plots (report/plots.py). No torch.
Exercise it: `python cli.py train --steps 3`. Read next: report/page.py.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path

from report.markup import Markup, Section, figures

Rewards = Sequence[tuple[int, float, str]]  # (step, reward, sections of the tasks or "")


def lengths_of(rewards: Rewards) -> set[int]:
    """Return the document lengths, in sections, that a training went through."""
    return {int(sections) for _, _, sections in rewards if sections.isdigit()}


def rewards_section(rewards: Rewards, measure: str, drawn: Markup) -> Section:
    title = f"{measure.capitalize()} by training step"
    return Section(title, figures(drawn), about_rewards(rewards))


def about_rewards(rewards: Rewards) -> str:
    several = len(lengths_of(rewards)) > 1
    return "Dotted lines: training goes on to longer documents." if several else ""


# ---------------------------------------------------------------- the files of a run


def _csv_rows(path: Path) -> Iterator[dict]:
    """Yield the rows of a CSV file; none if there is no such file."""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from csv.DictReader(text.splitlines())


def load_rewards(
    folder: Path, lengths: Sequence[int], column: str = "reward"
) -> list[tuple[int, float, str]]:
    """Return (step, reward, sections of the tasks or "") from metrics.csv.

    Lines without step or reward, such as a torn last one, are skipped. column: another measure.

    lengths: sections by level, for files that have only the level.
    """

    def of_level(level: int) -> str:
        return str(lengths[level]) if level < len(lengths) else ""

    rewards = []
    for row in _csv_rows(folder / "metrics.csv"):
        try:
            step, reward, level = int(row["step"]), float(row[column]), int(row.get("level") or 0)
        except (KeyError, TypeError, ValueError):
            continue
        if isfinite(reward):
            rewards.append((step, reward, row.get("sections") or of_level(level)))
    return rewards


def load_validation(folder: Path) -> list[tuple[int, float]]:
    """Return (step, score) from validation.csv; torn or foreign lines are skipped."""
    scores = []
    for row in _csv_rows(folder / "validation.csv"):
        try:
            scores.append((int(row["step"]), float(row["score"])))
        except (KeyError, TypeError, ValueError):
            continue
    return [(step, score) for step, score in scores if isfinite(score)]


def level_lengths(config: str) -> list[int]:
    """Return the sections of the tasks of each level, from the text of config.yaml.

    [] if it does not say, or if the training was not on generated English.
    """
    import yaml

    try:
        run = yaml.safe_load(config)["run"]
        return [int(n) for n in run["lengths"]] if run["data"] == "world" else []
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return []
