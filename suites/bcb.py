"""BigCodeBench: one program a task, judged by unit tests in a sandbox.

Exercise it: `pytest tests/tasks/test_bcb.py`. Read next: tasks/bcb.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from suites import Scope, Suite, SuiteConfig
from tasks.environments import Environment


@dataclass(frozen=True, slots=True)
class BCBConfig(SuiteConfig):
    """What runs the programs."""

    interpreter: str = ""
    """the Python that runs the programs, with the libraries they need; empty = this one"""
    leave_out: bool = False
    """leave out the tasks whose libraries that Python lacks, instead of refusing them all"""


class BCB(Suite):
    """Programs."""

    Config = BCBConfig
    unit, metric, may_differ = "steps", "reward", ("leave_out",)

    def environment(self, scope: Scope) -> Environment:
        from tasks.bcb import BCB

        c, path = self.config, self.file_in(scope)
        return BCB(path, c.interpreter or sys.executable, skip=c.leave_out)
