"""Suites: what is asked, one object in one file, found by its name or by its path.

A new suite is one subclass of `Suite`, in `suites/NAME.py` or in any other file. It says what is
asked, never who answers; no torch is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from config.errors import UserError
from config.flags import Given
from config.plugins import Finder, is_path, told
from config.settings import Settings, hints_of
from config.terminal import say
from data import Task

if TYPE_CHECKING:
    from tasks.environments import Environment
    from tokens.codec import Codec

Config = TypeVar("Config")

# ---------------------------------------------------------------- the interface


@dataclass(frozen=True, slots=True)
class Scope:
    """Say what of a suite is asked."""

    data: tuple[str, ...] = ()
    """files that the user names; () = none"""
    lengths: tuple[int, ...] = ()
    """in the suite's unit; of a suite without lengths of its choice ()"""
    n: int = 64
    """questions per length and kind, at most"""
    seed: int = 0
    """of all that is drawn"""
    codec: Callable[[], Codec] | None = None
    """loads the tokenizer of the model that is asked, whose tokens count"""


@dataclass(frozen=True, slots=True)
class Column:
    """Describe one column of the results: a kind of question at one length.

    `make` returns its tasks, the same ones at every call. Without a question the cells are the
    kinds of the tasks, side by side.
    """

    question: str
    length: int
    make: Callable[[], list[Task]]


@dataclass(frozen=True)
class Suite(Settings):
    """A set of questions: which there are, how long their documents are, how answers are graded.

    A suite is a frozen dataclass of its settings: each field is a flag of `--suite NAME`, its
    docstring the flag's help. Everything but `columns` has a default; one whose tasks answer back
    has `environment` instead. An answer is graded by containment (`metric`) unless its task is of a
    subclass of `Task` whose `score` grades it; such a suite is measured by "reward". No file holds
    such tasks.
    """

    name: ClassVar[str] = ""
    """as it is called: that of suites/NAME.py with - for _, or the file's path"""
    unit: ClassVar[str] = "documents"
    """what lengths count"""
    lengths: ClassVar[Sequence[int]] = ()
    """default of --lengths; () = the suite has its own, and none can be given"""
    metric: ClassVar[str] = "sub_em"
    """what tables show: sub_em, em, f1, or reward = the tasks' own score"""
    generated: ClassVar[bool] = False
    """whether no file can be named"""
    pictured: ClassVar[bool] = False
    """whether questions have pictures, which only a server of messages shows to its model"""
    file_name: ClassVar[str] = ""
    """of the files that `data build` writes, before their length; "" = the column's question"""
    may_differ: ClassVar[Sequence[str]] = ()
    """settings whose every value has rows of its own: calls that fill one folder may differ"""

    @property
    def label(self) -> str:
        """The name as it stands in sentences and reports: a file's without its folder."""
        return Path(self.name).stem

    def columns(self, scope: Scope) -> list[Column]:
        """Return what is asked. Sources are read now, so that mistakes show before a model is
        loaded; their tasks are made when they are needed.

        By default one column of all tasks of the environment, as long as the most steps of a task:
        of each kind the first `n` are worked on.
        """
        environment = self.opened(scope)

        def make() -> list[Task]:
            return first_of_each_kind(environment.tasks(), scope.n)

        return [Column("", environment.most_steps, make)]

    def environment(self, scope: Scope) -> Environment | None:
        """Open the world in which tasks are worked on, of one file or none; None: tasks of this
        suite do not answer back."""
        return None

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        """Return what the first line of a built file says of how it was made."""
        source = ", ".join(d if d.startswith("hf:") else Path(d).name for d in scope.data)
        return ({"source": source} if source else {}) | {"seed": scope.seed}

    def file_in(self, scope: Scope, optional: bool = False) -> str:
        """Return the one file that is named; "" if none is and that is `optional`."""
        if len(scope.data) == 1 or (optional and not scope.data):
            return "".join(scope.data)
        raise UserError(
            f"The suite {self.label} wants one file: name it by --data (stream: by --path)."
        )

    def opened(self, scope: Scope) -> Environment:
        """Open the environment, and say what of it cannot be solved here.

        UserError: there is none, or what it needs is missing.
        """
        environment = self.environment(scope)
        if environment is None:
            raise UserError(
                f"The suite {self.label} has no environment: its tasks do not answer back."
            )
        if skipped := environment.skipped:
            why = environment.skipped_because
            say(f"{self.label}: {skipped:,} tasks are left out, which {why}.")
        if missed := environment.skip_list():
            share = f"{len(missed)} of {len(environment.tasks())} tasks are not right by their own"
            say(f"{self.label}: {share} solution here: {' '.join(missed)}.")
        return environment


def first_of_each_kind(tasks: Sequence[Task], n: int) -> list[Task]:
    """Return the first n tasks of every kind, in their order."""
    met: Counter = Counter()
    chosen = []
    for task in tasks:
        met[task.kind] += 1
        chosen += [task] if met[task.kind] <= n else []
    return chosen


