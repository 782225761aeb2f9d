"""Files: write them whole or not at all; settings as YAML; the folder of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from difflib import get_close_matches
from hashlib import blake2b, file_digest
from pathlib import Path

from config.errors import UserError, clip, first_line


def is_file(path: str | Path) -> bool:
    """Tell whether a file exists. UserError: the system rejects the path as such."""
    try:
        return Path(path).is_file()
    except OSError as error:
        raise UserError(f"{clip(str(path), 200)} cannot be read: {error.strerror}.") from error


def content(path: str | Path) -> str:
    """Return a hex digest of what a file holds, or of a folder's files with their names; "" where
    there is neither. UserError: it cannot be read."""
    path = Path(path) if path else Path(os.devnull)
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            parts = [(str(file.relative_to(path)), content(file)) for file in files]
            return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).hexdigest()
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file_digest(file, lambda: blake2b(digest_size=8)).hexdigest()
    except OSError as error:
        raise UserError(f"{clip(str(path), 200)} cannot be read: {error.strerror}.") from error


def sync(path: Path) -> None:
    """Wait until the system has written a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some file systems know no such thing of a folder
        if not path.is_dir():
            raise
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` if the block succeeds: no
    reader ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder, and rename it to `path`, where nothing may be, if the block
    succeeds."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing_output(path: Path) -> Iterator[Path]:
    """Do as `replacing` for a path given by the user: errors of the system become UserErrors."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"{path} cannot be written: {first_line(error)}.") from error


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {path} cannot be made: {error.strerror}.") from error


# ---------------------------------------------------------------- settings as YAML

SETTINGS = 1 << 16  # most bytes of a file of settings
NESTED = 20  # most lists and sections within each other
LONGEST = 3000  # most letters of a number; Python writes none of more than 4,300 digits


def dump(path: Path, **sections) -> None:
    """Write settings as YAML, one section per dataclass, whole or not at all: a killed run is
    resumed from the file."""
    import yaml

    dumper = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
    dumper.ignore_aliases = lambda *_: True  # `settings_in` refuses what refers to other parts
    plain = {
        name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in sections.items()
    }
    with replacing(path) as temporary:
        text = yaml.dump(plain, Dumper=dumper, sort_keys=False)
        temporary.write_text(text, encoding="utf-8")


def read_yaml(path: str | Path) -> dict:
    """Read a YAML file of sections. UserError if it cannot be read or holds something else."""
    try:
        with Path(path).open("rb") as file:
            data = settings_in(file.read(SETTINGS + 1).decode())
    except OSError as error:
        raise UserError(f"The settings {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also: not UTF-8
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings: it must have sections with fields.")
    return data


def settings_in(text: str) -> object:
    """Return the value of a YAML text, which a stranger may have written.

    ValueError: it is no YAML, or costs more than settings may: it is too large or too deep, has an
    endless number or a NUL byte, or refers to its own parts (`*name`), each of which may stand for
    two of another one.
    """
    import yaml

    if len(text) > SETTINGS:
        raise ValueError(f"settings have at most {SETTINGS:,} bytes")
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0  # in C: ten times as fast
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"settings may not refer to other settings (*{event.anchor})")
            if isinstance(event, yaml.ScalarEvent):
                if "\0" in event.value:  # the system would cut it there
                    raise ValueError("a text has a NUL byte")
                if len(event.value) > LONGEST and event.value[0] in "+-.0123456789":
                    raise ValueError(f"a number has more than {LONGEST:,} letters")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > NESTED:
                raise ValueError(f"settings are at most {NESTED} lists and sections deep")
        return yaml.load(text, loader)
    except Exception as error:  # a wrong tag, date or number: whatever Python makes of it
        raise ValueError(str(error) or type(error).__name__) from error


def typed(data: dict, path: str | Path, **sections: type | Mapping[str, object]) -> dict[str, dict]:
    """Check the sections of `read_yaml` and convert their values: section name -> dict of fields.

    sections: section name -> its fields, as a dataclass or as names -> types. UserError: a wrong
    section, field or type. Settings that went are passed over (config/gone.py).
    """
    from config.gone import is_gone
    from config.settings import from_yaml, hints_of

    found: dict[str, dict] = {}
    for section, values in data.items():
        if section not in sections:
            names = ", ".join(sections)
            raise UserError(f"{path} has an unknown section {section!r}; known are {names}.")
        if not isinstance(values, dict | None):
            raise UserError(f"{path}: {section} must be a section of settings, not {values!r}.")
        known, values, found[section] = sections[section], values or {}, {}
        hints = known if isinstance(known, Mapping) else hints_of(known)
        for name, value in values.items():
            if name in hints:
                found[section][name] = from_yaml(value, hints[name], f"{path}: {section}.{name}")
            elif not is_gone(name, value, f"{path}: {section}", values):
                names = ", ".join(hints)
                raise UserError(f"{path}: {section} has no setting {name!r}; known are {names}.")
    return found


# ---------------------------------------------------------------- the folder of a run


def run_path(runs: str, name: str) -> Path:
    """Return RUNS/NAME, which must be a folder inside RUNS: "" would be RUNS, with all runs in it.
    The name may also be the folder, as other commands take it."""
    named = Path(name)
    folder = Path(runs, named.relative_to(runs) if named.is_relative_to(runs) else named)
    try:
        inside = Path(runs).resolve() in folder.resolve().parents
        for part in named.parts:  # which is not looked at where RUNS is still to be made
            Path(os.sep, part).exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; a loop of links; a NUL byte
        where = clip(str(folder), 200)
        raise UserError(f"The folder {where} cannot be there: {first_line(error)}.") from error
    if not inside:
        raise UserError(f"--name must be the name of a folder inside {runs}, not {name!r}.")
    return folder


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder where another run's results are, or one to resume that is not there."""
    try:
        there = folder.exists()
    except OSError as error:
        raise UserError(f"The run {folder} cannot be there: {error.strerror}.") from error
    if there and not resume:
        raise UserError(
            f"The run {folder} is there already: give another --name, or go on with it by --resume."
        )
    if resume and not there:
        raise UserError(f"There is no run {folder} to resume.{near_run(folder, 'metrics.csv')}")


def name_or_now(name: str) -> str:
    return name or datetime.now().strftime("%Y%m%d-%H%M%S")


def found_run(path: Path, holding: str = "") -> Path:
    """Return what a command is to look at: the run of this name in runs/, else the path itself.

    UserError: there is neither; a run of a like name is offered if it has the file `holding`.
    """
    named = Path("runs", path)
    places = (named, path) if len(path.parts) == 1 else (path, named)  # the repository has folders
    if place := next(filter(os.path.exists, places), None):
        return place
    near = near_run(path, holding)
    raise UserError(f"There is no {path}, and no run of this name in runs.{near}")


def near_run(folder: Path, holding: str = "") -> str:
    """Ask whether a run of a like name is meant, beside a folder or in runs/; "" of none.

    holding: a file that it has to have.
    """
    places = {folder.parent if folder.parent.name else Path("runs"), Path("runs", folder).parent}
    runs = {path.name: path for place in places for path in place.glob("*/")}
    runs = {name: path for name, path in runs.items() if (path / holding).exists()}
    near = get_close_matches(folder.name, runs, n=1)
    return "".join(f" Did you mean {runs[name]}?" for name in near)
