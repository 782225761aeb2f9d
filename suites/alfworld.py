"""ALFWorld's household games, by commands in text.

Exercise it: `pytest tests/tasks/test_alf.py`. Read next: tasks/alf.py.
"""

from __future__ import annotations

from suites import Scope, Suite
from tasks.environments import Environment


class ALFWorldSuite(Suite):
    """Games of a folder; without one six of ours."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Environment:
        from tasks.alf import ALFWorld

        return ALFWorld(self.file_in(scope, optional=True))
