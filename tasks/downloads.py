"""Data sets from the Hugging Face hub: which files, of which commit, and whether what came is what was meant.

Holds: `SOURCES`, `PINS` (the commits), `get`, the lock file `downloads.json`. Leaves out: reading the files (data.py).
Exercise it: `python cli.py data get musique`, `pytest tests/tasks/test_downloads.py`. Read next: data.py.

Every file is checked, by size and checksum, against the hub's listing of one commit, against the checksum below where one is known,
and against FOLDER/downloads.json, which remembers commit, size and sha256 of what was loaded first. What differs does not get its
name. The commits and checksums below were found in public code and on stored pages of the hub; none was tried against the hub when
this was written. For 2WikiMultiHopQA's train file, MemAgent's parquets and 7 of its 10 eval sets no checksum at the commit was found:
there the hub's own listing is trusted once, and the lock from then on.

The listing comes through huggingface_hub; the bytes are read here, because its version 1.33 deletes what it has when a download breaks
off. An access token is taken from HF_TOKEN alone and stands in no message.
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
    """A file of a data set repository of the hub; size in bytes and sha256 at the repository's commit in PINS, None if not known."""

    repo: str
    path: str
    size: int | None = None
    sha256: str | None = None
    to: str = ""  # its name in our folder, if not the last part of `path`

    @property
    def name(self) -> str:
        return self.to or Path(self.path).name


HOTPOTQA, FLASHRAG, MUSIQUE = (
    "hotpotqa/hotpot_qa",
    "RUC-NLPIR/FlashRAG_datasets",
    "dgslibisey/MuSiQue",
)
MEMAGENT, SQUAD, ESSAYS = (
    "BytedTsinghua-SIA/hotpotqa",
    "rajpurkar/squad",
    "baber/paul_graham_essays",
)
PINS = {  # a repository that is not here is taken at its newest commit, which the lock then keeps
    HOTPOTQA: "1908d6afbbead072334abe2965f91bd2709910ab",
    FLASHRAG: "bcafb8dd07d453be3cbeeeb3f78be1841bddf92c",
    MUSIQUE: "c8f4f8c9465fb69d31a8eae894c3fd509c4ca321",
    MEMAGENT: "27275ff4fee67ac0acb6478e405e7ac07efbdc1a",
    SQUAD: "7b6d24c440a36b6815f21b70d25016731768db1f",
    ESSAYS: "792d672b77d1a67720f7e9820d646358fc18792e",
}
SOURCES: dict[str, tuple[str, str, list[File]]] = {  # name: what it is, licence, files
    "hotpotqa": (
        "HotpotQA, distractor setting: train and dev questions with ten passages each",
        "CC BY-SA 4.0",
        [
            File(HOTPOTQA, f"distractor/{path}.parquet", size, sha256)
            for path, size, sha256 in (
                (
                    "train-00000-of-00002",
                    165624177,
                    "76d3bb3048a7cc73c1958107c0c5872a00d7e7d00c105b81e92f6769e7822e68",
                ),
                (
                    "train-00001-of-00002",
                    166162479,
                    "713661628434fbb19fff7392e2e321e4ed107e3c7c7784d0690946e5f722763f",
                ),
                (
                    "validation-00000-of-00001",
                    27452575,
                    "c20b638ca82b21d04fe12e14ff417ad05153d4d215a65de54497fca4e972f7c6",
                ),
            )
        ],
    ),
    "2wiki": (
        "2WikiMultiHopQA as FlashRAG publishes it: 15,000 train and 12,576 dev questions with passages",
        "CC BY-SA 4.0",
        [
            File(FLASHRAG, "2wikimultihopqa/train.jsonl"),
            File(
                FLASHRAG,
                "2wikimultihopqa/dev.jsonl",
                54682944,
                "b4d74d73d1cb3c0632c665a85e1e5060e3411968b807721618cfd2464fc905e3",
            ),
        ],
    ),
    # not FlashRAG's, whose dev file of 5.6 MB cannot hold the paragraphs that take 30.4 MB here
    "musique": (
        "MuSiQue-Answerable 1.0: train and dev questions of 2 to 4 hops with up to 20 paragraphs each",
        "CC BY 4.0",
        [
            File(
                MUSIQUE,
                "musique_ans_v1.0_train.jsonl",
                None,
                "83a75b1e11e4e9bb8f8308e72ac40ca617ae4431b3a0d955b61cab259248490a",
            ),
            File(
                MUSIQUE,
                "musique_ans_v1.0_dev.jsonl",
                30439728,
                "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b",
            ),
        ],
    ),
    "memagent-train": (
        "MemAgent's training and validation sets, made from HotpotQA",
        "not known; HotpotQA is CC BY-SA 4.0",
        [File(MEMAGENT, "hotpotqa_train_32k.parquet"), File(MEMAGENT, "hotpotqa_dev.parquet")],
    ),
    "memagent-eval": (
        "MemAgent's test sets, 128 questions over N documents; from 12,800 on passage numbers instead of texts",
        "not known; HotpotQA is CC BY-SA 4.0",
        [
            File(MEMAGENT, f"eval_{n}.json", *known)
            for n, *known in (
                (50,),
                (100,),
                (200,),
                (400, 29652378, "da11b9e4fa986476e0d29cffc4e079b0bf60b761e40dbe18fea182cd663dd9bb"),
                (800,),
                (
                    1600,
                    118487493,
                    "1e103e0dfc05ad5326f6e105d22e047b70dc23149943395f9895cc73c29c681b",
                ),
                (
                    3200,
                    236959262,
                    "1a1c25b721ce303356aab899005fc17d8a90b8bb3624e9fbf4b97305dae948fe",
                ),
                (6400,),
                (12800,),
                (25600,),
            )
        ],
    ),
}
SOURCES["ruler-assets"] = (
    "What RULER's tasks are made from: SQuAD, HotpotQA, Paul Graham's essays",
    "CC BY-SA 4.0; essays: not known",
    [
        File(
            SQUAD,
            "plain_text/validation-00000-of-00001.parquet",
            None,
            "8c6646d36bd5a95061e076788cf3161d11f6f3e7d625dac7a83bbed0a49f69f7",
            "squad.parquet",
        ),
        SOURCES["hotpotqa"][2][2]._replace(to="hotpotqa.parquet"),
        File(
            ESSAYS,
            "essays.parquet",
            None,
            "825448033be010042ffd6fc77c32bbcab61f2ef63196f0fc4bfbf5b388a1660e",
        ),
    ],
)


