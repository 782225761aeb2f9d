"""A generated world for episodic memory: which of two doors, and experiences of which half mislead.

Every task is known from experiences of its own intent, which name a door, half of them the wrong
one: similarity cannot tell them apart, their utility can. No model is needed: the policy that acts
in it is a rule (engines/rehearsed.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from config.settings import COUNT
from data import seed_of
from suites import Scope, Suite
from tasks.environments import Environment, Episode, Step, Work

HINTS = 10  # experiences of a task
DOORS = ("left", "right")
WORDS = (
    "amber basil cedar delta ember fjord grove heron inlet jetty kelp lagoon maple nectar opal "
    "pebble quartz raven spruce tundra umber violet willow yarrow zephyr"
).split()


class Bandit(Environment):
    """Tasks of one step: name a door. hints: experiences of each, half of them wrong."""

    name, most_steps = "bandit", 1
    leaves_nothing = True  # tries are no experiences: what there is to know is known at first
    instructions = "A house has two doors, and a prize behind one. Answer with it: left or right."

    def __init__(self, n_tasks: int = 60, hints: int = HINTS, seed: int = 0):
        self.hints, self._seed = hints, seed
        rng = random.Random(seed_of(seed, "bandit"))
        # no house shares a word with another: what is known of one says nothing about others
        self._names = [
            " ".join(f"{word}{k}" for word in rng.sample(WORDS, 4)) for k in range(n_tasks)
        ]
        self._doors = [rng.choice(DOORS) for _ in range(n_tasks)]

    def tasks(self) -> Sequence[Work]:
        return [
            Work(f"b{k}", name, (), text="", kind="bandit", dataset="bandit", environment=self,
                 solution=(door,), content=door)
            for k, (name, door) in enumerate(zip(self._names, self._doors, strict=True))
        ]  # fmt: skip

    def intent(self, id: str) -> str:
        return self._names[int(id[1:])]

    def reset(self, id: str) -> Try:
        return Try(self.intent(id), self._doors[int(id[1:])])

    def experiences(self) -> Iterator[tuple[str, str, str]]:
        """Yield (task id, intent, experience) of what is known at first, half of it wrong.

        The task ids are those of the tries that left them: each hint is another's.
        """
        for k, (name, door) in enumerate(zip(self._names, self._doors, strict=True)):
            other = DOORS[1 - DOORS.index(door)]
            rng = random.Random(f"hints/{self._seed}/{k}")
            right = rng.sample(range(self.hints), self.hints // 2)
            for n in range(self.hints):
                named = door if n in right else other
                yield f"b{k}-{n}", name, f"Visitor {n} of {name} took the {named} door."


@dataclass(slots=True)
class Try(Episode):
    """One response: of several doors the last one is meant."""

    observation: str
    door: str

    def step(self, action: str) -> Step:
        named = [word.strip(".") for word in action.lower().split() if word.strip(".") in DOORS]
        right = named[-1:] == [self.door]
        return Step("The prize." if right else "Nothing.", True, 1.0 if right else -1.0)


@dataclass(frozen=True)
class BanditSuite(Suite):
    """Doors."""

    hints: Annotated[int, COUNT] = HINTS
    """experiences of a task, half of them wrong"""

    unit, metric, generated = "steps", "reward", True

    def environment(self, scope: Scope) -> Bandit:
        return Bandit(hints=self.hints, seed=scope.seed)
