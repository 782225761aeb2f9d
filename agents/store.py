"""The memory store: dated entries, a journal of all operations, snapshots, and lines of both.

Holds: `Entry`, `Op`, `Snapshot`, `Store`.
Leaves out: what is no text (tasks/conversations.py), the tools that a policy calls
(agents/tools.py), search (agents/search.py). No torch.
Exercise it: `pytest tests/agents/test_store.py`. Read next: agents/search.py.

Entries are never changed in place: an update writes the next version, a deletion a version that is
marked as deleted. Every operation is one record of the journal, whether it wrote, only read or
failed; initial entries and journal together are the store, and reading its lines does them again.

Written, a store is a line with its format and two counts, then the initial entries, then the
operations, one JSON object a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from config.errors import UserError, clip, first_line
from config.foreign import from_json
from tasks.conversations import ENTRY_ID, KINDS, is_day, text_fault

FORMAT, VERSION = "memory store", 1

# ---------------------------------------------------------------- entries


def _a_text(value: str) -> str:
    if fault := text_fault(value):
        raise ValueError(fault)
    return value


def _a_day(value: str) -> str:
    if not is_day(value):
        raise ValueError("must be a day such as 2023-05-08")
    return value


Text = Annotated[str, AfterValidator(_a_text)]
Day = Annotated[str, AfterValidator(_a_day)]
Id = Annotated[str, Field(pattern=f"^{ENTRY_ID.pattern}$")]
IdOrNone = Annotated[str, Field(pattern=f"^({ENTRY_ID.pattern})?$")]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[int, Field(strict=True, ge=1)]
Place = Annotated[int, Field(strict=True, ge=0)]
STRICT = ConfigDict(extra="forbid", revalidate_instances="always")


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one memory. Its id stays the same through all versions."""

    __pydantic_config__ = STRICT

    id: IdOrNone  # "m17"; "" in an entry that a store has yet to number
    text: Text  # one paragraph
    kind: Literal[KINDS] | None = None
    speaker: Text | None = None
    date: Day | None = None  # ISO day, "2023-05-08"
    session: Place | None = None
    evidence: tuple[Text, ...] = ()  # ids of what it was taken from
    origin: Literal["agent", "init"] = "agent"
    version: Number = 1
    parents: tuple[Id, ...] = ()  # ids of the entries that were merged or split into it
    deleted: Flag = False

    @property
    def shown(self) -> str:
        """The text with its date and speaker: what is read, indexed and embedded.

        >>> Entry("m1", "It rains.", speaker="Ann", date="2023-05-08").shown
        '2023-05-08 Ann: It rains.'
        """
        text = f"{self.speaker}: {self.text}" if self.speaker else self.text
        return f"{self.date} {text}" if self.date else text

    @property
    def line(self) -> str:
        """The text as a tool shows it, with its id.

        >>> Entry("m1", "It rains.", date="2023-05-08").line
        '[m1] 2023-05-08 It rains.'
        """
        return f"[{self.id}] {self.shown}"


def number(entry_id: str) -> int:
    """Return the number of an id: 17 of "m17", 0 of ""."""
    return int(entry_id[1:] or 0)


@cache
def _type(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def _valid(kind: type, values: object) -> Entry | Op:
    """Return an entry or an operation that may stand in a store, of an object or of its fields.

    ValueError, with the field and the reason: it may not.
    """
    try:
        return _type(kind).validate_python(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, fault["loc"])) or kind.__name__.lower()
        raise ValueError(
            f"{clip(repr(field), 80)}: {fault['msg'].removeprefix('Value error, ')}"
        ) from None


def _numbered(entries: Iterable[Entry]) -> list[Entry]:
    """Check entries, and give those without an id the ids after the highest one, in order."""
    entries = [_valid(Entry, entry) for entry in entries]
    highest = max((number(entry.id) for entry in entries), default=0)
    for k, entry in enumerate(entries):
        if not entry.id:
            highest += 1
            entries[k] = replace(entry, id=f"m{highest}")
    return entries


