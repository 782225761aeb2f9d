"""Hybrid, the baseline that searches by words and by meaning at once.

Holds: `Hybrid`. Leaves out: the fusion of both (agents/search.py).
Exercise it: `python cli.py eval --suite locomo --agents facts,hybrid --embedder hf:FOLDER`.
Read next: agents/evidence.py.
"""

from __future__ import annotations

from agents.facts import Facts


class Hybrid(Facts):
    """The task's ready-made memories, searched by BM25 and embeddings together."""

    how = "hybrid"
