"""Humanity's Last Exam: one response a question, which a model judges.

Exercise it: `pytest tests/tasks/test_hle.py`. Read next: tasks/hle.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from suites import Scope, Suite, SuiteConfig
from tasks.environments import Environment


@dataclass(frozen=True, slots=True)
class HLEConfig(SuiteConfig):
    """Who judges, and whether pictures are sent."""

    judge: str = ""
    """the model that judges responses, openai:URL#MODEL; the key is read from OPENAI_API_KEY"""
    images: bool = False
    """send pictures as data URLs, to an --endpoint with --chat whose model sees them; without,
    questions with a picture are left out"""


class HLESuite(Suite):
    """Questions of a file; without one six easy ones of ours."""

    Config = HLEConfig
    unit, metric = "steps", "reward"

    @property
    def pictured(self) -> bool:
        return self.config.images

    def environment(self, scope: Scope) -> Environment:
        from tasks.hle import HLE

        return HLE(self.file_in(scope, optional=True), self.config.judge, self.config.images)
