import copy
import hashlib
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import random_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import find
from commands.train import rewarded
from config.errors import ServerFailed, UserError
from config.options import GRPOConfig
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import (
    GRPO,
    advantages,
    advantages_of,
    policy_loss,
    rate_of,
    token_weights,
    training_rows,
)
from memagent import Group
from models.load import inner, with_lora
from models.logprobs import Row, _HeadLogProbs, logprobs, mask_head, pack
from report.metrics import describe, describe_turns
from report.training import amiss
from rollout import Sampling, rollout
from tasks import worlds

# max_mismatch: many rows here have made-up log-probs
CONFIG = GRPOConfig(tasks_per_step=(2,), group_size=4, steps=4, max_mismatch=99)
SMALL = replace(CONFIG, tasks_per_step=(1,), group_size=2)  # where what is sampled does not matter


class World:
    levels = 1

    def batch(self, step, level, n):
        return [worlds.make_task(f"{step}.{i}", 1 + level, "one_fact") for i in range(n)]


def by_tokens(trajectory):
    """Reward what a random policy varies in."""
    return sum(i for t in trajectory.turns for i in t.response_ids) % 97 / 97


ROLLED_OUT = {}


def sampled(policy, codec, config=CONFIG, n=2, sections=2, reward=by_tokens, agent=tiny.agent()):
    """Return groups of a real rollout; what the same weights say to the same is sampled once."""
    weights = hashlib.sha256()
    for name, p in policy.named_parameters():
        weights.update(f"{name} {p.dtype} {[*p.shape]}".encode())
        weights.update(p.detach().float().numpy())
    asked = repr((agent.name, agent.config, n, sections, config.group_size, config.temperature[0]))
    key = weights.digest(), str(policy.config), id(codec), asked
    if key not in ROLLED_OUT:
        tasks = list(worlds.make_tasks(0, n, sections, "one_fact"))
        groups = {t.id: Group(t, []) for t in tasks}
        jobs = ((t, g) for t in tasks for g in range(config.group_size))
        sampling = Sampling(config.temperature[0])
        for t in rollout(TransformersEngine(policy, codec), agent, jobs, sampling):
            groups[t.task.id].trajectories.append(t)
        for group in groups.values():
            group.trajectories.sort(key=lambda t: t.sample)
        ROLLED_OUT[key] = codec, list(groups.values())  # with the codec, whose id is in the key
    groups = copy.deepcopy(ROLLED_OUT[key][1])
    for group in groups:
        for t in group.trajectories:
            t.reward = reward(t)
    return groups


def module(policy, codec, config=CONFIG, reward=by_tokens, reference=None):
    engine = TransformersEngine(policy.get_base_model() if config.lora_rank else policy, codec)
    grpo = GRPO(policy, engine, rewarded(tiny.agent(), reward), World(), config, reference)
    grpo.optimizers = lambda: grpo.optimizer  # without a Trainer
    grpo.manual_backward = lambda loss: loss.backward()
    grpo.optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    return grpo


def trainer(policy, codec, reward=by_tokens, reference=None, **settings):
    """A module with the optimizer of a training."""
    grpo = module(policy, codec, replace(CONFIG, **settings), reward, reference)
    grpo.optimizer = grpo.configure_optimizers()
    return grpo


def same(weights, policy):
    return all(torch.equal(a, b) for a, b in zip(weights, policy.parameters(), strict=True))


def obvious_logprobs(policy, row):
    """Compute log-probs [response ids] of a turn or row on its own, with full logits."""
    ids, p = torch.tensor([row.prompt_ids + row.response_ids]), len(row.prompt_ids)
    logits = policy(input_ids=ids).logits[0, p - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, p:, None])[:, 0]


def obvious_loss(policy, groups):
    """Compute the loss of GRPO's first, on-policy update (token_mean), one turn at a time."""
    n, loss = 0, 0.0
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        if rewards.std() == 0:
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for a, trajectory in zip(advantages, group.trajectories, strict=True):
            for turn in trajectory.turns:
                logp = obvious_logprobs(policy, turn)
                loss = loss - a * (logp - logp.detach()).exp().sum()
                n += len(turn.response_ids)
    return loss / n


