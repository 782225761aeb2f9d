"""The token trie: the turns of a training step as one prefix tree, so that no prefix is computed twice.

Holds: `Trie` and `build`, `split` (tries of a token budget), `Cost`, `hidden_states` (a trie through a transformers model), `dense_mask`.
Leaves out: which tokens are trained and with what weight (grpo.py). Not used by the training step yet.
Exercise it: `pytest tests/test_trie.py`. Read next: grpo.py.

A segment is a run of tokens between two branchings; segments are laid out depth first, and a token's position is its depth. Every token
attends to its ancestors and to itself: with `end[k]` = the end of k's subtree that is `k <= q < end[k]` for places k and q of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rollout import OwnCache


@dataclass(slots=True)
class Segment:
    """A run of tokens without a branch."""

    start: int  # its place in the layout, [start, stop)
    stop: int
    depth: int  # of its first token
    parent: int  # the segment that it goes on from; -1 = none
    level: int  # segments above it
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
        runs = [np.arange(self.segments[s].start, self.segments[s].stop) for s in self.line(self.leaf[sequence])]
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


def build(sequences: Sequence[Sequence[int]], least: int = 1) -> Trie:
    """The trie of non-empty sequences. A run is shared where that saves at least `least` tokens; otherwise each sequence gets its own."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    shared = [0] + [common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    segments: list[Segment] = []
    ids: list[int] = []
    leaf = [-1] * len(sequences)

    def add(sequence: int, start: int, stop: int, parent: int) -> int:
        if start == stop:
            return parent
        level = segments[parent].level + 1 if parent >= 0 else 0
        segments.append(Segment(len(ids), len(ids) + stop - start, start, parent, level))
        ids.extend(sequences[sequence][start:stop])
        return len(segments) - 1

    stack = [(0, len(order), 0, -1)]  # sequences order[i:j] agree in their first `base` tokens, which end in segment `parent`
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What computing a trie level by level costs, in floating-point operations."""

    token: float  # a token through the layers
    pair: float  # a token that looks at another one
    call: float  # one more call of the model: what its overhead could have computed; a guess until it is measured

    @classmethod
    def of(cls, model, call: float = 5e7) -> Cost:
        """From a transformers model's sizes."""
        config = model.config
        attention = config.num_hidden_layers * model.model.layers[0].self_attn.head_dim * config.num_attention_heads
        return cls(2 * sum(p.numel() for p in model.model.layers.parameters()), 4 * attention, call)

    def __call__(self, trie: Trie) -> float:
        total = 0.0
        for level in range(1 + max(s.level for s in trie.segments)):
            for batch in _batches(trie, level, 1 << 14):
                length = max(len(trie.segments[i]) for i in batch)
                above = max(trie.segments[i].depth for i in batch)
                total += self.call + len(batch) * length * (self.token + (above + length) * self.pair)
        return total


def cheapest(sequences: Sequence[Sequence[int]], cost: Cost) -> Trie:
    """The trie that shares as much as pays: every level is another call, and padding and short runs eat up what sharing saves."""
    return min((build(sequences, least) for least in (1, 16, 64, 256, 1 << 60)), key=cost)


