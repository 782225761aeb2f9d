"""Tell whether a run goes on: by locks, which the kernel releases however a process ends.

Holds: `hold`, `release`, `is_running`. Leaves out: how far a run has come (report/folder.py).
No torch. Exercise it: `pytest tests/report/test_status.py`. Read next: report/folder.py.

    FOLDER/.running   held, shared, by each process that fills a run's folder

Whether another process may fill it too is asked elsewhere (config/locks.py).
POSIX locks are of a process: a child does not inherit them, and closing any descriptor of the file
gives them up. So nothing but `hold` opens .running where it is held.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

MARK = ".running"

_held: dict[Path, int] = {}  # folder -> descriptor of its mark


def hold(folder: Path) -> None:
    """Mark a folder as filled by this process, until `release` or the end of the process.

    Several processes may hold one. Where the file system knows no locks, nothing is marked.
    """
    if (path := folder.resolve()) in _held:
        return
    with suppress(OSError):
        fd = os.open(path / MARK, os.O_RDWR | os.O_CREAT, 0o644)
        _held[path] = fd
        fcntl.lockf(fd, fcntl.LOCK_SH)  # who looks at it has it for a moment


def release(folder: Path) -> None:
    """Give up what `hold` has marked."""
    fd = _held.pop(folder.resolve(), None)
    if fd is not None:
        os.close(fd)


def is_running(folder: Path) -> bool:
    """Tell whether a process fills a folder."""
    if folder.resolve() in _held:
        return True
    try:
        fd = os.open(folder / MARK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
