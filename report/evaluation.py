"""The folder of an evaluation, which has one model and one suite.

Agents, lengths, temperatures and questions may be added to a folder. Answers of other weights or to
questions of another suite may not, for summary and page compare all that lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import suites
from config import files
from config.errors import UserError, clean, clip
from config.gone import check_gone
from config.options import EvalConfig, without_url
from config.plugins import is_path
from config.terminal import say
from report.rows import Cell, latest, read_rows
from suites import Suite

# settings of `EvalConfig` that may differ between calls that fill one folder. Which weights answer
# at an endpoint or as the untrained policy is in their fingerprint, not in their address
MAY_DIFFER = {
    "name", "runs", "agents", "lengths", "n", "samples", "temperatures", "in_flight",
    "redo_failed", "kv_gib", "endpoint", "device", "trust_remote_code", "untrained",
}  # fmt: skip
WEIGHTS = "weights"  # section of config.yaml: model, untrained -> fingerprint of what answers;
# suite -> digest of its file, where the user has written it


def evaluation_folder(config: EvalConfig, suite: Suite) -> Path:
    """Return the folder of an evaluation. UserError: its settings are another run's."""
    folder = files.run_path(config.runs, config.name)
    known_weights(folder, config, suite, {})
    return folder


def dtype_before(folder: Path) -> str:
    """Return the dtype of the answers in a folder, "auto" where none is known."""
    with suppress(UserError):  # `known_weights` raises it
        stored = files.read_yaml(folder / "config.yaml").get("eval")
        if isinstance(stored, dict) and stored.get("dtype") in ("float32", "bfloat16"):
            return stored["dtype"]
    return "auto"


def begin_evaluation(
    folder: Path,
    config: EvalConfig,
    suite: Suite,
    agents: Mapping[str, object],
    weights: Mapping[str, str],
) -> None:
    """Write config.yaml. weights: fingerprints of what answers, named model or untrained."""
    files.make_folder(folder)
    known = {**known_weights(folder, config, suite, weights), **weights, **_code(suite)}
    settings = asdict(config) | asdict(suite)
    files.dump(folder / "config.yaml", **{"eval": settings, "agent": agents, WEIGHTS: known})


def known_weights(
    folder: Path, config: EvalConfig, suite: Suite, weights: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the fingerprints that the folder has, {} if its rows are still to come. UserError: its
    rows are of other settings or weights."""
    path, rows, sections = folder / "config.yaml", folder / "rows.jsonl", {}
    if not path.exists():
        return {}
    with suppress(UserError):  # it is damaged
        sections = files.read_yaml(path)
    stored, known = sections.get("eval"), sections.get(WEIGHTS) or {}
    if not isinstance(stored, dict) or not isinstance(known, dict):
        raise UserError(
            f"{folder} holds a run that is no evaluation: give this one another --name."
        )
    check_gone(stored, asdict(config) | asdict(suite), f"{path}: eval")
    others = [*_differences(suites.stored(stored), config, suite)] or [
        f"{name}: its {'file' if name == 'suite' else 'weights or their dtype'} changed since"
        for name, now in {**weights, **_code(suite)}.items()
        if known.get(name, now) != now
    ]
    if not others:
        return known
    if rows.exists() and rows.stat().st_size:
        raise UserError(
            f"{folder} holds an evaluation of another model or suite ({'; '.join(others)}): give "
            "this one another --name."
        )
    return {}


def _code(suite: Suite) -> dict[str, str]:
    return {"suite": files.content(suite.name)} if is_path(suite.name) else {}


def _differences(stored: Mapping[str, object], config: EvalConfig, suite: Suite) -> Iterator[str]:
    """Yield the settings that may not differ and do, as "model 'a', not 'b'"."""
    now = asdict(config) | asdict(suite) | {"suite": suite.name}
    before = asdict(EvalConfig()) | asdict(type(suite)()) | dict(stored)
    before["suite"] = suites.name_of(stored)  # which --data may name as well
    for name in now:
        unknown = name == "dtype" and before[name] == "auto"  # the weights' fingerprint has it
        if name in MAY_DIFFER or name in suite.may_differ or unknown:
            continue
        if _plain(before[name]) != _plain(now[name]):
            yield clip(clean(f"{name} {before[name]!r}, not {now[name]!r}"), 200)


def _plain(value: object) -> object:
    """Return a setting as it compares: paths absolute, lists for tuples, no address of a server."""
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return Path(without_url(value)).absolute() if isinstance(value, str) and value else value


def key_of(row: dict) -> tuple:
    """Return what tells a row of a folder from others: settings, id, sample, digest of the task."""
    return row["settings"], row["id"], row["sample"], row["task"]


def joined(folder: Path, wanted: Iterable[tuple], known: Iterable[str] = ()) -> list[dict]:
    """Return all rows of a folder by agents, the wanted ones first (`key_of`), and say how many
    count beside them: of questions that their file no longer has, or of a larger --n.

    known: agents that come first.
    """
    rows = {key_of(row): row for row in read_rows(folder / "rows.jsonl")}
    asked = [rows.pop(key) for key in dict.fromkeys(wanted) if key in rows]
    # of a question with several texts the one that is asked now is the latest
    found = latest([*rows.values(), *asked])
    others = found[: len(found) - len(asked)]
    cells = {*map(Cell.from_row, asked)}
    if more := sum(Cell.from_row(row) in cells for row in others):
        say(f"Of earlier calls count too, in cells that this one asks for: {more:,} answers.")
    agents = [*dict.fromkeys([*known, *(row["agent"] for row in asked + others)])]
    return sorted(asked + others, key=lambda row: agents.index(row["agent"]))
