"""The demo's worker processes; the demo itself is run by .ci/run."""

import os
import subprocess
import sys

from conftest import HANG_S

from bench.common import ROOT

SCRIPT = """
import os, time
from commands import demo
from models import ranks

class Job:
    then = ()

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        from tqdm.auto import tqdm

        time.sleep(self.seconds)
        tqdm.get_lock()  # shared by processes: one that is killed leaves it behind
        return [{"pid": os.getpid()}]

if __name__ == "__main__":
    demo.PRELOADED = ranks.PRELOADED = ()
    idle, busy = demo.Workers(2), demo.Workers(1)
    busy.add([Job(10**6)])
    idle.add([Job(0), Job(0), Job(0)])
    while idle.done < 3:
        idle.collect(5)
    idle.close()
    busy.close()
    print(len({row["pid"] for row in idle.rows}))
"""


def test_workers_end_at_once_and_leave_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert int(done.stdout) in (1, 2)
    assert done.stderr == ""  # no leaked semaphore is reported
