import pytest

import base
import worlds
from memagent import Finish, memagent
from rollout import Sampling, ScriptedEngine, rollout
from text import UserError

CONFIG = base.AGENT


def tasks(n, n_sections=3, kind="one_fact"):
    return list(worlds.make_tasks(0, n, n_sections, kind))


def test_scripted_rollout_runs_every_agent_to_its_end(codec):
    engine = ScriptedEngine(codec, lambda prompt: "\\boxed{ Lima}" if prompt.final else "Anna joined Boris.")
    done = list(rollout(engine, memagent, ((t, s) for t in tasks(5) for s in range(3)), CONFIG, in_flight=4))
    assert sorted((t.task.id, t.sample) for t in done) == sorted((t.id, s) for t in tasks(5) for s in range(3))
    assert all([turn.prompt.final for turn in t.turns] == [False] * 3 + [True] for t in done)  # exactly one final turn, the last
    assert all(t.answer.strip() == "\\boxed{ Lima}" for t in done)


def test_a_memory_cut_at_its_limit_is_a_value(codec):
    engine = ScriptedEngine(codec, lambda prompt: "Anna joined Boris. " * 9)
    (done,) = rollout(engine, memagent, [(tasks(1)[0], 0)], CONFIG)
    assert {t.finish for t in done.turns} == {Finish.LENGTH}
    assert all(len(t.response_ids) == t.prompt.max_tokens for t in done.turns)


def test_padding_in_a_memory_is_sampled_and_trained_but_never_carried_on(codec):
    class Padding(ScriptedEngine):
        def step(self):
            done = super().step()
            for _, turn in done:
                turn.response_ids = [0, *turn.response_ids]
                turn.response = self.codec.response(turn.response_ids)
            return done

    engine = Padding(codec, lambda prompt: "\\boxed{ Lima}" if prompt.final else "Anna joined Boris.")
    (done,) = rollout(engine, memagent, [(tasks(1)[0], 0)], CONFIG)
    assert all(turn.response_ids[0] == 0 for turn in done.turns)
    assert not any(0 in turn.prompt_ids for turn in done.turns) and done.answer.strip() == "\\boxed{ Lima}"


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}])
def test_sampling_that_cannot_be(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)