class _Refused(Exception):
    """Why the hub gave nothing, in a few words; `_get` makes the sentence of it."""


def get(name: str, out: Path, revision: str = "", say: Callable[[str], None] = print) -> list[Path]:
    """The files of a source in the folder `out`/`name`, loaded where missing and verified all the same, in the table's order.

    A set that is there as recorded makes no request. revision: a commit, branch or tag of the hub, instead of the recorded or pinned
    commit; what differs from it is replaced. say: gets what the user should see, a line at a time. With no answer it gives up after
    one time-out. UserError: unknown name, no hub, content that differs, damaged lock, no room or right to write, two calls at once.
    """
    from filelock import FileLock, Timeout

    if name not in SOURCES:
        raise UserError(f"There is no data set {name!r} to get; there are {', '.join(SOURCES)}.")
    if revision and len({file.repo for file in SOURCES[name][2]}) > 1:
        raise UserError(
            f"{name} comes from several repositories; one revision cannot be given for them all."
        )
    try:
        (out / name).mkdir(parents=True, exist_ok=True)
        with FileLock(out / f".{LOCK}.lock", timeout=0):
            return _get(name, out, revision, say)
    except Timeout:
        raise UserError(
            f"Another download into {out} is under way; wait for it, or name another folder."
        ) from None
    except OSError as error:
        why = f"{name} cannot be kept in {out} ({error.strerror or error})"
        raise UserError(f"{why}; what was loaded stays, and the same command goes on.") from error


