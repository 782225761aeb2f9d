"""Any OpenAI-compatible server as an engine: `vllm serve` and others, one or several replicas.

Holds: `EndpointEngine`, for evaluation and `ask`; `Terms`. Leaves out: training (a server has
weights of its own), streaming, proxies (none is used).
Exercise it: `pytest tests/engines/test_endpoint.py`. Read next: eval.py.

Threads wait for the answers, one request and one connection each:

    caller    add -> _waiting ─┐                            ┌─> _finished -> step -> turns
    threads                    └─> _work: _ask -> _call ────┘

They carry nothing but JSON. The tokenizer and the engine's state belong to the caller's thread, the
one that calls `add` and `step`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from config.errors import UserError
from memagent import Finish, Prompt, Turn
from rollout import Engine, Sampling, refusal
from tokens.codec import Codec, Text

BACKOFF_S = (0.5, 15.0)
"""Wait after a request's first failure, doubled with each further one, and the longest wait.

Jitter takes off up to half of it."""
AVOID_S = 5.0
"""How long a replica that failed gets no request while there is another one."""
CONNECT_S = 10.0
"""Longest wait for a connection."""
ASKED_S = 600.0
"""How long a request waits for a server that says when to try again (Retry-After), at least."""
READY_S = 30.0
"""How long a server that does not answer yet is tried again when an engine is opened."""
API_KEY = "OPENAI_API_KEY"
"""Name of the environment variable with the API key; it may be unset."""
RETRIED = {408, 409, 425, 429}
"""HTTP statuses that are tried again, as are all from 500 on."""
SHORT_OF_MEMORY = re.compile(r"\bmemory\b", re.IGNORECASE)
"""How Ollama, llama.cpp and CUDA say that a model does not fit the machine."""
NO_ROOM = re.compile(r"context.?(length|size|window)", re.IGNORECASE)
"""How vLLM, SGLang, llama.cpp and OpenAI say that prompt and response do not fit."""


class _Failed(Exception):
    """A request that failed, and why.

    retry: another try may succeed, `wait_s` seconds later at the earliest. full: prompt and
    response do not fit the model's window.
    """

    def __init__(self, why: str, retry: bool = False, wait_s: float = 0.0, full: bool = False):
        super().__init__(why)
        self.retry, self.wait_s, self.full = retry, wait_s, full


@dataclass(frozen=True, slots=True)
class _Answer:
    """A completion, whichever of the two interfaces it is from. None: the server does not say."""

    text: str
    ids: list[int] | None
    prompt_ids: list[int] | None
    finish: Finish
    has_reasoning: bool  # the thoughts are separate and not in the text
    prompt_tokens: int | None
    cached_tokens: int  # of the prompt's
    completion_tokens: int | None


def _answer(reply: dict) -> _Answer:
    """Read the reply of /completions or /chat/completions; _Failed if the turn was not finished."""
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    message, reason = choice.get("message") or {}, choice.get("finish_reason")
    if reason in (None, "abort", "error"):  # of turns in flight when a server goes down
        raise _Failed(f"the turn was broken off for the reason {reason!r}", retry=True)
    if reason not in ("stop", "length"):
        raise _Failed(f"the turn ended for the reason {reason!r}")
    details = usage.get("prompt_tokens_details") or {}
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return _Answer(
        text=str(choice.get("text") or message.get("content") or ""),
        ids=choice.get("token_ids"),
        prompt_ids=choice.get("prompt_token_ids"),
        finish=Finish(reason),
        has_reasoning=bool(reasoning),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=usage.get("completion_tokens"),
    )


def _error_text(raw: bytes) -> str:
    """Return a server's own words about an error, in one line of at most 300 characters."""
    text = raw.decode(errors="replace")
    with suppress(ValueError):
        reply = json.loads(text)
        for name in ("error", "message", "detail"):
            reply = (reply.get(name) or reply) if isinstance(reply, dict) else reply
        text = reply if isinstance(reply, str) else json.dumps(reply)
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= 300 else text[:299] + "…"


def _check_url(url: str) -> None:
    """Raise a UserError unless this is an http(s) URL without a password or a query."""
    host, port, path = r"(?:[\w.-]+|\[[0-9a-f:.]+\])", r"(?::(\d{1,5}))?", r"(?:/[\w./~-]*)?"
    match = re.fullmatch(f"https?://{host}{port}{path}", url, re.ASCII)
    if not match or int(match[1] or 0) > 65535:
        raise UserError(
            "The URL of an endpoint is like http://127.0.0.1:8000/v1, "
            "without a password or a query."
        )


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
    """called, in the thread of a request, when it has failed once and will be tried again"""


