"""The body of `serve`: an agent as a server of OpenAI's protocol, whatever the text's length.

    client ──> door ──> Chats ──> a child that reads the body ──> Service ──> engine
           <── memory after every section, as reasoning_content; the answer, as content <──

Who comes in is commands/door.py's, what a request says tasks/chat_requests.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
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
from commands.ask import (
    fit_sections,
    make_agent,
    open_answerer,
    policy_of,
    remarks_on,
    with_answerer,
)
from commands.door import Door, Server, read_key
from commands.questions import How
from config.errors import UserError, clean, clip
from config.options import CACHE_TOKENS, ServeConfig
from data import Task, extract_answer
from engines.local import answerer
from engines.service import Ended, Job, Service, TooLong
from memagent import Agent, Finish, Turn
from report.reading import begins
from report.records import record_turn
from rollout import Engine, Sampling
from tasks.chat_requests import Inquiry, read_request
from tasks.limited import OverLimit, Readers

ALIVE_S = 5.0
"""Longest silence of a stream: a comment is sent then, so that nothing between gives it up. An
error before that has a status of its own."""
BODY_S, BODIES = 60.0, 8
"""Longest time for a body to come; how many bodies of the largest size all requests may hold."""
DOCUMENT_TOKENS = 2_000_000
CHILDREN = 4
"""Bodies that are read side by side."""
CODES = {401: "invalid_api_key", 404: "model_not_found", 413: "context_length_exceeded"}
"""What clients of OpenAI tell errors apart by."""


# ---------------------------------------------------------------- what answers


def run(config: ServeConfig, how: How) -> None:
    """Open the engine and answer until the process is told to stop. UserError: it cannot."""
    door = Door(config, read_key(config))
    with ExitStack() as ends:
        listening = ends.enter_context(listen(config))
        engine, agent, name, fits = _open(config, how)
        ends.callback(engine.close)
        service = Service(engine, config.in_flight, DOCUMENT_TOKENS)
        ends.callback(service.close)
        host, port = listening.getsockname()[:2]
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        say(f"The model {name} answers at {at} with {agent.label}{fits} (Ctrl-C ends it).")
        chats = Chats(service, agent, name, config, door)
        Server(app(chats), config.grace_s, service.stop).run(sockets=[listening])


def _open(config: ServeConfig, how: How) -> tuple[Engine, Agent, str, str]:
    """Return the engine, the agent, what clients call the model, and words on the sections."""
    who = answerer(config)
    config = with_answerer(config, who)
    say(f"Opening {who.said} ...")
    agent = make_agent(how.agent or find.agent_of("default", policy_of(config)), config, how)
    engine = open_answerer(who, config, [agent], CACHE_TOKENS, in_flight=config.in_flight)
    agent, fits = fit_sections(agent, engine.window, how.settings)
    model = config.served_as or Path(config.model or "model").name  # without its folder
    name = config.called or re.sub(r"[^\w.:-]+", "-", model) + f"-{agent.label}"
    return engine, agent, name, fits


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the log is gone, which is no request's fault
        typer.echo(line)


def listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except (OSError, OverflowError) as error:
        at = f"{config.host}:{config.port} cannot be listened on: {error}"
        raise UserError(f"{at}; give another --port or --host.") from None


# ---------------------------------------------------------------- one reading


class Exchange:
    """A request from its reading's submission to its answer."""

    def __init__(self, inquiry: Inquiry, chats: Chats, until: float):
        """until: when its time is over, by the clock of the event loop."""
        self.inquiry, self.until, self.began = inquiry, until, time.monotonic()
        self.loop, agent = asyncio.get_running_loop(), chats.agent
        self.status = 499  # until there is an answer
        created, self.id = int(time.time()), f"chatcmpl-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": created, "model": chats.name}
        self.section = self.last = None
        self.n_read = self.n_prompt = self.n_reused = self.n_written = 0
        self.events: asyncio.Queue[Turn | Ended] = asyncio.Queue()
        request = inquiry.request
        if most := request.max_completion_tokens or request.max_tokens:
            agent = agent.with_settings(final_tokens=min(most, agent.config.final_tokens))
        warm = request.temperature
        warm = chats.config.temperature if warm is None else warm
        sampling = Sampling(warm, request.top_p or 1.0)
        task = Task("asked", inquiry.question, (), inquiry.text, kind="asked")
        self.reading = Job(task, agent, self._tell, sampling, request.seed or 0)

    def _tell(self, event: Turn | Ended) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def memories(self) -> AsyncIterator[str]:
        """Yield a line after each section, and "" after each `ALIVE_S` of silence.

        HTTPException: the time is over, or the reading has failed.
        """
        while True:
            left = self.until - self.loop.time()
            try:
                event = await asyncio.wait_for(self.events.get(), max(0.0, min(ALIVE_S, left)))
            except TimeoutError:
                if left <= ALIVE_S:
                    raise HTTPException(503, "The time limit is over.") from None
                yield ""
                continue
            if isinstance(event, Ended):
                break
            self._count(event)
            if not (event.prompt.final or event.prompt.frozen or event.prompt.aside):
                memory = self.reading.agent.memory_after(record_turn(event)).strip()
                yield f"[section {self.n_read} of {len(self.reading.sections)}] {memory}\n"
        if event.error:
            raise HTTPException(event.status, event.error)
        self.status = 200

    def _count(self, turn: Turn) -> None:
        self.n_prompt += len(turn.prompt_ids)
        self.n_reused += turn.reused_tokens
        self.n_written += len(turn.response_ids)
        if begins(turn, self.section):
            self.n_read, self.section = self.n_read + 1, turn.prompt.section
        self.last = turn

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

    async def whole(self) -> dict:
        reasoning = "".join([line async for line in self.memories()])
        message = {"role": "assistant", "content": self.answer()}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        choice = {"index": 0, "message": message, "finish_reason": self.why(), "logprobs": None}
        kind = {"object": "chat.completion", "choices": [choice]}
        return self.head | kind | {"usage": self.usage(), "metadata": self.metadata()}

    async def chunks(self, lines: AsyncIterator[str], line: str | None) -> AsyncIterator[str]:
        """Yield a stream's events. lines: the memories that follow on the first line."""
        head = self.head | {"object": "chat.completion.chunk"}

        def data(delta: dict, why: str | None = None, **more: object) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": why, "logprobs": None}
            return f"data: {json.dumps(head | {'choices': [choice]} | more)}\n\n"

        try:
            yield data({"role": "assistant", "content": ""})
            while line is not None:
                yield data({"reasoning_content": line}) if line else ": reading\n\n"
                line = await anext(lines, None)
            yield data({"content": self.answer()})
            yield data({}, self.why(), metadata=self.metadata())
            options = self.inquiry.request.stream_options
            if options and options.include_usage:
                yield f"data: {json.dumps(head | {'choices': [], 'usage': self.usage()})}\n\n"
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            self.status = error.status_code
            yield f"data: {json.dumps(plain(error))}\n\n"


