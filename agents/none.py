"""No context, the baseline: the question alone.

Holds: `NoContext`. Exercise it: `python cli.py eval --agents none --n 8`. Read next:
agents/full.py.
"""

from __future__ import annotations

from collections.abc import Generator

from agents.full import AtOnce
from data import Task
from memagent import ROOM_TOKENS, Prompt, Turn, Wording


class NoContext(AtOnce):
    """The question alone; a right answer says nothing about reading."""

    name = "none"
    in_words = "without reading"
    prompts = {"none": Wording("Solve the problem. {answer}", ("problem",))}

    def window_needed(self) -> int:
        return ROOM_TOKENS + self.config.final_tokens

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        yield self.prompt("none", self.config.final_tokens, final=True, problem=task.question)
