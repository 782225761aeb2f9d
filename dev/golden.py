"""Compare what two commits compute, bit for bit: weights, metrics, trajectories, evaluation rows.

Holds: the runs that are compared, their digest, the comparison. Leaves out: speed (bench/).
Exercise it: `python dev/golden.py --against HEAD~1` (about five minutes on one core). A refactoring
that changes no result prints no difference. Read next: dev/LOG.md.

Each commit runs through its own `cli.py` in processes of its own, one after the other on the same
machine, because another kind of processor rounds differently. Times, paths, memory and the identity
of settings are left out: everything else has to be the same.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent.parent
TRAIN = "train --preset demo --steps 14 --lengths 2,4 --save-every 14"
COMMANDS = {
    "memagent": f"{TRAIN} --name memagent",
    "rememr1": f"{TRAIN} --agent rememr1 --name rememr1",
    "eval": "eval --agents memagent,rememr1,full,bm25,none,oracle --lengths 2,4 --n 8 --name eval",
    "trained": "eval --model {runs}/rememr1/model --agents rememr1,memagent --lengths 4 --n 8 "
    "--name trained",
}
UNEQUAL = ("seconds", "mib", "settings")  # of a row or a record
TIMES = ("_s", "_per_s")  # how columns of metrics.csv end that are times


def run(checkout: Path, runs: Path) -> None:
    """Run every command with the code of a checkout."""
    for arguments in COMMANDS.values():
        done = subprocess.run(
            [sys.executable, "cli.py", *arguments.format(runs=runs).split(), "--runs", str(runs)],
            cwd=checkout,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            output = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise SystemExit(f"{checkout}: cli.py {arguments} failed:\n{output}")


def digest(runs: Path) -> dict[str, object]:
    """Describe the results of `run`: name -> a value or a hash that has to be the same."""
    from safetensors.torch import load_file

    values: dict[str, object] = {}
    for name in ("memagent", "rememr1"):
        for key, tensor in load_file(runs / name / "model" / "model.safetensors").items():
            sha256 = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            values[f"{name}: weights of {key}"] = sha256
        with (runs / name / "metrics.csv").open() as file:
            for number, line in enumerate(csv.DictReader(file)):
                for column, value in line.items():
                    if not column.endswith(TIMES) and column not in NEW_COLUMNS:
                        column = COLUMNS.get(column, column)
                        values[f"{name}: step {number}, {column}"] = value
        with gzip.open(runs / name / "trajectories.jsonl.gz", "rt", encoding="utf-8") as lines:
            for number, record in enumerate(map(json.loads, lines)):
                values[f"{name}: trajectory {number}"] = _without(record)
    parts = ("agent", "question", "temperature", "length", "id", "sample")
    for name in ("eval", "trained"):
        for line in (runs / name / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = " ".join(str(row[part]) for part in parts)
            values[f"{name}: row {key}"] = _without(row)
    return values


# ---- records of commits before and after agents became objects, in one form

COLUMNS = {  # of metrics.csv -> as they are called now
    "state_format": "turn_reward_format",
    "state_format_final": "turn_reward_format_final",
    "state_callback": "turn_reward_callback",
    "state_gain": "answer_gain",
    "state_level": "answer_level",
    "state_covered": "answer_covered",
    "state_groups_without_signal": "turn_groups_without_signal",
}
# columns that only the newer side has; a memory's reward was one of state_gain and state_level
# before
NEW_COLUMNS = (
    *("turn_reward_memory", "turn_reward_memory_final", "turn_reward_callback_final"),
    "unrewarded",
)
COUNTED = (  # counts of a row that the older side has too
    "updates queries hits ages current sought holds evidence_sought evidence degenerate stray_tag "
    "memory_capped query_capped no_update multi_update empty_update multi_recall unclosed_recall "
    "empty_recall truncated"
).split()


def _without(record: dict) -> dict:
    record = {key: value for key, value in record.items() if key not in UNEQUAL}
    counts = record.pop("recalls", None) or record.pop("counts", None)
    if counts is not None:
        record["counts"] = {name: counts[name] for name in COUNTED if counts.get(name)}
    if "turns" in record:
        record.pop("agent", None)
        record["turns"] = [_turn(turn) for turn in record["turns"]]
    return record


def _turn(turn: dict) -> dict:
    """Return a recorded turn without its notes, but with what they say."""
    turn = dict(turn)
    notes, recalled = turn.pop("notes", None), turn.pop("recalled", None)
    if notes:
        step, recalled = notes["step"] or {}, notes["recalled"]
        recalled |= {"from": recalled["steps"], "held": notes["evidence"]}
        turn["errors"] = [*step.get("errors", ()), *["stray_tag"] * bool(step.get("stray"))]
        turn["update"], turn["query"] = (
            step.get("memory") or turn["memory"],
            step.get("query") or "",
        )
        if turn["final"]:
            del turn["errors"], turn["update"], turn["query"]
    if recalled:
        turn["recalled"] = [recalled["text"], recalled["query"], list(recalled["from"])]
        turn["recalled"] += [round(recalled["score"], 4), recalled.get("held") or ""]
    if "rewards" in turn:
        turn["rewards"] = [turn["rewards"][name] for name in ("memory", "callback", "format")]
    return turn


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """List the differences of two digests, a line each."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
            one, other = {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}
        lines.append(f"{name}: {str(one)[:200]} -> {str(other)[:200]}")
    return lines


def main(
    against: Annotated[str, typer.Option(help="the commit to compare this checkout with")] = "",
    keep: Annotated[
        Path | None, typer.Option(help="write this checkout's digest to a file and compare nothing")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(help="compare with a digest written by --keep on this machine")
    ] = None,
) -> None:
    """Compare the results of this checkout with those of another commit."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        run(HERE, Path(folder, "after"))
        after = digest(Path(folder, "after"))
        if keep:
            keep.write_text(json.dumps(after), encoding="utf-8")
            return typer.echo(f"{len(after)} values")
        if before:
            old = json.loads(before.read_text(encoding="utf-8"))
        else:
            checkout, git = Path(folder, "checkout"), ["git", "-C", HERE, "worktree"]
            subprocess.run([*git, "add", "--detach", "-q", checkout, against], check=True)
            try:
                run(checkout, Path(folder, "before"))
            finally:
                subprocess.run([*git, "remove", "--force", checkout], check=True)
            old = digest(Path(folder, "before"))
    lines = differences(old, json.loads(json.dumps(after)))
    typer.echo("\n".join(lines[:100]) or f"{len(after)} values, all the same")
    raise typer.Exit(bool(lines))


if __name__ == "__main__":
    typer.run(main)
