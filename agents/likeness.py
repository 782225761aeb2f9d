"""How alike two intents are: by their words, by their embeddings, or by both.

Holds: `Likeness` and its kinds, `likeness_of`; what is noted of an embedder. Leaves out: what is
kept of intents (agents/bank.py), embedders (models/embedder.py). No torch.
Exercise it: `pytest tests/agents/test_bank.py`. Read next: models/embedder.py.

Embeddings are compared exactly, with all intents at once. Similarities are rounded to six digits:
in the digits beyond, machines and libraries differ, and they decide nothing.
"""

from __future__ import annotations

import base64
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from agents.retrieval import K1, B, Lucene, tokens

if TYPE_CHECKING:
    from agents.search import Embedder

DIGITS = 6
MOST_PAIRED = 2000  # intents whose pairs are compared for a quantile
PROBE = "the embedding of this sentence tells embedders apart"

Row = tuple[int, str, bytes]  # id, text, float32 vector; b"" without an embedder


class Likeness(ABC):
    """Similarities to the intents that were added."""

    needs_vectors = True

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> None:
        """Know these intents, and no others."""

    @abstractmethod
    def add(self, rows: Sequence[Row]) -> None:
        """Know these intents as well."""

    @abstractmethod
    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        """Return the k intents most like a text, (id, similarity); of equals the lower id."""

    @abstractmethod
    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        """Return the similarities of all pairs of some texts, at least two. Shape [P]."""

    def vector(self, text: str) -> bytes:
        """Return the embedding of a text, b"" without an embedder."""
        return b""

    def cut(self, text: str) -> bool:
        """Whether a text is not read to its end."""
        return False

    def quantile(self, texts: Sequence[str], share: float) -> float:
        """Return a quantile of the similarities of all pairs of texts; 0 without a pair.

        Of more than `MOST_PAIRED` texts some are taken, always the same ones.
        """
        if len(texts) > MOST_PAIRED:
            texts = random.Random(0).sample([*texts], MOST_PAIRED)
        values = self.pairs(texts) if len(texts) > 1 else ()
        return round(float(np.quantile(values, share)), DIGITS) if len(values) else 0.0


def likeness_of(
    how: Literal["bm25", "dense", "hybrid"], embedder: Embedder | None = None
) -> Likeness:
    """Return similarity by words, by embeddings, or the mean of both; these need an embedder."""
    if how == "bm25":
        return Words()
    return Meanings(embedder) if how == "dense" else Both(Words(), Meanings(embedder))


def best(scores: dict[int, float], k: int) -> list[tuple[int, float]]:
    """Return the k highest scores, of equals those of lower ids."""
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k]


# ---------------------------------------------------------------- by words


class Words(Likeness):
    """BM25 of a text and an intent, as a share of what the text would score against itself.

    So it lies between 0 (no word in common) and about 1, whatever the lengths.
    """

    needs_vectors = False

    def __init__(self):
        self.begin(())

    def begin(self, rows: Sequence[Row]) -> None:
        self.ids, self.words, self._index = [], [], None
        self._in: Counter[str] = Counter()  # word -> intents with it
        self.add(rows)

    def add(self, rows: Sequence[Row]) -> None:
        for id, text, _ in rows:
            self.ids.append(id)
            self.words.append(tokens(text))
            self._in.update({*self.words[-1]})
        self._index = None if rows else self._index

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        counts = Counter(tokens(text))
        if not counts or not any(self.words):
            return []
        scores = self.scores(counts).round(DIGITS)
        return best({self.ids[i]: float(scores[i]) for i in np.flatnonzero(scores > 0)}, k)

    def scores(self, counts: Counter[str]) -> np.ndarray:
        """Return the similarity of every intent to the words of a text, some. Shape [N]."""
        if self._index is None:
            self._index = Lucene(self.words)
        # what the text would score against itself, among the intents
        n, length = len(self.words), counts.total()
        norm = K1 * (1 - B + B * length * n / sum(map(len, self.words)))
        highest = sum(
            math.log(1 + (n - self._in[word] + 0.5) / (self._in[word] + 0.5)) * tf / (tf + norm)
            for word, tf in counts.items()
        )
        return self._index.scores(sorted(counts)) / highest

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        matrix, has_words = lexical(texts)
        return matrix[has_words[:, None] & ~np.eye(len(texts), dtype=bool)]


