"""Checks of a training: the sampler has the trainer's weights, and samples from them.

Holds: `SamplerChecks`, a part of `grpo.GRPO`. Leaves out: the statistics (models/proof.py), the
algorithm (grpo.py).
Exercise it: `pytest tests/models/test_proof.py`. Read next: grpo.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from config.errors import UserError
from data import seed_of
from memagent import Turn
from models import ranks
from models.load import inner
from models.logprobs import Row
from models.proof import WeightSnapshot, agreement, match_weights
from rollout import Sampling, advance, start

# answers, and tokens of each, that show before the first step whether the weights reach the sampler
PROBES, PROBE_TOKENS = 8, 16


class SamplerChecks:
    """What `GRPO` asks about its engine. It reads model, engine, agent, tasks, config and groups of the
    module, writes `metrics`, `kept` and `proofs`, and computes with the module's `frozen`."""

    def prove_before(self) -> None:
        """Show before the first step that weights reach the sampler: disturb them, bring them over, compare, put them back.

        Where the first noise is too small for 16 bits to show it, larger ones follow.
        """
        tasks = self.tasks.batch(self.done_steps, self.level, self.n_tasks)
        prompt = advance(self.agent, start(self.agent, tasks[ranks.rank()]))
        prompt = replace(prompt, max_tokens=min(PROBE_TOKENS, prompt.max_tokens), frozen=False)
        fresh = (
            self.kept is not None and not self.done_steps
        )  # what is kept is what the model has: no second copy
        kept = self.kept if fresh else WeightSnapshot(self.model.parameters())
        try:
            for scale in (0.02, 0.1, 0.5):
                kept.disturb(scale, seed_of(self.config.seed, "probe", ranks.rank()) >> 2)
                with self.engine.awake(self.model):
                    for k in range(PROBES):
                        self.engine.add(
                            prompt,
                            Sampling(self.temperature),
                            seed_of(self.config.seed, "probe", k),
                        )
                    turns: list[Turn] = []
                    while len(turns) < PROBES:
                        turns += [turn for _, turn in self.engine.step()]
                rows = [
                    Row(turn.prompt_ids, turn.response_ids, turn.logprobs)
                    for turn in turns
                    if turn.response_ids
                ]
                if self.follows(rows, kept):
                    return
        finally:
            kept.restore()

    def prove_after(self, trained: int) -> None:
        """Show, after the first steps that move the weights enough, that the sampler has left those that training began with.

        trained: steps since this process began. Asked after 1, 2, 4, .. of them, until the weights have moved enough to tell.
        """
        asked = self.kept is not None and self.config.top_p == 1 and trained & (trained - 1) == 0
        if asked and (trained or self.done_steps) and self.follows(self.first_rows(), self.kept):
            self.kept = None

    def follows(self, rows: list[Row], kept: WeightSnapshot) -> bool:
        """Whether the sampler has been seen to have the model's weights, not the `kept` ones. UserError if it has the latter."""
        new = self.frozen(rows, inner(self.model))
        kept.exchange()
        try:
            old = self.frozen(rows, inner(self.model))
        finally:
            kept.exchange()
        found = match_weights([r.sampler for r in rows], new, old)
        if not found.decided:
            return False
        if not found.new_is_nearer:
            raise UserError(
                f"Before step {self.done_steps} the sampler's log-probs are those of the weights as they were, not of the trainer's "
                f"(root mean square distance {found.old**0.5:.2g} and {found.new**0.5:.2g}): the weights do not reach it."
            )
        self.proofs.append((self.done_steps, found))
        return True

    def compare(self) -> None:
        """Check sampler/trainer agreement even when a step has nothing to train on."""
        rows = self.first_rows()
        found = agreement([r.sampler for r in rows], self.frozen(rows, inner(self.model)))
        self.metrics |= {
            "mismatch": found.worst,
            "mismatch_mean": found.mean,
            "mismatch_kl": found.kl,
        }
        self.check_mismatch(found.kl)

    def check_mismatch(self, kl: float) -> None:
        """UserError if the sampler's log-probs are further from the trainer's than rounding explains, by the k3 estimate of KL."""
        config = self.config
        full = inner(self.model).dtype == torch.float32 and self.sharding != "mixed"
        allowed = config.max_mismatch or (1e-6 if full else 0.01)
        if config.top_p == 1 and not kl <= allowed:
            raise UserError(
                f"In step {self.done_steps} the sampler is {kl:.2g} from the trainer (k3 estimate of the KL divergence), {allowed:g} is "
                f"allowed: it does not sample from the trained weights. Nothing was learnt from this step; --max-mismatch allows more."
            )

    def first_rows(self) -> list[Row]:
        """The first turns of a rollout, as many as one pass takes."""
        rows, tokens = [], 0
        for turn in (
            turn
            for group in self.groups
            for t in group.trajectories
            for turn in t.turns
            if turn.response_ids and not turn.prompt.frozen
        ):
            tokens += len(turn.prompt_ids) + len(turn.response_ids)
            if rows and tokens > self.config.micro_tokens:
                break
            rows.append(Row(turn.prompt_ids, turn.response_ids, turn.logprobs))
        return rows
