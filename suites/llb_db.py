"""LifelongAgentBench's database tasks: SQL, judged by rows or by the table.

Exercise it: `python cli.py eval --suite llb-db --agents gold`.
Read next: tasks/llb_db.py.
"""

from __future__ import annotations

from suites import Scope, Suite
from tasks.environments import Environment


class LLBDB(Suite):
    """Databases; without a file eight tasks of ours."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Environment:
        from tasks.llb_db import LLBDB

        return LLBDB(self.file_in(scope, optional=True) or None)
