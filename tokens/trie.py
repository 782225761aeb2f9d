"""The prefix tree of a batch: token sequences in one row, so that no prefix is computed twice.

A segment is a run of tokens without a branch. Segments are laid out depth first:

    sequences      tree              segment    0      1   2   3   4
    a b c d        a b ─┬─ c ─┬─ d   place      0  1 | 2 | 3 | 4 | 5  6
    a b c e             │     └─ e   ids        a  b | c | d | e | f  g   what the model reads
    a b f g             └─ f g       depth      0  1 | 2 | 3 | 3 | 2  3   at which position
                                     parent    -1  0 | 1 | 2 | 2 | 1  5   place of the token before
                                     end        7  7 | 5 | 4 | 5 | 7  7   of the token's subtree
                                     leaf      of the three sequences: segments 2, 3, 4

`end` makes ancestry a comparison of integers: place k is an ancestor of place q, or q itself, if
and only if `k <= q < end[k]`. Attention goes by it (tokens/attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# ---------------------------------------------------------------- the tree


@dataclass(slots=True)
class Segment:
    """A run of tokens without a branch, at the places [start, stop) of the layout."""

    start: int
    stop: int
    depth: int  # of its first token
    parent: int = -1  # index of the segment that it continues; -1: none
    end: int = 0  # end of its subtree in the layout

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Trie:
    """Token sequences as a prefix tree of T tokens, laid out depth first.

    >>> trie = build_trie([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]])
    >>> trie.ids.tolist(), trie.places(1).tolist()
    ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4])
    >>> trie.depth().tolist(), trie.parent().tolist(), trie.end().tolist()
    ([0, 1, 2, 3, 3, 2, 3], [-1, 0, 1, 2, 2, 1, 5], [7, 7, 5, 4, 5, 7, 7])
    """

    ids: np.ndarray  # [T]
    segments: list[Segment]  # in the order of the layout
    leaf: list[int]  # sequence -> the segment in which it ends

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, segment: int) -> list[int]:
        """Return the indices of the segments from the root to `segment`, both included."""
        upwards = []
        while segment >= 0:
            upwards.append(segment)
            segment = self.segments[segment].parent
        return upwards[::-1]

    def places_to(self, segment: int) -> np.ndarray:
        """Return the places of a segment's tokens and of all that stand before them."""
        path = [self.segments[i] for i in self.path(segment)]
        return np.concatenate([np.arange(s.start, s.stop) for s in path])

    def places(self, sequence: int) -> np.ndarray:
        """Return the places of a sequence's tokens in the layout, [length of the sequence]."""
        return self.places_to(self.leaf[sequence])

    def depth(self) -> np.ndarray:
        """Return the position of every token in its sequences, [T]."""
        return np.concatenate([np.arange(s.depth, s.depth + len(s)) for s in self.segments])

    def parent(self) -> np.ndarray:
        """Return the place of the token before every token, [T]; -1 at the start of a sequence."""
        parents = np.arange(-1, len(self) - 1)
        for s in self.segments:
            parents[s.start] = self.segments[s.parent].stop - 1 if s.parent >= 0 else -1
        return parents

    def end(self) -> np.ndarray:
        """Return the end of every token's subtree, [T]."""
        return np.repeat([s.end for s in self.segments], [len(s) for s in self.segments])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix, by bisection over slices."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    lo, hi = 0, n  # invariant: a[:lo] == b[:lo] and a[:hi] != b[:hi]
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if a[lo:middle] == b[lo:middle]:
            lo = middle
        else:
            hi = middle
    return lo


