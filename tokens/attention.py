"""Attention of the token trie: a packed row goes through a model of transformers, exactly.

The layers of the model see a row of T tokens without padding; only attention knows the tree. Every
token attends to its ancestors and to itself (the layout and `end` are drawn in tokens/trie.py):

          key   a b c d e f g
    query a     x                   the mask of
          b     x x
          c     x x x               a b ─┬─ c ─┬─ d
          d     x x x x                  │     └─ e
          e     x x x . x                └─ f g
          f     x x . . . x
          g     x x . . . x x

That mask is mostly empty, so a CPU goes bucket by bucket: [a b] is causal by itself; [c], [d], [e]
and [f g] gather the keys of their ancestors and run side by side. A GPU leaves empty blocks out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from config.errors import UserError
from tokens.trie import Bucket, Cost, Segment, Trie, make_buckets, output_rows

NAME = "memagent"
"""Our attention's name in the table of transformers."""

ONE = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""The mask that `forward` gives a model; one that makes another of it has an attention of its own.
"""
USUAL = {"scaling", "dropout", "position_ids", "cache_position", "use_cache", "sliding_window"}
"""What models tell their attention that changes nothing of it: a window was looked at before
(`check_architecture`). Anything else, such as a cap or sinks, does unless it is off."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query [1, H, T, D], key [1, H', T, D], value [1, H', T, D'], scale) -> [1, T, H, D']"""

# ---------------------------------------------------------------- through the model


@lru_cache(maxsize=1)
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module, query, key, value, attention_mask, attend: Attend | None = None, **kwargs
    ):
        if attend is None:  # an ordinary call of the model
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        on = (name for name, x in kwargs.items() if x is not None and x is not False)
        odd = [name for name in on if name not in USUAL]
        odd += ["attention_mask"] * (attention_mask is None or attention_mask.shape != ONE.shape)
        odd += ["is_causal"] * (not getattr(module, "is_causal", True))
        if odd:
            raise UserError(
                f"The attention of a {type(module).__name__} is not computed here ({odd[0]}): give "
                "another --model."
            )
        return attend(module.layer_idx, query, key, value, kwargs["scaling"]), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_our_attention(model) -> None:
    """Make the model call `attend` where `forward` passes one.

    UserError for a model whose attention cannot be replaced.
    """
    _register()
    model.set_attn_implementation(NAME)  # only warns where a model refuses
    if model.config._attn_implementation != NAME:
        raise UserError(
            f"A {type(model).__name__} does not take its attention from transformers' table; "
            "give another --model."
        )


