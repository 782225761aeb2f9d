"""The questions of a file of SQuAD's form, each paragraph among others without the answer.

Exercise it: `python cli.py eval --suite passages --data FILE`. Read next: tasks/passages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import clean
from suites import Column, Scope, Suite
from suites._sources import Among
from tasks import passages, readers


@dataclass(frozen=True)
class Passages(Among):
    """SQuAD's questions."""

    source_split: str = ""
    """train or test, as --test-articles divides the articles; empty = all"""
    test_articles: str = "4/5"
    """articles of the split test, all others are train: K/M = those whose number in the file, from
    0, divided by M leaves K"""

    lengths, file_name = (1, 4, 16, 64), "passages"

    def columns(self, scope: Scope) -> list[Column]:
        is_test = passages.article_rule(self.test_articles)
        questions = passages.split_by_article(readers.read(self.file_in(scope)), is_test)
        name = clean(questions[0].dataset or "questions")
        if self.source_split:
            name += f", {self.source_split} articles"
        return self.columns_among(scope, questions, name)

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        split = {"split": self.source_split, "test_articles": self.test_articles}
        return Suite.about(self, scope, column) | (split if self.source_split else {})
