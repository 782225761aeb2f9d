"""Hostile requests: none stops the others, none holds more than it may, each gets its status."""

import json
import os
import random
import socket
from contextlib import ExitStack, suppress
from itertools import product

import http_faults as faults
import pytest
from conftest import HANG_S, until
from served import PATH, chat, error_of, listening, serving

import commands.door as door
import commands.serve as serve
from config.errors import UserError
from embedded import tiny
from engines.scripted import ScriptedEngine
from tasks.chat_requests import MOST, MOST_STOPS, ChatRequest, read_request
from tasks.limited import Readers
from tokens.codec import Codec

PAGE = "http://localhost:3000"


def anna(codec, **config):
    return serving(ScriptedEngine(codec, lambda prompt: "Anna"), **config)


@pytest.fixture(scope="module")
def server():
    with anna(Codec(tiny.make_tokenizer())) as served:
        yield served


def post(http, body, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(PATH, content=body, headers=headers)


def wire(http):
    return socket.create_connection((http.base_url.host, http.base_url.port), timeout=HANG_S)


def begun(body: bytes, length: int) -> bytes:
    return faults.HEAD + f"Content-Length: {length}\r\n\r\n".encode() + body


def sent(http, data: bytes, beginning: bool = False) -> bytes:
    """Return what comes back for bytes on the wire until the server closes, which it has to; or
    the beginning of it."""
    found = b""
    with wire(http) as connection, suppress(ConnectionError):  # refused amid what was sent
        connection.sendall(data)
        while piece := connection.recv(1 << 16):
            found += piece
            if beginning:
                break
    return found


# ---------------------------------------------------------------- bodies


@pytest.fixture(scope="module")
def readers():
    pool = Readers(HANG_S, 400)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", faults.BODIES)
def test_a_hostile_body_is_refused_within_its_memory(name, readers):
    job = readers.start(read_request, content=faults.BODIES[name](), name="The request")
    if name in ("escapes", "a file name of paths", "many fields", "a long name of the model"):
        with suppress(UserError):  # nothing wrong
            assert job.result().question == "Where is Anna?"
        return
    with pytest.raises(UserError) as caught:
        job.result()
    assert type(caught.value) is UserError  # it takes no more memory than it may
    assert len(str(caught.value)) < 500 and str(caught.value).endswith(".")


@pytest.mark.parametrize(("most", "body"), [
    (MOST, lambda n: faults.repeated(faults.MESSAGES, faults.MESSAGE, n, "]}")),
    (MOST, lambda n: faults.repeated(faults.PARTS, faults.PART, n, "]}]}")),
    (MOST_STOPS, lambda n: faults.chat(stop=["a"] * n)),
])  # fmt: skip
def test_a_request_has_so_many_of_each_at_most(most, body):
    ChatRequest.parse(body(most))
    with pytest.raises(UserError):
        ChatRequest.parse(body(most + 1))


def malformed():
    """Yield bodies that are cut off, or wrong in some letters."""
    whole = json.dumps(chat()).encode()
    rng = random.Random(0)
    yield from (whole[: rng.randrange(len(whole))] for _ in range(20))
    for _ in range(20):
        broken = bytearray(whole)
        for _ in range(3):
            broken[26 + rng.randrange(12)] = rng.choice(b'\xff\0{}[]":,')
        yield bytes(broken)


def test_malformed_requests_get_nothing_but_4xx(server, read_here):
    http, chats = server
    seen = set()
    for body in malformed():
        reply = post(http, body)
        assert 400 <= reply.status_code < 500, (body[:200], reply.text)
        seen.add(error_of(reply)[:40])
    assert len(seen) > 5  # not one and the same
    paths = ("/", "/v1", "/v1/chat", "/v1/responses", "/v1/models/none", "/%00")
    for path, method in [*product(paths, ("GET", "POST", "PUT")),
                         *product([PATH], ("GET", "PUT", "DELETE", "PATCH"))]:  # fmt: skip
        reply = http.request(method, path)
        assert reply.status_code in (404, 405) and error_of(reply), path
    until(lambda: not chats.held)


def test_hostile_bodies_and_wires_get_a_status_and_the_next_is_answered(server, capfd, monkeypatch):
    http, chats = server
    monkeypatch.setattr(door, "STUCK_S", 0.1)
    http.headers["Connection"] = "close"  # one that is kept may be given up
    for name in ("a number for each message", "deep arrays", "no UTF-8", "zeros"):
        assert 400 <= post(http, faults.BODIES[name]()).status_code < 500, name
    for name, make in faults.WIRES.items():
        data = make()
        if name == "pipelined" or name.startswith(("a large length", "a length that is too")):
            data = data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n")
        got = sent(http, data, beginning=True)
        assert not got or b" 500 " not in got.splitlines()[0], name
        assert http.get("/health").status_code == 200, name
    assert post(http, faults.chat(model=chats.name)).status_code == 200
    until(lambda: not chats.held)
    http.headers["Connection"] = "keep-alive"
    assert "Traceback" not in "".join(capfd.readouterr())


# ---------------------------------------------------------------- from the first byte


def test_a_body_that_is_on_its_way_has_a_place(codec, read_here):
    with anna(codec, in_flight=1, waiting=1) as (http, chats):
        with ExitStack() as wires:
            for _ in range(2):
                wires.enter_context(wire(http)).sendall(begun(b"{", 5000))
            until(lambda: len(chats.held) == 2)
            # before the body: what expects a sign to send it gets none
            expects = b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n"
            assert b" 503 " in sent(http, faults.HEAD + expects, True).splitlines()[0]
        until(lambda: not chats.held)  # its clients are gone
        assert post(http, faults.chat(model="")).status_code == 200


def test_a_body_and_headers_that_do_not_come_are_not_waited_for(codec, monkeypatch):
    monkeypatch.setattr(door, "STUCK_S", 0.2)
    monkeypatch.setattr(serve, "BODY_S", 0.2)
    with anna(codec) as (http, chats):
        assert b" 408 " in sent(http, begun(b"{", 5000), True).splitlines()[0]
        for head in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
            sent(http, head)  # ends
        until(lambda: not chats.held)


def test_all_bodies_together_hold_so_much_and_no_more(codec, read_here, monkeypatch):
    monkeypatch.setattr(serve, "BODIES", 1)
    large = faults.chat({"role": "user", "content": "Anna joined Boris. " * 20_000}, model="")
    with anna(codec, body_mib=1) as (http, chats):
        with ExitStack() as wires:
            for k in range(2):
                wires.enter_context(wire(http)).sendall(begun(b" " * 450_000, 460_000))
                until(lambda k=k: sum(chats.held.values()) == 450_000 * (k + 1))
            assert post(http, large).status_code == 503
            assert post(http, faults.chat(model="")).status_code == 200
        until(lambda: not chats.held)
        assert not chats.held and post(http, large).status_code == 200  # all is free again


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_body_whose_client_is_gone_is_read_no_further(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "read_request", faults.sleepy)
    # no limit of time may end it instead
    with anna(codec, document_s=HANG_S * 10) as (http, chats):
        path = tmp_path / "pid"
        with wire(http) as connection:
            body = faults.chat(sleeps=str(path))
            connection.sendall(begun(body, len(body)))
            until(lambda: path.exists() and path.read_text())
        until(lambda: not chats.held and ended(int(path.read_text())))


def test_a_body_that_takes_long_is_given_up(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "read_request", faults.sleepy)
    with anna(codec, document_s=0.2) as (http, _):
        assert post(http, faults.chat(sleeps=str(tmp_path / "pid"))).status_code == 413


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
    monkeypatch.setattr(door, "STUCK_S", 0.2)
    with listening(large) as (url, server):
        address = "127.0.0.1", int(url.rpartition(":")[2])
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: server.server_state.connections)
            until(lambda: not server.server_state.connections)


