"""The body of `serve`: an agent as a server of OpenAI's protocol, whatever the text's length.

    client ──> door ──> Chats ──> a child that reads the body ──> Service ──> engine
           <── memory after every section, as reasoning_content; the answer, as content <──

Who comes in is commands/door.py's, what a request says tasks/chat_requests.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path

import typer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agents import find
from commands.ask import PATIENCE_S, evaluation_of, fitted, made, remarks_on
from commands.door import LOOPBACK, Server, check_names, check_visitor
from commands.questions import How
from config.errors import UserError, clean, clip
from config.options import CACHE_TOKENS, ServeConfig
from data import Task, extract_answer
from engines.local import answerer
from engines.service import Ended, Job, Service
from memagent import Agent, Finish, Turn
from report.reading import begins
from report.records import record_turn
from rollout import Engine, Sampling
from tasks import served
from tasks.chat_requests import Inquiry, read_request
from tasks.limited import OverLimit, Readers

API_KEY = "MEMAGENT_API_KEY"
"""Name of the environment variable with the key that clients must send."""
ALIVE_S = 10.0
"""Longest silence of a stream: a comment is sent then, so that nothing between gives it up."""
HEADERS_S = 5.0
"""How long a stream waits before its headers: until then an error has a status of its own."""
BODY_S, BODIES = 60.0, 8
"""Longest time for a body to come; how many bodies of the largest size all requests may hold."""
DOCUMENT_TOKENS = 2_000_000
SWIFT_S = 2.0
"""How long a body may be read at first. One that takes longer is read anew, among its like: those
that take no time wait for none of them."""
CHILDREN = 2
"""Bodies that are read side by side, of either kind."""
LATE, ENDING = "The time limit is over.", "The server is shutting down."
KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "context_length_exceeded"),
}
"""Type and code of an error, as clients of OpenAI tell them apart."""


# ---------------------------------------------------------------- what answers


def run(config: ServeConfig, how: How) -> None:
    """Open the engine and answer until the process is told to stop. UserError: it cannot."""
    key = read_key(config)
    check_names(config, bool(key))
    if not key and config.host not in LOOPBACK:
        raise UserError(
            f"Listening on {config.host} lets other machines ask: give --api-key FILE with the "
            f"key that they must send, or set {API_KEY}."
        )
    with ExitStack() as ends:
        listening = ends.enter_context(listen(config))
        engine, agent, name, fits = _open(config, how)
        ends.callback(engine.close)
        service = Service(engine, config.in_flight, DOCUMENT_TOKENS)
        ends.callback(service.close)
        host, port = listening.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        at = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        say(f"The model {name} answers at {at} with {agent.label}{fits} (Ctrl-C ends it).")
        chats = Chats(service, agent, name, config, key)
        chats.lanes[0][0].begin(read_request)
        Server(app(chats), config.grace_s, service.stop).run(sockets=[listening])


def _open(config: ServeConfig, how: How) -> tuple[Engine, Agent, str, str]:
    """Return the engine, the agent, what clients call the model, and words on the sections."""
    from engines.open import Use, open_reader

    who = answerer(config)
    say(f"Opening {who.said} ...")
    config = replace(config, model=who.model, endpoint=tuple(who.endpoint), served_as=who.served_as)
    policy = find.model_or_default(config.model, config.endpoint)
    agent = made(how.agent or find.agent_of("default", policy), config, how)
    terms = served.Terms(patience_s=PATIENCE_S, memory_is_final=True, keyed=who.keyed)
    use = Use(window=who.window, terms=terms, cache_tokens=CACHE_TOKENS)
    engine = open_reader(evaluation_of(config, name="serve"), [agent], use=use)
    agent, fits = fitted(agent, engine.window, how.settings)
    model = config.served_as or Path(config.model or "model").name  # without its folder
    name = config.called or re.sub(r"[^\w.:-]+", "-", model) + f"-{agent.label}"
    return engine, agent, name, fits


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the log is gone, which is no request's fault
        typer.echo(line)


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


def listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except (OSError, OverflowError) as error:
        at = f"{config.host}:{config.port} cannot be listened on: {error}"
        raise UserError(f"{at}; give another --port or --host.") from None


# ---------------------------------------------------------------- one request


class Exchange:
    """A request from its reading's submission to its answer."""

    def __init__(self, inquiry: Inquiry, chats: Chats, until: float):
        self.inquiry, self.until, self.began = inquiry, until, time.monotonic()
        self.status = 499  # until there is an answer
        created, self.id = int(time.time()), f"chatcmpl-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": created, "model": chats.name}
        self.section = self.last = None
        self.n_read = self.n_prompt = self.n_reused = self.n_written = self.n_thought = 0
        self.events, self.loop = asyncio.Queue(), asyncio.get_running_loop()
        agent, request = chats.agent, inquiry.request
        if most := request.max_completion_tokens or request.max_tokens:
            agent = agent.with_settings(final_tokens=min(most, agent.config.final_tokens))
        warm = request.temperature
        sampling = Sampling(
            chats.config.temperature if warm is None else warm, request.top_p or 1.0
        )
        task = Task("asked", inquiry.question, (), inquiry.text, kind="asked")
        self.reading = Job(task, agent, self._tell, sampling, request.seed or 0)

    def _tell(self, event: Turn | Ended) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def next(self, most_s: float = ALIVE_S) -> str | Ended:
        """Return the next line of the reasoning, "" where there is none for `most_s` seconds, and
        `Ended` at last. HTTPException: the time is over, or the reading has failed."""
        left = self.until - self.loop.time()
        try:
            event = await asyncio.wait_for(self.events.get(), max(0.0, min(most_s, left)))
        except TimeoutError:
            if left <= most_s:
                raise HTTPException(503, LATE) from None
            return ""
        if isinstance(event, Turn):
            return self._count(event)
        if event.error:
            raise HTTPException(event.status, event.error)
        self.status = 200
        return event

    def _count(self, turn: Turn) -> str:
        self.n_prompt += len(turn.prompt_ids)
        self.n_reused += turn.reused_tokens
        self.n_written += len(turn.response_ids)
        self.n_thought += 0 if turn.prompt.final else len(turn.response_ids)
        if begins(turn, self.section):
            self.n_read, self.section = self.n_read + 1, turn.prompt.section
        self.last = turn
        if turn.prompt.final or turn.prompt.frozen or turn.prompt.aside:
            return ""
        memory = self.reading.agent.memory_after(record_turn(turn)).strip()
        return f"[section {self.n_read} of {len(self.reading.sections)}] {memory}\n"

    def answer(self) -> str:
        response = clean(self.last.response).strip()
        form = self.reading.agent.config.form
        return self.inquiry.request.cut(extract_answer(response, form)[0])

    def why(self) -> str:
        return "length" if self.last.finish is Finish.LENGTH else "stop"

    def usage(self) -> dict:
        """Count what was read and written, by all turns together."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_written,
            "total_tokens": self.n_prompt + self.n_written,
            "prompt_tokens_details": {"cached_tokens": self.n_reused},
            "completion_tokens_details": {"reasoning_tokens": self.n_thought},
        }

    def metadata(self) -> dict[str, str]:
        """Say what is to be known of the answer; as in OpenAI's, all are strings."""
        agent = self.reading.agent
        facts = {
            "agent": agent.label,
            "sections_read": str(self.n_read),
            "question": self.inquiry.source,
            "remarks": " ".join([*self.inquiry.remarks, *remarks_on(agent, self.last)]),
        }
        return {name: clip(clean(value), 500) for name, value in facts.items() if value}

    def line(self) -> str:
        """Return the log's line, with nothing of what was asked."""
        read = f"{self.n_prompt:,} tokens read ({self.n_reused:,} of them cached)"
        took = f"{self.n_written:,} written, {time.monotonic() - self.began:.1f} s"
        return f"{self.id} {self.status}: {self.n_read:,} sections, {read}, {took}"


