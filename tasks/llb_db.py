"""LifelongAgentBench's database tasks (arXiv 2505.11942): one table each, read or changed by SQL.

Holds: `LLBDB`, `load`, `own`, `Item`, `digest`, `same_rows`, `released_rows`, `SQLite`; what a
backend is: `Database`, `Result`, `StatementError`, `Lost`.
Leaves out: MariaDB and MySQL (tasks/sql_server.py), the protocol (tasks/environments.py).
Exercise it: `pytest tests/tasks/test_llb_db.py`. Read next: tasks/sql_server.py.

The files of the release are read from the user's path and never shipped, for they have no licence.
An item asks for rows ("direct"), which the agent writes out as its answer, or for a change ("md5"),
which is judged by a digest of the table. Every episode has a database of its own. Answers are
judged by rules of ours, or as the release judges them; docs/streams.md lists what they differ in.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b, md5
from pathlib import Path
from typing import Literal, Protocol

from config.errors import UserError, first_line
from tasks.environments import Environment, Episode, Late, Step, Work
from tasks.readers import Record, read_json

Cell = int | float | str | bytes | None
Row = tuple[Cell, ...]

SECONDS = 5.0  # of one statement
STATEMENT_CHARACTERS = 20_000
SHOWN = (500, 20_000)  # rows and characters of a result; more are an error
KEPT = (10_000, 2_000_000)  # the same of a table that is judged
ANSWER_CHARACTERS = 200_000

# ---------------------------------------------------------------- items and their file

DEMANDS = (
    "insert",
    "update",
    "delete",
    "select",
)  # skills that say what is asked; select comes last,
# for a change may have a SELECT within it
TYPE = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*(?:\(\d+(?:, *\d+)?\))?")
RIGHT = "db_bench_runtime_learning_data.json, db_train.json or db_val.json"


@dataclass(frozen=True, slots=True)
class Item:
    """Hold one task as the file has it."""

    id: str
    instruction: str
    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]  # of the columns, in SQL
    rows: tuple[Row, ...]
    sql: str  # the gold statement
    direct: tuple[Row, ...] | None  # the rows asked for; None: a change was asked for, then `md5`
    md5: str
    skills: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """Tell whether the order of the rows counts: the gold statement itself sorts."""
        text = re.sub(r"'[^']*'", "''", self.sql)
        while text != (text := re.sub(r"\([^()]*\)", "", text)):
            pass
        return bool(re.search(r"\border\s+by\b", text, re.IGNORECASE))

    @property
    def question(self) -> str:
        """Return what is to be done, with the table's name and columns."""
        columns = ", ".join(f"{n} ({t})" for n, t in zip(self.columns, self.types, strict=True))
        return f"{self.instruction}\nThe table is {self.table}. Its columns are {columns}."

    @property
    def fingerprint(self) -> str:
        """Return a hex fingerprint of the table, its rows and what is right."""
        parts = (self.table, self.columns, self.types, self.rows, self.direct, self.md5)
        return blake2b(repr((*parts, self.ordered)).encode(), digest_size=8).hexdigest()


def load(path: str | Path) -> list[Item]:
    """Read a file of LifelongAgentBench's database tasks (JSON, or .gz of it), in its order.

    UserError: there is no such file, or it does not hold such tasks; it names file, item and field.
    """
    return parsed(Path(path), read_json(path))


def parsed(path: Path, items: object) -> list[Item]:
    """Check the content of a file: an object of items by their id. UserError as `load`."""
    if not (isinstance(items, dict) and items):
        raise UserError(
            f"{path} must hold a JSON object of items by their index, as the release's {RIGHT}."
        )
    return [
        _item(Record(path, f"item {id}", n, item)) for n, (id, item) in enumerate(items.items())
    ]


