"""`report`: the page of any run, whatever state it is in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_page import Page, record, row
from typer.testing import CliRunner

import cli
from agents import bank
from commands.report import report
from commands.stream import run_stream
from config.errors import UserError
from config.options import StreamConfig

ROOT = Path(__file__).parents[2]


def invoke(*words):
    return CliRunner().invoke(cli.app, [*map(str, words)])


def page_of(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_command_writes_the_page_and_opens_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    (tmp_path / "config.yaml").write_text("eval: {suite: own}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row()) + "\n")
    assert invoke("report", tmp_path).output == f"The page is {tmp_path / 'report.html'}.\n"
    assert opened == [] and "in 4 sessions" in page_of(tmp_path).text
    invoke("report", tmp_path, "--open")
    assert opened == [(tmp_path / "report.html").as_uri()]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("", "", "There is no folder"),
        ("notes.txt", "", "holds no run"),
        ("config.yaml", "ask: {}\n", "holds no reading that can be shown"),
        ("config.yaml", "stream: {name: x}\n", "has worked on no task yet"),
        ("summary.json", "{}", "is damaged or of another kind"),
    ],
)
def test_what_has_no_page_is_told_in_one_sentence(tmp_path, name, content, said):
    folder = tmp_path / "run"
    if name:
        folder.mkdir()
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=said) as told:
        report(folder)
    assert str(told.value).count("\n") == 0
    assert not (folder / "report.html").exists()


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    config = StreamConfig(
        name="s", runs=str(runs), suite="bandit", epochs=2, n=6, batch=3,
        engine="rehearsed", arms=("none", "rag"),
    )  # fmt: skip
    return run_stream(config, {})


def test_a_stream_has_the_same_page_from_outside(stream):
    page = stream / "report.html"
    before = page.read_text()
    page.unlink()
    assert report(stream) == page and page.read_text() == before


def test_a_stream_that_was_killed(stream, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    for path in stream.iterdir():
        if path.name not in ("report.html", "summary.json", "rag.db", "rag.jsonl"):
            (folder / path.name).write_bytes(path.read_bytes())
    with (folder / "none.jsonl").open("a") as file:
        file.write('{"epoch": 2, "torn')
    text = page_of(report(folder).parent).text
    assert "Stopped: none, arm 1 of 2, epoch 2 of 2, 6 tasks of it done." in text
    assert "none solved 50%" in text and "Ways of remembering" in text
    assert not (folder / "summary.json").exists()


def test_the_banks_of_a_stream_are_copied_and_not_opened_to_be_written(stream, monkeypatch):
    opened, connected = [], bank._connected
    monkeypatch.setattr(
        bank, "_connected", lambda path, *rest: opened.append(str(path)) or connected(path, *rest)
    )
    before = {path.name: path.read_bytes() for path in stream.glob("*.db*")}
    report(stream)
    read = [path.partition("?mode=ro")[0][-7:] for path in opened if path != ":memory:"]
    assert read == ["none.db", "/rag.db"] and len(opened) == 4 and "rwc" not in str(opened)
    assert all("?mode=ro" in path for path in opened[::2])
    assert before == {path.name: path.read_bytes() for path in stream.glob("*.db*")}


def reading(folder, turns):
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {agent: memagent}\nask: {}\nagent: {form: boxed}\n")
    about = {"question": "Where is <b>?", "said": "by <i>", "document": {"title": "a&b.txt"}}
    (folder / "document.json").write_text(json.dumps(about))
    lines = [json.dumps(turn | {"where": "page 3", "seconds": 0.1}) for turn in turns]
    (folder / "turns.jsonl").write_text("\n".join([*lines, '{"torn']))
    return folder


def test_a_reading_that_is_not_finished(tmp_path):
    turns = record(("none", "Anna met Otto.", "Anna met Otto."))["turns"]
    folder = reading(tmp_path / "r", turns[:-1])
    page = page_of(report(folder).parent)
    assert "Stopped: 2 sections have been read. read a&b.txt by by <i>" in page.text
    assert "not answered yet Where is <b>?" in page.text and "section 2 of 2, page 3" in page.text
    assert "refresh" not in page.html
    code = (
        f"import sys; from pathlib import Path; from report.status import hold; "
        f"hold(Path({str(folder)!r})); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        process.stdout.readline()
        report(folder)
        assert "Running: 2 sections" in page_of(folder).text
        assert 'http-equiv="refresh"' in page_of(folder).html


def test_a_reading_that_is_finished_keeps_its_page(tmp_path):
    folder = reading(tmp_path / "r", record()["turns"])
    (folder / "transcripts.jsonl").write_text("{}\n")
    assert "answered Where is <b>?" in page_of(report(folder).parent).text  # it was lost
    (folder / "report.html").write_text("its own")
    assert report(folder).read_text() == "its own"
