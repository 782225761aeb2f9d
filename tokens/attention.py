"""Attention of the token trie: a packed row goes through a model of transformers, exactly.

The layers of the model see a row of T tokens without padding; only attention knows the tree. Every
token attends to its ancestors and to itself (the layout and `end` are drawn in tokens/trie.py):

          key   a b c d e f g
    query a     x                   the dense mask of
          b     x x
          c     x x x               a b ─┬─ c ─┬─ d
          d     x x x x                  │     └─ e
          e     x x x . x                └─ f g
          f     x x . . . x
          g     x x . . . x x

A large mask is mostly empty, so attention is computed bucket by bucket: [a b] is causal by itself;
[c], [d], [e] and [f g] gather the keys of their ancestors and run side by side. On a CPU, segments
that are too long or too different to be padded together are computed one by one, and gather
nothing: their keys are slices of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from config.errors import UserError
from tokens.trie import AT_ONCE, Bucket, Cost, Segment, Trie, make_buckets, output_rows

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
    from transformers.utils import logging

    _register()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library only warns about a model that refuses
    try:
        model.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(verbosity)
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
    options = getattr(model, "kernel_options", None)
    attend = TrieAttention(trie, cost or Cost.from_model(model), device, model.dtype, options)
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


BY_PRODUCTS = {torch.float32: 256, torch.bfloat16: 1024}
"""Up to so many queries a row, matrix products replace the library's attention on a CPU.

In blocks of `AT_ONCE` queries and with the way back they take half of its time in bfloat16, of
which an update with long prompts becomes 1.2 times as fast; in float32 as long as the library for
longer rows, and up to twice as long without gradients (dev/LESSONS.md).
"""
ONE_BY_ONE = {torch.float32: 1024, torch.bfloat16: 1024}
"""Up to so many queries a segment of a trie that is computed alone goes through `_OneByOne`.

