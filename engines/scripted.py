"""An engine for tests: it answers with a function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from memagent import Finish, Prompt, Turn
from rollout import Engine, Sampling
from tokens.codec import Codec


class ScriptedEngine(Engine):
    """Answers every prompt with `script(prompt)`, a string, for tests.

    Log-probs are 0. per_step: turns that a call of `step` answers.
    """

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

    def drop(self, key: int) -> None:
        self._queue = deque((k, prompt) for k, prompt in self._queue if k != key)

    def step(self) -> list[tuple[int, Turn]]:
        done = []
        for _ in range(min(self.per_step, len(self._queue))):
            key, prompt = self._queue.pop()  # last in, first out: no caller may rely on the order
            end = self.codec.tokenizer.eos_token_id
            ids = [*self.codec.reply(self.script(prompt)), *([] if end is None else [end])]
            finish = Finish.STOP if len(ids) <= prompt.max_tokens else Finish.LENGTH
            ids, prompt_ids = ids[: prompt.max_tokens], prompt.ids(self.codec)
            self.prefilled_tokens += len(prompt_ids)
            self.generated_tokens += len(ids)
            response, logprobs = self.codec.response(ids), [0.0] * len(ids)
            done.append((key, Turn(prompt, prompt_ids, ids, logprobs, finish, response)))
        return done

    def close(self) -> None: ...

    def awake(self, policy=None) -> AbstractContextManager:
        return nullcontext()
