"""Readings that begin and end at any time: none waits for another, none is lost or mixed up."""

import threading
from dataclasses import replace

import pytest
from conftest import HANG_S, random_policy, until

from config.errors import UserError
from data import Task
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from engines.service import Ended, Job, Service, TooLong
from memagent import Agent, MemAgent, MemAgentConfig, Turn
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

AGENT = MemAgent(MemAgentConfig(chunk_tokens=24, memory_tokens=6, final_tokens=6))


def task(k=0, sections=4):
    return replace(worlds.make_task(k, sections, "one_fact"), id=f"task {k}")


class Heard:
    """A reading's events, in order, and when it was over."""

    def __init__(self, task, agent=AGENT, sampling=Sampling(0.0), seed=0):
        self.events, self.over = [], threading.Event()
        self.reading = Job(task, agent, self.tell, sampling, seed)

    def tell(self, event):
        self.events.append(event)
        if isinstance(event, Ended):
            self.over.set()

    @property
    def ended(self) -> Ended:
        assert self.over.wait(HANG_S)
        return self.events[-1]

    @property
    def said(self) -> list[tuple[str, list[int]]]:
        return [(str(e.response), e.response_ids) for e in self.events if isinstance(e, Turn)]


def begin(service, *heard):
    for each in heard:
        service.cut(each.reading)
        service.submit(each.reading)
    return heard


class Gate(ScriptedEngine):
    """Answers nothing until its gate is opened."""

    def __init__(self, codec):
        super().__init__(codec, lambda prompt: "Anna", per_step=1)
        self.gate, self.dropped = threading.Event(), []

    def step(self):
        return super().step() if self.gate.wait(0.002) else []

    def drop(self, key):
        self.dropped.append(key)
        super().drop(key)


@pytest.fixture
def gated(codec):
    engine = Gate(codec)
    service = Service(engine, in_flight=2)
    yield service
    engine.gate.set()
    service.close()


def test_each_reading_says_what_it_says_alone_however_many_are_read(codec, policy):
    tasks = [task(k, 1 + k % 5) for k in range(12)]
    alone = {
        t.task.id: [(str(turn.response), turn.response_ids) for turn in t.turns]
        for one in tasks
        for t in rollout(TransformersEngine(policy, codec), AGENT, [(one, 0)], Sampling(1.0), 3)
    }
    engine = TransformersEngine(policy, codec, max_rows=5, max_cache_tokens=4096, remember=True)
    service = Service(engine, in_flight=5)
    heard = [Heard(one, sampling=Sampling(1.0), seed=3) for one in tasks]
    threads = [threading.Thread(target=begin, args=(service, each)) for each in heard]
    for thread in threads:
        thread.start()
    for h, one in zip(heard, tasks, strict=True):
        assert h.ended == Ended() and h.said == alone[one.id]
        assert len(h.reading.sections.ids) == len(codec.ids(one.document))
    assert len({str(said) for said in alone.values()}) == len(tasks)  # or mixing would not show
    service.close()


def test_a_reading_is_given_up_wherever_it_stands(gated):
    running, other, waits, never = begin(gated, *(Heard(task(k)) for k in range(4)))
    until(lambda: len(gated._running) == 2)
    for reading in (running.reading, never.reading, never.reading):  # twice is once
        gated.cancel(reading)
    until(lambda: waits.reading in gated._running.values())  # which had waited
    assert len(gated.engine.dropped) == 1
    gated.engine.gate.set()
    assert other.ended == waits.ended == Ended()
    assert not running.events and not never.events and not gated._running  # they hear no more


@pytest.mark.parametrize(("document", "encoded"), [
    ("Anna " * 10_000, 0),  # so many characters have more tokens, whatever they are
    ("Anna " * 6000, 25_000), ("a" * 30_000, 0),  # without a blank
])  # fmt: skip
def test_a_document_that_is_too_long_is_not_encoded_to_its_end(
    gated, monkeypatch, document, encoded
):
    monkeypatch.setattr(Codec, "PART", 1000)
    monkeypatch.setattr("engines.service.WORD", 20_000)
    gated.most_tokens, seen, encode = 2000, [], Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda it, text: seen.append(len(text)) or encode(it, text)
    )
    with pytest.raises(TooLong):
        gated.cut(Job(Task("a", "?", (), document), AGENT, print))
    assert sum(seen) - 1000 <= encoded


def test_a_document_of_one_part_may_have_as_many_tokens_and_no_more(gated, codec):
    gated.most_tokens = len(codec.ids(task().document))
    gated.cut(Job(task(), AGENT, print))
    gated.most_tokens -= 1
    with pytest.raises(TooLong):
        gated.cut(Job(task(), AGENT, print))


def test_a_document_is_cut_no_further_when_its_client_is_gone(gated, monkeypatch):
    monkeypatch.setattr(Codec, "PART", 1000)
    seen, encode = [], Codec.encode
    gone = Job(Task("b", "?", (), "Anna joined Boris. " * 10**4), AGENT, print)

    def leave(it, text):
        seen.append(len(text))
        gated.cancel(gone)
        return encode(it, text)

    monkeypatch.setattr(Codec, "encode", leave)
    with pytest.raises(TooLong):
        gated.cut(gone)
    assert 0 < sum(seen) < 20_000


def test_a_prompt_that_does_not_fit_ends_its_reading(codec):
    service = Service(TransformersEngine(random_policy(codec, window=64), codec))
    (beyond,) = begin(
        service, Heard(task(0, 3), MemAgent(MemAgentConfig(chunk_tokens=24, memory_tokens=64)))
    )
    assert beyond.ended.status == 413
    service.close()


class Broken(Agent):
    prompts = {"one": "{section}"}

    def run(self, task):
        yield self.prompt("one", 4, section="Anna")
        if task.id == "odd":
            yield 5  # an AgentError, which names this file
        raise {"user": UserError("That cannot be read."), "bug": KeyError("/srv/x")}[task.id]


def test_an_agent_that_fails_ends_its_own_reading_alone(codec, capsys):
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"))
    kinds = [Heard(Task(name, "q", (), "Anna"), Broken()) for name in ("user", "bug", "odd")]
    user, *others, other = begin(service, *kinds, Heard(task(1)))
    assert user.ended == Ended("That cannot be read.", 400) and other.ended == Ended()
    for each in others:  # nothing of the files of who serves
        assert each.ended.status == 503 and "/" not in each.ended.error
    assert "KeyError" in capsys.readouterr().err and not service.stopped
    service.close()


def test_an_engine_that_fails_and_one_that_is_closed_end_all_that_is_left(codec, capsys):
    def script(prompt):
        raise ZeroDivisionError

    service = Service(ScriptedEngine(codec, script))
    heard = begin(service, *(Heard(task(k)) for k in range(3)))
    assert [h.ended.status for h in heard] == [503] * 3
    assert "ZeroDivisionError" in service.stopped and "Traceback" in capsys.readouterr().err
    (late,) = begin(service, Heard(task()))
    assert late.ended == Ended(service.stopped, 503)  # none is taken any more
    service.close()
    service = Service(Gate(codec), in_flight=1)
    heard = begin(service, *(Heard(task(k)) for k in range(2)))
    service.close()
    assert [h.ended.status for h in heard] == [503] * 2
