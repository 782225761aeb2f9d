"""A stream whose model is a server of OpenAI's protocol that takes messages, from first to last."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typer.testing import CliRunner

import cli
from agents.memrl import SHOWN, SUCCESSES
from suites.llb_db import Databases

WRONG = "own-3"  # the task that is never solved


def answer(messages: list[dict]) -> str:
    """Act as the known solution of the task that the conversation began with."""
    said = messages[0]["content"]
    if said.endswith(("Steps:", "Reflection:")):
        return "Look at the table first."
    (task,) = [task for task in Databases().tasks() if said.endswith(f"Task:\n{task.question}\n")]
    if task.id == WRONG:
        return "Answer: []"
    return task.solution[sum(message["role"] == "assistant" for message in messages)]


@contextmanager
def served():
    """Yield the address of a server, and the conversations that it was sent."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_GET(self):
            self.send({"data": [{"id": "m"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent.append(body["messages"])
            message = {"role": "assistant", "content": answer(body["messages"])}
            self.send({"choices": [{"message": message, "finish_reason": "stop"}],
                       "usage": {"prompt_tokens": 70, "completion_tokens": 7}})  # fmt: skip

        def send(self, reply: dict):
            raw = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", sent
    finally:
        http.shutdown()
        http.server_close()


def test_a_server_of_messages_works_on_tasks_turn_by_turn(tmp_path):
    words = "--suite llb-db --arms none,memrl --epochs 2 --batch 8 --chat --delta 0"
    with served() as (url, sent):
        command = ["stream", "--runs", str(tmp_path), "--endpoint", url, *words.split()]
        result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    acts = [m for m in sent if not m[0]["content"].endswith(("Steps:", "Reflection:"))]
    for messages in acts:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    lessons = [m for m in sent if m not in acts]
    assert len(lessons) == 16 and all(len(messages) == 1 for messages in lessons)
    assert not any(SHOWN in m[0]["content"] for m in lessons)  # what was shown is not kept again
    with_memory = [m[0]["content"] for m in acts if SHOWN in m[0]["content"]]
    assert with_memory and any(
        "Script: Look at the table first." in text.split(SUCCESSES)[-1] for text in with_memory
    )
    for arm in ("none", "memrl"):
        lines = (tmp_path / "stream" / f"{arm}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 16 and not any(row["error"] for row in rows)
        assert {row["id"] for row in rows if not row["success"]} == {WRONG}
        assert all(row["read_tokens"] > 0 and row["written_tokens"] > 0 for row in rows)
        assert max(row["steps"] for row in rows) == 2
    assert "No model" not in result.output