def _item(record: Record) -> Item:
    if not isinstance(record.fields, dict):
        raise record.error("an item must be an object")
    if "evaluation_info" in record.fields:
        raise record.error(
            "this is one of the release's files for llb-os (for which "
            "os_interaction_runtime_learning_data.json, os_interaction_train.json and "
            f"os_interaction_val.json are right, os_interaction_data.json is broken); llb-db "
            f"reads {RIGHT}"
        )
    for name in ("answer_info", "table_info"):
        if isinstance(value := record.fields.get(name), str) and value.lstrip().startswith("{"):
            raise record.error(
                f"'{name}' is an object printed by Python instead of an object, as in the broken "
                f"db_bench_data.json of the release; use {RIGHT} beside it"
            )
    answer, table = record.inside("answer_info"), record.inside("table_info")
    columns = [
        table.inside("column_info_list", column) for column in table.get("column_info_list", list)
    ]
    names = tuple(_name(column) for column in columns)
    if len({name.lower() for name in names}) < len(names):
        raise record.error("two columns in 'column_info_list' have the same name")
    direct, hash = answer.fields.get("direct"), answer.fields.get("md5")
    if (direct is None) == (hash is None):
        raise record.error("'answer_info' must have one of 'direct' and 'md5', the other null")
    return Item(
        record.place.removeprefix("item "),
        record.text("instruction"),
        _name(table),
        names,
        tuple(_type(column) for column in columns),
        _rows(table, "row_list", len(names)),
        answer.text("sql").strip(),
        None if direct is None else _rows(answer, "direct"),
        "" if hash is None else answer.text("md5"),
        record.texts("skill_list"),
    )


def _name(record: Record) -> str:
    name = record.text("name")
    if not name.isprintable() or len(name) > 64:
        raise record.error("'name' must be at most 64 printable characters")
    return name


def _type(record: Record) -> str:
    if not TYPE.fullmatch(kind := record.text("type")):
        raise record.error(f"'type' must be a type of SQL such as INT or VARCHAR(20), not {kind!r}")
    return kind


def _rows(record: Record, name: str, width: int | None = None) -> tuple[Row, ...]:
    rows = record.fields.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise record.error(f"'{name}' must be a list of rows, each a list of values")
    for n, row in enumerate(rows, 1):
        if len(row) != (len(rows[0]) if width is None else width):
            raise record.error(f"row {n} of '{name}' has {len(row)} values, not one per column")
        if not all(map(_is_cell, row)):
            raise record.error(f"row {n} of '{name}' holds other than numbers, texts and null")
    return tuple(tuple(int(x) if isinstance(x, bool) else x for x in row) for row in rows)


def _is_cell(value: object) -> bool:
    """Tell whether a value of a file fits into a table."""
    if isinstance(value, str):
        return not re.search("[\0\ud800-\udfff]", value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -(2**63) <= value < 2**63)


# ---------------------------------------------------------------- what is right


def digest(rows: Iterable[Row]) -> str:
    """Return the benchmark's digest of a table, whatever the order of its rows.

    Per row the first 5 hex digits of MD5 over its values joined by commas, NULLs left out and whole
    floats written as integers; these sorted, joined by commas, MD5. As MySQL has it, an empty table
    has no digest: "None".

    >>> digest([(1, "a"), (2, None)]) == digest([(2.0, None), (1, "a")])
    True
    """
    texts = [",".join(_printed(cell) for cell in row if cell is not None) for row in rows]
    hashes = sorted(_md5(text)[:5] for text in texts)
    return _md5(",".join(hashes)) if hashes else "None"


