"""The user's own MariaDB or MySQL beneath the tasks of tasks/llb_db.py.

Holds: `Server`, `ServerDatabase`.
Leaves out: the tasks and SQLite (tasks/llb_db.py).
Exercise it: `LLB_SERVER=mysql://USER@HOST pytest tests/tasks/test_llb_db.py`.
Read next: tasks/environments.py.

Each episode has a database and an account that may use this database only: no files, no other
episode. What bounds its memory, its disk and where its tables lie is the server's own settings
(docs/streams.md).
"""

from __future__ import annotations

import re
import secrets
import threading
from contextlib import closing, suppress
from decimal import Decimal
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit

from config.errors import UserError
from tasks.llb_db import (
    SECONDS,
    SHOWN,
    TOO_LONG,
    Database,
    Item,
    Lost,
    Result,
    StatementError,
    quoted,
    taken,
)

RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, CREATE VIEW, SHOW VIEW"
KILLED, DENIED = 1927, 1045  # numbers of errors


class Server:
    """The server at a URL, which gives every episode a database."""

    def __init__(self, url: str) -> None:
        """Log on to the server at mysql://USER:PASSWORD@HOST:PORT.

        The account at the URL must be allowed to create databases and users. `?unix_socket=PATH`
        instead of a host: a server on this machine.
        UserError: what is missing, or why the server cannot be reached.
        """
        self.where = _address(url)
        try:
            import pymysql
        except ImportError as error:
            install = "pip install PyMySQL -c requirements-environments.txt"
            raise UserError(f"MariaDB and MySQL need PyMySQL: {install}.") from error
        self.library = pymysql
        # RuntimeError: an account whose password needs the package `cryptography`
        self.errors = (pymysql.MySQLError, RuntimeError, OSError)
        self._lock, self._numbers = threading.Lock(), count(1)
        self._names = f"llb_{secrets.token_hex(4)}"  # of this object's databases and accounts
        try:
            self.admin = self.connect(**self.where)
        except self.errors as error:
            raise UserError(f"The database server cannot be reached ({_reason(error)}).") from error
        version = self.admin.get_server_info()
        maria = re.search(r"([\d.]+)-MariaDB", version)
        self.dialect = f"MariaDB {maria[1]}" if maria else f"MySQL {version}"

    def connect(self, **where: object):
        """Log on; errors are `errors`."""
        fields, converters = self.library.constants.FIELD_TYPE, self.library.converters
        numbers = {k: kind for k, kind in converters.decoders.items() if kind in (int, float)}
        numbers |= dict.fromkeys((fields.DECIMAL, fields.NEWDECIMAL), _number)
        return self.library.connect(
            **where,
            ssl_disabled="unix_socket" in where,  # a context takes 100 ms; elsewhere: if offered
            charset="utf8mb4",
            autocommit=True,
            init_command="SET SESSION lock_wait_timeout = 10",
            connect_timeout=10,
            read_timeout=3 * SECONDS,  # should the server not end a statement when it is told to
            conv=converters.encoders | numbers,  # all else stays as the server prints it
        )

    def open(self, item: Item) -> ServerDatabase:
        """Make a database with the item's table. UserError: it cannot be made."""
        name, password = f"{self._names}_{next(self._numbers)}", secrets.token_hex(16)
        table = f"{quoted(name)}.{quoted(item.table)}"
        holes = ", ".join(["%s"] * len(item.columns))
        try:
            with self._lock, self.admin.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
                cursor.execute(f"CREATE USER {name}@'%' IDENTIFIED BY '{password}'")
                cursor.execute(f"GRANT {RIGHTS} ON {name}.* TO {name}@'%'")
                cursor.execute(f"CREATE TABLE {table} ({item.definition})")
                insert = f"INSERT INTO {table.replace('%', '%%')} VALUES ({holes})"
                cursor.executemany(insert, item.rows)
            return ServerDatabase(self, item, name, password)
        except self.errors as error:
            self.drop(name)
            raise UserError(f"The table {item.table} cannot be made ({_reason(error)}).") from error

    def allow(self, name: str, password: str) -> None:
        """Set the password of an episode's account."""
        with self._lock:
            self.admin.query(f"ALTER USER {name}@'%' IDENTIFIED BY '{password}'")

    def drop(self, name: str) -> None:
        """Remove an episode's database and account, as far as the server still answers."""
        for what in (f"DATABASE IF EXISTS {name}", f"USER IF EXISTS {name}@'%'"):
            with suppress(self.library.MySQLError), self._lock:
                self.admin.query(f"DROP {what}")

    def close(self) -> None:
        with suppress(self.library.MySQLError):  # it may be closed already
            self.admin.close()


