"""README.md, CONTRIBUTING.md and docs/: size, commands, links, figures, the agents they show."""

import contextlib
import csv
import io
import json
import re
import shlex
import textwrap
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import cli
import memagent
from agents import find
from commands.sft import demonstration
from config.options import EMBEDDED
from dev import picture
from tasks import documents, worlds

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
LESSONS = ROOT / "dev/LESSONS.md"
RESULTS, TUTORIAL = ROOT / "docs/results.md", ROOT / "docs/tutorial.md"
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
    >>> commands('make ask FILE=report.pdf Q="Who?"')
    [['ask', 'report.pdf', 'Who?']]
    """
    text = re.sub(r"\bmake ask FILE=(\S+) Q=", r"cli.py ask \1 ", text.replace("\\\n", " "))
    lines = re.findall(r"\bcli\.py ([^`\n]+)", text)
    return [shlex.split(line, comments=True) for line in lines]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_front_page_takes_five_minutes():
    text = README.read_text(encoding="utf-8")
    lines, before = text.splitlines(), text[: text.index("\n    ")]
    assert len(lines) <= 120 and len(text.split()) <= 820
    assert not [line for line in lines if len(line) > 100]
    assert len(before.split()) <= 60
    assert not re.search("policy|bounded|GRPO|reinforcement", before)
    assert re.findall(r"\]\(docs/(\w+)\.svg\)", text) == ["ask", "accuracy"]
    asked = [words for words in commands(text) if words[0] == "ask"]
    assert asked and all((ROOT / file).is_file() for _, file, *_ in asked)
    first = text[: text.index("\n## ")]
    order = ["make demo", "make ask", "make test", "(examples/minimal.py)", "(docs/tutorial.md)"]
    assert [*map(first.index, order)] == sorted(map(first.index, order))


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
        words = [word.replace("my_agent.py", find.DEFAULT) for word in words]
        command.make_context(name, words)  # raises at an unknown flag or a missing argument
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"^    .*$|`.*?`", text))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_the_hours_of_the_front_page_are_those_that_plan_says():
    text = README.read_text(encoding="utf-8")
    (words,) = (words for words in commands(text) if words[0] == "plan")
    (hours,) = re.findall(r"about [\d.]+ h for 100 steps", text)
    assert hours in " ".join(CliRunner().invoke(cli.app, words).output.split())


@pytest.mark.parametrize("page", [*PAGES, LESSONS], ids=lambda page: page.name)
def test_the_links_and_files_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target
    names = {*re.findall(r"`([\w./-]+\.(?:py|yaml|txt))`", text)}
    assert not {name for name in names - ELSEWHERE if not (ROOT / name).exists()}


def test_the_front_page_names_the_seven_modules_in_reading_order():
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)\.py`", text[text.index("## Read the code") :])
    assert named == MODULES == [name for name in named if (ROOT / f"{name}.py").exists()]
    assert {path.stem for path in ROOT.glob("*.py")} == {*MODULES}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench"}
    assert all(f"`{room}`" in text for room in rooms)


def test_the_results_begin_with_findings_whose_figures_stand_below():
    findings, _, rest = RESULTS.read_text(encoding="utf-8").partition("\n\nEvery measured")
    lines = findings.splitlines()[2:]
    assert len(lines) == 6 and all(line.startswith("- ") for line in lines)
    figures = re.findall(r"\d+\.\d\d|\b\d{2,}\b", findings)
    assert len(figures) > 8
    assert not [x for x in figures if not re.search(rf"(?<!\d){re.escape(x)}(?!\d)", rest)]


def test_the_figures_of_the_front_page_are_those_of_the_results():
    """In percent, as of the files that the results name."""

    def cells(name: str) -> list[dict]:
        return json.loads((ROOT / f"bench/results/{name}.json").read_text())["cells"]

    at_256 = [c for c in cells("reader") if c["set"] == "XQuAD, 256 passages"]
    reader, full, bm25 = (round(100 * cell["mean"]) for cell in at_256[:3])
    front = " ".join(README.read_text("utf-8").split())
    said = f"{reader} % among 256 passages, with the whole document in the prompt {full} %"
    assert f"{said}, with BM25's four best {bm25} %" in front
    absent = [c["mean"] for c in cells("absent") if c["agent"] == "memagent"][1:4]
    four, more, most = (f"{mean:.2f}" for mean in absent)
    assert f"to {four} among four of its article, {more} among 16, {most} among 64" in front
    twice = {(c["agent"], c["question"], c["length"]): c["mean"] for c in cells("twice")}
    ours, once = (f"{twice[name, 'two_hop_reverse', 16]:.2f}" for name in ("Twice", "memagent"))
    assert f"`Twice` has {ours} right among 16 sections, `memagent` {once}" in front


def test_the_picture_is_small_and_legible_on_any_page():
    file = ROOT / "docs/accuracy.svg"
    assert file.stat().st_size < 300 * 2**10
    assert f"](docs/{file.name})" in README.read_text(encoding="utf-8")
    for svg in (file.read_text(encoding="utf-8"), draw()):
        ET.fromstring(svg)
        # it brings a ground of its own, light or dark, and nothing has a colour for one alone
        style, _, drawing = svg.partition("</style>")
        assert 'fill="var(--page)"' in drawing and "prefers-color-scheme:dark" in style
        assert {"var(--c0)", "var(--c2)", "currentColor"} <= {
            *re.findall(r"var\(--c\d\)|currentColor", drawing)
        }
        assert not re.search(r"#[0-9a-fA-F]{6}\b", drawing)


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


def test_the_terminal_of_the_front_page_is_that_of_its_first_command():
    svg = (ROOT / "docs/ask.svg").read_text(encoding="utf-8")
    words = " ".join("".join(ET.fromstring(svg).itertext()).replace("\xa0", " ").split())
    ((_, file, question),) = commands(README.read_text("utf-8").partition("\n![")[0])
    assert f'$ python cli.py ask {file} "{question}"' in words
    assert "answer: Clara Whitlow" in words and "Found on page 3: " in words


# ---------------------------------------------------------------- the document and the tutorial


def test_the_document_about_the_town_is_read_whole():
    text = documents.read([ROOT / "examples/town.pdf"]).text
    unnumbered = re.sub(r"^\d+$", "", text, flags=re.M)
    written = (ROOT / "dev/town.txt").read_text(encoding="utf-8")
    assert unnumbered.split() == written.replace("# ", "").split()
    with (ROOT / "examples/town.csv").open(newline="") as file:
        asked = list(csv.DictReader(file))
    assert len(asked) == 30 == len({row["question"] for row in asked})
    assert [bool(row["answer"]) for row in asked] == [True] * 20 + [False] * 10


def test_the_numbers_of_the_tutorial_are_those_of_its_code(monkeypatch):
    """All of its code, in order; numbers may differ by a fiftieth, as processors round."""
    monkeypatch.chdir(ROOT)
    parts = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TUTORIAL.read_text(), re.S)
    assert len(parts) == len(blocks(TUTORIAL.read_text(), "python")) > 6
    number, space = re.compile(r"[-+]?\d*\.?\d+"), {}
    for code, expected in parts:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, space)
        printed = out.getvalue()
        assert number.sub("#", printed) == number.sub("#", expected)
        numbers = [[float(x) for x in number.findall(text)] for text in (printed, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.01)


def test_the_question_in_python_of_the_front_page_is_answered(read_here, monkeypatch, capsys):
    """By the model of the tests, which finds nothing; another test asks the reader."""
    (block,) = [b for b in blocks(README.read_text("utf-8"), "python") if "import ask\n" in b]
    assert len(block.split("\n\n")) == 2 and len(block.splitlines()) == 4
    monkeypatch.chdir(ROOT)
    small = {"model": "tiny", "max_sections": 2, "final_tokens": 8}
    monkeypatch.setattr(memagent, "ask", partial(memagent.ask, **small), raising=False)
    exec(block, {})
    assert capsys.readouterr().out.strip()


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
        if block.startswith("from memagent import NO_MEMORY, Agent")
    ]
    return block


def test_the_own_agent_of_the_front_page_learns_as_a_file(tmp_path):
    """Some readings of its first step are right, so that there is something to learn."""
    assert len(own_agent().splitlines()) <= 15
    (tmp_path / "my_agent.py").write_text(own_agent(), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("Anna joined Boris. Boris toured Oslo.", encoding="utf-8")
    run(tmp_path, *f"ask notes.txt Where? --model tiny --agent my_agent.py {SMALL}".split())
    train, evaluate = [
        words for words in commands(README.read_text("utf-8")) if "my_agent" in " ".join(words)
    ]
    run(tmp_path, *train, *"--steps 1 --tasks-per-step 2 --group-size 8 --lengths 1".split())
    with (tmp_path / "runs/twice/metrics.csv").open(newline="") as file:
        (step,) = csv.DictReader(file)
    assert float(step["reward"]) > 0
    run(tmp_path, *evaluate, *"--lengths 1 --n 1 --temperatures 0".split())
    assert "my_agent" in (tmp_path / "runs/twice-eval/summary.json").read_text("utf-8")


def test_the_example_is_a_complete_agent(tmp_path):
    """Its setting is a flag, its count a column, and its turns have rewards of their own."""
    path = str(ROOT / "examples/own_agent.py")
    wide = run(tmp_path, "train", "--agent", path, "--help-all")
    assert "--focus" in wide and "--short-tokens" in wide
    small = f"--steps 1 --tasks-per-step 1 --group-size 2 --lengths 1 --focus places {SMALL}"
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
        for task in worlds.make_tasks(0, 8, sections, kind, "train"):
            shown = demonstration(example, task)
            assert shown is not None and example.reward(shown) == 1
