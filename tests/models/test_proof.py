"""The proof that the sampler has the trainer's weights: arithmetic, and samplers left behind."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from conftest import random_policy
from test_grpo import CONFIG, module

from config.errors import UserError
from config.options import GRPOConfig
from engines.hf import TransformersEngine
from models.load import with_lora
from models.logprobs import Row
from models.proof import WeightSnapshot, agreement, match_weights

FEW = replace(CONFIG, max_mismatch=0.0, warmup=0)


def row(sampler, ids=None):
    return Row([1], ids or [*range(len(sampler))], sampler)


def test_agreement_by_hand():
    by_hand = agreement([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    assert (by_hand.mean, by_hand.worst) == (pytest.approx(0.5), 1.0)
    assert by_hand.kl == pytest.approx(((math.exp(-0.5) - 1 + 0.5) + 0 + (math.e - 2)) / 3)
    assert agreement([[0.0]], [[1000.0]]).kl > 1e30  # garbage is a large number, not an error
    tiny = agreement([[-1.0] * 9], [[-1.0 - 1e-7] * 9]).kl  # no cancellation
    assert tiny == pytest.approx(5e-15, rel=1e-3)


def test_new_weights_are_told_from_old_through_noise_and_else_nothing_is_decided():
    draw = torch.Generator().manual_seed(0)

    def noise():  # what every pass in bfloat16 has of its own
        return 0.04 * torch.randn(500, generator=draw)

    before = -3 * torch.rand(500, generator=draw)
    for move, decided in ((0.3, True), (0.05, False), (0.0, False)):
        after = before + move * torch.randn(500, generator=draw)
        new, old = (after + noise()).tolist(), (before + noise()).tolist()
        right, stale = (
            match_weights([row((x + noise()).tolist())], [new], [old]) for x in (after, before)
        )
        assert right.decided == stale.decided == decided
        assert not decided or (right.new_is_nearer and not stale.new_is_nearer)
    exact = match_weights([row([-1.0, -2.0])], [[-1.0 + 1e-7, -2.0]], [[-1.0, -2.0]])
    assert not exact.decided and (exact.new, exact.old) == (pytest.approx(5e-15, rel=1e-3), 0.0)
    assert not match_weights([], [], []).decided


def test_a_verdict_asks_for_more_the_fewer_tokens_it_has():
    """Seen with adapters in bfloat16: eight answers, seven of them the same, and of their tokens
    one whose probability was not near 1. The sampler had the new weights."""
    rows = [row([-1.848, -0.006], [7, 2])] + 7 * [row([-0.257, -0.003], [5, 2])]
    new, old = (
        [[-2.074, -0.006]] + 7 * [[-0.207, -0.003]],
        [[-1.856, -0.005]] + 7 * [[-0.282, -0.003]],
    )
    match = match_weights(rows, new, old)
    assert match.new > 50 * match.old and match.tokens < 2 and not match.decided
    assert match.new == pytest.approx((0.226**2 + 0.05**2) / 4, rel=1e-3)  # each token once
    # what was rounded off in float32 is told from any change by a single token
    assert match_weights([row([-1.0], [7])], [[-1.0 + 1e-6]], [[-1.1]]).decided
    # old and new are equally far, and nothing but chance decides
    draw, wrong = torch.Generator().manual_seed(0), 0
    for n in (1, 2, 4, 8, 16):
        for _ in range(400):
            errors = (0.05 * torch.randn(3, n, generator=draw) - 1).tolist()
            wrong += match_weights([row(errors[0])], [errors[1]], [errors[2]]).decided
    assert wrong <= 8  # of 2000; 442 where the factor is always 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 2])
def test_weights_are_put_back_to_the_last_bit(codec, dtype, rank):
    policy = random_policy(codec).to(dtype)
    policy = with_lora(policy, GRPOConfig(lora_rank=rank)) if rank else policy
    before = {name: p.clone() for name, p in policy.named_parameters()}

    def changed():
        return {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}

    kept = WeightSnapshot(policy.parameters())
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    kept.disturb(0.1, 7)
    assert changed() == trained  # adapters that begin with 0 too
    kept.exchange()
    assert not changed()
    kept.exchange()
    assert changed() == trained
    kept.exchange()
    kept.disturb(0.1, 7)
    kept.exchange()
    kept.restore()
    assert changed() == trained  # the copies are the disturbed ones now


class LeftBehind(TransformersEngine):
    """A copy of the trainer's weights that is updated `times` times and then no more."""

    times = 0

    def _take_over(self, policy):
        self.times -= 1
        if self.times >= 0:
            super()._take_over(policy)


