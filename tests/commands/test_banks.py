"""The commands on banks, as they are called."""

import json

import pytest
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig


@pytest.fixture
def path(tmp_path):
    made = Bank(tmp_path / "b.db", BankConfig(delta=0.0))
    first = made.write("count dogs", "SELECT count(*)", success=True, task_id="t1", kind="script")
    made.write("drop \x1b[31mcats", "it\nfailed", success=False, task_id="t2", kind="reflection",
               epoch=1, parents=[first])  # fmt: skip
    made.feedback(made.retrieve("count dogs").shown, 1.0)
    made.close()
    return tmp_path / "b.db"


def said(*words, code=0):
    result = CliRunner().invoke(cli.app, ["bank", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_show_prints_utility_and_provenance_the_most_useful_first(path):
    before = path.read_bytes()
    shown = said("show", path)
    assert shown.index("[1] Q +0.300, 1 of 1 solved; script of t1 (solved), epoch 1") < shown.index(
        "[2] Q +0.000, never shown; reflection of t2 (failed), epoch 2 from 1"
    )
    assert "\x1b" not in shown and "2 of 2 entries" in shown and path.read_bytes() == before
    for words in (("--task", "t2"), ("--visits", 1), ("--kind", "script"), ("--q-above", 0)):
        assert "1 of 2 entries" in said("show", path, *words)
    assert "    it\n    failed" in said("show", path, "--whole")


def test_stats_are_json(path):
    stats = json.loads(said("stats", path))
    assert stats["entries"] == 2 and stats["q_positive"] == 0.5 and stats["visits"] == 1


def test_export_and_merge(path, tmp_path):
    said("export", path, tmp_path / "e.jsonl", "--q-above", "0.1")
    (row,) = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert row["experience"] == "SELECT count(*)" and row["wins"] == 1
    other = Bank(tmp_path / "o.db", BankConfig(delta=0.0))
    other.close()
    assert "2 entries" in said("merge", tmp_path / "o.db", path)
    stats = [json.loads(said("stats", each)) for each in (path, tmp_path / "o.db")]
    assert stats[0]["q_mean"] == stats[1]["q_mean"] and stats[1]["entries"] == 2
    assert "with itself" in said("merge", path, path, code=2)


def test_forget_needs_a_condition(path):
    assert "Say which entries" in said("forget", path, code=2)
    assert "1 entries are forgotten" in said("forget", path, "--q-below", "0.1")
    assert "1 of 1 entries" in said("show", path)


def test_entries_are_chosen_by_what_became_of_their_task(path, tmp_path):
    assert "1 of 2 entries" in said("show", path, "--outcome", "failed")
    said("export", path, tmp_path / "e.jsonl", "--outcome", "solved")
    (row,) = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert row["success"] is True
    said("export", path, tmp_path / "f.jsonl", "--before", "2")  # as `show` counts
    (row,) = map(json.loads, (tmp_path / "f.jsonl").read_text().splitlines())
    assert row["epoch"] == 0
    assert "1 entries are forgotten" in said("forget", path, "--outcome", "failed")
    assert "[1]" in said("show", path) and "1 of 1 entries" in said("show", path)


def test_calibrate_and_check(path, tmp_path):
    assert 0 <= float(said("calibrate", path)) <= 1
    assert "is sound" in said("check", path)
    assert "no bank at" in said("check", tmp_path / "none.db", code=2)
    (tmp_path / "text.db").write_text("notes\n" * 200)
    for words in ("show", "stats", "check", "calibrate"):
        assert "no bank, or damaged" in said(words, tmp_path / "text.db", code=2)
    assert "between 0 and 1" in said("calibrate", path, "--quantile", "3", code=2)


def test_a_bank_with_embeddings_is_looked_at_and_thinned_without_its_embedder(tmp_path):
    from models.embedder import embedder_of

    path = tmp_path / "e.db"
    config = BankConfig(retrieve="dense", embedder="hash:16", delta=0.0)
    made = Bank(path, config, embedder_of("hash:16"))
    made.write("count dogs", "x", success=True, task_id="t1")
    made.close()
    assert "1 of 1 entries" in said("show", path)
    assert "1 entries are forgotten" in said("forget", path, "--task", "t1")
    other = Bank(tmp_path / "o.db", BankConfig(delta=0.0))
    other.write("a", "b", success=True, task_id="t")
    other.close()
    assert "new intents need them" in said("merge", path, tmp_path / "o.db", code=2)
    assert "1 entries" in said("merge", path, tmp_path / "o.db", "--embedder", "hash:16")
    assert "not with hash:32" in said(
        "merge", path, tmp_path / "o.db", "--embedder", "hash:32", code=2
    )
