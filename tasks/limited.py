"""Foreign data is read in child processes, with limits of time and memory.

Holds: `Readers`, `Job`, `OverLimit`. Leaves out: what is read (tasks/forms.py), who sets the limits
(config/options.py). No torch, here and in the children.
Exercise it: `pytest tests/tasks/test_limited.py`. Read next: tasks/documents.py.

    parent ── function, arguments ──> child     an interpreter of its own, begun when it is needed,
           <── value or error ──────            that reads one thing at a time, and many in turn

A child is killed when its time is over, when its job is cancelled and when its parent is gone. What
comes back may have been made by a process that hostile data has taken over: it is plain data and
classes of `DATA`, nothing else is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from config.errors import UserError, clip, first_line

DATA = ("config.errors", "tasks.chat_requests", "tasks.conversations", "tasks.documents",
        "tasks.forms", "tasks.limited")  # fmt: skip
"""Modules whose classes may come back."""
MAIN = (
    "import sys; mib, parent, *sys.path = sys.argv[1:]; "
    "from tasks.limited import work; work(int(mib), int(parent))"
)
LONGEST_S = 1e6  # that the system can be asked to wait
GRACE_S = 5.0  # for a process that has closed its end
TOO_LARGE = pickle.dumps(("memory", None, False))
LINUX = sys.platform == "linux"


class OverLimit(UserError):
    """What is read takes longer, or more memory, than it may."""


class Readers:
    """Child processes that read, at most so many at a time.

    seconds: that one job may take, by the clock, from the moment at which a child has it. mib: of
    memory that it may take beyond what it is given; other systems than Linux do not hold a process
    to that, and the seconds alone remain.
    """

    def __init__(self, seconds: float, mib: int, most: int = 1):
        self.seconds, self.mib, self.most = seconds, mib, most
        self._changed = threading.Condition()
        self._idle: list[_Child] = []
        self._working: set[_Child] = set()
        self._closed = False

    def start(self, function: Callable, *arguments, name: str = "the document") -> Job:
        """Return the job of calling a function of a module; name: what errors call its data.

        It does not block, and may be called from any thread: whoever asks for the job's `result`
        waits.
        """
        return Job(self, function, arguments, name)

    def close(self) -> None:
        """End all children, those at work at once."""
        with self._changed:
            self._closed = True
            for child in (*self._idle, *self._working):
                child.kill()
            self._idle.clear()
            self._changed.notify_all()

    def _take(self, job: Job) -> _Child:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or job.cancelled or len(self._working) < self.most
            )
            if self._closed or job.cancelled:
                raise CancelledError
            child = self._idle.pop() if self._idle else _Child(self.mib)
            if child.process.poll() is not None:  # the system took it, for its memory
                child = _Child(self.mib)
            self._working.add(child)
            job.child = child
            return child

    def _give_back(self, job: Job, child: _Child, goes_on: bool) -> None:
        with self._changed:
            job.child = None
            self._working.discard(child)
            if goes_on and not self._closed and child.process.returncode is None:
                self._idle.append(child)
            else:
                child.kill()
            self._changed.notify_all()


class Job:
    """One call of a function in a child."""

    def __init__(self, readers: Readers, function: Callable, arguments: tuple, name: str):
        self.readers, self.name = readers, name
        self.call = function, arguments
        self.cancelled = False
        self.child: _Child | None = None

    def result(self) -> object:
        """Wait for the value.

        Raises what the function raises, if that is an exception of `DATA`; `OverLimit`; a UserError
        for every other exception and for a child that dies; CancelledError.
        """
        child = self.readers._take(self)
        goes_on = False
        try:
            child.load(getattr(self.call[0], "__module__", None) or "builtins")
            child.send(*self.call)
            if child.values.poll(min(self.readers.seconds, LONGEST_S)):
                # a value that is larger than all the child's memory is none that it has made
                answer = child.values.recv_bytes(max(1 << 16, self.readers.mib << 20))
                kind, value, goes_on = _Plain(io.BytesIO(answer)).load()
            else:
                kind, value = "time", None
        except (EOFError, OSError):
            raise self._ended(child) from None
        except Exception as error:  # of the unpickler
            raise UserError(f"{self.name} cannot be read: what comes of it is no data.") from error
        finally:  # after Ctrl-C as well
            self.readers._give_back(self, child, goes_on is True)
        if kind == "value":
            return value
        if kind == "time":
            raise self._over(f"{self.readers.seconds:g} s", "s")
        if kind == "memory":
            raise self._over(f"{self.readers.mib:,} MiB of memory", "mib")
        if kind == "error" and isinstance(value, Exception):
            raise value
        reason, _, trace = str(value).partition("\n")
        raise UserError(f"{self.name} cannot be read ({clip(reason, 200)}).") from Broken(trace)

    def cancel(self) -> None:
        """End the job, and the child that is at it at once; `result` raises CancelledError."""
        with self.readers._changed:
            self.cancelled = True
            if self.child:
                self.child.kill()
            self.readers._changed.notify_all()

    def _ended(self, child: _Child) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(GRACE_S)
        child.kill()
        if self.cancelled or self.readers._closed:
            return CancelledError()
        code = child.process.returncode
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return UserError(f"{self.name} cannot be read: it ends the process that reads it ({how}).")

    def _over(self, limit: str, unit: str) -> OverLimit:
        return OverLimit(
            f"{self.name} takes more than {limit} to read: such documents are read with a higher "
            f"--document-{unit}."
        )


class Broken(Exception):
    """An exception of the child that does not travel, as its traceback."""


class _Child:
    def __init__(self, mib: int):
        parent, alive = os.pipe()
        self.alive = Connection(alive, readable=False)  # closed with this object
        # isolated, so that no file of the working directory is taken for a module; in a group of
        # its own, so that Ctrl-C reaches the parent alone
        command = [sys.executable, "-I", "-c", MAIN, str(mib), str(parent), *sys.path]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
                pass_fds=(parent,),
            )
        except OSError as error:
            why = error.strerror
            raise UserError(
                f"No process can be begun in which documents are read: {why}."
            ) from None
        finally:
            os.close(parent)
        self.jobs = Connection(os.dup(self.process.stdin.fileno()), readable=False)
        self.values = Connection(os.dup(self.process.stdout.fileno()), writable=False)
        self.process.stdin.close()
        self.process.stdout.close()
        self.loaded: set[str] = set()

    def load(self, module: str) -> None:
        """Let the child begin and import a module, which is no document's time."""
        if module not in self.loaded:
            self.send(_load, (module,))
            self.values.recv_bytes()
            self.loaded.add(module)

    def send(self, function: Callable, arguments: tuple) -> None:
        """Send a call; bytes, which may be many, without a copy."""
        large: list[pickle.PickleBuffer] = []
        plain = [pickle.PickleBuffer(a) if isinstance(a, bytes) else a for a in arguments]
        call = pickle.dumps((function, plain), 5, buffer_callback=large.append)
        self.jobs.send_bytes(pickle.dumps((len(large), call)))
        for content in large:
            self.jobs.send_bytes(content.raw())

    def kill(self) -> None:
        """End the process and wait for its end, which is at once."""
        self.process.kill()
        self.process.wait()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        found = getattr(import_module(module), name, None) if module in DATA else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no data")
        return found


