"""Retrievers: find the stored texts that match a query best, by their words.

Holds: `words`, `tokens`; `Lucene`, the BM25 of every other file; `WordRecall`, `Tfidf` and `BM25`,
each a `Retriever` (memory.py), `RETRIEVERS`. Leaves out: when an agent looks something up.
Exercise it: `pytest tests/test_memory.py`. Read next: agents/rememr1.py.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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


class Items:
    """Items in the order in which they were added, and the best of them for a query. One belongs to
    one trajectory.

    Ties go to the most recent item, and what shares nothing with the query is not found: nothing
    depends on hashes or on the order of a set. Each item is taken apart once. What a word weighs
    depends on all candidates, so that these are scored anew for every query.
    """

    def __init__(self, items: Iterable[str] = ()):
        self.n = 0
        self.items: list[list[str]] = []
        for item in items:
            self.add(item)

    def add(self, item: str) -> int:
        """Take in an item; return its index."""
        self._index(words(item))
        self.n += 1
        return self.n - 1

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = ()
    ) -> list[tuple[int, float]]:
        """Return the k best items as (index, score), the best first.

        without: indices that are no candidates.
        """
        wanted = words(query)
        scores = self._scores(wanted, without) if wanted else {}
        found = [(i, x) for i, x in scores.items() if x > 0 and i not in without]
        return sorted(found, key=lambda hit: (-hit[1], -hit[0]))[:k]

    def _index(self, tokens: Sequence[str]) -> None:
        self.items.append([sys.intern(token) for token in tokens])

    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        """Map the candidates that may score above 0 to their scores."""
        at = [i for i in range(self.n) if i not in without]
        items = [self.items[i] for i in at]
        return dict(zip(at, self._fit(query, items), strict=True)) if any(items) else {}

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> Sequence[float]:
        """Return the score of each item."""
        raise NotImplementedError


class WordRecall(Items):
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section
    3.1), by an index of words: a query costs what it finds.

    >>> WordRecall(["Anna met Otto.", "Otto left.", "Anna met Ida."]).top_k("who met Anna?")
    [(2, 0.6666666666666666)]
    """

    def __init__(self, items: Iterable[str] = ()):
        self.places: dict[str, array] = {}  # word -> items that have it
        super().__init__(items)

    def _index(self, tokens: Sequence[str]) -> None:
        for token in dict.fromkeys(tokens):
            self.places.setdefault(token, array("I")).append(self.n)

    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        wanted = dict.fromkeys(query)
        shared = Counter(i for word in wanted for i in self.places.get(word, ()))
        return {i: n / len(wanted) for i, n in shared.items()}


class Tfidf(Items):
    """The cosine of TF-IDF vectors, with the smoothed weights of scikit-learn: a word's weight is
    ln((1 + items) / (1 + items with it)) + 1."""

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        import numpy as np

        having = Counter(word for item in items for word in dict.fromkeys(item))
        counts = np.array([*having.values()], float)
        idf = (np.log((1 + len(items)) / (1 + counts)) + 1).tolist()
        place = dict(zip(having, range(len(idf)), strict=True))  # sums go in scikit-learn's order

        def vector(text: Sequence[str], order: Callable | None) -> dict[str, float]:
            counted = Counter(word for word in text if word in place)
            weights = {
                word: counted[word] * idf[place[word]] for word in sorted(counted, key=order)
            }
            length = math.sqrt(sum(x * x for x in weights.values()))
            return {word: x / length for word, x in weights.items()}

        wanted, rows = vector(query, None), [vector(item, place.get) for item in items]
        return [sum(x * wanted.get(word, 0.0) for word, x in row.items()) for row in rows]


class BM25(Items):
    """Lucene's BM25, fitted on the candidates."""

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        return Lucene(items).scores(query).tolist()


RETRIEVERS = {"word_recall": WordRecall, "tfidf": Tfidf, "bm25": BM25}
