"""Progress in the terminal: bars with rate and remaining time.

Holds: `bar`, `SupervisedProgress`, the console. Leaves out: GRPO's progress (commands/train.py).
No torch. Exercise it: `pytest tests/config/test_terminal.py`. Read next: config/options.py.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from config.errors import clean

console = Console(highlight=False)


class Rate(ProgressColumn):
    """Show items per second, or seconds per item if that is slower."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


class Elided(TextColumn):
    """Show text that ends in an ellipsis where the terminal is too narrow; numbers never do."""

    def __init__(self, text: str, plain: bool = False):
        """plain: no markup, and nothing that steers the terminal; for text of a foreign file."""
        # such columns shrink first
        super().__init__(text, markup=not plain, table_column=Column(no_wrap=False))
        self.plain = plain

    def render(self, task) -> Text:
        text = super().render(task)
        if self.plain:
            text = Text(clean(text.plain).replace("\n", " "))
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


WIDE = 120  # columns of a terminal with room for everything


def bar(unit: str, to: Console = console) -> Progress:
    """Make a progress bar for items counted in `unit`.

    `fields[note]` is any text behind it, without markup, the most important part first. On a
    narrow terminal the bar is short, and unit and elapsed time are omitted.
    """
    wide = to.width >= WIDE

    def whole() -> Column:
        return Column(no_wrap=True)

    return Progress(
        Elided("{task.description}"),
        BarColumn(24 if wide else 8),
        MofNCompleteColumn(table_column=whole()),
        *([TextColumn(unit)] if wide else []),
        Rate(whole()),
        *([TimeElapsedColumn(table_column=whole())] if wide else []),
        TimeRemainingColumn(table_column=whole()),
        TextColumn("left"),
        Elided("{task.fields[note]}", plain=True),
        console=to,
        refresh_per_second=2,
        speed_estimate_period=1800,  # seconds; a step may take minutes, the rate needs two of them
    )


class SupervisedProgress:
    """Show supervised training; call it with (step, mean loss)."""

    def __init__(self, steps: int):
        self.progress = bar("steps")
        self.task = self.progress.add_task("base policy", total=steps, note="")

    def __enter__(self) -> SupervisedProgress:
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def __call__(self, step: int, loss: float) -> None:
        self.progress.update(self.task, completed=step, note=f"loss {loss:.4f}")
        if step % 200 == 0:
            self.progress.print(f"step {step:>5}  loss {loss:.4f}")
