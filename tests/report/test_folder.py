"""The page of a run at any time: going on, killed in the middle of a line, or finished."""

import json
import re

import pytest
from run_folders import evaluation, folder_of, lines, row, shown, step, training, trajectory

from config.errors import UserError
from config.locks import writing
from memagent import Agent
from report import records, runlog
from report.folder import read_run
from report.page import write_report

# ---------------------------------------------------------------- a training


def test_a_training_that_was_killed_in_the_middle_of_a_line(tmp_path):
    folder = training(tmp_path / "run")
    with (folder / "metrics.csv").open("a") as file:
        file.write(",".join(map(str, step(12, step_s=25.5).values()))[:-1])  # half a number
    report = shown(write_report(folder))
    assert "Stopped: step 12 of 50." in report.text
    assert read_run(folder).summary["reward"] == pytest.approx(0.5 + 6.5 / 64)
    assert "<h1>Training run</h1>" in report.html


def test_a_training_that_goes_on_says_so_and_then_no_longer(tmp_path):
    folder = training(tmp_path / "run")
    with writing(folder, "The run"):
        for running, word in ((None, "Running"), (True, "Running"), (False, "Stopped")):
            report = shown(write_report(folder, running=running))
            assert f"{word}: step 12 of 50." in report.text
        training(folder, steps=50)
        report = shown(write_report(folder))
    assert "step 50" not in report.text and "Running" not in report.text


def test_a_training_before_its_first_step_and_one_that_was_resumed(tmp_path):
    folder = training(tmp_path / "run", steps=0)
    assert "Stopped: step 0 of 50" in shown(write_report(folder)).text
    (folder / "metrics.csv").unlink()
    assert "Stopped: step 0 of 50." in shown(write_report(folder)).text
    # a summary of fewer steps than there are now
    training(folder, steps=20)
    (folder / "summary.json").write_text(json.dumps(runlog.summary(folder)))
    training(folder, steps=30)
    assert read_run(folder).summary["steps"] == 30


def test_a_training_shows_readings_of_its_last_recorded_step_right_and_wrong(tmp_path):
    folder = training(tmp_path / "run")
    writer = runlog.TrajectoryWriter(folder / "trajectories.jsonl.gz")
    for k, rewards in enumerate([(0, 1), (0, 0.5, 1, 0)]):
        made = []
        for sample, reward in enumerate(rewards):
            made.append(trajectory(k, sample, reward))
        writer.write([runlog.packed(made, Agent(), k)])
    with (folder / "trajectories.jsonl.gz").open("ab") as file:
        file.write(records.MEMBER + b"torn")
    assert [(r["step"], r["sample"]) for r in read_run(folder).records] == [
        (1, k) for k in range(4)
    ]
    page = shown(write_report(folder))
    listed = re.findall('<details class="reading" data-verdict="([^"]*)"', page.html)
    assert listed == ["right"] * 4 and "training step 0" not in page.html.split("Readings")[1]


# ---------------------------------------------------------------- an evaluation


def test_an_evaluation_that_is_partly_there(tmp_path):
    rows = [row("memagent", id=str(i), length=n) for n in (4, 8) for i in range(10)]
    folder = evaluation(tmp_path / "eval", [*rows, *rows[:3]])
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"agent": "full", "ques')
    report = shown(write_report(folder))
    assert "Stopped: 20 answers." in report.text
    assert "100.0 72–100, n 10" in report.text
    assert "<h1>Evaluation eval</h1>" in report.html
    assert (folder / "table.md").exists() and not (folder / "summary.json").exists()
    with writing(folder, "It"):
        assert "Running: 20 answers." in shown(write_report(folder)).text
    other = evaluation(tmp_path / "files", rows, suite="ruler-hqa", data=["a.json"])
    report = shown(write_report(other))
    assert "Stopped: 20 answers." in report.text and "by documents" in report.text


def test_an_evaluation_without_an_answer_yet(tmp_path):
    folder = evaluation(tmp_path / "eval", [])
    with writing(folder, "It"):
        assert "Running: 0 answers" in shown(write_report(folder)).text
    (folder / "rows.jsonl").unlink()
    assert "Stopped: 0 answers." in shown(write_report(folder)).text


def test_a_summary_stands_unless_there_are_more_rows(tmp_path):
    rows = [row("memagent", id=str(i)) for i in range(4)]
    folder = evaluation(folder_of(tmp_path / "eval", rows), rows)

    def headline(*rows, stored=True):
        (folder / "rows.jsonl").write_text(lines(rows))
        kept = (folder / "summary.json").read_bytes()
        if not stored:
            (folder / "summary.json").unlink()
        run = read_run(folder)
        (folder / "summary.json").write_bytes(kept)
        return run.status, [cell["n"] for cell in run.summary["cells"]]

    assert headline(*rows) == ("", [4])
    again = [r | {"settings": "new"} for r in rows[:3]]
    assert headline(*rows, *again) == ("", [4])
    assert headline(*rows, *again, stored=False)[1] == [3]  # the latest ones alone
    status, n = headline(*rows, row("memagent", id="5"))
    assert "Stopped: 5 answers" in status and n == [5]
    assert headline(*rows, row("full"))[1] == [4, 1]


def test_rows_are_read_once(tmp_path, monkeypatch):
    """Also for the page of a finished evaluation, which lists them all."""
    rows = [row("memagent", id=str(i)) for i in range(4)]
    folder = evaluation(folder_of(tmp_path / "eval", rows), rows)
    parsed, parse = [], json.loads
    monkeypatch.setattr(
        "report.rows.json.loads", lambda text, **_: parsed.append(text) or parse(text)
    )
    assert "In numbers" in shown(write_report(folder)).text
    assert len([text for text in parsed if b'"settings": "s"' in bytes(text)]) == len(rows)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("rows.jsonl", "{}\n", r"rows\.jsonl is damaged"), ("rows.jsonl", "{\n", "line 1 is damaged"),
    ("config.yaml", ": [", "holds no run"), ("notes", "", "holds no run"),
    *(("summary.json", text, r"summary\.json is damaged")
      for text in ("{", "[1]", "{}", '{"unit": "", "accuracy": {}}')),
])  # fmt: skip
def test_what_is_damaged_or_no_run_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_run(tmp_path)
