"""The questions of a file of SQuAD's form, each paragraph among others without the answer.

Exercise it: `python cli.py eval --suite passages --data FILE`. Read next: tasks/passages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import clean
from suites import Column, Scope, Suite
from suites._sources import Among, AmongConfig
from tasks import passages, readers


@dataclass(frozen=True, slots=True)
class PassagesConfig(AmongConfig):
    """Which articles' questions."""

    source_split: str = ""
    """train or test, as --test-articles divides the articles; empty = all"""
    test_articles: str = "4/5"
    """articles of the split test, all others are train: K/M = those whose number in the file, from
    0, divided by M leaves K; hash:K/M = likewise with a hash of the title"""


class Passages(Among):
    """SQuAD's questions."""

    Config = PassagesConfig
    lengths, file_name = (1, 4, 16, 64), "passages"

    def columns(self, scope: Scope) -> list[Column]:
        is_test = passages.article_rule(self.config.test_articles)
        questions = passages.split_by_article(readers.read(self.file_in(scope)), is_test)
        name = clean(questions[0].dataset or "questions")
        if self.config.source_split:
            name += f", {self.config.source_split} articles"
        return self.columns_among(scope, questions, name)

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        c, about = self.config, Suite.about(self, scope, column)
        split = {"split": c.source_split, "test_articles": c.test_articles}
        return about | (split if c.source_split else {})
