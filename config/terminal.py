"""Progress in the terminal: bars with the remaining time; plain lines where there is none."""

from __future__ import annotations

import shlex
import shutil
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from config.errors import clean

console = Console(highlight=False)


class Elided(TextColumn):
    """Show text, perhaps of a foreign file, that ends in an ellipsis where the terminal is too
    narrow; numbers never do."""

    def __init__(self, text: str):
        super().__init__(text, table_column=Column(no_wrap=False))  # such columns shrink first

    def render(self, task) -> Text:
        text = clean(self.text_format.format(task=task)).replace("\n", " ")
        return Text(text, no_wrap=True, overflow="ellipsis")


class Lines(Progress):
    """Print a plain line whenever a task has ended, or another `every` of its items are done.

    It stands for a bar where the output is a file or a pipe: no control characters, no wrapping.
    """

    def __init__(self, unit: str, to: Console):
        super().__init__(console=to, disable=True)
        self.unit = unit
        self.print = partial(to.print, soft_wrap=True, markup=False)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, **changes) -> None:
        task = self._tasks[task_id]
        every = task.fields.get("every") or task.total
        before = task.completed
        super().update(task_id, **changes)
        if task.visible and every and task.completed // every > before // every:
            took = timedelta(seconds=int(task.elapsed or 0))
            done = f"{task.completed:g}/{task.total:g} {self.unit}"
            note = " ".join(clean(task.fields["note"]).split())
            self.print("  ".join(filter(None, (clean(task.description), done, str(took), note))))


def bar(unit: str, to: Console = console) -> Progress:
    """Make a progress bar for items counted in `unit`; outside a terminal, `Lines`.

    `fields[note]` is any text behind it, the most important part first. Its `print` puts a line
    above it, plain text that never wraps.
    """
    if not to.is_terminal:
        return Lines(unit, to)
    progress = Progress(
        Elided("{task.description}"),
        BarColumn(8),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
        Elided("{task.fields[note]}"),
        console=to,
        refresh_per_second=2,
        speed_estimate_period=1800,  # seconds; a step may take minutes, an estimate needs two
    )
    progress.print = partial(to.print, no_wrap=True, overflow="ellipsis", markup=False)
    return progress


def say(text: str | Text, style: str = "", to: Console = console) -> None:
    """Print a sentence: a terminal's lines break between words, a pipe gets one line."""
    line = text if isinstance(text, Text) else Text(clean(text), style=style)
    to.print(line, soft_wrap=not to.is_terminal)


def command_line(*words: object) -> str:
    """Return one of our commands as a shell takes it: with this Python, quoted where needed."""
    python, script, named = Path(sys.executable), Path(sys.argv[0]), shutil.which("python")
    if named and Path(named).parent == python.parent:  # the environment is active
        python = "python"
    script = script if script.name == "cli.py" else "cli.py"  # else of a test or a launcher
    here, line = Path.cwd(), []
    for word in (python, script, *words):
        inside = isinstance(word, Path) and word.is_relative_to(here)
        line.append(str(word.relative_to(here) if inside else word))
    return shlex.join(line)


def next_step(why: str, *words: object, runs: str = "runs", given: str = "") -> None:
    """End a command with another one that makes sense now, on a line that can be pasted.

    It goes to stderr, since other programs may read what a command prints. why: what it is for, a
    few words. runs: the folder of all runs, which is named where it is not the usual one. given: a
    text on standard input.
    """
    line = command_line(*words, *(() if runs == "runs" else ("--runs", runs)))
    line = f"echo {shlex.quote(given)} | {line}" if given else line
    Console(stderr=True).print(
        f"Next, {why}:\n{line}", highlight=False, markup=False, soft_wrap=True
    )