# ---------------------------------------------------------------- HTTP


def plain(error: HTTPException) -> dict:
    """Return an error in OpenAI's form."""
    status, message = error.status_code, clip(clean(error.detail), 1000)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": CODES.get(status)}}


class Chats:
    """What answers requests: a service, and so many places, bytes and children for them.

    name: of the model, as clients call it. held: each request that has a place, from its headers to
    the end of its answer, and how many bytes its body has.
    """

    def __init__(
        self,
        service: Service,
        agent: Agent,
        name: str,
        config: ServeConfig,
        door: Door,
        log: Callable[[str], None] = say,
    ):
        self.service, self.agent, self.name = service, agent, name
        self.config, self.door, self.log = config, door, log
        self.held: dict[Request, int] = {}
        self.readers = Readers(config.document_s, config.document_mib)
        self.room = asyncio.Semaphore(CHILDREN)
        created = int(time.time())
        self.card = {"id": name, "object": "model", "created": created, "owned_by": "memagent"}

    def check_model(self, name: str | None) -> None:
        if name and name != self.name:
            shown, known = clip(name, 100), f"{self.name} is (serve --called names it)"
            raise HTTPException(404, f"The model {shown!r} is not served: {known}.")

    async def health(self, request: Request) -> Response:
        self.door.check_visitor(request)
        stopped, n, most = self.service.stopped, len(self.held), self.config.in_flight
        state = {"status": stopped or "ok", "model": self.name, "agent": self.agent.label}
        load = {"in_flight": min(n, most), "waiting": max(0, n - most)}
        return JSONResponse(state | load, 503 if stopped else 200)

    async def models(self, request: Request) -> Response:
        self.door.check(request)
        name = request.path_params.get("name")
        self.check_model(name)
        return JSONResponse(self.card if name else {"object": "list", "data": [self.card]})

    async def __call__(self, scope, receive, send) -> None:
        """Answer a chat."""
        request = Request(scope, receive)
        self.door.check(request)
        if self.service.stopped:
            raise HTTPException(503, self.service.stopped)
        if (n := len(self.held)) >= self.config.in_flight + self.config.waiting:
            raise HTTPException(503, f"{n:,} requests are read or wait: try again later.")
        self.held[request] = 0
        with ExitStack() as ends:
            ends.callback(self.held.pop, request)
            try:
                response = await self.answer(request, ends)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # by the server, which ends
                raise HTTPException(503, "The server is shutting down.") from None
            await response(scope, receive, send)

    async def answer(self, request: Request, ends: ExitStack) -> Response:
        until = asyncio.get_running_loop().time() + self.config.timeout_s
        body = await self.receive(request)
        inquiry = await while_there(request, self.read(body, ends))
        del body
        self.check_model(inquiry.request.model)
        exchange = Exchange(inquiry, self, until)
        ends.callback(lambda: exchange.status and self.log(exchange.line()))
        ends.callback(self.service.cancel, exchange.reading)
        try:
            await while_there(request, asyncio.to_thread(self.service.cut, exchange.reading))
            self.service.submit(exchange.reading)
            if inquiry.request.stream:
                lines = exchange.memories()
                first = await while_there(request, anext(lines, None))
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                pieces = exchange.chunks(lines, first)
                return StreamingResponse(pieces, headers=headers, media_type="text/event-stream")
            return JSONResponse(await while_there(request, exchange.whole()))
        except (HTTPException, UserError):
            exchange.status = 0  # the refusal has a line of its own
            raise

    async def receive(self, request: Request) -> bytes:
        """Return a body, whose bytes and seconds are counted as they come."""
        found, mib = bytearray(), self.config.body_mib
        large = HTTPException(413, f"The body is larger than {mib} MiB.")
        if int(request.headers.get("content-length", 0)) > mib << 20:
            raise large
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    found += piece
                    self.held[request] = len(found)
                    if len(found) > mib << 20:
                        raise large
                    if sum(self.held.values()) > BODIES * mib << 20:
                        raise HTTPException(503, f"The requests hold {BODIES * mib:,} MiB: wait.")
        except TimeoutError:
            raise HTTPException(408, f"The body has not come within {BODY_S:g} s.") from None
        return bytes(found)

    async def read(self, body: bytes, ends: ExitStack) -> Inquiry:
        """Read a body in a child."""
        async with self.room:
            job = self.readers.start(read_request, content=body, name="The request")
            ends.callback(job.cancel)
            return await asyncio.to_thread(job.result)


