"""The token trie: token sequences as one prefix tree in one row, so that no prefix is computed twice, in training and in rollout.

Holds: `Trie` and `build`, `split` (tries of a token budget), `Cost`, `forward` (a packed row through a transformers model, with an attention
of our own), `Attention` (that of a trie), `hidden_states`, `dense_mask`. Leaves out: which tokens are trained and with what weight (grpo.py),
the key/value cache (engines/hf.py). Exercise it: `pytest tests/tokens/test_trie.py`. Read next: engines/hf.py.

A segment is a run of tokens between two branchings; segments are laid out depth first, and a token's position is its depth. Every token
attends to its ancestors and to itself: with `end[k]` = the end of k's subtree that is `k <= q < end[k]` for places k and q of the layout.
All but attention sees a row of tokens without padding; attention is computed bucket by bucket, segments of similar shape side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from config.errors import UserError
from tokens.trie import Cost, Segment, Trie, buckets, outputs_of

NAME = "memagent"  # of our attention among those of transformers
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query [1, H, T, D], key and value [1, H', T, D], scale) -> [1, T, H, D]"""


@lru_cache(maxsize=1)
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module, query, key, value, attention_mask, attend: Attend | None = None, **kwargs
    ):
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
        raise UserError(
            f"A {type(model).__name__} does not take its attention from transformers' table; give another --model."
        )


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
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=prepared,
        use_cache=False,
        attend=attend,
    ).last_hidden_state[0]


def take(x: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """x[at] along the first dimension; None: all of x. On a CPU a third of the time that indexing takes, gradient included."""
    return x if at is None else x.index_select(0, at.flatten()).view(*at.shape, *x.shape[1:])


FEW = 16  # queries of a row up to which the library's attention on a CPU loses to two products of matrices


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of S rows, query [S, H, L, D], key and value [S, H', K, D], mask [S, 1, L, K] or None = causal; returns [S, L, H, D]."""
    n, heads, length, depth = query.shape
    if (
        mask is not None
        and length <= FEW
        and query.device.type == "cpu"
        and query.dtype == torch.float32
    ):
        # the heads of a group are queries of one: keys and values are read once and not repeated
        query = (query * scale).reshape(n * key.shape[1], -1, depth)
        seen = (
            torch.bmm(query, key.flatten(0, 1).transpose(1, 2))
            .view(n, heads, length, -1)
            .add_(mask)
            .softmax(-1)
        )
        return (
            torch.bmm(seen.view(len(query), -1, seen.shape[3]), value.flatten(0, 1))
            .view(n, heads, length, -1)
            .transpose(1, 2)
        )
    if (
        query.shape[1] != key.shape[1]
    ):  # grouped heads: repeated, because on a CPU the fast kernel wants as many
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    ).transpose(1, 2)


def side_by_side(
    segments: Sequence[Segment], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """S segments padded on the right to L tokens: (places [S, L], mask [S, 1, L, K], which of the S * L are tokens [n]).

    Keys are the ancestors' and then the segment's own, so that the column is the depth. No mask: nothing stands above, plain causal. No
    list of tokens: all of them are.
    """
    sizes, depths, starts = (
        np.array(x)[:, None]
        for x in zip(*((len(s), s.depth, s.start) for s in segments), strict=True)
    )
    column = np.arange(sizes.max())
    places = torch.from_numpy(starts + np.minimum(column, sizes - 1)).to(
        device
    )  # padding repeats the last
    real = (
        None
        if (sizes == len(column)).all()
        else torch.from_numpy(np.flatnonzero(column < sizes)).to(device)
    )
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

    def __init__(
        self, trie: Trie, cost: Cost, device: torch.device, dtype: torch.dtype = torch.float32
    ):
        self.flex = block_mask(trie.end(), device) if takes_flex(device) else None
        self.buckets: list[_Bucket] = []
        if self.flex:
            return
        if cost.dense(trie) < cost.by_buckets(trie):
            everything = slice(0, len(trie))
            self.buckets.append(
                _Bucket(everything, everything, minus_inf(dense_mask(trie).to(device), dtype), None)
            )
            self.order = None
            return
        chosen = buckets(trie.segments, cost)
        self.buckets = [
            self._bucket(trie, some, [trie.segments[i] for i in some], device, dtype)
            for some in chosen
        ]
        self.order = torch.from_numpy(outputs_of(chosen, trie.segments)).to(device)

    @staticmethod
    def _bucket(
        trie: Trie,
        chosen: list[int],
        segments: list[Segment],
        device: torch.device,
        dtype: torch.dtype,
    ) -> _Bucket:
        if len(segments) == 1 and not segments[0].depth:
            span = slice(segments[0].start, segments[0].stop)
            return _Bucket(span, span, None, None)
        queries, mask, real = side_by_side(segments, device, dtype)
        if mask is None:
            return _Bucket(queries, queries, None, real)
        keys = np.zeros((len(segments), mask.shape[3]), dtype=np.int64)
        for row, i in enumerate(chosen):
            line = np.concatenate(
                [np.arange(trie.segments[k].start, trie.segments[k].stop) for k in trie.line(i)]
            )
            keys[row, : len(line)] = line
        return _Bucket(queries, torch.from_numpy(keys).to(device), mask, real)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.flex:
            return _flex()(
                query, key, value, block_mask=self.flex, scale=scale, enable_gqa=True
            ).transpose(1, 2)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]

        def rows(x: torch.Tensor, at: torch.Tensor | slice) -> torch.Tensor:  # [S, H, L or K, D]
            return (x[at][None] if isinstance(at, slice) else take(x, at)).transpose(1, 2)

        parts = []
        for b in self.buckets:
            out = sdpa(rows(q, b.queries), rows(k, b.keys), rows(v, b.keys), b.mask, scale).flatten(
                0, 1
            )
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
    ids, depth = (
        torch.from_numpy(np.pad(x, (0, padding(trie, device)))).to(device)
        for x in (trie.ids, trie.depth())
    )
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
        *lists(some & ~full),
        *lists(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, k: (k <= q) & (q < ends[k]),
        seq_lengths=(n * BLOCK, n * BLOCK),
    )


@lru_cache(maxsize=1)
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
