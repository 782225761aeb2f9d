"""RULER-HQA: the same questions in documents of any length, with the evidence where it falls or as far apart as asked.

Holds: `make_tasks`, and where evidence may stand. Leaves out: RULER's own thirteen tasks (tasks/ruler.py), reading and writing (data.py). No torch.
Exercise it: `python cli.py data build FILE OUT --documents 50,200`. Read next: tasks/ruler.py.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from config.errors import UserError
from data import Pool, Task
from tasks.readers import pool_of


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where the evidence of a question may stand.

    ReMemR1's paper: order reverse, min_distance .5, that is successive hops more than N/2 documents apart, the later hop first. Its code:
    order reverse, min_distance 100, 200, .., at least so many documents apart (spec rememr1.md 10).
    """

    order: str = "any"
    """any; forward = in hop order; reverse = the last hop first"""
    min_distance: float = 0.0
    """between neighbouring pieces of evidence: below 1 a share of the documents that the distance must exceed, else the least number of them"""

    def __post_init__(self):
        if self.order not in ("any", "forward", "reverse"):
            raise UserError(
                f"The order of evidence must be any, forward or reverse, not {self.order!r}."
            )
        if not self.min_distance >= 0:
            raise UserError(f"The distance of evidence must be 0 or more, not {self.min_distance}.")

    @property
    def anywhere(self) -> bool:
        return self == Evidence()

    def gap(self, n_documents: int) -> int:
        """The least distance, in documents."""
        if self.min_distance >= 1:
            return math.ceil(self.min_distance)
        return (
            math.floor(round(self.min_distance * n_documents, 6)) + 1
        )  # .29 of 100 is 29, not 28.999..

    def holds(self, places: Sequence[int], n_documents: int) -> bool:
        """Whether evidence at `places`, in hop order, is where it may be."""
        steps = [b - a for a, b in pairwise(places)]
        near = sorted(places)
        apart = self.min_distance == 0 or all(
            b - a >= self.gap(n_documents) for a, b in pairwise(near)
        )
        return apart and (
            self.order == "any" or all((step > 0) == (self.order == "forward") for step in steps)
        )

    def _room(self, n_places: int, n_documents: int) -> tuple[int, int]:
        gap = self.gap(n_documents) if self.min_distance else 1
        return gap, n_documents - (n_places - 1) * (gap - 1)

    def fits(self, n_places: int, n_documents: int) -> bool:
        """Whether so many pieces can stand as asked at all."""
        return self.anywhere or (n_places >= 2 and self._room(n_places, n_documents)[1] >= n_places)

    def draw(self, rng: random.Random, n_places: int, n_documents: int) -> list[int] | None:
        """Places in hop order, every possible choice equally likely; None if there is none."""
        gap, room = self._room(n_places, n_documents)
        if room < n_places:
            return None
        places = [
            place + i * (gap - 1)
            for i, place in enumerate(sorted(rng.sample(range(room), n_places)))
        ]
        if self.order == "any":
            rng.shuffle(places)
        return places[::-1] if self.order == "reverse" else places


