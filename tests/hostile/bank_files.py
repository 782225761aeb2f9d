"""Banks as a stranger may make them: each function spoils a sound bank's file in one way.

`LAYOUTS`, `VALUES` and `NOTES` are SQL, with the name of what is spoilt; `PAGES` works on bytes.
"""

import json
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

PAGE = 4096


def run(path: Path, sql: str) -> None:
    """Execute SQL without any of the care that a bank takes."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(sql)


COUNTING = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
ENTRY = (
    "x AS id, 1 AS intent_id, 'k' AS kind, 'e' AS experience, 1 AS success, 0.5 AS q, 0 AS visits, "
    "0 AS wins, 't' AS task_id, 0 AS epoch, 1 AS created, '[]' AS parents, '{}' AS meta, 0 AS dead"
)
LARGE = "printf('%.*c', 100000000, 'x')"
ALTER = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET "
LAYOUTS = {
    "endless view of entries": (
        f"DROP TABLE entry; CREATE VIEW entry AS {COUNTING} SELECT {ENTRY} FROM c"
    ),
    "endless view of notes": (
        f"DROP TABLE info; CREATE VIEW info AS {COUNTING} SELECT 'k' || x AS key, '1' AS value "
        "FROM c"
    ),
    "endless view of intents": (
        f"DROP TABLE intent; CREATE VIEW intent AS {COUNTING} SELECT x AS id, 'default' AS ns, "
        "'q' AS text, x'' AS vec FROM c"
    ),
    "view that never has a row": (
        f"DROP TABLE entry; CREATE VIEW entry AS {COUNTING} SELECT {ENTRY} FROM c WHERE x < 0"
    ),
    "view of a large text": (
        f"DROP TABLE event; CREATE VIEW event AS SELECT 1 AS t, {LARGE} AS task_id"
    ),
    "endless view beside": f"CREATE VIEW other AS {COUNTING} SELECT x FROM c",
    "endless trigger": (
        "CREATE TRIGGER tr AFTER UPDATE ON entry BEGIN INSERT INTO info "
        f"{COUNTING} SELECT 'k' || x, '1' FROM c; END"
    ),
    "trigger that deletes": "CREATE TRIGGER tr AFTER INSERT ON info BEGIN DELETE FROM entry; END",
    "generated column": "ALTER TABLE entry ADD COLUMN g AS (zeroblob(1000000000))",
    "index of an expression": "CREATE INDEX ix ON entry (abs(q))",
    "partial index": "CREATE INDEX ix ON entry (q) WHERE q > 0",
    "index that is missing": "DROP INDEX entry_of_intent",
    "missing column": "ALTER TABLE entry DROP COLUMN wins",
    "one column more": "ALTER TABLE entry ADD COLUMN more TEXT",
    "renamed column": "ALTER TABLE event RENAME COLUMN sim TO alike",
    "missing table": "DROP TABLE event",
    "one table more": "CREATE TABLE more (x)",
    "statistics": "ANALYZE",
    "virtual table": "CREATE VIRTUAL TABLE words USING fts5 (x)",
    "virtual table of a name": "DROP TABLE event; CREATE VIRTUAL TABLE event USING fts5 (x)",
    "check of a constraint": (
        f"{ALTER}sql = replace(sql, 'q REAL NOT NULL,', "
        "'q REAL NOT NULL CHECK (abs(random()) > q),') WHERE name = 'entry'"
    ),
    "another type": f"{ALTER}sql = replace(sql, 'q REAL', 'q TEXT') WHERE name = 'entry'",
    "no SQL": f"{ALTER}sql = 'noise' WHERE name = 'entry'",
    "SQL of another kind": f"{ALTER}sql = 'CREATE TABLE ' || name || ' (x)'",
    "table whose pages are the schema's": f"{ALTER}rootpage = 1 WHERE name = 'intent'",
    "table without pages": f"{ALTER}rootpage = 0 WHERE name = 'event'",
    "table beyond the end": f"{ALTER}rootpage = 99999 WHERE name = 'entry'",
    "two tables of the same pages": (
        f"{ALTER}rootpage = (SELECT rootpage FROM "
        "sqlite_master WHERE name = 'event') WHERE name = 'entry'"
    ),
    "5,000 views": (
        "PRAGMA writable_schema = ON; "
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000) "
        "INSERT INTO sqlite_master SELECT 'view', 'v' || x, 'v' || x, 0, "
        "'CREATE VIEW v' || x || ' AS SELECT 1' FROM c"
    ),
}  # fmt: skip

WRONG = {
    "text": "'many'", "blob": "x'ff00ff'", "huge": "9223372036854775807",
    "least": "-9223372036854775808", "infinite": "9e999", "fraction": "0.5", "escape": "char(27)",
    "no text": "CAST(x'ff41c3' AS TEXT)", "deep": "replace(hex(zeroblob(50000)), '0', '[')",
    "array": "'[1, 2]'", "array of texts": "'[\"1\", []]'", "array of huge": "'[1e999]'",
    "huge in an array": "'[99999999999999999999999]'", "object": "'{\"x\": {\"y\": []}}'",
    "many digits": "'[' || replace(hex(zeroblob(5000)), '0', '1') || ']'", "true": "'true'",
    "null": "'null'", "empty": "''",
}  # fmt: skip
COLUMNS = {
    "intent": ("ns", "text", "vec"),
    "entry": (
        "kind", "experience", "success", "q", "visits", "wins", "task_id", "epoch", "created",
        "parents", "meta", "dead", "intent_id",
    ),
    "event": ("epoch", "task_id", "entry_id", "sim", "q_before", "score", "reward", "q_after"),
    "info": ("value",),
}  # fmt: skip
VALUES = {
    f"{how} in {table}.{column}": (
        f"PRAGMA foreign_keys = OFF; UPDATE OR IGNORE {table} SET {column} = {value}"
    )
    for table, columns in COLUMNS.items()
    for column in columns
    for how, value in WRONG.items()
} | {
    f"{how} as an id of {table}": f"PRAGMA foreign_keys = OFF; UPDATE {table} SET {key} = {value}"
    for table, key in (("intent", "id"), ("entry", "id"), ("event", "t"), ("info", "key"))
    for how, value in WRONG.items()
    if table == "info" or how in ("huge", "least")
}

ODD = {
    "text": '"x"', "nothing": "null", "list": "[]", "number": "7", "negative": "-1",
    "huge": "9" * 400, "digits": "9" * 5000, "not a number": "NaN", "infinite": "Infinity",
    "deep": "[" * 100_000, "no JSON": "{", "true": "true", "object": '{"name": [], "x": 1}',
    "half an embedder": json.dumps({"name": "x" * 100_000, "dim": 8, "probe": "AAAA"}),
    "embedder of huge size": json.dumps({"name": "x", "dim": 10**30, "probe": ""}),
    "state": json.dumps({"epoch": "x", "cursor": [], "bytes": {}, "settings": None}),
}  # fmt: skip
NOTED = ("schema", "embedder", "batches", "delta bm25 0.8 default", "stream", "epoch 1")
NOTES = {
    f"{how} as {key}": f"INSERT OR REPLACE INTO info VALUES ('{key}', '{value}')"
    for key in NOTED
    for how, value in ODD.items()
}


# ---------------------------------------------------------------- pages


def roots(path: Path) -> dict[str, int]:
    """Return the first page of each table and index."""
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, rootpage FROM sqlite_master"))


def rebuilt(path: Path, change) -> None:
    """Replace the pages of a file, a list that `change` alters; the header counts them."""
    raw = path.read_bytes()
    pages = [bytearray(raw[at : at + PAGE]) for at in range(0, len(raw), PAGE)]
    change(pages, roots(path))
    pages[0][28:32] = struct.pack(">I", len(pages))
    path.write_bytes(b"".join(pages))


def inner(children, last: int) -> bytearray:
    """Return an inner page of a table: pages before the last one, and the last."""
    page = bytearray(PAGE)
    top = PAGE
    for k, child in enumerate(children):
        top -= 5
        page[top : top + 5] = struct.pack(">IB", child, min(k + 1, 127))
        page[12 + 2 * k : 14 + 2 * k] = struct.pack(">H", top)
    page[:12] = struct.pack(">BHHHBI", 5, 0, len(children), top, 0, last)
    return page


def deep_tree(path: Path, n: int = 60_000, table: str = "entry") -> None:
    """A table whose pages are a chain: looking at it in depth takes n calls within each other."""

    def change(pages, root):
        first = len(pages) + 1
        leaf = pages[root[table] - 1]
        pages[root[table] - 1] = inner([], first)
        pages += [inner([], first + k + 1) for k in range(n - 1)]
        pages.append(leaf)

    rebuilt(path, change)


def wide_tree(path: Path, levels: int = 12, table: str = "entry") -> None:
    """A table of few pages, each of which stands 400 times in the one above: 400**levels leaves."""

    def change(pages, root):
        first = len(pages) + 1
        leaf = pages[root[table] - 1]
        pages[root[table] - 1] = inner([first] * 400, first)
        pages += [inner([first + k + 1] * 400, first + k + 1) for k in range(levels - 1)]
        pages.append(leaf)

    rebuilt(path, change)


def circle(path: Path, table: str = "entry") -> None:
    """A table whose first page is below itself."""
    rebuilt(path, lambda pages, root: pages.__setitem__(
        root[table] - 1, inner([root[table]] * 300, root[table])
    ))  # fmt: skip


def shared_overflow(path: Path, n: int = 120, size: int = 8 << 20) -> None:
    """At most n rows of which each has the same long text: the file holds it once."""
    run(path, f"UPDATE entry SET experience = printf('%.*c', {size}, 'x') WHERE id = 1")

    def change(pages, root):
        page, leaf = pages[root["entry"] - 1], bytearray(PAGE)
        starts = struct.unpack_from(f">{page[4]}H", page, 8)
        end = min((at for at in starts if at > starts[0]), default=PAGE)
        cell = page[starts[0] : end]  # size, row id, the first bytes, the first page of the rest
        head, top, k = varint(cell), PAGE, 0
        while k < n and top - len(cell) > 10 + 2 * k:
            top, k = top - len(cell), k + 1
            leaf[top : top + len(cell)] = cell[:head] + bytes([k]) + cell[head + 1 :]
            struct.pack_into(">H", leaf, 6 + 2 * k, top)
        struct.pack_into(">BHHHB", leaf, 0, 13, 0, k, top, 0)
        pages[root["entry"] - 1] = leaf

    rebuilt(path, change)


def varint(raw: bytes) -> int:
    """Return how many bytes SQLite's integer of variable length at the beginning has."""
    return next(k for k, byte in enumerate(raw) if byte < 128) + 1


