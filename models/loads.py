"""What each rank computes of an update: about as much as any other, in as many passes.

Every rank waits for the slowest one in each pass. What is sampled is dealt by tasks, but of these
only some have a signal, and rows are trained on where most of their neighbours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from models import ranks
from models.logprobs import Row, TokenBatch, pack
from tokens.trie import sort_by_prefix


def stretches(sizes: Sequence[int], n: int) -> list[list[int]]:
    """Cut a list of items into n stretches of about the same size, as indices.

    >>> stretches([4, 2, 2, 1, 1, 2], 3)
    [[0], [1, 2], [3, 4, 5]]
    """
    total, done, parts = sum(sizes), 0, [[] for _ in range(n)]
    for i, size in enumerate(sizes):
        middle = n * (2 * done + size) // (2 * total) if total else 0
        parts[min(middle, n - 1)].append(i)  # the last item may have no size
        done += size
    return parts


def new_tokens(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of rows and how many tokens each adds to those before it."""
    if not rows:
        return [], []
    order, overlaps = sort_by_prefix([row.prompt_ids + row.response_ids for row in rows])
    return order, [len(rows[i]) - shared for i, shared in zip(order, overlaps, strict=True)]


def balance(rows: list[Row]) -> list[Row]:
    """Move whole trajectories between ranks, so that each has about as many tokens to compute.

    rows: this rank's; a trajectory's follow one another. Ranks keep what they have as far as that
    goes, and a group is torn at the border of two ranks only, so that most of what its trajectories
    share is computed once (a collective).
    """
    if ranks.world() == 1:
        return rows
    here: dict[int, list[Row]] = {}  # by trajectory
    for row in rows:
        here.setdefault(row.trajectory, []).append(row)
    tokens = dict.fromkeys(here, 0)  # that each adds: what is shared counts once
    for i, new in zip(*new_tokens(rows), strict=True):
        tokens[rows[i].trajectory] += new
    everywhere = [*chain.from_iterable(t.items() for t in ranks.all_gather_object(tokens))]
    parts = stretches([size for _, size in everywhere], ranks.world())
    mine = [everywhere[i][0] for i in parts[ranks.rank()]]
    leaving = {number: part for number, part in here.items() if number not in mine}
    for arriving in ranks.all_gather_object(leaving):
        here |= arriving
    return [row for number in mine for row in here[number]]


def passes(rows: Sequence[Row], max_tokens: int, filler: int = 0) -> Iterator[TokenBatch]:
    """Yield rows packed into tries, one per pass through the model.

    All ranks contribute their shards to every pass: one with fewer tries ends with empty ones
    of the token `filler`, one that the policy may say.
    """
    batches = list(pack(rows, max_tokens))
    n = int(ranks.all_reduce_max(len(batches)))  # before any pass, which is a collective too
    (empty,) = pack([Row([0], [filler], [])], 2)
    empty.index = []
    yield from batches
    yield from repeat(empty, n - len(batches))