def lexical(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the similarity by words of each text to each, and which have any. Shapes [N, N], [N].

    What a word weighs depends on all of them; a text without a word is like none.
    """
    among = Words()
    among.begin([(i, text, b"") for i, text in enumerate(texts)])
    nothing = np.zeros(len(texts))
    rows = [among.scores(Counter(each)) if each else nothing for each in among.words]
    return np.stack(rows), np.array([*map(bool, among.words)])


# ---------------------------------------------------------------- by embeddings


class Meanings(Likeness):
    """The cosine of two embeddings, whose length is 1."""

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self._known: dict[str, np.ndarray] = {}  # of intents and of texts that were looked for
        self.begin(())

    def begin(self, rows: Sequence[Row]) -> None:
        self._ids = np.zeros(0, np.int64)
        self._rows = np.zeros((0, self.embedder.dim), np.float32)  # [N, D]
        self.add(rows)

    def add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        matrix = np.frombuffer(b"".join(vec for *_, vec in rows), np.float32)
        matrix = matrix.reshape(len(rows), self.embedder.dim)  # [N, D]
        self._ids = np.append(self._ids, [id for id, *_ in rows])
        self._rows = np.concatenate([self._rows, matrix])
        self._known |= {text: row for (_, text, _), row in zip(rows, matrix, strict=True)}

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        sims = (self._rows @ self.embedded([text])[0]).astype(np.float64).round(DIGITS)
        least = np.partition(sims, -k)[-k] if k < len(sims) else -math.inf
        near = np.flatnonzero(sims >= least)  # with all that equal the last one
        return best(dict(zip(self._ids[near].tolist(), sims[near].tolist(), strict=True)), k)

    def vector(self, text: str) -> bytes:
        return self.embedded([text])[0].astype(np.float32).tobytes()

    def cut(self, text: str) -> bool:
        return self.embedder.cut([text])[0]

    def embedded(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of texts, each computed once. Shape [N, D]."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            rows = self.embedder.embed(new)
            self._known |= {text: row.copy() for text, row in zip(new, rows, strict=True)}
        return np.stack([self._known[text] for text in texts])

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        rows = self.embedded(texts)
        return (rows @ rows.T)[np.triu_indices(len(texts), 1)]


class Both(Likeness):
    """The mean of two similarities."""

    def __init__(self, words: Words, meanings: Meanings):
        self.words, self.meanings = words, meanings
        self.vector, self.cut = meanings.vector, meanings.cut

    def begin(self, rows: Sequence[Row]) -> None:
        self.words.begin(rows)
        self.meanings.begin(rows)

    def add(self, rows: Sequence[Row]) -> None:
        self.words.add(rows)
        self.meanings.add(rows)

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        n = len(self.words.ids)
        if not n:
            return []
        words = dict(self.words.nearest(text, n))
        hits = self.meanings.nearest(text, n)
        return best({id: round((sim + words.get(id, 0.0)) / 2, DIGITS) for id, sim in hits}, k)

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        rows = self.meanings.embedded(texts)
        both = (lexical(texts)[0] + rows @ rows.T) / 2
        return both[~np.eye(len(texts), dtype=bool)]


# ---------------------------------------------------------------- which embedder it was


def identity_of(embedder: Embedder) -> dict:
    """Return what is noted of an embedder: its name, its numbers, and what it makes of one sentence
    (float16, in base64)."""
    row = embedder.embed([PROBE])[0].astype(np.float16)
    probe = base64.b64encode(row.tobytes()).decode()
    return {"name": embedder.name, "dim": embedder.dim, "probe": probe}


def row_of(identity: dict) -> np.ndarray:
    """Return the embedding of `PROBE` that is noted. Shape [D]."""
    return np.frombuffer(base64.b64decode(identity["probe"]), np.float16).astype(np.float32)


def same(first: dict, second: dict) -> bool:
    """Whether both embed alike: a folder may have moved, its model or pooling not changed."""
    if first["dim"] != second["dim"]:
        return False
    a, b = row_of(first), row_of(second)
    return float(a @ b) > 0.999 * float(np.linalg.norm(a) * np.linalg.norm(b))