def _md5(text: str) -> str:
    return md5(text.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()


def _printed(cell: Cell) -> str:
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def same_rows(given: Sequence[Row], gold: Sequence[Row], ordered: bool) -> bool:
    """Tell whether rows are the gold ones, by our rules.

    Numbers are compared to three decimals, also where one is written as a text; other values must
    be equal. Order counts only if `ordered`.

    >>> same_rows([("b", "7"), ("a", 1.00049)], [("a", 1.0), ("b", 7)], False)
    True
    """
    one, other = ([tuple(map(_plain, row)) for row in rows] for rows in (given, gold))
    return one == other if ordered else Counter(one) == Counter(other)


def _plain(cell: Cell) -> Cell:
    """Return a number with three decimals, also of a text that is exactly how one is written."""
    if isinstance(cell, str) and re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", cell):
        number = float(cell) if "." in cell else int(cell)
        cell = number if str(number) == cell else cell
    if isinstance(cell, float) and math.isfinite(cell):
        cell = round(cell, 3)
        return int(cell) if cell.is_integer() else cell
    return str(cell) if isinstance(cell, float | bytes) else cell


def released_rows(answer: str, gold: Sequence[Row]) -> bool:
    """Tell whether the text of an answer is right as the release judges it (`--rules released`).

    Its `DirectTypeAnswerValidator` (src/tasks/instance/db_bench/task.py at d6f19b4) reads no values
    but text: a row is what stands in parentheses, in `Decimal(...)` none begins; without any the
    answer is one row. A row is cut at every comma. Order always counts, numbers may differ by a
    millionth, a number in quotes is wrong, and so is what stands for NULL.

    >>> released_rows("[('a', 1.0000001), ('b', Decimal('7'))]", [("a", 1), ("b", 7)])
    True
    >>> released_rows("[('b', 7), ('a', 1)]", [("a", 1), ("b", 7)])
    False
    """
    rows, start, in_decimal = [], None, False
    for mark in re.finditer(r"(?:Decimal)?\(|\)", answer):
        if mark[0] == "(":
            start = mark.end()
        elif mark[0] != ")":
            if in_decimal:
                return False
            in_decimal = True
        elif in_decimal:
            in_decimal = False
        elif start is None:
            return False
        else:
            rows, start = [*rows, answer[start : mark.start()]], None
    if start is not None:
        return False
    if not rows:
        rows = [answer] * bool(gold)
    return len(rows) == len(gold) and all(map(_released_row, rows, gold))


def _released_row(text: str, gold: Row) -> bool:
    values = [value.strip() for value in text.split(",") if value.strip()]
    return len(values) == len(gold) and all(map(_released_value, values, gold))


def _released_value(text: str, gold: Cell) -> bool:
    if isinstance(gold, str):
        if 0 < len(text) - len(gold) <= 2:
            if text.startswith(("'", '"')) and not gold.startswith(text[0]):
                text = text[1:]
            if text.endswith(("'", '"')) and not gold.endswith(text[-1]):
                text = text[:-1]
        return text == gold
    text = re.sub(r"^Decimal\(([\"']?)(.*?)(?:[\"']?)\)$", r"\2", text)
    # what stands around a number is cut but for one character: a quote that is left makes it none
    number = re.search(r".?[0-9.-](?:.*[0-9.-])?.?", text, re.S)
    try:
        return gold is not None and math.isclose(
            float(number[0] if number else text), gold, rel_tol=1e-6, abs_tol=1e-6
        )
    except ValueError:
        return False


# ---------------------------------------------------------------- databases


class StatementError(Exception):
    """Report a statement that could not be carried out; the database can go on."""


class Lost(Exception):
    """Report that the database is gone: nothing more is possible in this episode."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement has brought: rows with the columns' names, or how many it has changed."""

    columns: tuple[str, ...] | None = None
    rows: list[Row] = field(default_factory=list)
    changed: int = 0

    def shown(self) -> str:
        """Return it as the agent is shown it: a line a row, as JSON."""
        if self.columns is None:
            changed = f"{self.changed} row{'s' * (self.changed != 1)} changed." * (
                self.changed >= 0
            )
            return f"Done. {changed}".strip()
        lines = [", ".join(self.columns), *map(as_json, self.rows)]
        return "\n".join([*lines, f"({len(self.rows)} row{'s' * (len(self.rows) != 1)})"])


class Database(Protocol):
    """One episode's table in a database of its own."""

    def execute(self, sql: str, most: tuple[int, int] = SHOWN) -> Result:
        """Carry out one statement within `SECONDS`, with at most so many rows and characters.

        StatementError: it could not be. Lost: there is no database any more.
        """

    def table(self) -> list[Row]:
        """Return all rows of the item's table; errors as `execute`."""

    def close(self) -> None:
        """Release it; again is harmless."""


class Backend(Protocol):
    """Where databases come from."""

    name: str  # as the agent is told it

    def open(self, item: Item) -> Database:
        """Make a database with the item's table. UserError: it cannot be made."""

    def close(self) -> None:
        """Release what all databases share; again is harmless."""


def as_json(row: Sequence[Cell]) -> str:
    """Return a row as JSON; bytes as their hex digits."""
    return json.dumps([x.hex() if isinstance(x, bytes) else x for x in row], ensure_ascii=False)


def taken(rows: Iterable[Sequence[Cell]], most: tuple[int, int]) -> list[Row]:
    """Return all rows; StatementError if there are more rows or characters than `most`."""
    out, characters = [], 0
    for row in rows:
        characters += sum(len(str(cell)) for cell in row)
        if len(out) == most[0] or characters > most[1]:
            limits = f"{most[0]:,} rows or {most[1]:,} characters"
            raise StatementError(f"the result has more than {limits}: ask for less")
        out.append(tuple(row))
    return out


TOO_LONG = f"the statement took longer than {SECONDS:g} seconds and was ended"


class Deviation:
    """MySQL's STDDEV for SQLite: of the whole population; NULL without a value."""

    sample = False

    def __init__(self) -> None:
        self.n, self.mean, self.squares = 0, 0.0, 0.0

    def step(self, value: Cell) -> None:
        if value is None:
            return
        if not isinstance(value, int | float):  # as MySQL: the number that it begins with, else 0
            value = float((re.match(r"\s*[-+]?\d+(\.\d+)?", str(value)) or [0])[0])
        self.n += 1  # Welford: no list, which an endless statement would fill
        before = value - self.mean
        self.mean += before / self.n
        self.squares += before * (value - self.mean)

    def finalize(self) -> float | None:
        n = self.n - self.sample
        return math.sqrt(self.squares / n) if n > 0 else None


class SampleDeviation(Deviation):
    """MySQL's STDDEV_SAMP for SQLite: of a sample; NULL with fewer than two values."""

    sample = True


class SQLite:
    """A table in SQLite, in memory; see `Database`.

    The authoriser refuses what reaches beyond it: other files, settings, virtual tables, code.
    """

    REFUSED = {
        sqlite3.SQLITE_ATTACH,  # VACUUM INTO asks for it too
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_CREATE_VTABLE,
        sqlite3.SQLITE_DROP_VTABLE,
    }
    # virtual tables that are there without being made, and functions that reach beyond the database
    # or cannot be ended: printf('%.*c', 900000000, 'x') counts to its end
    TABLES = re.compile(r"pragma_.*|sqlite_dbpage|sqlite_stmt|dbstat", re.IGNORECASE)
    FUNCTIONS = re.compile(r"load_extension|fts3_tokenizer|printf|format", re.IGNORECASE)
    LIMITS = {
        sqlite3.SQLITE_LIMIT_LENGTH: 50_000,
        sqlite3.SQLITE_LIMIT_SQL_LENGTH: STATEMENT_CHARACTERS * 4,  # in bytes
        sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
        sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
        sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
        sqlite3.SQLITE_LIMIT_COLUMN: 200,
        sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
        sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    }

    PRAGMAS = (
        "temp_store=MEMORY",  # nothing on a disk
        "max_page_count=8192",  # 32 MiB, likewise temporary tables
        "temp.max_page_count=8192",
        f"hard_heap_limit={128 * 2**20}",  # of all databases of the process: a sort had taken 2 GB
    )

    def __init__(self, item: Item) -> None:
        self.item, self._deadline = item, math.inf
        self.connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
        )
        self.connection.text_factory = lambda raw: raw.decode(errors="replace")
        for pragma in self.PRAGMAS:
            self.connection.execute(f"PRAGMA {pragma}")
        for name in ("STDDEV", "STD", "STDDEV_POP"):
            self.connection.create_aggregate(name, 1, Deviation)
        self.connection.create_aggregate("STDDEV_SAMP", 1, SampleDeviation)
        columns = ", ".join(
            f"{quoted(n)} {t}" for n, t in zip(item.columns, item.types, strict=True)
        )
        holes = ", ".join("?" * len(item.columns))
        try:
            self.connection.execute(f"CREATE TABLE {quoted(item.table)} ({columns})")
            insert = f"INSERT INTO {quoted(item.table)} VALUES ({holes})"
            self.connection.executemany(insert, item.rows)
        except sqlite3.Error as error:
            self.close()
            reason = first_line(error)
            raise UserError(f"The table of item {item.id} cannot be made ({reason}).") from error
        for limit, value in self.LIMITS.items():
            self.connection.setlimit(limit, value)
        self.connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 100)
        self.connection.set_authorizer(self._authorised)

    def _authorised(self, action: int, *names: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            refused = self.FUNCTIONS.fullmatch(names[1] or "")
        else:
            refused = action in self.REFUSED or self.TABLES.fullmatch(names[0] or "")
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def execute(self, sql: str, most: tuple[int, int] = SHOWN) -> Result:
        self._deadline = time.monotonic() + SECONDS
        try:
            with closing(self.connection.execute(sql)) as cursor:
                if cursor.description is None:
                    return Result(changed=cursor.rowcount)
                columns = tuple(str(column[0]) for column in cursor.description)
                return Result(columns, taken(cursor, most))
        # Warning: several statements. ValueError: half surrogates, NUL. MemoryError, OverflowError:
        # sizes that SQLite or Python refuse before a limit of ours does
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError) as error:
            late = time.monotonic() > self._deadline
            raise StatementError(
                TOO_LONG if late else first_line(error) or "it takes too much memory"
            ) from error

    def table(self) -> list[Row]:
        columns = ", ".join(map(quoted, self.item.columns))
        # `main`: a temporary table of this name is not the one that was to be changed
        return self.execute(f"SELECT {columns} FROM main.{quoted(self.item.table)}", KEPT).rows

    def close(self) -> None:
        self.connection.close()