async def whole(exchange: Exchange) -> dict:
    reasoning = ""
    while not isinstance(piece := await exchange.next(), Ended):
        reasoning += piece
    message = {"role": "assistant", "content": exchange.answer()}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    choice = {"index": 0, "message": message, "finish_reason": exchange.why(), "logprobs": None}
    kind = {"object": "chat.completion", "choices": [choice]}
    return exchange.head | kind | {"usage": exchange.usage(), "metadata": exchange.metadata()}


async def chunks(exchange: Exchange, piece: str | Ended) -> AsyncIterator[str]:
    head = exchange.head | {"object": "chat.completion.chunk"}

    def data(delta: dict, why: str | None = None, **more: object) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": why, "logprobs": None}
        return f"data: {json.dumps(head | {'choices': [choice]} | more)}\n\n"

    try:
        yield data({"role": "assistant", "content": ""})
        while not isinstance(piece, Ended):
            yield data({"reasoning_content": piece}) if piece else ": reading\n\n"
            piece = await exchange.next()
        yield data({"content": exchange.answer()})
        yield data({}, exchange.why(), metadata=exchange.metadata())
        options = exchange.inquiry.request.stream_options
        if options and options.include_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': exchange.usage()})}\n\n"
        yield "data: [DONE]\n\n"
    except HTTPException as error:
        exchange.status = error.status_code
        yield f"data: {json.dumps(plain(error))}\n\n"