def gradient(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def grad_of(policy, codec, groups, config=CONFIG, rows=None, reference=None):
    """Return the gradient of the module's own update, before the (empty) optimizer step."""
    grpo = module(policy, codec, replace(config, grad_clip=1e9), reference=reference)
    gradients = []
    grpo.optimizer.step = lambda: gradients.append(gradient(policy).clone())
    grpo.metrics = {}
    grpo.update(training_rows(groups, config) if rows is None else rows)
    return gradients[0], grpo.metrics


def close(a, b, tolerance=1e-5):
    return (a - b).norm() <= tolerance * b.norm()


# ---- advantages


def test_golden_vectors_of_the_spec():
    rewards = [1.0] * 4 + [0.0] * 12
    assert advantages(rewards, "mean")[3:5] == [0.75, -0.25]
    assert advantages(rewards, "std")[3:5] == pytest.approx([1.677, -0.559], abs=5e-4)
    assert advantages([1.0], "mean") == [1.0]  # in a group of one the mean counts as 0


@given(
    st.lists(st.floats(0, 1, width=16), min_size=2, max_size=20), st.sampled_from(["mean", "std"])
)
def test_advantages_sum_to_zero_and_follow_the_order(rewards, normalisation):
    a = advantages(rewards, normalisation)
    assert sum(a) == pytest.approx(0, abs=1e-6)
    shuffled = random.Random(0).sample(range(len(rewards)), len(rewards))
    assert advantages([rewards[i] for i in shuffled], normalisation) == pytest.approx(
        [a[i] for i in shuffled], abs=1e-6
    )


def test_normalised_per_trajectory_before_it_is_expanded_to_turns_and_shared_out(policy, codec):
    groups, by_mean = sampled(policy, codec), replace(CONFIG, normalisation="mean")
    rows = training_rows(groups, by_mean)
    shorter = copy.deepcopy(groups)
    trajectory = shorter[0].trajectories[0]
    trajectory.turns = trajectory.turns[-1:]  # fewer turns do not change its weight
    again = training_rows(shorter, by_mean)
    assert {r.trajectory: r.advantage for r in rows} == {r.trajectory: r.advantage for r in again}
    share, split = (training_rows(groups, replace(CONFIG, credit=c)) for c in ("share", "split"))
    assert len(share) == len(split) > 0
    # three turns: two sections and an answer
    assert [r.advantage / 3 for r in share] == pytest.approx([r.advantage for r in split])
    for t in groups[0].trajectories:
        t.reward = 1.0
    assert {r.trajectory for r in training_rows(groups, CONFIG)} <= {*range(4, 8)}
    # a failed trajectory counts as wrong in its group
    groups[0].trajectories[0].reward, groups[0].trajectories[0].turns = 0.0, []
    assert {r.advantage for r in training_rows(groups[:1], by_mean)} == {0.25}


@pytest.mark.parametrize("aggregation", ["token_mean", "turn_mean"])
def test_groups_without_signal_that_are_kept_count_in_the_normaliser_and_have_the_kl_term(
    policy, codec, aggregation
):
    """Compare with -1/N sum A + kl/N sum k3 over all rows, one turn at a time.

    N is the number of tokens (turns) of all groups that are trained.
    """
    groups = sampled(policy, codec)
    for t in groups[0].trajectories:
        t.reward = 1.0
    reference = random_policy(codec, initializer_range=0.16)
    mask_head(reference, codec)

    def by_hand(groups):
        terms, n = [], 0
        for group in groups:
            mean = sum(t.reward for t in group.trajectories) / 4
            for t in group.trajectories:
                for turn in t.turns:
                    logp = obvious_logprobs(policy, turn)
                    d = obvious_logprobs(reference, turn).detach() - logp
                    surrogate = (t.reward - mean) * (logp - logp.detach()).exp()
                    each = -surrogate + 0.3 * (d.exp() - d - 1)
                    size = len(turn.response_ids)
                    terms.append(each.sum() if aggregation == "token_mean" else each.sum() / size)
                    n += size if aggregation == "token_mean" else 1
        policy.zero_grad()
        (loss := sum(terms) / n).backward()
        return loss.item(), gradient(policy).clone()

    config = replace(
        CONFIG, normalisation="mean", importance="none", kl=0.3, aggregation=aggregation
    )
    gradients = {}
    for name, first in (("keep", 0), ("skip", 4)):
        config = replace(config, without_signal=name)
        rows = training_rows(groups, config)
        assert {r.trajectory for r in rows} == {*range(first, 8)}
        assert all(r.advantage == 0 for r in rows if r.trajectory < 4)
        loss, expected = by_hand(groups[first // 4 :])
        policy.zero_grad()
        gradients[name], metrics = grad_of(policy, codec, groups, config, reference=reference)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4), name
        assert close(gradients[name], expected, 1e-4), name
    assert not close(gradients["keep"], gradients["skip"], 0.1) and metrics["kl"] > 1e-3


def test_a_step_in_which_no_group_has_a_signal_is_an_update_if_they_are_kept(policy, codec):
    for name in ("skip", "keep"):
        grpo = module(policy, codec, replace(SMALL, without_signal=name), reward=lambda t: 1.0)
        grpo.training_step(None, 0)
        m, kept = grpo.metrics, name == "keep"
        assert m["groups_without_signal"] == m["reward"] == 1 and m["grad_norm"] == 0
        assert (m["trained_rows"] > 0) == (m["computed_tokens"] > 0) == kept


def test_turns_drawn_at_random_are_weighted_to_stay_unbiased(policy, codec):
    groups = sampled(policy, codec, sections=4)
    shorter = groups[0].trajectories[0]
    shorter.turns = shorter.turns[1:]
    for group, rewards in zip(groups, ([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]), strict=True):
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            trajectory.reward = reward
    config = replace(CONFIG, turns_per_trajectory=2)
    rows = training_rows(groups, config, seed=0)
    assert rows == training_rows(groups, config, seed=0)
    assert rows != training_rows(groups, config, seed=1)
    key = lambda r: (r.trajectory, tuple(r.prompt_ids), tuple(r.response_ids))  # noqa: E731
    mean, draws = Counter(), 400
    for seed in range(draws):
        for r in training_rows(groups, config, seed=seed):
            mean[key(r)] += r.weight / draws
    full = Counter(map(key, training_rows(groups, CONFIG)))
    assert mean.keys() == full.keys()
    # within 5 standard errors
    assert all(mean[k] == pytest.approx(full[k], abs=0.25 * full[k]) for k in full)
    weights = [[r.weight for r in rows if r.trajectory == t] for t in range(8)]
    assert weights[0] == [1.5, 1.5, 1.0]
    assert weights[1:3] == weights[4:6] == [[2.0, 2.0, 1.0]] * 2
    # the rare failure and the rare success are trained whole
    assert weights[3] == weights[7] == [1.0] * 5
    # the normaliser counts a row as often as it stands for: the weights sum to what they sum to
    # without drawing
    for aggregation in ("token_mean", "turn_mean"):
        weights = token_weights(rows, replace(config, aggregation=aggregation))
        total = sum(w * len(r.response_ids) for w, r in zip(weights, rows, strict=True))
        assert total == pytest.approx(1.0)


# ---- loss and gradient


def test_loss_and_gradient_equal_the_obvious_implementation(policy, codec):
    groups = sampled(policy, codec)
    policy.zero_grad()
    obvious_loss(policy, groups).backward()
    expected = gradient(policy).clone()
    policy.zero_grad()
    got, metrics = grad_of(policy, codec, groups)
    assert expected.norm() > 1e-3
    assert close(got, expected)
    assert metrics["loss"] == pytest.approx(obvious_loss(policy, groups).item(), abs=1e-5)


def turn_by_turn(policy, rows, config):
    """Compute the loss and every parameter's gradient of any rows, one turn at a time."""
    total = sum(len(r.response_ids) for r in rows)
    loss = 0.0
    for r in rows:
        logp = obvious_logprobs(policy, r)
        loss = loss - r.advantage * (logp - logp.detach()).exp().sum() / total
    policy.zero_grad()
    loss.backward()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    return loss.item(), {name: p.grad.clone() for name, p in trained.items()}


def check_gradients(policy, expected):
    """Compare every trained parameter's gradient with the expected, 1e-5 relative in float32.

    Some are 0 in exact arithmetic (a query before equal keys), which leaves only rounding.
    """
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    for name, p in policy.named_parameters():
        if p.requires_grad:
            bound = 1e-5 * max(expected[name].norm(), 0.01 * whole)
            assert (p.grad - expected[name]).norm() <= bound, name


def check_exact(policy, codec, rows, **settings):
    """Compare our loss and gradients with those of `turn_by_turn`.

    Return the share of the tokens that was computed.
    """
    config = replace(CONFIG, grad_clip=1e9, importance="none", **settings)
    mask_head(inner(policy), codec)
    loss, expected = turn_by_turn(policy, rows, config)
    policy.zero_grad()
    grpo = module(policy, codec, config)
    grpo.optimizer.zero_grad = lambda: None
    grpo.metrics = {}
    grpo.update(rows)
    assert grpo.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    check_gradients(policy, expected)
    return grpo.metrics["computed_tokens"] / sum(map(len, rows))


def tool_chats(n, seed=0):
    """Make rows of chats with a common beginning that grow by responses and tool answers."""
    rng = random.Random(seed)
    some = lambda a, b: [rng.randrange(2, 90) for _ in range(rng.randrange(a, b))]  # noqa: E731
    rows, head = [], some(20, 30)
    for chat in range(n):
        prompt = head[:]
        for _ in range(rng.randrange(1, 5)):
            prompt = prompt + some(3, 9)
            response = some(1, 9)
            rows.append(Row(prompt, response, [0.0] * len(response), rng.uniform(-1, 1), 1.0, chat))
            prompt = prompt + response
    return rows


@pytest.mark.parametrize(
    ("micro_tokens", "checkpointing"), [(50, False), (50, True), (10**6, False)]
)
def test_exact_in_both_layouts_for_tool_chats_and_for_single_turns(
    policy, codec, micro_tokens, checkpointing
):
    settings = dict(micro_tokens=micro_tokens, recompute=checkpointing)
    whole = micro_tokens > 50
    shares = {}
    for layout in ("shared", "paper"):
        agent = tiny.agent(layout=layout)
        rows = training_rows(sampled(policy, codec, agent=agent), CONFIG)[:: 1 if whole else 3]
        shares[layout] = check_exact(policy, codec, rows, **settings)
    assert not whole or shares["shared"] < 0.68 < 0.74 < shares["paper"], shares
    rows = tool_chats(5)
    longest = {r.trajectory: len(r) for r in rows}  # a chat's last turn holds the whole chat
    share = check_exact(policy, codec, rows, **settings)
    assert not whole or share * sum(map(len, rows)) <= sum(longest.values()) - 4 * 20
    check_exact(policy, codec, rows[:1], **settings)
    assert check_exact(policy, codec, rows[:1] * 2, **settings) == 0.5  # duplicates


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_layers_run_twice_and_nothing_drops_out(policy, codec, recompute):
    rows = training_rows(sampled(policy, codec), CONFIG)
    calls, layer = [], policy.model.layers[1]
    layer.mlp.register_forward_pre_hook(
        lambda *_: calls.append((layer.mlp.training, layer.self_attn.training))
    )
    grpo = module(policy.eval(), codec, replace(CONFIG, recompute=recompute))
    calls.clear()  # of the engine's first trial
    grpo.metrics = {}
    grpo.update(rows)  # one micro-batch
    assert calls == [(False, False)] * (2 if recompute else 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_exact_with_lora(policy, codec, recompute):
    groups = sampled(policy, codec)
    config = replace(CONFIG, lora_rank=4, grad_clip=1e9, importance="none", recompute=recompute)
    model, draw = with_lora(policy, config), torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # they begin at 0, and with them the gradient of A
            p.data.normal_(0, 0.1, generator=draw)
    rows = training_rows(groups, config)
    _, expected = turn_by_turn(model.get_base_model(), rows, config)
    model.zero_grad()
    grpo = module(model, codec, config)
    grpo.optimizer.zero_grad = lambda: None
    grpo.metrics = {}
    grpo.update(rows)
    # A and B of seven linear layers in each of two
    assert sum(bool(g.norm() > 0) for g in expected.values()) == 2 * 2 * 7
    check_gradients(model.get_base_model(), expected)


few = st.integers(2, 4)  # few tokens, so that much is shared
row = st.tuples(
    st.lists(few, min_size=1, max_size=9),
    st.lists(few, min_size=1, max_size=5),
    st.floats(-1, 1, width=16),
)


@settings(max_examples=20)
@given(st.lists(row, min_size=1, max_size=8), st.sampled_from([1, 20, 10**6]))
def test_exact_for_random_tries(codec, rows, micro_tokens):
    """Cover tokens that are sampled in one turn and in the prompt of another.

    Others are sampled in several turns, with different advantages.
    """
    rows = [Row(p, r, [0.0] * len(r), a, 1.0, k) for k, (p, r, a) in enumerate(rows)]
    check_exact(random_policy(codec), codec, rows, micro_tokens=micro_tokens)


@pytest.mark.parametrize("aggregation", ["token_mean", "row_mean", "turn_mean", "constant"])
def test_gradient_does_not_depend_on_micro_batches_or_order(policy, codec, aggregation):
    config = replace(CONFIG, aggregation=aggregation)
    rows = training_rows(sampled(policy, codec), config)
    one, _ = grad_of(policy, codec, [], config, rows)
    shuffled = random.Random(1).sample(rows, len(rows))
    for micro, order in ((1, rows), (150, rows[::-1]), (400, shuffled)):
        policy.zero_grad()
        other, _ = grad_of(policy, codec, [], replace(config, micro_tokens=micro), order)
        assert close(other, one)


def test_the_four_aggregations_by_hand():
    rows = [
        Row([1], [1, 2, 3], [0.0] * 3, 1.0, 1.0, 0),
        Row([1], [1], [0.0], 1.0, 1.0, 0),
        Row([1], [1, 2], [0.0] * 2, 1.0, 1.0, 1),
    ]
    assert token_weights(rows, replace(CONFIG, aggregation="token_mean")) == [1 / 6] * 3
    assert token_weights(rows, replace(CONFIG, aggregation="row_mean")) == [1 / 6, 1 / 2, 1 / 4]
    assert token_weights(rows, replace(CONFIG, aggregation="turn_mean")) == [1 / 9, 1 / 3, 1 / 6]
    assert token_weights(rows, replace(CONFIG, aggregation="constant"), 10) == [1 / 30] * 3


def loss_of(logp, old, a, config, sampler=None, reference=None):
    sampler = old if sampler is None else sampler
    logp = torch.tensor([logp], requires_grad=True)
    old, sampler, a, weight = (torch.tensor([x]) for x in (old, sampler, a, 1.0))
    reference = None if reference is None else torch.tensor([reference])
    loss, stats = policy_loss(logp, old, sampler, a, weight, config, reference)
    loss.backward()
    return loss.item(), logp.grad.item(), stats


def test_clipping_by_hand():
    config = replace(CONFIG, clip_low=0.2, clip_high=0.3, importance="none")
    up, down = 0.5, -0.5  # ratios e^.5 = 1.649, e^-.5 = 0.607
    # past clip_high: bounded, no gradient
    assert loss_of(up, 0.0, 1.0, config)[:2] == pytest.approx((-1.3, 0.0))
    assert loss_of(down, 0.0, 1.0, config)[:2] == pytest.approx((-0.6065, -0.6065), abs=1e-3)
    assert loss_of(up, 0.0, -1.0, config)[:2] == pytest.approx((1.6487, 1.6487), abs=1e-3)
    assert loss_of(down, 0.0, -1.0, config)[:2] == pytest.approx((0.8, 0.0))  # past clip_low
    assert loss_of(2.0, 0.0, -1.0, config)[0] == pytest.approx(7.389, abs=1e-3)
    config = replace(config, dual_clip=3.0)  # for negative advantages only
    assert loss_of(2.0, 0.0, -1.0, config)[:2] == pytest.approx((3.0, 0.0))
    assert loss_of(2.0, 0.0, 1.0, config)[0] == pytest.approx(-1.3)


def test_importance_correction_by_hand():
    for importance, expected in (("truncate", -2.0), ("mask", 0.0), ("none", -1.0)):
        config = replace(CONFIG, importance=importance)
        loss, _, _ = loss_of(0.0, 0.0, 1.0, config, sampler=-1.0)  # ratio e
        assert loss == pytest.approx(expected)
    for importance in ("truncate", "mask"):
        config = replace(CONFIG, importance=importance)
        loss, _, _ = loss_of(0.0, 0.0, 1.0, config, sampler=1.0)  # ratio 1/e
        assert loss == pytest.approx(-0.3679, abs=1e-4)


def test_k3_kl_by_hand():
    loss, grad, stats = loss_of(0.0, 0.0, 0.0, replace(CONFIG, kl=0.5), reference=1.0)
    assert stats["kl"].item() == pytest.approx(2.71828 - 2, abs=1e-4)
    assert loss == pytest.approx(0.5 * 0.71828, abs=1e-4)
    assert grad == pytest.approx(0.5 * (1 - 2.71828), abs=1e-4)
    loss, _, _ = loss_of(0.0, 0.0, 0.0, replace(CONFIG, kl=1.0), reference=50.0)
    assert loss == pytest.approx(10.0)  # clamped


def test_a_step_in_which_everything_fails_ends_the_run(policy, codec):
    grpo = module(policy, codec)
    grpo.engine.window = 10
    with pytest.raises(UserError, match=r"Every trajectory of step 0 failed.*window of 10"):
        grpo.training_step(None, 0)


@pytest.mark.parametrize("aggregation", ["token_mean", "row_mean", "turn_mean", "constant"])
def test_logged_statistics_are_means(policy, codec, aggregation):
    config = replace(CONFIG, aggregation=aggregation)
    _, metrics = grad_of(policy, codec, sampled(policy, codec), config)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4) and metrics["clipped"] == 0


@pytest.mark.parametrize("keep", [False, True])
def test_only_the_rows_asked_for_and_in_chunks(policy, codec, monkeypatch, keep):
    rows = training_rows(sampled(policy, codec), CONFIG)
    (batch,) = pack(rows, 10**6)
    whole = logprobs(policy, batch)
    obvious = [obvious_logprobs(policy, rows[i]) for i in batch.index]
    assert torch.allclose(whole, torch.cat(obvious), atol=1e-5)
    policy.config.vocab_size, seen = 1 << 24, []  # forces the chunked path
    monkeypatch.setattr("models.logprobs.KEPT_LOGITS", 1 << 40 if keep else 0)
    policy.lm_head.register_forward_hook(lambda m, i, o: seen.append(len(o)))
    head = _HeadLogProbs.logits  # with a gradient, on a CPU

    def watched(hidden, weight, temperature):
        seen.append(len(hidden))
        return head(hidden, weight, temperature)

    monkeypatch.setattr(_HeadLogProbs, "logits", staticmethod(watched))
    chunked = logprobs(policy, batch, chunk=16)
    parents = {int(p) for p in batch.trie.parent()[batch.places]}
    assert torch.allclose(whole, chunked, atol=1e-6)
    assert max(seen) == 16 and sum(seen) == len(parents) < len(batch.places)
    once = len(seen)
    seen.clear()
    with torch.no_grad():  # nor is there a whole [T, V] where no gradient is wanted
        assert torch.allclose(whole, logprobs(policy, batch, chunk=16), atol=1e-6)
    assert max(seen) == 16
    policy.zero_grad(), whole.sum().backward()
    expected = gradient(policy).clone()
    seen.clear()
    policy.zero_grad(), chunked.sum().backward()
    assert close(gradient(policy), expected)
    assert len(seen) == (0 if keep else once)  # computed again, or not


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 100),
)
def test_pack_holds_every_row_once_within_its_budget(shapes, budget):
    rows = [Row(list(range(2, 2 + p)), [50 + i] * r, [0.0] * r) for i, (p, r) in enumerate(shapes)]
    batches = list(pack(rows, budget))
    assert sorted(i for b in batches for i in b.index) == list(range(len(rows)))
    for b in batches:
        assert len(b.trie) <= budget or len(b.index) == 1
        assert b.trie.ids[b.places].tolist() == [t for i in b.index for t in rows[i].response_ids]


