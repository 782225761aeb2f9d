"""Idle, the baseline that leaves the store as it is: empty, or with the task's memories.

Holds: `Idle`. Exercise it: `python cli.py eval --data ledger --agents idle --n 8`. Read next:
agents/facts.py.
"""

from __future__ import annotations

from agents.memupdate import MemUpdate


class Idle(MemUpdate):
    """Does nothing, and answers from what there is."""

    edits = keeps = trains = False
