"""Child processes that read: values and errors come back, and nothing outlives its limits."""

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import HANG_S, until

from config.errors import UserError
from tasks.chat_requests import ChatRequest, Refused
from tasks.forms import Contents, contents
from tasks.limited import LINUX, Job, OverLimit, Readers, _Child

ROOT = Path(__file__).parents[2]
ENDLESS = re.compile("(a+)+$").match, "a" * 60 + "b"  # holds the interpreter, as a parser may
linux = pytest.mark.skipif(not LINUX, reason="other systems do not hold a process to its memory")


@pytest.fixture
def readers():
    made: list[Readers] = []

    def make(seconds: float = HANG_S, mib: int = 512, most: int = 1) -> Readers:
        made.append(Readers(seconds, mib, most))
        return made[-1]

    yield make
    for each in made:
        each.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_values_and_errors_come_back_from_one_child(readers):
    pool = readers()
    pids = [pool.start(os.getpid).result()]
    assert pool.start(contents, b"Anna.", "a.txt").result() == contents(b"Anna.", "a.txt")
    with pytest.raises(UserError, match=r"a\.txt is empty"):
        pool.start(contents, b"", "a.txt").result()
    with pytest.raises(Refused) as refused:
        pool.start(ChatRequest.parse, b'{"messages": [], "model": "m"}').result()
    assert refused.value.param == "messages"
    with pytest.raises(UserError, match=r"^b\.txt cannot be read \(TypeError: .*\)\.$") as error:
        pool.start(len, 7, name="b.txt").result()
    assert "Traceback" in str(error.value.__cause__)
    pids.append(pool.start(os.getpid).result())
    assert pids[0] == pids[1] != os.getpid()


def test_what_takes_too_long_is_ended_and_named(readers):
    pool = readers(seconds=0.5)
    with pytest.raises(OverLimit, match=r"^a\.pdf .* --document-s\.$"):
        pool.start(*ENDLESS, name="a.pdf").result()
    assert not pool._idle and not pool._working


@linux
def test_what_takes_too_much_memory_is_ended_and_named(readers):
    pool = readers(mib=64)
    with pytest.raises(OverLimit, match=r"^a\.pdf takes more than 64 MiB .* --document-mib\.$"):
        pool.start(bytearray, 100 << 20, name="a.pdf").result()
    with pytest.raises(OverLimit):  # a value that is less, and more than that as it is sent
        pool.start("x".__mul__, 48 << 20).result()
    given = bytes(100 << 20)  # what is given does not count
    assert pool.start(len, given).result() == len(given)
    assert len(pool.start("x".__mul__, 9 << 20).result()) == 9 << 20


@pytest.mark.parametrize(
    ("call", "how"), [((os._exit, 3), "status 3"), ((signal.raise_signal, 11), "SIGSEGV")]
)
def test_a_child_that_dies_is_one_sentence_and_replaced(readers, call, how):
    pool = readers()
    with pytest.raises(UserError, match=rf"^a\.pdf cannot be read: .*\({how}\)\.$"):
        pool.start(*call, name="a.pdf").result()
    first = pool.start(os.getpid).result()
    os.kill(first, signal.SIGKILL)  # while it waits for the next job, as for want of memory
    until(lambda: pool._idle[0].process.poll() is not None)
    assert pool.start(os.getpid).result() != first


def test_nothing_but_data_comes_back(readers, tmp_path):
    """A child that hostile data has taken over cannot have the parent call anything."""
    with pytest.raises(UserError, match="what comes of it is no data"):
        readers().start(Path, tmp_path).result()
    (tmp_path / "taken.py").write_text(
        "import os\nclass Order:\n def __reduce__(self): return os.mkdir, ('made',)\n"
        "def over(): return Order()\n"
    )
    code = """
        import sys; sys.path[:0] = [{root!r}, {here!r}]
        import taken
        from tasks.limited import Readers
        try: Readers(99, 99).start(taken.over).result()
        except Exception as error: print(error)
    """
    code = textwrap.dedent(code).format(root=str(ROOT), here=str(tmp_path))
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert "no data" in found.stdout and not (tmp_path / "made").exists()


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


def test_a_job_is_cancelled_at_work_and_while_it_waits(readers):
    pool = readers()
    jobs = [pool.start(*ENDLESS, name="first"), pool.start(os.getpid, name="second")]
    ended: list[str] = []
    threads = [waits(jobs[0], ended)]
    until(lambda: jobs[0].child)
    threads.append(waits(jobs[1], ended))
    for job in reversed(jobs):
        job.cancel()
    for thread in threads:
        thread.join()
    assert {*ended} == {"first", "second"} and not pool._working


def test_so_many_jobs_run_at_a_time_from_any_thread(readers):
    pool = readers(most=2)
    names = [f"{k}.txt" for k in range(12)]

    def one(name: str) -> Contents:
        return pool.start(contents, name.encode(), name, name=name).result()

    with ThreadPoolExecutor(12) as threads:
        found = [*threads.map(one, names)]
    assert [each.pieces[0][0] for each in found] == names and 1 <= len(pool._idle) <= 2


def test_a_pool_that_is_closed_ends_what_is_at_work(readers):
    pool, ended = readers(), []
    thread = waits(pool.start(*ENDLESS), ended)
    until(lambda: pool._working)
    pool.close()
    thread.join()
    assert ended
    with pytest.raises(CancelledError):
        pool.start(os.getpid).result()


@linux
def test_what_is_written_to_a_child_amid_its_job_does_not_end_it(tmp_path):
    """As a late signal of the last write would: a system sends it after the reader has it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = _Child(99)
    try:
        child.load("pathlib")
        child.send(Path.read_text, (fifo,))
        with fifo.open("w") as file:  # the child has opened it: it is amid its job
            child.send(os.getpid, ())
            file.write("read")
        answers = [pickle.loads(child.values.recv_bytes())[:2] for _ in range(2)]
        assert answers == [("value", "read"), ("value", child.process.pid)]
    finally:
        child.kill()


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_parent(how):
    """Not even one that is amid a call that holds the interpreter."""
    code = (
        "import os, re, threading, time\nfrom tasks.limited import Readers\n"
        "pool = Readers(9999, 99)\npool.start(os.getpid).result()\n"
        "print(pool._idle[0].process.pid, flush=True)\n"
        'pool.start(re.compile("(a+)+$").match, "a" * 60 + "b").result()\n'
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    spent = Path(f"/proc/{child}/stat")
    before = sum(map(int, spent.read_text().split()[13:15]))
    until(lambda: sum(map(int, spent.read_text().split()[13:15])) > before + 10)  # it is at it
    parent.send_signal(how)
    parent.wait(HANG_S)
    until(lambda: not alive(child))
