"""A suite of your own, complete: its settings, its columns, a grader, and tasks that answer back.

Copy this file, change it, and give its path to any command that asks questions:

    python cli.py eval --name own-suite --suite examples/own_suite.py --agents bm25,none
    python cli.py data build counts --suite examples/own_suite.py --lengths 4,16
    python cli.py stream --suite examples/own_suite.py --epochs 3
    python cli.py stream --suite examples/own_suite.py --help-all

The only subclass of `Suite` in the file is the suite. No other file of the repository knows it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from data import Task, seed_of
from suites import Column, Scope, Suite
from tasks.environments import Environment, Episode, Step, Work

GOODS = "apples bricks candles drums eggs forks gloves hammers ink jars".split()


@dataclass(frozen=True)
class Store(Suite):
    """A store's log of counts, line by line: what was counted last, and first, of some goods.

    Each field is a flag of `--suite PATH`; the docstring below it is the help.
    """

    goods: Annotated[int, Field(ge=1, le=len(GOODS))] = 5
    """kinds of goods in the store"""

    # what lengths count, those that are asked without --lengths, and what the tables show: answers
    # are graded by em, f1 or sub_em, or by the tasks themselves ("reward", see `Work` below)
    unit, lengths, metric = "lines", (4, 16), "sub_em"

    def columns(self, scope: Scope) -> list[Column]:
        """Return a column for each kind of question and length; its tasks are made on demand.

        `scope` has the user's --data, --lengths, --n and --seed. Read files here, at once, so that
        mistakes show before a model is loaded; `self.file_in(scope)` is the one that is named.
        """
        return [
            Column(kind, length, partial(self.make, scope, kind, length))
            for length in scope.lengths
            for kind in ("last", "first")
        ]

    def make(self, scope: Scope, kind: str, length: int) -> list[Task]:
        """Return the same tasks at every call, each with an id of its own."""
        return [self.task(scope.seed, kind, length, k) for k in range(scope.n)]

    def task(self, seed: int, kind: str, length: int, k: int) -> Task:
        rng = random.Random(seed_of(seed, "store", length, k))
        lines = [(rng.choice(GOODS[: self.goods]), rng.randrange(10, 100)) for _ in range(length)]
        goods = rng.choice(lines)[0]
        counts = [count for name, count in lines if name == goods]
        answer = counts[-1] if kind == "last" else counts[0]
        return Task(
            id=f"{kind}-{length}-{k}",
            question=f"How many {goods} were counted {kind}?",
            answers=(str(answer),),  # all that are accepted
            text="\n".join(f"Line {n}: {count} {name}." for n, (name, count) in enumerate(lines)),
            kind=kind,
        )

    # Leave out what follows where tasks do not answer back: `stream` works on an environment, and
    # a suite without `columns` of its own has those of its environment in `eval`.

    def environment(self, scope: Scope) -> Counting:
        return Counting([self.task(scope.seed, "last", 4, k) for k in range(8)])


class Counting(Environment):
    """The world of `stream`: one response a task, which is right or wrong."""

    name, most_steps = "store", 1
    instructions = "Answer with a number alone."

    def __init__(self, questions: Sequence[Task]):
        self._questions = {task.id: task for task in questions}

    def tasks(self) -> list[Work]:
        return [
            Work(
                id=task.id,
                question=self.intent(task.id),
                answers=(),
                text="",
                kind=task.kind,
                environment=self,
                solution=task.answers,  # known to be right, for the agent gold
            )
            for task in self._questions.values()
        ]

    def intent(self, id: str) -> str:
        """Return the text by which experiences of similar tasks are found."""
        return f"{self._questions[id].text}\n{self._questions[id].question}"

    def reset(self, id: str) -> Try:
        return Try(self.intent(id), self._questions[id].answers[0])

    def close(self) -> None:
        """Release what all tries share."""


class Try(Episode):
    """One try of a task."""

    def __init__(self, observation: str, answer: str):
        self.observation, self._answer = observation, answer

    def step(self, action: str) -> Step:
        """Judge a response; the reward is between -1 and 1."""
        right = action.split()[-1:] == [self._answer]
        return Step("right" if right else "wrong", done=True, reward=1.0 if right else -1.0)

    def close(self) -> None:
        """Release what the try holds."""
