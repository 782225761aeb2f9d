"""Print recorded readings.

Holds: `show`. Leaves out: how one is rendered (report/transcripts.py).
Exercise it: `python cli.py show RUN`. Read next: report/transcripts.py.
"""

from __future__ import annotations

from pathlib import Path

from agents import find
from config.errors import UserError
from config.terminal import console, next_step
from report.records import is_graded, is_wrong, read_records


def show(
    path: Path,
    step: int | None,
    task: str,
    wrong: bool,
    n: int,
    agent: str = "",
    right: bool = False,
) -> None:
    """Print the first n of the readings that match, of a training those of its last steps.

    agent: by which turns are shown, a name or a file; "" = the record's own, if it is one of ours.
    """
    from report.transcripts import render

    records, kind = read_records(path), find.find(agent) if agent else None
    records.sort(key=lambda record: -(record["step"] or 0))
    chosen = [
        r
        for r in records
        if (step is None or r["step"] == step)
        and task in r["id"]
        and not (wrong and not is_wrong(r))
        and not (right and (not is_graded(r) or r["reward"] < 1))
    ]
    if not chosen and records:
        steps = sorted({record["step"] for record in records if record["step"] is not None})
        if step is not None and step not in steps:
            kept = ", ".join(map(str, steps if len(steps) < 9 else [*steps[:4], "…", *steps[-2:]]))
            known = f"kept are those of {kept}"
            if not steps:
                known = "they are of an evaluation, which has no steps"
            raise UserError(f"{path} has no readings of step {step}; {known}.")
    if not chosen:
        raise UserError(f"None of the {len(records)} readings in {path} matches.")
    for record in chosen[:n]:
        console.print(render(record, agent=kind))
    console.print(f"{min(n, len(chosen))} of {len(chosen)} readings")
    kind = ("--agent", agent) if agent else ()
    if not wrong and any(map(is_wrong, records)):
        next_step("see the wrong ones", "show", path, "--wrong", *kind)
