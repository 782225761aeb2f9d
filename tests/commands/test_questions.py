"""`ask` at a prompt in a terminal, and as a function of Python."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_ask import alone, scripted, told  # noqa: F401

import cli
from commands import ask as commands_ask
from config.errors import UserError
from memagent import ask

SMALL = "--model tiny --chunk-tokens 6 --memory-tokens 99 --final-tokens 99 --agent memagent"


def lima(prompt):
    if prompt.final:
        return "\\boxed{Oslo}" if "Boris" in prompt.text else "\\boxed{Lima}"
    return "Clara reached Lima."


def typed(words, keys, monkeypatch, codec) -> tuple[int, str]:
    """Run `ask` in a forked child on a terminal; type each of `keys` when a prompt is shown.

    Returns its exit status and all that the terminal showed.
    """
    scripted(monkeypatch, codec, lima)
    child, terminal = pty.fork()
    if not child:
        status = 1
        try:
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            os.environ["TERM"] = "dumb"  # no bar, no colours
            cli.app(words.split("|"))
        except SystemExit as end:
            status = end.code or 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    said, keys = b"", [*keys]
    try:
        while piece := os.read(terminal, 1 << 16):
            said += piece
            if keys and said.endswith(b"(empty to end): "):
                os.write(terminal, keys.pop(0))
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(terminal)
    assert not keys, said
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()


def test_x(monkeypatch, codec):
    Path("a.txt").write_text("Clara reached Lima. Boris toured Oslo.")
    print(typed("ask|a.txt|--name|r|" + SMALL.replace(" ", "|"), [b"Where is Clara?\n", b"Where is Boris?\n", b"\x04"], monkeypatch, codec))
    scripted(monkeypatch, codec, lima)
    print(ask("a.txt", "Where is Clara?", model="tiny", agent="memagent", memory_tokens=99, final_tokens=99))
    assert 0
