"""LifelongAgentBench's database tasks (arXiv 2505.11942): one table each, read or changed by SQL.

The files of the release have no licence and are read from the user's path; the eight items of
llb_db_own.json are ours. An item asks for rows ("direct"), which the agent writes out, or for a
change ("md5"), which is judged by a digest of the table. Episodes end and answers are judged as in
the release (caixd-220529/LifelongAgentBench at d6f19b4), each on a SQLite of its own.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from hashlib import md5
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, Field, StringConstraints, model_validator

from config.errors import first_line
from suites import Scope, Suite
from tasks import environments
from tasks.environments import Environment, Episode, Late, Step, Text, Texts, Work, fingerprint
from tasks.readers import read_json

STEPS = 3  # max_round of configs/components/tasks/db_bench.yaml
SECONDS = 5.0  # of one statement
STATEMENT_CHARACTERS = 20_000
SHOWN = (500, 20_000)  # rows and characters of a result; more are an error
KEPT = (10_000, 2_000_000)  # the same of a table that is judged
OWN = Path(__file__).with_name("llb_db_own.json")
DEMANDS = ("insert", "update", "delete", "select")  # a change may have a SELECT within it
FORM = (
    "llb-db reads the release's db_bench_runtime_learning_data.json, db_train.json and db_val.json "
    "(db_bench_data.json is broken, and the files os_interaction_... are for llb-os)"
)

# ---------------------------------------------------------------- items and their file


# a text without NUL, and by pydantic without half a surrogate pair; truth values are 1 and 0
Cell = (
    Annotated[int, Field(ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^[^\x00]*$")]
    | None
)
Row = tuple[Cell, ...]
Rows = Annotated[tuple[Annotated[Row, Field(fail_fast=True)], ...], Field(fail_fast=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\p{C}]{1,64}$")]  # without control characters
Type = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z]+(?: [A-Za-z]+)*(?:\(\d+(?:, *\d+)?\))?$")
]


def _at(*path: str, **more: Any) -> Any:
    return Field(validation_alias=AliasPath(*path), **more)


class Column(BaseModel):
    """A column of a table."""

    name: Name
    type: Type  # in SQL


class Item(BaseModel):
    """One task as the file has it."""

    instruction: Text
    table: Name = _at("table_info", "name")
    columns: tuple[Column, ...] = _at(
        "table_info", "column_info_list", min_length=1, fail_fast=True
    )
    rows: Rows = _at("table_info", "row_list")
    sql: Annotated[Text, StringConstraints(strip_whitespace=True)] = _at("answer_info", "sql")
    """the gold statement"""
    direct: Rows | None = _at("answer_info", "direct", default=None)
    """the rows asked for; None: a change was asked for, then `md5`"""
    md5: Text | None = _at("answer_info", "md5", default=None)
    skills: Texts = Field(validation_alias="skill_list", min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Item:
        if {len(row) for row in self.rows} - {len(self.columns)}:
            raise ValueError("a row of the table has not one value per column")
        if (self.direct is None) == (self.md5 is None):
            raise ValueError("one of 'direct' and 'md5' must be given, the other null")
        SQLite(self).close()  # ValueError: it is no table
        return self

    @property
    def question(self) -> str:
        """What is to be done, with the table's name and columns."""
        columns = ", ".join(f"{column.name} ({column.type})" for column in self.columns)
        return f"{self.instruction}\nThe table is {self.table}. Its columns are {columns}."

    @property
    def fingerprint(self) -> str:
        """A hex fingerprint of the table, its rows and what is right."""
        names, types = zip(*((column.name, column.type) for column in self.columns), strict=True)
        return fingerprint((self.table, names, types, self.rows, self.direct, self.md5 or ""))


# ---------------------------------------------------------------- what is right


def digest(rows: Iterable[Row]) -> str:
    """Return the benchmark's digest of a table, whatever the order of its rows.

    Per row the first 5 hex digits of MD5 over its values joined by commas, NULLs left out and whole
    floats written as integers; these sorted, joined by commas, MD5. An empty table has "None".
    """
    texts = [",".join(_printed(cell) for cell in row if cell is not None) for row in rows]
    hashes = sorted(_md5(text)[:5] for text in texts)
    return _md5(",".join(hashes)) if hashes else "None"


