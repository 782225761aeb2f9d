"""LoCoMo's questions, by the published file.

Exercise it: `python cli.py eval --suite locomo --data locomo10.json`. Read next: tasks/locomo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from suites._conversations import Conversations


@dataclass(frozen=True)
class LoCoMo(Conversations):
    """LoCoMo."""

    source_split: str = ""
    """RULE/PART/adversarial/START, each of which may be left out: RULE/PART = seven-three (also
    named memupdate) or memory-r1, and train, validation or test; adversarial = with category 5;
    START = what a store may begin with, such as observations"""
