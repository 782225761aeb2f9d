"""RULER-HQA: questions with their own paragraphs among N documents.

Exercise it: `python cli.py eval --suite ruler-hqa --data FILE --lengths 50,200`.
Read next: tasks/hqa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from config.errors import clean
from config.settings import NOT_NEGATIVE
from data import Task
from suites import Column, Scope, Suite
from suites._sources import Filled, question_files, read_filler, select_split
from tasks import hqa, readers


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
    def evidence(self) -> hqa.EvidenceRule:
        return hqa.EvidenceRule(self.evidence_order, self.min_distance)

    def columns(self, scope: Scope) -> list[Column]:
        evidence, columns = self.evidence, []
        extra = read_filler(self.filler)

        def make(questions: list[Task], n: int, length: int) -> list[Task]:
            rest = scope.seed, self.compat_seed4, evidence, scope.lengths
            return hqa.make_tasks(questions, length, n, extra, *rest)

        for file in question_files(scope.data, "hotpotqa"):
            questions = select_split(readers.read(file), self.source_split)
            n = min(scope.n, len(questions))
            name = clean(questions[0].dataset or Path(file).name.partition(".")[0])
            if not evidence.anywhere:  # other questions than those of published numbers
                name += f", evidence {evidence.order} {evidence.min_distance:g}"
            columns += [Column(name, k, partial(make, questions, n, k)) for k in scope.lengths]
        return sorted(columns, key=lambda column: column.length)

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        about = Suite.about(self, scope, column) | {"compat_seed4": self.compat_seed4}
        e = self.evidence
        where = {"evidence_order": e.order, "min_distance": e.min_distance}
        return about | ({} if e.anywhere else where)