def _draws(rng: random.Random, n: int) -> Iterator[int]:
    """All of range(n) in random order, as far as it is asked for: the first draws are the same however many follow."""
    moved: dict[int, int] = {}
    for i in range(n):
        j = rng.randrange(i, n)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def make_tasks(
    questions: Sequence[Task],
    n_documents: int,
    n_items: int | None = None,
    extra: Pool | None = None,
    seed: int = 0,
    compat_seed4: bool = False,
    evidence: Evidence = Evidence(),
    lengths: Sequence[int] = (),
) -> list[Task]:
    """Tasks of `n_documents` documents: a question's own paragraphs among random others (spec memagent.md 8).

    The others come from all questions' paragraphs and `extra`, never under a title that the question's own paragraphs have (another
    version of a gold paragraph would be evidence). Which questions are taken depends on the seed alone, so that they are the same at
    every length; which others on (seed, task id), so that a longer document has all that a shorter one has; the order of it on (seed,
    task id, n_documents), so that places differ from task to task.

    evidence: questions without two pieces of it, or whose pieces cannot stand so far apart, are passed over when it asks for anything.
    lengths: the numbers of documents of all sets that are to have the same questions; only those that fit in each are taken.
    compat_seed4: the originals' order, own paragraphs first and then one constant shuffle; at 50 documents the own ten always
    stand at 11, 18, 27, 29, 37, 41, 42, 43, 44 and 48. A policy can learn that. Evidence is then not placed: questions whose
    evidence happens to be where it may are kept, as upstream does; with `evidence` the sets of several lengths then differ in questions.
    """
    if any(task.pool is None or task.pool.frame != "documents" for task in questions):
        raise UserError(
            "These tasks have no paragraphs of their own; build from HotpotQA's json or from JSONL with paragraphs."
        )
    n_items = len(questions) if n_items is None else n_items
    if not 1 <= n_items <= len(questions):
        raise UserError(f"{n_items} questions are wanted and there are {len(questions)}.")
    pools = {id(task.pool): task.pool for task in questions} | ({id(extra): extra} if extra else {})
    passages = sorted(
        {
            passage
            for pool in pools.values()
            for passage in zip(pool.titles, pool.texts, strict=True)
        }
    )
    place = {passage: k for k, passage in enumerate(passages)}
    by_title = defaultdict(list)
    for k, (title, _) in enumerate(passages):
        by_title[title.casefold()].append(k)

    chosen, tasks = list(questions), []
    random.Random(str(seed)).shuffle(
        chosen
    )  # not sample(): the first 64 of 128 are then those of 64
    for task in chosen:
        if len(tasks) == n_items:
            break
        own = [place[task.pool.titles[k], task.pool.texts[k]] for k in task.order]
        barred = {k for i in own for k in by_title[passages[i][0].casefold()]}
        n_others, n_there = n_documents - len(own), len(passages) - len(barred)
        if n_others < 0:
            raise UserError(
                f"Question {task.id} has {len(own)} paragraphs of its own: {n_documents} documents are too few."
            )
        if n_others > n_there:
            need = f"Question {task.id} needs {n_others} other passages for {n_documents} documents"
            raise UserError(f"{need} and there are {n_there}; give more.")
        filler = (
            k for k in _draws(random.Random(f"{seed}:{task.id}"), len(passages)) if k not in barred
        )
        documents = own + [next(filler) for _ in range(n_others)]
        rng = random.Random(f"{seed}:{task.id}:{n_documents}")
        slots = list(range(n_documents))  # slots[place] = which of `documents` stands there
        (random.Random(4) if compat_seed4 else rng).shuffle(slots)
        gold = tuple(slots.index(slot) for slot in task.gold)
        if not evidence.anywhere:
            pieces = list(dict.fromkeys(task.gold))  # one paragraph may serve two hops
            if not all(evidence.fits(len(pieces), n) for n in (n_documents, *lengths)):
                continue
            if not compat_seed4 and not evidence.holds(
                [slots.index(piece) for piece in pieces], n_documents
            ):
                drawn = evidence.draw(rng, len(pieces), n_documents)
                others, at = (
                    iter([slot for slot in slots if slot not in pieces]),
                    dict(zip(drawn, pieces, strict=True)),
                )
                slots = [at[i] if i in at else next(others) for i in range(n_documents)]
                gold = tuple(slots.index(slot) for slot in task.gold)
            if not evidence.holds(list(dict.fromkeys(gold)), n_documents):
                continue
        tasks.append(
            replace(task, pool=None, order=tuple(documents[slot] for slot in slots), gold=gold)
        )
    if len(tasks) < n_items:
        raise UserError(
            f"Evidence can stand as asked among {n_documents} documents in {len(tasks)} of {len(questions)} questions only, and {n_items} are wanted."
        )
    used = sorted({k for task in tasks for k in task.order})
    place = {k: new for new, k in enumerate(used)}
    pool = pool_of(passages[k] for k in used)
    return [replace(task, pool=pool, order=tuple(place[k] for k in task.order)) for task in tasks]
