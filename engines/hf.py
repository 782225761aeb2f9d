"""The transformers engine: it samples from the trainer's own weights and computes no prefix twice.

Every turn in flight owns a row of the key/value cache, its slot. A finished turn leaves its row as
it is, and the longest prefix that any row holds is copied from there when a prompt is admitted:

    row 0   k k k k k k k .     in flight: the prompt and what was sampled after it
    row 1   k k k k k . . .     in flight
    row 2   k k k k k k . .     finished: copied from until its row is needed
    row 3   . . . . . . . .     empty

A forward pass is one row of tokens without padding, made of spans. A span is a run of new tokens
that follow one another in a row of the cache: the latest token of a turn with its draft, or a
segment of the trie (tokens/trie.py) of the admitted prompts, computed once for all that share it.

    x d d d d | x d d | x | p p p p p | p p p        x latest token, d draft, p prompts
    row 0       row 1  row 4  rows 5, 6   row 6

Drafts: an agent that rewrites its memory mostly copies it. So the tokens that followed the latest
ones in the prompt are appended as a guess, and one pass samples after each of them:

    prompt    .. Anna joined Boris in Lima . Clara ..
    sampled      Anna joined
    draft                    Boris in Lima .
    drawn                    Boris in Oslo            two guesses hold, Oslo is drawn after them

Every token is drawn from the model's own distribution with the random number of its position: a
draft changes how many passes a turn takes, and not what it says.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from tokens.attention import forward, pad_segments, sdpa, take
from tokens.codec import Codec
from tokens.trie import (
    Cost,
    Segment,
    Trie,
    common_prefix,
    make_buckets,
    output_rows,
    split_into_tries,
)

MIN_REUSE = 16
"""Fewest tokens of a prefix that are worth copying from another row."""
ADMIT_SHARE = 0.7
"""Prompts wait until at most this share of the rows is in flight: any prefill has a fixed cost."""
MAX_DRAFT = 4
"""Most tokens that are guessed ahead."""


@dataclass(slots=True)
class _Request:
    """A prompt that waits or is in flight."""

    key: int
    prompt: Prompt
    ids: list[int]
    sampling: Sampling
    seed: int
    reused: int = 0  # tokens that were copied from another row
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _after: dict = field(default_factory=dict)  # one or two tokens -> where they last ended

    @property
    def size(self) -> int:
        return len(self.ids) + self.prompt.max_tokens

    def draft(self, most: int) -> list[int]:
        """Guess what follows `out`: what followed its last one or two tokens in the prompt."""
        # one more is drawn after them
        most = min(most, self.prompt.max_tokens - len(self.out) - 1)
        if most < 1:
            return []
        if not self._after:
            self._after = {token: k for k, token in enumerate(self.ids[:-1], 1)}
            pairs = zip(self.ids, self.ids[1:-1], strict=False)
            self._after |= {pair: k for k, pair in enumerate(pairs, 2)}
        after = self._after.get((*self.out[-2:],)) or self._after.get(self.out[-1])
        return self.ids[after : after + most] if after else []


# ---------------------------------------------------------------- cache and attention


@dataclass(slots=True)
class _Span:
    """New tokens of a pass that follow one another in a row of the cache."""

    ids: Sequence[int]
    start: int  # position of the first
    rows: list[int]  # rows that get their keys and values; they attend in the first of these
    first: int = 0  # its place in the packed row, once that is laid out

    @property
    def stop(self) -> int:
        return self.first + len(self.ids)


_Asked = tuple[int, _Span, list[int]]
"""A row that is sampled in a pass, the span with its latest tokens, and the draft at its end."""


class _Cache:
    """Keys and values of all layers: a tensor [rows, heads, width, D] each, in which what a head
    reads lies side by side."""

    def __init__(self):
        self.rows = self.width = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def arrange(self, keep: list[int], rows: int, width: int) -> None:
        """Reallocate: the rows `keep` in this order, then empty ones up to `rows`."""
        n = min(width, self.width)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = old.new_zeros(rows, old.shape[1], width, old.shape[3])
                tensors[i][: len(keep), :, :n] = old[keep, :, :n]
        self.rows, self.width = rows, width

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of rows; a row may be both source and target."""
        for layer in (*self.keys, *self.values):
            layer[:, :, :width].index_copy_(0, targets, take(layer[:, :, :width], sources))

    def index_of(self, rows: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        """Return where the heads of rows and positions [n] are, [n * H], in a layer that is seen as
        [rows * H * width, D]."""
        head = torch.arange(heads, device=rows.device)
        return ((rows[:, None] * heads + head) * self.width + positions[:, None]).flatten()

    def write(self, layer: int, key, value, index: torch.Tensor) -> None:
        """Write keys and values [n, H, D] of a layer to `index_of` their rows and positions."""
        for tensors, new in ((self.keys, key), (self.values, value)):
            if layer == len(tensors):  # the first pass through this layer
                tensors.append(new.new_zeros(self.rows, new.shape[1], self.width, new.shape[2]))
            tensors[layer].flatten(0, 2).index_copy_(0, index, new.flatten(0, 1))


def _runs(starts, sizes) -> np.ndarray:
    """Return start, start + 1, .. of several runs of these sizes, one after the other."""
    starts, sizes = np.asarray(starts), np.asarray(sizes)
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])


