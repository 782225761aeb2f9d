"""Names, numbers and dates of any text, asked for by rule: no questions are needed.

Exercise it: `python cli.py data build examples/town.pdf town --suite cloze`. Read next:
tasks/cloze.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from config.errors import UserError
from config.settings import COUNT, UNFLAGGED
from config.terminal import say
from suites import Column, Scope
from suites._sources import Among
from tasks import cloze


@dataclass(frozen=True)
class Cloze(Among):
    """What a text says of names, numbers and dates."""

    source_split: Annotated[str, UNFLAGGED] = ""
    """there are no splits"""
    forms: tuple[Literal["apart", "asked", "keywords"], ...] = cloze.FORMS
    """of questions: apart = a sentence with a gap, which the document lacks; asked = a sentence
    turned into a question; keywords = the rarest words of a sentence"""
    per_passage: Annotated[int, COUNT] = 2
    """most questions about one passage"""

    lengths, file_name = (1, 4, 16), "cloze"

    def columns(self, scope: Scope) -> list[Column]:
        if not scope.data:
            raise UserError("The suite cloze wants files or folders of text: name them.")
        passages = cloze.read(scope.data)
        questions = cloze.questions(passages, self.forms, self.per_passage, scope.seed)
        left = ", ".join(f"{n:,} {why}" for why, n in passages.left_out.most_common())
        n = f"{len(questions):,} questions about {len(passages.texts):,} passages"
        say(f"{n}. Left out: {left}.")
        if not questions:
            raise UserError("No span of these texts can be asked for: give more text.")
        return self.columns_among(scope, questions, "cloze")
