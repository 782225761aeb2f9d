"""Tell a user's loggers of a training what metrics.csv says, every step once.

Holds: `open_loggers`, `Guarded`, `logger_class`, `tagged`. Leaves out: metrics.csv itself and
when it is written (report/runlog.py).
Exercise it: `python cli.py train --steps 3 --logger lightning.pytorch.loggers.CSVLogger`.
Read next: report/runlog.py.

What each logger was told last stands in RUN/loggers.json, written just before it is told. A resumed
run repeats steps that a logger knows already: it is not told them again. Steps of metrics.csv that
it does not know, such as those before it was added, are told when it is opened.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lightning.pytorch.loggers.logger import Logger
from pydantic import ImportString, TypeAdapter, ValidationError

from config.errors import UserError, clean, clip, first_line
from config.files import replacing
from config.options import without_url
from config.plugins import load_function
from config.terminal import say
from models.checkpoints import validations
from report.training import whole_rows

FLAG, MARKS = "--logger", "loggers.json"


def logger_class(place: str) -> Callable[..., Logger]:
    """Return the class at a dotted path, package.module.Class, or at path.py:Class."""
    if ":" in place:
        return load_function(place, FLAG)
    try:
        return TypeAdapter(ImportString[Callable]).validate_python(place)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise UserError(f"{FLAG} {place} is no package.module.Class: {why}.") from error


def open_loggers(places: Iterable[str], folder: Path, settings: Mapping[str, object]) -> list:
    """Make a run's further loggers; tell them its settings and what they have missed of it.

    settings: flat. The address of a server in one of them, which may hold a key, is left out.
    """
    public = {name: without_url(value) for name, value in settings.items()}
    loggers = [Guarded(place, folder) for place in places]
    for logger in loggers:
        logger.log_hyperparams(public)
        for row in whole_rows(folder / "metrics.csv"):
            logger.log_metrics({k: float(v) for k, v in row.items() if v}, int(row["step"]))
        for row in validations(folder):
            logger.log_metrics(metrics_of(row), row["step"] - 1)
    return loggers


def metrics_of(validation: Mapping[str, float]) -> dict[str, float]:
    """Return what loggers are told of a line of validation.csv."""
    return {"validation": validation["score"]}


def tagged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Name metrics by their groups, as pages of curves fold them: train/, time/, tokens/, memory/.

    >>> [*tagged({"reward": 1.0, "memory_tokens": 9.0, "read_tokens": 99.0, "step_s": 2.0})]
    ['train/reward', 'memory/memory_tokens', 'tokens/read_tokens', 'time/step_s']
    """

    def group(name: str) -> str:
        if name.startswith("memory"):
            return "memory"
        if name.endswith("_s"):
            return "time"
        return "tokens" if "tokens" in name else "train"

    return {f"{group(name)}/{name}": value for name, value in metrics.items()}


class Guarded(Logger):
    """A logger of the user's: told every step once, and left out once it has raised."""

    name, version = property(lambda self: self.place), 0

    def __init__(self, place: str, folder: Path):
        super().__init__()
        self.place, self.marks, make = place, folder / MARKS, logger_class(place)
        self.told: dict[str, int] = self._marks().get(place, {})  # first metric -> last step
        inner_folder = folder / "loggers" / make.__name__  # MLflow takes all in it for experiments
        given = {"save_dir": str(inner_folder), "name": folder.name, "run_name": folder.name}
        try:
            taken = given.keys() & inspect.signature(make).parameters.keys()
            self.inner = make(**{name: given[name] for name in taken})
        except Exception as error:  # a package that is missing, a server that is down, ...
            raise UserError(f"{FLAG} {place} cannot be made: {_words(error)}.") from error
        if not isinstance(self.inner, Logger):
            raise UserError(f"{FLAG} {place} is no logger of Lightning's.")
        if "save_dir" in taken:
            inner_folder.mkdir(parents=True, exist_ok=True)

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        self._call("log_hyperparams", params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Tell the metrics of a step, unless they were told before the run was resumed.

        Metrics of one kind, those of training or of validation, begin with the same name.
        """
        kind = next(iter(metrics))
        if self.inner is not None and step > self.told.get(kind, -1):
            self.told[kind] = step
            with replacing(self.marks) as temporary:
                temporary.write_text(json.dumps(self._marks() | {self.place: self.told}))
            self._call("log_metrics", tagged(metrics), step)
            self._call("save")

    def finalize(self, status: str) -> None:
        self._call("finalize", status)

    def _call(self, method: str, *args) -> None:
        try:
            if self.inner is not None:
                getattr(self.inner, method)(*args)
        except Exception as error:
            self.inner = None
            end = f"has failed and is told nothing more: {_words(error)}."
            say(f"{FLAG} {self.place} {end}", "bold red")

    def _marks(self) -> dict[str, dict[str, int]]:
        return json.loads(self.marks.read_text()) if self.marks.exists() else {}


def _words(error: Exception) -> str:
    return clip(clean(f"{type(error).__name__}: {first_line(error)}").rstrip(". "), 300)
