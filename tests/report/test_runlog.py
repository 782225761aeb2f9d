"""What is said of a training run after its last step."""

from __future__ import annotations

import csv

import pytest

from report.page import write_report
from report.runlog import StepCSV, gain, summary
from report.summary import write_summary
from report.training import amiss

RISEN = [*(0.30, 0.34, 0.26, 0.30) * 2, *(0.44, 0.52, 0.48, 0.40) * 2]


def run(folder, rewards, levels=None, name="reward"):
    """Write the metrics of a run."""
    rows = [
        {"level": level, name: value, "step_s": 1.5, "read_tokens": 10, "written_tokens": 2}
        for value, level in zip(rewards, levels or [0] * len(rewards), strict=True)
    ]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_gain_is_the_difference_of_the_ends_with_welchs_interval():
    found = gain(RISEN, 8)
    assert found["steps"] == 8
    assert (found["first"], found["last"]) == (pytest.approx(0.3), pytest.approx(0.46))
    # by hand: variances of the two means, Welch's degrees of freedom, t from a table
    one, two = 0.0064 / 7 / 8, 0.016 / 7 / 8
    assert 11 < (one + two) ** 2 / (one**2 / 7 + two**2 / 7) < 12
    half = [t * (one + two) ** 0.5 for t in (2.179, 2.201)]  # of 12 and 11
    assert half[0] < 0.16 - found["low"] < half[1] and half[0] < found["high"] - 0.16 < half[1]


def test_no_gain_where_the_ends_overlap_or_lengths_differ(tmp_path):
    assert gain(RISEN, 9) is None and gain(RISEN[:1], 1) is None
    assert gain([0.5] * 20) == {"steps": 10, "first": 0.5, "last": 0.5, "low": None, "high": None}
    one = summary(run(tmp_path, RISEN), 8)
    assert one["gain"] == gain(RISEN, 8) and one["reward"] == pytest.approx(0.46)
    longer = summary(run(tmp_path, RISEN, [0] * 8 + [1] * 8), 8)
    assert "gain" not in longer  # the last documents are longer than the first
    assert "gain" not in summary(run(tmp_path, RISEN, name="loss"), 8)


def test_a_run_of_an_earlier_version_goes_on_with_its_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,reward\n0,0.5\n1,0.25\n")
    logger = StepCSV(path, resumed_at=1)
    logger.log_metrics({"step": 1, "reward": 1.0, "reward_se": 0.1})
    assert path.read_text() == "step,reward\n0,0.5\n1,1\n"


def test_steps_without_reward_and_skipped_updates_are_summed_up_and_said(tmp_path):
    """As strict JSON, in the terminal's line of the step, and in the page's first lines."""
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["step", "reward", "step_s", "read_tokens", "written_tokens", "skipped_updates",
             "unrewarded"]
        )  # fmt: skip
        writer.writerows(
            [[0, 0.5, 1, 10, 2, 1, 3], [1, "nan", 1, 10, 2, 0, 8], [2, 1, 1, 10, 2, 2, 0]]
        )
    found = summary(tmp_path)
    assert found["reward"] == 0.75 and found["steps"] == 3
    assert (found["skipped_updates"], found["unrewarded"]) == (3, 11)
    write_summary(tmp_path / "summary.json", found)
    (tmp_path / "config.yaml").write_text("run: {}\ngrpo: {steps: 3}\n")
    page = write_report(tmp_path).read_text()
    lead = page[: page.index("<svg")]
    assert "3 updates skipped: the gradient is not finite" in lead
    assert "11 readings left out, without a reward" in lead
    row = {"skipped_updates": 1.0, "unrewarded": 1.0}
    assert amiss(row) == [
        "1 update skipped: the gradient is not finite",
        "1 reading left out, without a reward",
    ]
    assert amiss({"skipped_updates": 0.0, "unrewarded": 0.0}) == amiss({}) == []
    assert amiss({"unrewarded": 3.0, "faults": 2.0, "not_shown": 1.0}) == [
        "1 reading left out, without a reward",
        "2 readings left out: an engine or a server failed",
        "1 task left out: not to be demonstrated",
    ]
