"""Turns by a policy that is not trained, beside those of the one that is.

Holds: `WithFrozen`. Leaves out: which prompts are `frozen` (the agents), engines, which of them
answers (engines/open.py).
Exercise it: `pytest tests/engines/test_frozen.py`. Read next: engines/vllm_colocated.py.

Two engines stand behind one interface. The second one is the trained model without its adapters, a
copy of it, or another model, here or at a server. Where adapters are trained vLLM needs none of
this: a request without the adapter is answered by the base weights.

Another model may have another tokenizer. Agents know the first one's alone, so texts lose their ids
on the way to the second engine, and what it says gets ids of the first:

    prompt    pieces with ids of the first  ->  plain text  ->  ids of the second
    turn      prompt_ids, response_ids and log-probs as the second has them, for records and counts
              response with ids of the first, to stand in further prompts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from memagent import Finish, Prompt, Turn
from rollout import Engine, Sampling
from tokens.codec import Codec

MOMENT_S = 0.02
"""Longest wait for one server while another one may answer, too."""


class WithFrozen(Engine):
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
        self.codec, self.window, self.hint = engine.codec, engine.window, engine.hint
        self._same_ids = _same_ids(engine.codec, frozen.codec)
        # how long to wait for a server while the other engine has turns in flight
        self._moment_s = MOMENT_S if engine.poll and frozen.poll else 0.0
        # in flight, of each engine: key -> the agent's own prompt
        self._sampled: dict[int, Prompt] = {}
        self._asked: dict[int, Prompt] = {}

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        """Queue a prompt; keys of the second engine are negative."""
        told = prompt if self._same_ids else self._told(prompt, prompt.frozen)
        if not prompt.frozen:
            key = self.engine.add(told, sampling, seed)
            self._sampled[key] = prompt
            return key
        key = self.frozen.add(told, sampling, seed)
        self._asked[key] = prompt
        return -1 - key

    def drop(self, key: int) -> None:
        """Give up a prompt of either engine."""
        engine, keys = (self.engine, self._sampled) if key >= 0 else (self.frozen, self._asked)
        key = key if key >= 0 else -1 - key
        if keys.pop(key, None) is not None:
            engine.drop(key)

    def _told(self, prompt: Prompt, frozen: bool) -> Prompt:
        """Return a prompt as the second engine (`frozen`) or the first is to read it.

        Turns of its own keep their ids; those of the other engine, earlier in the conversation, are
        encoded anew.
        """
        codec = (self.frozen if frozen else self.engine).codec
        after = prompt.after
        if after is not None and after.prompt.frozen != frozen:
            before = self._told(after.prompt, frozen)
            ids, end = [*codec.reply(str(after.response))], codec.end_id
            if after.finish is Finish.STOP and end is not None:
                ids.append(end)
            after = replace(after, prompt=before, prompt_ids=before.ids(codec), response_ids=ids)
        if not frozen:
            return replace(prompt, after=after)
        pieces = tuple((str(text), constant) for text, constant in prompt.pieces)
        return replace(prompt, pieces=pieces, after=after)

    def step(self) -> list[tuple[int, Turn]]:
        sampling, asking = bool(self._sampled), bool(self._asked)
        finished = []
        for key, turn in self._step(self.engine, asking):
            turn.prompt = self._sampled.pop(key)
            finished.append((key, turn))
        if not asking:
            return finished
        with self.without_adapters():
            answered = self._step(self.frozen, sampling)
        for key, turn in answered:
            turn.prompt = self._asked.pop(key)
            if not self._same_ids:
                turn.response = self.codec.text(str(turn.response))
            finished.append((-1 - key, turn))
        return finished

    def _step(self, engine: Engine, other_works: bool) -> list[tuple[int, Turn]]:
        """Step one engine. A server is not waited for while the other one has something to do."""
        if other_works and engine.poll:
            return engine.poll(self._moment_s)
        return engine.step()

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


def _same_ids(first: Codec, second: Codec) -> bool:
    """Tell whether ids of one codec mean the same to the other."""
    exact = (
        first.exact and second.exact
    )  # ids that estimate lengths are numbered by each for itself
    return first is second or (exact and first.fingerprint == second.fingerprint)
