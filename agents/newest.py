"""Newest, the baseline that keeps what came last: the newest entries within the budget.

Holds: `Newest`. Exercise it: `python cli.py eval --suite locomo --agents newest --n 8`. Read next:
agents/evidence.py.
"""

from __future__ import annotations

from agents.facts import Facts
from agents.store import Entry
from data import Task


class Newest(Facts):
    """The latest of the task's memories, as many as the budget holds, whatever the question."""

    def start(self, task: Task) -> list[Entry]:
        c, entries = self.config, Facts.start(self, task)
        if c.budget == "none":
            return entries
        if c.budget_entries:
            return entries[-c.budget_entries :]
        room = self.budget_tokens(self.source_tokens(task, entries))
        kept = []
        for entry in reversed(entries):
            room -= self.measure(entry.line)
            if room < 0:
                break
            kept.append(entry)
        return kept[::-1]
