"""`report`: the page of any run, whatever state it is in."""

import json

import pytest
from run_folders import record, row, shown
from typer.testing import CliRunner

import cli
from agents.bank import Bank
from commands.report import report
from commands.stream import run_stream
from config.errors import UserError
from config.options import StreamConfig


def test_the_command_writes_the_page_and_opens_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    (tmp_path / "config.yaml").write_text("eval: {suite: own}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row()) + "\n")
    done = CliRunner().invoke(cli.app, ["report", str(tmp_path), "--open"])
    page = tmp_path / "report.html"
    assert str(page) in done.output and "by sessions" in shown(page).text
    assert opened == [page.as_uri()]


@pytest.mark.parametrize(("name", "content"), [
    ("", ""), ("notes.txt", ""), ("config.yaml", "ask: {}\n"), ("summary.json", "{}"),
    ("config.yaml", "stream: {name: x}\n"), ("config.yaml", "stream: {name: x}\nagent: 5\n"),
    ("config.yaml", "grpo: {steps: x}\n"),
])  # fmt: skip
def test_what_has_no_page_is_told_in_one_sentence(tmp_path, name, content):
    folder = tmp_path / "run"
    if name:
        folder.mkdir()
        (folder / name).write_text(content)
    with pytest.raises(UserError) as told:
        report(folder)
    assert "\n" not in str(told.value) and not (folder / "report.html").exists()


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    settings = dict(suite="bandit", epochs=2, n=6, batch=3, engine="rehearsed")
    runs = str(tmp_path_factory.mktemp("runs"))
    return run_stream(StreamConfig(name="s", runs=runs, arms=("none", "rag"), **settings), {})


def test_a_stream_has_the_same_page_from_outside_and_its_banks_are_opened_to_be_read(
    stream, monkeypatch
):
    opened, connect = [], Bank._connect

    def noted(self, place, *how):
        opened.append(place)
        return connect(self, place, *how)

    monkeypatch.setattr(Bank, "_connect", noted)
    page, before = stream / "report.html", {p: p.read_bytes() for p in stream.glob("*.db*")}
    written = page.read_text()
    page.unlink()
    assert report(stream) == page and page.read_text() == written
    assert all("?mode=ro" in path for path in opened if path != ":memory:") and opened
    assert before == {p: p.read_bytes() for p in stream.glob("*.db*")}


def test_a_stream_that_was_killed(stream, tmp_path):
    for path in stream.iterdir():
        if path.name not in ("report.html", "summary.json", "rag.db", "rag.jsonl"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "none.jsonl").open("a") as file:
        file.write('{"epoch": 2, "torn')
    text = shown(report(tmp_path)).text
    assert "Stopped: none, method 1 of 2, epoch 2 of 2, 6 tasks of it done." in text
    assert "50.0 % solved with none" in text and not (tmp_path / "summary.json").exists()


def test_a_reading_keeps_its_page_which_is_made_anew_if_it_was_lost(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {agent: memagent}\nask: {}\n")
    (tmp_path / "transcripts.jsonl").write_text(json.dumps(record(id="a&b.txt")) + "\n")
    text = shown(report(tmp_path)).text
    assert "Answer: Lima" in text and "read a&b.txt" in text
    (tmp_path / "report.html").write_text("its own")
    assert report(tmp_path).read_text() == "its own"
