"""The server, over real sockets: OpenAI's own client, curl, a load, and 500 malformed requests."""

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from conftest import HANG_S, forked, until
from typer.testing import CliRunner

import cli
from commands.door import Server
from commands.serve import API_KEY, Terms, _listen, app
from config.options import EMBEDDED, ServeConfig
from data import extract_answer, formed
from embedded import tiny
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from engines.service import Service
from models.load import load_model
from rollout import Sampling, follow
from tasks import worlds
from tokens.codec import Codec

AGENT, FULL = tiny.agent("memagent"), tiny.agent("full")
NAME = "tiny-memagent"
JSON = {"Content-Type": "application/json"}
MEMORY = Path("/proc/self/statm")


@contextmanager
def served(engine, agent=AGENT, terms=None, **service):
    """Serve in a thread; yields the URL and the service."""
    terms, service = terms or Terms(NAME), Service(engine, **service)
    listening = _listen(ServeConfig(port=0))
    server = Server(app(service, agent, terms), 1, service.stop)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def chat(task, **fields):
    said = [{"role": "user", "content": task.document}, {"role": "user", "content": task.question}]
    return {"model": NAME, "messages": said} | fields


def client(url, **how):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, **how)


@pytest.fixture(scope="module")
def engine():
    """The embedded policy, with room for what it has read."""
    codec = Codec(tiny.make_tokenizer())
    model = load_model(EMBEDDED, "float32", "cpu")
    return TransformersEngine(model, codec, max_rows=16, max_cache_tokens=1 << 13, remember=True)


@pytest.fixture(scope="module")
def server(engine):
    with served(engine) as (url, _):
        yield url


def alone(engine, task, agent=AGENT):
    """Return the memories and the answer of a task that is read by itself."""
    asked = replace(task, id="asked")
    said = [str(turn.response).strip() for turn in follow(engine, agent, asked, Sampling(0.0))]
    return said[:-1], extract_answer(said[-1], agent.config.form)[0]


def memories(reasoning):
    return [line.partition("] ")[2] for line in reasoning.splitlines()]


TASK = worlds.make_task(5, 6, "one_fact")


# ---------------------------------------------------------------- clients


def test_openais_client_gets_memories_answer_usage_and_sections(server):
    reply = client(server).chat.completions.create(**chat(TASK))
    (choice,) = reply.choices
    own = TransformersEngine(load_model(EMBEDDED, "float32", "cpu"), Codec(tiny.make_tokenizer()))
    said, answer = alone(own, TASK)
    assert (choice.message.role, choice.message.content) == ("assistant", answer)
    assert memories(choice.message.reasoning_content) == said and len(said) == 6
    assert choice.finish_reason == "stop" and reply.model == NAME
    counts, usage = own.counts(), reply.usage
    assert usage.prompt_tokens == counts["prefilled_tokens"] + counts["reused_tokens"]
    assert usage.completion_tokens == counts["generated_tokens"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert reply.metadata["agent"] == "memagent" and reply.metadata["sections_read"] == "6"


def test_a_stream_brings_each_memory_before_the_answer(server):
    whole = client(server).chat.completions.create(**chat(TASK))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client(server).chat.completions.create(**chat(TASK, **options))]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [d.reasoning_content for d in deltas if getattr(d, "reasoning_content", None)]
    assert len(thoughts) == 6  # one a section
    assert "".join(thoughts) == whole.choices[0].message.reasoning_content
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[0].role == "assistant" and not chunks[-1].choices
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    last = chunks[-2]
    assert last.choices[0].finish_reason == "stop" and last.metadata == whole.metadata
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_plan_is_no_memory_of_a_section(codec):
    planner = tiny.agent("infmem")

    def script(prompt):
        if prompt.final:
            return formed("Lima", "boxed")
        return "Otto reached Lima." if prompt.section else "<recall>Otto</recall>"

    with served(ScriptedEngine(codec, script), agent=planner) as (url, _):
        reply = client(url).chat.completions.create(**chat(TASK))
    n = len(planner.on(codec).sections(TASK))
    lines = reply.choices[0].message.reasoning_content.splitlines()
    assert lines == [f"[section {k} of {n}] Otto reached Lima." for k in range(1, n + 1)]
    assert reply.metadata["sections_read"] == str(n)


