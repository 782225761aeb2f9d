"""Proof, in every training, that the sampler has the trainer's weights and samples from them.

    before the first step    prove_before     disturbed weights reach the sampler
    after steps 1, 2, 4, ..  prove_after      the sampler has left the weights it began with
    in every step            check_rollout    something was sampled and given a reward
                             check_mismatch   its log-probs are the trainer's, up to rounding

Two engines never agree exactly in 16 bits: on SmolLM2 the right weights give a mean |log-prob
difference| of .04 to .05, and one update moves log-probs by far less. So a distance alone exposes
garbage, but not a sampler that kept the old weights. That takes the log-probs under the old weights
as well: `match_weights` tells which of the two the sampler is nearer to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from agents.rewards import place_of_reward
from config.errors import UserError
from data import seed_of
from memagent import Group, Prompt, Turn
from models import ranks
from models.load import inner
from models.logprobs import Row
from rollout import Sampling, advance, start

LogProbs = Sequence[Sequence[float]]  # [turns][response ids]
PROBES, PROBE_TOKENS = 8, 16  # answers, and most tokens of each, that `prove_before` samples
NOISE = (0.02, 0.1, 0.5)  # its scales: 16 bits may round the first away
MAX_KL_FLOAT32, MAX_KL_16_BIT = 1e-6, 0.01  # of trainer and sampler, by rounding alone


# ---------------------------------------------------------------- distances


def agreement(sampler: LogProbs, trainer: LogProbs) -> dict[str, float]:
    """Return how far log-probs of the same tokens are apart, over all ranks (a collective).

    Of d = trainer - sampler: the largest |d|, the mean of |d|, and the k3 estimate of KL(sampler,
    trainer), which is the mean of exp(d) - 1 - d.
    """
    pairs = zip(sampler, trainer, strict=True)
    apart = [b - a for s, t in pairs for a, b in zip(s, t, strict=True)]
    kl = sum(math.expm1(min(d, 99.0)) - d for d in apart)
    sums = ranks.all_reduce_sum({"n": len(apart), "mean": sum(map(abs, apart)), "kl": kl})
    n = max(1.0, sums["n"])
    worst = ranks.all_reduce_max(max(map(abs, apart), default=0.0))
    return {"mismatch": worst, "mismatch_mean": sums["mean"] / n, "mismatch_kl": sums["kl"] / n}


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """Mean squared distance of the sampler's log-probs from those under the new and old weights."""

    new: float
    old: float
    tokens: float  # effective number behind the mean that rests on fewer (Kish's formula)

    @property
    def decided(self) -> bool:
        """Whether one is farther than the other by more than rounding explains.

        Where a policy is sure of its words, all the rounding is that of one token or two, and
        either weights may be nearer by far. So the factor is 4 among many tokens, 16 among eight,
        1024 among two: some .999 quantile of the F distribution.
        """
        near, far = sorted((self.new, self.old))
        return far > 1e-6 and far >= near * 4 ** (1 + 8 / self.tokens)


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
    sums = {"n": len(squares)}
    for k, name in enumerate(("new", "old")):
        sums[name] = sum(pair[k] for pair in squares.values())
        sums[f"{name}_squared"] = sum(pair[k] ** 2 for pair in squares.values())
    sums = ranks.all_reduce_sum(sums)
    n = max(1.0, sums["n"])
    effective = [sums[x] ** 2 / (sums[f"{x}_squared"] or math.inf) or n for x in ("new", "old")]
    return WeightMatch(sums["new"] / n, sums["old"] / n, min(effective))


# ---------------------------------------------------------------- weights


