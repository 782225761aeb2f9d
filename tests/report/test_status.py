"""Whether a run goes on is told by locks, which end with their process."""

import subprocess
import sys
from pathlib import Path

import pytest

from report.status import MARK, hold, is_running, release

ROOT = Path(__file__).parents[2]
HOLD = "import sys; from pathlib import Path; from report.status import hold; hold(Path({!r})); "


@pytest.fixture
def another(tmp_path):
    """Return a process that holds the folder until its input ends."""
    code = HOLD.format(str(tmp_path)) + "print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_folder_is_held_until_its_process_is_killed(tmp_path, another):
    assert is_running(tmp_path) and is_running(tmp_path)  # looking takes nothing away
    hold(tmp_path)  # a second process may hold it too
    release(tmp_path)
    assert is_running(tmp_path)
    another.kill()
    another.wait()
    assert not is_running(tmp_path) and (tmp_path / MARK).exists()


def test_a_process_knows_what_it_holds_itself(tmp_path):
    hold(tmp_path)
    hold(tmp_path)
    assert is_running(tmp_path)
    child = "; print(is_running(Path({!r})))"  # and so does another one
    code = "from pathlib import Path; from report.status import is_running" + child.format(
        str(tmp_path)
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout == "True\n"
    release(tmp_path)
    release(tmp_path)
    assert not is_running(tmp_path)


@pytest.mark.parametrize("folder", ["", "missing"])
def test_nothing_runs_where_nothing_is(tmp_path, folder):
    assert not is_running(tmp_path / folder)
    assert [*tmp_path.iterdir()] == []  # and nothing was left there
