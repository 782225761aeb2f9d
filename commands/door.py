"""The door of `serve`: uvicorn with an end for connections that send or take in nothing, and for
bodies in tiny pieces; and which web pages may ask."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from config.errors import UserError, clip
from config.options import ServeConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")
STUCK_S = 20.0
"""Longest time for which a connection sends no whole head of a request, or takes in nothing."""
PIECES, PIECE = 256, 64
"""After so many pieces of a body each must have so many bytes on average: a chunk of one byte costs
as much time as one of 64 KiB."""
CONNECTIONS = 400
LAST_S = 1.0
"""What is left for sentences of farewell when the time of grace is over."""


class Connection(H11Protocol):
    """uvicorn's connection, which refuses a body in tiny pieces."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        following, pieces, size = self.conn.next_event, 0, 0

        def count():
            nonlocal pieces, size
            event = following()
            if isinstance(event, h11.Data):
                pieces, size = pieces + 1, size + len(event.data)
                if pieces > PIECES and size < pieces * PIECE:
                    raise h11.RemoteProtocolError("The body comes in too small pieces.")
            elif isinstance(event, h11.Request):
                pieces = size = 0
            return event

        self.conn.next_event = count


class Server(uvicorn.Server):
    """uvicorn's server. The first signal lets what is running finish, the second ends it; `end` is
    called when the time of grace is over, `LAST_S` before the rest is cancelled."""

    def __init__(self, app: Callable, grace_s: float, end: Callable[[], object]):
        how = dict(http=Connection, ws="none", access_log=False, server_header=False)
        how |= dict(log_level="error", timeout_graceful_shutdown=grace_s + LAST_S)
        super().__init__(uvicorn.Config(app, **how))
        logging.getLogger("asyncio").setLevel("CRITICAL")  # a malformed line is no event
        self._grace_s, self._end, self._since = grace_s, end, {}

    def handle_exit(self, sig, frame) -> None:
        self.force_exit, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        """Give up connections that are stuck, and where there are too many the oldest of these."""
        now, connections = time.monotonic(), self.server_state.connections
        stuck = [
            each for each in connections
            if not each.cycle or each.cycle.response_complete or each.flow.write_paused
        ]  # fmt: skip
        self._since = {each: self._since.get(each, now) for each in stuck}
        too_many = max(0, len(connections) - CONNECTIONS)
        for k, (each, since) in enumerate(sorted(self._since.items(), key=lambda item: item[1])):
            if k < too_many or now - since > STUCK_S:
                each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace_s, self._end)
        await super().shutdown(sockets)
        ending.cancel()


def check_names(config: ServeConfig, keyed: bool) -> None:
    """Raise a UserError for what is no origin or host, and for all of them without a key."""
    for origin in config.cors:
        if origin in ("*", "null") and not keyed:
            raise UserError(
                f"--cors {origin} lets every web page ask: name the origins, or give --api-key."
            )
        if origin not in ("*", "null") and not re.fullmatch(r"[\w.+-]+://[^\s/?#@]+", origin):
            raise UserError(f"--cors: {origin!r} is no origin such as http://localhost:3000.")
    for host in config.allow_host:
        if not re.fullmatch(r"[\w.-]+", host):
            raise UserError(f"--allow-host: {host!r} is no name such as host.docker.internal.")


def check_visitor(request: Request, config: ServeConfig) -> None:
    """Let in what programs of this machine send, and web pages of known origins.

    Without a key any web page could ask, through a browser on this machine: by a form, which needs
    no consent, or under a name of its own that leads here. With a key none can, for it has none.
    """
    host = request.headers.get("host", "")  # HTTP/1.0 has none, and no browser speaks it
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    if host and name not in (*LOOPBACK, *(each.lower() for each in config.allow_host)):
        shown = clip(name, 100)
        raise HTTPException(
            403, f"The host {shown!r} is not served: ask for localhost, or serve with --allow-host "
            f"{shown if re.fullmatch(r'[a-z0-9.-]+', shown) else 'NAME'}, or --host and --api-key."
        )  # fmt: skip
    origin = request.headers.get("origin")
    if origin is not None and origin not in (*config.cors, f"http://{host}"):
        shown = clip(origin, 100)
        raise HTTPException(403, f"Web pages of {shown!r} may not ask: --cors ORIGIN lets them.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise HTTPException(415, "Send the body with Content-Type: application/json.")
