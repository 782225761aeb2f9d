"""Files of strangers given as banks: one sentence, before they cost anything; one writer a bank."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from bank_files import (
    COLUMNS,
    COUNTING,
    LAYOUTS,
    NOTES,
    PAGES,
    VALUES,
    journal_that_names,
    run,
)
from conftest import HANG_S, until
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig
from agents.likeness import Meanings
from config.errors import UserError

ROOT = Path(__file__).parents[2]
LOOKING = (
    "import sys; sys.path[:0] = ['.', 'tests', 'tests/hostile']; from test_bank_files import *\n"
)


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


def used(path: Path, frozen: bool) -> None:
    """Do all that a bank can do."""
    with closing(Bank(path, BankConfig(credit="dag", ucb=0.1), frozen=frozen)) as bank:
        shown = bank.retrieve("count dogs").shown
        assert bank.stats() and bank.digest and bank.dump()
        bank.entries(), bank.events(), bank.check(), bank.delta, bank.batches
        if not frozen:
            bank.config = BankConfig(credit="dag", max_entries=1)
            bank.feedback(shown, 1.0)
            bank.write("new thing", "x", success=True, task_id="n")


def refused(path: Path, frozen: bool) -> str:
    """Use a bank; return the sentence by which it is refused, "" if it is not."""
    try:
        used(path, frozen)
    except UserError as error:
        said = str(error)
        assert str(path) in said and "\n" not in said and len(said) < 500
        return said
    return ""


def in_child(function: Callable[[], str], memory: int = 1 << 30) -> str:
    """Call a function in a forked child, with so many bytes more than it begins with."""
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            resource.setrlimit(resource.RLIMIT_AS, (there + memory, there + memory))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)  # ends what hangs, and judges no speed
            os.write(write, function().encode() or b"nothing is said")
        except BaseException as error:
            os.write(write, repr(error)[:300].encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def looked_at(path: Path, frozen: bool) -> str:
    return in_child(lambda: refused(path, frozen))


# ---------------------------------------------------------------- what a file holds


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
@pytest.mark.parametrize("how", LAYOUTS)
def test_another_layout_is_refused_before_anything_is_read(path, how, frozen):
    run(path, LAYOUTS[how])
    assert "no bank" in looked_at(path, frozen)


def test_a_bank_of_today_has_the_layout(path):
    assert not refused(path, frozen=True) and not refused(path, frozen=False)


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
@pytest.mark.parametrize("how", PAGES)
def test_pages_without_end_or_of_two_trees_are_refused(path, how, frozen):
    PAGES[how](path)
    said = looked_at(path, frozen)
    assert said.startswith(str(path)) and ("damaged" in said or "no end" in said)


def test_what_no_bank_writes_is_a_sentence_and_a_number_is_a_number(path, sound):
    """Each value is one that is sound, or is refused; of another type it is always refused."""
    kinds = {"text": "TEXT", "integer": "INTEGER", "real": "REAL", "blob": "BLOB"}
    with closing(sqlite3.connect(path)) as db:
        declared = {
            (table, column): kind
            for table in COLUMNS
            for _, column, kind, *_ in db.execute(f"PRAGMA table_info({table})")
        }
    for how, sql in VALUES.items():
        path.write_bytes(sound)
        try:
            run(path, sql)
        except sqlite3.IntegrityError:  # SQLite's own constraints
            continue
        said = refused(path, True)
        if " in " in how:
            table, column = how.rpartition(" in ")[2].split(".")
            with closing(sqlite3.connect(path)) as db:
                (kind,) = db.execute(f"SELECT typeof({column}) FROM {table}").fetchone()
            if kinds.get(kind) != declared[table, column]:
                assert "row " in said and f"of {table}: {column}" in said, how
        if how.startswith(("huge as", "least as")):
            assert "row " in said, how
    for how in ("infinite in entry.q", "deep in entry.meta", "array of texts in entry.parents",
                "huge in an array in entry.parents", "null in entry.parents"):  # fmt: skip
        path.write_bytes(sound)
        run(path, VALUES[how])
        for frozen in (True, False):
            assert "row 1 of entry" in refused(path, frozen), how


def test_notes_of_another_kind_are_a_sentence(path, sound):
    for how, sql in NOTES.items():
        for frozen in (True, False):
            path.write_bytes(sound)
            run(path, sql)
            said = refused(path, frozen)
            key, whole = how.rpartition(" as ")[2], how.startswith(("true", "number", "negative"))
            unread = key in ("stream", "epoch 1")  # a stream's own, which is asked for below
            fits = (
                (key == "batches" and whole) or key.startswith("delta") or how == "true as schema"
            )
            assert said or unread or fits, how


@pytest.mark.parametrize("note", ['{"x": 1}', '{"entries": "many"}', '{"entries": null}'])
def test_a_note_on_an_epoch_that_lacks_a_number_is_refused(path, tmp_path, note):
    from commands.stream import outcome_of
    from config.options import StreamConfig

    run(path, f"INSERT INTO info VALUES ('epoch 1', '{note}')")
    with closing(Bank(path, BankConfig())) as book:
        with pytest.raises(UserError, match="epoch 1"):
            outcome_of(tmp_path, "memrl", StreamConfig(epochs=1), book)


@pytest.mark.parametrize("note", ['"x"', '{"epoch": 0}', '{"x": 1}',
    '{"epoch": "x", "cursor": 0, "bytes": 0, "settings": ""}'])  # fmt: skip
def test_a_stream_that_does_not_know_where_it_stands_is_refused(path, note):
    from commands.stream import Stream

    run(path, f"INSERT INTO info VALUES ('stream', '{note}')")
    with closing(Bank(path, BankConfig())) as book:
        stream = Stream.__new__(Stream)
        stream.book, stream.settings = book, ""
        with pytest.raises(UserError, match="damaged"):
            stream._begun()


def test_every_command_says_it_in_one_sentence(path, tmp_path, sound):
    run(path, LAYOUTS["endless view of entries"])
    other = tmp_path / "o.db"
    other.write_bytes(sound)
    for words in (
        ["show", path], ["stats", path], ["export", path, tmp_path / "e.jsonl"], ["check", path],
        ["forget", path, "--task", "t1"], ["calibrate", path], ["merge", path, other],
        ["merge", other, path],
    ):  # fmt: skip
        result = CliRunner().invoke(cli.app, ["bank", *map(str, words)])
        assert result.exit_code == 2 and "its layout differs in" in " ".join(result.output.split())
    for command in ("show", "stats", "forget", "calibrate"):
        words = ["bank", command, str(tmp_path / "none.db")]
        words += ["--task", "t1"] if command == "forget" else []
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2 and "There is no bank at" in " ".join(result.output.split())
        assert not (tmp_path / "none.db").exists()
    for name in ("folder", "fifo", "loop", "a\0b", "x" * 300):
        if name == "folder":
            (tmp_path / name).mkdir()
        elif name == "fifo":
            os.mkfifo(tmp_path / name)
        elif name == "loop":
            (tmp_path / name).symlink_to(name)
        result = CliRunner().invoke(cli.app, ["bank", "show", str(tmp_path / name)])
        assert result.exit_code == 2, result.output
        with pytest.raises(UserError):
            Bank(tmp_path / name, BankConfig())


def test_an_embedding_of_no_numbers_is_refused(path):
    class Two:
        name, dim = "two", 2

        def cut(self, texts):
            return [False] * len(texts)

        def embed(self, texts):
            import numpy as np

            return np.array([[1.0, 0.0]] * len(texts), np.float32)

    config = BankConfig(retrieve="dense", embedder="hash:2", delta=0.0)
    path.unlink()
    with closing(Bank(path, config, Two())) as made:
        made.write("dogs", "x", success=True, task_id="t")
    for vec in ("0000c07f00000000", "0000807f00000000", "ffff7f7f00000000"):  # NaN, infinite, huge
        run(path, f"UPDATE intent SET vec = x'{vec}'")
        with pytest.raises(UserError, match="intent 1"):
            Bank(path, config, Two(), frozen=True)
    assert Meanings(Two()).nearest("dogs", 1) == []


@pytest.mark.parametrize("rows", [
    {}, [], {"info": 7},
    {"intent": [[1, "default", "x"]]}, {"intent": [[1, "default", "x", "?"]]},
    {"entry": [["x"] * 14]}, {"entry": [[1, 1, [], {}, *range(10)]]}, {"event": [[10**30] * 9]},
    {"event": [[1, 1, "t", 1, 9e999, 0, 0, 0, 0.5]] * 2}, {"info": [["schema", "[" * 100_000]]},
    {"entry": [[1, 1, "k", "e", 1, 0.5, 0, 0, "t", 0, 1, "[1]", "[]", 0]]},
])  # fmt: skip
def test_rows_that_a_model_folder_holds_are_checked_like_a_file(rows, path):
    with closing(Bank(path, BankConfig(), frozen=True)) as bank:
        whole = bank.dump()
    bank = Bank(None, BankConfig(delta=0.0))
    bank.load(whole)
    with pytest.raises(UserError) as said:
        bank.load(whole | rows if isinstance(rows, dict) and rows else rows)
        bank.entries()
    assert "\n" not in str(said.value)


# ---------------------------------------------------------------- what lies beside it


def test_a_journal_of_a_stranger_removes_no_file(path, tmp_path):
    """SQLite removes the file that a journal names at its end, wherever it is."""
    victim = tmp_path / "thesis.txt"
    victim.write_text("all of it")
    journal_that_names(path, victim)
    assert "is not of a bank" in refused_by_name(path)
    assert not refused(path, frozen=True)
    assert victim.read_text() == "all of it"
    journal = Path(f"{path}-journal")
    tiny = journal.read_bytes()
    journal.write_bytes(b"\0" * 512 + tiny[tiny.index(os.fsencode(victim)) - 4 :])
    assert "is not of a bank" in refused_by_name(path)
    assert victim.read_text() == "all of it"


def refused_by_name(path: Path) -> str:
    with pytest.raises(UserError) as said:
        Bank(path, BankConfig())
    return str(said.value)


def test_ctrl_c_ends_a_query(path, monkeypatch):
    bank = Bank(path, BankConfig(), frozen=True)

    def interrupt():
        begun = bank._patience.ticks
        until(lambda: bank._patience.ticks > begun + 3)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        bank._rows(f"SELECT count(*) FROM ({COUNTING} SELECT x FROM c LIMIT 1000000000)")
    waiting.join()
    assert bank.entries()


# ---------------------------------------------------------------- one writer


def test_a_second_writer_is_told_who_the_first_one_is(path):
    """Readers are not kept out, and a writer that was killed keeps nobody out."""
    code = f"{LOOKING}bank = Bank(Path({str(path)!r}), BankConfig()); print('open', flush=True)\n"
    writer = subprocess.Popen(
        [sys.executable, "-c", f"{code}sys.stdin.read()"], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"written by process {writer.pid} .* since 2"):
            Bank(path, BankConfig())
        words = ["bank", "forget", str(path), "--task", "t1"]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2 and f"process {writer.pid}" in " ".join(result.output.split())
        with closing(Bank(path, BankConfig(), frozen=True)) as bank:
            assert len(bank.entries()) == 2
    finally:
        writer.kill()
        writer.wait(HANG_S)
    with closing(Bank(path, BankConfig())) as bank:
        assert len(bank.entries()) == 2
    assert not [each for each in path.parent.iterdir() if each != path]
