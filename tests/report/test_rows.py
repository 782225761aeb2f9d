"""Files of rows: torn lines, kills, rows that are made again."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import until

from config.errors import UserError
from report.rows import Rows, lines_in, read_rows

ROOT = str(Path(__file__).parents[2])


def test_rows_come_back_as_they_were(tmp_path, monkeypatch):
    path, synced = tmp_path / "rows", []
    monkeypatch.setattr("os.fsync", synced.append)
    assert list(lines_in(path)) == []
    rows = [{"n": 1}, {"half": "\ud83d", "line": "\u2028\x85"}]
    with Rows(path) as file:
        for row in rows:
            file.append(row)
        assert list(lines_in(path)) == rows
    assert list(lines_in(path, b"half")) == rows[1:]
    assert path.read_bytes().count(b"\n") == len(synced) == 2


@pytest.mark.parametrize("torn", [b"", b"{", b'{"n": 2', b'{"text": "' + b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b'{"n": 1}\n'])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path, whole, torn):
    path = tmp_path / "rows"
    path.write_bytes(whole + torn)
    kept = [{"n": 1}] if whole else []
    assert list(lines_in(path)) == kept and path.read_bytes() == whole + torn
    with Rows(path) as file:
        assert path.read_bytes() == whole
        file.append({"n": 3})
    assert list(lines_in(path)) == [*kept, {"n": 3}]


def test_what_is_damaged_or_finds_no_room_is_said(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"n": 1}\n{"n" 2}\n')
    with pytest.raises(UserError, match="line 2"):
        list(lines_in(path))
    with Rows(Path("/dev/full")) as file, pytest.raises(UserError, match="No space left"):
        file.append({"n": 1})


def row(id, **other):
    cell = dict(agent="a", question="q", temperature="0.0", length=1)
    return cell | {"settings": "s", "id": id, "sample": 0, "task": "t", "error": ""} | other


def test_a_row_that_was_made_again_counts_once_where_the_first_one_stood(tmp_path):
    made = row("a", n=1), row("b", error="gone"), row("c", settings="other"), row("b", n=2)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(r["id"], r["error"], r.get("n")) for r in rows] == [
        ("a", "", 1), ("b", "", 2), ("c", "", None)
    ]  # fmt: skip
    assert [r["id"] for r in read_rows(tmp_path / "rows.jsonl", settings="other")] == ["c"]
    assert read_rows(tmp_path / "none.jsonl") == []


WRITER = """
import random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from report.rows import Rows
rng = random.Random(0)
with Rows(Path(sys.argv[1])) as file:
    for n in range(100000):
        file.append({"n": n, "text": "x" * rng.randrange(5000)})
"""


def test_a_writer_that_is_killed_leaves_whole_rows(tmp_path):
    path, rng = tmp_path / "rows", random.Random(0)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), ROOT])
    until(lambda: path.exists() and path.stat().st_size > 100_000)
    time.sleep(rng.random() * 0.1)
    process.kill()
    process.wait()
    numbers = [row["n"] for row in lines_in(path)]
    assert len(numbers) > 10 and numbers == list(range(len(numbers)))
