"""Train, evaluate, ask: by the agents that no other test runs through the commands."""

import csv
import json

import pytest
from typer.testing import CliRunner

import cli
from agents import find
from dev import keeper

LEDGER = ["--data", "ledger", "--lengths", 5, "--model", keeper.WEIGHTS]


def run(*words):
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("name", "data", "flags"), [
    ("infmem", ["--lengths", 1], ["--plan-tokens", 6]),
    ("grumem", ["--lengths", 1], ["--memory-tokens", 16]),
    ("mem1", ["--lengths", 1], ["--action-tokens", 8]),
    ("memoryr1", LEDGER, ["--stage", "manager"]),
    ("memoryr1", LEDGER, ["--stage", "answerer"]),
])  # fmt: skip
def test_it_is_trained_evaluated_and_asked(tmp_path, name, data, flags, read_here):
    runs, rates = ["--runs", tmp_path], {*find.find(name).rates}
    small = ["--steps", 1, "--tasks-per-step", 1, "--group-size", 2]
    run("train", "--agent", name, *data, *flags, *small, "--name", "t", *runs)
    (line,) = csv.DictReader((tmp_path / "t" / "metrics.csv").open())
    assert rates <= {*line} and 0 <= float(line["reward"]) <= 1.2  # its settings may pay for form
    if name == "memoryr1":
        edited = float(line["op_create"]) + float(line["stop_no_call"])
        assert (edited > 0) == ("turn_reward_right" not in line) == ("manager" in flags)
        if not edited:
            return
    trained = [*data[:-1], tmp_path / "t" / "model"] if data == LEDGER else [
        *data, "--model", tmp_path / "t" / "model"]  # fmt: skip
    run("eval", "--agents", name, *trained, "--n", 2, "--temperatures", 0, "--name", "e", *runs)
    cells = json.loads((tmp_path / "e" / "summary.json").read_text())["cells"]
    found = set().union(*(cell.get("rates", ()) for cell in cells))
    assert found and found <= rates
    (tmp_path / "doc.txt").write_text("Anna reached Rome. Otto reached Lima.")
    flags = [] if name == "memoryr1" else flags
    asked = ["ask", tmp_path / "doc.txt", "Where is Otto?", "--agent", name, "--model", "tiny"]
    printed = run(*asked, *flags, *runs, "--name", "a")
    assert "answer:" in printed or "The response is empty" in printed
    assert (tmp_path / "a" / "transcripts.jsonl").stat().st_size
