"""Any OpenAI-compatible server as an engine, for evaluation and `ask`: `vllm serve` and others, one or several replicas of a model.

Holds: `EndpointEngine`. Leaves out: training (a server has weights of its own), streaming, proxies (none is ever asked).
Exercise it: `pytest tests/engines/test_endpoint.py`. Read next: eval.py.

Threads wait for the answers, one request and one connection each, and carry nothing but JSON: the tokenizer and the engine's books are
touched by the thread that calls `add` and `step` alone.
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from config.errors import UserError
from memagent import Finish, Prompt, Turn
from rollout import Sampling, refusal
from tokens.codec import Codec, Text

BACKOFF_S = (0.5, 15.0)
"""Wait after the first failure of a request, doubled with each further one, and the longest; jitter takes up to half of it away."""
AVOID_S = 5.0
"""How long a replica that failed is not asked while there is another one."""
CONNECT_S = 10.0
PASSING = {408, 409, 425, 429}
"""HTTP statuses that are tried again, beside all from 500 on."""
NO_ROOM = re.compile(r"context.?(length|size|window)", re.IGNORECASE)
"""How vLLM, SGLang, llama.cpp and OpenAI say that prompt and response do not fit."""


class _Failed(Exception):
    """A request that failed: why. passing: another try may do better, `wait_s` seconds later at the earliest. full: it is too long."""

    def __init__(self, why: str, passing: bool = False, wait_s: float = 0.0, full: bool = False):
        super().__init__(why)
        self.passing, self.wait_s, self.full = passing, wait_s, full


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    ids: list[int] | None  # None: the server tells text only
    prompt_ids: list[int] | None  # what it read, where it tells
    finish: Finish
    thought: bool  # the thoughts are taken out of the text already
    read_tokens: int | None  # None: it does not count
    cached_tokens: int  # of these
    written_tokens: int | None


def _answer(told: dict) -> _Answer:
    """What /completions or /chat/completions said."""
    choice, usage = told["choices"][0], told.get("usage") or {}
    message, reason = choice.get("message") or {}, choice.get("finish_reason")
    if reason in (
        None,
        "abort",
        "error",
    ):  # what a server says of turns in flight when it goes down
        raise _Failed(f"the turn was broken off for the reason {reason!r}", passing=True)
    if reason not in ("stop", "length"):
        raise _Failed(f"the turn ended for the reason {reason!r}")
    cached, thought = (
        usage.get("prompt_tokens_details") or {},
        message.get("reasoning") or message.get("reasoning_content"),
    )
    return _Answer(
        str(choice.get("text") or message.get("content") or ""),
        choice.get("token_ids"),
        choice.get("prompt_token_ids"),
        Finish(reason),
        bool(thought),
        usage.get("prompt_tokens"),
        int(cached.get("cached_tokens") or 0),
        usage.get("completion_tokens"),
    )


def _said(raw: bytes) -> str:
    """A server's own words about an error, in one line of at most 300 characters."""
    text = raw.decode(errors="replace")
    with suppress(ValueError):
        told = json.loads(text)
        for name in ("error", "message", "detail"):
            told = (told.get(name) or told) if isinstance(told, dict) else told
        text = told if isinstance(told, str) else json.dumps(told)
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= 300 else text[:299] + "…"


