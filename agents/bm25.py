"""BM25, the baseline: the sections that match the question best, in one prompt.

Holds: `BM25`. Leaves out: the retrievers of memories (agents/retrieval.py).
Exercise it: `python cli.py eval --agents bm25 --n 8`. Read next: agents/find.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

from agents.full import AtOnce, AtOnceConfig
from agents.retrieval import Lucene
from config.options import COUNT
from data import Task
from memagent import Line, Prompt, Turn
from tasks.lexicon import words


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


class BM25(AtOnce):
    """The `top_k` sections that match the question best (Lucene BM25), in reading order, in one
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
        sections = self.sections(task)
        room = self.room(task.question)
        cut = sections.left_out
        kept: dict[int, tuple[int, ...]] = {}
        plain = task.probe or task  # without the answers to choose from
        ranked, matches = self._ranked(plain.question, sections)
        for k in ranked:
            kept[k] = sections[k].ids[:room]
            cut += len(sections[k].ids) - len(kept[k])
            room = None if room is None else room - len(kept[k])
        prompt = self.answer(task, [i for k in sorted(kept) for i in kept[k]], cut)
        return prompt, matches or len(kept) == len(sections)

    def _ranked(self, question: str, sections: Sequence[str]) -> tuple[list[int], bool]:
        """Return the numbers of the best sections, the best first, and whether they match."""
        sought, found = words_of(question), [*map(words_of, sections)]
        matches = not {*sought}.isdisjoint(word for section in found for word in section)
        return Lucene(found).best(sought, self.config.top_k), matches