def test_more_connections_than_that_are_refused(codec, monkeypatch):
    monkeypatch.setattr(door, "CONNECTIONS", 4)
    with anna(codec) as (http, _), ExitStack() as wires:
        for _ in range(4):
            wires.enter_context(wire(http))
        until(lambda: http.get("/health").status_code == 503)


# ---------------------------------------------------------------- who may ask


def test_no_web_page_of_others_asks_without_a_key(server, read_here):
    http, chats = server
    own, body = str(http.base_url).rstrip("/"), faults.chat(model=chats.name)
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "[", "10.0.0.1"):
        for path in ("/health", "/v1/models"):
            assert http.get(path, headers={"Host": f"{host}:80"}).status_code == 403, host
        assert post(http, body, Host=host).status_code == 403, host
    docker = {"Host": "host.docker.internal:8142"}
    assert "--allow-host host.docker.internal" in error_of(http.get("/v1/models", headers=docker))
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80"):
        assert http.get("/health", headers={"Host": host}).status_code == 200, host
    for origin in ("http://evil.example", "null", f"{own}.evil.example"):
        reply = post(http, body, Origin=origin)
        assert reply.status_code == 403 and "--cors" in reply.text, origin
        assert "access-control-allow-origin" not in reply.headers
    assert post(http, body, Origin=own).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "text/application/json"):
        assert post(http, body, Content_Type=kind).status_code == 415, kind
    assert post(http, body, Content_Type="Application/JSON; charset=utf-8").status_code == 200
    asks = {"Origin": "http://a.b", "Access-Control-Request-Method": "POST"}
    reply = http.options(PATH, headers=asks)
    assert reply.status_code in (403, 405) and "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_a_page_or_a_name_that_was_named_may_ask(codec, read_here, key):
    with anna(codec, cors=(PAGE,), allow_host=("Docker.Internal",), key=key) as (http, _):
        wanted = {"Access-Control-Request-Method": "POST"}
        wanted |= {"Access-Control-Request-Headers": "content-type"}
        reply = http.options(PATH, headers=wanted | {"Origin": PAGE})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        reply = http.options(PATH, headers=wanted | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in reply.headers
        how = dict(Origin=PAGE, Host="docker.internal:80", Authorization=f"Bearer {key or 'any'}")
        reply = post(http, faults.chat(model=""), **how)
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == PAGE
        assert key or http.get("/health", headers={"Host": "evil.internal"}).status_code == 403
