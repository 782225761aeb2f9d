"""MemoryAgentBench: made files of its schema, read, chosen from and asked; and bad ones."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import asked_of

import suites
from agents import find
from config.errors import UserError
from config.options import EvalConfig
from eval import run_suite
from tasks import memoryagentbench as bench


def row(source: str, questions: list[str], answers: list, context: str = "A fact.") -> dict:
    metadata = {"source": source, "qa_pair_ids": [f"q{n}" for n in range(len(questions))]}
    return dict(context=context, questions=questions, answers=answers, metadata=metadata)


FACTS = row("factconsolidation_sh_6k", ["Who?", "Where?"], [["Ann", "Anne"], ["Oslo"]])
LABELS = row("icl_banking77", ["my card", "my pin"], [["1"], ["12"]], "card label: 1")
FILMS = row("recsys_redial_full", ["Which film?"], [["7", "8"]])


def written(folder, rows, name="made.parquet"):
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.mark.parametrize("name", ["made.parquet", "made.jsonl"])
def test_a_record_becomes_a_task_for_each_question(tmp_path, name):
    first, second = bench.load(written(tmp_path, [FACTS], name))
    assert (first.answers, second.answers) == (("Ann", "Anne"), ("Oslo",))
    assert first.text is second.text and first.kind == second.split == "factconsolidation_sh_6k"
    assert first.question.startswith("Who?\n") and "larger number" in first.question
    assert [first.id, second.id] == ["factconsolidation_sh_6k-1-1", "factconsolidation_sh_6k-1-2"]


def test_all_answers_of_a_single_question_are_its_own(tmp_path):
    for answers in (["B. the butler", "the butler"], [["B. the butler", "the butler"]]):
        path = written(tmp_path, [row("detective_qa", ["Who did it?"], answers)], "x.jsonl")
        (task,) = bench.load(path)
        assert task.answers == ("B. the butler", "the butler") and task.question == "Who did it?"


def test_sources_that_cannot_be_graded_are_left_out_and_named(tmp_path):
    tasks = bench.load(written(tmp_path, [LABELS, FILMS], "x.jsonl"))
    chosen, said = bench.choose(tasks, "")
    assert {task.kind for task in chosen} == {"icl_banking77"}
    assert said == ["recsys_redial_full is left out: it needs a list of all films."]
    for source in ("recsys_redial_full", "icl"):
        with pytest.raises(UserError, match="recsys_redial_full"):
            bench.choose(tasks, source)
    with pytest.raises(UserError, match="icl_bank"):  # two metrics in one evaluation
        bench.check_metric(bench.load(written(tmp_path, [FACTS, LABELS], "x.jsonl")))


@pytest.mark.parametrize(
    "source, metric",
    [("icl_nlu", "em"), ("detective_qa", "em"), ("ruler_qa1_197K", "sub_em"),
     ("eventqa_65536", "sub_em"), ("factconsolidation_mh_6k", "sub_em")],
)  # fmt: skip
def test_the_metric_is_that_of_the_authors(tmp_path, source, metric):
    path = written(tmp_path, [row(source, ["?"], [["1"]])], "x.jsonl")
    bench.check_metric(bench.load(path))
    assert suites.make("memoryagentbench").measured_by([source]) == metric


def test_the_questions_that_are_asked_come_from_every_context(tmp_path):
    rows = [row("ruler_qa1", ["a", "b", "c"], [["1"]] * 3, text) for text in ("one", "two")]
    tasks = bench.load(written(tmp_path, rows, "x.jsonl"))
    assert [task.id for task in bench.some(tasks, 3)] == [
        "ruler_qa1-1-1", "ruler_qa1-1-2", "ruler_qa1-2-1",
    ]  # fmt: skip
    assert bench.some(tasks, 9) == tasks


@pytest.mark.parametrize(
    "damage",
    [
        {"context": " "}, {"metadata": {}}, {"metadata": {"source": 3}}, {"questions": "Who?"},
        {"answers": [["Ann"]]}, {"answers": [["Ann"], []]}, {"answers": [["Ann"], [7]]},
    ],
)  # fmt: skip
def test_a_field_that_is_not_as_published_is_named(tmp_path, damage):
    (name,) = damage
    name = "source" if damage[name] == {"source": 3} else name
    with pytest.raises(UserError, match=f"line 1: .*'{name}'"):
        bench.load(written(tmp_path, [FACTS | damage], "x.jsonl"))


def test_labels_are_graded_by_exact_match(tmp_path):
    """The engine answers 12 to both: it holds the 1 that is accepted for one, and is not that."""
    rows = [LABELS | {"context": "card label: 12"}]
    config = EvalConfig(
        suite="memoryagentbench", data=(str(written(tmp_path, rows, "x.jsonl")),), name="labels",
        agents=("bm25",), temperatures=(0.0,), engine="extractive", runs=str(tmp_path),
    )  # fmt: skip
    folder = run_suite(config, {"bm25": find.make("bm25", {})})
    summary = json.loads((folder / "summary.json").read_bytes())
    (cell,) = summary["cells"]
    assert summary["metric"] == "em" and cell["question"] == "icl_banking77"
    assert (cell["n"], cell["mean"], cell["em"], cell["sub_em"]) == (2, 0.5, 0.5, 1.0)


def test_a_column_is_as_long_as_its_longest_context(tmp_path, codec):
    rows = [row("ruler_qa1", ["a"], [["1"]], text) for text in ("one", "one two three four")]
    path = written(tmp_path, rows, "x.jsonl")
    unit, (column,) = asked_of(lambda: codec, suite="memoryagentbench", data=(str(path),))
    assert unit == "tokens" and column.length == len(codec.encode("one two three four"))
    assert [task.text for task in column.make()] == ["one", "one two three four"]
    assert suites.make("memoryagentbench").measured_by([column.question]) == "sub_em"
