"""What several suites make documents of: questions of --data, further passages, parts of a file."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
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


def sentences(texts: Iterable[str]) -> list[str]:
    """Split running texts (essays, articles) into sentences, for a haystack.

    A sentence ends at white space after ., ! or ? (closing quotes or brackets may follow the mark)
    and before a capital letter or a digit (opening ones may precede it). White space becomes one
    blank. The split is wrong after "Dr." and "J." and misses sentences that begin with a small
    letter, headings, and scripts without these marks.
    """
    border = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)\]]))\s+(?=["'“‘(\[]?[A-Z0-9])""")
    normal = (" ".join(text.split()) for text in texts)
    return [sentence for text in normal for sentence in border.split(text) if sentence]


def read_sentences(files: Sequence[str]) -> list[str]:
    """Read the sentences of running texts: of passages {text}, or of whole text files."""
    return sentences(text for file in files for text in readers.read_texts(file))


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
