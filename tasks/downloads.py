"""Data sets from the Hugging Face hub: which files of which commit, and the check of their content.

Holds: `SOURCES`, `PINS` (the commits), `get`, the lock file `downloads.json`; `commit_of`.
Leaves out: reading the files (tasks/readers.py). No torch.
Exercise it: `python cli.py data get musique`, `pytest tests/tasks/test_downloads.py`.
Read next: tasks/readers.py.

Every file is checked, by size and checksum, against the hub's listing of one commit, against the
checksum below where one is known, and against FOLDER/downloads.json, which records commit, size and
sha256 of the first download. A file that differs does not get its name. The commits and checksums
below come from public code and from stored pages of the hub; none was tried against the hub when
this was written. For 2WikiMultiHopQA's train file, MemAgent's parquets and 7 of its 10 eval sets no
checksum at the commit was available: there the hub's own listing is trusted once, and the lock from
then on.

The listing comes through huggingface_hub; the bytes are read here, because its version 1.33 deletes
the partial file when a download breaks off. An access token is taken from HF_TOKEN alone and
appears in no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import UserError

HUB = "https://huggingface.co"
LOCK = "downloads.json"
TRIES = 4  # of one file in one call, a second apart
ENTRY = ("repo", "path", "commit", "size", "sha256")  # of the lock, under NAME/file name


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
PINS = {  # any other repository is taken at its newest commit, which the lock then keeps
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


class _Refused(Exception):
    """Report, in a few words, why the hub gave nothing; `_Download` completes the sentence."""


def get(name: str, out: Path, revision: str = "", say: Callable[[str], None] = print) -> list[Path]:
    """Bring the files of a source into the folder `out`/`name`; return their paths in table order.

    Missing files are downloaded; those present are verified. A set that matches its record makes no
    request. Without an answer the download gives up after one time-out.
    revision: a commit, branch or tag of the hub, instead of the recorded or pinned commit; files
    that differ from it are replaced. say: receives the lines for the user. UserError: unknown name,
    no hub, content that differs, damaged lock, no room or no right to write, two calls at once.
    """
    from filelock import FileLock, Timeout

    if name not in SOURCES:
        raise UserError(f"There is no data set {name!r} to get; there are {', '.join(SOURCES)}.")
    if revision and len({file.repo for file in SOURCES[name][2]}) > 1:
        limit = "one revision cannot be given for them all"
        raise UserError(f"{name} comes from several repositories; {limit}.")
    try:
        (out / name).mkdir(parents=True, exist_ok=True)
        with FileLock(out / f".{LOCK}.lock", timeout=0):
            return _Download(name, out, revision, say).run()
    except Timeout:
        advice = "wait for it, or name another folder"
        raise UserError(f"Another download into {out} is under way; {advice}.") from None
    except OSError as error:
        why = f"{name} cannot be kept in {out} ({error.strerror or error})"
        raise UserError(f"{why}; what was loaded stays, and the same command goes on.") from error


def commit_of(repo: str, revision: str = "main") -> str:
    """Return the commit that a revision of a data set stands for; UserError if the hub gives
    none."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    try:
        return _listing(endpoint, os.environ.get("HF_TOKEN") or False, repo, revision)[0]
    except _Refused as refused:
        reason = str(refused).strip(" .")
        raise UserError(_clean(f"{repo} cannot be read from {endpoint} ({reason}).")) from refused


