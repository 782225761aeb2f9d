"""Servers of OpenAI's protocol: one client for the engine, the judge, the embedder.

Holds: `Client`, `Terms`, `Failed`, `Completion`, `address`. Leaves out: what is asked, and of which
server (engines/endpoint.py, engines/local.py, suites/hle.py, models/embedder.py).
Exercise it: `pytest tests/engines/test_endpoint.py`. Read next: suites/hle.py.

The `openai` library sends the requests, in one event loop in a daemon thread. What it would take
from the environment, and what it would not read of a server that bends the protocol, is ours.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ServerFailed, UserError, clean, clip
from config.terminal import say

BACKOFF_S = (0.5, 15.0)
"""Wait after a first failure, doubled with each further one, and the longest; less up to half."""
AVOID_S = 5.0
"""How long a replica that failed gets no request while there is another one."""
CONNECT_S = 10.0
"""Longest wait for a connection."""
ASKED_S = 600.0
"""How long a request waits for a server that says when to try again (Retry-After), at least."""
MOST_BYTES = 1 << 25
"""Longest reply, unpacked."""
API_KEY = "OPENAI_API_KEY"
"""Name of the environment variable with the API key; it may be unset."""
SHORT_OF_MEMORY = re.compile(r"\bmemory\b", re.IGNORECASE)
"""How Ollama, llama.cpp and CUDA say that a model does not fit the machine."""
NO_ROOM = re.compile(r"context.?(length|size|window)", re.IGNORECASE)
"""How vLLM, SGLang, llama.cpp and OpenAI say that prompt and response do not fit."""
NO_PLACE = re.compile(r"endpoint|not found|route", re.IGNORECASE)
"""How LM Studio and others say, with the status 200, that a URL leads nowhere."""
NEEDED = {"model", "messages", "prompt", "input", "tools"}
"""Fields without which a request would be another one."""
URL = r"https?://(?:[\w.-]+|\[[0-9a-f:.]+\])(?::\d{1,4}|:[1-5]\d{4}|:6[0-5]\d{3})?(?:/[^\s?#@]*)?"
HERE = r"https?://(localhost|127\.[\d.]+|\[::1\])[:/]"
STOP = "stop eos eos_token end_turn stop_sequence complete completed tool_calls".split()
LENGTH = "length max_tokens max_output_tokens model_length".split()


@dataclass(frozen=True, slots=True)
class Terms:
    """How servers are asked, whatever they are asked."""

    timeout_s: float = 600
    """longest silence of a server that has a request"""
    patience_s: float = 600
    """how long a request is tried again after its first failure"""
    memory_is_final: bool = False
    """a server that is short of memory is not asked again: someone waits who can change that"""
    keyed: bool = True
    """send the API key; never to a server that the user has not named"""
    tell: Callable[[str], None] = lambda words: None
    """called, in the thread of the requests, when one has failed once and will be tried again"""


class Failed(Exception):
    """A request that failed, and why."""

    retry, wait_s = False, 0.0  # another try may succeed, so many seconds later at the earliest
    absent = False  # it went to this machine, where no server listens
    full = False  # prompt and response do not fit the model's window
    astray = False  # the server may answer at another URL
    status, words, url = 0, "", ""  # of the reply; 0 = there is none

    def __init__(self, why: str, **facts):
        super().__init__(why)
        vars(self).update(facts)

    def refusal(self, name: str) -> UserError:
        """Return what to raise where a server is known by a name: what is too long for its window
        is no fault of the server's."""
        return (UserError if self.full else ServerFailed)(f"{name} cannot be used: {self}.")


# ---------------------------------------------------------------- what a reply says


class Completion(NamedTuple):
    """A completion, whichever of the two interfaces it is from."""

    text: str
    reason: str  # stop, length, or in the server's own word why it ended
    has_reasoning: bool  # the thoughts are separate and not in the text
    choice: dict
    usage: dict

    @classmethod
    def of(cls, reply: dict) -> Completion:
        """Read a reply of /completions or /chat/completions; Failed if there is no whole turn."""
        if not reply.get("choices"):
            raise Failed("the reply has no choices", retry=True)
        choice, usage = reply["choices"][0], reply.get("usage")
        message, reason = choice.get("message") or {}, choice.get("finish_reason")
        content = choice.get("text") or message.get("content") or message.get("refusal")
        told = [*_texts(content)]
        told += _texts(message.get("reasoning") or message.get("reasoning_content"), True)
        text = "".join(words for words, thought in told if not thought)
        word = str(reason).lower()
        if word in ("abort", "error") or (reason is None and not any(w for w, _ in told)):
            raise Failed(f"the turn was broken off for the reason {reason!r}", retry=True)
        reason = "stop" if word in STOP else "length" if word in LENGTH else str(reason)
        if not text and (reason not in ("stop", "length") or message.get("tool_calls")):
            raise Failed(f"the turn ended for the reason {word!r}, without an answer")
        ids = [*(choice.get("token_ids") or ()), *(choice.get("prompt_token_ids") or ())]
        if None in map(whole, ids):
            raise TypeError("these are no token ids")
        text = text.encode(errors="replace").decode()  # half a character has no tokens
        usage = usage if isinstance(usage, dict) else {}
        return cls(text, reason, any(words and thought for words, thought in told), choice, usage)