# ---- the module


def test_sampler_logprobs_equal_the_trainers_before_and_after_an_update(policy, codec):
    grpo = trainer(policy, codec, lr=1e-2, warmup=0)
    before, mismatches = [p.clone() for p in policy.parameters()], []
    for _ in range(3):
        grpo.training_step(None, 0)
        mismatches.append(grpo.metrics["mismatch"])
    assert not same(before, policy)
    assert grpo.metrics["trained_rows"] > 0 and 0 < max(mismatches) < 1e-5


@pytest.mark.parametrize(
    ("updates", "reward"), [(1, by_tokens), (3, by_tokens), (1, lambda t: 1.0)]
)
def test_a_sampler_with_other_weights_stops_the_run(policy, codec, reward, updates):
    """An engine that never takes the trainer's weights over, with a signal and without."""

    class Stale(TransformersEngine):
        def awake(self, policy=None):
            return super().awake()

    config = replace(CONFIG, lr=1e-3, warmup=0, max_mismatch=0.0, updates_per_rollout=updates)
    grpo = module(policy, codec, config, reward=reward)
    grpo.engine = Stale(copy.deepcopy(policy), codec)
    grpo.optimizer = grpo.configure_optimizers()
    grpo.training_step(None, 3)  # not at a step that proves the weights
    assert grpo.metrics["mismatch_mean"] < 1e-6 < 1e-3
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(UserError, match="does not sample from the trained weights"):
        grpo.training_step(None, 3)  # not at a step that proves the weights
    assert same(before, policy)
    grpo.config = replace(grpo.config, max_mismatch=99.0)
    grpo.training_step(None, 3)  # not at a step that proves the weights
    assert grpo.metrics["mismatch"] > grpo.metrics["mismatch_mean"] > 1e-3
    assert grpo.metrics["mismatch_kl"] > 1e-6


