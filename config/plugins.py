"""Python files of the user's: an agent, a suite, a reward, tasks. Data never names one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from config.errors import UserError, alone, meant, one_line, show_traceback
from config.files import is_file

ROOT = Path(__file__).parent.parent
LOADED: set[str] = set()  # absolute paths of the user's files that were loaded


def is_path(name: str) -> bool:
    """Tell whether a name, of an agent or a suite, is that of a file."""
    return name.endswith(".py") or "/" in name or "\\" in name


@alone()
def load_file(path: Path) -> ModuleType:
    """Import a Python file, once. UserError, with the line, if that fails."""
    name = f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:  # also where the file is gone since
        return sys.modules[name]
    if not is_file(path):
        raise UserError(f"There is no file {path}.")
    if path.suffix != ".py":
        raise UserError(f"{path} is no Python file: its name must end in .py.")
    LOADED.add(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        place = place_in_loaded(error) or path
        raise UserError(f"{place} cannot be imported: {one_line(error)}.") from error
    return module


class Finder:
    """Find subclasses of one class: each in a module of a room, or in any file by its path.

    room: the folder whose modules hold one each but for those of `shared`. constant: names the one
    that is meant where a file has several. method: what a class must have of its own; a generator
    function alone becomes that method of a new class. modules: name -> module, of those that hold
    several.
    """

    def __init__(
        self,
        base: type,
        room: str,
        constant: str,
        shared: Iterable[str] = (),
        method: str = "",
        modules: Mapping[str, str] = {},
    ):
        self.base, self.room, self.constant = base, room, constant
        self.shared, self.method, self.modules = frozenset(shared), method, modules
        self.loaded: dict[str, type] = {}  # name or absolute path -> what was found

    def names(self) -> list[str]:
        """List those of the room, with - for _."""
        stems = {path.stem for path in (ROOT / self.room).glob("[!_]*.py")} - self.shared
        stems = stems - {*self.modules.values()} | self.modules.keys()
        return sorted(stem.replace("_", "-") for stem in stems)

    def known(self, name: str) -> type | None:
        """Return one of the room, or of a file that was loaded before; no file is loaded for it: a
        record or settings that came with data may name any."""
        if name in self.names():
            return self.find(name)
        return self.loaded.get(str(Path(str(name)).absolute()))

    def find(self, name: str) -> type:
        """Return one by its name or by the path of its file, which is loaded once. UserError: it is
        not there, or the file does not hold it."""
        if is_path(name):
            path = Path(name).absolute()
            module, name = load_file(path), str(path)
        elif name in self.names():
            stem = self.modules.get(name, name.replace("-", "_"))
            module = importlib.import_module(f"{self.room}.{stem}")
        else:
            what, choices = self.base.__name__.lower(), ", ".join(self.names())
            raise UserError(
                f"Unknown {what} {name!r}.{meant(name, self.names())} Choose one of {choices}, or "
                f"give a file, such as my_{what}.py."
            )
        chosen = self._in(module, name)
        chosen.name = name
        return self.loaded.setdefault(name, chosen)

    def _in(self, module: ModuleType, name: str) -> type:
        values = [
            v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__
        ]
        kinds = [v for v in values if isinstance(v, type) and issubclass(v, self.base)]
        if name in self.modules:
            return next(kind for kind in kinds if kind.name == name)
        parents = {parent for kind in kinds for parent in kind.__mro__[1:]}
        leaves = [kind for kind in kinds if kind not in parents and self._is_whole(kind)]
        candidates = leaves or [v for v in values if self.method and inspect.isgeneratorfunction(v)]
        chosen = getattr(module, self.constant, candidates[0] if len(candidates) == 1 else None)
        if self.method and inspect.isgeneratorfunction(chosen):
            body = {"__doc__": chosen.__doc__, "__module__": chosen.__module__}
            chosen = type(self.base)(chosen.__name__, (self.base,), body | {self.method: chosen})
        if not (isinstance(chosen, type) and issubclass(chosen, self.base)):
            several = ", ".join(value.__name__ for value in candidates) or "none"
            if kinds and not candidates:
                raise UserError(f"{kinds[-1].__name__} in {name} has no method {self.method}.")
            raise UserError(
                f"{name} must hold one subclass of {self.base.__name__}, not {several}: say which "
                f"by {self.constant} = NAME."
            )
        return chosen

    def _is_whole(self, kind: type) -> bool:
        return not self.method or getattr(kind, self.method) is not getattr(self.base, self.method)


def place_in_loaded(error: BaseException) -> str:
    """Return the last line of the user's files that an exception has passed, as "FILE, line 14, in
    run"; "" of none."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f"line {f.lineno}, in {f.name}") for f in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename, f"line {error.lineno}"))
    ours = [(file, line) for file, line in places if file in LOADED]
    return "".join(f"{_shown(file)}, {line}" for file, line in ours[-1:]).removesuffix(
        ", in <module>"
    )


def _shown(path: str) -> str:
    """Return a path as short as it can be given."""
    return min(path, os.path.relpath(path), key=len)


@contextmanager
def told(kind: type[UserError] = UserError, file: str = "") -> Iterator[None]:
    """Turn an exception out of a file of the user's into one sentence, with file and line.

    file: one whose values are at fault where the exception is none of its own.
    """
    try:
        yield
    except (UserError, StopIteration):
        raise
    except Exception as error:
        if not (place := place_in_loaded(error) or file):
            raise
        raise kind(f"{place}: {one_line(error)} (--debug shows the traceback).") from error


SAID: set[str] = set()


def failure(error: Exception) -> UserError:
    """Return the failure of one reading by an exception of its agent, which is counted; of a file
    of the user's its place is said, once."""
    if (place := place_in_loaded(error)) and place not in SAID:
        SAID.add(place)
        show_traceback()
        said = f"{place}: {one_line(error)}; such readings count as failed"
        print(f"{said} (--debug shows the traceback).", file=sys.stderr, flush=True)
    return UserError(one_line(error))


def load_function(place: str, flag: str) -> Callable:
    """Return the function named by `path.py:function`, the value of the user's `flag`."""
    path, _, name = place.rpartition(":")
    if not path:
        raise UserError(f"{flag} takes path.py:function, not {place!r}.")
    module = load_file(Path(path).absolute())
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} has no function {name!r} ({flag}).")
    return function