class _CacheAttention:
    """Attention of a packed row of spans over the cache, an `Attend` of tokens/attention.py.

    New keys and values are written to the cache first, then it is read bucket by bucket.
    """

    def __init__(self, cache: _Cache, spans: list[_Span], cost: Cost, device, dtype):
        def put(values) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), device=device)

        self.cache, self.index = cache, None
        pairs = [(span, row) for span in spans for row in span.rows]
        sizes = [len(span.ids) for span, _ in pairs]
        self.source = put(_runs([span.first for span, _ in pairs], sizes))
        self.rows = put(np.repeat([row for _, row in pairs], sizes))
        self.positions = put(_runs([span.start for span, _ in pairs], sizes))
        # a span is a segment whose ancestors are what its row of the cache holds
        segments = [Segment(span.first, span.stop, span.start) for span in spans]
        buckets = make_buckets(segments, cost)
        self.order = put(output_rows(buckets, segments))
        self.buckets = [
            (
                put([spans[i].rows[0] for i in bucket.segments]),
                *pad_segments([segments[i] for i in bucket.segments], device, dtype),
            )
            for bucket in buckets
        ]

    def __call__(self, layer: int, query, key, value, scale: float) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        if self.index is None:  # the same in every layer
            self.index = self.cache.index_of(self.rows, self.positions, k.shape[1])
        self.cache.write(layer, take(k, self.source), take(v, self.source), self.index)
        outputs = []
        for rows, queries, mask, real in self.buckets:
            if mask is None:  # nothing stands before these: causal among themselves
                keys, values = (take(x, queries).transpose(1, 2) for x in (k, v))
            else:
                cached = (self.cache.keys[layer], self.cache.values[layer])
                keys, values = (take(x[:, :, : mask.shape[3]], rows) for x in cached)
            out = sdpa(take(q, queries).transpose(1, 2), keys, values, mask, scale)
            outputs.append(take(out.flatten(0, 1), real))
        return take(torch.cat(outputs), self.order)[None]