class SQLiteBackend:
    """SQLite of Python; see `Backend`."""

    name = f"SQLite {sqlite3.sqlite_version}"

    def open(self, item: Item) -> SQLite:
        return SQLite(item)

    def close(self) -> None:
        pass


def quoted(name: str) -> str:
    """Return a name in backquotes, which SQLite, MariaDB and MySQL read."""
    return "`" + name.replace("`", "``") + "`"


# ---------------------------------------------------------------- actions

# at the start of a line: what quotes the instructions is no statement
BLOCK = re.compile(r"^[ \t>]*```(?:(?:sql|sqlite|mysql|mariadb)\b)?(.*?)```", re.I | re.S | re.M)
ANSWER = re.compile(r"^[ \t>*_#]*(?:final +)?answer[ *_]*:[ *_]*(.*)", re.I | re.M | re.S)

FORM = (
    "Nothing was carried out: a response must hold one SQL statement in a block that begins with "
    "```sql and ends with ```, or a line that begins with Answer:"
)
ANSWER_FORM = (
    'The answer could not be read. Write the rows as a JSON list of lists, such as [["Ann", 3], '
    '["Bo", null]], or the word done if the table was to be changed.'
)


def read_action(response: str) -> tuple[str, str] | None:
    """Return ("sql", statement) or ("answer", text), whichever comes first; None without either.

    >>> read_action("First:\\n```sql\\nSELECT 1;\\n```"), read_action("**Answer:** done")
    (('sql', 'SELECT 1;'), ('answer', 'done'))
    """
    block, answer = BLOCK.search(response), ANSWER.search(response)
    if block and (inside := ANSWER.match(block[1].strip())):
        return "answer", inside[1].strip()
    if block and (not answer or block.start() < answer.start()):
        return "sql", block[1].strip()
    return ("answer", answer[1].strip()) if answer else None


