"""The server, over real sockets: OpenAI's own client, a load, and malformed requests."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx
import openai
import pytest
from conftest import HANG_S, forked, until
from test_seams import Planner
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

pytestmark = pytest.mark.usefixtures("read_here")
AGENT = tiny.agent("memagent")
NAME, PATH = "tiny-memagent", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MEMORY = Path("/proc/self/statm")
TASK = worlds.make_task(5, 6, "one_fact")


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


def chat(task=TASK, **fields):
    texts = task.document, task.question
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": NAME, "messages": messages} | fields


def client(url, **how):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, **how)


def reply_to(url, task=TASK, **fields):
    return client(url).chat.completions.create(**chat(task, **fields))


@contextmanager
def wired(url, length, body=b""):
    """Send the head of a request, and what is given of its body, over a socket."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=HANG_S) as wire:
        wire.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
        yield wire


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
    turns = follow(engine, agent, replace(task, id="asked"), Sampling(0.0))
    *memories, answer = [str(turn.response).strip() for turn in turns]
    return memories, extract_answer(answer, agent.config.form)[0]


def memories(reasoning):
    return [line.partition("] ")[2] for line in reasoning.splitlines()]


# ---------------------------------------------------------------- clients


def test_openais_client_gets_memories_answer_usage_and_sections(server, engine):
    reply = reply_to(server)
    (choice,) = reply.choices
    fresh = TransformersEngine(engine.model, engine.codec)
    noted, answer = alone(fresh, TASK)
    assert (choice.message.role, choice.message.content) == ("assistant", answer)
    assert memories(choice.message.reasoning_content) == noted and len(noted) == 6
    assert choice.finish_reason == "stop" and reply.model == NAME
    counts, usage = fresh.counts(), reply.usage
    assert usage.prompt_tokens == counts["prefilled_tokens"] + counts["reused_tokens"]
    assert usage.completion_tokens == counts["generated_tokens"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert reply.metadata["agent"] == "memagent" and reply.metadata["sections_read"] == "6"
    models = client(server).models
    assert [model.id for model in models.list().data] == [models.retrieve(NAME).id] == [NAME]
    assert httpx.get(f"{server}/health").json()["status"] == "ok"


def test_a_stream_brings_each_memory_before_the_answer(server):
    whole = reply_to(server)
    chunks = [*reply_to(server, stream=True, stream_options={"include_usage": True})]
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
    planner = Planner(AGENT.config)

    def script(prompt):
        if prompt.final:
            return formed("Lima", "boxed")
        return "Otto reached Lima." if prompt.section else "I look for Otto."

    with served(ScriptedEngine(codec, script), agent=planner) as (url, _):
        reply = reply_to(url)
    n = len(planner.on(codec).sections(TASK))
    lines = reply.choices[0].message.reasoning_content.splitlines()
    assert lines == [f"[section {k} of {n}] Otto reached Lima." for k in range(1, n + 1)]
    assert reply.metadata["sections_read"] == str(n)


def test_the_same_document_is_read_once(engine, server):
    task = worlds.make_task(77, 40, "one_fact")
    name = next(n for n in ("Anna", "Boris", "Clara") if n not in task.question)
    other = replace(task, question=f"Where is {name}?")
    first, second = [reply_to(server, each).usage for each in (task, other)]
    cached = second.prompt_tokens_details.cached_tokens
    assert cached >= len(engine.codec.ids(task.document))  # the whole of it
    assert cached > first.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens - cached < second.prompt_tokens / 2


def test_the_sections_are_named_in_which_the_answer_stands(codec):
    place = TASK.document.split(". ")[-1].rstrip(".").split()[-1]  # a word of the last section
    with served(ScriptedEngine(codec, lambda prompt: place)) as (url, _):
        metadata = reply_to(url).metadata
    sections = AGENT.on(codec).sections(TASK)
    named = [int(k) for k in metadata["sections"].split(", ")]
    assert all(place in sections[k - 1] for k in named)
    assert len(named) == sum(place in section for section in sections)


def test_it_is_said_where_no_word_of_the_question_is_in_the_text(codec):
    with served(ScriptedEngine(codec, lambda p: "x"), tiny.agent("bm25", chunk_tokens=9)) as (
        url,
        _,
    ):
        for question, said in (("Warum?", True), (TASK.question, False)):
            metadata = reply_to(url, replace(TASK, question=question)).metadata
            assert ("No word of the question" in metadata.get("remarks", "")) == said


def test_max_tokens_temperature_and_stop_reach_the_answer(server):
    assert reply_to(server, max_tokens=1).choices[0].finish_reason == "length"
    warm = [reply_to(server, temperature=2.0, seed=k).choices[0] for k in (1, 1, 2, 3, 4)]
    thoughts = [choice.message.reasoning_content for choice in warm]
    assert thoughts[0] == thoughts[1] and len({*thoughts}) > 2
    whole = reply_to(server).choices[0].message.content
    assert reply_to(server, stop=whole[1:]).choices[0].message.content == whole[:1]


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
    slow, terms = Slow(codec), Terms(NAME, ServeConfig(body_mib=1))
    with (
        served(slow, terms=terms, in_flight=1, waiting=1, most_tokens=200) as (url, service),
        httpx.Client(base_url=url, timeout=HANG_S, headers=JSON) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def post(task=TASK, **fields):
            return http.post(PATH, json=chat(task, **fields))

        two = [pool.submit(post) for _ in range(2)]
        until(lambda: service.load == (1, 1))
        third = post()
        assert third.status_code == 429 and third.headers["retry-after"]
        assert error_of(third)["type"] == "rate_limit_error"
        slow.gate.set()
        assert [each.result().status_code for each in two] == [200, 200]
        until(lambda: service.load == (0, 0))
        assert post().status_code == 200  # the places are free again
        long = worlds.make_task(5, 30, "one_fact")
        reply = post(long)
        assert reply.status_code == 413 and "200 are read" in error_of(reply)["message"]
        assert post(long, stream=True).status_code == 413  # before the headers
        reply = http.post(PATH, content=b"x" * (1 << 21))
        assert reply.status_code == 413 and error_of(reply)["code"] == "too_large"
        pieces = (b"x" * 1000 for _ in range(1100))  # no length is told beforehand
        assert http.post(PATH, content=pieces).status_code == 413


def test_past_the_time_limit_places_are_free_again(codec):
    terms = Terms(NAME, ServeConfig(timeout_s=0.5))
    with (
        served(Slow(codec), terms=terms, in_flight=1) as (url, service),
        httpx.Client(base_url=url, timeout=HANG_S) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        for late in pool.map(lambda _: http.post(PATH, json=chat()), range(2)):  # nothing answers
            assert late.status_code == 503 and error_of(late)["code"] == "timeout"
        until(lambda: service.load == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place_at_once(codec, stream):
    slow, lines = Slow(codec), []
    with served(slow, terms=Terms(NAME, log=lines.append), in_flight=1) as (url, service):
        body = json.dumps(chat(stream=stream)).encode()
        with wired(url, len(body), body):
            until(lambda: service._running)
        until(lambda: service.load == (0, 0) and not service._running)
        assert not slow._queue  # the prompt in flight was given up
        until(lambda: lines)
        assert " 499: " in lines[0]
        slow.gate.set()
        assert reply_to(url).choices[0].message.content


def test_a_key_is_asked_for_and_never_shown(codec):
    lines, secret = [], "s3cret-of-mine"
    terms = Terms(NAME, key=secret, log=lines.append)
    assert secret not in repr(terms)
    with served(ScriptedEngine(codec, lambda prompt: "Anna"), terms=terms) as (url, _):
        for key in ("wrong", secret[:-1], secret + "x"):
            headers = {"Authorization": f"Bearer {key}"}
            reply = httpx.post(url + PATH, json=chat(), headers=headers)
            assert reply.status_code == 401 and error_of(reply)["type"] == "authentication_error"
            assert secret not in reply.text
        assert httpx.get(f"{url}/health").status_code == 200
        keyed = openai.OpenAI(base_url=f"{url}/v1", api_key=secret)
        assert keyed.chat.completions.create(**chat()).choices[0].message.content == "Anna"
    assert lines and not any(secret in line for line in lines)


def test_a_refused_request_has_a_line_without_its_words(codec):
    lines, terms = [], Terms(NAME, key="s3cret-of-mine", log=lambda line: lines.append(line))
    with served(ScriptedEngine(codec, lambda prompt: "Anna"), terms=terms) as (url, _):
        key = {"Authorization": "bearer s3cret-of-mine"}

        def post(body, headers=key, path=PATH):
            reply = httpx.post(url + path, json=body, headers=headers, follow_redirects=True)
            return reply.status_code

        part = {"type": "secret-part", "text": "secret-text"}
        for body in (
            chat(n=2),
            chat(model="secret-model"),
            chat(messages=[{"role": "secret-role", "content": "secret-text"}]),
            chat(messages=[{"role": "user", "content": [part]}]),
            "secret-text",
        ):
            assert post(body) in (400, 404)
        assert post(chat(), {"Authorization": "secret-key"}) == 401
        assert post(chat(), path="/v1/responses?key=secret-key") == 404
        assert post(chat(), path=f"{PATH}/") == 200
        assert httpx.get(f"{url}/v1/models/", headers=key).json()["data"]
        assert httpx.get(f"{url}/v1/a%0a%1b[31mb", headers=key).status_code == 404
        for unknown in (
            httpx.get(f"{url}/v1/models/gpt", headers=key),
            httpx.post(url + PATH, json=chat(model="gpt"), headers=key),
        ):
            assert f"'gpt' is not served: {NAME} is (serve --called names it)." in unknown.text
    at = f"at {PATH}: "
    assert lines[:7] == [
        f"refused 400 {at}n", f"refused 404 {at}model", f"refused 400 {at}messages.0.role",
        f"refused 400 {at}messages.0.content.0", f"refused 400 {at}invalid_request_error",
        f"refused 401 {at}invalid_api_key", "refused 404 at /v1/responses: invalid_request_error",
    ]  # fmt: skip
    assert len(lines) == 11 and "secret" not in "".join(lines) and " 200: " in lines[7]
    assert lines[8].isprintable() and "/v1/a \ufffd[31mb" in lines[8]


def test_of_a_long_message_the_reply_says_what_was_the_question(codec):
    text = "Where is Anna?\n\n" + "Anna joined Boris. Boris toured Oslo.\n\n" * 60
    body = {"messages": [{"role": "user", "content": text}]}
    with served(ScriptedEngine(codec, lambda prompt: "Anna")) as (url, _):
        reply = httpx.post(url + PATH, json=body, timeout=HANG_S).json()
    assert reply["metadata"]["question"] == "the first paragraph" and reply["model"] == NAME


@pytest.mark.parametrize("words, environment", [
    (("--host", "0.0.0.0"), {}),
    (("--api-key", "none"), {}),
    (("--api-key", "empty"), {}),
    ((), {API_KEY: "two words"}),
    (("--host", "203.0.113.7"), {API_KEY: "k"}),
    (("--port", "70000"), {}),
    (("--port", "TAKEN"), {}),
    (("--agent", "nobody"), {}),
    (("--timeout-s", "0"), {}),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_sentence(
    tmp_path, monkeypatch, words, environment
):
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text(" \n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        done = CliRunner().invoke(cli.app, ["serve", "--model", "tiny", *words], env=environment)
    *before, last = done.output.splitlines()
    assert done.exit_code == 2 and last.startswith("memagent: ") and len(before) <= 1


# ---------------------------------------------------------------- malformed


def malformed():
    """Yield bodies that are wrong in one of many ways."""
    whole = json.dumps(chat()).encode()
    rng = random.Random(0)
    yield from (whole[: rng.randrange(len(whole))] for _ in range(40))
    for _ in range(40):
        broken = bytearray(whole)
        for _ in range(3):
            broken[26 + rng.randrange(12)] = rng.choice(b'\xff\0{}[]":,')
        yield bytes(broken)
    odd = [None, 5, -1, 1e308, 10**40, [], {}, "", "\0", True, [[]], {"a": {}}, "x" * 5000]
    odd_numbers = [-1, 5, 10**40, "x", [], {}, float("nan")]
    no_counts = [1.5, 10**40, "x", {}, float("inf"), -(10**40)]
    wrong = {
        "messages": odd, "model": [value for value in odd if value not in (None, "")],
        "stop": [5, {}, [5]], "stream_options": [5, "x", [1], {"include_usage": "no"}],
        "temperature": odd_numbers, "top_p": odd_numbers,
        "seed": no_counts, "max_tokens": no_counts,
    }  # fmt: skip
    for name, values in wrong.items():
        yield from (json.dumps(chat() | {name: value}).encode() for value in values)
    values = [5, {}, [5], ["x"], True, [{}], 1e9]
    for at, name, value in product((0, 1), ("role", "content"), values):
        body = chat()
        body["messages"][at][name] = value
        yield json.dumps(body).encode()


def test_malformed_requests_get_nothing_but_4xx(server, capfd):
    with httpx.Client(base_url=server, timeout=HANG_S, headers=JSON) as http:
        seen = set()
        for body in malformed():
            reply = http.post(PATH, content=body)
            assert 400 <= reply.status_code < 500, (body[:200], reply.text)
            seen.add(error_of(reply)["message"][:40])
        assert len(seen) > 20  # not one and the same
        for path in ("/", "/v1", "/v1/chat", "/v1/responses", "/v1/models/none", "/%00"):
            for method in ("GET", "POST", "PUT"):
                reply = http.request(method, path)
                assert reply.status_code in (404, 405) and error_of(reply), path
        assert "/v1/chat/completions" in error_of(http.post("/v1/responses"))["message"]
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            reply = http.request(method, PATH)
            assert reply.status_code == 405 and error_of(reply)
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
def test_of_many_requests_of_twenty_clients_none_is_lost_or_mixed_up(engine):
    """Mixed lengths; every tenth client goes away in the middle; memory stays where it is."""
    n, rng = 80, random.Random(1)
    lengths = [rng.choice((1, 1, 2, 2, 3, 4, 6, 12)) for _ in range(n)]
    tasks = [worlds.make_task(1000 + k, n, "one_fact") for k, n in enumerate(lengths)]
    fresh = TransformersEngine(engine.model, engine.codec)
    checked = {k: alone(fresh, tasks[k]) for k in range(0, n, 8)}
    assert len({answer + str(noted) for noted, answer in checked.values()}) == len(checked)
    with served(engine, in_flight=16, waiting=64) as (url, service):
        patient = client(url, timeout=HANG_S)  # one for all threads, as memory is measured

        def ask(k):
            if k % 10 == 9:  # reads the first piece of a stream, and is gone
                body = chat(tasks[k], stream=True)
                with httpx.stream("POST", url + PATH, json=body, timeout=HANG_S) as reply:
                    next(reply.iter_raw())
                return None
            message = patient.chat.completions.create(**chat(tasks[k])).choices[0].message
            return memories(message.reasoning_content), message.content

        with patient, ThreadPoolExecutor(20) as pool:
            got = [*pool.map(ask, range(n // 2))]
            half = megabytes()
            got += pool.map(ask, range(n // 2, n))
        grown = megabytes() - half
        until(lambda: service.load == (0, 0) and not service._running)
    for k, found in enumerate(got):
        if found:
            noted, answer = found
            assert answer and len(noted) == len(AGENT.on(engine.codec).sections(tasks[k]))
            assert found == checked.get(k, found), k
    assert grown < 24, f"{grown:.0f} MiB more after the second half"


# ---------------------------------------------------------------- the command


def start(tmp_path, *words):
    """Start a server that answers nothing before its gate, the last thing returned, is opened."""
    out, gate = tmp_path / "serve.log", multiprocessing.get_context("fork").Event()
    with pytest.MonkeyPatch.context() as patch:
        step = Service._step
        patch.setattr(Service, "_step", lambda it: gate.wait(0.01) and step(it))
        process = forked(["serve", "--model", "tiny", "--port", "0", *words], out)
    until(lambda: "answers at" in out.read_text() if out.exists() else False)
    url = next(w for w in out.read_text().split() if w.endswith("/v1")).removesuffix("/v1")
    until(lambda: _healthy(url))
    return process, url, out, gate


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
@pytest.mark.parametrize("keyed", ["", "by a file", "by the environment"])
def test_the_last_line_is_a_command_that_asks(tmp_path, monkeypatch, keyed):
    monkeypatch.delenv(API_KEY, raising=False)
    (tmp_path / "a key").write_text("s3cret\n")
    words = ("--api-key", str(tmp_path / "a key")) if keyed == "by a file" else ()
    if keyed == "by the environment":
        monkeypatch.setenv(API_KEY, "s3cret")
    process, _, out, gate = start(tmp_path, "--host", "0.0.0.0" if keyed else "127.0.0.1", *words)
    gate.set()
    command = out.read_text().splitlines()[-1]
    assert command.startswith("curl http://127.0.0.1:") and "s3cret" not in command
    done = subprocess.run(["sh", "-c", f"{command} -sS --noproxy '*'"], capture_output=True)
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["message"]["content"] == "Lima", done.stderr
    assert reply["metadata"]["where"] == "message 1"  # the document
    os.kill(process.pid, signal.SIGTERM)
    process.join()


def _healthy(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _in_flight(url):
    return httpx.get(f"{url}/health", timeout=HANG_S).json()["in_flight"]


def test_sigterm_finishes_what_is_in_flight(tmp_path):
    process, url, out, gate = start(tmp_path, "--grace-s", str(HANG_S))
    task = worlds.make_task(3, 40, "one_fact")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(reply_to, url, task)
        until(lambda: _in_flight(url) == 1)
        os.kill(process.pid, signal.SIGTERM)
        gate.set()
        reply = reply.result()
    assert reply.choices[0].message.content and reply.metadata["sections_read"] == "40"
    process.join()
    assert process.exitcode == 0 and " 200: 40 sections" in out.read_text()
    assert task.question not in out.read_text()  # nothing of what was asked
    assert not _healthy(url)


def test_past_the_grace_time_the_rest_is_told_so(tmp_path):
    process, url, out, _ = start(tmp_path, "--grace-s", "0.2")
    task = worlds.make_task(3, 3000, "one_fact")
    with ThreadPoolExecutor(1) as pool, wired(url, 99, b"{") as half:
        whole = pool.submit(reply_to, url, task)
        chunks = iter(reply_to(url, task, stream=True))
        assert next(chunks).choices[0].delta.role == "assistant"
        until(lambda: _in_flight(url) == 3)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            whole.result()
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        assert b" 503 " in half.recv(1 << 16).splitlines()[0]
    process.join()
    log = out.read_text()
    assert process.exitcode == 0 and "Traceback" not in log
    assert log.count(" 503: ") == 2 and log.count("refused 503") == 1
    assert len(log.splitlines()) <= 8
