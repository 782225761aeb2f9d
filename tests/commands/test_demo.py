"""The demo's processes; the demo itself is run by tests/test_cli.py."""

import os
import subprocess
import sys

from conftest import HANG_S

from bench.common import ROOT

SCRIPT = """
import multiprocessing, time
from pathlib import Path

from commands import demo


class Part:
    def __init__(self, fails):
        self.fails = fails

    def __call__(self):
        from tqdm.auto import tqdm

        tqdm.get_lock()  # shared by processes: one that is killed would leave it behind
        if not self.fails:
            Path("at-work").touch()
        while not self.fails or not Path("at-work").exists():
            time.sleep(0.01)
        raise KeyError("a part has failed")

if __name__ == "__main__":
    demo.PRELOADED = ()
    demo.os.cpu_count = lambda: 2
    try:
        demo._work(demo.Plan("", "", [], [Part(fails=False), Part(fails=True)]))
    except KeyError:
        print(len(multiprocessing.active_children()))
"""


def test_processes_end_when_a_part_fails_and_leave_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.split()[-1] == "0"
    assert done.stderr == ""  # no leaked semaphore is reported
