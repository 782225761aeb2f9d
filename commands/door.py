"""The door of `serve`: who may ask, and an end for connections that send or take in nothing."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request

from config.errors import UserError, clip
from config.options import ServeConfig

API_KEY = "MEMAGENT_API_KEY"
"""Name of the environment variable with the key that clients must send."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STUCK_S = 20.0
"""Longest time for which a connection sends no whole head of a request, or takes in nothing."""
CONNECTIONS = 400
LAST_S = 1.0
"""What is left for sentences of farewell when the time of grace is over."""


class Server(uvicorn.Server):
    """uvicorn's server. The first signal lets what is running finish, the second ends it; `end` is
    called when the time of grace is over, `LAST_S` before the rest is cancelled."""

    def __init__(self, app: Callable, grace_s: float, end: Callable[[], object]):
        how = dict(http="h11", ws="none", access_log=False, server_header=False, log_level="error")
        how |= dict(limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=grace_s + LAST_S)
        super().__init__(uvicorn.Config(app, **how))
        logging.getLogger("asyncio").setLevel("CRITICAL")  # a malformed line is no event
        self._grace_s, self._end, self._since = grace_s, end, {}

    def handle_exit(self, sig, frame) -> None:
        self.force_exit, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        """Give up connections that are stuck."""
        now = time.monotonic()
        stuck = [
            each for each in self.server_state.connections
            if not each.cycle or each.cycle.response_complete or each.flow.write_paused
        ]  # fmt: skip
        self._since = {each: self._since.get(each, now) for each in stuck}
        for each, since in self._since.items():
            if now - since > STUCK_S:
                each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace_s, self._end)
        await super().shutdown(sockets)
        ending.cancel()


class Door:
    """Who may ask: whoever has the key; without one, programs of this machine, and web pages of
    known origins.

    Without a key any web page could ask, through a browser on this machine: by a form, which needs
    no consent, or under a name of its own that leads here. With a key none can, for it has none.
    """

    def __init__(self, config: ServeConfig, key: str):
        """UserError: an origin or a host is none, or all may ask without a key."""
        self.cors, self._key, public = config.cors, key, ("*", "null")
        self._hosts = *LOOPBACK, *(name.lower() for name in config.allow_host)
        if not key and config.host not in LOOPBACK:
            raise UserError(
                f"Listening on {config.host} lets other machines ask: give --api-key FILE with the "
                f"key that they must send, or set {API_KEY}."
            )
        for origin in config.cors:
            if origin in public and not key:
                raise UserError(
                    f"--cors {origin} lets every web page ask: name the origins, or give --api-key."
                )
            if origin not in public and not re.fullmatch(r"[\w.+-]+://[^\s/?#@]+", origin):
                raise UserError(f"--cors: {origin!r} is no origin such as http://localhost:3000.")
        for host in config.allow_host:
            if not re.fullmatch(r"[\w.-]+", host):
                raise UserError(f"--allow-host: {host!r} is no name such as host.docker.internal.")

    def check(self, request: Request) -> None:
        """Let in who may ask."""
        if not self._key:
            return self.check_visitor(request)
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(sent.encode(), self._key.encode()):
            raise HTTPException(401, "The API key is missing or wrong.")

    def check_visitor(self, request: Request) -> None:
        """Let in who may ask without a key; with a key, everybody."""
        if self._key:
            return
        host = request.headers.get("host", "")  # HTTP/1.0 has none, and no browser speaks it
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if host and name not in self._hosts:
            shown = clip(name, 100)
            flag = shown if re.fullmatch(r"[a-z0-9.-]+", shown) else "NAME"
            raise HTTPException(
                403,
                f"The host {shown!r} is not served: ask for localhost, or serve with "
                f"--allow-host {flag}, or --host and --api-key.",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin not in (*self.cors, f"http://{host}"):
            shown = clip(origin, 100)
            raise HTTPException(
                403, f"Web pages of {shown!r} may not ask: --cors ORIGIN lets them."
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise HTTPException(415, "Send the body with Content-Type: application/json.")


def read_key(config: ServeConfig) -> str:
    """Return the key that clients must send, "" if there is none."""
    key, where = os.environ.get(API_KEY, ""), API_KEY
    if config.api_key:
        where = f"--api-key {config.api_key}"
        try:
            key = Path(config.api_key).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise UserError(f"{where} cannot be read: {type(error).__name__}.") from None
    key = key.strip()
    if not re.fullmatch(r"[!-~]*", key) or (config.api_key and not key):
        raise UserError(f"{where} holds no API key, which is one word of ASCII.")
    return key
