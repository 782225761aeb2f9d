"""One exception for the mistakes of a user, and text that is safe to print."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

debugging = False  # whether the command line has --debug


def show_traceback() -> None:
    """Print the traceback of the exception at hand, if the user asks for such."""
    if debugging:
        traceback.print_exc(file=sys.stderr)


class UserError(Exception):
    """A mistake of the user, in one sentence that says what to do; commands exit with `status`."""

    status = 2


class Unshown(UserError):
    """All is done and kept; only the page that shows it could not be written."""

    status = 1


class AgentError(UserError):
    """A mistake in the code of an agent: it ends what runs, and is no failure of one trajectory."""


class ServerFailed(UserError):
    """A server failed, also after some tries: the policy is not to blame, and what needed the
    server may be begun anew."""


class Stopped(BaseException):
    """A signal has ended the work (config/stops.py); advice: what is kept, and how to go on."""

    def __init__(self, number: int, advice: str = "stopped."):
        super().__init__(advice)
        self.number = number


@contextmanager
def kept(what: Callable[[], str]) -> Iterator[None]:
    """Where a file cannot be written, say in a UserError what is whole nevertheless."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{first_line(error)}. {what()}") from error


CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """Replace what could steer a terminal or break a page: control characters, direction overrides
    and lone surrogates become U+FFFD."""
    return CONTROL.sub("\ufffd", str(text).replace("\r\n", "\n"))


def clip(text: str, characters: int) -> str:
    """Shorten a text to so many characters by leaving out its middle."""
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    head, tail = text[: characters - characters // 2], text[len(text) - characters // 2 :]
    return f"{head} [… {left_out:,} characters left out …] {tail}"


def hide_keys(text: str) -> str:
    """Mask what stands before the host of an address: a user and a password."""
    return re.sub("//[^/@ ]*@", "//***@", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without its final full stop."""
    return str(error).partition("\n")[0].rstrip(". ")


def one_line(error: BaseException) -> str:
    """Describe an exception in one line, without its final full stop."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(". ")


def meant(word: str, choices: Iterable[str]) -> str:
    """Ask whether the nearest of the choices is meant, in a sentence behind others; "" of none.

    >>> meant("memagnt", ["full", "memagent"])
    ' Did you mean memagent?'
    """
    near = get_close_matches(word, [*choices], n=1)
    return f" Did you mean {near[0]}?" if near else ""


_LOADS = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Let one thread at a time load or import, in a block or in a function that this decorates.

    transformers replaces functions of its own while it loads a model: overlapping loads restore
    each other's replacements, and every later load of the process fails.
    """
    with _LOADS:
        yield


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn whatever a library raises on a user's damaged files into a UserError, `alone` and with
    the library's log and progress muted."""
    with alone():
        from transformers.utils import logging

        verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{what} cannot be loaded ({clip(one_line(error), 300)}).") from error
        finally:
            logging.set_verbosity(verbosity)
            if shown:
                logging.enable_progress_bar()
