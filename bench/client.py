"""MemAgent's own evaluation client against ours: same items, prompts and server, greedy.

Holds: both command lines, the comparison of wall time and answers, a server that records or stands
in. Leaves out: MemAgent's code, the model's server.
Exercise it: `python -m bench.client --checkout MEMAGENT --python THEIR_PYTHON --endpoint
http://127.0.0.1:8000/v1`. Read next: common.py.

It needs a checkout of BytedTsinghua-SIA/MemAgent, an interpreter with what that imports (aiohttp,
datasets, tiktoken, torch, tqdm, transformers, uvloop), and a server of plain HTTP that asks for no
key, because theirs has one of its own. Start `vllm serve` with VLLM_SERVER_DEV_MODE=1: its prefix
cache can then be emptied.

Their side is `ruler_hqa.py` as it stands, in a temporary copy of taskutils/memory_eval. We rely on
its flags --length, --save_dir, --save_file, --model, --tokenizer, --n_proc, --api, --force; on
DATAROOT/eval_50.json; on the environment of `their_command`; on TEMPLATE, TEMPLATE_FINAL, NO_MEMORY
and async_query_llm(.., temperature, top_p) in utils/recurrent.py or recurrent_boxed.py; on a line
{the item's fields, pred} for every item that was answered. It has no flag for greedy decoding
(temperature 0.7 is written into it), so its interpreter is started by way of `GREEDY`, which calls
async_query_llm with temperature 0 and top_p 1. Our side is `cli.py eval` with their templates, one
limit for memory and answer, and an empty memory left empty, as theirs.

Timed are whole processes, imports included, in rounds with items of their own after one that warms
up. The prefix cache is emptied before every run where the server can (`reset`); else, and against
drift, every other round has the sides in reverse. `ours` sends text to /chat/completions as theirs
does; `ours, ids` sends token ids to /completions, our default. At last every side runs once by way
of a recorder, untimed: requests, prompts and replies that theirs has too (token ids are other
prompts than text), most requests at once, seconds before the first request, from there to the last
reply, and after it. Where neither side finds an answer of the form asked for (`answered`), the
answers are the same for want of any: the replies say more. A run in which an item fails is an
error.

`--stub-delay S` queries a stand-in instead, whose answer after S seconds is a hash of the prompt
(of ids another than of text): it shows what the clients themselves cost, and leaves no result.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean

from bench.common import ROOT, finish, line, show, spread, table
from config.errors import UserError
from config.options import EMBEDDED
from data import Task
from memagent import NO_MEMORY
from tasks import readers, worlds, writers

BAR, FOLDER = 0.8, Path("taskutils", "memory_eval")
SIDES = {
    "theirs": "",
    "ours": "wall time, ours / MemAgent's client",
    "ours, ids": "wall time, ours in token ids / MemAgent's client",
}
NUMBERS = {
    "items": 128, "sections": 64, "chunk-tokens": 96, "new-tokens": 24, "in-flight": 64,
    "rounds": 5, "timeout-s": 1800,
}  # fmt: skip
GREEDY = """
import importlib, runpy, sys
module = importlib.import_module("utils." + sys.argv.pop(1))
query, greedy = module.async_query_llm, {"temperature": 0.0, "top_p": 1.0}
module.async_query_llm = lambda *args, **options: query(*args, **options | greedy)
runpy.run_path("ruler_hqa.py", run_name="__main__")
"""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


# ---------------------------------------------------------------- the server


def fetch(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Send a GET, or a POST with a JSON body; returns status and reply."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=600) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        raise UserError(f"{url} does not answer ({error}).") from error


class Server(ThreadingHTTPServer):
    """A loopback server that records requests and passes them on to `upstream`.

    Without one it answers by itself, after `delay_s`.
    """

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, upstream: str = "", delay_s: float = 0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.delay_s = upstream.removesuffix("/v1"), delay_s
        self.seen: list[tuple[dict, dict, float, float]] = []  # (request, reply, start, end)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def reply(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Return status and body of the reply to a request."""
        if self.upstream:
            return fetch(self.upstream + path, body)
        if not body:  # the list of models, the prefix cache
            return 200, b'{"data": [{"id": "stub"}]}'
        time.sleep(self.delay_s)
        request = json.loads(body)
        prompt = repr(request.get("messages") or request["prompt"])
        text = f"the answer is \\boxed{{{zlib.crc32(prompt.encode()):08x}}}"
        choice = {"text": text, "message": {"content": text}, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice]}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a connection that is kept open waits for its ACKs

    def log_message(self, *_): ...

    def do_GET(self, body: bytes | None = None):
        start = time.time()
        status, reply = self.server.reply(self.path, body)
        if body:
            self.server.seen.append((json.loads(body), json.loads(reply), start, time.time()))
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(reply)

    def do_POST(self):
        self.do_GET(self.rfile.read(int(self.headers["Content-Length"])))