def test_a_turn_whose_mean_ratio_leaves_the_cap_is_not_trained():
    config = replace(CONFIG, importance="mask_turn")
    old, ones = torch.zeros(6), torch.ones(6)
    apart = torch.tensor([0.6, 0.6, -0.9, 0.3, 5.0, -5.0])  # means .6, -.3, 0; log 2 = .69
    turn = torch.tensor([0, 0, 1, 1, 2, 2])

    def trained(sampler):
        logp = torch.zeros(6, requires_grad=True)
        loss, _ = policy_loss(logp, old, sampler, ones, ones / 6, config, turn=turn)
        loss.backward()
        return logp.grad.abs().mul(6).tolist()

    assert trained(old - apart) == pytest.approx([1] * 6)
    assert trained(old - 1.2 * apart) == pytest.approx([0, 0, 1, 1, 1, 1])
    assert trained(old + 1.2 * apart) == pytest.approx([0, 0, 1, 1, 1, 1])


def test_an_update_says_which_turn_a_token_is_of(policy, codec):
    """Leave out exactly every second turn, where the sampler is off by 1, in any batches."""
    rows = [replace(r, advantage=1.0) for r in training_rows(sampled(policy, codec), CONFIG)]
    off = [
        replace(r, sampler=[x - 1 for x in r.sampler]) if i % 2 else r for i, r in enumerate(rows)
    ]
    trained = [replace(r, advantage=float(i % 2 == 0)) for i, r in enumerate(rows)]
    gradients = []
    for importance, changed in (("mask_turn", off), ("none", trained)):
        for micro_tokens in (16384, 150):
            model = copy.deepcopy(policy)
            config = replace(CONFIG, importance=importance, micro_tokens=micro_tokens)
            grpo = module(model, codec, replace(config, grad_clip=1e9))
            grpo.optimizer.zero_grad = lambda: None
            grpo.update(changed)
            gradients.append(gradient(model))
    assert all(close(g, gradients[0]) for g in gradients) and gradients[0].abs().max() > 0


