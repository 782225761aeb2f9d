"""Hostile requests: none stops the others, none holds more than it may, each gets its status."""

import contextlib
import os
import socket
import threading
from contextlib import ExitStack, contextmanager

import http_faults as faults
import httpx
import pytest
from conftest import HANG_S, until
from pydantic import ValidationError

import commands.door as door
import commands.serve as serve
from commands.door import Memory, Server, check_origins
from commands.serve import Terms, _listen, app
from config.errors import UserError
from config.options import ServeConfig
from embedded import tiny
from engines.scripted import ScriptedEngine
from engines.service import Ended, Job, Service
from memagent import MemAgent, MemAgentConfig
from tasks.chat_requests import MOST, MOST_STOPS, ChatRequest, Refused, taken
from tasks.limited import Readers
from tasks.worlds import make_task
from tokens.codec import Codec

AGENT = MemAgent(MemAgentConfig(chunk_tokens=64, memory_tokens=8, final_tokens=8))
OVER_S = 60.0
"""Seconds after which a test takes for stuck what others should not hold up."""


@contextmanager
def listening(application, end=lambda: None):
    """Run an application in a thread; yields its address and its server."""
    with _listen(ServeConfig(port=0)) as listener:
        address, server = listener.getsockname(), Server(application, 1, end)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield address, server
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def served(codec, key="", in_flight=16, waiting=64, **config):
    """Serve an agent that answers Anna; yields an address and the service."""
    terms = Terms("m", ServeConfig(**config), key)
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"), in_flight, waiting)
    try:
        with listening(app(service, AGENT, terms), service.stop) as (address, _):
            yield address, service
    finally:
        service.close()


@pytest.fixture(scope="module")
def address():
    with served(Codec(tiny.make_tokenizer())) as (address, _):
        yield address


def client(address, **how):
    how = {"timeout": OVER_S, "headers": {"Content-Type": "application/json"}} | how
    return httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", **how)


def asked(http, body=None, **how):
    return http.post("/v1/chat/completions", content=body or faults.chat(), **how)


def head_of(body: bytes, length: int | None = None) -> bytes:
    n = len(body) if length is None else length
    return faults.HEAD + f"Content-Length: {n}\r\n\r\n".encode() + body


def sent(address, data: bytes, beginning: bool = False) -> bytes:
    """Return what comes back for bytes on the wire until the server closes, which it has to; or
    the beginning of it."""
    found = b""
    with socket.create_connection(address[:2], timeout=OVER_S) as wire:
        try:
            wire.sendall(data)
            while piece := wire.recv(1 << 16):
                found += piece
                if beginning:
                    break
        except ConnectionError:  # refused amid what was sent
            pass
    return found


# ---------------------------------------------------------------- bodies


@pytest.fixture(scope="module")
def readers():
    pool = Readers(HANG_S, ServeConfig().document_mib)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", faults.BODIES)
def test_a_hostile_body_is_refused_within_its_memory(name, readers):
    job = readers.start(taken, "m", content=faults.BODIES[name](), name="The request")
    if name in ("escapes", "a file name of paths", "a million fields"):  # nothing wrong
        assert job.result().opened()[1].question == "Where is Anna?"
        return
    with pytest.raises(Refused) as caught:
        job.result().opened()
    assert len(str(caught.value)) < 500 and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("body", "forms"),  # of a value that may have several, each is told
    [
        (faults.repeated(faults.MESSAGES, "0", 9, "]}"), 1),
        (faults.repeated(faults.PARTS, "0", 9, "]}]}"), 2),
        (faults.chat(stop=[0] * 9), 2),
    ],
)
def test_of_many_errors_the_first_alone_is_made(body, forms):
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    assert caught.value.error_count() == forms


AT_MOST = {
    "messages": (MOST, lambda n: faults.repeated(faults.MESSAGES, faults.MESSAGE, n, "]}")),
    "parts": (MOST, lambda n: faults.repeated(faults.PARTS, faults.PART, n, "]}]}")),
    "stops": (MOST_STOPS, lambda n: faults.chat(stop=["a"] * n)),
}


@pytest.mark.parametrize("what", AT_MOST)
def test_a_request_has_so_many_of_each_at_most(what):
    most, body = AT_MOST[what]
    ChatRequest.model_validate_json(body(most))
    with pytest.raises(ValidationError, match="too_long"):
        ChatRequest.model_validate_json(body(most + 1))


