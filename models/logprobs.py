"""Log-probs of many turns through one prefix tree.

Turns of a group share long prefixes. Packed into a trie, a prefix goes through the model once:

    turn 0   section memory-0 response-0         section -+- memory-0 response-0
    turn 1   section memory-1 response-1   ->             +- memory-1 response-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from config.errors import UserError
from tokens.attention import hidden_states
from tokens.codec import Codec
from tokens.trie import Trie, split_into_tries


@dataclass(slots=True)
class Row:
    """One turn, ready for training."""

    prompt_ids: list[int]
    response_ids: list[int]
    sampler: list[float]  # sampler log-probs, one per response id
    advantage: float = 0.0
    weight: float = 1.0  # of the row, before the loss is normalised
    trajectory: int = 0  # index within the step

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


# ---------------------------------------------------------------- packing


@dataclass(slots=True)
class TokenBatch:
    """Rows that go through the model as one trie; R response tokens, row after row."""

    index: list[int]  # indices of the rows
    trie: Trie
    places: np.ndarray  # [R] places of the response ids in the trie
    row: torch.Tensor  # [R] each token's row, as an index of all rows (int64)
    sampler: torch.Tensor  # [R] the sampler's log-probs (float32)
    advantage: torch.Tensor  # [R] (float32)

    def per_token(self, values: Sequence[float]) -> torch.Tensor:
        """Repeat a value for each response token of its row: [all rows] -> [R]."""
        return torch.tensor(values, dtype=torch.float32, device=self.row.device)[self.row]

    def flat(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """Concatenate the rows' values of each response token: [all rows][response ids] -> [R]."""
        flat = [value for i in self.index for value in values[i]]
        return torch.tensor(flat, dtype=torch.float32, device=self.row.device)

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch with its tensors on a device."""
        tensors = (x.to(device) for x in (self.row, self.sampler, self.advantage))
        return TokenBatch(self.index, self.trie, self.places, *tensors)


def pack(rows: Sequence[Row], max_tokens: int) -> Iterator[TokenBatch]:
    """Pack every row into exactly one trie of at most `max_tokens` tokens.

    A longer row gets a trie of its own.
    """
    for index, trie in split_into_tries([r.prompt_ids + r.response_ids for r in rows], max_tokens):
        places = [trie.places(k)[len(rows[i].prompt_ids) :] for k, i in enumerate(index)]
        sizes = torch.tensor([len(rows[i].response_ids) for i in index])
        sampler = [logp for i in index for logp in rows[i].sampler]
        advantage = torch.tensor([rows[i].advantage for i in index], dtype=torch.float32)
        yield TokenBatch(
            index,
            trie,
            np.concatenate(places),
            row=torch.tensor(index).repeat_interleave(sizes),
            sampler=torch.tensor(sampler, dtype=torch.float32),
            advantage=advantage.repeat_interleave(sizes),
        )


# ---------------------------------------------------------------- log-probs


def logprobs(model, batch: TokenBatch, temperature: float = 1.0, chunk: int = 512) -> torch.Tensor:
    """Compute log-probs [R] of a batch's response tokens.

    A token's log-prob is read at its parent in the trie, where the model predicts it. Only those
    parents reach the lm_head, each once, `chunk` at a time, so no [T, V] tensor (tokens x
    vocabulary) is ever alive. Where there are many logits they are recomputed in the backward pass.
    """
    # Several turns may have the same token at the same place of the trie: N <= R distinct nodes,
    # U <= N parents.
    #   batch.places [R]  --again-->  nodes [N]  --row-->  parents [U]
    nodes, again = np.unique(batch.places, return_inverse=True)
    parents, row = np.unique(batch.trie.parent()[nodes], return_inverse=True)
    order = np.argsort(row, kind="stable")

    def put(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(model.device)

    hidden = hidden_states(model, batch.trie).index_select(0, put(parents))  # [U, D]
    row, targets = row[order], batch.trie.ids[nodes[order]]
    masked = masked_ids(model)
    if masked is not None and (wrong := np.intersect1d(targets, model.lm_head.masked_set)).size:
        raise UserError(
            f"A response to be learnt holds the token {wrong[0]}, which the policy never says: it "
            "stands for no text (unknown characters, special tokens, rows beyond the tokenizer)."
        )

    def head(h: torch.Tensor, row: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_of(model, h) / temperature, -1)[row, targets]

    # below 8 million logits (32 MiB in float32) one call is cheaper than chunks
    n_logits = len(parents) * model.config.vocab_size
    large = n_logits > 1 << 23
    size = chunk if large else len(parents)
    # a sharded model, which has `logprobs` for a method, gathers its weights for its own modules
    whole = hidden.device.type == "cpu" and not hasattr(model, "logprobs")
    by_hand = large and whole and is_plain(model.lm_head)
    parts = []
    for start in range(0, len(parents), size):
        a, b = np.searchsorted(row, (start, start + size))  # the targets of these parents
        arguments = hidden[start : start + size], put(row[a:b] - start), put(targets[a:b])
        if by_hand and torch.is_grad_enabled():
            keep = n_logits <= KEPT_LOGITS
            weight = model.lm_head.weight
            parts.append(_HeadLogProbs.apply(*arguments, weight, temperature, keep, masked))
        elif large and torch.is_grad_enabled():
            parts.append(checkpoint(head, *arguments, use_reentrant=False))
        else:
            parts.append(head(*arguments))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return torch.cat(parts)[put(back[again])]


def policy_logprobs(model, batch: TokenBatch, temperature: float = 1.0) -> torch.Tensor:
    """Compute `logprobs` of a model that may be sharded.

    `ranks.shard` makes `logprobs` a method of a sharded model, which gathers its weights.
    """
    if hasattr(model, "logprobs"):
        return model.logprobs(batch, temperature)
    return logprobs(model, batch, temperature)


# ---------------------------------------------------------------- logits


class _Float32Logits(torch.autograd.Function):
    """Multiply hidden [N, D] by weight [V, D] in 16 bits to logits [N, V] that are float32.

    The logits are never rounded to 16 bits; gradients have the operands' type, as those of a plain
    linear layer.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:  # accumulates in float32 anyway, and makes no copy of the weight
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


