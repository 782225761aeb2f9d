"""Read what a run's folder holds at any time: finished, going on, or killed.

Holds: `Run`, `read_run`, `reading`, `settings_of`, `lines_of`. Leaves out: the page
(report/page.py), who writes the files (report/runlog.py, eval.py). No torch.
Exercise it: `python cli.py report RUN`. Read next: report/page.py.

What follows the last newline of a file is torn, and dropped. Where summary.json is missing, or says
less than the rows or metrics beside it, the run is summed up from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import datetime
from itertools import islice, product
from pathlib import Path

from agents import find
from config.errors import UserError
from config.files import settings_in
from config.foreign import from_json
from report.reading import thin
from report.records import CELL, is_record, newest, step_records
from report.rows import Cell, files_of, labels_of, latest, read_rows
from report.summary import cells, summarise
from report.training import whole_rows
from suites import Suite, known, name_of

OF_TRAINING = 4  # transcripts of the last recorded step, where nothing has been evaluated


@dataclass(slots=True)
class Run:
    """What a page is made of."""

    folder: Path
    summary: dict
    rows: list[dict] = field(default_factory=list)  # of an evaluation, those that are summed up
    records: list[dict] = field(default_factory=list)  # transcripts
    config: str = ""  # the text of config.yaml
    status: str = ""  # how far it has come, of a run that is not finished
    title: str = ""


def read_run(folder: Path, running: bool = False) -> Run:
    """Read a run's folder. UserError: it holds no training and no evaluation, or damaged files.

    running: a process still fills it.
    """
    path = folder / "config.yaml"
    config = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    settings = settings_of(config)
    rows = read_rows(*files_of(folder))
    latest_rows = latest(rows)
    summary, how_far, progress = _summed_up(folder, settings, latest_rows)
    for name, default in (("metric", "reward"), ("paired", [])):
        summary.setdefault(name, default)  # absent from the summary of a training
    records = _transcripts(folder, summary)
    if not summary["cells"]:
        records += _of_training(folder)
    status = _status(how_far, running, progress) if how_far or running else ""
    kind = "Evaluation " if "eval" in settings else ""
    if not summary["cells"] and ("grpo" in settings or "sft" in settings):
        kind = "Training "
    shown = latest([row for row in rows if row["settings"] in summary.get("settings", ())])
    return Run(folder, summary, shown, records, config, status, kind + folder.resolve().name)


def settings_of(config: str) -> dict:
    """Return the sections of config.yaml from its text; {} if it is none."""
    try:
        sections = settings_in(config)
    except ValueError:
        return {}
    return sections if isinstance(sections, dict) else {}


def _summed_up(folder: Path, settings: dict, rows: Sequence[dict]) -> tuple[dict, str, Path]:
    """Return a run's summary, how far it has come if it is not finished, and the file that tells
    when it last went on."""
    summary = _stored(folder / "summary.json")
    if "eval" in settings:
        path = [folder / "rows.jsonl", *files_of(folder)][-1]
        if summary is None or _says_less(summary, rows):
            asked = settings["eval"]
            return _of_rows(rows, asked), _answered(rows, asked), path
        missing = ", ".join(summary.get("missing", []))
        return summary, f"without part {missing}" if missing else "", path
    path = folder / "metrics.csv"
    steps = whole_rows(path)
    section = next((name for name in ("grpo", "sft") if name in settings), "")
    wanted = settings[section].get("steps", 0) if section else 0
    how_far = f"step {len(steps):,} of {wanted:,}" if len(steps) < wanted else ""
    if summary is None and not (steps or section):
        raise UserError(
            f"{folder} holds no run: there is neither summary.json nor a config.yaml of one."
        )
    if summary is None and not steps:
        summary = {"unit": "sections", "cells": []}
    elif steps and (summary is None or summary.get("steps", len(steps)) != len(steps)):
        from report.runlog import summary as of_training

        with reading(path):
            summary = of_training(folder)
    return summary, how_far if not summary["cells"] else "", path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another kind: {error!r}.") from error


def _stored(path: Path) -> dict | None:
    """Return the summary that a run has written; None: none yet."""
    if not path.exists():
        return None
    with reading(path):
        summary = from_json(path.read_bytes())
        if "accuracy" in summary:
            raise UserError(
                f"{path} was written by an earlier version: "
                "run the same eval or train --resume again, which writes it anew."
            )
        summary["unit"], list(cells(summary))  # a KeyError if this is no summary
    return summary


def lines_of(path: Path) -> list[dict]:
    """Return the whole lines of a file of JSON; [] if there is no such file."""
    with reading(path):
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [from_json(line) for line in lines]


# ---------------------------------------------------------------- an evaluation


def _says_less(summary: dict, rows: Sequence[dict]) -> bool:
    """Whether rows have been written since the summary: of other cells, or of more questions."""
    asked: dict[Cell, set] = {}
    for row in rows:
        asked.setdefault(Cell.of(row), set()).add((row["id"], row["task"]))
    known = {cell: record.get("n") for cell, record in cells(summary)}
    return any(known.get(cell, 0) < len(questions) for cell, questions in asked.items())


def _of_rows(rows: Sequence[dict], asked: dict) -> dict:
    """Return the summary of the rows that are there.

    asked: the settings of the evaluation. What agents of a user's own file count is left out.
    """
    suite = (known(name_of(asked)) or Suite)()
    kinds = {name: find.known(name.partition("@")[0]) for name in {row["agent"] for row in rows}}
    agents = {name: kind() for name, kind in kinds.items() if kind is not None}
    metric = suite.measured_by([*{row["question"] for row in rows}])
    return summarise(rows, suite.unit, metric, agents=agents)


def _answered(rows: Sequence[dict], asked: dict) -> str:
    """Return "37 of 128 answers", "" for all that were asked for last, whatever else is there;
    without the number of all, where only the suite knows it."""
    all_ = ""
    if asked.get("data") == ["world"] and not asked.get("suite") and asked.get("lengths"):
        agents = {*labels_of(asked["agents"]).values()}
        samples = {str(float(t)): asked["samples"] if t > 0 else 1 for t in asked["temperatures"]}
        places = {*product(agents, asked["kinds"], samples, asked["lengths"])}
        rows = [row for row in rows if astuple(Cell.of(row)) in places]
        n = len(places) // len(samples) * asked["n"] * sum(samples.values())
        if len(rows) >= n:
            return ""
        all_ = f" of {n:,}"
    return f"{len(rows):,}{all_} answer{'s' * (bool(all_) or len(rows) != 1)}"


# ---------------------------------------------------------------- how far, and what was read


def _status(how_far: str, running: bool, progress: Path) -> str:
    """Say whether a run goes on, how far it has come, and when it last did."""
    there = f": {how_far}" if how_far else ""
    if not progress.exists():
        return f"{'Running' if running else 'Stopped'}{there}."
    at = datetime.fromtimestamp(progress.stat().st_mtime)
    return (
        f"Running{there}, last written at {at:%H:%M:%S}."
        if running
        else f"Stopped{there}; nothing has been written since {at:%Y-%m-%d %H:%M:%S}."
    )


def _transcripts(folder: Path, summary: dict) -> list[dict]:
    """Return the transcripts of the evaluation that a summary is of, once each."""
    records = {}
    for path in files_of(folder, "transcripts"):
        lines = lines_of(path)
        with reading(path):
            records |= {(r.get("settings"), r["id"], r["sample"]): r for r in lines}
    known = [None, *summary.get("settings", [])]
    current = [r for (settings, _, _), r in records.items() if settings in known]
    return [r for r in current if is_record(r) and {*r.get("cell", CELL)} >= CELL]


def _of_training(folder: Path) -> list[dict]:
    """Return some trajectories of the last recorded step, with the newest that was right and the
    newest that was wrong, wherever these are."""
    firsts = (r for r in step_records(folder, last=True) if not r["sample"])
    chosen = [*newest(folder), *islice(firsts, OF_TRAINING)]
    return [*{(r["step"], r["id"], r["sample"]): thin(r) for r in chosen}.values()]
