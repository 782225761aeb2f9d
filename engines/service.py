"""Readings that begin and end at any time, on one engine: what a server needs.

    any thread      cut, submit, cancel ──> inbox ─┐
    the service's   ..  take the inbox, step the engine, send turns to agents, tell who asked  ..

The engine, its tokenizer and the agents belong to the service's thread alone. No reading waits for
another one: each has a prompt in flight, and its next one follows as soon as that is answered.
"""

from __future__ import annotations

import copy
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from config.errors import AgentError, UserError
from data import Task, seed_of
from memagent import Agent, Finish, Turn
from rollout import Engine, Sampling, advance, given, start
from tokens.codec import Sections

GREEDY = Sampling(0.0)
WORD = 1 << 22
"""Most characters without a place to cut: the tokenizer takes them at once, and 60 bytes for
each."""
TOKEN = 16
"""Characters of a token on average that no text has: a document of more is not looked at."""
MOMENT_S = 0.02
"""Longest wait for a server while new readings may come."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A reading is over; without an error its last turn has answered.

    status: as HTTP has it; 413 what is read does not fit, 400 it is wrong, 503 the program is.
    """

    error: str = ""
    status: int = 200


class TooLong(UserError):
    """A document that is not read; the message says why."""


@dataclass(eq=False, slots=True)
class Job:
    """One task, read by one agent.

    tell: called with every `Turn`, and with `Ended` at last; it must not block. sections: of the
    whole document, by `Service.cut`. gone: nobody wants to know any more.
    """

    task: Task
    agent: Agent
    tell: Callable[[Turn | Ended], None]
    sampling: Sampling = GREEDY
    seed: int = 0
    key: int | None = None  # of its prompt in flight
    n_turns: int = 0
    steps: Generator | None = field(default=None, repr=False)
    sections: Sections | None = field(default=None, repr=False)
    gone: bool = False


class Service:
    """An engine for readings that come one by one.

    in_flight: most readings that are read side by side; others wait. most_tokens: of a document; a
    longer one ends before it is read. stopped: why nothing is taken any more, "" if all is well.
    """

    def __init__(self, engine: Engine, in_flight: int = 16, most_tokens: int = sys.maxsize):
        self.engine, self.in_flight, self.most_tokens = engine, in_flight, most_tokens
        self.stopped = ""
        self._known: set[Job] = set()  # submitted and not over; each of its methods is one step
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # (function, reading), None = close
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # key of a prompt in flight -> reading
        self._apart = engine.codec.apart()
        self._thread = threading.Thread(target=self._work, name="service", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def cut(self, reading: Job) -> None:
        """Cut a document, which may take long, before it is submitted: the service's thread then
        finds its sections among those known. TooLong: it is not read."""

        def watch(n: int, length: int) -> None:
            if n > self.most_tokens or length > WORD or reading.gone:
                raise TooLong(
                    f"The document has more than {self.most_tokens:,} tokens, or {WORD:,} "
                    "characters without a blank or line: no more are read."
                )

        watch(len(reading.task.document) // TOKEN, 0)
        codec = copy.copy(self._apart)
        codec.watch = watch
        reading.sections = reading.agent.on(codec, self.engine.window).sections(reading.task)
        watch(len(reading.sections.ids) + reading.sections.left_out, 0)

    def submit(self, reading: Job) -> None:
        """Begin a reading as soon as there is room; if there never will be, it hears so."""
        self._known.add(reading)
        if self.stopped:
            self._end(reading, self.stopped, 503)
        else:
            self._inbox.put((self._waiting.append, reading))

    def cancel(self, reading: Job) -> None:
        """Give up a reading, wherever it stands. It hears no more."""
        reading.gone = True
        self._known.discard(reading)
        self._inbox.put((self._drop, reading))

    def stop(self, why: str = "The server is shutting down.") -> None:
        """Take no more readings and tell those that are left that they are over."""
        self.stopped = self.stopped or why
        for reading in self._known.copy():
            self._end(reading, why, 503)

    def close(self) -> None:
        """End all, and wait for that."""
        self.stop()
        self._inbox.put(None)
        self._thread.join()

    def _end(self, reading: Job, error: str = "", status: int = 200) -> None:
        if reading in self._known:
            self._known.discard(reading)
            reading.tell(Ended(error, status))

    def _guard(self, function: Callable, reading: Job, *arguments: object) -> None:
        """Call a function on a reading; an exception ends this one alone."""
        try:
            function(reading, *arguments)
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, AgentError):
                return self._end(reading, str(error), 400)
            # who asks need not see the files of who serves
            traceback.print_exc(file=sys.stderr)
            why = type(error.__cause__ or error).__name__
            self._end(reading, f"The reading has failed: {why}.", 503)

    # ------------------------------------------------------------ in the service's thread

    def _work(self) -> None:
        try:
            with self.engine.awake():
                while self._take():
                    while self._waiting and len(self._running) < self.in_flight:
                        reading = self._waiting.popleft()
                        if reading in self._known:
                            self._guard(self._start, reading)
                    if self._running:
                        self._step()
        except BaseException as error:  # the thread's last frame
            traceback.print_exc(file=sys.stderr)
            self.stop(f"The engine has failed ({type(error).__name__}); start the server again.")

    def _take(self) -> bool:
        """Do what the inbox says; wait for it if there is nothing else to do. False: close."""
        idle = not self._running and not self._waiting
        while idle or not self._inbox.empty():
            if (found := self._inbox.get()) is None:
                return False
            function, reading = found
            function(reading)
            idle = False
        return True

    def _start(self, reading: Job) -> None:
        reading.agent = reading.agent.on(self.engine.codec, self.engine.window)
        reading.steps = start(reading.agent, reading.task)
        self._send(reading, None)

    def _send(self, reading: Job, turn: Turn | None) -> None:
        """Send the agent a turn and the engine its next prompt."""
        while True:
            prompt = advance(reading.agent, reading.steps, turn)
            if turn is not None:
                reading.tell(turn)  # with the agent's notes
            if prompt is None:
                return self._end(reading)
            if (turn := given(prompt, self.engine.codec)) is None:
                break
            reading.n_turns += 1
        seed = seed_of(reading.seed, reading.task.id, 0) + reading.n_turns
        reading.key = self.engine.add(prompt, reading.sampling.for_prompt(prompt), seed)
        self._running[reading.key] = reading

    def _step(self) -> None:
        # a server is not waited for, or nothing else would begin meanwhile
        engine = self.engine
        for key, turn in engine.poll(MOMENT_S) if engine.poll else engine.step():
            reading = self._running.pop(key)
            reading.key, reading.n_turns = None, reading.n_turns + 1
            if turn.finish in (Finish.FULL, Finish.ERROR):
                error = f"Turn {reading.n_turns} could not be made: {turn.error}."
                self._end(reading, error, 413 if turn.finish is Finish.FULL else 503)
            else:
                self._guard(self._send, reading, turn)

    def _drop(self, reading: Job) -> None:
        """Free the place of a reading that was given up."""
        if reading.key is not None and self._running.pop(reading.key, None):
            self.engine.drop(reading.key)
        reading.steps = None
