"""The questions of a file of SQuAD's form, each paragraph among others without the answer.

Exercise it: `python cli.py eval --suite passages --data FILE`. Read next: tasks/passages.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from config.errors import clean
from config.settings import COUNT, SHARE
from config.terminal import say
from data import Task
from suites import Column, Scope, Suite
from suites._sources import Filled, read_filler, select_split
from tasks import passages, readers


@dataclass(frozen=True)
class Passages(Filled):
    """SQuAD's questions; the same at every length."""

    source_split: str = ""
    """train or test, as --test-articles divides the articles; empty = all"""
    together: Annotated[int, COUNT] = 1
    """at most so many questions share one document, which is then computed once for all of them"""
    absent: Annotated[float, SHARE] = 0.0
    """share of the questions whose paragraph is left out: right is NOT_FOUND (data.py)"""
    near: bool = True
    """among the passages of these are the other paragraphs of the article, or the most alike"""
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
        n_all = len(select_split(questions, self.source_split))
        n = min(scope.n, n_all)
        extra = read_filler(self.filler)

        def make(length: int) -> list[Task]:
            shared = passages.Shared(self.together, self.absent, self.near)
            how = scope.seed, self.source_split, scope.lengths, shared
            tasks = passages.make_tasks(questions, length, n, extra, *how)
            if len(tasks) < n:  # then all were tried
                say(
                    f"Passed over among {length}: {n_all - len(tasks):,} of {n_all:,} questions; "
                    "their answers stand in many passages or in another of their document, or too "
                    "few passages are left beside them.",
                    "yellow",
                )
            return [replace(task, kind=task.kind or name) for task in tasks]

        title = "" if self.absent else name  # without one every kind has cells of its own
        return [Column(title, length, partial(make, length)) for length in scope.lengths]

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        split = {"split": self.source_split, "test_articles": self.test_articles}
        return Suite.about(self, scope, column) | (split if self.source_split else {})