# ---------------------------------------------------------------- HTTP


def plain(error: HTTPException) -> dict:
    """Return an error in OpenAI's form."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    kind, code = KINDS.get(error.status_code, (kind, None))
    message = clip(clean(error.detail), 1000)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclass(eq=False)
class Chats:
    """What answers requests: a service, and so many places, bytes and children for them."""

    service: Service
    agent: Agent
    name: str  # of the model, as clients call it
    config: ServeConfig = field(default_factory=ServeConfig)
    key: str = field(default="", repr=False)  # "" = everybody may ask
    log: Callable[[str], None] = say
    places: int = 0  # taken, from a request's headers to the end of its answer
    held: Counter = field(default_factory=Counter)  # bytes by request

    def __post_init__(self):
        self.lanes = [
            (Readers(seconds, self.config.document_mib), asyncio.Semaphore(CHILDREN))
            for seconds in (min(SWIFT_S, self.config.document_s), self.config.document_s)
        ]
        created = int(time.time())
        self.card = {"id": self.name, "object": "model", "created": created, "owned_by": "memagent"}

    def check(self, request: Request) -> None:
        """Let in who may ask."""
        if not self.key:
            return check_visitor(request, self.config)
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(sent.encode(), self.key.encode()):
            raise HTTPException(401, "The API key is missing or wrong.")

    def check_model(self, name: str | None) -> None:
        if name and name != self.name:
            shown, known = clip(name, 100), f"{self.name} is (serve --called names it)"
            raise HTTPException(404, f"The model {shown!r} is not served: {known}.")

    async def health(self, request: Request) -> Response:
        if not self.key:
            check_visitor(request, self.config)
        stopped, n = self.service.stopped, self.config.in_flight
        state = {"status": stopped or "ok", "model": self.name, "agent": self.agent.label}
        load = {"in_flight": min(n, self.places), "waiting": max(0, self.places - n)}
        return JSONResponse(state | load, 503 if stopped else 200)

    async def models(self, request: Request) -> Response:
        self.check(request)
        name = request.path_params.get("name")
        self.check_model(name)
        return JSONResponse(self.card if name else {"object": "list", "data": [self.card]})

    async def __call__(self, scope, receive, send) -> None:
        """Answer a chat."""
        request = Request(scope, receive)
        self.check(request)
        if self.service.stopped:
            raise HTTPException(503, self.service.stopped)
        if self.places >= self.config.in_flight + self.config.waiting:
            raise HTTPException(503, f"{self.places:,} requests are read or wait: try again later.")
        self.places += 1
        with ExitStack() as held:
            held.callback(self._leave, request)
            try:
                response = await self.answer(request, held)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # by the server, which ends
                raise HTTPException(503, ENDING) from None
            await response(scope, receive, send)

    def _leave(self, request: Request) -> None:
        self.places -= 1
        del self.held[request]

    def _hold(self, request: Request, n: int) -> None:
        """Let a request hold so many bytes from now on, if that is not too much with all others."""
        most, before = BODIES * self.config.body_mib << 20, self.held[request]
        if n > before and self.held.total() - before + n > most:
            raise HTTPException(503, f"The requests hold {most >> 20:,} MiB: try again.")
        self.held[request] = n

    async def answer(self, request: Request, held: ExitStack) -> Response:
        until = asyncio.get_running_loop().time() + self.config.timeout_s
        body = await self.receive(request)
        try:
            async with asyncio.timeout_at(until):
                inquiry = await while_there(request, self.read(body, held))
        except TimeoutError:
            raise HTTPException(503, LATE) from None
        del body
        self.check_model(inquiry.request.model)
        self._hold(request, sys.getsizeof(inquiry.text))
        exchange = Exchange(inquiry, self, until)
        held.callback(lambda: exchange.status and self.log(exchange.line()))
        self.service.submit(exchange.reading)
        held.callback(self.service.cancel, exchange.reading)
        try:
            if inquiry.request.stream:
                first = await exchange.next(HEADERS_S)  # an error then has a status of its own
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                pieces = chunks(exchange, first)
                return StreamingResponse(pieces, headers=headers, media_type="text/event-stream")
            return JSONResponse(await while_there(request, whole(exchange)))
        except HTTPException:
            exchange.status = 0  # the refusal has a line of its own
            raise

    async def receive(self, request: Request) -> bytes:
        """Return a body, whose bytes and seconds are counted as they come."""
        found, most = bytearray(), self.config.body_mib << 20
        large = HTTPException(413, f"The body is larger than {self.config.body_mib} MiB.")
        if int(request.headers.get("content-length", 0)) > most:
            raise large
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    if len(found) + len(piece) > most:
                        raise large
                    self._hold(request, len(found) + len(piece))
                    found += piece
        except TimeoutError:
            raise HTTPException(408, f"The body has not come within {BODY_S:g} s.") from None
        return bytes(found)

    async def read(self, body: bytes, held: ExitStack) -> Inquiry:
        """Read a body in a child: first where none takes long."""
        for readers, room in self.lanes:
            async with room:
                job = readers.start(read_request, content=body, name="The request")
                held.callback(job.cancel)
                try:
                    return await asyncio.to_thread(job.result)
                except OverLimit as over:
                    error = HTTPException(413, str(over))
                except futures.CancelledError:
                    raise HTTPException(503, ENDING) from None
        raise error


async def while_there(request: Request, work: Coroutine):
    """Return what work returns; ClientDisconnect if the client is gone before."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(each) for each in (work, disconnect())]
    tasks[0].add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()


