"""The suite of examples/town.csv, by path: its report is read whole, and its tasks are right."""

import csv
import re
from pathlib import Path

from conftest import asked_of

from data import NOT_FOUND, places
from tasks import documents

ROOT = Path(__file__).parents[1]
SUITE = str(ROOT / "examples/town_suite.py")


def test_the_report_is_read_whole_page_by_page():
    text = documents.read([ROOT / "examples/town.pdf"]).text
    unnumbered = re.sub(r"^\d+$", "", text, flags=re.M)
    assert unnumbered.split() == (ROOT / "dev/town.txt").read_text().replace("# ", "").split()


def test_the_suite_is_found_by_its_path_and_asks_what_the_file_asks():
    unit, (column,) = asked_of(suite=SUITE, n=30)
    assert (unit, column.question, column.length) == ("pages", "", 14)
    tasks = column.make()
    with (ROOT / "examples/town.csv").open(newline="") as file:
        asked = {row["question"]: row["answer"] or NOT_FOUND for row in csv.DictReader(file)}
    assert {task.question: " | ".join(task.answers) for task in tasks} == asked
    assert len(tasks) == 30 and max(len(task.answers) for task in tasks) == 2
    assert [task.kind for task in tasks] == ["town"] * 20 + ["absent"] * 10
    assert len({task.id for task in tasks}) == 30
    for task in tasks:
        held = any(any(places(answer, task.document)) for answer in task.answers)
        assert held == (task.kind == "town"), task.question
    assert len(asked_of(suite=SUITE, n=5)[1][0].make()) == 5
