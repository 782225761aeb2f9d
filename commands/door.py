"""The door of `serve`: whose connections and requests come in, and what they may hold and for how
long.

Holds: `Connection` and `Server` (uvicorn's, with the bounds that it lacks), `Visitors` (which web
pages may ask), `InFlight`, `Memory`. Leaves out: what is answered (commands/serve.py), how long a
body may be read (tasks/limited.py).
Exercise it: `pytest tests/hostile/test_requests.py`. Read next: commands/serve.py.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import h11
import uvicorn
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from config.errors import UserError, clip
from tasks.chat_requests import Refused

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS_S = 10.0
"""Longest time from a connection, or from the first byte of a later request on it, to the end of
the request's headers."""
SEND_S = 60.0
"""Longest time for which a client takes in nothing of an answer."""
PIECES, PIECE = 256, 64
"""After so many pieces of a body each must have so many bytes on average: a chunk of one byte costs
as much time as one of 64 KiB."""
CONNECTIONS = 1000
LAST_S = 1.0
"""What is left for sentences of farewell when the time of grace is over."""
QUIET_S = 10.0
"""Seconds for which the event loop's complaints are not repeated."""


# ---------------------------------------------------------------- connections


def most_connections() -> int:
    """Return how many connections leave the process half of its file descriptors."""
    return min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Connection(H11Protocol):
    """uvicorn's connection with an end: for requests that do not come and answers not taken in.

    Where there are too many, the one that has been without a request for longest makes room.
    """

    _late = _full = None  # timers
    _pieces = _bytes = 0  # of a request's body

    def connection_made(self, transport):
        super().connection_made(transport)
        self._next, self.conn.next_event = self.conn.next_event, self._counted
        self._since = time.monotonic()
        self._watch()
        if len(self.connections) > most_connections():
            idle = [each for each in self.connections if not each.at_work and each is not self]
            gone = min(idle, key=lambda each: each._since, default=self)
            self.connections.discard(gone)
            gone.transport.abort()

    def connection_lost(self, exc):
        for timer in filter(None, (self._late, self._full)):
            timer.cancel()
        super().connection_lost(exc)

    @property
    def at_work(self) -> bool:
        """Whether there is a request whose headers have come and whose answer has not gone."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _counted(self):
        event = self._next()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._bytes = self._pieces + 1, self._bytes + len(event.data)
            if self._pieces > PIECES and self._bytes < self._pieces * PIECE:
                raise h11.RemoteProtocolError("The body comes in too small pieces.")
        return event

    def _watch(self) -> None:
        if self.at_work and self._late:
            self._late = self._late.cancel()
        elif not self.at_work and not self._late:
            self._since = time.monotonic()
            self._late = self.loop.call_later(HEADERS_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._full = self._full and self._full.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.at_work:  # whoever makes its answer has nobody to send it to
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # amid an answer
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server; `end` is called when the time of grace is over, `LAST_S` before the rest is
    cancelled."""

    def __init__(self, app, grace_s: float, end: Callable[[], object]):
        n = most_connections()
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="error",  # a client's malformed line is no event of the server
            access_log=False,
            server_header=False,
            backlog=max(1, min(128, n // 2)),  # asyncio accepts so many before it counts them
            timeout_graceful_shutdown=grace_s + LAST_S,
        )
        super().__init__(config)
        self._grace_s, self._end, self._told = grace_s, end, 0.0

    async def startup(self, sockets=None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await super().startup(sockets)

    async def shutdown(self, sockets=None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace_s, self._end)
        await super().shutdown(sockets)
        ending.cancel()

    def _complain(self, loop, context: dict) -> None:
        """Say in a line what has gone wrong in the event loop, such as that no file descriptor is
        left: a thousand times a second."""
        if time.monotonic() - self._told > QUIET_S:
            self._told, error = time.monotonic(), context.get("exception")
            why = f": {type(error).__name__}: {error}" if error else ""
            print(clip(f"serve: {context['message']}{why}", 300), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- requests


def check_origins(origins: Sequence[str], keyed: bool) -> None:
    """Raise a UserError for what is no origin, and for all of them where no key is asked for."""
    for origin in origins:
        if origin in ("*", "null"):
            if not keyed:
                raise UserError(
                    f"--cors {origin} lets every web page ask: name the origins, or give --api-key."
                )
        elif not re.fullmatch(r"[\w.+-]+://[^\s/?#@]+", origin):
            raise UserError(f"--cors: {origin!r} is no origin such as http://localhost:3000.")


@dataclass(frozen=True, slots=True)
class Visitors:
    """ASGI: lets in what programs of this machine send, and web pages of known origins.

    Without a key any web page could ask, through a browser on this machine: by a form, which needs
    no consent, or under a name of its own that leads here. With a key none can, for it has none.
    """

    app: Callable
    origins: Sequence[str]
    refused: Callable  # makes an answer of a Refused

    async def __call__(self, scope, receive, send) -> None:
        app = self.app
        try:
            if scope["type"] == "http":
                self._check(Headers(scope=scope), scope["method"])
        except Refused as error:
            app = self.refused(error, scope)
        await app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        host = headers.get("host", "")  # HTTP/1.0 has none, and no browser speaks it
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if host and name not in LOOPBACK:
            ways = "ask for localhost, or serve with --host and --api-key"
            wrong = f"The host {clip(host, 100)!r} is not served: {ways}."
            raise Refused(wrong, "Host", status=403)
        origin = headers.get("origin")
        if origin is not None and origin not in (*self.origins, f"http://{host}"):
            wrong = f"Web pages of {clip(origin, 100)!r} may not ask: --cors ORIGIN lets them."
            raise Refused(wrong, "Origin", status=403)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            wrong = "Send the body with Content-Type: application/json."
            raise Refused(wrong, "Content-Type", status=415)


class Memory:
    """Bytes that all requests together may hold."""

    def __init__(self, most: int):
        self.most, self.held = most, Counter[object]()

    def hold(self, request: object, n: int) -> None:
        """Let a request hold so many bytes from now on. Refused: that is more than is left."""
        more = n - self.held[request]
        if more > 0 and self.held.total() + more > self.most:
            full = f"The requests in flight hold {self.most >> 20:,} MiB: try again."
            raise Refused(full, code="memory_full", status=503)
        self.held[request] = n

    def free(self, request: object) -> None:
        del self.held[request]


@dataclass(frozen=True, slots=True)
class InFlight:
    """ASGI: gives a request a place from its headers to the end of its answer.

    What the request holds meanwhile is in its scope's `held`, and is given back when it ends,
    however it does.
    """

    app: Callable
    place: Callable

    async def __call__(self, scope, receive, send) -> None:
        with self.place(), ExitStack() as held:
            await self.app(scope | {"held": held}, receive, send)