def test_every_step_says_what_was_read_shared_and_computed(policy, codec):
    grpo = module(policy, codec, replace(CONFIG, group_size=16))
    for _ in range(2):
        grpo.training_step(None, 0)
        m = grpo.metrics
        turns = [turn for group in grpo.groups for t in group.trajectories for turn in t.turns]
        prompt_tokens = sum(len(t.prompt_ids) for t in turns)
        assert m["prefilled_tokens"] + m["reused_tokens"] == m["read_tokens"] == prompt_tokens
        assert m["generated_tokens"] == m["written_tokens"] == m["trained_tokens"]
        assert m["reused_tokens"] > 0.3 * m["read_tokens"]
        # every group has a signal
        assert m["turn_tokens"] == prompt_tokens + sum(len(t.response_ids) for t in turns)
        assert m["trained_tokens"] < m["computed_tokens"] < 0.7 * m["turn_tokens"]
        assert m["share_saved"] == pytest.approx(1 - m["computed_tokens"] / m["turn_tokens"])
        assert m["rollout_s"] + m["update_s"] == pytest.approx(m["step_s"]) and "mfu" not in m
        tokens = m["read_tokens"] + m["written_tokens"]
        assert m["tokens_per_s"] == pytest.approx(tokens / m["step_s"])
    silent = module(policy, codec, SMALL, reward=lambda t: 1.0)
    silent.training_step(None, 0)
    assert silent.metrics.keys() == m.keys()  # the columns of metrics.csv
    for name in ("computed_tokens", "share_saved", "turn_tokens"):
        assert silent.metrics[name] == 0


