"""Data sets from the Hugging Face hub: which files of which commit, and the check of their content.

Holds: `SOURCES`, `PINS` (the commits), `get`, `commit_of`. Leaves out: reading the files
(tasks/readers.py). No torch.
Exercise it: `python cli.py data get musique`, `pytest tests/tasks/test_downloads.py`.
Read next: tasks/readers.py.

huggingface_hub lists and loads. Every file is checked by size and checksum against the hub's
listing of its commit, and against the checksum of tasks/downloads.yaml where one is known; a file
that differs does not get its name.

`hf_hub_download` of version 1.33 deletes the partial file when a download breaks off, so its
`http_get` is called on a file of ours, which the next call continues. An access token is taken from
HF_TOKEN alone and appears in no message.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError
from config.files import read_yaml


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


class Content(NamedTuple):
    """What a file must hold: a size in bytes, and a sha256 or, of a small file, git's blob id."""

    size: int
    checksum: str

    def differs(self, path: Path) -> bool:
        """Tell whether a file holds anything else."""
        size = path.stat().st_size
        with path.open("rb") as file:
            if len(self.checksum) == 64:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                checksum = hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest()
        return (size, checksum) != self


def get(name: str, out: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Bring the files of a source into the folder `out`/`name`; return their paths in table order.

    Missing files are downloaded; those present are checked, without a request where their checksum
    is known.
    say: receives the lines for the user. UserError: unknown name, no hub, content that is not what
    is known or listed, no room or no right to write, two calls at once.
    """
    from filelock import FileLock, Timeout

    if name not in SOURCES:
        raise UserError(f"There is no data set {name!r} to get; there are {', '.join(SOURCES)}.")
    description, licence, files = SOURCES[name]
    folder, listing = out / name, cache(_listing)
    say(f"{name}: {description}. Licence: {licence}. What lies in {folder} is checked and kept.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            for file in files:
                _bring(file, folder, listing, say)
    except Timeout:
        raise UserError(f"Another download into {folder} is under way: wait for it.") from None
    except OSError as error:
        why = f"{name} cannot be kept in {out} ({error.strerror or error})"
        raise UserError(f"{why}; what was loaded stays, and the same command goes on.") from error
    say(f"{name}: {len(files)} files in {folder}, checked.")
    return [folder / file.name for file in files]


def _bring(file: File, folder: Path, listing: Callable, say: Callable[[str], None]) -> None:
    """Check a file that is in its place, else download it, check it and put it there."""
    place, known = folder / file.name, file.sha256
    if known and place.exists() and not Content(place.stat().st_size, known).differs(place):
        return
    commit, listed = listing(file.repo, PINS[file.repo])
    expected = listed.get(file.path)
    if expected is None or known not in ("", expected.checksum):
        what = "another" if expected else "no"
        raise UserError(f"The hub has {what} {file.path} in {file.repo} at {commit} than is known.")
    if place.exists():
        if expected.differs(place):
            raise UserError(f"{place} is not {file.path} of {file.repo} at {commit}: move it away.")
        return
    say(f"{place} is loaded from {_clean(_endpoint())}, {expected.size / 1e6:.1f} MB.")
    partial = _fetch(file, commit, expected, folder)
    if expected.differs(partial):
        partial.unlink()
        raise UserError(
            f"What came as {file.path} is not what the hub lists at {commit}; it was deleted. "
            "Try again; if that does not help, something on the way changes files."
        )
    partial.replace(place)


def commit_of(repo: str, revision: str = "main") -> str:
    """Return the commit that a revision of a data set stands for; UserError if the hub gives
    none."""
    return _listing(repo, revision)[0]


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def token() -> str | bool:
    """Return the access token in HF_TOKEN; False, so that none is searched for elsewhere."""
    return os.environ.get("HF_TOKEN") or False


def _listing(repo: str, revision: str) -> tuple[str, dict[str, Content]]:
    """Return the commit that a revision names, and what its files hold by their paths."""
    from huggingface_hub import HfApi, constants

    with _answers(repo, revision):
        info = HfApi(endpoint=_endpoint(), token=token()).dataset_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not info.sha or (re.fullmatch("[0-9a-f]{40}", revision) and info.sha != revision):
            raise ValueError(f"the commit {info.sha}")
        return info.sha, {
            entry.rfilename: Content(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in info.siblings or []
            if entry.size is not None and (entry.lfs or entry.blob_id)
        }


def _fetch(file: File, commit: str, expected: Content, folder: Path) -> Path:
    """Download a file beside its place and return the path; the content is not checked here.

    The name contains the expected checksum; such a file of an earlier call is continued at its end.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, logging

    logging.set_verbosity_error()  # a warning would repeat the address, a password in it too
    partial = folder / f"{file.name}.{expected.checksum[:12]}.partial"
    url = hf_hub_url(
        file.repo, file.path, repo_type="dataset", revision=commit, endpoint=_endpoint()
    )
    # Pieces of a compressed transfer could not be joined
    headers = build_hf_headers(token=token()) | {"accept-encoding": "identity"}
    with partial.open("ab") as stream, _answers(file.repo, commit):
        if stream.tell() < expected.size:
            http_get(url, stream, resume_size=stream.tell(), headers=headers)
    return partial


@contextmanager
def _answers(repo: str, revision: str) -> Iterator[None]:
    """Turn what goes wrong at the hub into one sentence, without what the server says."""
    import httpx
    from huggingface_hub import errors

    malformed = ValueError, LookupError, TypeError, AttributeError
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = f"{type(error).__name__}, HTTP {error.response.status_code}"
        reason, cause = f"{status}; what is private or gated needs HF_TOKEN", error
    except errors.OfflineModeIsEnabled as error:
        reason, cause = "HF_HUB_OFFLINE is set", error
    except (httpx.HTTPError, httpx.InvalidURL, *malformed) as error:
        reason, cause = f"no answer of a hub: {type(error).__name__}, {error}", error
    else:
        return
    reason = " ".join(reason.split()).strip(" .")
    why = f"{repo} at {revision} cannot be read from {_endpoint()} ({reason})"
    raise UserError(_clean(f"{why}; what was loaded stays.")) from cause


def _clean(text: str) -> str:
    """Remove the access token, and user names and passwords in URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text.replace(token() or "\0", "HF_TOKEN"))
