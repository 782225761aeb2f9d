"""Rollout: what an engine is, and the loop that drives many agents through one engine side by side.

Holds: the `Engine` protocol, `ScriptedEngine`, `rollout`, `together`, `follow`, `record` (a trajectory as plain data). Leaves out: agents
(memagent.py), the engine that samples from a model of transformers (slots.py), losses (grpo.py). No torch. Exercise it: `pytest tests/test_rollout.py`. Read next: slots.py.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from data import Task
from memagent import Agent, AgentConfig, Finish, Prompt, Trajectory, Turn
from rememr1 import Sought
from text import Codec, UserError


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


# ---------------------------------------------------------------- scripted


class ScriptedEngine:
    """For tests: answers every prompt with `script(prompt)`, a string; log-probs are 0. `per_step` turns are answered per step."""

    window = None

    def __init__(self, codec: Codec, script: Callable[[Prompt], str], per_step: int = 4):
        self.codec, self.script, self.per_step = codec, script, per_step
        self.prefilled_tokens = self.generated_tokens = 0
        self._queue: deque[tuple[int, Prompt]] = deque()
        self._keys = 0

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        self._queue.append((self._keys, prompt))
        return self._keys

    def step(self) -> list[tuple[int, Turn]]:
        done = []
        for _ in range(min(self.per_step, len(self._queue))):
            key, prompt = self._queue.pop()  # last in, first out: nobody may rely on the order
            ids = [*self.codec.encode(self.script(prompt)), self.codec.tokenizer.eos_token_id]
            finish = Finish.STOP if len(ids) <= prompt.max_tokens else Finish.LENGTH
            ids, prompt_ids = ids[: prompt.max_tokens], self.codec.chat(prompt.pieces)
            self.prefilled_tokens += len(prompt_ids)
            self.generated_tokens += len(ids)
            done.append((key, Turn(prompt, prompt_ids, ids, [0.0] * len(ids), finish, self.codec.response(ids))))
        return done

    def counts(self) -> dict[str, int]:
        return {"prefilled_tokens": self.prefilled_tokens, "reused_tokens": 0, "generated_tokens": self.generated_tokens}

    def close(self) -> None: ...

    def awake(self, policy=None) -> AbstractContextManager:
        return nullcontext()


def refusal(prompt: Prompt, ids: list[int], window: int, codec: Codec) -> Turn | None:
    """The turn of a prompt that does not fit the window with its response; None if it does."""
    if len(ids) + prompt.max_tokens <= window:
        return None
    turn = Turn(prompt, ids, [], [], Finish.FULL, codec.response([]))
    turn.error = f"a prompt of {len(ids)} tokens and {prompt.max_tokens} new ones exceed the model's window of {window}"
    return turn


# ---------------------------------------------------------------- the loop


def seed_of(*parts) -> int:
    """A 64-bit seed from anything printable, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def fitted(config: AgentConfig, engine: Engine) -> AgentConfig:
    """The settings with the window that the baselines have: the one asked for, never more than the engine's."""
    return replace(config, window=min(config.window or engine.window, engine.window)) if engine.window else config


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
            trajectory.turns.append(keep(trajectory, turn))  # with what the agent has read out of it
            if prompt is not None:
                running[engine.add(prompt, sampling, base + len(trajectory.turns))] = trajectory, steps, base, start
                continue
            trajectory.seconds = time.perf_counter() - start
            yield trajectory
        yield from begin()


T = TypeVar("T")


class _Stopped(BaseException):
    """Another function that shares the engine has failed."""