class EndpointEngine:
    """An engine that asks servers which speak OpenAI's protocol. A failure becomes a turn; log-probs are empty: nothing is trained from it.

    urls: one base URL or those of several replicas, such as http://127.0.0.1:8000/v1; a request goes to the one with the fewest in
    flight. model: "" = the only one that is served. codec: the model's own, or `Characters` where that is not known: then chat it must be,
    and prompts are not refused by their estimated length, the server does that. window: most tokens of a prompt and its response, never
    more than the servers tell. concurrency: most requests in flight, at all replicas together. timeout_s: longest silence of a server
    that has a request. patience_s: how long a request is tried again after its first failure; ready_s: the same for the first look at
    each server. key: name of the environment variable with the API key, if one is needed. chat: False sends token ids to /completions
    and takes the ids that vLLM returns; True sends text to /chat/completions, where the server applies its own chat template: for
    servers that know no ids. Where a server returns text alone, the codec gives it ids.

    UserError where a server does not answer or does not serve the model.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        codec: Codec,
        window: int | None = None,
        concurrency: int = 64,
        timeout_s: float = 600,
        patience_s: float = 600,
        key: str = "OPENAI_API_KEY",
        chat: bool = False,
        ready_s: float = 30,
    ):
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or concurrency < 1 or not timeout_s > 0 or not patience_s >= 0:
            raise UserError(
                "An endpoint needs a URL, concurrency >= 1, timeout_s > 0 and patience_s >= 0."
            )
        for url in self.urls:
            right = re.fullmatch(
                r"https?://(?:[\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?(?:/[\w./~-]*)?", url, re.ASCII
            )
            if not right or int(right[1] or 0) > 65535:
                raise UserError(
                    "The URL of an endpoint is like http://127.0.0.1:8000/v1, without a password or a query."
                )
        self.codec, self.model, self.window, self.concurrency, self.chat = (
            codec,
            model,
            window,
            concurrency,
            chat,
        )
        self.timeout_s, self.patience_s, self._variable, self._secret = (
            timeout_s,
            patience_s,
            key,
            os.environ.get(key, "").strip(),
        )
        if not re.fullmatch(r"[!-~]*", self._secret):  # http.client would quote it in its error
            raise UserError(f"The environment variable {key} holds characters that no API key has.")
        self._keys, self._closed, self._refused = 0, False, []
        self._jobs: dict[
            int, tuple[Prompt, list[int]]
        ] = {}  # in flight or waiting for it; changed by the caller's thread alone
        self._waiting, self._finished, self._threads = queue.SimpleQueue(), queue.SimpleQueue(), []
        self._changed = threading.Condition()  # guards the next three; told when turns are given up
        self._load, self._avoided_until = (
            [0] * len(self.urls),
            [0.0] * len(self.urls),
        )  # per replica
        self._sockets: dict[int, socket.socket] = {}
        self._jitter = random.Random()  # an evaluation leaves the global one alone
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        for at, url in enumerate(self.urls):
            try:
                served = self._ask(
                    "/models",
                    None,
                    lambda told: {card["id"]: card.get("max_model_len") for card in told["data"]},
                    ready_s,
                    at=at,
                )
            except _Failed as failure:
                raise UserError(f"The endpoint cannot be used: {failure}.") from None
            names = ", ".join(served) or "none"
            if not self.model and len(served) != 1:
                raise UserError(f"Name the model to ask; {url} serves {names}.")
            self.model = self.model or names
            if self.model not in served:
                raise UserError(
                    f"{url} does not serve the model {self.model!r}; it serves {names}."
                )
            self.window = (
                min(self.window or served[self.model], served[self.model])
                if served[self.model]
                else self.window
            )
        if self.window and not codec.exact:
            self.window = (
                self.window * 3 // 4
            )  # who reads as much as the window holds goes by it: room for the estimate's error

    # ------------------------------------------------------------ turns

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        if self._closed:
            raise RuntimeError("The engine is closed: a prompt would wait for ever.")
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
        else:  # vLLM takes what is not said from the model's generation_config.json: so everything is said, -1 being no limit
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

    def step(self) -> list[tuple[int, Turn]]:
        """Waits until a turn has finished; returns all that have."""
        done, self._refused = self._refused, []
        while self._jobs:
            try:  # the short wait is for Ctrl-C, which an endless one holds up on some systems
                key, result = self._finished.get(block=not done, timeout=0.2)
            except queue.Empty:
                if done:
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
            raise result  # a mistake of ours, in the thread
        if result.ids is not None and not self.chat:
            out, response = result.ids, self.codec.response(result.ids)
        else:
            out, text = list(self.codec.encode(result.text)), result.text
            if (
                not result.thought
                and not text.startswith("<think>")
                and self.codec.response(out).startswith("<think>")
            ):
                text = f"<think>{text}"  # the prompt ended with it, see `Codec.response`
            response, end = Text(text, out), self.codec.tokenizer.eos_token_id
            out = [*out, end] if result.finish is Finish.STOP and end is not None else out
        self.reused_tokens += result.cached_tokens
        self.prefilled_tokens += (
            len(ids) if result.read_tokens is None else result.read_tokens
        ) - result.cached_tokens
        self.generated_tokens += (
            len(out) if result.written_tokens is None else result.written_tokens
        )
        return Turn(prompt, ids, out, [], result.finish, response)

    def counts(self) -> dict[str, int]:
        """As the servers count; turns that failed are not in it."""
        return {
            name: getattr(self, name)
            for name in ("prefilled_tokens", "reused_tokens", "generated_tokens")
        }

    # ------------------------------------------------------------ requests

    def _work(self) -> None:
        """A thread: one request after the other. What goes wrong takes the place of the answer, or `step` would wait for ever."""
        path = "/chat/completions" if self.chat else "/completions"
        while (job := self._waiting.get()) is not None:
            key, body = job
            try:
                result = (
                    None
                    if self._given_up(key)
                    else self._ask(path, body, _answer, self.patience_s, key)
                )
            except (
                BaseException
            ) as error:  # the thread's last frame: `step` raises it again, whatever it is
                result = error
            self._finished.put((key, result))

    def _ask(
        self,
        path: str,
        body: dict | None,
        read: Callable,
        patience_s: float,
        key: int = 0,
        at: int | None = None,
    ):
        """`read` of the answer of replica `at` (None: of any), tried again until `patience_s` have passed since the first failure."""
        each = range(len(self.urls)) if at is None else [at]
        tries, began, last = 0, 0.0, None
        while True:
            with self._changed:
                now = time.monotonic()
                chosen = min(
                    each, key=lambda i: (self._avoided_until[i] > now, i == last, self._load[i])
                )
                self._load[chosen] += 1
            try:
                told = self._call(self.urls[chosen], path, body, key)
                try:
                    return read(told)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    raise _Failed("the answer is not of OpenAI's protocol") from None
            except _Failed as failure:
                now, tries, last = time.monotonic(), tries + 1, chosen
                began = began or now
                longest = min(BACKOFF_S[1], BACKOFF_S[0] * 2.0 ** min(tries - 1, 60))
                wait_s = max(failure.wait_s, longest * self._jitter.uniform(0.5, 1))
                with self._changed:
                    if failure.passing:
                        self._avoided_until[chosen] = max(
                            self._avoided_until[chosen], now + max(AVOID_S, failure.wait_s)
                        )
                    if any(self._avoided_until[i] <= now for i in each):
                        wait_s = 0.0  # there is another replica
                if not failure.passing or now - began + wait_s > patience_s:
                    after = f" after {tries} tries in {now - began:.0f} s" if tries > 1 else ""
                    raise _Failed(
                        f"{self.urls[chosen]}{path}{after}: {failure}", full=failure.full
                    ) from None
            finally:
                with self._changed:
                    self._load[chosen] -= 1
            with self._changed:
                if self._changed.wait_for(lambda: self._given_up(key), wait_s):
                    raise _Failed("given up")

    def _given_up(self, key: int) -> bool:
        return bool(key) and key not in self._jobs

    def _call(self, url: str, path: str, body: dict | None, key: int) -> dict:
        """One try, on a connection of its own that no server can have closed before. No redirect is followed: the key stays here."""
        parts, data = urlsplit(url), None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=min(CONNECT_S, self.timeout_s))
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout_s)
            with self._changed:
                if self._given_up(key):
                    raise _Failed("given up")
                self._sockets[key] = connection.sock
            connection.request("GET" if data is None else "POST", parts.path + path, data, headers)
            with connection.getresponse() as response:
                raw = response.read()
        except (OSError, HTTPException) as error:
            passing = not isinstance(
                error, ssl.SSLCertVerificationError
            )  # who is not known now is not known later
            raise _Failed(
                " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. "), passing
            ) from None
        finally:
            with self._changed:
                self._sockets.pop(key, None)
            connection.close()
        if not 200 <= (status := response.status) < 300:
            said = _said(
                raw.replace(self._secret.encode(), b"***") if self._secret else raw
            )  # some quote the key that they refuse
            why = f"HTTP {status}" + f": {said}" * bool(said)
            if status in (401, 403):
                why += f" (the key is taken from the environment variable {self._variable})"
            after = re.fullmatch(r"\d{1,6}", response.headers["Retry-After"] or "")
            full = status in (400, 413, 422) and bool(NO_ROOM.search(said))
            raise _Failed(
                why, status in PASSING or status >= 500, float(after[0]) if after else 0.0, full
            )
        try:
            return json.loads(raw)
        except ValueError:
            raise _Failed("the answer is not JSON", passing=True) from None

    # ------------------------------------------------------------ phases

    def awake(self, policy=None) -> AbstractContextManager:
        if policy is not None:
            raise UserError("An endpoint is never trained from: a server's weights are its own.")
        return self._held()

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Turns that nobody will fetch any more: threads that wait are woken up, and servers see their connections end."""
        self._jobs.clear()
        self._refused = []
        with self._changed:
            for sock in self._sockets.values():
                with suppress(OSError):
                    socket.socket.shutdown(
                        sock, socket.SHUT_RDWR
                    )  # below TLS, whose state is the other thread's
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        self._abandon()
        for _ in self._threads:
            self._waiting.put(None)
