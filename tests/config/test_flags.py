"""Flags are the fields of settings: of a small command of two classes, and of ours."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import cli
from config.errors import Stopped, UserError
from config.flags import Config, Group, command
from config.settings import COUNT, UNFLAGGED, Settings, divide


@dataclass(frozen=True, slots=True)
class Reading(Settings):
    n: Annotated[int, COUNT] = 3
    """how many"""
    sizes: tuple[int, ...] = (4, 8)
    """of each"""
    words: tuple[str, ...] = ()
    """to look for"""
    kind: Literal["plain", "rich"] = "plain"
    """of the print"""
    loud: bool = False
    """with noise"""
    limit: float | None = None
    """in seconds"""
    secret: Annotated[int, UNFLAGGED] = 1
    """set by files alone"""


@dataclass(frozen=True, slots=True)
class Own(Reading):
    depth: int = 2
    """of the agent's own"""


@dataclass(frozen=True, slots=True)
class Clash(Settings):
    n: int = 1
    """of a suite"""


RAISED = {
    "user": UserError("It is wrong\x1b[31m."),
    "stopped": Stopped(15, "stopped by hand"),
    "ctrl-c": KeyboardInterrupt(),
    "disk": OSError(28, "No space left on device"),
}
app = typer.Typer(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
KINDS = {"own": [Own], "clash": [Clash]}


@command(
    app,
    Reading,
    everyday="kind n",
    more=lambda given: KINDS.get(given.get("agent"), []),
    usual=lambda given: {"n": 99},
    examples="read a.txt",
)
def read(
    ctx: typer.Context,
    files: Annotated[list[str] | None, typer.Argument()] = None,
    agent: str = "",
    config: Config = None,
):
    """Read files."""
    if agent in RAISED:
        raise RAISED[agent]
    first, rest = divide(ctx.obj, Reading)
    print(json.dumps([files, str(config or ""), first, rest]))


@command(app)
def other():
    """Do nothing."""


def run(line: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    return done.output


def table(text: str) -> set[str]:
    return {*re.findall(r"^│ (--[\w-]+)", text, re.M)}


@pytest.mark.parametrize(
    ("line", "first", "rest"),
    [
        ("", {}, {}),
        ("--n 5 a b", {"n": 5}, {}),
        ("a --n=5 b", {"n": 5}, {}),
        ("--sizes 1,2 --sizes 3 a b", {"sizes": [1, 2, 3]}, {}),
        ("--sizes 50,...,400 a b", {"sizes": [50, 100, 200, 400]}, {}),
        ("--words x,y a b", {"words": ["x", "y"]}, {}),
        ("--words= a b", {"words": []}, {}),
        ("--loud a b", {"loud": True}, {}),
        ("--no-loud a --limit 2.5 b", {"loud": False, "limit": 2.5}, {}),
        ("a --kind rich --agent own --depth 7 b", {"kind": "rich"}, {"depth": 7}),
        ("--depth 7 --loud --agent=own a b", {"loud": True}, {"depth": 7}),
        ("--config c.yaml a b", {}, {}),
    ],
)
def test_what_is_given_arrives_with_its_type_and_nothing_else(line, first, rest):
    files, config, *found = json.loads(run(f"read {line}"))
    assert found == [first, rest] and files == (["a", "b"] if line else None)
    assert config == ("c.yaml" if "config" in line else "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--depth 7", "No such option"),  # of an agent that is not named
        ("--secret 2", "No such option"),
        ("--kinds rich", "--kind"),
        ("--kind riche", "'rich'"),
        ("--n many", "--n"),
        ("--n", "--n"),
        ("--sizes 4,x", "sizes must"),
        ("--sizes ...,8", "sizes must"),
        ("--sizes 9,...,8", "sizes must"),
        ("--agent clash", "another name"),
        ("--agent user", "memagent: It is wrong\ufffd[31m."),
        ("--agent disk", "No space left on device."),
    ],
)
def test_a_mistake_is_answered(line, said):
    output = run(f"read {line}", code=2)
    assert said in " ".join(output.split()) and "Traceback" not in output


@pytest.mark.parametrize(("agent", "code"), [("stopped", 143), ("ctrl-c", 130)])
def test_a_stop_has_the_status_of_its_signal(agent, code):
    assert run(f"read --agent {agent}", code).startswith("memagent: stopped")


