"""Find the stored texts that match a query best, by their words: BM25 for every room, and the two
retrievers by which ReMemR1 looks back (`Retriever` in memory.py)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tasks import lexicon
from tasks.mentions import INNER, MARKUP

if TYPE_CHECKING:
    import numpy as np

ARTICLES = {"a", "an", "the"}
tokens = lexicon.words  # by which entries of a store are compared
K1, B = 1.5, 0.75


def words(text: str) -> list[str]:
    """List the words of a text: lower case, no punctuation, no articles, no tags of responses."""
    bare = INNER.sub("", MARKUP.sub(" ", text))
    return [word for word in lexicon.words(bare) if word not in ARTICLES]


class Lucene:
    """Lucene's BM25 over items that have been taken apart into words, by bm25s."""

    def __init__(self, items: Sequence[Sequence[str]]):
        self.n, self._index = len(items), None
        if any(items):  # of nothing bm25s makes no index
            import bm25s

            self._index = bm25s.BM25(method="lucene", k1=K1, b=B)
            self._index.index(items, show_progress=False)

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """Return the score of every item. Shape [N]."""
        if not (query and self._index):
            import numpy as np

            return np.zeros(self.n, np.float32)
        return self._index.get_scores(list(query))

    def best(self, query: Sequence[str], k: int) -> list[int]:
        """Return the k best items, the best first; without a word to match, the first ones."""
        k = min(k, self.n)
        if not (query and self._index):
            return [*range(k)]
        found, scores = self._index.retrieve([list(query)], k=k, show_progress=False)
        return found[0].tolist() if scores.any() else [*range(k)]


# ---------------------------------------------------------------- looking back


def best(
    scores: Mapping[int, float], k: int, without: Container[int] = ()
) -> list[tuple[int, float]]:
    """Return the k best items as (index, score), the best first.

    Ties go to the most recent item, and what shares nothing with the query is not found: nothing
    depends on hashes or on the order of a set. without: indices that are no candidates.
    """
    found = [(i, x) for i, x in scores.items() if x > 0 and i not in without]
    return sorted(found, key=lambda hit: (-hit[1], -hit[0]))[:k]


class WordRecall:
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section
    3.1), by an index of words: a query costs what it finds.

    >>> WordRecall(["Anna met Otto.", "Otto left.", "Anna met Ida."]).top_k("who met Anna?")
    [(2, 0.6666666666666666)]
    """

    def __init__(self, items: Iterable[str] = ()):
        self.n = 0
        self.places: dict[str, list[int]] = {}  # word -> items that have it
        for item in items:
            self.add(item)

    def add(self, item: str) -> int:
        for word in dict.fromkeys(words(item)):
            self.places.setdefault(word, []).append(self.n)
        self.n += 1
        return self.n - 1

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = ()
    ) -> list[tuple[int, float]]:
        wanted = dict.fromkeys(words(query))
        shared = Counter(i for word in wanted for i in self.places.get(word, ()))
        return best({i: n / len(wanted) for i, n in shared.items()}, k, without)


class BM25:
    """Lucene's BM25, fitted on the candidates of each query: what a word weighs depends on all of
    them."""

    def __init__(self, items: Iterable[str] = ()):
        self.items: list[list[str]] = []
        for item in items:
            self.add(item)

    def add(self, item: str) -> int:
        self.items.append([*map(sys.intern, words(item))])
        return len(self.items) - 1

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = ()
    ) -> list[tuple[int, float]]:
        at = [i for i in range(len(self.items)) if i not in without]
        scores = Lucene([self.items[i] for i in at]).scores(words(query))
        return best(dict(zip(at, scores.tolist(), strict=True)), k)


RETRIEVERS = {"word_recall": WordRecall, "bm25": BM25}
