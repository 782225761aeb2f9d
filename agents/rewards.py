"""The rewards of trajectories, from an agent or from a function of the user's: finite numbers of
any library, or None where none can be given."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable

from config.errors import ServerFailed, UserError, clip
from config.plugins import one_line
from memagent import Agent, Trajectory


class Reward:
    """A function of the finished trajectory, in an agent's place of `Agent.reward`.

    place: what the user calls it, FILE:FUNCTION. UserError where it raises an exception.
    """

    def __init__(self, function: Callable[[Trajectory], object], place: str = ""):
        self.function = function
        name = getattr(function, "__qualname__", type(function).__name__)
        self.place = place or f"{getattr(function, '__module__', '')}:{name}"

    def __call__(self, trajectory: Trajectory, outcome: str = "exact") -> object:
        try:
            return self.function(trajectory)
        except UserError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{self.place} fails on the task {trajectory.task.id!r}: {one_line(error)} "
                f"({at.filename}, line {at.lineno})."
            ) from error


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


def place_of_reward(agent: Agent) -> str:
    """Return what gives the rewards, for a message."""
    reward = agent.reward
    return reward.place if isinstance(reward, Reward) else f"The reward of the agent {agent.label}"


def grade(agent: Agent, trajectory: Trajectory, outcome: str = "exact") -> None:
    """Set a trajectory's reward and, if the agent rewards single turns, those of its turns.

    The reward is None, too, where that of a turn is: they are compared by their sums. UserError: as
    `reward_of`, and where there are not as many rewards as turns.
    """
    trajectory.reward = reward_of(agent, trajectory, outcome)
    if (by_turn := agent.turn_rewards(trajectory)) is None:
        return
    place = f"turn_rewards of the agent {agent.label}"
    if len(by_turn) != len(trajectory.turns):
        raise UserError(
            f"{place} returned {len(by_turn)} rewards for the {len(trajectory.turns)} turns of the "
            f"task {trajectory.task.id!r}."
        )
    for turn, rewards in zip(trajectory.turns, by_turn, strict=True):
        numbers = {name: _number(x, place, trajectory) for name, x in rewards.items()}
        turn.rewards = {name: x for name, x in numbers.items() if x is not None}
        if len(turn.rewards) < len(numbers):
            trajectory.reward = None


def _number(value: object, place: str, trajectory: Trajectory) -> float | None:
    """Return a number as a float; None stays None. `float` alone would also take text, and NumPy's
    complex numbers without their imaginary part."""
    if value is None:
        return None
    try:
        plain = value.item() if hasattr(value, "item") else value  # of NumPy, torch, JAX, ...
        text = isinstance(plain, str | bytes | bytearray | complex)
        number = math.nan if text else float(plain)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{place} returned {clip(' '.join(repr(value).split()), 100)} for the task "
            f"{trajectory.task.id!r}: a reward is a finite number, or None to leave the trajectory "
            "out of its group."
        )
    return number
