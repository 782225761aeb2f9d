"""GRPO against the obvious: one turn at a time, full logits, the formulas as they are written."""

import copy
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import obvious_logprobs, random_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import find
from commands.train import rewarded
from config.errors import ServerFailed, UserError
from config.options import GRPOConfig
from data import Task
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import GRPO, advantages_of, policy_loss, rate_of, training_rows
from memagent import Finish, Group, Prompt, Trajectory, Turn
from models.load import inner, with_lora
from models.logprobs import Row, _HeadLogProbs, logprobs, mask_head, pack
from report.metrics import describe, describe_turns
from report.training import amiss
from tasks import worlds
from tokens.codec import Text

# max_mismatch: many rows here have made-up log-probs
CONFIG = GRPOConfig(tasks_per_step=(2,), group_size=4, steps=4, max_mismatch=99, grad_clip=1e9)


class World:
    levels = 1

    def batch(self, step, level, n):
        return [worlds.make_task(f"{step}.{i}", 1 + level, "one_fact") for i in range(n)]


def by_tokens(trajectory):
    """Reward what a random policy varies in."""
    return sum(i for t in trajectory.turns for i in t.response_ids) % 97 / 97


def module(policy, codec, reward=by_tokens, reference=None, **fields):
    """A module without a Trainer, whose learning rate is 0 unless it is given."""
    config = replace(CONFIG, **{"lr": 0.0, "warmup": 0} | fields)
    engine = TransformersEngine(inner(policy), codec)
    grpo = GRPO(policy, engine, rewarded(tiny.agent(), reward), World(), config, reference)
    grpo.optimizer = grpo.configure_optimizers()
    grpo.optimizers = lambda: grpo.optimizer
    grpo.manual_backward = lambda loss: loss.backward()
    return grpo


def gradients(policy, update):
    """Return the gradients that an update makes, by name; its optimizer steps are left out."""
    policy.zero_grad()
    update()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def updated(policy, codec, rows, reference=None, **fields):
    """Return the module's gradients and metrics of one update."""
    grpo = module(policy, codec, reference=reference, **fields)
    grpo.optimizer.step = grpo.optimizer.zero_grad = lambda: None
    grpo.metrics = {}
    return gradients(policy, lambda: grpo.update(rows)), grpo.metrics


def check_same(found, expected):
    """1e-5 of each; some are 0 in exact arithmetic, which leaves rounding of the whole."""
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert found.keys() == expected.keys() and whole > 0
    for name, g in expected.items():
        assert (found[name] - g).norm() <= 2e-5 * max(g.norm(), 0.01 * whole), name


# ---------------------------------------------------------------- the obvious


def obvious_loss(policy, rows, config, reference=None):
    """The first update after a rollout, in which old and new log-probs are the same."""
    n_tokens = sum(r.weight * len(r.response_ids) for r in rows)
    n_turns, loss = sum(r.weight for r in rows), 0.0
    turns_of = Counter()
    for r in rows:
        turns_of[r.trajectory] += r.weight
    for r in rows:
        logp = obvious_logprobs(policy, r, config.temperature[0])
        correction = (logp.detach() - torch.tensor(r.sampler)).exp()
        if config.importance == "none":
            correction = torch.ones_like(correction)
        surrogate = (logp - logp.detach()).exp() * r.advantage * correction.clamp_max(2.0)
        terms = -surrogate
        if reference is not None:
            d = obvious_logprobs(reference, r, config.temperature[0]).detach() - logp
            terms = terms + config.kl * (d.exp() - d - 1)
        share = {
            "token_mean": 1 / n_tokens,
            "turn_mean": 1 / len(logp) / n_turns,
            "trajectory_mean": 1 / len(logp) / turns_of[r.trajectory] / len(turns_of),
        }[config.aggregation]
        loss = loss + r.weight * share * terms.sum()
    return loss


# ---------------------------------------------------------------- one update, any rows

few = st.lists(st.integers(2, 4), min_size=1, max_size=8)  # few tokens, so that much is shared
rows = st.lists(
    st.builds(
        lambda prompt, response, advantage, off, weight, k: Row(
            prompt, response, [off - 2.0] * len(response), advantage, weight, k
        ),
        few, few, st.floats(-1, 1, width=16), st.floats(-3, 0, width=16),
        st.sampled_from([1.0, 2.5]), st.integers(0, 3),
    ),
    min_size=1, max_size=8,
)  # fmt: skip
ways = st.fixed_dictionaries(
    {
        "aggregation": st.sampled_from(["token_mean", "turn_mean", "trajectory_mean"]),
        "importance": st.sampled_from(["truncate", "none"]),
        "kl": st.sampled_from([0.0, 0.3]),
        "temperature": st.sampled_from([(1.0,), (0.7,)]),
        "micro_tokens": st.sampled_from([1, 20, 10**6]),
        "recompute": st.booleans(),
        "lora_rank": st.sampled_from([0, 4]),
    }
)


