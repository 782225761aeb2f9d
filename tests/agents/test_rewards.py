"""Rewards: numbers of any library, None, and whatever else a function returns."""

import math
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from agents.rewards import Reward, grade, reward_of
from config.errors import ServerFailed, UserError
from config.plugins import load_function
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
        Decimal("sNaN"), 10**400, "1.0", b"1", bytearray(b"1"), np.str_("1"), np.array("1"), 1 + 0j,
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


def test_a_function_of_a_file_pays_and_its_error_is_one_sentence_with_its_line(tmp_path):
    mine, agent = tmp_path / "mine.py", tiny.agent()
    mine.write_text("def pay(trajectory):\n    return 1 / (len(trajectory.turns) - 2)\n")
    agent.reward = Reward(load_function(f"{mine}:pay", "--reward"), "mine.py:pay")
    with pytest.raises(UserError, match="ZeroDivisionError") as error:
        reward_of(agent, trajectory())
    said = str(error.value)
    assert said.startswith("mine.py:pay fails on the task 'the-task'") and "line 2)." in said
    done = trajectory()
    done.turns.append(done.turns[0])
    assert reward_of(agent, done) == 1.0
    assert Reward(load_function(f"{mine}:pay", "")).place.endswith(":pay")
    assert "partial" in Reward(partial(max, 1)).place  # which has no name of its own


def test_an_agents_own_rewards_go_through_the_same_door():
    agent, done = paid(1), trajectory()
    for by_turn, reward, kept in (
        ([{"a": np.float32(0.5)}, {}], 1.0, [{"a": 0.5}, {}]),
        # a turn without its reward leaves its trajectory without one
        ([{"a": 0.5, "b": None}, {"a": 1}], None, [{"a": 0.5}, {"a": 1.0}]),
    ):
        agent.turn_rewards = lambda trajectory, by_turn=by_turn: by_turn
        grade(agent, done)
        assert (done.reward, [turn.rewards for turn in done.turns]) == (reward, kept)
        assert type(done.turns[0].rewards["a"]) is float
    for by_turn, refused in (
        ([{"a": 0.5}, {"a": math.nan}], "turn_rewards of the agent .* returned nan .*'the-task'"),
        ([{"a": 0.5}], "1 rewards for the 2 turns of the task 'the-task'"),
    ):
        agent.turn_rewards = lambda trajectory, by_turn=by_turn: by_turn
        with pytest.raises(UserError, match=refused):
            grade(agent, done)
    agent.reward = lambda trajectory, outcome: math.nan
    with pytest.raises(UserError, match=r"reward of the agent \w+ returned nan .*'the-task'"):
        grade(agent, trajectory())
