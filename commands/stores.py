"""The commands on memory stores: `memory show`, `diff`, `log`, `replay`, `restore` and `play`.

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
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from config.errors import UserError, clean, clip, first_line
from config.files import is_file
from config.flags import command
from config.foreign import from_json, unpacked

if TYPE_CHECKING:
    from agents.store import Diff, Entry, Op, Store

memory_app = typer.Typer(
    no_args_is_help=True, help="Show, compare, restore and edit memory stores, and their history."
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
Row = tuple[str, list[Piece]]  # what became of an entry (+, -, ~; "" = nothing), and the entry

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
MARKDOWN = {"out": "~~", "gone": "~~", "in": "**", "new": "**"}


def _say(*pieces: Piece) -> None:
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


def _say_row(row: Row) -> None:
    sign, pieces = row
    _say(*([("same", f"{sign} ")] if sign else []), *pieces)


def _shown(entry: Entry, kind: str = "same") -> list[Piece]:
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


def _gone(entry: Entry) -> Row:
    return "-", _shown(entry, "gone")


def _new(entry: Entry) -> Row:
    return "+", _shown(entry, "new")


NOTED = ("version", "kind", "session", "parents", "evidence", "origin")  # fields beside the line


def _changed(old: Entry, new: Entry) -> Row:
    """Mark the words by which two versions of an entry differ; other fields are a note."""
    other = [
        f"{name} {_value(getattr(old, name))} -> {_value(getattr(new, name))}"
        for name in NOTED
        if getattr(old, name) != getattr(new, name)
    ]
    return "~", [*_words(old, new), *([("note", f" {', '.join(other)}")] if other else [])]


def _words(old: Entry, new: Entry) -> list[Piece]:
    from report.transcripts import diff

    return diff(old.line, new.line)


def _value(value: object) -> str:
    return "none" if value in (None, ()) else _cell(value)


def _changes(op: Op) -> Iterator[Row]:
    """Yield what an operation did to each entry that is or was live."""
    before = {entry.id: entry for entry in op.before if not entry.deleted}
    for new in op.after:
        old = before.get(new.id)
        if old is None:
            if not new.deleted:
                yield _new(new)
        else:
            yield _gone(old) if new.deleted else _changed(old, new)


def _head(store: Store, n: int) -> str:
    """Count entries and operations in one line."""
    tools, failed = _counts(store.journal[:n])
    line = f"entries: {len(store.at(n))}; operations: {n} of {len(store.journal)}{_each(tools)}"
    return f"{line}; failed: {failed.total()}{_each(failed)}"


def _each(counts: Counter[str]) -> str:
    each = ", ".join(f"{name} {times}" for name, times in counts.items())
    return f" ({each})" if each else ""


def _counts(ops: Sequence[Op]) -> tuple[Counter[str], Counter[str]]:
    """Count all operations by tool, and those that failed by code."""
    return Counter(op.tool for op in ops), Counter(op.code for op in ops if not op.ok)


def _say_op(op: Op) -> None:
    """Print the number, session, tool and arguments of an operation."""
    session = "" if op.session is None else f"session {op.session}  "
    given = {name: value for name, value in op.args.items() if name != "reason"}
    each = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    _say(("note", f"{op.n:>3}  {session}"), ("same", f"{op.tool} {clip(' '.join(each), 160)}"))


def _say_outcome(op: Op) -> None:
    """Print the reason that an operation was given, and its code and reply."""
    if "reason" in op.args:
        _say(("note", "     reason: "), ("same", clip(str(op.args["reason"]), 300)))
    code = ("new", "ok") if op.ok else ("bad", op.code)
    first, *more = clip(op.message, 4000).split("\n")
    _say(("same", "     "), code, ("same", f"  {first}"))
    for line in more:
        _say(("same", f"         {line}"))


class _Size:
    """The size of a store after one operation after the other, each entry by its line."""

    def __init__(
        self,
        entries: Sequence[Entry],
        measure: Callable[[str], int] = len,
        unit: str = "characters",
    ):
        self.measure, self.unit = measure, unit
        self.sizes = {entry.id: measure(entry.line) for entry in entries}

    def say_after(self, op: Op) -> None:
        """Print how much is stored after the next operation."""
        for entry in op.after:
            self.sizes.pop(entry.id, None)
            if not entry.deleted:
                self.sizes[entry.id] = self.measure(entry.line)
        stored = f"{sum(self.sizes.values())} {self.unit}"
        _say(("note", f"     stored: {stored} in entries: {len(self.sizes)}"))


# ---------------------------------------------------------------- Markdown and JSON


def _markdown(pieces: Iterable[Piece]) -> str:
    """Render pieces for Markdown, in which foreign text has no marks of its own."""
    parts = []
    for kind, text in pieces:
        words = text.rstrip(" ")
        mark = MARKDOWN.get(kind, "") if words else ""
        parts.append(f"{mark}{_escaped(words)}{mark}{text[len(words) :]}")
    return "".join(parts).rstrip()


def _escaped(text: object) -> str:
    return re.sub(r"([\\`*_~<\[|&])", r"\\\1", clean(text)).replace("\n", " ")


def _print_json(value: dict) -> None:
    """Print JSON in ASCII: no character of foreign text steers the terminal, and none is lost."""
    typer.echo(json.dumps(value, indent=2))


# ---------------------------------------------------------------- flags

Source = Annotated[
    Path,
    typer.Argument(help="a store's file, own data, a file of trajectories, or a run's folder"),
]
Until = Annotated[int | None, typer.Option(help="after this operation; default: the last")]
Task = Annotated[str, typer.Option(help="trajectories: of a task whose id contains this")]
Step = Annotated[int | None, typer.Option(help="trajectories: of this step; default: the last")]
Sample = Annotated[int | None, typer.Option(help="trajectories: this sample; default: the first")]
Form = Annotated[Literal["text", "md", "json"], typer.Option("--format", help="of what is printed")]
Force = Annotated[bool, typer.Option("--force", help="replace FILE if it is there")]

# ---------------------------------------------------------------- show, diff, log, replay


@command(memory_app)
def show(
    source: Source,
    until: Until = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="the deleted entries too")] = False,
    form: Form = "text",
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Print the entries of a store, and how many operations there were."""
    (store,) = stores_of([source], Choice(task, step, sample))
    n = len(store.journal) if until is None else until
    entries = [*store.at(n).entries, *(store.at(n).deleted if deleted else ())]
    if form == "json":
        tools, failed = _counts(store.journal[:n])
        counts = {"operations": len(store.journal), "tools": tools, "failed": failed}
        return _print_json({"until": n} | counts | {"entries": [*map(asdict, entries)]})
    if form == "md":
        return typer.echo(f"{_escaped(_head(store, n))}\n\n{_table(entries)}")
    _print_store(store, n, entries)