@settings(max_examples=20, derandomize=True)
@given(rows, ways, st.randoms(use_true_random=False))
def test_an_update_is_the_formulas(codec, rows, how, rng):
    """Whatever is shared among rows, cut into passes, recomputed, or in which order."""
    policy, config = random_policy(codec), replace(CONFIG, **how)
    if any(r.advantage for r in rows) or config.kl:
        reference = random_policy(codec, initializer_range=0.16).requires_grad_(False)
        for model in (policy, reference):
            mask_head(model, codec)
        model = with_lora(policy, config) if config.lora_rank else policy
        for name, p in model.named_parameters():
            if "lora_B" in name:  # it begins at 0, and with it the gradient of A
                torch.nn.init.normal_(p, 0, 0.1)
        given = reference if config.kl else None
        expected = gradients(
            model, lambda: obvious_loss(inner(model), rows, config, given).backward()
        )
        shuffled = rng.sample(rows, len(rows))
        found, metrics = updated(model, codec, shuffled, (given or reference), **how)
        check_same(found, expected)
        loss = obvious_loss(inner(model), rows, config, given).item()
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4) and metrics["clipped"] == 0


@pytest.mark.parametrize(
    ("logp", "advantage", "more", "loss", "gradient"),
    [
        # clip_low .2, clip_high .3; the ratio is exp(logp)
        (0.5, 1.0, {}, -1.3, 0.0),
        (-0.5, 1.0, {}, -0.6065, -0.6065),
        (0.5, -1.0, {}, 1.6487, 1.6487),
        (-0.5, -1.0, {}, 0.8, 0.0),
        (2.0, -1.0, {}, 7.389, 7.389),
        (2.0, -1.0, {"dual_clip": 3.0}, 3.0, 0.0),
        (2.0, 1.0, {"dual_clip": 3.0}, -1.3, 0.0),
        # the sampler's log-prob is 1 lower, or higher: ratio e, 1/e, at most 2
        (0.0, 1.0, {"sampler": -1.0, "importance": "truncate"}, -2.0, -2.0),
        (0.0, 1.0, {"sampler": 1.0, "importance": "truncate"}, -0.3679, -0.3679),
        (0.0, 1.0, {"sampler": -1.0}, -1.0, -1.0),
        # k3 of a reference that is 1 higher; of one far away it is clamped
        (0.0, 0.0, {"reference": 1.0, "kl": 0.5}, 0.3591, -0.8591),
        (0.0, 0.0, {"reference": 50.0, "kl": 1.0}, 10.0, 0.0),
    ],
)
def test_the_loss_of_one_token_by_hand(logp, advantage, more, loss, gradient):
    sampler, reference = more.pop("sampler", 0.0), more.pop("reference", None)
    config = replace(CONFIG, **{"clip_low": 0.2, "clip_high": 0.3, "importance": "none"} | more)
    logp = torch.tensor([logp], requires_grad=True)
    old, sampler, advantage, weight = (torch.tensor([x]) for x in (0.0, sampler, advantage, 1.0))
    reference = None if reference is None else torch.tensor([reference])
    found, _ = policy_loss(logp, old, sampler, advantage, weight, config, reference)
    found.backward()
    assert (found.item(), logp.grad.item()) == pytest.approx((loss, gradient), abs=1e-3)


@settings(max_examples=30)
@given(rows, st.integers(1, 60))
def test_pack_holds_every_row_once_within_its_budget(rows, budget):
    batches = list(pack(rows, budget))
    assert sorted(i for b in batches for i in b.index) == [*range(len(rows))]
    for b in batches:
        assert len(b.trie) <= budget or len(b.index) == 1
        assert b.trie.ids[b.places].tolist() == [t for i in b.index for t in rows[i].response_ids]


