"""Proof that the sampler has the trainer's weights, by comparing their log-probs.

Two engines never agree exactly in 16 bits: on SmolLM2 the right weights give a mean |log-prob
difference| of .04 to .05, and one update moves log-probs by far less. So a distance alone exposes
garbage, but not a sampler that kept the old weights. That takes the log-probs under the old weights
as well: `match_weights` tells which of the two the sampler is nearer to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from models import ranks
from models.logprobs import Row

LogProbs = Sequence[Sequence[float]]  # [turns][response ids]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distance of the sampler's log-probs from the trainer's, over the tokens of all ranks."""

    mean: float  # of |d|, d = trainer - sampler
    worst: float  # largest |d|
    kl: float  # k3 estimate of KL(sampler, trainer): the mean of exp(d) - 1 - d


def agreement(sampler: LogProbs, trainer: LogProbs) -> Agreement:
    """Compare log-probs of the same tokens, over all ranks (a collective)."""
    differences = [
        b - a for s, t in zip(sampler, trainer, strict=True) for a, b in zip(s, t, strict=True)
    ]
    sums = ranks.all_reduce_sum(
        {
            "n": len(differences),
            "mean": sum(map(abs, differences)),
            "kl": sum(math.expm1(min(d, 99.0)) - d for d in differences),
        }
    )
    n = max(1.0, sums["n"])
    worst = ranks.all_reduce_max(max(map(abs, differences), default=0.0))
    return Agreement(sums["mean"] / n, worst, sums["kl"] / n)


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """Mean squared distance of the sampler's log-probs from those under the new and old weights."""

    new: float
    old: float
    tokens: float  # effective number behind the mean that rests on fewer (Kish's formula)

    @property
    def decided(self) -> bool:
        """Whether one is farther than the other by more than rounding explains.

        A small update moves 16-bit log-probs by rounding alone, and where a policy is sure of its
        words that is the rounding of one token or two: either weights may then be nearer by far.
        The factor that is asked for is 4 among many tokens, 16 among eight, 1024 among two: some
        .999 quantile of the F distribution. Of 20,000 draws of normal errors of one size 39 were
        that far apart with one token, one with two, and none with three to 32.
        """
        near, far = sorted((self.new, self.old))
        return far > 1e-6 and far >= near * 4 ** (1 + 8 / self.tokens)

    @property
    def new_is_nearer(self) -> bool:
        return self.new < self.old


def match_weights(rows: Sequence[Row], new: LogProbs, old: LogProbs) -> WeightMatch:
    """Compare the sampler's log-probs with those under new and old weights, over all ranks.

    A token counts once where responses of a prompt begin alike: they share its errors.
    """
    squares: dict[int, tuple[float, float]] = {}  # hash of context and token -> new, old
    for row, news, olds in zip(rows, new, old, strict=True):
        context = hash(tuple(row.prompt_ids))
        for token, s, n, o in zip(row.response_ids, row.sampler, news, olds, strict=True):
            context = hash((context, token))
            squares.setdefault(context, ((s - n) ** 2, (s - o) ** 2))
    sums = ranks.all_reduce_sum(
        {
            "n": len(squares),
            "new": sum(d for d, _ in squares.values()),
            "old": sum(d for _, d in squares.values()),
            "new_squared": sum(d * d for d, _ in squares.values()),
            "old_squared": sum(d * d for _, d in squares.values()),
        }
    )
    n = max(1.0, sums["n"])
    effective = [
        sums[name] ** 2 / sums[f"{name}_squared"] if sums[f"{name}_squared"] else n
        for name in ("new", "old")
    ]
    return WeightMatch(sums["new"] / n, sums["old"] / n, min(effective))


class WeightSnapshot:
    """A copy of the trained weights in host memory; of sharded weights, this rank's shards."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.copies = [_local(p).detach().to("cpu", copy=True) for p in self.parameters]

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the snapshot and the model's weights; twice restores every bit."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            local = _local(p)
            before = local.to("cpu", copy=True)
            local.copy_(copy)
            copy.copy_(before)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the snapshot into the model."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            _local(p).copy_(copy)

    @torch.no_grad()
    def disturb(self, scale: float, seed: int) -> None:
        """Set the model's weights to the snapshot plus Gaussian noise.

        Its standard deviation is `scale` times a weight's root mean square, which counts as 0.1 at
        least, so that adapter matrices that start at 0 move too.
        """
        for k, (p, copy) in enumerate(zip(self.parameters, self.copies, strict=True)):
            local = _local(p)
            local.copy_(copy)
            if local.numel():
                draw = torch.Generator(local.device).manual_seed(seed + k)
                size = scale * max(0.1, local.float().pow(2).mean().sqrt().item())
                noise = torch.randn(local.shape, generator=draw, device=local.device)
                local.add_(size * noise.to(local.dtype))


def _local(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a weight, or all of a weight that is not sharded."""
    return p.to_local() if hasattr(p, "to_local") else p
