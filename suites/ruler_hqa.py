"""RULER-HQA: the same questions in documents of any length, evidence anywhere or far apart."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Literal

from config.errors import UserError, clean
from config.settings import NOT_NEGATIVE
from data import Pool, Task
from suites import Column, Scope, Suite
from suites._sources import Filled, draws, read_filler, select_split, with_own_pool
from tasks import readers


@dataclass(frozen=True)
class RulerHQA(Filled):
    """The questions of each file among documents; the same questions at every length."""

    evidence_order: Literal["any", "forward", "reverse"] = "any"
    """order of the evidence in the document: any; forward = in hop order; reverse = last hop
    first"""
    min_distance: Annotated[float, NOT_NEGATIVE] = 0.0
    """distance between pieces of evidence: below 1, a share of the documents that it must exceed;
    otherwise a minimum number of documents. ReMemR1's distant evidence is reverse with 0.5 in its
    paper, reverse with 100 ... 1600 in its code"""
    compat_seed4: bool = False
    """use the original's constant shuffle, which always puts the evidence in the same places"""

    lengths, file_name = (50, 200, 800), "hqa"

    @property
    def evidence(self) -> EvidenceRule:
        return EvidenceRule(self.evidence_order, self.min_distance)

    def columns(self, scope: Scope) -> list[Column]:
        evidence, columns = self.evidence, []
        extra = read_filler(self.filler)

        def make(questions: list[Task], n: int, length: int) -> list[Task]:
            rest = scope.seed, self.compat_seed4, evidence, scope.lengths
            return make_tasks(questions, length, n, extra, *rest)

        for file in scope.data or downloaded("hotpotqa"):
            questions = select_split(readers.read(file), self.source_split)
            n = min(scope.n, len(questions))
            name = clean(questions[0].dataset or Path(file).name.partition(".")[0])
            if not evidence.anywhere:  # other questions than those of published numbers
                name += f", evidence {evidence.order} {evidence.min_distance:g}"
            columns += [Column(name, k, partial(make, questions, n, k)) for k in scope.lengths]
        return sorted(columns, key=lambda column: column.length)

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        about = Suite.about(self, scope, column) | {"compat_seed4": self.compat_seed4}
        where = {"evidence_order": self.evidence_order, "min_distance": self.min_distance}
        return about | ({} if self.evidence.anywhere else where)


def downloaded(name: str) -> list[str]:
    """Return the held-out files of questions that `data get` brought."""
    files = sorted(Path("data", name).rglob("*"))
    held_out = [
        str(path)
        for path in files
        if path.suffix in (".json", ".jsonl", ".parquet")
        and path.name.startswith(("validation", "dev", "test"))
    ]
    if not held_out:
        raise UserError(
            "Give a file of questions with their own paragraphs, or download some first: "
            f"python cli.py data get {name}."
        )
    return held_out


# ---------------------------------------------------------------- where evidence stands


@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """Restrict where the evidence of a question may stand.

    ReMemR1's distant evidence: order reverse, min_distance .5 in the paper (arXiv 2509.23040), that
    is successive hops more than N/2 documents apart, the later hop first; order reverse,
    min_distance 100, 200, ... in its code, at least so many documents apart.
    """

    order: str = "any"
    min_distance: float = 0.0

    @property
    def anywhere(self) -> bool:
        """Tell whether there is no restriction."""
        return self == EvidenceRule()

    def gap(self, n_documents: int) -> int:
        """Return the least distance in documents."""
        if self.min_distance >= 1:
            return math.ceil(self.min_distance)
        # .29 of 100 is 29, not 28.999..
        return math.floor(round(self.min_distance * n_documents, 6)) + 1 if self.min_distance else 1

    def holds(self, places: Sequence[int], n_documents: int) -> bool:
        """Tell whether evidence at `places`, in hop order, satisfies the restriction."""
        steps = [b - a for a, b in pairwise(places)]
        gaps = [b - a for a, b in pairwise(sorted(places))]
        if self.min_distance and min(gaps, default=math.inf) < self.gap(n_documents):
            return False
        return self.order == "any" or all((step > 0) == (self.order == "forward") for step in steps)

    def room(self, n_places: int, n_documents: int) -> int:
        """Return the number of free places once the gaps are cut out:

        n_documents = 10, gap = 3:   . A - - B - - C . .     "-" may hold no evidence
        without the "-":             . A B C . .             room = 6 places for 3 pieces
        """
        return n_documents - (n_places - 1) * (self.gap(n_documents) - 1)

    def fits(self, n_places: int, n_documents: int) -> bool:
        """Tell whether so many pieces can satisfy the restriction at all."""
        return self.anywhere or 2 <= n_places <= self.room(n_places, n_documents)

    def draw(self, rng: random.Random, n_places: int, n_documents: int) -> list[int]:
        """Draw places in hop order, uniformly among all possible ones, of which there are some."""
        packed = sorted(rng.sample(range(self.room(n_places, n_documents)), n_places))
        places = [place + i * (self.gap(n_documents) - 1) for i, place in enumerate(packed)]
        if self.order == "any":
            rng.shuffle(places)
        return places[::-1] if self.order == "reverse" else places


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
    n_items: int,
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
    pools = {id(task.pool): task.pool for task in questions}
    passages = readers.distinct_passages([*pools.values(), *([extra] if extra else [])])
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