@pytest.mark.parametrize("keep", [False, True])
def test_only_what_is_asked_for_reaches_the_head_and_in_chunks(policy, monkeypatch, keep):
    rows = [Row([5, 6, 7, k], [*range(10, 30)], [0.0] * 20) for k in range(8, 12)]
    (batch,) = pack(rows, 10**6)
    whole = torch.cat([obvious_logprobs(policy, rows[i]) for i in batch.index])
    policy.config.vocab_size, seen = 1 << 24, []  # forces the chunked path
    monkeypatch.setattr("models.logprobs.KEPT_LOGITS", 1 << 40 if keep else 0)
    policy.lm_head.register_forward_hook(lambda m, i, o: seen.append(len(o)))
    head = _HeadLogProbs.logits  # with a gradient, on a CPU
    count = lambda *x: seen.append(len(x[0])) or head(*x)  # noqa: E731
    monkeypatch.setattr(_HeadLogProbs, "logits", staticmethod(count))
    for gradient in (False, True):
        seen.clear()
        with torch.set_grad_enabled(gradient):
            chunked = logprobs(policy, batch, chunk=16)
        assert torch.allclose(whole, chunked, atol=1e-6) and max(seen) == 16 and sum(seen) == 80
    seen.clear()
    chunked.sum().backward()
    assert len(seen) == (0 if keep else 5)  # computed again, or not


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_layers_run_twice_and_nothing_drops_out(policy, codec, recompute):
    calls, layer = [], policy.model.layers[1]
    grpo = module(policy.eval(), codec, recompute=recompute)
    layer.mlp.register_forward_pre_hook(
        lambda *_: calls.append((layer.mlp.training, layer.self_attn.training))
    )
    grpo.metrics = {}
    grpo.update([Row([5, 6], [7, 8], [0.0, 0.0], 1.0)])
    assert calls == [(False, False)] * (2 if recompute else 1)


# ---------------------------------------------------------------- rows of groups


def group_of(rewards, n_turns=3):
    """A group of trajectories with these rewards, None: it has none, of n updates and an answer."""
    task = Task("t", "?", ("a",), "text")
    group = Group(task, [])
    for k, reward in enumerate(rewards):
        prompts = [Prompt((), 9, final=i == n_turns) for i in range(n_turns + 1)]
        turns = [
            Turn(prompt, [i], [k + 2, i], [0.0] * 2, Finish.STOP, Text("", []))
            for i, prompt in enumerate(prompts)
        ]
        trajectory = Trajectory(task, turns, k, reward)
        (group.left_out if reward is None else group.trajectories).append(trajectory)
    return group


@pytest.mark.parametrize(
    ("rewards", "fields", "expected"),  # advantages of each trajectory's turns
    [
        ([1.0] * 4 + [0.0] * 12, {}, [0.75] * 4 + [-0.25] * 12),
        ([1.0] * 4 + [0.0] * 12, {"normalisation": "std"}, [1.677] * 4 + [-0.559] * 12),
        ([1.0, 0.0], {"credit": "split"}, [0.125, -0.125]),
        ([1.0], {}, [1.0]),  # sampled alone
        ([1.0, 1.0], {}, []),  # no signal
        ([1.0, 1.0], {"without_signal": "keep"}, [0.0, 0.0]),
        ([1.0, None, 0.0], {}, [0.5, -0.5]),  # what has no reward plays no part
        ([1.0, None], {}, []),  # left alone in its group
        ([1.0, None], {"without_signal": "keep"}, [0.0]),
    ],
)
def test_the_advantages_of_a_groups_rows(rewards, fields, expected):
    config = replace(CONFIG, **{"normalisation": "mean"} | fields)
    rows = training_rows([group_of(rewards)], config)
    of = {r.trajectory: r.advantage for r in rows}
    assert len(rows) == 4 * len(of) and [*of.values()] == pytest.approx(expected, abs=1e-3)


def test_turns_drawn_at_random_are_weighted_to_stay_unbiased():
    group, config = group_of([1.0, 1.0, 1.0, 0.0], 4), replace(CONFIG, turns_per_trajectory=2)
    mean, draws = Counter(), 400
    for seed in range(draws):
        rows = training_rows([group], config, seed=seed)
        assert rows == training_rows([group], config, seed=seed)
        weights = [[r.weight for r in rows if r.trajectory == t] for t in range(4)]
        assert weights == [[2.0, 2.0, 1.0]] * 3 + [[1.0] * 5]  # the rare failure is trained whole
        for r in rows:
            mean[r.trajectory, r.prompt_ids[0]] += r.weight / draws
    assert len(mean) == 20 and all(m == pytest.approx(1, abs=0.25) for m in mean.values())


# ---------------------------------------------------------------- steps


def steps(grpo, n):
    """Do n steps; return their metrics, each with whether weights have moved."""
    found = []
    for _ in range(n):
        before = [p.clone() for p in grpo.model.parameters()]
        grpo.training_step(None, 0)
        pairs = zip(before, grpo.model.parameters(), strict=True)
        found.append(grpo.metrics | {"moved": not all(torch.equal(a, b) for a, b in pairs)})
    return found


