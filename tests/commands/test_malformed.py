"""Files that are no bank or hold no tasks, through the commands: one sentence, nothing written."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from suites.llb_db import OWN


def contents(folder: Path) -> dict[str, bytes]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path): raw for path, raw in files.items()}


def refused(*words) -> str:
    """The one sentence of a command that cannot be done."""
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("memagent: ") and last.endswith(".")
    return last


# ---------------------------------------------------------------- banks


def test_a_file_that_is_no_bank_is_one_sentence_before_anything_is_written(tmp_path):
    (tmp_path / "memrl.db").write_bytes(b"these are notes, no bank\n" * 40)
    before = contents(tmp_path)
    words = ["stream", "--runs", tmp_path.parent, "--name", tmp_path.name]
    assert "memrl.db" in refused(*words, "--arms", "memrl")
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


def shell(**changes) -> bytes:
    return json.dumps({"0": SHELL | changes}).encode()


def lines(*records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


TWICE = ITEM["table_info"]["column_info_list"][:1] * 5
PYTHON = {"initialization_command_item": {"command_name": "python", "script": "x"}}
FILES = {
    # suite, ending of the file, content
    "text": ("llb-db", "json", b"these are notes"),
    "noise": ("llb-db", "json", bytes(range(256))),
    "cut gzip": ("llb-db", "json.gz", gzip.compress(db())[:200]),
    "list": ("llb-db", "json", b"[1, 2]"),
    "nothing": ("llb-db", "json", b"{}"),
    "empty file": ("llb-db", "json", b""),
    "item is a number": ("llb-db", "json", b'{"7": 5}'),
    "printed by Python": ("llb-db", "json", db(answer_info=str(ITEM["answer_info"]))),
    "another environment's": ("llb-db", "json", json.dumps({"0": SHELL}).encode()),
    "two answers": ("llb-db", "json", db(answer_info=ITEM["answer_info"] | {"md5": "0" * 32})),
    "row too short": ("llb-db", "json", table(row_list=[[1]])),
    "infinite cell": ("llb-db", "json", table(row_list=[[float("inf"), "", "", 1, 1]])),
    "column twice": ("llb-db", "json", table(column_info_list=TWICE)),
    "deep": ("llb-db", "json", b"[" * 100_000),
    "os printed by Python": (
        "llb-os",
        "json",
        shell(evaluation_info=str(SHELL["evaluation_info"])),
    ),
    "os of Python": ("llb-os", "json", shell(**PYTHON)),
    "os without instruction": ("llb-os", "json", shell(instruction="")),
    "bcb is no JSON": ("bcb", "jsonl", b"{"),
    "bcb without tests": ("bcb", "jsonl", lines(PROGRAM | {"test": "x = 1"})),
    "bcb twice": ("bcb", "jsonl", lines(PROGRAM, PROGRAM)),
    "hle is no JSON": ("hle", "jsonl", b"question: x"),
    "hle without answer": ("hle", "jsonl", lines(QUESTION | {"answer": ""})),
    "hle twice": ("hle", "jsonl", lines(QUESTION, QUESTION)),
    "hle with a file as picture": ("hle", "jsonl", lines(QUESTION | {"image": "cat.png"})),
    "hle damaged": ("hle", "parquet", b"PAR1 and no more"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_holds_no_tasks_is_one_sentence_and_nothing_is_written(tmp_path, what):
    suite, ending, content = FILES[what]
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    before = contents(tmp_path)
    words = ["stream", "--suite", suite, "--path", path, "--runs", tmp_path / "runs"]
    words += ["--judge", "openai:http://127.0.0.1:9/v1#m"] if suite == "hle" else []
    assert path.name in refused(*words)
    assert contents(tmp_path) == before and not (tmp_path / "runs").exists()
