"""What strangers wrote is read in a child process, which limits its own seconds and memory.

    parent ── a call as JSON, bytes ──> child   an interpreter of its own, begun when it is needed,
           <── value or error as JSON ──        that reads one thing at a time, and many in turn

The parent ends a child that outlives its seconds, as one may whose signals are blocked. What comes
back may have been made by a process that hostile data has taken over: it is JSON, and taken for
what the function says that it returns, or refused.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

from config.errors import UserError, clip, first_line

MAIN = "import sys; sys.path[:] = sys.argv[1:]; import tasks.limited as a; a.work()"
LONGEST_S = 1e6  # that a timer of the system can be set to
GRACE_S = 5.0  # in which a child ends itself
LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # of prctl(2)


class OverLimit(UserError):
    """What is read takes longer, or more memory, than it may."""


class Readers:
    """Child processes that read.

    seconds: that one job may take, by the clock, from the moment at which a child has it. mib: of
    memory that it may take beyond what it is given; other systems than Linux do not hold a process
    to that, and the seconds alone remain.
    """

    def __init__(self, seconds: float, mib: int):
        self.seconds, self.mib = min(seconds, LONGEST_S), mib
        self.lock, self.closed = threading.Lock(), False
        self.idle: list[Child] = []
        self.working: list[Job] = []

    def start(
        self, function: Callable, *arguments, content: bytes | None = None, name: str = ""
    ) -> Job:
        """Return the job of calling a function of a module with bytes and what JSON can say.

        It does not block, and may be called from any thread: whoever asks for the job's `result`
        waits. name: what errors call the bytes.
        """
        call = {
            "function": (function.__module__, function.__qualname__), "arguments": arguments,
            "seconds": self.seconds, "mib": self.mib, "name": name,
            "n": None if content is None else len(content),
        }  # fmt: skip
        return Job(
            self, name, [json.dumps(call).encode() + b"\n", content or b""], returns(function)
        )

    def close(self) -> None:
        """End all children, those at work at once."""
        with self.lock:
            self.closed, working = True, [*self.working]
            for child in self.idle:
                child.kill()
        for job in working:
            job.cancel()


@dataclass(eq=False)
class Job:
    """One call of a function in a child."""

    readers: Readers
    name: str
    call: list[bytes]
    kind: TypeAdapter
    child: Child | None = None
    cancelled: bool = False

    def result(self) -> object:
        """Wait for the value.

        Raises the UserError that the function raises; `OverLimit`; a UserError for every other
        exception and for a child that dies; CancelledError.
        """
        pool, answer = self.readers, Answer("error", True)
        with pool.lock:
            if pool.closed or self.cancelled:
                raise CancelledError
            while pool.idle and pool.idle[-1].process.poll() is not None:
                pool.idle.pop()  # the system took it, for its memory
            self.child = child = pool.idle.pop() if pool.idle else Child()
            pool.working.append(self)
        try:
            # a value that is larger than all the child's memory is none that it has made
            answer = child.ask(self.call, pool.seconds, max(1 << 16, pool.mib << 20))
        finally:  # after Ctrl-C as well
            with pool.lock:
                pool.working.remove(self)
                if answer.is_last or pool.closed or self.cancelled:
                    child.kill()
                else:
                    pool.idle.append(child)
        if pool.closed or self.cancelled:
            raise CancelledError
        if answer.kind in ("s", "mib"):
            limit = f"{pool.seconds:g} s" if answer.kind == "s" else f"{pool.mib:,} MiB of memory"
            raise OverLimit(
                f"{self.name} takes more than {limit} to read: such documents are read with a "
                f"higher --document-{answer.kind}."
            )
        if answer.kind == "death":
            raise UserError(
                f"{self.name} cannot be read: it ends the process that reads it "
                f"({answer.text.decode()})."
            )
        try:
            if answer.kind == "value":
                return self.kind.validate_json(answer.text)
            message = TypeAdapter(str).validate_json(answer.text)
        except ValueError as error:
            raise UserError(f"{self.name} cannot be read: what comes of it is no data.") from error
        raise UserError(message)

    def cancel(self) -> None:
        """End the job, and the child that is at it at once; `result` raises CancelledError."""
        with self.readers.lock:
            self.cancelled = True
            if self in self.readers.working:
                self.child.kill()


@dataclass
class Answer:
    """What comes of a call; kind: value, error, death, or the limit that it is over, s or mib."""

    kind: str
    is_last: bool  # of this child
    text: bytes = b""


class Child:
    """A process that does jobs."""

    def __init__(self):
        # isolated, so that no file of the working directory is taken for a module; in a group of
        # its own, so that Ctrl-C reaches the parent alone
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", MAIN, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            process_group=0,
        )  # fmt: skip

    def ask(self, call: list[bytes], seconds: float, most: int) -> Answer:
        """Send a call and wait for its answer, of at most so many bytes."""
        late = threading.Event()
        watch = threading.Timer(seconds + GRACE_S, lambda: (late.set(), self.process.kill()))
        watch.daemon = True
        try:
            self.process.stdin.writelines(call)
            self.process.stdin.flush()
            self.process.stdout.readline(1)  # it is about to begin
            watch.start()
            head = json.loads(self.process.stdout.readline(1000))
            text = self.process.stdout.read(min(head["n"], most))
            return Answer(head["kind"], head["is_last"] is not False, text)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            self.kill()
        finally:
            watch.cancel()
        code = self.process.returncode
        if late.is_set() or code == -signal.SIGALRM:
            return Answer("s", True)
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return Answer("death", True, how.encode())

    def kill(self) -> None:
        """End the process and wait for its end, which is at once."""
        self.process.kill()
        self.process.wait()


def returns(function: Callable) -> TypeAdapter:
    """Return what takes JSON for the type that a function returns, and makes it."""
    return TypeAdapter(get_type_hints(function)["return"])


# ---------------------------------------------------------------- in the child


def work() -> None:
    """Do jobs from standard input, until it ends."""
    if LINUX:  # this process ends with the one that began it, also amid a long call
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
        _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
        if LINUX:
            limits = min(size() + (call["mib"] << 20), 1 << 62), *before
            least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, (least, hard))
        answers.write(b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, call["seconds"])
        kind, text = answer(function, [*given, *call["arguments"]], call["name"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        given.clear()
        # one that has grown is not used again, so that it does not grow on
        is_last = kind == "mib" or size() - begun > call["mib"] << 18
        head = {"kind": kind, "is_last": is_last, "n": len(text)}
        answers.write(json.dumps(head).encode() + b"\n" + text)
        answers.flush()


def answer(function: Callable, arguments: list, name: str) -> tuple[str, bytes]:
    """Call a function; return the kind of its answer, and the answer as JSON."""
    try:
        value = returns(function).dump_python(function(*arguments), mode="json")
        return "value", json.dumps(value).encode()
    except MemoryError:
        return "mib", b""
    except UserError as error:
        message = str(error)
    except Exception as error:
        reason = clip(f"{type(error).__name__}: {first_line(error)}", 200)
        message = f"{name} cannot be read ({reason})."
    return "error", json.dumps(message).encode()


def size() -> int:
    """Return the bytes of address space that this process has, 0 where the system does not say."""
    if not LINUX:
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