def test_each_length_has_its_temperature_in_sampler_and_trainer(policy, codec):
    config = replace(CONFIG, temperature=(0.5, 1.7), grow_steps=1)
    grpo = module(policy, codec, config, reward=lambda t: 1 + by_tokens(t))
    surprisals = []
    for level in (0, 1, 1):
        assert grpo.level == level
        grpo.training_step(None, 0)
        surprisals.append(grpo.metrics["surprisal"])
        assert grpo.metrics["trained_rows"] > 0 and grpo.metrics["mismatch"] < 1e-5
    assert surprisals[0] < surprisals[1] - 0.01  # hotter


def test_several_updates_per_rollout_use_the_log_probs_from_before(policy, codec):
    grpo = trainer(policy, codec, lr=1e-2, warmup=0, updates_per_rollout=3, importance="none")
    steps, step = [], grpo.optimizer.step
    grpo.optimizer.step = lambda: (steps.append(1), step())
    grpo.training_step(None, 0)
    assert len(steps) == 3
    assert abs(grpo.metrics["ratio"] - 1) > 1e-4  # the later updates are off policy


@pytest.mark.parametrize(
    ("rows_per_update", "updates"), [(0, 1), (6, 4), (7, 3), (24, 1), (64, 1), (1, 8)]
)
def test_turns_of_an_update_make_more_updates_of_longer_documents(
    policy, codec, rows_per_update, updates
):
    """Cut 24 rows, 8 trajectories of 3 turns, between trajectories.

    An update averages its turns' token means (vime).
    """
    config = replace(
        CONFIG,
        rows_per_update=rows_per_update,
        aggregation="turn_mean",
        importance="none",
        without_signal="keep",
    )
    rows, parts = training_rows(sampled(policy, codec), config), []
    grpo = module(policy, codec, config)
    grpo.metrics, gradient_of = {}, grpo.gradient
    grpo.gradient = lambda part, old: parts.append(part) or gradient_of(part, old)
    steps = []
    grpo.optimizer.step = lambda: steps.append(gradient(policy).clone())
    grpo.update(rows)
    assert len(rows) == 24 and len(steps) == updates
    assert [r for part in parts for r in part] == rows
    for one, other in pairwise(parts):
        assert {r.trajectory for r in one}.isdisjoint(r.trajectory for r in other)
    if updates == 4:
        assert [len(part) for part in parts] == [6] * 4
        for part, step in zip(parts, steps, strict=True):
            loss = 0.0
            for r in part:
                logp = obvious_logprobs(policy, r)
                loss = loss - r.advantage * (logp - logp.detach()).exp().mean() / 6
            policy.zero_grad()
            loss.backward()
            expected = gradient(policy)
            assert close(step, expected * min(1.0, config.grad_clip / float(expected.norm())), 1e-4)