def sort_by_prefix(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of sequences, and the prefix shared with the predecessor.

    Both lists follow the order: `overlaps[i]` is the common prefix of sequences `order[i - 1]` and
    `order[i]`, 0 for the first one.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    return order, [0] + [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]


def build_trie(sequences: Sequence[Sequence[int]], overlaps: Sequence[int] | None = None) -> Trie:
    """Build the trie of non-empty sequences.

    overlaps: if the sequences are in lexicographic order already, the tokens that each has in
    common with its predecessor.
    """
    order: Sequence[int] = range(len(sequences))
    if overlaps is None:
        order, overlaps = sort_by_prefix(sequences)
    segments: list[Segment] = []
    ids: list[int] = []
    leaf = [-1] * len(sequences)

    def append(sequence: int, start: int, stop: int, parent: int) -> int:
        if start == stop:
            return parent
        first_place = len(ids)
        ids.extend(sequences[sequence][start:stop])
        segments.append(Segment(first_place, len(ids), start, parent))
        return len(segments) - 1

    # Each task on the stack: the sequences order[i:j] agree in their first `base` tokens, which end
    # in the segment `parent`. No recursion: a growing chat can branch deeper than Python's limit.
    stack = [(0, len(order), 0, -1)]
    while stack:
        i, j, base, parent = stack.pop()
        if j - i == 1:
            leaf[order[i]] = append(order[i], base, len(sequences[order[i]]), parent)
            continue
        # They agree up to the smallest overlap among them, and branch wherever it occurs.
        agree = min(overlaps[i + 1 : j])
        cuts = [i, *(k for k in range(i + 1, j) if overlaps[k] == agree), j]
        parent = append(order[i], base, agree, parent)
        stack += [(a, b, agree, parent) for a, b in pairwise(cuts)][::-1]

    # Children follow their parent in the layout, so one pass from the back closes all subtrees.
    for segment in reversed(segments):
        segment.end = max(segment.end, segment.stop)
        if segment.parent >= 0:
            above = segments[segment.parent]
            above.end = max(above.end, segment.end)
    return Trie(np.array(ids), segments, leaf)


# ---------------------------------------------------------------- buckets of attention

MAX_MASK = 1 << 24
"""Most entries of a bucket's mask: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a forward pass in floating-point operations; a backward pass costs twice that."""

    token: float  # of one token through the layers
    pair: float  # of one query that attends to one key
    call: float  # of one call of attention: what could be computed in the time of its overhead

    @classmethod
    def from_model(cls, model) -> Cost:
        """Derive the costs from the sizes of a transformers model.

        A call's overhead is that of a few kernels a layer; any value from a sixth to five times
        this one gave the same times on a CPU (dev/LESSONS.md).
        """
        config, layers = model.config, model.model.layers
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pair = 4 * len(layers) * config.num_attention_heads * head
        return cls(2 * sum(p.numel() for p in layers.parameters()), pair, len(layers) * 2e6)


@dataclass(slots=True)
class Bucket:
    """Segments whose attention is one call, padded to a common shape.

    Four segments with ancestors (A), tokens of their own (x) and padding (.):

        keys       A A A A A x x x      n_queries = 3, the longest segment
                   A A A A x x x .      n_keys = 8, the most ancestors and own tokens
                   A A A x x . . .
                   A A A x x . . .
    """

    segments: list[int]  # by index
    n_queries: int
    n_keys: int
    has_ancestors: bool  # False for all of them: the causal kernel needs no mask


def make_buckets(segments: Sequence[Segment], cost: Cost) -> list[Bucket]:
    """Put every segment into one bucket; start a new one where padding costs more than a call."""
    # Plain integers: this runs for every batch of prompts, over hundreds of segments.
    shapes = [(s.depth > 0, s.stop - s.start, s.depth + s.stop - s.start) for s in segments]
    # Similar shapes become neighbours: first by ancestors or none, then by the keys' next power of
    # two, then by the queries; the largest come first.
    keys = [(above, n_keys.bit_length(), n_queries) for above, n_queries, n_keys in shapes]
    buckets: list[Bucket] = []
    bucket, area = None, 0  # area: entries of the bucket's mask that are not padding
    for i in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
        above, n_queries, n_keys = shapes[i]
        if bucket is not None and bucket.has_ancestors == above:
            longest, widest = max(bucket.n_queries, n_queries), max(bucket.n_keys, n_keys)
            padded = (len(bucket.segments) + 1) * longest * widest
            wasted = padded - area - n_queries * n_keys
            if padded <= MAX_MASK and wasted * cost.pair <= cost.call:
                bucket.segments.append(i)
                bucket.n_queries, bucket.n_keys = longest, widest
                area += n_queries * n_keys
                continue
        bucket, area = Bucket([i], n_queries, n_keys, above), n_queries * n_keys
        buckets.append(bucket)
    return buckets


def output_rows(buckets: Sequence[Bucket], segments: Sequence[Segment]) -> np.ndarray:
    """Return for every place, [T], the row of its output.

    The outputs are those of the buckets one after the other, padding removed.
    """
    rows, n_done = np.zeros(sum(map(len, segments)), dtype=np.int64), 0
    for s in (segments[i] for bucket in buckets for i in bucket.segments):
        rows[s.start : s.stop] = n_done + np.arange(len(s))
        n_done += len(s)
    return rows


# ---------------------------------------------------------------- packing


def split_into_tries(
    sequences: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[tuple[list[int], Trie]]:
    """Yield tries of at most `max_tokens` tokens, each with the indices of its sequences.

    Lexicographic neighbours stay together, and a longer sequence is alone in its trie. A full trie
    is cut where neighbours share least, so that no group of similar prompts is torn apart, but not
    before it is half full.
    """
    order, overlaps = sort_by_prefix(sequences)
    start = 0
    while start < len(order):
        n_tokens, cut, half_full = 0, start, False
        for stop in range(start, len(order)):
            shared = overlaps[stop] if stop > start else 0
            if stop > start and (not half_full or shared <= overlaps[cut]):
                cut, half_full = stop, 2 * n_tokens >= max_tokens
            n_tokens += len(sequences[order[stop]]) - shared
            if stop > start and n_tokens > max_tokens:
                break
        else:
            cut = len(order)
        index = order[start:cut]
        yield index, build_trie([sequences[i] for i in index], [0, *overlaps[start + 1 : cut]])
        start = cut
