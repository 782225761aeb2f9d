"""SQuAD's questions: the paragraph that answers among N passages that do not.

The other passages are paragraphs of the same file, of the same article or of others, and those of
further files. None contains an accepted answer of the question, in any case or within a longer
word, so that the answer stands in one place. Among N passages stand all those that stand among
fewer, in another order; the paragraph that answers is equally likely at every place.

Train and test are splits of *articles*. A document of the train split holds no paragraph of an
article of the test split, nor a passage of its title from elsewhere. One of the test split may
hold paragraphs of training articles as filler: a small file (XQuAD has 48 articles of 5
paragraphs) has too few others.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated

from config.errors import UserError, clean
from config.settings import COUNT, SHARE
from config.terminal import say
from data import NOT_FOUND, Pool, Task, normalize_answer, seed_of
from suites import Column, Scope, Suite
from suites._sources import Filled, draws, read_filler, select_split, with_own_pool
from tasks import readers
from tasks.lexicon import words
from tasks.mentions import separate_words


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
        questions = split_by_article(readers.read(self.file_in(scope)), self.test_articles)
        name = clean(questions[0].dataset or "questions")
        if self.source_split:
            name += f", {self.source_split} articles"
        n_all = len(select_split(questions, self.source_split))
        n = min(scope.n, n_all)
        extra = read_filler(self.filler)

        def make(length: int) -> list[Task]:
            tasks = make_tasks(questions, length, n, extra, scope.seed, scope.lengths, self)
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


def split_by_article(questions: Sequence[Task], rule: str) -> list[Task]:
    """Return the questions with their split, "train" or "test", by the article of their paragraph.

    rule: K/M, `Passages.test_articles`; articles are counted in the order in which the questions
    name them. UserError: another rule, or a question that has not exactly one paragraph.
    """
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", rule.strip())
    if not match or int(match[1]) >= int(match[2]):
        example = "K/M with K below M, such as 4/5, every fifth article"
        raise UserError(f"The articles of the test split are named by {example}, not {rule!r}.")
    remainder, modulus = map(int, match.groups())
    index: dict[str, int] = {}
    for task in questions:
        index.setdefault(article_of(task), len(index))
    test = {title for title, k in index.items() if k % modulus == remainder}
    return [replace(t, split="test" if article_of(t) in test else "train") for t in questions]


def article_of(task: Task) -> str:
    """Return the article of a question, by its title; UserError if it is not of SQuAD's form."""
    if task.pool is None or task.pool.frame != "documents" or len(task.order) != 1:
        needed = "the one paragraph that answers it, as in SQuAD's files"
        raise UserError(f"Question {task.id} does not come with {needed}.")
    k = task.order[0]  # without titles each paragraph is an article
    return _same_title(task.pool.titles[k]) or task.pool.texts[k]


def _same_title(title: str) -> str:
    """Return what all spellings of a title share: SQuAD's files have _ for blanks."""
    return " ".join(title.replace("_", " ").casefold().split())


# ---------------------------------------------------------------- documents


def make_tasks(
    questions: Sequence[Task],
    n_documents: int,
    n_items: int,
    extra: Pool | None = None,
    seed: int = 0,
    lengths: Sequence[int] = (),
    suite: Passages = Passages(),
) -> list[Task]:
    """Make tasks of `n_documents` passages; `gold` is the place of the one that answers.

    questions: those of all splits, as `split_by_article` returns them; the paragraphs of all are
    filler, but for those of test articles in documents of the train split.
    lengths: the numbers of documents of all sets that are to have the same questions. Questions
    whose answer occurs in so many passages ("two") that the longest document cannot be filled are
    passed over.
    Questions are chosen by the seed alone, other passages by (seed, id), and places by (seed, id,
    n_documents). UserError: no such questions, or too few passages for n_items of them.
    Of questions that share documents the sets of several lengths have not the same, and where few
    fit together there are fewer than n_items. UserError: none do.
    """
    split, together = suite.source_split, suite.together
    chosen = [task for task in questions if split in ("", task.split)]
    barred = {article_of(t) for t in questions if split == "train" and t.split == "test"}
    pools = [*{id(t.pool): t.pool for t in questions}.values(), extra]
    filler = _Filler([pool for pool in pools if pool], barred, suite)
    longest = max((n_documents, *lengths))
    random.Random(str(seed)).shuffle(chosen)
    if together > 1:
        blocks, longest = filler.blocks(chosen, n_documents), n_documents
    else:
        blocks = ([task] for task in chosen)
    made = (task for block in blocks for task in filler.tasks(block, n_documents, seed, longest))
    tasks = list(islice(made, n_items))
    if len(tasks) < n_items and (together == 1 or not tasks):
        found = f"only {len(tasks)} of {len(chosen)} questions, and {n_items} are wanted"
        need = f"Other passages without the answer suffice for {longest} documents in {found}"
        raise UserError(f"{need}; give files of further passages, or ask for fewer.")
    return with_own_pool(tasks, filler.passages)


# an answer in more passages than this share of them, and than so many, shares no document ("two")
COMMON, FEW = 0.02, 3
SAMPLED = 2000


