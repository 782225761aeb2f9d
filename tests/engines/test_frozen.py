"""What is asked beside the trained policy, and what no policy ever says."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import obvious_logprobs, random_policy
from test_seams import CONFIG, jobs

import models.logprobs as module
from config.errors import UserError
from config.options import GRPOConfig
from embedded import tiny
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.proof import row_of
from engines.scripted import ScriptedEngine
from memagent import Agent, Prompt
from models.load import inner, with_lora
from models.logprobs import Row, logprobs, mask_head, pack
from rollout import Sampling, rollout
from tokens.codec import Text

ROWS, SAID = 1000, (1, 426)  # of the lm_head, and those of tokens that a response may have
WHO = Prompt((("Who?", False),), 9)


def turn_of(engine, prompt, sampling=Sampling(0.0)):
    key = engine.add(prompt, sampling, 0)
    while not (done := engine.step()):
        pass
    assert [k for k, _ in done] == [key]
    return done[0][1]


def pair(codec):
    """A policy with adapters that have moved, and one engine over it with and without them."""
    policy = with_lora(random_policy(codec, vocab_size=ROWS), GRPOConfig(lora_rank=4))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.add_(0.3 * torch.randn_like(p))
    engines = (TransformersEngine(policy.get_base_model(), codec) for _ in range(2))
    return policy, WithFrozen(*engines, policy.disable_adapter)


# ---------------------------------------------------------------- two engines behind one


class Talk(Agent):
    """Goes on in one conversation, whoever answers."""

    frozen_turns = True
    prompts = {"say": "{problem}", "ask": "Who? {memory}", "last": "{memory}"}

    def run(self, task):
        first = yield self.prompt("say", 6, problem=self.codec.text(task.question))
        asked = yield self._ask(first)
        again = yield self._ask(asked)
        last = self.prompt("last", 6, final=True, memory=again.response)
        yield replace(last, after=again)

    def _ask(self, turn):
        prompt = self.prompt("ask", 6, memory=turn.response)
        return replace(prompt, frozen=True, after=turn)


def test_each_goes_on_from_the_others_turns_and_has_the_trainers_numbers(codec):
    policy, engine = pair(codec)
    (done,) = rollout(engine, Talk(CONFIG), jobs(1, 1), Sampling(1.0))
    assert [turn.prompt.frozen for turn in done.turns] == [False, True, True, False]
    for turn in done.turns:
        (batch,) = pack([row_of(turn)], 999)
        frozen = policy.disable_adapter() if turn.prompt.frozen else nullcontext()
        with frozen, torch.no_grad():
            for logp in (logprobs(inner(policy), batch), obvious_logprobs(policy, turn, 1.0, SAID)):
                assert torch.allclose(logp, torch.tensor(turn.logprobs), atol=1e-5)
    first, asked, again, _ = done.turns
    for before, after in ((first, asked), (asked, again)):
        said = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(said)] == said
    assert engine.counts()["generated_tokens"] == sum(len(t.response_ids) for t in done.turns)


class Phases(ScriptedEngine):
    """Notes when it is awake, and with which policy."""

    def __init__(self, codec, name, log):
        super().__init__(codec, lambda _: name)
        self.name, self.log = name, log

    @contextmanager
    def awake(self, policy=None):
        self.log.append((self.name, policy))
        try:
            yield
        finally:
            self.log.append((self.name, "asleep"))


def test_both_are_awake_together_and_the_weights_go_to_the_first(codec):
    log = []
    engine = WithFrozen(Phases(codec, "own", log), Phases(codec, "other", log))
    with pytest.raises(KeyError), engine.awake("weights"):
        assert log == [("own", "weights"), ("other", None)]
        assert turn_of(engine, replace(WHO, frozen=True)).response == " other"
        assert turn_of(engine, WHO).response == " own"
        raise KeyError
    assert log[2:] == [("other", "asleep"), ("own", "asleep")]


def test_the_very_tokens_are_asked_and_any_prompt_can_be_given_up(codec):
    engine = WithFrozen(*(ScriptedEngine(codec, lambda _: "Lima") for _ in range(2)))
    prompt = Prompt(((Text("Anna", [7, 8, 9]), False),), 4, frozen=True)
    assert turn_of(engine, prompt).prompt_ids == [7, 8, 9]
    prompts = [replace(prompt, frozen=frozen) for frozen in (False, True) * 2]
    keys = [engine.add(prompt, Sampling(0.0), 0) for prompt in prompts]
    for key in (keys[0], keys[1], keys[1]):
        engine.drop(key)
    assert {key for key, _ in engine.step()} == {*keys[2:]}
    assert not engine._asked and engine.step() == []


# ---------------------------------------------------------------- what no response may have


def sampled(policy, codec, sampling, n=6):
    """Sample turns, which say what may be said, and return them and their batch of rows."""
    done = rollout(TransformersEngine(policy, codec), tiny.agent(), jobs(n, 1), sampling)
    turns = [turn for t in done for turn in t.turns]
    for turn in turns:  # the response is what is carried on
        assert all(i in range(*SAID) for i in [*turn.response_ids, *turn.response.ids])
    return turns, *pack([row_of(turn) for turn in turns], 10**6)


class Head(torch.nn.Linear):
    """A head that is none of torch's own, so that it is called."""


@pytest.fixture
def padded(codec):
    """A model with more rows than the tokenizer has tokens, as Qwen2.5 has."""
    return random_policy(codec, vocab_size=ROWS)


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
