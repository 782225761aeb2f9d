"""The server, over real sockets: OpenAI's own client, bounds, and the command."""

import multiprocessing
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from conftest import HANG_S, forked, until
from served import AGENT, NAME, PATH, TASK, Slow, chat, error_of, serving
from typer.testing import CliRunner

import cli
from commands import serve
from commands.door import API_KEY
from config.options import EMBEDDED
from data import extract_answer, formed
from embedded import tiny
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from engines.service import Service
from memagent import MemAgent
from models.load import load_model
from rollout import Sampling, follow
from tasks import worlds
from tokens.codec import Codec

pytestmark = pytest.mark.usefixtures("read_here")


def client(http, key="any"):
    return openai.OpenAI(
        base_url=http.base_url.join("/v1"), api_key=key, max_retries=0, timeout=HANG_S
    )


def reply_to(http, task=TASK, **fields):
    return client(http).chat.completions.create(**chat(task, **fields))


@pytest.fixture(scope="module")
def engine():
    """The embedded policy, with room for what it has read."""
    codec = Codec(tiny.make_tokenizer())
    model = load_model(EMBEDDED, "float32", "cpu")
    return TransformersEngine(model, codec, max_rows=16, max_cache_tokens=1 << 13, remember=True)


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine) as (http, _):
        yield http


def alone(engine, task):
    """Return the memories and the answer of a task that is read by itself."""
    turns = follow(engine, AGENT, replace(task, id="asked"), Sampling(0.0))
    *memories, answer = [str(turn.response).strip() for turn in turns]
    return memories, extract_answer(answer, AGENT.config.form)[0]


def memories(reasoning):
    return [line.partition("] ")[2] for line in reasoning.splitlines()]


# ---------------------------------------------------------------- clients


def test_openais_client_gets_memories_answer_and_usage(server, engine):
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
    assert reply.metadata == {"agent": "memagent", "sections_read": "6"}
    models = client(server).models
    assert [model.id for model in models.list().data] == [models.retrieve(NAME).id] == [NAME]
    assert server.get("/health").json()["status"] == "ok"


def test_a_stream_brings_each_memory_before_the_answer(server):
    whole = reply_to(server)
    chunks = [*reply_to(server, stream=True, stream_options={"include_usage": True})]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    kinds = ["".join(delta.model_dump(exclude_none=True)) for delta in deltas]
    assert kinds[1:-2] == ["reasoning_content"] * 6 and kinds[-2:] == ["content", ""]
    thoughts = [d.reasoning_content for d in deltas if getattr(d, "reasoning_content", None)]
    assert "".join(thoughts) == whole.choices[0].message.reasoning_content
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert not chunks[-1].choices and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    last = chunks[-2]
    assert last.choices[0].finish_reason == "stop" and last.metadata == whole.metadata
    assert len({chunk.id for chunk in chunks}) == 1


class Planner(MemAgent):
    """MemAgent with a plan before each section: a turn aside, which reads nothing."""

    def run(self, task):
        steps, turn = super().run(task), None
        with suppress(StopIteration):
            while True:
                prompt = steps.send(turn)
                if not prompt.final:
                    yield replace(self.prompt("final", 16, problem="?", memory=""), aside=True)
                turn = yield prompt


def test_a_plan_is_no_memory_of_a_section(codec):
    planner = Planner(AGENT.config)

    def script(prompt):
        if prompt.final:
            return formed("Lima", "boxed")
        return "Otto reached Lima." if prompt.section else "I look for Otto."

    with serving(ScriptedEngine(codec, script), planner) as (http, _):
        reply = reply_to(http)
    n = len(planner.on(codec).sections(TASK))
    lines = reply.choices[0].message.reasoning_content.splitlines()
    assert lines == [f"[section {k} of {n}] Otto reached Lima." for k in range(1, n + 1)]


def test_the_same_document_is_read_once(engine, server):
    task = worlds.make_task(77, 40, "one_fact")
    name = next(n for n in ("Anna", "Boris", "Clara") if n not in task.question)
    other = replace(task, question=f"Where is {name}?")
    first, second = [reply_to(server, each).usage for each in (task, other)]
    cached = second.prompt_tokens_details.cached_tokens
    assert cached >= len(engine.codec.ids(task.document))  # the whole of it
    assert cached > first.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens - cached < second.prompt_tokens / 2


def test_max_tokens_temperature_and_stop_reach_the_answer(server):
    assert reply_to(server, max_tokens=1).choices[0].finish_reason == "length"
    warm = [reply_to(server, temperature=2.0, seed=k).choices[0] for k in (1, 1, 2, 3, 4)]
    thoughts = [choice.message.reasoning_content for choice in warm]
    assert thoughts[0] == thoughts[1] and len({*thoughts}) > 2
    whole = reply_to(server).choices[0].message.content
    assert reply_to(server, stop=whole[1:]).choices[0].message.content == whole[:1]


# ---------------------------------------------------------------- bounds


def test_past_a_bound_the_status_says_which(codec):
    slow = Slow(codec)
    how = dict(in_flight=1, waiting=1, most_tokens=200, body_mib=1)
    with serving(slow, **how) as (http, chats), ThreadPoolExecutor(4) as pool:
        two = [pool.submit(http.post, PATH, json=chat()) for _ in range(2)]
        until(lambda: len(chats.held) == 2)
        third = http.post(PATH, json=chat())
        assert third.status_code == 503 and third.headers["retry-after"] and error_of(third)
        assert http.get("/health").json()["waiting"] == 1
        slow.gate.set()
        assert [each.result().status_code for each in two] == [200, 200]
        until(lambda: not chats.held)
        assert http.post(PATH, json=chat()).status_code == 200  # the places are free again
        for stream in (False, True):  # before the headers
            body = chat(worlds.make_task(5, 30, "one_fact"), stream=stream)
            reply = http.post(PATH, json=body)
            assert reply.status_code == 413 and reply.json()["error"]["code"] and error_of(reply)
        assert http.post(PATH, content=b"x" * (1 << 21)).status_code == 413
        pieces = (b"x" * 1000 for _ in range(1100))  # no length is told beforehand
        assert http.post(PATH, content=pieces).status_code == 413


