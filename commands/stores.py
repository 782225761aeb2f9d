"""The commands on memory stores: `memory show`, `diff` and `log`.

Holds: `memory_app`, with the flags of its commands; `Choice` and `stores_of`, which find the store
that is meant. Leaves out: stores and their files (agents/store.py), tools (agents/tools.py).
Exercise it: `python cli.py memory show RUN`. Read next: agents/store.py.

A source is a file of a store, own data, a file of trajectories or a run's folder, and is never
written to. Results go to standard output; which trajectory was taken, to standard error.

What is printed is made of pieces, (kind, text). Where a terminal has colours, its kind gives a
piece its style. Elsewhere marks stand around words that differ, as in a word diff of git:

    ~ [m1] It [-rains.-] {+snows.+}  version 1 -> 2
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from config.errors import UserError, clean, clip
from config.files import is_file
from config.flags import command
from config.foreign import from_json, unpacked

if TYPE_CHECKING:
    from agents.store import Entry, Op, Store

memory_app = typer.Typer(
    no_args_is_help=True, help="Show and compare memory stores, and their history."
)

# ---------------------------------------------------------------- the store that is meant


@dataclass(frozen=True, slots=True)
class Choice:
    """Which trajectories of a file are meant."""

    task: str = ""  # those whose task's id contains it
    step: int | None = None  # of training; None = any
    sample: int | None = None  # None = any


def stores_of(sources: Sequence[Path], choice: Choice) -> list[Store]:
    """Read the store of each source: of trajectories, of the last step's first one that has one.

    UserError: there is none, or a choice is made where there is nothing to choose from.
    """
    from agents.store import FORMAT, Store, read_entries
    from report.records import is_record

    found, chosen = [], False
    for source in sources:
        first = None if source.is_dir() else _first_value(source)
        if source.is_dir() or is_record(first):
            found.append(_recorded(source, choice))
            chosen = True
        elif isinstance(first, dict) and first.get("format") == FORMAT:
            found.append(Store.from_jsonl(source))
        else:
            found.append(Store(read_entries(source)))
    if choice != Choice() and not chosen:
        raise UserError("Leave out --task, --step and --sample: no source holds trajectories.")
    return found


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


def _recorded(source: Path, choice: Choice) -> Store:
    """Read the store of the trajectory that is meant, and say on standard error which one it is."""
    from agents.store import Store
    from report.records import read_records

    records = read_records(source)
    kept = [record for record in records if _lines(record)]
    if not kept:
        raise UserError(
            f"None of the {len(records)} trajectories in {source} has a store: give some of an "
            "agent that edits one."
        )
    meant = [
        record
        for record in kept
        if choice.task in str(record["id"])
        and choice.step in (None, record["step"])
        and choice.sample in (None, record["sample"])
    ]
    if not meant:
        raise UserError(
            f"None of the {len(kept)} trajectories with a store in {source} is meant; the first "
            f"one is of {_origin(kept[0])}."
        )
    record = max(meant, key=_step)  # the first one of those with the highest step
    typer.echo(clean(f"{source}: {_origin(record)}"), err=True)
    return Store.from_lines(_lines(record), f"{source}, {_origin(record)}")


def _lines(record: dict) -> list[str]:
    """Return the lines of the store that a trajectory has left, as its last edit notes them."""
    for turn in reversed(record["turns"]):
        notes = turn.get("notes")
        lines = notes.get("store") if isinstance(notes, dict) else None
        if lines and isinstance(lines, list) and all(isinstance(line, str) for line in lines):
            return lines
    return []


SECTIONS = ("run", "eval", "ask")  # of config.yaml, whose `model` has the tokenizer


def measure_of(source: Path) -> tuple[Callable[[str], int], str]:
    """Return how long a text is by the tokenizer of the run that a source is of, and in what unit.

    Without a run, without its tokenizer at hand, or where a server's own is not known, it is in
    characters. Nothing is fetched, and no code of a model or an agent is run.
    """
    from config.files import read_yaml
    from config.options import EMBEDDED
    from config.realmodels import base_of
    from models.packaged import if_here

    path = (source if source.is_dir() else source.parent) / "config.yaml"
    try:
        raw = read_yaml(path) if path.is_file() else {}
        named = next((raw[name] for name in SECTIONS if isinstance(raw.get(name), dict)), None)
        if named is None or (named.get("endpoint") and not named.get("model")):
            return len, "characters"
        from tokens.codec import Codec

        model = if_here(base_of(named.get("model") or EMBEDDED))
        codec = Codec.load(model, local=True)
    except UserError:
        return len, "characters"
    return lambda text: len(codec.encode(text)), "tokens"


def _step(record: dict) -> int:
    return record["step"] if isinstance(record["step"], int) else -1


def _origin(record: dict) -> str:
    step = "" if record["step"] is None else f", training step {record['step']}"
    return clip(f"task {record['id']}, sample {record['sample']}{step}", 200)


# ---------------------------------------------------------------- in the terminal

Piece = tuple[str, str]  # (kind, text)

STYLES = {
    "same": "",
    "out": "red strike",  # words
    "in": "green",
    "gone": "red strike",  # a whole entry
    "new": "green",
    "bad": "bold red",
    "note": "dim",
}
MARKS = {"out": ("[-", "-]"), "in": ("{+", "+}")}  # where there are no colours
NOTED = ("version", "kind", "session", "parents", "evidence", "origin")  # fields beside the line


def _print(*pieces: Piece) -> None:
    """Print pieces as one line, which is not wrapped."""
    from rich.text import Text

    from config.terminal import console

    coloured = console.color_system is not None and not console.no_color
    line = Text()
    for kind, text in pieces:
        text = clean(text)
        words = text.rstrip(" ")
        opening, closing = MARKS.get(kind, ("", "")) if not coloured else ("", "")
        line.append(f"{opening}{words}{closing}", STYLES[kind])
        line.append(text[len(words) :])
    console.print(line, soft_wrap=True)


def _print_json(value: dict) -> None:
    """Print JSON in ASCII: no character of foreign text steers the terminal, and none is lost."""
    typer.echo(json.dumps(value, indent=2))


def _entry(entry: Entry, kind: str = "same") -> list[Piece]:
    """Return an entry's line, with what else is known of it as a note."""
    known = [
        f"v{entry.version}",
        entry.kind or "",
        "" if entry.session is None else f"session {entry.session}",
        f"from {', '.join(entry.parents)}" if entry.parents else "",
        f"evidence {', '.join(entry.evidence)}" if entry.evidence else "",
        "deleted" if entry.deleted else "",
    ]
    return [(kind, entry.line), ("note", f"  {', '.join(filter(None, known))}")]


