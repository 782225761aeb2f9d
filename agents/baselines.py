"""The baselines with one prompt: the whole document, the sections that match the question best,
the evidence alone, or the question alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from agents.retrieval import Lucene
from config.errors import UserError
from config.options import COUNT, LIMIT
from data import Task
from memagent import ROOM_TOKENS, Agent, Line, Prompt, ReadConfig, Turn, Wording
from tasks.lexicon import words

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
        """Make the prompt with a text, which past the window loses its middle."""
        ids = self.codec.ids(text)
        room = self.room(task.question) or len(ids)
        kept = ids[: room - room // 2] + ids[len(ids) - room // 2 :] if len(ids) > room else ids
        return self.answer(task, kept, len(ids) - len(kept))

    def answer(self, task: Task, ids: Sequence[int], cut: int) -> Prompt:
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
    extras = {"whole": True}

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        yield self.read(task, task.document)


class Oracle(AtOnce):
    """The passages that hold the evidence, in reading order, in one prompt.

    Of a question that names none, as four of LoCoMo do, it is given an empty document. A task that
    does not say where its evidence stands is refused.
    """

    name = "oracle"
    in_words = "reading the evidence alone"

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        if task.evidence is None:
            raise UserError(
                f"Task {task.id} does not say where its evidence stands: "
                "the agent oracle cannot read it"
            )
        yield self.read(task, task.evidence)


class NoContext(AtOnce):
    """The question alone; a right answer says nothing about reading."""

    name = "none"
    in_words = "without reading"
    prompts = {"none": Wording("Solve the problem. {answer}", ("problem",))}

    def window_needed(self) -> int:
        return ROOM_TOKENS + self.config.final_tokens

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        yield self.prompt("none", self.config.final_tokens, final=True, problem=task.question)


# ---------------------------------------------------------------- BM25


@dataclass(frozen=True, slots=True)
class BM25Config(AtOnceConfig):
    """How the BM25 baseline reads."""

    top_k: Annotated[int, COUNT] = 4
    """sections that the bm25 baseline reads"""


UNMATCHED = "No word of the question stands in the text: the sections read are the first ones."


@dataclass(slots=True)
class BM25Notes:
    """What a reader should know of the prompt."""

    remark: str


def words_of(text: str) -> list[str]:
    """List the words of a text but single letters and digits, as bm25s does."""
    return [word for word in words(text) if len(word) > 1 or word > "\u0e00"]


def best_sections(sections: Sequence[str], question: str, n: int) -> tuple[list[int], bool]:
    """Return the n sections that match a question best, the best first, and whether a word of the
    question has decided on them."""
    sought, found = words_of(question), [*map(words_of, sections)]
    matches = not {*sought}.isdisjoint(word for section in found for word in section)
    return Lucene(found).best(sought, n), matches


class BM25(AtOnce):
    """The `top_k` sections that match the question best (Lucene's BM25), in reading order, in one
    prompt."""

    name = "bm25"
    in_words = "reading only what matches the question"
    Config = BM25Config

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        # built in a helper: its lists of words are freed before the answer arrives
        prompt, matches = self._best_sections(task)
        turn = yield prompt
        turn.notes = None if matches else BM25Notes(UNMATCHED)

    def lines(self, turn: dict) -> list[Line]:
        remark = (turn.get("notes") or {}).get("remark")
        return [Line("remark", remark, before=True)] if remark else []

    def _best_sections(self, task: Task) -> tuple[Prompt, bool]:
        """Make the prompt; say whether a word of the question has decided on what it shows.

        Without room for all sections, those that match worst lose their ends first.
        """
        sections, room = self.sections(task), self.room(task.question)
        question = (task.probe or task).question  # without the answers to choose from
        best, matches = best_sections(sections, question, self.config.top_k)
        cut, kept = sections.left_out, {}
        for k in best:
            kept[k] = sections[k].ids[:room]
            cut += len(sections[k].ids) - len(kept[k])
            room = None if room is None else room - len(kept[k])
        prompt = self.answer(task, [i for k in sorted(kept) for i in kept[k]], cut)
        return prompt, matches or len(kept) == len(sections)
