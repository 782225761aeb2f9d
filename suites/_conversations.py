"""Suites of questions about long conversations, one file each.

Holds: `Conversations`. Leaves out: the files' forms (tasks/locomo.py and others), grading
(tasks/episodes.py).
Exercise it: `pytest tests/tasks/test_episodes.py`. Read next: tasks/episodes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from data import Task
from suites import Column, Scope, Suite, first_of_each_kind
from tasks import episodes


@dataclass(frozen=True)
class Conversations(Suite):
    """One column of all questions: its cells are the kinds, side by side, so that what an agent
    makes of a conversation serves all of them.

    Of each kind the first `n` are asked. Kinds without a question are said at once.
    """

    source_split: str = ""
    """what a store may begin with, such as observations or empty; empty = observations, where there
    are any, else memories or sessions"""

    unit, metric = "sessions", "reward"

    def columns(self, scope: Scope) -> list[Column]:
        part = self.source_split
        source = f"{self.name}:{self.file_in(scope)}{f'#{part}' if part else ''}"
        found = episodes.conversations_of(source)
        probes = [probe for c in found.conversations for probe in c.probes]
        abstaining = "/" not in part or found.adversarial
        found.say_missing(probes, abstaining, "is in it, none will be asked")

        def make() -> list[Task]:
            return first_of_each_kind(episodes.all_questions(found), scope.n)

        return [Column("", max(len(c.sessions) for c in found.conversations), make)]
