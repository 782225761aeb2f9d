"""The body of `serve`: an agent as a server of OpenAI's protocol, whatever the document's length.

Holds: `run` (opens what answers and listens), `app` (the HTTP part), `Terms`. Leaves out: who
comes in, and for how long (commands/door.py), what a request is (tasks/chat_requests.py), how
readings share an engine (engines/service.py), flags (commands/groups.py).
Exercise it: `python cli.py serve`. Read next: engines/service.py.

    client ──> door ──> app ──> a child that reads the body ──> Service ──> engine
           <── memory after every section, as reasoning_content; the answer, as content <──
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agents import find
from commands.ask import PATIENCE_S, evaluation_of, fitted, made, remarks_on
from commands.door import LOOPBACK, InFlight, Memory, Server, Visitors, check_origins
from commands.questions import How
from config.errors import UserError, clean, clip
from config.options import ServeConfig
from data import Task, extract_answer
from engines.local import answerer
from engines.service import LONG, Begun, Busy, Ended, Job, Service, Stopped
from memagent import Agent, Finish, Turn
from report.reading import begins
from report.records import record_turn
from rollout import Sampling
from tasks import quotes, served
from tasks.chat_requests import ChatRequest, Inquiry, Refused, taken, unserved
from tasks.limited import OverLimit, Readers
from tasks.pages import Places

API_KEY = "MEMAGENT_API_KEY"
"""Name of the environment variable with the key that clients must send."""
ALIVE_S = 10.0
"""Longest silence of a stream: a comment is sent then, so that nothing between gives it up."""
HEADERS_S = 5.0
"""How long a stream waits before its headers: until then an error has a status of its own."""
SWIFT_S = 2.0
"""How long a body may be read at first. One that takes longer is read anew, among its like: those
that take no time wait for none of them."""
CHILDREN = 2
"""Bodies that are read side by side, of either kind."""


# ---------------------------------------------------------------- what answers


@dataclass(frozen=True, slots=True)
class Terms:
    """What a server takes, and how it answers where a request says nothing."""

    model: str  # as clients call it
    config: ServeConfig = field(default_factory=ServeConfig)
    key: str = field(default="", repr=False)  # "" = everybody may ask
    log: Callable[[str], None] = lambda line: None


def run(config: ServeConfig, how: How) -> None:
    """Open the engine and answer until the process is told to stop. UserError: it cannot."""
    key = key_of(config)
    check_origins(config.cors, bool(key))
    if not key and config.host not in LOOPBACK:
        raise UserError(
            f"Listening on {config.host} lets other machines ask: give --api-key FILE with the "
            f"key that they must send, or set {API_KEY}."
        )
    with contextlib.closing(_listen(config)) as listening:
        _serve(config, how, key, listening)


def _serve(config: ServeConfig, how: How, key: str, listening: socket.socket) -> None:
    from engines.open import Use, open_reader

    who = answerer(config)
    _log(f"Opening {who.said} ...")
    config = replace(config, model=who.model, endpoint=tuple(who.endpoint), served_as=who.served_as)
    policy = find.model_or_default(config.model, config.endpoint)
    agent = made(how.agent or find.agent_of("default", policy), config, how)
    terms = served.Terms(patience_s=PATIENCE_S, memory_is_final=True, keyed=who.keyed)
    use = Use(window=who.window, terms=terms, cache_tokens=config.cache_tokens)
    engine = open_reader(evaluation_of(config, name="serve"), [agent], use=use)
    agent, fits = fitted(agent, engine.window, how.settings)
    service = Service(engine, config.in_flight, config.waiting, config.document_tokens)
    model = config.served_as or Path(config.model or "model").name  # without its folder
    model = re.sub(r"[^\w.:-]+", "-", model)
    name = config.called or f"{model}-{agent.label}"
    application = app(service, agent, Terms(name, config, key, _log))
    server = Server(application, config.grace_s, service.stop)
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    _log(f"The model {name} answers at {url} with {agent.label}{fits} (Ctrl-C ends it). Ask it:")
    _log(_example(url, config, bool(key)))
    # uvicorn passes the signal on when all is done: the process then ends by itself
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        service.close()
        engine.close()


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the log is gone, which is no request's fault
        typer.echo(line)


def _example(url: str, config: ServeConfig, keyed: bool) -> str:
    """Return a command that asks this server, for a shell on this machine."""
    file = config.api_key and shlex.quote(str(Path(config.api_key).absolute()))
    key = f"$(cat {file})" if file else f"${API_KEY}"
    bearer = f' -H "Authorization: Bearer {key}"' if keyed else ""
    texts = "Anna reached Lima. Boris toured Oslo.", "Where is Anna?"  # the document, the question
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in texts]})
    url = shlex.quote(f"{url}/chat/completions")
    return f"curl {url} -H 'Content-Type: application/json'{bearer} -d '{body}'"


def key_of(config: ServeConfig) -> str:
    """Return the key that clients must send, "" if there is none."""
    key, where = os.environ.get(API_KEY, ""), API_KEY
    if config.api_key:
        where = f"--api-key {config.api_key}"
        try:
            key = Path(config.api_key).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no text"
            raise UserError(f"{where} cannot be read: {why}.") from None
    key = key.strip()
    if not re.fullmatch(r"[!-~]*", key) or (config.api_key and not key):
        raise UserError(f"{where} holds no API key, which is one word of ASCII.")
    return key


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family)
        # without it, a reply whose head has gone waits 40 ms for the client's acknowledgement
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if getattr(error, "errno", None) else str(error)
        at = f"{config.host}:{config.port} cannot be listened on: {why}"
        raise UserError(f"{at}; give another --port or --host.") from None


# ---------------------------------------------------------------- one request


class Exchange:
    """A request from its reading's submission to its answer."""

    def __init__(
        self, request: ChatRequest, inquiry: Inquiry, agent: Agent, terms: Terms, began: float
    ):
        self.request, self.document, self.terms = request, inquiry.document, terms
        self.id, self.source = f"chatcmpl-{secrets.token_hex(12)}", inquiry.source
        self.head = {"id": self.id, "created": int(time.time()), "model": terms.model}
        self.began, self.until = began, began + terms.config.timeout_s
        self.sections = self.section = self.last = None
        self.n_read = self.n_prompt = self.n_reused = self.n_written = self.n_thought = 0
        self.events: asyncio.Queue = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        task = Task("asked", inquiry.question, (), self.document.text, kind="asked")
        if most := request.max_completion_tokens or request.max_tokens:
            agent = agent.with_settings(final_tokens=min(most, agent.config.final_tokens))
        warm = terms.config.temperature if request.temperature is None else request.temperature
        sampling = Sampling(warm, request.top_p or 1.0)
        self.reading = Job(task, agent, self._tell, sampling, request.seed or 0)

    def _tell(self, event: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def next(self, most_s: float) -> object | None:
        """Return what happened next, None after `most_s` seconds. Refused: time, or an error."""
        left = self.until - time.monotonic()
        try:
            event = await asyncio.wait_for(self.events.get(), max(0.0, min(most_s, left)))
        except TimeoutError:
            if left <= most_s:
                raise over_time(self.terms.config) from None
            return None
        if isinstance(event, Begun):
            self.sections = event.sections
        elif isinstance(event, Ended) and event.error:
            status = 413 if event.too_long else 503 if event.ours else 400
            code = "context_length_exceeded" if event.too_long else None
            raise Refused(event.error, code=code, status=status)
        elif isinstance(event, Turn):
            self._count(event)
        return event

    def _count(self, turn: Turn) -> None:
        self.n_prompt += len(turn.prompt_ids)
        self.n_reused += turn.reused_tokens
        self.n_written += len(turn.response_ids)
        self.n_thought += 0 if turn.prompt.final else len(turn.response_ids)
        if begins(turn, self.section):
            self.n_read, self.section = self.n_read + 1, turn.prompt.section
        self.last = turn

    def thought(self, turn: Turn) -> str:
        """Return the memory after a turn, as a line of the reasoning; "" for what is none."""
        if turn.prompt.final or turn.prompt.frozen or turn.prompt.aside:
            return ""
        memory = self.reading.agent.memory_after(record_turn(turn)).strip()
        return f"[section {self.n_read} of {len(self.sections)}] {memory}\n"

    def finish(self) -> str:
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

    def metadata(self, found: list | None) -> dict[str, str]:
        """Say in which sections the words of the answer were found in the document; as in OpenAI's,
        all are strings."""
        document, agent = self.document, self.reading.agent
        facts = {
            "agent": agent.label,
            "sections_read": str(self.n_read),
            "remarks": " ".join([*document.remarks, *remarks_on(agent, self.last)]),
            "question": self.source,
        }
        if found is not None:
            facts["answer_stands"] = "as a phrase" if found else "not found in the document"
            facts["sections"] = ", ".join(map(str, self._sections_with(found)))
            facts["where"] = document.where(found) if found else ""
        return {name: fact for name, fact in facts.items() if fact}

    def _sections_with(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the numbers of the sections that stretches of the document touch."""
        agent, found = self.reading.agent, self.sections
        # a copy: the service's thread reads the other one
        sections = type(found)(found.ids, found.n_tokens, found.left_out, agent.codec.decode)
        places = Places(self.document.text, sections, agent.codec.decode, agent.config.over)
        return [
            number
            for number, stretches in enumerate(places.ranges, 1)
            if any(a < end and start < b for a, b in stretches for start, end in ranges)
        ]

    def line(self, status: int, why: str = "") -> str:
        """Return a line of the log: what was read, in what time; nothing of what was asked."""
        seconds = f"{time.monotonic() - self.began:.1f} s"
        n = len(self.sections or ())
        counts = (
            f"{n:,} sections, {self.n_prompt:,} tokens read ({self.n_reused:,} of them cached), "
            f"{self.n_written:,} written, {seconds}"
        )
        return f"{self.id} {status}: {counts}{why and f'; {clip(clean(why), 200)}'}"


# ---------------------------------------------------------------- HTTP


def over_time(config: ServeConfig) -> Refused:
    """Return what is said of a request that has taken longer than it may."""
    return Refused(f"The time limit of {config.timeout_s:g} s is over.", code="timeout", status=503)


def app(service, agent: Agent, terms: Terms):
    """Make the ASGI application that answers by a service."""
    config = terms.config
    memory, body_bytes = Memory(config.bodies_mib << 20), config.body_mib << 20
    lanes = [
        (Readers(seconds, config.document_mib), asyncio.Semaphore(CHILDREN))
        for seconds in (min(SWIFT_S, config.document_s), config.document_s)
    ]
    created = int(time.time())
    card = {"id": terms.model, "object": "model", "created": created, "owned_by": "memagent"}

    def failed(error: Refused, scope: dict | None = None) -> Response:
        """Answer with a failure; a request that was not begun has its line of the log here."""
        plain, status = error.plain(), error.status
        if scope:  # nothing of the message, which may quote what was sent
            why = error.param or error.code or plain["error"]["type"]
            path = clip(" ".join(clean(scope["path"]).split()), 100)
            terms.log(f"refused {status} at {path}: {why}")
        headers = {"Retry-After": "5"} if status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return JSONResponse(plain, status, headers)

    def check_key(request: Request) -> None:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else ""
        if terms.key and not hmac.compare_digest(sent.encode(), terms.key.encode()):
            wrong = "The API key is missing or wrong."
            raise Refused(wrong, code="invalid_api_key", status=401)

    async def body_of(request: Request) -> bytes:
        found = bytearray()
        large = f"The body is larger than {config.body_mib} MiB."
        too_large = Refused(large, code="too_large", status=413)
        if int(request.headers.get("content-length", 0)) > body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(config.body_s):
                async for piece in request.stream():
                    memory.hold(request, len(found) + len(piece))
                    found += piece
                    if len(found) > body_bytes:
                        raise too_large
        except TimeoutError:
            late = f"The body has not come within {config.body_s:g} s."
            raise Refused(late, code="timeout", status=408) from None
        return bytes(found)

    async def read(body: bytes, held: ExitStack) -> tuple[ChatRequest, Inquiry]:
        """Read a body in a child: first where none takes long."""
        for readers, room in lanes:
            async with room:
                job = readers.start(taken, terms.model, content=body, name="The request")
                held.callback(job.cancel)
                try:
                    found = await run_in_threadpool(job.result)
                    return found.opened()
                except OverLimit as over:
                    error = Refused(str(over), code="too_large", status=413)
                except futures.CancelledError:
                    raise ClientDisconnect from None
        raise error

    async def health(request: Request) -> Response:
        in_flight, waiting = service.load
        state = {"status": service.stopped or "ok", "model": terms.model, "agent": agent.label}
        status = 503 if service.stopped else 200
        return JSONResponse(state | {"in_flight": in_flight, "waiting": waiting}, status)

    async def models(request: Request) -> Response:
        check_key(request)
        if (name := request.path_params.get("name", "")) in ("", terms.model):
            return JSONResponse(card if name else {"object": "list", "data": [card]})
        raise unserved(name, terms.model)

    async def completions(request: Request) -> Response:
        check_key(request)
        began, held = time.monotonic(), request.scope["held"]
        held.callback(memory.free, request)
        try:
            body = await body_of(request)
            async with asyncio.timeout(config.timeout_s):
                parsed, inquiry = await while_there(request, read(body, held))
            del body
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            raise over_time(config) from None
        except asyncio.CancelledError:  # by the server, which ends
            raise Refused("The server is shutting down.", status=503) from None
        memory.hold(request, sys.getsizeof(inquiry.document.text))
        exchange = Exchange(parsed, inquiry, agent, terms, began)
        service.submit(exchange.reading)
        held.callback(service.cancel, exchange.reading)
        try:
            if exchange.request.stream:
                first = await exchange.next(HEADERS_S)  # an error then has a status of its own
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                pieces = chunks(exchange, first)
                return StreamingResponse(pieces, headers=headers, media_type="text/event-stream")
            return JSONResponse(await while_there(request, whole(exchange)))
        except ClientDisconnect:
            terms.log(exchange.line(499, "the client is gone"))
            return Response(status_code=499)
        except Refused as error:
            terms.log(exchange.line(error.status, str(error)))
            return failed(error)

    async def while_there(request: Request, work: Coroutine):
        """Return what work returns; ClientDisconnect if the client is gone before."""
        tasks = [asyncio.ensure_future(each) for each in (work, disconnected(request))]
        tasks[0].add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            raise ClientDisconnect
        finally:
            for task in tasks:
                task.cancel()

    async def disconnected(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def whole(exchange: Exchange) -> dict:
        thoughts = []
        while not isinstance(event := await exchange.next(ALIVE_S), Ended):
            if isinstance(event, Turn):
                thoughts.append(exchange.thought(event))
        answer, metadata = await ended(exchange)
        message = {"role": "assistant", "content": answer}
        if reasoning := "".join(thoughts):
            message["reasoning_content"] = reasoning
        choice = {"index": 0, "message": message, "finish_reason": exchange.finish()}
        return exchange.head | {
            "object": "chat.completion",
            "choices": [choice | {"logprobs": None}],
            "usage": exchange.usage(),
            "metadata": metadata,
        }

    async def ended(exchange: Exchange) -> tuple[str, dict]:
        document, found = exchange.document, None
        response, form = clean(exchange.last.response).strip(), agent.config.form
        answer = exchange.request.cut(extract_answer(response, form)[0])
        if answer and len(document.text) < LONG:
            found = document.find(answer)
        elif answer:  # beside the event loop, for which a thread would leave no time
            readers, room = lanes[-1]
            async with room:
                job = readers.start(quotes.places, document.text, answer, name="The document")
                with contextlib.suppress(UserError):  # past its limits nothing is said of it
                    found = await run_in_threadpool(job.result)
        metadata = await run_in_threadpool(exchange.metadata, found)
        terms.log(exchange.line(200))
        return answer, metadata

    async def chunks(exchange: Exchange, event: object) -> AsyncIterator[str]:
        head = exchange.head | {"object": "chat.completion.chunk"}

        def data(**fields) -> str:
            return f"data: {json.dumps(head | fields)}\n\n"

        def chunk(delta: dict, finish: str | None = None, **more: object) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return data(choices=[choice], **more)

        try:
            yield chunk({"role": "assistant", "content": ""})
            while not isinstance(event, Ended):
                if isinstance(event, Turn) and (thought := exchange.thought(event)):
                    yield chunk({"reasoning_content": thought})
                elif event is None:
                    yield ": reading\n\n"
                event = await exchange.next(ALIVE_S)
            answer, metadata = await ended(exchange)
            yield chunk({"content": answer})
            yield chunk({}, exchange.finish(), metadata=metadata)
            options = exchange.request.stream_options
            if options and options.include_usage:
                yield data(choices=[], usage=exchange.usage())
            yield "data: [DONE]\n\n"
        except Refused as error:
            terms.log(exchange.line(error.status, str(error)))
            yield f"data: {json.dumps(error.plain())}\n\n"
        except asyncio.CancelledError:
            terms.log(exchange.line(499, "the client is gone"))
            raise

    async def refused(request: Request, error: Exception) -> Response:
        """Answer what ended otherwise than it should."""
        if isinstance(error, Busy):
            error = Refused(str(error), code="queue_full", status=429)
        elif isinstance(error, Stopped):
            error = Refused(str(error), status=503)
        elif isinstance(error, UserError):
            error = Refused(str(error))
        elif isinstance(error, HTTPException):
            paths = "POST /v1/chat/completions, GET /v1/models and GET /health are served"
            by_pages = request.method == "OPTIONS"  # a browser asks first
            why = f"{paths}{', to web pages if --cors ORIGIN names them' * by_pages}."
            error = Refused(why, status=error.status_code)
        elif not isinstance(error, Refused):
            error = Refused(f"The server has failed: {type(error).__name__}.", status=500)
        return failed(error, request.scope)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        for readers, _ in lanes:
            readers.close()

    doors = [Middleware(Visitors, config.cors, failed)] if not terms.key else []
    if config.cors:
        headers = {"allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
        local = {"allow_private_network": True}
        doors.insert(0, Middleware(CORSMiddleware, config.cors, **headers, **local))
    counted = [Middleware(InFlight, service.place)]
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", models),
        Route("/v1/chat/completions", completions, methods=["POST"], middleware=counted),
    ]
    ends = dict.fromkeys((Refused, UserError, Busy, Stopped, HTTPException, Exception), refused)
    return Starlette(routes=routes, middleware=doors, exception_handlers=ends, lifespan=lifespan)
