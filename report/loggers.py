"""Loggers of Lightning's kind that the user names by dotted paths (--logger)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import Logger
from pydantic import ImportString, TypeAdapter, ValidationError

from config.errors import UserError, clean, first_line
from config.options import without_url


def logger_class(place: str) -> type[Logger]:
    """Return the class at a dotted path. UserError: there is none, or it is no logger."""
    try:
        return TypeAdapter(ImportString[type[Logger]]).validate_python(place)
    except ValidationError as error:
        why = clean(error.errors()[0]["msg"])
        raise UserError(f"--logger {place} is no logger's package.module.Class: {why}.") from error


def make_logger(place: str, folder: Path, settings: Mapping[str, object]) -> Logger:
    """Make a run's logger, and tell it the run's settings, flat; the address of a server in one of
    them, which may hold a key, is left out."""
    make = logger_class(place)
    given = {"save_dir": str(folder / "loggers"), "name": folder.name, "run_name": folder.name}
    taken = given.keys() & inspect.signature(make).parameters.keys()
    try:
        logger = make(**{name: given[name] for name in taken})
    except Exception as error:  # a package that is missing, a server that is down, ...
        why = clean(f"{type(error).__name__}: {first_line(error)}")
        raise UserError(f"--logger {place} cannot be made: {why}.") from error
    logger.log_hyperparams({name: without_url(value) for name, value in settings.items()})
    return logger


def tagged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Name metrics by their groups, as pages of curves fold them."""

    def group(name: str) -> str:
        kind = "tokens" if "tokens" in name else "train"
        return "memory" if name.startswith("memory") else "time" if name.endswith("_s") else kind

    return {f"{group(name)}/{name}": value for name, value in metrics.items()}
