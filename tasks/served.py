"""Servers of OpenAI's protocol: one client for the engine, the judge, the embedder.

The openai library sends the requests and tries them again, in one event loop in a daemon thread,
over the transport of tasks/replicas.py. Both are loaded where a server is asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ServerFailed, UserError
from config.terminal import say

API_KEY = "OPENAI_API_KEY"
"""Name of the environment variable with the API key; it may be unset."""
CONNECT_S = 10.0
"""Longest wait for a connection."""
SHORT_OF_MEMORY = re.compile(r"\bmemory\b", re.IGNORECASE)
"""How Ollama, llama.cpp and CUDA say that a model does not fit the machine."""
NO_ROOM = re.compile(r"context.?(length|size|window)|max_model_len", re.IGNORECASE)
"""How vLLM, SGLang, llama.cpp and OpenAI say that prompt and response do not fit."""
NEEDED = {"model", "messages", "prompt", "input", "tools"}
"""Fields without which a request would be another one."""
URL = r"https?://(?:[\w.-]+|\[[0-9a-f:.]+\])(?::\d{1,4}|:[1-5]\d{4}|:6[0-5]\d{3})?(?:/[^\s?#@]*)?"
STOP = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
LENGTH = ("length", "max_tokens", "max_output_tokens", "model_length")


@dataclass(frozen=True, slots=True)
class Terms:
    """How servers are asked, whatever they are asked."""

    timeout_s: float = 600
    """longest silence of a server that has a request"""
    patience_s: float = 600
    """about how long a request that fails at once is tried again"""
    memory_is_final: bool = False
    """a server that is short of memory is not asked again: someone waits who can change that"""
    keyed: bool = True
    """send the API key; never to a server that the user has not named"""
    tell: Callable[[str], None] = lambda words: None
    """called, in the thread of the requests, when one has failed once and will be tried again"""


class Failed(Exception):
    """A request that failed, and why.

    status: of the reply, 0 = there is none. retry: it was tried again, and may succeed later. full:
    prompt and response do not fit the model's window.
    """

    def __init__(self, why: str, status: int = 0, retry: bool = False, full: bool = False):
        super().__init__(why)
        self.status, self.retry, self.full = status, retry, full

    def refusal(self, name: str) -> UserError:
        """Return what to raise where a server is known by a name: what is too long for its window
        is no fault of the server's."""
        return (UserError if self.full else ServerFailed)(f"{name} cannot be used: {self}.")


class Completion(NamedTuple):
    """A completion, whichever of the two interfaces it is from."""

    text: str
    reason: str  # stop or length
    has_reasoning: bool  # the thoughts are separate and not in the text
    choice: dict
    usage: dict

    @classmethod
    def of(cls, reply: dict) -> Completion:
        """Read a reply of /completions or /chat/completions; Failed if there is no whole turn."""
        choice, usage = reply["choices"][0], reply.get("usage")
        message, reason = choice.get("message") or {}, str(choice.get("finish_reason")).lower()
        content = choice.get("text") or message.get("content") or message.get("refusal") or ""
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        thoughts = message.get("reasoning") or message.get("reasoning_content") or parts[1:]
        if reason in ("abort", "error") or not (text or reason in (*STOP, *LENGTH)):
            raise Failed(f"the turn ended for the reason {reason}, without an answer")
        ids = [*(choice.get("token_ids") or ()), *(choice.get("prompt_token_ids") or ())]
        if None in map(whole, ids):
            raise TypeError("these are no token ids")
        text = text.encode(errors="replace").decode()  # half a character has no tokens
        finish = "length" if reason in LENGTH else "stop"
        return cls(text, finish, bool(thoughts), choice, usage if isinstance(usage, dict) else {})


def whole(value: object, default: int | None = None) -> int | None:
    """Return a number that a server reports, or the default."""
    return value if type(value) is int and 0 <= value < 2**31 else default


def address(spec: str) -> tuple[str, str] | None:
    """Return (URL, model) of URL#MODEL; None: it is none, or has a password or a query.

    >>> address("http://127.0.0.1:8000/v1/#org/model"), address("http://u:p@host/v1#model")
    (('http://127.0.0.1:8000/v1', 'org/model'), None)
    """
    url, _, model = spec.rpartition("#")
    return (url.rstrip("/"), model) if model and re.fullmatch(URL, url) else None


def count_retries(patience_s: float) -> int:
    """Return how often the library tries again: it waits half a second, doubled up to eight."""
    return int(min(4, patience_s) + patience_s / 8)


