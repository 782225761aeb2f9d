"""How alike two intents are: by their words (BM25, as a share of what a text scores against itself)
or by their embeddings (cosine). Similarities have six digits: in those beyond, machines and
libraries differ, and they decide nothing."""

from __future__ import annotations

import base64
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from agents.retrieval import K1, B, Lucene, tokens

if TYPE_CHECKING:
    from agents.search import Embedder

DIGITS = 6
MOST_PAIRED = 2000  # texts whose pairs are compared for a quantile, always the same ones
PROBE = "the embedding of this sentence tells embedders apart"

Row = tuple[int, str, bytes]  # id, text, float32 vector; b"" where words are compared


class Words:
    """BM25 of a text and each intent, between 0 (no word in common) and about 1."""

    identity: Mapping = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Know these intents, by ascending id, and no others."""
        self.ids, self.words = [id for id, *_ in rows], [tokens(text) for _, text, _ in rows]
        self._in = Counter(word for words in self.words for word in {*words})
        self._index = Lucene(self.words)

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        """Return the k intents most like a text, (id, similarity); of equals the lower id."""
        counts = Counter(tokens(text))
        if not (counts and any(self.words)):
            return []
        found = best(self.ids, self._scores(counts).round(DIGITS), k)
        return [(id, similarity) for id, similarity in found if similarity > 0]

    def _scores(self, counts: Counter[str]) -> np.ndarray:
        """Return the similarity of every intent to the words of a text, some. Shape [N]."""
        # what the text would score against itself, among the intents
        n, length = len(self.words), counts.total()
        norm = K1 * (1 - B + B * length * n / sum(map(len, self.words)))
        highest = sum(
            math.log(1 + (n - self._in[word] + 0.5) / (self._in[word] + 0.5)) * tf / (tf + norm)
            for word, tf in counts.items()
        )
        return self._index.scores(sorted(counts)) / highest

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        """Return the similarities of all pairs of texts, in both directions. Shape [P]."""
        among = Words()
        among.begin([(i, text, b"") for i, text in enumerate(texts)])
        rows = [among._scores(Counter(words)) for words in among.words if words]
        others = ~np.eye(len(texts), dtype=bool)[[bool(words) for words in among.words]]
        return np.stack(rows)[others] if rows else np.zeros(0)

    def vector(self, text: str) -> bytes:
        return b""

    def cut(self, text: str) -> bool:
        """Whether a text is not read to its end."""
        return False

    def fits(self, identity: Mapping) -> bool:
        """Whether rows of this identity can be compared with ours."""
        return not identity


class Meanings:
    """The cosine of two embeddings, whose length is 1."""

    def __init__(self, embedder: Embedder):
        """Note the embedder by its name, its numbers, and what it makes of `PROBE`."""
        self.embedder = embedder
        self._known: dict[str, np.ndarray] = {}  # of intents and of texts that were looked for
        probe = embedder.embed([PROBE])[0].astype(np.float16)
        text = base64.b64encode(probe.tobytes()).decode()
        self.identity = {"name": embedder.name, "dim": embedder.dim, "probe": text}

    def begin(self, rows: Sequence[Row]) -> None:
        self.ids = [id for id, *_ in rows]
        matrix = np.frombuffer(b"".join(vec for *_, vec in rows), np.float32)
        self._rows = matrix.reshape(len(rows), self.embedder.dim)  # [N, D]
        self._known |= {text: row for (_, text, _), row in zip(rows, self._rows, strict=True)}

    def nearest(self, text: str, k: int) -> list[tuple[int, float]]:
        cosines = self._rows @ self._embedded([text])[0]
        return best(self.ids, cosines.astype(np.float64).round(DIGITS), k)

    def _embedded(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of texts, each computed once. Shape [N, D]."""
        if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
            self._known |= zip(new, self.embedder.embed(new), strict=True)
        return np.stack([self._known[text] for text in texts])

    def pairs(self, texts: Sequence[str]) -> np.ndarray:
        rows = self._embedded(texts)
        return (rows @ rows.T)[np.triu_indices(len(texts), 1)]

    def vector(self, text: str) -> bytes:
        return self._embedded([text])[0].astype(np.float32).tobytes()

    def cut(self, text: str) -> bool:
        return self.embedder.cut([text])[0]

    def fits(self, identity: Mapping) -> bool:
        """A folder may have moved, its model not changed: the probe's embedding decides."""
        if not identity:
            return False
        a, b = (
            np.frombuffer(base64.b64decode(each["probe"]), np.float16).astype(np.float32)
            for each in (self.identity, identity)
        )
        like = 0.999 * float(np.linalg.norm(a) * np.linalg.norm(b))
        return len(a) == len(b) and float(a @ b) > like


def best(ids: Sequence[int], scores: np.ndarray, k: int) -> list[tuple[int, float]]:
    """Return the k highest scores with their ids, which ascend; of equals the first."""
    return [(ids[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")[:k].tolist()]


def quantile(likeness: Words | Meanings, texts: Sequence[str], share: float) -> float:
    """Return a quantile of the similarities of all pairs of texts; 0 without a pair."""
    if len(texts) > MOST_PAIRED:
        texts = random.Random(0).sample([*texts], MOST_PAIRED)
    values = likeness.pairs(texts) if len(texts) > 1 else ()
    return round(float(np.quantile(values, share)), DIGITS) if len(values) else 0.0