def test_the_rate_warms_up_from_the_first_share_or_from_zero(policy, codec):
    config = replace(CONFIG, lr=1.0, warmup=20, steps=400)
    ours = replace(config, warmup_from="share")
    verl = replace(config, warmup_from="zero")
    table = {0: (0.05, 0.0), 1: (0.1, 0.05), 19: (1.0, 0.95), 20: (1.0, 1.0), 399: (1.0, 1.0)}
    for step, rates in table.items():
        assert (rate_of(ours, step), rate_of(verl, step)) == pytest.approx(rates)
    assert rate_of(replace(verl, warmup=0), 0) == 1.0
    grpo = trainer(policy, codec, lr=1e-2, warmup=2, warmup_from="zero")
    moved = []
    for _ in range(2):
        before = [p.clone() for p in policy.parameters()]
        grpo.training_step(None, 0)
        moved.append(not same(before, policy))
    assert moved == [False, True]


def kls_of(grpo):
    """The KL of three steps, in which sampler and trainer agree."""
    for _ in range(3):
        grpo.training_step(None, 0)
        assert grpo.metrics["mismatch"] < 1e-5
        yield grpo.metrics["kl"]


def test_kl_is_zero_at_first_and_its_reference_stays(policy, codec):
    reference = copy.deepcopy(policy).requires_grad_(False)
    settings = dict(lr=1e-2, warmup=0, kl=0.1, grad_clip=1e9)
    grpo = trainer(policy, codec, reference=reference, **settings)
    kls = [*kls_of(grpo)]
    assert abs(kls[0]) < 1e-6 < 1e-4 < kls[-1]
    assert same(random_policy(codec).parameters(), reference)
    assert not any("reference" in name for name in grpo.state_dict())


def test_lora_trains_adapters_alone_and_is_its_own_reference(policy, codec):
    settings = dict(lr=1e-2, warmup=0, lora_rank=4, kl=0.1)
    model = with_lora(policy, replace(CONFIG, **settings))
    grpo = trainer(model, codec, **settings)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    kls = [*kls_of(grpo)]
    assert abs(kls[0]) < 1e-6 < kls[-1]
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in frozen.items())
    assert any("lora_B" in n and p.abs().sum() > 0 for n, p in model.named_parameters())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(policy, codec):
    grpo = trainer(policy, codec, lr=1e-2, warmup=0)
    before = [p.clone() for p in policy.parameters()]
    grpo.manual_backward = lambda loss: (loss * float("nan")).backward()
    grpo.training_step(None, 0)
    assert grpo.metrics["skipped_updates"] == 1 and same(before, policy)


# ---- trajectories without a reward


def without(groups, left_out):
    """Groups in which the trajectories with these (group, sample) have no reward."""
    for g, group in enumerate(groups):
        taken = [t for t in group.trajectories if (g, t.sample) in left_out]
        group.trajectories = [t for t in group.trajectories if t not in taken]
        for t in taken:
            t.reward = None
        group.left_out = taken
    return groups


def test_a_trajectory_without_a_reward_plays_no_part_in_its_group(policy, codec):
    config = replace(CONFIG, group_size=4)
    whole = sampled(policy, codec, config)
    for group in whole:  # as if they had never been sampled
        group.trajectories = [t for t in group.trajectories if t.sample != 1]
    groups = without(sampled(policy, codec, config), {(0, 1), (1, 1)})
    expected, got = (grad_of(policy, codec, each, config)[0] for each in (whole, groups))
    assert close(got, expected, 1e-6) and expected.norm() > 1e-3
    ours, theirs = (
        describe(each, {}) | describe_turns(each, tiny.agent()) for each in (groups, whole)
    )
    assert ours["reward"] == theirs["reward"] and ours["reward_se"] == theirs["reward_se"]
    assert ours["unrewarded"] == 2 and theirs["unrewarded"] == 0
    assert ours["read_tokens"] > theirs["read_tokens"]  # they were sampled all the same


def test_documents_that_are_read_in_part_are_counted(policy, codec):
    for most, cut in ((1, 8), (2, 0)):  # of two sections
        groups = sampled(policy, codec, agent=tiny.agent(max_sections=most))
        assert describe(groups, {})["documents_cut"] == cut