def _md5(text: str) -> str:
    return md5(text.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()


def _printed(cell: Cell) -> str:
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def right_rows(answer: str, gold: Sequence[Row]) -> bool:
    """Tell whether the text of an answer is right as the release judges it.

    Its `DirectTypeAnswerValidator` (src/tasks/instance/db_bench/task.py) reads no values but text:
    a row is what stands in parentheses, in `Decimal(...)` none begins; without any the
    answer is one row. A row is cut at every comma. Order always counts, numbers may differ by a
    millionth, a number in quotes is wrong, and so is what stands for NULL.
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
    return len(rows) == len(gold) and all(map(_right_row, rows, gold))


def _right_row(text: str, gold: Row) -> bool:
    values = [value.strip() for value in text.split(",") if value.strip()]
    return len(values) == len(gold) and all(map(_right_value, values, gold))


def _right_value(text: str, gold: Cell) -> bool:
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
        value = float(number[0] if number else text)
    except ValueError:
        return False
    return gold is not None and math.isclose(value, gold, rel_tol=1e-6, abs_tol=1e-6)


# ---------------------------------------------------------------- the database


class StatementError(Exception):
    """Report a statement that could not be carried out; the database can go on."""


class Deviation:
    """MySQL's STDDEV, of the whole population; by Welford, since a list has no end."""

    n, mean, squares = 0, 0.0, 0.0

    def step(self, value: object) -> None:
        if isinstance(value, int | float):
            self.n += 1
            before = value - self.mean
            self.mean += before / self.n
            self.squares += before * (value - self.mean)

    def finalize(self) -> float | None:
        return math.sqrt(self.squares / self.n) if self.n else None


class SQLite:
    """One episode's table, in memory. The authoriser refuses what reaches beyond it: other files,
    settings, virtual tables, code."""

    # VACUUM INTO asks for ATTACH too
    REFUSED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA,
               sqlite3.SQLITE_CREATE_VTABLE, sqlite3.SQLITE_DROP_VTABLE}  # fmt: skip
    # virtual tables that are there without being made, and functions that reach beyond the database
    # or cannot be ended: printf('%.*c', 900000000, 'x') counts to its end
    TABLES = re.compile("pragma_.*|sqlite_dbpage|sqlite_stmt|dbstat", re.I)
    FUNCTIONS = re.compile("load_extension|fts3_tokenizer|printf|format", re.I)
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
        table, holes = _quoted(item.table), ", ".join("?" * len(item.columns))
        columns = ", ".join(f"{_quoted(column.name)} {column.type}" for column in item.columns)
        try:
            self.connection.execute(f"CREATE TABLE {table} ({columns})")
            self.connection.executemany(f"INSERT INTO {table} VALUES ({holes})", item.rows)
        except sqlite3.Error as error:
            self.close()
            raise ValueError(f"the table cannot be made ({first_line(error)})") from error
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

    def execute(
        self, sql: str, most: tuple[int, int] = SHOWN
    ) -> tuple[list[str] | None, list[Row], int]:
        """Carry out one statement within `SECONDS`; return its columns (None: it has no rows), rows
        and how many it has changed. StatementError: it failed, or has more than `most`."""
        self._deadline = time.monotonic() + SECONDS
        try:
            with closing(self.connection.execute(sql)) as cursor:
                if cursor.description is None:
                    return None, [], cursor.rowcount
                rows, characters = [], 0
                for row in cursor:
                    characters += sum(len(str(cell)) for cell in row)
                    if len(rows) == most[0] or characters > most[1]:
                        limits = f"{most[0]:,} rows or {most[1]:,} characters"
                        raise StatementError(f"the result has more than {limits}: ask for less")
                    rows.append(row)
                return [column[0] for column in cursor.description], rows, 0
        # Warning: several statements. ValueError: half surrogates, NUL. MemoryError, OverflowError:
        # sizes that SQLite or Python refuse before a limit of ours does
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError) as error:
            late = f"the statement took longer than {SECONDS:g} seconds and was ended"
            is_late = time.monotonic() > self._deadline
            raise StatementError(
                late if is_late else first_line(error) or "it takes too much memory"
            ) from error

    def table(self) -> list[Row]:
        """Return all rows of the item's table; errors as `execute`."""
        names = ", ".join(_quoted(column.name) for column in self.item.columns)
        # a temporary table of the same name is not the one that was to be changed
        return self.execute(f"SELECT {names} FROM main.{_quoted(self.item.table)}", KEPT)[1]

    def close(self) -> None:
        """Release it; again is harmless."""
        self.connection.close()


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# ---------------------------------------------------------------- episodes

# at the start of a line: what quotes the instructions is no statement
BLOCK = re.compile(r"^[ \t>]*```(?:(?:sql|sqlite|mysql|mariadb)\b)?(.*?)```", re.I | re.S | re.M)
ANSWER = re.compile(r"^[ \t>*_#]*(?:final +)?answer[ *_]*:[ *_]*(.*)", re.I | re.M | re.S)
INSTRUCTIONS = f"""\
You are given a task on one table of a database (SQLite {sqlite3.sqlite_version}). Do one \
thing in each response.

To run one SQL statement and see what it brings, write it in a block:
```sql
SELECT name, score FROM players LIMIT 3
```
To end the task, write one of these lines instead:
Answer: [('Ann', 3), ('Bo', 2.5)]
Answer: done
The first gives the rows that were asked for, in their order: on one line, a Python list with a \
tuple for each row, texts in quotes, numbers without, its values in the order of the columns asked \
for. The second says that the table has been changed as it was asked for.

Only the first statement or answer of a response counts; one with neither ends the task. You have \
{STEPS} responses, the answer included: rows that are not given in one of them count as missing, \
and an answer cannot be taken back. A statement may take {SECONDS:g} seconds. Results of more than \
{SHOWN[0]:,} rows or {SHOWN[1]:,} characters are not shown."""