class WeightSnapshot:
    """A copy of the trained weights in host memory; of sharded weights, this rank's shards."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.copies = [weight.detach().to("cpu", copy=True) for weight in self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters]

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the snapshot and the model's weights; twice restores every bit."""
        for weight, copy in zip(self.weights(), self.copies, strict=True):
            before = weight.to("cpu", copy=True)
            weight.copy_(copy)
            copy.copy_(before)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the snapshot into the model."""
        for weight, copy in zip(self.weights(), self.copies, strict=True):
            weight.copy_(copy)

    @torch.no_grad()
    def disturb(self, scale: float, seed: int) -> None:
        """Set the model's weights to the snapshot plus Gaussian noise.

        Its standard deviation is `scale` times a weight's root mean square, which counts as 0.1 at
        least, so that adapter matrices that start at 0 move too.
        """
        self.restore()
        for k, weight in enumerate(self.weights()):
            if weight.numel():
                draw = torch.Generator(weight.device).manual_seed(seed + k)
                size = scale * max(0.1, weight.float().pow(2).mean().sqrt().item())
                noise = torch.randn(weight.shape, generator=draw, device=weight.device)
                weight.add_(size * noise.to(weight.dtype))


# ---------------------------------------------------------------- the proof


class SamplerChecks:
    """The part of `GRPO` that compares its sampler with its weights, through `row_logprobs`.

    It writes `metrics`, `proofs`, and `initial_weights`, which are the weights at the start of
    training until the sampler is proven to have left them.
    """

    def check_rollout(self, groups: Sequence[Group]) -> None:
        """Raise UserError if all trajectories of a step have failed, on all ranks, or if at the
        first step none is given a reward: there would be nothing to learn from (a collective)."""
        sampled, step = [t for group in groups for t in group.sampled], self.done_steps
        right = sum(not t.error for t in sampled)
        rewarded = sum(len(group.trajectories) for group in groups)
        n = ranks.all_reduce_sum({"right": right, "rewarded": rewarded})
        if not n["right"]:
            once = "; once that is mended, --resume goes on" if step and sampled[0].fault else ""
            raise UserError(f"Every trajectory of step {step} failed: {sampled[0].error}{once}.")
        if not (step or n["rewarded"]):
            raise UserError(
                f"{place_of_reward(self.agent)} gave no trajectory of the first step a reward "
                "(None): there is nothing to learn from."
            )

    def prove_before(self) -> None:
        """Prove before the first step that weights reach the sampler: disturb the trainer's, sample
        short answers with them, compare, restore them."""
        tasks = self.tasks.batch(self.done_steps, self.level, self.n_tasks)
        prompt = advance(self.agent, start(self.agent, tasks[ranks.rank()]))
        prompt = replace(prompt, max_tokens=min(PROBE_TOKENS, prompt.max_tokens), frozen=False)
        snapshot = self.initial_weights
        if snapshot is None or self.done_steps:  # else it holds the present weights: no second copy
            snapshot = WeightSnapshot(self.model.parameters())
        try:
            for scale in NOISE:
                snapshot.disturb(scale, seed_of(self.config.seed, "probe", ranks.rank()) >> 2)
                if self.sampler_follows(self.probe_rows(prompt), snapshot):
                    return
        finally:
            snapshot.restore()

    def probe_rows(self, prompt: Prompt) -> list[Row]:
        """Sample answers to a prompt with the trainer's weights as they are now."""
        turns: list[Turn] = []
        with self.engine.awake(self.model):
            for k in range(PROBES):
                seed = seed_of(self.config.seed, "probe", k)
                self.engine.add(prompt, Sampling(self.temperature), seed)
            while len(turns) < PROBES:
                turns += [turn for _, turn in self.engine.step()]
        return [row_of(turn) for turn in turns if turn.response_ids]

    def prove_after(self, trained: int) -> None:
        """Prove that the sampler has left the weights at the start of training, once they moved.

        trained: steps since this process began. Tried after 1, 2, 4, .. of them, and in a resumed
        run before the first, until the weights have moved enough to tell.
        """
        snapshot = self.initial_weights
        due = trained & (trained - 1) == 0 and (trained or self.done_steps)
        if snapshot is None or self.config.top_p < 1 or not due:
            return
        if self.sampler_follows(self.first_rows(), snapshot):
            self.initial_weights = None

    def sampler_follows(self, rows: list[Row], snapshot: WeightSnapshot) -> bool:
        """Return whether the sampler provably has the model's weights; False if undecided.

        UserError if it has those of the snapshot.
        """
        new = self.row_logprobs(rows, inner(self.model))
        snapshot.exchange()
        try:
            old = self.row_logprobs(rows, inner(self.model))
        finally:
            snapshot.exchange()
        match = match_weights(rows, new, old)
        if match.decided and match.new >= match.old:
            raise UserError(
                f"Before step {self.done_steps} the sampler's log-probs are those of the weights "
                "as they were, not of the trainer's (root mean square distance "
                f"{match.old**0.5:.2g} and {match.new**0.5:.2g}): "
                "the weights do not reach it."
            )
        if match.decided:
            self.proofs.append((self.done_steps, match))
        return match.decided

    def check_agreement(self) -> None:
        """Check sampler/trainer agreement even when a step has nothing to train on."""
        rows = self.first_rows()
        trainer = self.row_logprobs(rows, inner(self.model))
        self.metrics |= agreement([row.sampler for row in rows], trainer)
        self.check_mismatch(self.metrics["mismatch_kl"])

    def check_mismatch(self, kl: float) -> None:
        """Raise UserError if sampler and trainer are further apart than rounding explains.

        kl: k3 estimate of KL(sampler, trainer), a mean over tokens; nan fails too.
        """
        config = self.config
        full = inner(self.model).dtype == torch.float32 and self.sharding != "mixed"
        allowed = config.max_mismatch or (MAX_KL_FLOAT32 if full else MAX_KL_16_BIT)
        if config.top_p == 1 and not kl <= allowed:
            raise UserError(
                f"In step {self.done_steps} the sampler is {kl:.2g} from the trainer (k3 estimate "
                f"of the KL divergence), {allowed:g} is allowed: it does not sample from the "
                "trained weights. Nothing was learnt from this step; max_mismatch allows more."
            )

    def first_rows(self) -> list[Row]:
        """Return the rollout's first turns as rows, as many as one pass takes."""
        trajectories = (t for group in self.groups for t in group.sampled)
        turns = (turn for trajectory in trajectories for turn in trajectory.turns)
        rows = [row_of(turn) for turn in turns if turn.response_ids and not turn.prompt.frozen]
        fitting = sum(n <= self.config.micro_tokens for n in accumulate(map(len, rows)))
        return rows[: max(1, fitting)]


def row_of(turn: Turn) -> Row:
    return Row(turn.prompt_ids, turn.response_ids, turn.logprobs)
