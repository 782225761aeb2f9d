"""Bars in a terminal and in a pipe: what gives way is text, never a number."""

import io
import shlex

import pytest
from rich.console import Console

from config.terminal import bar, command_line, next_step


def drawn(console, progress) -> str:
    console.print(progress.make_tasks_table(progress.tasks))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [64, 80, 120, 160])
@pytest.mark.parametrize("description", ["training", "memagent@untrained T=0 hotpotqa 0.5 25600"])
def test_every_number_is_whole_at_every_width(width, description):
    console, now = Console(width=width, file=io.StringIO(), force_terminal=True), [0.0]
    progress = bar("questions", console)
    progress.get_time = lambda: now[0]
    task = progress.add_task(description, total=1104, note="reward 0.83  12,345 tokens/s")
    for _ in range(57):
        now[0] += 61.5
        progress.advance(task)
    (line,) = drawn(Console(width=width, file=io.StringIO()), progress).rstrip("\n").split("\n")
    assert {"57/1104", "61.5"} <= {*line.split()} and " s each " in line, line
    assert "17:53:1" in line and description[:5] in line and len(line) <= width


@pytest.mark.parametrize("note", ["Notes [/sources]", "[red] and [link=x]", "[bold]\\[x]"])
def test_a_note_is_shown_as_it_is_and_steers_no_terminal(note):
    console = Console(width=120, file=io.StringIO(), force_terminal=True)
    progress = bar("sections", console)
    progress.add_task("reading", total=3, note=f"{note}\n\x1b[31m\x9b2J")
    shown = drawn(console, progress)
    assert f"{note} \ufffd[31m\ufffd2J" in shown and "\x1b[31m" not in shown


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
        progress.print("a line of the caller's, [longer] than the console is wide")
    *said, other = console.file.getvalue().splitlines()
    head = "memagent [x] T=1 one_fact 4  "
    between = [f"{head}20/60 answers  0:20:30", f"{head}40/60 answers  0:41:00"]
    assert said == [*(between if every else ()), f"{head}60/60 answers  1:01:30"]
    assert other == "a line of the caller's, [longer] than the console is wide"


def test_parts_of_a_line_that_do_not_fit_a_terminal_are_left_out():
    parts = "step   10", "reward 0.5", "x" * 57, "update 1.1 s"
    narrow = Console(width=80, file=io.StringIO(), force_terminal=True)
    assert fitting(parts, narrow) == "  ".join(parts[:3]) and len(fitting(parts, narrow)) == 80
    assert fitting(parts, Console(width=80, file=io.StringIO())) == "  ".join(parts)


def test_the_next_command_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tests/run.py"])
    words = ["ask", tmp_path / "my notes.txt", "Who's there?"]
    line = command_line(*words)
    assert shlex.split(line)[1:] == ["cli.py", "ask", "my notes.txt", "Who's there?"]
    next_step("go on", *words, runs="elsewhere")
    said = capsys.readouterr()
    assert not said.out and said.err.splitlines()[-1] == f"{line} --runs elsewhere"
