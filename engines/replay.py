"""Go on with a reading that was stopped: recorded turns first, then an engine.

Holds: `Replay`. Leaves out: where turns are recorded (commands/ask.py), the engines.
Exercise it: `python cli.py ask --resume --name NAME`. Read next: engines/open.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager

from config.errors import UserError
from memagent import Finish, Prompt, Turn
from rollout import Engine, Sampling
from tokens.codec import Text


class Replay(Engine):
    """An engine that answers the first prompts with recorded turns (`report.records`).

    An agent is a generator and cannot be stored, so it is fed the very tokens of its turns once
    more: it then stands where it stood. UserError: it asks something else than it did.
    """

    def __init__(self, engine: Engine, turns: Iterable[dict]):
        self.engine, self.codec, self.window = engine, engine.codec, engine.window
        self._recorded, self._done = deque(turns), []

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        if not self._recorded:
            return self.engine.add(prompt, sampling, seed)
        self._done.append((0, self._turn(prompt, self._recorded.popleft())))
        return 0

    def _turn(self, prompt: Prompt, recorded: dict) -> Turn:
        ids, response_ids = prompt.ids(self.codec), list(recorded["response_ids"])
        same = (prompt.section, prompt.memory) == (recorded["section"], recorded["memory"])
        # ids that estimate lengths are numbered anew by every process
        if not same or (self.codec.exact and ids != recorded["prompt_ids"]):
            raise UserError(
                "What was read cannot be gone on with: the model, its tokenizer or the agent's "
                "prompts are others than before. Ask anew under another --name."
            )
        text = recorded["response"]
        if self.codec.exact:
            response = Text(text, self.codec.response(response_ids).ids)
        else:
            response = Text(text, self.codec.encode(text))
            response_ids = list(response.ids)
        finish = Finish(recorded["finish"])
        return Turn(prompt, ids, response_ids, recorded["logprobs"], finish, response)

    def step(self) -> list[tuple[int, Turn]]:
        done, self._done = self._done, []
        return done or self.engine.step()

    def awake(self, policy=None) -> AbstractContextManager:
        return self.engine.awake(policy)

    def close(self) -> None:
        self.engine.close()

    def counts(self) -> dict[str, int]:
        return self.engine.counts()