def read_rows(text: str, width: int) -> list[Row] | None:
    """Return the rows that an answer gives, as JSON or as Python writes them; None if it has none.

    A bare value is one row. A flat list is one row, or where a row has one value (`width`), a
    column. What follows a list is not read.
    """
    value = _value(text)
    if not isinstance(value, list | tuple):
        value = [] if value is None else [[value]]
        return [tuple(row) for row in value] or None
    rows = [*value]
    if rows and not any(isinstance(row, list | tuple) for row in rows):
        rows = [[cell] for cell in rows] if width == 1 else [rows]
    if not all(isinstance(row, list | tuple) for row in rows):
        return None
    cells = (cell for row in rows for cell in row)
    if not all(cell is None or isinstance(cell, str | int | float) for cell in cells):
        return None
    return [tuple(int(x) if isinstance(x, bool) else x for x in row) for row in rows]


def _value(text: str) -> object:
    """Return the value that a text begins with if it is a list, else that it is; None without."""
    if len(text) > ANSWER_CHARACTERS:
        return None
    block = re.match(r"```\w*\n(.*?)```", text, re.S)
    text = (block[1] if block else text).strip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        if isinstance(value, list) or (isinstance(value, str | int | float) and end == len(text)):
            return value
    except (ValueError, RecursionError):
        pass  # no JSON: perhaps Python
    for part in (text, text.partition("\n")[0]):
        try:
            value = ast.literal_eval(part.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list | tuple | str | int | float) else None
    return None


def done_or_rows(text: str, width: int) -> list[Row] | None:
    """Return the rows of an answer, none for "done"; None if it is neither."""
    return [] if re.match(r"[\"'`]?done\b", text, re.I) else read_rows(text, width)


# ---------------------------------------------------------------- episodes


