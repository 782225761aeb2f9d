"""Files of strangers given as banks: one sentence, before they cost anything; one writer a bank."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
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
from child import in_child
from conftest import HANG_S, until
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig
from agents.likeness import Meanings
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


def used(path: Path, frozen: bool) -> None:
    """Do all that a bank can do."""
    with closing(Bank(path, BankConfig(ucb=0.1), frozen=frozen)) as bank:
        shown = bank.retrieve("count dogs").shown
        assert bank.stats() and bank.digest and bank.dump()
        bank.entries(), bank.events(), bank.delta, bank.batches
        if not frozen:
            bank.config = BankConfig(max_entries=1)
            bank.feedback(shown, 1.0)
            bank.write("new thing", "x", success=True, task_id="n")


def refusal(path: Path, frozen: bool) -> str:
    """Use a bank; return the sentence by which it is refused, "" if it is not."""
    try:
        used(path, frozen)
    except UserError as error:
        sentence = str(error)
        assert str(path) in sentence and "\n" not in sentence and len(sentence) < 500
        return sentence
    return ""


def bank(*words) -> str:
    """Call a command on banks that is refused; return its sentence."""
    result = CliRunner().invoke(cli.app, ["bank", *map(str, words)])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


both_ways = pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])

# ---------------------------------------------------------------- what a file holds


@both_ways
@pytest.mark.parametrize("how", LAYOUTS)
def test_another_layout_is_refused_before_anything_is_read(path, how, frozen):
    run(path, LAYOUTS[how])
    assert "no bank" in in_child(lambda: refusal(path, frozen))


@both_ways
def test_a_bank_of_today_has_the_layout(path, frozen):
    assert not refusal(path, frozen)


@both_ways
@pytest.mark.parametrize("how", PAGES)
def test_pages_without_end_or_of_two_trees_are_refused(path, how, frozen):
    PAGES[how](path)
    sentence = in_child(lambda: refusal(path, frozen))
    assert sentence.startswith(str(path)) and ("damaged" in sentence or "no end" in sentence)


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
        sentence = refusal(path, True)
        if " in " in how:
            table, column = how.rpartition(" in ")[2].split(".")
            with closing(sqlite3.connect(path)) as db:
                (kind,) = db.execute(f"SELECT typeof({column}) FROM {table}").fetchone()
            if kinds.get(kind) != declared[table, column]:
                assert "row " in sentence and f"of {table}: {column}" in sentence, how
        if how.startswith(("huge as", "least as")):
            assert "row " in sentence, how
    for how in ("infinite in entry.q", "deep in entry.meta", "array of texts in entry.parents",
                "huge in an array in entry.parents", "null in entry.parents"):  # fmt: skip
        path.write_bytes(sound)
        run(path, VALUES[how])
        for frozen in (True, False):
            assert "row 1 of entry" in refusal(path, frozen), how


@both_ways
def test_notes_of_another_kind_are_a_sentence(path, sound, frozen):
    for how, sql in NOTES.items():
        path.write_bytes(sound)
        run(path, sql)
        key, whole = how.rpartition(" as ")[2], how.startswith(("true", "number", "negative"))
        unread = key in ("stream", "epoch 1")  # a stream's own, which is asked for below
        fits = (key == "batches" and whole) or key.startswith("delta") or how == "true as schema"
        assert refusal(path, frozen) or unread or fits, how


@pytest.mark.parametrize("note", ['{"x": 1}', '{"entries": "many"}', '{"entries": null}'])
def test_a_note_on_an_epoch_that_lacks_a_number_is_refused(path, tmp_path, note):
    run(path, f"INSERT INTO info VALUES ('epoch 1', '{note}')")
    with closing(Bank(path, BankConfig())) as book:
        with pytest.raises(UserError, match="epoch 1"):
            outcome_of(tmp_path, "memrl", StreamConfig(epochs=1), book)


@pytest.mark.parametrize("note", ['"x"', '{"epoch": 0}', '{"x": 1}',
    '{"epoch": "x", "cursor": 0, "bytes": 0, "settings": ""}'])  # fmt: skip
def test_a_stream_that_does_not_know_where_it_stands_is_refused(path, note):
    run(path, f"INSERT INTO info VALUES ('stream', '{note}')")
    with closing(Bank(path, BankConfig())) as book:
        stream = Stream.__new__(Stream)
        stream.book, stream.settings = book, ""
        with pytest.raises(UserError, match="damaged"):
            stream._begun()


def test_every_command_says_it_in_one_sentence(path, tmp_path):
    run(path, LAYOUTS["endless view of entries"])
    none = tmp_path / "none.db"
    for words in (
        ["show", path], ["stats", path], ["export", path, tmp_path / "e.jsonl"],
        ["forget", path, "--task", "t1"],
    ):  # fmt: skip
        assert "its layout differs in" in bank(*words)
    for words in (["show"], ["stats"], ["forget", "--task", "t1"]):
        assert "There is no " in bank(*words, none) and not none.exists()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "fifo", "loop", "a\0b", "x" * 300):
        bank("show", tmp_path / name)
        with pytest.raises(UserError):
            Bank(tmp_path / name, BankConfig())


class Two:
    """An embedder of two numbers."""

    name, dim = "two", 2

    def cut(self, texts):
        return [False] * len(texts)

    def embed(self, texts):
        return np.array([[1.0, 0.0]] * len(texts), np.float32)


@pytest.mark.parametrize("vec", ["0000c07f", "0000807f", "ffff7f7f"])  # NaN, infinite, huge
def test_an_embedding_of_no_numbers_is_refused(path, vec):
    config = BankConfig(retrieve="dense", embedder="hash:2", delta=0.0)
    path.unlink()
    with closing(Bank(path, config, Two())) as made:
        made.write("dogs", "x", success=True, task_id="t")
    run(path, f"UPDATE intent SET vec = x'{vec}00000000'")
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
    with closing(Bank(path, BankConfig(), frozen=True)) as sound_one:
        whole = sound_one.dump()
    made = Bank(None, BankConfig(delta=0.0))
    made.load(whole)
    with pytest.raises(UserError) as caught:
        made.load(whole | rows if isinstance(rows, dict) and rows else rows)
        made.entries()
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- what lies beside it


def test_a_journal_of_a_stranger_removes_no_file(path, tmp_path):
    """SQLite removes the file that a journal names at its end, wherever it is."""
    victim, journal = tmp_path / "thesis.txt", Path(f"{path}-journal")
    victim.write_text("all of it")
    journal_that_names(path, victim)
    whole = journal.read_bytes()
    for content in (whole, b"\0" * 512 + whole[whole.index(os.fsencode(victim)) - 4 :]):
        journal.write_bytes(content)
        with pytest.raises(UserError, match="is not of a bank"):
            Bank(path, BankConfig())
        assert not refusal(path, frozen=True)
        assert victim.read_text() == "all of it"


def test_ctrl_c_ends_a_query(path):
    looking = Bank(path, BankConfig(), frozen=True)

    def interrupt():
        begun = looking._patience.ticks
        until(lambda: looking._patience.ticks > begun + 3)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        looking._rows(f"SELECT count(*) FROM ({COUNTING} SELECT x FROM c LIMIT 1000000000)")
    waiting.join()
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
        assert f"process {writer.pid}" in bank("forget", path, "--task", "t1")
        with closing(Bank(path, BankConfig(), frozen=True)) as looking:
            assert len(looking.entries()) == 2
    finally:
        writer.kill()
        writer.wait(HANG_S)
    with closing(Bank(path, BankConfig())) as left:
        assert len(left.entries()) == 2
    assert not [each for each in path.parent.iterdir() if each != path]
