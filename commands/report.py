"""Write the page of a run anew, at any time: going on, stopped or finished.

Holds: `report_command`, `report`. Leaves out: the pages (report/page.py, report/streams.py), what a
folder holds (report/folder.py), whether a run goes on (report/status.py).
Exercise it: `python cli.py report runs/demo`. Read next: report/folder.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from config.errors import UserError, clean
from config.files import found_run
from config.flags import command
from config.foreign import from_json
from data import extract_answer


def report_command(app: typer.Typer) -> None:
    """Register the command."""

    @command(app, name="report")
    def _report(
        run: Annotated[Path, typer.Argument(help="a run, by its name or its folder")],
        open_it: Annotated[bool, typer.Option("--open", help="then show it in a browser")] = False,
    ):
        """Write the page of any run, also of one that goes on or was stopped: RUN/report.html."""
        from report.folder import show_next

        run = found_run(run)
        path = report(run)
        typer.echo(f"The page is {path}.")
        if open_it:
            typer.launch(path.resolve().as_uri())
        show_next(run)


def report(folder: Path) -> Path:
    """Write a run's page; return its path. UserError: the folder holds no run that has one."""
    from report.folder import settings_of
    from report.page import rewrite_report

    path = folder / "config.yaml"
    settings = settings_of(path.read_text(encoding="utf-8")) if path.exists() else {}
    try:
        if "stream" in settings:
            return _stream(folder, settings)
        if "ask" in settings:
            return _reading(folder, settings)
        return rewrite_report(folder)
    except OSError as error:
        raise UserError(f"The page of {folder} cannot be written: {error.strerror}.") from error


def _stream(folder: Path, settings: dict) -> Path:
    """Write the page of a stream from the rows and banks of those arms that have begun."""
    from agents.bank import Bank, BankConfig
    from commands.stream import outcome_of, settings_of_stream
    from report.folder import reading
    from report.status import is_running
    from report.streams import rewrite_stream_report

    with reading(folder / "config.yaml"):
        config, outcomes = settings_of_stream(settings["stream"]), []
    for arm in config.arms:
        if (path := folder / f"{arm}.db").exists():
            # nothing of another process's bank is written, and no embedder is needed to look at it
            with closing(Bank(path, BankConfig(), frozen=True)) as bank:
                outcomes.append(outcome_of(folder, arm, config, bank))
    return rewrite_stream_report(folder, config, outcomes, is_running(folder))


def _reading(folder: Path, settings: dict) -> Path:
    """Write the page of a reading as far as it has come; one that is finished has its page."""
    from report.folder import lines_of
    from report.page import write_reading
    from report.status import is_running
    from report.transcripts import n_sections

    page = folder / "report.html"
    if (folder / "transcripts.jsonl").exists() and page.exists():
        return page
    try:
        about = from_json((folder / "document.json").read_bytes())
        question, reader, title = about["question"], about["said"], about["document"]["title"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no reading that can be shown: {error!r}.") from error
    turns = lines_of(folder / "turns.jsonl")
    answer = turns[-1]["response"] if turns and turns[-1]["final"] else ""
    record = {
        "id": title, "agent": settings.get("run", {}).get("agent", ""), "step": None, "sample": 0,
        "question": question, "answers": [], "kind": "asked", "reward": 0.0, "answer": answer,
        "form": settings.get("agent", {}).get("form", ""), "error": "", "turns": turns,
    }  # fmt: skip
    running = is_running(folder)
    sections = f"{n_sections(record):,} sections"
    status = f"{'Running' if running else 'Stopped'}: {sections} have been read."
    final, facts = extract_answer(answer, record["form"])[0], {"read": title, "by": reader}
    return write_reading(folder, record, facts, status, running, clean(final))