class EndpointEngine(Engine):
    """An engine that sends its prompts to servers which speak OpenAI's protocol.

    A failure becomes a turn. Log-probs are empty: nothing is trained from it.

    urls: the base URL, or those of several replicas, such as http://127.0.0.1:8000/v1; a request
    goes to the replica with the fewest in flight. model: "" = the only one that is served. codec:
    the model's own, or `Characters` if that is not known; then `chat` must be True, and the server
    refuses prompts that are too long, since their length here is an estimate. window: most tokens
    of a prompt and its response, never more than the servers report. concurrency: most requests in
    flight, at all replicas together. chat: False sends token ids to /completions and takes the ids
    that vLLM returns; True sends text to /chat/completions, where the server applies its own chat
    template, for servers that know no ids. If a server returns text alone, the codec encodes it.

    UserError if a server does not answer or does not serve the model.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        codec: Codec,
        window: int | None = None,
        concurrency: int = 64,
        chat: bool = False,
        terms: Terms = Terms(),
    ):
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        timeout_s, patience_s = terms.timeout_s, terms.patience_s
        if not self.urls or concurrency < 1 or not timeout_s > 0 or not patience_s >= 0:
            raise UserError(
                "An endpoint needs a URL, concurrency >= 1, timeout_s > 0 and patience_s >= 0."
            )
        for url in self.urls:
            _check_url(url)
        self.codec, self.model, self.window = codec, model, window
        self.concurrency, self.chat = concurrency, chat
        self.terms = terms
        self._secret = os.environ.get(API_KEY, "").strip() if terms.keyed else ""
        if not re.fullmatch(r"[!-~]*", self._secret):  # http.client would quote it in its error
            raise UserError(
                f"The environment variable {API_KEY} holds characters that no API key has."
            )
        self._keys, self._closed, self._refused = 0, False, []
        # in flight or waiting for it; changed by the caller's thread alone
        self._jobs: dict[int, tuple[Prompt, list[int]]] = {}
        self._waiting, self._finished, self._threads = queue.SimpleQueue(), queue.SimpleQueue(), []
        # guards the next three; notified when turns are given up
        self._changed = threading.Condition()
        self._load = [0] * len(self.urls)  # requests in flight per replica
        self._avoided_until = [0.0] * len(self.urls)  # per replica
        self._sockets: dict[int, socket.socket] = {}
        self._jitter = random.Random()  # an evaluation leaves the global one alone
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        for replica in range(len(self.urls)):
            self._connect(replica)
        if self.window and not codec.exact:
            # callers fill the window as far as it goes: leave room for the estimate's error
            self.window = self.window * 3 // 4

    def _connect(self, replica: int) -> None:
        """Ask a replica for its models, settle the model's name, and respect its window."""

        def windows(reply: dict) -> dict[str, int | None]:
            return {card["id"]: card.get("max_model_len") for card in reply["data"]}

        try:
            served = self._ask("/models", None, windows, READY_S, replica=replica)
        except _Failed as failure:
            raise UserError(f"The endpoint cannot be used: {failure}.") from None
        url, names = self.urls[replica], ", ".join(served) or "none"
        if not self.model and len(served) != 1:
            raise UserError(f"Name the model to ask; {url} serves {names}.")
        self.model = self.model or names
        if self.model not in served:
            raise UserError(f"{url} does not serve the model {self.model!r}; it serves {names}.")
        if window := served[self.model]:
            self.window = min(self.window or window, window)

    # ------------------------------------------------------------ turns

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        if self._closed:
            raise RuntimeError("The engine is closed: a prompt would wait for ever.")
        if prompt.target:
            raise UserError(
                "A server cannot say how probable a response is: scoring needs --engine "
                "transformers or vllm, and an --answerer with weights (base or hf:FOLDER)."
            )
        self._keys += 1
        ids = prompt.ids(self.codec)
        if (
            self.window
            and self.codec.exact
            and (turn := refusal(prompt, ids, self.window, self.codec))
        ):
            self._refused.append((self._keys, turn))
            return self._keys
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**63,
        }
        if self.chat:
            body["messages"] = prompt.messages()
            if tools := prompt.all_tools():
                body["tools"] = list(tools)
            if sampling.top_k:
                body["top_k"] = sampling.top_k
        else:
            # vLLM takes what is missing from the model's generation_config.json; -1: no limit
            body |= {
                "prompt": ids,
                "stop_token_ids": sorted(self.codec.eos_ids),
                "return_token_ids": True,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            }
        self._jobs[self._keys] = prompt, ids
        self._waiting.put((self._keys, body))
        if len(self._threads) < min(self.concurrency, len(self._jobs)):
            # a daemon: for threads of concurrent.futures the interpreter would wait at its exit
            self._threads.append(threading.Thread(target=self._work, name="endpoint", daemon=True))
            self._threads[-1].start()
        return self._keys

    def drop(self, key: int) -> None:
        self._refused = [(k, turn) for k, turn in self._refused if k != key]
        if self._jobs.pop(key, None):
            self._give_up([key])

    def step(self) -> list[tuple[int, Turn]]:
        """Block until a turn has finished; return all that have."""
        return self.poll(math.inf)

    def poll(self, most_s: float = 0.0) -> list[tuple[int, Turn]]:
        """Return all turns that have finished; wait for the first one at most `most_s` seconds."""
        done, self._refused = self._refused, []
        until = time.monotonic() + most_s
        while self._jobs:
            left_s = 0.0 if done else max(0.0, until - time.monotonic())
            try:  # a short wait, again and again: an endless one holds up Ctrl-C on some systems
                key, result = self._finished.get(timeout=min(0.2, left_s))
            except queue.Empty:
                if done or not left_s:
                    break
                continue
            if key in self._jobs:
                done.append((key, self._turn(*self._jobs.pop(key), result)))
        return done

    def _turn(self, prompt: Prompt, ids: list[int], result: _Answer | BaseException) -> Turn:
        if isinstance(result, _Answer) and not self.chat and result.prompt_ids not in (None, ids):
            result = _Failed("the server read another prompt than the one that was sent")
        if isinstance(result, _Failed):
            finish = Finish.FULL if result.full else Finish.ERROR
            return Turn(prompt, ids, [], [], finish, self.codec.response([]), str(result))
        if not isinstance(result, _Answer):
            raise result  # a bug of ours, raised in the thread
        out, response = self._response(result)
        n_prompt, n_out = result.prompt_tokens, result.completion_tokens
        self.reused_tokens += result.cached_tokens
        self.prefilled_tokens += (len(ids) if n_prompt is None else n_prompt) - result.cached_tokens
        self.generated_tokens += len(out) if n_out is None else n_out
        turn = Turn(prompt, ids, out, [], result.finish, response)
        turn.reused_tokens = result.cached_tokens
        return turn

    def _response(self, answer: _Answer) -> tuple[list[int], Text]:
        """Return an answer's ids, its end-of-sequence id included, and its text."""
        if answer.ids is not None and not self.chat:
            return answer.ids, self.codec.response(answer.ids)
        ids, text = list(self.codec.reply(answer.text)), self.codec.shown(answer.text)
        # where the chat template opens <think>, the text must say so: see `Codec.response`
        opened = self.codec.response(ids).startswith("<think>")
        if opened and not answer.has_reasoning and not text.startswith("<think>"):
            text = f"<think>{text}"
        response, end = Text(text, ids), self.codec.end_id
        if answer.finish is Finish.STOP and end is not None:
            ids = [*ids, end]
        return ids, response

    def counts(self) -> dict[str, int]:
        """Return the tokens as the servers count them, without turns that failed."""
        names = ("prefilled_tokens", "reused_tokens", "generated_tokens")
        return {name: getattr(self, name) for name in names}

    # ------------------------------------------------------------ requests

    def _work(self) -> None:
        """Send one request after the other, in a thread.

        An exception takes the place of the answer, or `step` would wait for ever.
        """
        path = "/chat/completions" if self.chat else "/completions"
        while (job := self._waiting.get()) is not None:
            key, body = job
            result = None
            try:
                if not self._given_up(key):
                    result = self._ask(path, body, _answer, self.terms.patience_s, key)
            except BaseException as error:  # the thread's last frame: `step` raises it again
                result = error
            self._finished.put((key, result))

    def _ask(
        self,
        path: str,
        body: dict | None,
        read: Callable,
        patience_s: float,
        key: int = 0,
        replica: int | None = None,
    ):
        """Return `read` of the answer of a replica (None: of any).

        Failures are tried again until `patience_s` have passed since the first one; then _Failed.
        """
        allowed = range(len(self.urls)) if replica is None else [replica]
        tries, began, last = 0, 0.0, None
        while True:
            chosen = self._pick(allowed, last)
            try:
                reply = self._call(self.urls[chosen], path, body, key)
                try:
                    return read(reply)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    raise _Failed("the answer is not of OpenAI's protocol") from None
            except _Failed as failure:
                now, tries, last = time.monotonic(), tries + 1, chosen
                began = began or now
                wait_s = self._wait_after(failure, tries, chosen, allowed, now)
                if key and failure.wait_s:
                    patience_s = max(patience_s, ASKED_S)
                if not failure.retry or now - began + wait_s > patience_s:
                    after = f" after {tries} tries in {now - began:.0f} s" if tries > 1 else ""
                    raise _Failed(
                        f"{self.urls[chosen]}{path}{after}: {failure}", full=failure.full
                    ) from None
                if tries == 1 and not self._given_up(key):
                    self.terms.tell(f"{self.urls[chosen]}{path}: {failure}; trying again.")
            finally:
                with self._changed:
                    self._load[chosen] -= 1
            with self._changed:
                if self._changed.wait_for(lambda: self._given_up(key), wait_s):
                    raise _Failed("given up")

    def _pick(self, allowed: Sequence[int], last: int | None) -> int:
        """Choose a replica and count a request on it.

        First one that has not failed of late, then another than the last, then the least loaded.
        """
        with self._changed:
            now = time.monotonic()
            chosen = min(
                allowed, key=lambda i: (self._avoided_until[i] > now, i == last, self._load[i])
            )
            self._load[chosen] += 1
        return chosen

    def _wait_after(
        self, failure: _Failed, tries: int, replica: int, allowed: Sequence[int], now: float
    ) -> float:
        """Return the seconds to wait before the next try, and avoid the replica that failed.

        At least what the server asked for; 0 if there is another replica.
        """
        backoff_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2.0 ** min(tries - 1, 60))
        wait_s = max(failure.wait_s, backoff_s * self._jitter.uniform(0.5, 1))
        with self._changed:
            if failure.retry:
                until = now + max(AVOID_S, failure.wait_s)
                self._avoided_until[replica] = max(self._avoided_until[replica], until)
            if any(self._avoided_until[i] <= now for i in allowed):
                return 0.0
        return wait_s

    def _given_up(self, key: int) -> bool:
        return bool(key) and key not in self._jobs

    def _call(self, url: str, path: str, body: dict | None, key: int) -> dict:
        """Send one request and return the JSON of its answer; _Failed for anything else.

        Each request has a new connection, which no server can have closed before. Redirects are not
        followed: the API key stays with this server.
        """
        parts, data = urlsplit(url), None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=min(CONNECT_S, self.terms.timeout_s))
        try:
            connection.connect()
            connection.sock.settimeout(self.terms.timeout_s)
            with self._changed:
                if self._given_up(key):
                    raise _Failed("given up")
                self._sockets[key] = connection.sock
            connection.request("GET" if data is None else "POST", parts.path + path, data, headers)
            with connection.getresponse() as response:
                raw = response.read()
        except (OSError, HTTPException) as error:
            # a certificate that is not trusted now will not be trusted later
            retry = not isinstance(error, ssl.SSLCertVerificationError)
            why = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")
            raise _Failed(why, retry) from None
        finally:
            with self._changed:
                self._sockets.pop(key, None)
            connection.close()
        if not 200 <= response.status < 300:
            raise self._http_failure(response.status, raw, response.headers["Retry-After"] or "")
        try:
            return json.loads(raw)
        except ValueError:
            raise _Failed("the answer is not JSON", retry=True) from None

    def _http_failure(self, status: int, raw: bytes, retry_after: str) -> _Failed:
        """Return the failure of an HTTP status, with the server's own words but never the key."""
        if self._secret:  # some servers quote the key that they refuse
            raw = raw.replace(self._secret.encode(), b"***")
        text = _error_text(raw)
        why = f"HTTP {status}: {text}" if text else f"HTTP {status}"
        if status in (401, 403):
            why += (
                f" (the key is taken from the environment variable {API_KEY})"
                if self.terms.keyed
                else " (no key is sent to a server that was found here: name it by --endpoint)"
            )
        seconds = re.fullmatch(r"\d{1,6}", retry_after)
        final = self.terms.memory_is_final and SHORT_OF_MEMORY.search(text)
        return _Failed(
            why,
            retry=(status in RETRIED or status >= 500) and not final,
            wait_s=float(seconds[0]) if seconds else 0.0,
            full=status in (400, 413, 422) and bool(NO_ROOM.search(text)),
        )

    # ------------------------------------------------------------ phases

    def awake(self, policy=None) -> AbstractContextManager:
        if policy is not None:
            raise UserError("An endpoint is never trained from: a server's weights are its own.")
        return self._abandon_at_exit()

    @contextmanager
    def _abandon_at_exit(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Give up all turns: wake the threads that wait, and end their connections."""
        self._jobs.clear()
        self._refused = []
        self._give_up([*self._sockets])

    def _give_up(self, keys: Iterable[int]) -> None:
        """End the connections of turns that are no longer in `_jobs`, and wake what waits."""
        with self._changed:
            for sock in filter(None, map(self._sockets.get, keys)):
                with suppress(OSError):
                    # below TLS, whose state belongs to the other thread
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        self._abandon()
        for _ in self._threads:
            self._waiting.put(None)
