"""Retrievers: find the stored texts that match a query best.

Holds: `Retriever` and its implementations, `RETRIEVERS`. Leaves out: when an agent looks something
up.
Exercise it: `pytest tests/test_memory.py`. Read next: agents/rememr1.py.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice

from tasks.mentions import separate_words

# ---------------------------------------------------------------- looking back


def words(text: str) -> list[str]:
    """List the words of a text: lower case, no punctuation, no articles, no tags of responses."""
    return separate_words(text).split()


class Retriever(ABC):
    """Items in the order in which they were added, and the best of them for a query. One belongs to
    one trajectory.

    Ties go to the most recent item, and what shares nothing with the query is not found: nothing
    depends on hashes or on the order of a set. Each item is taken apart once.
    """

    def __init__(self, items: Iterable[str] = (), tokens: Callable[[str], Sequence[str]] = words):
        self.tokens, self.n = tokens, 0
        for item in items:
            self.add(item)

    def add(self, item: str) -> int:
        """Returns its index."""
        self._index(self.n, self.tokens(item))
        self.n += 1
        return self.n - 1

    def top_k(
        self, query: str, k: int = 1, without: Container[int] = (), at_zero: bool = False
    ) -> list[tuple[int, float]]:
        """The k best items as (index, score), the best first. without: indices that are no
        candidates. at_zero: candidates that share nothing with the query follow, the most recent
        first."""
        asked = self.tokens(query)
        found = (
            {
                i: score
                for i, score in self._scores(asked, without).items()
                if score > 0 and i not in without
            }
            if asked
            else {}
        )
        best = sorted(found.items(), key=lambda hit: (-hit[1], -hit[0]))[:k]
        if at_zero and len(best) < k:
            rest = (i for i in reversed(range(self.n)) if i not in found and i not in without)
            best += [(i, 0.0) for i in islice(rest, k - len(best))]
        return best

    @abstractmethod
    def _index(self, i: int, tokens: Sequence[str]) -> None:
        """Take in the tokens of item i."""

    @abstractmethod
    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        """Index -> score, of those that may score above 0."""


class WordRecall(Retriever):
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section
    3.1), by an index of words: a query costs what it finds.

    >>> WordRecall(["Anna met Otto.", "Otto left.", "Anna met Ida."]).top_k("who met Anna?")
    [(2, 0.6666666666666666)]
    """

    def __init__(self, items: Iterable[str] = (), tokens: Callable[[str], Sequence[str]] = words):
        self.places: dict[str, array] = {}  # word -> items that have it
        super().__init__(items, tokens)

    def _index(self, i: int, tokens: Sequence[str]) -> None:
        for token in dict.fromkeys(tokens):
            self.places.setdefault(token, array("I")).append(i)

    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        asked = dict.fromkeys(query)
        shared = Counter(i for word in asked for i in self.places.get(word, ()))
        return {i: n / len(asked) for i, n in shared.items()}


class _Fitted(Retriever):
    """One that is fitted on the candidates at every query: what a word weighs depends on all of
    them."""

    def __init__(self, items: Iterable[str] = (), tokens: Callable[[str], Sequence[str]] = words):
        self.items: list[list[str]] = []
        super().__init__(items, tokens)

    def _index(self, i: int, tokens: Sequence[str]) -> None:
        self.items.append([sys.intern(token) for token in tokens])

    def _scores(self, query: Sequence[str], without: Container[int]) -> Mapping[int, float]:
        at = [i for i in range(self.n) if i not in without]
        items = [self.items[i] for i in at]
        return dict(zip(at, self._fit(query, items), strict=True)) if any(items) else {}

    @abstractmethod
    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        """The score of each item."""


class Tfidf(_Fitted):
    """Cosine of TF-IDF vectors (scikit-learn)."""

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(analyzer=list)
        found = (
            vectorizer.fit_transform(items) @ vectorizer.transform([query]).T
        )  # rows have length 1: cosines
        return found.toarray()[:, 0].tolist()


class BM25(_Fitted):
    """Lucene's BM25 (bm25s)."""

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        import bm25s

        index = bm25s.BM25()
        index.index(items, show_progress=False)
        return index.get_scores(list(query)).tolist()


RETRIEVERS = {"word_recall": WordRecall, "tfidf": Tfidf, "bm25": BM25}
