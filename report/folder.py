"""What a run's folder holds at any time: finished, going on, or killed.

What follows the last newline of a file is torn, and dropped. Where summary.json is missing, or says
less than the rows or metrics beside it, the run is summed up from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agents import find
from config.errors import UserError
from config.files import SETTINGS, settings_in
from config.foreign import read_json
from config.gone import is_gone
from config.locks import is_written
from config.terminal import console, next_step, say
from memagent import Agent
from report.reading import thin
from report.records import CELL, is_record, is_wrong, step_records
from report.rows import Cell, latest, lines_in, read_rows
from report.summary import overlaps, summarise, table
from report.training import whole_rows
from report.words import nothing_right
from suites import Suite, known, name_of


@dataclass(slots=True)
class Run:
    """What a page is made of."""

    folder: Path
    summary: dict
    rows: list[dict] = field(default_factory=list)  # of an evaluation, those that are summed up
    records: list[dict] = field(default_factory=list)  # transcripts
    first: list[dict] = field(default_factory=list)  # of a training: those of the first step kept
    config: str = ""  # the text of config.yaml
    status: str = ""  # how far it has come, of a run that is not finished
    title: str = ""


def read_run(folder: Path, running: bool | None = None) -> Run:
    """Read a run's folder. UserError: it holds no training and no evaluation, or damaged files.

    running: whether it goes on; None: if it has a writer.
    """
    path, config = folder / "config.yaml", ""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            config = file.read(SETTINGS + 1)
    settings, rows = settings_of(config), read_rows(folder / "rows.jsonl")
    stored = stored_summary(folder / "summary.json")
    if "eval" in settings:
        # each part had a file of rows of its own
        is_gone("part", settings["eval"].get("part", ""), f"{path}: eval")
        summary, how_far = _of_evaluation(stored, latest(rows), settings["eval"])
    else:
        summary, how_far = _of_training(folder, stored, settings)
    # absent from the summary of a training
    summary = {"metric": "reward", "paired": []} | summary
    run = Run(folder, summary, config=config)
    run.records = transcripts(folder, summary)
    if not summary["cells"]:
        run.records += map(thin, step_records(folder, last=True))
        run.first += map(thin, step_records(folder))
    running = is_written(folder) if running is None else running
    run.status = f"{'Running' if running else 'Stopped'}: {how_far}." if how_far else ""
    run.rows = latest([row for row in rows if row["settings"] in summary.get("settings", ())])
    training = not summary["cells"] and settings.keys() & {"grpo", "sft"}
    kind = "Evaluation " if "eval" in settings else "Training " if training else ""
    run.title = kind + folder.resolve().name
    return run


def settings_of(config: str) -> dict:
    """Return the sections of config.yaml from its text; {} if it is none."""
    sections = {}
    with suppress(ValueError):
        sections = settings_in(config)
    found = sections.items() if isinstance(sections, dict) else ()
    return {name: values for name, values in found if isinstance(values, dict)}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another kind: {error!r}.") from error


def stored_summary(path: Path) -> dict | None:
    """Return the summary that a run has written; None: none yet."""
    if not path.exists():
        return None
    with reading(path):
        summary = read_json(path)
        summary["unit"], [*map(Cell.from_row, summary["cells"])]  # KeyError if it is no summary
    return summary


def _of_training(folder: Path, summary: dict | None, settings: dict) -> tuple[dict, str]:
    """Return the summary of a training, and how far it has come if it is not finished."""
    steps = whole_rows(folder / "metrics.csv")
    section = settings.get("grpo", settings.get("sft", {}))
    with reading(folder / "config.yaml"):
        wanted = int(section.get("steps", 0))
    if summary is None and not (steps or section):
        raise UserError(
            f"{folder} holds no run: there is neither summary.json nor a config.yaml of one."
        )
    if steps and (summary is None or summary.get("steps", len(steps)) != len(steps)):
        from report.runlog import summary as sum_up

        with reading(folder / "metrics.csv"):
            summary = sum_up(folder)
    summary = summary or {"unit": "sections", "cells": []}
    unfinished = len(steps) < wanted and not summary["cells"]
    return summary, f"step {len(steps):,} of {wanted:,}" if unfinished else ""


def _of_evaluation(summary: dict | None, rows: Sequence[dict], settings: dict) -> tuple[dict, str]:
    """Return the summary of an evaluation, and how far it has come if it is not finished: where
    rows have been written since the summary, of other cells or of more questions."""
    questions: dict[Cell, set] = {}
    for row in rows:
        questions.setdefault(Cell.from_row(row), set()).add((row["id"], row["task"]))
    stored = {Cell.from_row(cell): cell.get("n") for cell in summary["cells"]} if summary else {}
    if summary and not any(stored.get(cell, 0) < len(each) for cell, each in questions.items()):
        return summary, ""
    suite = (known(name_of(settings)) or Suite)()
    summary = summarise(rows, suite.unit, suite.metric, agents=agents_of(rows))
    return summary, f"{len(rows):,} answers"


def agents_of(rows: Sequence[dict]) -> dict[str, Agent]:
    """Return the agents of rows by the names that rows have, but for those of a user's files."""
    kinds = {name: find.known(name.partition("@")[0]) for name in {row["agent"] for row in rows}}
    return {name: kind() for name, kind in kinds.items() if kind is not None}


def transcripts(folder: Path, summary: dict) -> list[dict]:
    """Return the transcripts of the evaluation that a summary is of, once each."""
    with reading(path := folder / "transcripts.jsonl"):
        records = {(r.get("settings"), r["id"], r["sample"]): r for r in lines_in(path)}
    known = [None, *summary.get("settings", [])]
    current = [r for (settings, _, _), r in records.items() if settings in known]
    return [r for r in current if is_record(r) and {*r.get("cell", CELL)} >= CELL]


def tell(folder: Path, summary: dict, rows: Sequence[dict]) -> None:
    """Print the table of an evaluation, how much of its readings was kept, and warnings."""
    console.print(table(summary, console.width))
    records = transcripts(folder, summary)
    say(f"Of {len(rows):,} readings {len(records):,} are kept whole, for `show` and the page.")
    for sentence in filter(None, [nothing_right(summary, rows), *overlaps(summary)]):
        say(sentence, "bold red")
    show_next(folder, any(map(is_wrong, records)))


def show_next(folder: Path, wrong: bool = False) -> None:
    """End a command with the one that shows what a run has read, if that was kept."""
    if any((folder / name).exists() for name in ("trajectories.jsonl.gz", "transcripts.jsonl")):
        why = "see what was wrong" if wrong else "see what was read"
        next_step(why, "show", folder, *["--wrong"] * wrong)
