"""`ask` with an agent that keeps a store."""

import json
import re
from pathlib import Path

from test_ask import alone, run, scripted  # noqa: F401  alone is a fixture
from test_store import read_store

PLACE = re.compile(r"(\w+): I am in (\w+)\.")
STORE = "--model tiny --agent memupdate --chunk-tokens 200 --call-tokens 400 --final-tokens 99"
STORE = [*STORE.split(), "--memory-budget", "9"]


def call(**arguments) -> str:
    body = json.dumps({"name": "manage_memory", "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


def keeper(asked: list):
    """Return a policy that keeps the place of everybody, and answers from what is stored."""

    def script(prompt):
        asked.append(prompt)
        if prompt.final:
            who = re.search(r"Where is (\w+)\?", prompt.text)[1]
            known = re.findall(rf"{who} is in (\w+)", prompt.memory)
            return f"\\boxed{{{known[0] if known else 'unknown'}}}"
        if "None yet." not in prompt.text:
            return ""  # the calls of this section were made
        calls = []
        for who, place in PLACE.findall(prompt.section.replace("\n ", "\n")):
            old = re.search(rf"\[(m\d+)\][^\n]* {who} is in ", prompt.memory)
            change = dict(operation="update", memory_id=old[1]) if old else dict(operation="create")
            calls.append(call(**change, content=f"{who} is in {place}."))
        return "".join(calls)

    return script


def test_a_text_is_read_by_section_and_its_entries_have_no_date(monkeypatch, codec):
    Path("notes.txt").write_text("Ann: I am in Oslo.\n" + "It rained all day. " * 40
                                 + "\nAnn: I am in Rome.\n")  # fmt: skip
    scripted(monkeypatch, codec, keeper(asked := []))
    said = run("notes.txt", "Where is Ann?", *STORE, "--name", "r")
    n = len({str(prompt.section) for prompt in asked if not prompt.final})
    assert n > 2 and "answer: Rome" in said and f", {n} sections, about" in said
    numbers = [int(k) for k in re.findall(r"^section (\d+):", said, re.MULTILINE)]
    assert numbers[0] == 1 and numbers[-1] == n  # however many turns a section has
    lines = Path("runs/r/store.jsonl").read_text(encoding="utf-8").splitlines()
    (entry,) = read_store(lines).snapshot().entries
    assert (entry.text, entry.date, entry.version) == ("Ann is in Rome.", None, 2)
    assert "What was kept: runs/r/store.jsonl" in said.splitlines()
    page = Path("runs/r/report.html").read_text()
    assert "Ann is in Rome." in page and "graded" not in page
