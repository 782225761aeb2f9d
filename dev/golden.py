"""Compare what two commits compute, bit for bit: weights, metrics, trajectories, evaluation rows.

`python -m dev.golden --against COMMIT` takes about fifteen minutes on one core. A change that keeps
all results prints no difference. What this machine lacks (a sandbox, ALFWorld, SmolLM2's package)
is named and not compared.

Each commit runs through its own `cli.py` in processes of its own, one after the other on the same
machine, because another kind of processor rounds differently. Times, paths, memory and the identity
of settings are left out: everything else has to be the same.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from config.realmodels import cache_folder

HERE = Path(__file__).resolve().parent.parent
TRAIN = "train --dtype float32"
DEMO = f"{TRAIN} --preset demo --steps 14 --lengths 2,4 --save-every 14"
FEW = f"{TRAIN} --tasks-per-step 2 --group-size 4 --save-every 2"
EVAL = "eval --dtype float32 --n 4 --temperatures 1,0"
TRAININGS = {
    "memagent": DEMO,
    "rememr1": f"{DEMO} --agent rememr1",
    "memupdate": f"{FEW} --agent memupdate --data ledger --model embedded/keeper_weights "
    "--lengths 6 --steps 1",
    "smollm2": f"{FEW} --model smollm2 --lora-rank 8 --lengths 2 --steps 2 --lr 2e-4 "
    "--chunk-tokens 64 --memory-tokens 16 --final-tokens 16",  # where its package is at hand
}
SUITES = {
    "files": "--data {data}/hotpotqa.jsonl --agents memagent,oracle",
    "ruler-hqa": "--suite ruler-hqa --data {data}/hotpotqa.jsonl --filler {data}/passages.jsonl "
    "--agents memagent,oracle --lengths 10,20 --evidence-order reverse",
    "ruler": "--suite ruler --data {data}/hotpotqa.jsonl --squad {data}/squad.json --filler "
    "{data}/passages.jsonl --agents none,newest --lengths 2048 --ruler-tasks all",
    "passages": "--suite passages --data {data}/squad.json --filler {data}/passages.jsonl "
    "--agents memagent,none --lengths 1,3 --together 2",
    "locomo": "--suite locomo --data {data}/locomo.json --agents full,bm25",
    "own": "--suite own --data {data}/own.jsonl --agents full,memupdate",
    "bandit": "--suite bandit --agents none,gold",
    "llb-db": "--suite llb-db --data {data}/llb_db.json --agents none,gold{rules}",
    "llb-os": "--suite llb-os --data {data}/llb_os.json --agents gold{rules}",
    "bcb": "--suite bcb --data {data}/bcb.jsonl --agents none,gold",
    "alfworld": "--suite alfworld --agents gold",
    "hle": "--suite hle --judge {judge} --agents none",
}
EVALUATIONS = {
    "world": f"{EVAL} --agents memagent,rememr1,full,bm25,none,oracle --lengths 2,4",
    "trained": f"{EVAL} --model {{runs}}/rememr1/model --agents rememr1,memagent --lengths 4",
    "ledger": f"{EVAL} --data ledger --agents memupdate,full --lengths 8",
    **{suite: f"{EVAL} {arguments}" for suite, arguments in SUITES.items()},
}
STREAM = "stream --suite bandit --n 10 --epochs 4 --batch 4 --arms memrl"
# what may differ in a row or a record; earlier rows lack a dtype, the others went
UNEQUAL = ("seconds", "mib", "settings", "dtype", "efficiency", "current", "recall_current",
           "search_cut", "seen", "held", "needed", "occupancy", "memory_most", "gold", "depths",
           "tries")  # fmt: skip
TIMES = ("_s", "_per_s")  # how columns of metrics.csv end that are times


def write_sources(folder: Path) -> None:
    """Write a small file of every form that a suite reads; all of it is made up."""
    names = [f"Person {k}" for k in range(12)]
    towns = [f"Town {k}" for k in range(12)]
    texts = [
        f"{name} was born in {town} in {1900 + k}."
        for k, (name, town) in enumerate(zip(names, towns, strict=True))
    ]
    paragraphs = [*zip(names, texts, strict=True)]
    near = [f"{town} is near {towns[(k + 1) % 12]}." for k, town in enumerate(towns)]
    questions = [
        {
            "_id": f"q{k}",
            "question": f"Near which town was {name} born?",
            "answer": towns[(k + 1) % 12],
            "type": "bridge",
            "level": "easy",
            "supporting_facts": [[name, 0], [towns[k], 0]],
            "context": [[name, [texts[k]]], [towns[k], [near[k]]]]
            + [[title, [text]] for title, text in paragraphs[k + 1 : k + 4]],
        }
        for k, name in enumerate(names[:8])
    ]
    squad = [
        {
            "title": name,
            "paragraphs": [
                {
                    "context": texts[k],
                    "qas": [
                        {
                            "id": f"s{k}",
                            "question": f"Where was {name} born?",
                            "answers": [{"text": towns[k], "answer_start": texts[k].index("Town")}],
                        }
                    ],
                }
            ],
        }
        for k, name in enumerate(names)
    ]
    talk = {"speaker_a": "Ada", "speaker_b": "Bo"}
    for n, day in enumerate(("3 January", "17 January", "28 February"), 1):
        talk[f"session_{n}_date_time"] = f"4:05 pm on {day}, 2024"
        talk[f"session_{n}"] = [
            {"speaker": "AdaBo"[3 * (k % 2) :][:3], "dia_id": f"D{n}:{k + 1}", "text": text}
            for k, text in enumerate(texts[4 * n - 4 : 4 * n])
        ]
    locomo = {
        "sample_id": "made",
        "conversation": talk,
        "observation": {
            f"session_{n}_observation": {"Ada": [[texts[n], f"D{n}:1"]], "Bo": []}
            for n in (1, 2, 3)
        },
        "session_summary": {f"session_{n}_summary": f"They met, {n}." for n in (1, 2, 3)},
        "event_summary": {
            f"events_session_{n}": {"Ada": ["It rains."], "Bo": [], "date": "3 January, 2024"}
            for n in (1, 2, 3)
        },
        "qa": [
            {
                "question": f"Where was {names[k]} born?",
                "answer": towns[k],
                "category": 1 + k % 4,
                "evidence": [f"D{1 + k // 4}:{1 + k % 4}"],
            }
            for k in range(8)
        ],
    }
    own = {
        "id": "talk",
        "sessions": [
            {"date": f"2024-01-0{n + 1}", "turns": [{"speaker": "Ada", "text": text}]}
            for n, text in enumerate(texts[:4])
        ],
        "qa": [{"question": "Where was Person 2 born?", "answer": "Town 2", "evidence": ["D3:1"]}],
    }
    program = {
        "task_id": "Made/0",
        "instruct_prompt": "Return twice a number.\n```\ndef task_func(n):\n```",
        "complete_prompt": 'def task_func(n):\n    """Return twice a number."""\n',
        "canonical_solution": "    return 2 * n\n",
        "test": "import unittest\nclass TestCases(unittest.TestCase):\n"
        "    def test_twice(self):\n        self.assertEqual(task_func(4), 8)\n",
        "entry_point": "task_func",
        "libs": "[]",
    }
    commands = {
        "ground_truth_command_item": {"command_name": "bash", "script": "touch /srv/a"},
        "evaluation_command_item": {"command_name": "bash", "script": "[ -e /srv/a ]"},
    }
    shell = {
        "instruction": "Make the file /srv/a.",
        "initialization_command_item": {"command_name": "bash", "script": "true"},
        "evaluation_info": commands,
        "skill_list": ["touch"],
    }
    filler = [{"title": f"F{k}", "text": f"Filler {k} says nothing."} for k in range(300)]
    for name, value in {
        "hotpotqa.jsonl": questions,
        "passages.jsonl": filler,
        "squad.json": {"version": "1.1", "data": squad},
        "locomo.json": [locomo],
        "own.jsonl": [own],
        "bcb.jsonl": [program],
        "llb_os.json": {"1": shell},
    }.items():
        items = value if name.endswith("jsonl") else [value]
        (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    shutil.copy(HERE / "suites" / "llb_db_own.json", folder / "llb_db.json")


@contextmanager
def judge() -> Iterator[str]:
    """Serve a judge without a model, which finds every answer wrong; yield its name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "judge"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said = {"extracted_final_answer": "None", "reasoning": "", "correct": "no"}
            message = {"role": "assistant", "content": json.dumps(said | {"confidence": 100})}
            self._send({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        def _send(self, value: dict) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"openai:http://127.0.0.1:{server.server_port}/v1#judge"
    server.shutdown()


def run(checkout: Path, runs: Path, only: Sequence[str] = ()) -> dict[str, str]:
    """Run every command with the code of a checkout; return name -> why it was refused.

    only: of these names alone.
    """
    data = runs / "data"
    data.mkdir(parents=True)
    write_sources(data)
    # before the second rules of these suites went, those of the release were a choice
    had_rules = "rules" in (checkout / "suites" / "llb_db.py").read_text(encoding="utf-8")
    rules, refused = " --rules released" if had_rules else "", {}
    with judge() as address:
        for name, command in (TRAININGS | EVALUATIONS | {"stream": STREAM}).items():
            if only and name not in only:
                continue
            if name == "smollm2" and not [*(cache_folder() / "models").glob("smollm2-*")]:
                refused[name] = "its package is not at hand"
                continue
            arguments = f"{command} --name {name}".format(
                runs=runs, data=data, judge=address, rules=rules
            )
            done = subprocess.run(
                [sys.executable, "cli.py", *arguments.split(), "--runs", str(runs)],
                cwd=checkout,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode == 2:
                refused[name] = " ".join(done.stderr.split())[-300:]
            elif done.returncode:
                output = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
                raise SystemExit(f"{checkout}: cli.py {arguments} failed:\n{output}")
    return refused


def digest(runs: Path) -> dict[str, object]:
    """Describe the results of `run`: name -> a value or a hash that has to be the same."""
    from safetensors.torch import load_file

    values: dict[str, object] = {}
    for name in filter(lambda name: (runs / name).is_dir(), TRAININGS):
        adapter = runs / name / "adapter" / "adapter_model.safetensors"
        weights = adapter if adapter.exists() else runs / name / "model" / "model.safetensors"
        for key, tensor in load_file(weights).items():
            sha256 = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            values[f"{name}: weights of {key}"] = sha256
        with (runs / name / "metrics.csv").open() as file:
            values |= _parts(f"{name}: step", [*csv.DictReader(file)])
        with gzip.open(runs / name / "trajectories.jsonl.gz", "rt", encoding="utf-8") as lines:
            values |= _parts(f"{name}: trajectory", [*map(json.loads, lines)])
    parts = ("agent", "question", "temperature", "length", "id", "sample")
    for path in (*runs.glob("*/rows.jsonl"), *runs.glob("stream/*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            key = " ".join(str(row.get(part, number)) for part in parts)
            key = f"{path.parent.name}: row {key}".replace(", released rules", "")
            if path.parent.name.startswith("llb-"):
                row.pop("task")  # its digest held whose rules these are
            values |= _parts(key, row)
    return values


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what a value is made of, each with its place, but for times and what went."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in pairs:
        if key in UNEQUAL or str(key).endswith(TIMES):
            continue
        if key == "counts" and ": trajectory" in name:  # which rows have
            continue
        if isinstance(part, dict | list):
            yield from _parts(f"{name}.{key}", part)
        else:
            rules = part.replace(", released rules", "") if isinstance(part, str) else part
            yield f"{name}.{key}", rules


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """List the differences of two digests, a line each."""
    names = [
        name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)
    ]
    return [f"{n}: {str(before.get(n))[:200]} -> {str(after.get(n))[:200]}" for n in names]


def main(
    against: Annotated[str, typer.Option(help="the commit to compare this checkout with")],
    only: Annotated[str, typer.Option(help="these runs alone, such as memagent,world")] = "",
) -> None:
    """Compare the results of this checkout with those of another commit."""
    names = [name for name in only.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        checkout, git = Path(folder, "checkout"), ["git", "-C", HERE, "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", checkout, against], check=True)
        try:
            old_refused = run(checkout, Path(folder, "before"), names)
        finally:
            subprocess.run([*git, "remove", "--force", checkout], check=True)
        refused = run(HERE, Path(folder, "after"), names)
        old, new = (digest(Path(folder, side)) for side in ("before", "after"))
    for name in refused.keys() & old_refused.keys():
        typer.echo(f"not compared: {name}: {refused[name]}")
    lines = [f"refused on one side: {name}" for name in refused.keys() ^ old_refused.keys()]
    lines += differences(old, new)
    typer.echo("\n".join(lines[:100]) or f"{len(new)} values, all the same")
    raise typer.Exit(bool(lines))


if __name__ == "__main__":
    typer.run(main)
