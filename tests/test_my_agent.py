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

MINE = str(Path(__file__).with_name("my_agent.py"))
SHORT = ["--chunk-tokens", "24", "--memory-tokens", "12", "--final-tokens", "12"]


def run(*words, code=0):
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps with the agent's own setting."""
    runs = tmp_path_factory.mktemp("runs")
    run(
        "train", "--agent", MINE, "--topic", "places", "--steps", 2, "--tasks-per-step", 2,
        "--group-size", 3, "--lengths", 2, "--temperature", 1.5, "--name", "mine",
        "--runs", runs, *SHORT,
    )  # fmt: skip
    return runs / "mine"


def test_the_agent_of_these_tests_is_a_file_of_thirty_lines():
    assert len(Path(MINE).read_text().splitlines()) <= 30


def test_a_training_has_the_agents_setting_turn_reward_and_count(trained):
    stored = yaml.safe_load((trained / "config.yaml").read_text())
    assert stored["agent"]["topic"] == "places" and stored["run"]["agent"] == MINE
    lines = list(csv.DictReader((trained / "metrics.csv").open()))
    assert len(lines) == 2
    assert all(0 <= float(line["turn_reward_short"]) <= 1 for line in lines)
    assert all(0 <= float(line["notes_long"]) <= 1 for line in lines)
    exported = yaml.safe_load((trained / "model" / "agent.yaml").read_text())
    assert exported["run"]["agent"] == MINE and exported["agent"]["topic"] == "places"


@pytest.fixture
def forgotten(monkeypatch):
    """As in a process that has not loaded the agent: every command is one."""
    find.find.cache_clear()
    monkeypatch.setattr(find.FINDER, "loaded", {})


def test_a_stopped_run_goes_on_with_the_users_agent_which_is_named_again(trained, forgotten):
    """Its config.yaml could be anybody's: it runs no code."""
    words = ("train", "--name", "mine", "--runs", trained.parent, "--resume", "--steps", 3)
    said = " ".join(run(*words, code=2).split())
    assert f"agent {MINE}," in said and f"give --agent {MINE} or --trust-remote-code." in said
    words = (*words, "--agent", MINE)
    run(*words)
    assert len(list(csv.DictReader((trained / "metrics.csv").open()))) == 3
    assert "topic 'places', not 'food'" in run(*words, "--topic", "food", code=2)


def test_an_evaluation_reports_the_agents_count(trained):
    model = trained / "model"
    run(
        "eval", "--agents", f"{MINE},full", "--model", model, "--lengths", 2, "--n", 2,
        "--name", "e", "--runs", trained.parent, *SHORT,
    )  # fmt: skip
    folder = trained.parent / "e"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    mine = [row for row in rows if "counts" in row]
    assert {row["agent"] for row in mine} == {"my_agent"} and all(
        row["counts"]["notes"] == 2 for row in mine
    )
    summary = json.loads((folder / "summary.json").read_text())
    rates = [cell["rates"]["notes_long"] for cell in summary["cells"] if "rates" in cell]
    assert rates and all(0 <= rate <= 1 for rate in rates)
    page = (folder / "report.html").read_text()
    assert "notes long" in page


def test_a_file_that_was_edited_is_another_agent_under_the_same_name(tmp_path, forgotten):
    path = tmp_path / "mine_too.py"
    path.write_text(Path(MINE).read_text())
    words = ["eval", "--agents", path, "--model", "tiny", "--lengths", 2, "--n", 1]
    words += ["--name", "e", "--runs", tmp_path, *SHORT]
    run(*words)
    run(*words)  # goes on
    path.write_text(path.read_text() + "# another word\n")
    assert "its file may have been edited" in " ".join(run(*words, code=2).split())


def test_a_policy_brings_the_agent_that_it_was_trained_with_if_code_is_trusted(trained, forgotten):
    runs, model, small = trained.parent, trained / "model", ("--lengths", 2, "--n", 1)
    words = ("eval", "--model", model, *small, "--name", "f", "--runs", runs)
    assert f"names code, agents {MINE}," in " ".join(run(*words, code=2).split())
    assert not (runs / "f").exists()
    run(*words, "--agents", "bm25")  # another one does not need it
    run(*words, "--trust-remote-code")
    assert '"my_agent"' in (runs / "f" / "rows.jsonl").read_text()


def test_a_run_with_the_users_agent_is_exported_where_its_code_is_trusted(
    trained, forgotten, tmp_path
):
    words = ("export", trained, "--out", tmp_path / "policy")
    assert f"names code, agent {MINE}," in " ".join(run(*words, code=2).split())
    run(*words, "--trust-remote-code")
    exported = yaml.safe_load((tmp_path / "policy" / "agent.yaml").read_text())
    assert exported["agent"]["topic"] == "places"