def _print_store(store: Store, n: int, entries: Sequence[Entry]) -> None:
    _say(("note", _head(store, n)))
    for entry in entries:
        _say(*_shown(entry, "gone" if entry.deleted else "same"))


COLUMNS = ("id", "date", "speaker", "text", "kind", "version", "parents", "evidence", "session")


def _table(entries: Sequence[Entry]) -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for entry in entries:
        values = [_escaped(_cell(getattr(entry, name))) for name in COLUMNS]
        values[0] += " (deleted)" if entry.deleted else ""
        rows.append(values)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


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

    if other is not None and (start, end) != (None, None):
        raise UserError("--from and --to are for two states of one source: give no second source.")
    sources = [path for path in (source, other) if path is not None]
    stores = stores_of(sources, Choice(task, step, sample))
    if other is not None:
        before, after = (store.snapshot() for store in stores)
    else:
        (store,) = stores
        before = store.at(0 if start is None else start)
        after = store.at(len(store.journal) if end is None else end)
    found = diff(before, after)
    if form == "json":
        return _print_json(_plain(found))
    sections = _sections(found)
    head = ", ".join(f"{title} {len(groups)}" for title, groups in sections.items())
    if form == "md":
        typer.echo(head)
    else:
        _say(("note", head))
    for title, groups in sections.items():
        rows = [row for group in groups for row in group]
        if rows and form == "md":
            items = "\n".join(f"- {_markdown(pieces)}" for _, pieces in rows)
            typer.echo(f"\n## {title}\n\n{items}")
        elif rows:
            _say(("same", title))
            for row in rows:
                _say_row(row)


def _alone(found: Diff) -> tuple[list[Entry], list[Entry]]:
    """Return the added and the removed entries that are part of no merge and no split."""
    linked = {entry.id for olds, new in found.merged for entry in (*olds, new)}
    linked |= {entry.id for old, news in found.split for entry in (old, *news)}
    return tuple([e for e in side if e.id not in linked] for side in (found.added, found.removed))


