"""What is said of a training run after its last step, and its table of metrics."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest

from config.errors import UserError
from memagent import Agent
from models.checkpoints import validations, write_validations
from report.page import write_report
from report.runlog import RunRecorder, StepCSV, TrajectoryWriter, gain, summary
from report.summary import write_summary
from report.training import amiss

RISEN = [*(0.30, 0.34, 0.26, 0.30) * 2, *(0.44, 0.52, 0.48, 0.40) * 2]
USUAL = {"level": 0, "step_s": 1.5, "read_tokens": 10, "written_tokens": 2}


def run(folder, rewards, name="reward", **columns):
    """Write the metrics of a run. columns: a value for each step, beside `USUAL`."""
    rows = [USUAL | {"step": k, name: value} for k, value in enumerate(rewards)]
    rows = [row | {n: values[k] for n, values in columns.items()} for k, row in enumerate(rows)]
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
    assert (one["steps"], one["seconds"], one["tokens"]) == (16, 24.0, 192)
    longer = summary(run(tmp_path, RISEN, level=[0] * 8 + [1] * 8), 8)
    assert "gain" not in longer  # the last documents are longer than the first
    assert "gain" not in summary(run(tmp_path, RISEN, "loss"), 8)


def test_steps_without_reward_and_skipped_updates_are_summed_up(tmp_path):
    columns = {"skipped_updates": [1, 0, 2], "unrewarded": [3, 8, 0], "faults": [0, 0, 0]}
    found = summary(run(tmp_path, [0.5, "nan", 1], **columns))
    assert (found["reward"], found["steps"]) == (0.75, 3)
    assert (found["skipped_updates"], found["unrewarded"]) == (3, 11) and "faults" not in found
    write_summary(tmp_path / "summary.json", found)  # as strict JSON
    (tmp_path / "config.yaml").write_text("grpo: {steps: 3}\n")
    assert "3 updates skipped" in write_report(tmp_path).read_text()
    assert summary(run(tmp_path, ["nan"]))["reward"] is None


@pytest.mark.parametrize(("metrics", "counts"), [
    ({"skipped_updates": 1.0, "unrewarded": 1.0}, ["1 update skipped", "1 reading left out"]),
    ({"unrewarded": 3.0, "faults": 2.0, "not_shown": 1.0},
     ["1 reading left out", "2 readings left out", "1 task left out"]),
    ({"skipped_updates": 0.0, "unrewarded": 0.0}, []), ({}, []),
])  # fmt: skip
def test_what_is_amiss_in_a_step_is_counted(metrics, counts):
    assert [text.partition(":")[0].partition(",")[0] for text in amiss(metrics)] == counts


@pytest.mark.parametrize(("text", "damaged"), [
    ("step,reward\n0,0.5\n1,0.25\n", False), ("step,reward\n0,0.5\n1,0.", False),
    ("step,reward\n0\n1,0.5\n", True), ("step,reward\nx,1\n", True),
])  # fmt: skip
def test_a_resumed_run_goes_on_with_the_steps_and_columns_that_it_has(tmp_path, text, damaged):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    if damaged:
        with pytest.raises(UserError, match="damaged"):
            StepCSV(path, resumed_at=1)
        assert path.read_text() == text
        return
    StepCSV(path, resumed_at=1).log_metrics({"step": 1, "reward": 2.0, "reward_se": 0.1})
    assert path.read_text() == "step,reward\n0,0.5\n1,2\n"


def test_trajectories_are_cut_back_to_a_checkpoint_and_no_further(tmp_path):
    path = tmp_path / "t"
    writer = TrajectoryWriter(path)
    writer.write([b"ab", b"c"])
    assert (writer.position, TrajectoryWriter(path, 2).position) == (3, 2)
    assert path.read_bytes() == b"ab"
    with pytest.raises(UserError, match="torn"):
        TrajectoryWriter(path, 3)


def test_what_follows_the_checkpoint_is_cut_back_before_the_first_step(tmp_path):
    """Of a run without one, of which two steps are done."""
    (tmp_path / "checkpoints" / ".step-3.tmp").mkdir(parents=True)
    (tmp_path / "trajectories.jsonl.gz").write_bytes(b"of step 3")
    rows = [{"step": k, "score": 0.5, "n": 4} for k in (1, 2, 3)]
    write_validations(tmp_path / "validation.csv", rows)
    (tmp_path / "trained_on.csv").write_text("digest,step,id\nx,1,a\ny,2,b\n")
    begun = []
    recorder = RunRecorder(tmp_path, 1, 1, 4, begin=lambda: begun.append(1))
    recorder.on_fit_start(None, SimpleNamespace(agent=Agent(), done_steps=2))
    assert validations(tmp_path) == rows[:2] and recorder.trained_on == {"x": (1, "a")}
    assert (tmp_path / "trajectories.jsonl.gz").read_bytes() == b"" and begun == [1]
    assert [*(tmp_path / "checkpoints").iterdir()] == []
