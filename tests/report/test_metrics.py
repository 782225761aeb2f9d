"""The metrics of a step, by hand."""

import math
from statistics import stdev

import pytest

from data import Task
from memagent import Agent, Finish, Group, Prompt, Trajectory, Turn
from report.metrics import UPDATE_METRICS, describe, describe_turns
from tokens.codec import Text

TASK = Task("a", "Where?", ("Lima",), text="x")


def groups(*rewards):
    return [
        Group(TASK, [Trajectory(TASK, [], k, reward) for k, reward in enumerate(of_group)])
        for of_group in rewards
    ]


def test_the_standard_error_is_over_groups_not_over_their_members():
    found = describe(groups((0, 1), (1, 1), (0, 0)), {})
    assert found["reward"] == 0.5
    assert found["reward_se"] == pytest.approx(stdev([0.5, 1, 0]) / math.sqrt(3))
    assert describe(groups((0.7, 0.7), (0.7, 0.7)), {})["reward_se"] == pytest.approx(0, abs=1e-8)
    assert math.isnan(describe(groups((0, 1)), {})["reward_se"])


def turn(response="Lima", finish=Finish.STOP, rewards=(), **about):
    prompt = Prompt((("x", True),), 9, **about)
    text = Text(response, (4, 5))
    return Turn(prompt, [1, 2, 3], [4, 5], [-0.5, -0.25], finish, text, rewards=dict(rewards))


def test_a_rollout_is_described_turn_by_turn():
    read = [turn(finish=Finish.LENGTH, cut=4), turn(" "), turn(frozen=True), turn(final=True)]
    failed = Trajectory(TASK, [turn(), turn("<think>x", final=True)], 1, 0.0, error="gone")
    fault = Trajectory(TASK, [], 2, None, error="down", fault=True)
    found = describe([Group(TASK, [Trajectory(TASK, read, 0, 1.0), failed], [fault])], {"rows": 7})
    assert found == pytest.approx({
        "reward": 0.5, "reward_se": math.nan, "groups_without_signal": 0, "failed": 2 / 3,
        "unrewarded": 1, "faults": 1, "documents_cut": 1, "turns": 2, "memory_tokens": 2,
        "memory_cut": 1 / 3, "memory_empty": 1 / 3, "answer_empty": 1 / 2, "read_tokens": 18,
        "written_tokens": 10, "surprisal": 0.375, "rows": 7,
    } | dict.fromkeys(UPDATE_METRICS, 0.0), nan_ok=True)  # fmt: skip


def test_rewards_of_turns_are_means_over_updates_and_over_answers():
    class Counting(Agent):
        rates = {"long": ("long", "turns"), "never": ("long", "nothing")}

        def count(self, task, turn):
            return {"turns": 1, "long": turn.prompt.final}

    made = [
        Trajectory(TASK, [turn(rewards={"short": short}), turn(final=True, rewards={"short": 1})])
        for short in (0.0, 1.0)
    ]
    unpaid = Trajectory(TASK, [turn(rewards={"short": 9.0})], 2, None)
    found = describe_turns([Group(TASK, made, [unpaid])], Counting())
    assert found == {
        "long": 2 / 5, "never": 2.0, "turn_reward_short": 0.5, "turn_reward_short_final": 1.0,
        "turn_groups_without_signal": 0.5,
    }  # fmt: skip
    assert describe_turns(groups((0, 1)), Agent()) == {}
