"""Bars on terminals of every width: what gives way is text, never a number."""

import io
import os
import signal

import pytest
from conftest import HANG_S
from rich.console import Console
from tqdm import tqdm

from config.terminal import WIDE, bar, fitting


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
    console, now = Console(width=width, file=io.StringIO(), force_terminal=True), [0.0]
    progress = bar("questions", console)
    progress.get_time = lambda: now[0]
    task = progress.add_task(description, total=1104, note=note)
    for _ in range(57):
        now[0] += 61.5
        progress.advance(task)
    console = Console(width=width, file=io.StringIO())
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
        assert lock.acquire(timeout=HANG_S)
        lock.release()


@pytest.mark.parametrize("every", [None, 20])
def test_where_there_is_no_terminal_a_bar_is_plain_lines(every):
    console, now = Console(width=40, file=io.StringIO()), [0.0]
    progress = bar("answers", console)
    progress.get_time = lambda: now[0]
    with progress:
        own = {} if every is None else {"every": every}
        task = progress.add_task(r"memagent \[x] T=1 one_fact 4", total=60, note="", **own)
        for _ in range(60):
            now[0] += 61.5
            progress.advance(task)
        progress.update(task, completed=60, note="again")
        progress.print("a line of the caller's, [longer] than the console is wide")
    *said, other = console.file.getvalue().splitlines()
    last = r"memagent [x] T=1 one_fact 4  60/60 answers  1:01:30"
    head = last.partition("60/60")[0]
    between = [f"{head}20/60 answers  0:20:30", f"{head}40/60 answers  0:41:00"]
    assert said == [*(between if every else ()), last]
    assert other == "a line of the caller's, [longer] than the console is wide"


def test_parts_of_a_line_that_do_not_fit_a_terminal_are_left_out():
    parts = "step   10", "reward 0.5", "x" * 57, "update 1.1 s"
    narrow = Console(width=80, file=io.StringIO(), force_terminal=True)
    assert fitting(parts, narrow) == "  ".join(parts[:3]) and len(fitting(parts, narrow)) == 80
    assert fitting(parts, Console(width=80, file=io.StringIO())) == "  ".join(parts)
