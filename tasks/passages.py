"""SQuAD's questions as reading tasks: the paragraph that answers among N passages.

Holds: `article_rule`, `split_by_article`, `Shared`, `make_tasks`. Leaves out: reading files
(tasks/readers.py), RULER-HQA with its several pieces of evidence (tasks/hqa.py). No torch.
Exercise it: `python cli.py data build SQUAD.json OUT --suite passages --lengths 1,4,16`.
Read next: suites/__init__.py.

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from config.errors import UserError
from data import NOT_FOUND, Pool, Task, normalize_answer, seed_of
from tasks.hqa import draws, with_own_pool
from tasks.lexicon import words
from tasks.mentions import separate_words
from tasks.readers import distinct_passages

Rule = Callable[[int], bool]  # number of an article in its file, from 0 -> is it of the test split?
RULE = re.compile(r"(\d+)/([1-9]\d*)")


def article_rule(text: str) -> Rule:
    """Parse the rule K/M by which articles are of the test split: those whose index in the file
    leaves the remainder K when divided by M. UserError: it is none, or K is not below M."""
    match = RULE.fullmatch(text.strip())
    if not match or int(match[1]) >= int(match[2]):
        example = "K/M with K below M, such as 4/5, every fifth article"
        raise UserError(f"The articles of the test split are named by {example}, not {text!r}.")
    remainder, modulus = map(int, match.groups())
    return lambda index: index % modulus == remainder


def split_by_article(questions: Sequence[Task], is_test: Rule) -> list[Task]:
    """Return the questions with their split, "train" or "test", by the article of their paragraph.

    Articles are counted in the order in which the questions name them. UserError: a question that
    has not exactly one paragraph.
    """
    index: dict[str, int] = {}
    for task in questions:
        index.setdefault(_article(task), len(index))
    test = {title for title, k in index.items() if is_test(k)}
    return [
        replace(task, split="test" if _article(task) in test else "train") for task in questions
    ]


class Shared(NamedTuple):
    """How questions share documents, and which have no answer there."""

    together: int = 1
    """at most so many share one document (`_blocks`), whose sections are then computed once"""
    absent: float = 0.0
    """share of the documents without the paragraph of their questions: the answer of these is
    `NOT_FOUND`, their kind absent"""
    near: bool = True
    """in its place stand the other paragraphs of its article, or the three that are most like it"""


def make_tasks(
    questions: Sequence[Task],
    n_documents: int,
    n_items: int | None = None,
    extra: Pool | None = None,
    seed: int = 0,
    split: str = "",
    lengths: Sequence[int] = (),
    shared: Shared = Shared(),
) -> list[Task]:
    """Make tasks of `n_documents` passages; `gold` is the place of the one that answers.

    questions: those of all splits, as `split_by_article` returns them; the paragraphs of all are
    filler, but for those of test articles in documents of the train split. split: train or test;
    "" makes tasks of all questions. n_items: None for all.
    lengths: the numbers of documents of all sets that are to have the same questions. Questions
    whose answer occurs in so many passages ("two") that the longest document cannot be filled are
    passed over.
    Questions are chosen by the seed alone, other passages by (seed, id), and places by (seed, id,
    n_documents). UserError: no such questions, or too few passages for n_items of them.
    shared: how questions share documents. Of several lengths the sets then no longer have the same
    questions, and where few fit together there are fewer than n_items. UserError: none do.
    """
    chosen = [task for task in questions if split in ("", task.split)]
    n_items = len(chosen) if n_items is None else n_items
    barred = {_article(t) for t in questions if split == "train" and t.split == "test"}
    pools = [*{id(t.pool): t.pool for t in questions}.values(), extra]
    filler, together = _Filler(pools, barred, shared), shared.together
    longest = max((n_documents, *lengths))
    random.Random(str(seed)).shuffle(chosen)
    tasks: list[Task] = []
    if together > 1:
        blocks = _blocks(chosen, filler, n_documents, together)
        made = (task for block in blocks for task in filler.shared(block, n_documents, seed))
        if tasks := list(islice(made, n_items)):  # which may be fewer than there are questions
            return with_own_pool(tasks, filler.passages)
    for task in chosen if together == 1 else ():
        if len(tasks) == n_items:
            break
        tasks += filler.shared([task], n_documents, seed, longest)
    if len(tasks) < n_items:
        found = f"only {len(tasks)} of {len(chosen)} questions, and {n_items} are wanted"
        need = f"Other passages without the answer suffice for {longest} documents in {found}"
        raise UserError(f"{need}; give files of further passages, or ask for fewer.")
    return with_own_pool(tasks, filler.passages)


# an answer in more passages than this share of them, and than so many, shares no document ("two")
COMMON, FEW = 0.02, 3
SAMPLED = 2000


def _blocks(
    questions: Sequence[Task], filler: _Filler, n_documents: int, together: int
) -> Iterator[list[Task]]:
    """Yield lists of at most `together` questions with at most `n_documents` paragraphs.

    The questions of a paragraph stay together, as far as they are not more. Passed over is a
    question whose answer occurs in another paragraph of the block, or in too many passages to keep
    it out of all others.
    """
    by_paragraph: dict[int, list[Task]] = {}
    for task in questions:
        by_paragraph.setdefault(filler.paragraph(task), []).append(task)
    block: list[Task] = []
    paragraphs: set[int] = set()
    most = max(COMMON, FEW / len(filler.passages))
    fit = (  # found one by one, since each is compared with all passages
        (paragraph, [t for t in tasks if n_documents == 1 or filler.share_with(t) <= most])
        for paragraph, tasks in by_paragraph.items()
    )
    parts = (
        (paragraph, tasks[start : start + together])
        for paragraph, tasks in fit
        for start in range(0, len(tasks), together)
    )
    for paragraph, tasks in parts:
        if block and (len(paragraphs) == n_documents or len(block) + len(tasks) > together):
            yield block
            block, paragraphs = [], set()
        if any(filler.answers(task, paragraph) for task in block):
            continue
        fitting = [t for t in tasks if not any(filler.answers(t, other) for other in paragraphs)]
        if fitting:
            block, paragraphs = [*block, *fitting], paragraphs | {paragraph}
    if block:
        yield block


class _Filler:
    """All passages that documents may be composed of, in sorted order.

    barred: titles, as `_same_title` returns them, of passages that no document may have.
    """

    def __init__(self, pools: Sequence[Pool | None], barred: set[str], how: Shared):
        passages = distinct_passages([pool for pool in pools if pool])
        self.passages = [p for p in passages if _same_title(p[0]) not in barred]
        self.index = {passage: k for k, passage in enumerate(self.passages)}
        self.forms: dict[int, str] = {}  # passage -> its text in all spellings
        self.keys: dict[tuple[str, ...], tuple[str, ...]] = {}  # answers -> all their spellings
        self.by_title: dict[str, list[int]] = {}  # filled by `beside`, as is the next one
        self.by_word: dict[str, list[int]] = {}
        self.how = how

    def paragraph(self, task: Task) -> int:
        """Return the index of the paragraph that answers the question."""
        (k,) = task.order
        return self.index[task.pool.titles[k], task.pool.texts[k]]

    def others(
        self, tasks: Sequence[Task], n: int, seed: int, chosen: Sequence[int] = ()
    ) -> list[int]:
        """Draw n passages without an answer of these questions, or as many as there are, beside
        those that are chosen."""
        barred, found = {*chosen, *(self.paragraph(task) for task in tasks)}, []
        for k in draws(random.Random(f"{seed}:{tasks[0].id}"), len(self.passages)):
            if len(found) == n:
                break
            if k not in barred and not any(self.answers(task, k) for task in tasks):
                found.append(k)
        return found

    def shared(
        self, block: Sequence[Task], n_documents: int, seed: int, longest: int = 0
    ) -> list[Task]:
        """Return the questions of a block among the same passages; [] if these are too few, also
        for `longest` of them."""
        order = list(dict.fromkeys(self.paragraph(task) for task in block))
        absent = seed_of(seed, block[0].id, "absent") < self.how.absent * 2**64
        if absent:
            order = self.beside(block)[:n_documents] if self.how.near else []
        needed = max(n_documents, longest) - len(order)
        others = self.others(block, needed, seed, order)
        if len(others) < needed:
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

    def beside(self, block: Sequence[Task]) -> list[int]:
        """Return the other paragraphs of the articles of these questions, or, where there are none,
        the three paragraphs that share most rare words with theirs; none has an answer of any."""
        if not self.by_title:
            for k, (title, text) in enumerate(self.passages):
                self.by_title.setdefault(_same_title(title), []).append(k)
                for word in {*words(text)}:
                    self.by_word.setdefault(word, []).append(k)
        own = {self.paragraph(task) for task in block}
        titles = {_same_title(self.passages[k][0]) for k in own} - {""}
        found = [k for title in sorted(titles) for k in self.by_title[title] if k not in own]
        if found := [k for k in found if not any(self.answers(task, k) for task in block)]:
            return found
        shared: Counter[int] = Counter()
        for word in sorted({word for k in own for word in words(self.passages[k][1])}):
            if len(self.by_word[word]) <= COMMON * len(self.passages):
                shared.update(dict.fromkeys(self.by_word[word], 1 / len(self.by_word[word])))
        ranked = (k for k, _ in shared.most_common() if k not in own)
        return list(islice((k for k in ranked if not any(self.answers(t, k) for t in block)), 3))

    def answers(self, task: Task, k: int) -> bool:
        """Tell whether a passage contains an answer of the question, in any spelling."""
        if task.answers not in self.keys:
            forms = {form for answer in task.answers for form in _forms(answer)} - {""}
            self.keys[task.answers] = tuple(forms)
        text = self._all_forms(k)
        return any(key in text for key in self.keys[task.answers])

    def share_with(self, task: Task) -> float:
        """Return the share of the passages that contain an answer of the question, of at most
        `SAMPLED` of them, evenly spaced: each question is compared with each."""
        sample = range(0, len(self.passages), max(1, len(self.passages) // SAMPLED))
        return sum(self.answers(task, k) for k in sample) / len(sample)

    def _all_forms(self, k: int) -> str:
        if k not in self.forms:
            self.forms[k] = "\n".join(form for part in self.passages[k] for form in _forms(part))
        return self.forms[k]


def _forms(text: str) -> tuple[str, str, str]:
    """Return the spellings in which an answer is sought: as it is, in lower case, and as the two
    normalisations of data.py leave it."""
    return text.strip().lower(), normalize_answer(text), separate_words(text)


def _same_title(title: str) -> str:
    """Return what all spellings of a title share: SQuAD's files have _ for blanks."""
    return " ".join(title.replace("_", " ").casefold().split())


def _article(task: Task) -> str:
    """Return the article of a question, by its title; UserError if it is not of SQuAD's form."""
    if task.pool is None or task.pool.frame != "documents" or len(task.order) != 1:
        needed = "the one paragraph that answers it, as in SQuAD's files"
        raise UserError(f"Question {task.id} does not come with {needed}.")
    k = task.order[0]  # without titles each paragraph is an article
    return _same_title(task.pool.titles[k]) or task.pool.texts[k]