def _gone(entry: Entry) -> list[Piece]:
    return [("same", "- "), *_entry(entry, "gone")]


def _new(entry: Entry) -> list[Piece]:
    return [("same", "+ "), *_entry(entry, "new")]


def _changed(old: Entry, new: Entry) -> list[Piece]:
    """Mark the words by which two versions of an entry differ; other fields are a note."""
    from report.transcripts import diff

    other = [
        f"{name} {_value(getattr(old, name))} -> {_value(getattr(new, name))}"
        for name in NOTED
        if getattr(old, name) != getattr(new, name)
    ]
    note = [("note", f" {', '.join(other)}")] if other else []
    return [("same", "~ "), *diff(old.line, new.line), *note]


def _value(value: object) -> str:
    if value in (None, ()):
        return "none"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _counts(ops: Sequence[Op]) -> tuple[Counter[str], Counter[str]]:
    """Count all operations by tool, and those that failed by code."""
    return Counter(op.tool for op in ops), Counter(op.code for op in ops if not op.ok)


def _head(store: Store, n: int) -> str:
    """Count the entries after n operations, and these operations, in one line."""

    def each(counts: Counter[str]) -> str:
        text = ", ".join(f"{name} {times}" for name, times in counts.items())
        return f" ({text})" if text else ""

    tools, failed = _counts(store.journal[:n])
    line = f"entries: {len(store.at(n))}; operations: {n} of {len(store.journal)}{each(tools)}"
    return f"{line}; failed: {failed.total()}{each(failed)}"


# ---------------------------------------------------------------- the commands

Source = Annotated[
    Path,
    typer.Argument(help="a store's file, own data, a file of trajectories, or a run's folder"),
]
Task = Annotated[str, typer.Option(help="trajectories: of a task whose id contains this")]
Step = Annotated[int | None, typer.Option(help="trajectories: of this step; default: the last")]
Sample = Annotated[int | None, typer.Option(help="trajectories: this sample; default: the first")]
Form = Annotated[Literal["text", "json"], typer.Option("--format", help="of what is printed")]