def test_hostile_bodies_and_wires_get_a_status_and_the_next_is_answered(
    address, capfd, monkeypatch
):
    monkeypatch.setattr(door, "HEADERS_S", 0.5)
    with client(address) as http:
        for name in ("a number for each message", "deep arrays", "no UTF-8", "zeros", "quotes"):
            assert 400 <= asked(http, faults.BODIES[name]()).status_code < 500, name
            assert http.get("/health").status_code == 200
        for name, make in faults.WIRES.items():
            data = make()
            if name == "pipelined" or name.startswith(("a large length", "a length that is too")):
                data = data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n")
            got = sent(address, data, beginning=True)
            assert not got or b" 500 " not in got.splitlines()[0], name
            assert http.get("/health").status_code == 200, name
        assert asked(http).status_code == 200
        assert http.get("/health").json()["in_flight"] == 0
    assert "Traceback" not in "".join(capfd.readouterr())


def test_tiny_chunks_cost_the_loop_no_more_than_a_few(address):
    got = sent(address, faults.WIRES["tiny chunks"]())
    assert not got or b" 400 " in got.splitlines()[0]


# ---------------------------------------------------------------- from the first byte


def test_a_body_that_is_on_its_way_has_a_place(codec):
    with served(codec, in_flight=1, waiting=1) as (address, service), client(address) as http:
        with ExitStack() as wires:
            for _ in range(2):
                wire = wires.enter_context(socket.create_connection(address[:2]))
                wire.sendall(head_of(b"{", 5000))
            until(lambda: service.load == (1, 1))
            assert asked(http).status_code == 429
            # before the body: what expects a sign to send it gets none
            got = socket.create_connection(address[:2], timeout=OVER_S)
            got.sendall(faults.HEAD + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n")
            assert b" 429 " in got.recv(1 << 16).splitlines()[0]
            got.close()
            assert http.get("/health").json()["waiting"] == 1
        until(lambda: service.load == (0, 0))  # its clients are gone
        assert asked(http).status_code == 200


def test_a_body_and_headers_that_do_not_come_are_not_waited_for(codec, monkeypatch):
    monkeypatch.setattr(door, "HEADERS_S", 0.2)
    with served(codec, body_s=0.2) as (address, service):
        assert b" 408 " in sent(address, head_of(b"{", 5000)).splitlines()[0]
        for begun in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
            sent(address, begun)  # ends
        until(lambda: service.load == (0, 0))


def test_all_bodies_together_hold_so_much_and_no_more(codec):
    with served(codec, bodies_mib=1) as (address, service):
        with client(address) as http, ExitStack() as wires:
            for k in range(2):
                wire = wires.enter_context(socket.create_connection(address[:2]))
                wire.sendall(head_of(b" " * 450_000, 460_000))
                until(lambda k=k: service.load[0] == k + 1)
            large = faults.chat({"role": "user", "content": "Anna joined Boris. " * 20_000})
            until(lambda: asked(http, large).status_code == 503)
            assert asked(http, large).json()["error"]["code"] == "memory_full"
            assert asked(http).status_code == 200
        with client(address) as http:
            until(lambda: service.load == (0, 0))
            assert asked(http, large).status_code == 200  # all of it is free again


def test_what_is_held_is_counted_by_the_byte():
    memory = Memory(100)
    memory.hold("a", 60)
    memory.hold("b", 40)
    with pytest.raises(Refused):
        memory.hold("b", 41)
    memory.hold("a", 10)
    memory.hold("b", 90)
    memory.free("a")
    memory.free("b")
    assert not memory.held


def sleeps(path) -> bytes:
    return faults.chat(sleeps=str(path))


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_body_whose_client_is_gone_is_read_no_further(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "taken", faults.sleepy)
    monkeypatch.setattr(serve, "SWIFT_S", HANG_S * 10)  # no limit of time may end it instead
    with served(codec, document_s=HANG_S * 10) as (address, service):
        path = tmp_path / "pid"
        with socket.create_connection(address[:2]) as wire:
            wire.sendall(head_of(sleeps(path)))
            until(lambda: path.exists() and path.read_text())
        until(lambda: service.load == (0, 0) and ended(int(path.read_text())))


def test_bodies_that_take_long_hold_up_none_that_does_not(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "taken", faults.sleepy)
    monkeypatch.setattr(serve, "SWIFT_S", 0.2)
    paths = [tmp_path / str(k) for k in range(2 * serve.CHILDREN)]
    with served(codec) as (address, _), ExitStack() as wires, client(address) as http:
        for path in paths:
            wire = wires.enter_context(socket.create_connection(address[:2]))
            wire.sendall(head_of(sleeps(path)))
        until(lambda: all(path.exists() for path in paths))
        until(lambda: asked(http).status_code == 200)
        assert http.get("/health").json()["in_flight"] == len(paths)


def test_past_its_time_a_body_is_given_up(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "taken", faults.sleepy)
    with served(codec, document_s=0.2) as (address, _), client(address) as http:
        reply = asked(http, sleeps(tmp_path / "pid"))
        assert reply.status_code == 413 and "0.2 s" in reply.json()["error"]["message"]


# ---------------------------------------------------------------- connections


async def large(scope, receive, send):
    """An application that answers with more than a socket holds."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            body = {"type": "http.response.body", "body": bytes(1 << 16), "more_body": True}
            await send(body)
        await send({"type": "http.response.body", "body": b""})


def test_an_answer_that_is_not_taken_in_is_given_up(monkeypatch):
    monkeypatch.setattr(door, "SEND_S", 0.2)
    with listening(large) as (address, server), socket.create_connection(address[:2]) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: server.server_state.connections)
        until(lambda: not server.server_state.connections)


def test_where_connections_are_too_many_an_idle_one_makes_room(codec, monkeypatch):
    monkeypatch.setattr(door, "CONNECTIONS", 4)
    monkeypatch.setattr(door, "HEADERS_S", HANG_S)  # no limit of time makes the room
    with served(codec) as (address, _), ExitStack() as wires:
        idle = [wires.enter_context(socket.create_connection(address[:2])) for _ in range(12)]
        with client(address) as http:
            assert http.get("/health").status_code == 200
        for wire in idle[:6]:
            wire.settimeout(OVER_S)
            with contextlib.suppress(ConnectionError):
                assert wire.recv(1) == b""


def test_what_the_loop_complains_of_is_one_line(capfd):
    server = Server(large, 1, lambda: None)
    for _ in range(1000):
        error = OSError(24, "Too many open files")
        server._complain(None, {"message": "socket.accept() out of resources", "exception": error})
    assert capfd.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- who may ask


def test_no_web_page_of_others_asks_without_a_key(address):
    own = f"http://127.0.0.1:{address[1]}"
    with client(address) as http:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "[", "10.0.0.1"):
            for path in ("/health", "/v1/models"):
                assert http.get(path, headers={"Host": f"{host}:80"}).status_code == 403, host
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80"):
            assert http.get("/health", headers={"Host": host}).status_code == 200, host
        for origin in ("http://evil.example", "null", "http://localhost:1", f"{own}.evil.example"):
            reply = asked(http, headers={"Origin": origin})
            assert reply.status_code == 403 and "--cors" in reply.text, origin
            assert "access-control-allow-origin" not in reply.headers
        assert asked(http, headers={"Origin": own}).status_code == 200
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "",
            "text/application/json",
        ):
            assert asked(http, headers={"Content-Type": kind}).status_code == 415, kind
        kind = "Application/JSON; charset=utf-8"
        assert asked(http, headers={"Content-Type": kind}).status_code == 200
        preflight = {"Origin": "http://a.b", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/chat/completions", headers=preflight).status_code == 403


def test_a_page_that_was_named_may_ask(codec):
    page = "http://localhost:3000"
    with served(codec, cors=(page,)) as (address, _), client(address) as http:
        wanted = {"Access-Control-Request-Method": "POST"}
        wanted |= {"Access-Control-Request-Headers": "content-type"}
        reply = http.options("/v1/chat/completions", headers=wanted | {"Origin": page})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == page
        other = {"Origin": "http://evil.example"}
        reply = http.options("/v1/chat/completions", headers=wanted | other)
        assert "access-control-allow-origin" not in reply.headers
        reply = asked(http, headers={"Origin": page})
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == page
        assert asked(http, headers=other).status_code == 403
        rebound = {"Origin": page, "Host": "evil.example"}
        assert asked(http, headers=rebound).status_code == 403


def test_what_is_no_origin_is_refused_and_all_of_them_without_a_key():
    for origin in ("", "localhost", "http://", "http://a.b/", "http://a.b/x", "http://u@a.b"):
        with pytest.raises(UserError, match="no origin"):
            check_origins([origin], keyed=True)
    for origin in ("*", "null"):
        check_origins([origin], keyed=True)
        with pytest.raises(UserError, match="every web page"):
            check_origins([origin], keyed=False)
    check_origins(["http://localhost:3000", "https://a.b"], keyed=False)


def test_a_key_comes_behind_its_scheme_in_any_case(codec):
    with served(codec, "k3y") as (address, _), client(address) as http:
        for sent, status in {
            "Bearer k3y": 200, "bearer k3y": 200, "BEARER  k3y": 200, "k3y": 401, "Bearerk3y": 401,
            "Basic k3y": 401, "Bearer": 401, "": 401, "Bearer Bearer k3y": 401, "Bearer k3y x": 401,
        }.items():  # fmt: skip
            reply = http.get("/v1/models", headers={"Authorization": sent})
            assert reply.status_code == status, sent


# ---------------------------------------------------------------- long documents


class Heard:
    """A reading of a document, and how it ended."""

    def __init__(self, document: str):
        self.over, self.ended = threading.Event(), None
        task = make_task(0, 1, "one_fact")
        task = type(task)("asked", task.question, (), document, kind="asked")
        self.reading = Job(task, AGENT, self.tell)

    def tell(self, event):
        if isinstance(event, Ended):
            self.ended = event
            self.over.set()


def test_a_long_document_is_cut_beside_the_readings(codec, monkeypatch):
    gate, ids = threading.Event(), Codec.ids
    slow = lambda it, text: (len(text) < 10**5 or gate.wait(HANG_S)) and ids(it, text)  # noqa: E731
    monkeypatch.setattr(Codec, "ids", slow)
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna", per_step=64))
    long, short = Heard("Anna joined Boris. " * 10**4), Heard("Boris toured Oslo.")
    service.submit(long.reading)
    service.submit(short.reading)
    try:
        assert short.over.wait(OVER_S) and not long.over.is_set()
    finally:
        gate.set()
    assert long.over.wait(HANG_S) and long.ended == Ended()
    assert [*long.reading.sections.ids] == [*ids(codec, long.reading.task.document)]
    service.close()


def test_a_document_that_is_too_long_is_not_encoded_to_its_end(codec, monkeypatch):
    encoded, encode = [], Codec.encode
    monkeypatch.setattr(Codec, "PART", 1000)
    monkeypatch.setattr("engines.service.LONG", 5000)
    monkeypatch.setattr("engines.service.WORD", 20_000)
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"), most_tokens=2000)
    counted = lambda it, text: encoded.append(len(text)) or encode(it, text)  # noqa: E731
    monkeypatch.setattr(Codec, "encode", counted)
    for document, why, most in (
        ("Anna " * 10_000, "32,000|50,000", 0),  # characters
        ("Anna " * 6000, "more than 2,000 tokens", 25_000),
        ("a" * 30_000, "without a blank", 0),
    ):
        encoded.clear()
        heard = Heard(document)
        service.submit(heard.reading)
        assert heard.over.wait(OVER_S) and heard.ended.too_long
        assert any(word in heard.ended.error for word in why.split("|"))
        assert sum(encoded) <= most
    service.close()


def test_a_document_is_cut_no_further_when_its_client_is_gone(codec, monkeypatch):
    monkeypatch.setattr(Codec, "PART", 1000)
    monkeypatch.setattr("engines.service.LONG", 5000)
    service = Service(ScriptedEngine(codec, lambda prompt: "Anna"))
    heard, encoded, encode = Heard("Anna joined Boris. " * 50_000), [], Codec.encode

    def gone(it, text):
        if len(text) > 600:
            service.cancel(heard.reading)
        encoded.append(text)
        return encode(it, text)

    monkeypatch.setattr(Codec, "encode", gone)
    service.submit(heard.reading)
    service._cutters.shutdown(wait=True)
    assert 0 < sum(map(len, encoded)) < 20_000 and not heard.over.is_set()
    service.close()
