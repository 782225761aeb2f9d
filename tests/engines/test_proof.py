"""The proof that the sampler has the trainer's weights: its numbers, and samplers left behind."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from conftest import random_policy, worst_mismatch
from test_grpo import module

from config.errors import UserError
from config.options import GRPOConfig
from engines.hf import TransformersEngine
from engines.proof import WeightSnapshot, agreement, match_weights
from models.load import inner, load_model, with_lora
from models.logprobs import Row, mask_head

LORA = GRPOConfig(lora_rank=2)


def row(sampler, ids=None):
    return Row([1], ids or [*range(len(sampler))], sampler)


# ---------------------------------------------------------------- distances


def test_agreement_by_hand():
    found = agreement([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    kl = ((math.exp(-0.5) - 1 + 0.5) + 0 + (math.e - 2)) / 3
    assert found == pytest.approx({"mismatch": 1.0, "mismatch_mean": 0.5, "mismatch_kl": kl})
    assert agreement([[0.0]], [[1000.0]])["mismatch_kl"] > 1e30  # garbage is a large number
    tiny = agreement([[-1.0] * 9], [[-1.0 - 1e-7] * 9])["mismatch_kl"]  # no cancellation
    assert tiny == pytest.approx(5e-15, rel=1e-3)


@pytest.mark.parametrize(("move", "decided"), [(0.3, True), (0.05, False), (0.0, False)])
def test_new_weights_are_told_from_old_through_noise_and_else_nothing_is_decided(move, decided):
    draw = torch.Generator().manual_seed(0)

    def noisy(x):  # as every pass in bfloat16
        return (x + 0.04 * torch.randn(500, generator=draw)).tolist()

    before = -3 * torch.rand(500, generator=draw)
    after = before + move * torch.randn(500, generator=draw)
    new, old = noisy(after), noisy(before)
    for sampler, right in ((after, True), (before, False)):
        match = match_weights([row(noisy(sampler))], [new], [old])
        assert match.decided == decided and (not decided or (match.new < match.old) == right)


def test_a_verdict_asks_for_more_the_fewer_tokens_it_has():
    """Seen with adapters in bfloat16: eight answers, seven of them the same, and of their tokens
    one whose probability was not near 1. The sampler had the new weights."""
    rows = [row([-1.848, -0.006], [7, 2])] + 7 * [row([-0.257, -0.003], [5, 2])]
    new = [[-2.074, -0.006]] + 7 * [[-0.207, -0.003]]
    old = [[-1.856, -0.005]] + 7 * [[-0.282, -0.003]]
    match = match_weights(rows, new, old)
    assert match.new > 50 * match.old and match.tokens < 2 and not match.decided
    assert match.new == pytest.approx((0.226**2 + 0.05**2) / 4, rel=1e-3)  # each token once
    # what was rounded off in float32 is told from any change by a single token
    assert match_weights([row([-1.0], [7])], [[-1.0 + 1e-6]], [[-1.1]]).decided
    exact = match_weights([row([-1.0, -2.0])], [[-1.0 + 1e-7, -2.0]], [[-1.0, -2.0]])
    assert not exact.decided and (exact.new, exact.old) == (pytest.approx(5e-15, rel=1e-3), 0.0)
    assert not match_weights([], [], []).decided
    # old and new are equally far, and nothing but chance decides
    draw, wrong = torch.Generator().manual_seed(0), 0
    for n in (1, 2, 4, 8, 16):
        for _ in range(400):
            errors = (0.05 * torch.randn(3, n, generator=draw) - 1).tolist()
            wrong += match_weights([row(errors[0])], [errors[1]], [errors[2]]).decided
    assert wrong <= 8  # of 2000; 442 where the factor is always 4


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 2])
def test_weights_are_put_back_to_the_last_bit(codec, dtype, rank):
    policy = random_policy(codec).to(dtype)
    policy = with_lora(policy, LORA) if rank else policy
    before = {name: p.clone() for name, p in policy.named_parameters()}
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    kept = WeightSnapshot(policy.parameters())
    for act, changed in (
        (lambda: kept.disturb(0.1, 7), trained),  # adapters that begin with 0 too
        (kept.exchange, set()),
        (kept.exchange, trained),
        (kept.restore, set()),
        (lambda: kept.disturb(0.1, 7), trained),
        (kept.exchange, set()),
        (kept.restore, trained),  # the copies are the disturbed ones now
    ):
        act()
        now = policy.named_parameters()
        assert {name for name, p in now if not torch.equal(p, before[name])} == changed


# ---------------------------------------------------------------- samplers


class LeftBehind(TransformersEngine):
    """A copy of the trainer's weights that is updated `times` times and then no more."""

    times = 99

    def _take_over(self, policy):
        self.times -= 1
        if self.times >= 0:
            super()._take_over(policy)


