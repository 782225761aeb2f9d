"""Agents: generators that yield prompts and are sent turns. The words of the project, and MemAgent itself, on one page.

Holds: `Prompt`, `Turn`, `Trajectory`, `Group`; templates; the agents `memagent`, `full_context`, `bm25`; rewards.
Leaves out: engines (rollout.py), losses (grpo.py). No torch.
Exercise it: `python cli.py ask FILE "question"`. Read next: rollout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum

from data import Task
from text import Codec, Text


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"  # an end-of-sequence id was sampled
    LENGTH = "length"  # cut at max_tokens
    FULL = "full"  # prompt + max_tokens do not fit the model's window: nothing was sampled
    ERROR = "error"  # the engine failed; the reason is in Turn.error


@dataclass(slots=True, frozen=True)
class Prompt:
    """One user message as pieces, in order. `constant` pieces belong to the template; the others are slots."""

    pieces: tuple[tuple[str, bool], ...]  # (text, constant?)
    max_tokens: int
    final: bool = False  # the turn that answers
    section: str = ""  # what the turn reads, "" in a final turn
    memory: str = ""  # the memory it starts from

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


@dataclass(slots=True)
class Turn:
    """One model call."""

    prompt: Prompt
    prompt_ids: list[int]
    response_ids: list[int]  # as sampled, the end-of-sequence id included
    logprobs: list[float]  # the sampler's, one per response id, at the sampling temperature
    finish: Finish
    response: Text  # without the end-of-sequence id
    error: str = ""


@dataclass(slots=True)
class Trajectory:
    """All turns of one rollout of one task."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    sample: int = 0  # which of the group's G trajectories
    reward: float = 0.0  # raw, never overwritten
    error: str = ""  # why it failed; a failed trajectory counts as wrong
    seconds: float = 0.0

    @property
    def answer(self) -> str:
        """The final turn's response, "" if there is none."""
        return str(self.turns[-1].response) if self.turns and self.turns[-1].prompt.final else ""


@dataclass(slots=True)
class Group:
    """The G trajectories of one task."""

    task: Task
    trajectories: list[Trajectory]


Agent = Callable[[Task, "AgentConfig", Codec], Generator[Prompt, Turn, None]]
