"""What MemUpdate is compared with: stores that nobody edits, searched and answered from as its own.

`facts` has all of a task's ready-made memories, `newest` the latest within the budget, `evidence`
those that the question needs, `idle` what the store began with.
"""

from __future__ import annotations

from agents.memupdate import MemUpdate, entries_of
from agents.search import recall
from agents.store import Entry
from data import Task


class Idle(MemUpdate):
    """Does nothing, and answers from what there is."""

    name = "idle"
    edits = keeps = trains = False


class Facts(Idle):
    """The task's ready-made memories, searched as MemUpdate searches its store."""

    name = "facts"

    def start(self, task: Task) -> list[Entry]:
        return entries_of(task.memories)


class Newest(Facts):
    """The latest of the task's memories, as many as the budget holds, whatever the question."""

    name = "newest"

    def start(self, task: Task) -> list[Entry]:
        c, entries = self.config, super().start(task)
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


class Evidence(Facts):
    """Of the task's memories those that were made from the evidence of the question."""

    name = "evidence"

    def start(self, task: Task) -> list[Entry]:
        wanted = task.probe.evidence if task.probe else ()
        return [entry for entry in super().start(task) if wanted and recall([entry], wanted)]
