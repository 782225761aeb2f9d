"""`report RUN` writes the pages of finished runs anew, `report A B` sets runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import typer

from config.errors import UserError, clean
from config.files import replacing_output
from config.locks import is_written
from config.terminal import console, say
from data import extract_answer


def write_pages(runs: Sequence[Path], open_it: bool = False, out: Path | None = None) -> None:
    """Write the page of a run, or one of several evaluations, and say where it is."""
    from report.folder import show_next

    first, *others = runs
    if others:
        path = print_comparison(runs, out)
    elif out:
        raise UserError(f"--out is for several evaluations: a run has its page in {first}.")
    else:
        path = report(first)
    say(f"The page is {path}.")
    if open_it:
        typer.launch(path.resolve().as_uri())
    show_next(first)


def print_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Print the comparison of runs and write its page; return its path.

    UserError: one alone, or unlike ones.
    """
    from report import compare
    from report.summary import table

    names = _names([folder.resolve() for folder in folders])
    if len(names) < 2:
        raise UserError("Runs that are compared have different folders.")
    runs = [compare.read_named(folder, name) for folder, name in names.items()]
    evaluated = any(run.rows for run in runs)
    summary = (compare.side_by_side if evaluated else compare.trainings_side_by_side)(runs)
    notes = [
        *compare.remarks(summary),
        *(f"{run.title}: {run.status}" for run in runs if run.status),
    ]
    title = " and ".join(names.values())
    path = out or next(iter(names)).parent / f"compare-{'-'.join(map(_plain, names.values()))}.html"
    with replacing_output(path) as temporary:
        temporary.write_text(compare.comparison_page(summary, title, notes), encoding="utf-8")
    if evaluated:
        console.print(table(summary, console.width))
    for sentence in [*notes, *compare.verdicts(summary)]:
        say(sentence)
    return path


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Name each folder once: by its own name, or by its path where two have the same."""
    names = {folder: folder.name for folder in folders}
    alike = len({*names.values()}) < len(names)
    return {folder: str(folder) for folder in names} if alike else names


def _plain(name: str) -> str:
    return name.strip("/").replace("/", "-")


def report(folder: Path) -> Path:
    """Write a run's page; return its path. UserError: the folder holds no run that has one."""
    from report.folder import settings_of
    from report.page import write_report

    path = folder / "config.yaml"
    settings = settings_of(path.read_text(encoding="utf-8")) if path.exists() else {}
    try:
        if "stream" in settings:
            return _stream(folder, settings)
        if "ask" in settings:
            return _reading(folder)
        return write_report(folder, note=False)
    except OSError as error:
        raise UserError(f"The page of {folder} cannot be written: {error.strerror}.") from error


def _stream(folder: Path, settings: dict) -> Path:
    """Write the page of a stream from the rows and banks of those arms that have begun."""
    from agents.bank import Bank, BankConfig
    from commands.stream import outcome_of, settings_of_stream
    from report.folder import reading
    from report.streams import rewrite_stream_report

    with reading(folder / "config.yaml"):
        config, outcomes = settings_of_stream(settings["stream"]), []
    for arm in config.arms:
        if (path := folder / f"{arm}.db").exists():
            # nothing of another process's bank is written, and no embedder is needed to look at it
            with closing(Bank(path, BankConfig(), frozen=True)) as bank:
                outcomes.append(outcome_of(folder, arm, config, bank))
    return rewrite_stream_report(folder, config, outcomes, is_written(folder))


def _reading(folder: Path) -> Path:
    """Return the page of a reading; write it anew if it was lost."""
    from report.page import write_reading
    from report.records import read_records

    if (page := folder / "report.html").exists():
        return page
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} holds no reading that can be shown.")
    last = records[-1]
    final = clean(extract_answer(last["answer"], last.get("form", ""))[0])
    return write_reading(folder, last, {"read": last["id"]}, final and f"answer: {final}")
