"""Chat templates and tokenizers of strangers, each tried in a child that can neither last nor grow.

transformers renders in Jinja's sandbox, which keeps a template from files and attributes, not from
nested loops, `'x' * 10**9` or `10**10**10`. One operator can take all memory, and what is taken
depends on the messages: so the system counts, each time.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from config.errors import UserError, clip

SECONDS = 3
"""Most processor time of a trial."""
MEMORY = 1 << 29
"""Most bytes that it may take beside what the process has."""
ADDED = 1 << 18
"""Most characters that a template may write beside eight times what it is given."""
COSTLY = ("Regex", "Replace", "Prepend", "Precompiled", "Split")
"""Kinds of a tokenizer's parts whose cost is for its folder to say; others need no trial, which
takes half a second."""
RUN, LENGTH = 1000, 1 << 16
"""Characters of the same letter, and of words, that a tokenizer is tried with."""
WORDS = "It's 12,345.67 o'clock; Anna (b. 1994-05-01) wrote: \"naïve, 你好 мир\"!\n\n"


class Refused(UserError):
    """The chat template raises something."""


def rendered(tokenizer, messages: Sequence[dict], **more: object) -> str:
    """Return what the tokenizer's `apply_chat_template` makes of messages.

    more: its further arguments. Refused: the template raises something. UserError: it takes more
    time or memory than a chat template may, or writes more.
    """
    given = pickle.dumps((messages, more))
    found = _render(tokenizer, str(tokenizer.chat_template), given)
    if not found:
        raise UserError(
            f"The model's chat template takes more than {SECONDS} seconds or {MEMORY >> 20} MiB, "
            "or writes too much: give another --model."
        )
    text, wrong = found
    if wrong:
        roles = ", ".join(message["role"] for message in messages)
        raise Refused(f"The model's chat template refuses the roles {roles}: {wrong}.")
    return text


@lru_cache(256)  # a child of a process that holds a model takes a tenth of a second to begin
def _render(tokenizer, template: str, given: bytes) -> tuple[str, str] | None:
    """Return what is rendered, or what is wrong; None: it passes a limit.

    template: the tokenizer's, which may be given another one. given: messages and arguments.
    """
    messages, more = pickle.loads(given)

    def render() -> tuple[str, str]:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
        except MemoryError:
            raise
        except Exception as error:  # whatever a template makes Jinja, or Python, raise
            return "", clip(str(error), 500) or type(error).__name__
        if len(text) > ADDED + 8 * len(given):
            raise MemoryError
        return text, ""

    return _by_child(render)


def check_tokenizer(tokenizer, name: str | Path) -> None:
    """Raise a UserError where a tokenizer takes more than `SECONDS` or `MEMORY` for texts of
    letters, words or lines that repeat, or cannot read them.

    name: of its folder.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{name} has no tokenizer.json, or none that is read here.")
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    # what is looked for and replaced is in there
    parts = [whole[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
    source = json.dumps(parts, ensure_ascii=False)
    if not any(f'"{kind}"' in source for kind in COSTLY):
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
    if (statm := Path("/proc/self/statm")).exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # the last resort: another thread may have held a lock that nobody releases here
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60 * SECONDS)
