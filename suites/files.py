"""Files of tasks as they are, with the lengths that they have.

Exercise it: `python cli.py eval --data FILE`. Read next: tasks/readers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError, clean
from data import Task
from suites import Column, Scope, Suite
from tasks import readers


class _File(NamedTuple):
    path: str
    question: str
    length: int
    unit: str


class Files(Suite):
    """Files of tasks, one column each."""

    def columns(self, scope: Scope) -> list[Column]:
        if not scope.data:
            raise UserError("The suite files wants files of tasks: name them by --data.")
        files = [_describe(path, readers.read(path, n=scope.n)) for path in scope.data]
        if len(units := {file.unit for file in files}) > 1:
            raise UserError(
                "RULER's sets are measured in tokens, the other files in documents: "
                "evaluate them apart."
            )
        object.__setattr__(self, "unit", units.pop())  # which no setting is: the files tell
        times = Counter((file.question, file.length) for file in files)
        columns = []
        for file in files:
            name = file.question
            if times[name, file.length] > 1:
                name += f", {'/'.join(Path(file.path).parts[-2:])}"
            # Read again on demand: the texts of all files together may exceed the memory
            make = partial(readers.read, file.path, n=scope.n)
            columns.append(Column(name, file.length, make))
        return columns


def _describe(path: str, tasks: Sequence[Task]) -> _File:
    """Name the questions of a file and measure its longest document, in tokens or documents."""
    if all(task.tokens for task in tasks):
        unit, names, sizes = "tokens", {t.kind for t in tasks}, {t.tokens for t in tasks}
    else:
        unit = "documents"
        names, sizes = {t.dataset for t in tasks}, {t.n_documents for t in tasks}
    question = (len(names) == 1 and clean(names.pop())) or "questions"
    if len(sizes) > 1:  # e.g. HotpotQA's own questions: 2 to 10 passages, still one column
        question += f", {min(sizes)} to {max(sizes)} {unit}"
    return _File(path, question, max(sizes), unit)
