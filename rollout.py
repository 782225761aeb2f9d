"""Rollout: engines that turn prompts into turns, and the loop that drives many agents through one engine side by side.

Holds: the `Engine` protocol, `ScriptedEngine`, `TransformersEngine`, `rollout`. Leaves out: agents (memagent.py), losses (grpo.py).
Exercise it: `pytest tests/test_rollout.py`. Read next: grpo.py.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from data import Task
from memagent import Agent, AgentConfig, Finish, Prompt, Trajectory, Turn
from text import Codec, UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    """smallest set of tokens whose probability reaches this"""
    top_k: int = 0
    """0 keeps all"""

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError("Sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0.")


class Engine(Protocol):
    """Turns prompts into turns, continuously: prompts are added at any time, finished turns come back from `step` in any order.

    The same (weights, prompt, sampling, seed) gives the same turn whatever else is in flight, up to rounding of the arithmetic.
    """

    codec: Codec
    window: int | None  # most tokens of a prompt and its response; None: no limit

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; returns its key."""

    def step(self) -> list[tuple[int, Turn]]:
        """Do some work; returns the turns that finished. Empty only while something is still in flight."""

    def sync(self, policy) -> None:
        """Take over the policy's weights as they are now."""

    def awake(self) -> AbstractContextManager:
        """Hold the engine ready to generate; on exit its memory may be given up."""


# ---------------------------------------------------------------- scripted


class ScriptedEngine:
    """For tests: answers every prompt with `script(prompt)`, a string; log-probs are 0. `per_step` turns are answered per step."""

    window = None

    def __init__(self, codec: Codec, script: Callable[[Prompt], str], per_step: int = 4):
        self.codec, self.script, self.per_step = codec, script, per_step
        self._queue: deque[tuple[int, Prompt]] = deque()
        self._keys = 0

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        self._queue.append((self._keys, prompt))
        return self._keys

    def step(self) -> list[tuple[int, Turn]]:
        done = []
        for _ in range(min(self.per_step, len(self._queue))):
            key, prompt = self._queue.pop()  # last in, first out: nobody may rely on the order
            ids = [*self.codec.encode(self.script(prompt)), self.codec.tokenizer.eos_token_id]
            finish = Finish.STOP if len(ids) <= prompt.max_tokens else Finish.LENGTH
            ids = ids[: prompt.max_tokens]
            done.append(
                (key, Turn(prompt, self.codec.chat(prompt.pieces), ids, [0.0] * len(ids), finish, self.codec.response(ids)))
            )
        return done

    def sync(self, policy) -> None: ...

    def awake(self) -> AbstractContextManager:
        return nullcontext()


# ---------------------------------------------------------------- transformers


@dataclass(slots=True)
class _Request:
    key: int
    prompt: Prompt
    ids: list[int]
    sampling: Sampling
    seed: int


