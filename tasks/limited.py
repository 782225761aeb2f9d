"""What strangers wrote is read in a child process, which limits its own seconds and memory.

    parent ── a call as JSON, bytes ──> child   an interpreter of its own, begun when it is needed,
           <── value or error as JSON ──        that reads one thing at a time, and many in turn

What comes back may have been made by a process that hostile data has taken over: it is JSON, and
taken for what the function says that it returns, or refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

from config.errors import UserError, clip, first_line

MAIN = (
    "import sys; parent, *sys.path = sys.argv[1:]; import tasks.limited as a; a.work(int(parent))"
)
LONGEST_S = 1e6  # that a timer of the system can be set to
GRACE_S = 5.0  # for a process that has closed its end
LINUX = sys.platform == "linux"


class OverLimit(UserError):
    """What is read takes longer, or more memory, than it may."""


class Readers:
    """Child processes that read.

    seconds: that one job may take, by the clock, from the moment at which a child has it. mib: of
    memory that it may take beyond what it is given; other systems than Linux do not hold a process
    to that, and the seconds alone remain.
    """

    def __init__(self, seconds: float, mib: int):
        self.seconds, self.mib = seconds, mib
        self.lock, self.closed = threading.Lock(), False
        self.idle: list[Child] = []
        self.working: set[Child] = set()

    def start(
        self, function: Callable, *arguments, content: bytes | None = None, name: str = ""
    ) -> Job:
        """Return the job of calling a function of a module with bytes and what JSON can say.

        It does not block, and may be called from any thread: whoever asks for the job's `result`
        waits. name: what errors call the bytes.
        """
        n = None if content is None else len(content)
        call = {"function": (function.__module__, function.__qualname__), "arguments": arguments}
        limits = {"seconds": min(self.seconds, LONGEST_S), "mib": self.mib, "n": n}
        line = json.dumps(call | limits).encode() + b"\n"
        return Job(self, (line, content or b""), returned(function), name)

    def close(self) -> None:
        """End all children, those at work at once."""
        with self.lock:
            self.closed = True
            for child in (*self.idle, *self.working):
                child.kill()


class Job:
    """One call of a function in a child."""

    def __init__(self, readers: Readers, call: tuple[bytes, bytes], kind: TypeAdapter, name: str):
        self.readers, self.call, self.kind, self.name = readers, call, kind, name
        self.cancelled = False
        self.child: Child | None = None

    def result(self) -> object:
        """Wait for the value.

        Raises the UserError that the function raises; `OverLimit`; a UserError for every other
        exception and for a child that dies; CancelledError.
        """
        pool, last = self.readers, True
        with pool.lock:
            if pool.closed or self.cancelled:
                raise CancelledError
            child = pool.idle.pop() if pool.idle else Child()
            if child.process.poll() is not None:  # the system took it, for its memory
                child = Child()
            self.child = child
            pool.working.add(child)
        try:
            # a value that is larger than all the child's memory is none that it has made
            how, last, answer = child.ask(self.call, most=max(1 << 16, pool.mib << 20))
        finally:  # after Ctrl-C as well
            with pool.lock:
                self.child = None
                pool.working.discard(child)
                if last is False and not (pool.closed or self.cancelled):
                    pool.idle.append(child)
                else:
                    child.kill()
        if pool.closed or self.cancelled:
            raise CancelledError
        if how == "time":
            raise self.over(f"{pool.seconds:g} s", "s")
        if how == "memory":
            raise self.over(f"{pool.mib:,} MiB of memory", "mib")
        try:
            if how == "value":
                return self.kind.validate_json(answer)
            message = TypeAdapter(str).validate_json(answer)
        except ValueError as error:
            raise UserError(f"{self.name} cannot be read: what comes of it is no data.") from error
        raise UserError(message if how == "error" else f"{self.name} cannot be read{message}.")

    def over(self, limit: str, unit: str) -> OverLimit:
        return OverLimit(
            f"{self.name} takes more than {limit} to read: such documents are read with a higher "
            f"--document-{unit}."
        )

    def cancel(self) -> None:
        """End the job, and the child that is at it at once; `result` raises CancelledError."""
        with self.readers.lock:
            self.cancelled = True
            if self.child:
                self.child.kill()


class Child:
    """A process that does jobs."""

    def __init__(self):
        parent, alive = os.pipe()
        self.alive = os.fdopen(alive, "wb")  # closed with this object
        # isolated, so that no file of the working directory is taken for a module; in a group of
        # its own, so that Ctrl-C reaches the parent alone
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", MAIN, str(parent), *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            process_group=0, pass_fds=(parent,),
        )  # fmt: skip
        os.close(parent)

    def ask(self, call: tuple[bytes, bytes], most: int) -> tuple[str, bool, bytes]:
        """Send a call; return what kind of answer comes, whether it is the last, and the answer."""
        try:
            self.process.stdin.writelines(call)
            self.process.stdin.flush()
            head = json.loads(self.process.stdout.readline(1000))
            answer = self.process.stdout.read(min(head["n"], most))
            return head["kind"], head["last"], answer
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            self.kill()
        code = self.process.returncode
        if code == -signal.SIGALRM:
            return "time", True, b""
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        said = f": it ends the process that reads it ({how})"
        return "death", True, json.dumps(said).encode()

    def kill(self) -> None:
        """End the process and wait for its end, which is at once."""
        self.process.kill()
        self.process.wait()


def returned(function: Callable) -> TypeAdapter:
    """Return what takes JSON for the type that a function returns, and makes it."""
    return TypeAdapter(get_type_hints(function)["return"])


# ---------------------------------------------------------------- in the child


def work(parent: int) -> None:
    """Do jobs from standard input, until it ends; parent: the pipe that it holds open."""
    end_with(parent)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends a process, also amid a long call
    begun = 0
    while line := jobs.readline():
        call = json.loads(line)
        module, name = call["function"]
        function = getattr(import_module(module), name)
        begun = begun or size()  # what it imports is no growth
        given = [] if call["n"] is None else [jobs.read(call["n"])]
        before = resource.getrlimit(resource.RLIMIT_AS)
        if LINUX:
            limits = min(size() + (call["mib"] << 20), 1 << 62), *before
            least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, (least, before[1]))
        signal.setitimer(signal.ITIMER_REAL, call["seconds"])
        kind, answer = answered(function, [*given, *call["arguments"]])
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        given.clear()
        # one that has grown is not used again, so that it does not grow on
        last = kind == "memory" or size() - begun > call["mib"] << 18
        head = {"kind": kind, "last": last, "n": len(answer)}
        answers.write(json.dumps(head).encode() + b"\n" + answer)
        answers.flush()


def answered(function: Callable, arguments: list) -> tuple[str, bytes]:
    """Call a function; return what kind of answer there is, and the answer as JSON."""
    try:
        value = returned(function).dump_python(function(*arguments), mode="json")
        return "value", json.dumps(value).encode()
    except MemoryError:
        return "memory", b""
    except UserError as error:
        return "error", json.dumps(str(error)).encode()
    except Exception as error:
        reason = clip(f"{type(error).__name__}: {first_line(error)}", 200)
        return "broken", json.dumps(f" ({reason})").encode()


def size() -> int:
    """Return the bytes of address space that this process has, 0 where the system does not say."""
    if not LINUX:
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def end_with(parent: int) -> None:
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
