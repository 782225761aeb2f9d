"""Rewards: numbers of any library, None, and whatever else a function returns."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from agents.rewards import Reward, grade, reward_of
from config.errors import ServerFailed, UserError
from data import Task
from embedded import tiny
from memagent import Finish, Prompt, Trajectory, Turn
from report.reading import row_of
from report.rows import Cell


def trajectory(**fields):
    turns = [Turn(Prompt((), 4, final=k), [], [], [], Finish.STOP, "") for k in (False, True)]
    return Trajectory(Task("the-task", "Who?", ("Ada",)), turns, **fields)


def paid(value, place="mine.py:pay"):
    agent = tiny.agent()
    agent.reward = Reward(lambda trajectory: value, place)
    return agent


@pytest.mark.parametrize(
    "value",
    [
        0.5, np.float32(0.5), np.float16(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5),
        torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True),
        Decimal("0.5"), Fraction(1, 2), True, np.True_, 1, np.int64(1), torch.tensor(True),
    ],
)  # fmt: skip
def test_a_number_of_any_library_is_a_float(value):
    reward = reward_of(paid(value), trajectory())
    assert type(reward) is float and reward == (1.0 if value == 1 else 0.5)


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), Decimal("NaN"),
        Decimal("sNaN"), 10**400, "1.0", b"1", np.str_("1"), np.array("1"), 1 + 0j,
        np.complex64(1), [0.5], {}, np.array([0.5, 1]), torch.zeros(2), torch.zeros(0), object(),
        float, "long " * 1000,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_one_sentence_with_function_task_and_value(value):
    with pytest.raises(UserError, match=r"mine\.py:pay returned .*'the-task'") as error:
        reward_of(paid(value), trajectory())
    shown = " ".join(repr(value).split())
    assert "\n" not in str(error.value) and shown[:40] in str(error.value)
    assert len(str(error.value)) < 400


def test_none_is_no_reward_and_a_failed_trajectory_is_not_asked_about():
    assert reward_of(paid(None), trajectory()) is None
    assert reward_of(paid("unseen"), trajectory(error="it failed")) == 0.0
    assert reward_of(paid("unseen"), trajectory(error="HTTP 500", fault=True)) is None


def test_a_server_that_a_reward_asks_and_that_fails_leaves_the_reading_out():
    def asks(trajectory):
        raise ServerFailed("The judge cannot be used: HTTP 503.")

    agent, done = tiny.agent(), trajectory()
    agent.reward = Reward(asks)
    grade(agent, done)
    assert (done.reward, done.fault) == (None, True) and "HTTP 503" in done.error
    row = row_of(trajectory(), Cell("a", "q", "0.0", 1), agent)  # in an evaluation it is wrong
    assert row["reward"] == 0.0 and "HTTP 503" in row["error"]


def test_an_error_in_the_function_is_one_sentence_with_its_line():
    def fails(trajectory):
        return 1 / 0

    agent = tiny.agent()
    agent.reward = Reward(fails, "mine.py:fails")
    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(UserError) as error:
        reward_of(agent, trajectory())
    said = str(error.value)
    assert said.startswith("mine.py:fails fails on the task 'the-task': ZeroDivisionError")
    assert f"test_rewards.py, line {line})." in said


def test_a_function_that_nobody_named_has_a_name_all_the_same():
    def own(trajectory, value=0.5):
        return value

    assert Reward(own).place.endswith(".own")
    assert "partial" in Reward(partial(own, value=1)).place


def test_an_agents_own_reward_goes_through_the_same_door():
    agent = tiny.agent()
    agent.reward = lambda trajectory, outcome: math.nan
    with pytest.raises(UserError, match=r"reward of the agent \w+ returned nan .*'the-task'"):
        grade(agent, trajectory())


def test_rewards_of_turns_are_numbers_too():
    agent, done = paid(1), trajectory()
    agent.turn_rewards = lambda trajectory: [{"a": np.float32(0.5)}, {}]
    grade(agent, done)
    assert [turn.rewards for turn in done.turns] == [{"a": 0.5}, {}]
    assert type(done.turns[0].rewards["a"]) is float and done.reward == 1.0
    agent.turn_rewards = lambda trajectory: [{"a": 0.5, "b": None}, {"a": 1}]
    grade(agent, done)  # a turn without its reward leaves its trajectory without one
    assert done.reward is None and [t.rewards for t in done.turns] == [{"a": 0.5}, {"a": 1.0}]
    agent.turn_rewards = lambda trajectory: [{"a": 0.5}, {"a": math.nan}]
    with pytest.raises(UserError, match=r"turn_rewards of the agent .* returned nan .*'the-task'"):
        grade(agent, done)
    agent.turn_rewards = lambda trajectory: [{"a": 0.5}]
    with pytest.raises(UserError, match="1 rewards for the 2 turns of the task 'the-task'"):
        grade(agent, done)
