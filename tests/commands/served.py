"""A server in a thread, and what is asked of it: for tests/commands and tests/hostile."""

import threading
from contextlib import contextmanager

import httpx
from conftest import HANG_S

from commands.door import Door, Server
from commands.serve import Chats, app, listen
from config.options import ServeConfig
from embedded import tiny
from engines.scripted import ScriptedEngine
from engines.service import Service
from tasks import worlds

AGENT = tiny.agent("memagent")
NAME, PATH = "tiny-memagent", "/v1/chat/completions"
TASK = worlds.make_task(5, 6, "one_fact")


class Slow(ScriptedEngine):
    """Answers a turn a step, and nothing before its gate is opened."""

    def __init__(self, codec):
        super().__init__(codec, lambda prompt: "Anna", per_step=1)
        self.gate = threading.Event()

    def step(self):
        return super().step() if self.gate.wait(0.002) else []


@contextmanager
def listening(application, end=lambda: None):
    """Run an application in a thread; yields its URL and the server."""
    with listen(ServeConfig(port=0)) as listener:
        server = Server(application, 1, end)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serving(engine, agent=AGENT, key="", most_tokens=10**6, **config):
    """Serve an agent; yields a client, and the chats with the `lines` of their log."""
    config, lines = ServeConfig(**config), []
    service = Service(engine, config.in_flight, most_tokens)
    chats = Chats(service, agent, NAME, config, Door(config, key), lines.append)
    chats.lines = lines
    kind = {"Content-Type": "application/json"}
    try:
        with listening(app(chats), service.stop) as (url, server):
            chats.server = server
            with httpx.Client(base_url=url, timeout=HANG_S, headers=kind) as http:
                yield http, chats
    finally:
        service.close()


def chat(task=TASK, **fields):
    texts = task.document, task.question
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": NAME, "messages": messages} | fields


def error_of(reply):
    error = reply.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["message"].endswith(".")
    return error["message"]
