"""Log-probs of many turns through one prefix tree.

Holds: `Row`, `TokenBatch`, `pack`, `logprobs`, `policy_logprobs`, `logits_of`. Leaves out: the loss (grpo.py).
Exercise it: `pytest tests/test_grpo.py`. Read next: grpo.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from tokens.attention import hidden_states
from tokens.trie import Cost, Trie, split


@dataclass(slots=True)
class Row:
    """One turn as training sees it."""

    prompt_ids: list[int]
    response_ids: list[int]
    sampler: list[float]  # sampler log-probs, one per response id
    advantage: float = 0.0
    weight: float = 1.0  # of the row, before the loss is normalised
    trajectory: int = 0  # index within the step

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


# ---------------------------------------------------------------- log-probs


@dataclass(slots=True)
class TokenBatch:
    """Turns that go through the model as one trie."""

    index: list[int]  # which rows
    trie: Trie
    at: np.ndarray  # [R] places of the response ids in the trie, row after row


def pack(rows: Sequence[Row], max_tokens: int, cost: Cost | None = None) -> Iterator[TokenBatch]:
    """Every row in exactly one trie of at most `max_tokens` tokens (a longer row stands alone)."""
    for index, trie in split([r.prompt_ids + r.response_ids for r in rows], max_tokens, cost):
        at = [trie.places(k)[len(rows[i].prompt_ids) :] for k, i in enumerate(index)]
        yield TokenBatch(index, trie, np.concatenate(at))


def logprobs(model, batch: TokenBatch, temperature: float = 1.0, chunk: int = 512) -> torch.Tensor:
    """Log-probs [R] of the tokens at the places `batch.at`.

    Each is read at its parent: that is where the model predicts it. Only those parents reach the lm_head, each once, `chunk` at a time
    and recomputed in the backward pass: no [T, V] tensor is ever alive.
    """
    nodes, again = np.unique(
        batch.at, return_inverse=True
    )  # the same token at the same place of several turns
    parents, row = np.unique(batch.trie.parent()[nodes], return_inverse=True)
    order = np.argsort(row, kind="stable")

    def put(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(model.device)

    hidden = hidden_states(model, batch.trie).index_select(0, put(parents))  # [U, D]
    row, targets = row[order], batch.trie.ids[nodes[order]]

    def head(h: torch.Tensor, row: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_of(model, h) / temperature, -1)[row, targets]

    large = len(parents) * model.config.vocab_size > 1 << 23
    size = chunk if large else len(parents)
    parts = []
    for start in range(0, len(parents), size):
        a, b = np.searchsorted(row, (start, start + size))
        arguments = hidden[start : start + size], put(row[a:b] - start), put(targets[a:b])
        parts.append(
            checkpoint(head, *arguments, use_reentrant=False)
            if large and torch.is_grad_enabled()
            else head(*arguments)
        )
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return torch.cat(parts)[put(back[again])]


def policy_logprobs(model, batch: TokenBatch, temperature: float = 1.0) -> torch.Tensor:
    """`logprobs`, for a model whose weights are in shards too."""
    return (model.logprobs if hasattr(model, "logprobs") else partial(logprobs, model))(
        batch, temperature
    )


def differences(rows: Sequence[Row], logps: Sequence[Sequence[float]]) -> list[float]:
    """How far the sampler's log-probs of each response token are from `logps` [rows][response ids]."""
    return [
        abs(a - b)
        for row, ours in zip(rows, logps, strict=True)
        for a, b in zip(row.sampler, ours, strict=True)
    ]


class _Float32Logits(torch.autograd.Function):
    """hidden [N, D] times weight [V, D] in 16 bits -> logits [N, V] in float32, never rounded on the way out. The gradients
    have the operands' own type, as those of a plain linear layer."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:  # accumulated in float32 anyway: no copy of the weight is made
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.t() @ hidden if ctx.needs_input_grad[1] else None,
        )


def logits_of(model, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in float32 of last hidden states [N, D].

    In 16 bits a logit of 16 is rounded to 0.125, once in the sampler and once, differently, in the trainer: on SmolLM2 a fifth of
    the distance between their log-probs (bench/results/h100.json). vLLM does the same under head_dtype (engines/vllm_colocated.py).
    """
    head = model.lm_head
    if head.weight.dtype == torch.float32:
        return head(hidden).float()
    logits = _Float32Logits.apply(hidden.to(head.weight.dtype), head.weight)
    return logits if getattr(head, "bias", None) is None else logits + head.bias.float()
