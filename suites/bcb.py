"""BigCodeBench: one program a task, judged by unit tests in a sandbox.

Exercise it: `pytest tests/tasks/test_bcb.py`. Read next: tasks/bcb.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from suites import Scope, Suite
from tasks.environments import Environment


@dataclass(frozen=True)
class BCB(Suite):
    """Programs."""

    interpreter: str = ""
    """the Python that runs the programs, with the libraries they need; empty = this one"""
    leave_out: bool = False
    """leave out the tasks whose libraries that Python lacks, instead of refusing them all"""

    unit, metric, may_differ = "steps", "reward", ("leave_out",)

    def environment(self, scope: Scope) -> Environment:
        from tasks.bcb import BCB

        python = self.interpreter or sys.executable
        return BCB(self.file_in(scope), python, skip=self.leave_out)
