"""MariaDB or MySQL beneath the tasks of tasks/llb_db.py.

Holds: `Server`, `ServerDatabase`.
Leaves out: the tasks and SQLite (tasks/llb_db.py).
Exercise it: `pytest tests/tasks/test_llb_db.py`. Read next: tasks/environments.py.

A server of our own runs as an ordinary user in a temporary folder, on a socket in it, without a
network port; it ends with `close`, and with this process, however that ends. Each episode has a
database and an account that may use this database only: no files, no other episode.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from config.errors import UserError, first_line
from tasks.llb_db import (
    KEPT,
    SECONDS,
    SHOWN,
    TOO_LONG,
    Item,
    Lost,
    Result,
    Row,
    StatementError,
    quoted,
    taken,
)

START_SECONDS = 60.0
END_SECONDS = 30.0
# Without InnoDB: 4 MB instead of 113; nothing of it has to survive. Its own logs stay small
OPTIONS = (
    "--innodb=OFF",
    "--default-storage-engine=MyISAM",
    "--character-set-server=utf8mb4",
    "--aria-log-file-size=8M",
    "--aria-log-purge-type=immediate",
)
LIMITS = (
    "--skip-networking",
    "--skip-name-resolve",
    "--enforce-storage-engine=MyISAM",
    "--myisam-data-pointer-size=3",  # a table is 16 MB at most
    "--tmp-disk-table-size=64M",
    "--tmp-memory-table-size=0",  # there, ties of a sort come by address: 346 to 349 gold answers
    "--local-infile=OFF",
    "--skip-symbolic-links",  # DATA DIRECTORY would write tables anywhere
    "--max-session-mem-used=256M",
    "--maximum-max-session-mem-used=256M",  # these: what a session may set for itself
    "--maximum-tmp-disk-table-size=64M",
    "--maximum-tmp-memory-table-size=16M",
    "--maximum-max-heap-table-size=16M",
    "--maximum-sort-buffer-size=16M",
    "--maximum-join-buffer-size=16M",
)
RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, CREATE VIEW, SHOW VIEW"
KILLED, DENIED = 1927, 1045  # numbers of errors
# The pipe to `read` closes when this process ends in whatever way. Then the server has to go too
KEEPER = """
"$@" > server.log 2>&1 < /dev/null & server=$!
echo "$server"; read -r _
kill "$server"; wait "$server"; cd /; rm -rf -- "$FOLDER"
"""


def _library():
    """Return PyMySQL; UserError: it is not installed."""
    try:
        import pymysql
    except ImportError as error:
        raise UserError(
            "MariaDB and MySQL need PyMySQL: pip install -r requirements.txt."
        ) from error
    import pymysql.cursors

    return pymysql


# ---------------------------------------------------------------- the server


class Server:
    """A MariaDB of our own, or the server at a URL; see `tasks.llb_db.Backend`."""

    def __init__(self, url: str | None = None) -> None:
        """Start a server, or log on to the one at mysql://USER:PASSWORD@HOST:PORT.

        The account at the URL must be allowed to create databases and users. `?unix_socket=PATH`
        instead of a host: a server on this machine.
        UserError: what is missing, or why the server cannot be reached.
        """
        self.library = _library()
        self._close = lambda: None
        self._lock, self._numbers = threading.Lock(), count(1)
        self._names = f"llb_{secrets.token_hex(4)}"  # of this object's databases and accounts
        self.pid: int | None = None  # of a server of our own, which works in `folder`
        self.folder: Path | None = None
        self.where = self._start() if url is None else _address(url)
        try:
            self.admin = self._log_on() if url is None else self.connect(**self.where)
            version = self.admin.get_server_info()
        except (self.library.MySQLError, RuntimeError, OSError) as error:
            self._close()
            raise UserError(f"The database server cannot be reached ({_said(error)}).") from error
        maria = re.search(r"([\d.]+)-MariaDB", version)
        self.name = f"MariaDB {maria[1]}" if maria else f"MySQL {version}"

    def connect(self, **where: object):
        """Log on; errors are PyMySQL's, or RuntimeError where it lacks `cryptography`."""
        fields = self.library.constants.FIELD_TYPE
        whole = (fields.TINY, fields.SHORT, fields.LONG, fields.LONGLONG, fields.INT24, fields.YEAR)
        decode = dict.fromkeys(whole, int) | dict.fromkeys((fields.FLOAT, fields.DOUBLE), float)
        decode |= dict.fromkeys((fields.DECIMAL, fields.NEWDECIMAL), _number)
        encode = self.library.converters.encoders
        return self.library.connect(
            **where,
            ssl_disabled="unix_socket" in where,  # a context takes 100 ms; elsewhere: if offered
            charset="utf8mb4",
            autocommit=True,
            init_command="SET SESSION lock_wait_timeout = 10",
            connect_timeout=10,
            read_timeout=3 * SECONDS,  # should the server not end a statement when it is told to
            conv=encode | decode,  # all else stays as the server prints it
        )

    def _start(self) -> dict[str, object]:
        path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin"
        server, installer = (shutil.which(x, path=path) for x in ("mariadbd", "mariadb-install-db"))
        if not server or not installer:
            raise UserError(
                "MariaDB's server is not installed: apt-get install --no-install-recommends "
                "mariadb-server-core mariadb-client-core."
            )
        folder = Path(tempfile.mkdtemp(prefix="memagent-mariadb-", dir=_memory_folder()))
        self._close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        how: dict = {"cwd": folder, "start_new_session": True, "umask": 0o077}
        if os.geteuid() == 0:  # mariadbd refuses to be root, with good reason
            user, group = _ordinary()
            os.chown(folder, user, group)
            how |= {"user": user, "group": group, "extra_groups": []}
        common = ("--no-defaults", f"--datadir={folder / 'data'}", f"--tmpdir={folder}", *OPTIONS)
        own = ("--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve")
        log = folder / "install.log"
        with log.open("wb") as out:
            out_to = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            install = subprocess.Popen([installer, *common, *own], **out_to, **how)
            try:
                failed = install.wait(START_SECONDS)
            except BaseException as error:
                os.killpg(install.pid, signal.SIGKILL)
                install.wait()
                self._close()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                failed = 1
        if failed:
            reason = _last_error(log)
            self._close()
            raise UserError(f"MariaDB's tables could not be made ({reason}).")
        socket = folder / "socket"
        run = (server, *common, f"--socket={socket}", *LIMITS)
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "sh", *run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "FOLDER": str(folder)},
            **how,
        )
        self._close.detach()
        self._close = weakref.finalize(self, _end, keeper, folder)
        self.pid = int(keeper.stdout.readline())
        self.folder = folder
        return {"unix_socket": str(socket), "user": "root"}

    def _log_on(self):
        """Wait until a server of our own answers."""
        until, log = time.monotonic() + START_SECONDS, self.folder / "server.log"
        while not Path(self.where["unix_socket"]).is_socket():  # made when it is ready
            if time.monotonic() > until or _aborted(log):
                raise OSError(_last_error(log))
            time.sleep(0.02)
        return self.connect(**self.where)

    def open(self, item: Item) -> ServerDatabase:
        name, password = f"{self._names}_{next(self._numbers)}", secrets.token_hex(16)
        columns = ", ".join(
            f"{quoted(n)} {t}" for n, t in zip(item.columns, item.types, strict=True)
        )
        table = f"{quoted(name)}.{quoted(item.table)}"
        holes = ", ".join(["%s"] * len(item.columns))
        try:
            with self._lock, self.admin.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
                cursor.execute(f"CREATE USER {name}@'%' IDENTIFIED BY '{password}'")
                cursor.execute(f"GRANT {RIGHTS} ON {name}.* TO {name}@'%'")
                cursor.execute(f"CREATE TABLE {table} ({columns})")
                insert = f"INSERT INTO {table.replace('%', '%%')} VALUES ({holes})"
                cursor.executemany(insert, item.rows)
            return ServerDatabase(self, item, name, password)
        except (self.library.MySQLError, RuntimeError, OSError) as error:
            self.drop(name)
            reason = _said(error)
            raise UserError(f"The table of item {item.id} cannot be made ({reason}).") from error

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
        self._close()


