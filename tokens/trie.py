"""The prefix tree of a batch: token sequences in one row, so that no prefix is computed twice.

Holds: `Segment`, `Trie`, `build`, `split` (trees of a token budget), `Cost`, `buckets`. Leaves out: the attention
of that tree (tokens/attention.py), which tokens are trained and with what weight (grpo.py).
Exercise it: `pytest tests/tokens/test_trie.py`. Read next: tokens/attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(slots=True)
class Segment:
    """A run of tokens without a branch."""

    start: int  # its place in the layout, [start, stop)
    stop: int
    depth: int  # of its first token
    parent: int = -1  # the segment that it goes on from; -1 = none
    end: int = 0  # end of its subtree in the layout

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Trie:
    """Token sequences as a prefix tree of T tokens, laid out depth first."""

    ids: np.ndarray  # [T]
    segments: list[Segment]  # in the order of the layout
    leaf: list[int]  # sequence -> the segment it ends in

    def __len__(self) -> int:
        return len(self.ids)

    def line(self, segment: int) -> list[int]:
        """A segment and those above it, the topmost first."""
        out = []
        while segment >= 0:
            out.append(segment)
            segment = self.segments[segment].parent
        return out[::-1]

    def places(self, sequence: int) -> np.ndarray:
        """Where the tokens of a sequence stand in the layout, [length of the sequence]."""
        runs = [
            np.arange(self.segments[s].start, self.segments[s].stop)
            for s in self.line(self.leaf[sequence])
        ]
        return np.concatenate(runs)

    def depth(self) -> np.ndarray:
        """Position of every token in its sequences, [T]."""
        return np.concatenate([np.arange(s.depth, s.depth + len(s)) for s in self.segments])

    def parent(self) -> np.ndarray:
        """Place of the token before every token, [T]; -1 at the first of a sequence."""
        out = np.arange(-1, len(self) - 1)
        for s in self.segments:
            out[s.start] = self.segments[s.parent].stop - 1 if s.parent >= 0 else -1
        return out

    def end(self) -> np.ndarray:
        """End of every token's subtree, [T]."""
        return np.repeat([s.end for s in self.segments], [len(s) for s in self.segments])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    lo, hi = 0, n  # a[:lo] == b[:lo], a[:hi] != b[:hi]
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if a[lo:middle] == b[lo:middle]:
            lo = middle
        else:
            hi = middle
    return lo


