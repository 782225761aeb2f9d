"""Small files that cost much: one sentence each, in a process that may take little."""

import gzip
import json
import os
import shutil
from pathlib import Path

import bombs
import pytest
from child import (  # noqa: F401
    HEAVY,
    LIGHT,
    a_second,
    imported,
    in_child,
    refused,
    sentences,
    written,
)

import suites
from config.errors import UserError
from config.files import NESTED, SETTINGS, read_yaml
from config.foreign import FREE, from_json, read_data
from config.options import EMBEDDED, EvalConfig
from config.realmodels import adapter_config
from models.dtypes import auto_dtype
from models.load import load_model
from models.plan import geometry
from models.policy import stored_as
from report.evaluation import evaluation_folder
from report.folder import settings_of
from report.records import read_records, step_records
from suites import bcb, llb_os
from tasks import readers
from tasks.forms import contents
from tasks.readers import read_json
from tokens.codec import Codec

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if p.parts[-2] != "tests"]
FLOOD = "more than 400 times its size"


def tasks_of(path):
    return [*readers.records_of(Path(path))]


def those_that_call(words: str) -> list[Path]:
    return [path for path in SOURCES if words in path.read_text(encoding="utf-8")]


# ---------------------------------------------------------------- settings


def test_settings_that_cost_much_are_refused_before_they_do(tmp_path):
    found = refused(read_yaml, written(tmp_path, bombs.settings(), ".yaml"))
    for name in ("lists of lists", "maps of maps", "merged", "itself", "as a key"):
        assert "may not refer to other settings (*a)" in found[name]
    for name in ("deep lists", "deep blocks"):
        assert f"at most {NESTED} lists and sections deep" in found[name]
    assert f"{SETTINGS:,} bytes" in found["long"] and f"{SETTINGS:,} bytes" in found["wide"]
    assert "64 bits" in found["large number"] and "64 bits" in found["large key"]
    refused(read_yaml, {"endless": Path("/dev/zero")}, f"{SETTINGS:,} bytes")


def test_every_reader_of_settings_goes_through_that_door(tmp_path):
    bomb = bombs.settings()["lists of lists"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(bomb)
    assert settings_of(bomb) == {}
    with pytest.raises(UserError, match="no evaluation"):
        evaluation_folder(EvalConfig(runs=str(tmp_path), name="run"), suites.make("world"))
    calls = [path for words in ("yaml.load(", "yaml.safe_load") for path in those_that_call(words)]
    product = [path for path in calls if path.parts[-2] != "dev"]
    assert product == [ROOT / "config" / "files.py"]


# ---------------------------------------------------------------- packed data

READERS = {
    "records": lambda path: read_records(Path(path)),
    "bcb": lambda path: bcb.read(path),
    "llb-os": lambda path: llb_os.Systems(path),
    "json": read_json,
    "tasks": tasks_of,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_unpacks_to_a_flood_is_refused_when_it_begins(tmp_path, reader):
    files = {"blanks": bombs.flood(), "one line": bombs.flood(b'{"id": "', b'"}\n')}
    paths = written(tmp_path, files, ".jsonl.gz")
    found = sentences(READERS[reader], paths, 2 << 30)
    assert all(str(paths[name]) in said and FLOOD in said for name, said in found.items()), found


def test_data_that_repeats_itself_as_data_does_is_read(tmp_path):
    sentences = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 9
    text = sentences * (2 * FREE // len(sentences))  # as RULER's haystacks
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(text).encode()))
    assert len(text) > FREE and read_json(path) == text
    path = tmp_path / "zeros.gz"  # few, however well they are packed
    path.write_bytes(gzip.compress(bytes(FREE)))
    assert read_data(path) == bytes(FREE)


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


# ---------------------------------------------------------------- JSON


def test_json_without_a_ground_is_a_value_error():
    for text in (bombs.deep(), "[" * bombs.DEEP, '{"a":' * bombs.DEEP, "9" * 5000):
        with pytest.raises(ValueError):
            from_json(text)


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


# ---------------------------------------------------------------- models


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