def _sections(found: Diff) -> dict[str, list[list[Row]]]:
    """Return the rows of each difference by its kind."""
    added, removed = _alone(found)
    return {
        "added": [[_new(entry)] for entry in added],
        "removed": [[_gone(entry)] for entry in removed],
        "changed": [[_changed(*pair)] for pair in found.changed],
        "merged": [[*map(_gone, olds), _new(new)] for olds, new in found.merged],
        "split": [[_gone(old), *map(_new, news)] for old, news in found.split],
    }


def _plain(found: Diff) -> dict:
    """Return a difference as JSON values."""
    added, removed = _alone(found)
    return {
        "added": [*map(asdict, added)],
        "removed": [*map(asdict, removed)],
        "changed": [
            {"before": asdict(old), "after": asdict(new), "words": _words(old, new)}
            for old, new in found.changed
        ],
        "merged": [
            {"before": [*map(asdict, olds)], "after": asdict(new)} for olds, new in found.merged
        ],
        "split": [
            {"before": asdict(old), "after": [*map(asdict, news)]} for old, news in found.split
        ],
    }


@command(memory_app)
def log(source: Source, task: Task = "", step: Step = None, sample: Sample = None):
    """Print all operations: arguments, reason, reply, outcome, and how much is stored then.

    Entries are measured as they are shown: in tokens of the run's model where its config.yaml lies
    with the source and its tokenizer is at hand, else in characters.
    """
    (store,) = stores_of([source], Choice(task, step, sample))
    _say(("note", _head(store, len(store.journal))))
    size = _Size(store.at(0).entries, *measure_of(source))
    for op in store.journal:
        _say_op(op)
        _say_outcome(op)
        size.say_after(op)


MOST_DELAY = 60


