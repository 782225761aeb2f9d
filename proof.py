"""Proof that the sampler has the trainer's weights: how far their log-probs are apart, and which of two weights they follow.

Holds: `Agreement`, `agreement`, `Followed`, `followed`, `Kept`. Leaves out: when it is asked for and what follows (grpo.py).
Exercise it: `pytest tests/test_proof.py`. Read next: grpo.py.

Two engines never agree exactly in 16 bits: on SmolLM2 the right weights give a mean |log-prob difference| of .04 to .05, and
one update moves log-probs by far less. So a distance alone shows garbage, not a sampler that was left behind. For that the
log-probs under the old weights are needed as well: `followed` says how far the sampler has gone from the old to the new ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import ranks

LogProbs = Sequence[Sequence[float]]  # [turns][response ids]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance between the sampler's log-probs and the trainer's, over the tokens of all ranks."""

    mean: float  # of |d|, d = trainer - sampler
    worst: float
    kl: float  # the k3 estimate of KL(sampler, trainer): the mean of exp(d) - 1 - d


def agreement(sampler: LogProbs, trainer: LogProbs) -> Agreement:
    """Compare log-probs of the same tokens, this rank's and those of the others."""
    apart = [b - a for s, t in zip(sampler, trainer, strict=True) for a, b in zip(s, t, strict=True)]
    n = ranks.total({
        "n": len(apart), "mean": sum(map(abs, apart)), "kl": sum(math.expm1(min(d, 99.0)) - d for d in apart),
    })  # fmt: skip
    tokens = max(1.0, n["n"])
    return Agreement(n["mean"] / tokens, ranks.most(max(map(abs, apart), default=0.0)), n["kl"] / tokens)


@dataclass(frozen=True, slots=True)
class Followed:
    """How far the sampler has gone from the old weights to the new ones."""

    share: float  # 0 = it has the old weights, 1 = the new ones
    error: float  # standard error; infinite where the weights have not moved

    @property
    def decided(self) -> bool:
        return self.error < 0.1

    @property
    def right(self) -> bool:
        return self.share > 0.5


def followed(sampler: LogProbs, new: LogProbs, old: LogProbs) -> Followed:
    """Regress the sampler's log-probs on the way from those under the old weights to those under the new ones.

    share = sum (new - old)(sampler - old) / sum (new - old)^2 over the tokens of all ranks; error = its standard error.
    """
    moves = [
        (s - o, n - o)
        for some in zip(sampler, new, old, strict=True)
        for s, n, o in zip(*some, strict=True)
    ]  # fmt: skip
    n = ranks.total({
        "n": len(moves), "both": sum(s * m for s, m in moves), "own": sum(m * m for _, m in moves),
        "sampler": sum(s * s for s, _ in moves),
    })  # fmt: skip
    if not n["own"]:
        return Followed(math.nan, math.inf)
    share = n["both"] / n["own"]
    left = max(0.0, n["sampler"] - share * n["both"])  # the residual sum of squares
    return Followed(share, math.sqrt(left / n["n"] / n["own"]))


class Kept:
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
                own.add_(size * torch.randn(own.shape, generator=draw, device=own.device).to(own.dtype))


def _own(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight in shards; else all of it."""
    return p.to_local() if hasattr(p, "to_local") else p
