"""Oracle, the baseline that is given the evidence and nothing else.

Holds: `Oracle`. Leaves out: where the evidence stands (data.py).
Exercise it: `python cli.py eval --agents oracle --n 8`. Read next: agents/bm25.py.
"""

from __future__ import annotations

from collections.abc import Generator

from agents.full import AtOnce
from config.errors import UserError
from data import Task
from memagent import Prompt, Turn


class Oracle(AtOnce):
    """The passages that hold the evidence, in reading order, in one prompt.

    Of a question that names none, as four of LoCoMo do, it is given an empty document. A task that
    does not say where its evidence stands is refused.
    """

    name = "oracle"
    in_words = "reading the evidence alone"

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        if task.evidence is None:
            raise UserError(
                f"Task {task.id} does not say where its evidence stands: "
                "the agent oracle cannot read it"
            )
        yield self.read(task, task.evidence)
