"""How alike two intents are: by their words, by their embeddings, or by both.

Holds: `Likeness` and its kinds, `likeness_of`; `Identity`, what is noted of an embedder. Leaves
out: what is kept of intents (agents/bank.py), embedders (models/embedder.py). No torch.
Exercise it: `pytest tests/agents/test_bank.py`. Read next: models/embedder.py.

Embeddings are compared exactly, with all intents at once. Similarities are rounded to six digits:
in the digits beyond, machines and libraries differ, and they decide nothing.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from agents.retrieval import K1, B, Lucene, tokens
from config.errors import UserError

if TYPE_CHECKING:
    from agents.search import Embedder

DIGITS = 6
MOST_PAIRED = 2000  # intents whose pairs are compared for a quantile
PROBE = "the embedding of this sentence tells embedders apart"

Row = tuple[int, str, bytes]  # id, text, float32 vector; b"" without an embedder


class Likeness(Protocol):
    """Similarities to the intents that were added."""

    needs_vectors: bool

    def begin(self, rows: Sequence[Row]) -> None:
        """Know these intents, and no others."""

    def add(self, rows: Sequence[Row]) -> None:
        """Know these intents as well."""

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        """Return the k intents most like a text, (id, similarity); of equals the lower id."""

    def vector(self, text: str) -> bytes:
        """Return the embedding of a text, b"" without an embedder."""

    def cut(self, text: str) -> bool:
        """Whether a text is not read to its end."""

    def quantile(self, texts: Sequence[str], share: float) -> float:
        """Return a quantile of the similarities of all pairs of texts; 0 without a pair."""


def likeness_of(
    how: Literal["bm25", "dense", "hybrid"], embedder: Embedder | None = None
) -> Likeness:
    """Return similarity by words, by embeddings, or the mean of both.

    UserError: there is no embedder, and one is needed.
    """
    if how == "bm25":
        return Words()
    if embedder is None:
        raise UserError(
            f"To compare intents by {how} an embedder is needed: name one, or take bm25."
        )
    return Meanings(embedder) if how == "dense" else Both(Words(), Meanings(embedder))


def best(scores: dict[int, float], k: int) -> list[tuple[int, float]]:
    """Return the k highest scores, of equals those of lower ids."""
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k]


def sampled(texts: Sequence[str]) -> list[str]:
    """Return at most `MOST_PAIRED` of the texts, always the same ones."""
    if len(texts) <= MOST_PAIRED:
        return [*texts]
    return random.Random(0).sample([*texts], MOST_PAIRED)


# ---------------------------------------------------------------- by words


class Words:
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

    def vector(self, text: str) -> bytes:
        return b""

    def cut(self, text: str) -> bool:
        return False

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        asked = Counter(tokens(text))
        if not asked or not any(self.words):
            return []
        scores = self._scores(asked).round(DIGITS)
        return best({self.ids[i]: float(scores[i]) for i in np.flatnonzero(scores > 0)}, k)

    def _scores(self, asked: Counter[str]) -> np.ndarray:
        """Return the similarity of every intent to the words of a text. Shape [N]."""
        if self._index is None:
            self._index = Lucene(self.words)
        return self._index.scores(sorted(asked)) / self._own(asked)

    def _own(self, asked: Counter[str]) -> float:
        """Return the score of a text against itself, among the intents."""
        n, length = len(self.words), asked.total()
        norm = K1 * (1 - B + B * length * n / sum(map(len, self.words)))
        return sum(
            math.log(1 + (n - self._in[word] + 0.5) / (self._in[word] + 0.5)) * tf / (tf + norm)
            for word, tf in asked.items()
        )

    def quantile(self, texts: Sequence[str], share: float) -> float:
        texts, other = sampled(texts), Words()
        other.begin([(i, text, b"") for i, text in enumerate(texts)])
        counted = [Counter(words) for words in other.words]
        pairs = [np.delete(other._scores(asked), i) for i, asked in enumerate(counted) if asked]
        return _quantile(np.concatenate(pairs) if pairs else np.zeros(0), share)


# ---------------------------------------------------------------- by embeddings


class Meanings:
    """The cosine of two embeddings, whose length is 1."""

    needs_vectors = True

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self._known: dict[str, np.ndarray] = {}  # of intents and of texts that were asked for
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
        if not (fits := np.abs(matrix).max(1) <= 2).all():  # NaN is not
            raise ValueError(f"the embedding of intent {rows[fits.argmin()][0]} has no length of 1")
        self._ids = np.append(self._ids, [id for id, *_ in rows])
        self._rows = np.concatenate([self._rows, matrix])
        self._known |= {text: row for (_, text, _), row in zip(rows, matrix, strict=True)}

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        sims = (self._rows @ self._embedded([text])[0]).astype(np.float64).round(DIGITS)
        least = np.partition(sims, -k)[-k] if k < len(sims) else -math.inf
        near = np.flatnonzero(sims >= least)  # with all that equal the last one
        return best(dict(zip(self._ids[near].tolist(), sims[near].tolist(), strict=True)), k)

    def vector(self, text: str) -> bytes:
        return self._embedded([text])[0].astype(np.float32).tobytes()

    def cut(self, text: str) -> bool:
        return self.embedder.cut([text])[0]

    def _embedded(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of texts, each computed once. Shape [N, D]."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            rows = self.embedder.embed(new)
            self._known |= {text: row.copy() for text, row in zip(new, rows, strict=True)}
        return np.stack([self._known[text] for text in texts])

    def quantile(self, texts: Sequence[str], share: float) -> float:
        return _quantile(self.pairs(sampled(texts)), share)

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        """Return the cosines of all pairs. Shape [N * (N - 1) / 2]."""
        if len(texts) < 2:
            return np.zeros(0)
        rows = self._embedded(texts)
        return (rows @ rows.T)[np.triu_indices(len(texts), 1)]


class Both:
    """The mean of two similarities."""

    needs_vectors = True

    def __init__(self, words: Words, meanings: Meanings):
        self.words, self.meanings = words, meanings

    def begin(self, rows: Sequence[Row]) -> None:
        self.words.begin(rows)
        self.meanings.begin(rows)

    def add(self, rows: Sequence[Row]) -> None:
        self.words.add(rows)
        self.meanings.add(rows)

    def vector(self, text: str) -> bytes:
        return self.meanings.vector(text)

    def cut(self, text: str) -> bool:
        return self.meanings.cut(text)

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        n = len(self.words.ids)
        if not n:
            return []
        words = dict(self.words.nearest(text, n))
        hits = self.meanings.nearest(text, n)
        return best({id: round((sim + words.get(id, 0.0)) / 2, DIGITS) for id, sim in hits}, k)

    def quantile(self, texts: Sequence[str], share: float) -> float:
        texts = sampled(texts)
        if len(texts) < 2:
            return 0.0
        words = Words()
        words.begin([(i, text, b"") for i, text in enumerate(texts)])
        lexical = np.stack([
            words._scores(asked) if (asked := Counter(each)) else np.zeros(len(texts))
            for each in words.words
        ])  # fmt: skip
        rows = self.meanings._embedded(texts)
        both = (lexical + rows @ rows.T) / 2
        return _quantile(both[~np.eye(len(texts), dtype=bool)], share)


def _quantile(values: np.ndarray, share: float) -> float:
    return round(float(np.quantile(values, share)), DIGITS) if len(values) else 0.0


# ---------------------------------------------------------------- which embedder it was


@dataclass(frozen=True, slots=True)
class Identity:
    """What is noted of an embedder: its name, and what it makes of one sentence."""

    name: str
    dim: int
    probe: str  # the embedding of PROBE, float16, in base64

    @classmethod
    def of(cls, embedder: Embedder) -> Identity:
        row = embedder.embed([PROBE])[0].astype(np.float16)
        return cls(embedder.name, embedder.dim, base64.b64encode(row.tobytes()).decode())

    @property
    def row(self) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.probe), np.float16).astype(np.float32)

    def same(self, other: Identity) -> bool:
        """Whether both embed alike: a folder may have moved, its model or pooling not changed."""
        if self.dim != other.dim:
            return False
        one, two = self.row, other.row
        return float(one @ two) > 0.999 * float(np.linalg.norm(one) * np.linalg.norm(two))

    def as_json(self) -> dict:
        return asdict(self)
