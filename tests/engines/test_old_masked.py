"""Ids that no response may have: neither the sampler nor the trainer gives them any probability.

The model has more rows than the tokenizer has tokens, as Qwen2.5 does.
"""

import numpy as np
import pytest
import torch
from conftest import random_policy

import models.logprobs as module
from config.errors import UserError
from config.options import GRPOConfig
from embedded import tiny
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from memagent import Prompt
from models.load import inner, with_lora
from models.logprobs import Row, logprobs, mask_head, pack
from rollout import Sampling, rollout
from tasks import worlds

ROWS = 1000  # of the lm_head; the tokenizer has 426 tokens
PAD = 0  # special, and no end of a response


@pytest.fixture
def padded(codec):
    return random_policy(codec, vocab_size=ROWS)


def obvious(policy, row, temperature=1.0):
    """Return log-probs [response ids], in plain sight over the tokens that may be said."""
    ids, p = torch.tensor([row.prompt_ids + row.response_ids]), len(row.prompt_ids)
    hidden = policy.model(input_ids=ids).last_hidden_state[0, p - 1 : -1]
    scores = (hidden.float() @ policy.lm_head.weight.float().t())[:, PAD + 1 : 426] / temperature
    return scores.log_softmax(-1).gather(1, ids[0, p:, None] - PAD - 1)[:, 0]


def sampled(policy, codec, sampling, n=6):
    engine = TransformersEngine(policy, codec)
    jobs = [(task, 0) for task in worlds.make_tasks(0, n, 3, "one_fact")]
    done = list(rollout(engine, tiny.agent(), jobs, sampling))
    return [turn for t in done for turn in t.turns]


def one(engine):
    while not (done := engine.step()):
        pass
    return done[0][1]


def row_of(turn):
    return Row(turn.prompt_ids, turn.response_ids, turn.logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_on_a_model_with_more_rows_than_tokens(
    codec, padded, temperature, monkeypatch
):
    before = padded(torch.tensor([[5, 6, 7]])).logits.softmax(-1)
    assert before[..., 426:].sum(-1).min() > 0.3  # they would be sampled
    turns = sampled(padded, codec, Sampling(temperature))
    assert all(PAD < i < 426 for turn in turns for i in turn.response_ids)
    assert all(PAD < i < 426 for turn in turns for i in turn.response.ids)  # what is carried on
    rows = [row_of(turn) for turn in turns]
    (batch,) = pack(rows, 10**6)
    expected = torch.cat([obvious(padded, rows[i], temperature) for i in batch.index])
    assert torch.allclose(batch.sampler, expected, atol=1e-5)
    gradients = []
    for chunked, kept in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(padded.config, "vocab_size", 1 << 24 if chunked else ROWS)
        monkeypatch.setattr(module, "KEPT_LOGITS", 1 << 40 if kept else 0)
        for _ in range(1):
            padded.zero_grad()
            logp = logprobs(padded, batch, temperature, chunk=16)
            assert torch.allclose(logp, batch.sampler, atol=1e-5)
            logp.sum().backward()
            gradients.append(padded.lm_head.weight.grad.clone())
    padded.zero_grad()
    expected.sum().backward()
    gradient = padded.lm_head.weight.grad
    assert not gradient[426:].any() and not gradient[PAD].any() and gradient.norm() > 1
    for other in gradients:
        assert (other - gradient).norm() < 1e-5 * gradient.norm()


def test_greedily_in_16_bits_and_in_transformers_own_way_nothing_of_it_is_said(codec, padded):
    with torch.no_grad():
        padded.lm_head.weight[500] = 4 * padded.lm_head.weight[300]  # often the most probable
    (turn, *_) = sampled(padded, codec, Sampling(0.0), 1)
    ids = torch.tensor([turn.prompt_ids])
    said = padded.generate(ids, max_new_tokens=len(turn.response_ids), do_sample=False)
    assert said[0, ids.shape[1] :].tolist() == turn.response_ids
    half = padded.to(torch.bfloat16)
    turns = sampled(half, codec, Sampling(1.0, 0.9), 2)
    assert all(PAD < i < 426 for turn in turns for i in turn.response_ids)
    turns = sampled(half, codec, Sampling(1.0), 2)
    (batch,) = pack([row_of(turn) for turn in turns], 10**6)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            ours = logprobs(half, batch)
        assert ours.isfinite().all() and (ours - batch.sampler).abs().mean() < 0.05


def test_the_policy_before_training_says_what_the_trainers_reference_has(codec, padded):
    policy = with_lora(padded, GRPOConfig(lora_rank=4))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.add_(0.3 * torch.randn_like(p))
    lm = inner(policy)
    engines = TransformersEngine(lm, codec), TransformersEngine(lm, codec)
    engine = WithFrozen(*engines, policy.disable_adapter)
    engine.add(Prompt((("Who? ", False),), 9, frozen=True), Sampling(), 0)
    turn = one(engine)
    (batch,) = pack([row_of(turn)], 99)
    with policy.disable_adapter(), torch.no_grad():
        assert torch.allclose(logprobs(lm, batch), torch.tensor(turn.logprobs), atol=1e-5)
        assert torch.allclose(obvious(lm, row_of(turn)), torch.tensor(turn.logprobs), atol=1e-5)


def test_what_is_never_said_is_not_learnt(codec, padded):
    mask_head(padded, codec)
    for wrong in (PAD, 426, 999):
        (batch,) = pack([Row([5, 6], [7, wrong], [0.0, 0.0])], 99)
        with pytest.raises(UserError, match=f"holds the token {wrong}, which the policy never"):
            logprobs(padded, batch)
    # a rank without rows takes part with one that has no weight
    (batch,) = pack([Row([0], [codec.end_id], [])], 2)
    batch.index = []
    assert logprobs(padded, batch).isfinite().all()


def test_the_mask_is_no_weight_and_comes_once(codec, padded):
    names = [*padded.state_dict()]
    for _ in range(2):
        mask_head(padded, codec)
    assert [*padded.state_dict()] == names and len(padded.lm_head._forward_hooks) == 1
    assert np.array_equal(padded.lm_head.masked.numpy(), [PAD, *range(426, ROWS)])
