"""README.md, CONTRIBUTING.md and docs/: size, commands, links, figures, the agents they show."""

import contextlib
import csv
import re
import shlex
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import fmean

import pytest
import typer
from typer.testing import CliRunner

import cli
from agents import find
from commands.sft import demonstration
from config import flags
from config.options import EMBEDDED
from dev import picture
from report.summary import wilson
from tasks import worlds

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING, LOG = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "dev/LOG.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, CONTRIBUTING, *DOCS]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MODULES = ["memagent", "memory", "data", "rollout", "grpo", "eval", "cli"]
# files that a page speaks of and this repository does not have: a user's, and forbidden names
ELSEWHERE = {"my_agent.py", "update.txt", "final.txt", "full.txt"}
ELSEWHERE |= {"__init__.py", "vllm.py", "transformers.py", "datasets.py"}


def commands(text: str) -> list[list[str]]:
    """Return the words after `cli.py` of every command in a text, in order, comments left out.

    >>> commands("`python cli.py doctor`, then `cli.py train \\\\\\n  --steps 3`")
    [['doctor'], ['train', '--steps', '3']]
    """
    lines = re.findall(r"\bcli\.py ([^`\n]+)", text.replace("\\\n", " "))
    return [shlex.split(line, comments=True) for line in lines]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def rows(text: str, columns: int) -> dict[str, list[str]]:
    """Return the rows of the first table with so many columns: first cell -> the others."""
    out: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns:
            out[cells[0]] = cells[1:]
        elif out:
            break
    return out


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_front_page_takes_five_minutes():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_every_command_of_a_page_exists_with_its_flags(page, monkeypatch):
    monkeypatch.setattr(find, "check_model", lambda *_, **__: None)  # they need not be here
    text = page.read_text(encoding="utf-8")
    for words in commands(text):
        command = typer.main.get_command(cli.app)
        while hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        # which flags there are depends on the agent that is named; this one is the reader's own
        words = [find.DEFAULT if word == "my_agent.py" else word for word in words]
        if name in flags.BUILDERS:
            command = flags.BUILDERS[name](words)
        command.make_context(name, words)  # raises at an unknown flag or a missing argument
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"^    .*$|`.*?`", text))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=lambda page: page.name)
def test_the_links_and_files_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target
    names = {*re.findall(r"`([\w./-]+\.(?:py|yaml|txt))`", text)} if page != LOG else set()
    assert not {name for name in names - ELSEWHERE if not (ROOT / name).exists()}


