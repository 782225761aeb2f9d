"""The commands on memory stores: `memory show`, `diff` and `log`.

Holds: `memory_app`, with the flags of its commands; `store_of`, which finds the store that is
meant. Leaves out: stores and their files (agents/store.py), tools (agents/tools.py).
Exercise it: `python cli.py memory show RUN`. Read next: agents/store.py.

A source is a file of a store, a file of trajectories or a run's folder, and is never written to.
Results go to standard output; which trajectory was taken, to standard error. Marks stand around
words that differ, as in a word diff of git:

    ~ [m1] It [-rains.-] {+snows.+}  version 1 -> 2
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from config.errors import UserError, clean, clip
from config.files import found_run, is_file
from config.flags import command
from config.foreign import from_json, unpacked

if TYPE_CHECKING:
    from agents.store import Entry, Store

memory_app = typer.Typer(
    no_args_is_help=True, help="Show and compare memory stores, and their history."
)

# ---------------------------------------------------------------- the store that is meant


def store_of(source: Path, task: str = "", step: int | None = None) -> Store:
    """Read the store of a source: of trajectories, of the last step's first one that has one.

    task: of trajectories, those whose task's id contains it. step: those of this training step.
    UserError: there is none, or a choice is made where there is nothing to choose from.
    """
    from agents.store import Store
    from report.records import is_record

    first = None if source.is_dir() else _first_value(source)
    if source.is_dir() or is_record(first):
        return _recorded(source, task, step)
    if task or step is not None:
        raise UserError(f"{source} holds no readings: leave out --task and --step.")
    return Store.from_jsonl(source)


def _first_value(path: Path) -> object:
    """Return the value of a file's first line; None if it has none, whose reader then says why."""
    if not is_file(path):
        return None
    from agents.store import MOST_BYTES

    try:
        with path.open("rb") as file:
            data = unpacked(file, path) if path.suffix == ".gz" else file
            lines = islice(iter(lambda: data.readline(MOST_BYTES), b""), 1000)
            whole = (line for line in lines if line.strip() or len(line) == MOST_BYTES)
            return from_json(next(whole, b""))
    except (OSError, EOFError, zlib.error, ValueError):
        return None


def _recorded(source: Path, task: str, step: int | None) -> Store:
    """Read the store of the trajectory that is meant, and say on standard error which one it is."""
    from agents.store import Store
    from report.records import read_records

    records = read_records(source)
    meant = [
        record
        for record in records
        if _lines(record) and task in str(record["id"]) and step in (None, record["step"])
    ]
    if not meant:
        raise UserError(f"None of the {len(records)} readings in {source} matches and has a store.")
    # the first one of those with the highest step
    record = max(meant, key=lambda record: -1 if record["step"] is None else record["step"])
    origin = clip(f"task {record['id']}, sample {record['sample']}, step {record['step']}", 200)
    typer.echo(clean(f"{source}: {origin}"), err=True)
    return Store.from_lines(_lines(record), f"{source}, {origin}")


def _lines(record: dict) -> list[str]:
    """Return the lines of the store that a trajectory has left, as its last edit notes them."""
    for turn in reversed(record["turns"]):
        notes = turn.get("notes")
        lines = notes.get("store") if isinstance(notes, dict) else None
        if lines and isinstance(lines, list) and all(isinstance(line, str) for line in lines):
            return lines
    return []


# ---------------------------------------------------------------- what is printed

NOTED = ("version", "kind", "session", "parents", "evidence", "origin")  # fields beside the line


def _print(*lines: str) -> None:
    """Print lines of foreign text, which steer no terminal."""
    for line in lines:
        typer.echo(clean(line))


def _entry(entry: Entry) -> str:
    """Return an entry's line, with what else is known of it."""
    known = [
        f"v{entry.version}",
        entry.kind or "",
        "" if entry.session is None else f"session {entry.session}",
        f"from {', '.join(entry.parents)}" if entry.parents else "",
        f"evidence {', '.join(entry.evidence)}" if entry.evidence else "",
    ]
    return f"{entry.line}  {', '.join(filter(None, known))}"


def _changed(old: Entry, new: Entry) -> str:
    """Mark the words by which two versions of an entry differ, and say what else does."""
    from report.transcripts import diff, marked

    def value(entry: Entry, name: str) -> str:
        value = getattr(entry, name)
        if value in (None, ()):
            return "none"
        return ", ".join(value) if isinstance(value, tuple) else str(value)

    other = [
        f"{name} {value(old, name)} -> {value(new, name)}"
        for name in NOTED
        if getattr(old, name) != getattr(new, name)
    ]
    return f"~ {marked(diff(old.line, new.line))}  {', '.join(other)}".rstrip()


