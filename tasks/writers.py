"""Write tasks: sets of our own, and the form that MemAgent's evaluation reads.

Holds: one function per form. Leaves out: readers (tasks/readers.py). No torch.
Exercise it: `python cli.py data build FILE OUT --suite ruler-hqa`. Read next: tasks/worlds.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path

from config.errors import UserError
from config.files import replacing_output
from data import Task

# ---------------------------------------------------------------- parts that the forms share


def _write_json(
    path: str | Path,
    lines: Iterable[dict],
    before: str = "",
    between: str = "\n",
    after: str = "\n",
) -> None:
    """Write each of `lines` as one line of JSON, compressed if the name ends in .gz."""
    import pyarrow as pa

    if (path := Path(path)).suffix == ".parquet":
        reason = "this form is JSON, its name must not end in .parquet"
        raise UserError(f"{path} cannot be written: {reason}.")
    compression = "gzip" if path.suffix == ".gz" else None
    with (
        replacing_output(path) as temporary,
        pa.output_stream(temporary, compression=compression) as stream,
    ):
        for n, line in enumerate(lines):
            text = (between if n else before) + json.dumps(line, ensure_ascii=False)
            stream.write(text.encode())
        stream.write(after.encode())


def _labels(task: Task) -> dict[str, object]:
    """Return the fields that the published forms lack, so that reading restores the whole task."""
    labels = {"id": task.id, "kind": task.kind, "dataset": task.dataset, "split": task.split}
    return labels | {name: n for name in ("level", "tokens") if (n := getattr(task, name))}


def _checked(tasks: Sequence[Task]) -> Sequence[Task]:
    """Return the tasks; UserError if there are none, or one that no reader would accept."""
    for task in tasks:
        answerable = task.answers and all(answer.strip() for answer in task.answers)
        if not (task.question.strip() and answerable):
            rule = "only tasks that can be graded are written"
            raise UserError(f"Task {task.id} has no question or no accepted answer; {rule}.")
    if not tasks:
        raise UserError("There are no tasks to write.")
    return tasks


def _evidence(task: Task) -> dict:
    """Return the positions of the evidence as in ReMemR1's eval files; {} if unknown."""
    if task.pool is None or not task.gold:
        return {}
    return {"evidence_idx": list(task.gold), "type": task.kind}


# ---------------------------------------------------------------- forms


def write_eval_json(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write MemAgent's eval form, with the full text; ReMemR1's, if the evidence is known."""
    rows = (
        {"input": task.question, "answers": list(task.answers), "index": index}
        | {"context": task.document, "num_docs": task.n_documents}
        | _evidence(task)
        | _labels(task)
        for index, task in enumerate(_checked(tasks))
    )
    _write_json(path, rows, before="[\n", between=",\n", after="\n]\n")


def write_built(path: str | Path, tasks: Sequence[Task], **about: str | int | bool) -> None:
    """Write our own form: each passage once, documents as indices.

    about: how the set was made (seed, n_documents, ...), for its first line.
    """
    pool = _checked(tasks)[0].pool
    if pool is None or any(task.pool is not pool for task in tasks):
        raise UserError(
            "Only tasks that share one pool of passages can be kept as a set: build it first."
        )
    titled = pool.frame == "documents"
    head = {"form": "memagent-set", "passages": len(pool.texts), "tasks": len(tasks)}
    head |= ({} if titled else {"frame": pool.frame}) | about
    titles = pool.titles if titled else repeat(None)
    passages = (
        ({"title": title} if titled else {}) | {"text": text}
        for title, text in zip(titles, pool.texts, strict=False)
    )
    rows = (
        _labels(task)
        | {"question": task.question, "answers": task.answers}
        | {"order": list(task.order), "gold": task.gold}
        for task in tasks
    )
    _write_json(path, chain([head], passages, rows))
