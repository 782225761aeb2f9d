"""One exception for the mistakes of a user, and text that is safe to print.

Holds: `UserError`, `clean`, `clip`, `loading`. Leaves out: files (config/files.py).
Exercise it: `pytest tests/tokens`. Read next: config/files.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake of the user's: one sentence that says what to do. The commands print it and exit with 2."""


CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """Text that cannot steer a terminal or break a page: control characters, direction overrides and half surrogates become `\\ufffd`."""
    return CONTROL.sub("\ufffd", str(text).replace("\r\n", "\n"))


def clip(text: str, characters: int) -> str:
    """The text with its middle left out, if it is longer than that."""
    if (left_out := len(text) - characters) <= 0:
        return text
    head, tail = text[: characters - characters // 2], text[len(text) - characters // 2 :]
    return f"{head} [… {left_out:,} characters left out …] {tail}"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Around a library's loader of the user's files: what it raises becomes one sentence, and its own long reports are not printed.

    Damaged files make transformers and tokenizers raise whatever they come upon: KeyError, TypeError, a plain Exception, ..
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(". ")
        raise UserError(
            f"{what} cannot be loaded ({reason if len(reason) < 300 else reason[:299] + '…'})."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