def _get(name: str, out: Path, revision: str, say: Callable[[str], None]) -> list[Path]:
    what, licence, files = SOURCES[name]
    lock, places = _read_lock(out / LOCK), {file: out / name / file.name for file in files}
    entries = {
        f: e
        for f in files
        if (e := lock.get(f"{name}/{f.name}")) and (e["repo"], e["path"]) == (f.repo, f.path)
    }
    begun = {
        file.repo: entry["commit"] for file, entry in entries.items()
    }  # a set is ended at the commit it was begun at
    commits = {
        f: revision
        or entries.get(f, {}).get("commit")
        or begun.get(f.repo)
        or PINS.get(f.repo, "main")
        for f in files
    }
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    token = os.environ.get("HF_TOKEN") or False  # False: huggingface_hub looks for none elsewhere
    listings, todo = {}, list(files)

    def record(file: File, commit: str, content: dict[str, Any]) -> None:
        entry = dict(
            zip(
                ENTRY,
                (file.repo, file.path, commit, content["size"], content["sha256"]),
                strict=True,
            )
        )
        if lock.get(f"{name}/{file.name}") != entry:
            lock[f"{name}/{file.name}"] = entry
            (new := out / f"{LOCK}.new").write_text(
                json.dumps(lock, indent=1, sort_keys=True) + "\n", encoding="utf-8"
            )
            new.replace(out / LOCK)

    def in_place(file: File, commit: str, expected: dict[str, Any]) -> bool:
        """Whether the file is there, and right. One that is not gives up its name, or is replaced if a revision was asked for."""
        place = places[file]
        if not (expected and place.exists()):
            return False
        if not (why := _differs(content := _content(place, expected), expected)):
            record(file, commit, content)
        elif not revision:
            place.replace(aside := place.with_name(place.name + ".differs"))
            raise UserError(
                f"{place} is not what was meant ({why}); it is {aside.name} now. The same command loads the right one."
            )
        return not why

    try:
        for file in files:
            key = repo, commit = file.repo, commits[file]
            known = (
                {"size": file.size, "sha256": file.sha256}
                if file.sha256 and commit == PINS.get(repo)
                else {}
            )
            if entries.get(file, {}).get("commit") == commit:
                known = {"size": entries[file]["size"], "sha256": entries[file]["sha256"]}
            if not in_place(file, commit, known):
                if not listings:
                    say(f"{name}: {what}. Licence: {licence}.")
                    if endpoint != HUB:
                        say(
                            _clean(
                                f"HF_ENDPOINT is set: {endpoint} is asked{', and gets HF_TOKEN' if token else ''}."
                            )
                        )
                commit, listed = listings[key] = listings.get(key) or _listing(
                    endpoint, token, *key
                )
                if file.path not in listed:
                    raise UserError(f"{name}: the hub has no {file.path} in {repo} at {commit}.")
                if why := _differs(listed[file.path], known):
                    why = f"the hub lists another {file.path} at {commit} than is known ({why}); nothing was replaced"
                    raise UserError(
                        f"{name}: {why}. If the new one is wanted, give its commit as the revision."
                    )
                if not in_place(file, commit, expected := known | listed[file.path]):
                    partial = _fetch(endpoint, token, file, commit, expected, places[file], say)
                    if why := _differs(content := _content(partial, expected), expected):
                        partial.unlink()
                        why = f"what came as {file.path} is not what the hub lists at {commit} ({why}); it was deleted"
                        raise UserError(
                            f"{name}: {why}. Try again; if that does not help, something on the way changes files."
                        )
                    partial.replace(places[file])
                    record(file, commit, content)
            todo.remove(file)
    except _Refused as refused:
        settings = " and ".join(
            f"{key} is {'' if os.environ.get(key) else 'not '}set"
            for key in ("HF_ENDPOINT", "HF_HUB_OFFLINE")
        )
        by_hand = ", ".join(
            f"{f.path} of the data set {f.repo} at {commits[f]} as {places[f]}" for f in todo
        )
        why = f"{name} cannot be loaded from {endpoint} ({str(refused).strip(' .')}); {settings}. What was loaded is kept, and the same"
        raise UserError(_clean(f"{why} command goes on; or put by hand: {by_hand}.")) from refused
    say(f"{name}: {len(files)} files in {out / name}, as recorded in {out / LOCK}.")
    return list(places.values())


