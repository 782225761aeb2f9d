"""`ask` with an agent that keeps a store: of a text, of chats."""

import json
import re
from pathlib import Path

import pytest
from test_ask import alone, run, scripted, turns_of  # noqa: F401  alone is a fixture
from typer.testing import CliRunner

import cli
from agents.store import Store

PLACE = re.compile(r"(\w+): I am in (\w+)\.")
STORE = "--model tiny --agent memupdate --chunk-tokens 512 --call-tokens 400 --final-tokens 99"
STORE = [*STORE.split(), "--memory-budget", "9"]


def whatsapp(*said: str) -> str:
    """Write an export of a message a day."""
    return "\n".join(f"[{k}.03.24, 10:00:00] {words}" for k, words in enumerate(said, 13))


CHAT = whatsapp("Ann: I am in Oslo.", "Bo: I am in Lima.", "Ann: \u200eimage omitted",
                "Ann: I am in Rome.")  # fmt: skip


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
            return ""  # the calls of this session were made
        calls = []
        for who, place in PLACE.findall(prompt.section.replace("\n ", "\n")):
            old = re.search(rf"\[(m\d+)\][^\n]* {who} is in ", prompt.memory)
            change = dict(operation="update", memory_id=old[1]) if old else dict(operation="create")
            if day := old and re.match(r"\d{4}-\d\d-\d\d", prompt.section.strip()):
                change["date"] = day[0]  # else an update leaves the old one
            calls.append(call(**change, content=f"{who} is in {place}."))
        return "".join(calls)

    return script


def asking(monkeypatch, codec, *words, name="r", agent=STORE, **more):
    """Ask with the keeper; return what was said and its prompts."""
    asked = []
    scripted(monkeypatch, codec, keeper(asked))
    return run(*words, *agent, "--name", name, **more), asked


def stored(name="r") -> Store:
    return Store.from_jsonl(Path("runs", name, "store.jsonl"))


def sections(asked) -> list[str]:
    """Return what was read, each section once, blanks before a first word dropped."""
    read = [str(p.section).replace("\n ", "\n").strip() for p in asked if not p.final]
    return list(dict.fromkeys(read))


def test_a_chat_is_read_session_by_session_and_the_store_is_dated(monkeypatch, codec):
    Path("chat.txt").write_text(CHAT)
    said, asked = asking(monkeypatch, codec, "chat.txt", "Where is Ann?")
    assert sections(asked) == [
        "2024-03-13 (Wed) 10:00\nAnn: I am in Oslo.",
        "2024-03-14 (Thu) 10:00\nBo: I am in Lima.",
        "2024-03-16 (Sat) 10:00\nAnn: I am in Rome.",
    ]
    entries = stored().snapshot().entries
    assert [(e.id, e.date, e.text, e.version) for e in entries] == [
        ("m1", "2024-03-16", "Ann is in Rome.", 2),
        ("m2", "2024-03-14", "Bo is in Lima.", 1),
    ]
    assert (entries[1].session, entries[1].evidence) == (2, ("S2",))
    lines = said.splitlines()
    assert lines[1] == (
        "chat.txt is a chat of Ann, Bo; messages: 3; sessions: 3; left out without words: 1."
    )
    (size,) = [line for line in lines if line.startswith("3 sessions, ")]
    assert ", 3 sections, about" in size
    assert "answer: Rome" in lines and "What was kept: runs/r/store.jsonl" in lines
    assert "Found in session 3 (2024-03-16): 'Ann: I am in Rome.'" in said
    where = [turn["where"] for turn in turns_of("r")]
    assert where == [*2 * ["session 1 (2024-03-13)"], *2 * ["session 2 (2024-03-14)"],
                     *2 * ["session 3 (2024-03-16)"], ""]  # fmt: skip
    shown = CliRunner().invoke(cli.app, ["memory", "show", "runs/r/store.jsonl"]).output
    assert "Ann is in Rome." in shown and "2024-03-16" in shown
    page = Path("runs/r/report.html").read_text()
    assert "Ann is in Rome." in page and "2024-03-14" in page and "graded" not in page


@pytest.mark.parametrize("form", ["telegram", "lines"])
def test_the_other_forms_of_a_chat_give_the_same_store(monkeypatch, codec, form):
    Path("chat.txt").write_text(CHAT)
    asking(monkeypatch, codec, "chat.txt", "Where is Bo?")
    messages = [
        {"type": "message", "date": f"2024-03-{day}T10:00:00", "from": who, "text": text}
        for day, who, text in ((13, "Ann", "I am in Oslo."), (14, "Bo", "I am in Lima."),
                               (16, "Ann", "I am in Rome."))
    ]  # fmt: skip
    text = json.dumps({"name": "Trip", "messages": messages})
    Path("x").write_text(text if form == "telegram" else "\n".join(map(json.dumps, messages)))
    said, _ = asking(monkeypatch, codec, "x", "Where is Bo?", name="x")
    assert "answer: Lima" in said
    assert stored("x").snapshot().entries == stored("r").snapshot().entries


def test_other_agents_read_a_chat_as_a_text_with_dates(monkeypatch, codec):
    Path("chat.txt").write_text(CHAT)
    full = "--model tiny --agent full --final-tokens 99".split()
    _, asked = asking(monkeypatch, codec, "chat.txt", "Where is Ann?", agent=full)
    assert "2024-03-14 (Thu) 10:00\n Bo: I am in Lima.\n\n 2024-03-16 (Sat)" in re.sub(
        r"\n(?=\w)", "\n ", str(asked[-1].section)
    )
    facts = "--model tiny --agent facts --final-tokens 99 --answer-k 2".split()
    _, asked = asking(monkeypatch, codec, "chat.txt", "Where is Bo?", name="f", agent=facts)
    assert "2024-03-14 Bo: I am in Lima." in asked[-1].memory  # its messages are the entries


def test_a_text_is_read_by_section_and_its_entries_have_no_date(monkeypatch, codec):
    Path("notes.txt").write_text("Ann: I am in Oslo.\n" + "It rained all day. " * 40
                                 + "\nAnn: I am in Rome.\n")  # fmt: skip
    small = [*STORE, "--chunk-tokens", "200"]
    said, asked = asking(monkeypatch, codec, "notes.txt", "Where is Ann?", agent=small)
    assert len(sections(asked)) > 2 and "answer: Rome" in said
    (entry,) = stored().snapshot().entries
    assert (entry.text, entry.date, entry.version) == ("Ann is in Rome.", None, 2)
    assert f", {len(sections(asked))} sections, about" in said


def test_a_text_beside_a_chat_is_read_too(monkeypatch, codec):
    Path("chat.txt").write_text(CHAT)
    Path("notes.txt").write_text("Cy: I am in Nice.")
    said, asked = asking(monkeypatch, codec, "chat.txt", "notes.txt", "Where is Cy?")
    assert sections(asked)[-1] == "notes.txt\nCy: I am in Nice." and "answer: Nice" in said
    assert [e.date for e in stored().snapshot().entries] == ["2024-03-16", "2024-03-14", None]


def test_a_damaged_chat_is_read_as_text_and_this_is_said(monkeypatch, codec):
    Path("chat.txt").write_text(CHAT.replace("14.03", "14.13"))
    said, asked = asking(monkeypatch, codec, "chat.txt", "Where is Bo?")
    assert "read as text: '14.13.24, 10:00:00' is no date and time." in said
    assert "answer: Lima" in said and len(sections(asked)) == 1