In float32, beside 256, an update of SmolLM2 becomes 1 to 8 % faster, and with long prompts needs
8 % more memory for the weights that are kept (dev/LESSONS.md).
"""
IN_CACHE = 1 << 20
"""So many weights, 4 MiB of them, are computed at a time: what a processor's cache holds."""


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the attention of S rows, [S, L, H, D].

    query [S, H, L, D]; key and value [S, H', K, D]; mask [S, 1, L, K], added to the scores; None:
    causal. H is a multiple of H' (grouped heads). On a CPU queries are taken block by block, each
    with the keys up to the last one that its last query sees: in rows of more than `AT_ONCE`
    queries none may see further than the next.
    """
    n_heads, n_queries = query.shape[1], query.shape[2]
    if query.device.type == "cpu" and n_queries <= BY_PRODUCTS.get(query.dtype, 0):
        mask = _causal_mask(n_queries) if mask is None else mask
        return _joined_blocks(_by_products, AT_ONCE, query, key, value, mask, scale)
    if n_heads != key.shape[1]:
        # Repeated: the fast kernel on a CPU takes as many heads of keys as of queries.
        key, value = (x.repeat_interleave(n_heads // key.shape[1], 1) for x in (key, value))
    if query.device.type == "cpu" and mask is not None:
        return _joined_blocks(_by_library, 2 * AT_ONCE, query, key, value, mask, scale)
    return _by_library(query, key, value, mask, scale)


def _joined_blocks(attend, size: int, query, key, value, mask, scale: float) -> torch.Tensor:
    """Return the outputs of `attend`, called with blocks of at most `size` queries.

    A mask hides most keys of a long row from its first queries: half of the pairs are left out.
    """
    n_queries = query.shape[2]
    if n_queries <= size:
        return attend(query, key, value, mask, scale)
    outputs = []
    for start in range(0, n_queries, size):
        stop = min(start + size, n_queries)
        shown = mask[:, 0, stop - 1].isfinite().any(0).nonzero()
        n_keys = int(shown[-1]) + 1
        seen = (x[:, :, :n_keys] for x in (key, value))
        outputs.append(
            attend(query[:, :, start:stop], *seen, mask[:, :, start:stop, :n_keys], scale)
        )
    return torch.cat(outputs, 1)


def _by_library(query, key, value, mask, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    ).transpose(1, 2)


def _by_products(query, key, value, mask, scale: float) -> torch.Tensor:
    """Return the attention of rows by matrix products, as many rows at a time as fit the cache."""
    mask = mask.float()
    n = max(1, IN_CACHE // (query.shape[1] * query.shape[2] * key.shape[2]))  # rows
    if n >= len(query):
        return _Products.apply(query, key, value, mask, scale)
    rows = (x.split(n) for x in (query, key, value, mask.expand(len(query), -1, -1, -1)))
    return torch.cat([_Products.apply(*part, scale) for part in zip(*rows, strict=True)])


class _Products(torch.autograd.Function):
    """Compute `sdpa` by matrix products, with the grouped heads of a key as its queries.

    So keys and values are read once and never repeated. Scores and softmax are in float32 and the
    weights, in the type of the query, are kept for the backward pass: S H L K of them.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, scale: float) -> torch.Tensor:
        n_rows, n_heads, n_queries, depth = query.shape
        q = query.reshape(n_rows * key.shape[1], -1, depth)  # [S * H', H / H' * L, D]
        k, v = key.flatten(0, 1), value.flatten(0, 1)  # [S * H', K, D or D']
        scores = torch.bmm(q.float() * scale, k.float().transpose(1, 2))
        scores = scores.view(n_rows, n_heads, n_queries, -1).add_(mask)
        weights = scores.softmax(-1).to(q.dtype).view(len(q), -1, k.shape[1])
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape, value.shape)
        return torch.bmm(weights, v).view(n_rows, n_heads, n_queries, -1).transpose(1, 2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        q, k, v, weights = ctx.saved_tensors
        of_query, of_key, of_value = ctx.shapes
        gradient = gradient.transpose(1, 2).reshape(len(q), -1, v.shape[2])
        of_weights = torch.bmm(gradient, v.transpose(1, 2))
        # weights * (of_weights - their weighted sum), in one pass
        scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        scores.mul_(ctx.scale)
        return (
            torch.bmm(scores, k).view(of_query),
            torch.bmm(scores.transpose(1, 2), q).view(of_key),
            torch.bmm(weights.transpose(1, 2), gradient).view(of_value),
            None,
            None,
        )


class _OneByOne(torch.autograd.Function):
    """Compute the attention of blocks of segments, without padding and gathering.

    query [H, T, D]; key and value [H', T, D]; paths: for every block the slices of the layout
    that it sees, its own last. Returns [n, H, D], block after block. Precision and what is kept
    are those of `_Products`. Heads of keys are repeated here: products of H matrices occupy several
    threads better than those of H' larger ones, and the gradients of a key are added up once.
    """

    @staticmethod
    def forward(ctx, query, key, value, paths: list[list[slice]], scale: float) -> torch.Tensor:
        ctx.paths, ctx.scale = paths, scale
        k, v = (_for_each_query(x, query) for x in (key, value))
        outputs, kept = [], []
        for path in paths:
            q = query[:, path[-1]]
            scores = torch.bmm(q.float() * scale, _joined(k, path).float().transpose(1, 2))
            n = q.shape[1]
            scores[..., -n:] += _causal_mask(n)[0]
            weights = scores.softmax(-1).to(q.dtype)
            outputs.append(torch.bmm(weights, _joined(v, path)))
            kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        return torch.cat(outputs, 1).transpose(0, 1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        query, key, value, *kept = ctx.saved_tensors
        k, v = (_for_each_query(x, query) for x in (key, value))
        of_query = torch.zeros_like(query)
        # added up in float32: of a common prefix there are as many as blocks see it
        of_key, of_value = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        start = 0
        for path, weights in zip(ctx.paths, kept, strict=True):
            q, n = query[:, path[-1]], weights.shape[1]
            out = gradient[start : start + n].transpose(0, 1)
            start += n
            of_weights = torch.bmm(out, _joined(v, path).transpose(1, 2))
            scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            scores.mul_(ctx.scale)
            of_query[:, path[-1]] = torch.bmm(scores, _joined(k, path))
            _add_to(of_key, path, torch.bmm(scores.transpose(1, 2), q))
            _add_to(of_value, path, torch.bmm(weights.transpose(1, 2), out))
        of_key, of_value = (
            x.view(len(key), -1, *x.shape[1:]).sum(1).to(key.dtype) for x in (of_key, of_value)
        )
        return of_query, of_key, of_value, None, None


def _for_each_query(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat the heads of keys or values [H', T, D] for those of the queries, [H, T, D]."""
    return x.repeat_interleave(len(query) // len(x), 0)


def _joined(x: torch.Tensor, path: list[slice]) -> torch.Tensor:
    return x[:, path[0]] if len(path) == 1 else torch.cat([x[:, part] for part in path], 1)


def _add_to(total: torch.Tensor, path: list[slice], gradient: torch.Tensor) -> None:
    """Add a gradient [H, K, D] of joined slices to those slices of `total` [H, T, D]."""
    sizes = [part.stop - part.start for part in path]
    for part, share in zip(path, gradient.split(sizes, 1), strict=True):
        total[:, part] += share


@lru_cache(maxsize=16)
def _causal_mask(n: int) -> torch.Tensor:
    return additive_mask(torch.ones(1, 1, n, n, dtype=torch.bool).tril_(), torch.float32)


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


@dataclass(slots=True)
class _TrieBucket:
    """S segments, L queries and K keys each, padded on the right."""

    queries: torch.Tensor | slice  # [S, L] places; a slice for a single segment
    keys: torch.Tensor | slice  # [S, K] places of its ancestors, then its own
    mask: torch.Tensor | None  # [S, 1, L, K], 0 or -inf; None: no ancestors, causal
    real: torch.Tensor | None  # [n] which of the S * L are tokens; None: all


class TrieAttention:
    """The exact attention of a trie, differentiable: an `Attend` for `forward`.

    On a GPU one FlexAttention call with a block mask. On a CPU the cheaper by `cost` of two ways:
    one call with a dense mask, or one call a bucket. Segments that are alone in their bucket or
    longer than `AT_ONCE`, up to `ONE_BY_ONE`, are computed by `_OneByOne`, in blocks.
    """

    def __init__(
        self,
        trie: Trie,
        cost: Cost,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        options: dict | None = None,
    ):
        """options: FlexAttention's kernel_options."""
        self.options = options
        self.flex = block_mask(trie.end(), device) if takes_flex(device) else None
        self.buckets: list[_TrieBucket] = []
        self.paths: list[list[slice]] = []
        if self.flex:
            return
        if cost.dense(trie) < cost.by_buckets(trie):
            whole = slice(0, len(trie))
            mask = additive_mask(dense_mask(trie).to(device), dtype)
            self.buckets.append(_TrieBucket(whole, whole, mask, None))
            self.order = None
            return
        most = ONE_BY_ONE.get(dtype, 0) if device.type == "cpu" else 0
        alone, others = [], []
        for bucket in make_buckets(trie.segments, cost):
            single = len(bucket.segments) == 1 or bucket.n_queries > AT_ONCE
            (alone if single and bucket.n_queries <= most else others).append(bucket)
        self.paths = [path for b in alone for i in b.segments for path in _blocks(trie, i)]
        self.buckets = [self._gather(trie, bucket, device, dtype) for bucket in others]
        self.order = torch.from_numpy(output_rows(alone + others, trie.segments)).to(device)

    @staticmethod
    def _gather(
        trie: Trie, bucket: Bucket, device: torch.device, dtype: torch.dtype
    ) -> _TrieBucket:
        segments = [trie.segments[i] for i in bucket.segments]
        if len(segments) == 1 and not segments[0].depth:
            span = slice(segments[0].start, segments[0].stop)
            return _TrieBucket(span, span, None, None)
        queries, mask, real = pad_segments(segments, device, dtype)
        if mask is None:
            return _TrieBucket(queries, queries, None, real)
        keys = np.zeros((len(segments), mask.shape[3]), dtype=np.int64)
        for row, i in enumerate(bucket.segments):
            path = [trie.segments[k] for k in trie.path(i)]
            places = np.concatenate([np.arange(s.start, s.stop) for s in path])
            keys[row, : len(places)] = places
        return _TrieBucket(queries, torch.from_numpy(keys).to(device), mask, real)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.flex:
            how = dict(scale=scale, enable_gqa=True, kernel_options=self.options)
            return _flex()(query, key, value, block_mask=self.flex, **how).transpose(1, 2)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]

        def rows(x: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
            picked = x[index][None] if isinstance(index, slice) else take(x, index)
            return picked.transpose(1, 2)  # [S, H, L or K, D]

        outputs = []
        if self.paths:
            outputs.append(_OneByOne.apply(query[0], key[0], value[0], self.paths, scale))
        for b in self.buckets:
            out = sdpa(rows(q, b.queries), rows(k, b.keys), rows(v, b.keys), b.mask, scale)
            outputs.append(take(out.flatten(0, 1), b.real))  # [n, H, D], padding removed
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return take(out, self.order)[None]


def _blocks(trie: Trie, segment: int) -> Iterator[list[slice]]:
    """Yield what blocks of at most `AT_ONCE` tokens of a segment see, as slices of the layout.

    These are the ancestors, what stands before the block in its segment, and the block itself.
    """
    above: list[slice] = []
    *ancestors, last = (trie.segments[i] for i in trie.path(segment))
    for s in ancestors:
        _append(above, slice(s.start, s.stop))
    for start in range(last.start, last.stop, AT_ONCE):
        block = slice(start, min(start + AT_ONCE, last.stop))
        yield [*above, block]
        _append(above, block)


def _append(slices: list[slice], more: slice) -> None:
    """Append a slice; one that follows the last is joined to it."""
    if slices and slices[-1].stop == more.start:
        more = slice(slices.pop().start, more.stop)
    slices.append(more)


def dense_mask(trie: Trie) -> torch.Tensor:
    """Return the boolean mask of a trie, [1, 1, T, T].

    Place q sees place k if and only if k <= q < end[k].
    """
    q = torch.arange(len(trie))
    end = torch.from_numpy(trie.end())
    return ((q <= q[:, None]) & (q[:, None] < end))[None, None]


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
