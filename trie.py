"""The token trie: token sequences as one prefix tree in one row, so that no prefix is computed twice, in training and in rollout.

Holds: `Trie` and `build`, `split` (tries of a token budget), `Cost`, `forward` (a packed row through a transformers model, with an attention
of our own), `Attention` (that of a trie), `hidden_states`, `dense_mask`. Leaves out: which tokens are trained and with what weight (grpo.py),
the key/value cache (slots.py). Exercise it: `pytest tests/test_trie.py`. Read next: slots.py.

A segment is a run of tokens between two branchings; segments are laid out depth first, and a token's position is its depth. Every token
attends to its ancestors and to itself: with `end[k]` = the end of k's subtree that is `k <= q < end[k]` for places k and q of the layout.
All but attention sees a row of tokens without padding; attention is computed bucket by bucket, segments of similar shape side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from text import UserError


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


def in_order(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Their order of the alphabet, and how many tokens each has in common with the one before it in that order."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    return order, [0] + [common(sequences[a], sequences[b]) for a, b in pairwise(order)]


def build(sequences: Sequence[Sequence[int]], least: int = 1, shared: Sequence[int] | None = None) -> Trie:
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


def cheapest(sequences: Sequence[Sequence[int]], cost: Cost, shared: Sequence[int] | None = None) -> Trie:
    """The trie that shares as much as pays: buckets cost something each, padding and short runs eat up what sharing saves."""
    everything = build(sequences, 1, shared)
    if len(everything) == sum(map(len, sequences)):
        return everything
    return min((everything, *(build(sequences, least, shared) for least in (64, 1 << 60))), key=cost)


def split(sequences: Sequence[Sequence[int]], max_tokens: int, cost: Cost | None = None) -> Iterator[tuple[list[int], Trie]]:
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


NAME = "memagent"  # of our attention among those of transformers
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query [1, H, T, D], key and value [1, H', T, D], scale) -> [1, T, H, D]"""


@lru_cache(maxsize=1)
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module, query, key, value, attention_mask, attend: Attend | None = None, **kwargs):
        if attend is None:  # everybody else's call of the model
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return attend(module.layer_idx, query, key, value, kwargs["scaling"]), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_our_attention(model) -> None:
    """Have the model ask `attend` where it is given one. UserError for a model with an attention of its own."""
    from transformers.utils import logging

    _register()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what cannot be set is a warning there
    try:
        model.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(verbosity)
    if model.config._attn_implementation != NAME:
        raise UserError(f"A {type(model).__name__} does not take its attention from transformers' table; give another --model.")


def forward(model, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Last hidden states [T, D] of one row of tokens, ids and positions [T], with the attention left to `attend`.

    For any decoder of transformers that takes its attention from the library's table; `attend` is asked again when a checkpointed layer
    is recomputed. The model keeps working as before for every other call.
    """
    if model.config._attn_implementation != NAME:
        use_our_attention(model)
    prepared = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device=ids.device
    )  # a mask of four dimensions: the library builds none of its own
    return model.model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=prepared, use_cache=False, attend=attend
    ).last_hidden_state[0]


def take(x: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """x[at] along the first dimension; None: all of x. On a CPU a third of the time that indexing takes, gradient included."""
    return x if at is None else x.index_select(0, at.flatten()).view(*at.shape, *x.shape[1:])


FEW = 16  # queries of a row up to which the library's attention on a CPU loses to two products of matrices


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention of S rows, query [S, H, L, D], key and value [S, H', K, D], mask [S, 1, L, K] or None = causal; returns [S, L, H, D]."""
    n, heads, length, depth = query.shape
    if mask is not None and length <= FEW and query.device.type == "cpu" and query.dtype == torch.float32:
        # the heads of a group are queries of one: keys and values are read once and not repeated
        query = (query * scale).reshape(n * key.shape[1], -1, depth)
        seen = torch.bmm(query, key.flatten(0, 1).transpose(1, 2)).view(n, heads, length, -1).add_(mask).softmax(-1)
        return torch.bmm(seen.view(len(query), -1, seen.shape[3]), value.flatten(0, 1)).view(n, heads, length, -1).transpose(1, 2)
    if query.shape[1] != key.shape[1]:  # grouped heads: repeated, because on a CPU the fast kernel wants as many
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale).transpose(1, 2)


