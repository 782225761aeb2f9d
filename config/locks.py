"""One writer at a time: a lock on a run, a store or a bank, which ends with its process.

The lock is flock's, on a file of its own beside what is written: it holds against a second writer
of the same process too, and no other descriptor that is closed gives it up, as it would a POSIX
lock. The kernel gives it up with the last descriptor; a forked child, which would have another,
closes its own at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from config.errors import UserError, clip
from config.files import make_folder
from config.terminal import say

_held: set[int] = set()  # descriptors of this process


def _close_all() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_all)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Be the only writer of a file or a folder, there already or not, to the end of the block.

    what: its name at the beginning of a sentence, such as "The run runs/a". Where nothing is
    written, no folder is left. UserError, with the process and since when: it has a writer.
    OSError: the lock's file cannot be written. Where a file system knows no locks, that is said,
    and the block goes on.
    """
    path = path.resolve()
    new = [folder for folder in path.parents if not folder.exists()]
    make_folder(path.parent)
    mark = path.with_name(f".{path.name}.writing")
    fd = _locked(mark, what)
    try:
        os.ftruncate(fd, 0)
        since = f"{datetime.now():%Y-%m-%d %H:%M}"
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        yield
    finally:
        if fd in _held:  # not so in a forked child
            mark.unlink(missing_ok=True)
            _held.remove(fd)
            os.close(fd)
            with suppress(OSError):  # something is in it
                for folder in new:
                    folder.rmdir()


def is_written(path: Path) -> bool:
    """Tell whether a file or a folder has a writer now, in this process or another."""
    path = path.resolve()
    try:
        fd = os.open(path.with_name(f".{path.name}.writing"), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # there is no mark
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def _locked(mark: Path, what: str) -> int:
    """Open a file and lock it; return its descriptor."""
    while True:
        # no link, which a folder of a stranger may have there
        fd = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = clip(os.pread(fd, 1000, 0).decode(errors="replace"), 200) or "another process"
            os.close(fd)
            raise UserError(f"{what} is being written by {who}: wait for it, or end it.") from None
        except OSError as error:
            why = f"files cannot be locked there ({error.strerror})"
            say(f"{what} may have another writer, for {why}: see that it has none.", "red")
        if os.fstat(fd).st_nlink:  # else the writer before has removed it meanwhile
            _held.add(fd)
            return fd
        os.close(fd)
