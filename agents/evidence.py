"""Evidence, the baseline that is given the entries with the evidence and nothing else.

Holds: `Evidence`. Exercise it: `python cli.py eval --suite locomo --agents evidence --n 8`. Read
next: agents/find.py.
"""

from __future__ import annotations

from agents.facts import Facts
from agents.store import Entry
from data import Task


class Evidence(Facts):
    """Of the task's memories those that were made from the evidence of the question."""

    def start(self, task: Task) -> list[Entry]:
        from agents.search import recall

        wanted = task.probe.evidence if task.probe else ()
        return [e for e in Facts.start(self, task) if wanted and recall([e], wanted)]