class OwnCache:
    """What transformers asks of `past_key_values` before it builds a mask: only a call without a past gets that far, others bring theirs."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class _Slots(OwnCache):
    """A key/value cache of S rows, each with a length of its own: what transformers calls `past_key_values`.

    Prefill writes whole prompts into chosen rows and attends within the prompts alone; decode writes one token per row at its length
    and attends over the first `width` places of every row (the mask cuts each row at its own length).
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.keys: list[torch.Tensor] = []  # per layer [S, H, W, D]
        self.values: list[torch.Tensor] = []
        self.into: torch.Tensor | None = None  # prefill: rows to write; decode: None
        self.at: torch.Tensor | None = None  # decode: place to write in each row, [S]
        self.width = 0

    def reserve(self, width: int) -> None:
        for kv in (self.keys, self.values):
            for i, old in enumerate(kv):
                if old.shape[2] < width:
                    kv[i] = old.new_zeros(old.shape[0], old.shape[1], width, old.shape[3])
                    kv[i][:, :, : old.shape[2]] = old

    def keep(self, rows: torch.Tensor) -> None:
        self.rows = len(rows)
        for kv in (self.keys, self.values):
            for i, old in enumerate(kv):
                kv[i] = old[rows]

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            shape = (self.rows, key.shape[1], self.width, key.shape[3])
            self.keys.append(key.new_zeros(shape))
            self.values.append(value.new_zeros(shape[:3] + value.shape[3:]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.into is not None:
            keys[self.into, :, : key.shape[2]] = key
            values[self.into, :, : value.shape[2]] = value
            return key, value
        everyone = torch.arange(self.rows, device=key.device)
        keys[everyone, :, self.at] = key[:, :, 0]
        values[everyone, :, self.at] = value[:, :, 0]
        return keys[:, :, : self.width], values[:, :, : self.width]


def draw(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, uniform: torch.Tensor):
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
        logp = logp.masked_fill(cut.scatter(1, index, cut) & ~greedy[:, None], -torch.inf).log_softmax(-1)
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
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


class TransformersEngine:
    """Generates with the very weights of the trainer: a causal LM of transformers, a slot cache, continuous batching.

    It uses `model.model` and `model.lm_head` themselves (only rows that are sampled from reach the lm_head), and so does the trainer. A
    model whose logits are not what that gives (scaled, capped, cut to a sliding window) is refused with a `UserError`.

    max_rows: most turns in flight. max_cache_tokens: rows x width of the key/value cache at most (one long prompt may exceed it, alone).
    """

    def __init__(
        self, model, codec: Codec, max_rows: int = 256, max_cache_tokens: int = 1 << 18, max_prefill_tokens: int = 1 << 14
    ):
        self.model, self.codec = model, codec
        self.max_rows, self.max_cache_tokens, self.max_prefill_tokens = max_rows, max_cache_tokens, max_prefill_tokens
        config = model.config
        self.window: int = getattr(config, "max_position_embeddings", 0)
        layers = getattr(config, "layer_types", None) or ()
        slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        if any(kind != "full_attention" for kind in layers) or (not layers and slides and slides < self.window):
            raise UserError("The transformers engine serves models with full attention in every layer; give another --model.")
        if not (self.window and hasattr(model, "model") and hasattr(model, "lm_head")):
            raise UserError(
                f"The transformers engine cannot serve a {type(model).__name__}: it has no .model and .lm_head like Llama or Qwen."
            )
        self.prefilled_tokens = self.generated_tokens = 0
        self._keys = 0
        self._waiting: deque[_Request] = deque()
        self._refused: list[tuple[int, Turn]] = []
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
            logp = self.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]
            own = logp.gather(1, ids[0, len(turn.prompt_ids) :, None])[:, 0].tolist()
            worst = max(abs(a - b) for a, b in zip(turn.logprobs, own, strict=True))
            if not worst < (1e-2 if self.model.dtype == torch.float32 else 0.5):  # bfloat16 rounds logits of 16 to 0.125
                raise UserError(
                    f"The transformers engine cannot serve a {type(self.model).__name__}: its logits are not those of lm_head(model) "
                    f"with full attention (log-probs differ by {worst:.2g}); give another --model."
                )
        self.model.train(training)
        self.prefilled_tokens = self.generated_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self._slots: _Slots | None = None
        self._requests: list[_Request | None] = []  # per row
        self._out: list[list[int]] = []
        self._logp: list[list[float]] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        ids = self.codec.chat(prompt.pieces)
        if len(ids) + prompt.max_tokens > self.window:
            turn = Turn(prompt, ids, [], [], Finish.FULL, self.codec.response([]))
            turn.error = (
                f"a prompt of {len(ids)} tokens and {prompt.max_tokens} new ones exceed the model's window of {self.window}"
            )
            self._refused.append((self._keys, turn))
        else:
            self._waiting.append(_Request(self._keys, prompt, ids, sampling, seed & (2**64 - 1)))
        return self._keys

    @torch.no_grad()
    def step(self) -> list[tuple[int, Turn]]:
        done, self._refused = self._refused, []
        training, _ = self.model.training, self.model.eval()
        n_active = sum(r is not None for r in self._requests)
        # A small prefill costs almost as much as a large one: wait until a quarter of the rows is free.
        if self._waiting and n_active <= 0.75 * min(self.max_rows, n_active + len(self._waiting)):
            done += self._admit()
        elif self._slots is not None and n_active and n_active <= self._slots.rows // 2:
            self._compact()
        if any(r is not None for r in self._requests):
            done += self._decode()
        self.model.train(training)
        return done

    def _admit(self) -> list[tuple[int, Turn]]:
        """Prefill waiting prompts into free rows, first come first served, as far as rows and cache reach."""
        done: list[tuple[int, Turn]] = []
        active = [i for i, r in enumerate(self._requests) if r is not None]
        if not active:
            self._clear()
        width = max((len(r.ids) + r.prompt.max_tokens for r in self._requests if r is not None), default=0)
        chosen: list[_Request] = []
        while self._waiting and len(active) + len(chosen) < self.max_rows:
            need = max(width, len(self._waiting[0].ids) + self._waiting[0].prompt.max_tokens)
            if (active or chosen) and (len(active) + len(chosen) + 1) * need > self.max_cache_tokens:
                break
            width = need
            chosen.append(self._waiting.popleft())
        if not chosen:
            return done
        rows = len(active) + len(chosen)
        free = [i for i, r in enumerate(self._requests) if r is None]
        if self._slots is None or len(free) < len(chosen):
            self._grow(active, rows)
            free = list(range(len(active), rows))
        assert self._slots is not None
        self._slots.width = max(width, self._slots.width)
        self._slots.reserve(self._slots.width)
        pairs = sorted(zip(free, chosen, strict=False), key=lambda pair: len(pair[1].ids))
        while pairs:  # batches of similar length, at most max_prefill_tokens each
            n = 1
            while n < len(pairs) and (n + 1) * len(pairs[n][1].ids) <= self.max_prefill_tokens:
                n += 1
            batch, pairs = pairs[:n], pairs[n:]
            done += self._prefill(batch)
        return done

    def _grow(self, active: list[int], rows: int) -> None:
        """A slot cache of `rows` rows whose first ones are the active rows."""
        old = self._slots
        self._slots = _Slots(rows)
        extra = rows - len(active)
        if old is not None and active:
            index = torch.tensor(active + active[:1] * extra, device=self.device)
            old.keep(index)
            self._slots.keys, self._slots.values, self._slots.width = old.keys, old.values, old.width
        self._requests = [self._requests[i] for i in active] + [None] * extra
        self._out = [self._out[i] for i in active] + [[] for _ in range(extra)]
        self._logp = [self._logp[i] for i in active] + [[] for _ in range(extra)]

    def _compact(self) -> None:
        active = [i for i, r in enumerate(self._requests) if r is not None]
        self._grow(active, len(active))

    def _prefill(self, batch: list[tuple[int, _Request]]) -> list[tuple[int, Turn]]:
        assert self._slots is not None
        longest = max(len(r.ids) for _, r in batch)
        ids = torch.full((len(batch), longest), self.codec.pad_id)
        for n, (row, request) in enumerate(batch):
            ids[n, : len(request.ids)] = torch.tensor(request.ids)
            self._requests[row], self._out[row], self._logp[row] = request, [], []
        rows = torch.tensor([row for row, _ in batch], device=self.device)
        self._slots.into = rows
        # padding stands on the right, so plain causal attention is exact for every real token
        hidden = self.model.model(
            input_ids=ids.to(self.device), past_key_values=self._slots, use_cache=True, position_ids=torch.arange(longest, device=self.device)[None]
        ).last_hidden_state  # fmt: skip
        self._slots.into = None
        last = torch.tensor([len(r.ids) - 1 for _, r in batch], device=self.device)
        self.prefilled_tokens += sum(len(r.ids) for _, r in batch)
        return self._sample([row for row, _ in batch], hidden[torch.arange(len(batch), device=self.device), last])

    def _decode(self) -> list[tuple[int, Turn]]:
        assert self._slots is not None
        at = [len(r.ids) + len(out) - 1 if r is not None else 0 for r, out in zip(self._requests, self._out, strict=True)]
        tokens = torch.tensor(
            [out[-1] if r is not None else self.codec.pad_id for r, out in zip(self._requests, self._out, strict=True)]
        )
        positions = torch.tensor(at, device=self.device)
        self._slots.at = positions
        self._slots.width = max(at) + 1
        self._slots.reserve(self._slots.width)
        mask = torch.arange(self._slots.width, device=self.device) <= positions[:, None]  # [S, W]
        hidden = self.model.model(
            input_ids=tokens[:, None].to(self.device), attention_mask=mask[:, None, None], position_ids=positions[:, None],
            past_key_values=self._slots, use_cache=True,
        ).last_hidden_state[:, 0]  # fmt: skip
        rows = [i for i, r in enumerate(self._requests) if r is not None]
        return self._sample(rows, hidden[rows] if len(rows) < len(at) else hidden)

    def _sample(self, rows: list[int], hidden: torch.Tensor) -> list[tuple[int, Turn]]:
        """Draw the next token of each row from its last hidden state [N, D]; returns the turns that this finishes."""
        requests: list[_Request] = [self._requests[i] for i in rows]  # type: ignore[misc]
        seeds = np.array([r.seed for r in requests], dtype=np.uint64)
        position = np.array([len(self._out[i]) for i in rows])
        ids, logp = draw(
            self.model.lm_head(hidden),
            torch.tensor([r.sampling.temperature for r in requests], device=self.device),
            torch.tensor([r.sampling.top_p for r in requests], device=self.device),
            torch.tensor([r.sampling.top_k for r in requests], device=self.device),
            torch.from_numpy(uniform_of(seeds, position)).to(self.device),
        )
        self.generated_tokens += len(rows)
        done = []
        for row, request, token, lp in zip(rows, requests, ids.tolist(), logp.tolist(), strict=True):
            out = self._out[row]
            out.append(token)
            self._logp[row].append(lp)
            stopped = token in self.codec.eos_ids
            if stopped or len(out) == request.prompt.max_tokens:
                finish = Finish.STOP if stopped else Finish.LENGTH
                turn = Turn(request.prompt, request.ids, out, self._logp[row], finish, self.codec.response(out))
                self._requests[row] = None
                done.append((request.key, turn))
        return done

    def sync(self, policy) -> None:
        """The weights are shared: nothing to copy."""
        if policy is not self.model:
            raise UserError("The transformers engine samples from the trainer's own model; it cannot take over another one.")

    def awake(self) -> AbstractContextManager:
        return nullcontext()


# ---------------------------------------------------------------- the loop


def seed_of(*parts) -> int:
    """A 64-bit seed from anything printable, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def fitted(config: AgentConfig, engine: Engine) -> AgentConfig:
    """The settings with the window that the baselines have: the one asked for, never more than the engine's."""
    return replace(config, window=min(config.window or engine.window, engine.window)) if engine.window else config


def rollout(
    engine: Engine,
    agent: Agent,
    jobs: Iterable[tuple[Task, int]],
    config: AgentConfig,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    in_flight: int = 512,
) -> Iterator[Trajectory]:
    """Drive one agent per job (task, sample number) through the engine, at most `in_flight` at a time; yields trajectories as they finish.

    Every trajectory goes its own pace: there is no barrier between sections. A turn that could not be made ends its trajectory with
    `error` set; it is yielded like the others, and counted as wrong by whoever asks.
    """
    jobs, config = iter(jobs), fitted(config, engine)
    running: dict[int, tuple[Trajectory, object, int, float]] = {}

    def begin() -> Iterator[Trajectory]:
        while len(running) < in_flight and (job := next(jobs, None)) is not None:
            task, sample = job
            trajectory, steps = Trajectory(task, sample=sample), agent(task, config, engine.codec)
            base = seed_of(seed, task.id, sample)
            start = time.perf_counter()
            try:
                running[engine.add(next(steps), sampling, base)] = trajectory, steps, base, start
            except UserError as error:
                trajectory.error = str(error)
                yield trajectory

    yield from begin()
    while running:
        for key, turn in engine.step():
            trajectory, steps, base, start = running.pop(key)
            trajectory.turns.append(turn)
            if turn.finish in (Finish.FULL, Finish.ERROR):
                trajectory.error = turn.error
            else:
                try:
                    prompt = steps.send(turn)
                    running[engine.add(prompt, sampling, base + len(trajectory.turns))] = trajectory, steps, base, start
                    continue
                except StopIteration:
                    pass
                except UserError as error:
                    trajectory.error = str(error)
            trajectory.seconds = time.perf_counter() - start
            yield trajectory
        yield from begin()


def follow(engine: Engine, agent: Agent, task: Task, config: AgentConfig, sampling: Sampling, seed: int = 0) -> Iterator[Turn]:
    """One trajectory, turn by turn as it happens."""
    steps = agent(task, fitted(config, engine), engine.codec)
    base, number = seed_of(seed, task.id, 0), 0
    prompt = next(steps)
    while True:
        engine.add(prompt, sampling, base + number)
        while not (done := engine.step()):
            pass
        ((_, turn),) = done
        yield turn
        number += 1
        if turn.finish in (Finish.FULL, Finish.ERROR):
            raise UserError(f"Turn {number} could not be made: {turn.error}.")
        try:
            prompt = steps.send(turn)
        except StopIteration:
            return
