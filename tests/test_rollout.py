from dataclasses import replace

import pytest
from test_service import Heard

from agents.rewards import grade
from config.errors import ServerFailed, UserError
from embedded import tiny
from engines.scripted import ScriptedEngine
from engines.service import Service
from memagent import Finish, MemAgent, Prompt, Turn
from rollout import Sampling, rollout
from tasks import worlds

MEMAGENT = tiny.agent()


def tasks(n):
    return list(worlds.make_tasks(0, n, 3, "one_fact"))


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


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_sampling_that_cannot_be(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)


LONG = 3000  # more than Python's calls within each other


def test_an_agent_may_answer_itself_any_number_of_times(codec):
    class Talks(MemAgent):
        def run(self, task):
            for n in range(LONG + 1):
                slots = {"problem": task.question, "memory": "x"}
                prompt = self.prompt("final", 8, final=n == LONG, **slots)
                yield prompt if prompt.final else replace(prompt, given="ok")

    agent = Talks(MEMAGENT.config)
    (done,) = rollout(ScriptedEngine(codec, answer), agent, [(tasks(1)[0], 0)])
    service = Service(ScriptedEngine(codec, answer))
    heard = Heard(tasks(1)[0], agent)
    service.submit(heard.reading)
    assert not heard.ended.error and not done.error
    assert len(done.turns) == len(heard.said) == LONG + 1
    service.close()


def test_a_conversation_may_have_any_number_of_messages(codec):
    prompt = Prompt((("q", True),), 4, system="s", tools=({"name": "t"},))
    for _ in range(LONG):
        turn = Turn(prompt, [], [], [], Finish.STOP, codec.text("a"))
        prompt = Prompt((("next", True),), 4, after=turn, role="tool")
    messages = prompt.messages()
    assert [m["role"] for m in messages[:4]] == ["system", "user", "assistant", "tool"]
    assert messages[-1] == {"role": "tool", "content": "next"}
    assert len(messages) == 2 + 2 * LONG and prompt.all_tools() == ({"name": "t"},)


@pytest.mark.parametrize("fails, reward", [
    (Finish.ERROR, None), (ServerFailed("HTTP 422"), None),  # of the engine; of what an agent asks
    (Finish.FULL, 0.0), (UserError("no such page"), 0.0), (None, 1.0),
])  # fmt: skip
def test_what_an_engine_or_a_server_failed_has_no_reward(codec, fails, reward):
    class Fails(ScriptedEngine):
        def step(self):
            done = super().step()
            for _, turn in done:
                if isinstance(fails, Finish):
                    turn.finish, turn.error = fails, "overloaded"
            return done

    class Asks(MemAgent):
        def run(self, task):
            yield from super().run(task)
            if isinstance(fails, UserError):
                raise fails

    (task,) = tasks(1)
    engine = Fails(codec, lambda prompt: f"\\boxed{{{task.answers[0]}}}")
    (done,) = rollout(engine, Asks(MEMAGENT.config), [(task, 0)])
    grade(MEMAGENT, done)
    assert done.reward == reward and bool(done.error) is (reward != 1.0)
    assert done.fault is (reward is None)
