"""Full context, the baseline: the whole document in one prompt.

Holds: `Full`, and `AtOnce` for every agent that reads in one prompt. Leaves out: which text is
read by the others (agents/bm25.py, agents/oracle.py, agents/none.py).
Exercise it: `python cli.py eval --agents full --n 8`. Read next: agents/bm25.py.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from config.errors import UserError
from config.options import LIMIT
from data import Task
from memagent import Agent, Prompt, ReadConfig, Turn, Wording

if TYPE_CHECKING:  # numpy comes with it, and `eval` would wait for that before its first line
    from tokens.codec import Codec


@dataclass(frozen=True, slots=True)
class AtOnceConfig(ReadConfig):
    """How an agent reads that has one prompt."""

    window: Annotated[int | None, LIMIT] = None
    """most tokens of a prompt and its answer; longer texts lose their middle. Never more than the
    model's own window, which is also what 0 or None means"""


class AtOnce(Agent):
    """An agent with one prompt, cut to the model's window."""

    Config = AtOnceConfig
    by_section = False
    prompts = {
        "full": Wording(
            "Read the document, then solve the problem. {answer}",
            ("section", "problem"),
            needs=("section",),
        )
    }

    def on(self, codec: Codec, window: int | None = None) -> Agent:
        """Keep of the setting's window and the engine's the smaller one."""
        return super().on(codec, min(filter(None, (self.config.window, window)), default=None))

    def window_needed(self) -> int | None:
        limit = self.config.window
        return max(self.turn_tokens(), limit) if limit else None

    def room(self, question: str) -> int | None:
        """Return the tokens left for the document beside question and answer; None = no limit."""
        if self.window is None:
            return None
        frame = self.prompt("full", 1, problem=question, section="")
        around = len(self.codec.chat(frame.pieces)) + self.config.final_tokens
        if self.window <= around:
            raise UserError(
                f"The question alone does not fit a window of {self.window} tokens; "
                "give a larger --window."
            )
        return self.window - around

    def read(self, task: Task, text: str) -> Prompt:
        """Make the prompt with a text.

        Past the window the text loses its middle, never the question.
        """
        ids = self.codec.ids(text)
        room = self.room(task.question) or len(ids)
        kept = ids[: room - room // 2] + ids[len(ids) - room // 2 :] if len(ids) > room else ids
        return self.answer(task, kept, len(ids) - len(kept))

    def answer(self, task: Task, ids, cut: int) -> Prompt:
        return self.prompt(
            "full",
            self.config.final_tokens,
            final=True,
            cut=cut,
            problem=task.question,
            section=self.codec.decode(ids),
        )


class Full(AtOnce):
    """The whole document in one prompt."""

    name = "full"
    in_words = "whole document in the prompt"
    whole = True

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        yield self.read(task, task.document)
