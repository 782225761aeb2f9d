"""All baselines of conversations in one evaluation, from a file to the summary, by a tiny model."""

import json
from statistics import fmean

import pytest
from test_locomo import sample, write
from test_train_conversations import model  # noqa: F401  a fixture
from typer.testing import CliRunner

import cli

AGENTS = (
    "memupdate", "memupdate@untrained", "none", "bm25", "facts", "full", "newest", "idle",
    "evidence", "oracle",
)  # fmt: skip


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
        "--final-tokens 3 --chunk-tokens 4096 --memory-budget 0.1 "
        "--answer-k 3"
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
    ids = {row["id"] for row in rows}
    assert len(ids) == 16 and len(rows) == 16 * len(AGENTS)
    for agent in AGENTS:
        assert {row["id"] for row in of(rows, agent)} == ids
    assert not [row for row in rows if row["error"]]
    # a question that names no evidence is asked about an empty document; all others have some
    shown = {row["id"]: row["document_tokens"] for row in of(rows, "oracle")}
    assert {name for name, n in shown.items() if not n} == {"made-1-q3", "made-2-q3"}
    summary = json.loads((evaluated / "summary.json").read_text())
    cells = summary["cells"]
    assert len(cells) == len({(c["agent"], c["question"]) for c in cells}) == 5 * len(AGENTS)
    assert summary["metric"] == "reward" and all("official_em" in cell for cell in cells)
    for cell in cells:
        made = [r for r in of(rows, cell["agent"]) if r["question"] == cell["question"]]
        assert cell["n"] == len(made) and cell["seconds"] > 0
        for cost in ("tokens_read", "tokens_written", "model_calls"):
            assert cell[cost] == pytest.approx(fmean(row[cost] for row in made))


def test_the_baselines_read_what_they_are_named_for(evaluated):
    cells = json.loads((evaluated / "summary.json").read_text())["cells"]
    read = {a: fmean(c["tokens_read"] for c in of(cells, a)) for a in AGENTS}
    assert read["none"] == min(read.values()) and read["memupdate"] == max(read.values())
    assert read["idle"] < read["facts"] and read["evidence"] < read["facts"] < read["full"]
    calls = {a: fmean(c["model_calls"] for c in of(cells, a)) for a in AGENTS}
    once = {agent for agent, n in calls.items() if n == 1}
    assert calls["memupdate"] > 1 and calls["memupdate"] == calls["memupdate@untrained"]
    assert once == {*AGENTS} - {"memupdate", "memupdate@untrained"}
    recall = {a: fmean(c["rates"]["recall"] for c in of(cells, a) if "recall" in c["rates"])
              for a in ("idle", "newest", "facts")}  # fmt: skip
    assert recall["idle"] < recall["newest"] < recall["facts"]
