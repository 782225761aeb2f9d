"""The one reader of JSON, JSON lines and gz of files that came from elsewhere: run, model and data.

What is packed may not unpack to a flood, a file may not be larger than its kind can be, and JSON
may not be an abyss. Settings are read by config/files.py, documents by tasks/forms.py.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from config.errors import UserError

FREE = 1 << 24
"""Bytes that may be unpacked from however few."""
RATIO = 400
"""Most bytes that are unpacked from one, beyond `FREE`: gzip makes 1,030 of zeros, 290 of RULER's
haystacks, whose sentences repeat, and less than 20 of any other text."""
PART = 1 << 26
"""Most bytes of a file beside a model's weights; the largest published tokenizers have 35 MB."""
PARTS = (
    "added_tokens",
    "chat_template",
    "config",
    "generation_config",
    "merges",
    "special_tokens",
    "spiece",
    "tokenizer",
    "vocab",
)


def flood(name: str | Path) -> UserError:
    """Return what is said of a file that unpacks to more than `RATIO` allows."""
    return UserError(
        f"{name} unpacks to more than {RATIO} times its size: unpack it yourself if that is meant "
        "to be so."
    )


class _Unpacked(io.RawIOBase):
    """What a file of gzip unpacks to, as long as that is in proportion to what is read for it."""

    def __init__(self, packed: BinaryIO, name: str | Path):
        self.packed, self.name = packed, name
        self.stream = gzip.GzipFile(fileobj=packed)
        self.start, self.size = packed.tell(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        # gzip sets as many bytes aside as it is asked for, which may be those of the largest file
        data = self.stream.read1(min(len(buffer), FREE))
        self.size += len(data)
        if self.size > max(FREE, RATIO * (self.packed.tell() - self.start)):
            raise flood(self.name)
        buffer[: len(data)] = data
        return len(data)


def unpacked(file: BinaryIO, name: str | Path) -> BinaryIO:
    """Return a file as it is, or if its name ends in .gz what it unpacks to, as it is asked for.

    Reading that raises a UserError for a flood, else what gzip does: OSError, EOFError, zlib.error.
    """
    if Path(name).suffix != ".gz":
        return file
    return io.BufferedReader(_Unpacked(file, name), 1 << 16)


def from_json(text: str | bytes) -> object:
    """Parse JSON. ValueError: it is none, or it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, most: int = PART) -> object:
    """Read a file of JSON, or .gz of it, that has at most so many bytes. ValueError: it has more,
    or is no JSON; a UserError or an error of the system as of `unpacked`."""
    with path.open("rb") as file:
        text = unpacked(file, path).read(most + 1)
    if len(text) > most:
        raise ValueError(f"it has more than {most >> 20:,} MiB")
    return from_json(text)


def check_parts(paths: Iterable[Path]) -> None:
    """Raise a UserError for a pipe or a device, whose reading may never end, or a part of a model,
    of those with names as in `PARTS`, that is larger than one can be."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a pipe or a device and no file: remove it.")
        if path.name.startswith(PARTS) and path.is_file() and path.stat().st_size > PART:
            raise UserError(f"{path} has more than {PART >> 20} MiB: give another --model.")
