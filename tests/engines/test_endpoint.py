"""The client of OpenAI's protocol, and the engine over it, against a server on loopback."""

import gzip
import json
import random
import shutil
import signal
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import servers
from conftest import HANG_S, until

from config.errors import UserError
from embedded import tiny
from engines import endpoint
from engines.endpoint import EndpointEngine
from memagent import Finish, Prompt
from rollout import Sampling, rollout
from tasks import replicas, served, worlds
from tasks.served import Terms
from tokens.codec import Characters

SECRET = "sk-not-a-real-one-123"


def reply(codec, ids, max_tokens):
    """Return (ids, finish) of the only answer to a prompt.

    No text gives these ids back, so that a text which is encoded again is noticed.
    """
    draw = random.Random(repr(ids))
    n = draw.randrange(1, 2 * max_tokens)
    out = [draw.randrange(2, len(codec.tokenizer)) for _ in range(n)]
    return ([*out, 1], "stop") if len(out) < max_tokens else (out[:max_tokens], "length")


class Server:
    """Speaks the protocol on loopback.

    faults: what happens to the next requests, one each; always: to all further ones. A fault is
    "drop", "hang", a tuple (status, reply, headers), a dict that replaces parts of the answer, or a
    function of the request that returns one of these. models: the reply to /models.
    """

    def __init__(self, codec, name="m", window=None, ids=True, delay_s=0.002):
        self.codec, self.name, self.window = codec, name, window
        self.ids, self.delay_s = ids, delay_s
        self.faults, self.always, self.on_request = [], "", lambda n: None
        self.models, self.headers = None, []
        self.bodies, self.keys, self.now, self.most, self.broken = [], set(), 0, 0, 0
        self.lock, self.port = threading.Lock(), 0
        self.start()

    def start(self):
        self.up = threading.Event()
        self.up.set()
        self.http = servers.Server(self.reply, self.port)
        self.port, self.url = self.http.server_port, f"{self.http.url}/v1"

    def stop(self):
        """Go down as if killed: refuse connections and lose the turns in flight."""
        self.up.clear()
        self.http.__exit__()

    def reply(self, path, headers, content):
        self.keys.add(headers.get("Authorization"))
        if not content or path == "/api/show":
            card, names = {"id": self.name, "max_model_len": self.window}, [{"name": self.name}]
            return self.models or (
                200,
                {"data": [card], "models": names},
            )  # as an Ollama lists them
        body, up = json.loads(content), self.up
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.bodies.append(body)
            self.headers.append(headers)
            fault = self.faults.pop(0) if self.faults else self.always
            number = len(self.bodies)
        self.on_request(number)
        time.sleep(self.delay_s)
        while fault == "hang" and up.is_set():
            time.sleep(0.01)
        fault = fault(body) if callable(fault) else fault
        if not isinstance(fault, tuple):
            changes = fault if isinstance(fault, dict) else {}
            response = 200, self.answer(body, path) | changes
        with self.lock:  # before the answer: then the next request may come at once
            self.now -= 1
        if fault != "drop" and up.is_set():
            return fault if isinstance(fault, tuple) else response
        self.broken += 1
        return None

    def answer(self, body, path):
        if path.endswith("/chat/completions"):
            content = f" Anna joined {len(body['messages'][-1]['content'])} Boris."
            return text_of(content) | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        ids, finish = reply(self.codec, body["prompt"], body["max_tokens"])
        choice = {"text": str(self.codec.response(ids)), "finish_reason": finish}
        if self.ids and body["return_token_ids"]:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        usage |= {"prompt_tokens_details": {"cached_tokens": 5}}
        return {"choices": [choice], "usage": usage}


