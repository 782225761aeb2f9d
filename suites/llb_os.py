"""LifelongAgentBench's shell tasks: scripts in a fresh Debian system each, judged by a check.

Exercise it: `pytest tests/tasks/test_llb_os.py`. Read next: tasks/llb_os.py.
"""

from __future__ import annotations

from suites import Scope, Suite
from tasks.environments import Environment


class LLBOS(Suite):
    """Shells."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Environment:
        from tasks.llb_os import LLBOS

        return LLBOS(self.file_in(scope))
