"""LifelongAgentBench's database tasks: SQL, judged by rows or by the table.

Exercise it: `python cli.py eval --suite llb-db --agents gold`.
Read next: tasks/llb_db.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from suites import Scope
from suites.llb_os import LLBOS
from tasks.environments import Environment


@dataclass(frozen=True)
class LLBDB(LLBOS):
    """Databases; without a file eight tasks of ours."""

    db_backend: str = "sqlite"
    """sqlite, or mysql://USER@HOST, a MariaDB or MySQL of yours"""

    def environment(self, scope: Scope) -> Environment:
        from tasks.llb_db import LLBDB

        path = self.file_in(scope, optional=True)
        return LLBDB(path or None, self.db_backend, self.rules)