@pytest.mark.parametrize("without_signal", ["skip", "keep"])
def test_a_group_that_shrinks_to_one_or_none_teaches_nothing(policy, codec, without_signal):
    config = replace(CONFIG, group_size=3, without_signal=without_signal)
    left_out = {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}
    groups = without(sampled(policy, codec, config), left_out)
    assert [group.signal for group in groups] == [False, False]
    assert [row.advantage for row in training_rows(groups, config) if row.advantage] == []
    for trajectory in groups[0].trajectories:
        for turn in trajectory.turns:
            turn.rewards = {"own": 1.0}
    of_turns = advantages_of(groups[0], replace(config, alpha=0.5))
    assert {a for turns in of_turns for a in turns} == {0.0}  # of turns likewise: it is alone
    found = describe(groups, {})
    assert found["unrewarded"] == 5 and found["groups_without_signal"] == 1
    assert found["reward"] == groups[0].trajectories[0].reward
    alone = Group(groups[0].task, groups[0].trajectories)  # sampled alone: as before
    assert alone.signal and any(map(any, advantages_of(alone, config)))


@pytest.mark.parametrize("failed", [[0], [1, 2, 4, 5], [0, 1, 2], [*range(6)]])
def test_readings_that_a_server_failed_are_left_out_and_counted(policy, codec, failed):
    """One of six; all but one of each group; a whole group; all of a step, which ends the run."""

    def paid(trajectory):
        if group_of(trajectory) * 3 + trajectory.sample in failed:
            raise ServerFailed("The judge cannot be used: HTTP 503.")
        return float(trajectory.sample)

    def group_of(trajectory):
        return int(trajectory.task.id[-1])

    config = replace(CONFIG, group_size=3)
    grpo = module(policy, codec, config, reward=paid)
    if len(failed) == 6:
        grpo.done_steps = 2
        with pytest.raises(UserError, match=r"step 2 failed: .*HTTP 503.*--resume goes on"):
            grpo.training_step(None, 1)
        return
    grpo.training_step(None, 0)
    m, n = grpo.metrics, len(failed)
    left = [t.sample for group in grpo.groups for t in group.trajectories]
    assert (m["faults"], m["unrewarded"], len(left)) == (n, n, 6 - n)
    assert amiss(m) == [f"{n} reading{'s' * (n > 1)} left out: an engine or a server failed"]
    assert m["reward"] == pytest.approx(sum(left) / len(left))
    turns = [len(t.turns) for group in grpo.groups if group.signal for t in group.trajectories]
    assert m["trained_rows"] == sum(turns) and bool(turns) is (n != 4)
    assert m["groups_without_signal"] == {1: 0, 4: 1, 3: 0.5}[n]


def test_a_step_without_any_reward_goes_by_and_the_first_one_is_refused(policy, codec):
    def none(trajectory):
        return None

    grpo = module(policy, codec, SMALL, reward=none)
    with pytest.raises(UserError, match=r"none gave no trajectory of the first step a reward"):
        grpo.training_step(None, 0)
    grpo.done_steps = grpo.level_steps = 1
    grpo.training_step(None, 1)
    assert math.isnan(grpo.metrics["reward"]) and grpo.running == 0.0
    assert grpo.metrics["unrewarded"] == grpo.config.group_size * grpo.n_tasks
    assert grpo.metrics["mismatch"] < 1e-4  # what was sampled is checked
    grpo.validation = [*worlds.make_tasks(0, 2, 1, "one_fact")]
    assert math.isnan(grpo.validate()["score"]) and grpo.validated["n"] == 0


def test_a_reward_that_is_no_number_ends_the_run_at_once(policy, codec):
    grpo = module(policy, codec, reward=lambda trajectory: float("nan"))
    with pytest.raises(UserError, match=r"<lambda> returned nan for the task 'one_fact-"):
        grpo.training_step(None, 0)


def test_tasks_grow_when_the_running_reward_is_high(policy, codec):
    grpo = module(policy, codec, replace(SMALL, grow_at=0.9, grow_steps=2), reward=lambda t: 1.0)
    levels = []
    for _ in range(4):
        grpo.training_step(None, 0)
        levels.append(grpo.level)
    assert levels == [0, 1, 1, 1]  # World has one further level
    stays = module(policy, codec, replace(SMALL, grow_steps=1), reward=lambda t: 0.0)
    stays.training_step(None, 0)
    assert stays.level == 0


def check_fields(config, **expected):
    assert {name: getattr(config, name) for name in expected} == expected


def test_presets_are_the_published_settings():
    grpo, agent = find.resolve("paper", "", {}, {})
    check_fields(grpo, group_size=16, tasks_per_step=(128,), updates_per_rollout=16)
    check_fields(grpo, normalisation="mean", credit="share")
    check_fields(grpo, clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl=1e-3, lr=1e-6)
    check_fields(agent.config, chunk_tokens=5000, memory_tokens=1024, max_sections=8)
    check_fields(agent.config, over="center", layout="paper")
    grpo, agent = find.resolve("vime", "", {"lr": 1.0}, {"chunk_tokens": 7})
    check_fields(grpo, group_size=8, credit="split", aggregation="turn_mean", clip_high=0.3, lr=1.0)
    check_fields(agent.config, chunk_tokens=7, final_tokens=256, over="head", empty="keep")
    with pytest.raises(UserError, match="default, demo, paper, vime, rememr1"):
        find.resolve("papre", "", {}, {})
    assert {*find.presets()} == {"default", "demo", "paper", "rememr1", "vime"}
