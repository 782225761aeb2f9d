"""Readings that begin and end at any time: none waits for another, none is lost or mixed up."""

import threading
from dataclasses import replace

import pytest
from conftest import HANG_S, random_policy, until

from config.errors import UserError
from data import Task
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from engines.service import Begun, Busy, Ended, Job, Service, Stopped
from memagent import Agent, MemAgent, MemAgentConfig, Turn
from rollout import Sampling, rollout
from tasks import worlds

AGENT = MemAgent(MemAgentConfig(chunk_tokens=24, memory_tokens=6, final_tokens=6))


def task(k=0, sections=4):
    return replace(worlds.make_task(k, sections, "one_fact"), id=f"task {k}")


class Heard:
    """A reading's events, in order, and when it was over."""

    def __init__(self, task, agent=AGENT, sampling=Sampling(0.0), seed=0):
        self.events, self.over, self.begun = [], threading.Event(), threading.Event()
        self.reading = Job(task, agent, self.tell, sampling, seed)

    def tell(self, event):
        self.events.append(event)
        if isinstance(event, Begun):
            self.begun.set()
        if isinstance(event, Ended):
            self.over.set()

    @property
    def ended(self) -> Ended:
        assert self.over.wait(HANG_S)
        return self.events[-1]

    @property
    def said(self) -> list[tuple[str, list[int]]]:
        return [(str(e.response), e.response_ids) for e in self.events if isinstance(e, Turn)]


class Gate(ScriptedEngine):
    """Answers nothing until its gate is opened."""

    def __init__(self, codec):
        super().__init__(codec, lambda prompt: "Anna", per_step=1)
        self.gate, self.dropped = threading.Event(), []

    def step(self):
        if not self.gate.wait(0.002):
            return []
        return super().step()

    def drop(self, key):
        self.dropped.append(key)
        super().drop(key)


@pytest.fixture
def gated(codec):
    engine = Gate(codec)
    service = Service(engine, in_flight=2, waiting=1)
    yield service
    engine.gate.set()
    service.close()


def test_each_reading_says_what_it_says_alone_however_many_are_read(codec, policy):
    tasks = [task(k, 1 + k % 7) for k in range(24)]
    alone = {
        t.task.id: [(str(turn.response), turn.response_ids) for turn in t.turns]
        for one in tasks
        for t in rollout(TransformersEngine(policy, codec), AGENT, [(one, 0)], Sampling(1.0), 3)
    }
    engine = TransformersEngine(policy, codec, max_rows=5, max_cache_tokens=4096, remember=True)
    service = Service(engine, in_flight=5, waiting=100)
    heard = [Heard(one, sampling=Sampling(1.0), seed=3) for one in tasks]
    threads = [threading.Thread(target=service.submit, args=(h.reading,)) for h in heard]
    for thread in threads:
        thread.start()
    for h, one in zip(heard, tasks, strict=True):
        assert h.ended == Ended() and isinstance(h.events[0], Begun)
        assert h.events[0].tokens == len(codec.ids(one.document))
        assert h.said == alone[one.id]
    assert len({str(said) for said in alone.values()}) == len(tasks)  # or mixing would not show
    service.close()


def test_beyond_what_may_wait_a_reading_is_refused_and_a_place_is_free_again(gated):
    heard, places = [Heard(task(k)) for k in range(4)], [gated.place() for _ in range(4)]
    for h, place in zip(heard[:3], places[:3], strict=True):
        place.__enter__()
        gated.submit(h.reading)
    assert gated.load == (2, 1)
    with pytest.raises(Busy):
        places[3].__enter__()
    heard[0].begun.wait(HANG_S)
    gated.cancel(heard[0].reading)
    places[0].__exit__(None, None, None)
    with gated.place():  # at once
        gated.submit(heard[3].reading)
    until(lambda: len(gated.engine.dropped) == 1)
    until(heard[2].begun.is_set)  # which had waited
    gated.engine.gate.set()
    assert [h.ended for h in heard[1:]] == [Ended()] * 3
    assert not heard[0].over.is_set()  # it hears no more
    assert gated.load == (2, 0) and not gated._running


def test_one_that_waits_can_be_given_up_and_is_never_read(gated):
    heard = [Heard(task(k)) for k in range(3)]
    for h in heard:
        gated.submit(h.reading)
    heard[0].begun.wait(HANG_S)
    gated.cancel(heard[2].reading)
    gated.cancel(heard[2].reading)  # twice is once
    gated.engine.gate.set()
    assert heard[0].ended == heard[1].ended == Ended()
    assert not heard[2].events and not gated.engine.dropped


def test_a_document_or_a_prompt_that_is_too_long_says_so(codec):
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"), most_tokens=60)
    long, short = Heard(task(0, 20)), Heard(task(1, 2))
    service.submit(long.reading)
    service.submit(short.reading)
    assert long.ended.too_long and "60 are read at most" in long.ended.error
    assert len(long.events) == 1 and short.ended == Ended()
    service.close()
    service = Service(TransformersEngine(random_policy(codec, window=64), codec))
    beyond = Heard(task(0, 3), MemAgent(MemAgentConfig(chunk_tokens=24, memory_tokens=64)))
    service.submit(beyond.reading)
    assert beyond.ended.too_long and "window of 64" in beyond.ended.error
    service.close()


class Broken(Agent):
    prompts = {"one": "{section}"}

    def run(self, task):
        yield self.prompt("one", 4, section="Anna")
        raise {"user": UserError("That cannot be read."), "bug": KeyError("x")}[task.id]


@pytest.mark.filterwarnings("ignore")
def test_an_agent_that_fails_ends_its_own_reading_alone(codec, capsys):
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"))
    user = Heard(Task("user", "q", (), "Anna"), Broken())
    bug = Heard(Task("bug", "q", (), "Anna"), Broken())
    other = Heard(task(1))
    for h in (user, bug, other):
        service.submit(h.reading)
    assert user.ended == Ended("That cannot be read.") and other.ended == Ended()
    assert bug.ended.ours and "KeyError" in bug.ended.error
    assert "KeyError" in capsys.readouterr().err
    assert not service.stopped
    service.close()


def test_an_engine_that_fails_ends_all_and_nothing_is_taken_any_more(codec, capsys):
    def script(prompt):
        raise ZeroDivisionError

    service = Service(ScriptedEngine(codec, script))
    heard = [Heard(task(k)) for k in range(3)]
    for h in heard:
        service.submit(h.reading)
    assert all(h.ended.ours and "ZeroDivisionError" in h.ended.error for h in heard)
    assert "ZeroDivisionError" in service.stopped and "Traceback" in capsys.readouterr().err
    with pytest.raises(Stopped, match="ZeroDivisionError"):
        service.submit(Heard(task()).reading)
    service.close()
    service = Service(Gate(codec), in_flight=1)  # closing ends what is left
    heard = [Heard(task(k)) for k in range(2)]
    for h in heard:
        service.submit(h.reading)
    service.close()
    assert all("shutting down" in h.ended.error for h in heard)
    with pytest.raises(Stopped):
        service.submit(Heard(task()).reading)