def forward(model, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return the last hidden states [T, D] of one row of tokens.

    ids and positions are [T]; attention is left to `attend`, which is called again when a
    checkpointed layer is recomputed. Works with every decoder of transformers that takes its
    attention from the library's table. All other calls of the model behave as before.
    """
    if model.config._attn_implementation != NAME:
        use_our_attention(model)
    # Given a mask of four dimensions, the library builds none of its own.
    mask = ONE.to(ids.device)
    output = model.model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=False,
        attend=attend,
    )
    return output.last_hidden_state[0]


def hidden_states(model, trie: Trie, cost: Cost | None = None) -> torch.Tensor:
    """Return the last hidden states of a trie, [T, D] in the order of its layout.

    Every token is computed once. Differentiable.
    """
    device = model.device
    attend = TrieAttention(trie, cost or Cost.from_model(model), device, model.dtype)
    ids, depth = (
        torch.from_numpy(np.pad(x, (0, padding(trie, device)))).to(device)
        for x in (trie.ids, trie.depth())
    )
    return forward(model, ids, depth, attend)[: len(trie)]


# ---------------------------------------------------------------- parts of every attention


def take(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Return x[index] along the first dimension; None: all of x.

    On a CPU this takes a third of the time of plain indexing, gradient included.
    """
    if index is None:
        return x
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


AT_ONCE = 256
"""Queries of a row that attend side by side on a CPU, where their keys differ."""


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the attention of S rows, [S, L, H, D].

    query [S, H, L, D]; key and value [S, H', K, D]; mask [S, 1, L, K], added to the scores; None:
    causal. H is a multiple of H' (grouped heads). With a mask, the heads of a group are queries of
    their key, which is then read once and never repeated: a decode takes a third less time. On a
    CPU queries are taken block by block, each with the keys up to the last one that its last query
    sees: a mask hides most keys of a long row from its first queries.
    """
    n_rows, n_heads, n_queries, _ = query.shape
    if mask is not None and n_queries > AT_ONCE and query.device.type == "cpu":
        outputs = []
        for queries, hidden in zip(query.split(AT_ONCE, 2), mask.split(AT_ONCE, 2), strict=True):
            n = 1 + int(hidden[:, 0, -1].isfinite().any(0).nonzero()[-1])  # keys
            outputs.append(sdpa(queries, key[:, :, :n], value[:, :, :n], hidden[..., :n], scale))
        return torch.cat(outputs, 1)
    group = n_heads // key.shape[1]
    if mask is None:  # the fast kernel on a CPU takes as many heads of keys as of queries
        key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    else:
        query = query.reshape(n_rows, key.shape[1], group * n_queries, -1)
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.reshape(n_rows, n_heads, n_queries, -1).transpose(1, 2)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where a boolean mask is True and -inf elsewhere, to be added to the scores.

    Given a boolean mask, the library would do this again in every layer.
    """
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, -torch.inf)


def pad_segments(
    segments: Sequence[Segment], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Lay S segments side by side, padded on the right to L tokens.

    Returns (places [S, L], mask [S, 1, L, K] or None, real [n] or None). The keys are the
    ancestors, then the segment itself: a key's column is its depth. mask is None if no segment has
    ancestors, so that plain causal attention will do. real: which of the S * L places are tokens;
    None: all.

        depth 2, tokens p q r          key   0 1 2 3 4
                                 query p     x x x . .
                                       q     x x x x .
                                       r     x x x x x
    """
    shapes = [(len(s), s.depth, s.start) for s in segments]
    sizes, depths, starts = (np.array(x)[:, None] for x in zip(*shapes, strict=True))  # [S, 1]
    column = np.arange(sizes.max())
    places = starts + np.minimum(column, sizes - 1)  # padding repeats the last token
    places = torch.from_numpy(places).to(device)
    real = None
    if (sizes != len(column)).any():
        real = torch.from_numpy(np.flatnonzero(column < sizes)).to(device)
    if not depths.any():
        return places, None, real
    visible = np.arange((sizes + depths).max()) <= (depths + column)[:, :, None]  # [S, L, K]
    return places, additive_mask(torch.from_numpy(visible)[:, None].to(device), dtype), real


# ---------------------------------------------------------------- attention of a trie


class TrieAttention:
    """The exact attention of a trie, differentiable: an `Attend` for `forward`.

    On a GPU one FlexAttention call with a block mask, on a CPU one call a bucket.
    """

    def __init__(self, trie: Trie, cost: Cost, device: torch.device, dtype: torch.dtype):
        self.flex = block_mask(trie.end(), device) if takes_flex(device) else None
        if self.flex:
            return
        buckets = make_buckets(trie.segments, cost)
        self.buckets = [_gather(trie, bucket, device, dtype) for bucket in buckets]
        self.order = torch.from_numpy(output_rows(buckets, trie.segments)).to(device)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.flex:
            out = _flex()(query, key, value, block_mask=self.flex, scale=scale, enable_gqa=True)
            return out.transpose(1, 2)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        outputs = []
        for queries, keys, mask, real in self.buckets:
            pairs = ((q, queries), (k, keys), (v, keys))
            out = sdpa(*(take(x, places).transpose(1, 2) for x, places in pairs), mask, scale)
            outputs.append(take(out.flatten(0, 1), real))  # [n, H, D], padding removed
        return take(torch.cat(outputs), self.order)[None]


def _gather(trie: Trie, bucket: Bucket, device: torch.device, dtype: torch.dtype) -> tuple:
    """Return the places of a bucket's queries [S, L] and of their keys [S, K], and the mask and the
    real tokens of `pad_segments`."""
    queries, mask, real = pad_segments([trie.segments[i] for i in bucket.segments], device, dtype)
    if mask is None:
        return queries, queries, None, real
    keys = np.zeros((len(bucket.segments), mask.shape[3]), dtype=np.int64)
    for row, i in enumerate(bucket.segments):
        places = trie.places_to(i)
        keys[row, : len(places)] = places
    return queries, torch.from_numpy(keys).to(device), mask, real


# ---------------------------------------------------------------- on a GPU

BLOCK = 128
"""Queries and keys of a block of FlexAttention."""


def takes_flex(device: torch.device) -> bool:
    """Return whether the attention of a trie is FlexAttention on this device."""
    return device.type == "cuda"


def padding(trie: Trie, device: torch.device) -> int:
    """Return the number of tokens to append to a row on a GPU.

    Rows come in multiples of four blocks, or the kernel would be compiled for every length.
    """
    return -len(trie) % (4 * BLOCK) if takes_flex(device) else 0


def block_mask(end: np.ndarray, device: torch.device):
    """Return FlexAttention's mask of a layout, from the ends of the subtrees [T].

    It is computed from the smallest and the largest end of each block of 128 keys, so that no
    [T, T] is ever made. The kernel skips empty blocks, applies the mask to partial ones, and
    computes full ones without it:

                    keys   0  1  2  3     P partial, F full, . empty
        queries 0          P  .  .  .     on the diagonal: causal, hence partial
                1          F  P  .  .     all keys of block 0 are ancestors of block 1
                2          P  .  P  .     not all subtrees of block 0 reach the end of block 2
                3          P  .  F  P
    """
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-len(end) // (4 * BLOCK)) * 4  # blocks, appended tokens included
    ends = torch.arange(1, n * BLOCK + 1)  # an appended token sees itself alone
    ends[: len(end)] = torch.from_numpy(end)
    by_block = ends.view(n, BLOCK)
    i = torch.arange(n)
    # [query blocks, key blocks]: some key's subtree reaches into the queries; all reach past them
    some = (i <= i[:, None]) & (by_block.amax(1) > i[:, None] * BLOCK)
    full = (i < i[:, None]) & (by_block.amin(1) >= (i[:, None] + 1) * BLOCK)

    def lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many key blocks each query block has, and their indices first in its row."""
        index = blocks.int().argsort(dim=1, descending=True, stable=True).int()
        return blocks.sum(1).int()[None, None].to(device), index[None, None].to(device)

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
