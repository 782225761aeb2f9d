"""Which questions a policy was trained on, so that an evaluation can warn about them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from config.errors import UserError, first_line
from config.files import replacing_output
from data import Task

TRAINED_ON = "trained_on.csv"


def trained_on(folder: str | Path, before: int | None = None) -> dict[str, tuple[int, str]]:
    """Return the questions of a run's or a model's folder: `Task.question_digest` -> (step, id).

    Empty if the folder has no such list, as for a model trained elsewhere. before: only earlier
    steps. An export keeps the digests alone (step 0, no id). UserError: the file is damaged.
    """
    path, found = Path(folder, TRAINED_ON), {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = int(row.get("step") or 0)
                if row["digest"] and (before is None or step < before):
                    found[row["digest"]] = step, row.get("id") or ""
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = first_line(error)
        raise UserError(f"{path} cannot be read as a list of questions ({reason}).") from error
    return found


def questions_of(tasks: Iterable[Task]) -> list[tuple[str, str]]:
    """Return (digest, id) of the questions of tasks, without those of generated English.

    These all have the same words; the split of its facts keeps training and evaluation apart.
    """
    return [(task.question_digest, task.id) for task in tasks if task.dataset != "world"]


def add_trained_on(
    folder: Path,
    known: dict[str, tuple[int, str]],
    step: int,
    questions: Iterable[tuple[str, str]],
) -> None:
    """Add the questions of a step (`questions_of`) to `known`, and the new ones to the run's list.

    known: at first `trained_on(folder, before=step)`, so that a resumed run forgets the steps that
    it does again. A question of several steps or files is listed once, with its first step and id.
    """
    n_before = len(known)
    for digest, name in questions:
        known.setdefault(digest, (step, name))
    if len(known) > n_before:
        rows = ((digest, step, name) for digest, (step, name) in known.items())
        _write(folder, ["digest", "step", "id"], rows)


def pass_on(lists: Iterable[Mapping[str, object]], folder: Path) -> None:
    """Write the digests of several lists (`trained_on`) to an exported folder, where there are any.

    lists: the run's, and that of each folder whose weights it started from.
    """
    digests = sorted({digest for known in lists for digest in known})
    if digests:
        _write(folder, ["digest"], ([digest] for digest in digests))


def _write(folder: Path, header: list[str], rows: Iterable[Iterable[object]]) -> None:
    # half a surrogate pair, in an id out of JSON, becomes \\ud83d
    text = dict(newline="", encoding="utf-8", errors="backslashreplace")
    with replacing_output(folder / TRAINED_ON) as temporary, temporary.open("w", **text) as file:
        csv.writer(file).writerows([header, *rows])
