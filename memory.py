"""Memories as plain state with an update rule: what an agent carries from one turn to the next.

Holds: the overwritten memory of MemAgent; ReMemR1's memory with a history and the retrievers that look back into it. Leaves out: prompts,
models, torch.
Exercise it: `pytest tests/test_memory.py`. Read next: memagent.py.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from graders import separate_words


def overwrite(old: str, new: str, first: str, empty: str = "placeholder") -> str:
    """MemAgent's rule: the response is the memory (spec memagent.md 3.3).

    empty: what becomes of a response without text: "placeholder" = the first-memory literal (MemAgent's asynchronous path),
    "keep" = the old memory (vime), "empty" = stays empty.

    >>> overwrite("old", "new", "none yet"), overwrite("old", " ", "none yet"), overwrite("old", "", "none yet", "keep")
    ('new', 'none yet', 'old')
    """
    if new.strip():
        return new
    return {"placeholder": first, "keep": old, "empty": new}[empty]


# ---------------------------------------------------------------- looking back


def words(text: str) -> list[str]:
    """List the words of a text: lower case, no punctuation, no articles, no tags of responses."""
    return separate_words(text).split()


class Retriever(ABC):
    """Items in the order in which they were added, and the best of them for a query. One belongs to one trajectory.

    Ties go to the most recent item, and what shares nothing with the query is not found: nothing depends on hashes or on the order of a
    set (D-10). Each item is taken apart once.
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

    def top_k(self, query: str, k: int = 1, without: Container[int] = (), at_zero: bool = False) -> list[tuple[int, float]]:
        """The k best items as (index, score), the best first. without: indices that are no candidates. at_zero: candidates that share
        nothing with the query follow, the most recent first."""
        asked = self.tokens(query)
        found = {i: score for i, score in self._scores(asked, without).items() if score > 0 and i not in without} if asked else {}
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
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section 3.1), by an index of words: a query costs
    what it finds.

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
    """One that is fitted on the candidates at every query: what a word weighs depends on all of them."""

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
        found = vectorizer.fit_transform(items) @ vectorizer.transform([query]).T  # rows have length 1: cosines
        return found.toarray()[:, 0].tolist()


class BM25(_Fitted):
    """Lucene's BM25 (bm25s)."""

    def _fit(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        import bm25s

        index = bm25s.BM25()
        index.index(items, show_progress=False)
        return index.get_scores(list(query)).tolist()


RETRIEVERS = {"word_recall": WordRecall, "tfidf": Tfidf, "bm25": BM25}


@dataclass(frozen=True, slots=True)
class Recall:
    """What a look back has brought, as it stands in the next prompt."""

    text: str = ""  # the stored memories, "" = nothing was recalled
    query: str = ""  # "" = nothing was asked
    steps: tuple[int, ...] = ()  # after which update, from 1, each recalled memory was written, the best one first
    score: float = 0.0  # of the best one
    age: int = 0  # updates between the writing of the best one and the query; 1 = it was overwritten just now
    current: bool = False  # the memory that the prompt shows anyway is among them


@dataclass(slots=True)
class MemoryState:
    """ReMemR1's state: the memory, what was recalled for the next turn, and all different memories so far, in order."""

    memory: str
    retriever: Retriever
    placeholder: str = ""  # a memory without content, such as the first one: never stored, so never recalled
    recalled: Recall = Recall()
    history: list[tuple[int, str]] = field(default_factory=list)  # (update, from 1; memory), only what an update has written
    step: int = 0  # updates so far
    _place: dict[str, int] = field(default_factory=dict)  # memory -> its last place in the history
    _older: set[int] = field(default_factory=set)  # places whose memory was written anew later

    def update(self, new: str | None, query: str | None, k: int = 1, scope: str = "exclude_current", at_zero: bool = False) -> None:
        """Take over a new memory (None: the old one stays), then look back for `query` (None: nothing is recalled).

        scope: exclude_current = the memory that the next prompt shows anyway is never a candidate (spec rememr1.md 3), so the first update
        recalls nothing; include_current = it is one; exclude_new = it is one if it was written before this update too, as where the look
        back goes before the writing. A memory that was written several times is found once, as the last time.
        """
        self.step += 1
        fresh = new is not None and new not in self._place
        if new is not None:
            self.memory = new
            if new.strip() not in ("", self.placeholder.strip()):
                last = self._place.get(new)
                if last is not None and last == len(self.history) - 1:  # written as it stood
                    self.history[last] = (self.step, new)
                else:
                    self._older |= {last} - {None}
                    self.history.append((self.step, new))
                    self._place[new] = self.retriever.add(new)
        if not query:
            self.recalled = Recall()
            return
        current = self._place.get(self.memory)
        hidden = {"exclude_current": True, "include_current": False, "exclude_new": fresh}[scope]
        without = self._older if current is None or not hidden else self._older | {current}
        found = self.retriever.top_k(query, k, without, at_zero)
        hits = [self.history[i] for i, _ in found]
        self.recalled = Recall(
            "\n\n".join(text for _, text in sorted(hits)), query, tuple(step for step, _ in hits), found[0][1] if found else 0.0,
            self.step - hits[0][0] if hits else 0, any(i == current for i, _ in found),
        )  # fmt: skip