def test_the_front_page_names_the_seven_modules_in_reading_order():
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)\.py`", text[text.index("## Read the code") :])
    assert named == MODULES == [name for name in named if (ROOT / f"{name}.py").exists()]
    assert {path.stem for path in ROOT.glob("*.py")} == {*MODULES}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench"}
    assert all(f"`{room}`" in text for room in rooms)


def test_the_table_of_the_front_page_pools_the_three_seeds_of_the_results():
    """Mean, and Wilson's interval over the questions of all three seeds, to two digits."""

    def short(x: float) -> str:
        return f"{x:.2f}".removeprefix("0")

    front = rows(README.read_text(encoding="utf-8"), columns=4)
    results = rows((ROOT / "docs/results.md").read_text(encoding="utf-8"), columns=6)
    agents = ("trained", "untrained", "full context")
    n = [cell.split(" / ") for cell in results[f"n, {' / '.join(agents)}"]]
    lengths = [results["sections"].index(length) for length in ("4", "64", "1,024")]
    names = [f"{facts}, {agent}" for facts in ("one fact", "two facts") for agent in agents]
    assert [*front][2:] == names
    for name in names:
        for cell, k in zip(front[name], lengths, strict=True):
            asked = int(n[k][agents.index(name.split(", ")[1])])
            means = [round(float(seed) * asked) / asked for seed in results[name][k].split()]
            mean = fmean(means)
            low, high = wilson(mean, len(means) * asked)
            assert cell == f"{short(mean)} ({short(low)}-{short(high)})", name


def test_the_picture_is_small_and_legible_on_any_page(tmp_path):
    file = ROOT / "docs/accuracy.svg"
    assert file.stat().st_size < 300 * 2**10
    assert f"](docs/{file.name})" in README.read_text(encoding="utf-8")
    for svg in (file.read_text(encoding="utf-8"), drawn := draw()):
        ET.fromstring(svg)
        # it brings a ground of its own, light or dark, and nothing has a colour for one alone
        style, _, drawing = svg.partition("</style>")
        assert 'fill="var(--page)"' in drawing and "prefers-color-scheme:dark" in style
        assert {"var(--c0)", "var(--c2)", "currentColor"} <= {
            *re.findall(r"var\(--c\d\)|currentColor", drawing)
        }
        assert not re.search(r"#[0-9a-fA-F]{6}\b", drawing)
    assert drawn == draw()


def draw() -> str:
    cells = [
        {"agent": agent, "question": question, "temperature": t, "length": length}
        | {"mean": 0.5, "low": 0.4, "high": 0.6}
        for agent in picture.AGENTS
        for question in picture.PANELS
        for length in (4, 64)
        for t in ("1.0", "0.0")
    ]
    return picture.picture({"cells": cells}, (2, 4))


# ---------------------------------------------------------------- agents of one's own

SMALL = "--chunk-tokens 30 --memory-tokens 8 --final-tokens 8"


def run(folder: Path, *words: str) -> str:
    """Run a command as if in the folder; return what it printed."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    return done.output


def own_agent() -> str:
    """Return the agent that the front page writes: its block of code that imports something."""
    (block,) = [
        block
        for block in blocks(README.read_text(encoding="utf-8"), "python")
        if block.startswith("from memagent import")
    ]
    return block


def test_the_own_agent_of_the_front_page_runs_as_a_file(tmp_path):
    assert len(own_agent().splitlines()) <= 15
    (tmp_path / "my_agent.py").write_text(own_agent(), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("Anna joined Boris. Boris toured Oslo.", encoding="utf-8")
    asking = f"ask notes.txt 'Where is Anna?' --model tiny --agent my_agent.py {SMALL}"
    run(tmp_path, *shlex.split(asking))
    (words,) = [
        words for words in commands(README.read_text(encoding="utf-8")) if "my_agent.py" in words
    ]
    small = f"--name own --steps 1 --tasks-per-step 2 --group-size 2 --lengths 2 {SMALL}".split()
    run(tmp_path, *words, *small)
    with (tmp_path / "runs/own/metrics.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1


def test_the_example_is_a_complete_agent(tmp_path):
    """Its setting is a flag, its count a column, and its turns have rewards of their own."""
    path = str(ROOT / "examples/own_agent.py")
    wide = run(tmp_path, "train", "--agent", path, "--help")
    assert "--focus" in wide and "--short-tokens" in wide
    small = f"--steps 1 --tasks-per-step 2 --group-size 2 --lengths 2 --focus places {SMALL}"
    run(tmp_path, "train", "--agent", path, "--name", "own", *small.split())
    with (tmp_path / "runs/own/metrics.csv").open(newline="") as file:
        (step,) = csv.DictReader(file)
    assert 0 <= float(step["notes_empty"]) <= 1 and "turn_reward_short_final" in step
    assert 0 <= float(step["turn_reward_short"]) <= 1
    assert "places" in (tmp_path / "runs/own/config.yaml").read_text(encoding="utf-8")
    source = (ROOT / "examples/own_agent.py").read_text(encoding="utf-8")
    about = textwrap.dedent(source[: source.index("from __future__")])
    assert [words[0] for words in commands(about)] == ["ask", "sft", "train", "eval"]


@pytest.mark.parametrize("sections", [2, 16])
def test_the_example_can_be_warmed_up(codec, sections):
    """What it demonstrates is right, and fits its turns: of the embedded policy, which knows none
    of its prompts, nothing else could be rewarded."""
    example = find.make(str(ROOT / "examples/own_agent.py"), find.of_model(EMBEDDED)).on(codec)
    for kind in ("one_fact", "two_hop"):
        for task in worlds.make_tasks(0, 20, sections, kind, "train"):
            shown = demonstration(example, task)
            assert shown is not None and example.reward(shown) == 1
