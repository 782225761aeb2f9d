"""Print recorded readings; how one is rendered is in report/transcripts.py."""

from __future__ import annotations

from pathlib import Path

from agents import find
from config.errors import UserError
from config.terminal import console, next_step
from report.records import is_wrong, read_records


def show(path: Path, step: int | None, task: str, wrong: bool, n: int, agent: str = "") -> None:
    """Print the first n of the readings that match, of a training those of its last steps.

    agent: by which turns are shown, a name or a file; "" = the record's own, if it is one of ours.
    """
    from report.transcripts import render

    records, kind = read_records(path), find.find(agent) if agent else None
    records.sort(key=lambda record: -(record["step"] or 0))
    chosen = [
        record
        for record in records
        if (step is None or record["step"] == step)
        and task in record["id"]
        and (is_wrong(record) or not wrong)
    ]
    if not chosen:
        steps = sorted({record["step"] for record in records if record["step"] is not None})
        of_step = f" There are readings of step {steps[0]} to {steps[-1]}." if steps else ""
        raise UserError(f"None of the {len(records)} readings in {path} matches.{of_step}")
    for record in chosen[:n]:
        console.print(render(record, agent=kind))
    console.print(f"{min(n, len(chosen))} of {len(chosen)} readings")
    if not wrong and any(map(is_wrong, records)):
        words = ("--agent", agent) if agent else ()
        next_step("see the wrong ones", "show", path, "--wrong", *words)
