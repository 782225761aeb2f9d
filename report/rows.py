"""A file of rows that several processes fill together: every row whole, every row once.

Holds: `Rows` (lines of JSON, appended whole), claims on rows to come, `read_rows`, `latest`,
`Cell`, `labels_of`, `fate`. Leaves out: what a row says (eval.py). No torch.
Exercise it: two `python cli.py eval --name shared` side by side. Read next: eval.py.

A row is one `write` to the end of the file, made under a lock and forced to the disk. A process
that is killed leaves whole rows and at most one torn last line, which the next writer cuts off.
Before a process works on a row it claims it: a lock on one byte of FILE.claims, at an offset that
the row's name decides. The kernel releases the locks of a process however it ends, so that no claim
outlives its owner.

    FILE          [row][row][row][row][ro             locked as a whole while a row is appended
    FILE.claims   ..x......x.................x....    one byte is locked for each row in the making

Both kinds of lock hold on one machine, and between machines if the file system supports it, as
NFS 4 does.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from config.errors import UserError


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an evaluation: all rows of one agent on one kind of question at one length."""

    agent: str  # the name it is shown by, e.g. trained, untrained, full
    question: str  # kind of question, e.g. one_fact
    temperature: str  # e.g. "1.0"; "0.0" is greedy
    length: int  # sections of a generated document, documents of RULER-HQA, tokens of RULER

    @classmethod
    def of(cls, row: dict) -> Cell:
        return cls(row["agent"], row["question"], row["temperature"], row["length"])


def labels_of(names: Sequence[str]) -> dict[str, str]:
    """Return the names of agents as rows have them: a file's without its folder, where that is
    unique."""
    short = {
        name: f"{Path(plain).stem}{at}{weights}"
        for name in names
        for plain, at, weights in [name.partition("@")]
    }
    return short if len({*short.values()}) == len(short) else {name: name for name in names}


FATES = ("unknown", "not shown", "never kept", "lost", "kept in part", "kept")


def fate(row: dict) -> str:
    """Return what became of the accepted answers of a row: one of `FATES`.

        unknown        none to look for, or the agent has no memory
        not shown      in no section that was read
        never kept     in a section, never in the memory
        lost           once in the memory, not all of it at the end
        kept in part   all that ever was in the memory is there at the end, but more was needed
        kept           all that is needed is in the memory at the end

    row["held"]: (section, how many answers the memory holds) wherever that number changed.
    """
    if not row["needed"] or not row["sections"]:
        return "unknown"
    in_memory = [n for _, n in row["held"]]
    if not in_memory:
        return "never kept" if row["seen"] else "not shown"
    if in_memory[-1] == row["needed"]:
        return "kept"
    return "lost" if in_memory[-1] < max(in_memory) else "kept in part"


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a file, those of earlier settings too, each once.

    A row that was made again stands for both, where the first one stood. Takes no lock and changes
    nothing: a torn last line is left out, and so is a file that is not there. UserError for damage.
    """
    if not path.exists():
        return []
    rows: dict[tuple, dict] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    row = _parsed(line, path, number)
                    name = row["settings"], row["id"], row["sample"], row["task"]
                    rows[Cell.of(row), name] = row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return [*rows.values()]


def latest(rows: Sequence[dict]) -> list[dict]:
    """Return of each cell the rows of the settings that its last row was made under."""
    settings = {Cell.of(row): row["settings"] for row in rows}
    return [row for row in rows if row["settings"] == settings[Cell.of(row)]]


def _parsed(line: bytes, path: Path, number: int) -> dict:
    try:
        return json.loads(line)
    except ValueError:
        where = f"{path}, line {number}"
        raise UserError(f"{where} is damaged: delete it, its question is asked again.") from None


BLOCK = 1 << 24  # bytes read at once


class Rows:
    """The file, open for reading and appending. UserError if it cannot be opened or written."""

    def __init__(self, path: Path):
        self.path = path
        self._read, self._number = 0, 0  # bytes and lines read so far
        self._fd, self._claims = self._open(path), -1

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error

    @contextmanager
    def _os_errors_named(self) -> Iterator[None]:
        """Turn an error of the operating system into a `UserError` with the file's name."""
        try:
            yield
        except OSError as error:
            problem = (
                f"{self.path} cannot be locked or written: {error.strerror}; make room and call "
            )
            problem += "again, the rows so far are kept."
            raise UserError(problem) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from appending, after cutting off a last line that one left torn."""
        with self._os_errors_named():
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._fd).st_size
            end = self._end_of_last_line(size)
            if end < size:
                os.ftruncate(self._fd, end)
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _end_of_last_line(self, size: int, step: int = 1 << 16) -> int:
        """Return the offset after the last newline, searching backwards; 0 without one."""
        end = size
        while end > 0:
            start = max(0, end - step)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def new(self, wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict]:
        """Yield the rows that any process has appended since the last call.

        wanted: whether a line is to be parsed and yielded. UserError, with the number of the line,
        if it is not JSON.
        """
        with self._locked():
            size = os.fstat(self._fd).st_size
        rest = b""
        while self._read < size:
            content = os.pread(self._fd, min(size - self._read, BLOCK), self._read)
            self._read += len(content)
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                self._number += 1
                if wanted(line):
                    yield _parsed(line, self.path, self._number)

    def append(self, row: dict) -> None:
        """Append a row as one line and wait until it is on the disk."""
        # half a surrogate pair becomes \udc80, which is how JSON spells it
        raw = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
            errors="backslashreplace"
        )
        with self._locked():
            with self._os_errors_named():
                written = os.write(self._fd, raw)
            if written < len(raw):
                raise UserError(
                    f"{self.path}: the disk is full; make room and call again, "
                    "the rows so far are kept."
                )
            with self._os_errors_named():
                os.fsync(self._fd)

    @staticmethod
    def _offset(name: str) -> int:
        """Return the byte of FILE.claims that stands for a name, of 2^56."""
        return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=7).digest())

    def claim(self, name: str) -> bool:
        """Try to reserve the row of this name for this process; return whether it succeeded.

        The claim lasts until `release`, `close` or the end of the process.
        """
        # opened here and nowhere else: closing any descriptor of a file drops its POSIX locks
        if self._claims < 0:
            self._claims = self._open(self.path.with_name(self.path.name + ".claims"))
        with self._os_errors_named():
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._offset(name))
            except (BlockingIOError, PermissionError):
                return False
        return True

    def release(self, name: str) -> None:
        """Give up a claim."""
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
