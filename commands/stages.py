"""Command lines one after the other, each skipped once its results are there.

Holds: `Stage`, `make`. Leaves out: which they are (commands/learn.py, dev/reader.py). No torch.
Exercise it: `pytest tests/commands/test_learn.py`. Read next: commands/learn.py.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from config.files import read_yaml

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Stage:
    """One command line, and what is there when it is done."""

    name: str
    words: tuple[str, ...]  # after `python cli.py`
    makes: tuple[Path, ...]
    run: Path | None = None  # folder of a training, which goes on by --resume
    partial: Path | None = None  # what a stopped command may have left and cannot replace

    @property
    def done(self) -> bool:
        """Whether all is there. UserError: it is of a training of another length."""
        complete = all(path.exists() for path in self.makes)
        if complete and self.run is not None:
            sections = read_yaml(self.run / "config.yaml")
            steps = next(
                str(section["steps"]) for section in sections.values() if "steps" in section
            )
            if steps != (wanted := self.words[self.words.index("--steps") + 1]):
                reason = f"{self.run} has {steps} steps, not {wanted}"
                raise UserError(f"{reason}: give another --out, or remove what is there.")
        return complete

    @property
    def command(self) -> list[str]:
        """Return the words of the command as it has to be given now."""
        goes_on = self.run is not None and self.run.exists()
        return [*self.words, *(["--resume"] if goes_on else [])]


def call(words: Sequence[str]) -> int:
    """Run a command of cli.py in a process of its own; return its exit code."""
    return subprocess.call([sys.executable, str(ROOT / "cli.py"), *words])


def make(plan: Sequence[Stage]) -> None:
    """Run the stages whose results are not there, printing each. UserError: one of them failed."""
    for stage in plan:
        if stage.done:
            print(f"# {stage.name}: done before", flush=True)
            continue
        if stage.partial is not None:
            shutil.rmtree(stage.partial, ignore_errors=True)
        command = stage.command
        print(f"# {stage.name}\npython cli.py {shlex.join(command)}", flush=True)
        if code := call(command):
            reason = f"The stage {stage.name} ended with exit code {code}"
            raise UserError(f"{reason}: see above; the same call goes on from here.")
