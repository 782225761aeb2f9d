"""Data sets from the Hugging Face hub: which files of which commit, and the check of their content.

Holds: `SOURCES`, `PINS` (the commits), `get`, `commit_of`. Leaves out: reading the files
(tasks/readers.py). No torch.
Exercise it: `python cli.py data get musique`, `pytest tests/tasks/test_downloads.py`.
Read next: tasks/readers.py.

huggingface_hub lists and loads. Every file is checked by size and checksum against the hub's
listing of its commit, and against the checksum below where one is known; a file that differs does
not get its name. The commits and checksums below come from public code and from stored pages of the
hub; none was tried against the hub when this was written.

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

HUB = "https://huggingface.co"


class File(NamedTuple):
    """Name a file of a data set repository of the hub.

    size (bytes) and sha256 are those at the repository's commit in PINS, None if unknown.
    """

    repo: str
    path: str
    size: int | None = None
    sha256: str | None = None
    to: str = ""  # its name in our folder, if not the last part of `path`

    @property
    def name(self) -> str:
        return self.to or Path(self.path).name


HOTPOTQA, FLASHRAG = "hotpotqa/hotpot_qa", "RUC-NLPIR/FlashRAG_datasets"
MUSIQUE, MEMAGENT = "dgslibisey/MuSiQue", "BytedTsinghua-SIA/hotpotqa"
SQUAD, ESSAYS = "rajpurkar/squad", "baber/paul_graham_essays"
PINS = {
    HOTPOTQA: "1908d6afbbead072334abe2965f91bd2709910ab",
    FLASHRAG: "bcafb8dd07d453be3cbeeeb3f78be1841bddf92c",
    MUSIQUE: "c8f4f8c9465fb69d31a8eae894c3fd509c4ca321",
    MEMAGENT: "27275ff4fee67ac0acb6478e405e7ac07efbdc1a",
    SQUAD: "7b6d24c440a36b6815f21b70d25016731768db1f",
    ESSAYS: "792d672b77d1a67720f7e9820d646358fc18792e",
}
HOTPOTQA_DEV = File(
    HOTPOTQA,
    "distractor/validation-00000-of-00001.parquet",
    27452575,
    "c20b638ca82b21d04fe12e14ff417ad05153d4d215a65de54497fca4e972f7c6",
)
SOURCES: dict[str, tuple[str, str, list[File]]] = {  # name -> description, licence, files
    "hotpotqa": (
        "HotpotQA, distractor setting: train and dev questions with ten passages each",
        "CC BY-SA 4.0", [
        File(HOTPOTQA, "distractor/train-00000-of-00002.parquet", 165624177,
             "76d3bb3048a7cc73c1958107c0c5872a00d7e7d00c105b81e92f6769e7822e68"),
        File(HOTPOTQA, "distractor/train-00001-of-00002.parquet", 166162479,
             "713661628434fbb19fff7392e2e321e4ed107e3c7c7784d0690946e5f722763f"),
        HOTPOTQA_DEV]),
    "2wiki": (
        "2WikiMultiHopQA as FlashRAG publishes it: "
        "15,000 train and 12,576 dev questions with passages",
        "CC BY-SA 4.0", [
        File(FLASHRAG, "2wikimultihopqa/train.jsonl"),
        File(FLASHRAG, "2wikimultihopqa/dev.jsonl", 54682944,
             "b4d74d73d1cb3c0632c665a85e1e5060e3411968b807721618cfd2464fc905e3")]),
    # Not FlashRAG's: its dev file of 5.6 MB cannot hold the paragraphs that take 30.4 MB here
    "musique": (
        "MuSiQue-Answerable 1.0: "
        "train and dev questions of 2 to 4 hops with up to 20 paragraphs each",
        "CC BY 4.0", [
        File(MUSIQUE, "musique_ans_v1.0_train.jsonl", None,
             "83a75b1e11e4e9bb8f8308e72ac40ca617ae4431b3a0d955b61cab259248490a"),
        File(MUSIQUE, "musique_ans_v1.0_dev.jsonl", 30439728,
             "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b")]),
    "memagent-train": (
        "MemAgent's training and validation sets, made from HotpotQA",
        "not known; HotpotQA is CC BY-SA 4.0", [
        File(MEMAGENT, "hotpotqa_train_32k.parquet"),
        File(MEMAGENT, "hotpotqa_dev.parquet")]),
    "memagent-eval": (
        "MemAgent's test sets, 128 questions over N documents; "
        "from 12,800 on passage numbers instead of texts",
        "not known; HotpotQA is CC BY-SA 4.0", [
        File(MEMAGENT, "eval_50.json"), File(MEMAGENT, "eval_100.json"),
        File(MEMAGENT, "eval_200.json"),
        File(MEMAGENT, "eval_400.json", 29652378,
             "da11b9e4fa986476e0d29cffc4e079b0bf60b761e40dbe18fea182cd663dd9bb"),
        File(MEMAGENT, "eval_800.json"),
        File(MEMAGENT, "eval_1600.json", 118487493,
             "1e103e0dfc05ad5326f6e105d22e047b70dc23149943395f9895cc73c29c681b"),
        File(MEMAGENT, "eval_3200.json", 236959262,
             "1a1c25b721ce303356aab899005fc17d8a90b8bb3624e9fbf4b97305dae948fe"),
        File(MEMAGENT, "eval_6400.json"), File(MEMAGENT, "eval_12800.json"),
        File(MEMAGENT, "eval_25600.json")]),
    "ruler-assets": (
        "What RULER's tasks are made from: SQuAD, HotpotQA, Paul Graham's essays",
        "CC BY-SA 4.0; essays: not known", [
        File(SQUAD, "plain_text/validation-00000-of-00001.parquet", None,
             "8c6646d36bd5a95061e076788cf3161d11f6f3e7d625dac7a83bbed0a49f69f7", "squad.parquet"),
        HOTPOTQA_DEV._replace(to="hotpotqa.parquet"),
        File(ESSAYS, "essays.parquet", None,
             "825448033be010042ffd6fc77c32bbcab61f2ef63196f0fc4bfbf5b388a1660e")]),
}  # fmt: skip


class Content(NamedTuple):
    """What a file must hold: a size in bytes, and a sha256 or, of a small file, git's blob id."""

    size: int | None
    checksum: str

    def difference(self, path: Path) -> str:
        """Describe how the file differs from this; "" if it does not."""
        size = path.stat().st_size
        if self.size not in (None, size):
            return f"size {size} instead of {self.size}"
        with path.open("rb") as file:
            if len(self.checksum) == 64:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                checksum = hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest()
        same = checksum == self.checksum
        return "" if same else f"checksum {checksum} instead of {self.checksum}"


