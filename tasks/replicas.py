"""How a request of the openai library reaches one of several servers that are asked alike.

A transport beneath the library, which waits and tries again: each try goes to the replica with the
fewest requests in flight, with no header but ours, and so much of the reply is read and no more.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress

import certifi
import httpx
import openai

from config.errors import clean, clip
from tasks.served import SHORT_OF_MEMORY, Terms

MOST_BYTES = 1 << 25
"""Longest reply, unpacked."""
AVOID_S = 5.0
"""How long a replica that failed gets no request while there is another one."""
ONLY = "x-only-replica"
"""Header of a request that is for one replica; it is not sent."""
HERE = r"https?://(localhost|127\.[\d.]+|\[::1\])[:/]"


class Replicas(httpx.AsyncHTTPTransport):
    """Servers that are asked alike; secret: the API key, "" = none is sent."""

    def __init__(self, urls: Sequence[str], terms: Terms, secret: str):
        context = ssl.create_default_context()  # the system's certificates, or SSL_CERT_FILE's
        context.load_verify_locations(certifi.where())
        # a new connection for every request: no server can have closed it before
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        super().__init__(verify=context, trust_env=False, limits=limits)
        self.urls, self.terms, self.secret = urls, terms, secret
        self.in_flight, self.avoided_until = [0] * len(urls), [0.0] * len(urls)
        self.reached: set[int] = set()  # those that have answered

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. APIConnectionError: no other try mends what went wrong."""
        now, numbers = time.monotonic(), range(len(self.urls))
        least = min(numbers, key=lambda k: (self.avoided_until[k] > now, self.in_flight[k]))
        k = int(request.headers.get(ONLY, least))
        request.url = httpx.URL(self.urls[k].rstrip("/") + request.url.path)  # as errors name it
        self.in_flight[k] += 1
        try:
            reply = await self._reply(request)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            if "CERTIFICATE" in why:  # what is not trusted now will not be trusted later
                raise openai.APIConnectionError(message=why, request=request) from None
            here = k not in self.reached and re.match(HERE, str(request.url))
            if here and isinstance(error, httpx.ConnectError):
                absent = "no server is running there, start it first"
                raise openai.APIConnectionError(message=absent, request=request) from None
            self._avoid(k, request, why)
            raise
        finally:
            self.in_flight[k] -= 1
        self.reached.add(k)
        if reply.status_code in (408, 409, 429) or reply.status_code >= 500:
            if self.terms.memory_is_final and SHORT_OF_MEMORY.search(reply.text):
                reply.headers["x-should-retry"] = "false"
            else:
                self._avoid(k, request, f"HTTP {reply.status_code}: {reply.text}")
        return reply

    def _avoid(self, k: int, request: httpx.Request, why: str) -> None:
        self.avoided_until[k] = time.monotonic() + AVOID_S
        if request.headers["x-stainless-retry-count"] == "0":
            self.terms.tell(f"{request.url}: {why}; trying again.")

    async def _reply(self, request: httpx.Request) -> httpx.Response:
        """Send a request without what the library takes from the environment; read the reply. Of a
        failure its text is the server's words."""
        headers = {"Content-Type": "application/json", "User-Agent": "memagent"}
        headers |= {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        sent = httpx.Request(request.method, request.url, headers=headers, content=request.read())
        sent.extensions = request.extensions  # with the limits of time
        reply, content = await super().handle_async_request(sent), bytearray()
        try:
            async for part in reply.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    long = f"the reply is longer than {MOST_BYTES >> 20} MiB"
                    raise openai.APIConnectionError(message=long, request=request)
        finally:
            await reply.aclose()
        if not reply.is_success:
            content = self.words_of(content).encode()
        told = {"retry-after", "retry-after-ms"} & reply.headers.keys()
        headers = {name: reply.headers[name] for name in told}
        return httpx.Response(reply.status_code, headers=headers, content=bytes(content))

    def words_of(self, content: bytes) -> str:
        """Return a server's own words in one line, without the key, which some servers quote."""
        text = content.decode("utf-8-sig", "replace")
        with suppress(ValueError, RecursionError):
            said = json.loads(text)
            for name in ("error", "message", "detail"):
                said = said.get(name) or said if isinstance(said, dict) else said
            text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        text = text.replace(self.secret, "***") if self.secret else text
        return clip(" ".join(clean(text).split()).rstrip(". "), 300)