def in_order(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Their order of the alphabet, and how many tokens each has in common with the one before it in that order."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    return order, [0] + [common(sequences[a], sequences[b]) for a, b in pairwise(order)]


def build(
    sequences: Sequence[Sequence[int]], least: int = 1, shared: Sequence[int] | None = None
) -> Trie:
    """The trie of non-empty sequences. A run is shared where that saves at least `least` tokens; otherwise each sequence gets its own.

    shared: for sequences in the order of the alphabet, how many tokens each has in common with the one before it.
    """
    order: Sequence[int] = range(len(sequences))
    if shared is None:
        order, shared = in_order(sequences)
    segments: list[Segment] = []
    ids: list[int] = []
    leaf = [-1] * len(sequences)

    def add(sequence: int, start: int, stop: int, parent: int) -> int:
        if start == stop:
            return parent
        at = len(ids)
        ids.extend(sequences[sequence][start:stop])
        segments.append(Segment(at, len(ids), start, parent))
        return len(segments) - 1

    stack = [
        (0, len(order), 0, -1)
    ]  # sequences order[i:j] agree in their first `base` tokens, which end in segment `parent`
    while stack:
        i, j, base, parent = stack.pop()
        if j - i == 1:
            leaf[order[i]] = add(order[i], base, len(sequences[order[i]]), parent)
            continue
        m = min(shared[i + 1 : j])
        cuts = [i, *(k for k in range(i + 1, j) if shared[k] == m), j]
        if (j - i - 1) * (m - base) >= least:
            parent, base = add(order[i], base, m, parent), m
        stack += [(a, b, base, parent) for a, b in pairwise(cuts)][::-1]
    for segment in reversed(segments):
        segment.end = max(segment.end, segment.stop)
        if segment.parent >= 0:
            above = segments[segment.parent]
            above.end = max(above.end, segment.end)
    return Trie(np.array(ids), segments, leaf)


MAX_MASK = 1 << 24  # entries of a bucket's mask at most: 64 MiB in float32


@dataclass(slots=True)
class Group:
    """Segments whose attention is computed side by side."""

    chosen: list[int]
    length: int  # queries of the longest
    wide: int  # keys of the widest: what stands above a segment and itself
    below: bool  # whether something stands above them


def grouped(segments: Sequence[Segment], cost: Cost) -> list[Group]:
    """Segments side by side, padded to the longest: a new group where padding costs more than the overhead of one."""
    # plain integers: this runs for every batch of prompts, over hundreds of segments
    shapes = [(s.depth > 0, s.stop - s.start, s.depth + s.stop - s.start) for s in segments]
    keys = [(below, own.bit_length(), length) for below, length, own in shapes]
    out: list[Group] = []
    group, area = None, 0
    for i in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
        below, length, own = shapes[i]
        if group is not None and group.below == below:
            longest, wide = max(group.length, length), max(group.wide, own)
            padded = (len(group.chosen) + 1) * longest * wide
            if padded <= MAX_MASK and (padded - area - length * own) * cost.pair <= cost.call:
                group.chosen.append(i)
                group.length, group.wide, area = longest, wide, area + length * own
                continue
        group, area = Group([i], length, own, below), length * own
        out.append(group)
    return out


def buckets(segments: Sequence[Segment], cost: Cost) -> list[list[int]]:
    """Which segments' attention is computed side by side, by number."""
    return [group.chosen for group in grouped(segments, cost)]


def outputs_of(chosen: Sequence[Sequence[int]], segments: Sequence[Segment]) -> np.ndarray:
    """Where the outputs of buckets, one after the other and without padding, have each place, [T]."""
    back, n_done = np.zeros(sum(map(len, segments)), dtype=np.int64), 0
    for s in (segments[i] for bucket in chosen for i in bucket):
        back[s.start : s.stop] = n_done + np.arange(len(s))
        n_done += len(s)
    return back


# ---------------------------------------------------------------- through the model


@dataclass(frozen=True, slots=True)
class Cost:
    """What a forward pass costs, in floating-point operations. A backward pass costs twice that, which changes no choice."""

    token: float  # a token through the layers
    pair: float  # a token that looks at another one
    call: float  # a bucket of attention: what its overhead could have computed

    @classmethod
    def of(cls, model) -> Cost:
        """From a transformers model's sizes. A bucket's overhead is that of a few calls a layer; any value
        from a sixth to five times this one gave the same times on a CPU (dev/LOG.md)."""
        config, layers = model.config, model.model.layers
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pair = 4 * len(layers) * config.num_attention_heads * head
        return cls(2 * sum(p.numel() for p in layers.parameters()), pair, len(layers) * 2e6)

    def __call__(self, trie: Trie) -> float:
        return self.token * len(trie) + min(self.dense(trie), self.by_buckets(trie))

    def dense(self, trie: Trie) -> float:
        """Attention as one call with a mask [T, T]."""
        return self.call + self.pair * len(trie) ** 2

    def by_buckets(self, trie: Trie) -> float:
        """Attention bucket by bucket, padding included; the causal kernel leaves half of the pairs out."""
        return sum(
            self.call + self.pair * len(b.chosen) * b.length * b.wide * (1 if b.below else 0.5)
            for b in grouped(trie.segments, self)
        )


def cheapest(
    sequences: Sequence[Sequence[int]], cost: Cost, shared: Sequence[int] | None = None
) -> Trie:
    """The trie that shares as much as pays: buckets cost something each, padding and short runs eat up what sharing saves."""
    everything = build(sequences, 1, shared)
    if len(everything) == sum(map(len, sequences)):
        return everything
    return min(
        (everything, *(build(sequences, least, shared) for least in (64, 1 << 60))), key=cost
    )


def split(
    sequences: Sequence[Sequence[int]], max_tokens: int, cost: Cost | None = None
) -> Iterator[tuple[list[int], Trie]]:
    """Tries of at most `max_tokens` tokens (a longer sequence stands alone), each with the numbers of its sequences.

    Neighbours in the order of the alphabet stay together. A full trie is cut where its neighbours share least, so that a group is
    not torn apart, but not before it is half full. With a `cost` each trie shares as much as pays, and may have more tokens for it.
    """
    order, shared = in_order(sequences)
    start = 0
    while start < len(order):
        size, stop, cut, half = 0, start, start + 1, False
        while stop < len(order):
            size += len(sequences[order[stop]]) - (shared[stop] if stop > start else 0)
            if stop > start and size > max_tokens:
                break
            stop += 1
            if stop < len(order) and (not half or shared[stop] <= shared[cut]):
                cut, half = stop, 2 * size >= max_tokens
        cut = len(order) if stop == len(order) else cut
        chosen, overlap, start = order[start:cut], [0, *shared[start + 1 : cut]], cut
        some = [sequences[i] for i in chosen]
        yield chosen, cheapest(some, cost, overlap) if cost else build(some, 1, overlap)
