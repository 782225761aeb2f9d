"""All baselines of conversations in one evaluation, from a file to the summary, by a tiny model."""

import csv
import json
import math
from statistics import fmean

import pytest
from test_locomo import sample, write
from test_train_conversations import model  # noqa: F401  a fixture
from typer.testing import CliRunner

import cli
import eval
from config.errors import UserError
from config.options import EvalConfig
from dev import keeper
from report.summary import csv_of

AGENTS = (
    "memupdate", "memupdate@untrained", "none", "bm25", "facts", "hybrid", "full", "newest",
    "idle", "evidence", "oracle",
)  # fmt: skip
SEARCHING = ("memupdate", "memupdate@untrained", "facts", "hybrid", "newest", "idle", "evidence")


@pytest.fixture(scope="module")
def evaluated(model, tmp_path_factory):  # noqa: F811
    """The folder of an evaluation over two conversations with questions of all categories."""
    folder = tmp_path_factory.mktemp("baselines")
    samples = [sample("made-1"), sample("made-2", ("Cy", "Di"))]
    for each in samples:
        for k, question in enumerate(each["qa"]):
            question["question"] = f"Who cooks or grows pears or sells them, asked in {k}?"
    source = write(folder / "made.json", samples)
    small = (
        "--suite locomo --n 100 --temperatures 1 --device cpu --max-turns 2 --call-tokens 8 "
        "--final-tokens 3 --chunk-tokens 4096 --memory-budget 0.1 --embedder hash:256 "
        "--answer-k 3 --transcripts 2"
    )
    words = ["eval", "--model", model, "--untrained", model, "--data", source, "--runs", folder]
    words = [*map(str, words), "--agents", ",".join(AGENTS), *small.split()]
    with pytest.MonkeyPatch.context() as patch:  # the page takes longer than all answers
        patch.setattr("report.page.write_report", lambda *_, **__: None)
        done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    return folder / "eval"


def of(cells, agent):
    return [cell for cell in cells if cell["agent"] == agent]


def test_every_baseline_has_its_rows_and_its_costs(evaluated):
    rows = [json.loads(line) for line in (evaluated / "rows.jsonl").read_text().splitlines()]
    assert {row["agent"] for row in rows} == {*AGENTS}
    ids = {row["id"] for row in rows}
    assert len(ids) == 16 and len(rows) == 16 * len(AGENTS)
    for agent in AGENTS:
        assert {row["id"] for row in of(rows, agent)} == ids
    assert not [row for row in rows if row["error"]]
    # a question that names no evidence is asked about an empty document; all others have some
    shown = {row["id"]: row["document_tokens"] for row in of(rows, "oracle")}
    assert {name for name, n in shown.items() if not n} == {"made-1-q3", "made-2-q3"}
    cells = json.loads((evaluated / "summary.json").read_text())["cells"]
    questions = {cell["question"] for cell in cells}
    assert len(questions) == 5 and len(cells) == 5 * len(AGENTS)
    for agent in AGENTS:
        assert {cell["question"] for cell in of(cells, agent)} == questions
        assert sum(cell["n"] for cell in of(cells, agent)) == 16
    for cell in cells:
        where = cell["agent"], cell["question"]
        made = [r for r in of(rows, cell["agent"]) if r["question"] == cell["question"]]
        for cost in ("tokens_read", "tokens_written", "model_calls", "seconds"):
            assert cell[cost] == pytest.approx(fmean(row[cost] for row in made)), where
            assert math.isfinite(cell[cost]) and cell[cost] > 0, where
        if cell["agent"] in SEARCHING:
            sought = sum(row["counts"]["search_s"] for row in made)
            n = sum(row["counts"]["answers"] for row in made)
            assert n == len(made) and sought > 0, where
            assert cell["search_ms"] == pytest.approx(1000 * sought / n, abs=1e-3), where
            assert cell["rates"]["search_s"] == pytest.approx(sought / n, abs=1e-4), where
        else:
            assert "search_ms" not in cell and "rates" not in cell, where