def _address(url: str) -> dict[str, object]:
    """Return the arguments to log on to mysql://USER:PASSWORD@HOST:PORT or ?unix_socket=PATH."""
    try:
        parts = urlsplit(url)
        where = {"host": parts.hostname, "port": parts.port or 3306}
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise UserError(f"The database's address cannot be read ({first_line(error)}).") from error
    if socket := query.pop("unix_socket", None):
        where = {"unix_socket": socket[0]}
    if not parts.username or not any(where.values()) or query or parts.path.strip("/"):
        raise UserError(
            "The database's address must be mysql://USER:PASSWORD@HOST:PORT or "
            "mysql://USER:PASSWORD@/?unix_socket=PATH, without a database."
        )
    return where | {"user": unquote(parts.username), "password": unquote(parts.password or "")}


def _memory_folder() -> str | None:
    """Return a folder in memory with room for a server, for every table that is made is forced to
    the disk; None: where temporary files are, if there is none or TMPDIR is set."""
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not (memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)):
        return None
    return str(memory) if shutil.disk_usage(memory).free > 256 * 2**20 else None


def _ordinary() -> tuple[int, int]:
    """Return user and group of nobody, of whom there is one on every Unix."""
    try:
        nobody = pwd.getpwnam("nobody")
        return nobody.pw_uid, nobody.pw_gid
    except KeyError:
        return 65534, 65534


