"""examples/minimal.py is the oracle: the product samples and learns what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import minimal

from config.options import EMBEDDED, GRPOConfig
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import GRPO, advantages_of, training_rows
from models.load import load_model
from models.logprobs import mask_head
from tasks.worlds import make_task
from tokens.codec import Codec

TEMPERATURE, G = 1.6, 4
CONFIG = GRPOConfig(
    tasks_per_step=(6,), group_size=G, normalisation="mean", temperature=(TEMPERATURE,)
)


@pytest.fixture(scope="module")
def both():
    """What the product and the example sample of six tasks: its module and groups, and the
    example's model and trajectories."""
    tasks = [make_task(f"0.{k}", 2, "one_fact") for k in range(6)]
    settings = minimal.Settings()
    model = minimal.AutoModelForCausalLM.from_pretrained(settings.model)
    tokenizer = minimal.AutoTokenizer.from_pretrained(settings.model)
    seed = minimal.seed_of(CONFIG.seed, 0)  # of the first step
    plain = minimal.rollout(model, tokenizer, tasks, G, TEMPERATURE, seed, settings)

    policy, codec = load_model(EMBEDDED, device="cpu"), Codec(tokenizer)
    mask_head(policy, codec)
    engine = TransformersEngine(policy, codec)
    module = GRPO(policy, engine, tiny.agent("memagent"), None, CONFIG)
    with engine.awake(policy):
        groups = module.sample(tasks, seed)
    return module, groups, model, plain


def test_both_sample_the_same_trajectories(both):
    _, groups, _, plain = both
    ours = [trajectory for group in groups for trajectory in group.trajectories]
    assert [(t.task.id, t.sample, t.reward) for t in ours] == [
        (t.task.id, t.sample, t.reward) for t in plain
    ]
    assert {t.reward for t in plain} == {0.0, 1.0}
    for one, other in zip(ours, plain, strict=True):
        assert [(t.prompt_ids, t.response_ids) for t in one.turns] == [
            (t.prompt, t.response) for t in other.turns
        ]
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.logprobs == pytest.approx(b.sampled, abs=5e-5)


def test_both_have_the_same_advantages_loss_and_gradient(both):
    module, groups, model, plain = both
    settings = minimal.Settings(group_size=G, rows_per_pass=10)
    pairs = minimal.training_rows(plain, G)
    rows = training_rows(groups, CONFIG)
    assert len(rows) == len(pairs) > 10
    assert [row.advantage for row in rows] == pytest.approx([a for _, a in pairs], abs=1e-6)
    assert [turn for group in groups for turns in advantages_of(group, CONFIG) for turn in turns]

    parts = [*minimal.losses(model, pairs, TEMPERATURE, settings)]
    sum(parts).backward()
    module.manual_backward = torch.Tensor.backward
    sums = module.gradient(rows, None)
    # at a ratio of 1 the loss is the mean of the advantages, whatever the log-probs
    assert sums["loss"] == pytest.approx(sum(parts).item(), abs=1e-5)
    ours = dict(module.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)
