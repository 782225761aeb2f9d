"""Files of tasks: sets of our own, and the form that MemAgent's evaluation reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from config.files import replacing_output
from data import Task


def write_eval_json(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write MemAgent's eval form, with the full text; ReMemR1's, if the evidence is known."""
    with replacing_output(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        for index, task in enumerate(tasks):
            row = {"input": task.question, "answers": task.answers, "index": index}
            row |= {"context": task.document, "num_docs": task.n_documents} | labels_of(task)
            if task.pool is not None and task.gold:
                row |= {"evidence_idx": task.gold, "type": task.kind}
            file.write(f"{',' if index else '['}\n{json.dumps(row, ensure_ascii=False)}")
        file.write("\n]\n")


def write_built(path: str | Path, tasks: Sequence[Task], **about: str | int | bool) -> None:
    """Write our own form of tasks that share a pool, compressed if the name ends in .gz: each
    passage once, documents as indices.

    about: how the set was made (seed, n_documents, ...), for its first line.
    """
    pool = tasks[0].pool
    titled = pool.frame == "documents"
    head = {"form": "memagent-set", "passages": len(pool.texts), "tasks": len(tasks)}
    head |= ({} if titled else {"frame": pool.frame}) | about
    passages = (
        ({"title": pool.titles[k]} if titled else {}) | {"text": text}
        for k, text in enumerate(pool.texts)
    )
    rows = (
        labels_of(task)
        | {"question": task.question, "answers": task.answers}
        | {"order": list(task.order), "gold": task.gold}
        for task in tasks
    )
    with replacing_output(path := Path(path)) as temporary, temporary.open("wb") as file:
        packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else file
        with packed:
            for line in chain([head], passages, rows):
                packed.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


def labels_of(task: Task) -> dict[str, object]:
    """Return the fields that the published forms lack, so that reading restores the whole task."""
    labels = {"id": task.id, "kind": task.kind, "dataset": task.dataset, "split": task.split}
    return labels | {name: n for name in ("level", "tokens") if (n := getattr(task, name))}
