"""Rollout: what an engine is, and the loop that drives many agents through one engine side by side.

Holds: the `Engine` protocol, `ScriptedEngine`, `rollout`, `together`, `follow`, `record` (a trajectory as plain data). Leaves out: agents
(memagent.py), the engine that samples from a model of transformers (engines/hf.py), losses (grpo.py). No torch. Exercise it: `pytest tests/test_rollout.py`. Read next: engines/hf.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from config.errors import UserError
from data import Task, seed_of
from memagent import Agent, AgentConfig, Finish, Prompt, Trajectory, Turn
from tokens.codec import Codec


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    """smallest set of tokens whose probability reaches this"""
    top_k: int = 0
    """0 keeps all"""

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError("Sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0.")


class Engine(Protocol):
    """Turns prompts into turns, continuously: prompts are added at any time, finished turns come back from `step` in any order.

    The same (weights, prompt, sampling, seed) gives the same turn whatever else is in flight, up to rounding of the arithmetic.
    """

    codec: Codec
    window: int | None  # most tokens of a prompt and its response; None: no limit

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; returns its key."""

    def step(self) -> list[tuple[int, Turn]]:
        """Do some work; returns the turns that finished. Empty only while something is still in flight."""

    def awake(self, policy=None) -> AbstractContextManager:
        """Hold the engine ready to generate, with the policy's weights as they are now (None: with those it has). On exit it may give
        up its memory, and turns that are still in flight."""

    def close(self) -> None:
        """Give up everything; it is not used again."""

    def counts(self) -> dict[str, int]:
        """Tokens so far: prefilled_tokens (of prompts, computed), reused_tokens (of prompts, taken from a cache), generated_tokens."""


def refusal(prompt: Prompt, ids: list[int], window: int, codec: Codec) -> Turn | None:
    """The turn of a prompt that does not fit the window with its response; None if it does."""
    if len(ids) + prompt.max_tokens <= window:
        return None
    turn = Turn(prompt, ids, [], [], Finish.FULL, codec.response([]))
    turn.error = f"a prompt of {len(ids)} tokens and {prompt.max_tokens} new ones exceed the model's window of {window}"
    return turn


def fitted(config: AgentConfig, engine: Engine) -> AgentConfig:
    """The settings with the window that the baselines have: the one asked for, never more than the engine's."""
    return (
        replace(config, window=min(config.window or engine.window, engine.window))
        if engine.window
        else config
    )


def rollout(
    engine: Engine,
    agent: Agent,
    jobs: Iterable[tuple[Task, int]],
    config: AgentConfig,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    in_flight: int = 512,
    keep: Callable[[Trajectory, Turn], Turn] = lambda trajectory, turn: turn,
) -> Iterator[Trajectory]:
    """Drive one agent per job (task, sample number) through the engine, at most `in_flight` at a time; yields trajectories as they finish.

    Every trajectory goes its own pace: there is no barrier between sections. A turn that could not be made ends its trajectory with
    `error` set; it is yielded like the others, and counted as wrong by whoever asks.

    keep: what the trajectory keeps of a turn. A document of millions of tokens stands in the prompts of its turns a second time.
    """
    jobs, config = iter(jobs), fitted(config, engine)
    running: dict[int, tuple[Trajectory, object, int, float]] = {}

    def begin() -> Iterator[Trajectory]:
        while len(running) < in_flight and (job := next(jobs, None)) is not None:
            task, sample = job
            trajectory, steps = Trajectory(task, sample=sample), agent(task, config, engine.codec)
            base = seed_of(seed, task.id, sample)
            start = time.perf_counter()
            try:
                running[engine.add(next(steps), sampling, base)] = trajectory, steps, base, start
            except UserError as error:
                trajectory.error = str(error)
                yield trajectory

    yield from begin()
    while running:
        for key, turn in engine.step():
            trajectory, steps, base, start = running.pop(key)
            prompt = None
            if turn.finish in (Finish.FULL, Finish.ERROR):
                trajectory.error = turn.error
            else:
                try:
                    prompt = steps.send(turn)
                except StopIteration:
                    pass
                except UserError as error:
                    trajectory.error = str(error)
            trajectory.turns.append(
                keep(trajectory, turn)
            )  # with what the agent has read out of it
            if prompt is not None:
                running[engine.add(prompt, sampling, base + len(trajectory.turns))] = (
                    trajectory,
                    steps,
                    base,
                    start,
                )
                continue
            trajectory.seconds = time.perf_counter() - start
            yield trajectory
        yield from begin()


def follow(
    engine: Engine, agent: Agent, task: Task, config: AgentConfig, sampling: Sampling, seed: int = 0
) -> Iterator[Turn]:
    """One trajectory, turn by turn as it happens."""
    steps = agent(task, fitted(config, engine), engine.codec)
    base, number = seed_of(seed, task.id, 0), 0
    prompt = next(steps)
    while True:
        engine.add(prompt, sampling, base + number)
        while not (done := engine.step()):
            pass
        ((_, turn),) = done
        number += 1
        if turn.finish in (Finish.FULL, Finish.ERROR):
            yield turn
            raise UserError(f"Turn {number} could not be made: {turn.error}.")
        try:
            prompt, more = steps.send(turn), True
        except StopIteration:
            more = False
        yield turn  # with what the agent has read out of it
        if not more:
            return
