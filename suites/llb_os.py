"""LifelongAgentBench's shell tasks: scripts in a fresh Debian system each, judged by a check.

Exercise it: `pytest tests/tasks/test_llb_os.py`. Read next: tasks/llb_os.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from suites import Scope, Suite
from tasks.environments import Environment

RULES = {
    "own": "rules of ours, which are not those of its release",
    "released": "the rules of its release",
}


@dataclass(frozen=True)
class LLBOS(Suite):
    """Shells."""

    rules: Literal["own", "released"] = "own"
    """how episodes are judged and end: by rules of ours, or as in the code that LifelongAgentBench
    has released, after 3 (llb-db) or 5 responses instead of 15 (docs/streams.md)"""

    unit, metric, may_differ = "steps", "reward", ("rules",)

    @property
    def judged_by(self) -> str:
        return RULES[self.rules]

    def environment(self, scope: Scope) -> Environment:
        from tasks.llb_os import LLBOS

        return LLBOS(self.file_in(scope), self.rules)
