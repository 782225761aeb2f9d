"""The transformers engine: it samples from the trainer's own weights and computes no prefix twice.

Holds: `TransformersEngine`, `draw`. Leaves out: the protocol of an engine (rollout.py), the packing
of tokens that share prefixes (tokens/trie.py).
Exercise it: `pytest tests/engines/test_hf.py`. Read next: grpo.py.

Every turn in flight has a row of the key/value cache, its slot:

    row 0   k k k k k k k .     in flight: the prompt and what was sampled after it
    row 1   k k k k k . . .     in flight
    row 2   k k k k k k . .     free; a finished turn, whose prefixes are still copied from here
    row 3   . . . . . . . .     free

A forward pass is one row of tokens without padding: the next token of every turn with its draft,
then the prompts that are admitted, packed as a trie (tokens/trie.py):

    x d d d d   x d d   x   p p p p p p p p p p     x next token, d draft, p prompts
    row 0       row 1   ..  one trie

The longest prefix of a prompt that any row holds is copied from there.

Drafts. An agent that rewrites its memory mostly copies it. So the tokens that followed the latest
ones in the prompt are appended as a guess, and one forward pass samples after each of them:

    prompt    .. Anna joined Boris in Lima . Clara ..
    sampled      Anna joined
    draft                    Boris in Lima .
    drawn                    Boris in Oslo            two guesses hold, Oslo is drawn after them

Every token is drawn from the model's own distribution with the random number of its position: the
draft changes how many passes a turn takes, not what it says.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from config.errors import UserError, first_line
from memagent import Finish, Prompt, Turn
from models.load import check_architecture, inner, longest_context
from models.logprobs import logits_of, mask_head, masked_ids, without
from models.ranks import full_tensor
from rollout import Engine, Sampling, refusal
from tokens.attention import additive_mask, forward, pad_segments, sdpa, take
from tokens.codec import Codec
from tokens.trie import (
    Bucket,
    Cost,
    Segment,
    Trie,
    common_prefix,
    make_buckets,
    output_rows,
    split_into_tries,
)

MIN_REUSE = 16
"""Fewest tokens of a prefix to copy from another row: for fewer a causal call costs less."""

ADMIT_SHARE = 0.7
"""Waiting prompts are admitted once at most this share of the rows is in flight."""

MAX_DRAFT = 4
"""Most tokens that are guessed ahead; 0: none."""


@dataclass(slots=True)
class _Request:
    """A prompt that waits or is in flight."""

    key: int
    prompt: Prompt
    ids: list[int]
    sampling: Sampling
    seed: int
    reused: int = 0  # tokens that were copied from another row
    out: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)  # of these
    # one or two tokens of the prompt -> the position after their last occurrence
    _after: dict[int | tuple[int, int], int] = field(default_factory=dict)

    def draft(self, most: int) -> list[int]:
        """Guess at most `most` tokens after the sampled ones.

        The guess is what followed their last two tokens in the prompt; failing that, their last.
        """
        # one more is drawn after them
        most = min(most, self.prompt.max_tokens - len(self.out) - 1)
        if most < 1:
            return []
        if not self._after:
            pairs = zip(self.ids, self.ids[1:], strict=False)
            self._after = {
                **dict(zip(self.ids, range(1, len(self.ids)), strict=False)),
                **dict(zip(pairs, range(2, len(self.ids)), strict=False)),
            }
        after = self._after.get((*self.out[-2:],)) if len(self.out) > 1 else None
        after = after or self._after.get(self.out[-1])
        return self.ids[after : after + most] if after else []


# ---------------------------------------------------------------- the cache


class _SlotCache:
    """A key/value cache of R rows of W positions, each row filled to a length of its own.

    One tensor [R, H, W, D] a layer for the keys and one for the values, so that what a head reads
    lies side by side. A place is a number for row and position: row x W + position.
    """

    def __init__(self, rows: int):
        self.rows, self.width = rows, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def arrange(self, keep: list[int], rows: int, width: int) -> None:
        """Reallocate: the rows `keep` in this order, then empty ones up to `rows`, of `width`."""
        self.rows, self.width = rows, width
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = old.new_zeros(rows, old.shape[1], width, old.shape[3])
                n = min(width, old.shape[2])
                tensors[i][: len(keep), :, :n] = old[keep, :, :n]

    def copy(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of the rows `source` into the rows `target`.

        A row may be both source and target: all are read before any is written.
        """
        for tensors in (self.keys, self.values):
            for layer in tensors:
                layer[:, :, :width].index_copy_(0, target, take(layer[:, :, :width], source))

    def head_index(self, places: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the rows [n * H] of some places [n] in a layer seen as [R * H * W, D].

        row 0, head 0: W positions | row 0, head 1: W positions | .. | row 1, head 0: ..
        """
        row, position = (places // self.width)[:, None], (places % self.width)[:, None]
        head = torch.arange(heads, device=places.device)
        return ((row * heads + head) * self.width + position).flatten()

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Write keys and values [n, H, D] of a layer to `head_index` [n * H]."""
        for tensors, new in ((self.keys, key), (self.values, value)):
            if layer == len(tensors):  # the first pass through this layer
                tensors.append(new.new_zeros(self.rows, new.shape[1], self.width, new.shape[2]))
            tensors[layer].flatten(0, 2).index_copy_(0, index, new.flatten(0, 1))


# ---------------------------------------------------------------- attention over the cache


@dataclass(slots=True)
class _CacheBucket:
    """Queries of S rows of the cache that are computed side by side, L of each."""

    queries: torch.Tensor  # [S, L] indices into the packed row; padding repeats one
    rows: torch.Tensor | None  # [S] whose keys they see; None: every row of the cache
    mask: torch.Tensor | None  # [S, 1, L, W]; None: causal among themselves, the cache unread
    real: torch.Tensor | None  # [n] which of the S * L are wanted; None: all


@dataclass(slots=True)
class _Part:
    """T new tokens of a forward pass; all indices are into this part.

    The keys and values of token `source[i]` are written to `places[i]`: a token that several
    prompts share is computed once and written to the row of each.
    """

    ids: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    source: np.ndarray  # [n]
    places: np.ndarray  # [n]
    buckets: list[_CacheBucket]
    order: np.ndarray  # [T] token -> its row in the outputs of the buckets, one after the other
    rows: list[int]  # rows of the cache that get their next tokens
    last: np.ndarray  # the tokens to sample after: per row its latest token, then its draft
    drafts: list[list[int]]  # per row of `rows`


def _join(parts: list[_Part]) -> _Part:
    """Concatenate parts into one packed row and shift their indices. Changes the buckets."""
    starts = np.cumsum([0, *(len(p.ids) for p in parts)])

    def joined(name: str, shift: bool = False) -> np.ndarray:
        shifts = starts if shift else np.zeros_like(starts)
        return np.concatenate(
            [getattr(part, name) + n for part, n in zip(parts, shifts, strict=False)]
        )

    for part, start in zip(parts, starts, strict=False):
        for bucket in part.buckets:
            bucket.queries += start
    return _Part(
        ids=joined("ids"),
        positions=joined("positions"),
        source=joined("source", shift=True),
        places=joined("places"),
        buckets=[bucket for part in parts for bucket in part.buckets],
        order=joined("order", shift=True),
        rows=[row for part in parts for row in part.rows],
        last=joined("last", shift=True),
        drafts=[draft for part in parts for draft in part.drafts],
    )


@dataclass(slots=True)
class _CacheAttention:
    """Attention of a packed row over the cache, an `Attend` of tokens/attention.py.

    New keys and values are written to the cache first, then it is read bucket by bucket.
    """

    cache: _SlotCache
    source: torch.Tensor | None  # see `_Part`; None: all tokens in order
    places: torch.Tensor | None  # None: nothing is written
    buckets: list[_CacheBucket]
    order: torch.Tensor | None  # None: the outputs are in order
    index: torch.Tensor | None = None  # `head_index` of the places, the same in every layer

    def write(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        k, v = (take(x[0].transpose(0, 1), self.source) for x in (key, value))
        if self.index is None:
            self.index = self.cache.head_index(self.places, k.shape[1])
        self.cache.write(layer, k, v, self.index)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        if self.places is not None:
            self.write(layer, query, key, value, scale)
        outputs = []
        for b in self.buckets:
            if b.mask is None:
                keys, values = (take(x, b.queries).transpose(1, 2) for x in (k, v))
            else:
                width = b.mask.shape[3]
                cached = (self.cache.keys[layer], self.cache.values[layer])
                keys, values = (take(x[:, :, :width], b.rows) for x in cached)
            queries = take(q, b.queries).transpose(1, 2)
            out = sdpa(queries, keys, values, b.mask, scale)
            outputs.append(take(out.flatten(0, 1), b.real))
        return take(torch.cat(outputs) if len(outputs) > 1 else outputs[0], self.order)[None]


class StopLayer(Exception):
    """Leaves a layer from inside its attention, once its keys and values are in the cache."""


@contextmanager
def last_layer_for(model, tokens: torch.Tensor, attention: _CacheAttention):
    """Restrict the last layer of the model to the `tokens` [n] of T, with an attention of theirs.

    Only the last token of a prompt is sampled after, so the last layer's outputs for the others are
    never read; of those only keys and values are needed. A layer has no such option, so a hook runs
    it twice:

        layers 1 .. L-1     T tokens   queries, keys, values -> attention -> feed-forward
        layer L, by hook    T tokens   keys, values -> cache, then StopLayer
        layer L, as usual   n tokens   queries -> attention over the cache -> feed-forward

    Inside this context the model's output is that of the n tokens.
    """

    def pick(x, n_tokens: int):
        """Return the tokens' share of an argument: hidden states, positions, rotary tables."""
        if isinstance(x, tuple):
            return tuple(pick(y, n_tokens) for y in x)
        per_token = isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == n_tokens
        return x[:, tokens] if per_token else x

    def before(layer, args, kwargs):
        def write_and_stop(*qkv):
            kwargs["attend"].write(*qkv)
            raise StopLayer

        with suppress(StopLayer):
            layer.forward(*args, **{**kwargs, "attend": write_and_stop})
        n_tokens = args[0].shape[1]
        picked = {name: pick(x, n_tokens) for name, x in kwargs.items()}
        return pick(args, n_tokens), picked | {"attend": attention}

    with model.model.layers[-1].register_forward_pre_hook(before, with_kwargs=True):
        yield


def weights_version(model) -> int:
    """Return a number that changes whenever a parameter is written to."""
    return sum(p._version for p in model.parameters())


# ---------------------------------------------------------------- drawing tokens


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
):
    """Sample one token per row by inverting the cumulative distribution.

    logits [N, V]; temperature, top_p, uniform [N]. Returns ids [N] and their log-probs [N]
    in the distribution that was sampled from (greedy rows, temperature 0: in the untempered one).
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], -1)
    if bool((top_p < 1).any()):
        ordered, index = logp.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the tokens ranked above
        cut = (before >= top_p[:, None]) & (top_p[:, None] < 1)
        cut = cut.scatter(1, index, cut) & ~greedy[:, None]  # back to the order of the vocabulary
        logp = logp.masked_fill(cut, -torch.inf).log_softmax(-1)
    n_greedy = int(greedy.sum())
    ids = logp.argmax(-1) if n_greedy else torch.zeros_like(greedy, dtype=torch.int64)
    if n_greedy < len(ids):
        cdf = logp.exp().cumsum(-1)
        # Scaled by the last entry, so that rounding never points past the last token of positive
        # probability.
        sampled = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1)
        ids = torch.where(greedy, ids, sampled.clamp_max(logp.shape[1] - 1))
    return ids, logp.gather(1, ids[:, None])[:, 0]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each pair of seed and position (splitmix64).

    A function of the pair alone, so that a draw does not depend on the batch around it.
    """
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
        return x.astype(np.float32) / np.float32(1 << 24)


# ---------------------------------------------------------------- the engine


class TransformersEngine(Engine):
    """Samples from a causal LM of transformers with a slot cache and continuous batching.

    It calls `model.model` and `model.lm_head` themselves, as the trainer does; only tokens that are
    sampled after reach the lm_head. A model whose logits are not what that gives (scaled, capped,
    a sliding window) is refused with a `UserError`.

    copy: the model is a copy of the trainer's, whose weights are sharded or of another dtype.
    max_rows: most turns in flight. max_cache_tokens: most rows x width of the key/value cache (one
    long prompt may exceed it, alone). max_prefill_tokens: most prompt tokens of a forward pass.
    remember: fill `max_cache_tokens` with finished turns before any of them is overwritten, for
    texts that are read again; else the cache has as many rows as were ever in flight.
    """

    def __init__(
        self,
        model,
        codec: Codec,
        max_rows: int = 256,
        max_cache_tokens: int = 1 << 18,
        max_prefill_tokens: int = 1 << 14,
        copy: bool = False,
        remember: bool = False,
    ):
        self.model, self.codec, self.copy, self.remember = model, codec, copy, remember
        self.max_rows, self.max_cache_tokens = max_rows, max_cache_tokens
        self.max_prefill_tokens = max_prefill_tokens
        check_architecture(model)
        self.window: int = longest_context(model.config)
        mask_head(model, codec)
        self.cost = Cost.from_model(model)
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._keys = self._weights = 0
        self._waiting: deque[_Request] = deque()
        self._refused: list[tuple[int, Turn]] = []
        self.device, self.dtype = model.device, model.dtype
        # the lm_head in float32, and the address and version of the weights that it was made from
        self._wide: tuple[tuple[int, int], torch.Tensor] | None = None
        self._clear()
        try:
            self._check_logprobs()
        except UserError:
            raise
        except Exception as error:  # whatever it raises, it is not computed like Llama or Qwen
            raise UserError(
                f"The transformers engine cannot serve a {type(model).__name__} "
                f"({first_line(error)}); give another --model."
            ) from error

    @torch.no_grad()
    def _check_logprobs(self) -> None:
        """Sample a few greedy tokens and compare their log-probs with the model's forward pass.

        That pass also has a token at the last position of the window, which must change nothing.
        UserError if they differ: then the engine computes something else than the model.
        """
        # a sentence: on a row of unused tokens SmolLM2 in bfloat16 is 4 from itself in float32
        for text in ("The train leaves", "The train leaves the station at noon."):
            ids = [*self.codec.encode(text)]
            self._waiting.append(_Request(len(text), Prompt((), 4), ids, Sampling(0.0), 0))
        turns: list[Turn] = []
        while len(turns) < 2:
            turns += [turn for _, turn in self.step()]
        training, _ = self.model.training, self.model.eval()
        # a rounding step of bfloat16 is 0.125 for logits of 16
        bar = 1e-2 if self.model.dtype == torch.float32 else 0.5
        for turn in turns:
            ids = torch.tensor([turn.prompt_ids + turn.response_ids], device=self.device)
            positions = torch.arange(ids.shape[1] + 1, device=self.device)[None]
            positions[0, -1] = self.window - 1  # it does not follow, so it is a text of its own
            far = torch.cat([ids, ids[:, :1]], 1)
            logits = self.model(input_ids=far, position_ids=positions, use_cache=False).logits
            n_prompt = len(turn.prompt_ids)
            logp = logits[0, :-1].float().log_softmax(-1)[n_prompt - 1 : -1]
            expected = logp.gather(1, ids[0, n_prompt:, None])[:, 0].tolist()
            worst = max(abs(a - b) for a, b in zip(turn.logprobs, expected, strict=True))
            if not worst < bar:
                raise UserError(
                    f"The transformers engine cannot serve a {type(self.model).__name__}: its "
                    "logits are not those of lm_head(model) with full attention and one rotary "
                    f"table (log-probs differ by {worst:.2g}); give another --model."
                )
        self.model.train(training)
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self._cache = _SlotCache(0)
        # one entry per row of the cache
        self._requests: list[_Request | None] = []  # None: the row is free
        self._cached: list[list[int]] = []  # ids whose keys and values it holds, if free too
        self._free: deque[int] = deque()  # rows without a request, the longest free first

    # ------------------------------------------------------------ turns

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        ids = prompt.ids(self.codec)
        if turn := refusal(prompt, ids, self.window, self.codec):
            self._refused.append((self._keys, turn))
        else:
            request = _Request(self._keys, prompt, ids, sampling, seed & (2**64 - 1))
            self._waiting.append(request)
        return self._keys

    def drop(self, key: int) -> None:
        """Give up a turn that waits or is in flight; its row is free at once."""
        self._refused = [(k, turn) for k, turn in self._refused if k != key]
        self._waiting = deque(r for r in self._waiting if r.key != key)
        for row, request in enumerate(self._requests):
            if request is not None and request.key == key:
                self._release(row)

    def _release(self, row: int) -> None:
        """Free a row; its prompt and what was sampled stay, to be copied from."""
        request = self._requests[row]
        # the last token was never read by the model
        self._requests[row], self._cached[row] = None, request.ids + request.out[:-1]
        self._free.append(row)

    @torch.no_grad()
    def step(self) -> list[tuple[int, Turn]]:
        done, self._refused = self._refused, []
        # a search through the model's parameters: once a step
        self.device, self.dtype = self.model.device, self.model.dtype
        if training := self.model.training:
            self.model.eval()
        n_active = len(self._requests) - len(self._free)
        batches: Iterator[tuple[list[_Request], Trie]] = iter(())
        # Any prefill has a fixed cost, however small it is: wait until some rows are free.
        most_active = ADMIT_SHARE * min(self.max_rows, n_active + len(self._waiting))
        if self._waiting and n_active <= most_active:
            batches = self._admit()
        parts = [self._decode()] if n_active else []
        for batch, trie in batches:  # the first prefill shares its pass with the turns in flight
            done += self._run([*parts, self._prefill(batch, trie)])
            parts = []
        if parts:
            done += self._run(parts)
        if training:
            self.model.train()
        return done

    # ------------------------------------------------------------ admission

    def _admit(self) -> Iterator[tuple[list[_Request], Trie]]:
        """Make room for waiting prompts, first come first served; return them in batches."""
        active = [i for i, r in enumerate(self._requests) if r is not None]
        if self._weights != (now := weights_version(self.model)):
            self._weights = now  # an update without `awake`
            self._forget()
        chosen, width = self._choose(len(active))
        rows = len(active) + len(chosen)
        all_rows, all_width = max(rows, len(self._requests)), max(width, self._cache.width)
        if self.remember:
            all_rows = max(all_rows, self._rows_to_remember(len(chosen), all_width))
        if all_rows * all_width <= self.max_cache_tokens:
            if all_rows > len(self._requests) or width > self._cache.width:
                self._arrange([*range(len(self._requests))], all_rows, all_width)
        else:  # no room for every finished turn that could be copied from: the latest stay
            if self.remember and rows * all_width <= self.max_cache_tokens:
                rows, width = self.max_cache_tokens // all_width, all_width
            latest = [*self._free][::-1][: rows - len(active)]
            self._arrange(active + latest, rows, width)
        batches = split_into_tries([r.ids for r in chosen], self.max_prefill_tokens, self.cost)
        return (([chosen[i] for i in index], trie) for index, trie in batches)

    def _rows_to_remember(self, n_new: int, width: int) -> int:
        """Return how many rows spare all finished turns, as far as the cache's tokens reach.

        Twice as many as there are, where they do not suffice: each growth copies the cache.
        """
        n = len(self._requests)
        if sum(not self._cached[row] for row in self._free) >= n_new:
            return n
        return min(max(2 * n, n + n_new), max(n, self.max_cache_tokens // width))

    def _choose(self, n_active: int) -> tuple[list[_Request], int]:
        """Take waiting prompts as far as rows and cache reach; also return the width they need."""

        def size(request: _Request) -> int:
            return len(request.ids) + request.prompt.max_tokens

        width = max((size(r) for r in self._requests if r is not None), default=0)
        chosen: list[_Request] = []
        while self._waiting and n_active + len(chosen) < self.max_rows:
            needed = max(width, size(self._waiting[0]))
            n = n_active + len(chosen)
            if n and (n + 1) * needed > self.max_cache_tokens:
                break
            width = needed
            chosen.append(self._waiting.popleft())
        return chosen, width

    def _arrange(self, keep: list[int], rows: int, width: int) -> None:
        """Reallocate the cache as in `_SlotCache.arrange`, and renumber what is known of rows."""
        self._cache.arrange(keep, rows, width)
        extra = rows - len(keep)
        rank = {row: n for n, row in enumerate(self._free)}  # how long a row has been free
        self._requests = [self._requests[i] for i in keep] + [None] * extra
        self._cached = [self._cached[i] for i in keep] + [[] for _ in range(extra)]
        # empty rows first, then the free ones in their order: used rows are overwritten late
        still_free = sorted((rank[row], n) for n, row in enumerate(keep) if row in rank)
        self._free = deque([*range(len(keep), rows), *(n for _, n in still_free)])

    def _forget(self) -> None:
        """Reuse nothing of the cache: it was computed with other weights."""
        self._cached = [[] for _ in self._cached]

    # ------------------------------------------------------------ prefill

    def _match(self, prompts: Sequence[list[int]]) -> list[tuple[int, int]]:
        """Return for each prompt the longest prefix that any row holds: (tokens, row).

        (0, 0) if that is too short to copy. At least one token is left to compute.
        """
        cached = sorted((ids, row) for row, ids in enumerate(self._cached) if ids)
        matches = []
        for ids in prompts:
            # of sorted sequences a neighbour has the longest common prefix
            i = bisect(cached, (ids, -1))
            neighbours = cached[max(0, i - 1) : i + 1]
            n, row = max(
                ((common_prefix(ids, other), row) for other, row in neighbours), default=(0, 0)
            )
            n = min(n, len(ids) - 1)
            matches.append((n, row) if n >= MIN_REUSE else (0, 0))
        return matches

    def _prefill(self, batch: list[_Request], trie: Trie) -> _Part:
        """Put prompts into free rows: copy cached prefixes, compute the rest of the trie once."""
        matches = self._match([r.ids for r in batch])
        rows = [self._take_row(*match) for match in matches]
        for request, (n, _) in zip(batch, matches, strict=True):
            request.reused = n
        self._copy_prefixes(matches, rows)
        paths = [trie.path(leaf) for leaf in trie.leaf]
        new = _uncached(trie, paths, [n for n, _ in matches])
        self._start(batch, rows, n_computed=sum(map(len, new.values())))

        ends = [(trie.segments[i].stop, len(s)) for i, s in new.items()]
        in_trie = np.concatenate([np.arange(stop - n, stop) for stop, n in ends])
        ids, positions = trie.ids[in_trie], trie.depth()[in_trie]
        # of each prompt the tokens of its path that are computed, as indices into this part
        tokens = [
            np.concatenate([np.arange(new[i].start, new[i].stop) for i in path if i in new])
            for path in paths
        ]
        source = np.concatenate(tokens)
        into = np.repeat(rows, [len(x) for x in tokens])
        # A shared segment attends in the row of any of its prompts: all hold the same ancestors.
        row_of = {i: row for path, row in zip(paths, rows, strict=True) for i in path}
        segments, segment_rows = list(new.values()), [row_of[i] for i in new]
        buckets = make_buckets(segments, self.cost)
        return _Part(
            ids=ids,
            positions=positions,
            source=source,
            places=into * self._cache.width + positions[source],
            buckets=[self._bucket_of_segments(b, segments, segment_rows) for b in buckets],
            order=output_rows(buckets, segments),
            rows=rows,
            last=np.array([x[-1] for x in tokens]),
            drafts=[[] for _ in rows],
        )

    def _take_row(self, n: int, source: int) -> int:
        """Take a free row for a prompt whose first n tokens are those of the row `source`.

        Where turns are remembered that is the source itself, if the prefix is a third of it: a
        section, not a template. The same section asked about anew takes no second row.
        """
        if self.remember and n and 3 * n >= len(self._cached[source]) and source in self._free:
            self._free.remove(source)
            return source
        return self._free.popleft()

    def _copy_prefixes(self, matches: list[tuple[int, int]], rows: list[int]) -> None:
        """Copy the match of each prompt into its row."""
        pairs = zip(rows, matches, strict=True)
        if copies := [(row, source, n) for row, (n, source) in pairs if n]:
            targets, sources, sizes = zip(*copies, strict=True)
            # as far as the longest match: what lies beyond a shorter one is overwritten or unread
            self._cache.copy(self._put(sources), self._put(targets), max(sizes))

    def _start(self, batch: list[_Request], rows: list[int], n_computed: int) -> None:
        """Record that the prompts are in flight in these rows, and count their tokens."""
        for row, request in zip(rows, batch, strict=True):
            self._requests[row], self._cached[row] = request, request.ids
        self.prefilled_tokens += n_computed
        self.reused_tokens += sum(len(r.ids) for r in batch) - n_computed

    def _bucket_of_segments(
        self, bucket: Bucket, segments: list[Segment], rows: list[int]
    ) -> _CacheBucket:
        """Return the queries of a bucket: segment i sees its ancestors in rows[i], and itself."""
        members = [segments[i] for i in bucket.segments]
        queries, mask, real = pad_segments(members, self.device, self.model.dtype)
        return _CacheBucket(queries, self._put([rows[i] for i in bucket.segments]), mask, real)

    # ------------------------------------------------------------ decoding

    def _bucket_of_rows(self, rows: list[int], start: np.ndarray, n: np.ndarray) -> _CacheBucket:
        """Return the bucket of n[i] queries of rows[i], at the positions start[i], start[i] + 1, ..

        The queries follow one another in the packed row. Each sees all of its row up to its own
        position.
        """
        first, column = np.cumsum(n) - n, np.arange(n.max())
        step = np.minimum(column, n[:, None] - 1)  # [rows, L]; padding repeats the last
        queries, positions = first[:, None] + step, start[:, None] + step
        if 2 * len(rows) <= len(self._requests):  # few: their keys are gathered
            gathered = self._put(rows)
            real = None if len(column) == 1 else np.flatnonzero(column < n[:, None])
        else:  # most: the cache is read as it is, and the outputs of the other rows are dropped
            gathered = None
            real = (np.array(rows)[:, None] * len(column) + column)[column < n[:, None]]
            queries, positions = (
                self._in_all_rows(rows, queries),
                self._in_all_rows(rows, positions),
            )
        width = int(positions.max()) + 1
        keys = torch.arange(width, device=self.device)
        visible = keys <= self._put(positions)[:, :, None]  # [S, L, W]
        return _CacheBucket(
            self._put(queries),
            gathered,
            additive_mask(visible, self.dtype)[:, None],
            None if real is None else self._put(real),
        )

    def _in_all_rows(self, rows: list[int], values: np.ndarray) -> np.ndarray:
        """Return values [rows, L] as [R, L], 0 in the rows that are not given."""
        out = np.zeros((len(self._requests), values.shape[1]), dtype=np.int64)
        out[rows] = values
        return out

    def _decode(self) -> _Part:
        """Return the latest token of every turn in flight, each followed by its draft."""
        rows = [i for i, r in enumerate(self._requests) if r is not None]
        active: list[_Request] = [self._requests[i] for i in rows]  # type: ignore[misc]
        drafts = [r.draft(MAX_DRAFT) for r in active]
        latest = [[r.out[-1], *draft] for r, draft in zip(active, drafts, strict=True)]
        start = np.array([len(r.ids) + len(r.out) - 1 for r in active])
        n = np.array([len(tokens) for tokens in latest])
        ids = np.array([token for tokens in latest for token in tokens])
        each, ahead = np.arange(len(ids)), np.concatenate([np.arange(k) for k in n])
        positions = np.repeat(start, n) + ahead
        return _Part(
            ids=ids,
            positions=positions,
            source=each,
            # A guess that fails leaves its keys and values behind; the next token overwrites them.
            places=np.repeat(np.array(rows) * self._cache.width, n) + positions,
            buckets=[self._bucket_of_rows(rows, start, n)],
            order=each,
            rows=rows,
            last=each,
            drafts=drafts,
        )

    # ------------------------------------------------------------ the forward pass

    def _run(self, parts: list[_Part]) -> list[tuple[int, Turn]]:
        """Do one forward pass for all parts; return the turns that this finishes."""
        row = _join(parts)
        n_tokens = len(row.ids)

        def index(values: np.ndarray) -> torch.Tensor | None:
            """Return an index for `take`; None where it would take everything in order."""
            return None if np.array_equal(values, np.arange(n_tokens)) else self._put(values)

        attention = _CacheAttention(
            self._cache, index(row.source), self._put(row.places), row.buckets, index(row.order)
        )
        last_layer: AbstractContextManager = nullcontext()
        if few := 2 * len(row.last) <= n_tokens:
            n = np.array([1 + len(draft) for draft in row.drafts])
            start = row.positions[row.last[np.cumsum(n) - n]]
            bucket = self._bucket_of_rows(row.rows, start, n)
            of_few = _CacheAttention(self._cache, None, None, [bucket], None)
            last_layer = last_layer_for(self.model, self._put(row.last), of_few)
        with last_layer:
            hidden = forward(self.model, self._put(row.ids), self._put(row.positions), attention)
        return self._sample(row.rows, row.drafts, hidden if few else take(hidden, index(row.last)))

    def _put(self, values) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(self.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] in float32.

        On a CPU a 16-bit lm_head would be converted for every pass; its float32 copy is cached.
        """
        weight = self.model.lm_head.weight
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            return logits_of(self.model, hidden)
        version = weight.data_ptr(), weight._version
        if self._wide is None or self._wide[0] != version:
            self._wide = version, weight.float()
        bias = getattr(self.model.lm_head, "bias", None)
        bias = None if bias is None else bias.float()
        return without(
            masked_ids(self.model), torch.nn.functional.linear(hidden.float(), self._wide[1], bias)
        )

    # ------------------------------------------------------------ sampling

    def _sample(
        self, rows: list[int], drafts: list[list[int]], hidden: torch.Tensor
    ) -> list[tuple[int, Turn]]:
        """Draw what follows the latest token of each row and every token of its draft.

        hidden: the states of these tokens, [rows and their drafts, D]. Returns the turns that this
        finishes.
        """
        requests: list[_Request] = [self._requests[i] for i in rows]  # type: ignore[misc]
        n = np.array([1 + len(draft) for draft in drafts])
        seeds = np.repeat(np.array([r.seed for r in requests], dtype=np.uint64), n)
        positions = np.concatenate(
            [len(r.out) + np.arange(k) for r, k in zip(requests, n, strict=True)]
        )

        def per_token(values: list) -> torch.Tensor:
            return self._put(np.repeat(np.array(values), n))

        logits = self._logits(hidden)
        ids, logprobs = draw(
            logits,
            per_token([r.sampling.temperature for r in requests]).float(),
            per_token([r.sampling.top_p for r in requests]).float(),
            self._put(uniforms(seeds, positions)),
        )
        done, drawn = [], iter(zip(ids.tolist(), logprobs.tolist(), strict=True))
        for row, request, draft in zip(rows, requests, drafts, strict=True):
            if turn := self._accept(row, request, list(islice(drawn, 1 + len(draft))), draft):
                done.append((request.key, turn))
        return done

    def _accept(
        self, row: int, request: _Request, drawn: list[tuple[int, float]], draft: list[int]
    ) -> Turn | None:
        """Append the tokens drawn for a row as long as its draft holds; return a finished turn.

            draft            Boris in   Lima   .       guesses after the latest token
            drawn      Boris in    Oslo x      x      each after the guesses before it
            accepted   Boris in    Oslo               up to the first that no guess foresaw

        What was drawn behind a wrong guess (x) follows the wrong text.
        """
        out = request.out
        for (token, logprob), guess in zip(drawn, [*draft, None], strict=True):
            out.append(token)
            request.logprobs.append(logprob)
            self.generated_tokens += 1
            stopped = token in self.codec.eos_ids
            if stopped or len(out) == request.prompt.max_tokens:
                finish = Finish.STOP if stopped else Finish.LENGTH
                response = self.codec.response(out)
                self._release(row)
                turn = Turn(request.prompt, request.ids, out, request.logprobs, finish, response)
                turn.reused_tokens = request.reused
                return turn
            if token != guess:
                break
        return None

    # ------------------------------------------------------------ phases

    def awake(self, policy=None) -> AbstractContextManager:
        """Get ready to generate with the policy's weights, and reuse nothing of other weights.

        The weights are shared, nothing is copied; a model that is a copy takes over the parameters
        that are trained.
        """
        if policy is not None:
            if inner(policy) is not self.model:
                self._take_over(inner(policy))
            self._forget()
        return nullcontext()

    @torch.no_grad()
    def _take_over(self, policy) -> None:
        if not self.copy:
            raise UserError(
                "The transformers engine samples from the trainer's own model; "
                "it cannot take over another one."
            )
        copies = dict(self.model.named_parameters())
        for name, p in policy.named_parameters():
            if p.requires_grad:
                copies[name].copy_(full_tensor(p))

    def close(self) -> None:
        self._clear()


def _uncached(trie: Trie, paths: list[list[int]], n_copied: list[int]) -> dict[int, Segment]:
    """Return what is left to compute of each segment of a trie, laid out in a row of its own.

    paths: the segments of each sequence. n_copied: how many tokens of it are copied from the
    cache. A token is computed if any sequence through it has no copy:

        trie       a b c d ─┬─ e f      first sequence: 3 tokens copied
                            └─ g h      second sequence: 5 tokens copied
        computed         d ─┬─ e f
                            └─   h
    """
    start = [s.depth + len(s) for s in trie.segments]  # the depth from which each is computed
    for path, n in zip(paths, n_copied, strict=True):
        for i in path:
            start[i] = min(start[i], max(n, trie.segments[i].depth))
    new, n_new = {}, 0
    for i, s in enumerate(trie.segments):
        if size := s.depth + len(s) - start[i]:
            new[i] = Segment(n_new, n_new + size, start[i])
            n_new += size
    return new
