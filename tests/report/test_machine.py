"""The foot of a page: where a run was made, by what, and what it took."""

import re

import pytest
from run_folders import folder_of, row

from report.machine import NAME, foot, note_machine
from report.page import write_report


def test_the_foot_of_a_run_is_that_of_the_call_that_made_it(tmp_path):
    rows = [row(id=str(k), tokens_read=1000, tokens_written=2) for k in range(3)]
    folder = folder_of(tmp_path / "run", rows)
    tokens = "3 readings; 3,000 tokens read, 6 tokens written"

    def shown(path):
        return re.search("<footer[^>]*>(.*?)</footer>", path.read_text())[1]

    assert shown(write_report(folder, note=False)) == tokens  # of an earlier version's run
    made = shown(write_report(folder))
    parts = (
        r"on \w+ .* cores, \d+ GiB, .*; by commit \w.*; with Python 3.*; until 20.* UTC; last call"
    )
    assert re.match(parts, made) and made.endswith(f"; {tokens}")
    assert shown(write_report(folder, note=False)) == made


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"on": 1'])
def test_a_damaged_note_is_left_out(tmp_path, text):
    note_machine(tmp_path)
    (tmp_path / NAME).write_text(text)
    assert foot(tmp_path, {"read": 5, "written": 0}, 0) == "5 tokens read"
