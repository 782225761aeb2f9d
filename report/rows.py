"""Rows: lines of JSON, each appended whole by the one process that writes the file.

A process that is killed leaves whole rows and at most one torn last line, which readers leave out
and the next writer cuts off.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError, kept
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


def lines_in(path: Path, mark: bytes = b"") -> Iterator[dict]:
    """Yield the rows of a file, none of one that is not there; a torn last line is left out.

    mark: only lines that hold it are parsed. UserError: a line is no JSON.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and mark in line:
                try:
                    row = from_json(line)
                except ValueError:
                    where = f"{path}, line {number}"
                    raise UserError(f"{where} is damaged: delete it, and call again.") from None
                yield row


def read_rows(path: Path, settings: str = "") -> list[dict]:
    """Return the rows of a file, those of these settings or of all; none of no file.

    A row that was made again stands for both, where the first one stood.
    """
    rows: dict[tuple, dict] = {}
    try:
        for row in lines_in(path, settings.encode()):
            if settings in ("", row["settings"]):
                name = row["settings"], row["id"], row["sample"], row["task"]
                rows[Cell.from_row(row), *name] = row
    except (LookupError, TypeError) as error:
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
        for cell in [Cell.from_row(row)]
        if (row["settings"], row["task"]) == (settings[cell], newest[cell, row["id"]])
    ]


class Rows:
    """A file to append to, which nobody else writes."""

    def __init__(self, path: Path):
        self.path, self._file = path, path.open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                whole = data.rfind(b"\n") + 1
            self._file.truncate(whole)

    def append(self, row: dict) -> None:
        """Append a row as one line and wait until it is on the disk. UserError: no room."""
        # half a surrogate pair becomes \udc80, which is how JSON spells it
        raw = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
            errors="backslashreplace"
        )
        with kept(lambda: f"{self.path}: make room and call again, the rows so far are kept."):
            if self._file.write(raw) < len(raw):
                raise OSError(errno.ENOSPC, "The disk is full")
            os.fsync(self._file.fileno())

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