def test_ask_show_plan_and_the_report_of_a_training(trained, tmp_path):
    (tmp_path / "notes.txt").write_text("Anna joined Boris. Clara reached Lima. Boris toured Oslo.")
    said = run(
        "ask",
        tmp_path / "notes.txt",
        "Where is Anna?",
        "--model",
        "tiny",
        "--runs",
        tmp_path,
        "--agent",
        MINE,
        "--topic",
        "places",
        *SHORT,
    )
    assert "section 1" in said and ("answer:" in said or "The response is empty" in said)
    assert "section 1 of 2" in run("show", trained, "--n", 1, "--agent", MINE)
    planned = run("plan", "--agent", MINE, "--topic", "food", "--model", "Qwen/Qwen3-0.6B")
    assert "--agent" in planned and "--topic food" in planned
    assert "my_agent" in (trained / "report.html").read_text()


def test_the_demo_trains_and_compares_the_users_agent(tmp_path, monkeypatch):
    monkeypatch.setattr("commands.demo.ProcessPoolExecutor", Inline)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one rank: no processes for the training either
    run("demo", "--agent", MINE, "--short", "--name", "d", "--runs", tmp_path)
    summary = json.loads((tmp_path / "d" / "summary.json").read_text())
    assert {cell["agent"] for cell in summary["cells"]} == {"trained", "untrained", "full"}


def test_the_agents_flags_appear_with_that_agent_alone():
    assert "--topic" in run("train", "--agent", MINE, "--help-all")
    assert "--topic" not in run("train", "--help-all")
    assert "--recall-k" in run("eval", "--agents", "rememr1", "--help-all")
    assert "--recall-k" not in run("eval", "--help-all")


def test_a_file_with_nothing_but_a_generator_function_works(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from memagent import MemAgent\n\n"
        "def bare(agent, task):\n"
        "    'Answer without reading.'\n"
        "    prompt = MemAgent(None, agent.codec).prompt\n"
        "    yield prompt('final', 8, final=True, problem=task.question, memory='')\n"
    )
    kind = find.find(str(path))
    assert kind.__doc__ == "Answer without reading." and kind().label == "bare"
    run("eval", "--agents", path, "--lengths", 2, "--n", 1, "--name", "e", "--runs", tmp_path)
    assert '"bare"' in (tmp_path / "e" / "rows.jsonl").read_text()


def test_rewards_and_tasks_of_the_users_own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from tasks import worlds\n\n"
        "def reward(trajectory):\n    return len(trajectory.answer) % 5 / 5\n\n"
        "def tasks():\n    return [worlds.make_task(k, 2, 'one_fact') for k in range(4)]\n\n"
        "def nothing():\n    return []\n\nnumber = 3\n"
    )
    words = ("train", "--steps", 1, "--tasks-per-step", 2, "--group-size", 3, "--runs", tmp_path)
    run(*words, "--name", "a", "--data", f"{path}:tasks", "--reward", f"{path}:reward")
    (line,) = csv.DictReader((tmp_path / "a" / "metrics.csv").open())
    assert 0 < float(line["reward"]) < 1
    run(
        "eval", "--agents", "oracle,none", "--data", f"{path}:tasks", "--n", 2, "--runs", tmp_path,
        "--name", "e",
    )  # fmt: skip
    assert len((tmp_path / "e" / "rows.jsonl").read_text().splitlines()) == 8
    for flag, place, what in (
        ("--reward", f"{path}:missing", "has no function 'missing'"),
        ("--reward", f"{path}:number", "has no function 'number'"),
        ("--reward", "reward", "takes path.py:function"),
        ("--reward", "nowhere.py:reward", "There is no file"),
        ("--reward", "/etc/hostname:reward", "is no Python file"),
        ("--agent", "/etc/hostname", "is no Python file"),
        ("--data", f"{path}:nothing", "must return tasks"),
    ):
        said = " ".join(run(*words, "--name", "b", flag, place, code=2).split())
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
        ("ask", document, "Where?", "--agent", path, "--model", "tiny"),
        ("train", "--agent", path, "--steps", 1, "--name", "a"),
        ("eval", "--agents", path, "--lengths", 2, "--n", 1, "--name", "a"),
    ):
        said = " ".join(run(*words, "--runs", tmp_path, code=2).split())
        assert what in said and "wrong" in said and "Traceback" not in said