def whole(value: object, default: int | None = None) -> int | None:
    """Return a number that a server reports, or the default."""
    return value if type(value) is int and 0 <= value < 2**31 else default


def _texts(content: object, thought: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a content, a text or a list of parts; True: it is a thought."""
    if isinstance(content, str | int | float):
        yield str(content), thought
    for part in content if isinstance(content, list) else ():
        yield from _texts(part, thought)
    if isinstance(content, dict):
        thought = thought or bool(re.search("think|reason", str(content.get("type"))))
        for name in ("text", "value", "content", "refusal", "thinking", "reasoning", "summary"):
            yield from _texts(content.get(name), thought or name in ("thinking", "reasoning"))


def _words(text: str, secret: str = "") -> str:
    """Return a server's own words in one line, without the key, which some servers quote."""
    with suppress(ValueError, RecursionError):
        # what was sent is no word of the server
        reply = json.loads(text, object_hook=lambda d: {k: d[k] for k in d if k != "input"})
        param = ""
        for name in ("error", "message", "detail"):
            reply = reply[0] if isinstance(reply, list) and len(reply) == 1 else reply
            if isinstance(reply, dict):
                param, reply = reply.get("param") or param, reply.get(name) or reply
        text = reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False)
        text = text if not param or str(param) in text else f"{text} ({param})"
    if text.lstrip().startswith("<"):
        text = re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^<>]*>", " ", text[:20_000])
    text = text.replace(secret, "***") if secret else text
    return " ".join(clean(text).split()).rstrip(". ")


# ---------------------------------------------------------------- where a server is


def address(spec: str) -> tuple[str, str] | None:
    """Return (URL, model) of URL#MODEL; None: it is none, or has a password or a query.

    >>> address("http://127.0.0.1:8000/v1/#org/model"), address("http://u:p@host/v1#model")
    (('http://127.0.0.1:8000/v1', 'org/model'), None)
    """
    url, _, model = spec.rpartition("#")
    return (url.rstrip("/"), model) if model and re.fullmatch(URL, url) else None


def _bases(url: str) -> list[str]:
    """Return where a server may answer that is named like this, likeliest first.

    >>> _bases("http://a/v1/chat/completions/"), _bases("http://a")
    (['http://a/v1', 'http://a'], ['http://a', 'http://a/v1'])
    """
    ends = r"(?<=[^:/])/+(chat(/+completions)?|completions|models|embeddings|responses)?/*$"
    base = re.sub(ends, "", url)
    other = base.removesuffix("/v1") if base.endswith("/v1") else f"{base}/v1"
    return list(dict.fromkeys([base, other, re.match("https?://[^/]+", base)[0] + "/v1"]))


# ---------------------------------------------------------------- the client


