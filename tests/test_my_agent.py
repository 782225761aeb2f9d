"""A user's own agent, by path, through every command; and its mistakes, each one sentence."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from conftest import Inline
from typer.testing import CliRunner

import cli
from agents import find
from commands import demo

MINE = str(Path(__file__).with_name("my_agent.py"))
SHORT = "--chunk-tokens 24 --memory-tokens 8 --final-tokens 8"
ONE = f"--lengths 2 --n 1 --temperatures 0 {SHORT}"
STEP = f"--tasks-per-step 2 --group-size 2 --lengths 2 {SHORT}"


def run(*words, code=0):
    """Run a command, whose words are texts of several, or paths."""
    parts = [
        part for word in words for part in ([word] if isinstance(word, Path) else word.split())
    ]
    result = CliRunner().invoke(cli.app, [*map(str, parts)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step with the agent's own setting."""
    runs = tmp_path_factory.mktemp("runs")
    run(f"train --agent {MINE} --topic places --steps 1 --temperature 1.5 --name mine {STEP}",
        "--runs", runs)  # fmt: skip
    return runs / "mine"


@pytest.fixture
def forgotten(monkeypatch):
    """As in a process that has not loaded the agent: every command is one."""
    find.find.cache_clear()
    monkeypatch.setattr(find.FINDER, "loaded", {})


def test_a_training_has_the_agents_setting_turn_reward_and_count(trained):
    assert len(Path(MINE).read_text().splitlines()) <= 30
    stored = yaml.safe_load((trained / "config.yaml").read_text())
    assert stored["agent"]["topic"] == "places" and stored["run"]["agent"] == MINE
    (line,) = csv.DictReader((trained / "metrics.csv").open())
    assert 0 <= float(line["turn_reward_short"]) <= 1 and 0 <= float(line["notes_long"]) <= 1
    exported = yaml.safe_load((trained / "model" / "agent.yaml").read_text())
    assert exported["run"]["agent"] == MINE and exported["agent"]["topic"] == "places"
    assert "section 1 of 2" in run("show", trained, f"--n 1 --agent {MINE}")


def test_data_that_names_the_agent_runs_it_only_where_its_code_is_trusted(
    trained, forgotten, tmp_path
):
    """A run's config.yaml and a model's agent.yaml could be anybody's."""
    words = ("train --name mine --resume --steps 2 --runs", trained.parent)
    said = run(*words, code=2)
    assert f"agent {MINE}," in said and f"give --agent {MINE} or --trust-remote-code." in said
    run(*words, f"--agent {MINE}")
    assert len([*csv.DictReader((trained / "metrics.csv").open())]) == 2
    assert "topic 'places', not 'food'" in run(*words, f"--agent {MINE} --topic food", code=2)
    find.FINDER.loaded.clear()
    find.find.cache_clear()
    asked = (f"eval {ONE} --name f --model", trained / "model", "--runs", tmp_path)
    assert f"names code, agents {MINE}," in run(*asked, code=2)
    assert not (tmp_path / "f").exists()
    written = ("export", trained, "--out", tmp_path / "policy")
    assert f"names code, agent {MINE}," in run(*written, code=2)
    run(*asked, "--agents bm25")  # another one does not need it
    run(*written, "--trust-remote-code")
    assert (
        yaml.safe_load((tmp_path / "policy/agent.yaml").read_text())["agent"]["topic"] == "places"
    )


def test_an_evaluation_reports_the_agents_count_and_knows_its_file(trained, tmp_path, forgotten):
    path = tmp_path / "mine_too.py"
    path.write_text(Path(MINE).read_text())
    words = (f"eval --agents {path},none --model", trained / "model", f"{ONE} --name e --runs",
             tmp_path)  # fmt: skip
    run(*words)
    mine = [row for row in rows(tmp_path / "e") if "counts" in row]
    assert {row["agent"] for row in mine} == {"mine_too"} and mine[0]["counts"]["notes"] == 2
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    rates = [cell["rates"]["notes_long"] for cell in summary["cells"] if "rates" in cell]
    assert rates and all(0 <= rate <= 1 for rate in rates)
    assert "notes long" in (tmp_path / "e" / "report.html").read_text()
    path.write_text(path.read_text() + "# another word\n")
    assert "its file may have been edited" in run(*words, code=2)


