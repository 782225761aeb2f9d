"""Child processes that read: values and errors come back, and nothing outlives its limits."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from conftest import HANG_S, until
from limited_calls import boast, deaf, die, endless, hoard, letters, lie, many, pid, wrong

from config.errors import UserError
from tasks.forms import Contents, contents
from tasks.limited import LINUX, Job, OverLimit, Readers

linux = pytest.mark.skipif(not LINUX, reason="other systems do not hold a process to its memory")


@pytest.fixture
def readers():
    made: list[Readers] = []

    def make(seconds: float = HANG_S, mib: int = 512) -> Readers:
        made.append(Readers(seconds, mib))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_values_and_errors_come_back_from_one_child(readers):
    pool = readers()
    pids = [pool.start(pid).result()]
    found = pool.start(contents, "a.txt", content=b"Anna.").result()
    assert found == contents(b"Anna.", "a.txt") and isinstance(found, Contents)
    with pytest.raises(UserError, match=r"a\.txt is empty"):
        pool.start(contents, "a.txt", content=b"").result()
    with pytest.raises(UserError, match=r"^b\.txt cannot be read \(TypeError: .*\)\.$"):
        pool.start(wrong, name="b.txt").result()
    pids.append(pool.start(pid).result())
    assert pids[0] == pids[1] != os.getpid()


@pytest.mark.parametrize("function", [endless, deaf])
def test_what_takes_too_long_is_ended_and_named(readers, function):
    pool = readers(seconds=0.5)
    with pytest.raises(OverLimit, match=r"^a\.pdf .* --document-s\.$"):
        pool.start(function, name="a.pdf").result()
    assert not pool.idle
    assert readers().start(pid).result()


@linux
def test_what_takes_too_much_memory_is_ended_and_named(readers):
    pool = readers(mib=64)
    with pytest.raises(OverLimit, match=r"^a\.pdf takes more than 64 MiB .* --document-mib\.$"):
        pool.start(many, 100, content=b"", name="a.pdf").result()
    with pytest.raises(OverLimit):  # a value that is less, and more than that as it is sent
        pool.start(letters, 48).result()
    given = bytes(100 << 20)  # what is given does not count
    assert pool.start(many, 1, content=given).result() == len(given) + (1 << 20)
    assert len(pool.start(letters, 9).result()) == 9 << 20


@linux
def test_a_child_that_has_grown_is_not_used_again(readers):
    pool = readers(mib=64)
    first = pool.start(hoard, 1).result()
    assert pool.start(hoard, 32).result() == first != pool.start(pid).result()


@pytest.mark.parametrize("how", ["status 3", "SIGSEGV"])
def test_a_child_that_dies_is_one_sentence_and_replaced(readers, how):
    pool = readers()
    with pytest.raises(UserError, match=rf"^a\.pdf cannot be read: .*\({how}\)\.$"):
        pool.start(die, how, name="a.pdf").result()
    first = pool.start(pid).result()
    os.kill(first, signal.SIGKILL)  # while it waits for the next job, as for want of memory
    until(lambda: pool.idle[0].process.poll() is not None)
    assert pool.start(pid).result() != first


VALUE = '["value", false]'


@pytest.mark.parametrize("said", [
    (VALUE, '[{"a": 1}]'), ('["error", false]', '[{"a": 1}]'), ('["else", false]', "5"),
    ("no JSON", ""), ("5", ""), ("[" * 900, ""), ("x" * 2000, ""),
])  # fmt: skip
def test_nothing_but_data_of_its_type_comes_back(readers, said):
    """A child that hostile data has taken over can neither call anything nor say anything else."""
    pool = readers(seconds=5)
    with pytest.raises(UserError, match=r"^a\.pdf cannot be read: "):
        pool.start(lie, *said, name="a.pdf").result()


def test_no_more_is_taken_from_a_child_than_it_may_have_made(readers):
    with pytest.raises(UserError, match="cannot be read"):
        readers(mib=16).start(boast, VALUE, name="a.pdf").result()


def waits(job: Job, ended: list[str]) -> threading.Thread:
    """Wait for a job in a thread of its own; a job that is cancelled ends up in the list."""

    def wait():
        try:
            job.result()
        except CancelledError:
            ended.append(job.name)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_job_is_cancelled_at_work_and_before_it_begins(readers):
    pool, ended = readers(), []
    job, waiting = pool.start(endless, name="first"), pool.start(pid, name="second")
    thread = waits(job, ended)
    until(lambda: job.child)
    job.cancel()
    thread.join()
    waiting.cancel()
    waits(waiting, ended).join()
    assert ended == ["first", "second"] and not pool.idle


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_parent(how):
    """Not even one that is amid a call that holds the interpreter, and hears no signal."""
    code = (
        "import sys; sys.path[:0] = ['.', 'tests/tasks']\n"
        "import limited_calls as t\nfrom tasks.limited import Readers\npool = Readers(9999, 99)\n"
        "print(pool.start(t.pid).result(), flush=True)\npool.start(t.deaf).result()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    spent = Path(f"/proc/{child}/stat")
    before = sum(map(int, spent.read_text().split()[13:15]))
    until(lambda: sum(map(int, spent.read_text().split()[13:15])) > before + 10)  # it is at it
    parent.send_signal(how)
    parent.wait(HANG_S)
    until(lambda: not alive(child))