def test_a_nul_byte_is_refused_and_the_traceback_is_shown_where_it_is_asked_for():
    for words in (["a\0b"], ["--agent", "a\0b"]):
        done = CliRunner().invoke(app, ["read", *words])
        assert done.exit_code == 2 and "NUL" in done.output
    assert "Traceback" in run("read --agent user --debug", 2)
    assert "Traceback" not in run("read --agent user", 2)


def test_help_shows_a_few_and_help_all_every_flag_in_two_panels():
    short, whole = run("read -h"), run("read --agent own --help-all")
    assert table(short) == {"--kind", "--n", "--agent", "--config", "--help"}
    assert table(whole) == table(short) | {"--sizes", "--words", "--loud", "--limit", "--depth"}
    assert "how many (default: 99)" in short and "plain, rich" in short
    assert "python cli.py read a.txt" in short
    panels = re.findall(r"^╭─ (.+?) ─", whole, re.M)
    assert panels == ["Arguments", "Options", "All other settings"]


# ---------------------------------------------------------------- ours


def context(line: str):
    name, *words = line.split()
    made = typer.main.get_command(cli.app).commands[name]
    return made, made.make_context(name, words, resilient_parsing=True)


def flags(line: str) -> dict[str, typer.core.TyperOption]:
    made, ctx = context(line)
    return {p.opts[0]: p for p in made.get_params(ctx)}


def test_there_are_fifteen_commands():
    group = typer.main.get_command(cli.app)
    names = "demo ask serve train sft plan export eval stream show report doctor".split()
    assert {*group.commands} == {*names, "data"}
    assert {*group.commands["data"].commands} == {"get", "build", "look"}


@pytest.mark.parametrize(("name", "most"), [("train", 45), ("eval", 40), ("sft", 45)])
def test_a_command_has_few_flags(name, most):
    assert len(flags(name)) <= most
    assert name != "sft" or not {"--reward", "--engine"} & {*flags(name)}


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("train --agent rememr1", "--recall-k"),
        ("train --preset rememr1", "--recall-k"),
        ("plan --agent=rememr1", "--recall-k"),
        ("eval --agents memagent,rememr1", "--recall-k"),
        ("eval --suite world", "--kinds"),
        ("eval --suite ruler", "--ruler-tasks"),
        ("eval --agents bm25@untrained", "--top-k"),
        ("ask --agent bm25", "--top-k"),
        ("stream", "--embedder"),
    ],
)
def test_an_agent_and_a_suite_bring_their_flags(line, flag):
    assert flag in flags(line)
    plain = line.split()[0]
    assert plain in ("stream",) or flag == "--top-k" or flag not in flags(plain)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("ask", {"chunk-tokens": "128", "memory-tokens": "32"}),  # of the reader, which answers
        ("ask --model tiny", {"chunk-tokens": "24", "memory-tokens": "13"}),
        ("train --preset vime", {"lr": "1e-06", "group-size": "8", "agent": "memagent"}),
        ("train --preset rememr1", {"agent": "rememr1"}),
        ("sft", {"lr": "0.001", "steps": "100"}),
        ("eval", {"agents": "memagent,full,bm25", "n": "64"}),
    ],
)
def test_help_shows_the_values_in_force(line, values):
    done = CliRunner().invoke(cli.app, [*line.split(), "--help"])
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())
    for name, value in values.items():
        assert f"(default: {value})" in text.partition(f"--{name} <")[2].partition(" --")[0]


@pytest.mark.parametrize("line", ["train --agent rememr1", "eval", "ask", "plan", "data"])
def test_no_flag_is_cut_in_80_columns(line):
    shown = CliRunner().invoke(cli.app, [*line.split(), "--help-all" * (line != "data") or "-h"])
    names = re.findall(r"--[\w-]+…?", shown.output)
    assert names and not [n for n in names if n.endswith("…") and not n.startswith("--no-")]


def test_every_example_of_a_help_is_a_line_that_the_command_takes():
    group = typer.main.get_command(cli.app)
    for made in [*group.commands.values(), *group.commands["data"].commands.values()]:
        for line in re.findall(r"cli\.py (.+)", made.epilog or ""):
            words = [word.strip('"') for word in line.split()][1 + line.startswith("data ") :]
            made.make_context(made.name, words, resilient_parsing=False)
