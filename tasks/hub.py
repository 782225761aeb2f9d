"""Data sets of the hub by name, at one commit: hf:ORG/NAME[/CONFIG][@REVISION][:SPLIT].

Holds: `Place`, `pin` and `pinned` (the commit of a name), `data_files`, `open_file`.
Leaves out: the forms of their records (tasks/readers.py), whole sets that are checked and kept
(tasks/downloads.py). No torch.
Exercise it: `python cli.py data look hf:rajpurkar/squad:validation`. Read next: tasks/readers.py.

`datasets` says which files a split consists of; they are streamed, and nothing is kept on disk. It
does not read them: its JSON reader turns answers such as "1994-05-01" into dates and HotpotQA's
[title, [sentences]] pairs into texts, and cannot name the line of an error. A name without a
revision, or with a branch or tag, stands for the commit of this moment: `pin` puts that commit in
its place, so that a run's settings name what it read.

hf:./FOLDER[:SPLIT] is a folder with files as they lie on the hub; it has no revision and no
configuration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from config.errors import UserError, clip
from tasks.downloads import commit_of, token

PREFIX = "hf:"
NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?(?:@([\w./-]+))?(?::([\w.-]+))?")
FOLDER = re.compile(r"([./~].*?)()()(?::([\w.-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTED = re.compile(r"(.*?)(=[\d.e+-]+)?", re.DOTALL)
FORMATS = re.compile(r"\.(parquet|(json|jsonl)(\.gz)?)$")
Settings = TypeVar("Settings")


def is_hub(path: str | Path) -> bool:
    """Tell whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


class Place(NamedTuple):
    """Name a split of a data set."""

    source: str  # ORG/NAME, or a folder
    config: str = ""
    revision: str = ""
    split: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read a name; UserError if it is none."""
        rest = text.removeprefix(PREFIX)
        match = (FOLDER if rest.startswith((".", "/", "~")) else NAME).fullmatch(rest)
        if not match:
            form = "hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG@REVISION:SPLIT"
            raise UserError(f"A data set of the hub is named by {form}, not {text!r}.")
        return cls(*(part or "" for part in match.groups()))

    def __str__(self) -> str:
        parts = ("", self.source), ("/", self.config), ("@", self.revision), (":", self.split)
        return PREFIX + "".join(sign + part for sign, part in parts if part)

    @property
    def folder(self) -> str:
        """The absolute path of a local folder; "" of a data set of the hub."""
        local = self.source.startswith((".", "/", "~"))
        return str(Path(self.source).expanduser().resolve()) if local else ""

    @property
    def at_commit(self) -> Place:
        """The name with the hub's commit; one that has a commit, or a local folder's, as it is."""
        from huggingface_hub import constants

        if self.folder or COMMIT.fullmatch(self.revision):
            return self
        if constants.HF_HUB_OFFLINE:
            advice = "unset it, or give a file or a folder instead"
            raise UserError(f"{self} cannot be read while HF_HUB_OFFLINE is set: {advice}.")
        return self._replace(revision=commit_of(self.source, self.revision or "main"))


class DataFile(NamedTuple):
    """Name a file of a split."""

    path: Path  # to show, and to recognise forms by
    url: str  # to open: of the hub, or a path


# ---------------------------------------------------------------- the commit


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
    changed = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, str) and PREFIX in value:
            parts = (WEIGHTED.fullmatch(part).groups("") for part in value.split(","))
            changed[field.name] = ",".join(pin(name, say) + weight for name, weight in parts)
        elif isinstance(value, tuple) and any(map(is_hub, value)):
            changed[field.name] = tuple(pin(item, say) for item in value)
    return dataclasses.replace(settings, **changed) if changed else settings


# ---------------------------------------------------------------- the files


def data_files(path: str | Path) -> list[DataFile]:
    """Return the files of the named split, in order; that of the only split if none is named.

    UserError: no hub, no such data set, configuration or split, or files of a format that the
    readers do not know.
    """
    # A commit is looked up too: `datasets` would say less, half a minute later
    place = Place.parse(str(path)).at_commit
    splits = _splits(place)
    split = place.split or next(iter(splits))
    if split not in splits or (len(splits) > 1 and not place.split):
        example = place._replace(split=next(iter(splits)))
        raise UserError(f"The splits are {', '.join(splits)}: name one of them, such as {example}.")
    root = place.folder or f"hf://datasets/{place.source}@{place.revision}"
    label, files = place._replace(config="", split=""), []
    for url in splits[split]:
        # A card may refer to files of anywhere, which no commit of this data set pins
        if not url.startswith(f"{root}/") or ".." in url.split("/"):
            raise UserError(f"{place} refers to {url}, which is not a part of it: name that place.")
        if not FORMATS.search(url):
            kinds = "only parquet, JSON lines and JSON can be"
            raise UserError(f"{place} cannot be read, its files are like {url}: {kinds}.")
        files.append(DataFile(Path(str(label), url.removeprefix(f"{root}/")), url))
    return files


def _splits(place: Place) -> dict[str, list[str]]:
    """Return the files of each split of a configuration, as `datasets` finds them."""
    from unittest.mock import patch

    import datasets
    import datasets.data_files

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    # its card may name any address, of which `datasets` would ask at once
    asks = patch.object(datasets.data_files, "url_to_fs", _here) if place.folder else nullcontext()
    named = place.folder or place.source, place.config or None
    try:
        with asks:
            builder = datasets.load_dataset_builder(
                *named, revision=place.revision or None, token=token()
            )
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, RuntimeError, of httpx, of YAML, ...
        reason = clip(" ".join(f"{error}".split()).rstrip(". "), 300)
        raise UserError(f"{place} cannot be read ({reason}).") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    files = getattr(builder.config, "data_files", None)
    if not files:  # of a copy that `datasets` has kept of another day
        raise UserError(f"{place} cannot be read: the hub does not answer, or it has no files.")
    return {str(split): [str(url) for url in urls] for split, urls in files.items()}


def _here(url: str, **options: object):
    """Do as fsspec's `url_to_fs` for a path of this machine; UserError for any other address."""
    from fsspec.core import url_to_fs

    if "://" in url.removeprefix("file://") or "::" in url:
        raise UserError(
            f"The data set's card refers to {url}, of which nothing is asked: remove it."
        )
    return url_to_fs(url, **options)


@contextmanager
def open_file(file: DataFile) -> Iterator[IO[bytes]]:
    """Open a file for reading, piece by piece as it is read. UserError: the hub stops answering."""
    import httpx
    from huggingface_hub import HfFileSystem

    if not file.url.startswith("hf://"):
        with Path(file.url).open("rb") as stream:
            yield stream
        return
    try:
        with HfFileSystem(token=token()).open(file.url, "rb") as stream:
            yield stream
    except httpx.HTTPError as error:
        reason = f"{type(error).__name__}, {error}".rstrip(". ")
        raise UserError(f"{file.path} cannot be read further, no answer: {reason}.") from error
