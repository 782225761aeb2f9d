"""Files that are no bank or hold no tasks, through the commands: one sentence, nothing written."""

import gzip
import json
import re
from pathlib import Path

import pytest
from test_bank import SPOILT, spoil
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig
from models.embedder import embedder_of
from tasks.llb_db import OWN

EMBEDDER = "hash:8"


def contents(folder: Path) -> dict[str, bytes]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path): raw for path, raw in files.items()}


def refused(*words, code=2) -> str:
    """The one sentence of a command that ends with an exit code."""
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    last = result.stderr.strip().splitlines()[-1] if code == 2 else result.stdout
    assert code != 2 or (last.startswith("memagent: ") and last.endswith("."))
    return last


def embedded(path: Path) -> None:
    """Make a bank with embeddings of a known embedder."""
    config = BankConfig(retrieve="dense", embedder=EMBEDDER, delta=0.0, same_intent=1.1)
    made = Bank(path, config, embedder_of(EMBEDDER))
    for task in ("t1", "t2"):
        made.write(f"count the dogs of {task}", "x" * 3000, success=True, task_id=task)
    made.close()


# ---------------------------------------------------------------- banks


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_is_no_bank_is_one_sentence_of_every_command(tmp_path, how):
    path, other = tmp_path / "b.db", tmp_path / "other.db"
    spoil(path, how, embedded)
    embedded(other)
    before = contents(tmp_path)
    readers = [[name, path] for name in ("check", "show", "stats", "calibrate")]
    for words in (
        *readers,
        ["export", path, tmp_path / "e.jsonl"],
        ["forget", path, "--q-below", "1"],
    ):
        assert str(path) in refused("bank", *words)
    named = refused("bank", "merge", path, other, "--embedder", EMBEDDER)
    assert str(path) in named
    assert contents(tmp_path) == before


@pytest.mark.parametrize("how", SPOILT)
def test_a_stream_with_such_a_bank_is_refused_before_its_first_task(tmp_path, how):
    folder = tmp_path / "stream"
    folder.mkdir()
    spoil(folder / "memrl.db", how, embedded)
    before = contents(tmp_path)
    words = f"--suite llb-db --arms memrl --retrieve dense --embedder {EMBEDDER} --epochs 1"
    assert "memrl.db" in refused("stream", "--runs", tmp_path, *words.split())
    assert contents(tmp_path) == before


# ---------------------------------------------------------------- files of tasks

ITEM = json.loads(OWN.read_text())["own-1"]
QUESTION = {"id": "a", "question": "2 + 2?", "answer": "4", "category": "Math",
            "answer_type": "exactMatch", "image": ""}  # fmt: skip
PROGRAM = {"task_id": "T/0", "instruct_prompt": "Add.", "complete_prompt": "def f():",
           "entry_point": "f", "libs": "[]",
           "test": "class TestCases:\n    def test_a(self): ..."}  # fmt: skip
SHELL = {"instruction": "Make a file.", "evaluation_info": {
    "ground_truth_command_item": {"command_name": "bash", "script": "touch a"},
    "evaluation_command_item": {"command_name": "bash", "script": "test -e a"}}}  # fmt: skip


def db(**changes) -> bytes:
    return json.dumps({"0": ITEM, "1": ITEM | changes}).encode()


def table(**changes) -> bytes:
    return db(table_info=ITEM["table_info"] | changes)


def lines(*records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


FILES = {
    # environment, name of the file, content, what is said of it
    "text": ("llb-db", "a.json", b"these are notes", "JSON"),
    "noise": ("llb-db", "a.json", bytes(range(256)), ""),
    "cut gzip": ("llb-db", "a.json.gz", gzip.compress(db())[:200], ""),
    "list": ("llb-db", "a.json", b"[1, 2]", "db_train.json"),
    "nothing": ("llb-db", "a.json", b"{}", "db_train.json"),
    "empty file": ("llb-db", "a.json", b"", ""),
    "item is a number": ("llb-db", "a.json", b'{"7": 5}', "item 7"),
    "printed by Python": ("llb-db", "a.json", db(answer_info=str(ITEM["answer_info"])),
                          "db_bench_data.json"),
    "another environment's": ("llb-db", "a.json", json.dumps({"0": SHELL}).encode(), "llb-os"),
    "two answers": ("llb-db", "a.json",
                    db(answer_info=ITEM["answer_info"] | {"md5": "0" * 32}), "'direct' and 'md5'"),
    "row too short": ("llb-db", "a.json", table(row_list=[[1]]), "one value per column"),
    "infinite cell": ("llb-db", "a.json",
                      table(row_list=[[float("inf"), "", "", 1, 1]]), ""),
    "column twice": ("llb-db", "a.json",
                     table(column_info_list=ITEM["table_info"]["column_info_list"][:1] * 5),
                     "same name"),
    "deep": ("llb-db", "a.json", b"[" * 100_000, ""),
    "os printed by Python": ("llb-os", "a.json", json.dumps(
        {"0": SHELL | {"evaluation_info": str(SHELL["evaluation_info"])}}).encode(),
        "os_interaction_data.json"),
    "os of Python": ("llb-os", "a.json", json.dumps({"0": SHELL | {
        "initialization_command_item": {"command_name": "python", "script": "x"}}}).encode(),
        "command_name"),
    "os without instruction": ("llb-os", "a.json",
                               json.dumps({"0": SHELL | {"instruction": ""}}).encode(),
                               "instruction"),
    "bcb is no JSON": ("bcb", "a.jsonl", b"{", "line 1"),
    "bcb without tests": ("bcb", "a.jsonl", lines(PROGRAM | {"test": "x = 1"}),
                          "no class TestCases"),
    "bcb twice": ("bcb", "a.jsonl", lines(PROGRAM, PROGRAM), "was there before"),
    "hle is no JSON": ("hle", "a.jsonl", b"question: x", "line 1"),
    "hle without answer": ("hle", "a.jsonl", lines(QUESTION | {"answer": ""}), "line 1, answer"),
    "hle twice": ("hle", "a.jsonl", lines(QUESTION, QUESTION), "was there before"),
    "hle with a file as picture": ("hle", "a.jsonl", lines(QUESTION | {"image": "cat.png"}),
                                   "data URL"),
    "hle damaged": ("hle", "a.parquet", b"PAR1 and no more", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_holds_no_tasks_is_one_sentence_and_nothing_is_written(tmp_path, what):
    environment, name, content, said = FILES[what]
    (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    words = ["stream", "--suite", environment, "--path", tmp_path / name]
    words += ["--judge", "openai:http://127.0.0.1:9/v1#m"] if environment == "hle" else []
    wrong = refused(*words, "--runs", tmp_path / "runs")
    assert name in wrong and re.search(re.escape(said), wrong), wrong
    assert contents(tmp_path) == before and not (tmp_path / "runs").exists()


def test_there_are_twenty_of_each():
    assert len({*SPOILT}) >= 20 and len(FILES) >= 20
