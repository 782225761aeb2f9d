"""One writer at a time of a run, a store or a bank: a lock beside it ends with its process."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from config.errors import UserError
from config.files import make_folder
from config.terminal import say


def _lock(path: Path, seconds: float):
    """Return the mark beside a file or a folder, and its lock."""
    from filelock import FileLock

    mark = path.with_name(f".{path.name}.writing")
    # a soft lock would outlive a process that is killed
    return mark, FileLock(mark, timeout=seconds, thread_local=False, fallback_to_soft=False)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Be the only writer of a file or a folder, there already or not, to the end of the block.

    what: its name at the beginning of a sentence, such as "The run runs/a". Where nothing is
    written, no folder is left. UserError: it has a writer. OSError: the lock's file cannot be
    written. Where a file system knows no locks, a line says so, and the block goes on.
    """
    from filelock import Timeout

    path, creator = Path(os.path.realpath(path)), os.getpid()  # of a loop of links as well
    new = [folder for folder in path.parents if not folder.exists()]
    make_folder(path.parent)
    mark, lock = _lock(path, 0.2)  # `is_written` has it for a moment
    try:
        lock.acquire()
        since = f"{datetime.now():%Y-%m-%d %H:%M}"
        mark.write_text(f"process {creator} on {socket.gethostname()} since {since}")
    except Timeout:
        who = "another process"
        with suppress(FileNotFoundError), mark.open("rb") as file:  # it may have ended by now
            who = file.read(200).decode(errors="replace") or who
        raise UserError(f"{what} is being written by {who}: wait for it, or end it.") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        say(f"{what} may have another writer: files cannot be locked there ({error}).", "red")
    try:
        yield
    finally:
        if os.getpid() == creator:  # not so in a forked child
            mark.unlink(missing_ok=True)  # while it is held: who waits sees that it has gone
            lock.release()
            with suppress(OSError):  # something is in it
                for folder in new:
                    folder.rmdir()


def is_written(path: Path) -> bool:
    """Tell whether a file or a folder has a writer now, in this process or another."""
    from filelock import Timeout

    mark, lock = _lock(Path(os.path.realpath(path)), 0)
    try:
        if mark.exists():
            lock.acquire().lock.release()
    except Timeout:
        return True
    except OSError:  # a file system without locks, or a link
        return False
    return False
