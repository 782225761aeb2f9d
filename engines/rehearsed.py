"""An engine without a model that plays the bandit by a rule: its skill depends on what it is shown.

For comparing ways of remembering in seconds. How well a policy solves a task here is a rule that is
printed with every table, no measurement of any model. Its chance is the seed of each turn, so that
the same stream gives the same rows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from config.errors import UserError
from engines.scripted import ScriptedEngine
from memagent import Prompt
from rollout import Sampling
from tasks.environments import Work
from tokens.codec import Characters

RULE = (
    "takes the door that most of the shown experiences name; mostly-right ones lead to the prize "
    "with probability 0.97, others with 0.05; without any it guesses"
)
FOLLOWS, MISLED = 0.97, 0.05


class RehearsedEngine(ScriptedEngine):
    """Answers prompts about known tasks; lengths are estimated at four bytes a token."""

    model = "rehearsed"
    dtype = "none"
    rule = RULE

    def __init__(self, tasks: Sequence[Work]):
        """UserError: there is no rule for the tasks."""
        super().__init__(Characters(), self.respond, per_step=64)
        if any(task.kind != "bandit" for task in tasks):
            raise UserError(
                "The engine rehearsed has a rule for the suite bandit alone: give --engine "
                "transformers or vllm."
            )
        self._tasks = {task.question: task for task in tasks}
        self._seeds: dict[int, int] = {}  # id of a prompt in the queue -> its seed

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._seeds[id(prompt)] = seed
        return super().add(prompt, sampling, seed)

    def respond(self, prompt: Prompt) -> str:
        rng = random.Random(self._seeds.pop(id(prompt)))
        texts = [str(piece) for piece, constant in prompt.pieces if not constant]
        task = next(self._tasks[text] for text in reversed(texts) if text in self._tasks)
        known = task.question, task.instructions
        shown = "\n".join(text for text in texts if text not in known)
        doors = re.findall(r"took the (\w+) door", shown)
        if not doors:
            return rng.choice(("left", "right"))
        good = 2 * sum(door == task.solution[0] for door in doors) > len(doors)
        return task.solution[0] if rng.random() < (FOLLOWS if good else MISLED) else "neither"
