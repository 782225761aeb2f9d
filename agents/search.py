"""Search in a memory store, by words (BM25) or by meaning (embeddings); always over the entries
that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from agents.retrieval import Lucene, tokens
from agents.store import Entry, number
from tasks.conversations import session_of

EMBEDDINGS = 50_000
"""Embeddings that a `Search` keeps, those made last."""


class Embedder(Protocol):
    """What turns texts into vectors whose scalar product is their similarity."""

    name: str
    dim: int

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        """Return float32 [N, dim], rows of length 1. query: they ask, and are not searched."""

    def cut(self, texts: Sequence[str], query: bool = False) -> list[bool]:
        """Say of each text whether its end is not read, as far as is known."""
        return [False] * len(texts)


def recall(found: Sequence[Entry], evidence: Sequence[str]) -> float:
    """Return the share of the evidence that the found entries were taken from; of none it is 1.

    A piece of evidence counts if an entry names it. Where only the session is known on one side,
    S3, the sessions are compared: an entry that was written while session 3 was read, and names no
    turn, is of D3:1 too.

    >>> recall([Entry("m1", "It rains.", evidence=("S3",))], ["D3:1", "D4:2"])
    0.5
    """
    if not evidence:
        return 1.0
    named = {source for entry in found for source in entry.evidence}
    whole = {session_of(source) for source in named if source.startswith("S")} - {None}
    touched = {*map(session_of, named)} - {None}

    def is_found(source: str) -> bool:
        sessions = touched if source.startswith("S") else whole
        return source in named or session_of(source) in sessions

    return sum(map(is_found, evidence)) / len(evidence)


def searched(entry: Entry) -> str:
    """Return the text by which an entry is found: as it is shown, but with its date in words.

    Questions say "in May", and no word of theirs is in an ISO date.

    >>> searched(Entry("m1", "It rains.", speaker="Ann", date="2023-05-08"))
    '8 May 2023 Ann: It rains.'
    """
    if not entry.date:
        return entry.shown
    day = date.fromisoformat(entry.date)
    return f"{day.day} {day:%B %Y} {entry.shown.partition(' ')[2]}"


@lru_cache(64)
def _index(texts: tuple[str, ...]) -> Lucene:
    """Return the index of some texts, which several queries share."""
    return Lucene([*map(tokens, texts)])


class Search:
    """Find the entries that match a query best, by their text with date and speaker.

    how: "bm25" finds entries that share a word with the query; "dense" ranks all by the cosine of
    their embeddings, of which each is made once, and needs an embedder.
    """

    def __init__(self, how: Literal["bm25", "dense"] = "bm25", embedder: Embedder | None = None):
        self.how, self.embedder = how, embedder
        self._known: dict[tuple[str, bool], np.ndarray] = {}  # (text, is it a query?) -> embedding

    def top(
        self,
        entries: Sequence[Entry],
        query: str,
        k: int,
        keep: Callable[[Entry], bool] = lambda entry: True,
    ) -> list[tuple[Entry, float]]:
        """Return the k best entries with their scores, the best first; of equals the lower id.

        keep: says which entries may be found; what a word weighs still depends on all of them.
        """
        texts = tuple(map(searched, entries))
        if self.how == "dense":
            scores = self._cosines(texts, query) if texts else []
        else:
            scores = _index(texts).scores(tokens(query)).tolist()
        found = [
            (entry, score)
            for entry, score in zip(entries, scores, strict=True)
            if (self.how == "dense" or score > 0) and keep(entry)
        ]
        return sorted(found, key=lambda hit: (-hit[1], number(hit[0].id)))[:k]

    def _cosines(self, texts: Sequence[str], query: str) -> list[float]:
        query = query.encode(errors="replace").decode()  # without half of a surrogate pair
        vectors = self._embed(texts, False) @ self._embed([query], True)[0]
        # In other batches and on other machines the last digits differ: they decide no tie
        return vectors.round(6).tolist()

    def _embed(self, texts: Sequence[str], query: bool) -> np.ndarray:
        """Return the embeddings of texts, of which only those not made before are made."""
        known = self._known
        if new := [text for text in dict.fromkeys(texts) if (text, query) not in known]:
            rows = self.embedder.embed(new, query)
            known |= {(text, query): row.copy() for text, row in zip(new, rows, strict=True)}
        matrix = np.stack([known[text, query] for text in texts])
        while len(known) > EMBEDDINGS:
            del known[next(iter(known))]
        return matrix
