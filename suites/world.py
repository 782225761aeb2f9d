"""Generated English: facts about people and places, and questions about one of them or two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from config.errors import UserError
from config.settings import NOT_EMPTY
from data import Task
from suites import Column, Scope, Suite
from suites._sources import read_sentences
from tasks import worlds


@dataclass(frozen=True)
class World(Suite):
    """Generated English."""

    kinds: Annotated[tuple[str, ...], NOT_EMPTY] = ("one_fact", "two_hop")
    """kinds of question"""
    split: str = "dev"
    """split of the facts: dev to choose settings, test to report"""
    filler: tuple[str, ...] = ()
    """files of running text, whose sentences stand between the facts: one of each a section"""

    unit, lengths, generated, may_differ = "sections", (4, 16, 64), True, ("kinds",)

    def __post_init__(self):
        for values, choices in ((self.kinds, worlds.KINDS), ((self.split,), worlds.SPLITS)):
            for k, value in enumerate(values):
                if value not in choices or value in values[:k]:
                    known = ", ".join(choices)
                    raise UserError(
                        f"Generated English has {known}, each named once, not {value!r}."
                    )

    def columns(self, scope: Scope) -> list[Column]:
        filler = read_sentences(self.filler)

        def make(kind: str, length: int) -> list[Task]:
            return [*worlds.make_tasks(scope.seed, scope.n, length, kind, self.split, filler)]

        return [
            Column(kind, length, partial(make, kind, length))
            for length in scope.lengths
            for kind in self.kinds
        ]
