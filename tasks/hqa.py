"""RULER-HQA: the same questions in documents of any length, evidence anywhere or far apart.

Holds: `EvidenceRule` (where it may stand), `make_tasks`. Leaves out: RULER's own thirteen tasks
(tasks/ruler.py), files (tasks/readers.py, tasks/writers.py). No torch.
Exercise it: `python cli.py data build FILE OUT --lengths 50,200`. Read next: tasks/ruler.py.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from config.errors import UserError
from data import Pool, Task
from tasks.readers import Passage, distinct_passages, pool_of


@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """Restrict where the evidence of a question may stand.

    ReMemR1's distant evidence: order reverse, min_distance .5 in the paper (arXiv 2509.23040), that
    is successive hops more than N/2 documents apart, the later hop first; order reverse,
    min_distance 100, 200, ... in its code, at least so many documents apart.
    """

    order: str = "any"
    """any; forward = in hop order; reverse = the last hop first"""
    min_distance: float = 0.0
    """between neighbouring pieces of evidence: below 1, a share of the documents that the distance
    must exceed; else the least distance in documents"""

    @property
    def anywhere(self) -> bool:
        """Tell whether there is no restriction."""
        return self == EvidenceRule()

    def gap(self, n_documents: int) -> int:
        """Return the least distance in documents."""
        if self.min_distance >= 1:
            return math.ceil(self.min_distance)
        # .29 of 100 is 29, not 28.999..
        return math.floor(round(self.min_distance * n_documents, 6)) + 1

    def holds(self, places: Sequence[int], n_documents: int) -> bool:
        """Tell whether evidence at `places`, in hop order, satisfies the restriction."""
        steps = [b - a for a, b in pairwise(places)]
        gaps = [b - a for a, b in pairwise(sorted(places))]
        if self.min_distance and min(gaps, default=math.inf) < self.gap(n_documents):
            return False
        return self.order == "any" or all((step > 0) == (self.order == "forward") for step in steps)

    def _room(self, n_places: int, n_documents: int) -> tuple[int, int]:
        """Return the gap, and the number of free places once the gaps are cut out:

        n_documents = 10, gap = 3:   . A - - B - - C . .     "-" may hold no evidence
        without the "-":             . A B C . .             room = 6 places for 3 pieces
        """
        gap = self.gap(n_documents) if self.min_distance else 1
        return gap, n_documents - (n_places - 1) * (gap - 1)

    def fits(self, n_places: int, n_documents: int) -> bool:
        """Tell whether so many pieces can satisfy the restriction at all."""
        return self.anywhere or (n_places >= 2 and self._room(n_places, n_documents)[1] >= n_places)

    def draw(self, rng: random.Random, n_places: int, n_documents: int) -> list[int] | None:
        """Draw places in hop order, uniformly among all possible ones; None if there are none."""
        gap, room = self._room(n_places, n_documents)
        if room < n_places:
            return None
        packed = sorted(rng.sample(range(room), n_places))
        places = [place + i * (gap - 1) for i, place in enumerate(packed)]
        if self.order == "any":
            rng.shuffle(places)
        return places[::-1] if self.order == "reverse" else places


def draws(rng: random.Random, n: int) -> Iterator[int]:
    """Yield range(n) in random order (Fisher-Yates), lazily: a prefix does not depend on how many
    more are drawn."""
    moved: dict[int, int] = {}
    for i in range(n):
        j = rng.randrange(i, n)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _arrange(
    task: Task,
    n_documents: int,
    seed: int,
    compat_seed4: bool,
    evidence: EvidenceRule,
    lengths: Sequence[int],
) -> list[int] | None:
    """Draw the order of a task's documents: a permutation, place -> index into the documents.

    The question's own paragraphs have the first indices, as in `Task.gold`. None: the evidence
    cannot stand as required, at this number of documents or at one of `lengths`.
    """
    rng = random.Random(f"{seed}:{task.id}:{n_documents}")
    order = list(range(n_documents))
    (random.Random(4) if compat_seed4 else rng).shuffle(order)
    if evidence.anywhere:
        return order
    pieces = list(dict.fromkeys(task.gold))  # one paragraph may serve two hops
    if not all(evidence.fits(len(pieces), n) for n in (n_documents, *lengths)):
        return None
    if evidence.holds([order.index(piece) for piece in pieces], n_documents):
        return order
    if compat_seed4:
        return None
    places = evidence.draw(rng, len(pieces), n_documents)
    piece_at = dict(zip(places, pieces, strict=True))
    others = iter([k for k in order if k not in pieces])
    return [piece_at[i] if i in piece_at else next(others) for i in range(n_documents)]


def make_tasks(
    questions: Sequence[Task],
    n_documents: int,
    n_items: int | None = None,
    extra: Pool | None = None,
    seed: int = 0,
    compat_seed4: bool = False,
    evidence: EvidenceRule = EvidenceRule(),
    lengths: Sequence[int] = (),
) -> list[Task]:
    """Make tasks of `n_documents` documents: a question's own paragraphs among random others.

    The others come from all questions' paragraphs and `extra`. The choice of questions depends on
    the seed alone, so that it is the same at every length; the choice of other passages on (seed,
    task id), so that a longer document has all that a shorter one has; their order on (seed, task
    id, n_documents), so that places differ from task to task.

    evidence: a restriction skips questions with fewer than two pieces, and those whose pieces
    cannot stand so far apart.
    lengths: the numbers of documents of all sets that are to have the same questions; only those
    that fit in each are taken.
    compat_seed4: the originals' order, own paragraphs first and then one constant shuffle; at 50
    documents the own ten always stand at 11, 18, 27, 29, 37, 41, 42, 43, 44 and 48. A policy can
    learn that. Evidence is then not placed: only questions whose evidence happens to stand as
    required are kept, as upstream does; with `evidence` the sets of several lengths then differ in
    questions.
    """
    if any(task.pool is None or task.pool.frame != "documents" for task in questions):
        sources = "HotpotQA's json or from JSONL with paragraphs"
        raise UserError(f"These tasks have no paragraphs of their own; build from {sources}.")
    n_items = len(questions) if n_items is None else n_items
    pools = {id(task.pool): task.pool for task in questions}
    passages = distinct_passages([*pools.values(), *([extra] if extra else [])])
    index = {passage: k for k, passage in enumerate(passages)}
    titled = defaultdict(list)
    for k, (title, _) in enumerate(passages):
        titled[title.casefold()].append(k)
    candidates, tasks = list(questions), []
    # Not sample(): shuffled, the first 64 of 128 are the same as all of 64
    random.Random(str(seed)).shuffle(candidates)
    for task in candidates:
        if len(tasks) == n_items:
            break
        pairs = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        documents = [index[pair] for pair in pairs]
        # Another version of a gold paragraph would be evidence
        barred = {k for title, _ in pairs for k in titled[title.casefold()]}
        n_others, n_left = n_documents - len(documents), len(passages) - len(barred)
        if not 0 <= n_others <= n_left:
            have = f"has {len(pairs)} paragraphs of its own and {n_left} others"
            raise UserError(f"Question {task.id} {have}, which are not {n_documents} documents.")
        drawn = draws(random.Random(f"{seed}:{task.id}"), len(passages))
        documents += islice((k for k in drawn if k not in barred), n_others)
        order = _arrange(task, n_documents, seed, compat_seed4, evidence, lengths)
        if order is not None:
            gold = tuple(order.index(k) for k in task.gold)
            composed = tuple(documents[k] for k in order)
            tasks.append(replace(task, pool=None, order=composed, gold=gold))
    if len(tasks) < n_items:
        raise UserError(
            f"Evidence can stand as asked among {n_documents} documents in {len(tasks)} of "
            f"{len(questions)} questions only, and {n_items} are wanted."
        )
    return with_own_pool(tasks, passages)


def with_own_pool(tasks: Sequence[Task], passages: Sequence[Passage]) -> list[Task]:
    """Give tasks, whose orders are indices into `passages`, one pool of just those they use."""
    used = sorted({k for task in tasks for k in task.order})
    index = {k: new for new, k in enumerate(used)}
    pool = pool_of(passages[k] for k in used)
    return [replace(task, pool=pool, order=tuple(index[k] for k in task.order)) for task in tasks]
