"""RULER's thirteen tasks, generated at any length in tokens of the evaluated model.

Exercise it: `python cli.py eval --suite ruler --ruler-tasks vt --n 4`. Read next: tasks/ruler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from config.errors import UserError
from data import Pool, Task
from suites import Column, Scope
from suites._sources import Filled, read_filler, select_split
from tasks import readers, ruler

ESSAY = tuple(kind for kind, settings in ruler.NIAH.items() if settings.haystack == "essay")


@dataclass(frozen=True)
class Ruler(Filled):
    """RULER's tasks."""

    ruler_tasks: tuple[str, ...] = ()
    """names of tasks, or all; empty = those whose sources are given"""
    haystack: tuple[str, ...] = ()
    """files of essays or other running text (.txt, .json with a text, passages); empty = the
    passages of --data and --filler"""
    squad: str = ""
    """SQuAD file, for the task qa_1"""

    unit, lengths, may_differ = "tokens", (4096, 8192, 16384), ("ruler_tasks",)

    def columns(self, scope: Scope) -> list[Column]:
        everything = [task for file in scope.data for task in readers.read(file)]
        questions = select_split(everything, self.source_split) if scope.data else []
        squad = readers.read(self.squad) if self.squad else []
        extra = read_filler(self.filler)
        texts = haystack_texts(self.haystack, questions, extra)
        kinds = select_ruler_tasks(self.ruler_tasks, texts, squad, questions)
        sentences = lru_cache(1)(lambda: ruler.sentences(texts))
        questions_of = {"qa_1": squad, "qa_2": questions}

        def make(kind: str, length: int) -> list[Task]:
            is_qa = kind in questions_of
            return ruler.make_tasks(
                kind,
                length,
                min(scope.n, len(questions_of[kind])) if is_qa else scope.n,
                scope.codec(),
                scope.seed,
                haystack=sentences() if kind in ESSAY else (),
                questions=questions_of[kind] if is_qa else (),
                extra=extra if is_qa else None,
            )

        return [
            Column(kind, length, partial(make, kind, length))
            for length in scope.lengths
            for kind in kinds
        ]

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        about = {"seed": scope.seed}
        if column.question in ESSAY:
            about["haystack"] = self.haystack_name(scope.data)
        return about

    def haystack_name(self, data: Sequence[str]) -> str:
        """Name the sources of `haystack_texts`."""
        if self.haystack:
            return ", ".join(Path(file).name for file in self.haystack)
        return f"passages of {', '.join(Path(f).name for f in (*data, *self.filler))}"


def haystack_texts(files: Sequence[str], tasks: Sequence[Task], extra: Pool | None) -> list[str]:
    """Return running text for RULER's essay tasks: of the files, else of the passages at hand."""
    if files:
        return [text for file in files for text in readers.read_texts(file)]
    pools = {id(task.pool): task.pool for task in tasks if task.pool}
    pools |= {id(extra): extra} if extra else {}
    return [text for pool in pools.values() for text in pool.texts]


def select_ruler_tasks(
    names: Sequence[str], texts: Sequence[str], squad: Sequence[Task], questions: Sequence[Task]
) -> list[str]:
    """Return the requested tasks; by default, those whose sources are given.

    UserError: an unknown task, or one whose source is missing.
    """
    for kind in names:
        if kind not in (*ruler.KINDS, "all"):
            known = ", ".join(ruler.KINDS)
            raise UserError(f"Unknown task of RULER {kind!r}: choose among all, {known}.")
    missing = {kind: "--haystack, essays or other running text" for kind in ESSAY if not texts}
    missing |= {} if squad else {"qa_1": "--squad, a file of SQuAD's form"}
    missing |= {} if questions else {"qa_2": "--data, HotpotQA's questions with their paragraphs"}
    requested = list(ruler.KINDS) if "all" in names else list(names)
    for kind in requested:
        if kind in missing:
            raise UserError(f"{kind} needs {missing[kind]}.")
    return requested or [kind for kind in ruler.KINDS if kind not in missing]