class _Seat:
    """One function's view of an engine that several share. The function runs, in a thread, only while it is its turn."""

    def __init__(self, engine: Engine, work: Callable[[Engine], object]):
        self.engine, self.codec, self.window, self.counts = engine, engine.codec, engine.window, engine.counts
        self.keys: set[int] = set()  # in flight
        self.finished: list[tuple[int, Turn]] = []
        self.result: object = None
        self.error: BaseException | None = None
        self.over = self.stopped = False
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._body, args=(work,), daemon=True)
        self.thread.start()

    def _body(self, work: Callable[[Engine], object]) -> None:
        try:
            self._wait()
            self.result = work(self)
        except BaseException as error:  # the thread's last frame: `together` raises it again, whatever it is
            self.error = error
        finally:
            self.over = True
            self.back.release()

    def _wait(self) -> None:
        self.go.acquire()
        if self.stopped:
            raise _Stopped

    def turn(self) -> None:
        """Let the function run until it waits for the engine, or ends."""
        self.go.release()
        self.back.acquire()

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        key = self.engine.add(prompt, sampling, seed)
        self.keys.add(key)
        return key

    def step(self) -> list[tuple[int, Turn]]:
        self.back.release()
        self._wait()
        finished, self.finished = self.finished, []
        return finished

    def awake(self, policy=None) -> AbstractContextManager:
        return nullcontext()

    def close(self) -> None: ...


def together(engine: Engine, works: Sequence[Callable[[Engine], T]]) -> list[T]:
    """Run functions that each drive an engine on the same one, side by side; returns their results in order.

    An evaluation of a few long documents leaves an engine half empty; beside another one it costs little more than nothing. The functions
    take turns in a fixed order, never two at a time, and the engine steps once all that are left wait for it: the same
    requests reach it in the same order in every run. The first exception ends the others and is raised.
    """
    with engine.awake():
        seats = [_Seat(engine, work) for work in works]
        try:
            while left := [seat for seat in seats if not seat.over]:
                for seat in left:
                    seat.turn()
                    if seat.error:
                        raise seat.error
                if any(not seat.over for seat in left):
                    for key, turn in engine.step():
                        seat = next(seat for seat in left if key in seat.keys)
                        seat.keys.remove(key)
                        seat.finished.append((key, turn))
        finally:
            for seat in seats:
                if not seat.over:
                    seat.stopped = True
                    seat.go.release()
                    seat.thread.join()
    return [seat.result for seat in seats]  # type: ignore[misc]


def follow(engine: Engine, agent: Agent, task: Task, config: AgentConfig, sampling: Sampling, seed: int = 0) -> Iterator[Turn]:
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


def record(trajectory: Trajectory, step: int | None = None, form: str = "", temperature: float | None = None) -> dict:
    """A trajectory as JSON-able data: what `show` prints, the report quotes, and a replay of the loss needs. form: that the answer was asked
    for in (`AgentConfig.form`); temperature: that it was sampled at."""
    task, sought = trajectory.task, Sought(trajectory.task)
    return {
        "id": task.id,
        "step": step,
        "sample": trajectory.sample,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "form": form,
        "temperature": temperature,
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 4),
        "turns": [
            {
                "final": turn.prompt.final,
                "section": turn.prompt.section,
                "memory": turn.prompt.memory,
                "response": str(turn.response),
                "finish": str(turn.finish),
                "prompt_ids": turn.prompt_ids,
                "response_ids": turn.response_ids,
                "logprobs": [round(x, 7) for x in turn.logprobs],
            }
            | looking_back(turn, sought)
            | ({"rewards": trajectory.states[k]} if trajectory.states else {})
            for k, turn in enumerate(trajectory.turns)
        ],
    }


def looking_back(turn: Turn, sought: Sought) -> dict:
    """What a record keeps of a turn of an agent that looks back: what had been recalled for it and whether that held evidence, what it asks
    for, what was wrong with its form."""
    recalled, step = turn.prompt.recalled, turn.step
    if recalled is None:
        return {}
    shown = {"text": recalled.text, "query": recalled.query, "from": list(recalled.steps), "score": round(recalled.score, 4)}
    shown |= {"held": sought.held(recalled.text)} if recalled.steps else {}
    if turn.prompt.final:
        return {"recalled": shown}
    said = {"update": (step and step.memory) or turn.prompt.memory, "query": (step and step.query) or ""}
    errors = [*step.errors, *(["stray_tag"] if step.stray else [])] if step else []
    return {"recalled": shown, "errors": errors} | said
