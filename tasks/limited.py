"""What strangers wrote is read in a child process that has so many seconds and so much memory.

    parent ── a call as JSON, bytes ──> child   an interpreter of its own, begun when it is needed,
           <── value or error as JSON ──        that reads one thing at a time, and many in turn

Hostile data may have taken the child over: what it says is JSON, and is taken for what the function
says that it returns, or refused.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

from config.errors import UserError, clip, first_line

MAIN = "import sys; sys.path[:] = sys.argv[4:]; import tasks.limited as a; a.work(*sys.argv[1:4])"
LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # of prctl(2)


class OverLimit(UserError):
    """What is read takes longer, or more memory, than it may."""


class Readers:
    """Child processes that read.

    seconds: that one job may take, by the clock. mib: of memory that it may take beyond what it is
    given; other systems than Linux do not hold a process to that, and the seconds alone remain.
    """

    def __init__(self, seconds: float, mib: int):
        self.seconds, self.mib = min(seconds, threading.TIMEOUT_MAX), mib
        self.idle: list[Child] = []
        self.lock = threading.Lock()

    def start(
        self, function: Callable, *arguments, content: bytes | None = None, name: str = ""
    ) -> Job:
        """Return the job of calling a function of a module with bytes and what JSON can say.

        Whoever asks for the job's `result` waits, in any thread. name: what errors call the bytes.
        """
        return Job(self, function, arguments, content, name)

    def child(self, module: str) -> Child:
        """Return a child that has nothing to do; one that the system took is passed over."""
        with self.lock:
            self.idle = [child for child in self.idle if child.process.poll() is None]
            if self.idle:
                return self.idle.pop()
        return Child(self.mib, module)

    def close(self) -> None:
        """End the children that are idle; `Job.cancel` ends one at work."""
        while self.idle:
            self.idle.pop().kill()


class Child:
    """A process that does jobs, begun: what that takes is not the data's fault."""

    def __init__(self, mib: int, module: str):
        self.wire, theirs = Pipe()
        # isolated, so that no file of the working directory is taken for a module; in a group of
        # its own, so that Ctrl-C reaches the parent alone
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", MAIN, str(theirs.fileno()), str(mib), module),
                    *sys.path,
                ],
                pass_fds=[theirs.fileno()], process_group=0, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self.wire.recv_bytes()
        except BaseException:  # Ctrl-C as well
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and wait for its end, which is at once."""
        self.process.kill()
        self.process.wait()


class Job:
    """One call of a function in a child."""

    def __init__(self, readers: Readers, function: Callable, arguments, content, name: str):
        self.readers, self.function, self.name = readers, function, name
        where = function.__module__, function.__qualname__
        call = {"function": where, "arguments": arguments, "name": name, "n": content is not None}
        self.parts = [json.dumps(call).encode(), content or b""]
        self.child: Child | None = None  # while it works
        self.cancelled = False

    def result(self) -> object:
        """Wait for the value.

        Raises the UserError that the function raises; `OverLimit`; a UserError for every other
        exception and for a child that dies; CancelledError.
        """
        pool, late = self.readers, threading.Event()
        child = self.child = pool.child(self.function.__module__)
        watch = threading.Timer(pool.seconds, lambda: (late.set(), child.process.kill()))
        watch.daemon = True
        kind, reuse, text = "death", False, b""
        try:
            if self.cancelled:
                raise CancelledError
            watch.start()
            for part in self.parts:
                child.wire.send_bytes(part)
            kind, reuse = json.loads(child.wire.recv_bytes(1000))
            # a value that is larger than all the child's memory is none that it has made
            text = child.wire.recv_bytes(max(1 << 16, pool.mib << 20))
        except (OSError, EOFError, ValueError, TypeError, RecursionError):
            kind, reuse = "death", False
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(1.0)
        finally:
            watch.cancel()
            with pool.lock:
                self.child = None
                if reuse is True and not late.is_set() and not self.cancelled:
                    pool.idle.append(child)
                else:
                    child.kill()
        if self.cancelled:
            raise CancelledError
        if late.is_set() or kind == "mib":
            limit = f"{pool.mib:,} MiB of memory" if kind == "mib" else f"{pool.seconds:g} s"
            raise OverLimit(
                f"{self.name} takes more than {limit} to read: such documents are read with a "
                f"higher --document-{'mib' if kind == 'mib' else 's'}."
            )
        if kind == "death":
            code = child.process.returncode
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            raise UserError(
                f"{self.name} cannot be read: it ends the process that reads it ({how})."
            )
        try:
            if kind == "value":
                return returns(self.function).validate_json(text)
            message = TypeAdapter(str).validate_json(text)
        except ValueError as error:
            raise UserError(f"{self.name} cannot be read: what comes of it is no data.") from error
        raise UserError(message)

    def cancel(self) -> None:
        """End the job, and the child that is at it at once; `result` raises CancelledError."""
        with self.readers.lock:
            self.cancelled = True
            if self.child:
                self.child.kill()


def returns(function: Callable) -> TypeAdapter:
    """Return what takes JSON for the type that a function returns, and makes it."""
    return TypeAdapter(get_type_hints(function)["return"])


# ---------------------------------------------------------------- in the child


def work(fd: str, mib: str, module: str) -> None:
    """Do jobs as they come, until the parent is gone."""
    if LINUX:  # this process ends with the one that began it, also amid a long call
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, wire, most = resource.getrlimit(resource.RLIMIT_AS), Connection(int(fd)), int(mib) << 20
    import_module(module)
    begun = size()  # what it imports is no growth
    wire.send_bytes(b"ready")
    with suppress(EOFError, ConnectionError):
        while True:
            call, content = json.loads(wire.recv_bytes()), wire.recv_bytes()
            module, name = call["function"]
            function = getattr(import_module(module), name)
            if LINUX:
                limits = [n for n in before if n != resource.RLIM_INFINITY]
                least = min(size() + most, 1 << 62, *limits)
                resource.setrlimit(resource.RLIMIT_AS, (least, before[1]))
            given = [content, *call["arguments"]] if call["n"] else call["arguments"]
            del content
            kind, text = answer(function, given, call["name"])
            resource.setrlimit(resource.RLIMIT_AS, before)
            del given
            # one that has grown is not used again, so that it does not grow on
            reuse = kind != "mib" and size() - begun <= most // 4
            wire.send_bytes(json.dumps([kind, reuse]).encode())
            wire.send_bytes(text)


def answer(function: Callable, arguments: list, name: str) -> tuple[str, bytes]:
    """Call a function; return the kind of its answer (value, error, mib), and it as JSON."""
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
