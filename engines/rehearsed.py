"""An engine without a model that works on tasks by a rule: its skill depends on what it is shown.

Holds: `RehearsedEngine`, `RULES`. Leaves out: any model.
Exercise it: `python cli.py stream --suite bandit --engine rehearsed`. Read next:
commands/stream.py.

For comparing ways of remembering in seconds. How well a policy solves a task here is a rule that is
printed with every table, no measurement of any model. Its chance is the seed of each turn, so that
the same stream gives the same rows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from engines.scripted import ScriptedEngine
from memagent import Prompt
from rollout import Sampling
from tasks.environments import Work
from tokens.codec import Characters

RULES = {
    "bandit": (
        "takes the door that most of the shown experiences name; mostly-right ones lead to the "
        "prize with probability .97, others with .05; without any it guesses"
    ),
    "skills": (
        "solves a task with probability .3, plus .2 for each experience shown of a tidy solution "
        "of a task with the same first skill, at most .95; every second solution, by chance, is "
        "tidy"
    ),
}
FOLLOWS, MISLED = 0.97, 0.05
ALONE, HELPS, MOST = 0.3, 0.2, 0.95
TIDY, MESSY = "tidy", "messy"


class RehearsedEngine(ScriptedEngine):
    """Answers prompts about known tasks; lengths are estimated at four bytes a token."""

    model = "rehearsed"
    dtype = "none"

    def __init__(self, tasks: Sequence[Work], experiences: Mapping[str, str] | None = None):
        """experiences: with tasks that are not among these -> those tasks' kinds."""
        super().__init__(Characters(), self.respond, per_step=64)
        self._tasks = {task.question: task for task in tasks}
        self._skill = {task.question: task.kind for task in tasks}
        self._experiences = experiences or {}
        self.rule = RULES["bandit" if any(t.kind == "bandit" for t in tasks) else "skills"]
        self._seeds: dict[int, int] = {}  # id of a prompt in the queue -> its seed

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._seeds[id(prompt)] = seed
        return super().add(prompt, sampling, seed)

    def respond(self, prompt: Prompt) -> str:
        rng = random.Random(self._seeds.pop(id(prompt)))
        if prompt.after is not None:
            return self._go_on(prompt)
        texts = [str(piece) for piece, constant in prompt.pieces if not constant]
        task = next((self._tasks[t] for t in reversed(texts) if t in self._tasks), None)
        if task is None:  # a script or a reflection is asked for
            return "Do as it was done there."
        known = task.question, task.instructions
        shown = "\n".join(text for text in texts if text not in known)
        if task.kind == "bandit":
            return self._door(task, shown, rng)
        right = rng.random() < self._chance(task, shown)
        tidy = TIDY if rng.random() < 0.5 else MESSY
        return self._written(task.solution[0], tidy) if right else "I do not know."

    @staticmethod
    def _door(task: Work, shown: str, rng: random.Random) -> str:
        doors = re.findall(r"took the (\w+) door", shown)
        if not doors:
            return rng.choice(("left", "right"))
        good = 2 * sum(door == task.solution[0] for door in doors) > len(doors)
        right = rng.random() < (FOLLOWS if good else MISLED)
        return task.solution[0] if right else "neither"

    def _chance(self, task: Work, shown: str) -> float:
        """Return the probability that a task is solved with what is shown."""
        chance = ALONE + HELPS * sum(
            kind == task.kind and f"-- {TIDY}" in experience and experience in shown
            for experience, kind in self._experiences.items()
        )
        for question in self._tasks:
            if self._experiences or f"Task: {question}" not in shown:
                continue
            # up to the next experience: what was done with that task
            story = shown.split(f"Task: {question}", 1)[1].split("\nTask: ", 1)[0]
            helps = self._skill[question] == task.kind and f"-- {TIDY}" in story
            chance += HELPS if helps else 0.0
        return min(MOST, chance)

    @staticmethod
    def _written(action: str, how: str) -> str:
        """Return an action below a mark of how it was written."""
        return f"-- {how}\n{action}"

    def _go_on(self, prompt: Prompt) -> str:
        """Return the next action of the solution that was begun, or give up."""
        responses, turn = [], prompt.after
        while turn is not None:
            responses.append(str(turn.response))
            first, turn = turn, turn.prompt.after
        texts = [str(piece) for piece, constant in first.prompt.pieces if not constant]
        task = next(self._tasks[t] for t in reversed(texts) if t in self._tasks)
        begun, n = task.solution[0] in responses[-1], len(responses)
        return task.solution[n] if begun and n < len(task.solution) else "I give up."
