"""examples/verifiers_env.py: verifiers' own evaluation asks and pays what our rollout does."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
pytest.importorskip("verifiers", reason="verifiers is not installed here: docs/train.md")

import verifiers_env
from test_readers import SHARED
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig

from engines.scripted import ScriptedEngine
from rollout import rollout

WORLD = {"lengths": [4], "n": 8}  # two kinds of question
HOTPOTQA = {
    "suite": "ruler-hqa", "data": [str(SHARED / "hotpotqa_tiny.jsonl.gz")], "lengths": [10], "n": 8,
}  # fmt: skip


def script(text, tasks):
    """Return a reply that depends on the whole prompt: a name that stands in it or nothing, and at
    last the right answer or none."""
    draw = random.Random(text)
    if "<section>" in text:
        return draw.choice([*re.findall(r"[A-Z]\w+", text)[-9:], ""])
    (right,) = (task.answers[0] for task in tasks if task.question in text)
    return f"\\boxed{{{draw.choice([right, 'Nobody'])}}}"


@pytest.fixture
def server(codec):
    """Answers chats by the script; `read` has the ids of each, by the model's chat template."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): ...

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            *_, last = body["messages"]
            ids = codec.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False
            )
            server.read.append((ids, body["max_tokens"]))
            said, most = script(last["content"], server.tasks), body["max_tokens"]
            out = [*codec.reply(said), codec.tokenizer.eos_token_id]
            reason = "stop" if len(out) <= most else "length"
            message = {"role": "assistant", "content": str(codec.response(out[:most]))}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"prompt_tokens": len(ids), "total_tokens": 0}
            usage["completion_tokens"] = server.written or len(out[:most])
            about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
            reply = json.dumps(about | {"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.read, server.written, server.tasks = [], 0, ()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def evaluated(server, folder, suite, harness):
    """Return the traces of verifiers' own evaluation, by the place of their task."""
    name = "verifiers-env"
    suite = suite | {"id": name}
    first, *_ = verifiers_env.Suite(verifiers_env.SuiteConfig(**suite))
    server.tasks = verifiers_env.tasks_of(first.data.source)
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": name} | harness}
    config = EvalConfig.model_validate({
        "env": {"taskset": suite, "agent": agent},
        "client": {"base_url": f"http://127.0.0.1:{server.server_port}/v1"},
        "model": "m", "output_dir": str(folder), "push": False, "rich": None,
    })  # fmt: skip
    traces = [trace for episode in asyncio.run(run_eval(config)) for trace in episode.traces]
    return {trace.task.data.place: trace for trace in traces}


@pytest.mark.parametrize("suite", [WORLD, HOTPOTQA], ids=["world", "hotpotqa"])
def test_verifiers_asks_and_pays_what_our_rollout_does(server, codec, tmp_path, suite):
    harness = {"settings": {"chunk_tokens": 512, "memory_tokens": 40, "final_tokens": 40}}
    harness = harness if suite is HOTPOTQA else {}
    traces = evaluated(server, tmp_path, suite, harness)
    tasks = server.tasks
    assert len(traces) == len(tasks) == (8 if suite is HOTPOTQA else 16)
    agent = verifiers_env.Reader(verifiers_env.ReaderConfig(**harness)).agent
    engine = ScriptedEngine(codec, lambda prompt: script(prompt.text, tasks))
    ours = {tasks.index(t.task): t for t in rollout(engine, agent, [(t, 0) for t in tasks])}
    prompts, rewards = [], []
    for place, trace in traces.items():
        trajectory = ours[place]
        assert trace.ok and trace.reward == agent.reward(trajectory)
        rewards.append(trace.reward)
        # no prompt goes on from a response: each turn is a branch, and a sample of its own
        turns = [[m.content or "" for m in branch.messages] for branch in trace.branches]
        assert turns == [[turn.prompt.text, str(turn.response)] for turn in trajectory.turns]
        prompts += [(turn.prompt_ids, turn.prompt.max_tokens) for turn in trajectory.turns]
    assert {*rewards} == {0.0, 1.0} and len(server.read) == len(prompts)
    if suite is WORLD:  # elsewhere a section may end within what the tokenizer puts together
        assert sorted(server.read) == sorted(prompts)


def test_what_cannot_be_kept_is_an_error(server, tmp_path):
    server.written = 99  # a client for training heeds the run's max_tokens alone
    one = WORLD | {"n": 1, "settings": {"kinds": ["one_fact"]}}
    (trace,) = evaluated(server, tmp_path, one, {}).values()
    assert "lower the sampling's max_tokens" in trace.errors[-1].message and not trace.ok