def read_action(response: str) -> tuple[str, str] | None:
    """Return ("sql", statement) or ("answer", text), whichever comes first; None without either."""
    block, answer = BLOCK.search(response), ANSWER.search(response)
    if block and (inside := ANSWER.match(block[1].strip())):
        return "answer", inside[1].strip()
    if block and (not answer or block.start() < answer.start()):
        return "sql", block[1].strip()
    return ("answer", answer[1].strip()) if answer else None


class Session(Episode):
    """One try of one item, with a database of its own."""

    def __init__(self, item: Item) -> None:
        self.item, self.database, self._left = item, SQLite(item), STEPS
        self.observation = item.question

    def step(self, action: str) -> Step:
        """Run the statement of a response, or judge its answer: of rows its first line."""
        self._left -= 1
        match read_action(action):
            case None:
                return self.give_up("no action")
            case "answer", _ if self.item.direct is None:
                return _judged(self._is_changed())
            case "answer", text:
                return _judged(right_rows(text.partition("\n")[0], self.item.direct))
            case _, sql:
                ignored = len(BLOCK.findall(action)) > 1 or ANSWER.search(BLOCK.sub("", action))
                note = "\n\nOnly the first statement was run; the rest of the response was ignored."
                shown = self._run(sql) + note * bool(ignored)
        return Step(shown) if self._left > 0 else self.give_up("steps", f"{shown}\n\n")

    def give_up(self, failure: str, before: str = "") -> Step:
        """End without an answer. A change is judged by the table all the same; where rows were
        asked for, none were given. failure: why, unless that is right."""
        right = self._is_changed() if self.item.direct is None else not self.item.direct
        told = f"{before}The task has ended, and no answer was given. "
        return _judged(right, told, "" if right else failure)

    def _run(self, sql: str) -> str:
        """Return what the agent is shown of a statement: a line of JSON for each row."""
        if not re.sub(r"--[^\n]*|/\*.*?(?:\*/|\Z)|[;\s]+", "", sql, flags=re.S):
            return "Error: there is no statement in the block."
        if len(sql) > STATEMENT_CHARACTERS:
            return f"Error: a statement may have {STATEMENT_CHARACTERS:,} characters at most."
        try:
            columns, rows, changed = self.database.execute(sql)
        except StatementError as error:
            return f"Error: {error}."
        if columns is None:
            return f"Done. {_counted(changed)} changed." if changed >= 0 else "Done."
        lines = [
            json.dumps([x.hex() if isinstance(x, bytes) else x for x in row], ensure_ascii=False)
            for row in rows
        ]
        return "\n".join([", ".join(columns), *lines, f"({_counted(len(rows))})"])

    def _is_changed(self) -> bool:
        """Tell whether the table is as it was to become."""
        try:
            return digest(self.database.table()) == self.item.md5
        except StatementError:  # there is no such table any more
            return False

    def close(self) -> None:
        self.database.close()


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _judged(right: bool, before: str = "", failure: str = "") -> Step:
    told = f"{before}This is {'right' if right else 'wrong'}."
    return Step(told, True, 1.0 if right else -1.0, failure)


# ---------------------------------------------------------------- the suite


class Databases(Environment):
    """The tasks of a file of the release (JSON, or .gz of it); None: eight of our own.

    UserError: the file is no such file; it names item and field.
    """

    name, instructions, most_steps = "llb-db", INSTRUCTIONS, STEPS

    def __init__(self, path: str | Path | None = None) -> None:
        path = path or OWN
        self.items: dict[str, Item] = environments.items(Item, read_json(path), path, FORM)
        self._tasks = [self._work(id, item) for id, item in self.items.items()]

    def tasks(self) -> list[Work]:
        return [*self._tasks]

    def _work(self, id: str, item: Item) -> Work:
        kind = next((skill for skill in DEMANDS if skill in item.skills), item.skills[0])
        return Work(
            id, item.question, (), text="", kind=kind, dataset=self.name, environment=self,
            solution=Late(lambda: self._solution(item)), skills=item.skills,
            content=item.fingerprint,
        )  # fmt: skip

    def _solution(self, item: Item) -> tuple[str, str]:
        """Run the gold statement, and answer with the rows that it gives here."""
        with closing(SQLite(item)) as database:
            try:
                rows = database.execute(item.sql, KEPT)[1]
            except StatementError:  # not in SQLite's dialect
                rows = []
        return f"```sql\n{item.sql}\n```", f"Answer: {'done' if item.direct is None else rows}"

    def intent(self, id: str) -> str:
        return self.items[id].instruction

    def reset(self, id: str) -> Session:
        return Session(self.items[id])

    def skip_list(self) -> list[str]:
        """Return the ids of the tasks whose own solution is not right on SQLite."""
        missed = []
        for task in self._tasks:
            with closing(task.begin()) as episode:
                if [episode.step(action) for action in task.solution][-1].reward <= 0:
                    missed.append(task.id)
        return missed


class LLBDB(Suite):
    """Databases; without a file eight tasks of ours."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Databases:
        return Databases(self.file_in(scope, optional=True) or None)
