"""Progress in the terminal: bars with rate and remaining time for training, the base policy and evaluations.

Holds: `SupervisedProgress`, `bar`, the console. Leaves out: GRPO's progress (commands/train.py). No torch.
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

console = Console(highlight=False)


class Rate(ProgressColumn):
    """Things per second, or seconds per thing where it takes longer."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(
            "" if not speed else f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"
        )


class Shrinking(TextColumn):
    """Text that gives way, with an ellipsis, where the terminal has no room for all columns: numbers never do."""

    def __init__(self, text: str):
        super().__init__(text, table_column=Column(no_wrap=False))  # such columns give way first

    def render(self, task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


WIDE = 120  # columns of a terminal that has room for everything


def bar(unit: str, to: Console = console) -> Progress:
    """A bar for things counted in `unit`; `fields[note]` is free text behind it, the most important first. On a narrow terminal the bar is
    short and unit and elapsed time are left out."""
    wide = to.width >= WIDE
    return Progress(
        Shrinking("{task.description}"),
        BarColumn(24 if wide else 8),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        *([TextColumn(unit)] if wide else []),
        Rate(Column(no_wrap=True)),
        *([TimeElapsedColumn(table_column=Column(no_wrap=True))] if wide else []),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
        Shrinking("{task.fields[note]}"),
        console=to,
        refresh_per_second=2,
        speed_estimate_period=1800,  # seconds: a step may take minutes, and the rate is that between two of them
    )


class SupervisedProgress:
    """A bar for supervised training; called with (step, mean loss)."""

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