class Client:
    """Servers that are asked alike: one, or the replicas of one model.

    A request goes to the replica with the fewest in flight; a failure that passes is tried again.
    urls: such as http://127.0.0.1:8000/v1. UserError: these are no URLs, or the key is none.
    """

    def __init__(self, urls: Sequence[str], terms: Terms = Terms()):
        if not urls or not terms.timeout_s > 0 or not terms.patience_s >= 0:
            raise UserError("An endpoint needs a URL, timeout_s > 0 and patience_s >= 0.")
        if not all(re.fullmatch(URL, url) for url in urls):
            example = "http://127.0.0.1:8000/v1"
            raise UserError(f"An endpoint's URL is like {example}, without a password or a query.")
        self.urls, self.terms = urls, terms
        self._secret = os.environ.get(API_KEY, "").strip() if terms.keyed else ""
        if not re.fullmatch(r"[!-~]*", self._secret):
            raise UserError(
                f"The environment variable {API_KEY} has characters that no API key has."
            )
        self._bases = [_bases(url) for url in urls]  # one alone, as soon as it has answered
        self._load, self._avoided_until = [0] * len(urls), [0.0] * len(urls)
        self._changes: dict[str, str] = {}  # field that was refused -> the one instead of it, or ""
        self._remarks: set[str] = set()
        self._openai, self._over = _library(terms.timeout_s, self._secret), asyncio.Event()
        started: futures.Future = futures.Future()
        life = self._live(started)
        threading.Thread(target=asyncio.run, args=(life,), name="servers", daemon=True).start()
        self._loop = started.result()

    async def _live(self, started: futures.Future) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._over.wait()

    def close(self) -> None:
        """Give up all requests and end the thread; again is harmless."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._over.set)

    def submit(self, coroutine: Coroutine) -> futures.Future:
        """Run a coroutine of this client; to cancel the future ends its connection."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine):
        """Return what a coroutine of this client returns."""
        future = self.submit(coroutine)
        try:
            while not future.done():  # an endless wait holds up Ctrl-C on some systems
                futures.wait([future], 0.2)
            return future.result()
        finally:
            future.cancel()

    def remark(self, words: str) -> None:
        """Say something once."""
        if words not in self._remarks:
            self._remarks.add(words)
            say(words, "yellow")

    async def ask(self, path: str, body: dict | None, read: Callable, patience_s=None, only=None):
        """Return `read` of the JSON with which a replica replies; only: this one.

        Failures are tried again until the patience is over; then Failed.
        """
        patience_s = self.terms.patience_s if patience_s is None else patience_s
        allowed = range(len(self.urls)) if only is None else [only]
        tries, began, last, until = 0, 0.0, -1, self._avoided_until
        while True:
            now = time.monotonic()
            last = min(allowed, key=lambda i: (until[i] > now, i == last, self._load[i]))
            self._load[last] += 1
            try:
                return await self._accepted(last, path, body, read)
            except Failed as failure:
                now, tries = time.monotonic(), tries + 1
                began = began or now
                until[last] = max(until[last], now + failure.retry * max(AVOID_S, failure.wait_s))
                other = any(until[i] <= now for i in allowed)
                wait_s = 0.0 if other else _wait_s(failure, tries)
                patience_s = max(patience_s, ASKED_S if failure.wait_s else 0)
                never = failure.absent and self._bases[last][1:]  # it has not answered before
                if never or not failure.retry or now - began + wait_s > patience_s:
                    after = f" after {tries} tries in {now - began:.0f} s" if tries > 1 else ""
                    failure.args = (f"{failure.url}{after}: {failure}",)
                    raise
                if tries == 1:
                    self.terms.tell(f"{failure.url}: {failure}; trying again.")
            finally:
                self._load[last] -= 1
            await asyncio.sleep(wait_s)

    async def _accepted(self, replica: int, path: str, body: dict | None, read: Callable):
        """Send a request, without the fields that the server has refused, until it is accepted."""
        while True:
            sent = dict(body or {})
            for name, other in self._changes.items():
                if name in sent:
                    value = sent.pop(name)
                    sent |= {other: value} if other else {}
            try:
                return await self._found(replica, path, body and sent, read)
            except Failed as failure:
                if failure.full or failure.status not in (400, 422):
                    raise
                text = failure.words
                named = {name: re.search(rf"(?<!\w){name}(?!\w)", text) for name in sent}
                names = sorted((at.start(), n) for n, at in named.items() if at and n not in NEEDED)
                if not names:
                    raise
                # of two that exclude each other, the one that changes nothing
                name = "top_p" if named.get("top_p") and sent["top_p"] == 1 else names[0][1]
                asked = re.search(r"(?<!\w)max_(?!tokens)\w*tokens(?!\w)", text)
                other = asked[0] if asked and name == "max_tokens" else ""
                self._changes.setdefault(name, other)
                how = f"with {other} instead of" if other else "without"
                self.remark(f"{failure.url}: {failure}; it is asked {how} {name}.")

    async def _found(self, replica: int, path: str, body: dict | None, read: Callable):
        """Send a request to where the server answers; Failed if that is at none of its bases."""
        failures: dict[str, Failed] = {}
        for base in self._bases[replica]:
            try:
                reply = await self._call(f"{base}{path}", body, read)
            except Failed as failure:
                if not failure.astray:
                    raise
                failures.setdefault(str(failure), failure)
                continue
            if base != self.urls[replica].rstrip("/"):
                self.remark(f"{self.urls[replica]} answers at {base}, which is asked.")
            self._bases[replica] = [base]
            return reply
        first, *others = failures.values()
        first.args = ("; ".join([str(first), *(f"{other.url}: {other}" for other in others)]),)
        raise first

    async def _call(self, url: str, body: dict | None, read: Callable):
        """Send one request and return `read` of the JSON of its reply; Failed for anything else."""
        import httpx
        import openai

        try:
            if body is None:
                reply = await self._openai.get(url, cast_to=httpx.Response)
            else:
                data = json.dumps(body).encode()  # in ASCII: half a character breaks UTF-8
                reply = await self._openai.post(url, content=data, cast_to=httpx.Response)
        except openai.APIStatusError as error:
            reply = error.response
        except openai.APIConnectionError as error:
            raise _lost(error, url) from None
        text, status, plain = reply.content.decode("utf-8-sig", "replace"), reply.status_code, {}
        facts: dict = {"retry": True, "url": url}
        try:
            plain = json.loads(text)
            status = _status(plain, status)
            if 200 <= status < 300:
                return read(plain)
        except Failed as failure:
            why, facts = str(failure), vars(failure) | {"url": url}
        except json.JSONDecodeError:
            why, facts["astray"] = "the reply is not JSON", True
            facts["retry"] = not text.lstrip().startswith("<")  # a page stays a page
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            why, facts["astray"] = "the reply is not of OpenAI's protocol", True
            facts["retry"] = False
        words = _words(text, self._secret)
        if not 200 <= status < 300:
            why = f"HTTP {status}" if status else "the reply is an error"
            final = self.terms.memory_is_final and SHORT_OF_MEMORY.search(text)
            again = status in (408, 409, 425, 429) or status >= 500
            wait_s = self._openai._parse_retry_after_header(reply.headers) or 0.0
            facts["retry"] = again and not final
            facts["wait_s"] = wait_s if 0 < wait_s < math.inf else 0.0
            facts["full"] = status in (400, 413, 422) and bool(NO_ROOM.search(text))
            facts["astray"] = 300 <= status < 400 or status in (404, 405)
            facts["astray"] |= not status and bool(NO_PLACE.search(words))
        elif isinstance(plain, dict) and plain.get("choices") and '"error"' not in text:
            raise Failed(why, **facts, status=200)
        why = f"{why}: {clip(words, 300)}".rstrip(": ")
        if status in (401, 403):
            key = f"the key is taken from the environment variable {API_KEY}"
            none = "no key is sent to a server that was found here: name it by --endpoint"
            why += f" ({key if self.terms.keyed else none})"
        if location := reply.headers.get("location"):
            why += f" (it redirects to {clean(location)[:200]})"
        raise Failed(why, **facts, status=status or 200, words=words)


