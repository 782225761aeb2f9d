"""Files of strangers given as banks: one sentence, before a row is read; one writer a bank."""

import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from conftest import HANG_S

from agents.bank import Bank, BankConfig
from commands.stream import Stream, outcome_of
from config.errors import UserError
from config.options import StreamConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    """The bytes of a bank: two entries, a delta and an event."""
    path = tmp_path_factory.mktemp("sound") / "b.db"
    with closing(Bank(path, BankConfig(delta=0.0))) as made:
        first = made.write("count dogs", "SELECT", success=True, task_id="t1", kind="script")
        made.write("drop cats", "it", success=False, task_id="t2", parents=[first], meta={"n": 1})
        made.feedback(made.retrieve("count dogs").shown, 1.0)
        made.calibrate(["count dogs", "drop cats"])
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, sound) -> Path:
    (tmp_path / "b.db").write_bytes(sound)
    return tmp_path / "b.db"


def run(path: Path, sql: str) -> None:
    """Execute SQL without any of the care that a bank takes."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(sql)


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
ALTER = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET "
WRONG = {
    "view in place of a table": f"DROP TABLE event; CREATE VIEW event AS {ENDLESS}",
    "view beside": f"CREATE VIEW other AS {ENDLESS}",
    "trigger": "CREATE TRIGGER tr AFTER INSERT ON info BEGIN DELETE FROM entry; END",
    "endless trigger": (
        "CREATE TRIGGER tr AFTER UPDATE ON entry BEGIN "
        f"INSERT INTO event (t) {ENDLESS}; END"
    ),
    "generated column": "ALTER TABLE entry ADD COLUMN g AS (zeroblob(1000000000))",
    "index of an expression": "CREATE INDEX ix ON entry (abs(q))",
    "missing table": "DROP TABLE event",
    "one table more": "CREATE TABLE more (x)",
    "virtual table": "DROP TABLE event; CREATE VIRTUAL TABLE event USING fts5 (x)",
    "constraint": (
        f"{ALTER}sql = replace(sql, 'q REAL NOT NULL,', "
        "'q REAL NOT NULL CHECK (abs(random()) > q),') WHERE name = 'entry'"
    ),
    "no SQL": f"{ALTER}sql = 'noise' WHERE name = 'entry'",
    "another program's": "PRAGMA application_id = 7",
    "newer": "UPDATE info SET value = '99' WHERE key = 'schema'",
    "no version": "DELETE FROM info WHERE key = 'schema'",
    "other tables alone": (
        "PRAGMA application_id = 0; DROP TABLE event; DROP TABLE entry; DROP TABLE intent"
    ),
    "vectors of no embedder": (
        "UPDATE info SET value = '{\"name\": 1, \"dim\": \"x\"}' WHERE key = 'embedder'"
    ),
    "text": lambda raw: b"these are notes, no bank\n" * 40,
    "zeros": lambda raw: bytes(8192),
    "truncated": lambda raw: raw[: len(raw) // 2],
    "header alone": lambda raw: raw[:100],
    "noise": lambda raw: raw[:100] + bytes(range(256)) * 40,
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
@pytest.mark.parametrize("how", WRONG)
def test_what_is_no_bank_is_one_sentence_and_stays_as_it_is(path, how, frozen):
    if frozen and how == "vectors of no embedder":  # it may be searched by words
        return
    if isinstance(WRONG[how], str):
        run(path, WRONG[how])
    else:
        path.write_bytes(WRONG[how](path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(UserError, match=path.name) as caught:
        Bank(path, BankConfig(), frozen=frozen)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert path.read_bytes() == before


def test_functions_of_a_schema_are_not_trusted_and_values_are_bounded(path):
    for frozen in (False, True):
        with closing(Bank(path, BankConfig(), frozen=frozen)) as made:
            assert made._value("PRAGMA trusted_schema") == 0
            assert made._db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) < 1 << 27


def test_what_is_no_file_of_a_bank_is_one_sentence(path, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "fifo", "loop", "a\0b", "x" * 300, "none/b.db"):
        with pytest.raises(UserError):
            Bank(tmp_path / name, BankConfig())
    with pytest.raises(UserError, match="There is no bank"):
        Bank(tmp_path / "none.db", BankConfig(), frozen=True)
    monkeypatch.setattr("agents.bank.MOST_BYTES", 4096)
    with pytest.raises(UserError, match="too large"):
        Bank(path, BankConfig(), frozen=True)


@pytest.mark.parametrize(("key", "note"), [
    ("epoch 1", '{"x": 1}'), ("epoch 1", '{"entries": "many"}'), ("stream", '"x"'),
    ("stream", '{"epoch": 0}'),
    ("stream", '{"epoch": "x", "cursor": 0, "bytes": 0, "settings": ""}'),
])  # fmt: skip
def test_a_note_of_a_stream_that_lacks_what_it_needs_is_refused(path, tmp_path, key, note):
    run(path, f"INSERT INTO info VALUES ('{key}', '{note}')")
    with closing(Bank(path, BankConfig())) as book:
        stream = Stream.__new__(Stream)
        stream.book, stream.settings = book, ""
        with pytest.raises(UserError, match="damaged"):
            if key == "stream":
                stream._begun()
            else:
                outcome_of(tmp_path, "memrl", StreamConfig(epochs=1), book)


@pytest.mark.parametrize("rows", [
    {}, [], {"info": 7}, {"intent": [[1, "default", "x"]]}, {"intent": [[1, "default", "x", "?"]]},
    {"event": [[10**30] * 9]}, {"info": [["schema", "[" * 100_000]]}, {"info": [["schema", "2"]]},
    {"entry": [[1, 55, "k", "e", 1, 0.5, 0, 0, "t", 0, 1, "[1]", "[]", 0]]},
])  # fmt: skip
def test_rows_of_a_model_folder_that_are_no_bank_are_one_sentence(rows, path):
    with closing(Bank(path, BankConfig(), frozen=True)) as sound_one:
        whole = sound_one.dump()
    made = Bank(None, BankConfig(delta=0.0))
    made.load(whole)
    before = made.digest
    with pytest.raises(UserError) as caught:
        made.load(whole | rows if isinstance(rows, dict) and rows else rows)
    assert "\n" not in str(caught.value) and made.digest == before


# ---------------------------------------------------------------- what lies beside it


def journal_that_names(path: Path, other: Path) -> bytes:
    """Return a journal after whose use SQLite removes another file."""
    page_size, magic = 4096, bytes.fromhex("d9d505f920a163d7")
    name, page = os.fsencode(other.resolve()), path.read_bytes()[:page_size]
    check = sum(page[at] for at in range(page_size - 200, 0, -200)) & 0xFFFFFFFF
    pages = path.stat().st_size // page_size
    header = magic + struct.pack(">IIIII", 1, 0, pages, 512, page_size)
    said = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    return (
        header.ljust(512, b"\0") + struct.pack(">I", 1) + page + struct.pack(">I", check)
        + struct.pack(">I", 0x40000000 // page_size + 1) + name
        + struct.pack(">II", len(name), said) + magic
    )  # fmt: skip


def test_a_journal_of_a_stranger_removes_no_file(path, tmp_path):
    """SQLite removes the file that a journal names at its end, wherever it is."""
    victim = tmp_path / "thesis.txt"
    victim.write_text("all of it")
    whole = journal_that_names(path, victim)
    named_alone = b"\0" * 512 + whole[whole.index(os.fsencode(victim)) - 4 :]
    for content in (whole, named_alone, bytes((1 << 16) + 1)):
        Path(f"{path}-journal").write_bytes(content)
        with pytest.raises(UserError, match="is not of a bank"):
            Bank(path, BankConfig())
        Bank(path, BankConfig(), frozen=True).close()
        assert victim.read_text() == "all of it"


def test_ctrl_c_ends_a_query(path):
    looking = Bank(path, BankConfig(), frozen=True)
    main = threading.get_ident()

    def interrupt():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt, daemon=True).start()
        looking._rows(f"SELECT count(*) FROM ({ENDLESS})")  # which has no end
    assert looking.entries()


# ---------------------------------------------------------------- one writer


def test_a_second_writer_is_told_who_the_first_one_is(path):
    """Readers are not kept out, and a writer that was killed keeps nobody out."""
    code = (
        "import sys; from pathlib import Path; from agents.bank import Bank, BankConfig; "
        f"bank = Bank(Path({str(path)!r}), BankConfig()); print('open', flush=True); "
        "sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"written by process {writer.pid} .* since 2"):
            Bank(path, BankConfig())
        with closing(Bank(path, BankConfig(), frozen=True)) as looking:
            assert len(looking.entries()) == 2
    finally:
        writer.kill()
        writer.wait(HANG_S)
    with closing(Bank(path, BankConfig())) as left:
        assert len(left.entries()) == 2
    assert not [each for each in path.parent.iterdir() if each != path]
