"""The card of an export: what was trained, what was measured, nothing but text of strangers."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load

import eval
from agents import find
from commands import card, export, train
from commands.card import write_card
from config.options import EMBEDDED, READER, EvalConfig, RunConfig
from config.realmodels import PACKAGED, SHIPPED
from embedded import tiny
from models.policy import fingerprint
from report.summary import wilson


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step with adapters and validation, alone in its folder of runs."""
    fields = {"steps": 1, "tasks_per_step": (1,), "group_size": 2, "lora_rank": 2}
    config, _ = find.resolve("demo", EMBEDDED, fields, {})
    run = RunConfig(name="mine", runs=str(tmp_path_factory.mktemp("runs")), lengths=(2,),
                    validation="world", validation_n=4)  # fmt: skip
    return train.train(run, config, tiny.agent())


@pytest.fixture
def runs(trained, tmp_path):
    """A copy of that run, with nothing beside it."""
    return shutil.copytree(trained, tmp_path / "runs" / "mine")


def evaluation(folder, trained, **other):
    """Write what an evaluation of a run's export leaves behind, as far as a card reads it.

    other: what a second cell has instead.
    """
    folder.mkdir(parents=True)
    low, high = wilson(0.5, 8)
    cell = {"agent": "memagent", "question": "one_fact", "temperature": "0.0", "length": 4}
    cell |= {"n": 8, "mean": 0.5, "low": low, "high": high}
    summary = {"unit": "sections", "metric": "exact", "cells": [cell, cell | other]}
    (folder / "summary.json").write_text(json.dumps(summary))
    weights = fingerprint(trained / "model", "torch.float32")
    sections = {"eval": {"model": str(trained / "model")}, "weights": {"model": f"it {weights}"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))


def card_of(trained, tmp_path, **run):
    """Write a card of the run whose settings are changed; return what it says."""
    stored = find.begun(trained)
    stored = stored | {"run": stored["run"] | run}
    write_card(tmp_path, stored, trained, 1, False, [trained / "model"])
    return (tmp_path / "README.md").read_text()


def test_the_card_says_what_was_trained_how_and_what_is_known_of_it(runs):
    evaluation(runs.parent / "seen", runs, agent="full", mean=0.25)
    evaluation(runs.parent / "others", shutil.copytree(runs, runs.parent / "another"))
    export.export(runs)
    for name, library in (("model", "transformers"), ("adapter", "peft")):
        found = ModelCard.load(runs / name / "README.md")
        data, text = found.data, found.text
        assert (data.library_name, data.license) == (library, "mit")
        assert {"memagent", "grpo"} <= {*data.tags} and data.base_model is None
        low, high = wilson(0.5, 8)
        ends = f"[{100 * low:.1f}, {100 * high:.1f}]"
        for agent, percent in (("memagent", "50.0"), ("full", "25.0")):
            assert f"| one_fact | {agent} | 0.0 | {percent} {ends} |" in text
        assert "n = 8 questions a cell" in text and "others" not in text
        numbers = [(e.metric_name, e.metric_value, e.metric_args["n"]) for e in data.eval_results]
        assert numbers == [("memagent", 0.5, 8), ("full", 0.25, 8)]
        assert "Validation at this step, greedy" in text and "n = 4" in text
        assert "step 1 of 1" in text and "lora_rank 2" in text
        assert str(runs.parent) not in (runs / name / "README.md").read_text()


@pytest.mark.parametrize("wrong", [
    {"mean": "good"}, {"low": None}, {"n": "x"}, {"question": ["x"]}, {"length": {}},
])  # fmt: skip
def test_an_evaluation_that_is_damaged_is_left_out_and_said(runs, tmp_path, capsys, wrong):
    evaluation(runs.parent / "good", runs)
    evaluation(runs.parent / "damaged", runs, **wrong)
    text = card_of(runs, tmp_path)
    assert "damaged/summary.json" in "".join(capsys.readouterr().out.split())
    assert "Evaluation good" in text and "Evaluation damaged" not in text


EVIL = "a|b\n---\nlicense: evil\n# big <script>x</script> ![p](http://h/p) `c` **b** \x1b[2J &lt;"


def test_texts_of_strangers_are_plain_text(runs, tmp_path):
    evaluation(runs.parent / "e <b>x", runs, agent=EVIL, question=EVIL)
    text = card_of(runs, tmp_path, name=EVIL, data=f"hf:{EVIL},{EVIL}")
    known, body = metadata_load(tmp_path / "README.md"), ModelCard(text).text
    assert known["license"] == "mit" and "\x1b" not in text
    for markup in ("<", "![", "`", "**", "\n# big", "\nlicense", "\n---", "://", "&lt;"):
        assert markup not in body, markup
    lines = [line for line in body.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("text", "shown"), [
    *((f"a {mark}b\n c", f"a &#{ord(mark)};b c") for mark in "\\`*_~[]|<>&"),
    ("two_hop", "two_hop"), ("http://h", "http&#58;//h"), ("WWW.h", "WWW&#46;h"),
])  # fmt: skip
def test_every_mark_of_markdown_is_escaped(text, shown):
    assert card.plain(text) == shown


def test_a_card_has_no_evaluation_of_an_earlier_export(runs, capsys):
    """Which lay at the same path, with the weights of another step."""
    config = EvalConfig(name="real", runs=str(runs.parent), model=str(runs / "model"), n=1,
                        agents=("memagent",), lengths=(1,), temperatures=(0.0,))  # fmt: skip
    eval.run_suite(config, {"memagent": tiny.agent()})
    export.export(runs)
    assert "Evaluation real" in (runs / "model" / "README.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "fingerprint", lambda *_: "another")
        export.export(runs)
    assert "real/summary.json" in "".join(capsys.readouterr().out.split())
    assert "Evaluation real" not in (runs / "model" / "README.md").read_text()


@pytest.mark.parametrize(("run", "licence", "base"), [
    ({"model": READER}, "cc-by-sa-4.0", PACKAGED["smollm2"].hub_name),
    ({"adapter": str(SHIPPED[READER]), "model": "smollm2"}, "cc-by-sa-4.0",
     PACKAGED["smollm2"].hub_name),
    ({"model": "base", "data": "/there/train.jsonl"}, "cc0-1.0", None),
])  # fmt: skip
def test_licence_and_base_are_those_of_what_it_went_on_from(
    runs, tmp_path, monkeypatch, run, licence, base
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: cc0-1.0\n---\n\n# base\n")
    text, known = card_of(runs, tmp_path, **run), metadata_load(tmp_path / "README.md")
    assert known["license"] == licence and known.get("base_model") == base
    assert "/there" not in text
