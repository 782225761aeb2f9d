"""Gold, the baseline of environments that acts as the known solution does: is a task's check right?

It asks no model, whichever the engine is: its one prompt is there because a trajectory has one, and
has its response with it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from agents.baselines import AtOnce
from agents.memrl import Tried
from config.errors import UserError
from data import Task, formed
from memagent import ROOM_TOKENS, Prompt, Trajectory, Turn
from tasks.environments import Work


class Gold(AtOnce):
    """The solution that comes with a task, in its environment."""

    name = "gold"
    trains = False
    prompts = {"gold": "{problem}"}

    def window_needed(self) -> int:
        return ROOM_TOKENS

    def check(self, task: Task) -> None:
        if not isinstance(task, Work):
            raise UserError("The agent gold acts in environments: give --suite llb-db or another.")

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        if not task.solution:
            raise UserError(f"No solution of {task.id} is known.")
        prompt = self.prompt("gold", 1, final=True, problem=task.id)
        said = formed(task.id, self.config.form)
        turn = yield replace(prompt, trained=False, given=said)
        steps = []
        with closing(task.begin()) as episode:
            for action in task.solution:
                steps.append(episode.step(action))
                if steps[-1].done:
                    break
        last = steps[-1]
        turn.notes = Tried(
            action=action, observation=last.observation, success=last.done and last.reward > 0,
            reward=last.reward, steps=len(steps), failure=last.failure,
        )  # fmt: skip

    def reward(self, trajectory: Trajectory, outcome: str = "exact") -> float:
        notes = trajectory.turns[-1].notes if trajectory.turns else None
        return float(isinstance(notes, Tried) and notes.success and not trajectory.error)