class LLBEpisode(Episode):
    """One try of one item, with a database of its own; see `tasks.environments.Episode`."""

    def __init__(self, item: Item, database: Database, most_steps: int, released: bool) -> None:
        self.item, self.database, self.released = item, database, released
        self.observation = item.question
        self._left, self._end = most_steps, None

    def step(self, action: str) -> Step:
        """Run the statement of a response, or judge its answer. After the end: the last step."""
        if self._end is not None:
            return self._end
        self._left -= 1
        try:
            step = self._step(action)
            if not step.done and self._left <= 0:
                end = self.give_up("steps")
                step = replace(end, observation=f"{step.observation}\n\n{end.observation}")
        except Lost as error:
            step = _lost(error)
        self._end = step if step.done else None
        return step

    def give_up(self, failure: str) -> Step:
        """End without an answer. A change is judged by the table all the same, as in the release;
        where rows were asked for, none were given. failure: why, unless that is right."""
        try:
            right = self._is_changed() if self.item.direct is None else not self.item.direct
        except Lost as error:
            return _lost(error)
        said = f"The task has ended, and no answer was given. {_said(right)}"
        return Step(said, True, 1.0 if right else -1.0, "" if right else failure)

    def _step(self, action: str) -> Step:
        match read_action(action):
            case None:
                return self.give_up("no action") if self.released else Step(FORM)
            case "sql", sql:
                ignored = len(BLOCK.findall(action)) > 1 or ANSWER.search(BLOCK.sub("", action))
                note = "\n\nOnly the first statement was run; the rest of the response was ignored."
                return Step(self._run(sql) + note * bool(ignored))
            case _, text:
                if (right := self._right(text)) is None:
                    return Step(ANSWER_FORM)
                return Step(_said(right), True, 1.0 if right else -1.0)

    def _run(self, sql: str) -> str:
        if not re.sub(r"--[^\n]*|/\*.*?(?:\*/|\Z)|[;\s]+", "", sql, flags=re.S):
            return "Error: there is no statement in the block."
        if len(sql) > STATEMENT_CHARACTERS:
            return f"Error: a statement may have {STATEMENT_CHARACTERS:,} characters at most."
        try:
            return self.database.execute(sql).shown()
        except StatementError as error:
            return f"Error: {error}."

    def _right(self, answer: str) -> bool | None:
        """Tell whether an answer is right; None: it cannot be read."""
        direct = self.item.direct
        if self.released:  # the first line counts; of a change, none
            line = answer.partition("\n")[0]
            return self._is_changed() if direct is None else released_rows(line, direct)
        if (rows := done_or_rows(answer, len(direct[0]) if direct else 0)) is None:
            return None
        return self._is_changed() if direct is None else same_rows(rows, direct, self.item.ordered)

    def _is_changed(self) -> bool:
        """Tell whether the table is as it was to become."""
        try:
            return digest(self.database.table()) == self.item.md5
        except StatementError:  # there is no such table any more
            return False

    def close(self) -> None:
        self._end = self._end or Step("The task was closed.", True, -1.0, "closed")
        self.database.close()


def _said(right: bool) -> str:
    return f"This is {'right' if right else 'wrong'}."


def _lost(error: Lost) -> Step:
    return Step(f"The database is gone: {error}.", True, -1.0, f"database lost: {error}")


# ---------------------------------------------------------------- the environment

INSTRUCTIONS = """\
You are given a task on one table of a database ({dialect}). Do one thing in each response.

To run one SQL statement and see what it brings, write it in a block:
```sql
SELECT name, score FROM players LIMIT 3
```
To end the task, write one of these lines instead:
Answer: {answer}
Answer: done
The first gives the rows that were asked for, in their order: {form}, its values in the order of \
the columns asked for. The second says that the table has been changed as it was asked for.

Only the first statement or answer of a response counts{ends}. You have {steps} responses, the \
answer included: rows that are not given in one of them count as missing, and an answer cannot be \
taken back. A statement may take {seconds:g} seconds. Results of more than {rows:,} rows or \
{characters:,} characters are not shown."""
OWN_RULES = dict(
    answer='[["Ann", 3], ["Bo", 2.5]]',
    form="a JSON list with a list for each row, NULL as null",
    ends="",
    steps=15,
)
# Round limit: max_round of configs/components/tasks/db_bench.yaml
RELEASED_RULES = dict(
    answer="[('Ann', 3), ('Bo', 2.5)]",
    form="on one line, a Python list with a tuple for each row, texts in quotes, numbers without",
    ends="; one with neither ends the task",
    steps=3,
)


