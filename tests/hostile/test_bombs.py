"""Small files that cost much: one sentence each, in a process that may take little."""

import gzip
import json
import os
import shutil
from pathlib import Path

import bombs
import pytest
from child import HEAVY, LIGHT, a_second, imported, in_child, refused, written  # noqa: F401

import suites
from config.errors import UserError
from config.options import EMBEDDED, EvalConfig
from config.realmodels import adapter_config
from models.dtypes import auto_dtype
from models.load import load_model
from models.plan import geometry
from models.policy import stored_as
from report.evaluation import evaluation_folder
from report.folder import settings_of
from report.records import read_records, step_records
from tasks import readers
from tasks.forms import contents
from tokens.codec import Codec

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if p.parts[-2] != "tests"]
FLOOD = "more than 400 times its size"


def tasks_of(path):
    return [*readers.records_of(Path(path))]


def those_that_call(words: str) -> list[Path]:
    return [path for path in SOURCES if words in path.read_text(encoding="utf-8")]


def test_a_run_folder_whose_settings_cost_much_is_no_run(tmp_path):
    bomb = bombs.settings()["lists of lists"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(bomb)
    assert settings_of(bomb) == {}
    with pytest.raises(UserError, match="no evaluation"):
        evaluation_folder(EvalConfig(runs=str(tmp_path), name="run"), suites.make("world"))


def test_records_that_unpack_to_a_flood_are_refused_when_it_begins(tmp_path):
    files = {"blanks": bombs.flood(), "one line": bombs.flood(b'{"id": "', b'"}\n')}
    paths = written(tmp_path, files, ".jsonl.gz")
    refused(lambda path: read_records(Path(path)), paths, FLOOD, 2 << 30)


def test_gzip_in_gzip_is_a_sentence(tmp_path):
    paths = written(tmp_path, {"a": bombs.within_gzip(2000), "b": bombs.within_gzip(2)}, ".txt.gz")
    refused(lambda path: contents(Path(path).read_bytes(), path), paths, "packed more than once")


def test_members_that_hold_no_record_do_not_each_cost_the_rest_of_the_file(tmp_path, monkeypatch):
    """Without a line's end each of 4,000 members was read to the end of the file."""
    (tmp_path / "trajectories.jsonl.gz").write_bytes(gzip.compress(b"{}", mtime=0) * 4000)
    headers, read = [], gzip._GzipReader._read_gzip_header
    counted = lambda it: headers.append(1) or read(it)  # noqa: E731
    monkeypatch.setattr(gzip._GzipReader, "_read_gzip_header", counted)

    def look():
        return f"{[*step_records(tmp_path, last=True)]} {len(headers) < 2_000_000}"

    assert in_child(look, LIGHT, 30) == "[] True"


def test_a_folder_whose_json_is_an_abyss_is_a_sentence(tmp_path):
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text(bombs.deep())
    assert auto_dtype(tmp_path, "cpu") == "float32" and stored_as(tmp_path) == ""
    with pytest.raises(UserError, match="nested too deep"):
        adapter_config(tmp_path)
    path = tmp_path / "transcripts.jsonl"
    path.write_text(bombs.record() + bombs.deep() + "\n")
    with pytest.raises(UserError, match=r"line 2 cannot be read: it is nested too deep"):
        read_records(path)


def test_a_config_that_declares_more_than_the_files_hold_is_a_sentence(tmp_path):
    config, paths = json.loads((EMBEDDED / "config.json").read_bytes()), {}
    for name, n in bombs.SIZES.items():
        paths[name] = tmp_path / name
        shutil.copytree(EMBEDDED, paths[name])
        (paths[name] / "config.json").write_text(json.dumps(config | {name: n}))
    load = lambda path: load_model(path, "float32", "cpu")  # noqa: E731
    refused(load, paths, "does not hold what its config.json declares", HEAVY)
    name = "num_hidden_layers"
    (paths[name] / "model.safetensors").unlink()  # as of one that is to be downloaded
    refused(geometry, {name: paths[name]}, "declares, 1,000,000,000 layers", HEAVY)


@pytest.fixture
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED)


@pytest.mark.usefixtures("a_second")
@pytest.mark.parametrize("kind", bombs.templates())
def test_a_chat_template_that_costs_much_is_a_sentence(tokenizer, kind):
    tokenizer.chat_template = bombs.templates()[kind]
    with pytest.raises(UserError, match=r"chat template takes .*than .*\.$"):
        Codec(tokenizer)


@pytest.mark.usefixtures("a_second")
def test_a_chat_template_that_costs_much_for_one_message_is_a_sentence(tokenizer):
    tokenizer.chat_template = bombs.for_systems_only()
    codec = Codec(tokenizer)
    codec.chat([("a", True)], system="short")
    with pytest.raises(UserError, match="chat template takes more"):
        codec.chat([("a", True)], system="long " * 300)
    door = ROOT / "tokens" / "chat_templates.py"
    assert those_that_call(".apply_chat_template(") == [door]


def test_a_value_without_an_end_is_read_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST", 100)
    paths = written(tmp_path, {"a line": "x", "an array": "[\n1,"}, ".jsonl")
    for path in paths.values():
        os.truncate(path, 1 << 33)
    refused(tasks_of, paths, "a value of more than", 2 << 30)


@pytest.mark.parametrize("text", ["x" * 101, '{"a": 1}\n' + "x" * 101, "[" + "1,\n" * 40 + "1]"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_value_that_is_too_large_to_be_held_is_refused(pack, text, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST", 100)
    record = {"question": "?", "context": ".", "answer": "."}
    monkeypatch.setattr(readers, "from_json", lambda _: record)
    path = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl")
    path.write_bytes(pack(text.encode()))
    with pytest.raises(UserError, match="a value of more than"):
        tasks_of(path)
