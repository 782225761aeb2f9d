"""Record which questions a policy was trained on, so that an evaluation can warn about them.

Holds: `trained_on`, `write_trained_on`. Leaves out: the warning itself (report/summary.py).
Exercise it: `pytest tests/commands/test_commands.py -k trained_on`. Read next: tasks/suites.py.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from config.errors import UserError, first_line
from config.files import replacing_output

TRAINED_ON = "trained_on.csv"


def trained_on(folder: str | Path, before: int | None = None) -> dict[str, tuple[int, str]]:
    """Return the questions of a run's or a model's folder: `Task.question_digest` -> (step, id).

    Empty if the folder has no such list, as for a model trained elsewhere. before: only earlier
    steps. An export keeps the digests alone (step 0, no id). UserError: the file is damaged.
    """
    path = Path(folder, TRAINED_ON)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                (row["digest"], int(row.get("step") or 0), row.get("id") or "")
                for row in csv.DictReader(file)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = first_line(error)
        raise UserError(f"{path} cannot be read as a list of questions ({reason}).") from error
    return {
        digest: (step, name)
        for digest, step, name in rows
        if digest and (before is None or step < before)
    }


def write_trained_on(
    folder: Path, questions: Iterable[tuple[str, int, str]] | Iterable[str]
) -> None:
    """Write `TRAINED_ON`: (digest, step, id) of a run, or the digests alone of an export."""
    rows = [[q] if isinstance(q, str) else q for q in questions]
    header = ["digest", "step", "id"][: len(rows[0]) if rows else 1]
    with (
        replacing_output(folder / TRAINED_ON) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        csv.writer(file).writerows([header, *rows])
