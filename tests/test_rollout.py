import pytest

from config.errors import UserError
from embedded import tiny
from engines.scripted import ScriptedEngine
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


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_sampling_that_cannot_be(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)
