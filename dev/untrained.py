"""Check that a policy was asked no question that it was trained on.

    python -m dev.untrained runs/eval runs/reader/reader

Holds: `asked`, `met`, the command. Leaves out: making the list (tasks/seen.py), the warning of an
evaluation (report/summary.py).
Exercise it: `pytest tests/tasks/test_seen.py -k untrained`. Read next: tasks/seen.py.

The rows of an evaluation are compared with the trained_on.csv of one or several models or adapters.
A question is the same if its words are, once normalised (`Task.question_digest`), whatever its id
and document; one of generated English is in no list. The exit code is 1 where the two meet, and the
ids are printed; 2 where nothing can be said, as of a policy without a list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from config.errors import UserError, clean
from tasks.seen import TRAINED_ON, trained_on


def questions(folder: Path) -> dict[str, list[str]]:
    """Return the questions of an evaluation's rows: `Task.question_digest` -> their ids.

    UserError: there are none, or one does not say what was asked.
    """
    path, found = folder / "rows.jsonl", {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as the rows of an evaluation.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            digest, name = row["asked"], str(row["id"])
        except (ValueError, KeyError, TypeError):
            reason = "it is damaged, or of a version that did not write it"
            raise UserError(f"{path}, line {number}: no question is named ({reason}).") from None
        ids = found.setdefault(digest, [])
        ids += [name] if name not in ids else []
    if not found:
        raise UserError(f"{path} is empty: nothing was asked yet.")
    return found


def met(questions: dict[str, list[str]], known: Collection[str]) -> list[str]:
    """Return the ids of the questions that are known, in order."""
    return [name for digest, ids in questions.items() if digest in known for name in ids]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.untrained", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("evaluation", type=Path, help="its folder, with rows.jsonl")
    parser.add_argument("policies", nargs="+", type=Path, help=f"folders with a {TRAINED_ON}")
    given = parser.parse_args(arguments)
    try:
        digests, failed = questions(given.evaluation), False
        for policy in given.policies:
            if not (known := trained_on(policy)):
                raise UserError(f"{policy} has no {TRAINED_ON}: what it was trained on is unknown.")
            ids = met(digests, known)
            failed = failed or bool(ids)
            verdict = f"{len(ids)} of the rows' ids: {', '.join(ids)}" if ids else "none"
            n = f"{len(digests):,} questions asked, {len(known):,} trained on"
            print(clean(f"{policy}: {n}; both: {verdict}"))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
