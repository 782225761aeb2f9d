"""The body of `compare`: several evaluations side by side, in the terminal and on a page.

Holds: `compare_command`, with its flags. Leaves out: what is compared and how
(report/compare.py).
Exercise it: `python cli.py compare RUN RUN`. Read next: report/compare.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from config.errors import UserError
from config.files import found_run, replacing_output
from config.flags import command
from config.terminal import console, say


def compare_command(app: typer.Typer) -> None:
    """Register the command."""

    @command(app)
    def compare(
        runs: Annotated[
            list[Path],
            typer.Argument(metavar="RUN", help="evaluations, by name or folder; the first is "
                           "compared with each other one"),
        ],
        out: Annotated[
            Path | None,
            typer.Option(help="the page; default: compare-NAME-NAME.html beside the first run"),
        ] = None,
    ):  # fmt: skip
        """Put evaluations side by side: differences on the same questions, with intervals."""
        print_comparison([found_run(run) for run in runs], out)


def print_comparison(folders: Sequence[Path], out: Path | None = None) -> None:
    """Print the comparison and write its page. UserError: fewer than two runs, or unlike ones."""
    from report.compare import (
        comparison_page,
        differences,
        read_evaluation,
        remarks,
        side_by_side,
    )
    from report.folder import show_next
    from report.summary import table

    names = _names([folder.resolve() for folder in folders])
    if len(names) < 2:
        raise UserError("compare takes two or more different folders.")
    runs = [read_evaluation(folder, name) for folder, name in names.items()]
    summary = side_by_side(runs)
    title = " and ".join(names.values())
    path = out or next(iter(names)).parent / f"compare-{'-'.join(map(_plain, names.values()))}.html"
    with replacing_output(path) as temporary:
        temporary.write_text(comparison_page(summary, title), encoding="utf-8")
    console.print(table(summary, console.width))
    for line, style in differences(summary):
        say(line, style)
    for sentence in remarks(summary):
        say(sentence)
    say(f"Page: {path}")
    show_next(folders[0])


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Name each folder once: by its own name, or by its path where two have the same."""
    names = {folder: folder.name for folder in folders}
    alike = len({*names.values()}) < len(names)
    return {folder: str(folder) for folder in names} if alike else names


def _plain(name: str) -> str:
    return name.strip("/").replace("/", "-")