@command(memory_app)
def replay(
    source: Source,
    until: Until = None,
    delay: Annotated[float, typer.Option(help="seconds after each operation")] = 0.0,
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Show a store as it grows: each operation, and the entries that it changed."""
    if not 0 <= delay <= MOST_DELAY:
        raise UserError(f"--delay takes seconds from 0 to {MOST_DELAY}, not {delay}.")
    (store,) = stores_of([source], Choice(task, step, sample))
    n = len(store.journal) if until is None else until
    store.at(n)  # refuses an n that is not there
    _print_store(store, 0, store.at(0).entries)
    for op in store.journal[:n]:
        _say_op(op)
        if not op.ok:
            _say_outcome(op)
        for row in _changes(op):
            _say_row(row)
        time.sleep(delay)
    _say(("note", _head(store, n)))


# ---------------------------------------------------------------- restore, play


@command(memory_app)
def restore(
    source: Source,
    n: Annotated[int, typer.Argument(help="the operation after which the entries are wanted")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="file of a store, new")],
    force: Force = False,
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Write a store whose entries are those after an operation, with the whole history before."""
    (store,) = stores_of([source], Choice(task, step, sample))
    with _output(out, [source], force):
        op = store.restore(n)
        store.to_jsonl(out)
    _say(("same", op.message))
    _say_saved(store, out)


@contextmanager
def _output(out: Path, inputs: Sequence[Path], force: bool) -> Iterator[None]:
    """Be the one writer of a path, which is refused before anything is done that would be lost.

    UserError: it cannot be written, or has a writer.
    """
    from config.locks import writing

    if not out.parent.is_dir():
        raise UserError(f"{out} cannot be written: there is no folder {out.parent}.")
    with writing(out, f"The store {out}"):
        _check_output(out, inputs, force)
        yield


def _check_output(out: Path, inputs: Sequence[Path], force: bool) -> None:
    if not out.exists():
        return
    read = [path for one in inputs for path in (one.iterdir() if one.is_dir() else [one])]
    if out.is_dir() or any(path.exists() and path.samefile(out) for path in read):
        what = "is a folder" if out.is_dir() else "is what is read, and stays as it is"
        raise UserError(f"{out} {what}: give another --out.")
    if not force:
        raise UserError(f"{out} is there already: give another --out, or --force.")


def _say_saved(store: Store, out: Path) -> None:
    counts = f"entries: {len(store.snapshot())}, operations: {len(store.journal)}"
    _say(("same", f"The store is in {out}; {counts}."))


@command(memory_app)
def play(
    source: Annotated[
        Path | None, typer.Argument(help="what to begin with, as for show; default: no entries")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file of a store, written at the end")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="file of calls, one a line, instead of standard input")
    ] = None,
    force: Force = False,
    task: Task = "",
    step: Step = None,
    sample: Sample = None,
):
    """Edit a copy of a store by hand, with the tools that a policy has.

    A line is one of: search WORDS; create TEXT; update ID TEXT; delete ID; undo; show; quit; or a
    call, {"name": ..., "arguments": {...}}.
    """
    from agents.store import Store

    inputs = [path for path in (source, script) if path is not None]
    store, *_ = [*stores_of([source] if source else [], Choice(task, step, sample)), Store()]
    with _output(out, inputs, force) if out else nullcontext():
        with suppress(KeyboardInterrupt):  # an end like any other: what was done is saved
            _run(store, _scripted(script) if script else _typed(), whole=script is not None)
        if out is None:
            return _say(("note", "Nothing is saved: that takes --out FILE."))
        store.to_jsonl(out)
    _say_saved(store, out)


Action = str | tuple[object, object]  # undo, show or quit; or name and arguments of a call
WRITTEN = (
    "write search WORDS, create TEXT, update ID TEXT, delete ID, undo, show, quit, or a call: "
    '{"name": ..., "arguments": {...}}'
)


def _action(line: str) -> Action:
    """Read a line; a ValueError says how one is written."""
    if line.startswith("{"):
        try:
            call = from_json(line)
        except ValueError as error:
            raise ValueError(f"this is not JSON ({first_line(error)})") from None
        if {*call} != {"name", "arguments"}:
            raise ValueError('a call has two fields, {"name": ..., "arguments": {...}}')
        return call["name"], call["arguments"]
    match line.split(maxsplit=1):
        case ["undo" | "show" | "quit" as word]:
            return word
        case ["search", query]:
            return "search_memory", {"query": query}
        case ["create", text]:
            return "manage_memory", {"operation": "create", "content": text}
        case ["update", rest] if len(given := rest.split(maxsplit=1)) == 2:
            values = {"memory_id": given[0], "content": given[1]}
            return "manage_memory", {"operation": "update"} | values
        case ["delete", rest] if len(rest.split()) == 1:
            return "delete_memory", {"memory_id": rest}
    raise ValueError(WRITTEN)


def _scripted(path: Path) -> list[Action]:
    """Read a file of actions; UserError with the line's number for one that is none."""
    if not is_file(path):
        raise UserError(f"No file at {path}.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from error
    actions = []
    for number, line in enumerate(map(str.strip, lines), 1):
        try:
            actions += [_action(line)] if line else []
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}.") from None
    return actions


def _typed() -> Iterator[Action]:
    """Yield what is written to standard input until it ends; say how a line is to be written."""
    # Bytes that are no UTF-8 become half surrogates, which the tools refuse
    sys.stdin.reconfigure(errors="surrogateescape")
    asks = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            line = input(asks).strip()
            try:
                action = _action(line) if line else None
            except ValueError as error:
                _say(("bad", f"{error}."))
            else:
                if action is not None:
                    yield action


def _run(store: Store, actions: Iterable[Action], whole: bool) -> None:
    """Do one action after the other and print the replies; whole: as in a log."""
    from agents.search import Search
    from agents.tools import Scope, apply

    scope = Scope(Search(), _count_words, seed=("play",))
    size = _Size(store.snapshot().entries)
    before: list[int] = []  # the number of operations before each one that can be undone
    for action in actions:
        if action == "quit":
            break
        if action == "show":
            _print_store(store, len(store.journal), store.snapshot().entries)
            continue
        if action == "undo" and not before:
            _say(("bad", "Nothing is left to undo."))
            continue
        if action == "undo":
            op = store.restore(before.pop())
        else:
            name, arguments = action
            op = apply(store, name, arguments, scope)
            before += [op.n - 1] if op.after else []
        if whole:
            _say_op(op)
            _say_outcome(op)
            size.say_after(op)
        else:
            _say(("same" if op.ok else "bad", op.message))


def _count_words(text: str) -> int:
    """Measure a text where there is no tokenizer."""
    return len(text.split())