@pytest.fixture
def serve(codec, monkeypatch):
    """Make servers, and engines that ask them with waits of a hundredth of a second."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.1)
    monkeypatch.setattr(replicas, "AVOID_S", 0.2)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = []

    def server(**switches):
        made.append(Server(codec, **switches))
        return made[-1]

    def engine(*several, model="m", codec=codec, **settings):
        terms = {f.name: settings.pop(f.name) for f in fields(Terms) if f.name in settings}
        terms = Terms(**{"patience_s": 10 * HANG_S} | terms)
        urls = [server.url for server in several]
        made.append(EndpointEngine(urls, model, codec, terms=terms, **settings))
        return made[-1]

    server.engine = engine
    yield server
    for it in reversed(made):
        with suppress(OSError):
            it.stop() if isinstance(it, Server) else it.close()


def check(engine, n=8):
    """Read with an engine: no trajectory is lost, and turns have the ids of the replies."""
    jobs = [(t, g) for t in worlds.make_tasks(0, n, 3, "one_fact") for g in range(2)]
    with engine.awake():
        done = list(rollout(engine, tiny.agent(), jobs))
    turns, codec = [turn for t in done for turn in t.turns], engine.codec
    assert {(t.task.id, t.sample) for t in done} == {(task.id, g) for task, g in jobs}
    assert len(turns) == 4 * len(done) == 4 * len(jobs) and not any(t.error for t in done)
    for turn in turns:
        ids, finish = reply(codec, turn.prompt.ids(codec), turn.prompt.max_tokens)
        assert (turn.prompt_ids, turn.response_ids) == (turn.prompt.ids(codec), ids)
        assert turn.finish == finish and turn.response == codec.response(ids)
    return turns


def ask(engine, max_tokens=8, **sampling):
    """Add a prompt, with a seed that is too large for a server."""
    prompt = Prompt((("Anna joined Boris.", False),), max_tokens)
    return engine.add(prompt, Sampling(**sampling), 2**64 - 3)


def one(engine, **settings):
    with engine.awake():
        ask(engine, **settings)
        ((_, turn),) = engine.step()
    return turn


def at(number, act):
    """Return an `on_request` that acts at a request, and holds up it and all further ones."""
    done = threading.Event()

    def on_request(n):
        if n == number:
            threading.Thread(target=lambda: (act(), done.set())).start()
        if n >= number:
            done.wait(HANG_S)

    return on_request


def message(text, **more):
    return {"error": {"message": text} | more}


def choices(**choice):
    return {"choices": [{"text": ""} | choice]}


def text_of(content, finish="stop", **more):
    """A fault that answers a chat with this message."""
    return {"choices": [{"message": {"content": content} | more, "finish_reason": finish}]}


def packed(raw):
    return 200, gzip.compress(raw), [("Content-Encoding", "gzip")]


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- turns


def test_a_rollout_has_the_tokens_that_the_server_read_and_wrote(codec, serve):
    server, five = serve(delay_s=0.01), threading.Barrier(5)
    server.on_request = lambda number: number <= 5 and five.wait(HANG_S)
    engine = serve.engine(server, concurrency=5)
    turns = check(engine)
    assert server.most == 5  # as many as allowed, and no more
    # the ids are not the text's
    assert any(list(codec.encode(str(t.response))) != list(t.response.ids) for t in turns)
    assert {turn.finish for turn in turns} == {Finish.STOP, Finish.LENGTH}
    assert not any(turn.logprobs for turn in turns)
    assert engine.counts() == {
        "prefilled_tokens": sum(len(turn.prompt_ids) - 5 for turn in turns),
        "reused_tokens": 5 * len(turns),
        "generated_tokens": sum(len(turn.response_ids) for turn in turns),
    }
    assert engine.step() == []


def test_what_a_request_says_and_an_answer_without_ids(codec, serve):
    server = serve(ids=False)
    settings = {"max_tokens": 40, "temperature": 0.5, "top_p": 0.9}
    engines = [serve.engine(server, chat=chat) for chat in (False, True)]
    turns = [one(engine, **settings) for engine in engines]
    plain, chat = server.bodies
    both = settings | {"model": "m", "seed": (2**64 - 3) % 2**63}
    assert chat == both | {"messages": [{"role": "user", "content": "Anna joined Boris."}]}
    own = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "return_token_ids": True}
    own |= {"presence_penalty": 0, "frequency_penalty": 0, "stop_token_ids": [1]}
    assert plain == both | own | {"prompt": codec.chat([("Anna joined Boris.", False)])}
    (choice,) = server.answer(plain, "/completions")["choices"]
    for turn, text in zip(turns, (choice["text"], " Anna joined 18 Boris."), strict=True):
        assert turn.response == text and turn.finish is Finish.STOP
        assert turn.response_ids == [*turn.response.ids, 1] == [*codec.encode(text), 1]
    assert [*engines[1].counts().values()] == [7, 0, 3]  # as the server counts them
    with pytest.raises(UserError), engines[1].awake("a policy"):  # it is never trained from
        pass


RECORDED = json.loads(Path(__file__).with_name("replies.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_replies_in_the_form_of_each_server(serve, name):
    """replies.json says of which version each is."""
    recorded, server = RECORDED[name], serve()
    server.models, server.always = (200, recorded["models"]), recorded["answer"]
    engine = serve.engine(server, codec=Characters(), chat=True)
    window, cached = recorded["window"], recorded["cached"]
    assert engine.window == (window and window * 3 // 4)  # lengths are estimates
    turn = one(engine)
    assert (turn.response, turn.finish) == (" Anna", Finish.LENGTH)
    assert [*engine.counts().values()] == [4 - cached, cached, 6]
    for status, refusal in product((400, 413), recorded["too_long"]):
        server.always = (status, refusal)
        assert one(engine).finish is Finish.FULL
    server.always = (404, recorded["unknown"])
    turn = one(engine)
    assert turn.finish is Finish.ERROR and "HTTP 404: " in turn.error and "model" in turn.error
    assert len(server.bodies) == 2 + 2 * len(recorded["too_long"])  # none is tried again


def test_thoughts_are_known_as_thoughts_however_they_are_marked(codec, serve, monkeypatch):
    server = serve()
    engine = serve.engine(server, codec=Characters(), chat=True)
    server.always = text_of("[THINK]hm[/THINK]Anna")
    assert engine.codec.after_thinking(one(engine).response) == "Anna"
    # those that the prompt began
    monkeypatch.setattr(codec, "_thinks_at_once", True)
    assert codec.after_thinking(one(serve.engine(serve(ids=False))).response) == ""
    engine = serve.engine(server, chat=True)
    for fault, answer in (("", ""), (text_of("Anna", reasoning="hm"), "Anna"), (MISTRAL, "Anna")):
        server.always = fault
        assert codec.after_thinking(one(engine).response) == answer


# ---------------------------------------------------------------- failures that pass


def test_failures_that_pass_lose_nothing(serve):
    server = serve()
    failing = [(500, {}), (429, {}), "drop", (503, b"<html>"), (408, {}), (409, {})]
    server.faults = [fault for one in failing for fault in (one, "", "")]
    check(serve.engine(server))
    assert len(server.bodies) == 16 * 4 + len(failing)
    server.faults, before = ["hang"], len(server.bodies)
    check(serve.engine(server, timeout_s=1))  # others may be too late, too, and come again
    assert len(server.bodies) > before + 16 * 4


def test_a_server_killed_and_started_again_in_the_middle_loses_nothing(serve):
    server = serve(delay_s=0.01)
    server.on_request = at(30, lambda: (server.stop(), threading.Timer(0.5, server.start).start()))
    check(serve.engine(server, concurrency=8))
    assert server.broken > 0  # turns were in flight


def test_two_replicas_share_the_work_and_one_may_die_or_fail(serve, monkeypatch):
    first, second = serve(delay_s=0.01), serve(delay_s=0.01)
    eight = threading.Barrier(8)  # none is answered before each of the two has four
    first.on_request = second.on_request = lambda number: number <= 4 and eight.wait(HANG_S)
    check(serve.engine(first, second, concurrency=8))
    assert len(first.bodies) + len(second.bodies) == 16 * 4
    assert first.most == second.most == 4
    last = len(first.bodies) + 10
    first.on_request, second.on_request = at(last, first.stop), lambda number: None
    check(serve.engine(first, second, concurrency=8))
    assert last <= len(first.bodies) < last + 10
    monkeypatch.setattr(replicas, "AVOID_S", 1e6)
    bad = serve()
    bad.always = (503, {})
    check(serve.engine(bad, second, concurrency=4))
    assert 0 < len(bad.bodies) <= 4


def test_a_request_is_tried_for_as_long_as_was_said():
    counts = {0: 0, 1: 1, 10: 5, 30: 7, 600: 79}
    assert {s: served.count_retries(s) for s in counts} == counts


# ---------------------------------------------------------------- failures that stay

FAILURES = [  # what always comes, a word of the turn's error, requests (3: tried again)
    ((400, message("the prompt must be\n one")), "must be one", 1),
    ((400, message("top_p must be in (0, 1].")), "top_p", 2),
    ((500, message("context length of 9")), "length of 9", 3),
    ((500, message("not enough system memory")), "memory", 3),  # an evaluation waits
    ((422, {"message": "x" * 5000}), "xxx", 1),
    ((401, b""), "OPENAI_API_KEY", 1),
    ((302, b"", [("Location", "/v1/models")]), "302", 1),
    ((429, {}, [("Retry-After", "3600")]), "429", 1),
    ("drop", "disconnected", 3),
    *((reply, "protocol", 1) for reply in (
        (200, b"{"), (200, []), (200, b"[" * 10**5), (200, {"choices": []}),
        (200, {"choices": [None], "usage": 3}), choices(text="a", token_ids=[2**40]),
    )),
    ((200, {"choices": None} | message("busy", code=429)), "busy", 1),
    ((200, b"<html><title>Log in</title>"), "Log in", 1),
    (packed(b" " * 10**7), "longer", 1),
    (choices(finish_reason="content_filter"), "content_filter", 1),
    (choices(text="half a", finish_reason="abort"), "abort", 1),
    (choices(finish_reason="stop", prompt_token_ids=[3]), "another prompt", 1),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "says", "tries"), FAILURES)
def test_a_failure_that_no_retry_mends_is_a_value(serve, monkeypatch, fault, says, tries):
    monkeypatch.setattr(replicas, "MOST_BYTES", 10**6)
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    server = serve()
    server.always = fault
    engine = serve.engine(server, timeout_s=HANG_S)
    turn = one(engine)
    assert turn.finish is Finish.ERROR and says in turn.error
    assert turn.response_ids == [] and turn.response == ""
    assert "\n" not in turn.error and len(turn.error) < 500
    assert len(server.bodies) == tries
    server.always = ""
    assert not one(engine).error  # the engine goes on


def test_all_tries_together_take_so_long_and_no_longer(serve, monkeypatch):
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 1000)
    server = serve()
    server.always = "hang"
    turn = one(serve.engine(server, timeout_s=0.2, patience_s=0.5))
    assert turn.finish is Finish.ERROR


def test_prompts_longer_than_the_window_are_not_sent(serve):
    server = serve(window=30)
    for window, most in ((None, 30), (20, 20), (99, 30)):
        engine = serve.engine(server, window=window)
        assert engine.window == most
        turn = one(engine, max_tokens=most)
        assert turn.finish is Finish.FULL and f"window of {most}" in turn.error
    assert server.bodies == []


# ---------------------------------------------------------------- servers that bend the protocol

REFUSED = "is not supported with this model"
FIELDS = [  # a field of a request, the server's words about it, the field instead
    ("max_tokens", f"'max_tokens' {REFUSED}. Use 'max_completion_tokens'", "max_completion_tokens"),
    ("temperature", f"temperature {REFUSED}", ""),
    ("seed", [{"loc": ["body", "seed"], "msg": "Extra inputs", "input": {"top_p": 1}}], ""),
    ("top_p", "temperature and top_p cannot both be specified", ""),
]


@pytest.mark.parametrize(("field", "words", "other"), FIELDS)
def test_a_field_that_is_refused_is_left_out_or_renamed_and_that_is_told_once(
    serve, capsys, field, words, other
):
    server = serve()
    refusal = (400, message(words)) if other else (422, {"detail": words})
    server.always = lambda body: refusal if field in body else ""
    engine = serve.engine(server, chat=True)
    assert not one(engine).error and not one(engine).error
    first, second, third = server.bodies
    assert first.keys() - second.keys() == {field} and second.keys() == third.keys()
    assert second.keys() - first.keys() == {*filter(None, [other])}
    assert not other or second[other] == first[field]
    assert printed(capsys).count("it is asked without") == 1


MISTRAL = text_of([
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "text", "text": "An"}, {"type": "text", "text": "na"},
])  # fmt: skip
REASONS = ("stop", "eos", "STOP", "end_turn", "tool_calls", None, "content_filter", "odd")
REPLIES = [
    *((text_of("Anna", reason), "Anna", "stop") for reason in REASONS),
    *((text_of("Anna", r), "Anna", "length") for r in ("length", "MAX_TOKENS", "model_length")),
    (text_of("Anna") | {"usage": {"completion_tokens": "2"}}, "Anna", "stop"),
    (text_of("Anna") | {"usage": None}, "Anna", "stop"),
    (MISTRAL, "Anna", "stop"),
    (text_of(None, refusal="I must not."), "I must not.", "stop"),
    (text_of(None, "length", reasoning_content="hm"), "", "length"),
    (choices(text="Anna", message={"content": "Anna"}, finish_reason="stop"), "Anna", "stop"),
    ((200, b"\xef\xbb\xbf" + json.dumps(text_of("Anna")).encode()), "Anna", "stop"),
    (text_of("A\ud800"), "A?", "stop"),
    (packed(json.dumps(text_of("Anna")).encode()), "Anna", "stop"),
]


def test_a_good_answer_in_an_odd_form_is_taken(serve):
    server = serve()
    engine = serve.engine(server, chat=True, patience_s=0)
    for answer, text, finish in REPLIES:
        server.always = answer
        turn = one(engine)
        assert (str(turn.response), turn.finish, turn.error) == (text, finish, ""), answer


LISTS = [
    ((404, b"404 page not found"), "m", "404"), ((200, {"data": None}), "m", "no models"),
    ((200, []), "m", "no models"), ((200, b"<html>Hi"), "m", "Hi"), ((405, b""), "m", "405"),
    ((200, [{"id": "m"}, {"id": "n"}]), "m", ""), ((200, {"models": [{"name": "m"}]}), "m", ""),
    ((200, {"data": ["n", "m", None, {"id": 3}]}), "m", ""),
    ((200, {"data": [{"id": "models/m"}, {"id": "n"}]}), "models/m", ""),
    ((200, {"data": [{"id": "m:7b"}, {"id": "m:latest"}]}), "m:latest", ""),
    ((200, {"data": [{"id": "m:latest"}, {"id": "m"}]}), "m", ""),
]  # fmt: skip


@pytest.mark.parametrize(("models", "name", "told"), LISTS)
def test_a_list_of_models_is_no_gate(serve, capsys, models, name, told):
    server = serve()
    server.models = models
    engine = serve.engine(server)
    assert engine.model == name and not one(engine).error
    assert told in printed(capsys)
    if told:
        with pytest.raises(UserError):
            serve.engine(server, model="")


def test_opening_an_engine_checks_the_models_that_the_server_names(codec, serve, monkeypatch):
    server, other, two, none = serve(), serve(name="n"), serve(), serve()
    two.models, none.models = (200, {"data": ["m", "n"]}), (404, b"")
    assert serve.engine(server, model="").model == "m"
    for several, model, said in (
        ([server], "other", "serves m"), ([server, other], "", "serves n"),
        ([two], "", "serves m, n"), ([none], "", "404"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            serve.engine(*several, model=model)
    server.stop()
    for host in ("127.0.0.1", "localhost"):
        url, again = f"http://{host}:{server.port}/v1", []
        with pytest.raises(UserError):
            EndpointEngine(url, "m", codec, terms=Terms(tell=again.append))
        assert not again  # it is not tried again
    monkeypatch.setattr(replicas, "HERE", "of another machine")
    monkeypatch.setattr(endpoint, "READY_S", 0)
    with pytest.raises(UserError):
        serve.engine(server)
    monkeypatch.setattr(endpoint, "READY_S", 600)
    threading.Timer(0.3, server.start).start()
    assert not one(serve.engine(server)).error  # it was still loading


# ---------------------------------------------------------------- the key, the environment


def test_the_key_is_sent_to_a_server_that_was_named_and_never_shown(
    serve, monkeypatch, capfd, caplog
):
    caplog.set_level("DEBUG")
    monkeypatch.setattr(served, "API_KEY", "MY_KEY")
    server, told = serve(), []
    monkeypatch.setenv("MY_KEY", f"{SECRET}\n{SECRET}")
    with pytest.raises(UserError, match="MY_KEY") as refused:
        serve.engine(server)
    serve.engine(server, keyed=False)  # there it is not even looked at
    monkeypatch.setenv("MY_KEY", SECRET + "\n")
    said = [str(refused.value)]
    for keyed in (True, False):
        server.keys.clear()
        server.always, server.faults = "", [(503, message(f"busy, {SECRET}"))] * keyed
        engine = serve.engine(server, keyed=keyed, tell=told.append)
        assert not one(engine).error and server.keys == {f"Bearer {SECRET}" if keyed else None}
        server.always = (401, message(f"Incorrect API key: {SECRET}.") if keyed else b"")
        said += [one(engine).error, repr(engine)]
        server.always = (200, {"key": SECRET})
        said += [one(engine).error] * keyed
    assert "Incorrect API key: ***" in said[1] and "MY_KEY" in said[1]
    assert "no key is sent" in said[4] and "busy, ***" in told[0]
    monkeypatch.delenv("MY_KEY")
    server.keys.clear()
    one(serve.engine(server))
    assert server.keys == {None}
    assert SECRET not in "".join([*said, *told, caplog.text, *capfd.readouterr()])


def test_the_environment_and_a_redirect_have_no_say_in_what_a_server_hears(serve, monkeypatch):
    for name in ("ORG_ID", "PROJECT_ID", "CUSTOM_HEADERS", "ADMIN_KEY", "BASE_URL"):
        monkeypatch.setenv(f"OPENAI_{name}", f"Authorization: {SECRET}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server, other = serve(), serve()
    engine = serve.engine(server)
    assert not one(engine).error
    assert SECRET not in repr(server.headers)
    assert {*server.headers[0]} <= {
        "Host", "Accept-Encoding", "Connection", "Content-Type", "User-Agent", "Content-Length",
    }  # fmt: skip
    for status in (301, 302, 307, 308):
        server.always = (status, b"", [("Location", f"{other.url}/completions")])
        assert f"HTTP {status}" in one(engine).error
    assert not other.bodies and not other.keys


URLS = ["127.0.0.1:8000", "ftp://h/v1", "http://me:pass@h/v1", "http://h/v1?key=1"]
URLS += ["http://h:99999", "http://", "", []]


@pytest.mark.parametrize("url", URLS)
def test_what_is_no_address_is_refused(codec, url):
    with pytest.raises(UserError):
        EndpointEngine(url, "m", codec)


# ---------------------------------------------------------------- the end


def test_ctrl_c_works_at_once_and_what_was_in_flight_never_comes_back(serve):
    server = serve()
    server.always = "hang"
    engine = serve.engine(server, concurrency=3)
    server.on_request = lambda number: number == 3 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # for no answer of the server, which gives none
        check(engine, 4)
    server.always = ""
    check(engine, 4)


def test_close_ends_every_thread(serve):
    server, before = serve(), {*threading.enumerate()}
    server.faults = ["hang", (500, {}, [("Retry-After", "5")])]
    engine = serve.engine(server)
    for n in range(1, 4):
        ask(engine)
        until(lambda n=n: len(server.bodies) == n)
    started = [t for t in {*threading.enumerate()} - before if t.name == "servers"]
    engine.close()
    assert len(started) == 1 and started[0].daemon
    until(lambda: not any(thread.is_alive() for thread in started))
    assert engine.step() == []


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_over_https_a_server_needs_a_certificate_that_is_trusted_and_is_not_tried_again(
    codec, serve, tmp_path, monkeypatch
):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        "-keyout", key, "-out", cert,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    server = serve()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    url = f"https://localhost:{server.port}/v1"
    with monkeypatch.context() as patch:  # another try would be after so many seconds
        patch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 1e6)
        patch.setattr("openai._base_client.MAX_RETRY_DELAY", 1e6)
        with pytest.raises(UserError, match="CERTIFICATE_VERIFY_FAILED"):
            EndpointEngine([url], "m", codec)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    ssl.create_default_context.cache_clear()  # of tests/conftest.py
    engine = EndpointEngine([url], "m", codec)
    check(engine, 3)
    engine.close()


def test_a_turn_that_is_given_up_frees_its_place_and_ends_its_connection(serve):
    server = serve()
    engine = serve.engine(server, concurrency=1)
    server.faults = ["hang"]
    with engine.awake():
        first, waits, last = (ask(engine) for _ in range(3))
        until(lambda: server.bodies)
        for key in (first, waits, 10**6):
            engine.drop(key)
        ((key, turn),) = engine.step()
    assert key == last and not turn.error
    assert not engine._jobs and engine.step() == []
