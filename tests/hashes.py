"""An embedder of the tests alone, hash:256: each word counts in one of 256 places, with a sign."""

from hashlib import blake2b

import numpy as np

from agents.retrieval import tokens
from agents.search import Embedder
from models.embedder import OPENERS


class Hashes(Embedder):
    def __init__(self, spec: str, dim: str):
        self.name, self.dim = spec, int(dim)

    def embed(self, texts, query=False):
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            self._count(row, tokens(text))
            if not row.any():  # no words, or words that cancel out
                self._count(row, [text])
        return rows / (np.linalg.norm(rows, axis=1, keepdims=True) if len(rows) else 1)

    def _count(self, row, words):
        for word in words:
            code = blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest()
            number = int.from_bytes(code, "big")
            row[number % self.dim] += 1 if number >> 63 else -1


OPENERS["hash"] = Hashes
HASHES = "hash:64"