class _Download:
    """Bring the files of one source into its folder, and record them in the lock."""

    def __init__(self, name: str, out: Path, revision: str, say: Callable[[str], None]):
        self.name, self.out, self.revision, self.say = name, out, revision, say
        self.description, self.licence, self.files = SOURCES[name]
        self.places = {file: out / name / file.name for file in self.files}
        self.lock = _read_lock(out / LOCK)
        self.entries: dict[File, dict[str, Any]] = {}
        for file in self.files:
            entry = self.lock.get(f"{name}/{file.name}")
            if entry and (entry["repo"], entry["path"]) == (file.repo, file.path):
                self.entries[file] = entry
        # A set is completed at the commit at which it was begun
        begun = {file.repo: entry["commit"] for file, entry in self.entries.items()}
        self.commits = {
            file: revision
            or self.entries.get(file, {}).get("commit")
            or begun.get(file.repo)
            or PINS.get(file.repo, "main")
            for file in self.files
        }
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
        self.token = os.environ.get("HF_TOKEN") or False  # False: no search for one elsewhere
        self.listings: dict[tuple[str, str], tuple[str, dict[str, dict[str, Any]]]] = {}

    def run(self) -> list[Path]:
        todo = list(self.files)
        try:
            for file in self.files:
                self.bring(file)
                todo.remove(file)
        except _Refused as refused:
            raise self.failure(refused, todo) from refused
        place = f"{len(self.files)} files in {self.out / self.name}"
        self.say(f"{self.name}: {place}, as recorded in {self.out / LOCK}.")
        return list(self.places.values())

    def bring(self, file: File) -> None:
        """Verify a file that is in place, else download, verify and record it."""
        known = self.reference(file)
        if self.in_place(file, self.commits[file], known):
            return
        commit, listed = self.listing(file)
        if file.path not in listed:
            missing = f"the hub has no {file.path} in {file.repo} at {commit}"
            raise UserError(f"{self.name}: {missing}.")
        if why := _differs(listed[file.path], known):
            why = f"the hub lists another {file.path} at {commit} than is known ({why})"
            advice = "If the new one is wanted, give its commit as the revision"
            raise UserError(f"{self.name}: {why}; nothing was replaced. {advice}.")
        expected = known | listed[file.path]
        if self.in_place(file, commit, expected):
            return
        place = self.places[file]
        partial = _fetch(self.endpoint, self.token, file, commit, expected, place, self.say)
        content = _content(partial, expected)
        if why := _differs(content, expected):
            partial.unlink()
            why = f"what came as {file.path} is not what the hub lists at {commit} ({why})"
            advice = "Try again; if that does not help, something on the way changes files"
            raise UserError(f"{self.name}: {why}; it was deleted. {advice}.")
        partial.replace(place)
        self.record(file, commit, content)

    def reference(self, file: File) -> dict[str, Any]:
        """Return size and sha256 as recorded, else as in the table for the pinned commit; or {}."""
        commit, entry = self.commits[file], self.entries.get(file, {})
        if entry.get("commit") == commit:
            return {"size": entry["size"], "sha256": entry["sha256"]}
        if file.sha256 and commit == PINS.get(file.repo):
            return {"size": file.size, "sha256": file.sha256}
        return {}

    def listing(self, file: File) -> tuple[str, dict[str, dict[str, Any]]]:
        """Return the hub's listing of the file's repository, requested once per commit."""
        if not self.listings:
            self.say(f"{self.name}: {self.description}. Licence: {self.licence}.")
            if self.endpoint != HUB:
                token = ", and gets HF_TOKEN" if self.token else ""
                self.say(_clean(f"HF_ENDPOINT is set: {self.endpoint} is asked{token}."))
        key = file.repo, self.commits[file]
        if key not in self.listings:
            self.listings[key] = _listing(self.endpoint, self.token, *key)
        return self.listings[key]

    def in_place(self, file: File, commit: str, expected: dict[str, Any]) -> bool:
        """Tell whether the file exists with the expected content, and record it if so.

        One that differs is renamed with a UserError, or left to be replaced if a revision was
        given.
        """
        place = self.places[file]
        if not (expected and place.exists()):
            return False
        content = _content(place, expected)
        why = _differs(content, expected)
        if not why:
            self.record(file, commit, content)
        elif not self.revision:
            place.replace(aside := place.with_name(place.name + ".differs"))
            state = f"{place} is not what was meant ({why}); it is {aside.name} now"
            raise UserError(f"{state}. The same command loads the right one.")
        return not why

    def record(self, file: File, commit: str, content: dict[str, Any]) -> None:
        """Enter a file into the lock, unless it is there as it should be."""
        values = file.repo, file.path, commit, content["size"], content["sha256"]
        entry = dict(zip(ENTRY, values, strict=True))
        if self.lock.get(f"{self.name}/{file.name}") != entry:
            self.lock[f"{self.name}/{file.name}"] = entry
            text = json.dumps(self.lock, indent=1, sort_keys=True) + "\n"
            (new := self.out / f"{LOCK}.new").write_text(text, encoding="utf-8")
            new.replace(self.out / LOCK)

    def failure(self, refused: _Refused, todo: list[File]) -> UserError:
        """Explain a refusal of the hub, and how to bring the rest of the files by hand."""
        settings = " and ".join(
            f"{key} is {'' if os.environ.get(key) else 'not '}set"
            for key in ("HF_ENDPOINT", "HF_HUB_OFFLINE")
        )
        by_hand = ", ".join(
            f"{f.path} of the data set {f.repo} at {self.commits[f]} as {self.places[f]}"
            for f in todo
        )
        reason = str(refused).strip(" .")
        why = f"{self.name} cannot be loaded from {self.endpoint} ({reason}); {settings}."
        advice = "What was loaded is kept, and the same command goes on; or put by hand"
        return UserError(_clean(f"{why} {advice}: {by_hand}."))