# ---------------------------------------------------------------- by name or by path

GENERATED = (("world",), ("ledger",))  # values of --data that name a suite instead of files
FINDER = Finder(Suite, "suites", "SUITE")
names, known, find = FINDER.names, FINDER.known, cache(FINDER.find)


def name_of(settings: Mapping[str, object]) -> str:
    """Return the name of the suite that the settings of an evaluation mean, given or stored.

    Without one it is that of generated tasks which --data names, else files as they are.
    """
    data = settings.get("data") or GENERATED[0]
    data = tuple(data) if isinstance(data, list) else data
    return str(settings.get("suite") or (data[0] if data in GENERATED else "files"))


def make(name: str, settings: Mapping[str, object] = {}) -> Suite:
    """Make a suite of its settings. UserError: it has no such setting, or not such a value."""
    kind = find(name)
    if other := next((field for field in settings if field not in hints_of(kind)), ""):
        raise UserError(f"{other} means nothing to the suite {kind().label}: leave it out.")
    return kind(**settings)


def from_config(config: object, settings: Mapping[str, object] = {}) -> Suite:
    """Make the suite that the settings of a command name, with settings of its own."""
    return make(name_of({"suite": config.suite, "data": getattr(config, "data", ())}), settings)


def chosen(cls: type[Config], settings: Mapping[str, object]) -> tuple[Config, Suite]:
    """Divide the settings of a command: those of its class `cls`, and the suite with all others."""
    config = cls(**{name: value for name, value in settings.items() if name in hints_of(cls)})
    suite = from_config(
        config, {n: value for n, value in settings.items() if n not in hints_of(cls)}
    )
    if suite.pictured and not (config.endpoint and config.chat):
        raise UserError("images are sent to a server alone: give --endpoint URL and --chat.")
    return config, suite


def kinds() -> list[type[Suite]]:
    """Return all suites of this folder, and of files that were loaded before."""
    return list(dict.fromkeys([*map(find, names()), *FINDER.loaded.values()]))


def hints() -> dict[str, object]:
    """Map the settings of all suites to their types."""
    return {name: kind for suite in kinds() for name, kind in hints_of(suite).items()}


def stored(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings of a file as they are today.

    Earlier versions called the suite of a stream `environment`, and wrote the settings of all
    suites: those of others than the file's own are left out where they are as by default.
    """
    found = {"suite" if name == "environment" else name: v for name, v in settings.items()}
    kept = {field.name for field in fields(known(name_of(found)) or Suite)}
    usual = {f.name: f.default for kind in kinds() for f in fields(kind) if f.name not in kept}

    def is_usual(name: str, value: object) -> bool:
        return name in usual and usual[name] == (tuple(value) if isinstance(value, list) else value)

    return {name: value for name, value in found.items() if not is_usual(name, value)}


def classes(given: Given, usual: str) -> list[type[Suite]]:
    """Return the suite that a command line names, by default `usual`: its fields are flags."""
    return [find(given.get("suite") or usual)]


# ---------------------------------------------------------------- what a command asks


def scope_of(
    suite: Suite, data: tuple[str, ...], config: object, codec: Callable[[], Codec] | None = None
) -> Scope:
    """Return what a command asks of a suite, at the suite's own lengths where none are given.

    data: files, or a name of generated tasks. config: the command's lengths, n and seed. UserError:
    the suite has no use for files or lengths that are given.
    """
    data = () if data in GENERATED else data
    useless = {"data": data and suite.generated, "lengths": config.lengths and not suite.lengths}
    for flag in filter(useless.get, useless):
        raise UserError(f"--{flag} means nothing to the suite {suite.label}: leave it out.")
    return Scope(data, config.lengths or tuple(suite.lengths), config.n, config.seed, codec)


def columns(suite: Suite, scope: Scope) -> list[Column]:
    """Return the columns of a suite. UserError: there are none, two could not be told apart, or the
    code of a file of the user's fails."""
    with told(file=suite.name if is_path(suite.name) else ""):
        found = [*suite.columns(scope)]
        places = Counter((column.question, column.length) for column in found)
    if not found or max(places.values()) > 1:
        what = f"two columns {places.most_common(1)[0][0]}" if found else "no column"
        raise UserError(
            f"The suite {suite.label} has {what}: rename one of its files, or take them apart."
        )
    return [replace(column, make=partial(_made, suite, column)) for column in found]


def _made(suite: Suite, column: Column) -> list[Task]:
    with told(file=suite.name if is_path(suite.name) else ""):
        tasks = [*column.make()]  # which may be a generator
    if others := [type(task).__name__ for task in tasks if not isinstance(task, Task)]:
        raise UserError(f"The suite {suite.label} makes {others[0]}s, which are no tasks.")
    return tasks