def _listing(
    endpoint: str, token: str | bool, repo: str, revision: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """The commit that a revision means, and by path: size, and sha256 or, of small files, git's blob id."""
    import httpx
    from huggingface_hub import HfApi, constants, errors

    reasons = {
        errors.RevisionNotFoundError: f"{repo} has no revision {revision}",
        errors.GatedRepoError: f"{repo} is gated: accept its terms on the hub and set HF_TOKEN",
        errors.RepositoryNotFoundError: f"there is no {repo}, or not for this HF_TOKEN",
    }
    try:
        api = HfApi(endpoint=endpoint, token=token)
        info = api.dataset_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        sums = {
            s.rfilename: {"sha256": s.lfs.sha256} if s.lfs else {"blob": s.blob_id}
            for s in info.siblings or []
        }
        files = {
            s.rfilename: sums[s.rfilename] | {"size": s.lfs.size if s.lfs else s.size}
            for s in info.siblings or []
        }
    except errors.HfHubHTTPError as error:  # its own text repeats what the server said
        raise _Refused(
            reasons.get(type(error), f"it answers HTTP {error.response.status_code}")
        ) from error
    except (
        errors.OfflineModeIsEnabled,
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
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
    """The file beside its place, under a name with the checksum it should have; goes on where such a file ends. Not checked here."""
    import httpx
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if not (size := expected["size"]) or not (
        checksum := expected.get("sha256") or expected.get("blob")
    ):
        raise _Refused(f"it gives no size or no checksum of {file.path}")
    partial, why, said = place.with_name(f"{place.name}.{checksum[:12]}.partial"), "", 0.0
    url = hf_hub_url(file.repo, file.path, repo_type="dataset", revision=commit, endpoint=endpoint)
    headers = build_hf_headers(token=token) | {
        "accept-encoding": "identity"
    }  # pieces of packed bytes could not be joined
    options = {"follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    tried = 0
    while (done := partial.stat().st_size if partial.exists() else 0) < size:
        if tried == TRIES:
            raise _Refused(why)
        time.sleep(bool(tried))
        tried += 1
        if shutil.disk_usage(place.parent).free < size - done:
            raise _Refused(
                f"the disk has no room for the {(size - done) / 1e6:.1f} MB of {file.path} still to come"
            )
        asked = headers | ({"range": f"bytes={done}-"} if done else {})
        try:
            with get_session().stream("GET", url, headers=asked, **options) as answer:
                if answer.status_code not in (200, 206):
                    gated = ", set HF_TOKEN if the data set is gated" * (
                        answer.status_code in (401, 403)
                    )
                    why = f"it answers HTTP {answer.status_code} for {file.path}{gated}"
                    continue
                with partial.open("ab" if answer.status_code == 206 else "wb") as stream:
                    for chunk in (
                        answer.iter_bytes()
                    ):  # as they come: what a buffer holds would be lost when it breaks off
                        stream.write(chunk)
                        if time.monotonic() - said > 10:
                            said = time.monotonic()
                            say(f"{place}: {stream.tell() / 1e6:.1f} of {size / 1e6:.1f} MB")
                        if stream.tell() > size:
                            break  # longer than it may be: the check refuses it
            why = f"{file.path} ends early"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"{file.path} broke off: {type(error).__name__}, {error}"
    return partial


def _read_lock(path: Path) -> dict[str, dict[str, Any]]:
    try:
        lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: {key: entry[key] for key in ENTRY} for name, entry in lock.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged; delete it, and the files are checked against the hub again."
        ) from error


def _content(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Size and sha256 of a file, and git's blob id where that is expected (of files under 10 MB)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    blob = (
        hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
        if expected.get("blob")
        else None
    )
    return {"size": size, "sha256": sha256, "blob": blob}


def _differs(content: dict[str, Any], expected: dict[str, Any]) -> str:
    """Where two descriptions of a file disagree, of what both know; empty if nowhere."""
    pairs = ((key, content.get(key), expected.get(key)) for key in ("size", "sha256", "blob"))
    return ", ".join(
        f"{key} {is_} instead of {must}"
        for key, is_, must in pairs
        if None not in (is_, must) and is_ != must
    )


def _clean(text: str) -> str:
    """Without the access token, and without names and passwords in URLs."""
    token = os.environ.get("HF_TOKEN")
    return re.sub(r"//[^/@\s]*@", "//", text.replace(token, "HF_TOKEN") if token else text)