# ---------------------------------------------------------------- the two sides


def copy_templates(checkout: Path, api: str, out: Path) -> None:
    """Write their prompts as a folder of templates.

    Their module is parsed, not imported: it imports packages that we need not have.
    """
    path = checkout / FOLDER / "utils" / f"{api.replace('-', '_')}.py"
    for needed in (checkout / FOLDER / "ruler_hqa.py", path):
        if not needed.is_file():
            raise UserError(
                f"{checkout} is no checkout of MemAgent with its evaluation client: "
                f"there is no file {needed}."
            )
    constants = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = (target.id for target in node.targets if isinstance(target, ast.Name))
            constants |= dict.fromkeys(names, node.value.value)
    known = constants.get("NO_MEMORY") == NO_MEMORY and "TEMPLATE_FINAL" in constants
    if not known or not isinstance(constants.get("TEMPLATE"), str):
        raise UserError(
            f"{path} has no TEMPLATE, no TEMPLATE_FINAL or another NO_MEMORY than {NO_MEMORY!r}: "
            f"a version that we do not know."
        )
    out.mkdir()
    slots = {name: f"{{{name}}}" for name in ("prompt", "memory", "chunk")}
    for name, constant in (("update", "TEMPLATE"), ("final", "TEMPLATE_FINAL")):
        text = constants[constant].format(**slots)  # {{ and }} become what they stand for
        (out / f"{name}.txt").write_bytes(text.encode())


def their_command(a: argparse.Namespace, folder: Path, url: str, items: Path) -> tuple[list, dict]:
    """Return the command line of their client and its environment variables."""
    host, port = url[len("http://") : -len("/v1")].split(":")
    command = [
        a.python, "-c", GREEDY, a.api.replace("-", "_"), "--length", 50,
        "--save_dir", items / "theirs", "--save_file", "out", "--force",
        "--model", a.served_as, "--tokenizer", a.tokenizer, "--n_proc", a.in_flight, "--api", a.api,
    ]  # fmt: skip
    environment = {
        "DATAROOT": items, "SERVE_HOST": host, "SERVE_PORT": port, "FORCE_THINK": "",
        "RECURRENT_MAX_CONTEXT_LEN": 10**11, "RECURRENT_CHUNK_SIZE": a.chunk_tokens,
        "RECURRENT_MAX_NEW": a.new_tokens, "HF_DATASETS_CACHE": folder / "cache",
    }  # fmt: skip
    return command, environment


def our_command(side: str, a: argparse.Namespace, folder: Path, url: str, items: Path) -> list:
    """Return the command line of `cli.py eval` for the same items and prompts."""
    form = "boxed" if "boxed" in a.api else "sentence"
    command = [
        sys.executable, ROOT / "cli.py", "eval", "--data", items / "eval_50.json",
        "--n", a.items, "--agents", "memagent", "--endpoint", url, "--served-as", a.served_as,
        "--model", a.tokenizer, "--temperatures", 0, "--in-flight", a.in_flight,
        "--templates", folder / "templates", "--layout", "paper", "--form", form,
        "--empty", "empty", "--chunk-tokens", a.chunk_tokens,
        "--memory-tokens", a.new_tokens, "--final-tokens", a.new_tokens,
        "--name", side, "--runs", items,
    ]  # fmt: skip
    if side == "ours":
        command.append("--chat")
    return command


