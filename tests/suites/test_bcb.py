"""BigCodeBench's file and what its tasks carry; verdicts are in real_bcb.py."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import opened

from config.errors import UserError
from suites import bcb
from suites.bcb import Interpreter, Programs
from tasks.sandbox import Ran, fence


def item(prompt: str, arguments: str, gold: str, tests: str, *libs: str, setup: str = "") -> dict:
    """Compose a record: `gold` is the body of the function, `tests` the methods of the class."""
    imports = "".join(f"import {lib}\n" for lib in libs)
    signature = f"def task_func({arguments}):\n"
    body = "".join(f"    {line}\n" for line in gold.strip().split("\n"))
    methods = "".join(f"    {line}\n" if line else "\n" for line in tests.strip().split("\n"))
    return {
        "instruct_prompt": f"{prompt}\nYou should write self-contained code starting with:\n"
                           f"```\n{imports}{signature}```",
        "complete_prompt": f'{imports}{signature}    """{prompt}"""\n',
        "canonical_solution": body,
        "test": f"import unittest\n{setup}\nclass TestCases(unittest.TestCase):\n{methods}",
        "entry_point": "task_func",
        "libs": repr([*libs]),
    }  # fmt: skip


ITEM = item(
    "Write rows to a CSV file at path.", "rows, path", "return 0",
    "def test_file(self): self.assertEqual(task_func([['a']], 'x'), 0)", "csv",
)  | {"task_id": "Own/0"}  # fmt: skip
OTHER = {**ITEM, "task_id": "Own/1"}
RIGHT = "def task_func(k): return k + 1"
ONE = "def test_one(self): self.assertEqual(task_func(1), 2)"
WRONG = "def test_base(self): self.assertEqual(task_func(1), 3)"
PROMPT = "import math\ndef task_func(k):\n"


def case_file(*methods: str, base: str = "unittest.TestCase", before="", after="") -> str:
    """Compose the text of a test file."""
    return f"import unittest\n{before}{class_of('TestCases', base, *methods)}{after}"


def class_of(name: str, base: str, *methods: str) -> str:
    body = "\n".join(methods).replace("\n", "\n    ")
    return f"class {name}({base}):\n    {body}\n"


def heir(*methods: str, inherits: str) -> str:
    """Compose the text of a test file whose class inherits a method."""
    return case_file(*methods, base="Base", before=class_of("Base", "unittest.TestCase", inherits))


def write(path, items) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in items))


def response(environment: Programs, id: str, action: str):
    episode = environment.reset(id)
    try:
        return episode.step(action)
    finally:
        episode.close()


@pytest.fixture
def path(tmp_path):
    write(path := tmp_path / "bcb.jsonl", [ITEM, OTHER])
    return path


@pytest.fixture
def unconfined(monkeypatch):
    monkeypatch.setattr(bcb, "lacking", lambda: [])


def test_the_prompts_code_comes_first_where_a_file_has_it(path, monkeypatch, unconfined):
    """And what is judged with it is another task."""
    ran, digests = [], set()
    monkeypatch.setattr(Interpreter, "judged", lambda *given: ran.append(given[1]) or ({}, "", ""))
    for more in ({}, {"code_prompt": PROMPT}):
        write(path, [{**ITEM, **more, "task_id": "0"}])
        environment = Programs(path, sys.executable)
        response(environment, "0", fence(RIGHT, "python"))
        digests.add(environment.tasks()[0].digest)
    assert ran[0] == f"{RIGHT}\n\n{ITEM['test']}" and len(digests) == 2
    assert ran[1] == f"{PROMPT}\n    pass\n{ran[0]}"


def test_tasks_carry_what_is_asked_and_a_fingerprint_of_the_tests(path, unconfined):
    environment = Programs(path, sys.executable)
    tasks = environment.tasks()
    assert [task.id for task in tasks] == ["Own/0", "Own/1"]
    # of all versions: a stored row is found again by it
    assert tasks[0].digest == "9e8206ca934dc759"
    prompt = ITEM["instruct_prompt"]
    assert prompt == tasks[0].question == tasks[0].intent == environment.reset("Own/0").observation
    assert tasks[0].skills == ("csv",) and tasks[0].dataset == "bcb"
    assert environment.most_steps == 1
    assert "60 seconds" in environment.instructions.replace("\n", " ")
    write(path, [{**ITEM, "test": ITEM["test"] + "\n"}, OTHER])
    digests = [task.digest for task in Programs(path, sys.executable).tasks()]
    changed = [a != b.digest for a, b in zip(digests, tasks, strict=True)]
    assert changed == [True, False]


def test_tasks_of_a_missing_library_are_refused_or_left_out(path, capsys, unconfined):
    write(path, [ITEM, missing := {**OTHER, "libs": "['csv', 'no_such.library', '.']"}])
    with pytest.raises(UserError, match=r"1 of 2 tasks .* need \., no_such.library"):
        Programs(path, sys.executable)
    (ready,) = opened("bcb", str(path), leave_out=True).tasks()
    said = " ".join(capsys.readouterr().out.split())
    assert ready.id == "Own/0" and "1 tasks are left out, which need ., no_such.library." in said
    write(path, [missing])
    with pytest.raises(UserError):
        Programs(path, sys.executable, skip=True)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/bin/false", "/", "whole"])
def test_what_is_no_interpreter_or_needs_the_whole_machine_is_refused(tmp_path, python):
    """The folder of the last one would be shown to what models write."""
    if python == "whole":
        (python := tmp_path / "python").write_text('#!/bin/sh\necho \'["/x", ["/", "/"], []]\'\n')
        python.chmod(0o755)
    with pytest.raises(UserError):
        Interpreter.from_program(python)


def test_what_is_missing_is_told_before_the_first_task(path, monkeypatch):
    monkeypatch.setattr(bcb, "lacking", lambda: [("bwrap", "apt-get install bubblewrap")])
    with pytest.raises(UserError, match="bcb needs bwrap: apt-get install bubblewrap"):
        Programs(path, sys.executable)


def test_an_error_of_the_machine_is_a_failure(path, monkeypatch, unconfined):
    def full(*given, **more):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(bcb, "confine", full)
    step = response(Programs(path, sys.executable), "Own/0", "```python\npass\n```")
    assert step.failure == "crashed: Resource temporarily unavailable" and step.reward == -1.0


def test_a_verdict_is_whatever_the_code_has_written_there(path, monkeypatch, unconfined):
    for said, reward, good in (
        ('{"a": true, "b": 1}', 1.0, "2 of 2"), ('{"a": "", "b": [1]}', -1.0, "1 of 2"),
        ("{}", -1.0, "0 of 0"), ("5", -1.0, "0 of 0"), ("[" * 10**5, -1.0, "0 of 0"),
    ):  # fmt: skip
        monkeypatch.setattr(bcb, "confine", lambda *_, said=said: Ran("", said, 0, 1.0))
        step = response(Programs(path, sys.executable), "Own/0", "```python\npass\n```")
        assert step.reward == reward and good in step.observation


def broken(**fields) -> str:
    return json.dumps({**ITEM, **fields})


@pytest.mark.parametrize(("text", "field"), [
    (None, "No file"), ("", "holds no task"), ("{", "line 1"), (b"\xff\xfe", "line 1"),
    (broken() + "\n" + "[" * 100_000, "line 2"), (broken() + "\n5", "line 2"),
    (broken(task_id=3), "line 1, task_id"),
    (broken(instruct_prompt=" "), "line 1, instruct_prompt"),
    (broken(test=None), "line 1, test"), (broken(test="class Other: pass"), "line 1, test"),
    (broken(entry_point="a b"), "line 1, entry_point"),
    (broken(code_prompt=["x"]), "line 1, code_prompt"), (broken(libs="['a"), "line 1, libs"),
    (broken(libs=[1]), "line 1, libs"), (broken(libs="5"), "line 1, libs"),
    (broken() + "\n" + broken(), "Own/0 was there before"),
])  # fmt: skip
def test_a_file_that_is_wrong_is_one_sentence(tmp_path, text, field, unconfined):
    path = tmp_path / "bcb.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        Programs(path, sys.executable)
    assert str(path) in str(caught.value) and field in str(caught.value)
    assert "\n" not in str(caught.value)
