"""Files: write them whole or not at all, read and write settings as YAML, name the folder of a run.

Holds: `replacing`, `is_file`, `make_folder`, `dump`, `load`, `run_path`. Leaves out: the settings (config/options.py).
Exercise it: `pytest tests/config`. Read next: config/options.py.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from config.errors import UserError, clip


def is_file(path: str | Path) -> bool:
    """Whether a file is there. A path that the system does not take at all (too long, a NUL byte, a loop of links) is a UserError."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        name = clip(str(path), 200)
        raise UserError(f"{name} cannot be read: {reason}.") from error
    return Path(path).is_file()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it to `path` when the block ends well: at no moment is there half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {path} cannot be made: {error.strerror}.") from error


def dump(path: Path, **sections) -> None:
    """Write settings as YAML, one section per dataclass; whole or not at all, a killed run is resumed from them."""
    import yaml

    plain = {
        name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in sections.items()
    }
    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump(_lists(plain), sort_keys=False), encoding="utf-8")


def _lists(value):
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def read_yaml(path: str | Path) -> dict:
    """Read a YAML file of sections. A file that cannot be read, or holds something else, is a UserError."""
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The settings {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # a ValueError: not UTF-8, or a number of too many digits
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no valid YAML: {reason}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings: it must have sections with fields.")
    return data


def typed(data: dict, path: str | Path, **classes: type | dict[str, object]) -> dict[str, dict]:
    """Check the sections of `read_yaml` and convert their values: section name -> fields.

    classes: section name -> the dataclass that it belongs to, or field names -> types. A wrong section,
    field or type is a UserError.
    """
    out: dict[str, dict] = {}
    for section, values in data.items():
        if section not in classes:
            raise UserError(
                f"{path} has an unknown section {section!r}; known are {', '.join(classes)}."
            )
        if not isinstance(values, dict | None):
            raise UserError(f"{path}: {section} must be a section of settings, not {values!r}.")
        known = classes[section]
        known = known if isinstance(known, dict) else typing.get_type_hints(known)
        out[section] = {}
        for name, value in (values or {}).items():
            if name not in known:
                names = ", ".join(known)
                raise UserError(f"{path}: {section} has no setting {name!r}; known are {names}.")
            try:
                out[section][name] = _typed(value, known[name])
            except ValueError as error:
                raise UserError(
                    f"{path}: {section}.{name} must be {error}, not {value!r}."
                ) from None
    return out


WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _typed(value: object, kind: object) -> object:
    """A value of a YAML file as the annotation of its field wants it; a ValueError says in words what that is."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        if value not in parts:
            raise ValueError(f"one of {', '.join(parts)}")
        return value
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"a list, each item {WORDS[parts[0]]}")
        return tuple(_typed(item, parts[0]) for item in value)
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else _typed(value, parts[0])
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for text
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind and not (
        kind is str and "\0" in value
    ):  # of a text with a NUL byte the system sees a part
        return value
    raise ValueError(WORDS[kind])


def run_path(runs: str, name: str) -> Path:
    """RUNS/NAME. UserError unless that is a folder inside RUNS: with an empty name it would be RUNS itself, with all runs in it."""
    folder = Path(runs, name)
    try:
        inside = Path(runs).resolve() in folder.resolve().parents
        for part in Path(
            name
        ).parts:  # of its own: while RUNS is not there, nothing looks at what follows
            Path(os.sep, part).exists()  # an OSError where the system takes no such name
    except (OSError, RuntimeError) as error:  # the latter: links in a loop
        reason = getattr(error, "strerror", None) or "its links go round in a circle"
        raise UserError(
            f"The folder {clip(str(folder), 200)} cannot be there: {reason}."
        ) from error
    if not inside:
        raise UserError(f"--name must be the name of a folder inside {runs}, not {name!r}.")
    return folder