def app(chats: Chats) -> Starlette:
    """Make the ASGI application that answers by a service."""

    async def refuse(request: Request, error: Exception) -> Response:
        """Answer what ended otherwise than it should; the line of the log quotes nothing."""
        if isinstance(error, UserError):
            error = HTTPException(400, str(error))
        elif not isinstance(error, HTTPException):
            error = HTTPException(500, f"The server has failed: {type(error).__name__}.")
        elif error.detail == HTTPStatus(error.status_code).phrase:  # starlette's: no such path
            by_pages = ", to web pages if --cors ORIGIN names them" * (request.method == "OPTIONS")
            paths = "POST /v1/chat/completions, GET /v1/models and GET /health"
            error = HTTPException(error.status_code, f"{paths} are served{by_pages}.")
        path, status = clip(" ".join(clean(request.url.path).split()), 100), error.status_code
        chats.log(f"refused {status} at {path}")
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "5"}}.get(status)
        return JSONResponse(plain(error), status, headers)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        for readers, _ in chats.lanes:
            readers.close()

    how = dict(allow_methods=("GET", "POST"), allow_headers=("*",), allow_private_network=True)
    doors = [Middleware(CORSMiddleware, chats.config.cors, **how)] if chats.config.cors else []
    routes = [
        Route("/health", chats.health),
        Route("/v1/models", chats.models),
        Route("/v1/models/{name:path}", chats.models),
        Route("/v1/chat/completions", chats, methods=["POST"]),
    ]
    ends = dict.fromkeys((UserError, HTTPException, Exception), refuse)
    return Starlette(routes=routes, middleware=doors, exception_handlers=ends, lifespan=lifespan)
