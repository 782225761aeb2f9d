"""Rollout: the protocol of an engine, and the loop that drives many agents through one side by
side.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from config.errors import AgentError, ServerFailed, UserError
from config.plugins import told
from data import Task, seed_of
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from tokens.codec import Codec


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    """smallest set of tokens whose probability reaches this"""

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UserError("Sampling needs temperature >= 0 and 0 < top_p <= 1.")

    def for_prompt(self, prompt: Prompt) -> Sampling:
        """Return how a prompt is answered: a frozen one greedily."""
        return replace(self, temperature=0.0) if prompt.frozen else self


class Engine(Protocol):
    """What turns prompts into turns, continuously: prompts are added at any time, and finished
    turns come back from `step` in any order.

    The same (weights, prompt, sampling, seed) gives the same turn whatever else is in flight, up
    to rounding. A `frozen` prompt is answered, greedily, by the policy as it was before training,
    where the engine samples for a trainer; any other engine has one policy only, which answers.
    """

    codec: Codec
    window: int | None  # most tokens of a prompt and its response; None: no limit
    poll: Callable[[float], list] | None = None  # `step` of a server, which waits this long at most

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; return its key."""

    def step(self) -> list[tuple[int, Turn]]:
        """Do some work; return the turns that finished, none only while some are in flight."""

    def drop(self, key: int) -> None:
        """Give up a prompt that was added; its turn never comes back."""

    def awake(self, policy=None) -> AbstractContextManager:
        """Hold the engine ready with the policy's weights of now; None: with those that it has.

        On exit it may release its memory and drop the turns still in flight.
        """

    def close(self) -> None:
        """Release all resources; the engine is unusable afterwards."""

    def counts(self) -> dict[str, int]:
        """Count tokens so far: prefilled_tokens and reused_tokens (of prompts, computed or taken
        from a cache), generated_tokens."""
        names = ("prefilled_tokens", "reused_tokens", "generated_tokens")
        return {name: getattr(self, name, 0) for name in names}


def refusal(prompt: Prompt, ids: list[int], window: int, codec: Codec) -> Turn | None:
    """Return the failed turn of a prompt that does not fit the window with its response; None if
    it fits."""
    if len(ids) + prompt.max_tokens <= window:
        return None
    turn = Turn(prompt, ids, [], [], Finish.FULL, codec.response([]))
    turn.error = (
        f"a prompt of {len(ids)} tokens and {prompt.max_tokens} new ones "
        f"exceed the model's window of {window}"
    )
    return turn


def given(prompt: Prompt, codec: Codec) -> Turn | None:
    """Return the turn of a prompt to which the agent gives the response itself, else None."""
    if prompt.given is None:
        return None
    return Turn(prompt, [], [], [], Finish.STOP, codec.text(prompt.given))


# ---------------------------------------------------------------- the loop


def start(agent: Agent, task: Task, sample: int = 0) -> Generator[Prompt, Turn, None]:
    """Start an agent on a task, the same for all samples. AgentError: `run` is no generator."""
    steps = agent.run(task)
    if not inspect.isgenerator(steps):
        raise AgentError(
            f"The agent {agent.label} has a run that is no generator: it must yield prompts."
        )
    return steps


def advance(agent: Agent, steps: Generator, turn: Turn | None = None) -> Prompt | None:
    """Send an agent its last turn; return its next prompt, None if there is none.

    UserError is the agent's own: the trajectory has failed. AgentError is a mistake in its code.
    """
    at = "" if turn else _place(steps)  # a generator that has ended stands nowhere
    try:
        with told(AgentError):
            prompt = steps.send(turn)
    except StopIteration:
        if turn is None:
            raise AgentError(f"The agent {agent.label} ended without a prompt ({at}).") from None
        return None
    if not isinstance(prompt, Prompt):
        raise AgentError(
            f"The agent {agent.label} yielded {type(prompt).__name__}, which is no prompt "
            f"({_place(steps)}): yield self.prompt(...)."
        )
    return prompt


