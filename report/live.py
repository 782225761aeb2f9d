"""The page of a run that goes on: written again and again, for no more than a part of the time.

Holds: `Live`. Leaves out: the page itself (report/page.py), when a run asks for it
(commands/train.py, eval.py).
Exercise it: `python cli.py train --steps 40`, and open the page it names. Read next:
report/page.py.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from config.errors import Unshown, clean, clip
from config.terminal import console, say
from report.status import hold

REST = 20  # times as long as the page took, at least, until it is written again
SOON = 2.0  # seconds until the first page: what ends within them is written once, at its end


class Live:
    """The page of a folder. As a context it is written once more where a run ends before its time.

    every: least seconds between two pages. A failure is told once, and again by `finish`.
    """

    def __init__(self, folder: Path, title: str = "", every: float = 0.0):
        self.folder, self.title, self.every = folder, title, every
        self.begun = self.written = self.failed = False
        self.next = 0.0

    def begin(self) -> None:
        """Mark the folder as filled by this process, and say once where the page will be."""
        hold(self.folder)
        if not self.begun:
            words = f"Live report: {self.folder / 'report.html'}"
            console.print(words, soft_wrap=True, markup=False)
            self.next = time.monotonic() + SOON
        self.begun = True

    def refresh(self) -> None:
        """Write the page of a run that goes on, unless that was done a short time ago."""
        begun = time.monotonic()
        if begun >= self.next:
            self.write(running=True)
            end = time.monotonic()
            self.next = end + max(self.every, REST * (end - begun))

    def write(self, running: bool = False) -> None:
        if (why := self._failure(running)) and not self.failed:
            say(f"The page could not be written ({why}).", "red")
        self.failed = self.failed or bool(why)

    def finish(self, kept: str) -> None:
        """Write the page of a run that is over. Unshown: it could not be; kept: what is, where."""
        if why := self._failure(running=False):
            raise Unshown(
                f"The page could not be written ({why}). {kept}; once that is mended, python "
                f"cli.py report {shlex.quote(str(self.folder))} writes it."
            )

    def _failure(self, running: bool) -> str:
        """Write the page; say why it could not be, which is never worth a run."""
        from report.page import write_report

        self.written = True
        try:
            write_report(self.folder, self.title, running)
        except Exception as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # while a library was being loaded
                raise KeyboardInterrupt from None
            why = " ".join(clean(f"{type(error).__name__}: {error}").split()).rstrip(".")
            return clip(why, 300)
        return ""

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind and self.begun:
            self.write()
