"""Generated sessions: people arrive and move, and it is asked where each of them is.

Exercise it: `python cli.py eval --data ledger --lengths 6 --n 4`. Read next: tasks/ledger.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from data import Task
from suites import Column, Scope, Suite
from tasks import ledger


@dataclass(frozen=True)
class Ledger(Suite):
    """Generated sessions."""

    split: str = "dev"
    """split of the facts: dev to choose settings, test to report"""

    unit, lengths, metric, generated = "sessions", (4, 16, 64), "reward", True

    def columns(self, scope: Scope) -> list[Column]:
        def make(length: int) -> list[Task]:
            return [*ledger.make_questions(scope.seed, scope.n, length, self.split)]

        return [Column(ledger.KIND, length, partial(make, length)) for length in scope.lengths]
