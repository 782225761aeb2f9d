"""A generated world: which of two doors, known from experiences half of which mislead.

Exercise it: `python cli.py stream --suite bandit`. Read next: tasks/bandit.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from config.options import COUNT
from suites import Scope, Suite, SuiteConfig
from tasks.bandit import HINTS, Bandit


@dataclass(frozen=True, slots=True)
class BanditConfig(SuiteConfig):
    """What is known of the doors."""

    hints: Annotated[int, COUNT] = HINTS
    """experiences of a task, half of them wrong"""


class BanditSuite(Suite):
    """Doors."""

    Config = BanditConfig
    unit, metric, generated = "steps", "reward", True

    def environment(self, scope: Scope) -> Bandit:
        return Bandit(hints=self.config.hints, seed=scope.seed)
