"""Ctrl-C and SIGTERM: the first lets a step become whole, another one ends the process at once.

Where no steps go on, the first is as another: it raises `StoppedNow`, and from there on a signal
ends the process without Python. A terminal sends Ctrl-C to the ranks too, which ignore it: their
launcher passes it on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from config.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = signal.SIGUSR1  # by the launcher, to its ranks


class StoppedNow(Stopped):
    """It has ended what was not whole, too: nothing is finished any more."""


_handlers: dict[int, object] = {}  # of a process that is stoppable
_asked = 0  # the first signal
_tell: Callable[[], None] | None = None  # while steps go on


@contextmanager
def stoppable(rank: bool = False) -> Iterator[None]:
    """Let signals stop what this process does in the block; one that is ignored stays so.

    rank: of a launcher, which tells it.
    """
    global _asked
    handlers = {s: _heard for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    if rank:
        handlers = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, TOLD: _heard}
    before = {s: signal.getsignal(s) for s in handlers}
    _asked = 0
    _handlers.update(handlers)
    heed()
    try:
        yield
    finally:
        _asked = 0
        _handlers.clear()
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def saying(advice: str) -> Iterator[None]:
    """Let signals stop the block, or the function that this decorates, and say how to go on."""
    try:
        with stoppable():
            yield
    except Stopped as stop:
        raise Stopped(stop.number, f"stopped. {advice}") from None


def heed() -> None:
    """Take the signals back from a library that has taken them meanwhile."""
    for s, handler in _handlers.items():
        signal.signal(s, handler)


def is_stoppable() -> bool:
    return bool(_handlers)


def requested() -> int:
    """Return the signal that has asked for an end, 0 if none has."""
    return _asked


@contextmanager
def waiting(tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Note the first signal in the block and `tell` it: whoever does the steps looks at
    `requested`. One that came too late for that ends the work with the block."""
    global _tell
    _tell = tell
    try:
        yield
    finally:
        _tell = None
    if _asked:
        raise Stopped(_asked)


def _heard(number: int, frame: object) -> None:
    global _asked
    first, _asked = not _asked, _asked or number
    if first and _tell:
        if number != TOLD:
            with suppress(OSError):  # a print may be interrupted, and Python's takes no second one
                os.write(2, b"\nStopping after this step; once more ends it at once.\n")
        _tell()
    elif number == TOLD:
        os._exit(130)  # the others may be in a step that needs this rank, which ends them too
    elif first or not os.environ.get("TORCHELASTIC_RUN_ID"):  # torchrun sends it again
        for s in SIGNALS:
            signal.signal(s, signal.SIG_DFL)
        raise StoppedNow(_asked)