def test_a_step_samples_trains_and_says_what_was_read_shared_and_computed(policy, codec):
    for m in steps(module(policy, codec, lr=1e-2, group_size=16), 2):
        assert m["moved"] and 0 < m["mismatch"] < 1e-5
        assert m["prefilled_tokens"] + m["reused_tokens"] == m["read_tokens"]
        assert m["generated_tokens"] == m["written_tokens"] == m["trained_tokens"]
        assert m["turn_tokens"] == m["read_tokens"] + m["written_tokens"]
        assert m["trained_tokens"] < m["computed_tokens"] < 0.7 * m["turn_tokens"]
    (silent,) = steps(module(policy, codec, reward=lambda t: 1.0), 1)
    assert silent.keys() == m.keys() and not silent["moved"] and not silent["computed_tokens"]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_kl_is_zero_at_first_and_its_reference_stays(policy, codec, lora_rank):
    config = replace(CONFIG, lora_rank=lora_rank)
    reference = None if lora_rank else copy.deepcopy(policy).requires_grad_(False)
    model = with_lora(policy, config) if lora_rank else policy
    fixed = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    grpo = module(model, codec, lr=1e-2, kl=0.1, lora_rank=lora_rank, reference=reference)
    kls = [m["kl"] for m in steps(grpo, 2)]
    assert abs(kls[0]) < 1e-6 < kls[-1]
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in fixed.items())
    assert not any("reference" in name for name in grpo.state_dict())


def test_several_updates_per_rollout_use_the_log_probs_from_before(policy, codec):
    grpo = module(policy, codec, lr=1e-2, updates_per_rollout=3, importance="none")
    n, step = [], grpo.optimizer.step
    grpo.optimizer.step = lambda: (n.append(1), step())
    (m,) = steps(grpo, 1)
    assert len(n) == 3 and abs(m["ratio"] - 1) > 1e-4  # the later ones are off policy


def test_tasks_grow_when_they_are_learnt_and_have_a_temperature_each(policy, codec):
    fields = dict(temperature=(0.5, 1.7), grow_steps=1, grow_at=0.9)
    first, second = steps(module(policy, codec, lambda t: 1 + by_tokens(t), **fields), 2)
    assert (first["level"], second["level"]) == (0, 1) and second["mismatch"] < 1e-5
    assert first["surprisal"] < second["surprisal"] - 0.01  # hotter
    not_learnt = module(policy, codec, lambda t: 0.0, **fields)
    assert [m["level"] for m in steps(not_learnt, 2)] == [0, 0]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(policy, codec):
    grpo = module(policy, codec, lr=1e-2)
    grpo.manual_backward = lambda loss: (loss * math.nan).backward()
    (m,) = steps(grpo, 1)
    assert m["skipped_updates"] == 1 and not m["moved"]


class Stale(TransformersEngine):
    """Never takes the trainer's weights over."""

    def awake(self, policy=None):
        return super().awake()


@pytest.mark.parametrize(("reward", "updates"), [(by_tokens, 3), (lambda t: 1.0, 1)])
def test_a_sampler_with_other_weights_stops_the_run(policy, codec, reward, updates):
    grpo = module(policy, codec, reward, lr=1e-3, max_mismatch=0.0, updates_per_rollout=updates)
    grpo.engine = Stale(copy.deepcopy(policy), codec)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(UserError, match="does not sample from the trained weights"):
        grpo.training_step(None, 3)  # not at a step that proves the weights
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("reward", "window", "says"),
    [
        (by_tokens, 10, "Every trajectory of step 0 failed.*window of 10"),
        (lambda t: None, None, "no trajectory of the first step a reward"),
        (lambda t: math.nan, None, "returned nan for the task 'one_fact-"),
    ],
)
def test_a_step_from_which_nothing_can_be_learnt_ends_the_run(policy, codec, reward, window, says):
    grpo = module(policy, codec, reward)
    grpo.engine.window = window or grpo.engine.window
    with pytest.raises(UserError, match=says):
        grpo.training_step(None, 0)


@pytest.mark.parametrize(
    ("warmup_from", "rates"),
    [
        ("share", {0: 0.05, 1: 0.1, 19: 1.0, 399: 1.0}),
        ("zero", {0: 0.0, 1: 0.05, 19: 0.95, 20: 1.0}),
    ],
)
def test_the_rate_warms_up(warmup_from, rates):
    config = replace(CONFIG, lr=1.0, warmup=20, steps=400, warmup_from=warmup_from)
    assert {step: rate_of(config, step) for step in rates} == pytest.approx(rates)
    assert rate_of(replace(config, decay_from=0.5), 300) == pytest.approx(0.55)


