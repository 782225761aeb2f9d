"""Turns by the policy as it was before training, beside those of the one that is trained.

Two engines stand behind one interface. The second one is the trained model without its adapters, or
a copy of it. Where adapters are trained vLLM needs none of this: a request without the adapter is
answered by the base weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from memagent import Prompt, Turn
from rollout import Engine, Sampling


class WithFrozen(Engine):
    """An engine that passes `frozen` prompts on to a second one with the same tokenizer.

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
        self._asked: set[int] = set()  # in flight of the second engine

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; keys of the second engine are negative."""
        if not prompt.frozen:
            return self.engine.add(prompt, sampling, seed)
        key = self.frozen.add(prompt, sampling, seed)
        self._asked.add(key)
        return -1 - key

    def drop(self, key: int) -> None:
        """Give up a prompt of either engine."""
        if key >= 0:
            self.engine.drop(key)
        else:
            self._asked.discard(-1 - key)
            self.frozen.drop(-1 - key)

    def step(self) -> list[tuple[int, Turn]]:
        finished = self.engine.step()
        if not self._asked:
            return finished
        with self.without_adapters():
            answered = self.frozen.step()
        self._asked -= {key for key, _ in answered}
        return finished + [(-1 - key, turn) for key, turn in answered]

    @contextmanager
    def awake(self, policy=None) -> Iterator[None]:
        """Hold both ready: the second has its weights, whatever becomes of the policy's."""
        with self.engine.awake(policy), self.frozen.awake():
            yield

    def counts(self) -> dict[str, int]:
        other = self.frozen.counts()
        return {name: n + other[name] for name, n in self.engine.counts().items()}

    def close(self) -> None:
        self.engine.close()
        self.frozen.close()

    def __getattr__(self, name: str):
        return getattr(self.engine, name)  # what an engine has beyond the protocol, such as dtype
