"""What children of tests/tasks/test_limited.py are asked to do: they find it by the module's name,
and import nothing else."""

import os
import re
import signal
import struct
from contextlib import suppress


def pid() -> int:
    return os.getpid()


def endless() -> bool:
    """Hold the interpreter, as a parser may."""
    return bool(re.match("(a+)+$", "a" * 60 + "b"))


def deaf() -> bool:
    """Hold it where no signal comes through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    return endless()


def many(content: bytes, mib: int) -> int:
    return len(content) + len(bytearray(mib << 20))


def letters(mib: int) -> str:
    return "x" * (mib << 20)


KEPT = []


def hoard(mib: int) -> int:
    """Hold on to memory, as a leak does."""
    KEPT.append(bytearray(mib << 20))
    return os.getpid()


def die(how: str) -> None:
    os._exit(3) if how == "status 3" else signal.raise_signal(signal.Signals[how])


def wrong() -> list[int]:
    raise TypeError("no such thing")


def lie(*parts: str) -> str:
    """Answer as a process would that hostile data has taken over."""
    for fd in range(3, 1000):
        for part in parts:
            with suppress(OSError):
                os.write(fd, struct.pack("!i", len(part)) + part.encode())
    return ""


def boast(header: str) -> str:
    """Say that more is to come than it may be, as such a process would."""
    for fd in range(3, 1000):
        with suppress(OSError):
            os.write(fd, struct.pack("!i", len(header)) + header.encode())
            os.write(fd, struct.pack("!i", -1) + struct.pack("!Q", 1 << 40))
    return ""
