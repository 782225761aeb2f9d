"""Write tasks in the forms that other programs read.

Holds: one function per form, `write`. Leaves out: readers (tasks/readers.py).
Exercise it: `python cli.py data convert FILE OUT --to eval`. Read next: tasks/worlds.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

from config.errors import UserError
from config.files import replacing
from data import Task
from tasks.readers import _one_line

# ---- Writing ----


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """`text.replacing` for a path of the user's: what the system refuses is a UserError."""
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"{path} cannot be written: {_one_line(error)}.") from error


def _write_json(
    path: str | Path,
    lines: Iterable[dict],
    before: str = "",
    between: str = "\n",
    after: str = "\n",
) -> None:
    """Each of `lines` as one line of JSON, compressed if the name ends in .gz."""
    import pyarrow as pa

    if (path := Path(path)).suffix == ".parquet":
        raise UserError(
            f"{path} cannot be written: this form is JSON, its name must not end in .parquet."
        )
    compression = "gzip" if path.suffix == ".gz" else None
    with (
        _replacing(path) as temporary,
        pa.output_stream(temporary, compression=compression) as stream,
    ):
        for n, line in enumerate(lines):
            stream.write(
                ((between if n else before) + json.dumps(line, ensure_ascii=False)).encode()
            )
        stream.write(after.encode())


def _labels(task: Task) -> dict[str, str]:
    """Fields beyond the published forms, so that a task comes back as it went."""
    labels = {"id": task.id, "kind": task.kind, "dataset": task.dataset, "split": task.split}
    return labels | {name: value for name in ("level", "tokens") if (value := getattr(task, name))}


def _checked(tasks: Sequence[Task]) -> Sequence[Task]:
    """Refuses what no reader would take back."""
    if not tasks:
        raise UserError("There are no tasks to write.")
    for task in tasks:
        if not (
            task.question.strip()
            and task.answers
            and all(answer.strip() for answer in task.answers)
        ):
            raise UserError(
                f"Task {task.id} has no question or no accepted answer; only tasks that can be graded are written."
            )
    return tasks


def _expanded(tasks: Sequence[Task]) -> Iterator[tuple[Task, dict]]:
    """Each task with the fields that the three published forms share."""
    for task in _checked(tasks):
        yield task, {"context": task.document, "num_docs": task.n_documents}


def _evidence(task: Task) -> dict:
    """Where the evidence stands, in the fields of ReMemR1's eval files; {} where it is not known."""
    if task.pool is None or not task.gold:
        return {}
    gold = list(task.gold)
    distance = min((b - a for a, b in pairwise(sorted(gold))), default=None)
    forward, reverse = gold == sorted(gold), gold == sorted(gold, reverse=True)
    return {
        "evidence_idx": gold,
        "is_ordered": forward,
        "is_reverse_ordered": reverse,
        "min_distance": distance,
        "type": task.kind,
    }


def write_eval_json(path: str | Path, tasks: Sequence[Task]) -> None:
    """MemAgent's eval form, with the full text; ReMemR1's, where the evidence is known."""
    rows = (
        {"input": task.question, "answers": list(task.answers), "index": index}
        | shared
        | _evidence(task)
        | _labels(task)
        for index, (task, shared) in enumerate(_expanded(tasks))
    )
    _write_json(path, rows, before="[\n", between=",\n", after="\n]\n")


def write_vime_jsonl(path: str | Path, tasks: Sequence[Task]) -> None:
    """vime's training form, with the full text. `data_source` names the grader there, hence always hotpotqa."""
    rows = (
        {
            "prompt": task.question,
            "label": task.answers[0],
            "metadata": {"ground_truth": list(task.answers), "data_source": "hotpotqa"}
            | shared
            | _labels(task),
        }
        for task, shared in _expanded(tasks)
    )
    _write_json(path, rows)


def write_parquet(path: str | Path, tasks: Sequence[Task]) -> None:
    """MemAgent's training form, with the full text. `data_source` names the grader there, hence always hotpotqa."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = (
        {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": task.question}],
            "context": shared["context"],
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": list(task.answers)},
            "extra_info": {
                "index": index,
                "question": task.question,
                "num_docs": shared["num_docs"],
            }
            | _labels(task),
        }
        for index, (task, shared) in enumerate(_expanded(tasks))
    )
    if (path := Path(path)).suffix != ".parquet":
        raise UserError(
            f"{path} cannot be written: the name of a parquet file must end in .parquet."
        )
    with _replacing(path) as temporary:
        table = pa.Table.from_pylist(
            list(islice(rows, 32))
        )  # in parts: at 6,400 documents a row is 3.6 MB of text
        with pq.ParquetWriter(temporary, table.schema, compression="zstd") as writer:
            while table.num_rows:
                writer.write_table(table)
                table = pa.Table.from_pylist(list(islice(rows, 32)), table.schema)


def write_built(path: str | Path, tasks: Sequence[Task], **about: str | int | bool) -> None:
    """Our own form: each passage once, documents as indices. `about` (seed, n_documents, ..) is kept in the first line."""
    pool = _checked(tasks)[0].pool
    if pool is None or any(task.pool is not pool for task in tasks):
        raise UserError(
            "Only tasks that share one pool of passages can be kept as a set: build it first."
        )
    documents = pool.frame == "documents"
    head = (
        {"form": "memagent-set", "passages": len(pool.texts), "tasks": len(tasks)}
        | ({} if documents else {"frame": pool.frame})
        | about
    )
    titles = pool.titles if documents else repeat(None)
    passages = (
        ({"title": title} if documents else {}) | {"text": text}
        for title, text in zip(titles, pool.texts, strict=False)
    )
    rows = (
        _labels(task)
        | {
            "question": task.question,
            "answers": task.answers,
            "order": list(task.order),
            "gold": task.gold,
        }
        for task in tasks
    )
    _write_json(path, chain([head], passages, rows))


WRITERS = {
    "eval": write_eval_json,
    "memagent": write_parquet,
    "vime": write_vime_jsonl,
    "built": write_built,
}


def write(path: str | Path, tasks: Sequence[Task], form: str) -> None:
    """A form by its name."""
    if form not in WRITERS:
        raise UserError(
            f"'{form}' is no form that can be written; these are: {', '.join(WRITERS)}."
        )
    WRITERS[form](path, tasks)