KEPT_LOGITS = 1 << 26
"""Up to so many logits of a batch, 256 MiB, are kept for the backward pass on a CPU."""


class _HeadLogProbs(torch.autograd.Function):
    """Compute log-probs [n] of `targets` [n], read at the places `row` [n] of hidden [N, D].

    The logits [N, V] = hidden weight^T / temperature are computed again in the backward pass, where
    they become their own gradient in place: one float32 tensor [N, V] is alive in either pass, not
    the two to four of a checkpoint around a softmax, and fewer passes go over it. keep: it stays
    alive between the passes, as exp(logits - largest), and nothing is computed again. masked: see
    `masked_ids`.
    """

    @staticmethod
    def forward(
        ctx, hidden, row, targets, weight, temperature: float, keep: bool, masked=None
    ) -> torch.Tensor:
        logits = without(masked, _HeadLogProbs.logits(hidden, weight, temperature))
        chosen = logits[row, targets]
        largest = logits.amax(-1, keepdim=True)
        shares = logits.sub_(largest).exp_()
        sums = shares.sum(-1)  # [N]
        total = sums.log().add_(largest[:, 0])
        kept = (shares, sums) if keep else (None, total)
        ctx.save_for_backward(hidden, row, targets, weight, *kept)
        ctx.temperature, ctx.masked = temperature, masked
        return chosen - total[row]

    @staticmethod
    def logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the logits in float32, a tensor of its own."""
        out = hidden.float() @ weight.float().t()
        return out if temperature == 1 else out.div_(temperature)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        hidden, row, targets, weight, logits, total = ctx.saved_tensors
        gradient = gradient / ctx.temperature
        place_gradient = torch.zeros_like(total).index_add_(0, row, gradient)  # [N]
        if logits is None:
            logits = _HeadLogProbs.logits(hidden, weight, ctx.temperature)
            logits = without(ctx.masked, logits)
            logits.sub_(total[:, None]).exp_().mul_(-place_gradient[:, None])
        else:  # in place: a second backward pass through the same graph is an error
            logits.mul_((-place_gradient / total)[:, None])
        # several targets may be read at one place, and the same one twice
        logits.index_put_((row, targets), gradient, accumulate=True)
        logits = logits.to(weight.dtype)
        return (
            (logits @ weight).to(hidden.dtype) if ctx.needs_input_grad[0] else None,
            None,
            None,
            logits.t() @ hidden.to(weight.dtype) if ctx.needs_input_grad[3] else None,
            None,
            None,
            None,
        )


# ---------------------------------------------------------------- what is never said


def mask_head(model, codec: Codec) -> None:
    """Let a causal LM say no token that a response may not have (`Codec.never_sampled`), in place.

    Its lm_head then gives them the logit -inf, for the sampler, the trainer and transformers alike.
    """
    head = model.lm_head
    ids = codec.never_sampled(head.weight.shape[0])
    if not hasattr(head, "masked"):
        if not ids:
            return
        head.register_forward_hook(_mask_output)
    head.masked_set = np.array(ids, dtype=np.int64)
    masked = torch.from_numpy(head.masked_set).to(head.weight.device)
    head.register_buffer("masked", masked, persistent=False)


def _mask_output(head, _, logits: torch.Tensor) -> torch.Tensor:
    return without(head.masked, logits)


def masked_ids(model) -> torch.Tensor | None:
    """Return the ids [M] that a model never says, None if it says all."""
    return getattr(model.lm_head, "masked", None)


@torch.no_grad()
def without(masked: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Set the logits [..., V] of the ids `masked` [M] to -inf, in place.

    Autograd need not know: the gradient of a log-softmax is 0 where the logit is -inf, and no
    product needs its result for its backward pass. Otherwise a copy [..., V] would be made there.
    """
    return logits if masked is None else logits.index_fill_(-1, masked, -torch.inf)


def is_plain(head) -> bool:
    """Return whether a head is nothing but a product with its weight."""
    return type(head) is torch.nn.Linear and head.bias is None


def logits_of(model, hidden: torch.Tensor) -> torch.Tensor:
    """Compute logits [N, V] in float32 from last hidden states [N, D].

    In 16 bits a logit of 16 is rounded to 0.125, once in the sampler and once, differently, in the
    trainer: on SmolLM2 that is a fifth of the distance between their log-probs
    (bench/results/h100.json). vLLM computes float32 logits under its setting head_dtype
    (engines/vllm_colocated.py).
    """
    head = model.lm_head
    if head.weight.dtype == torch.float32:
        return head(hidden).float()
    logits = _Float32Logits.apply(hidden.to(head.weight.dtype), head.weight)
    if getattr(head, "bias", None) is not None:
        logits = logits + head.bias.float()
    return without(masked_ids(model), logits)
