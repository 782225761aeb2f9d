"""Data sets of the Hugging Face hub, as `data get` brings them: which files of which commit.

huggingface_hub loads them; a file whose checksum in tasks/downloads.yaml differs gets no name. An
access token is taken from HF_TOKEN alone, and no message repeats what a server says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError, first_line
from config.files import make_folder, read_yaml


class File(NamedTuple):
    """Name a file of a data set repository of the hub."""

    repo: str
    path: str
    sha256: str = ""  # at the repository's commit in PINS; "" if unknown
    to: str = ""  # its name in our folder, if not the last part of `path`

    @property
    def name(self) -> str:
        return self.to or Path(self.path).name


_TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))
PINS: dict[str, str] = _TABLE["pins"]  # repository -> commit
SOURCES: dict[str, tuple[str, str, list[File]]] = {  # name -> description, licence, files
    name: (source["about"], source["licence"], [File(**file) for file in source["files"]])
    for name, source in _TABLE["sources"].items()
}


def get(name: str, out: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Bring the files of a source into the folder `out`/`name`; return their paths in table order.

    What is there is kept if it has the known checksum. UserError: unknown name, no hub, another
    content, no room or no right to write.
    """
    if name not in SOURCES:
        raise UserError(f"There is no data set {name!r} to get; there are {', '.join(SOURCES)}.")
    description, licence, files = SOURCES[name]
    folder = out / name
    say(f"{name}: {description}. Licence: {licence}. What lies in {folder} is checked and kept.")
    make_folder(folder)  # before the network is asked for what it could not hold
    try:
        for file in files:
            if not (place := folder / file.name).exists():
                say(f"{place} is loaded.")
                _fetch(file, folder / ".loading").replace(place)
            _check(place, file)
        shutil.rmtree(folder / ".loading", ignore_errors=True)
    except OSError as error:
        raise UserError(f"{name} cannot be kept in {out} ({first_line(error)}).") from error
    say(f"{name}: {len(files)} files in {folder}, checked.")
    return [folder / file.name for file in files]


def _fetch(file: File, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # a warning would repeat the address, a password in it too
    with answers(f"{file.path} of {file.repo}"):
        path = hf_hub_download(
            file.repo,
            file.path,
            repo_type="dataset",
            revision=PINS[file.repo],
            local_dir=folder,
            token=token(),
        )
    _check(Path(path), file)
    return Path(path)


def _check(path: Path, file: File) -> None:
    with path.open("rb") as stream:
        if file.sha256 not in ("", hashlib.file_digest(stream, "sha256").hexdigest()):
            commit = PINS[file.repo]
            raise UserError(f"{path} is not {file.path} of {file.repo} at {commit}: remove it.")


def commit_of(repo: str, revision: str) -> str:
    """Return the commit that a revision of a data set stands for; UserError if there is none."""
    from huggingface_hub import HfApi

    with answers(f"{repo} at {revision}"):
        return HfApi(token=token()).dataset_info(repo, revision=revision, timeout=10).sha


def token() -> str | bool:
    """Return the access token in HF_TOKEN; False, so that none is searched for elsewhere."""
    return os.environ.get("HF_TOKEN") or False


@contextmanager
def answers(what: str) -> Iterator[None]:
    """Turn what goes wrong at the hub into one sentence, without what the server says."""
    import httpx
    from huggingface_hub import errors

    hub = errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled
    malformed = ValueError, LookupError, TypeError, AttributeError, AssertionError
    try:
        yield
    except (*hub, httpx.HTTPError, httpx.InvalidURL, *malformed) as error:
        cause = error.__cause__ or error  # of a file that is not in a cache either
        status = getattr(getattr(cause, "response", None), "status_code", "")
        reason = f"{type(cause).__name__} {status}".strip()
        raise UserError(
            f"{what} cannot be read from the hub ({reason}); what is private or gated needs "
            "HF_TOKEN."
        ) from None
