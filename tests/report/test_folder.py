"""The page of a run at any time: going on, killed in the middle of a line, or finished."""

import json
import os
import re

import pytest
from test_counted import trajectory
from test_page import Page, folder_of, row

from config.errors import UserError
from memagent import Agent
from report import records, runlog
from report.folder import read_run
from report.page import rewrite_report, write_report
from report.status import hold, release
from report.training import PLOTS

TRAINING = "run:\n  data: world\n  lengths: [4, 8]\ngrpo:\n  steps: 50\n"
EVALUATION = {
    "suite": "", "data": ["world"], "lengths": [4, 8], "kinds": ["one_fact"], "n": 16,
    "agents": ["memagent", "full"], "temperatures": [1.0, 0.0], "samples": 2,
}  # fmt: skip
COLUMNS = (
    "step,level,reward,reward_se,groups_without_signal,memory_tokens,read_tokens,written_tokens,"
    "computed_tokens,mismatch,mismatch_mean,rollout_s,switch_s,update_s,step_s"
).split(",")


def step(k, **other):
    values = {
        "step": k, "level": 0, "reward": 0.5 + k / 64, "reward_se": 0.05,
        "groups_without_signal": 0.25, "memory_tokens": 40, "read_tokens": 1000,
        "written_tokens": 200, "computed_tokens": 500, "mismatch": 1e-3, "mismatch_mean": 1e-5,
        "rollout_s": 1.5, "switch_s": 0, "update_s": 0.5, "step_s": 2,
    } | other  # fmt: skip
    return ",".join(str(values[name]) for name in values) + "\n"


def training(folder, steps=12, columns=COLUMNS, **other):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(TRAINING)
    text = ",".join([*columns, *other]) + "\n" + "".join(step(k, **other) for k in range(steps))
    (folder / "metrics.csv").write_text(text)
    return folder


def shown(path):
    return Page(path.read_text(encoding="utf-8"))


def evaluation(folder, rows, **other):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps({"eval": EVALUATION | other}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


# ---------------------------------------------------------------- a training


def test_a_training_that_was_killed_in_the_middle_of_a_line(tmp_path):
    folder = training(tmp_path / "run")
    with (folder / "metrics.csv").open("a") as file:
        file.write(step(12, step_s=25.5)[:-2])  # all columns, and half a number
    os.utime(folder / "metrics.csv", (1e9, 1e9))
    report = shown(rewrite_report(folder))
    assert re.search(
        "Stopped: step 12 of 50; nothing has been written since 2001-09-0[89] ", report.text
    )
    assert read_run(folder).summary["reward"] == pytest.approx(0.5 + 6.5 / 64)
    assert "<h1>Training run</h1>" in report.html


def test_a_training_that_goes_on_says_so_and_then_no_longer(tmp_path):
    folder = training(tmp_path / "run")
    hold(folder)
    for write in (write_report, rewrite_report):
        report = shown(write(folder))
        assert re.search(r"Running: step 12 of 50, last written at \d\d:\d\d:\d\d\.", report.text)
    training(folder, steps=50)
    release(folder)
    report = shown(write_report(folder))
    assert "step 50" not in report.text and "Running" not in report.text
    assert "Stopped" not in shown(rewrite_report(folder)).text


def test_a_training_before_its_first_step_and_one_that_was_resumed(tmp_path):
    folder = training(tmp_path / "run", steps=0)
    assert "Stopped: step 0 of 50" in shown(rewrite_report(folder)).text
    (folder / "metrics.csv").unlink()
    assert "Stopped: step 0 of 50." in shown(rewrite_report(folder)).text
    # a summary of fewer steps than there are now
    training(folder, steps=20)
    (folder / "summary.json").write_text(json.dumps(runlog.summary(folder)))
    training(folder, steps=30)
    assert read_run(folder).summary["steps"] == 30


@pytest.mark.usefixtures("rendered")
def test_what_is_known_of_every_step_is_drawn(tmp_path):
    report = shown(rewrite_report(training(tmp_path / "run", peak_gib=7)))
    labels = {*re.findall("<text[^>]*>([^<]*)</text>", report.html)}
    assert labels >= {"one step, 2 standard errors", *PLOTS}
    assert not {"with signal", "switch"} & labels  # a single line, and nothing was switched
    first = report.html.partition("<h2>Result</h2>")[2].partition("</section>")[0]
    assert first.count("<svg") == 1 and "Band: two standard errors" in first


def test_a_training_shows_readings_of_its_last_recorded_step_right_and_wrong(tmp_path):
    folder = training(tmp_path / "run")
    writer = runlog.TrajectoryWriter(folder / "trajectories.jsonl.gz")
    for k, rewards in enumerate([(0, 1), (0, 0.5, 1, 0)]):
        made = []
        for sample, reward in enumerate(rewards):
            one = trajectory(k, sample, a=1)
            one.reward = reward
            made.append(one)
        writer.write([runlog.packed(made, Agent(), k)])
    with (folder / "trajectories.jsonl.gz").open("ab") as file:
        file.write(records.MEMBER + b"torn")
    assert [(r["step"], r["sample"]) for r in read_run(folder).records] == [
        (1, k) for k in range(4)
    ]
    html = shown(rewrite_report(folder)).html
    readings = html.partition("<h2>Readings</h2>")[2].partition("</section>")[0]
    assert re.findall('class="tag ">([^<]*)<', readings) == ["reward 0.5", "reward 0"]
    assert "training step 0" not in readings


# ---------------------------------------------------------------- an evaluation


def test_an_evaluation_that_is_partly_there(tmp_path):
    rows = [row("memagent", id=str(i), length=n) for n in (4, 8) for i in range(10)]
    folder = evaluation(tmp_path / "eval", [*rows, *rows[:3]])
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"agent": "full", "ques')
    report = shown(rewrite_report(folder))
    assert "Stopped: 20 answers; nothing" in report.text
    assert "100.0 72–100, n 10" in report.text
    assert "<h1>Evaluation eval</h1>" in report.html
    assert (folder / "table.csv").exists() and not (folder / "summary.json").exists()
    hold(folder)
    assert "Running: 20 answers, last" in shown(rewrite_report(folder)).text
    release(folder)
    other = evaluation(tmp_path / "files", rows, suite="ruler-hqa", data=["a.json"])
    report = shown(rewrite_report(other))
    assert "Stopped: 20 answers; nothing" in report.text and "by documents" in report.text


def test_an_evaluation_without_an_answer_yet(tmp_path):
    folder = evaluation(tmp_path / "eval", [])
    hold(folder)
    report = shown(write_report(folder))
    assert "Running: 0 answers" in report.text
    release(folder)
    (folder / "rows.jsonl").unlink()
    assert "Stopped: 0 answers." in shown(write_report(folder)).text


def test_a_summary_stands_unless_there_are_more_rows(tmp_path):
    rows = [row("memagent", id=str(i)) for i in range(4)]
    folder = evaluation(folder_of(tmp_path / "eval", rows), rows)

    def headline(*rows, stored=True):
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
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
    assert "Below is every reading." in shown(rewrite_report(folder)).text
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
