"""The single facts of 2WikiMultiHopQA's or MuSiQue's questions, each paragraph among others.

Exercise it: `python cli.py eval --suite facts --data FILE`. Read next: tasks/facts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import clean
from suites import Column, Scope, Suite
from suites._sources import Among
from tasks import facts


@dataclass(frozen=True)
class Facts(Among):
    """One-fact questions."""

    source_split: str = ""
    """use only facts of this split of the source; empty = train, if the file names splits"""

    lengths, file_name = (1, 4), "facts"

    def columns(self, scope: Scope) -> list[Column]:
        questions = facts.read(self.file_in(scope), self.source_split)
        name = clean(f"{questions[0].dataset or 'questions'}, one fact")
        return self.columns_among(scope, questions, name)

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        split = self.source_split
        return Suite.about(self, scope, column) | ({"split": split} if split else {})