def _head(store: Store, n: int) -> str:
    """Count the entries after n operations, and these operations, in one line."""

    def each(counts: Counter[str]) -> str:
        text = ", ".join(f"{name} {times}" for name, times in counts.items())
        return f" ({text})" if text else ""

    ops = store.journal[:n]
    tools, failed = Counter(op.tool for op in ops), Counter(op.code for op in ops if not op.ok)
    line = f"entries: {len(store.at(n))}; operations: {n} of {len(store.journal)}{each(tools)}"
    return f"{line}; failed: {failed.total()}{each(failed)}"


# ---------------------------------------------------------------- the commands

Source = Annotated[
    Path,
    typer.Argument(help="a store's file, a file of readings, or a run"),
]
Task = Annotated[str, typer.Option(help="of readings: of a task whose id contains this")]
Step = Annotated[int | None, typer.Option(help="of readings: of this step; default: the last")]
Until = Annotated[int | None, typer.Option(help="after this operation; default: the last")]


@command(memory_app)
def show(
    source: Source,
    until: Until = None,
    task: Task = "",
    step: Step = None,
):
    """Print the entries of a store, and how many operations there were."""
    store = store_of(found_run(source), task, step)
    n = len(store.journal) if until is None else until
    state = store.at(n)
    _print(_head(store, n), *map(_entry, state.entries))
    _next("see how it came about", "log", source, task, step)


@command(memory_app, name="diff")
def compare(
    source: Source,
    other: Annotated[Path | None, typer.Argument(help="another source, compared with it")] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", help="of one source: after this operation; default: 0, before all"),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option("--to", help="of one source: after this operation; default: the last"),
    ] = None,
    task: Task = "",
    step: Step = None,
):
    """Print what is different between two stores, or between two states of one."""
    from agents.store import diff

    store = store_of(found_run(source), task, step)
    if other is None:
        before = store.at(start or 0)
        after = store.at(len(store.journal) if end is None else end)
    elif (start, end) == (None, None):
        before, after = store.snapshot(), store_of(found_run(other), task, step).snapshot()
    else:
        raise UserError("--from and --to are two states of one source: give no second one.")
    found = diff(before, after)
    linked = {entry.id for olds, new in found.merged for entry in (*olds, new)}
    linked |= {entry.id for old, news in found.split for entry in (old, *news)}

    def gone(*entries: Entry) -> list[str]:
        return [f"- {_entry(entry)}" for entry in entries]

    def come(*entries: Entry) -> list[str]:
        return [f"+ {_entry(entry)}" for entry in entries]

    sections = {
        "added": [come(entry) for entry in found.added if entry.id not in linked],
        "removed": [gone(entry) for entry in found.removed if entry.id not in linked],
        "changed": [[_changed(*pair)] for pair in found.changed],
        "merged": [[*gone(*olds), *come(new)] for olds, new in found.merged],
        "split": [[*gone(old), *come(*news)] for old, news in found.split],
    }
    _print(", ".join(f"{title} {len(groups)}" for title, groups in sections.items()))
    for title, groups in sections.items():
        if groups:
            _print(title)
        for lines in groups:
            _print(*lines)


@command(memory_app)
def log(source: Source, task: Task = "", step: Step = None):
    """Print all operations: arguments, reason, reply, outcome, and how much is stored then.

    Entries are measured in characters, as they are shown.
    """
    source = found_run(source)
    store = store_of(source, task, step)
    _print(_head(store, len(store.journal)))
    sizes = {entry.id: len(entry.line) for entry in store.at(0).entries}
    stored = sum(sizes.values())
    for op in store.journal:
        session = "" if op.session is None else f"session {op.session}  "
        given = {name: value for name, value in op.args.items() if name != "reason"}
        each = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        _print(f"{op.n:>3}  {session}{op.tool} {clip(' '.join(each), 160)}")
        if "reason" in op.args:
            _print(f"     reason: {clip(str(op.args['reason']), 300)}")
        first, *more = clip(op.message, 4000).split("\n")
        _print(
            f"     {'ok' if op.ok else op.code}  {first}", *(f"         {line}" for line in more)
        )
        for entry in op.after:
            stored -= sizes.pop(entry.id, 0)
            if not entry.deleted:
                sizes[entry.id] = len(entry.line)
                stored += sizes[entry.id]
        _print(f"     stored: {stored} characters in entries: {len(sizes)}")
    _next("see what all of that has changed", "diff", source, task, step)


def _next(why: str, command: str, source: Path, task: str, step: int | None) -> None:
    from config.terminal import next_step

    flags = ("--task", task) * bool(task) + ("--step", step) * (step is not None)
    next_step(why, "memory", command, source, *flags)
