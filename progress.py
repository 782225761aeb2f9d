"""Progress in the terminal: bars with rate and remaining time for training, the base policy and evaluations.

Holds: `TrainingProgress`, `BaseProgress`, `bar`. Leaves out: what is shown (grpo.py, eval.py).
"""

from __future__ import annotations

import lightning
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
        return Text("" if not speed else f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


def bar(unit: str) -> Progress:
    """A bar for things counted in `unit`; `fields[note]` is free text behind it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn(unit),
        Rate(Column(no_wrap=True)),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=2,
    )


class TrainingProgress(lightning.Callback):
    """One bar for the steps, and every `every` steps a line that stays."""

    def __init__(self, steps: int, every: int = 10):
        self.steps, self.every = steps, every
        self.validated: dict[str, float] = {}
        self.progress: Progress | None = None  # until training starts: an error before that has no bar to stop

    def on_train_start(self, trainer, module) -> None:
        self.validated = module.validated
        self.progress = bar("steps")
        self.task = self.progress.add_task("training", total=self.steps, completed=module.done_steps, note="")
        self.progress.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        m = module.metrics
        rate = (m["read_tokens"] + m["written_tokens"]) / m["step_s"]
        note = f"reward {m['reward']:.2f}  turns {m['turns']:.0f}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=module.done_steps, note=note)
        if module.validated is not self.validated:
            self.validated = module.validated
            score, n = self.validated["score"], self.validated["n"]
            self.progress.print(f"step {module.done_steps:>4}  validation {score:.3f} (n {n})")
        if module.done_steps % self.every == 0:
            self.progress.print(
                f"step {module.done_steps:>4}  reward {m['reward']:.3f}  turns {m['turns']:>5.1f}  memory {m['memory_tokens']:>5.1f} tokens"
                f"  no signal {m['groups_without_signal']:.0%}  rollout {m['rollout_s']:.1f} s  update {m['update_s']:.1f} s"
            )

    def on_train_end(self, trainer, module) -> None:
        self.progress.stop()

    def on_exception(self, trainer, module, exception) -> None:
        if self.progress:
            self.progress.stop()


class BaseProgress:
    """A bar for supervised training; called with (step, mean loss)."""

    def __init__(self, steps: int):
        self.progress = bar("steps")
        self.task = self.progress.add_task("base policy", total=steps, note="")

    def __enter__(self) -> BaseProgress:
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def __call__(self, step: int, loss: float) -> None:
        self.progress.update(self.task, completed=step, note=f"loss {loss:.4f}")
        if step % 200 == 0:
            self.progress.print(f"step {step:>5}  loss {loss:.4f}")
