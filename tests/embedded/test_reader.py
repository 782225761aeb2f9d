"""The script that makes the reader: its commands, what they train on, and what ships of it."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
import torch
import typer.main
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file

import cli
from agents.find import of_model
from config.errors import UserError
from config.options import EMBEDDED, READER
from config.realmodels import PACKAGED, adapter_config, is_adapter, named_folder
from dev import reader
from tasks.readers import read

ROOT = Path(__file__).parents[2]
SOURCES = {name: f"folder/{file}" for name, file in reader.LOCAL.items()}


def parse(words):
    """Parse a command line as cli.py does, without running it: (command, parameters given)."""
    group = typer.main.get_command(cli.app)
    ctx = group.make_context("cli.py", [*words])
    name, command, rest = group.resolve_command(ctx, [*words])
    while hasattr(command, "resolve_command"):  # data build
        ctx = command.make_context(name, rest, parent=ctx)
        name, command, rest = command.resolve_command(ctx, rest)
    done = command.make_context(name, rest, parent=ctx)
    return name, done.params | (done.obj or {})


def test_each_command_parses_and_goes_on_from_the_one_before():
    plan = reader.recipe(SOURCES, Path("out"))
    parsed = [parse(words) for words in plan.values()]
    assert [name for name, _ in parsed] == ["build"] * 4 + "sft sft sft train export".split()
    assert not any("xquad" in word for words in plan.values() for word in words)
    adapter, made = None, {str(path) for path in plan}
    trainings = [given for _, given in parsed[4:8]]
    for given, (_, steps, *_) in zip(trainings, reader.TRAININGS.values(), strict=True):
        assert (
            given.get("adapter") == adapter and given["model"] == "smollm2" and given["seed"] == 0
        )
        assert given["steps"] == steps and given["not_found"] == "say"
        for part in given["data"].split(","):
            folder = Path(part.partition("=")[0]).parent  # that an earlier command fills
            assert any(Path(path).parent == folder for path in made)
        adapter = f"out/{given['name']}/adapter"
    assert parsed[7][1]["outcome"] == "f1" and parsed[4][1]["lora_rank"] == 16
    assert all(given.get("source_split", "train") == "train" for _, given in parsed[:4])


def test_what_is_reported_was_not_trained_on():
    for words in reader.evaluations(SOURCES, Path("out")).values():
        given = parse(words)[1]
        assert given["model"] == "out/shipped" and given["data"] == (SOURCES["xquad"],)
        assert given["temperatures"] == (0.0,) and given["not_found"] == "say"


def test_what_is_there_is_not_made_again_and_a_failure_ends_the_call(tmp_path, monkeypatch):
    calls, codes = [], iter([0, 3])
    monkeypatch.setattr(
        reader.subprocess, "call", lambda words: calls.append([*words[2:]]) or next(codes)
    )
    there, run = tmp_path / "a", tmp_path / "run"
    there.touch()
    run.mkdir()  # of a training that was stopped
    plan = {there: ["x"], run / "model": ["sft"], tmp_path / "b": ["export"]}
    with pytest.raises(UserError, match="exit code 3"):
        reader.run(plan)
    assert calls == [["sft", "--resume"], ["export"]]
    with pytest.raises(UserError, match="xquad"):
        reader.found(tmp_path)


def test_questions_with_an_answer_are_written_with_their_sentence(tmp_path):
    """Without one the answer is the one date or year of the sentence."""
    when, year = "When did Ida leave?", "In which year did Ida leave?"
    records = [
        (when, "Born in 1911, Ida left on 4 May 1931.", "", "4 May 1931"),
        (year, "Born on May 4, 1911, Ida left in 1931.", "", "1931"),
        ("When did Ida, born in 1911, leave?", "Ida, born in 1911, left in 1931.", "", "1931"),
        ("Who left?", "Ida left in 1931.", "Ida", "Ida"),
        (when, "Ida, born in 1911, left in 1931.", "", None),  # one of several
        (when, "Ida left 1,931 days later, in section 3.1931.", "", None),
        ("Why?", "Nobody knows.", "", None),
    ]
    with gzip.open(tmp_path / "s.jsonl.gz", "wt") as file:
        for question, sentence, answer, _ in records:
            record = {"question": question, "sentence": sentence}
            file.write(json.dumps(record | ({"answer": answer} if answer else {})) + "\n")
    reader.write_sentences(tmp_path / "s.jsonl.gz", tmp_path / "out.json")
    right = [(f"s{k}", (right,)) for k, (*_, right) in enumerate(r for r in records if r[3])]
    assert [(task.id, task.answers) for task in read(tmp_path / "out.json")] == right


def test_what_ships_is_in_bfloat16_with_its_settings(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.tensor([1.5])}, adapter / reader.WEIGHTS)
    for name in ("adapter_config.json", "agent.yaml", "trained_on.csv"):
        (adapter / name).write_text(name)
    reader.ship(adapter, tmp_path / "shipped")
    assert load_file(tmp_path / "shipped" / reader.WEIGHTS)["a"].dtype == torch.bfloat16
    assert (tmp_path / "shipped" / "agent.yaml").read_text() == "agent.yaml"


LICENCES = {  # of what the adapters that ship were trained on
    "HotpotQA": "CC BY-SA 4.0",
    "XQuAD": "CC BY-SA 4.0",
    "MuSiQue": "CC BY 4.0",
    "2WikiMultiHopQA": "Apache-2.0",
}


def test_beside_all_weights_that_ship_stand_base_licence_and_data():
    listed = ["git", "ls-files", "*.safetensors"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.splitlines()]
    adapters = {path.parent for path in paths if is_adapter(path.parent)}
    assert of_model(READER)["top_k"] == 2  # sections of the first answer, as it was measured
    assert named_folder(READER) in adapters and EMBEDDED in {p.parent for p in paths} - adapters
    for folder in {path.parent for path in paths}:
        text, card = (folder / "README.md").read_text(), metadata_load(folder / "README.md")
        assert card["license"] == ("cc-by-sa-4.0" if folder in adapters else "mit")
        assert all(f"**{word}**" in text for word in ("Base", "Trained on"))
    for folder in adapters:
        text = (folder / "README.md").read_text()
        base = PACKAGED[adapter_config(folder)["base_model_name_or_path"]]
        card = metadata_load(folder / "README.md")
        assert base.licence == "apache-2.0" and card["base_model"] == base.hub_name
        rows = [line for line in text.splitlines() if line.startswith("| [")]
        for name, licence in LICENCES.items():
            (row,) = (row for row in rows if row.startswith(f"| [{name}]"))
            assert row.endswith(f"| {licence} |")
    weights = [path for path in paths if path.parent in adapters]
    assert sum(path.stat().st_size for path in weights) <= 10 * 2**20
    assert {w.dtype for path in weights for w in load_file(path).values()} == {torch.bfloat16}
