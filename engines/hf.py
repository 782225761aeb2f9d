"""The transformers engine: it samples from the trainer's own weights, with a key/value cache of slots that computes no prefix twice.

Holds: `TransformersEngine`, `draw`. Leaves out: what an engine is (rollout.py), the packing of tokens that share prefixes (tokens/trie.py).
Exercise it: `pytest tests/engines/test_hf.py`. Read next: grpo.py.

Every turn in flight has a row of the cache, its slot. A forward pass is one row of tokens without padding: the next token of every
turn, and the prompts that are admitted, packed as a trie. A prompt's prefix that stands in any slot, a finished turn's too, is copied
from there.

An agent that rewrites its memory mostly copies it. So what followed the latest tokens in the prompt is appended as a draft, and one forward pass
samples after each of them; the draft holds as far as it is what was sampled. Every token is drawn from the model's own distribution with
the random number of its place: the draft changes how many passes a turn takes, not what it says.
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

from config.errors import UserError
from memagent import Finish, Prompt, Turn
from models.load import inner
from models.logprobs import logits_of
from models.ranks import full_tensor
from rollout import Sampling, refusal
from tokens.attention import forward, minus_inf, sdpa, side_by_side, take
from tokens.codec import Codec
from tokens.trie import Cost, Segment, Trie, buckets, common, outputs_of, split


@dataclass(slots=True)
class _Request:
    key: int
    prompt: Prompt
    ids: list[int]
    sampling: Sampling
    seed: int
    _after: dict[int | tuple[int, int], int] = field(
        default_factory=dict
    )  # tokens -> the place after them, the last one counts

    def draft(self, out: list[int], most: int) -> list[int]:
        """Guess at most `most` tokens after those sampled: what follows the latest two, or the latest one, in the prompt."""
        most = min(most, self.prompt.max_tokens - len(out) - 1)
        if most < 1:
            return []
        if not self._after:
            pairs = zip(self.ids, self.ids[1:], strict=False)
            self._after = {
                **dict(zip(self.ids, range(1, len(self.ids)), strict=False)),
                **dict(zip(pairs, range(2, len(self.ids)), strict=False)),
            }
        at = self._after.get((out[-2], out[-1])) if len(out) > 1 else None
        at = at or self._after.get(out[-1])
        return self.ids[at : at + most] if at else []


class _Slots:
    """A key/value cache of R rows of W places, each row with a length of its own: per layer [R, H, W, D], what a head reads side by side."""

    def __init__(self, rows: int):
        self.rows, self.width = rows, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def arrange(self, keep: list[int], rows: int, width: int) -> None:
        """The rows `keep`, in this order, then new ones up to `rows` in all; `width` places of each."""
        self.rows, self.width = rows, width
        for kv in (self.keys, self.values):
            for i, old in enumerate(kv):
                kv[i] = old.new_zeros(rows, old.shape[1], width, old.shape[3])
                n = min(width, old.shape[2])
                kv[i][: len(keep), :, :n] = old[keep, :, :n]

    def copy(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """The first `width` places of some rows into others. A row may be source and target: all are read before one is written."""
        for kv in (self.keys, self.values):
            for layer in kv:
                layer[:, :, :width].index_copy_(0, target, take(layer[:, :, :width], source))

    def of_heads(self, places: torch.Tensor, heads: int) -> torch.Tensor:
        """Where each head of some places stands, [n * H] in a layer without dimensions; place = row x W + place in the row [n]."""
        rows = places // self.width
        return (
            (rows[:, None] * heads + torch.arange(heads, device=places.device)) * self.width
            + (places % self.width)[:, None]
        ).flatten()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, into: torch.Tensor) -> None:
        """Keys and values [n, H, D] to where `of_heads` says [n * H]."""
        for kv, new in ((self.keys, key), (self.values, value)):
            if layer == len(kv):
                kv.append(new.new_zeros(self.rows, new.shape[1], self.width, new.shape[2]))
            kv[layer].flatten(0, 2).index_copy_(0, into, new.flatten(0, 1))


@dataclass(slots=True)
class _Bucket:
    """Queries of S rows that are computed side by side."""

    queries: torch.Tensor  # [S, L] places in the packed row; padding repeats one
    rows: (
        torch.Tensor | None
    )  # [S] whose keys they see; None = all rows; with `mask` None they see each other
    mask: torch.Tensor | None  # [S, 1, L, W]; None: causal among themselves
    real: torch.Tensor | None  # which of the S * L are queries; None = all


@dataclass(slots=True)
class _Part:
    """T new tokens of a forward pass. Their keys and values go into the slots: those of token `source[i]` to `places[i]`."""

    ids: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    source: np.ndarray  # [n]
    places: np.ndarray  # [n] row x W + place in the row
    buckets: list[_Bucket]
    order: np.ndarray  # [T] where the buckets' outputs have each token
    asked: list[int]  # rows that get their next token
    last: np.ndarray  # and the token that it follows, or tokens, one after the other
    drafts: list[list[int]]  # per row asked the tokens after the first of those


@dataclass(slots=True)
class _Attention:
    """Attention of a packed row: what is new goes into the slots first, then bucket by bucket."""

    slots: _Slots
    source: torch.Tensor | None  # None: all
    places: torch.Tensor | None  # None: nothing is new
    buckets: list[_Bucket]
    order: torch.Tensor | None  # None: as they come
    into: torch.Tensor | None = None  # the places, head by head

    def write(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        k, v = (take(x[0].transpose(0, 1), self.source) for x in (key, value))
        if self.into is None:
            self.into = self.slots.of_heads(self.places, k.shape[1])
        self.slots.write(layer, k, v, self.into)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        if self.places is not None:
            self.write(layer, query, key, value, scale)
        parts = []
        for b in self.buckets:
            if b.mask is None:
                keys, values = (take(x, b.queries).transpose(1, 2) for x in (k, v))
            else:
                keys, values = (
                    take(x[layer][:, :, : b.mask.shape[3]], b.rows)
                    for x in (self.slots.keys, self.slots.values)
                )
            queries = take(q, b.queries).transpose(1, 2)
            parts.append(take(sdpa(queries, keys, values, b.mask, scale).flatten(0, 1), b.real))
        return take(torch.cat(parts) if len(parts) > 1 else parts[0], self.order)[None]


class _Written(Exception):
    """The keys and values of the last layer stand in the slots."""


@contextmanager
def last_layer_for(model, asked: torch.Tensor, attention: _Attention):
    """Meanwhile the model's last layer makes keys and values of all T tokens and everything else for the tokens `asked` [n] alone.

    Nothing reads what the last layer makes of the other tokens of a prompt. A layer cannot be told so: it is run for all and broken off
    by its attention once the slots are written, then it is run for the few. The model's output is that of the few.
    """

    def few(x, n_tokens: int):
        if isinstance(x, tuple):
            return tuple(few(y, n_tokens) for y in x)
        return (
            x[:, asked]
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == n_tokens
            else x
        )

    def before(layer, args, kwargs):
        def write(*qkv):
            kwargs["attend"].write(*qkv)
            raise _Written

        with suppress(_Written):
            layer.forward(*args, **{**kwargs, "attend": write})
        n_tokens = args[0].shape[1]
        return few(args, n_tokens), {name: few(x, n_tokens) for name, x in kwargs.items()} | {
            "attend": attention
        }

    with model.model.layers[-1].register_forward_pre_hook(before, with_kwargs=True):
        yield


REUSE = 16
"""Fewest tokens of a prefix that are copied from another row: below that a causal call of its own costs less."""


ADMIT = 0.7
"""Share of the rows in flight up to which waiting prompts are admitted."""


DRAFT = 4
"""Most tokens that are guessed ahead; 0: none."""


def weights_stamp(model) -> int:
    """A number that changes whenever a parameter is written to."""
    return sum(p._version for p in model.parameters())


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    uniform: torch.Tensor,
):
    """Sample one token per row by inverting the cumulative distribution.

    logits [N, V]; temperature, top_p, top_k, uniform [N]; returns ids [N] and the log-probs [N] of the distribution that was sampled
    (greedy rows: of the untempered one).
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], -1)
    if bool((top_p < 1).any()) or bool((top_k > 0).any()):
        ordered, index = logp.sort(-1, descending=True)
        rank = torch.arange(logp.shape[1], device=logp.device)
        k = torch.where(top_k > 0, top_k, logp.shape[1])[:, None]
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the tokens ranked above
        cut = ((before >= top_p[:, None]) & (top_p[:, None] < 1)) | (rank >= k)
        logp = logp.masked_fill(
            cut.scatter(1, index, cut) & ~greedy[:, None], -torch.inf
        ).log_softmax(-1)
    cdf = logp.exp().cumsum(-1)
    # scaled by the last entry, so that rounding can never point past the last token of positive probability
    picked = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1)
    ids = torch.where(greedy, logp.argmax(-1), picked.clamp_max(logp.shape[1] - 1))
    return ids, logp.gather(1, ids[:, None])[:, 0]


