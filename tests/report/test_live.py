"""The page of a run that goes on: when it is written, and what a failure does."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cli import app
from report import live, page


@pytest.fixture
def written(monkeypatch):
    """Return the `running` of each page that was asked for; the clock stands still."""
    asked = []
    monkeypatch.setattr(page, "write_report", lambda folder, title, running: asked.append(running))
    monkeypatch.setattr(live.time, "monotonic", lambda: 100.0)
    return asked


def test_a_page_is_written_when_its_time_has_come(written, monkeypatch, tmp_path, capsys):
    run = live.Live(tmp_path, every=20.0)
    run.begin()
    run.begin()
    assert capsys.readouterr().out.count("report.html") == 1
    run.refresh()
    assert not written and not run.written  # what ends within a moment is written once
    for now, n in ((100.0 + live.SOON, 1), (121.0, 1), (122.0, 2)):
        monkeypatch.setattr(live.time, "monotonic", lambda now=now: now)
        run.refresh()
        assert written == [True] * n
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert written[-1] is False  # it says that it was stopped


def test_a_page_that_cannot_be_written_is_said_once_and_ends_no_run(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(page, "write_report", fail)
    run = live.Live(tmp_path)
    run.write(running=True)
    run.write()
    assert capsys.readouterr().out.count("the disk is full") == 1


def test_ctrl_c_while_the_page_loads_a_library_is_no_failure_of_the_page(monkeypatch, tmp_path):
    def interrupted(*_):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(page, "write_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        live.Live(tmp_path).write(running=True)


def test_a_training_and_an_evaluation_name_and_write_their_page_while_they_go_on(
    monkeypatch, tmp_path
):
    asked, write = [], page.write_report

    def noted(folder, title, running):
        asked.append(running)
        return write(folder, title, running)

    monkeypatch.setattr(page, "write_report", noted)
    monkeypatch.setattr(live, "SOON", 0.0)
    small = "--tasks-per-step 1 --group-size 2 --lengths 1 --save-every 1 --micro-tokens 512"
    for words in (
        f"train --name t --steps 1 {small}",
        "eval --name e --agents none --lengths 1 --n 2 --temperatures 0",
    ):
        asked.clear()
        told = CliRunner().invoke(app, [*words.split(), "--runs", str(tmp_path)])
        assert told.exit_code == 0, told.output
        folder = tmp_path / words.split()[2]
        first = told.output.replace("\n", "").index("Live report:")
        assert first < told.output.replace("\n", "").index(
            "none T=0" if "eval" in words else "step    1"
        )
        assert asked[0] is True and asked[-1] is False
        assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
