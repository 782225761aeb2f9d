"""Rewards: numbers of any library, None, and whatever else a function returns."""

import math
from decimal import Decimal

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
from tokens.codec import Text


def trajectory(**fields):
    turns = [Turn(Prompt((), 4, final=k), [], [], [], Finish.STOP, "") for k in (False, True)]
    return Trajectory(Task("the-task", "Who?", ("Ada",)), turns, **fields)


def paid(function, place="mine.py:pay", by_turn=None):
    agent = tiny.agent()
    agent.reward = Reward(function, place)
    agent.turn_rewards = lambda trajectory: by_turn
    return agent


@pytest.mark.parametrize("value", [
    0.5, np.float16(0.5), np.array(0.5), torch.tensor([0.5], dtype=torch.bfloat16),
    torch.tensor(0.5, requires_grad=True), Decimal("0.5"), True, np.int64(1), torch.tensor(True),
])  # fmt: skip
def test_a_number_of_any_library_is_a_float(value):
    reward = reward_of(paid(lambda _: value), trajectory())
    assert type(reward) is float and reward == (1.0 if value == 1 else 0.5)


@pytest.mark.parametrize("value", [
    math.nan, -math.inf, torch.tensor(math.inf), Decimal("sNaN"), 10**400, 1 + 0j, [0.5],
    torch.zeros(2), object(), "long " * 1000,
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_anything_else_is_refused_with_function_and_task(value):
    with pytest.raises(UserError, match=r"mine\.py:pay .*'the-task'") as error:
        reward_of(paid(lambda _: value), trajectory())
    assert len(str(error.value)) < 400
    with pytest.raises(UserError, match="'the-task'"):
        grade(paid(lambda _: 1, by_turn=[{"a": 0.5}, {"a": value}]), trajectory())


def test_none_is_no_reward_and_a_failed_trajectory_is_not_asked_about():
    assert reward_of(paid(lambda _: None), trajectory()) is None
    assert reward_of(paid(lambda _: "unseen"), trajectory(error="it failed")) == 0.0
    assert reward_of(paid(lambda _: "unseen"), trajectory(error="HTTP 500", fault=True)) is None


def test_a_server_that_a_reward_asks_and_that_fails_leaves_the_reading_out():
    def ask(trajectory):
        raise ServerFailed("The judge cannot be used: HTTP 503.")

    agent, done = paid(ask), trajectory()
    grade(agent, done)
    assert (done.reward, done.fault) == (None, True) and "HTTP 503" in done.error
    row = row_of(trajectory(), Cell("a", "q", "0.0", 1), agent)  # in an evaluation it is wrong
    assert row["reward"] == 0.0 and "HTTP 503" in row["error"]


def test_the_error_of_a_function_of_a_file_is_one_sentence_with_its_line(tmp_path):
    mine, done = tmp_path / "mine.py", trajectory()
    mine.write_text("def pay(trajectory):\n    return 1 / (len(trajectory.turns) - 2)\n")
    agent = paid(load_function(f"{mine}:pay", "--reward"))
    with pytest.raises(UserError, match=r"mine\.py, line 2.*ZeroDivisionError"):
        reward_of(agent, done)
    done.turns.append(done.turns[0])
    assert reward_of(agent, done) == 1.0


@pytest.mark.parametrize(("by_turn", "reward", "kept"), [
    ([{"a": np.float32(0.5)}, {}], 1.0, [{"a": 0.5}, {}]),
    # a turn without its reward leaves its trajectory without one
    ([{"a": 0.5, "b": None}, {"a": 1}], None, [{"a": 0.5}, {"a": 1.0}]),
])  # fmt: skip
def test_rewards_of_turns(by_turn, reward, kept):
    done = trajectory()
    grade(paid(lambda _: 1, by_turn=by_turn), done)
    assert (done.reward, [turn.rewards for turn in done.turns]) == (reward, kept)
    with pytest.raises(UserError, match="1 rewards for the 2 turns"):
        grade(paid(lambda _: 1, by_turn=by_turn[:1]), done)


@pytest.mark.parametrize(("outcome", "boxed", "plain"), [
    ("exact", (0, 1, 0), (1, 0, 0)), ("em", (1, 1, 0), (1, 1, 0)),
    ("f1", (1, 1, 2 / 3), (1, 1, 1 / 3)), ("sub_em", (1, 1, 0), (1, 1, 1)),
])  # fmt: skip
def test_what_each_outcome_setting_pays_for_a_nearly_literal_answer(outcome, boxed, plain):
    """One that differs from an accepted one in an article or a full stop, or within a sentence."""
    forms = {
        "Old Town": (
            tiny.agent(),
            ("\\boxed{The Old Town.}", "\\boxed{old town}", "\\boxed{town}"),
        ),
        "Lima": (tiny.agent(form="plain"), ("**Lima**.", "The Lima", "Lima or Oslo, or so")),
    }
    for (answer, (agent, responses)), worth in zip(forms.items(), (boxed, plain), strict=True):
        for response, expected in zip(responses, worth, strict=True):
            turn = Turn(Prompt((), 9, final=True), [], [], [], Finish.STOP, Text(response, ()))
            read = Trajectory(Task("1", "q", (answer,), text="t"), [turn])
            assert agent.reward(read, outcome) == pytest.approx(expected)


@pytest.mark.parametrize(("dataset", "share"), [("ruler", 2 / 3), ("own", 0.0)])
def test_the_reward_of_a_task_that_asks_for_all_answers_is_their_share(dataset, share):
    turn = Turn(Prompt((), 9, final=True), [], [], [], Finish.STOP, Text("\\boxed{Lima, Oslo}", ()))
    task = Task("1", "q", ("Lima", "Oslo", "Nice"), text="t", dataset=dataset)
    assert tiny.agent().reward(Trajectory(task, [turn])) == pytest.approx(share)
