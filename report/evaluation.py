"""The folder of an evaluation, which has one model and one suite.

Holds: `evaluation_folder`, `known_weights`, `begin_evaluation`, `held`, `locked`; `room`
for transcripts; `dealt`, `file_of_part`, `joined` of an evaluation in parts. Leaves out: its rows
(report/rows.py), what a folder holds later (report/folder.py). No torch.
Exercise it: `pytest tests/report/test_evaluation.py`. Read next: report/rows.py.

Agents, lengths, temperatures and questions may be added to a folder. Answers of other weights, of
an agent with other settings, or to questions of another suite may not, for summary and page sum up
and compare all that lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock

import suites
from config import files
from config.errors import UserError, clean, clip
from config.options import EvalConfig, without_url
from data import Task
from report.rows import TRANSCRIPTS_MIB, Cell, files_of, latest, read_rows
from report.status import hold, is_running
from suites import Suite

# settings of `EvalConfig` that may differ between calls that fill one folder. Which weights answer
# at an endpoint is in their fingerprint, not in its address
MAY_DIFFER = {
    "name", "runs", "agents", "lengths", "n", "samples", "temperatures", "transcripts", "in_flight",
    "retries", "redo_failed", "kv_gib", "endpoint", "device", "trust_remote_code",
    "part",
}  # fmt: skip
WEIGHTS = "weights"  # section of config.yaml: model, untrained -> fingerprint of what answers


def evaluation_folder(config: EvalConfig, suite: Suite) -> Path:
    """Return the folder of an evaluation.

    UserError: it holds another run, or an evaluation of another model or suite, so far as the
    settings tell.
    """
    folder = files.run_path(config.runs, config.name)
    known_weights(folder, config, suite, {})
    return folder


def locked(folder: Path) -> FileLock:
    """Keep other processes from writing the settings and the summary of a folder."""
    return FileLock(folder / ".config.lock")


def begin_evaluation(
    folder: Path,
    config: EvalConfig,
    suite: Suite,
    agents: Mapping[str, object],
    weights: Mapping[str, str],
) -> None:
    """Write config.yaml, and mark the folder as filled by this process.

    weights: fingerprints of what answers, named model or untrained. UserError: another process has
    begun an evaluation of another model or suite, or the weights are not those of the rows there.
    """
    files.make_folder(folder)
    with locked(folder):
        known = known_weights(folder, config, suite, weights)
        hold(folder)
        settings = asdict(config) | asdict(suite)
        sections = {"eval": settings, "agent": agents, WEIGHTS: {**known, **weights}}
        files.dump(folder / "config.yaml", **sections)


def known_weights(
    folder: Path, config: EvalConfig, suite: Suite, weights: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the fingerprints that the folder has, {} if its rows are still to come."""
    path = folder / "config.yaml"
    try:
        sections = files.read_yaml(path) if path.exists() else {"eval": {}}
    except UserError:
        sections = {}
    stored, known = sections.get("eval"), sections.get(WEIGHTS) or {}
    if not isinstance(stored, dict) or not isinstance(known, dict):
        raise UserError(
            f"{folder} holds a run that is no evaluation: give this one another --name."
        )
    if not stored:
        return {}
    others = [*_differences(suites.stored(stored), config, suite)] or [
        f"{name}: its weights have changed since"
        for name in weights
        if known.get(name, weights[name]) != weights[name]
    ]
    if not others:
        return known
    if is_running(folder) or any(path.stat().st_size for path in files_of(folder)):
        raise UserError(
            f"{folder} holds an evaluation of another model or suite ({'; '.join(others)}): give "
            "this one another --name."
        )
    return {}


