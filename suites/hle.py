"""Humanity's Last Exam: one response a question, which a model judges.

Exercise it: `pytest tests/tasks/test_hle.py`. Read next: tasks/hle.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from suites import Scope, Suite
from tasks.environments import Environment


@dataclass(frozen=True)
class HLESuite(Suite):
    """Questions of a file; without one six easy ones of ours."""

    judge: str = ""
    """the model that judges responses, openai:URL#MODEL; the key is read from OPENAI_API_KEY"""
    images: bool = False
    """send pictures as data URLs, to an --endpoint with --chat whose model sees them; without,
    questions with a picture are left out"""

    unit, metric = "steps", "reward"

    @property
    def pictured(self) -> bool:
        return self.images

    def environment(self, scope: Scope) -> Environment:
        from tasks.hle import HLE

        return HLE(self.file_in(scope, optional=True), self.judge, self.images)
