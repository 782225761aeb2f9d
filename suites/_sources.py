"""What several suites read: the questions of --data, further passages, parts of a file.

Holds: `Filled`, `Among`, `question_files`, `select_split`, `read_filler`. Leaves out: forms
of files (tasks/readers.py).
Exercise it: `pytest tests/tasks/test_suites.py`. Read next: suites/ruler_hqa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from config.errors import UserError
from config.settings import COUNT, SHARE
from config.terminal import say
from data import Pool, Task
from suites import Column, Scope, Suite
from tasks import passages, readers


@dataclass(frozen=True)
class Filled(Suite):
    """Documents that are made of passages."""

    filler: tuple[str, ...] = ()
    """files of further passages {title, text}"""
    source_split: str = ""
    """use only questions of this split of the source: train or validation"""


@dataclass(frozen=True)
class Among(Filled):
    """Questions that come with one paragraph each, among others; the same at every length."""

    together: Annotated[int, COUNT] = 1
    """at most so many questions share one document, which is then computed once for all of them"""
    absent: Annotated[float, SHARE] = 0.0
    """share of the questions whose paragraph is left out: right is NOT_FOUND (data.py)"""
    near: bool = True
    """among the passages of these are the other paragraphs of the article, or the most alike"""

    def columns_among(self, scope: Scope, questions: Sequence[Task], name: str) -> list[Column]:
        """Make a column of each length."""
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


def question_files(data: Sequence[str], standard: str) -> list[str]:
    """Return the files of --data; by default, the held-out ones that `data get` downloaded."""
    if data:
        return list(data)
    files = sorted(
        str(path)
        for path in Path("data", standard).rglob("*")
        if path.suffix in (".json", ".jsonl", ".parquet")
    )
    held_out = [path for path in files if Path(path).name.startswith(("validation", "dev", "test"))]
    if not held_out:
        raise UserError(
            "Give a file of questions with their own paragraphs, or download some first: "
            f"python cli.py data get {standard}."
        )
    return held_out


def select_split(tasks: Sequence[Task], split: str) -> list[Task]:
    """Return the tasks of one split of the source, "" for all; UserError if there are none."""
    selected = [task for task in tasks if not split or task.split == split]
    if not selected:
        splits = ", ".join(sorted({task.split for task in tasks})) or "none"
        raise UserError(f"There is no split {split!r}; there are {splits}.")
    return selected


def read_filler(files: Sequence[str]) -> Pool | None:
    """Read further passages {title, text} into one pool of all files; None without files."""
    if not files:
        return None
    pools = [readers.read_passages(file) for file in files]
    titles = [title for pool in pools for title in pool.titles]
    return Pool(titles, [text for pool in pools for text in pool.texts])