def _listing(
    endpoint: str, token: str | bool, repo: str, revision: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the commit that a revision names and, by path, size and sha256 (small files: git's
    blob id)."""
    import httpx
    from huggingface_hub import HfApi, constants, errors

    reasons = {
        errors.RevisionNotFoundError: f"{repo} has no revision {revision}",
        errors.GatedRepoError: f"{repo} is gated: accept its terms on the hub and set HF_TOKEN",
        errors.RepositoryNotFoundError: f"there is no {repo}, or not for this HF_TOKEN",
    }
    offline = errors.OfflineModeIsEnabled, httpx.HTTPError, httpx.InvalidURL
    malformed = ValueError, LookupError, TypeError
    try:
        api = HfApi(endpoint=endpoint, token=token)
        info = api.dataset_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        files = {
            entry.rfilename: {"sha256": entry.lfs.sha256, "size": entry.lfs.size}
            if entry.lfs
            else {"blob": entry.blob_id, "size": entry.size}
            for entry in info.siblings or []
        }
    except errors.HfHubHTTPError as error:  # its own text repeats the server's
        status = f"it answers HTTP {error.response.status_code}"
        raise _Refused(reasons.get(type(error), status)) from error
    except (*offline, *malformed) as error:
        raise _Refused(f"no answer of a hub: {type(error).__name__}, {error}") from error
    if not info.sha or (re.fullmatch("[0-9a-f]{40}", revision) and info.sha != revision):
        raise _Refused(f"asked for {revision} of {repo} it answers with {info.sha}")
    return info.sha, files


def _fetch(
    endpoint: str,
    token: str | bool,
    file: File,
    commit: str,
    expected: dict[str, Any],
    place: Path,
    say: Callable,
) -> Path:
    """Download a file beside its place and return the path; the content is not checked here.

    The name contains the expected checksum; such a file of an earlier call is continued at its end.
    """
    import httpx
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    size, checksum = expected["size"], expected.get("sha256") or expected.get("blob")
    if not size or not checksum:
        raise _Refused(f"it gives no size or no checksum of {file.path}")
    partial = place.with_name(f"{place.name}.{checksum[:12]}.partial")
    url = hf_hub_url(file.repo, file.path, repo_type="dataset", revision=commit, endpoint=endpoint)
    # Pieces of a compressed transfer could not be joined
    headers = build_hf_headers(token=token) | {"accept-encoding": "identity"}
    options = {"follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    last_report = 0.0

    def report(done: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > 10:
            last_report = time.monotonic()
            say(f"{place}: {done / 1e6:.1f} of {size / 1e6:.1f} MB")

    def receive(done: int) -> str:
        """Append the bytes from `done` on; return the reason to give if some are missing."""
        ranged = headers | ({"range": f"bytes={done}-"} if done else {})
        with get_session().stream("GET", url, headers=ranged, **options) as answer:
            if answer.status_code not in (200, 206):
                is_denied = answer.status_code in (401, 403)
                advice = ", set HF_TOKEN if the data set is gated" if is_denied else ""
                return f"it answers HTTP {answer.status_code} for {file.path}{advice}"
            _store(answer, partial, size, report)
        return f"{file.path} ends early"

    tries, why = 0, ""
    while (done := partial.stat().st_size if partial.exists() else 0) < size:
        if tries == TRIES:
            raise _Refused(why)
        time.sleep(1 if tries else 0)
        tries += 1
        if shutil.disk_usage(place.parent).free < size - done:
            missing = f"{(size - done) / 1e6:.1f} MB of {file.path}"
            raise _Refused(f"the disk has no room for the {missing} still to come")
        try:
            why = receive(done)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"{file.path} broke off: {type(error).__name__}, {error}"
    return partial


def _store(answer: Any, partial: Path, size: int, report: Callable[[int], None]) -> None:
    """Append the bytes of an answer to the file, or begin it anew if the answer is not a range."""
    with partial.open("ab" if answer.status_code == 206 else "wb") as stream:
        # Chunks as they arrive: a buffer for a fixed size would be lost with the connection
        for chunk in answer.iter_bytes():
            stream.write(chunk)
            report(stream.tell())
            if stream.tell() > size:
                break  # too long: the check will refuse it


def _read_lock(path: Path) -> dict[str, dict[str, Any]]:
    """Read the lock: NAME/file name -> entry; {} if there is none yet."""
    try:
        lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: {key: entry[key] for key in ENTRY} for name, entry in lock.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "delete it, and the files are checked against the hub again"
        raise UserError(f"{path} is damaged; {advice}.") from error


def _content(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return size and sha256 of a file, and git's blob id if expected (of files under 10 MB)."""
    size, blob = path.stat().st_size, None
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if expected.get("blob"):
        blob = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
    return {"size": size, "sha256": sha256, "blob": blob}


def _differs(content: dict[str, Any], expected: dict[str, Any]) -> str:
    """Describe how two descriptions of a file differ in what both state; "" if they agree."""
    pairs = ((key, content.get(key), expected.get(key)) for key in ("size", "sha256", "blob"))
    return ", ".join(
        f"{key} {actual} instead of {wanted}"
        for key, actual, wanted in pairs
        if None not in (actual, wanted) and actual != wanted
    )


def _clean(text: str) -> str:
    """Remove the access token, and user names and passwords in URLs."""
    token = os.environ.get("HF_TOKEN")
    return re.sub(r"//[^/@\s]*@", "//", text.replace(token, "HF_TOKEN") if token else text)