def get(name: str, out: Path, revision: str = "", say: Callable[[str], None] = print) -> list[Path]:
    """Bring the files of a source into the folder `out`/`name`; return their paths in table order.

    Missing files are downloaded; those present are checked, without a request where their checksum
    is known. One that differs is replaced, and kept as NAME.differs.
    revision: a commit, branch or tag of the hub instead of the pinned commit. say: receives the
    lines for the user. UserError: unknown name, no hub, content that is not what is known or
    listed, no room or no right to write, two calls at once.
    """
    from filelock import FileLock, Timeout

    if name not in SOURCES:
        raise UserError(f"There is no data set {name!r} to get; there are {', '.join(SOURCES)}.")
    description, licence, files = SOURCES[name]
    if revision and len({file.repo for file in files}) > 1:
        raise UserError(f"{name} comes from several repositories: no revision fits them all.")
    folder, listing = out / name, cache(_listing)
    say(f"{name}: {description}. Licence: {licence}. What lies in {folder} is checked and kept.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            for file in files:
                _bring(file, folder, revision, listing, say)
    except Timeout:
        raise UserError(f"Another download into {folder} is under way: wait for it.") from None
    except OSError as error:
        why = f"{name} cannot be kept in {out} ({error.strerror or error})"
        raise UserError(f"{why}; what was loaded stays, and the same command goes on.") from error
    say(f"{name}: {len(files)} files in {folder}, checked.")
    return [folder / file.name for file in files]


def _bring(
    file: File, folder: Path, revision: str, listing: Callable, say: Callable[[str], None]
) -> None:
    """Check a file that is in its place, else download it, check it and put it there."""
    place, commit = folder / file.name, revision or PINS[file.repo]
    known = Content(file.size, file.sha256) if file.sha256 and not revision else None
    if known and place.exists() and not known.difference(place):
        return
    commit, listed = listing(file.repo, commit)
    if file.path not in listed:
        raise UserError(f"The hub has no {file.path} in {file.repo} at {commit}.")
    expected = listed[file.path]
    if known and (known.checksum != expected.checksum or known.size not in (None, expected.size)):
        raise UserError(
            f"The hub lists another {file.path} at {commit} than is known ({expected} instead of "
            f"{known}); nothing was replaced. If it is wanted, give its commit as the revision."
        )
    if place.exists() and not expected.difference(place):
        return
    say(f"{place} is loaded from {_clean(_endpoint())}, {expected.size / 1e6:.1f} MB.")
    partial = _fetch(file, commit, expected, folder)
    if why := expected.difference(partial):
        partial.unlink()
        raise UserError(
            f"What came as {file.path} is not what the hub lists at {commit} ({why}); it was "
            "deleted. Try again; if that does not help, something on the way changes files."
        )
    if place.exists():
        differs = place.replace(place.with_name(f"{place.name}.differs"))
        say(f"{place} was not {file.path} at {commit}; what it was is kept as {differs.name}.")
    partial.replace(place)


def commit_of(repo: str, revision: str = "main") -> str:
    """Return the commit that a revision of a data set stands for; UserError if the hub gives
    none."""
    return _listing(repo, revision)[0]


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB


def _token() -> str | bool:
    return os.environ.get("HF_TOKEN") or False  # False: no search for one elsewhere


def _listing(repo: str, revision: str) -> tuple[str, dict[str, Content]]:
    """Return the commit that a revision names, and what its files hold by their paths."""
    from huggingface_hub import HfApi, constants

    with _answers(repo, revision):
        info = HfApi(endpoint=_endpoint(), token=_token()).dataset_info(
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
    headers = build_hf_headers(token=_token()) | {"accept-encoding": "identity"}
    with partial.open("ab") as stream, _answers(file.repo, commit):
        if stream.tell() < expected.size:
            http_get(url, stream, resume_size=stream.tell(), headers=headers)
    return partial


@contextmanager
def _answers(repo: str, revision: str) -> Iterator[None]:
    """Turn what goes wrong at the hub into one sentence, without what the server says."""
    import httpx
    from huggingface_hub import errors

    reasons = {
        errors.RevisionNotFoundError: f"{repo} has no revision {revision}",
        errors.GatedRepoError: f"{repo} is gated: accept its terms on the hub and set HF_TOKEN",
        errors.RepositoryNotFoundError: f"there is no {repo}, or not for this HF_TOKEN",
    }
    malformed = ValueError, LookupError, TypeError, AttributeError
    try:
        yield
        return
    except errors.HfHubHTTPError as error:
        cause: Exception = error
        reason = reasons.get(type(error), f"it answers HTTP {error.response.status_code}")
    except errors.OfflineModeIsEnabled as error:
        cause, reason = error, "HF_HUB_OFFLINE is set"
    except (httpx.HTTPError, httpx.InvalidURL, *malformed) as error:
        cause, reason = error, f"no answer of a hub: {type(error).__name__}, {error}"
    reason = " ".join(reason.split()).strip(" .")
    why = f"{repo} at {revision} cannot be read from {_endpoint()} ({reason})"
    raise UserError(_clean(f"{why}; what was loaded stays.")) from cause


def _clean(text: str) -> str:
    """Remove the access token, and user names and passwords in URLs."""
    token = os.environ.get("HF_TOKEN")
    return re.sub(r"//[^/@\s]*@", "//", text.replace(token, "HF_TOKEN") if token else text)
