"""Memories as plain state with an update rule: what an agent carries from one turn to the next.

Holds: the overwritten memory of MemAgent; ReMemR1's memory with a history and the retrievers that look back into it. Leaves out: prompts,
models, torch.
Exercise it: `pytest tests/test_memory.py`. Read next: memagent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graders import normalize_answer


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
    """The words of a text, lower-cased, without punctuation and articles."""
    return normalize_answer(text).split()


class WordRecall:
    """The share of the query's different words that an item has (ReMemR1, arXiv 2509.23040, section 3.1).

    A retriever belongs to one trajectory: it remembers the words of what it has seen. Items are an ordered list, ties go to the most
    recent one, and what shares nothing with the query is not found: nothing depends on hashes or on the order of a set (D-10).

    >>> WordRecall().top_k("who met Anna?", ["Anna met Otto.", "Otto left.", "Anna met Ida."])
    [(2, 0.6666666666666666)]
    """

    def __init__(self, tokens: Callable[[str], Sequence[str]] = words):
        self.tokens = tokens
        self._seen: dict[str, Sequence[str]] = {}

    def top_k(self, query: str, items: Sequence[str], k: int = 1, at_zero: bool = False) -> list[tuple[int, float]]:
        """The k best items as (index, score), the best first. at_zero: items that share nothing with the query count too."""
        asked = self.tokens(query)
        if not items:
            return []
        scores = self.scores(asked, [self._tokens(item) for item in items]) if asked else [0.0] * len(items)
        best = sorted(range(len(items)), key=lambda i: (-scores[i], -i))[:k]
        return [(i, scores[i]) for i in best if scores[i] > 0 or at_zero]

    def _tokens(self, item: str) -> Sequence[str]:
        if item not in self._seen:
            self._seen[item] = self.tokens(item)
        return self._seen[item]

    def scores(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        asked = frozenset(query)
        return [len(asked.intersection(item)) / len(asked) for item in items]


class Tfidf(WordRecall):
    """Cosine of TF-IDF vectors, fitted on the items at every query (scikit-learn)."""

    def scores(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        if not any(items):
            return [0.0] * len(items)
        vectorizer = TfidfVectorizer(analyzer=list)
        found = vectorizer.fit_transform(items) @ vectorizer.transform([query]).T  # rows have length 1: cosines
        return found.toarray()[:, 0].tolist()


class BM25(WordRecall):
    """Lucene's BM25 over the items (bm25s)."""

    def scores(self, query: Sequence[str], items: Sequence[Sequence[str]]) -> list[float]:
        import bm25s

        if not any(items):
            return [0.0] * len(items)
        index = bm25s.BM25()
        index.index([list(item) for item in items], show_progress=False)
        return index.get_scores(list(query)).tolist()


RETRIEVERS = {"word_recall": WordRecall, "tfidf": Tfidf, "bm25": BM25}


@dataclass(frozen=True, slots=True)
class Recall:
    """What a look back has brought, as it stands in the next prompt."""

    text: str = ""  # the stored memory, "" = nothing was recalled
    query: str = ""  # "" = nothing was asked
    steps: tuple[int, ...] = ()  # after which update, from 1, each recalled memory was written
    score: float = 0.0  # of the best one
    age: int = 0  # updates between the writing of the best one and the query; 1 = it was overwritten just now


@dataclass(slots=True)
class MemoryState:
    """ReMemR1's state: the memory, what was recalled for the next turn, and all memories so far, in order."""

    memory: str
    retriever: WordRecall
    placeholder: str = ""  # a memory without content, such as the first one: never stored, so never recalled
    recalled: Recall = Recall()
    history: list[tuple[int, str]] = field(default_factory=list)  # (update, from 1; memory), only what an update has written
    step: int = 0  # updates so far

    def update(self, new: str | None, query: str | None, k: int = 1, include_current: bool = False, at_zero: bool = False) -> None:
        """Take over a new memory (None: the old one stays), then look back for `query` (None: nothing is recalled).

        The memory that the next prompt shows anyway is never a candidate, unless `include_current` (spec rememr1.md 3); so the first
        update recalls nothing.
        """
        self.step += 1
        if new is not None:
            self.memory = new
            if new.strip() not in ("", self.placeholder.strip()):
                self.history.append((self.step, new))
        items = [(step, text) for step, text in self.history if include_current or text != self.memory]
        found = self.retriever.top_k(query, [text for _, text in items], k, at_zero) if query else []
        hits = [items[i] for i, _ in found]
        self.recalled = Recall(
            "\n\n".join(text for _, text in sorted(hits)), query or "", tuple(step for step, _ in hits),
            found[0][1] if found else 0.0, self.step - hits[0][0] if hits else 0,
        )  # fmt: skip
