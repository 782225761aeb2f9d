"""Search in a memory store: BM25, embeddings, or both; always over the entries it is given.

Holds: `Search`, `Embedder`, `recall`. Leaves out: the embedders (models/embedder.py), the
retrievers of memories (agents/retrieval.py). No torch.
Exercise it: `pytest tests/agents/test_search.py`. Read next: models/embedder.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from agents.retrieval import Lucene, tokens
from agents.store import Entry, number
from config.errors import UserError
from tasks.conversations import session_of

RRF_K = 60
"""Reciprocal rank fusion adds 1 / (RRF_K + rank), the best rank being 1 (Cormack et al. 2009)."""
INDEXES = 64
"""Indexes that a `Search` keeps, those used last."""
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


@lru_cache(1 << 14)
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


class Search:
    """Find the entries that match a query best, by their text with date and speaker.

    how: "bm25" finds entries that share a word with the query; "dense" ranks all by the cosine of
    their embeddings; "hybrid" fuses both rankings by reciprocal ranks. The last two need an
    embedder.

    Indexes and embeddings are kept: several queries to the same entries build one index, and a
    text is embedded once.
    """

    def __init__(
        self,
        how: Literal["bm25", "dense", "hybrid"] = "bm25",
        embedder: Embedder | None = None,
    ):
        self.how, self.embedder = how, embedder
        self._indexes: OrderedDict[tuple[int, ...], _Index] = OrderedDict()
        # (text, is it a query?) -> its embedding, and whether its end was not read
        self._embeddings: dict[tuple[str, bool], tuple[np.ndarray, bool]] = {}

    def top(
        self,
        entries: Sequence[Entry],
        query: str,
        k: int,
        keep: Callable[[Entry], bool] | None = None,
    ) -> list[tuple[Entry, float]]:
        """Return the k best entries with their scores, the best first; of equals the lower id.

        keep: says which entries may be found; what a word weighs still depends on all of them.
        """
        if not entries:
            return []
        index = self._index(entries)
        at = [i for i, entry in enumerate(index.entries) if keep is None or keep(entry)]
        found: list[dict[int, float]] = []  # position -> score, by each way of searching
        if self.how != "dense":
            lexical = index.lexical(tokens(query))
            found.append({i: lexical[i] for i in at if lexical[i] > 0})
        if self.how != "bm25":
            cosines = self._cosines(index, query)
            found.append({i: cosines[i] for i in at})
        scores = found[0] if len(found) == 1 else fused([*map(index.ranked, found)])
        return [(index.entries[i], scores[i]) for i in index.ranked(scores)[:k]]

    def n_cut(self, entries: Sequence[Entry], query: str) -> int:
        """Return how many texts of a search the embedder has not read to their end: of the entries,
        and the query."""
        if self.how == "bm25" or not entries:
            return 0
        keys = [*((text, False) for text in self._index(entries).texts), (_whole(query), True)]
        return sum(self._embeddings[key][1] for key in keys if key in self._embeddings)

    def _index(self, entries: Sequence[Entry]) -> _Index:
        """Return the index of these very entries. It keeps them, so that no other object can have
        the identity of one of them. (An id and a version do not: other stores have the same.)"""
        key = tuple(map(id, entries))
        index = self._indexes.pop(key, None) or _Index(entries)
        self._indexes[key] = index
        if len(self._indexes) > INDEXES:
            self._indexes.popitem(last=False)
        return index

    def _cosines(self, index: _Index, query: str) -> list[float]:
        if index.embedded is None:
            index.embedded = self._embed(index.texts)
        cosines = index.embedded @ self._embed([_whole(query)], query=True)[0]
        # In other batches and on other machines the last digits differ: they decide no tie
        return cosines.round(6).tolist()

    def _embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        """Embed those texts that were not embedded before; UserError: of another dimension."""
        known, embedder = self._embeddings, self.embedder
        new = [text for text in dict.fromkeys(texts) if (text, query) not in known]
        if new:
            rows = embedder.embed(new, query)
            if rows.shape != (len(new), embedder.dim):
                raise UserError(
                    f"The embedder {embedder.name} gave an array of {rows.shape} for {len(new)} "
                    f"texts, where each must have {embedder.dim} numbers: use another one."
                )
            for text, row, cut in zip(new, rows, embedder.cut(new, query), strict=True):
                known[text, query] = row.copy(), cut
        matrix = np.stack([known[text, query][0] for text in texts])
        while len(known) > EMBEDDINGS:
            del known[next(iter(known))]
        return matrix


def _whole(text: str) -> str:
    """Return a text without half of a surrogate pair."""
    return text.encode(errors="replace").decode()


def fused(rankings: Sequence[Sequence[int]]) -> dict[int, float]:
    """Score the members of rankings, each from the best on, by their reciprocal ranks.

    >>> fused([[7, 5], [7]]) == {7: 1 / 61 + 1 / 61, 5: 1 / 62}
    True
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, member in enumerate(ranking, 1):
            scores[member] = scores.get(member, 0.0) + 1 / (RRF_K + rank)
    return scores


class _Index:
    """What is computed once for a sequence of entries, when it is needed."""

    def __init__(self, entries: Sequence[Entry]):
        self.entries = tuple(entries)
        self.texts = [*map(searched, entries)]
        self.numbers = [number(entry.id) for entry in entries]
        self.words: Lucene | None = None
        self.embedded: np.ndarray | None = None

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """List the positions with a score, the best first."""
        return sorted(scores, key=lambda i: (-scores[i], self.numbers[i]))

    def lexical(self, query: Sequence[str]) -> list[float]:
        """Return the BM25 score of each entry."""
        if self.words is None:
            self.words = Lucene([*map(tokens, self.texts)])
        return self.words.scores(query).tolist()
