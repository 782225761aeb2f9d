"""Readings that begin and end at any time, on one engine: what a server needs.

    any thread      submit, cancel ──> inbox ─┐
    the service's   ..  take the inbox, step the engine, send turns to agents, tell who asked  ..
    two others      a long document ──> its sections ──> inbox

The engine, its tokenizer and the agents belong to the service's thread alone. No reading waits for
another one: each has a prompt in flight, and its next one follows as soon as that is answered; a
long document is cut beforehand, by threads that have a tokenizer of their own.
"""

from __future__ import annotations

import copy
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from config.errors import AgentError, UserError, show_traceback
from data import Task, seed_of
from memagent import Agent, Finish, Turn
from rollout import Engine, Sampling, advance, given, start
from tokens.codec import Sections

GREEDY = Sampling(0.0)
LONG = 1 << 16
"""Characters of a document from which on another thread cuts it."""
WORD = 1 << 22
"""Most characters without a place to cut: the tokenizer takes them at once, and 60 bytes for
each."""
TOKEN = 16
"""Characters of a token on average that no text has: a document of more is not looked at."""
MOMENT_S = 0.02
"""Longest wait for a server while new readings may come."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A reading has begun."""

    sections: Sections  # of the whole document, also where the agent reads it otherwise
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A reading is over; without an error its last turn has answered."""

    error: str = ""  # one sentence
    too_long: bool = False  # the document or a prompt does not fit
    ours: bool = False  # a mistake of the program, not of who asks


class Busy(Exception):
    """As many are read and wait as may; the message says so."""


class TooLong(Exception):
    """A document that is not read; the message says why."""


class Gone(Exception):
    """Nobody wants to know any more."""


class Stopped(Exception):
    """No reading begins any more; the message says why."""


@dataclass(eq=False, slots=True)
class Job:
    """One task, read by one agent.

    tell: called in the service's thread with `Begun`, with every `Turn`, and with `Ended` at last;
    it must not block.
    """

    task: Task
    agent: Agent
    tell: Callable[[Begun | Turn | Ended], None]
    sampling: Sampling = GREEDY
    seed: int = 0
    key: int | None = None  # of its prompt in flight
    n_turns: int = 0
    steps: Generator | None = field(default=None, repr=False)
    sections: Sections | None = field(default=None, repr=False)  # of a long document


class Service:
    """An engine for readings that come one by one.

    in_flight: most readings that are read side by side. waiting: most that wait for that; beyond,
    there is no `place`. most_tokens: of a document; a longer one ends before it is read.
    """

    def __init__(self, engine: Engine, in_flight: int = 16, waiting: int = 64, most_tokens=None):
        self.engine, self.in_flight, self.waiting = engine, in_flight, waiting
        self.most_tokens = most_tokens
        self._known: set[Job] = set()  # submitted and not over
        self._places = 0  # taken
        self._lock = threading.Lock()  # guards `_known`, `_places` and `_why`
        self._why = ""  # why nothing is taken any more
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # (function, reading), None = close
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # key of a prompt in flight -> reading
        self._cutters = ThreadPoolExecutor(2, "cutter")
        self._apart = engine.codec.apart()
        self._thread = threading.Thread(target=self._work, name="service", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    @property
    def load(self) -> tuple[int, int]:
        """Return how many are read and how many wait."""
        n = self._places
        return min(n, self.in_flight), max(0, n - self.in_flight)

    @property
    def stopped(self) -> str:
        """Return why nothing is taken any more, "" if all is well."""
        return self._why

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for a reading, from before it is known. Raise Busy or Stopped."""
        with self._lock:
            if self._why:
                raise Stopped(self._why)
            if self._places >= self.in_flight + self.waiting:
                raise Busy(f"{self._places:,} requests are read or wait: try again later.")
            self._places += 1
        try:
            yield
        finally:
            with self._lock:
                self._places -= 1

    def submit(self, reading: Job) -> None:
        """Begin a reading as soon as there is room. Raise Stopped if it never will."""
        with self._lock:
            if self._why:
                raise Stopped(self._why)
            self._known.add(reading)
        if len(reading.task.document) > LONG:
            self._cutters.submit(self._guarded, reading, self._cut)
        else:
            self._inbox.put((self._queue.append, reading))

    def cancel(self, reading: Job) -> None:
        """Give up a reading, wherever it stands. It hears no more."""
        with self._lock:
            known = reading in self._known
            self._known.discard(reading)
        if known:
            self._inbox.put((self._drop, reading))

    def stop(self) -> None:
        """Take no more readings and tell those that are left that they are over."""
        self._stop("The server is shutting down.")

    def close(self) -> None:
        """End all, and wait for that."""
        self.stop()
        self._cutters.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join()

    # ------------------------------------------------------------ in a cutter's

    def _cut(self, reading: Job) -> None:
        """Cut a long document; the service's thread then finds its sections among those known."""
        document, most = reading.task.document, self.most_tokens

        def watch(n: int, length: int) -> None:
            if reading not in self._known:
                raise Gone
            if most and n > most:
                raise TooLong(
                    f"The document has more than {most:,} tokens, which are read at most."
                )
            if length > WORD:
                raise TooLong(
                    f"The document has {length:,} characters without a blank or line: {WORD:,} are "
                    "read at most."
                )

        if most and len(document) > TOKEN * most:
            raise TooLong(
                f"The document has {len(document):,} characters, and {most:,} tokens are read at "
                "most."
            )
        codec = copy.copy(self._apart)
        codec.watch = watch
        reading.sections = reading.agent.on(codec, self.engine.window).sections(reading.task)
        self._inbox.put((self._queue.append, reading))

    # ------------------------------------------------------------ in the service's thread

    def _stop(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            left, self._known = [*self._known], set()
        for reading in left:
            reading.tell(Ended(why, ours=True))

    def _work(self) -> None:
        try:
            with self.engine.awake():
                while self._take():
                    self._begin()
                    if self._running:
                        self._step()
        except BaseException as error:  # the thread's last frame
            traceback.print_exc(file=sys.stderr)
            self._stop(f"The engine has failed ({type(error).__name__}); start the server again.")

    def _take(self) -> bool:
        """Do what the inbox says; wait for it if there is nothing else to do. False: close."""
        idle = not self._running and not self._queue
        while True:
            try:
                found = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if found is None:
                return False
            function, reading = found
            function(reading)
            idle = False

    def _begin(self) -> None:
        """Begin readings that wait, first come first served, as far as there is room."""
        while self._queue and len(self._running) < self.in_flight:
            reading = self._queue.popleft()
            if reading in self._known:
                self._guarded(reading, self._start)

    def _start(self, reading: Job) -> None:
        agent = reading.agent = reading.agent.on(self.engine.codec, self.engine.window)
        sections = agent.sections(reading.task)
        tokens = len(sections.ids) + sections.left_out
        if self.most_tokens and tokens > self.most_tokens:
            raise TooLong(
                f"The document has {tokens:,} tokens, and {self.most_tokens:,} are read at most."
            )
        reading.tell(Begun(sections, tokens))
        reading.steps = start(agent, reading.task)
        self._send(reading, None)

    def _send(self, reading: Job, turn: Turn | None) -> None:
        """Send the agent a turn and the engine its next prompt."""
        while True:
            prompt = advance(reading.agent, reading.steps, turn)
            if turn is not None:
                reading.tell(turn)  # with the agent's notes
            if prompt is None:
                return self._end(reading, Ended())
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
                self._end(reading, Ended(error, turn.finish is Finish.FULL, ours=True))
            else:
                self._guarded(reading, self._send, turn)

    def _guarded(self, reading: Job, function: Callable, *arguments: object) -> None:
        """Call a function on a reading; an exception ends this one alone."""
        try:
            function(reading, *arguments)
        except Gone:
            pass
        except TooLong as error:
            self._end(reading, Ended(str(error), too_long=True))
        except AgentError as error:  # who asks need not see the files of who serves
            show_traceback()
            print(f"serve: {error}", file=sys.stderr, flush=True)
            why = f"The reading has failed: {type(error.__cause__).__name__}."
            self._end(reading, Ended(why if error.__cause__ else str(error), ours=True))
        except UserError as error:
            self._end(reading, Ended(str(error)))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._end(reading, Ended(f"The reading has failed: {type(error).__name__}.", ours=True))

    def _end(self, reading: Job, ended: Ended) -> None:
        with self._lock:
            known = reading in self._known
            self._known.discard(reading)
        if known:
            reading.tell(ended)

    def _drop(self, reading: Job) -> None:
        """Free the place of a reading that was given up."""
        if reading.key is not None and self._running.pop(reading.key, None):
            self.engine.drop(reading.key)
        reading.steps = None