class LLBDB(Environment):
    """Work on LifelongAgentBench's database tasks; see `tasks.environments.Environment`."""

    name, style = "llb-db", "agent"

    def __init__(
        self,
        path: str | Path | None = None,
        backend: str = "sqlite",
        rules: Literal["own", "released"] = "own",
        most_steps: int | None = None,
    ) -> None:
        """Read the items and start the backend.

        path: a file of the release (JSON, or .gz of it); None: eight items of our own.
        backend: "sqlite", or a server of yours at mysql://USER@HOST.
        rules: by which answers are judged and episodes end. most_steps: responses of an episode;
        None: as many as the rules have. UserError: the file is none of these, or what the backend
        needs is missing.
        """
        items = own() if path is None else load(path)
        self.items = {item.id: item for item in items}
        self.rules = rules
        said = RELEASED_RULES if rules == "released" else OWN_RULES
        self.most_steps = most_steps or said["steps"]
        self.backend = _backend(backend)
        self.instructions = INSTRUCTIONS.format(
            **said | {"steps": self.most_steps},
            dialect=self.backend.name,
            seconds=SECONDS,
            rows=SHOWN[0],
            characters=SHOWN[1],
        )
        self._tasks: list[Work] = []

    def tasks(self) -> list[Work]:
        """Return all tasks in the file's order. Their solutions run the gold statement, and answer
        with the rows that this backend gives: it is asked when one is first looked at."""
        self._tasks = self._tasks or [self._work(item) for item in self.items.values()]
        return [*self._tasks]

    def _work(self, item: Item) -> Work:
        kind = next((skill for skill in DEMANDS if skill in item.skills), item.skills[0])
        return Work(
            item.id,
            item.question,
            (),
            text="",
            kind=f"{kind}, {self.rules} rules",  # every table names them
            dataset=self.name,
            environment=self,
            solution=Late(lambda: self._solution(item)),
            skills=item.skills,
            content=item.fingerprint + self.rules.removeprefix("own"),
        )

    def _solution(self, item: Item) -> tuple[str, str]:
        with closing(self.backend.open(item)) as database:
            try:
                rows = database.execute(item.sql, KEPT).rows
            except StatementError:  # not in this backend's dialect
                rows = []
        written = rows if self.rules == "released" else f"[{', '.join(map(as_json, rows))}]"
        answer = "done" if item.direct is None else written
        return f"```sql\n{item.sql}\n```", f"Answer: {answer}"

    def intent(self, id: str) -> str:
        return self.items[id].instruction

    def reset(self, id: str) -> LLBEpisode:
        item = self.items[id]
        return LLBEpisode(item, self.backend.open(item), self.most_steps, self.rules == "released")

    def skip_list(self) -> list[str]:
        """Return the ids of the tasks whose own solution is not right on this backend."""
        return [task.id for task in self.tasks() if not self._verified(task)]

    def _verified(self, task: Work) -> bool:
        with closing(task.begin()) as episode:
            steps = [episode.step(action) for action in task.solution]
        return steps[-1].reward > 0

    def close(self) -> None:
        self.backend.close()


def _backend(name: str) -> Backend:
    if name == "sqlite":
        return SQLiteBackend()
    if not name.startswith("mysql://"):
        form = "mysql://USER:PASSWORD@HOST, a MariaDB or MySQL of yours"
        raise UserError(f"The database must be sqlite or {form}, not {name!r}.")
    from tasks.sql_server import Server

    return Server(name)


# ---------------------------------------------------------------- items of our own

