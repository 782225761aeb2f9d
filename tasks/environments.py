"""Environments: tasks that are worked on by actions, and judged by what these have done.

An environment gives its tasks one after the other; an episode is one try of one of them. Several
episodes of one environment may be under way side by side, also of the same task: they share no
state. What an environment needs (data, a package, a program, a right) is checked when it is made:
UserError says what is missing and the command that brings it. An action that cannot be carried out
is an observation, never an exception; what ends an episode is its last step, with a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from config.errors import UserError, clean, clip, first_line
from data import Task


def _whole(text: str) -> str:
    text.encode()  # of half a surrogate pair, which is no text, a ValueError
    return text


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


Unicode = Annotated[str, AfterValidator(_whole)]
"""A text of a user's file."""
Text = Annotated[Unicode, AfterValidator(_filled)]
"""A text of a user's file that is not blank."""
FIRST = Field(fail_fast=True)
"""Of a list in a user's file the first mistake is told: a million of them take a gigabyte."""
Texts = Annotated[tuple[Text, ...], FIRST]


@dataclass(frozen=True, slots=True)
class Step:
    """What an action has brought."""

    observation: str
    done: bool = False
    reward: float = 0.0  # of the whole episode, in [-1, 1], at its last step
    failure: str = ""  # why nothing more is possible: crashed, timed out; it counts as failed
    # how sure of its answer the action says it is, in percent; None: it does not say
    confidence: float | None = None


class Late(Sequence[str]):
    """Actions that are found out when they are first looked at, and then kept."""

    def __init__(self, find: Callable[[], Sequence[str]]):
        self._find = find

    @cached_property
    def found(self) -> tuple[str, ...]:
        return tuple(self._find())

    def __getitem__(self, at):
        return self.found[at]

    def __len__(self) -> int:
        return len(self.found)


class Episode:
    """One try of a task. It has its own state, and is closed whether it ended or not."""

    observation: str
    """what is to be done, as it is told at first"""

    def step(self, action: str) -> Step:
        """Carry out an action: the model's whole response, without thoughts."""
        raise NotImplementedError

    def give_up(self, failure: str) -> Step:
        """End the episode without a last word and judge what was done; failure: why it ends.

        By default it has failed.
        """
        return Step("", True, -1.0, failure)

    def close(self) -> None:
        """Release what the episode holds; again is harmless."""


class Environment:
    """A set of tasks and the world in which they are worked on."""

    name: str
    instructions: str
    """what every task has in common: which actions there are and how they are written"""
    most_steps: int
    """actions of an episode, after which it has failed"""
    leaves_nothing: bool = False
    """whether tries are no experiences"""
    skipped: int = 0
    """tasks of the source that are left out"""
    skipped_because: str = "have a picture"

    def tasks(self) -> Sequence[Work]:
        """Return all tasks, in a fixed order."""
        raise NotImplementedError

    def intent(self, id: str) -> str:
        """Return the text by which experiences of similar tasks are found."""
        raise NotImplementedError

    def reset(self, id: str) -> Episode:
        """Begin a task. UserError: it cannot be begun; it counts as failed."""
        raise NotImplementedError

    def experiences(self) -> Iterable[tuple[str, str, str]]:
        """Return (task id, intent, experience) of what is known at first."""
        return ()

    def skip_list(self) -> list[str]:
        """Return the ids of tasks that are not right by their own solution here."""
        return []

    def close(self) -> None:
        """Release what all episodes share."""


@dataclass(slots=True)
class Work(Task):
    """Hold a task that is worked on in an environment; its question is what is to be done."""

    environment: Environment | None = field(default=None, repr=False, compare=False)
    # actions that are known to lead to the reward, in the form that `step` takes; () = unknown
    solution: Sequence[str] = ()
    skills: tuple[str, ...] = ()  # that the task needs, as its source names them
    images: tuple[str, ...] = ()  # data URLs of the pictures that belong to the question
    content: str = ""  # fingerprint of what the question does not tell: tables, checks

    @property
    def digest(self) -> str:
        """Return a hex fingerprint of the task with what it is judged by."""
        return fingerprint((super(Work, self).digest, self.content))

    def begin(self) -> Episode:
        """Begin a try of the task."""
        return self.environment.reset(self.id)

    @property
    def instructions(self) -> str:
        """Return what its environment tells of every task."""
        return self.environment.instructions

    @property
    def intent(self) -> str:
        """Return the text by which experiences of similar tasks are found."""
        return self.environment.intent(self.id)


def fingerprint(parts: object) -> str:
    """Return a hex fingerprint of 16 digits, of how Python writes the parts."""
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).hexdigest()


_adapter = cache(TypeAdapter)


def checked(kind: Any, value: object, where: object, form: str) -> Any:
    """Return a value of a user's file as `kind`, a type that pydantic knows.

    UserError names the place within the file (where) and the field, and tells the right form.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{where}, {fault_of(error)}; {form}.") from error


def fault_of(error: Exception) -> str:
    """Return the first field that is wrong in a value of a user's file, and why."""
    reason = f"the field {error} is missing" if isinstance(error, KeyError) else first_line(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    return clip(clean(reason or type(error).__name__), 300)


def items(kind: Any, values: object, where: object, form: str) -> dict[str, Any]:
    """Return the items of a user's JSON object, at least one, by their ids; errors as `checked`."""
    values = checked(dict, values, where, form)
    if not values:
        raise UserError(f"{where} is empty; {form}.")
    return {id: checked(kind, value, f"{where}, item {id}", form) for id, value in values.items()}
