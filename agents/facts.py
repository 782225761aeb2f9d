"""Facts, the baseline that edits nothing: the entries that match a question best, of all there are.

Holds: `Facts`. Leaves out: what a store may begin with (tasks/conversations.py).
Exercise it: `python cli.py eval --suite locomo --agents facts --n 8`. Read next: agents/newest.py.
"""

from __future__ import annotations

from agents.memupdate import MemUpdate, entries_of
from agents.store import Entry
from data import Task


class Facts(MemUpdate):
    """The task's ready-made memories, searched as MemUpdate searches its store."""

    edits = keeps = trains = False

    def start(self, task: Task) -> list[Entry]:
        return entries_of(task.memories)
