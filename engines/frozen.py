"""Turns by the policy as it was before training, beside those of the one that is trained.

Two engines stand behind one interface. The second has the trained model without its adapters, or a
copy of it. vLLM with adapters needs none of this: a request without the adapter is answered by the
base weights.
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
        self.engines, self.without_adapters = (engine, frozen), without_adapters
        self.codec, self.window = engine.codec, engine.window
        self._asked: set[int] = set()  # in flight of the second engine

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; the keys of the first engine become even ones, of the second odd ones."""
        key = 2 * self.engines[prompt.frozen].add(prompt, sampling, seed) + prompt.frozen
        if prompt.frozen:
            self._asked.add(key)
        return key

    def drop(self, key: int) -> None:
        self._asked.discard(key)
        self.engines[key % 2].drop(key // 2)

    def step(self) -> list[tuple[int, Turn]]:
        engine, frozen = self.engines
        finished = [(2 * key, turn) for key, turn in engine.step()]
        if self._asked:
            with self.without_adapters():
                answered = [(2 * key + 1, turn) for key, turn in frozen.step()]
            self._asked -= {key for key, _ in answered}
            finished += answered
        return finished

    @contextmanager
    def awake(self, policy=None) -> Iterator[None]:
        """Hold both ready: the second has its weights, whatever becomes of the policy's."""
        engine, frozen = self.engines
        with engine.awake(policy), frozen.awake():
            yield

    def counts(self) -> dict[str, int]:
        ours, other = (engine.counts() for engine in self.engines)
        return {name: n + other[name] for name, n in ours.items()}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
