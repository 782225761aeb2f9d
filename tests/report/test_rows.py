"""The file of rows: torn lines, several processes, claims."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import until

from config.errors import UserError
from report.rows import Rows


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_rows_come_back_and_only_once(tmp_path):
    path = tmp_path / "rows"
    with Rows(path) as a, Rows(path) as b:
        a.append({"n": 1})
        assert list(b.new()) == [{"n": 1}] and list(b.new()) == []
        b.append({"half": "\ud83d", "line": "\u2028\x85"})
        assert (
            list(a.new(lambda line: b"half" in line)) == [{"half": "\ud83d", "line": "\u2028\x85"}]
            and list(a.new()) == []
        )
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("torn", [b"", b"{", b'{"n": 2', b'{"text": "' + b"x" * 200_000])
def test_a_torn_last_line_is_cut_off_by_whoever_comes_next(tmp_path, torn):
    path = tmp_path / "rows"
    path.write_bytes(b'{"n": 1}\n' + torn)
    with Rows(path) as file:
        assert list(file.new()) == [{"n": 1}] and path.read_bytes() == b'{"n": 1}\n'
        with path.open("ab") as other:  # torn while it is open
            other.write(torn)
        file.append({"n": 3})
        assert list(file.new()) == [{"n": 3}]
    assert lines(path) == [{"n": 1}, {"n": 3}]
    path.write_bytes(torn)
    with Rows(path) as file:
        file.append({"n": 4})
    assert lines(path) == [{"n": 4}]


def test_what_cannot_be_read_or_written_is_said(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_bytes(b'{"n": 1}\n{"n" 2}\n')
    with Rows(path) as file, pytest.raises(UserError, match="line 2 is damaged"):
        list(file.new())
    with pytest.raises(UserError, match="cannot be written"):
        Rows(tmp_path / "no folder" / "rows")
    with Rows(tmp_path / "full") as file:
        monkeypatch.setattr(os, "write", lambda fd, raw: len(raw) - 1)
        with pytest.raises(UserError, match="disk is full"):
            file.append({"n": 1})


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from report.rows import Rows
file = Rows(Path(sys.argv[1]))
claimed = [name for name in sys.argv[3:] if file.claim(name)]
print(*claimed, flush=True)
sys.stdin.readline()
"""
ROOT = str(Path(__file__).parents[2])


def child(path, *names):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), ROOT, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().split()


def test_a_row_is_claimed_by_one_process_and_free_when_that_ends_however(tmp_path):
    path = tmp_path / "rows"
    process, claimed = child(path, "a", "b")
    assert claimed == ["a", "b"]
    with Rows(path) as file:
        assert not file.claim("a") and file.claim("c") and not file.claim("b")
        other, claimed = child(path, "b", "c", "d")
        assert claimed == ["d"]
        file.release("c")
        third, claimed = child(path, "c")
        assert claimed == ["c"]
        for each in (process, other, third):
            each.kill()
            each.wait()
        assert all(map(file.claim, "abcd"))


WRITER = """
import random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from report.rows import Rows
rng = random.Random(int(sys.argv[3]))
with Rows(Path(sys.argv[1])) as file:
    for n in range(100000):
        file.append({"writer": int(sys.argv[3]), "n": n, "text": "x" * rng.randrange(5000)})
"""


def test_writers_side_by_side_and_killed_leave_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), ROOT, str(k)]) for k in range(3)
    ]
    rng = random.Random(0)
    until(lambda: path.exists() and path.stat().st_size > 100_000)
    until(lambda: all(b'"writer": %d,' % k in path.read_bytes() for k in range(3)))
    for process in started:
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.wait()
    with Rows(path) as file:
        rows = list(file.new())
    for k in range(3):
        ours = [row["n"] for row in rows if row["writer"] == k]
        assert ours == list(range(len(ours)))
    assert len(rows) > 10 and len({row["writer"] for row in rows}) > 1