class Client:
    """Servers that are asked alike: one, or the replicas of one model.

    urls: such as http://127.0.0.1:8000/v1. UserError: these are no URLs, or the key is none.
    """

    def __init__(self, urls: Sequence[str], terms: Terms = Terms()):
        import httpx
        import openai

        from tasks.replicas import Replicas

        if not urls or not all(re.fullmatch(URL, url) for url in urls):
            example = "http://127.0.0.1:8000/v1"
            raise UserError(f"An endpoint's URL is like {example}, without a password or a query.")
        secret = os.environ.get(API_KEY, "").strip() if terms.keyed else ""
        if not re.fullmatch(r"[!-~]*", secret):  # httpx would quote it
            raise UserError(f"{API_KEY} in the environment has characters that no API key has.")
        self.urls, self.terms = urls, terms
        self._refused: set[str] = set()  # fields
        self._remarks: set[str] = set()
        self._beneath = Replicas(urls, terms, secret)
        self._openai = openai.AsyncOpenAI(
            api_key="none",
            base_url="http://replicas",
            http_client=httpx.AsyncClient(transport=self._beneath, trust_env=False),
            timeout=httpx.Timeout(terms.timeout_s, connect=min(CONNECT_S, terms.timeout_s)),
        )
        self._over, started = asyncio.Event(), Future()
        live = self._live(started)
        threading.Thread(target=asyncio.run, args=(live,), name="servers", daemon=True).start()
        self._loop = started.result()

    async def _live(self, started: Future) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._over.wait()

    def close(self) -> None:
        """Give up all requests and end the thread; again is harmless."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._over.set)

    def submit(self, coroutine: Coroutine) -> Future:
        """Run a coroutine of this client; to cancel the future ends its connection."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine):
        """Return what a coroutine of this client returns."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def remark(self, words: str) -> None:
        """Say something once."""
        if words not in self._remarks:
            self._remarks.add(words)
            say(words, "yellow")

    async def ask(self, path: str, body: dict | None, read: Callable, patience_s=None, only=None):
        """Return `read` of the JSON with which a replica replies; only: the one of this number.

        Failed: the library has given up, or `read` cannot read the reply.
        """
        import httpx
        import openai

        from tasks.replicas import ONLY

        patience_s = self.terms.patience_s if patience_s is None else patience_s
        longest_s, began = self.terms.timeout_s + patience_s, time.monotonic()
        options = {"max_retries": count_retries(patience_s)}
        options |= {} if only is None else {"headers": {ONLY: str(only)}}
        how, sent = {"cast_to": httpx.Response, "options": options}, self._accepted(body or {})
        try:
            async with asyncio.timeout(longest_s):
                if body is None:
                    reply = await self._openai.get(path, **how)
                else:  # in ASCII: half a character breaks UTF-8
                    content = json.dumps(sent).encode()
                    reply = await self._openai.post(path, content=content, **how)
            return read(json.loads(reply.content))
        except (openai.APIStatusError, openai.APIConnectionError) as error:
            failure = self._failure(error, time.monotonic() - began)
            if failure.status not in (400, 422) or failure.full or not self._learn(sent, failure):
                raise failure from None
        except TimeoutError:
            raise Failed(f"{path}: no answer within {longest_s:g} s", retry=True) from None
        except Failed as failure:
            raise Failed(f"{reply.request.url}: {failure}", reply.status_code) from None
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            words = self._beneath.words_of(reply.content)
            why = f"{reply.request.url}: the reply is not of OpenAI's protocol: {words}"
            raise Failed(why, reply.status_code) from None
        return await self.ask(path, body, read, patience_s, only)  # without what was refused

    def _failure(self, error, seconds: float) -> Failed:
        """Return what the library's last error says, in the words of the server or the system."""
        import openai

        tries = 1 + int(error.request.headers["x-stainless-retry-count"])
        why = str(error.request.url) + (f" after {tries} tries in {seconds:.0f} s" * (tries > 1))
        if not isinstance(error, openai.APIStatusError):
            cause = error.__cause__
            return Failed(f"{why}: {error} {cause or ''}".rstrip(". "), retry=cause is not None)
        status, words = error.status_code, error.response.text
        why = f"{why}: HTTP {status}: {words}".rstrip(": ")
        if status in (401, 403):
            key = f"the key is taken from the environment variable {API_KEY}"
            none = "no key is sent to a server that was found here: name it by --endpoint"
            why += f" ({key if self.terms.keyed else none})"
        if status in (404, 405) and not self.urls[0].rstrip("/").endswith("/v1"):
            why += " (should the address end in /v1?)"
        full = status in (400, 413, 422) and bool(NO_ROOM.search(words))
        return Failed(why, status, status in (408, 409, 429) or status >= 500, full)

    def _learn(self, sent: dict, failure: Failed) -> bool:
        """Take the field that a refusal names first for refused; False if it names none."""
        words = str(failure).partition(": HTTP ")[2]
        found = {name: re.search(rf"\b{name}\b", words) for name in sent.keys() - NEEDED}
        places = {name: at.start() for name, at in found.items() if at}
        if {"temperature", "top_p"} <= places.keys():  # where they exclude each other
            del places["temperature"]
        if places:
            name = min(places, key=places.get)
            self._refused.add(name)
            self.remark(f"{failure}; it is asked without {name}.")
        return bool(places)

    def _accepted(self, body: dict) -> dict:
        """Return a body without the fields that the servers have refused."""
        if "max_tokens" in self._refused & body.keys():
            body = body | {"max_completion_tokens": body["max_tokens"]}
        return {name: body[name] for name in body if name not in self._refused}
