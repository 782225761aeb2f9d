"""A server of OpenAI's protocol that is asked one thing at a time: a judge, an embedder.

Holds: `Served`, `address`. Leaves out: what is asked (tasks/judge.py, models/embedder.py), engines
behind a server, which have many requests in flight (engines/endpoint.py).
Exercise it: `pytest tests/tasks/test_hle.py tests/models/test_embedder.py`. Read next:
tasks/judge.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from config.errors import Unreachable, UserError, first_line

if TYPE_CHECKING:
    import httpx

API_KEY = "OPENAI_API_KEY"
"""Name of the environment variable with the API key; it may be unset."""


def address(what: str) -> tuple[str, str] | None:
    """Return (URL, model) of URL#MODEL; None: it is none, or has a password or a query.

    >>> address("http://127.0.0.1:8000/v1/#org/model"), address("http://u:p@host/v1#model")
    (('http://127.0.0.1:8000/v1', 'org/model'), None)
    """
    url, _, model = what.rpartition("#")
    if not model or not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", url):
        return None
    return url.rstrip("/"), model


class _Lost(Exception):
    """A request that failed; another try may succeed."""


class Served:
    """A server. The key goes to it alone, and into no message.

    name: how messages call it; gives: what it is asked for, in messages. timeout_s: longest silence
    of a server that has a request; waits_s: before the tries that follow a first failure.
    """

    def __init__(self, url: str, name: str, gives: str, timeout_s: float, waits_s: Sequence[float]):
        import httpx

        self.url, self.name, self.gives, self.waits_s = url, name, gives, waits_s
        self._secret = os.environ.get(API_KEY, "").strip()
        if not re.fullmatch(r"[!-~]*", self._secret):
            raise UserError(
                f"The environment variable {API_KEY} holds characters that no API key has."
            )
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        # neither proxies nor the keys of a .netrc: the environment has no say
        self._client = httpx.Client(timeout=timeout_s, trust_env=False, headers=headers)

    def sent(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        """Send a request and return the reply. Unreachable: the last try has failed too."""
        for wait_s in (*self.waits_s, None):
            try:
                return self._sent_once(method, self.url + path, body)
            except _Lost as lost:
                if wait_s is None:
                    tries = len(self.waits_s) + 1
                    why = f"{self.name} gives no {self.gives} after {tries} tries: {lost}"
                    raise Unreachable(f"{why}; is the server running?") from None
            time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _sent_once(self, method: str, url: str, body: dict | None) -> httpx.Response:
        import httpx

        try:
            reply = self._client.request(method, url, json=body)
        except httpx.InvalidURL as error:
            raise UserError(f"{url} is no URL: {first_line(error)}.") from None
        except httpx.HTTPError as error:
            raise _Lost(f"{type(error).__name__}: {first_line(error)}") from None
        if reply.status_code in (408, 429) or reply.status_code >= 500:
            raise _Lost(f"HTTP {reply.status_code}")
        return reply

    def refusal(self, reply: httpx.Response) -> UserError:
        """Return what to raise for a reply that is a refusal."""
        said = " ".join(reply.text.split())  # some servers quote the key that they refuse
        said = (said.replace(self._secret, "***") if self._secret else said)[:300].rstrip(". ")
        key = f" (the key is taken from the environment variable {API_KEY})"
        key *= reply.status_code in (401, 403)
        return UserError(f"{self.name} answers HTTP {reply.status_code}: {said}{key}.")

    def close(self) -> None:
        """Close the connections; again is harmless."""
        self._client.close()
