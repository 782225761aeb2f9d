"""Python files of the user's: an agent, a reward, tasks.

Holds: `is_path`, `load_file`, `load_function`, `told`. Leaves out: finding the agent or suite in
a file (agents/find.py, suites/).
Exercise it: `python cli.py train --reward my_reward.py:reward --dry-run`.
Read next: agents/find.py.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from config.errors import UserError
from config.files import is_file


def is_path(name: str) -> bool:
    """Tell whether a name, of an agent or a suite, is that of a file."""
    return name.endswith(".py") or "/" in name or "\\" in name


def load_file(path: Path) -> ModuleType:
    """Import a Python file, once. UserError, with the line, if that fails."""
    if not is_file(path):
        raise UserError(f"There is no file {path}.")
    name = f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{path} cannot be imported: {_one_line(error, path)}.") from error
    return module


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an exception in a file of the user's into one sentence, with the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} fails: {_one_line(error, path)}.") from error


def _one_line(error: BaseException, path: Path) -> str:
    """Describe an exception in one line, with the last line of `path` in its traceback."""
    message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(". ")
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f"line {lines[-1]}: {message}" if lines else message


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
