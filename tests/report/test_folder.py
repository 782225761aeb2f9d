"""What a run's folder holds at any time: going on, killed in the middle of a line, or finished."""

import json

import pytest
from run_folders import evaluation, folder_of, lines, record, row, step, training, trajectory

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
    run = read_run(folder)
    assert (run.title, run.status) == ("Training run", "Stopped: step 12 of 50.")
    assert run.summary["reward"] == pytest.approx(0.5 + 6.5 / 64)


def test_how_far_a_training_has_come(tmp_path):
    folder = training(tmp_path / "run", steps=0)
    assert read_run(folder).status == "Stopped: step 0 of 50."
    (folder / "metrics.csv").unlink()
    assert read_run(folder).status == "Stopped: step 0 of 50."
    training(folder, steps=20)
    (folder / "summary.json").write_text(json.dumps(runlog.summary(folder)))
    training(folder, steps=30)  # it has been resumed since
    assert read_run(folder).summary["steps"] == 30
    with writing(folder, "The run"):
        for running, word in ((None, "Running"), (True, "Running"), (False, "Stopped")):
            assert read_run(folder, running).status == f"{word}: step 30 of 50."
        training(folder, steps=50)
        assert read_run(folder).status == ""


def test_the_readings_of_a_training_are_those_of_its_first_and_last_recorded_step(tmp_path):
    folder = training(tmp_path / "run")
    writer = runlog.TrajectoryWriter(folder / "trajectories.jsonl.gz")
    for k, sizes in enumerate([(2,), (1,), (3, 1)]):  # of each rank
        made = [[trajectory(k, sample) for sample in range(size)] for size in sizes]
        writer.write(runlog.packed(each, Agent(), k) for each in made)
    with (folder / "trajectories.jsonl.gz").open("ab") as file:
        file.write(records.MEMBER + b"torn")
    run = read_run(folder)
    assert [(r["step"], r["sample"]) for r in run.first] == [(0, 0), (0, 1)]
    assert [(r["step"], r["sample"]) for r in run.records] == [(2, 0), (2, 1), (2, 2), (2, 0)]


@pytest.mark.parametrize(("turns", "after"), [(2, None), (1, "Lima")])
def test_a_reading_that_ends_without_an_answer_has_its_last_memory(turns, after):
    read = trajectory(3, 0)
    read.turns = read.turns[:turns]
    kept = records.record(read, Agent(), step=3)
    assert records.is_record(kept) and kept["turns"][-1].get("memory_after") == after


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"reward": 0}, True), ({"reward": 0.5}, False), ({"reward": None}, False),
    ({"reward": 0, "answers": []}, False),  # of `ask`, which has no right answer
    ({"reward": 0, "answers": [], "step": 1}, True), ({"answers": [], "cell": {}}, False),
])  # fmt: skip
def test_a_reading_is_wrong_where_nothing_of_it_is_right(fields, wrong):
    assert records.is_wrong(record() | fields) is wrong


# ---------------------------------------------------------------- an evaluation


def test_an_evaluation_that_is_partly_there(tmp_path):
    rows = [row("memagent", id=str(i), length=n) for n in (4, 8) for i in range(10)]
    folder = evaluation(tmp_path / "eval", [*rows, *rows[:3]])
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"agent": "full", "ques')
    run = read_run(folder)
    assert (run.title, run.status) == ("Evaluation eval", "Stopped: 20 answers.")
    assert [(cell["length"], cell["n"]) for cell in run.summary["cells"]] == [(4, 10), (8, 10)]
    write_report(folder)
    assert (folder / "table.md").exists() and not (folder / "summary.json").exists()
    with writing(folder, "It"):
        assert read_run(folder).status == "Running: 20 answers."
    other = evaluation(tmp_path / "files", rows, suite="ruler-hqa", data=["a.json"])
    assert read_run(other).summary["unit"] == "documents"
    (folder / "rows.jsonl").unlink()
    assert read_run(folder).status == "Stopped: 0 answers."


def test_a_summary_stands_unless_there_are_more_rows(tmp_path):
    rows = [row("memagent", id=str(i)) for i in range(4)]
    folder = evaluation(folder_of(tmp_path / "eval", rows), rows)
    kept = (folder / "summary.json").read_bytes()
    again = [r | {"settings": "new"} for r in rows[:3]]
    for more, stored, expected in (
        ([], True, ("", [4])),
        (again, True, ("", [4])),
        (again, False, ("Stopped: 3 answers.", [3])),  # the latest ones alone
        ([row("memagent", id="5")], True, ("Stopped: 5 answers.", [5])),
        ([row("full")], True, ("Stopped: 5 answers.", [4, 1])),
    ):
        (folder / "rows.jsonl").write_text(lines(rows + more))
        (folder / "summary.json").write_bytes(kept)
        if not stored:
            (folder / "summary.json").unlink()
        run = read_run(folder)
        assert (run.status, [cell["n"] for cell in run.summary["cells"]]) == expected


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