def with_copy(policy, codec, config, times, dtype=torch.float32):
    grpo = module(policy, codec, config)
    grpo.engine = LeftBehind(copy.deepcopy(policy).to(dtype), codec, copy=True)
    grpo.engine.times = times
    grpo.optimizer = grpo.configure_optimizers()
    grpo.initial_weights = WeightSnapshot(policy.parameters())
    return grpo


def test_a_sampler_that_no_weights_reach_is_seen_before_the_first_step(policy, codec):
    before = copy.deepcopy(policy.state_dict())
    grpo = with_copy(policy, codec, replace(FEW, lr=1e-3), times=0)
    with pytest.raises(UserError, match=r"Before step 0 .* the weights do not reach it"):
        grpo.training_step(None, 0)
    assert not grpo.groups
    assert all(torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    # where it does follow, the noise of the proof is gone again: the sampler has the very weights
    right = with_copy(policy, codec, replace(FEW, lr=0.0), times=99)
    right.training_step(None, 0)
    assert all(torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    ((step, match),) = right.proofs
    assert step == 0 and match.new < 1e-9 * match.old
    assert right.metrics["mismatch_mean"] < 1e-6


def test_a_sampler_that_is_left_behind_later_is_seen_though_its_distance_is_that_of_rounding(
    policy, codec
):
    """Compare bfloat16 with float32.

    The distance stays far below the bar, and the old weights are nearer all the same.
    """
    config = replace(FEW, lr=1e-3, max_mismatch=0.01)
    # two times: for the proof and for step 0
    grpo = with_copy(policy, codec, config, times=2, dtype=torch.bfloat16)
    grpo.training_step(None, 0)
    with pytest.raises(UserError, match=r"Before step [12] .* those of the weights as they were"):
        for step in (1, 2):
            grpo.training_step(None, step)
    rows = grpo.first_rows()
    assert agreement([r.sampler for r in rows], grpo.row_logprobs(rows, policy)).kl < 0.01
    right = with_copy(random_policy(codec), codec, config, times=99, dtype=torch.bfloat16)
    for step in range(3):
        right.training_step(None, step)
    assert right.proofs[0][0] == 0 and len(right.proofs) == 2 and right.initial_weights is None
    assert all(4 * match.new < match.old for _, match in right.proofs)


def test_a_resumed_run_whose_sampler_has_the_base_weights_is_seen_before_its_first_step(
    policy, codec
):
    config = replace(FEW, lr=1e-3, max_mismatch=0.01)
    grpo = with_copy(policy, codec, config, times=1, dtype=torch.bfloat16)
    base, take_over = random_policy(codec), grpo.engine._take_over

    def back_to_the_base(trained):  # once the proof with noise is over
        take_over(trained)
        if grpo.engine.times < 0:
            grpo.engine.model.load_state_dict(base.state_dict())

    grpo.engine._take_over = back_to_the_base
    with torch.no_grad():  # what a checkpoint does
        for p in policy.parameters():
            p.add_(0.02 * torch.randn_like(p))
    grpo.done_steps = 3
    with pytest.raises(UserError, match=r"Before step 3 .* those of the weights as they were"):
        grpo.training_step(None, 0)
    assert [step for step, _ in grpo.proofs] == [3]
