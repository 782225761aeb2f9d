"""Two engines behind one: who is asked, and what of it comes back."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import random_policy, worst_mismatch
from test_seams import CONFIG, jobs

from config.options import GRPOConfig
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from memagent import Agent, Prompt
from models.load import with_lora
from rollout import Sampling, rollout
from tokens.codec import Text


def turn_of(engine, prompt, sampling=Sampling(0.0)):
    key = engine.add(prompt, sampling, 0)
    while not (done := engine.step()):
        pass
    assert [k for k, _ in done] == [key]
    return done[0][1]


def pair(codec, **other):
    """A policy with adapters that have moved, and one engine over it with and without them."""
    policy = with_lora(random_policy(codec, **other), GRPOConfig(lora_rank=4))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.add_(0.3 * torch.randn_like(p))
    engines = (TransformersEngine(policy.get_base_model(), codec) for _ in range(2))
    return policy, WithFrozen(*engines, policy.disable_adapter)


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


def test_each_goes_on_from_the_others_turns(codec):
    policy, engine = pair(codec)
    (done,) = rollout(engine, Talk(CONFIG), jobs(1, 1), Sampling(1.0))
    assert [turn.prompt.frozen for turn in done.turns] == [False, True, True, False]
    for turn in done.turns:
        with policy.disable_adapter() if turn.prompt.frozen else nullcontext():
            assert worst_mismatch(policy, [turn]) < 1e-4
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
        assert turn_of(engine, Prompt((("Who?", False),), 9, frozen=True)).response == " other"
        assert turn_of(engine, Prompt((("Who?", False),), 9)).response == " own"
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
