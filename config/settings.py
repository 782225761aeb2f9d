"""Settings: frozen dataclasses that pydantic checks; the docstring of a field is its help."""

from __future__ import annotations

import json
import re
import types
import typing
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import date
from functools import lru_cache

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from config.errors import UserError

# metadata of a field's annotation: what holds of its values; NaN meets none
COUNT = Field(ge=1, lt=2**63)
NOT_NEGATIVE = Field(ge=0, lt=2**63, allow_inf_nan=False)
LIMIT = Field(ge=0, lt=2**63)  # 0 = no limit
POSITIVE = Field(gt=0)
SHARE = Field(ge=0, le=1)
TOP_P = Field(gt=0, le=1)
SEED = Field(ge=0, lt=2**63)
NUMBER = Field(allow_inf_nan=False)
NOT_EMPTY = Field(min_length=1)
# such a field is set by presets and by files of settings, and is no flag
UNFLAGGED = "unflagged"

adapter = lru_cache(maxsize=1024)(TypeAdapter)


def sentence(error: ValidationError, name: str = "") -> str:
    """Return the first error as "NAME must be ..., not VALUE"; name: of a lone value."""
    first = error.errors()[0]
    if not (name or first["loc"]):  # of several fields together
        return first["msg"].removeprefix("Value error, ").rstrip(".")
    name = name or str(first["loc"][0])
    if first["type"] == "unexpected_keyword_argument":
        return f"There is no setting {name}: leave it out"
    must = re.sub(r"^(\w+ should|Value error, must|Field)", "must", first["msg"])
    return f"{name} {must.partition(' after validation')[0]}, not {first['input']!r}"


class Checked(type):
    """Make and check the dataclasses of this type by pydantic; UserError for a wrong value."""

    def __call__(cls, *args, **given):
        made = cls.__new__(cls)
        try:
            adapter(cls).validator.validate_python(ArgsKwargs(args, given), self_instance=made)
        except ValidationError as error:
            raise UserError(f"{sentence(error)}.") from error
        return made


@dataclass(frozen=True, slots=True)
class Settings(metaclass=Checked):
    """Settings of a command, an agent or a suite: every field is a flag, its docstring the help."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    def __post_init__(self):
        """Raise a UserError for values that do not go together; for subclasses."""


@lru_cache(maxsize=64)
def hints_of(cls: type) -> dict[str, object]:
    """Return each field's annotated type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def unflagged(cls: type) -> set[str]:
    """Return the fields that presets and files alone set."""
    hints = hints_of(cls).items()
    return {name for name, hint in hints if UNFLAGGED in getattr(hint, "__metadata__", ())}


@lru_cache(maxsize=64)
def docs(cls: type) -> dict[str, str]:
    """Map each field, inherited ones included, to its docstring in one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            for name, about in adapter(base).json_schema().get("properties", {}).items():
                if text := about.get("description"):
                    found[name] = " ".join(text.split())
    return found


def divide(given: dict[str, object], *classes: type) -> list[dict[str, object]]:
    """Divide settings by the classes that have them, the first one first; the rest comes last."""
    rest, parts = {**given}, []
    for cls in classes:
        parts.append({name: rest.pop(name) for name in hints_of(cls) if name in rest})
    return [*parts, rest]


def plain(kind: object) -> object:
    """Return a type without its bounds; of `X | None` the X."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType):
        return plain(next(k for k in typing.get_args(kind) if k is not type(None)))
    return kind


def item(kind: object) -> object:
    """Return the plain type of a field's values, of several that of each."""
    kind = plain(kind)
    return item(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind


def checked(value: object, kind: object, name: str) -> object:
    """Convert a value to the type of a field; UserError with its name if that fails."""
    try:
        return adapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{sentence(error, name)}.") from error


def from_yaml(value: object, kind: object, name: str) -> object:
    """Convert a value of YAML, where a text is no number; UserError with its name if that fails."""
    if item(kind) is float:  # YAML 1.1 takes 1e-3 for text
        value = [*map(_number, value)] if isinstance(value, list) else _number(value)
    try:  # as JSON, of which even the strict mode takes a list for a tuple
        return adapter(kind).validate_json(json.dumps(value, default=_day), strict=True)
    except ValidationError as error:
        raise UserError(f"{sentence(error, name)}.") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} must not be a {type(value).__name__}.") from error


def _day(value: object) -> str:
    """Return the text of a date, which YAML takes for more; TypeError for anything else."""
    if type(value) is not date:
        raise TypeError
    return value.isoformat()


def _number(value: object) -> object:
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value
