"""The rewards of trajectories, from an agent or from a function of the user's: finite numbers of
any library, or None where none can be given."""

from __future__ import annotations

import math
from collections.abc import Callable

from config.errors import ServerFailed, UserError, clip
from config.plugins import told
from memagent import Agent, Trajectory


class Reward:
    """A function of the finished trajectory, in an agent's place of `Agent.reward`.

    place: what the user calls it, FILE:FUNCTION. UserError where it raises an exception.
    """

    def __init__(self, function: Callable[[Trajectory], object], place: str = ""):
        self.function = function
        self.place = place or getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, trajectory: Trajectory, outcome: str = "exact") -> object:
        with told(file=self.place):
            return self.function(trajectory)


def place_of_reward(agent: Agent) -> str:
    """Return what gives the rewards, for a message."""
    reward = agent.reward
    return reward.place if isinstance(reward, Reward) else f"The reward of the agent {agent.label}"


def reward_of(agent: Agent, trajectory: Trajectory, outcome: str = "exact") -> float | None:
    """Return a trajectory's reward: 0 if it failed, None if none can be given or if an engine or a
    server failed it, which may be one that the reward asks.

    UserError: what was returned is neither None nor a finite number, of whatever library.
    """
    if not trajectory.error:
        try:
            return _number(agent.reward(trajectory, outcome), place_of_reward(agent), trajectory)
        except ServerFailed as error:
            trajectory.error, trajectory.fault = str(error), True
    return None if trajectory.fault else 0.0


def grade(agent: Agent, trajectory: Trajectory, outcome: str = "exact") -> None:
    """Set a trajectory's reward and, if the agent rewards single turns, those of its turns.

    The reward is None, too, where that of a turn is: they are compared by their sums. UserError: as
    `reward_of`, and where there are not as many rewards as turns.
    """
    trajectory.reward = reward_of(agent, trajectory, outcome)
    if (by_turn := agent.turn_rewards(trajectory)) is None:
        return
    place, n = f"turn_rewards of the agent {agent.label}", len(trajectory.turns)
    if len(by_turn) != n:
        raise UserError(f"{place} returned {len(by_turn)} rewards for the {n} turns.")
    for turn, rewards in zip(trajectory.turns, by_turn, strict=True):
        numbers = {name: _number(x, place, trajectory) for name, x in rewards.items()}
        turn.rewards = {name: x for name, x in numbers.items() if x is not None}
        if len(turn.rewards) < len(numbers):
            trajectory.reward = None


def _number(value: object, place: str, trajectory: Trajectory) -> float | None:
    """Return a number as a float; None stays None."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{place} returned {clip(' '.join(repr(value).split()), 100)} for the task "
            f"{trajectory.task.id!r}: a reward is a finite number, or None to leave the trajectory "
            "out of its group."
        )
    return number
