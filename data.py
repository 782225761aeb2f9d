"""Tasks: what is read, what is asked, how an answer is graded; the readers and writers of every data form.

Holds: `Task`, `Pool`; readers, writers, the RULER-HQA generator. Leaves out: graders and metrics (graders.py), generated English
(worlds.py), tokens (text.py). No torch.
Exercise it: `python cli.py data look FILE`. Read next: memagent.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pool:
    """Passages that documents are composed of, stored once and shared by many tasks."""

    titles: Sequence[str]
    texts: Sequence[str]

    def document(self, order: Sequence[int]) -> str:
        """`Document {i}:` newline title newline text, i from 1, joined by a blank line (spec memagent.md 7)."""
        return "\n\n".join(f"Document {i}:\n{self.titles[k]}\n{self.texts[k]}" for i, k in enumerate(order, 1))


@dataclass(slots=True)
class Task:
    """One question about one document.

    The document is either `text`, or `order`: indices into `pool`, in reading order, expanded each time `document` is read.
    """

    id: str
    question: str
    answers: tuple[str, ...]  # accepted answers; the first is the gold one
    text: str | None = None
    pool: Pool | None = field(default=None, repr=False)
    order: tuple[int, ...] = ()
    gold: tuple[int, ...] = ()  # positions in `order`, from 0, of the passages that hold the evidence, in hop order
    kind: str = ""  # e.g. one_fact, two_hop, bridge, comparison
    dataset: str = ""

    @property
    def document(self) -> str:
        if self.text is not None:
            return self.text
        assert self.pool is not None, f"task {self.id} has neither text nor pool"
        return self.pool.document(self.order)