@pytest.mark.parametrize("failed", [[0], [1, 2, 4, 5], [0, 1, 2], [*range(6)]])
def test_readings_that_a_server_failed_are_left_out_and_counted(policy, codec, failed):
    """One of six; all but one of each group; a whole group; all of a step, which ends the run."""

    def paid(trajectory):
        if int(trajectory.task.id[-1]) * 3 + trajectory.sample in failed:
            raise ServerFailed("The judge cannot be used: HTTP 503.")
        return float(trajectory.sample)

    grpo = module(policy, codec, paid, group_size=3)
    if len(failed) == 6:
        grpo.done_steps = 2
        with pytest.raises(UserError, match=r"step 2 failed: .*HTTP 503.*--resume goes on"):
            grpo.training_step(None, 1)
        return
    (m,) = steps(grpo, 1)
    n, left = len(failed), [t.sample for group in grpo.groups for t in group.trajectories]
    assert (m["faults"], m["unrewarded"], len(left)) == (n, n, 6 - n)
    assert len(amiss(m)) == 1 and m["reward"] == pytest.approx(sum(left) / len(left))
    turns = [len(t.turns) for group in grpo.groups if group.signal for t in group.trajectories]
    assert m["trained_rows"] == sum(turns) and bool(turns) is (n != 4)
    assert m["groups_without_signal"] == {1: 0, 4: 1, 3: 0.5}[n]


def test_a_later_step_without_any_reward_goes_by(policy, codec):
    grpo = module(policy, codec, lambda t: None)
    grpo.done_steps = grpo.level_steps = 1
    grpo.training_step(None, 1)
    m = grpo.metrics
    assert math.isnan(m["reward"]) and grpo.running == 0.0 and m["unrewarded"] == 8
    assert 0 < m["mismatch"] < 1e-4  # what was sampled is checked
    grpo.validation = [*worlds.make_tasks(0, 2, 1, "one_fact")]
    assert math.isnan(grpo.validate()["score"]) and grpo.validated["n"] == 0


@pytest.mark.parametrize(
    ("rows_per_update", "updates"), [(0, 1), (6, 4), (7, 3), (24, 1), (64, 1), (1, 8)]
)
def test_longer_documents_make_more_updates_each_of_whole_trajectories(
    policy, codec, rows_per_update, updates
):
    rows = [Row([5, 9], [9 + k, 7], [0.0] * 2, float(k % 3 - 1), 1.0, k // 3) for k in range(24)]
    grpo, parts = module(policy, codec, rows_per_update=rows_per_update), []
    gradient_of = grpo.gradient
    grpo.gradient = lambda part, old: parts.append(part) or gradient_of(part, old)
    grpo.metrics = {}
    grpo.update(rows)
    assert len(parts) == updates and [r for part in parts for r in part] == rows
    trajectories = [{r.trajectory for r in part} for part in parts]
    assert sum(map(len, trajectories)) == len(set().union(*trajectories)) == 8


def test_a_step_describes_all_that_was_sampled():
    """Trajectories without a reward count as sampled, and play no part in means of rewards."""
    groups = [group_of([1.0, None, 0.0]), group_of([None, None, 0.5])]
    m = describe(groups, {}) | describe_turns(groups, tiny.agent())
    assert (m["reward"], m["unrewarded"], m["groups_without_signal"]) == (0.5, 3, 0.5)
    assert (m["read_tokens"], m["written_tokens"], m["turns"]) == (24, 48, 4)
    for turn in groups[1].trajectories[0].turns:
        turn.rewards = {"own": 1.0}
    alone = advantages_of(groups[1], replace(CONFIG, alpha=0.5))
    assert {a for turns in alone for a in turns} == {0.0}  # of turns likewise


def test_presets_are_the_published_settings():
    wanted = {
        "paper": dict(group_size=16, tasks_per_step=(128,), updates_per_rollout=16, credit="share",
                      normalisation="mean", clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl=1e-3,
                      lr=1e-6, chunk_tokens=5000, memory_tokens=1024, max_sections=8,
                      over="center", layout="paper"),
        "vime": dict(group_size=8, credit="split", aggregation="turn_mean", clip_high=0.3,
                     lr=1e-6, chunk_tokens=2048, final_tokens=256, over="head", empty="keep"),
    }  # fmt: skip
    for preset, fields in wanted.items():
        config, agent = find.resolve(preset, "", {}, {})
        for name, value in fields.items():
            assert getattr(config if hasattr(config, name) else agent.config, name) == value, name
    assert {*find.presets()} == {"default", "demo", "paper", "rememr1", "vime"}
