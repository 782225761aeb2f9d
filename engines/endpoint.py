"""Servers of OpenAI's protocol as an engine: vLLM's, llama.cpp's, Ollama, and others.

A server's weights are its own: it answers evaluations and `ask`, and is never trained from. How a
request gets there, and is tried again, is a matter of tasks/served.py.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from config.errors import UserError, clean, clip
from memagent import Finish, Prompt, Turn
from rollout import Engine, Sampling, refusal
from tasks.served import Client, Completion, Failed, Terms, whole
from tokens.codec import Codec, Text

READY_S = 30.0
"""How long a server that does not answer yet is tried again when an engine is opened."""


def read_windows(reply: object) -> dict[str, int]:
    """Read a list of models, in any form that servers have: name -> window, 0 = not told.

    vLLM tells max_model_len, llama.cpp its n_ctx; what a model was trained for is no window.
    """
    while isinstance(reply, dict):
        reply = reply.get("data") or reply.get("models")
    windows = {}
    for card in reply if isinstance(reply, list) else ():
        card = card if isinstance(card, dict) else {"id": card}
        meta = card["meta"] if isinstance(card.get("meta"), dict) else {}
        if isinstance(name := card.get("id") or card.get("name"), str):
            windows[name] = whole(card.get("max_model_len")) or whole(meta.get("n_ctx"), 0)
    return windows


def plain_name(name: str) -> str:
    return name.removeprefix("models/").removesuffix(":latest")


def worded(answer: Completion, codec: Codec) -> Text:
    """Return the response of a server that sends no ids; the codec encodes it."""
    ids, text = codec.reply(answer.text), codec.shown(answer.text)
    # where the chat template opens <think>, the text must say so: see `Codec.response`
    opened = codec.response(ids).startswith("<think>")
    if opened and not answer.has_reasoning and not text.startswith("<think>"):
        text = f"<think>{text}"
    return Text(text, ids)


class EndpointEngine(Engine):
    """An engine that asks servers. A failure becomes a turn, and log-probs are empty.

    urls: several are replicas of one model. model: "" = the only one that is served. codec: the
    model's own, or `Characters` if that is not known: lengths are then estimates, and the server
    refuses what is too long. window: most tokens of a prompt and its response, never more than the
    servers report. concurrency: most requests in flight. chat: False sends token ids to
    /completions and takes those that vLLM returns; True sends text to /chat/completions, where the
    server applies its own chat template.

    UserError if a server does not answer, or does not serve the model.
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
        self.codec, self.model, self.window, self.chat = codec, model, window, chat
        self.client = Client([urls] if isinstance(urls, str) else urls, terms)
        self._keys, self._room = 0, asyncio.Semaphore(concurrency)
        self._jobs: dict[int, tuple[Prompt, list[int], Future]] = {}
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        try:
            for replica, url in enumerate(self.client.urls):
                self._connect(replica, url)
        except BaseException:  # Ctrl-C too: the thread of the client would live on
            self.client.close()
            raise
        if self.window and not codec.exact:
            # callers fill the window as far as it goes: leave room for the estimate's error
            self.window = self.window * 3 // 4

    def _connect(self, replica: int, url: str) -> None:
        """Ask a replica for its models, settle the model's name, and respect its window."""
        served, why = {}, f"{url} lists no models"
        try:
            asked = self.client.ask("/models", None, read_windows, READY_S, replica)
            if served := self.client.wait(asked):
                why = f"{url} serves {clip(clean(', '.join(served)), 300)}"
        except Failed as failure:
            if failure.status in (0, 401, 403):
                raise UserError(f"The endpoint cannot be used: {failure}.") from None
            why = str(failure)
        if self.model and not served:
            return self.client.remark(f"{why}; the first request shows if it has {self.model}.")
        name = self.model or (*served, "")[0] * (len(served) == 1)
        alike = [other for other in served if plain_name(other) == plain_name(name)]
        if not alike:
            wrong = f", not {name!r}" if name else ""
            raise UserError(f"Name the model to ask by --served-as{wrong}: {why}.")
        self.model = name if name in served else alike[0]
        if window := served[self.model]:
            self.window = min(self.window or window, window)

    # ------------------------------------------------------------ turns

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        key, ids, future = self._keys, prompt.ids(self.codec), Future()
        known = self.window if self.codec.exact else None
        if known and (turn := refusal(prompt, ids, known, self.codec)):
            future.set_result(turn)
        else:
            future = self.client.submit(self._answer(self._body(prompt, ids, sampling, seed)))
        self._jobs[key] = prompt, ids, future
        future.add_done_callback(lambda _: self._finished.put(key))
        return key

    async def _answer(self, body: dict) -> Completion:
        path = "/chat/completions" if self.chat else "/completions"
        async with self._room:
            return await self.client.ask(path, body, Completion.of)

    def _body(self, prompt: Prompt, ids: list[int], sampling: Sampling, seed: int) -> dict:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**63,
        }
        if self.chat:
            tools = [*prompt.all_tools()]
            return body | {"messages": prompt.messages()} | ({"tools": tools} if tools else {})
        # vLLM takes what is missing from the model's generation_config.json; -1: no limit
        return body | {
            "prompt": ids,
            "stop_token_ids": sorted(self.codec.eos_ids),
            "return_token_ids": True,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def drop(self, key: int) -> None:
        if job := self._jobs.pop(key, None):
            job[-1].cancel()

    def step(self) -> list[tuple[int, Turn]]:
        return self.poll(math.inf)

    def poll(self, most_s: float = 0.0) -> list[tuple[int, Turn]]:
        """Return all turns that have finished; wait for the first one at most `most_s` seconds."""
        done, until = [], time.monotonic() + most_s
        while self._jobs and not (done and self._finished.empty()):
            left_s = max(0.0, until - time.monotonic())
            try:  # a short wait, again and again: an endless one holds up Ctrl-C on some systems
                key = self._finished.get(timeout=min(0.2, left_s))
            except queue.Empty:
                if not left_s:
                    break
                continue
            if key in self._jobs:
                done.append((key, self._turn(*self._jobs.pop(key))))
        return done

    def _turn(self, prompt: Prompt, ids: list[int], future: Future) -> Turn:
        """Return the turn of an answer, its end-of-sequence id included, or of a failure."""
        try:
            answer = future.result()
            if isinstance(answer, Turn):  # it was not sent
                return answer
            if not self.chat and answer.choice.get("prompt_token_ids") not in (None, ids):
                raise Failed("the server read another prompt than the one that was sent")
        except Failed as failure:
            finish = Finish.FULL if failure.full else Finish.ERROR
            return Turn(prompt, ids, [], [], finish, self.codec.response([]), str(failure))
        out, usage = answer.choice.get("token_ids"), answer.usage
        if out is not None and not self.chat:
            response = self.codec.response(out)
        else:
            response, end = worded(answer, self.codec), self.codec.end_id
            ended = answer.reason == "stop" and end is not None
            out = [*response.ids, *([end] if ended else ())]
        turn = Turn(prompt, ids, out, [], Finish(answer.reason), response)
        details = usage.get("prompt_tokens_details")
        turn.reused_tokens = whole(isinstance(details, dict) and details.get("cached_tokens"), 0)
        self.reused_tokens += turn.reused_tokens
        self.prefilled_tokens += whole(usage.get("prompt_tokens"), len(ids)) - turn.reused_tokens
        self.generated_tokens += whole(usage.get("completion_tokens"), len(out))
        return turn

    # ------------------------------------------------------------ phases

    @contextmanager
    def awake(self, policy=None) -> Iterator[None]:
        if policy is not None:
            raise UserError("An endpoint is never trained from: a server's weights are its own.")
        try:
            yield
        finally:
            for key in [*self._jobs]:
                self.drop(key)

    def close(self) -> None:
        self._jobs.clear()
        self.client.close()