def with_copy(policy, codec, times, dtype=torch.float32, **fields):
    grpo = module(policy, codec, **{"max_mismatch": 0.0} | fields)
    grpo.engine = LeftBehind(copy.deepcopy(policy).to(dtype), codec, copy=True)
    grpo.engine.times = times
    grpo.initial_weights = WeightSnapshot(policy.parameters())
    return grpo


def made(kind, codec, folder):
    """Return a policy as it is trained."""
    policy = random_policy(codec, vocab_size=1000 if kind == "masked" else len(codec.tokenizer))
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
        policy.save_pretrained(folder)
        policy = load_model(folder, device="cpu", quantise=True)
    if "bfloat16" in kind:
        policy = policy.to(torch.bfloat16)
    mask_head(policy, codec)
    return with_lora(policy, LORA) if "lora" in kind else policy


@pytest.mark.parametrize("kind", ["masked", "lora", "lora in bfloat16", "qlora", "mixed"])
def test_in_every_step_the_sampler_is_the_trainer(codec, tmp_path, kind):
    """mixed: weights in float32 that the sampler has in bfloat16."""
    policy, rounded = made(kind, codec, tmp_path), kind in ("lora in bfloat16", "mixed")
    if kind == "mixed":
        grpo = with_copy(policy, codec, 99, torch.bfloat16, lr=1e-3, max_mismatch=0.01)
    else:
        grpo = module(policy, codec, lr=1e-2, max_mismatch=0.0)
        grpo.initial_weights = WeightSnapshot(policy.parameters())
    for step in range(3 if rounded else 2):
        before = copy.deepcopy([p for p in policy.parameters() if p.requires_grad])
        grpo.training_step(None, step)
        assert grpo.metrics["mismatch_mean"] < (0.05 if rounded else 1e-5)
        after = [p for p in policy.parameters() if p.requires_grad]
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    turns = [turn for group in grpo.groups for t in group.sampled for turn in t.turns]
    assert worst_mismatch(inner(policy), turns) > 1e-3  # which were sampled before the last step
    assert [step for step, _ in grpo.proofs] in ([0, 1], [0, 2]) and grpo.initial_weights is None
    assert all(4 * match.new < match.old for _, match in grpo.proofs)


def test_a_sampler_that_no_weights_reach_is_seen_before_the_first_step(policy, codec):
    before = copy.deepcopy(policy.state_dict())
    grpo = with_copy(policy, codec, times=0, lr=1e-3)
    with pytest.raises(UserError, match=r"Before step 0 .* the weights do not reach it"):
        grpo.training_step(None, 0)
    assert not grpo.groups
    assert all(torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    # where it does follow, the noise of the proof is gone again: the sampler has the very weights
    right = with_copy(policy, codec, times=99)
    right.training_step(None, 0)
    assert all(torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    ((step, match),) = right.proofs
    assert step == 0 and match.new < 1e-9 * match.old
    assert right.metrics["mismatch_mean"] < 1e-6


def test_a_sampler_that_is_left_behind_later_is_seen_though_its_distance_is_that_of_rounding(
    policy, codec
):
    """Its bfloat16 stays far below the bar, and the old weights are nearer all the same."""
    # two times: for the proof and for step 0
    grpo = with_copy(policy, codec, 2, torch.bfloat16, lr=1e-3, max_mismatch=0.01)
    grpo.training_step(None, 0)
    with pytest.raises(UserError, match=r"Before step [12] .* those of the weights as they were"):
        for step in (1, 2):
            grpo.training_step(None, step)
    rows = grpo.first_rows()
    found = agreement([r.sampler for r in rows], grpo.row_logprobs(rows, policy))
    assert found["mismatch_kl"] < 0.01


def test_a_resumed_run_whose_sampler_has_the_base_weights_is_seen_before_its_first_step(
    policy, codec
):
    grpo = with_copy(policy, codec, 1, torch.bfloat16, lr=1e-3, max_mismatch=0.01)
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


@pytest.mark.parametrize(("dtype", "sharding", "allowed"), [
    (torch.float32, "none", 1e-6), (torch.float32, "mixed", 0.01), (torch.bfloat16, "same", 0.01),
])  # fmt: skip
def test_what_rounding_does_not_explain_ends_a_run(policy, codec, dtype, sharding, allowed):
    grpo = module(policy.to(dtype), codec, max_mismatch=0.0)
    grpo.sharding = sharding
    grpo.check_mismatch(allowed)
    for kl in (1.1 * allowed, math.nan):
        with pytest.raises(UserError, match="does not sample from the trained weights"):
            grpo.check_mismatch(kl)
    grpo.config = replace(grpo.config, max_mismatch=1.0)
    grpo.check_mismatch(0.9)
