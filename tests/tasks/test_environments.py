"""Environments by name, in `stream` and in `eval`."""

import json
from pathlib import Path

import pytest
from conftest import opened
from typer.testing import CliRunner

import cli
from config.errors import UserError
from tasks.bandit import HINTS, Bandit
from tasks.environments import Work

SHARED = Path(__file__).parents[3] / "shared" / "data" / "llb_db_train.json.gz"


@pytest.mark.parametrize(
    ("suite", "path", "named"),
    [
        ("moon", "", "moon"),
        ("world", "", "world"),
        ("llb-os", "", "file"),
        ("bcb", "", "file"),
        ("llb-db", "/nowhere/x.json", "/nowhere/x.json"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(suite, path, named):
    with pytest.raises(UserError, match=named) as error:
        opened(suite, path)
    assert "\n" not in str(error.value)


def test_half_of_what_is_known_of_the_bandit_is_wrong():
    world = Bandit(5)
    doors = {task.id: task.solution[0] for task in world.tasks()}
    known = [*world.experiences()]
    assert len(known) == 5 * HINTS and len({task for task, *_ in known}) == len(known)
    for id, door in doors.items():
        said = [text for task, _, text in known if task.startswith(f"{id}-")]
        assert sum(f"the {door} door" in text for text in said) == HINTS // 2
    for task in world.tasks():
        assert [task.begin().step(a).reward for a in (*task.solution, "neither")] == [1.0, -1.0]
    names = [{*task.intent.split()} for task in world.tasks()]
    assert not any(a & b for k, a in enumerate(names) for b in names[:k])


def test_a_task_is_told_apart_by_what_it_is_judged_by():
    one, two = (Work("t", "q", (), text="", content=content) for content in ("a", "b"))
    assert one.digest != two.digest


def gold(tmp_path, *words):
    command = ["eval", "--suite", "llb-db", "--agents", "gold", "--engine", "extractive",
               "--temperatures", "0", "--n", "1000", "--runs", str(tmp_path), *words]  # fmt: skip
    result = CliRunner().invoke(cli.app, command)
    rows = tmp_path / "eval" / "rows.jsonl"
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return result, found


def test_known_solutions_solve_our_own_items(tmp_path):
    result, rows = gold(tmp_path)
    assert result.exit_code == 0, result.output
    assert len(rows) == 8 and all(row["reward"] == 1.0 for row in rows)
    said = " ".join(result.output.split())
    assert "llb-db: judged by rules of ours, which are not those of its release, in 15" in said


def test_rows_by_the_rules_of_the_release_are_others(tmp_path):
    _, rows = gold(tmp_path)
    result, both = gold(tmp_path, "--rules", "released")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "llb-db: judged by the rules of its release, in 3 responses" in said
    assert "select, released rules" in (tmp_path / "eval" / "table.md").read_text()
    wrong = sorted(row["id"] for row in both if not row["reward"])
    assert len(both) == 2 * len(rows) and wrong == ["own-2", "own-3", "own-4"]


@pytest.mark.skipif(not SHARED.exists(), reason="the data beside the checkout is not here")
def test_known_solutions_solve_the_published_train_tasks_but_for_the_skip_list(tmp_path):
    result, rows = gold(tmp_path, "--data", str(SHARED))
    assert result.exit_code == 0, result.output
    wrong = {row["id"] for row in rows if not row["reward"]}
    assert len(rows) == 361 and len(rows) - len(wrong) >= 341
    said = " ".join(result.output.split())
    assert f"{len(wrong)} of 361 tasks are not right by their own solution here" in said
    assert all(f" {id}" in said for id in wrong)


def test_gold_acts_in_environments_alone(tmp_path):
    result = CliRunner().invoke(
        cli.app, ["eval", "--agents", "gold", "--n", "1", "--lengths", "2", "--runs", str(tmp_path)]
    )
    assert result.exit_code == 2 and "gold acts in environments" in " ".join(result.output.split())
