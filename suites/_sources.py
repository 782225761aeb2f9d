"""What several suites read: the questions of --data, further passages, parts of a file.

Holds: `Filled`, `question_files`, `select_split`, `read_filler`. Leaves out: forms of files
(tasks/readers.py).
Exercise it: `pytest tests/tasks/test_suites.py`. Read next: suites/ruler_hqa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from data import Pool, Task
from suites import Suite
from tasks import readers


@dataclass(frozen=True)
class Filled(Suite):
    """Documents that are made of passages."""

    filler: tuple[str, ...] = ()
    """files of further passages {title, text}"""
    source_split: str = ""
    """use only questions of this split of the source: train or validation"""


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
