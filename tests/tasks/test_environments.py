"""Environments by name, in `stream` and in `eval`."""

import json

import pytest
from conftest import opened
from typer.testing import CliRunner

import cli
from config.errors import UserError
from suites import llb_db
from suites.bandit import HINTS, Bandit
from tasks.environments import Work


@pytest.mark.parametrize(("suite", "path", "named"), [
    ("moon", "", "moon"), ("world", "", "world"), ("llb-os", "", "file"), ("bcb", "", "file"),
    ("llb-db", "/nowhere/x.json", "/nowhere/x.json"),
])  # fmt: skip
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
        door = task.solution[0]
        other = ({"left", "right"} - {door}).pop()  # of several the last one is meant
        tries = (door, f"Not {other}, but {door}.", f"{door} {other}", "neither")
        assert [task.begin().step(a).reward for a in tries] == [1.0, 1.0, -1.0, -1.0]
    names = [{*task.intent.split()} for task in world.tasks()]
    assert not any(a & b for k, a in enumerate(names) for b in names[:k])


def test_a_task_is_told_apart_by_what_it_is_judged_by():
    one, two = (Work("t", "q", (), text="", content=content) for content in ("a", "b"))
    assert one.digest != two.digest


def gold(tmp_path, *words):
    command = ["eval", "--agents", "gold", "--device", "cpu", "--temperatures", "0",
               "--n", "1000", "--runs", str(tmp_path), *words]  # fmt: skip
    result = CliRunner().invoke(cli.app, command)
    rows = tmp_path / "eval" / "rows.jsonl"
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return result.exit_code, " ".join(result.output.split()), found


def test_known_solutions_solve_our_own_items_and_others_are_named(tmp_path):
    code, output, rows = gold(tmp_path, "--suite", "llb-db")
    assert code == 0 and len(rows) == 8 and all(row["reward"] == 1.0 for row in rows)
    assert "not right by their own solution" not in output
    items = json.loads(llb_db.OWN.read_text())
    items["own-5"]["answer_info"]["md5"] = "0" * 32
    (path := tmp_path / "db.json").write_text(json.dumps(items))
    _, output, _ = gold(tmp_path, "--suite", "llb-db", "--data", str(path), "--name", "b")
    assert "1 of 8 tasks are not right by their own solution here: own-5" in output


def test_gold_acts_in_environments_alone(tmp_path):
    code, output, rows = gold(tmp_path, "--suite", "world", "--lengths", "2")
    assert code == 2 and "gold acts in environments" in output and not rows