# ---------------------------------------------------------------- in the child


def work(mib: int, parent: int) -> None:
    """Do jobs from standard input, until it ends; parent: the pipe that it holds open."""
    _end_with(parent)
    jobs, values = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begun = _size()
    with contextlib.suppress(EOFError):
        while True:
            n, call = pickle.loads(jobs.recv_bytes())
            large = [jobs.recv_bytes() for _ in range(n)]
            with _limits(mib):
                # one that has grown is not used again, so that it does not grow on
                answer = _answer(call, large, lambda: _size() - begun < mib << 18)
            values.send_bytes(answer)


def _answer(call: bytes, large: list[bytes], goes_on: Callable[[], bool]) -> bytes:
    """Do a job; return what kind of answer there is, the answer, and whether another job may come,
    pickled."""
    try:
        function, arguments = pickle.loads(call, buffers=large)
        large.clear()
        value = function(*arguments)
        return pickle.dumps(("value", value, goes_on()), 5)
    except MemoryError:
        return TOO_LARGE
    except Exception as error:
        if type(error).__module__ in DATA:
            return pickle.dumps(("error", error, goes_on()), 5)
        reason = f"{type(error).__name__}: {first_line(error)}"
        return pickle.dumps(("broken", f"{reason}\n{traceback.format_exc()}", goes_on()), 5)


def _load(module: str) -> None:
    import_module(module)


def _size() -> int:
    """Return the bytes of address space that this process has, 0 where the system does not say."""
    if not LINUX:
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def _limits(mib: int):
    """Limit this process to so much memory beyond what it has, whatever limit it has already."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if LINUX:
        limits = (min(_size() + (mib << 20), 1 << 62), *before)
        least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (least, before[1]))
    yield
    if LINUX:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _end_with(parent: int) -> None:
    """End this process when the other end of a pipe is closed, also amid a call that takes long.

    Nothing is written into it: SIGIO, which ends a process, can only mean that it was closed. Of
    the pipe through which jobs come it may be a late word of the last write, which a system sends
    after the reader could have it.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent, fcntl.F_SETFL, fcntl.fcntl(parent, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([parent], [], [], 0)[0]:  # closed before that
        os._exit(0)