def split(sequences: Sequence[Sequence[int]], max_tokens: int, cost: Cost | None = None) -> Iterator[tuple[list[int], Trie]]:
    """Tries of at most `max_tokens` tokens (a longer sequence stands alone), each with the numbers of its sequences.

    Neighbours in the order of the alphabet stay together: what is cut apart shares least. With a `cost` each trie shares as much as
    pays, and may have more tokens for it.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    start = 0
    while start < len(order):
        size = len(sequences[order[start]])
        stop = start + 1
        while stop < len(order):
            size += len(sequences[order[stop]]) - common(sequences[order[stop - 1]], sequences[order[stop]])
            if size > max_tokens:
                break
            stop += 1
        chosen = order[start:stop]
        some = [sequences[i] for i in chosen]
        yield chosen, cheapest(some, cost) if cost else build(some)
        start = stop


# ---------------------------------------------------------------- through the model


class _Ancestors(OwnCache):
    """What transformers calls `past_key_values`: the keys and values of all segments so far, per layer in one flat list [P, H, D].

    Differentiable: a segment's keys get the gradient of everything below it.
    """

    def __init__(self):
        self.keys: list[list[torch.Tensor]] = []  # per layer what has been computed, merged when it is needed
        self.values: list[list[torch.Tensor]] = []
        self.above: torch.Tensor | None = None  # [S, A] places of each row's ancestors in the flat lists; None at the top
        self.own: torch.Tensor | None = None  # places of the real tokens in this batch, flat in [S * L]

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            self.keys.append([])
            self.values.append([])
        out = []
        for kv, new in ((self.keys[layer_idx], key), (self.values[layer_idx], value)):
            if self.above is not None:
                if len(kv) > 1:
                    kv[:] = [torch.cat(kv)]
                past = kv[0][self.above].transpose(1, 2)  # [S, H, A, D]
            kv.append(new.transpose(1, 2).flatten(0, 1)[self.own])
            out.append(new if self.above is None else torch.cat([past, new], 2))
        return out[0], out[1]


def _batches(trie: Trie, level: int, max_tokens: int) -> Iterator[list[int]]:
    """Segments of one level that go through the model side by side: similar in what is above them and in length."""
    chosen: list[int] = []
    width = 0
    of_level = [i for i, s in enumerate(trie.segments) if s.level == level]
    for i in sorted(of_level, key=lambda i: (trie.segments[i].depth, len(trie.segments[i]))):
        s = trie.segments[i]
        wider = max(width, len(s))
        if chosen and ((len(chosen) + 1) * wider > max_tokens or s.depth > 1.25 * trie.segments[chosen[0]].depth + 32):
            yield chosen
            chosen, wider = [], len(s)
        chosen.append(i)
        width = wider
    yield chosen


def hidden_states(model, trie: Trie, max_tokens: int = 1 << 14) -> torch.Tensor:
    """Last hidden states of a trie [T, D], in the order of the layout, every token computed once.

    Level by level: the segments of a level stand side by side, padded on the right, and attend to the keys and values of those above
    them, which carry their gradient. Exact for any model of transformers with full attention and rotary positions.
    """
    device = model.device
    cache = _Ancestors()
    at = np.zeros(len(trie), dtype=np.int64)  # place in the layout -> place in the order of computation
    parts, n_done = [], 0
    for level in range(max(s.level for s in trie.segments) + 1):
        for batch in _batches(trie, level, max_tokens):
            segments = [trie.segments[i] for i in batch]
            length, above = max(map(len, segments)), max(s.depth for s in segments)
            ids = np.zeros((len(batch), length), dtype=np.int64)
            positions = np.zeros_like(ids)
            real = np.arange(length) < np.array([len(s) for s in segments])[:, None]  # [S, L]
            ancestors = np.zeros((len(batch), above), dtype=np.int64)
            for row, (i, s) in enumerate(zip(batch, segments, strict=True)):
                ids[row, : len(s)] = trie.ids[s.start : s.stop]
                positions[row, : len(s)] = np.arange(s.depth, s.depth + len(s))
                at[s.start : s.stop] = n_done + np.arange(len(s))
                n_done += len(s)
                if above:
                    line = [trie.segments[k] for k in trie.line(i)[:-1]]
                    ancestors[row, : s.depth] = np.concatenate([at[a.start : a.stop] for a in line])
            mask = None
            if above:
                seen = np.arange(above) < np.array([s.depth for s in segments])[:, None]  # [S, A]
                causal = np.tri(length, dtype=bool)
                both = (
                    np.broadcast_to(seen[:, None], (len(batch), length, above)),
                    np.broadcast_to(causal, (len(batch), length, length)),
                )
                mask = torch.from_numpy(np.concatenate(both, 2)).to(device)[:, None]  # [S, 1, L, A + L]
            cache.above = torch.from_numpy(ancestors).to(device) if above else None
            cache.own = torch.from_numpy(np.flatnonzero(real)).to(device)
            hidden = model.model(
                input_ids=torch.from_numpy(ids).to(device), position_ids=torch.from_numpy(positions).to(device), attention_mask=mask,
                past_key_values=cache, use_cache=True,
            ).last_hidden_state  # fmt: skip
            parts.append(hidden.flatten(0, 1).index_select(0, cache.own))
    return torch.cat(parts).index_select(0, torch.from_numpy(at).to(device))


def dense_mask(trie: Trie) -> torch.Tensor:
    """Who sees whom, [1, 1, T, T]: place q sees place k iff k <= q < end[k]."""
    q = torch.arange(len(trie))
    end = torch.from_numpy(trie.end())
    return ((q <= q[:, None]) & (q[:, None] < end))[None, None]
