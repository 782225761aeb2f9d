"""Several evaluations on one engine, in a fixed order.

Holds: `share_engine`. Leaves out: the evaluation (eval.py).
Exercise it: `python cli.py demo --short`. Read next: eval.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from memagent import Prompt, Turn
from rollout import Engine, Sampling

T = TypeVar("T")


class _Stopped(BaseException):
    """Ends a function because another one that shares the engine has failed."""


class _Seat(Engine):
    """One function's view of a shared engine.

    The function has a thread of its own, which runs only between `turn` and its next `step`:

        share_engine    turn()   waits                 engine.step()   turn()   waits
        the function    waits    add() add() step()    waits           waits    add() ..
    """

    def __init__(self, engine: Engine, work: Callable[[Engine], object]):
        self.engine, self.codec = engine, engine.codec
        self.window, self.counts = engine.window, engine.counts
        self.keys: set[int] = set()  # of its prompts in flight
        self.finished: list[tuple[int, Turn]] = []  # what its next `step` returns
        self.result: object = None
        self.error: BaseException | None = None
        self.over = self.stopped = False
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._body, args=(work,), daemon=True)
        self.thread.start()

    def _body(self, work: Callable[[Engine], object]) -> None:
        try:
            self._wait()
            self.result = work(self)
        except BaseException as error:  # the thread's last frame: raised again by `share_engine`
            self.error = error
        finally:
            self.over = True
            self.back.release()

    def _wait(self) -> None:
        self.go.acquire()
        if self.stopped:
            raise _Stopped

    def turn(self) -> None:
        """Let the function run until it waits for the engine or ends."""
        self.go.release()
        self.back.acquire()

    def add(self, prompt: Prompt, sampling: Sampling, seed: int) -> int:
        key = self.engine.add(prompt, sampling, seed)
        self.keys.add(key)
        return key

    def step(self) -> list[tuple[int, Turn]]:
        self.back.release()
        self._wait()
        finished, self.finished = self.finished, []
        return finished

    def awake(self, policy=None) -> AbstractContextManager:
        return nullcontext()

    def close(self) -> None: ...


def share_engine(engine: Engine, works: Sequence[Callable[[Engine], T]]) -> list[T]:
    """Run functions that each drive an engine, side by side on one; return their results in order.

    An evaluation of a few long documents leaves an engine half empty; beside another one it costs
    little more than nothing. The functions take turns in a fixed order, never two at a time, and
    the engine steps once all that are left wait for it: the same requests reach it in the same
    order in every run. The first exception ends the others and is raised.
    """
    with engine.awake():
        seats = [_Seat(engine, work) for work in works]
        try:
            while left := [seat for seat in seats if not seat.over]:
                for seat in left:
                    seat.turn()
                    if seat.error:
                        raise seat.error
                if any(not seat.over for seat in left):
                    for key, turn in engine.step():
                        seat = next(seat for seat in left if key in seat.keys)
                        seat.keys.remove(key)
                        seat.finished.append((key, turn))
        finally:
            for seat in seats:
                if not seat.over:
                    seat.stopped = True
                    seat.go.release()
                    seat.thread.join()
    return [seat.result for seat in seats]  # type: ignore[misc]
