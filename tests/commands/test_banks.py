"""The commands on banks, as they are called."""

import json

import pytest
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig
from models.embedder import embedder_of


@pytest.fixture
def path(tmp_path):
    made = Bank(tmp_path / "b.db", BankConfig(delta=0.0))
    first = made.write("count dogs", "SELECT count(*)", success=True, task_id="t1", kind="script")
    made.write("drop \x1b[31mcats", "it\nfailed", success=False, task_id="t2", kind="reflection",
               epoch=1, parents=[first])  # fmt: skip
    made.feedback(made.retrieve("count dogs").shown, 1.0)
    made.close()
    return tmp_path / "b.db"


def printed(*words, code=0):
    result = CliRunner().invoke(cli.app, ["bank", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_show_prints_utility_and_provenance_the_most_useful_first(path):
    before = path.read_bytes()
    shown = printed("show", path)
    first = shown.index("[1] Q +0.300, 1 of 1 solved; script of t1 (solved), epoch 1")
    assert first < shown.index(
        "[2] Q +0.000, never shown; reflection of t2 (failed), epoch 2 from 1"
    )
    assert "\x1b" not in shown and "2 of 2 entries" in shown and path.read_bytes() == before
    assert "    it\n    failed" in printed("show", path, "--whole")
    stats = json.loads(printed("stats", path))
    assert stats["entries"] == 2 and stats["q_positive"] == 0.5 and stats["visits"] == 1


@pytest.mark.parametrize("condition, task", [
    ("--task t2", "t2"), ("--q-below 0.1", "t2"), ("--outcome failed", "t2"),
    ("--outcome solved", "t1"),
])  # fmt: skip
def test_a_condition_chooses_among_entries(path, tmp_path, condition, task):
    assert "1 of 2 entries" in printed("show", path, *condition.split())
    printed("export", path, tmp_path / "e.jsonl", *condition.split())
    (row,) = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert row["task_id"] == task and row["success"] is (task == "t1")
    assert "1 entries are forgotten" in printed("forget", path, *condition.split())
    assert "1 of 1 entries" in printed("show", path)


def test_a_folder_of_banks_is_none_and_they_are_named(path):
    assert f"There is no bank at {path.parent}; there are {path}." in printed(
        "show", path.parent, code=2
    )


@pytest.mark.parametrize("words", [
    "forget b.db", "show none.db", "show text.db", "stats text.db",
])  # fmt: skip
def test_what_cannot_be_done_is_one_sentence(path, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.db").write_text("notes\n" * 200)
    said = printed(*words.split(), code=2)
    assert said.startswith("memagent: ") and said.count("\n") == 1


def test_a_bank_with_embeddings_is_looked_at_and_thinned_without_its_embedder(tmp_path):
    path = tmp_path / "e.db"
    config = BankConfig(retrieve="dense", embedder="hash:16", delta=0.0)
    made = Bank(path, config, embedder_of("hash:16"))
    made.write("count dogs", "x", success=True, task_id="t1")
    made.close()
    assert "1 of 1 entries" in printed("show", path)
    assert "1 entries are forgotten" in printed("forget", path, "--task", "t1")
