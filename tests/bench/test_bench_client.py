"""The comparison with MemAgent's client, driven with a miniature of that client: its file layout and command line, nothing of its code."""

import json
import textwrap

import pytest

import bench.client as client
import bench.common as common
from config.errors import UserError

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


said = asyncio.run(everyone())
Path(args.save_dir).mkdir(parents=True)
with Path(args.save_dir, f"{args.save_file}.jsonl").open("w") as out:
    for item, response in zip(items, said):
        item["pred"] = response.rpartition("the answer is")[2].strip() or None
        out.write(json.dumps(item) + "\\n")
if os.environ["FAKE_SPOILS"]:
    lines = Path(args.save_dir, f"{args.save_file}.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"pred": "another"}
    kept = [] if os.environ["FAKE_SPOILS"] == "fails" else [json.dumps(first)]
    Path(args.save_dir, f"{args.save_file}.jsonl").write_text("\\n".join([*kept, *lines[1:]]) + "\\n")
with Path(os.environ["FAKE_NOTES"]).open("a") as notes:
    notes.write(json.dumps(vars(args) | {"items": items}) + "\\n")
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
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


async def async_query_llm(item, model, tokenizer, temperature=1.0, top_p=0.5):
    async def turn(text):
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": temperature, "top_p": top_p}
        return await asyncio.to_thread(ask, body | {"max_tokens": int(os.environ["RECURRENT_MAX_NEW"])})

    memory, ids, step = NO_MEMORY, tokenizer.encode(item["context"]).ids, int(os.environ["RECURRENT_CHUNK_SIZE"])
    assert len(ids) <= int(os.environ["RECURRENT_MAX_CONTEXT_LEN"])
    for at in range(0, len(ids), step):
        memory = await turn(TEMPLATE.format(prompt=item["input"], memory=memory, chunk=tokenizer.decode(ids[at : at + step])))
    return await turn(TEMPLATE_FINAL.format(prompt=item["input"], memory=memory))
'''


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "checkout" / "taskutils" / "memory_eval"
    (folder / "utils").mkdir(parents=True)
    (folder / "utils" / "__init__.py").write_text("")
    (folder / "utils" / "recurrent.py").write_text(textwrap.dedent(AGENT))
    (folder / "ruler_hqa.py").write_text(textwrap.dedent(MAIN))
    monkeypatch.setenv("FAKE_NOTES", str(tmp_path / "notes.jsonl"))
    monkeypatch.setenv("FAKE_SPOILS", "")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(
        client, "SIDES", {side: client.SIDES[side] for side in ("theirs", "ours")}
    )  # the third is a process more a round
    return tmp_path / "checkout"


SMALL = "--items 3 --sections 9 --chunk-tokens 50 --new-tokens 40 --in-flight 2 --rounds 1".split()


def test_both_sides_send_the_same_and_another_answer_is_noticed(
    checkout, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(
        "FAKE_SPOILS", "one"
    )  # of three answers, in what is left behind, not in what is asked
    server = client.Server()
    result = client.main(["--checkout", str(checkout), "--endpoint", server.url, *SMALL])
    turns = 3 * (-(-9 * 24 // 50) + 1)
    theirs, ours = result["sides"]["theirs"], result["sides"]["ours"]
    assert (
        ours["same_prompts"]
        == ours["same_replies"]
        == ours["answered"]
        == theirs["same_answers"]
        == 1
    )
    assert ours["same_answers"] == pytest.approx(2 / 3, abs=1e-4)
    assert (
        theirs["requests"] == ours["requests"] == turns
        and theirs["at_once"] <= 2
        and ours["at_once"] <= 2
    )
    (one,) = result["rounds"]
    assert ours["ratio"]["median"] == pytest.approx(
        one["ours"]["seconds"] / one["theirs"]["seconds"], abs=1e-3
    )
    assert ours["cpu_seconds"]["min"] > 0 and theirs["ratio"] == {"median": 1, "min": 1, "max": 1}
    assert (
        result["met"] is (ours["ratio"]["median"] <= 0.8) and result["reset"] is True
    )  # the stand-in says yes to anything

    asked = [
        body for body, *_ in server.seen if "messages" in body
    ]  # of both sides, in three rounds, the last through the recorder
    assert len(asked) == 3 * 2 * turns
    assert {(b["temperature"], b["top_p"], b["max_tokens"], b["model"]) for b in asked} == {
        (0, 1, 40, "stub")
    }
    texts = [body["messages"][0]["content"] for body in asked]
    assert (
        sum(
            t.startswith("Solve Where is ") and " with {care} and\nNo previous memory, after\n" in t
            for t in texts
        )
        == 3 * 2 * 3
    )
    assert sum(t.startswith("Of Where is ") and t.endswith(". ") for t in texts) == 3 * 2 * 3

    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [len(n["items"]) for n in notes] == [3, 3, 3] and len(
        {i["context"] for n in notes for i in n["items"]}
    ) == 9
    flags = {
        "length": "50",
        "model": "stub",
        "n_proc": "2",
        "api": "recurrent",
        "force": True,
        "tokenizer": str(client.EMBEDDED),
    }
    assert all(n | flags == n for n in notes)
    written = json.loads((tmp_path / "client.json").read_text())
    assert (
        written["lines"][0]["what"] == "wall time, ours / MemAgent's client"
        and written["sides"]["ours"] == ours
    )
    assert str(tmp_path) not in json.dumps(written) and "same answers" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said_in_a_sentence(checkout, tmp_path, monkeypatch):
    def refused(*words):
        with pytest.raises(UserError) as refusal:
            client.main(["--checkout", str(checkout), *(words or ("--stub-delay", "0")), *SMALL])
        return str(refusal.value)

    assert "http://HOST:PORT/v1" in refused("--endpoint", "https://somewhere/v1")
    few = tmp_path / "few.jsonl"
    few.write_text(
        '{"question": "Where?", "answer": "Lima", "context": "Anna reached Lima."}\n' * 8
    )
    assert "has 8 tasks: 1 rounds" in refused("--stub-delay", "0", "--data", str(few))
    assert "no-python" in refused("--stub-delay", "0", "--python", "no-python")
    folder = checkout / "taskutils" / "memory_eval"
    monkeypatch.setenv("FAKE_SPOILS", "fails")
    assert "theirs answered 2 of 3 items" in refused()
    (folder / "ruler_hqa.py").write_text("import nowhere_to_be_found")
    assert "theirs failed: ModuleNotFoundError: No module named 'nowhere_to_be_found'" in refused()
    (folder / "utils" / "recurrent.py").write_text(
        'TEMPLATE = "{prompt} {memory} {chunk}"\nNO_MEMORY = "none"'
    )
    assert "a version that we do not know" in refused()
    (folder / "utils" / "recurrent.py").unlink()
    assert refused().endswith("there is no file " + str(folder / "utils" / "recurrent.py") + ".")
