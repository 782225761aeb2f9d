"""Chat templates and tokenizers of strangers: each is tried in a child process that can neither
last nor grow.

transformers renders them in Jinja's sandbox, which keeps them from files and attributes, not from
nested loops, `'x' * 10**9` or `10**10**10`. One operator can take all memory, also where a template
is compiled, and what is taken depends on the messages: so the system counts, each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from config.errors import UserError, clip

SECONDS = 3
"""Most processor time of a rendering."""
MEMORY = 1 << 29
"""Most bytes that it may take beside what the process has."""
SOURCE = 1 << 20
"""Most characters of a template."""
ADDED = 1 << 18
"""Most characters that it may write beside eight times what it is given."""
COSTLY = ("Regex", "Replace", "Prepend", "Precompiled", "Split")
"""Kinds of a tokenizer's parts whose cost is for its folder to say."""
RUN, LENGTH = 1000, 1 << 16
"""Characters of the same letter, and of words, that a tokenizer is tried with."""
WORDS = "It's 12,345.67 o'clock; Anna (b. 1994-05-01) wrote: \"naïve, 你好 мир\"!\n\n"

_known: dict[bytes, tuple[str, str]] = {}  # of what was rendered: the text, or what was wrong


def rendered(tokenizer, messages: Sequence[dict], **more: object) -> str:
    """Return what the tokenizer's `apply_chat_template` makes of messages; remembered.

    more: its further arguments. jinja2.TemplateError: the template raises something. UserError: it
    takes more time or memory than a chat template may, or writes more.
    """
    from jinja2 import TemplateError

    template = tokenizer.chat_template
    key = pickle.dumps((template, tokenizer.special_tokens_map, messages, more))
    if key not in _known:
        if len(str(template)) > SOURCE:
            raise UserError(f"The model's chat template is longer than {SOURCE:,} characters.")
        found = _by_child(lambda: _render(tokenizer, messages, more))
        if not found:
            raise UserError(
                f"The model's chat template takes more than {SECONDS} seconds or "
                f"{MEMORY >> 20} MiB, or writes more than {ADDED:,} characters: give another "
                "--model."
            )
        _known[key] = found
    text, wrong = _known[key]
    if wrong:
        raise TemplateError(wrong)
    return text


def check_tokenizer(tokenizer, name: str | Path) -> None:
    """Raise a UserError where a tokenizer takes more than `SECONDS` or `MEMORY` for texts of
    letters, words or lines that repeat, or cannot read them.

    name: of its folder.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend else {}
    parts = {part: parts.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")}
    source = json.dumps(parts, ensure_ascii=False)  # what is looked for and replaced is in there
    if backend and not any(f'"{kind}"' in source for kind in COSTLY):
        return
    letters = [*string.printable, *sorted({*source} - {*string.printable})[:200]]
    runs = "\0".join(letter * RUN for letter in letters)
    words = f"{WORDS} {string.printable} {source[:RUN]}\n"

    def encode() -> bool:
        for text in (*(letter * 40 for letter in letters), runs, words * (LENGTH // len(words))):
            ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            tokenizer.decode(ids)
        return True

    if not _by_child(encode):
        raise UserError(
            f"The tokenizer of {name} takes more than {SECONDS} seconds or {MEMORY >> 20} MiB for "
            f"{LENGTH:,} characters, or fails: give another --model."
        )


def _by_child(function: Callable[[], object]) -> object:
    """Return what a function returns in a child process, None if it passes a limit or fails."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            _limit()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's panic
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(function()))
        finally:
            os._exit(0)  # whatever was raised: nothing of the parent is cleaned up here
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return pickle.loads(answer) if answer else None


def _limit() -> None:
    """Limit this process: where a limit is passed it is ended, or gets a MemoryError."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with contextlib.suppress(OSError):  # systems without /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # the last resort: another thread may have held a lock that nobody releases here
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60 * SECONDS)


def _render(tokenizer, messages: Sequence[dict], more: dict) -> tuple[str, str]:
    """Render; a MemoryError goes through, as does the one for a text that is too long."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
    except MemoryError:
        raise
    except Exception as error:  # whatever a template makes Jinja, or Python, raise
        return "", clip(str(error), 500) or type(error).__name__
    if len(text) > ADDED + 8 * len(repr((messages, more))):
        raise MemoryError
    return text, ""