def test_ask_and_plan_take_the_agent_with_its_flags(tmp_path):
    document = tmp_path / "notes.txt"
    document.write_text("Anna joined Boris. Clara reached Lima. Boris toured Oslo.")
    own = f"--agent {MINE} --topic food"
    said = run("ask", document, f"Where? --model tiny {own} {SHORT} --runs", tmp_path)
    assert "section 1" in said and ("answer:" in said or "The response is empty" in said)
    planned = run(f"plan {own} --model Qwen/Qwen3-0.6B")
    assert "--agent" in planned and "--topic food" in planned
    assert "--topic" in run(f"train --agent {MINE} --help-all")
    assert "--topic" not in run("train --help-all")


def test_the_demo_trains_and_compares_the_users_agent(tmp_path, monkeypatch):
    few = ({2: 1}, {2: 1})
    monkeypatch.setattr(demo, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one rank: no processes for the training either
    monkeypatch.setitem(demo.STEPS, "short", 1)
    monkeypatch.setitem(demo.AMOUNTS, "short", dict.fromkeys(demo.AMOUNTS["short"], few))
    run(f"demo --agent {MINE} --short --runs", tmp_path)
    summary = json.loads((tmp_path / "demo-my_agent" / "summary.json").read_text())
    assert {cell["agent"] for cell in summary["cells"]} == {"trained", "untrained", "full"}


def test_a_file_with_nothing_but_a_generator_function_works(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(
        "from memagent import MemAgent\n\n"
        "def bare(agent, task):\n"
        "    'Answer without reading.'\n"
        "    prompt = MemAgent(None, agent.codec).prompt\n"
        "    yield prompt('final', 8, final=True, problem=task.question, memory='')\n"
    )
    kind = find.find(str(path))
    assert kind.__doc__ == "Answer without reading." and kind().label == "bare"
    run(f"eval --agents {path} {ONE} --name e --runs", tmp_path)
    assert {row["agent"] for row in rows(tmp_path / "e")} == {"bare"}


def test_rewards_and_tasks_of_the_users_own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from tasks import worlds\n\n"
        "def reward(trajectory):\n    return len(trajectory.answer) % 5 / 5\n\n"
        "def tasks():\n    return [worlds.make_task(k, 2, 'one_fact') for k in range(4)]\n\n"
        "def nothing():\n    return []\n\nnumber = 3\n"
    )
    words = (f"train --steps 1 {STEP} --runs", tmp_path)
    run(*words, f"--name a --data {path}:tasks --reward {path}:reward")
    (line,) = csv.DictReader((tmp_path / "a" / "metrics.csv").open())
    assert 0 < float(line["reward"]) < 1
    run(f"eval --agents none --data {path}:tasks --n 2 --name e --temperatures 0 --runs", tmp_path)
    assert len(rows(tmp_path / "e")) == 2
    for flag, place, what in (
        ("--reward", f"{path}:missing", "'missing'"),
        ("--reward", f"{path}:number", "'number'"),
        ("--reward", "reward", "path.py:function"),
        ("--reward", "nowhere.py:reward", "There is no file"),
        ("--reward", "/etc/hostname:reward", "no Python file"),
        ("--agent", "/etc/hostname", "no Python file"),
        ("--data", f"{path}:nothing", "must return tasks"),
    ):
        said = run(*words, f"--name b {flag} {place}", code=2)
        assert what in said and "Traceback" not in said


@pytest.mark.parametrize(("text", "what"), [
    ("import nonsense_module\n", "line 1"),
    ("x = 1\nx +\n", "line 2"),
    ("x = 1\n", "none"),
    ("def a(agent, task):\n    yield\n\ndef b(agent, task):\n    yield\n", "a, b"),
    ("AGENT = 3\n", "AGENT"),
    ("def a(agent, task):\n    yield 'Where?'\n", "yielded str"),
    ("def a(agent, task):\n    yield agent.prompt('final', 8)\n", "no prompt 'final'"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_that_says_what_and_where(tmp_path, text, what):
    path, document = tmp_path / "wrong.py", tmp_path / "doc.txt"
    path.write_text(text)
    document.write_text("Anna reached Lima.")
    for words in (
        f"ask {document} Where? --agent {path} --model tiny",
        f"train --agent {path} --steps 1 --name a",
        f"eval --agents {path} --lengths 2 --n 1 --name a",
    ):
        said = run(words, "--runs", tmp_path, code=2)
        assert what in said and "wrong" in said and "Traceback" not in said