def run(side: str, a: argparse.Namespace, folder: Path, url: str, items: Path) -> dict:
    """Run one process of one side over items/eval_50.json.

    Returns start and end time, seconds, CPU-seconds, and the answer to every item. UserError where
    the process fails or leaves an item without an answer.
    """
    if side == "theirs":
        command, environment = their_command(a, folder, url, items)
        where, out, field = folder / "memory_eval", items / side / "out.jsonl", "pred"
    else:
        command, environment = our_command(side, a, folder, url, items), {}
        where, out, field = ROOT, items / side / "rows.jsonl", "prediction"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    try:
        done = subprocess.run(
            [*map(str, command)],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=a.timeout_s,
            env=os.environ | {name: str(value) for name, value in environment.items()},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{side} could not be run to the end: {str(error)[-300:]}.") from error
    end, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "ModuleNotFoundError" in done.stderr:
            reason += " (--python is the interpreter that has it)"
        raise UserError(f"{side} failed: {reason}.")
    rows = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if not row.get("error")]
    if len(rows) != a.items:
        raise UserError(
            f"{side} answered {len(rows)} of {a.items} items: "
            f"the seconds of failures are not compared."
        )
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "start": start,
        "end": end,
        "seconds": round(end - start, 3),
        "cpu_seconds": round(cpu_s, 2),
        "answers": {row["id"]: (row[field] or "").strip() for row in rows},
    }


# ---------------------------------------------------------------- rounds


def tasks_of_round(n: int, a: argparse.Namespace, tasks: list[Task]) -> list[Task]:
    """Return the next tasks of the file, or generated ones; stripped, as their client does."""
    chosen = tasks[n * a.items :][: a.items]
    chosen = chosen or list(worlds.make_tasks(n, a.items, a.sections, "two_hop", "test"))
    return [replace(t, question=t.question.strip(), text=t.document.strip()) for t in chosen]


def play(a: argparse.Namespace, url: str, tasks: list[Task], folder: Path):
    """Run all rounds: the first warms up, the last is recorded.

    Returns the rounds [rounds + 2] as {side: result of `run`}, the recorded requests of each side,
    and whether the server's prefix cache was emptied.
    """
    rounds, recorded, reset = [], {}, False
    for n in range(a.rounds + 2):
        items = folder / f"round{n}"
        items.mkdir()
        writers.write_eval_json(items / "eval_50.json", tasks_of_round(n, a, tasks))
        recorder = Server(url) if n > a.rounds else None
        results = {}
        for side in reversed(SIDES) if n % 2 else SIDES:
            if a.stub_delay is None:
                reset = fetch(f"{url[:-3]}/reset_prefix_cache", b"")[0] == 200
            results[side] = run(side, a, folder, recorder.url if recorder else url, items)
            if recorder:
                recorded[side], recorder.seen = recorder.seen, []
        rounds.append(results)
        seconds = {side: result["seconds"] for side, result in results.items()}
        print(f"round {n}:", seconds, flush=True)
    return rounds, recorded, reset


def overlap(a: list[str], b: list[str]) -> float:
    """Return the share of strings that two lists have in common, as multisets."""
    return round((Counter(a) & Counter(b)).total() / max(len(a), len(b)), 4)


def prompts_and_replies(requests: list[tuple]) -> tuple[list[str], list[str]]:
    """Return what was sent and what came back, comparable between the sides."""
    fields = ("messages", "prompt", "max_tokens", "temperature", "top_p")
    prompts = [json.dumps([body.get(field) for field in fields]) for body, *_ in requests]
    choices = (reply["choices"][0] for _, reply, *_ in requests)
    replies = [c.get("text") or c.get("message", {}).get("content") or "" for c in choices]
    return prompts, replies


def compare(side: str, rounds: list[dict], last: dict, recorded: dict) -> dict:
    """Compare one side with theirs: times of the rounds, answers, and the recorded requests."""
    pairs = [
        (answer, r[side]["answers"].get(i))
        for r in rounds
        for i, answer in r["theirs"]["answers"].items()
    ]
    prompts, replies = prompts_and_replies(recorded[side])
    their_prompts, their_replies = prompts_and_replies(recorded["theirs"])
    *_, starts, ends = zip(*recorded[side], strict=True)
    at_once = (sum(x <= t < y for x, y in zip(starts, ends, strict=True)) for t in starts)
    phases = (
        min(starts) - last[side]["start"],
        max(ends) - min(starts),
        last[side]["end"] - max(ends),
    )
    return {
        "seconds": spread([r[side]["seconds"] for r in rounds], 2),
        "cpu_seconds": spread([r[side]["cpu_seconds"] for r in rounds], 2),
        "ratio": spread(ratios(side, rounds), 3),
        "same_answers": round(fmean(x == y for x, y in pairs), 4),
        "answered": round(fmean(bool(y) for _, y in pairs), 4),
        "requests": len(prompts),
        "at_once": max(at_once),
        "same_prompts": overlap(their_prompts, prompts),
        "same_replies": overlap(their_replies, replies),
        "before_asking_after_s": [round(x, 2) for x in phases],
    }