def test_the_same_document_is_read_once(engine):
    with served(engine) as (url, _):
        task = worlds.make_task(77, 40, "one_fact")
        name = next(n for n in ("Anna", "Boris", "Clara") if n not in task.question)
        other = replace(task, question=f"Where is {name}?")
        replies = [client(url).chat.completions.create(**chat(t)) for t in (task, other)]
        first, second = [r.usage for r in replies]
        cached = second.prompt_tokens_details.cached_tokens
        assert cached >= len(engine.codec.ids(task.document))  # the whole of it
        assert cached > first.prompt_tokens_details.cached_tokens
        assert second.prompt_tokens - cached < second.prompt_tokens / 2


def test_the_sections_are_named_in_which_the_answer_stands(codec):
    task = worlds.make_task(5, 6, "one_fact")
    facts = task.document.split(". ")
    place = facts[-1].rstrip(".").split()[-1]  # a word of the last section

    with served(ScriptedEngine(codec, lambda prompt: place)) as (url, _):
        metadata = client(url).chat.completions.create(**chat(task)).metadata
    sections = AGENT.on(codec).sections(task)
    named = [int(k) for k in metadata["sections"].split(", ")]
    assert all(place in sections[k - 1] for k in named)
    assert len(named) == sum(place in section for section in sections)


def test_max_tokens_temperature_and_stop_reach_the_answer(server, engine):
    ask = client(server).chat.completions.create
    short = ask(**chat(TASK, max_tokens=1))
    assert short.choices[0].finish_reason == "length"
    warm = [ask(**chat(TASK, temperature=2.0, seed=k)).choices[0] for k in (1, 1, 2, 3, 4)]
    said = [choice.message.reasoning_content for choice in warm]
    assert said[0] == said[1] and len({*said}) > 2
    whole = ask(**chat(TASK)).choices[0].message.content
    assert ask(**chat(TASK, stop=whole[1:])).choices[0].message.content == whole[:1]


def curl(*words):
    ran = subprocess.run(["curl", "-sS", *words], capture_output=True, text=True, timeout=HANG_S)
    assert not ran.returncode, ran.stderr
    return ran.stdout