def _place(steps: Generator) -> str:
    """Return the file and line at which a generator stands."""
    while inspect.isgenerator(steps.gi_yieldfrom):
        steps = steps.gi_yieldfrom
    line = steps.gi_frame.f_lineno if steps.gi_frame else steps.gi_code.co_firstlineno
    return f"{steps.gi_code.co_filename}, line {line}"


@dataclass(slots=True)
class _Running:
    """A trajectory in flight."""

    trajectory: Trajectory
    steps: Generator
    seed: int
    started: float


def rollout(
    engine: Engine,
    agent: Agent,
    jobs: Iterable[tuple[Task, int]],
    sampling: Sampling = Sampling(),
    seed: int = 0,
    in_flight: int = 512,
    keep: Callable[[Trajectory, Turn], Turn] = lambda trajectory, turn: turn,
    steps_of: Callable[[Agent, Task, int], Generator[Prompt, Turn, None]] = start,
) -> Iterator[Trajectory]:
    """Drive an agent through the engine, once per job (task, sample number), at most `in_flight`
    at a time.

    Yield trajectories as they finish. Each goes at its own pace: there is no barrier between
    sections. A turn that could not be made ends its trajectory with `error` set; it is yielded
    like the others.

    keep: what the trajectory keeps of a turn, since the prompts of all turns hold the document
    once more. steps_of: begins a job.
    """
    jobs, agent = iter(jobs), agent.on(engine.codec, engine.window)
    running: dict[int, _Running] = {}

    def send(job: _Running, turn: Turn | None) -> bool:
        """Send the agent a turn and the engine its next prompt; False if the trajectory is over."""
        while True:
            try:
                prompt = advance(agent, job.steps, turn)
            except AgentError:
                raise
            except UserError as error:
                job.trajectory.error, prompt = str(error), None
                job.trajectory.fault = isinstance(error, ServerFailed)
            if turn is not None:
                job.trajectory.turns.append(keep(job.trajectory, turn))  # with the agent's notes
            if prompt is None:
                return False
            if (turn := given(prompt, engine.codec)) is None:
                break
        key = engine.add(prompt, sampling.for_prompt(prompt), job.seed + len(job.trajectory.turns))
        running[key] = job
        return True

    def begin() -> Iterator[Trajectory]:
        while len(running) < in_flight and (job := next(jobs, None)) is not None:
            task, sample = job
            seed_of_job, steps = seed_of(seed, task.id, sample), steps_of(agent, task, sample)
            trajectory = Trajectory(task, sample=sample)
            if not send(_Running(trajectory, steps, seed_of_job, time.perf_counter()), None):
                yield trajectory

    yield from begin()
    while running:
        for key, turn in engine.step():
            job = running.pop(key)
            if turn.finish in (Finish.FULL, Finish.ERROR):
                job.trajectory.error = turn.error
                job.trajectory.fault = turn.finish is Finish.ERROR
                job.trajectory.turns.append(keep(job.trajectory, turn))
            elif send(job, turn):
                continue
            job.trajectory.seconds = time.perf_counter() - job.started
            yield job.trajectory
        yield from begin()


def follow(
    engine: Engine, agent: Agent, task: Task, sampling: Sampling, seed: int = 0
) -> Iterator[Turn]:
    """Yield the turns of one trajectory as they happen."""
    agent = agent.on(engine.codec, engine.window)
    steps = start(agent, task)
    base, number = seed_of(seed, task.id, 0), 0
    prompt = advance(agent, steps)
    while prompt is not None:
        if (turn := given(prompt, engine.codec)) is None:
            engine.add(prompt, sampling.for_prompt(prompt), base + number)
            while not (done := engine.step()):
                pass
            ((_, turn),) = done
        number += 1
        if turn.finish in (Finish.FULL, Finish.ERROR):
            yield turn
            raise UserError(f"Turn {number} could not be made: {turn.error}.")
        prompt = advance(agent, steps, turn)
        yield turn  # with the agent's notes
