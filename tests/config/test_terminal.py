"""Bars on terminals of every width: what gives way is text, never a number."""

import io
import os
import signal

import pytest
from rich.console import Console
from tqdm import tqdm

from config.terminal import WIDE, bar


@pytest.mark.parametrize("width", [64, 80, 100, WIDE, 160])
@pytest.mark.parametrize(
    ("description", "note"),
    [
        ("training", "reward 0.83  turns 34  12,345 tokens/s"),
        ("memagent@untrained T=0 hotpotqa, evidence reverse 0.5 25600", ""),
        ("asking without the document", "and a note of any length that stands behind the numbers"),
    ],
)
def test_every_number_is_whole_at_every_width(width, description, note):
    console, now = Console(width=width, file=io.StringIO()), [0.0]
    progress = bar("questions", console)
    progress.get_time = lambda: now[0]
    task = progress.add_task(description, total=1104, note=note)
    for _ in range(57):
        now[0] += 61.5
        progress.advance(task)
    console.print(progress.make_tasks_table(progress.tasks))
    (line,) = console.file.getvalue().rstrip("\n").split("\n")
    assert {"57/1104", "61.5"} <= {*line.split()} and " s each " in line, line
    assert "17:53:10 left" in line.replace("17:53:11", "17:53:10"), line
    assert description[:5] in line and len(line) <= width
    if width >= WIDE:
        assert "0:58:25" in line.replace("0:58:26", "0:58:25") and "questions" in line
    if width >= 80 and description == "training":
        assert "reward 0.83" in line and description in line


@pytest.mark.parametrize("note", ["Notes [/sources]", "[red] and [link=x]", "[bold]\\[x]"])
def test_a_note_is_shown_as_it_is_and_steers_no_terminal(note):
    console = Console(width=WIDE, file=io.StringIO(), force_terminal=True)
    progress = bar("sections", console)
    progress.add_task("reading", total=3, note=f"{note}\n\x1b[31m\x9b2J")
    console.print(progress.make_tasks_table(progress.tasks))
    shown = console.file.getvalue()
    assert f"{note} \ufffd[31m\ufffd2J" in shown and "\x1b[31m" not in shown


def test_a_child_that_is_killed_in_the_middle_of_a_bar_leaves_no_lock_held():
    """Libraries draw bars of tqdm's, and several tests kill forked children."""
    tqdm.get_lock()  # made at first use: what is made before the fork is shared
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        tqdm.get_lock().acquire()
        os.write(theirs, b"held")
        signal.pause()
    assert os.read(ours, 4) == b"held"
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(ours)
    os.close(theirs)
    for lock in getattr(tqdm.get_lock(), "locks", [tqdm.get_lock()]):
        assert lock.acquire(timeout=5)
        lock.release()