def _address(url: str) -> dict[str, object]:
    """Return the arguments to log on to mysql://USER:PASSWORD@HOST:PORT or ?unix_socket=PATH."""
    try:
        parts = urlsplit(url)
        where = {"host": parts.hostname, "port": parts.port or 3306}
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
        if socket := query.pop("unix_socket", None):
            where = {"unix_socket": socket[0]}
        if parts.scheme != "mysql" or not parts.username or not any(where.values()):
            raise ValueError
        if query or parts.path.strip("/"):
            raise ValueError
    except ValueError:
        raise UserError(
            "The database must be sqlite or a server of yours, mysql://USER:PASSWORD@HOST:PORT or "
            "mysql://USER:PASSWORD@/?unix_socket=PATH, without a database's name."
        ) from None
    return where | {"user": unquote(parts.username), "password": unquote(parts.password or "")}


def _reason(error: BaseException) -> str:
    """Return what the server says of an error, without PyMySQL's tuple."""
    text = error.args[-1] if error.args else ""
    return str(text or type(error).__name__).partition("\n")[0].rstrip(". ")


def _number(text: str) -> int | float:
    """Return a decimal number as Python's own, whole ones too as floats: 2.0 is not 2 here."""
    value = Decimal(text)
    return int(value) if "." not in text and abs(value) < 2**63 else float(value)


class ServerDatabase(Database):
    """A table in a database and under an account of its own; see `tasks.llb_db.Database`."""

    def __init__(self, server: Server, item: Item, name: str, password: str) -> None:
        self.server, self.item, self.name = server, item, name
        self._where = server.where | {"user": name, "password": password, "database": name}
        self._closed = False
        self.connection = server.connect(**self._where)

    def execute(self, sql: str, most: tuple[int, int] = SHOWN) -> Result:
        late, error = threading.Event(), None
        timer = threading.Timer(SECONDS, self._end, [late])
        timer.daemon = True
        timer.start()
        try:
            result = self._result(sql, most)
        # the last two: a text that is no UTF-8, from either side; replies that make no sense
        except (StatementError, self.server.library.MySQLError, ValueError, LookupError) as e:
            error = e
        finally:
            timer.cancel()
            timer.join()  # what it ends must not be the next statement
        answered = error is None or isinstance(
            error, StatementError | self.server.library.MySQLError
        )
        killed = error is not None and error.args[:1] == (KILLED,)
        # a connection whose statement has not come to its end serves no other one
        if late.is_set() or killed or not answered or not self.connection.open:
            self._reconnect()
        if late.is_set():
            raise StatementError(TOO_LONG) from error
        if error is not None:
            raise StatementError(_reason(error)) from error
        return result

    def _result(self, sql: str, most: tuple[int, int]) -> Result:
        cursor = self.connection.cursor(self.server.library.cursors.SSCursor)
        try:
            result = Result(changed=cursor.execute(sql))
            if cursor.description is not None:
                columns = tuple(column[0] for column in cursor.description)
                result = Result(columns, taken(iter(cursor.fetchone, None), most))
            while cursor.nextset():  # of several results the first is shown, and errors of all
                for _ in iter(cursor.fetchone, None):
                    pass
            return result
        except StatementError:
            self._kill("QUERY")  # else all the rest would have to be received
            raise
        finally:
            with suppress(self.server.library.MySQLError):
                cursor.close()

    def _end(self, late: threading.Event) -> None:
        late.set()
        self._kill("CONNECTION")  # a loop of statements would swallow the end of one

    def _kill(self, what: str) -> None:
        """End the statement that runs, or all of its connection; an account may do so with its
        own."""
        with suppress(*self.server.errors), closing(self._log_on()) as other:
            other.query(f"KILL {what} {self.connection.thread_id()}")

    def _reconnect(self) -> None:
        self._hang_up()
        try:
            self.connection = self._log_on()
        except self.server.errors as error:
            raise Lost(_reason(error)) from error

    def _log_on(self):
        """Return a new connection; an account can change its password, which is undone."""
        try:
            return self.server.connect(**self._where)
        except self.server.library.OperationalError as error:
            if error.args[:1] != (DENIED,):
                raise
        self.server.allow(self.name, self._where["password"])
        return self.server.connect(**self._where)

    def _hang_up(self) -> None:
        with suppress(self.server.library.MySQLError, OSError):
            self.connection.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hang_up()
            self.server.drop(self.name)