def _end(keeper: subprocess.Popen, folder: Path) -> None:
    """End a server of our own, and remove its folder."""
    keeper.stdin.close()
    try:
        keeper.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)  # our own session: the shell and its server
        keeper.wait()
    keeper.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)


def _aborted(log: Path) -> bool:
    return log.is_file() and "[ERROR] Aborting" in log.read_text(errors="replace")


def _last_error(log: Path) -> str:
    """Return the first error of a log, else its last line."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    errors = [line for line in lines if "ERROR" in line]
    return (errors or lines[-1:] or ["it said nothing"])[0].rstrip(". ")


def _said(error: BaseException) -> str:
    """Return what the server has said, without PyMySQL's tuple."""
    text = error.args[-1] if error.args else ""
    return str(text or type(error).__name__).partition("\n")[0].rstrip(". ")


def _number(text: str) -> int | float:
    """Return a decimal number as Python's own, whole ones too as floats: 2.0 is not 2 here."""
    value = Decimal(text)
    return int(value) if "." not in text and abs(value) < 2**63 else float(value)


# ---------------------------------------------------------------- an episode's database


class ServerDatabase:
    """A table in a database and under an account of its own; see `tasks.llb_db.Database`."""

    def __init__(self, server: Server, item: Item, name: str, password: str) -> None:
        self.server, self.item, self.name = server, item, name
        self.library = server.library
        self._where = server.where | {"user": name, "password": password, "database": name}
        self._closed = False
        self.connection = server.connect(**self._where)

    def execute(self, sql: str, most: tuple[int, int] = SHOWN) -> Result:
        error = None
        with self._within_time() as ended:
            try:
                result = self._result(sql, most)
            # the others: a text that is no UTF-8, from either side; replies that make no sense
            except (StatementError, self.library.MySQLError, ValueError, LookupError) as e:
                error = e
        understood = error is None or isinstance(error, StatementError | self.library.MySQLError)
        killed = error is not None and error.args[:1] == (KILLED,)
        if not self.connection.open or killed or not understood:
            self._reconnect()
        if ended.is_set():
            raise StatementError(TOO_LONG) from error
        if error is not None:
            raise StatementError(_said(error)) from error
        return result

    def _result(self, sql: str, most: tuple[int, int]) -> Result:
        cursor = self.connection.cursor(self.library.cursors.SSCursor)
        try:
            changed = cursor.execute(sql)
            result = Result(changed=changed)
            if cursor.description is not None:
                columns = tuple(column[0] for column in cursor.description)
                result = Result(columns, taken(iter(cursor.fetchone, None), most))
            while cursor.nextset():  # of several results the first is shown, and errors of all
                for _ in iter(cursor.fetchone, None):
                    pass
            return result
        except StatementError:
            self._kill()  # else all the rest would have to be received
            raise
        finally:
            with suppress(self.library.MySQLError):
                cursor.close()

    @contextmanager
    def _within_time(self) -> Iterator[threading.Event]:
        """End what runs on the connection after `SECONDS`; the event is then set."""
        ended = threading.Event()

        def end() -> None:
            ended.set()
            self._kill("CONNECTION")  # a loop of statements would swallow the end of one

        timer = threading.Timer(SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            yield ended
        finally:
            timer.cancel()
            timer.join()  # what it kills must not be the next statement

    def _kill(self, what: str = "QUERY") -> None:
        """End the statement that runs, or all of its connection; an account may do so with its
        own."""
        with suppress(self.library.MySQLError, RuntimeError, OSError):
            other = self._log_on()
            with suppress(self.library.MySQLError):
                other.query(f"KILL {what} {self.connection.thread_id()}")
            other.close()

    def _reconnect(self) -> None:
        self._hang_up()
        try:
            self.connection = self._log_on()
        except (self.library.MySQLError, RuntimeError, OSError) as error:
            raise Lost(_said(error)) from error

    def _log_on(self):
        """Return a new connection; an account can change its password, which is undone."""
        try:
            return self.server.connect(**self._where)
        except self.library.OperationalError as error:
            if error.args[:1] != (DENIED,):
                raise
        self.server.allow(self.name, self._where["password"])
        return self.server.connect(**self._where)

    def _hang_up(self) -> None:
        with suppress(self.library.MySQLError, OSError):
            self.connection.close()

    def table(self) -> list[Row]:
        columns = ", ".join(map(quoted, self.item.columns))
        return self.execute(
            f"SELECT {columns} FROM {self.name}.{quoted(self.item.table)}", KEPT
        ).rows

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hang_up()
            self.server.drop(self.name)
