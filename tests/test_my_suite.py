"""A user's own suite, by path, through every command; and its mistakes, each one sentence."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
import suites
from tasks import readers

MINE = str(Path(__file__).with_name("my_suite.py"))
EXAMPLE = str(Path(__file__).parents[1] / "examples/own_suite.py")
FLAG = {MINE: ("--goods", "figs"), EXAMPLE: ("--goods", "3")}


def run(*words, code=0):
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def forgotten(monkeypatch):
    """As in a process that has not loaded the suite: every command is one."""
    suites.find.cache_clear()
    monkeypatch.setattr(suites.FINDER, "loaded", {})


@pytest.mark.parametrize("path", [MINE, EXAMPLE])
def test_two_agents_are_asked_it_and_its_tasks_are_written(path, tmp_path):
    words = ("--suite", path, "--lengths", "4", "--n", 2, *FLAG[path])
    run(
        "eval", *words, "--agents", "bm25,none", "--device", "cpu", "--temperatures", 0,
        "--runs", tmp_path,
    )  # fmt: skip
    summary = json.loads((tmp_path / "eval/summary.json").read_text())
    columns = 1 if path == MINE else 2
    assert (summary["unit"], summary["metric"], len(summary["cells"])) == (
        "lines", "sub_em", 2 * columns,
    )  # fmt: skip
    run("data", "build", tmp_path / "sets", *words)
    files = sorted((tmp_path / "sets").iterdir())
    assert len(files) == columns and all(len(readers.read(file)) == 2 for file in files)


def test_its_flags_appear_with_that_suite_alone(forgotten):
    for command in (("eval",), ("data", "build"), ("stream",)):
        assert "what is counted" in run(*command, "--suite", MINE, "--help-all")
        assert "what is counted" not in run(*command, "--help-all")
    assert "No such option" in run("eval", "--suite", MINE, "--kinds", "one_fact", code=2)


def test_a_stream_works_on_the_environment_of_the_example(tmp_path):
    words = ("stream", "--suite", EXAMPLE, "--epochs", 2, "--runs", tmp_path, "--engine",
             "transformers", "--act-tokens", 8, "--lesson-tokens", 8, "--arms")  # fmt: skip
    run(*words, "none,memrl")
    rows = [json.loads(line) for line in (tmp_path / "stream/memrl.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {row["success"] for row in rows} <= {True, False}
    run(*words, "none,memrl")  # goes on: nothing is left to do
    assert "goods" in run(*words, "none,memrl", "--goods", 3, code=2)
    run("report", tmp_path / "stream")
    assert "do not answer back" in run("stream", "--suite", MINE, "--runs", tmp_path, code=2)


def test_settings_that_came_with_data_load_no_suite(tmp_path, forgotten):
    mark, path = tmp_path / "ran", tmp_path / "theirs.py"
    path.write_text(f"open({str(mark)!r}, 'w')\n" + Path(MINE).read_text())
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"eval": {"suite": str(path), "goods": "figs", "n": 1}}))
    words = ("eval", "--config", config, "--device", "cpu", "--agents", "none", "--runs",
             tmp_path, "--temperatures", 0)  # fmt: skip
    said = run(*words, code=2)
    assert f"suite {path}," in said and "--trust-remote-code" in said and not mark.exists()
    run(*words, "--suite", "world", "--lengths", 1)  # another one does not need it
    assert not mark.exists()
    run(*words, "--suite", path, "--name", "e")
    assert mark.exists() and "How many figs" in (tmp_path / "e/rows.jsonl").read_text()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import nonsense_module\n", "nonsense_module"),
        ("x = 1\n", "Suite"),
        ("from suites import Suite\nclass A(Suite): pass\nclass B(Suite): pass\n", "A, B"),
        ("from suites import Suite\nclass A(Suite): pass\n", "answer back"),
        (Path(MINE).read_text().replace("scope.n, length", "1 / 0"), "line 17"),
        (Path(MINE).read_text().replace("k * 3} {", "k / 0} {"), "line 16"),
        (Path(MINE).read_text().replace("for n in scope.lengths", "for n in ()"), "no column"),
        (Path(MINE).read_text().replace("n, lambda", "1, lambda"), "two columns"),
        (Path(MINE).read_text().replace("lambda n=n: make(n)", "lambda: ['Day 1']"), "no tasks"),
        (Path(MINE).read_text().replace("lambda n=n: make(n)", "lambda: [None]"), "no tasks"),
        (Path(MINE).read_text().replace('Column("day", n, lambda n=n: make(n))', "n"), "question"),
        (Path(MINE).read_text().replace("goods", "seed"), "seed"),
        (Path(MINE).read_text().replace("goods", "layout"), "layout"),
    ],
)
def test_a_mistake_in_its_file_is_one_sentence(text, named, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    words = ("--suite", path, "--device", "cpu", "--agents", "none")
    said = run("eval", *words, "--runs", tmp_path / "runs", code=2)
    assert named in said and "Traceback" not in said
    assert not (tmp_path / "runs/eval/summary.json").exists()