class _Filler:
    """All passages that documents may be composed of, in sorted order.

    barred: titles, as `_same_title` returns them, of passages that no document may have.
    """

    def __init__(self, pools: Sequence[Pool], barred: set[str], suite: Passages):
        passages = readers.distinct_passages(pools)
        self.passages = [p for p in passages if _same_title(p[0]) not in barred]
        self.index = {passage: k for k, passage in enumerate(self.passages)}
        self.forms: dict[int, str] = {}  # passage -> its text in all spellings
        self.keys: dict[tuple[str, ...], set[str]] = {}  # answers -> all their spellings
        self.by_title: dict[str, list[int]] = defaultdict(list)  # filled by `near`, as the next
        self.by_word: dict[str, list[int]] = defaultdict(list)
        self.suite = suite

    def paragraph(self, task: Task) -> int:
        """Return the index of the paragraph that answers the question."""
        (k,) = task.order
        return self.index[task.pool.titles[k], task.pool.texts[k]]

    def answers(self, tasks: Sequence[Task], k: int) -> bool:
        """Tell whether a passage contains an answer of one of the questions, in any spelling."""
        if k not in self.forms:
            self.forms[k] = "\n".join(form for part in self.passages[k] for form in _forms(part))
        for task in tasks:
            if task.answers not in self.keys:
                self.keys[task.answers] = {f for a in task.answers for f in _forms(a)} - {""}
            if any(key in self.forms[k] for key in self.keys[task.answers]):
                return True
        return False

    def tasks(self, block: Sequence[Task], n_documents: int, seed: int, longest: int) -> list[Task]:
        """Return the questions of a block among the same passages; [] if these are too few, also
        for `longest` of them."""
        order = list(dict.fromkeys(self.paragraph(task) for task in block))
        own = {*order}
        absent = seed_of(seed, block[0].id, "absent") < self.suite.absent * 2**64
        if absent:
            order = self.near(block)[:n_documents] if self.suite.near else []
        barred = {*order, *own}
        drawn = draws(random.Random(f"{seed}:{block[0].id}"), len(self.passages))
        free = (k for k in drawn if k not in barred and not self.answers(block, k))
        others = list(islice(free, longest - len(order)))
        if len(others) < longest - len(order):
            return []
        order += others[: n_documents - len(order)]
        random.Random(f"{seed}:{block[0].id}:{n_documents}").shuffle(order)
        if absent:
            nothing = {"answers": (NOT_FOUND,), "kind": "absent", "gold": ()}
            return [replace(task, pool=None, order=order, **nothing) for task in block]
        return [
            replace(task, pool=None, order=order, gold=(order.index(self.paragraph(task)),))
            for task in block
        ]

    def near(self, block: Sequence[Task]) -> list[int]:
        """Return the other paragraphs of the articles of these questions, or, where there are none,
        the three paragraphs that share most rare words with theirs; none has an answer of any."""
        if not self.by_title:
            for k, (title, text) in enumerate(self.passages):
                self.by_title[_same_title(title)].append(k)
                for word in {*words(text)}:
                    self.by_word[word].append(k)
        own = {self.paragraph(task) for task in block}
        titles = {_same_title(self.passages[k][0]) for k in own} - {""}
        found = [k for title in sorted(titles) for k in self.by_title[title] if k not in own]
        if found := [k for k in found if not self.answers(block, k)]:
            return found
        shared: Counter[int] = Counter()
        for word in sorted({word for k in own for word in words(self.passages[k][1])}):
            if len(self.by_word[word]) <= COMMON * len(self.passages):
                shared.update(dict.fromkeys(self.by_word[word], 1 / len(self.by_word[word])))
        ranked = (k for k, _ in shared.most_common() if k not in own)
        return list(islice((k for k in ranked if not self.answers(block, k)), 3))

    def blocks(self, questions: Sequence[Task], n_documents: int) -> Iterator[list[Task]]:
        """Yield lists of at most `together` questions with at most `n_documents` paragraphs.

        The questions of a paragraph stay together, as far as they are not more. Passed over is a
        question whose answer occurs in another paragraph of the block, or in too many passages to
        keep it out of all others.
        """
        together, by_paragraph = self.suite.together, defaultdict(list)
        for task in questions:
            by_paragraph[self.paragraph(task)].append(task)
        block: list[Task] = []
        paragraphs: set[int] = set()
        for paragraph, asked in by_paragraph.items():
            rare = [task for task in asked if n_documents == 1 or self.is_rare(task)]
            for start in range(0, len(rare), together):
                tasks = rare[start : start + together]
                full = len(paragraphs) == n_documents or len(block) + len(tasks) > together
                if block and full:
                    yield block
                    block, paragraphs = [], set()
                if self.answers(block, paragraph):
                    continue
                fitting = [t for t in tasks if not any(self.answers([t], k) for k in paragraphs)]
                if fitting:
                    block, paragraphs = [*block, *fitting], paragraphs | {paragraph}
        if block:
            yield block

    def is_rare(self, task: Task) -> bool:
        """Tell whether few passages contain an answer of the question, by at most `SAMPLED` of
        them, evenly spaced: each question is compared with each."""
        sample = range(0, len(self.passages), max(1, len(self.passages) // SAMPLED))
        share = sum(self.answers([task], k) for k in sample) / len(sample)
        return share <= max(COMMON, FEW / len(self.passages))


def _forms(text: str) -> tuple[str, str, str]:
    """Return the spellings in which an answer is sought: as it is, in lower case, and as the two
    normalisations of data.py leave it."""
    return text.strip().lower(), normalize_answer(text), separate_words(text)