def test_plain_curl(server, tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps(chat(TASK)))
    url, to = f"{server}/v1/chat/completions", ["-H", "Content-Type: application/json"]
    reply = json.loads(curl(url, *to, "-d", f"@{body}"))
    assert reply["object"] == "chat.completion" and reply["choices"][0]["message"]["content"]
    body.write_text(json.dumps(chat(TASK, stream=True)))
    lines = [line for line in curl("-N", url, *to, "-d", f"@{body}").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert json.loads(curl(f"{server}/health"))["status"] == "ok"
    assert [m["id"] for m in json.loads(curl(f"{server}/v1/models"))["data"]] == [NAME]
    assert json.loads(curl(f"{server}/v1/models/{NAME}"))["id"] == NAME


# ---------------------------------------------------------------- bounds


class Slow(ScriptedEngine):
    """Answers a turn a step, and nothing before its gate is opened."""

    def __init__(self, codec):
        super().__init__(codec, lambda prompt: "Anna", per_step=1)
        self.gate = threading.Event()

    def step(self):
        return super().step() if self.gate.wait(0.002) else []


def error_of(reply):
    error = reply.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["message"].endswith(".")
    return error


def test_past_a_bound_the_status_says_which(codec):
    slow = Slow(codec)
    terms = Terms(NAME, body_bytes=20_000)
    with (
        served(slow, terms=terms, in_flight=1, waiting=1, most_tokens=200) as (url, service),
        httpx.Client(base_url=url, timeout=HANG_S, headers=JSON) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def post(**fields):
            return http.post("/v1/chat/completions", json=chat(TASK, **fields))

        two = [pool.submit(post) for _ in range(2)]
        until(lambda: service.load == (1, 1))
        third = post()
        assert third.status_code == 429 and third.headers["retry-after"]
        assert error_of(third)["type"] == "rate_limit_error"
        slow.gate.set()
        assert [one.result().status_code for one in two] == [200, 200]
        until(lambda: service.load == (0, 0))
        assert post().status_code == 200  # the places are free again
        long = chat(worlds.make_task(5, 30, "one_fact"))
        reply = http.post("/v1/chat/completions", json=long)
        assert reply.status_code == 413 and "200 are read" in error_of(reply)["message"]
        reply = http.post("/v1/chat/completions", json=long | {"stream": True})
        assert reply.status_code == 413  # before the headers
        reply = http.post("/v1/chat/completions", content=b"x" * 20_001)
        assert reply.status_code == 413 and error_of(reply)["code"] == "too_large"
        pieces = (b"x" * 1000 for _ in range(30))  # no length is told beforehand
        assert http.post("/v1/chat/completions", content=pieces).status_code == 413


def test_past_the_time_limit_places_are_free_again(codec):
    with (
        served(Slow(codec), terms=Terms(NAME, timeout_s=0.5), in_flight=1) as (url, service),
        httpx.Client(base_url=url, timeout=HANG_S) as http,
        ThreadPoolExecutor(2) as pool,
    ):

        def post(_):
            return http.post("/v1/chat/completions", json=chat(TASK))

        for late in pool.map(post, range(2)):  # nothing answers
            assert late.status_code == 503 and error_of(late)["code"] == "timeout"
        until(lambda: service.load == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place_at_once(codec, stream):
    slow, lines = Slow(codec), []
    with served(slow, terms=Terms(NAME, log=lines.append), in_flight=1) as (url, service):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(chat(TASK, stream=stream)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(head.encode() + body)
            until(lambda: service._running)
        until(lambda: service.load == (0, 0) and not service._running)
        assert not slow._queue  # the prompt in flight was given up
        until(lambda: lines)
        assert " 499: " in lines[0]
        slow.gate.set()
        assert client(url).chat.completions.create(**chat(TASK)).choices[0].message.content


def test_a_key_is_asked_for_and_never_shown(codec):
    lines, secret = [], "s3cret-of-mine"
    terms = Terms(NAME, secret, log=lines.append)
    assert secret not in repr(terms)
    with served(ScriptedEngine(codec, lambda prompt: "Anna"), terms=terms) as (url, _):
        for key in ("", "wrong", secret[:-1], secret + "x"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            for path in ("/v1/models", f"/v1/models/{NAME}"):
                assert httpx.get(url + path, headers=headers).status_code == 401
            reply = httpx.post(f"{url}/v1/chat/completions", json=chat(TASK), headers=headers)
            assert reply.status_code == 401 and error_of(reply)["type"] == "authentication_error"
            assert secret not in reply.text
        assert httpx.get(f"{url}/health").status_code == 200
        own = openai.OpenAI(base_url=f"{url}/v1", api_key=secret)
        assert own.chat.completions.create(**chat(TASK)).choices[0].message.content == "Anna"
    assert lines and not any(secret in line for line in lines)


def refused(*words, **environment):
    said = CliRunner().invoke(cli.app, ["serve", "--model", "tiny", *words], env=environment)
    assert said.exit_code == 2 and said.output.startswith("memagent: ")
    assert said.output.count("\n") == 1 and "Traceback" not in said.output
    return said.output


def test_what_cannot_be_served_is_refused_in_one_sentence(tmp_path):
    assert "--api-key" in refused("--host", "0.0.0.0")
    assert API_KEY in refused("--host", "0.0.0.0")
    assert "cannot be read" in refused("--api-key", str(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    assert "is empty" in refused("--api-key", str(empty))
    assert "characters" in refused(**{API_KEY: "two words"})
    assert "listened on" in refused("--host", "203.0.113.7", **{API_KEY: "k"})
    assert "listened on" in refused("--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refused("--port", str(taken.getsockname()[1]))
    assert "nobody" in refused("--agent", "nobody")
    assert "timeout" in refused("--timeout-s", "0")


# ---------------------------------------------------------------- malformed


def mutated(rng: random.Random) -> bytes:
    """Return a body that is wrong in one of many ways."""
    body = chat(TASK)
    odd = [None, 5, -1, 1e308, 10**40, [], {}, "", "\0", True, [[]], {"a": {}}, "x" * 5000, [None]]
    kind = rng.randrange(5)
    if kind == 0:  # cut or broken bytes
        raw = bytearray(json.dumps(body).encode())
        return bytes(raw[: rng.randrange(len(raw))])
    if kind == 1:
        raw = bytearray(json.dumps(body).encode())
        for _ in range(3):
            raw[rng.randrange(0, 30)] = rng.choice(b'\xff\0{}[]":,')
        return bytes(raw)
    if kind == 2:
        body[rng.choice(("messages", "model"))] = rng.choice(odd)
    elif kind == 3:
        name = rng.choice(("temperature", "max_tokens", "seed", "top_p", "stream_options", "stop"))
        body[name] = rng.choice([x for x in odd if x not in (None, True, [], "", {}, 5)] + [1e999])
        if name == "stop":
            body[name] = rng.choice([5, {}, [5]])
        if name == "stream_options":
            body[name] = rng.choice([5, "x", [1], {"include_usage": "no"}])
        if name in ("temperature", "top_p"):
            body[name] = rng.choice(
                [-1, 5, 1e308, 10**40, "x", [], {}, float("nan"), float("-inf")]
            )
        if name in ("seed", "max_tokens"):
            body[name] = rng.choice([1.5, 10**40, "x", [], {}, float("inf"), -(10**40)])
    else:
        message = body["messages"][rng.randrange(2)]
        message[rng.choice(("role", "content"))] = rng.choice([5, {}, [5], ["x"], True, [{}], 1e9])
    return json.dumps(body).encode()


def test_five_hundred_malformed_requests_get_nothing_but_4xx(server, capfd):
    rng = random.Random(0)
    with httpx.Client(base_url=server, timeout=HANG_S, headers=JSON) as http:
        seen = set()
        for _ in range(440):
            reply = http.post("/v1/chat/completions", content=mutated(rng))
            assert 400 <= reply.status_code < 500, reply.text
            seen.add(error_of(reply)["message"][:40])
        assert len(seen) > 20  # not one and the same
        paths = ["/", "/v1", "/v1/chat", "/v1/completions", "/v2/models", "/v1/models/none", "/%00"]
        for k in range(40):
            reply = http.request(rng.choice(["GET", "POST", "PUT"]), paths[k % 7])
            assert reply.status_code in (404, 405) and error_of(reply)
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            reply = http.request(method, "/v1/chat/completions")
            assert reply.status_code == 405 and error_of(reply)
    host, port = server.removeprefix("http://").split(":")
    for raw in (b"\0\0\0\0", b"GET", b"POST / HTTP/9.9", b"x" * 70_000) * 4:
        with socket.create_connection((host, int(port)), timeout=HANG_S) as wire:
            wire.sendall(raw + b"\r\n\r\n")
            wire.shutdown(socket.SHUT_WR)
            first = wire.recv(100)
            assert not first or first.split()[1] in (b"400", b"404", b"415")
    assert "Traceback" not in "".join(capfd.readouterr())
    assert httpx.get(f"{server}/health").json()["in_flight"] == 0


# ---------------------------------------------------------------- a load


def megabytes():
    return int(MEMORY.read_text().split()[1]) * resource.getpagesize() / 2**20


def test_no_reply_waits_for_an_acknowledgement():
    with _listen(ServeConfig(port=0)) as listening:
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(not MEMORY.exists(), reason="memory is read from /proc")
def test_two_hundred_requests_of_twenty_clients_none_lost_none_mixed_up(engine):
    """Mixed lengths; every tenth client goes away in the middle; memory stays where it is."""
    rng = random.Random(1)
    lengths = [rng.choice((1, 1, 2, 2, 3, 4, 6, 12)) for _ in range(200)]
    tasks = [worlds.make_task(1000 + k, n, "one_fact") for k, n in enumerate(lengths)]
    own = TransformersEngine(engine.model, engine.codec)
    checked = {k: alone(own, tasks[k]) for k in range(0, 200, 8)}
    assert len({answer + str(said) for said, answer in checked.values()}) == len(checked)
    with served(engine, in_flight=16, waiting=64) as (url, service):
        patient = client(url, timeout=HANG_S)  # one for all threads, as memory is measured

        def ask(k):
            task = tasks[k]
            if k % 10 == 9:  # reads the first piece of a stream, and is gone
                with httpx.stream(
                    "POST",
                    f"{url}/v1/chat/completions",
                    json=chat(task, stream=True),
                    timeout=HANG_S,
                ) as reply:
                    next(reply.iter_raw())
                return None
            message = patient.chat.completions.create(**chat(task)).choices[0].message
            return memories(message.reasoning_content), message.content

        with patient, ThreadPoolExecutor(20) as pool:
            got = dict(zip(range(100), pool.map(ask, range(100)), strict=True))
            half = megabytes()
            got |= dict(zip(range(100, 200), pool.map(ask, range(100, 200)), strict=True))
        grown = megabytes() - half
        until(lambda: service.load == (0, 0) and not service._running)
    for k, task in enumerate(tasks):
        if k % 10 == 9:
            continue
        said, answer = got[k]
        assert answer and len(said) == len(AGENT.on(engine.codec).sections(task))
        if k in checked:
            assert (said, answer) == checked[k], k
    assert grown < 24, f"{grown:.0f} MiB more after the second hundred"


# ---------------------------------------------------------------- the command


def start(tmp_path, *words):
    """Start a server that answers nothing before its gate, the last thing returned, is opened."""
    out, gate = tmp_path / "serve.log", multiprocessing.get_context("fork").Event()
    with pytest.MonkeyPatch.context() as patch:
        step = Service._step
        patch.setattr(Service, "_step", lambda it: gate.wait(0.01) and step(it))
        process = forked(["serve", "--model", "tiny", "--port", "0", *words], out)
    until(lambda: "answers at" in out.read_text() if out.exists() else False)
    url = next(w for w in out.read_text().split() if w.startswith("http://")).removesuffix("/v1")
    until(lambda: _healthy(url))
    return process, url, out, gate


def _healthy(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_finishes_what_is_in_flight(tmp_path):
    process, url, out, gate = start(tmp_path, "--grace-s", str(HANG_S))
    task = worlds.make_task(3, 40, "one_fact")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client(url).chat.completions.create, **chat(task))
        until(lambda: httpx.get(f"{url}/health", timeout=HANG_S).json()["in_flight"] == 1)
        os.kill(process.pid, signal.SIGTERM)
        gate.set()
        reply = asked.result()
    assert reply.choices[0].message.content and reply.metadata["sections_read"] == "40"
    process.join()
    assert process.exitcode == 0 and " 200: 40 sections" in out.read_text()
    assert task.question not in out.read_text()  # nothing of what was asked
    assert not _healthy(url)


def test_past_the_grace_time_the_rest_is_told_so(tmp_path):
    process, url, out, _ = start(tmp_path, "--grace-s", "0.2")
    ask, task = client(url).chat.completions.create, worlds.make_task(3, 3000, "one_fact")
    host, port = url.removeprefix("http://").split(":")
    with ThreadPoolExecutor(1) as pool, socket.create_connection((host, int(port))) as half:
        half.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        asked = pool.submit(ask, **chat(task))
        chunks = iter(ask(**chat(task, stream=True)))
        assert next(chunks).choices[0].delta.role == "assistant"
        until(lambda: httpx.get(f"{url}/health", timeout=HANG_S).json()["in_flight"] == 3)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            asked.result()
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        half.settimeout(HANG_S)
        assert b" 503 " in half.recv(1 << 16).splitlines()[0]
    process.join()
    said = out.read_text()
    assert process.exitcode == 0 and "Traceback" not in said
    assert said.count(" 503: ") == 2 and len(said.splitlines()) <= 6
