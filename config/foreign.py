"""Files that came from elsewhere: what is packed may not unpack to a flood, nor JSON be an abyss.

Holds: `flood`, `unpacked`, `check_parts`, `read_data`, `from_json`. Leaves out: settings
(config/files.py), documents (tasks/forms.py), chat templates (tokens/chat_templates.py).
Exercise it: `pytest tests/hostile/test_bombs.py`. Read next: config/files.py.
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


def flood(name: str | Path) -> UserError:
    """Return what is said of a file that unpacks to more than `RATIO` allows."""
    return UserError(
        f"{name} unpacks to more than {RATIO} times its size: unpack it yourself if that is meant "
        "to be so."
    )


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
            raise flood(self.name)
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


def read_data(path: Path) -> bytes:
    """Return the bytes of a file, of a .gz what it unpacks to.

    UserError as of `unpacked`; OSError, EOFError and zlib.error where it cannot be read.
    """
    with path.open("rb") as file:
        return (unpacked(file, path) if path.suffix == ".gz" else file).read()


PART = 1 << 26
"""Most bytes of a file beside a model's weights; the largest published tokenizers have 35 MB."""
PARTS = (
    "added_tokens", "chat_template", "config", "generation_config", "merges", "special_tokens",
    "spiece", "tokenizer", "vocab",
)  # fmt: skip


def check_parts(paths: Iterable[Path]) -> None:
    """Raise a UserError for a pipe or a device, whose reading may never end, or a part of a model,
    of those with names as in `PARTS`, that is larger than one can be."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a pipe or a device and no file: remove it.")
        if path.name.startswith(PARTS) and path.is_file() and path.stat().st_size > PART:
            raise UserError(f"{path} has more than {PART >> 20} MiB: give another --model.")


def from_json(text: str | bytes) -> object:
    """Parse JSON. ValueError: it is none, or it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