# ---------------------------------------------------------------- drawing tokens


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    logits [N, V]; temperature, top_p, uniform [N]. Returns ids [N] and their log-probs [N] in the
    distribution that was sampled from (temperature 0: greedily, in the untempered one).
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], -1)
    if bool((top_p < 1).any()):
        ordered, index = logp.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the tokens ranked above
        cut = (before >= top_p[:, None]) & (top_p[:, None] < 1)
        cut = cut.scatter(1, index, cut) & ~greedy[:, None]  # back to the order of the vocabulary
        logp = logp.masked_fill(cut, -torch.inf).log_softmax(-1)
    ids = logp.argmax(-1)
    if not bool(greedy.all()):
        # scaled by the last entry: rounding never points past the last token that is possible
        cdf = logp.exp().cumsum(-1)
        sampled = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1).clamp_max(logp.shape[1] - 1)
        ids = torch.where(greedy, ids, sampled)
    return ids, logp.gather(1, ids[:, None])[:, 0]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each pair of seed and position (splitmix64): a function of the
    pair alone, so that a draw does not depend on the batch around it."""
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
        return x.astype(np.float32) / np.float32(1 << 24)


# ---------------------------------------------------------------- the engine


class TransformersEngine(Engine):
    """Samples from a causal LM of transformers with a cache of rows and continuous batching.

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
        mask_head(model, codec)
        self.window: int = longest_context(model.config)
        self.cost = Cost.from_model(model)
        self.device, self.dtype = model.device, model.dtype
        # the lm_head in float32, and the address and version of the weights that it was made from
        self._wide: tuple[tuple[int, int], torch.Tensor] | None = None
        self._keys = self._weights = 0
        self._waiting: deque[_Request] = deque()
        self._refused: list[tuple[int, Turn]] = []
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
        self._clear()

    def _clear(self) -> None:
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._cache = _Cache()
        # one entry per row of the cache
        self._requests: list[_Request | None] = []  # None: the row is free
        self._cached: list[list[int]] = []  # ids whose keys and values it holds, if free too
        self._free: deque[int] = deque()  # rows without a request, the longest free first

    @torch.no_grad()
    def _check_logprobs(self) -> None:
        """Sample a few greedy tokens and compare their log-probs with the model's forward pass.

        That pass also has a token at the last position of the window, which must change nothing.
        UserError if they differ: then the engine computes something else than the model.
        """
        # sentences: on a row of unused tokens SmolLM2 in bfloat16 is 4 from itself in float32
        texts = "The train leaves", "The train leaves the station at noon."
        for key, text in enumerate(texts):
            ids = [*self.codec.encode(text)]
            self._waiting.append(_Request(key, Prompt((), 4), ids, Sampling(0.0), 0))
        turns: list[Turn] = []
        while len(turns) < len(texts):
            turns += [turn for _, turn in self.step()]
        training, _ = self.model.training, self.model.eval()
        # a rounding step of bfloat16 is 0.125 for logits of 16
        bar = 1e-2 if self.model.dtype == torch.float32 else 0.5
        for turn in turns:
            n, ids = len(turn.prompt_ids), [*turn.prompt_ids, *turn.response_ids]
            # the last token does not follow, so it is a text of its own
            positions = torch.tensor([[*range(len(ids)), self.window - 1]], device=self.device)
            ids = torch.tensor([[*ids, ids[0]]], device=self.device)
            logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
            logp = logits[0, n - 1 : -2].float().log_softmax(-1).gather(1, ids[0, n:-1, None])
            worst = (logp[:, 0].cpu() - torch.tensor(turn.logprobs)).abs().max().item()
            if not worst < bar:
                raise UserError(
                    f"The transformers engine cannot serve a {type(self.model).__name__}: its "
                    "logits are not those of lm_head(model) with full attention and one rotary "
                    f"table (log-probs differ by {worst:.2g}); give another --model."
                )
        self.model.train(training)

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
        # Any prefill has a fixed cost, however small it is: wait until some rows are free.
        most_active = ADMIT_SHARE * min(self.max_rows, n_active + len(self._waiting))
        batches = self._admit() if self._waiting and n_active <= most_active else ()
        spans, asked = self._decode() if n_active else ([], [])
        for batch, trie in batches:  # the first prefill shares its pass with the turns in flight
            more_spans, more_asked = self._prefill(batch, trie)
            done += self._run(spans + more_spans, asked + more_asked)
            spans, asked = [], []
        if spans:
            done += self._run(spans, asked)
        if training:
            self.model.train()
        return done

    # ------------------------------------------------------------ admission

    def _admit(self) -> Iterator[tuple[list[_Request], Trie]]:
        """Take waiting prompts, first come first served, as far as rows and cache reach.

        Make room for them, and return them in batches, each with the trie of its prompts.
        """
        if self._weights != (now := weights_version(self.model)):
            self._weights = now  # an update without `awake`
            self._forget()
        active = [row for row, r in enumerate(self._requests) if r is not None]
        width = max((self._requests[row].size for row in active), default=0)
        chosen: list[_Request] = []
        while self._waiting and (n := len(active) + len(chosen)) < self.max_rows:
            wider = max(width, self._waiting[0].size)
            if n and (n + 1) * wider > self.max_cache_tokens:
                break
            width = wider
            chosen.append(self._waiting.popleft())
        self._make_room(active, len(active) + len(chosen), width)
        batches = split_into_tries([r.ids for r in chosen], self.max_prefill_tokens)
        return (([chosen[i] for i in index], trie) for index, trie in batches)

    def _make_room(self, active: list[int], needed: int, width: int) -> None:
        """Give the cache at least `needed` rows of `width`, and renumber what is known of rows.

        Finished turns stay as far as `max_cache_tokens` reach, the latest longest.
        """
        wide = max(width, self._cache.width)
        width = wide if needed * wide <= self.max_cache_tokens else width
        most, now, new = self.max_cache_tokens // width, len(self._requests), needed - len(active)
        if self.remember and sum(not self._cached[row] for row in self._free) < new:
            now = max(2 * now, now + new)  # doubled: each growth copies the cache
        rows = max(needed, min(now, most))
        if rows == len(self._requests) and width == self._cache.width:
            return
        keep = [*active, *reversed(self._free)][:rows]
        self._cache.arrange(keep, rows, width)
        empty = rows - len(keep)
        self._requests = [self._requests[row] for row in keep] + [None] * empty
        self._cached = [self._cached[row] for row in keep] + [[] for _ in range(empty)]
        # empty rows first, then the free ones in their order: used rows are overwritten late
        self._free = deque([*range(len(keep), rows), *reversed(range(len(active), len(keep)))])

    def _forget(self) -> None:
        """Reuse nothing of the cache: it was computed with other weights."""
        self._cached = [[] for _ in self._cached]

    def _match(self, prompts: Sequence[list[int]]) -> list[tuple[int, int]]:
        """Return for each prompt the longest prefix that any row holds: (tokens, row).

        (0, 0) if that is too short to copy. At least one token is left to compute.
        """
        cached = sorted((ids, row) for row, ids in enumerate(self._cached) if ids)
        matches = []
        for ids in prompts:
            i = bisect(cached, (ids, -1))  # of sorted sequences a neighbour shares the most
            near = cached[max(0, i - 1) : i + 1]
            n, row = max(((common_prefix(ids, other), row) for other, row in near), default=(0, 0))
            n = min(n, len(ids) - 1)
            matches.append((n, row) if n >= MIN_REUSE else (0, 0))
        return matches

    def _take_row(self, n: int, source: int) -> int:
        """Take a free row for a prompt whose first n tokens are those of the row `source`.

        Where turns are remembered that is the source itself, if the prefix is a third of it: a
        section, not a template. The same section asked about anew takes no second row.
        """
        if self.remember and n and 3 * n >= len(self._cached[source]) and source in self._free:
            self._free.remove(source)
            return source
        return self._free.popleft()

    # ------------------------------------------------------------ the spans of a pass

    def _prefill(self, batch: list[_Request], trie: Trie) -> tuple[list[_Span], list[_Asked]]:
        """Put prompts into free rows: copy cached prefixes, compute the rest of the trie once.

        A token of the trie is computed if any prompt through it has no copy of it:

            trie       a b c d ─┬─ e f      first prompt: 3 tokens copied
                                └─ g h      second prompt: 5 tokens copied
            computed         d ─┬─ e f
                                └─   h
        """
        matches = self._match([r.ids for r in batch])
        rows = [self._take_row(*match) for match in matches]
        pairs = zip(rows, matches, strict=True)
        if copies := [(source, row, n) for row, (n, source) in pairs if n]:
            sources, targets, sizes = zip(*copies, strict=True)
            # as far as the longest match: what lies beyond a shorter one is overwritten or unread
            self._cache.copy(self._put(sources), self._put(targets), max(sizes))
        rows_of: list[list[int]] = [[] for _ in trie.segments]
        start = [s.depth + len(s) for s in trie.segments]  # the depth from which each is computed
        for leaf, row, (n, _) in zip(trie.leaf, rows, matches, strict=True):
            for i in trie.path(leaf):
                rows_of[i].append(row)
                start[i] = min(start[i], max(n, trie.segments[i].depth))
        # A shared segment attends in the row of any of its prompts: all hold the same ancestors.
        spans = {
            i: _Span(trie.ids[s.start + start[i] - s.depth : s.stop], start[i], rows_of[i])
            for i, s in enumerate(trie.segments)
            if s.depth + len(s) > start[i]
        }
        for row, request, (n, _) in zip(rows, batch, matches, strict=True):
            self._requests[row], self._cached[row], request.reused = request, request.ids, n
        computed = sum(len(span.ids) for span in spans.values())
        self.prefilled_tokens += computed
        self.reused_tokens += sum(len(r.ids) for r in batch) - computed
        asked = [(row, spans[leaf], []) for row, leaf in zip(rows, trie.leaf, strict=True)]
        return [*spans.values()], asked

    def _decode(self) -> tuple[list[_Span], list[_Asked]]:
        """Return the span of every turn in flight: its latest token, followed by its draft.

        A guess that fails leaves its keys and values behind; the next token overwrites them.
        """
        asked = []
        for row, r in enumerate(self._requests):
            if r is not None:
                draft = r.draft(MAX_DRAFT)
                span = _Span([r.out[-1], *draft], len(r.ids) + len(r.out) - 1, [row])
                asked.append((row, span, draft))
        return [span for _, span, _ in asked], asked

    # ------------------------------------------------------------ the pass

    def _run(self, spans: list[_Span], asked: list[_Asked]) -> list[tuple[int, Turn]]:
        """Do one forward pass over spans, and sample after the last token of each that is asked,
        and after those of its draft; return the turns that this finishes."""
        sizes = [len(span.ids) for span in spans]
        for span, stop in zip(spans, np.cumsum(sizes).tolist(), strict=True):
            span.first = stop - len(span.ids)
        ids = self._put(np.concatenate([span.ids for span in spans]))
        positions = self._put(_runs([span.start for span in spans], sizes))
        attention = _CacheAttention(self._cache, spans, self.cost, self.device, self.dtype)
        hidden = forward(self.model, ids, positions, attention)
        n = np.array([1 + len(draft) for _, _, draft in asked])
        last = _runs(np.array([span.stop for _, span, _ in asked]) - n, n)
        return self._sample(asked, n, take(hidden, self._put(last)))

    def _put(self, values) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), device=self.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] in float32.

        On a CPU a 16-bit lm_head would be converted for every pass; its float32 copy is cached.
        """
        head = self.model.lm_head
        if head.weight.dtype == torch.float32 or head.weight.device.type != "cpu":
            return logits_of(self.model, hidden)
        version = head.weight.data_ptr(), head.weight._version
        if self._wide is None or self._wide[0] != version:
            self._wide = version, head.weight.float()
        logits = torch.nn.functional.linear(hidden.float(), self._wide[1])
        if head.bias is not None:
            logits += head.bias.float()
        return without(masked_ids(self.model), logits)

    def _sample(
        self, asked: list[_Asked], n: np.ndarray, hidden: torch.Tensor
    ) -> list[tuple[int, Turn]]:
        """Draw what follows the n[i] latest tokens of each row; return the turns that this
        finishes. hidden: the states of these tokens, [sum of n, D]."""
        requests: list[_Request] = [self._requests[row] for row, *_ in asked]  # type: ignore[misc]

        def per_token(values) -> torch.Tensor:
            return self._put(np.repeat(np.array(values), n))

        seeds = np.repeat(np.array([r.seed for r in requests], dtype=np.uint64), n)
        ids, logprobs = draw(
            self._logits(hidden),
            per_token([r.sampling.temperature for r in requests]).float(),
            per_token([r.sampling.top_p for r in requests]).float(),
            self._put(uniforms(seeds, _runs([len(r.out) for r in requests], n))),
        )
        done, drawn = [], zip(ids.tolist(), logprobs.tolist(), strict=True)
        for (row, _, draft), request in zip(asked, requests, strict=True):
            if turn := self._accept(row, request, [*islice(drawn, 1 + len(draft))], draft):
                done.append((request.key, turn))
        return done

    def _accept(
        self, row: int, request: _Request, drawn: list[tuple[int, float]], draft: list[int]
    ) -> Turn | None:
        """Append the tokens drawn for a row as long as its draft holds; return a finished turn.

            draft            Boris in   Lima   .       guesses after the latest token
            drawn      Boris in    Oslo x      x       each after the guesses before it
            accepted   Boris in    Oslo                up to the first that no guess foresaw

        What was drawn behind a wrong guess (x) follows the wrong text.
        """
        out = request.out
        for (token, logprob), guess in zip(drawn, [*draft, None], strict=True):
            out.append(token)
            request.logprobs.append(logprob)
            self.generated_tokens += 1
            stopped = token in self.codec.eos_ids
            if stopped or len(out) == request.prompt.max_tokens:
                self._release(row)
                finish = Finish.STOP if stopped else Finish.LENGTH
                response = self.codec.response(out)
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


def weights_version(model) -> int:
    """Return a number that changes whenever a parameter is written to."""
    return sum(p._version for p in model.parameters())
