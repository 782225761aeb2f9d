"""The memory store: dated entries, a journal of all operations, snapshots, and lines of both.

Entries are never changed in place: an update writes the next version, a deletion a version that is
marked as deleted. Every operation is one record of the journal, whether it wrote, only read or
failed; initial entries and journal together are the store.

Written, a store is a line with its format and two counts, then the initial entries, then the
operations, one JSON object a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

FORMAT, VERSION = "memory store", 1

# ---------------------------------------------------------------- entries and operations


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one memory. Its id stays the same through all versions."""

    id: str  # "m17"; "" in an entry that a store has yet to number
    text: str  # one paragraph
    kind: str | None = None
    speaker: str | None = None
    date: str | None = None  # ISO day, "2023-05-08"
    session: int | None = None
    evidence: tuple[str, ...] = ()  # ids of what it was taken from
    origin: Literal["agent", "init"] = "agent"
    version: int = 1
    parents: tuple[str, ...] = ()  # ids of the entries that were merged or split into it
    deleted: bool = False

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


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, as it stands in the journal."""

    n: int
    tool: str  # of it and its reply anything, also half of a surrogate pair
    args: dict  # JSON values
    ok: bool
    code: str  # why it failed, in a word such as "unknown_id"; "" if it did not
    message: str  # the reply
    before: tuple[Entry, ...]  # the versions that were replaced
    after: tuple[Entry, ...]  # the versions that were written
    session: int | None = None  # the session that was being read


# ---------------------------------------------------------------- the store


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Snapshot:
    """The entries of a store at one moment; it never changes, and is equal to itself alone."""

    n: int  # the number of the operation that wrote last, 0 if none has
    latest: Mapping[str, Entry]  # id -> last version, of the deleted ones too
    entries: tuple[Entry, ...]  # the live ones, by id

    @classmethod
    def of(cls, n: int, latest: Mapping[str, Entry]) -> Snapshot:
        """Take the last versions, in the order of their ids; nobody may change them any more."""
        return cls(n, latest, tuple(entry for entry in latest.values() if not entry.deleted))

    def get(self, entry_id: str) -> Entry | None:
        """Return an entry, or what its deletion has left; None if there was never one."""
        return self.latest.get(entry_id)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self.latest and not self.latest[entry_id].deleted


class Store:
    """Entries, and the journal of what was done to them since the beginning.

    entries: the initial ones; those with the id "" get ids in order, after the highest one given.
    """

    def __init__(self, entries: Iterable[Entry] = ()):
        entries = [*entries]
        self._next = 1 + max((number(entry.id) for entry in entries), default=0)
        numbered = []
        for entry in entries:
            numbered.append(entry if entry.id else replace(entry, id=f"m{self._next}"))
            self._next += not entry.id
        self._first = sorted(numbered, key=lambda entry: number(entry.id))
        self._latest = {entry.id: entry for entry in self._first}  # always in the order of the ids
        self.journal: list[Op] = []
        self._snapshot = Snapshot.of(0, dict(self._latest))

    def snapshot(self) -> Snapshot:
        """Return the present state: the same object until an operation writes."""
        return self._snapshot

    def new_ids(self, k: int) -> list[str]:
        """Return the next k ids. They are used up only when entries with them are recorded."""
        return [f"m{self._next + i}" for i in range(k)]

    def record(
        self,
        tool: str,
        args: Mapping,
        message: str,
        *,
        code: str = "",
        after: Iterable[Entry] = (),
        session: int | None = None,
    ) -> Op:
        """Enter an operation into the journal and write its entries: the one way to change a store.

        after: new entries with the next ids in order, and next versions of live ones; a deletion is
        a next version that is marked as deleted. code: why it failed, "" if it did not.
        """
        after = tuple(after)
        before = tuple(self._latest[entry.id] for entry in after if entry.id in self._latest)
        n = len(self.journal) + 1
        op = Op(n, tool, dict(args), not code, code, message, before, after, session)
        self.journal.append(op)
        if after:
            self._latest.update((entry.id, entry) for entry in after)
            self._next += len(after) - len(before)
            self._snapshot = Snapshot.of(n, dict(self._latest))
        return op

    # ---- lines

    def lines(self) -> Iterator[str]:
        """Yield the store as lines."""
        counts = {"entries": len(self._first), "operations": len(self.journal)}
        yield _json({"format": FORMAT, "version": VERSION} | counts)
        for entry in self._first:
            yield _json(_plain(entry))
        for op in self.journal:
            yield _json({field.name: _plain(getattr(op, field.name)) for field in fields(op)})


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
