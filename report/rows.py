"""Files of rows: lines of JSON, each appended whole by the one process that writes the file.

A row is one `write` to the end of the file, forced to the disk. A process that is killed leaves
whole rows and at most one torn last line, which the next writer cuts off.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from config.foreign import from_json


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an evaluation: all rows of one agent on one kind of question at one length."""

    agent: str  # the name it is shown by, e.g. trained, untrained, full
    question: str  # kind of question, e.g. one_fact
    temperature: str  # e.g. "1.0"; "0.0" is greedy
    length: int  # sections of a generated document, documents of RULER-HQA, tokens of RULER

    @classmethod
    def from_row(cls, row: dict) -> Cell:
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


def lines_in(path: Path, wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict]:
    """Yield the rows of a file, none of one that is not there; a torn last line is left out.

    wanted: whether a line is to be parsed and yielded. UserError, with the number of the line, if
    it is not JSON.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and wanted(line):
                    try:
                        row = from_json(line)
                    except ValueError:
                        raise UserError(
                            f"{path}, line {number} is damaged: delete it, and call again."
                        ) from None
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def read_rows(path: Path, settings: str = "") -> list[dict]:
    """Return the rows of a file, those of earlier settings too, each once; none of no file.

    A row that was made again stands for both, where the first one stood. settings: of the rows
    wanted; empty: of all.
    """
    rows: dict[tuple, dict] = {}
    mark = settings.encode()
    try:
        for row in lines_in(path, lambda line: mark in line):
            name = Cell.from_row(row), row["settings"], row["id"], row["sample"], row["task"]
            if settings in ("", row["settings"]):
                rows[name] = row
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another kind: {error!r}.") from error
    return [*rows.values()]


def latest(rows: Sequence[dict]) -> list[dict]:
    """Return of each cell the rows of the settings that its last row was made under, of each of its
    questions those of the text that was asked last."""
    settings = {Cell.from_row(row): row["settings"] for row in rows}
    newest = {(Cell.from_row(row), row["id"]): row["task"] for row in rows}
    return [
        row
        for row in rows
        if row["settings"] == settings[cell := Cell.from_row(row)]
        and row["task"] == newest[cell, row["id"]]
    ]


class Rows:
    """A file to append to, which nobody else writes. UserError: it cannot be opened or written."""

    def __init__(self, path: Path):
        self.path = path
        with self._errors_named():
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._fd, self._end_of_last_line(os.fstat(self._fd).st_size))

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Turn an error of the operating system into a `UserError` with the file's name."""
        try:
            yield
        except OSError as error:
            kept = "make room and call again, the rows so far are kept"
            raise UserError(f"{self.path} cannot be written: {error.strerror}; {kept}.") from error

    def _end_of_last_line(self, size: int, step: int = 1 << 16) -> int:
        """Return the offset after the last newline, searching backwards; 0 without one."""
        for start in range(size - step, -step, -step):
            newline = os.pread(self._fd, step + min(start, 0), max(start, 0)).rfind(b"\n")
            if newline >= 0:
                return max(start, 0) + newline + 1
        return 0

    def append(self, row: dict) -> None:
        """Append a row as one line and wait until it is on the disk."""
        # half a surrogate pair becomes \udc80, which is how JSON spells it
        raw = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
            errors="backslashreplace"
        )
        with self._errors_named():
            if os.write(self._fd, raw) < len(raw):
                raise OSError(errno.ENOSPC, "the disk is full")
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_) -> None:
        self.close()
