"""Bars in a terminal and in a pipe: what gives way is text, never a number."""

import io
import shlex

import pytest
from rich.console import Console

from config.terminal import bar, command_line, next_step


def slow(console, description, total, done, **fields):
    """A bar whose every item takes 61.5 seconds."""
    progress, now = bar("answers", console), [0.0]
    progress.get_time = lambda: now[0]
    task = progress.add_task(description, total=total, **fields)
    for _ in range(done):
        now[0] += 61.5
        progress.advance(task)
    return progress


@pytest.mark.parametrize("width", [64, 160])
@pytest.mark.parametrize("description", ["training", "memagent@untrained T=0 hotpotqa 0.5 25600"])
@pytest.mark.parametrize("note", ["reward 0.83", "[red] [link=x] \\[x] [/sources]\n\x1b[31m\x9b2J"])
def test_every_number_is_whole_and_a_note_steers_no_terminal(width, description, note):
    terminal, out = (Console(width=width, file=io.StringIO(), force_terminal=t) for t in (True, 0))
    progress = slow(terminal, description, 1104, 57, note=note)
    out.print(progress.make_tasks_table(progress.tasks))
    (line,) = out.file.getvalue().rstrip("\n").split("\n")
    assert "57/1104" in line.split() and "17:53:1" in line, line
    assert description[:5] in line and len(line) <= width
    shown = note.replace("\n", " ").replace("\x1b", "\ufffd").replace("\x9b", "\ufffd")
    assert width < 99 or shown in line


@pytest.mark.parametrize("every", [None, 20])
def test_where_there_is_no_terminal_a_bar_is_plain_lines(every):
    console, head = Console(width=40, file=io.StringIO()), "memagent [x] T=1 one_fact 4  "
    progress = slow(console, head.strip(), 60, 60, note="", **({"every": every} if every else {}))
    progress.print("a line of the caller's, [longer] than the console is wide")
    *said, other = console.file.getvalue().splitlines()
    between = [f"{head}20/60 answers  0:20:30", f"{head}40/60 answers  0:41:00"]
    assert said == [*(between if every else ()), f"{head}60/60 answers  1:01:30"]
    assert other == "a line of the caller's, [longer] than the console is wide"


def test_the_next_command_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tests/run.py"])
    words = ["ask", tmp_path / "my notes.txt", "Who's there?"]
    line = command_line(*words)
    assert shlex.split(line)[1:] == ["cli.py", "ask", "my notes.txt", "Who's there?"]
    next_step("go on", *words, runs="elsewhere")
    said = capsys.readouterr()
    assert not said.out and said.err.splitlines()[-1] == f"{line} --runs elsewhere"
