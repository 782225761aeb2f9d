"""Memories as plain state with an update rule: what an agent carries from one turn to the next."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol


class Retriever(Protocol):
    """What looks back through the memories of one trajectory (agents/retrieval.py)."""

    def add(self, item: str) -> None:
        """Take in an item; its index is the number of those before."""

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = ()
    ) -> list[tuple[int, float]]:
        """List the k best items as (index, score), the best first."""


def overwrite(old: str, new: str, first: str, empty: str = "placeholder") -> str:
    """Apply MemAgent's rule: the response is the memory.

    empty: what becomes of a response without text: "placeholder" = the first-memory literal
    (MemAgent's asynchronous path), "keep" = the old memory (vime), "empty" = stays empty.

    >>> overwrite("old", "new", "none yet"), overwrite("old", " ", "none yet")
    ('new', 'none yet')
    """
    if new.strip():
        return new
    return {"placeholder": first, "keep": old, "empty": new}[empty]


@dataclass(frozen=True, slots=True)
class Recall:
    """What a look back has brought, as it stands in the next prompt."""

    text: str = ""  # the stored memories, "" = nothing was recalled
    query: str = ""  # "" = nothing was asked
    steps: tuple[int, ...] = ()  # after which update, from 1, each was written, the best one first
    score: float = 0.0  # of the best one
    # updates between the writing of the best one and the query; 1 = it was overwritten just now
    age: int = 0


@dataclass(slots=True)
class MemoryState:
    """A memory that can look back: its text, what was recalled, and all memories so far."""

    memory: str
    retriever: Retriever
    placeholder: str = ""  # a memory without content, such as the first: never stored
    recalled: Recall = Recall()
    # (update, from 1; memory), only what an update has written
    history: list[tuple[int, str]] = field(default_factory=list)
    step: int = 0  # updates so far

    def update(self, new: str | None, query: str | None, k: int = 1) -> None:
        """Take over a new memory (None: the old one stays), then look back for `query` (None:
        nothing is recalled).

        The memory that the next prompt shows anyway is never a candidate, so the first update
        recalls nothing. A memory that was written several times is found once, as the last time.
        """
        self.step += 1
        if new is not None:
            self.memory = new
            if new.strip() not in ("", self.placeholder.strip()):
                if self.history and self.history[-1][1] == new:  # written as it stood
                    self.history.pop()
                else:
                    self.retriever.add(new)
                self.history.append((self.step, new))
        if not query:
            self.recalled = Recall()
            return
        last = {text: i for i, (_, text) in enumerate(self.history) if text != self.memory}
        without = {*range(len(self.history))} - {*last.values()}
        found = self.retriever.top_k(query, k, without)
        hits = [self.history[i] for i, _ in found]
        self.recalled = Recall(
            "\n\n".join(text for _, text in sorted(hits)),
            query,
            tuple(step for step, _ in hits),
            found[0][1] if found else 0.0,
            self.step - hits[0][0] if hits else 0,
        )