# ---------------------------------------------------------------- states and operations


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, as it stands in the journal."""

    __pydantic_config__ = STRICT

    n: Number
    tool: str  # of it and its reply anything, also half of a surrogate pair
    args: dict  # JSON values
    ok: Flag
    code: str  # why it failed, in a word such as "unknown_id"; "" if it did not
    message: str  # the reply
    before: tuple[Entry, ...]  # the versions that were replaced
    after: tuple[Entry, ...]  # the versions that were written
    session: Place | None = None  # the session that was being read


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Snapshot:
    """The entries of a store at one moment; it never changes, and is equal to itself alone."""

    n: int  # the number of the operation that wrote last, 0 if none has
    entries: tuple[Entry, ...]  # the live ones, by id
    _latest: Mapping[str, Entry]  # id -> last version, of the deleted ones too

    @classmethod
    def from_versions(cls, n: int, latest: Mapping[str, Entry]) -> Snapshot:
        """Take the last versions, in the order of their ids; nobody may change them any more."""
        return cls(n, tuple(entry for entry in latest.values() if not entry.deleted), latest)

    def get(self, entry_id: str) -> Entry | None:
        """Return an entry, or what its deletion has left; None if there was never one."""
        return self._latest.get(entry_id)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._latest and not self._latest[entry_id].deleted


class Store:
    """Entries, and the journal of what was done to them since the beginning.

    entries: the initial ones; those with the id "" get ids in order, after the highest one given.
    ValueError: two with the same id, or one that no store may hold.
    """

    def __init__(self, entries: Iterable[Entry] = ()):
        self._first = sorted(_numbered(entries), key=lambda entry: number(entry.id))
        self._latest = {entry.id: entry for entry in self._first}  # always in the order of the ids
        if len(self._latest) < len(self._first):
            raise ValueError("two initial entries have the same id")
        self._next = number(self._first[-1].id) + 1 if self._first else 1
        self.journal: list[Op] = []
        self._snapshot: Snapshot | None = None  # dropped when an operation writes

    def snapshot(self) -> Snapshot:
        """Return the present state: the same object until an operation writes."""
        if self._snapshot is None:
            self._snapshot = self.at(len(self.journal))
        return self._snapshot

    def at(self, n: int) -> Snapshot:
        """Return the state after the n-th operation; 0 is the initial one."""
        ops = self.journal[:n]
        wrote = next((op.n for op in reversed(ops) if op.after), 0)
        if n == len(self.journal):
            return Snapshot.from_versions(wrote, dict(self._latest))
        latest = {entry.id: entry for entry in self._first}
        latest.update((entry.id, entry) for op in ops for entry in op.after)
        return Snapshot.from_versions(wrote, latest)

    def new_ids(self, k: int) -> list[str]:
        """Return the next k ids. They are used up only when entries with them are recorded."""
        return [f"m{self._next + i}" for i in range(k)]

    def record(
        self,
        tool: str,
        args: Mapping,
        message: str,
        *,
        ok: bool = True,
        code: str = "",
        after: Iterable[Entry] = (),
        session: int | None = None,
    ) -> Op:
        """Enter an operation into the journal and write its entries: the one way to change a store.

        after: new entries with the next ids in order, and next versions of live ones; a deletion is
        a next version that is marked as deleted. ValueError, and no change: anything else.
        """
        after = tuple(_valid(Entry, entry) for entry in after)
        if after and not ok:
            raise ValueError("an operation that failed writes nothing")
        known, fresh = set[str](), self._next
        for entry in after:
            old = self._latest.get(entry.id)
            if entry.id in known:
                raise ValueError(f"{entry.id} is written twice")
            if old is None and (entry.id, entry.version) != (f"m{fresh}", 1):
                raise ValueError(f"{entry.id} v{entry.version} is new and must be m{fresh} v1")
            if old is None and entry.deleted:
                raise ValueError(f"{entry.id} cannot be deleted before it is there")
            if old and old.deleted:
                raise ValueError(f"{entry.id} is deleted")
            if old and entry.version != old.version + 1:
                raise ValueError(f"{entry.id} v{entry.version} does not follow v{old.version}")
            known.add(entry.id)
            fresh += old is None
        before = tuple(self._latest[entry.id] for entry in after if entry.id in self._latest)
        n = len(self.journal) + 1
        op = Op(n, tool, dict(args), ok, code, message, before, after, session)
        self.journal.append(op)
        if after:
            self._latest.update((entry.id, entry) for entry in after)
            self._next += len(after) - len(before)
            self._snapshot = None
        return op

    def _redo(self, op: Op) -> None:
        """Do a recorded operation again; ValueError if what it does is not what the record says."""
        how = {"ok": op.ok, "code": op.code, "session": op.session}
        made = self.record(op.tool, op.args, op.message, after=op.after, **how)
        names = (field.name for field in fields(Op))
        wrong = [name for name in names if getattr(made, name) != getattr(op, name)]
        if wrong:
            raise ValueError(f"'{wrong[0]}' contradicts the operations before it")

    def lines(self) -> Iterator[str]:
        """Yield the store as lines."""
        counts = {"entries": len(self._first), "operations": len(self.journal)}
        yield _json({"format": FORMAT, "version": VERSION} | counts)
        for entry in self._first:
            yield _json(_plain(entry))
        for op in self.journal:
            yield _json({field.name: _plain(getattr(op, field.name)) for field in fields(op)})

    @classmethod
    def from_lines(cls, lines: Iterable[str], where: str) -> Store:
        """Read the lines of a store; where: names them in errors.

        UserError, with line and field: anything that is wrong.
        """
        objects = [(n, _object(where, n, line)) for n, line in enumerate(lines, 1)]
        (_, header), *rest = objects or [(0, {})]
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise UserError(f"{where} is no store: its first line must name the format.")
        counts = header.get("entries"), header.get("operations")
        if not all(type(n) is int and n >= 0 for n in counts) or len(rest) != sum(counts):
            follow = f"{_brief(counts[0])} entries and {_brief(counts[1])} operations"
            raise UserError(f"{where} is not whole: {follow} must follow the first line.")
        store = cls(_entries(where, rest[: counts[0]]))
        for line, values in rest[counts[0] :]:
            with _place(where, line):
                store._redo(_valid(Op, values))
        return store


# ---------------------------------------------------------------- lines


def _object(where: str, line: int, raw: str) -> dict:
    with _place(where, line):
        try:
            value = from_json(raw)
        except ValueError as error:
            raise ValueError(f"this is not JSON ({first_line(error)})") from None
        if not isinstance(value, dict):
            raise ValueError(f"a line must be an object with named fields, not {_brief(value)}")
        return value


def _brief(value: object) -> str:
    return clip(repr(value), 80)


@contextmanager
def _place(where: str, line: int) -> Iterator[None]:
    """Turn a ValueError of the block into a UserError that names the line."""
    try:
        yield
    except (ValueError, UserError) as error:
        raise UserError(f"{where}, line {line}: {first_line(error)}.") from None


def _entries(where: str, lines: Iterable[tuple[int, dict]]) -> list[Entry]:
    """Make an entry of each line; no two have the same id."""
    entries, places = [], dict[str, int]()
    for line, values in lines:
        with _place(where, line):
            entry = _valid(Entry, {"id": ""} | values)
            if entry.id and places.setdefault(entry.id, line) != line:
                raise ValueError(f"'id' is {entry.id}, as in line {places[entry.id]}")
            entries.append(entry)
    return entries


def _plain(value: object) -> object:
    """Return JSON values; of an entry the fields that are not as they are by default."""
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if not isinstance(value, Entry):
        return value
    values = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: given for name, (given, default) in values.items() if given != default}


def _json(value: dict) -> str:
    # What a policy calls may hold half of a surrogate pair. As \ud800 it can be written, and in a
    # JSON text this means the same
    text = json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()
