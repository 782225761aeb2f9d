"""What commands print as they work: plain lines in a pipe, and nothing that wraps in a terminal."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

import cli
import commands.train  # noqa: F401  what the children need is imported once

COLUMNS = 80
SMALL = "--chunk-tokens 30 --memory-tokens 8 --final-tokens 8".split()
TRAIN = "--name t --tasks-per-step 1 --lengths 1 --steps 2".split()
COMMANDS = {  # and what a line of a step, a cell or an epoch begins with, and how many there are
    "train --group-size 2 --validation world --save-every 1": (
        [*TRAIN, *SMALL], {r"step +\d+  reward .* update .* s$": 2, r"step +\d+  validation": 2}
    ),
    "sft": (TRAIN, {r"step +\d+  loss .* update .* s$": 2}),
    "eval --name e --lengths 1,2 --n 2 --agents memagent,none": (
        SMALL,
        {r"(memagent|none) T=\d (one_fact|two_hop) [12]  2/2 answers  0:\d\d:\d\d$": 16},
    ),
    "stream --epochs 2 --name st": (
        [], {r"(none|rag|memp|memrl)  \d+/\d+ tasks  0:\d\d:\d\d$": 8}
    ),
}  # fmt: skip


def shown(words, folder, terminal: bool) -> str:
    """Return what a command prints, in a forked child, to a terminal of 80 columns or a pipe."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    child = os.fork()
    if not child:
        try:
            if terminal:
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
            for fd in (1, 2):
                os.dup2(theirs, fd)
            if terminal:
                os.dup2(theirs, 0)
            for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
                os.environ.pop(name, None)
            os.environ["TERM"] = "xterm"
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(folder)
            cli.app(words)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 1 << 16):
            said += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0
    return said.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_one_plain_line_a_step_or_cell(command, tmp_path):
    words, patterns = COMMANDS[command]
    said = shown([*command.split(), *words], tmp_path, terminal=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said), said
    for pattern, n in patterns.items():
        assert len([line for line in said.splitlines() if re.match(pattern, line)]) == n, said


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_wraps_in_a_terminal_of_80_columns(command, tmp_path):
    said = shown([*command.split(), *COMMANDS[command][0]], tmp_path, terminal=True)
    assert "\x1b[" in said  # a bar
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    long = [line for line in re.split(r"[\r\n]+", plain) if len(line) > COLUMNS]
    # but a command to be pasted, which names the Python that runs
    assert not [line for line in long if " cli.py " not in line], long