@command(memory_app)
def show(
    source: Source,
    until: Annotated[
        int | None, typer.Option(help="after this operation; default: the last")
    ] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="the deleted entries too")] = False,
    form: Form = "text",
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Print the entries of a store, and how many operations there were."""
    (store,) = stores_of([source], Choice(task, step, sample))
    n = len(store.journal) if until is None else until
    state = store.at(n)
    entries = [*state.entries, *(state.deleted if deleted else ())]
    if form == "json":
        tools, failed = _counts(store.journal[:n])
        counts = {"operations": len(store.journal), "tools": tools, "failed": failed}
        return _print_json({"until": n} | counts | {"entries": [*map(asdict, entries)]})
    _print(("note", _head(store, n)))
    for entry in entries:
        _print(*_entry(entry, "gone" if entry.deleted else "same"))


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
    form: Form = "text",
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Print what is different between two stores, or between two states of one."""
    from agents.store import diff
    from report.transcripts import diff as words

    if other is not None and (start, end) != (None, None):
        raise UserError("--from and --to are for two states of one source: give no second source.")
    sources = [path for path in (source, other) if path is not None]
    first, *more = stores_of(sources, Choice(task, step, sample))
    if more:
        before, after = first.snapshot(), more[0].snapshot()
    else:
        before = first.at(0 if start is None else start)
        after = first.at(len(first.journal) if end is None else end)
    found = diff(before, after)
    linked = {entry.id for olds, new in found.merged for entry in (*olds, new)}
    linked |= {entry.id for old, news in found.split for entry in (old, *news)}
    added = [entry for entry in found.added if entry.id not in linked]
    removed = [entry for entry in found.removed if entry.id not in linked]
    if form == "json":
        value = {"added": [*map(asdict, added)], "removed": [*map(asdict, removed)]}
        value["changed"] = [
            _pair(*pair) | {"words": words(*(entry.line for entry in pair))}
            for pair in found.changed
        ]
        value["merged"] = [_pair(*pair) for pair in found.merged]
        value["split"] = [_pair(*pair) for pair in found.split]
        return _print_json(value)
    sections = {
        "added": [[_new(entry)] for entry in added],
        "removed": [[_gone(entry)] for entry in removed],
        "changed": [[_changed(*pair)] for pair in found.changed],
        "merged": [[*map(_gone, olds), _new(new)] for olds, new in found.merged],
        "split": [[_gone(old), *map(_new, news)] for old, news in found.split],
    }
    _print(("note", ", ".join(f"{title} {len(groups)}" for title, groups in sections.items())))
    for title, groups in sections.items():
        if groups:
            _print(("same", title))
        for row in chain.from_iterable(groups):
            _print(*row)


def _pair(before: Entry | tuple[Entry, ...], after: Entry | tuple[Entry, ...]) -> dict:
    """Return what became of one or several entries as JSON values."""

    def values(side: Entry | tuple[Entry, ...]) -> dict | list[dict]:
        return [*map(asdict, side)] if isinstance(side, tuple) else asdict(side)

    return {"before": values(before), "after": values(after)}


@command(memory_app)
def log(source: Source, task: Task = "", step: Step = None, sample: Sample = None):
    """Print all operations: arguments, reason, reply, outcome, and how much is stored then.

    Entries are measured as they are shown: in tokens of the run's model where its config.yaml lies
    with the source and its tokenizer is at hand, else in characters.
    """
    (store,) = stores_of([source], Choice(task, step, sample))
    measure, unit = measure_of(source)
    _print(("note", _head(store, len(store.journal))))
    sizes = {entry.id: measure(entry.line) for entry in store.at(0).entries}
    stored = sum(sizes.values())
    for op in store.journal:
        session = "" if op.session is None else f"session {op.session}  "
        given = {name: value for name, value in op.args.items() if name != "reason"}
        each = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        call = f"{op.tool} {clip(' '.join(each), 160)}"
        _print(("note", f"{op.n:>3}  {session}"), ("same", call))
        if "reason" in op.args:
            _print(("note", "     reason: "), ("same", clip(str(op.args["reason"]), 300)))
        code = ("new", "ok") if op.ok else ("bad", op.code)
        first, *more = clip(op.message, 4000).split("\n")
        _print(("same", "     "), code, ("same", f"  {first}"))
        for line in more:
            _print(("same", f"         {line}"))
        for entry in op.after:
            stored -= sizes.pop(entry.id, 0)
            if not entry.deleted:
                sizes[entry.id] = measure(entry.line)
                stored += sizes[entry.id]
        _print(("note", f"     stored: {stored} {unit} in entries: {len(sizes)}"))
