import threading
from functools import partial

import pytest

from config.errors import UserError
from embedded import tiny
from engines.scripted import ScriptedEngine
from engines.sharing import share_engine
from memagent import Finish
from rollout import Sampling, rollout
from tasks import worlds

MEMAGENT, FULL = tiny.agent(), tiny.agent("full")


def tasks(n, n_sections=3, kind="one_fact"):
    return list(worlds.make_tasks(0, n, n_sections, kind))


def answer(prompt):
    return "\\boxed{ Lima}" if prompt.final else f"Anna joined Boris. {len(prompt.section)}"


def test_every_job_runs_to_its_end_and_padding_is_never_carried_on(codec):
    class Padding(ScriptedEngine):
        def step(self):
            done = super().step()
            for _, turn in done:
                turn.response_ids = [0, *turn.response_ids]
                turn.response = self.codec.response(turn.response_ids)
            return done

    jobs = [(t, s) for t in tasks(5) for s in range(3)]
    done = list(rollout(Padding(codec, answer), MEMAGENT, iter(jobs), in_flight=4))
    names = sorted((t.task.id, t.sample) for t in done)
    assert names == sorted((task.id, sample) for task, sample in jobs)
    for trajectory in done:
        assert [turn.prompt.final for turn in trajectory.turns] == [False] * 3 + [True]
        assert trajectory.answer.strip() == "\\boxed{ Lima}"
        assert all(turn.response_ids[0] == 0 for turn in trajectory.turns)  # sampled, trained
        assert not any(0 in turn.prompt_ids for turn in trajectory.turns)


def test_a_memory_cut_at_its_limit_is_a_value(codec):
    engine = ScriptedEngine(codec, lambda prompt: "Anna joined Boris. " * 9)
    (done,) = rollout(engine, MEMAGENT, [(tasks(1)[0], 0)])
    assert {t.finish for t in done.turns} == {Finish.LENGTH}
    assert all(len(t.response_ids) == t.prompt.max_tokens for t in done.turns)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_sampling_that_cannot_be(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)


# ---------------------------------------------------------------- several on one engine


class Watched(ScriptedEngine):
    """Keeps what it was asked, in order, and how much was in flight at every step."""

    def __init__(self, codec):
        super().__init__(codec, answer)
        self.asked, self.in_flight = [], []

    def add(self, prompt, sampling=Sampling(), seed=0):
        self.asked.append((prompt.text, sampling.temperature, seed))
        return super().add(prompt, sampling, seed)

    def step(self):
        self.in_flight.append(len(self._queue))
        return super().step()


def ask(agent, n, temperature, engine):
    done = rollout(engine, agent, [(t, 0) for t in tasks(n, n + 1)], Sampling(temperature))
    return sorted((t.task.id, t.answer, [str(turn.response) for turn in t.turns]) for t in done)


WORKS = [partial(ask, *how) for how in ((MEMAGENT, 3, 1.0), (FULL, 2, 0.5), (MEMAGENT, 1, 0.0))]


def test_callers_that_share_an_engine_get_what_each_gets_alone(codec):
    engines = [Watched(codec) for _ in range(2)]
    found, again = (share_engine(engine, WORKS) for engine in engines)
    assert found == again == [work(Watched(codec)) for work in WORKS]
    assert len({len(some) for some in found}) == 3
    assert engines[0].asked == engines[1].asked
    assert engines[0].in_flight[0] == 6  # the prompts of all three, before the first step
    assert share_engine(Watched(codec), []) == []


def test_a_caller_that_fails_ends_those_that_share_its_engine(codec):
    before, ended = threading.active_count(), []

    def fails(engine):
        ask(MEMAGENT, 1, 1.0, engine)
        raise UserError("no more")

    def goes_on(engine):
        try:
            ask(MEMAGENT, 9, 1.0, engine)
        except Exception as error:  # as an evaluation would turn it into a row
            ended.append(error)
        finally:
            ended.append("closed")

    engine = Watched(codec)
    with pytest.raises(UserError, match="no more"):
        share_engine(engine, [goes_on, fails, goes_on])
    assert ended == ["closed", "closed"] and threading.active_count() == before

    def broken():
        raise OSError("the engine itself")

    engine.step = broken
    with pytest.raises(OSError, match="the engine itself"):
        share_engine(engine, [goes_on, goes_on])
    assert threading.active_count() == before
