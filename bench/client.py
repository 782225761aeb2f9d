"""MemAgent's own evaluation client against ours: the same items, prompts and server, greedy; wall time and answers.

Holds: both command lines, the comparison, a server that records or stands in. Leaves out: MemAgent's code, the server that is asked.
Exercise it: `python -m bench.client --checkout MEMAGENT --python THEIR_PYTHON --endpoint http://127.0.0.1:8000/v1`. Read next: common.py.

It needs a checkout of BytedTsinghua-SIA/MemAgent, an interpreter with what that imports (aiohttp, datasets, tiktoken, torch, tqdm,
transformers, uvloop) and a server of plain HTTP that asks for no key, for theirs has one of its own. Start `vllm serve` with
VLLM_SERVER_DEV_MODE=1: its prefix cache can then be emptied.

Their side is `ruler_hqa.py` as it stands, in a temporary copy of taskutils/memory_eval. We rely on its flags --length, --save_dir,
--save_file, --model, --tokenizer, --n_proc, --api, --force; on DATAROOT/eval_50.json; on the variables in `run`; on TEMPLATE,
TEMPLATE_FINAL, NO_MEMORY and async_query_llm(.., temperature, top_p) in utils/recurrent.py or recurrent_boxed.py; on a line {the item's
fields, pred} for every item that was answered. It has no flag for greedy (temperature 0.7 is written into it), so its interpreter is
started by way of `GREEDY`, which calls async_query_llm with temperature 0 and top_p 1. Our side is `cli.py eval` with their templates, one
limit for memory and answer, and an empty memory left empty, as theirs.

Timed are whole processes, imports and all, in rounds with items of their own after one that warms up. The prefix cache is emptied before
every run where the server can (`reset`); else, and against drift, every other round has the sides in reverse. `ours` sends text to
/chat/completions as theirs does, `ours, ids` token ids to /completions, our default. At last every side runs once by way of a recorder,
untimed: requests, prompts and replies that theirs has too (token ids are other prompts than text), most requests at once, seconds before
the first request, from there to the last reply, and after it. Where neither side finds an answer of the form asked for (`answered`), the
answers are the same for want of any: the replies say more. A run in which an item fails is an error.

`--stub-delay S` asks a stand-in instead, whose answer after S seconds is a hash of the prompt (of ids another than of text): it shows what
the clients themselves cost, and leaves no result.
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
from memagent import NO_MEMORY
from tasks import readers, worlds, writers

BAR, FOLDER = 0.8, Path("taskutils", "memory_eval")
SIDES = {
    "theirs": "",
    "ours": "wall time, ours / MemAgent's client",
    "ours, ids": "wall time, ours in token ids / MemAgent's client",
}
GREEDY = """
import importlib, runpy, sys
module = importlib.import_module("utils." + sys.argv.pop(1))
ask = module.async_query_llm
module.async_query_llm = lambda *args, **given: ask(*args, **given | {"temperature": 0.0, "top_p": 1.0})
runpy.run_path("ruler_hqa.py", run_name="__main__")
"""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, raw: bytes | None = None) -> tuple[int, bytes]:
    try:
        with OPENER.open(
            urllib.request.Request(url, raw, {"Content-Type": "application/json"}), timeout=600
        ) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        raise UserError(f"{url} does not answer ({error}).") from error


class Server(ThreadingHTTPServer):
    """On loopback; notes what it is asked and passes it on to `upstream`, or, without one, answers by itself after `delay_s`."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, upstream: str = "", delay_s: float = 0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.delay_s, self.seen = (
            upstream.removesuffix("/v1"),
            delay_s,
            [],
        )  # (asked, told, from, to)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def told(self, path: str, raw: bytes | None) -> tuple[int, bytes]:
        if self.upstream or not raw:  # without a body: the models, the prefix cache
            return (
                fetch(self.upstream + path, raw)
                if self.upstream
                else (200, b'{"data": [{"id": "stub"}]}')
            )
        time.sleep(self.delay_s)
        asked = json.loads(raw)
        said = f"the answer is \\boxed{{{zlib.crc32(repr(asked.get('messages') or asked['prompt']).encode()):08x}}}"
        return 200, json.dumps(
            {"choices": [{"text": said, "message": {"content": said}, "finish_reason": "stop"}]}
        ).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = (
        "HTTP/1.1",
        True,
    )  # or a connection that is kept open waits for its ACKs

    def log_message(self, *_): ...

    def do_GET(self, raw: bytes | None = None):
        start = time.time()
        status, told = self.server.told(self.path, raw)
        if raw:
            self.server.seen.append((json.loads(raw), json.loads(told), start, time.time()))
        self.send_response(status)
        self.send_header("Content-Length", str(len(told)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(told)

    def do_POST(self):
        self.do_GET(self.rfile.read(int(self.headers["Content-Length"])))


def templates(checkout: Path, api: str, out: Path) -> None:
    """Their prompts as a folder of templates. Read, not imported: they import what we need not have."""
    path = checkout / FOLDER / "utils" / f"{api.replace('-', '_')}.py"
    for needed in (checkout / FOLDER / "ruler_hqa.py", path):
        if not needed.is_file():
            raise UserError(
                f"{checkout} is no checkout of MemAgent with its evaluation client: there is no file {needed}."
            )
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {
                name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)
            }
    if (
        found.get("NO_MEMORY") != NO_MEMORY
        or not isinstance(found.get("TEMPLATE"), str)
        or "TEMPLATE_FINAL" not in found
    ):
        raise UserError(
            f"{path} has no TEMPLATE, no TEMPLATE_FINAL or another NO_MEMORY than {NO_MEMORY!r}: a version that we do not know."
        )
    out.mkdir()
    for turn, name in (("update", "TEMPLATE"), ("final", "TEMPLATE_FINAL")):
        text = found[name].format(
            prompt="{prompt}", memory="{memory}", chunk="{chunk}"
        )  # {{ and }} become what they stand for
        (out / f"{turn}.txt").write_bytes(text.encode())


def run(side: str, a: argparse.Namespace, folder: Path, url: str, items: Path) -> dict:
    """One process of one side over items/eval_50.json: when, how many CPU-seconds, and the answer to every item."""
    out = items / side
    if side == "theirs":
        host, port = url[len("http://") : -len("/v1")].split(":")
        command = [
            a.python,
            "-c",
            GREEDY,
            a.api.replace("-", "_"),
            "--length",
            50,
            "--save_dir",
            out,
            "--save_file",
            "out",
            "--force",
            "--model",
            a.served_as,
            "--tokenizer",
            a.tokenizer,
            "--n_proc",
            a.in_flight,
            "--api",
            a.api,
        ]
        env = {
            "DATAROOT": items,
            "SERVE_HOST": host,
            "SERVE_PORT": port,
            "RECURRENT_MAX_CONTEXT_LEN": 10**11,
            "FORCE_THINK": "",
            "RECURRENT_CHUNK_SIZE": a.chunk_tokens,
            "RECURRENT_MAX_NEW": a.new_tokens,
            "HF_DATASETS_CACHE": folder / "cache",
        }
    else:
        command = [
            sys.executable,
            ROOT / "cli.py",
            "eval",
            "--data",
            items / "eval_50.json",
            "--n",
            a.items,
            "--agents",
            "memagent",
            "--endpoint",
            url,
            "--served-as",
            a.served_as,
            "--model",
            a.tokenizer,
            "--temperatures",
            0,
            "--in-flight",
            a.in_flight,
            "--templates",
            folder / "templates",
            "--layout",
            "paper",
            "--form",
            "boxed" if "boxed" in a.api else "sentence",
            "--empty",
            "empty",
            "--chunk-tokens",
            a.chunk_tokens,
            "--memory-tokens",
            a.new_tokens,
            "--final-tokens",
            a.new_tokens,
            "--name",
            side,
            "--runs",
            items,
            *["--chat"] * (side == "ours"),
        ]
        env = {}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    try:
        done = subprocess.run(
            [*map(str, command)],
            cwd=folder / "memory_eval" if side == "theirs" else ROOT,
            capture_output=True,
            text=True,
            timeout=a.timeout_s,
            env=os.environ | {name: str(value) for name, value in env.items()},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{side} could not be run to the end: {str(error)[-300:]}.") from error
    end, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        hint = (
            " (--python is the interpreter that has it)"
            if "ModuleNotFoundError" in done.stderr
            else ""
        )
        raise UserError(
            f"{side} failed: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}{hint}."
        )
    lines = (
        (out / ("out.jsonl" if side == "theirs" else "rows.jsonl"))
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [row for row in map(json.loads, lines) if not row.get("error")]
    if len(rows) != a.items:
        raise UserError(
            f"{side} answered {len(rows)} of {a.items} items: the seconds of failures are not compared."
        )
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answers = {
        row["id"]: (row["pred" if side == "theirs" else "prediction"] or "").strip() for row in rows
    }
    return {
        "start": start,
        "end": end,
        "seconds": round(end - start, 3),
        "cpu_seconds": round(cpu_s, 2),
        "answers": answers,
    }


def in_both(a: list[str], b: list[str]) -> float:
    return round((Counter(a) & Counter(b)).total() / max(len(a), len(b)), 4)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        description="MemAgent's own evaluation client against ours, on one server."
    )
    add, where = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("--checkout", type=Path, required=True, help="of BytedTsinghua-SIA/MemAgent")
    add(
        "--python",
        default=sys.executable,
        help="interpreter of their side, with the packages that it imports",
    )
    where.add_argument("--endpoint", default="", help="http://HOST:PORT/v1")
    where.add_argument(
        "--stub-delay",
        type=float,
        help="seconds; a stand-in instead of a server, no result is written",
    )
    add("--served-as", default="", help="the model's name there; empty = the first one")
    add("--tokenizer", default=str(EMBEDDED), help="the model's tokenizer: a folder or hub name")
    add(
        "--api",
        choices=("recurrent", "recurrent-boxed"),
        default="recurrent",
        help="their agent: answers in a sentence or boxed",
    )
    add(
        "--data",
        default="",
        help="a file of tasks, of which every round takes the next ones; empty = generated English",
    )
    numbers = {
        "items": 128,
        "sections": 64,
        "chunk-tokens": 96,
        "new-tokens": 24,
        "in-flight": 64,
        "rounds": 5,
        "timeout-s": 1800,
    }
    for name, value in numbers.items():
        add(f"--{name}", type=int, default=value)
    a = parser.parse_args(argv)
    url = a.endpoint.rstrip("/") if a.stub_delay is None else Server(delay_s=a.stub_delay).url
    if not re.fullmatch(r"http://[^/:]+:\d+/v1", url):
        raise UserError("MemAgent's client can only ask a server of the form http://HOST:PORT/v1.")
    given, rounds, seen, reset = readers.read(a.data) if a.data else [], [], {}, False
    if a.data and len(given) < (a.rounds + 2) * a.items:
        raise UserError(
            f"{a.data} has {len(given)} tasks: {a.rounds} rounds, a warm-up and a recorded one take {a.items} each."
        )
    with tempfile.TemporaryDirectory(prefix="bench-client-") as temporary:
        templates(a.checkout, a.api, (folder := Path(temporary)) / "templates")
        a.served_as = a.served_as or json.loads(fetch(f"{url}/models")[1])["data"][0]["id"]
        shutil.copytree(a.checkout / FOLDER, folder / "memory_eval")
        for n in range(a.rounds + 2):  # the first warms up, the last is recorded
            (items := folder / f"round{n}").mkdir()
            tasks = given[n * a.items :][: a.items] or list(
                worlds.make_tasks(n, a.items, a.sections, "two_hop", "test")
            )
            tasks = [
                replace(t, question=t.question.strip(), text=t.document.strip()) for t in tasks
            ]  # as theirs does
            writers.write_eval_json(items / "eval_50.json", tasks)
            server, done = Server(url) if n > a.rounds else None, {}
            for side in (SIDES, reversed(SIDES))[n % 2]:
                reset = (
                    a.stub_delay is None and fetch(f"{url[:-3]}/reset_prefix_cache", b"")[0] == 200
                )
                done[side] = run(side, a, folder, server.url if server else url, items)
                if server:
                    seen[side], server.seen = server.seen, []
            rounds.append(done)
            print(f"round {n}:", {side: one["seconds"] for side, one in done.items()}, flush=True)
    *rounds, last = rounds[1:]
    sides, shown = {}, []
    for side in SIDES:
        bodies, told, starts, ends = zip(*seen[side], strict=True)
        prompts = [
            json.dumps(
                [b.get(k) for k in ("messages", "prompt", "max_tokens", "temperature", "top_p")]
            )
            for b in bodies
        ]
        replies = [
            c.get("text") or c.get("message", {}).get("content") or ""
            for c in (t["choices"][0] for t in told)
        ]
        if side == "theirs":
            their_prompts, their_replies = prompts, replies
        pairs = [
            (answer, r[side]["answers"].get(i))
            for r in rounds
            for i, answer in r["theirs"]["answers"].items()
        ]
        seconds, cpu_s = ([r[side][k] for r in rounds] for k in ("seconds", "cpu_seconds"))
        ratios = [r[side]["seconds"] / r["theirs"]["seconds"] for r in rounds]
        parts = (
            min(starts) - last[side]["start"],
            max(ends) - min(starts),
            last[side]["end"] - max(ends),
        )
        s = sides[side] = {
            "seconds": spread(seconds, 2),
            "cpu_seconds": spread(cpu_s, 2),
            "ratio": spread(ratios, 3),
            "same_answers": round(fmean(x == y for x, y in pairs), 4),
            "answered": round(fmean(bool(y) for _, y in pairs), 4),
            "requests": len(bodies),
            "at_once": max(
                sum(x <= t < y for x, y in zip(starts, ends, strict=True)) for t in starts
            ),
            "same_prompts": in_both(their_prompts, prompts),
            "same_replies": in_both(their_replies, replies),
            "before_asking_after_s": [round(x, 2) for x in parts],
        }
        about = [
            f"{s[k]:.1%}" for k in ("answered", "same_answers", "same_prompts", "same_replies")
        ]
        shown.append(
            (
                side,
                show(seconds, 2),
                show(ratios),
                s["cpu_seconds"]["median"],
                *about,
                s["requests"],
                " + ".join(f"{x:.2f}" for x in parts),
            )
        )
    header = (
        "",
        "seconds",
        "/ theirs",
        "CPU-s",
        "answered",
        "same answers",
        "prompts",
        "replies",
        "requests",
        "before, asking, after: s",
    )
    table(f"{a.items} items, {a.in_flight} in flight, {a.rounds} rounds", header, shown)
    ratio = {side: sides[side]["ratio"]["median"] for side in SIDES}
    lines = [
        line(what, f"{ratio[side]:.2f}x", f"at most {BAR:g}x", ratio[side] <= BAR)
        for side, what in SIDES.items()
        if what
    ]
    asked = {name.replace("-", "_"): getattr(a, name.replace("-", "_")) for name in numbers}
    asked |= {
        "api": a.api,
        "data": Path(a.data).name or "generated English",
        "model": Path(a.served_as).name,
    }
    kept = [
        {side: {k: one[k] for k in ("seconds", "cpu_seconds")} for side, one in r.items()}
        for r in rounds
    ]  # in the order of their runs
    result = {
        "met": lines[0]["met"],
        "asked": asked,
        "reset": reset,
        "sides": sides,
        "rounds": kept,
    }
    if a.stub_delay is None:
        finish("client", result, lines)
    return result | {"lines": lines}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"memagent: {error}") from None