def uniform_of(seeds: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row from (seed, position) alone (splitmix64), so that a draw does not depend on the batch around it."""
    with np.errstate(over="ignore"):
        x = seeds + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(
            1 << 24
        )


class TransformersEngine:
    """Generates with the very weights of the trainer: a causal LM of transformers, a slot cache, continuous batching.

    It uses `model.model` and `model.lm_head` themselves (only rows that are sampled from reach the lm_head), and so does the trainer. A
    model whose logits are not what that gives (scaled, capped, cut to a sliding window) is refused with a `UserError`.

    copy: the model is a copy of the trainer's, whose weights are in shards or of another type. max_rows: most turns in flight.
    max_cache_tokens: rows x width of the key/value cache at most (one long prompt may exceed it, alone).
    """

    def __init__(
        self,
        model,
        codec: Codec,
        max_rows: int = 256,
        max_cache_tokens: int = 1 << 18,
        max_prefill_tokens: int = 1 << 14,
        copy: bool = False,
    ):
        self.model, self.codec, self.copy = model, codec, copy
        self.max_rows, self.max_cache_tokens, self.max_prefill_tokens = (
            max_rows,
            max_cache_tokens,
            max_prefill_tokens,
        )
        config = model.config
        self.window: int = getattr(config, "max_position_embeddings", 0)
        layers = getattr(config, "layer_types", None) or ()
        slides = getattr(config, "use_sliding_window", True) and getattr(
            config, "sliding_window", None
        )
        if any(kind != "full_attention" for kind in layers) or (
            not layers and slides and slides < self.window
        ):
            raise UserError(
                "The transformers engine serves models with full attention in every layer; give another --model."
            )
        if not (self.window and hasattr(model, "model") and hasattr(model, "lm_head")):
            raise UserError(
                f"The transformers engine cannot serve a {type(model).__name__}: it has no .model and .lm_head like Llama or Qwen."
            )
        self.cost = Cost.of(model)
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._keys = self._weights = 0
        self._waiting: deque[_Request] = deque()
        self._refused: list[tuple[int, Turn]] = []
        self.device, self.dtype = model.device, model.dtype
        self._wide: tuple[tuple[int, int], torch.Tensor] | None = (
            None  # the lm_head in float32, and of which weights
        )
        self._clear()
        self._try_out()

    @torch.no_grad()
    def _try_out(self) -> None:
        """A few greedy tokens must have the log-probs of the model's own forward pass; if not, it computes something else."""
        for n in (3, 6):
            self._waiting.append(_Request(n, Prompt((), 4), [*range(2, 2 + n)], Sampling(0.0), 0))
        turns: list[Turn] = []
        while len(turns) < 2:
            turns += [turn for _, turn in self.step()]
        training, _ = self.model.training, self.model.eval()
        for turn in turns:
            ids = torch.tensor([turn.prompt_ids + turn.response_ids], device=self.device)
            logp = (
                self.model(input_ids=ids, use_cache=False)
                .logits[0]
                .float()
                .log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]
            )
            own = logp.gather(1, ids[0, len(turn.prompt_ids) :, None])[:, 0].tolist()
            worst = max(abs(a - b) for a, b in zip(turn.logprobs, own, strict=True))
            if not worst < (
                1e-2 if self.model.dtype == torch.float32 else 0.5
            ):  # bfloat16 rounds logits of 16 to 0.125
                raise UserError(
                    f"The transformers engine cannot serve a {type(self.model).__name__}: its logits are not those of lm_head(model) "
                    f"with full attention (log-probs differ by {worst:.2g}); give another --model."
                )
        self.model.train(training)
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self._slots = _Slots(0)
        self._requests: list[_Request | None] = []  # per row; None: free
        self._out: list[list[int]] = []
        self._logp: list[list[float]] = []
        self._held: list[
            list[int]
        ] = []  # per row the ids whose keys and values stand in it, finished turns' too
        self._free: deque[int] = deque()  # rows without a request, the longest free first

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        ids = self.codec.chat(prompt.pieces)
        if turn := refusal(prompt, ids, self.window, self.codec):
            self._refused.append((self._keys, turn))
        else:
            self._waiting.append(_Request(self._keys, prompt, ids, sampling, seed & (2**64 - 1)))
        return self._keys

    @torch.no_grad()
    def step(self) -> list[tuple[int, Turn]]:
        done, self._refused = self._refused, []
        self.device, self.dtype = (
            self.model.device,
            self.model.dtype,
        )  # a search through the model: once a step
        if training := self.model.training:
            self.model.eval()
        n_active = len(self._requests) - len(self._free)
        waiting: Iterator[tuple[list[_Request], Trie]] = iter(())
        # putting a prefill together costs something however small it is: wait until some rows are free
        if self._waiting and n_active <= ADMIT * min(self.max_rows, n_active + len(self._waiting)):
            waiting = self._admit()
        parts = [self._decode()] if n_active else []
        for (
            batch,
            trie,
        ) in waiting:  # the first prefill goes along with the tokens that are due anyway
            done += self._run([*parts, self._prefill(batch, trie)])
            parts = []
        if parts:
            done += self._run(parts)
        if training:
            self.model.train()
        return done

    def _admit(self) -> Iterator[tuple[list[_Request], Trie]]:
        """Waiting prompts, first come first served, as far as rows and cache reach: free rows for them now, then their batches."""
        active = [i for i, r in enumerate(self._requests) if r is not None]
        if self._weights != (now := weights_stamp(self.model)):
            self._weights = now  # somebody trained without saying so
            self._forget()
        width = max(
            (len(r.ids) + r.prompt.max_tokens for r in self._requests if r is not None), default=0
        )
        chosen: list[_Request] = []
        while self._waiting and len(active) + len(chosen) < self.max_rows:
            need = max(width, len(self._waiting[0].ids) + self._waiting[0].prompt.max_tokens)
            if (active or chosen) and (
                len(active) + len(chosen) + 1
            ) * need > self.max_cache_tokens:
                break
            width = need
            chosen.append(self._waiting.popleft())
        rows = len(active) + len(chosen)
        if max(rows, len(self._requests)) * max(width, self._slots.width) <= self.max_cache_tokens:
            if rows > len(self._requests) or width > self._slots.width:
                self._arrange(
                    [*range(len(self._requests))],
                    max(rows, len(self._requests)),
                    max(width, self._slots.width),
                )
        else:  # no room for all the finished turns that are held: the latest stay
            self._arrange(active + [*self._free][::-1][: rows - len(active)], rows, width)
        batches = split([r.ids for r in chosen], self.max_prefill_tokens, self.cost)
        return (([chosen[i] for i in some], trie) for some, trie in batches)

    def _arrange(self, keep: list[int], rows: int, width: int) -> None:
        """The slots anew: the rows `keep`, then empty ones up to `rows` in all, of `width` places."""
        self._slots.arrange(keep, rows, width)
        extra = rows - len(keep)
        free = {row: n for n, row in enumerate(self._free)}
        self._requests = [self._requests[i] for i in keep] + [None] * extra
        self._out = [self._out[i] for i in keep] + [[] for _ in range(extra)]
        self._logp = [self._logp[i] for i in keep] + [[] for _ in range(extra)]
        self._held = [self._held[i] for i in keep] + [[] for _ in range(extra)]
        old = sorted((free[row], n) for n, row in enumerate(keep) if row in free)
        self._free = deque([*range(len(keep), rows), *(n for _, n in old)])

    def _forget(self) -> None:
        """Nothing that stands in the cache is reused: a cache of other weights would go unnoticed."""
        self._held = [[] for _ in self._held]

    def _match(self, prompts: Sequence[list[int]]) -> list[tuple[int, int]]:
        """For each prompt the longest prefix that stands in some row: (tokens, row). At least one token is left to compute."""
        held = sorted((ids, row) for row, ids in enumerate(self._held) if ids)
        out = []
        for ids in prompts:
            i = bisect(
                held, (ids, -1)
            )  # neighbours in the order of the alphabet have the longest common prefix
            n, row = max(
                ((common(ids, other), row) for other, row in held[max(0, i - 1) : i + 1]),
                default=(0, 0),
            )
            n = min(n, len(ids) - 1)
            out.append((n, row) if n >= REUSE else (0, 0))
        return out

    def _prefill(self, batch: list[_Request], trie: Trie) -> _Part:
        """Prompts into free rows: what stands in another row is copied, what they share is computed once."""
        found = self._match([r.ids for r in batch])
        rows = [self._free.popleft() for _ in batch]
        if copied := [(row, source, n) for row, (n, source) in zip(rows, found, strict=True) if n]:
            targets, sources, sizes = zip(*copied, strict=True)
            self._slots.copy(self._put(sources), self._put(targets), max(sizes))
        lines = [trie.line(leaf) for leaf in trie.leaf]
        start = [
            s.depth + len(s) for s in trie.segments
        ]  # the depth from which on a segment is computed
        for line, (n, _) in zip(lines, found, strict=True):
            for i in line:
                start[i] = min(start[i], max(n, trie.segments[i].depth))
        new, n_new = {}, 0  # segment -> what is computed of it, in a packed row of its own
        for i, s in enumerate(trie.segments):
            if size := s.depth + len(s) - start[i]:
                new[i] = Segment(n_new, n_new + size, start[i])
                n_new += size
        ids = np.concatenate(
            [
                trie.ids[trie.segments[i].stop - len(s) : trie.segments[i].stop]
                for i, s in new.items()
            ]
        )
        depth = np.concatenate([np.arange(s.depth, s.depth + len(s)) for s in new.values()])
        into = [
            np.concatenate([np.arange(new[i].start, new[i].stop) for i in line if i in new])
            for line in lines
        ]
        source = np.concatenate(into)
        in_row = {
            i: row for line, row in zip(lines, rows, strict=True) for i in line
        }  # a row with all that stands above
        for row, request in zip(rows, batch, strict=True):
            self._requests[row], self._out[row], self._logp[row], self._held[row] = (
                request,
                [],
                [],
                request.ids,
            )
        self.prefilled_tokens += n_new
        self.reused_tokens += sum(len(r.ids) for r in batch) - n_new
        each = np.repeat(rows, [len(x) for x in into])
        segments, of = list(new.values()), [in_row[i] for i in new]
        chosen = buckets(segments, self.cost)
        made = [self._bucket([segments[i] for i in some], [of[i] for i in some]) for some in chosen]
        places = each * self._slots.width + depth[source]
        last = np.array([x[-1] for x in into])
        return _Part(
            ids,
            depth,
            source,
            places,
            made,
            outputs_of(chosen, segments),
            rows,
            last,
            [[] for _ in rows],
        )

    def _bucket(self, segments: list[Segment], rows: list[int]) -> _Bucket:
        queries, mask, real = side_by_side(segments, self.device, self.model.dtype)
        return _Bucket(queries, self._put(rows), mask, real)

    def _ask(self, rows: list[int], at: np.ndarray, n: np.ndarray) -> _Bucket:
        """n[i] queries one after the other for each of some rows, from place at[i] of it on; each sees what stands before it and itself."""
        first, column = np.cumsum(n) - n, np.arange(n.max())
        each = np.minimum(column, n[:, None] - 1)  # [len(rows), L]; padding repeats the last
        if 2 * len(rows) <= len(self._requests):  # few: their keys are gathered
            some, take_of, places = self._put(rows), first[:, None] + each, at[:, None] + each
            real = None if len(column) == 1 else np.flatnonzero(column < n[:, None])
        else:  # the other rows ask too and are not heard
            some, take_of, places = (
                None,
                np.zeros((len(self._requests), len(column)), dtype=np.int64),
                np.zeros((len(self._requests), len(column)), dtype=np.int64),
            )
            take_of[rows], places[rows] = first[:, None] + each, at[:, None] + each
            real = (np.array(rows)[:, None] * len(column) + column)[column < n[:, None]]
        seen = (
            torch.arange(int(places.max()) + 1, device=self.device) <= self._put(places)[:, :, None]
        )  # [S, L, W]
        return _Bucket(
            self._put(take_of),
            some,
            minus_inf(seen, self.dtype)[:, None],
            None if real is None else self._put(real),
        )

    def _decode(self) -> _Part:
        """One more token of every turn in flight, and those that are guessed to follow it."""
        rows = [i for i, r in enumerate(self._requests) if r is not None]
        drafts = [self._requests[i].draft(self._out[i], DRAFT) for i in rows]  # type: ignore[union-attr]
        at = np.array([len(self._requests[i].ids) + len(self._out[i]) - 1 for i in rows])  # type: ignore[union-attr]
        n = np.array([1 + len(draft) for draft in drafts])
        tokens = np.array(
            [
                token
                for i, draft in zip(rows, drafts, strict=True)
                for token in (self._out[i][-1], *draft)
            ]
        )
        each, ahead = np.arange(len(tokens)), np.concatenate([np.arange(k) for k in n])
        positions = np.repeat(at, n) + ahead
        places = np.repeat(np.array(rows) * self._slots.width, n) + positions
        return _Part(
            tokens, positions, each, places, [self._ask(rows, at, n)], each, rows, each, drafts
        )

    def _run(self, parts: list[_Part]) -> list[tuple[int, Turn]]:
        """One forward pass for all parts; returns the turns that this finishes."""
        starts = np.cumsum([0, *(len(p.ids) for p in parts)])

        def joined(name: str, shift: bool = False) -> np.ndarray:
            return np.concatenate(
                [getattr(p, name) + start * shift for p, start in zip(parts, starts, strict=False)]
            )

        def unless_all(places: np.ndarray) -> torch.Tensor | None:  # what `take` need not do
            return None if np.array_equal(places, np.arange(starts[-1])) else self._put(places)

        for part, start in zip(parts, starts, strict=False):
            for bucket in part.buckets:
                bucket.queries += start
        rows, drafts = (
            [row for p in parts for row in p.asked],
            [draft for p in parts for draft in p.drafts],
        )
        positions, last = joined("positions"), joined("last", True)
        source, places = unless_all(joined("source", True)), self._put(joined("places"))
        attention = _Attention(
            self._slots,
            source,
            places,
            [b for p in parts for b in p.buckets],
            unless_all(joined("order", True)),
        )
        if few := 2 * len(last) <= len(positions):
            n = np.array([1 + len(draft) for draft in drafts])
            at_end = _Attention(
                self._slots,
                None,
                None,
                [self._ask(rows, positions[last[np.cumsum(n) - n]], n)],
                None,
            )
        with last_layer_for(self.model, self._put(last), at_end) if few else nullcontext():
            hidden = forward(self.model, self._put(joined("ids")), self._put(positions), attention)
        return self._sample(rows, drafts, hidden if few else take(hidden, unless_all(last)))

    def _put(self, values) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(self.device)

    def _sample(
        self, rows: list[int], drafts: list[list[int]], hidden: torch.Tensor
    ) -> list[tuple[int, Turn]]:
        """Draw what follows the last token of each row and the tokens of its draft, as long as the draft holds, from the hidden states
        [rows and drafts, D]; returns the turns that this finishes."""
        requests: list[_Request] = [self._requests[i] for i in rows]  # type: ignore[misc]
        n = np.array([1 + len(draft) for draft in drafts])
        seeds = np.repeat(np.array([r.seed for r in requests], dtype=np.uint64), n)
        position = np.concatenate(
            [len(self._out[i]) + np.arange(k) for i, k in zip(rows, n, strict=True)]
        )

        def of(values: list) -> torch.Tensor:
            return self._put(np.repeat(np.array(values), n))

        ids, logp = draw(
            self._logits(hidden),
            of([r.sampling.temperature for r in requests]).float(),
            of([r.sampling.top_p for r in requests]).float(),
            of([r.sampling.top_k for r in requests]),
            self._put(uniform_of(seeds, position)),
        )
        done, drawn = [], iter(zip(ids.tolist(), logp.tolist(), strict=True))
        for row, request, draft in zip(rows, requests, drafts, strict=True):
            out, own = self._out[row], list(islice(drawn, 1 + len(draft)))
            for (token, lp), guessed in zip(own, [*draft, None], strict=True):
                out.append(token)
                self._logp[row].append(lp)
                self.generated_tokens += 1
                stopped = token in self.codec.eos_ids
                if stopped or len(out) == request.prompt.max_tokens:
                    finish = Finish.STOP if stopped else Finish.LENGTH
                    turn = Turn(
                        request.prompt,
                        request.ids,
                        out,
                        self._logp[row],
                        finish,
                        self.codec.response(out),
                    )
                    self._requests[row], self._held[row] = None, request.ids + out[:-1]
                    self._free.append(row)
                    done.append((request.key, turn))
                    break
                if token != guessed:
                    break
        return done

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in float32. On a CPU a 16-bit lm_head would be widened for every token anew: its copy is kept."""
        weight = self.model.lm_head.weight
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            return logits_of(self.model, hidden)
        stamp = weight.data_ptr(), weight._version
        if self._wide is None or self._wide[0] != stamp:
            self._wide = stamp, weight.float()
        bias = getattr(self.model.lm_head, "bias", None)
        return torch.nn.functional.linear(
            hidden.float(), self._wide[1], None if bias is None else bias.float()
        )

    def awake(self, policy=None) -> AbstractContextManager:
        """The weights are shared, nothing is copied; or, if the model is a copy of its own, it takes over those that are trained. What
        finished turns have left in the cache is given up."""
        if policy is not None:
            if inner(policy) is not self.model:
                self._take_over(inner(policy))
            self._forget()
        return nullcontext()

    @torch.no_grad()
    def _take_over(self, policy) -> None:
        if not self.copy:
            raise UserError(
                "The transformers engine samples from the trainer's own model; it cannot take over another one."
            )
        own = dict(self.model.named_parameters())
        for name, p in policy.named_parameters():
            if p.requires_grad:
                own[name].copy_(full_tensor(p))

    def counts(self) -> dict[str, int]:
        return {
            name: getattr(self, name)
            for name in ("prefilled_tokens", "reused_tokens", "generated_tokens")
        }

    def close(self) -> None:
        self._clear()
