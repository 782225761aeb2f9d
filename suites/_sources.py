"""What several suites make documents of: questions of --data, further passages, parts of a file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


def select_split(tasks: Sequence[Task], split: str) -> list[Task]:
    """Return the tasks of one split of the source, "" for all; UserError if there are none."""
    selected = [task for task in tasks if split in ("", task.split)]
    if not selected:
        splits = ", ".join(sorted({task.split for task in tasks})) or "none"
        raise UserError(f"There is no split {split!r}; there are {splits}.")
    return selected


def read_filler(files: Sequence[str]) -> Pool | None:
    """Read further passages {title, text} into one pool of all files; None without files."""
    pools = [readers.read_passages(Path(file)) for file in files]
    if not pools:
        return None
    titles = [title for pool in pools for title in pool.titles]
    return Pool(titles, [text for pool in pools for text in pool.texts])


def draws(rng: random.Random, n: int) -> Iterator[int]:
    """Yield range(n) in random order (Fisher-Yates), lazily: a prefix does not depend on how many
    more are drawn."""
    moved: dict[int, int] = {}
    for i in range(n):
        j = rng.randrange(i, n)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def with_own_pool(tasks: Sequence[Task], passages: Sequence[readers.Passage]) -> list[Task]:
    """Give tasks, whose orders are indices into `passages`, one pool of just those they use."""
    used = sorted({k for task in tasks for k in task.order})
    index = {k: new for new, k in enumerate(used)}
    pool = readers.pool_of(passages[k] for k in used)
    return [replace(task, pool=pool, order=tuple(index[k] for k in task.order)) for task in tasks]
