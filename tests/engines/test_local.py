"""Who answers when it is not said, and what of a running Ollama is asked."""

import contextlib
import json
from pathlib import Path

import pytest
from servers import Server

from config.errors import UserError
from config.options import READER, AskConfig
from engines import local
from engines.local import answerer

OLLAMA = json.loads(Path(__file__).with_name("replies.json").read_text())["ollama"]
SMALL, LARGE = {"name": "small:1b", "size": 10}, {"name": "large:7b", "size": 70}
VECTORS = {"name": "all-minilm", "size": 99, "details": {"family": "bert", "families": None}}
CLOUD = {"name": "huge:cloud", "size": 300, "remote_host": "https://example.com"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setenv(local.HOST, "127.0.0.1:1")  # where no Ollama listens
    monkeypatch.delenv(local.BASE_URL, raising=False)
    monkeypatch.delenv(local.CONTEXT, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-a-real-one")


@contextlib.contextmanager
def ollama(monkeypatch, tags=(), loaded=(), shown=b""):
    """Run what answers as an Ollama with these models does; gives the URL and what it is sent."""

    def cards(given):
        return {"models": [*given]} if isinstance(given, list | tuple) else given

    replies, sent = {"/api/tags": cards(tags), "/api/ps": cards(loaded), "/api/show": shown}, []

    def answer(path, headers, content):
        sent.append((path, headers, content))
        return 200, replies[path]

    with Server(answer) as server:
        monkeypatch.setenv(local.HOST, server.url.removeprefix("http://"))
        yield f"{server.url}/v1", sent
    monkeypatch.setenv(local.HOST, "127.0.0.1:1")


def test_the_order_in_which_who_answers_is_looked_for(monkeypatch):
    def found(**settings):
        who = answerer(AskConfig(**settings))
        return who.endpoint, who.model, who.served_as, who.keyed

    named, other = ("http://127.0.0.1:8/v1",), "http://127.0.0.1:9/v1"
    with ollama(monkeypatch, [SMALL, LARGE, VECTORS, CLOUD]) as (url, sent):
        assert found() == ((url,), "", "large:7b", False)
        monkeypatch.setenv(local.BASE_URL, other)
        sent.clear()
        assert found(served_as="m") == ((other,), "", "m", True)
        assert found(model="tiny") == ((), "tiny", "", False)
        assert found(model="m", endpoint=named) == (named, "m", "", True)
        assert not sent
    monkeypatch.delenv(local.BASE_URL)
    assert found() == ((), READER, "", False)
    for setting in ({"served_as": "m"}, {"chat": True}, {"served_as": "m", "model": "tiny"}):
        with pytest.raises(UserError):
            found(**setting)


def test_replies_in_the_form_of_ollama(monkeypatch):
    """replies.json says of which version they are; embeddings and a cloud's model are the largest
    there."""
    tags, loaded, show = (OLLAMA[name] for name in ("tags", "ps", "show"))
    with ollama(monkeypatch, tags, loaded) as (_, sent):
        found = answerer(AskConfig())
        assert (found.served_as, found.window) == ("qwen3:1.7b", 16384)
    with ollama(monkeypatch, tags, shown=show) as (_, sent):
        found = answerer(AskConfig())
        assert (found.served_as, found.window) == ("llama3.1:8b", 8192)
    assert [path for path, *_ in sent] == ["/api/tags", "/api/ps", "/api/show"]
    assert json.loads(sent[-1][-1]) == {"model": "llama3.1:8b"}
    assert not any("sk-" in repr(request) for request in sent)


WINDOWS = [  # what /api/show says, the environment, the window
    (b"", "", 4096), (b"no JSON", "", 4096), ({}, "8192", 8192), ({}, "0", 4096), ({}, "x", 4096),
    ({"parameters": "stop   \"a\"\nnum_ctx    2048"}, "8192", 2048),
    ({"parameters": "num_ctx    99999", "model_info": {"a.context_length": 8192}}, "", 8192),
    ({"model_info": {"a.context_length": "8"}}, "6000", 6000),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "environment", "window"), WINDOWS)
def test_the_window_of_a_model_that_is_not_loaded(monkeypatch, shown, environment, window):
    monkeypatch.setenv(local.CONTEXT, environment)
    with ollama(monkeypatch, [SMALL], shown=shown):
        assert answerer(AskConfig()).window == window
        assert answerer(AskConfig(served_as="other")).served_as == "other"


ENDLESS = SMALL | {"name": "m" * local.MOST_BYTES}


@pytest.mark.parametrize(
    "tags",
    [[], [VECTORS], [CLOUD], [{"no": "name"}], ["x"], [SMALL, ENDLESS], b"<html>", b"[" * 99],
)
def test_what_is_no_ollama_with_a_chat_model_is_passed_by(monkeypatch, tags):
    with ollama(monkeypatch, tags):
        assert answerer(AskConfig()).model == READER