def _wait_s(failure: Failed, tries: int) -> float:
    """Return the seconds to wait before the next try, at least what the server asked for."""
    backoff_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2.0 ** min(tries - 1, 60))
    return max(failure.wait_s, backoff_s * random.SystemRandom().uniform(0.5, 1))


def _status(plain: object, status: int) -> int:
    """Return a reply's status: of an error with the status 200 its own code, 0 if it has none."""
    if status != 200 or not isinstance(plain, dict) or plain.get("choices") or plain.get("data"):
        return status
    error = plain.get("error") or (plain if plain.get("object") == "error" else None)
    code = str(error.get("code") if isinstance(error, dict) else "")
    return (int(code) if re.fullmatch(r"[45]\d\d", code) else 0) if error else status


def _lost(error: Exception, url: str) -> Failed:
    """Return the failure of a request without a reply, in the words of the system."""
    chain = [error]
    while deeper := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(deeper)
    chain += getattr(chain[-1], "exceptions", ())  # one for each address that the name has
    if isinstance(chain[1], Failed):
        return Failed(str(chain[1]), url=url)
    cause = ([chain[1]] + [deeper for deeper in chain if isinstance(deeper, OSError)])[-1]
    # a certificate that is not trusted now will not be trusted later
    retry = not isinstance(cause, ssl.SSLCertVerificationError)
    why, absent = f"{type(cause).__name__}: {str(cause) or error}", False
    if isinstance(cause, ConnectionRefusedError) and re.match(HERE, url):
        why, absent = "no server is running there, start it first", True
    return Failed(" ".join(why.split()).rstrip(":. "), retry=retry, absent=absent, url=url)


def _library(timeout_s: float, secret: str):
    """Return the library's client, which heeds no environment, follows no redirect, tries once and
    unpacks no more than `MOST_BYTES`."""
    import certifi
    import httpx
    import openai

    class Transport(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            headers = {"Content-Type": "application/json", "User-Agent": "memagent"}
            headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
            plain = httpx.Request(
                *(request.method, request.url),
                headers=headers, content=request.read(), extensions=request.extensions,
            )  # fmt: skip
            reply, content = await super().handle_async_request(plain), bytearray()
            try:
                async for part in reply.aiter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise Failed(f"the reply is longer than {MOST_BYTES >> 20} MiB")
            finally:
                await reply.aclose()
            told = {"location", "retry-after", "retry-after-ms"} & {*reply.headers}
            headers = {name: reply.headers[name] for name in told}
            return httpx.Response(reply.status_code, headers=headers, content=bytes(content))

    context = ssl.create_default_context()  # the system's certificates, or those of SSL_CERT_FILE
    context.load_verify_locations(certifi.where())
    # a new connection for every request: no server can have closed it before
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = Transport(verify=context, trust_env=False, limits=limits)
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None)
    http = httpx.AsyncClient(transport=transport, trust_env=False)
    given = {"api_key": "none", "base_url": "http://none", "http_client": http}
    return openai.AsyncOpenAI(**given, timeout=timeout, max_retries=0)