def side_by_side(
    segments: Sequence[Segment], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """S segments padded on the right to L tokens: (places [S, L], mask [S, 1, L, K], which of the S * L are tokens [n]).

    Keys are the ancestors' and then the segment's own, so that the column is the depth. No mask: nothing stands above, plain causal. No
    list of tokens: all of them are.
    """
    sizes, depths, starts = (np.array(x)[:, None] for x in zip(*((len(s), s.depth, s.start) for s in segments), strict=True))
    column = np.arange(sizes.max())
    places = torch.from_numpy(starts + np.minimum(column, sizes - 1)).to(device)  # padding repeats the last
    real = None if (sizes == len(column)).all() else torch.from_numpy(np.flatnonzero(column < sizes)).to(device)
    if not depths.any():
        return places, None, real
    seen = np.arange((sizes + depths).max()) <= (depths + column)[:, :, None]  # [S, L, K]
    return places, minus_inf(torch.from_numpy(seen)[:, None].to(device), dtype), real


@dataclass(slots=True)
class _Bucket:
    """S segments, L queries and K keys each, padded on the right."""

    queries: torch.Tensor | slice  # [S, L] places; a slice for one segment
    keys: torch.Tensor | slice  # [S, K] places of its ancestors, then its own
    mask: torch.Tensor | None  # [S, 1, L, K], 0 or -inf; None: nothing above them, causal
    real: torch.Tensor | None  # [n] which of the S * L are tokens; None = all


class Attention:
    """The exact attention of a trie, differentiable: each segment attends to its ancestors and causally to itself.

    On a GPU one FlexAttention call with a block mask. On a CPU whatever costs least by `cost`: plain causal calls where nothing stands
    above, gathered ancestors where something does, or one dense mask for a small row.
    """

    def __init__(self, trie: Trie, cost: Cost, device: torch.device, dtype: torch.dtype = torch.float32):
        self.flex = block_mask(trie.end(), device) if takes_flex(device) else None
        self.buckets: list[_Bucket] = []
        if self.flex:
            return
        if cost.dense(trie) < cost.by_buckets(trie):
            everything = slice(0, len(trie))
            self.buckets.append(_Bucket(everything, everything, minus_inf(dense_mask(trie).to(device), dtype), None))
            self.order = None
            return
        chosen = buckets(trie.segments, cost)
        self.buckets = [self._bucket(trie, some, [trie.segments[i] for i in some], device, dtype) for some in chosen]
        self.order = torch.from_numpy(outputs_of(chosen, trie.segments)).to(device)

    @staticmethod
    def _bucket(trie: Trie, chosen: list[int], segments: list[Segment], device: torch.device, dtype: torch.dtype) -> _Bucket:
        if len(segments) == 1 and not segments[0].depth:
            span = slice(segments[0].start, segments[0].stop)
            return _Bucket(span, span, None, None)
        queries, mask, real = side_by_side(segments, device, dtype)
        if mask is None:
            return _Bucket(queries, queries, None, real)
        keys = np.zeros((len(segments), mask.shape[3]), dtype=np.int64)
        for row, i in enumerate(chosen):
            line = np.concatenate([np.arange(trie.segments[k].start, trie.segments[k].stop) for k in trie.line(i)])
            keys[row, : len(line)] = line
        return _Bucket(queries, torch.from_numpy(keys).to(device), mask, real)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        if self.flex:
            return _flex()(query, key, value, block_mask=self.flex, scale=scale, enable_gqa=True).transpose(1, 2)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]

        def rows(x: torch.Tensor, at: torch.Tensor | slice) -> torch.Tensor:  # [S, H, L or K, D]
            return (x[at][None] if isinstance(at, slice) else take(x, at)).transpose(1, 2)

        parts = []
        for b in self.buckets:
            out = sdpa(rows(q, b.queries), rows(k, b.keys), rows(v, b.keys), b.mask, scale).flatten(0, 1)
            parts.append(take(out, b.real))
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        return take(out, self.order)[None]


def minus_inf(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to the scores, from one that says what is seen. Made once, the library would do it in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def hidden_states(model, trie: Trie, cost: Cost | None = None) -> torch.Tensor:
    """Last hidden states of a trie [T, D], in the order of the layout, every token computed once."""
    device = model.device
    attend = Attention(trie, cost or Cost.of(model), device, model.dtype)
    ids, depth = (torch.from_numpy(np.pad(x, (0, padding(trie, device)))).to(device) for x in (trie.ids, trie.depth()))
    return forward(model, ids, depth, attend)[: len(trie)]


def dense_mask(trie: Trie) -> torch.Tensor:
    """Who sees whom, [1, 1, T, T]: place q sees place k iff k <= q < end[k]."""
    q = torch.arange(len(trie))
    end = torch.from_numpy(trie.end())
    return ((q <= q[:, None]) & (q[:, None] < end))[None, None]


# ---------------------------------------------------------------- on a GPU

BLOCK = 128  # FlexAttention's


def takes_flex(device: torch.device) -> bool:
    return device.type == "cuda"


def padding(trie: Trie, device: torch.device) -> int:
    """Tokens appended on a GPU: rows of a few lengths only, or the attention kernel would be compiled for each."""
    return -len(trie) % (4 * BLOCK) if takes_flex(device) else 0


def block_mask(end: np.ndarray, device: torch.device):
    """FlexAttention's mask of a layout, from the ends of the subtrees [T]. Block by block, so that no [T, T] is ever made."""
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-len(end) // (4 * BLOCK)) * 4
    ends = torch.arange(1, n * BLOCK + 1)  # what is appended sees itself alone
    ends[: len(end)] = torch.from_numpy(end)
    by_block = ends.view(n, BLOCK)
    i = torch.arange(n)
    some = (i <= i[:, None]) & (by_block.amax(1) > i[:, None] * BLOCK)  # [queries, keys], blocks
    full = (i < i[:, None]) & (by_block.amin(1) >= (i[:, None] + 1) * BLOCK)

    def lists(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = chosen.int().argsort(dim=1, descending=True, stable=True).int()
        return chosen.sum(1).int()[None, None].to(device), index[None, None].to(device)

    ends = ends.to(device)
    return BlockMask.from_kv_blocks(
        *lists(some & ~full), *lists(full), BLOCK_SIZE=BLOCK, mask_mod=lambda b, h, q, k: (k <= q) & (q < ends[k]),
        seq_lengths=(n * BLOCK, n * BLOCK),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
