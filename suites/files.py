"""Files of tasks as they are, with the lengths that they have."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from config.errors import UserError, clean
from suites import Column, Scope, Suite
from tasks import readers


class Files(Suite):
    """Files of tasks, one column each."""

    def columns(self, scope: Scope) -> list[Column]:
        if not scope.data:
            raise UserError("The suite files wants files of tasks: name them by --data.")
        files = {path: _describe(path, scope.n) for path in scope.data}
        if len(units := {unit for _, _, unit in files.values()}) > 1:
            raise UserError(
                "RULER's sets are measured in tokens, the other files in documents: "
                "evaluate them apart."
            )
        object.__setattr__(self, "unit", units.pop())  # which no setting is: the files tell
        times = Counter((name, length) for name, length, _ in files.values())
        columns = []
        for path in scope.data:
            name, length, _ = files[path]
            if times[name, length] > 1:
                name += f", {'/'.join(Path(path).parts[-2:])}"
            # Read again on demand: the texts of all files together may exceed the memory
            columns.append(Column(name, length, partial(readers.read, path, n=scope.n)))
        return columns


def _describe(path: str, n: int) -> tuple[str, int, str]:
    """Name the questions of a file; measure its longest document, in tokens or documents."""
    tasks = readers.read(path, n=n)
    if all(task.tokens for task in tasks):
        unit, names, sizes = "tokens", {t.kind for t in tasks}, {t.tokens for t in tasks}
    else:
        unit = "documents"
        names, sizes = {t.dataset for t in tasks}, {t.n_documents for t in tasks}
    name = (len(names) == 1 and clean(names.pop())) or "questions"
    if len(sizes) > 1:  # e.g. HotpotQA's own questions: 2 to 10 passages, still one column
        name += f", {min(sizes)} to {max(sizes)} {unit}"
    return name, max(sizes), unit