def test_the_baselines_read_what_they_are_named_for(evaluated):
    cells = json.loads((evaluated / "summary.json").read_text())["cells"]

    def mean(agent, what, **where):
        return fmean(c[what] for c in of(cells, agent) if where.items() <= c.items())

    read = {agent: mean(agent, "tokens_read") for agent in AGENTS}
    assert read["none"] == min(read.values()) and read["memupdate"] == max(read.values())
    assert read["idle"] < read["facts"] and read["evidence"] < read["facts"] < read["full"]
    calls = {agent: mean(agent, "model_calls") for agent in AGENTS}
    once = {agent for agent, n in calls.items() if n == 1}
    assert calls["memupdate"] > 1 and calls["memupdate"] == calls["memupdate@untrained"]
    assert once == {*AGENTS} - {"memupdate", "memupdate@untrained"}
    recall = {a: [c["rates"]["recall"] for c in of(cells, a) if "recall" in c.get("rates", {})]
              for a in SEARCHING}  # fmt: skip
    assert fmean(recall["idle"]) < fmean(recall["newest"]) < fmean(recall["facts"])
    assert fmean(recall["hybrid"]) >= fmean(recall["facts"]) and read["hybrid"] >= read["facts"]


def test_the_costs_stand_in_the_table_for_other_programs(evaluated):
    summary = json.loads((evaluated / "summary.json").read_text())
    kinds = {cell["question"] for cell in summary["cells"]}  # the pooled rows have no costs
    rows = csv.DictReader(csv_of(summary).splitlines())
    table = [row for row in rows if row["question"] in kinds]
    assert {row["agent"] for row in table} == {*AGENTS}
    for cost in ("tokens_read", "tokens_written", "model_calls", "seconds"):
        assert [float(row[cost]) for row in table] == pytest.approx(
            [cell[cost] for cell in summary["cells"]], rel=1e-3, abs=1e-3
        )


def test_without_a_model_the_untrained_row_is_edited_by_one_and_answered_as_all_others(
    tmp_path, monkeypatch
):
    """What it stores is read by the rule that reads what the baselines find."""
    monkeypatch.setattr("report.page.write_report", lambda *_, **__: None)
    words = (
        f"eval --data ledger --lengths 6 --n 6 --temperatures 0 --engine extractive --device cpu "
        f"--model {keeper.WEIGHTS} --untrained {keeper.WEIGHTS} --runs {tmp_path} "
        "--agents memupdate@untrained,memupdate,facts"
    )
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "eval" / "rows.jsonl").open()]
    assert len(rows) == 18 and not any(row["error"] for row in rows)
    edited, nothing, found = (of(rows, a) for a in ("memupdate@untrained", "memupdate", "facts"))
    assert all(row["counts"]["op_create"] and row["counts"]["entries_at_end"] for row in edited)
    # no model: no call, an empty store
    assert not any(row["counts"]["entries_at_end"] for row in nothing)
    # the rule knows a sentence of one place alone: what is in no store is not mentioned
    assert {row["prediction"] for row in nothing} == {"Not mentioned"}
    assert {row["prediction"] for row in edited} - {"Not mentioned"}
    assert {row["prediction"] for row in edited} <= {r["prediction"] for r in found} | {
        "Not mentioned"
    }
    assert len({row["settings"] for row in rows}) == 3


def test_what_only_a_model_could_answer_is_no_row_beside_those_answered_without_one():
    config = EvalConfig(
        suite="locomo", engine="extractive", untrained="m", agents=("facts", "full@untrained")
    )
    with pytest.raises(UserError, match="'full@untrained' would answer itself"):
        eval.weights_of(config)
    allowed = ("memupdate@untrained", "facts@untrained", "full")
    assert len(eval.weights_of(EvalConfig(suite="locomo", engine="extractive", untrained="m",
                                          agents=allowed))[True]) == 2  # fmt: skip