BOATS = (
    "boats",
    "boat_id INT, name TEXT, kind TEXT, length_m DOUBLE, berth INT",
    (
        (1, "Petrel", "sloop", 9.5, 4),
        (2, "Gannet", "ketch", 12.25, None),
        (3, "Tern", "sloop", 7.0, 11),
        (4, "Skua", "yawl", 10.5, 7),
        (5, "Puffin", "sloop", 9.5, None),
        (6, "Fulmar", "ketch", 14.0, 2),
    ),
)
LOANS = (
    "loans",
    "loan_id INT, reader TEXT, title TEXT, days INT, fine DOUBLE",
    (
        (1, "Ida", "Tides", 12, 0.0),
        (2, "Omar", "Knots", 30, 2.25),
        (3, "Ida", "Charts", 21, 0.75),
        (4, "Lena", "Tides", 45, 6.0),
        (5, "Omar", "Stars", 9, None),
    ),
)
# instruction, table, gold statement, skills, what is right: rows asked for or the changed table
OWN = (
    (
        "Which sloops are there? Give name and length in metres, the longest first and boats of "
        "the same length by name.",
        BOATS,
        "SELECT name, length_m FROM boats WHERE kind = 'sloop' ORDER BY length_m DESC, name ASC;",
        "select where_single_condition order_by_multiple_columns_different_directions",
        "rows",
        (("Petrel", 9.5), ("Puffin", 9.5), ("Tern", 7)),
    ),
    (
        "What is the mean length of all boats, and how many have a berth?",
        BOATS,
        "SELECT AVG(length_m) AS mean_length, COUNT(berth) AS berthed FROM boats;",
        "select column_alias",
        "rows",
        ((10.458, 4),),
    ),
    (
        "For each kind with at least two boats, give the kind and the length of its longest boat.",
        BOATS,
        "SELECT kind, MAX(length_m) AS longest FROM boats GROUP BY kind HAVING COUNT(*) >= 2;",
        "select column_alias group_by_single_column having_single_condition_with_aggregate",
        "rows",
        (("sloop", 9.5), ("ketch", 14)),
    ),
    (
        "List name and berth of all boats longer than ten metres, by name.",
        BOATS,
        "SELECT name, berth FROM boats WHERE length_m > 10 ORDER BY name;",
        "select where_single_condition order_by_single_column",
        "rows",
        (("Fulmar", 2), ("Gannet", None), ("Skua", 7)),
    ),
    (
        "Enter a new loan: number 6, reader Lena, title Knots, 3 days; nothing is known of a fine.",
        LOANS,
        "INSERT INTO loans (loan_id, reader, title, days) VALUES (6, 'Lena', 'Knots', 3);",
        "insert",
        "table",
        (*LOANS[2], (6, "Lena", "Knots", 3, None)),
    ),
    (
        "Raise the fine of every loan of more than 20 days by a half of what it is.",
        LOANS,
        "UPDATE loans SET fine = fine * 1.5 WHERE days > 20;",
        "update where_single_condition",
        "table",
        (
            (1, "Ida", "Tides", 12, 0),
            (2, "Omar", "Knots", 30, 3.375),
            (3, "Ida", "Charts", 21, 1.125),
            (4, "Lena", "Tides", 45, 9),
            (5, "Omar", "Stars", 9, None),
        ),
    ),
    (
        "Delete the loans of readers whose longest loan is shorter than 25 days.",
        LOANS,
        "DELETE FROM loans WHERE reader IN (SELECT reader FROM (SELECT reader FROM loans "
        "GROUP BY reader HAVING MAX(days) < 25) AS short);",
        "delete group_by_single_column having_single_condition_with_aggregate subquery_nested",
        "table",
        (LOANS[2][1], LOANS[2][3], LOANS[2][4]),
    ),
    (
        "Boats without a berth get berth 20, but only if they are sloops.",
        BOATS,
        "UPDATE boats SET berth = 20 WHERE berth IS NULL AND kind = 'sloop';",
        "update where_multiple_conditions",
        "table",
        (*BOATS[2][:4], (5, "Puffin", "sloop", 9.5, 20), BOATS[2][5]),
    ),
)


def own_file() -> dict[str, dict]:
    """Return eight items of our own in the schema of the release's file."""
    out = {}
    for n, (instruction, (table, columns, rows), sql, skills, kind, right) in enumerate(OWN, 1):
        names = (column.rpartition(" ") for column in columns.split(", "))
        out[f"own-{n}"] = {
            "instruction": instruction,
            "answer_info": {
                "direct": [[*row] for row in right] if kind == "rows" else None,
                "md5": digest(right) if kind == "table" else None,
                "sql": sql,
            },
            "table_info": {
                "name": table,
                "column_info_list": [{"name": name, "type": type} for name, _, type in names],
                "row_list": [[*row] for row in rows],
            },
            "skill_list": skills.split(),
        }
    return out


def own() -> list[Item]:
    """Return eight items of our own: rows sorted, grouped, summed up, with NULLs; changes of all
    three kinds."""
    return parsed(Path("own items"), own_file())
