"""Data sets of the hub by name, at one commit: hf:ORG/NAME[/CONFIG][@REVISION][:SPLIT].

`datasets` says which files a split consists of; they are streamed to tasks/readers.py, for its own
JSON reader turns answers such as "1994-05-01" into dates and HotpotQA's [title, [sentences]] pairs
into texts. A name without a revision, or with a branch or tag, stands for the commit of this
moment: `pin` puts that in its place, so that a run's settings name what it read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from config.errors import UserError, clip, first_line
from tasks.downloads import commit_of, token

PREFIX = "hf:"
NAME = re.compile(r"hf:(\w[\w.-]*(?:/[\w.-]+)?)(?:/([\w.-]+))?(?:@([\w./-]+))?(?::([\w.-]+))?")
NAMED = re.compile(r"(?:(?<=,)|\A)hf:[^,=]*")  # in a mixture
COMMIT = re.compile(r"[0-9a-f]{40}")
FORMATS = re.compile(r"\.(parquet|(json|jsonl)(\.gz)?)$")
Settings = TypeVar("Settings")


def is_hub(path: str | Path) -> bool:
    """Tell whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


class Place(NamedTuple):
    """Name a split of a data set."""

    source: str
    config: str = ""
    revision: str = ""
    split: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read a name; UserError if it is none."""
        if not (match := NAME.fullmatch(text)):
            form = "hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG@REVISION:SPLIT"
            raise UserError(f"A data set of the hub is named by {form}, not {text!r}.")
        return cls(*(part or "" for part in match.groups()))

    def __str__(self) -> str:
        parts = ("", self.source), ("/", self.config), ("@", self.revision), (":", self.split)
        return PREFIX + "".join(sign + part for sign, part in parts if part)

    @property
    def at_commit(self) -> Place:
        """The name with the hub's commit, unless it has one."""
        if COMMIT.fullmatch(self.revision):
            return self
        return self._replace(revision=commit_of(self.source, self.revision or "main"))


def pin(path: str | Path, say: Callable[[str], None] = lambda line: None) -> str:
    """Return a name with the commit for which it stands now; any other path as it is.

    say: is told the commit, unless the name has one. UserError: no such revision, or no hub.
    """
    if not is_hub(path):
        return str(path)
    place = Place.parse(str(path))
    if (fixed := place.at_commit) != place:
        say(f"{place} is read at its present commit: {fixed}")
    return str(fixed)


def pinned(settings: Settings, say: Callable[[str], None] = lambda line: None) -> Settings:
    """Return a dataclass of settings with every name of the hub in it pinned.

    A text may be a mixture, NAME=WEIGHT,NAME=WEIGHT.
    """

    def fix(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(fix, value))
        if not isinstance(value, str):
            return value
        return NAMED.sub(lambda name: pin(name[0], say), value)

    before = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    changed = {name: fixed for name, value in before.items() if (fixed := fix(value)) != value}
    return dataclasses.replace(settings, **changed) if changed else settings


class DataFile(NamedTuple):
    """Name a file of a split."""

    path: Path  # to show, and to recognise forms by
    url: str


def data_files(path: str | Path) -> list[DataFile]:
    """Return the files of the named split, in order; that of the only split if none is named.

    UserError: no hub, no such data set, configuration or split, or files of a format that the
    readers do not know.
    """
    import datasets

    # A commit is looked up too: `datasets` would say less, half a minute later
    place = Place.parse(str(path)).at_commit
    datasets.logging.set_verbosity_error()
    named = place.source, place.config or None
    try:
        builder = datasets.load_dataset_builder(*named, revision=place.revision, token=token())
        splits = {str(split): urls for split, urls in builder.config.data_files.items()}
    except Exception as error:  # OSError, ValueError, RuntimeError, of httpx, of YAML, ...
        raise UserError(f"{place} cannot be read ({clip(first_line(error), 300)}).") from error
    split = place.split or next(iter(splits))
    if split not in splits or (len(splits) > 1 and not place.split):
        example = place._replace(split=next(iter(splits)))
        raise UserError(f"The splits are {', '.join(splits)}: name one of them, such as {example}.")
    root = f"hf://datasets/{place.source}@{place.revision}/"
    label, files = place._replace(config="", split=""), []
    for url in map(str, splits[split]):
        # A card may refer to files of anywhere, which no commit of this data set pins
        if not url.startswith(root) or ".." in url.split("/") or not FORMATS.search(url):
            kinds = "its own files alone, in parquet, JSON lines or JSON"
            raise UserError(f"{place} cannot be read, it refers to {url}: {kinds}.")
        files.append(DataFile(Path(str(label), url.removeprefix(root)), url))
    return files


@contextmanager
def open_file(file: DataFile) -> Iterator[IO[bytes]]:
    """Open a file for reading, piece by piece as it is read. UserError: the hub stops answering."""
    import httpx
    from huggingface_hub import HfFileSystem

    try:
        with HfFileSystem(token=token()).open(file.url, "rb") as stream:
            yield stream
    except httpx.HTTPError as error:
        raise UserError(f"{file.path} cannot be read further ({type(error).__name__}).") from error
