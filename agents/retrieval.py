"""Find the stored texts that match a query best, by their words: BM25 for every room, and the two
retrievers by which ReMemR1 looks back (`Retriever` in memory.py)."""

from __future__ import annotations

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


def best(scores: Mapping[int, float], k: int) -> list[tuple[int, float]]:
    """Return the k best items as (index, score), the best first.

    Ties go to the most recent item, and what shares nothing with the query is not found: nothing
    depends on hashes or on the order of a set.
    """
    found = [(i, x) for i, x in scores.items() if x > 0]
    return sorted(found, key=lambda hit: (-hit[1], -hit[0]))[:k]


class WordRecall:
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section
    3.1).

    >>> WordRecall(["Anna met Otto.", "Otto left.", "Anna met Ida."]).top_k("who met Anna?")
    [(2, 0.6666666666666666)]
    """

    keep: type = frozenset
    """what is kept of an item's words"""

    def __init__(self, items: Iterable[str] = ()):
        self.items = []
        for item in items:
            self.add(item)

    def add(self, item: str) -> None:
        self.items.append(self.keep(words(item)))

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = ()
    ) -> list[tuple[int, float]]:
        among = [i for i in range(len(self.items)) if i not in without]
        return best(self._scores(words(query), among), k)

    def _scores(self, query: Sequence[str], among: Sequence[int]) -> dict[int, float]:
        """Return the score of each of these items."""
        wanted = {*query}
        return {i: len(wanted & self.items[i]) / max(1, len(wanted)) for i in among}


class BM25(WordRecall):
    """Lucene's BM25, fitted on the candidates of each query: what a word weighs depends on all of
    them."""

    keep = list

    def _scores(self, query: Sequence[str], among: Sequence[int]) -> dict[int, float]:
        scores = Lucene([self.items[i] for i in among]).scores(query)
        return dict(zip(among, scores.tolist(), strict=True))


RETRIEVERS = {"word_recall": WordRecall, "bm25": BM25}
