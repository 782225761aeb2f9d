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
from memagent import Prompt, Turn


@dataclass(frozen=True, slots=True)
class BM25Config(AtOnceConfig):
    """How the BM25 baseline reads."""

    top_k: Annotated[int, COUNT] = 4
    """sections that the bm25 baseline reads"""


def words_of(text: str) -> list[str]:
    import bm25s

    return bm25s.tokenize([text], stopwords=None, show_progress=False, return_ids=False)[0]


class BM25(AtOnce):
    """The `top_k` sections that match the question best (Lucene BM25), in reading order, in one
    prompt."""

    name = "bm25"
    in_words = "reading only what matches the question"
    Config = BM25Config

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        # built in a helper: its lists of words are freed before the answer arrives
        yield self._best_sections(task)

    def _best_sections(self, task: Task) -> Prompt:
        """Make the prompt.

        Without room for all sections, those that match worst lose their ends first.
        """
        sections = self.sections(task)
        room = self.room(task.question)
        cut = sections.left_out
        kept: dict[int, tuple[int, ...]] = {}
        plain = task.probe or task  # without the answers to choose from
        for k in self._ranked(plain.question, sections):
            kept[k] = sections[k].ids[:room]
            cut += len(sections[k].ids) - len(kept[k])
            room = None if room is None else room - len(kept[k])
        return self.answer(task, [i for k in sorted(kept) for i in kept[k]], cut)

    def _ranked(self, question: str, sections: Sequence[str]) -> list[int]:
        """Return the numbers of the best sections, the best first."""
        return Lucene([*map(words_of, sections)]).best(words_of(question), self.config.top_k)
