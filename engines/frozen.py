"""Turns by the policy as it was before training, beside those of the policy that is trained.

Holds: `WithFrozen`. Leaves out: which prompts are `frozen` (the agents), engines.
Exercise it: `pytest tests/engines/test_frozen.py`. Read next: engines/vllm_colocated.py.

Two engines stand behind one interface. The policy before training is the trained model without its
adapters or, where all weights are trained, a copy of it. vLLM needs none of this: a request without the
adapter is answered by the base weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from memagent import Prompt, Turn
from rollout import Engine, Sampling


class WithFrozen:
    """An engine that passes `frozen` prompts on to a second one.

    without_adapters: the context in which the second engine computes, where it shares the model.
    """

    def __init__(
        self,
        engine: Engine,
        frozen: Engine,
        without_adapters: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.engine, self.frozen, self.without_adapters = engine, frozen, without_adapters
        self.codec, self.window = engine.codec, engine.window
        self._in_flight = 0  # of the frozen engine

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; keys of the second engine are negative."""
        if not prompt.frozen:
            return self.engine.add(prompt, sampling, seed)
        self._in_flight += 1
        return -1 - self.frozen.add(prompt, sampling, seed)

    def step(self) -> list[tuple[int, Turn]]:
        finished = self.engine.step()
        if self._in_flight:
            with self.without_adapters():
                answered = self.frozen.step()
            self._in_flight -= len(answered)
            finished += [(-1 - key, turn) for key, turn in answered]
        return finished

    def awake(self, policy=None) -> AbstractContextManager:
        return self.engine.awake(policy)

    def counts(self) -> dict[str, int]:
        own, other = self.engine.counts(), self.frozen.counts()
        return {name: n + other[name] for name, n in own.items()}

    def close(self) -> None:
        self.engine.close()
        self.frozen.close()

    def __getattr__(self, name: str):
        return getattr(self.engine, name)  # what an engine has beyond the protocol, such as dtype