async def while_there(request: Request, work: Awaitable):
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
            too_large = isinstance(error, TooLong | OverLimit)
            error = HTTPException(413 if too_large else 400, str(error))
        elif not isinstance(error, HTTPException):
            error = HTTPException(500, f"The server has failed: {type(error).__name__}.")
        elif error.detail == HTTPStatus(error.status_code).phrase:  # starlette's: no such path
            paths = "POST /v1/chat/completions, GET /v1/models and GET /health"
            error = HTTPException(error.status_code, f"{paths} are served.")
        path, status = clip(" ".join(clean(request.url.path).split()), 100), error.status_code
        chats.log(f"refused {status} at {path}")
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "5"}}.get(status)
        return JSONResponse(plain(error), status, headers)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        chats.readers.close()

    how = dict(allow_methods=("GET", "POST"), allow_headers=("*",), allow_private_network=True)
    doors = [Middleware(CORSMiddleware, chats.door.cors, **how)] if chats.door.cors else []
    routes = [
        Route("/health", chats.health),
        Route("/v1/models", chats.models),
        Route("/v1/models/{name:path}", chats.models),
        Route("/v1/chat/completions", chats, methods=["POST"]),
    ]
    ends = dict.fromkeys((UserError, HTTPException, Exception), refuse)
    return Starlette(routes=routes, middleware=doors, exception_handlers=ends, lifespan=lifespan)
