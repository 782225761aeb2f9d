"""Two engines behind one: who is asked, in whose tokens, and who waits for whom."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import HANG_S, random_policy
from test_endpoint import Server
from test_seams import CONFIG, Probes, jobs

from dev import keeper
from engines import frozen
from engines.endpoint import EndpointEngine
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from memagent import Agent, Finish, Prompt
from rollout import Sampling, rollout
from tokens.codec import Characters, Codec, Text


@pytest.fixture(scope="module")
def other_codec():
    return Codec(keeper.make_tokenizer())


@pytest.fixture
def server(codec):
    made = Server(codec)
    yield made
    made.stop()


def at_server(server):
    return EndpointEngine(server.url, "m", Characters(), chat=True)


def turn_of(engine, prompt, sampling=Sampling(0.0)):
    key = engine.add(prompt, sampling, 0)
    while not (done := engine.step()):
        pass
    assert [k for k, _ in done] == [key]
    return done[0][1]


def logprobs(model, turn):
    """Return the log-probs of a response in the obvious way."""
    ids = torch.tensor([turn.prompt_ids + turn.response_ids])
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
    return [logp[k - 1, ids[0, k]].item() for k in range(len(turn.prompt_ids), ids.shape[1])]


def disturbed(policy):
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(0.3 * torch.randn_like(p))
    return policy


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


def test_another_models_tokens_are_its_own_and_the_agents_texts_are_the_policys(codec, other_codec):
    policy, other = random_policy(codec), disturbed(random_policy(other_codec))
    engine = WithFrozen(TransformersEngine(policy, codec), TransformersEngine(other, other_codec))
    (done,) = rollout(engine, Talk(CONFIG), jobs(1, 1), Sampling(1.0))
    first, asked, again, last = done.turns
    for turn in done.turns:
        model = other if turn.prompt.frozen else policy
        assert logprobs(model, turn) == pytest.approx(turn.logprobs, abs=1e-4)
    for turn in (asked, again):  # what the agent is given can stand in a prompt of the policy
        assert turn.response.ids == codec.encode(str(turn.response))
    end = [codec.tokenizer.eos_token_id]

    def said(codec, turn):
        return [*codec.encode(str(turn.response)), *(turn.finish is Finish.STOP) * end]

    # each goes on from its own very tokens, and reads what the other one said as text
    who, question, answer = "Who? ", first.prompt.text, str(first.response)
    assert asked.prompt_ids == [
        *other_codec.encode(question), *said(other_codec, first),
        *other_codec.fixed(who), *other_codec.encode(answer),
    ]  # fmt: skip
    assert again.prompt_ids == [
        *asked.prompt_ids, *asked.response_ids,
        *other_codec.fixed(who), *other_codec.encode(str(asked.response)),
    ]  # fmt: skip
    assert last.prompt_ids == [
        *first.prompt_ids, *first.response_ids,
        *codec.fixed(who), *first.response.ids, *said(codec, asked),
        *codec.fixed(who), *asked.response.ids, *said(codec, again), *again.response.ids,
    ]  # fmt: skip
    assert engine.counts()["generated_tokens"] == sum(len(t.response_ids) for t in done.turns)


def test_a_server_is_asked_in_text(codec, server):
    engine = WithFrozen(ScriptedEngine(codec, lambda _: "Lima"), at_server(server))
    with engine.awake():
        (done,) = rollout(engine, Probes(CONFIG), jobs(1, 1))
        asked = [turn for turn in done.turns if turn.prompt.frozen]
        assert len(asked) == 2 and engine.counts()["generated_tokens"] > 0
        for turn, body in zip(asked, server.bodies, strict=True):
            assert body["messages"] == [{"role": "user", "content": turn.prompt.text}]
            assert turn.response == f" Anna joined {len(turn.prompt.text)} Boris."
            assert turn.response.ids == codec.encode(str(turn.response))
    assert not any(turn.logprobs for turn in asked)


def test_a_turn_that_the_server_refuses_fails_its_trajectory_alone(codec, server):
    server.faults = ["", (400, {"error": "no"})]
    engine = WithFrozen(ScriptedEngine(codec, lambda _: "Lima"), at_server(server))
    with engine.awake():
        done = list(rollout(engine, Probes(CONFIG), jobs(1, 2), in_flight=1))
    failed, fine = sorted(done, key=lambda t: not t.error)
    assert "HTTP 400: no" in failed.error and failed.turns[-1].prompt.frozen and not failed.answer
    assert not fine.error and fine.answer == " Lima"


@pytest.mark.parametrize("policy_at_server", [False, True])
def test_a_server_that_takes_long_holds_up_nobody(codec, server, policy_at_server):
    let, asked = threading.Event(), Prompt((("Who?", False),), 4, frozen=True)
    server.on_request = lambda number: number == 1 and let.wait(HANG_S)
    here = ScriptedEngine(codec, lambda _: "Lima")
    pair = (at_server(server), here) if policy_at_server else (here, at_server(server))
    engine = WithFrozen(*pair)
    slow = replace(asked, frozen=not policy_at_server)
    with engine.awake():
        held = engine.add(slow, Sampling(), 0)
        quick = engine.add(replace(slow, frozen=policy_at_server), Sampling(), 0)
        assert [key for key, _ in engine.step()] == [quick]
        let.set()
        assert [key for key, _ in engine.step()] == [held]


def test_two_servers_are_waited_for_in_turn_and_number_their_pieces_apart(
    codec, server, monkeypatch
):
    monkeypatch.setattr(frozen, "MOMENT_S", 0.001)
    engine = WithFrozen(at_server(server), at_server(server))
    prompt = Prompt((("Who?", False),), 4)
    text = engine.codec.text("abcdefgh")
    engine.frozen.codec.encode("12345678")
    with engine.awake():
        keys = {engine.add(replace(prompt, frozen=k % 2 == 0), Sampling(), 0) for k in range(6)}
        while keys:
            keys -= {key for key, _ in engine.step()}
        assert len(server.bodies) == 6 and engine.step() == []
        turn = turn_of(engine, Prompt(((text, False),), 4, frozen=True))
    assert str(engine.frozen.codec.decode(turn.prompt_ids)) == "abcdefgh"
    assert str(engine.codec.decode(turn.response.ids)) == turn.response


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


def test_with_one_tokenizer_the_very_tokens_are_asked_and_any_prompt_can_be_given_up(codec):
    """Equal text may have other ids: they are kept where they mean the same."""
    engine = WithFrozen(*(ScriptedEngine(codec, lambda _: "Lima") for _ in range(2)))
    prompt = Prompt(((Text("Anna", [7, 8, 9]), False),), 4, frozen=True)
    assert turn_of(engine, prompt).prompt_ids == [7, 8, 9]
    prompts = [replace(prompt, frozen=frozen) for frozen in (False, True) * 2]
    keys = [engine.add(prompt, Sampling(0.0), 0) for prompt in prompts]
    for key in (keys[0], keys[1], keys[1]):
        engine.drop(key)
    assert {key for key, _ in engine.step()} == {*keys[2:]}
    assert not engine._sampled and not engine._asked
