"""Ids that no response may have: neither the sampler nor the trainer gives them any probability.

The model has more rows than the tokenizer has tokens, as Qwen2.5 does.
"""

import numpy as np
import pytest
import torch
from conftest import obvious_logprobs, random_policy
from test_frozen import pair, turn_of

import models.logprobs as module
from config.errors import UserError
from embedded import tiny
from engines.hf import TransformersEngine
from engines.proof import row_of
from memagent import Prompt
from models.load import inner
from models.logprobs import Row, logprobs, mask_head, pack
from rollout import Sampling, rollout
from tasks import worlds

ROWS, SAID = 1000, (1, 426)  # of the lm_head, and those of tokens that a response may have


@pytest.fixture
def padded(codec):
    return random_policy(codec, vocab_size=ROWS)


def sampled(policy, codec, sampling, n=6):
    """Sample turns, which say what may be said, and return them and their batch of rows."""
    engine = TransformersEngine(policy, codec)
    jobs = [(task, 0) for task in worlds.make_tasks(0, n, 3, "one_fact")]
    turns = [turn for t in rollout(engine, tiny.agent(), jobs, sampling) for turn in t.turns]
    for turn in turns:  # the response is what is carried on
        assert all(i in range(*SAID) for i in [*turn.response_ids, *turn.response.ids])
    return turns, *pack([row_of(turn) for turn in turns], 10**6)


class Head(torch.nn.Linear):
    """A head that is none of torch's own, so that it is called."""


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_on_a_model_with_more_rows_than_tokens(
    codec, padded, temperature, monkeypatch
):
    before = padded(torch.tensor([[5, 6, 7]])).logits.softmax(-1)
    assert before[..., SAID[1] :].sum(-1).min() > 0.3  # they would be sampled
    turns, batch = sampled(padded, codec, Sampling(temperature))
    plain = random_policy(codec, vocab_size=ROWS)  # the same weights, and nothing is masked
    expected = torch.cat(
        [obvious_logprobs(plain, turns[i], temperature, SAID) for i in batch.index]
    )
    assert torch.allclose(batch.sampler, expected, atol=1e-5)
    expected.sum().backward()
    gradient = plain.lm_head.weight.grad
    assert not gradient[SAID[1] :].any() and not gradient[0].any() and gradient.norm() > 1
    for vocabulary, kept, head in (
        (ROWS, 0, torch.nn.Linear),
        (1 << 24, 0, torch.nn.Linear),  # in chunks, whose logits are computed again
        (1 << 24, 1 << 40, torch.nn.Linear),  # or kept
        (1 << 24, 0, Head),
    ):
        monkeypatch.setattr(padded.config, "vocab_size", vocabulary)
        monkeypatch.setattr(module, "KEPT_LOGITS", kept)
        padded.lm_head.__class__ = head
        padded.zero_grad()
        logp = logprobs(padded, batch, temperature, chunk=16)
        assert torch.allclose(logp, batch.sampler, atol=1e-5)
        logp.sum().backward()
        assert (padded.lm_head.weight.grad - gradient).norm() < 1e-5 * gradient.norm()


def test_greedily_in_16_bits_and_in_transformers_own_way_nothing_of_it_is_said(codec, padded):
    with torch.no_grad():
        padded.lm_head.weight[500] = 4 * padded.lm_head.weight[300]  # often the most probable
    (turn, *_), _ = sampled(padded, codec, Sampling(0.0), 1)
    ids = torch.tensor([turn.prompt_ids])
    said = padded.generate(ids, max_new_tokens=len(turn.response_ids), do_sample=False)
    assert said[0, ids.shape[1] :].tolist() == turn.response_ids
    half = padded.to(torch.bfloat16)
    sampled(half, codec, Sampling(1.0, 0.9), 2)
    _, batch = sampled(half, codec, Sampling(1.0), 2)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            ours = logprobs(half, batch)
        assert ours.isfinite().all() and (ours - batch.sampler).abs().mean() < 0.05


def test_the_policy_before_training_says_what_the_trainers_reference_has(codec):
    policy, engine = pair(codec, vocab_size=ROWS)
    turn = turn_of(engine, Prompt((("Who? ", False),), 9, frozen=True), Sampling())
    (batch,) = pack([row_of(turn)], 99)
    with policy.disable_adapter(), torch.no_grad():
        for logp in (logprobs(inner(policy), batch), obvious_logprobs(policy, turn, 1.0, SAID)):
            assert torch.allclose(logp, torch.tensor(turn.logprobs), atol=1e-5)


def test_what_is_never_said_is_not_learnt(codec, padded):
    names = [*padded.state_dict()]
    for _ in range(2):  # the mask is no weight and comes once
        mask_head(padded, codec)
    assert [*padded.state_dict()] == names and len(padded.lm_head._forward_hooks) == 1
    assert np.array_equal(padded.lm_head.masked.numpy(), [0, *range(SAID[1], ROWS)])
    for wrong in (0, 426, 999):
        (batch,) = pack([Row([5, 6], [7, wrong], [0.0, 0.0])], 99)
        with pytest.raises(UserError, match=str(wrong)):
            logprobs(padded, batch)
    # a rank without rows takes part with one that has no weight
    (batch,) = pack([Row([0], [codec.end_id], [])], 2)
    batch.index = []
    assert logprobs(padded, batch).isfinite().all()