def free_pages_in_a_circle(path: Path) -> None:
    def change(pages, root):
        pages.append(bytearray(struct.pack(">II", len(pages) + 1, 0).ljust(PAGE, b"\0")))
        pages[0][32:40] = struct.pack(">II", len(pages), 2**31)

    rebuilt(path, change)


def zeros_after(path: Path, pages: int) -> None:
    """Let a file be of so many pages, which take no place on the disk."""
    with path.open("r+b") as file:
        file.seek(28)
        file.write(struct.pack(">I", pages))
        file.truncate(pages * PAGE)


PAGES = {
    "a tree of 60,000 levels": deep_tree,
    "events of 60,000 levels": lambda path: deep_tree(path, table="event"),
    "a tree of 400**12 leaves": wide_tree,
    "a tree in a circle": circle,
    "rows that share a long text": shared_overflow,
    "free pages in a circle": free_pages_in_a_circle,
    "zeros up to a terabyte": lambda path: zeros_after(path, 1 << 28),
    "zeros up to a gigabyte": lambda path: zeros_after(path, 1 << 18),
}


# ---------------------------------------------------------------- beside the bank


def journal_that_names(path: Path, other: Path) -> None:
    """Put a journal beside a bank after whose use SQLite removes another file."""
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(other.resolve())
    page = path.read_bytes()[:PAGE]
    check = sum(page[at] for at in range(PAGE - 200, 0, -200)) & 0xFFFFFFFF
    header = magic + struct.pack(">IIIII", 1, 0, path.stat().st_size // PAGE, 512, PAGE)
    said = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    Path(f"{path}-journal").write_bytes(
        header.ljust(512, b"\0") + struct.pack(">I", 1) + page + struct.pack(">I", check)
        + struct.pack(">I", 0x40000000 // PAGE + 1) + name
        + struct.pack(">II", len(name), said) + magic
    )  # fmt: skip
