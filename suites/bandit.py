"""A generated world: which of two doors, known from experiences half of which mislead.

Exercise it: `python cli.py stream --suite bandit`. Read next: tasks/bandit.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from config.settings import COUNT
from suites import Scope, Suite
from tasks.bandit import HINTS, Bandit


@dataclass(frozen=True)
class BanditSuite(Suite):
    """Doors."""

    hints: Annotated[int, COUNT] = HINTS
    """experiences of a task, half of them wrong"""

    unit, metric, generated = "steps", "reward", True

    def environment(self, scope: Scope) -> Bandit:
        return Bandit(hints=self.hints, seed=scope.seed)
