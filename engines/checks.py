"""Checks of a training: the sampler has the trainer's weights, and samples from them.

before the first step    prove_before     disturbed weights reach the sampler
after steps 1, 2, 4, ..  prove_after      the sampler has left the weights it began with
in every step            check_rollout    something was sampled and given a reward
                         check_mismatch   its log-probs are the trainer's, up to rounding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from agents.rewards import place_of_reward
from config.errors import UserError
from data import seed_of
from memagent import Group, Prompt, Turn
from models import ranks
from models.load import inner
from models.logprobs import Row
from models.proof import WeightSnapshot, agreement, match_weights
from rollout import Sampling, advance, start

PROBES, PROBE_TOKENS = 8, 16  # answers, and most tokens of each, that `prove_before` samples
NOISE = (0.02, 0.1, 0.5)  # its scales: 16 bits may round the first away
MAX_KL_FLOAT32, MAX_KL_16_BIT = 1e-6, 0.01  # of trainer and sampler, by rounding alone


class SamplerChecks:
    """Compare the sampler's log-probs with those of the trainer's weights.

    A part of `GRPO`: it reads the module's model, engine, agent, tasks, config and groups, computes
    with its `row_logprobs`, and writes its `metrics`, `initial_weights` and `proofs`.
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
        """Prove before the first step that weights reach the sampler.

        Disturb the trainer's, sample short answers with them, compare, restore them. UserError if
        the sampler still has the undisturbed ones.
        """
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
        sampling = Sampling(self.temperature)
        with self.engine.awake(self.model):
            for k in range(PROBES):
                self.engine.add(prompt, sampling, seed_of(self.config.seed, "probe", k))
            turns: list[Turn] = []
            while len(turns) < PROBES:
                turns += [turn for _, turn in self.engine.step()]
        return [
            Row(turn.prompt_ids, turn.response_ids, turn.logprobs)
            for turn in turns
            if turn.response_ids
        ]

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
        if not match.decided:
            return False
        if not match.new_is_nearer:
            raise UserError(
                f"Before step {self.done_steps} the sampler's log-probs are those of the weights "
                "as they were, not of the trainer's (root mean square distance "
                f"{match.old**0.5:.2g} and {match.new**0.5:.2g}): "
                "the weights do not reach it."
            )
        self.proofs.append((self.done_steps, match))
        return True

    def check_agreement(self) -> None:
        """Check sampler/trainer agreement even when a step has nothing to train on."""
        rows = self.first_rows()
        trainer = self.row_logprobs(rows, inner(self.model))
        distance = agreement([r.sampler for r in rows], trainer)
        self.metrics |= {
            "mismatch": distance.worst,
            "mismatch_mean": distance.mean,
            "mismatch_kl": distance.kl,
        }
        self.check_mismatch(distance.kl)

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
        rows, tokens = [], 0
        trajectories = (t for group in self.groups for t in group.sampled)
        for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
            if not turn.response_ids or turn.prompt.frozen:
                continue
            tokens += len(turn.prompt_ids) + len(turn.response_ids)
            if rows and tokens > self.config.micro_tokens:
                break
            rows.append(Row(turn.prompt_ids, turn.response_ids, turn.logprobs))
        return rows