def ratios(side: str, rounds: list[dict]) -> list[float]:
    return [r[side]["seconds"] / r["theirs"]["seconds"] for r in rounds]


def print_table(a: argparse.Namespace, rounds: list[dict], sides: dict[str, dict]) -> None:
    shares = ("answered", "same_answers", "same_prompts", "same_replies")
    rows = [
        (
            side,
            show([r[side]["seconds"] for r in rounds], 2),
            show(ratios(side, rounds)),
            s["cpu_seconds"]["median"],
            *(f"{s[name]:.1%}" for name in shares),
            s["requests"],
            " + ".join(f"{x:.2f}" for x in s["before_asking_after_s"]),
        )
        for side, s in sides.items()
    ]
    header = (
        "", "seconds", "/ theirs", "CPU-s", "answered", "same answers", "prompts", "replies",
        "requests", "before, asking, after: s",
    )  # fmt: skip
    table(f"{a.items} items, {a.in_flight} in flight, {a.rounds} rounds", header, rows)


# ---------------------------------------------------------------- the command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="MemAgent's own evaluation client against ours, on one server."
    )
    add, where = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("--checkout", type=Path, required=True, help="of BytedTsinghua-SIA/MemAgent")
    help = "interpreter of their side, with the packages that it imports"
    add("--python", default=sys.executable, help=help)
    where.add_argument("--endpoint", default="", help="http://HOST:PORT/v1")
    help = "seconds; a stand-in instead of a server, no result is written"
    where.add_argument("--stub-delay", type=float, help=help)
    add("--served-as", default="", help="the model's name there; empty = the first one")
    add("--tokenizer", default=str(EMBEDDED), help="the model's tokenizer: a folder or hub name")
    apis, help = ("recurrent", "recurrent-boxed"), "their agent: answers in a sentence or boxed"
    add("--api", choices=apis, default="recurrent", help=help)
    help = "a file of tasks, of which every round takes the next ones; empty = generated English"
    add("--data", default="", help=help)
    for name, value in NUMBERS.items():
        add(f"--{name}", type=int, default=value)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    a = parse(argv)
    url = a.endpoint.rstrip("/") if a.stub_delay is None else Server(delay_s=a.stub_delay).url
    if not re.fullmatch(r"http://[^/:]+:\d+/v1", url):
        raise UserError("MemAgent's client can only ask a server of the form http://HOST:PORT/v1.")
    tasks = readers.read(a.data) if a.data else []
    if a.data and len(tasks) < (a.rounds + 2) * a.items:
        raise UserError(
            f"{a.data} has {len(tasks)} tasks: {a.rounds} rounds, a warm-up and a recorded one "
            f"take {a.items} each."
        )
    with tempfile.TemporaryDirectory(prefix="bench-client-") as temporary:
        folder = Path(temporary)
        copy_templates(a.checkout, a.api, folder / "templates")
        a.served_as = a.served_as or json.loads(fetch(f"{url}/models")[1])["data"][0]["id"]
        shutil.copytree(a.checkout / FOLDER, folder / "memory_eval")
        (_, *rounds, last), recorded, reset = play(a, url, tasks, folder)
    sides = {side: compare(side, rounds, last, recorded) for side in SIDES}
    print_table(a, rounds, sides)
    lines = []
    for side, what in SIDES.items():
        if what:
            ratio = sides[side]["ratio"]["median"]
            lines.append(line(what, f"{ratio:.2f}x", f"at most {BAR:g}x", ratio <= BAR))
    settings = {name: getattr(a, name) for name in (n.replace("-", "_") for n in NUMBERS)}
    source, model = Path(a.data).name or "generated English", Path(a.served_as).name
    settings |= {"api": a.api, "data": source, "model": model}
    result = {
        "met": lines[0]["met"],
        "asked": settings,
        "reset": reset,
        "sides": sides,
        "rounds": [  # the sides in the order of their runs
            {side: {k: timed[k] for k in ("seconds", "cpu_seconds")} for side, timed in r.items()}
            for r in rounds
        ],
    }
    if a.stub_delay is None:
        finish("client", result, lines)
    return result | {"lines": lines}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"memagent: {error}") from None
