"""The card of an export."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load

import eval
from agents import find
from commands import export, train
from commands.card import write_card
from config.options import EMBEDDED, READER, EvalConfig, RunConfig
from config.realmodels import PACKAGED, SHIPPED
from embedded import tiny
from report.summary import wilson


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps with adapters and validation."""
    fields = {"steps": 2, "tasks_per_step": (1,), "group_size": 2, "lora_rank": 2}
    config, _ = find.resolve("demo", EMBEDDED, fields, {})
    run = RunConfig(name="mine", runs=str(tmp_path_factory.mktemp("runs")), lengths=(2,),
                    validation="world", validation_n=4)  # fmt: skip
    return train.train(run, config, tiny.agent())


def evaluation(folder, model, n=8, mean=0.5, **others):
    """Write what an evaluation of a model leaves behind, as far as a card reads it.

    others: further cells of the agent, by name: what differs in them.
    """
    folder.mkdir()
    cell = {"agent": "memagent", "question": "one_fact", "temperature": "0.0", "length": 4}
    low, high = wilson(mean, n)
    cell |= {"n": n, "mean": mean, "low": low, "high": high}
    other = cell | {"agent": "full", "mean": 0.25, "documents": 1}
    summary = {"unit": "sections", "metric": "exact", "cells": [cell, other]}
    summary["cells"] += [cell | other for other in others.values()]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump({"eval": {"model": str(model)}}))


def test_the_card_says_what_was_trained_how_and_what_is_known_of_it(trained):
    evaluation(trained.parent / "seen", trained / "model")
    evaluation(trained.parent / "others", trained.parent / "another", mean=1.0)
    export.export(trained)
    for name, library in (("model", "transformers"), ("adapter", "peft")):
        card = ModelCard.load(trained / name / "README.md")
        data, text = card.data, card.text
        assert (data.library_name, data.license) == (library, "mit")
        assert {"memagent", "grpo"} <= {*data.tags} and data.base_model is None
        low, high = wilson(0.5, 8)
        row = f"| full | one_fact | 0.0 | 4 | 8, one document | 0.250 | {low:.2f}-{high:.2f} |"
        assert row in text and "`others`" not in text
        assert "Validation at this step, greedy" in text and "n = 4" in text
        assert "step 2 of 2" in text and "| lora_rank | 2 |" in text
        assert "licence of the base: mit" in text
        assert str(trained.parent) not in (trained / name / "README.md").read_text()


def test_an_evaluation_that_is_damaged_is_left_out(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    evaluation(tmp_path / "a", folder / "model", n=8, hot={"temperature": "1.0", "mean": 0.4})
    evaluation(tmp_path / "c", folder / "model", n=999, nan={"length": 8, "mean": float("nan")})
    evaluation(tmp_path / "d", folder / "model", n=999, text={"length": 8, "mean": "good"})
    evaluation(tmp_path / "e", folder / "model", n=999, old={"length": 8, "low": None})
    write_card(tmp_path, find.begun(trained), folder, 2, adapter=False)
    assert "c/summary.json" in " ".join(capsys.readouterr().out.split())
    text = (tmp_path / "README.md").read_text()
    assert "Evaluation `a`" in text and text.count("Evaluation `") == 1
    assert "| memagent | one_fact | 1.0 | 4 | 8 | 0.400 |" in text


def test_a_card_has_no_evaluation_of_an_earlier_export(trained, capsys):
    """Which lay at the same path, with the weights of another step."""
    config = EvalConfig(name="real", runs=str(trained.parent), model=str(trained / "model"), n=1,
                        agents=("memagent",), lengths=(1,), temperatures=(0.0,))  # fmt: skip
    eval.run_suite(config, {"memagent": tiny.agent()})
    card = trained / "model" / "README.md"
    export.export(trained)
    assert "Evaluation `real`" in card.read_text()
    weight = trained / "model" / "model.safetensors"
    whole = weight.read_bytes()
    write = export._write_export

    def with_others(*args):
        write(*args)
        (args[2] / weight.name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        shutil.rmtree(trained / "adapter")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_write_export", with_others)
        capsys.readouterr()
        export.export(trained)
    assert "is of other weights" in " ".join(capsys.readouterr().out.split())
    assert "Evaluation `real`" not in card.read_text()


def test_a_card_without_results_says_so_and_names_no_folder(tmp_path, codec):
    data = tmp_path / "train.jsonl"
    row = {"id": "a", "question": "Where is Anna?", "answer": "Lima", "context": "Anna is in Lima."}
    data.write_text(json.dumps(row))
    config, _ = find.resolve(
        "demo", EMBEDDED, {"steps": 1, "tasks_per_step": (1,), "group_size": 2}, {}
    )
    model = tmp_path / "base"
    shutil.copytree(EMBEDDED, model)
    (model / "README.md").write_text("---\nlicense: cc0-1.0\n---\n\n# base\n")
    run = RunConfig(name="plain", runs=str(tmp_path), data=str(data), model=str(model))
    folder = train.train(run, config, tiny.agent())
    text = (folder / "model" / "README.md").read_text()
    known = metadata_load(folder / "model" / "README.md")
    assert known["license"] == "cc0-1.0"
    assert "Nothing: no validation" in text and "`train.jsonl`" in text
    assert str(tmp_path) not in text


def test_what_goes_on_from_the_reader_has_the_licence_of_its_adapters(trained, tmp_path):
    stored = find.begun(trained)
    for named in ({"model": READER}, {"adapter": str(SHIPPED[READER]), "model": "smollm2"}):
        write_card(tmp_path, stored | {"run": named}, trained, 2, adapter=True)
        known, text = metadata_load(tmp_path / "README.md"), (tmp_path / "README.md").read_text()
        assert known["license"] == "cc-by-sa-4.0"
        assert known["base_model"] == PACKAGED["smollm2"].hub_name
        assert "licence of the base: apache-2.0" in text
        assert "licence of the adapters that it went on from: cc-by-sa-4.0" in text