def test_past_the_time_limit_places_are_free_again(codec):
    with serving(Slow(codec), in_flight=1, timeout_s=0.5) as (http, chats):
        for stream in (False, True):
            late = http.post(PATH, json=chat(stream=stream))  # nothing answers
            assert late.status_code == 503 and error_of(late)
        until(lambda: not chats.held)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place_at_once(codec, stream):
    slow = Slow(codec)
    with serving(slow, in_flight=1) as (http, chats):
        with httpx.Client(base_url=http.base_url, timeout=0.5) as gone:
            with pytest.raises(httpx.ReadTimeout):
                gone.post(PATH, json=chat(stream=stream))
        until(lambda: not chats.held and not chats.service._running)
        assert not slow._queue  # the prompt in flight was given up
        assert " 499: " in chats.lines[0]
        slow.gate.set()
        assert reply_to(http).choices[0].message.content


def test_a_key_is_asked_for_and_never_shown(codec):
    secret = "s3cret-of-mine"
    with serving(ScriptedEngine(codec, lambda prompt: "Anna"), key=secret) as (http, chats):
        assert secret not in repr(chats)
        for key in ("wrong", secret[:-1], secret + "x"):
            reply = http.post(PATH, json=chat(), headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == 401 and error_of(reply) and secret not in reply.text
            assert reply.headers["www-authenticate"] == "Bearer"
        assert http.get("/v1/models", headers={"Authorization": secret}).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": f"bearer {secret}"}).json()["data"]
        assert http.get("/health").status_code == 200
        reply = client(http, secret).chat.completions.create(**chat())
        assert reply.choices[0].message.content == "Anna"
    assert chats.lines and not any(secret in line for line in chats.lines)


def test_a_log_line_quotes_nothing_of_what_was_asked(codec):
    with serving(ScriptedEngine(codec, lambda prompt: "secret"), called="x") as (http, chats):
        part = {"type": "secret-part", "text": "secret-text"}
        for body in (
            chat(),
            chat(model="secret-model"),
            chat(messages=[{"role": "secret-role", "content": "secret-text"}]),
            chat(messages=[{"role": "user", "content": [part]}]),
            "secret-text",
        ):
            http.post(PATH, json=body)
        assert http.get("/v1/a%0a%1b[31mb?secret").status_code == 404
        assert "gpt" in error_of(http.get("/v1/models/gpt"))
        assert http.post(f"{PATH}/", json=chat(), follow_redirects=True).status_code == 200
    assert len(chats.lines) == 8 and "secret" not in "".join(chats.lines)
    assert all(line.isprintable() for line in chats.lines)


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
    (("--cors", "*"), {}),
    (("--cors", "localhost:3000"), {}),
    (("--allow-host", "http://a"), {}),
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
    http = httpx.Client(base_url=url, timeout=HANG_S)
    until(lambda: _in_flight(http) == 0)
    return process, http, out, gate


def _in_flight(http):
    try:
        return http.get("/health").json()["in_flight"]
    except httpx.TransportError:
        return None


def test_the_first_signal_finishes_what_is_in_flight(tmp_path):
    process, http, out, gate = start(tmp_path, "--grace-s", str(HANG_S))
    task = worlds.make_task(3, 40, "one_fact")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(reply_to, http, task)
        until(lambda: _in_flight(http) == 1)
        os.kill(process.pid, signal.SIGTERM)
        gate.set()
        assert reply.result().metadata["sections_read"] == "40"
    process.join()
    assert process.exitcode == 0 and " 200: 40 sections" in out.read_text()
    assert task.question not in out.read_text() and _in_flight(http) is None


def test_past_the_grace_time_the_rest_is_told_so(codec, capfd):
    half = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(Slow(codec)) as (http, chats), ThreadPoolExecutor(1) as pool:
        address = http.base_url.host, http.base_url.port
        with socket.create_connection(address, timeout=HANG_S) as wire:
            wire.sendall(half % PATH.encode() + b"Content-Length: 99\r\n\r\n{")
            whole = pool.submit(reply_to, http)
            until(lambda: len(chats.held) == 2)
            until(lambda: chats.service._running)
            chats.server.should_exit = True  # as a signal has it
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                whole.result()
            assert caught.value.status_code == 503
            assert b" 503 " in wire.recv(1 << 16).splitlines()[0]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_stream_is_told_too_that_the_server_ends(codec, monkeypatch):
    monkeypatch.setattr(serve, "ALIVE_S", 0.05)  # the headers do not wait for a memory
    with serving(Slow(codec)) as (http, chats):
        chunks = iter(reply_to(http, stream=True))
        assert next(chunks).choices[0].delta.role == "assistant"
        chats.service.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)


def test_the_second_signal_ends(tmp_path):
    process, http, *_ = start(tmp_path, "--grace-s", "9999")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(http.post, PATH, json=chat(), headers={"Connection": "close"})
        until(lambda: _in_flight(http) == 1)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: _in_flight(http) is None)  # no more are let in
        assert not reply.done()
        os.kill(process.pid, signal.SIGTERM)
        process.join()
        assert reply.exception() or reply.result().status_code == 503
