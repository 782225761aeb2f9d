"""The comparison with MemAgent's client, driven with a miniature of that client.

The miniature has its file layout and command line, nothing of its code.
"""

import json
import subprocess
import textwrap
from types import SimpleNamespace

import pytest
from conftest import forked

import bench.client as client
import bench.common as common

MAIN = """
import argparse, asyncio, json, os
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("length", "save_dir", "save_file", "model", "tokenizer", "n_proc", "api"):
    parser.add_argument(f"--{name}")
parser.add_argument("--force", action="store_true")
args = parser.parse_args()
items = json.loads(Path(os.environ["DATAROOT"], f"eval_{args.length}.json").read_text())
from utils.recurrent import async_query_llm
from tokenizers import Tokenizer  # transformers would take seconds

tokenizer = Tokenizer.from_file(str(Path(args.tokenizer, "tokenizer.json")))
gate = asyncio.Semaphore(int(args.n_proc))


async def one(item):
    async with gate:
        return await async_query_llm(item, args.model, tokenizer, temperature=0.7, top_p=0.95)


async def everyone():
    return await asyncio.gather(*[one(item) for item in items])


responses = asyncio.run(everyone())
Path(args.save_dir).mkdir(parents=True)
with Path(args.save_dir, f"{args.save_file}.jsonl").open("w") as out:
    for item, response in zip(items, responses):
        item["pred"] = response.rpartition("the answer is")[2].strip() or None
        out.write(json.dumps(item) + "\\n")
if os.environ["FAKE_SPOILS"]:
    path = Path(args.save_dir, f"{args.save_file}.jsonl")
    first, *lines = path.read_text().splitlines()
    lines.insert(0, json.dumps(json.loads(first) | {"pred": "another"}))
    path.write_text("\\n".join(lines) + "\\n")
"""
AGENT = '''
import asyncio, json, os, urllib.request

TEMPLATE = """Solve {prompt} with {{care}} and
{memory}, after
{chunk}
now:
"""
TEMPLATE_FINAL = "Of {prompt} we kept {memory}. "
NO_MEMORY = "No previous memory"


def ask(body):
    url = f"http://{os.environ['SERVE_HOST']}:{os.environ['SERVE_PORT']}/v1/chat/completions"
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), header)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


async def async_query_llm(item, model, tokenizer, temperature=1.0, top_p=0.5):
    async def turn(text):
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        body |= {"temperature": temperature, "top_p": top_p}
        body |= {"max_tokens": int(os.environ["RECURRENT_MAX_NEW"])}
        return await asyncio.to_thread(ask, body)

    memory, ids = NO_MEMORY, tokenizer.encode(item["context"]).ids
    step = int(os.environ["RECURRENT_CHUNK_SIZE"])
    assert len(ids) <= int(os.environ["RECURRENT_MAX_CONTEXT_LEN"])
    for at in range(0, len(ids), step):
        chunk = tokenizer.decode(ids[at : at + step])
        memory = await turn(TEMPLATE.format(prompt=item["input"], memory=memory, chunk=chunk))
    return await turn(TEMPLATE_FINAL.format(prompt=item["input"], memory=memory))
'''


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "checkout" / "taskutils" / "memory_eval"
    (folder / "utils").mkdir(parents=True)
    (folder / "utils" / "__init__.py").write_text("")
    (folder / "utils" / "recurrent.py").write_text(textwrap.dedent(AGENT))
    (folder / "ruler_hqa.py").write_text(textwrap.dedent(MAIN))
    monkeypatch.setenv("FAKE_SPOILS", "")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    sides = {side: client.SIDES[side] for side in ("theirs", "ours")}
    monkeypatch.setattr(client, "SIDES", sides)  # the third would cost a process in each round
    return tmp_path / "checkout"


SMALL = "--items 3 --sections 9 --chunk-tokens 50 --new-tokens 40 --in-flight 2 --rounds 1".split()


class Forked:
    """Stands in for `subprocess`: runs our side in forked processes.

    They are fresh interpreters in the real comparison, and each takes seconds.
    """

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, folder):
        self.said = folder / "said"

    def run(self, command, cwd, timeout, **other):
        if command[1] != str(client.ROOT / "cli.py"):
            return subprocess.run(command, cwd=cwd, timeout=timeout, **other)
        process = forked(command[2:], self.said, cwd)
        process.join(timeout)
        return SimpleNamespace(returncode=process.exitcode, stderr=self.said.read_text())


def compared(checkout, monkeypatch):
    """Compare three items; their client then spoils one answer in its file.

    Returns the result and the bodies of all requests, of both sides in three rounds.
    """
    monkeypatch.setenv("FAKE_SPOILS", "one")
    monkeypatch.setattr(client, "subprocess", Forked(checkout.parent))
    server = client.Server()
    result = client.main(["--checkout", str(checkout), "--endpoint", server.url, *SMALL])
    return result, [body for body, *_ in server.seen if "messages" in body]


def test_both_sides_send_the_same_and_another_answer_is_noticed(
    checkout, tmp_path, monkeypatch, capsys
):
    result, bodies = compared(checkout, monkeypatch)
    turns = 3 * (-(-9 * 24 // 50) + 1)
    theirs, ours = result["sides"]["theirs"], result["sides"]["ours"]
    assert ours["same_prompts"] == ours["same_replies"] == ours["answered"] == 1
    assert theirs["same_answers"] == 1
    assert ours["same_answers"] == pytest.approx(2 / 3, abs=1e-4)
    for side in (theirs, ours):
        assert side["requests"] == turns and side["at_once"] <= 2
    (one,) = result["rounds"]
    ratio = one["ours"]["seconds"] / one["theirs"]["seconds"]
    assert ours["ratio"]["median"] == pytest.approx(ratio, abs=1e-3)
    assert ours["cpu_seconds"]["min"] > 0
    assert theirs["ratio"] == {"median": 1, "min": 1, "max": 1}
    assert result["met"] is (ours["ratio"]["median"] <= 0.8)
    assert result["reset"] is True  # the stand-in says yes to anything

    assert len(bodies) == 3 * 2 * turns
    settings = {(b["temperature"], b["top_p"], b["max_tokens"], b["model"]) for b in bodies}
    assert settings == {(0, 1, 40, "stub")}
    texts = [body["messages"][0]["content"] for body in bodies]
    assert sum(text.startswith("Of Where is ") for text in texts) == 3 * 2 * 3

    written = json.loads((tmp_path / "client.json").read_text())
    assert written["lines"][0]["what"] == "wall time, ours / MemAgent's client"
    assert written["sides"]["ours"] == ours
    assert str(tmp_path) not in json.dumps(written) and "same answers" in capsys.readouterr().out
