"""A file of rows that several processes fill together: every row whole, every row once.

Holds: `Rows` (lines of JSON that grow by whole lines), claims on rows to come. Leaves out: what a row says (eval.py). No torch.
Exercise it: two `python cli.py eval --name shared` side by side. Read next: eval.py.

A row is one `write` to the end of the file, made under a lock and forced to the disk. A process that is killed leaves whole rows and at
most one torn last line, which the next writer cuts off. Before a process works on a row it claims it: a lock on one byte of
FILE.claims, at an offset that the row's name decides. The kernel takes back the locks of a process however it ends, so that no claim
outlives its owner. Both kinds of lock hold on one machine, and between machines where the file system says so (NFS 4 does).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from config.errors import UserError


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an evaluation: who was asked what, how it was sampled, how long the documents were."""

    agent: str  # the name it is shown by, e.g. trained, untrained, full
    question: str  # kind of question, e.g. one_fact
    temperature: str  # e.g. "1.0"; "0.0" is greedy
    length: int  # sections of a generated document, documents of a RULER-HQA task, tokens of a RULER task


FATES = ("unknown", "not shown", "never kept", "lost", "kept in part", "kept")


def fate(row: dict) -> str:
    """What became of the accepted answers: unknown (none to look for, or the agent has no memory), not shown (in no section that was
    read), never kept, lost (once in the memory, not at the end), kept in part, kept."""
    if not row["needed"] or not row["sections"]:
        return "unknown"
    held = [n for _, n in row["held"]]
    if held and held[-1] == row["needed"]:
        return "kept"
    if held and held[-1] < max(held):
        return "lost"
    return "kept in part" if held else "never kept" if row["seen"] else "not shown"


BLOCK = 1 << 24  # bytes that are read at once


class Rows:
    """The file, open for reading and appending. What cannot be opened or written is a `UserError`."""

    def __init__(self, path: Path):
        self.path, self._read, self._number = path, 0, 0  # bytes and lines that were read so far
        self._fd, self._claims = self._open(path), -1

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be locked or written: {error.strerror}."
            ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process appends; a last line that one has left torn is cut off."""
        with self._said():
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._fd).st_size
            end, step = size, 1 << 16
            while end > 0:
                start = max(0, end - step)
                if (newline := os.pread(self._fd, end - start, start).rfind(b"\n")) >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                os.ftruncate(self._fd, end)
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def new(self, wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict]:
        """Rows that came since the last call, whoever wrote them; only lines that are `wanted` are parsed. A line that is no JSON is
        a `UserError` with its number."""
        with self._alone():
            size = os.fstat(self._fd).st_size
        rest = b""
        while self._read < size:
            content = os.pread(self._fd, min(size - self._read, BLOCK), self._read)
            self._read += len(content)
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                self._number += 1
                if wanted(line):
                    try:
                        yield json.loads(line)
                    except ValueError:
                        raise UserError(
                            f"{self.path}, line {self._number} is damaged: delete it, its question is asked again."
                        ) from None

    def append(self, row: dict) -> None:
        # half a surrogate pair becomes \udc80, which is how JSON spells it
        raw = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
            errors="backslashreplace"
        )
        with self._alone():
            with self._said():
                written = os.write(self._fd, raw)
            if written < len(raw):
                raise UserError(
                    f"{self.path}: the disk is full; make room and call again, the rows so far are kept."
                )
            with self._said():
                os.fsync(self._fd)

    @staticmethod
    def _offset(name: str) -> int:
        return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=7).digest())

    def claim(self, name: str) -> bool:
        """Whether the row of this name is this process's to make; it stays so until `release`, `close` or the process's end."""
        if (
            self._claims < 0
        ):  # POSIX locks go when any descriptor of the file is closed: it is opened here and nowhere else
            self._claims = self._open(self.path.with_name(self.path.name + ".claims"))
        with self._said():
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._offset(name))
            except (BlockingIOError, PermissionError):
                return False
        return True

    def release(self, name: str) -> None:
        if self._claims >= 0:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, self._offset(name))

    def close(self) -> None:
        os.close(self._fd)
        if self._claims >= 0:
            os.close(self._claims)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_) -> None:
        self.close()