def _differences(stored: Mapping[str, object], config: EvalConfig, suite: Suite) -> Iterator[str]:
    """Yield the settings that may not differ and do, as "model 'a', not 'b'"."""
    usual = asdict(EvalConfig()) | asdict(type(suite)())
    for name, value in (asdict(config) | asdict(suite)).items():
        old = stored.get(name, usual[name])
        if name == "suite":  # which --data may name as well
            old, value = suites.name_of(stored), suite.name
        added = name == "untrained" and "" in (old, value)
        if name in MAY_DIFFER or name in suite.may_differ or added:
            continue  # the latter: agents that it answers for are added
        if _plain(old) != _plain(value):
            yield clip(clean(f"{name} {old!r}, not {value!r}"), 200)


def _plain(value: object) -> object:
    """Return a setting as it compares: paths absolute, lists for tuples, no address of a server."""
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return Path(without_url(value)).absolute() if isinstance(value, str) and value else value


def held(folder: Path, asked: Sequence[Cell]) -> str:
    """Say what a folder holds before a call that asks these cells, and what that adds; "" of a
    folder without rows."""
    rows = read_rows(*files_of(folder))
    if not rows:
        return ""
    added = []
    for name in Cell.__slots__:
        known = {row[name] for row in rows}
        values = dict.fromkeys(getattr(cell, name) for cell in asked)
        if new := [str(value) for value in values if value and value not in known]:
            added.append(f"{name} {', '.join(new)}")
    agents = ", ".join(dict.fromkeys(row["agent"] for row in rows))
    then = f"to these it adds {'; '.join(added)}" if added else "what is missing is asked"
    return clean(f"{folder} holds {len(rows):,} answers of {agents}: {then}.")


# ---------------------------------------------------------------- parts


def room(config: EvalConfig, columns: int, cells: int) -> int:
    """Return how many bytes the transcripts of a part may have once so many of its cells are
    filled: what earlier ones have left over goes to the later ones."""
    cells_in_all = columns * len(config.temperatures) * len(config.agents)
    n_parts = int(config.part.partition("/")[2] or 1)
    return (TRANSCRIPTS_MIB << 20) * cells // cells_in_all // n_parts


def file_of_part(folder: Path, name: str, part: str) -> Path:
    """Return the file of rows or transcripts that one part writes; part: as K/N, "" = all."""
    return folder / f"{name}{part and '-'}{part.replace('/', '-of-')}.jsonl"


def dealt(tasks: Sequence[Task], part: str) -> tuple[list[str], list[Task]]:
    """Deal out documents in turn, each with all its questions; return the part of each task, as K/N
    ("" where there is one part alone), and the tasks of the part that is named."""
    if not part:
        return [""] * len(tasks), [*tasks]
    n = int(part.partition("/")[2])
    documents: dict[str, int] = {}
    numbers = [documents.setdefault(task.document_digest, len(documents)) for task in tasks]
    parts = [f"{number % n + 1}/{n}" for number in numbers]
    return parts, [task for task, dealt in zip(tasks, parts, strict=True) if dealt == part]


def joined(
    folder: Path, wanted: Mapping[tuple, str], known: Iterable[str] = ()
) -> tuple[list[dict], list[str]]:
    """Return the rows of all files by agents, of each those that are asked for first, and the parts
    that have not made all of theirs.

    wanted: (settings, id, sample, digest of the task) -> the part that makes it. known: agents that
    come first.
    """
    names = ("settings", "id", "sample", "task")
    rows = read_rows(*files_of(folder))
    found = {tuple(map(row.get, names)): row for row in rows}
    missing = {part: None for key, part in wanted.items() if key not in found}
    asked = [found[key] for key in wanted if key in found]
    tasks = {(row["settings"], row["id"]): row["task"] for row in asked}
    others = [
        row
        for row in latest(rows)
        if tuple(map(row.get, names)) not in wanted
        and row["task"] == tasks.get((row["settings"], row["id"]), row["task"])
    ]
    agents = [*dict.fromkeys([*known, *(row["agent"] for row in asked + others)])]
    return sorted(asked + others, key=lambda row: agents.index(row["agent"])), [*missing]
