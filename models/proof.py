"""Proof that the sampler has the trainer's weights: how far their log-probs are apart, and which of two weights they follow.

Holds: `Agreement`, `agreement`, `WeightMatch`, `match_weights`, `WeightSnapshot`. Leaves out: when it is asked for and what follows (grpo.py).
Exercise it: `pytest tests/models/test_proof.py`. Read next: grpo.py.

Two engines never agree exactly in 16 bits: on SmolLM2 the right weights give a mean |log-prob difference| of .04 to .05, and
one update moves log-probs by far less. So a distance alone shows garbage, not a sampler that was left behind. For that the
log-probs under the old weights are needed as well: `match_weights` says which of the two the sampler is nearer to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from models import ranks

LogProbs = Sequence[Sequence[float]]  # [turns][response ids]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance between the sampler's log-probs and the trainer's, over the tokens of all ranks."""

    mean: float  # of |d|, d = trainer - sampler
    worst: float
    kl: float  # the k3 estimate of KL(sampler, trainer): the mean of exp(d) - 1 - d


def agreement(sampler: LogProbs, trainer: LogProbs) -> Agreement:
    """Compare log-probs of the same tokens, this rank's and those of the others."""
    apart = [
        b - a for s, t in zip(sampler, trainer, strict=True) for a, b in zip(s, t, strict=True)
    ]
    n = ranks.all_reduce_sum(
        {
            "n": len(apart),
            "mean": sum(map(abs, apart)),
            "kl": sum(math.expm1(min(d, 99.0)) - d for d in apart),
        }
    )
    tokens = max(1.0, n["n"])
    return Agreement(
        n["mean"] / tokens,
        ranks.all_reduce_max(max(map(abs, apart), default=0.0)),
        n["kl"] / tokens,
    )


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """Which of two weights the sampler has: mean squares of its distance from the log-probs under either."""

    new: float
    old: float

    @property
    def decided(self) -> bool:
        """Whether one is at least twice as far as the other, and farther than float32 rounds. Below that nothing can be told: a
        small update moves bfloat16 log-probs by rounding alone, and then either weights may be the nearer ones by 40 %."""
        near, far = sorted((self.new, self.old))
        return far >= 4 * near and far > 1e-6

    @property
    def new_is_nearer(self) -> bool:
        return self.new < self.old


def match_weights(sampler: LogProbs, new: LogProbs, old: LogProbs) -> WeightMatch:
    """Compare the sampler's log-probs with those under the new and under the old weights, over the tokens of all ranks."""
    tokens = [t for some in zip(sampler, new, old, strict=True) for t in zip(*some, strict=True)]
    n = ranks.all_reduce_sum(
        {
            "n": len(tokens),
            "new": sum((s - n) ** 2 for s, n, _ in tokens),
            "old": sum((s - o) ** 2 for s, _, o in tokens),
        }
    )
    return WeightMatch(n["new"] / max(1.0, n["n"]), n["old"] / max(1.0, n["n"]))


class WeightSnapshot:
    """A copy of the trained weights as they were, on the host: of shards this rank's own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.copies = [_own(p).detach().to("cpu", copy=True) for p in self.parameters]

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the copies into the model and the model's weights into the copies; twice leaves every bit as it was."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            own = _own(p)
            was = own.to("cpu", copy=True)
            own.copy_(copy)
            copy.copy_(was)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copies into the model."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            _own(p).copy_(copy)

    @torch.no_grad()
    def disturb(self, scale: float, seed: int) -> None:
        """Set the model's weights to the copies plus noise of `scale` times their root mean square, 0.1 at least, so that
        adapters that begin with 0 move too."""
        for k, (p, copy) in enumerate(zip(self.parameters, self.copies, strict=True)):
            own = _own(p)
            own.copy_(copy)
            if own.numel():
                draw = torch.Generator(own.device).manual_seed(seed + k)
                size = scale * max(0.1, own.float().pow(2).mean().sqrt().item())
                own.add_(
                    size * torch.randn(own.shape, generator=draw, device=own.device).to(own.dtype)
                )


def _own(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight in shards; else all of it."""
    return p.to_local() if hasattr(p, "to_local") else p
