"""Files that came from elsewhere: what is packed may not unpack to a flood, nor JSON be an abyss.

Holds: `unpacked`, `read_data`, `from_json`. Leaves out: settings (config/files.py), documents
(tasks/forms.py), chat templates (tokens/chat_templates.py), models (models/convert.py).
Exercise it: `pytest tests/hostile/test_bombs.py`. Read next: config/files.py.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import BinaryIO

from config.errors import UserError

FREE = 1 << 24
"""Bytes that may be unpacked from however few."""
RATIO = 400
"""Most bytes that are unpacked from one, beyond `FREE`: gzip makes 1,030 of zeros, 290 of RULER's
haystacks, whose sentences repeat, and less than 20 of any other text."""


class _Unpacked(io.RawIOBase):
    """What a stream unpacks, as long as that is in proportion to what has been read for it."""

    def __init__(self, packed: BinaryIO, stream: BinaryIO, name: str | Path):
        self.packed, self.stream, self.name = packed, stream, name
        self.start, self.size = packed.tell(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self.stream.read1(len(buffer))
        self.size += len(data)
        if self.size > max(FREE, RATIO * (self.packed.tell() - self.start)):
            raise UserError(
                f"{self.name} unpacks to more than {RATIO} times its size: unpack it yourself if "
                "that is meant to be so."
            )
        buffer[: len(data)] = data
        return len(data)


def unpacked(
    packed: BinaryIO, name: str | Path, stream: BinaryIO | None = None
) -> io.BufferedReader:
    """Return what a file unpacks to, read as it is asked for.

    name: of the file, for errors. stream: what unpacks it; gzip if None. Reading raises a UserError
    where the file unpacks to far more than it holds, else what `stream` raises.
    """
    stream = stream or gzip.GzipFile(fileobj=packed)
    return io.BufferedReader(_Unpacked(packed, stream, name), 1 << 16)


def read_data(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a file, of a .gz what it unpacks to; at most so many of them (-1 = all).

    UserError as of `unpacked`; OSError, EOFError and zlib.error where it cannot be read.
    """
    with path.open("rb") as file:
        return (unpacked(file, path) if path.suffix == ".gz" else file).read(most)


def from_json(text: str | bytes) -> object:
    """Parse JSON. ValueError: it is none, or it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
