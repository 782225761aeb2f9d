"""What `cli.py demo --agent NAME` trains and compares, of agents that have a demo of their own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a demo is done: trainings of every agent, and sections -> questions for each
    policy."""

    seeds: int
    training: dict[str, dict]  # agent -> fields of GRPOConfig, over the preset demo
    lengths: dict[str, tuple[int, ...]]  # agent -> sections of its training documents
    questions: dict[int, int]


@dataclass(frozen=True, slots=True)
class Demo:
    """An agent and others trained from one policy, with as many steps, and compared. An agent
    without one is trained alone, beside the untrained policy and full context."""

    beside: tuple[str, ...]  # agents that are trained likewise
    kind: str  # of question
    title: str
    sizes: dict[str, Size]  # default, short
    # label -> settings with which the trained agent answers as well
    variants: dict[str, dict] = field(default_factory=dict)
    baselines: tuple[str, ...] = ("full",)  # agents that answer with the untrained policy
    data: str = "world"  # what is read: generated documents, or ledger = generated sessions
    model: str = ""  # folder of the base policy in embedded/; "" = the usual one
