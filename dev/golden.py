"""Compare what two commits compute, bit for bit: weights, metrics, trajectories, evaluation rows.

Holds: the runs that are compared, their digest, the comparison. Leaves out: speed (bench/).
Exercise it: `python dev/golden.py --against HEAD~1` (about five minutes on one core). A refactoring
that changes no result prints no difference. Read next: dev/LOG.md.

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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent.parent
TRAIN = "train --preset demo --steps 14 --lengths 2,4 --save-every 14"
EVAL = "eval --n 4 --transcripts 0 --temperatures 1,0"
COMMANDS = {
    "memagent": f"{TRAIN}",
    "rememr1": f"{TRAIN} --agent rememr1",
    "world": f"{EVAL} --agents memagent,rememr1,full,bm25,none,oracle --lengths 2,4",
    "trained": f"{EVAL} --model {{runs}}/rememr1/model --agents rememr1,memagent --lengths 4",
    "ledger": f"{EVAL} --data ledger --agents memupdate,full --lengths 8",
    "files": f"{EVAL} --data {{data}}/hotpotqa.jsonl --agents memagent,oracle",
    **{
        suite: f"{EVAL} --suite {suite} {arguments}"
        for suite, arguments in {
            "ruler-hqa": "--data {data}/hotpotqa.jsonl --filler {data}/passages.jsonl "
            "--agents memagent,oracle --lengths 10,20 --evidence-order reverse",
            "ruler": "--data {data}/hotpotqa.jsonl --squad {data}/squad.json --filler "
            "{data}/passages.jsonl --agents none,newest --lengths 2048 --ruler-tasks all",
            "passages": "--data {data}/squad.json --filler {data}/passages.jsonl "
            "--agents memagent,none --lengths 1,3 --together 2",
            "facts": "--data {data}/wiki.jsonl --agents memagent,oracle --lengths 1,3",
            "locomo": "--data {data}/locomo.json --agents full,bm25 --metric mem0",
            "longmemeval": "--data {data}/longmemeval.json --agents full,memupdate",
            "own": "--data {data}/own.jsonl --agents full,memupdate",
            "memoryagentbench": "--data {data}/accurate.jsonl --agents memagent,bm25",
            "bandit": "--agents none",
            "llb-db": "--agents none",
        }.items()
    },
}
UNEQUAL = ("seconds", "mib", "settings")  # of a row or a record
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
    wiki = [
        {
            "id": f"w{k}",
            "dataset": "made",
            "question": "Which?",
            "answers": [towns[k]],
            "hops": [0, 1],
            "orig_split": "train",
            "paragraphs": [{"title": title, "text": text} for title, text in paragraphs],
            "evidences": [[name, "place of birth", towns[k]]],
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
    dates = [f"2024/06/{n:02} (Mon) 09:05" for n in (3, 10, 17)]
    longmemeval = {
        "question_id": "l0",
        "question_type": "knowledge-update",
        "question": "Where was Person 5 born?",
        "answer": "Town 5",
        "question_date": "2024/06/30 (Sun) 08:00",
        "haystack_session_ids": ["a", "b", "c"],
        "haystack_dates": dates,
        "haystack_sessions": [
            [{"role": "user", "content": text}, {"role": "assistant", "content": "I see."}]
            for text in texts[4:7]
        ],
        "answer_session_ids": ["b"],
    }
    own = {
        "id": "talk",
        "sessions": [
            {"date": f"2024-01-0{n + 1}", "turns": [{"speaker": "Ada", "text": text}]}
            for n, text in enumerate(texts[:4])
        ],
        "qa": [{"question": "Where was Person 2 born?", "answer": "Town 2", "evidence": ["D3:1"]}],
    }
    accurate = {
        "context": " ".join(texts),
        "questions": ["Where was Person 3 born?"],
        "answers": [["Town 3"]],
        "metadata": {"source": "ruler_qa1_197K", "qa_pair_ids": ["a0"]},
    }
    filler = [{"title": f"F{k}", "text": f"Filler {k} says nothing."} for k in range(300)]
    for name, value in {
        "hotpotqa.jsonl": questions,
        "passages.jsonl": filler,
        "squad.json": {"version": "1.1", "data": squad},
        "wiki.jsonl": wiki,
        "locomo.json": [locomo],
        "longmemeval.json": [longmemeval],
        "own.jsonl": [own],
        "accurate.jsonl": [accurate],
    }.items():
        items = value if name.endswith("jsonl") else [value]
        (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items))


def run(checkout: Path, runs: Path) -> None:
    """Run every command with the code of a checkout."""
    data = runs / "data"
    data.mkdir(parents=True)
    write_sources(data)
    for name, command in COMMANDS.items():
        arguments = f"{command} --name {name}".format(runs=runs, data=data)
        done = subprocess.run(
            [sys.executable, "cli.py", *arguments.split(), "--runs", str(runs)],
            cwd=checkout,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            output = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise SystemExit(f"{checkout}: cli.py {arguments} failed:\n{output}")


def digest(runs: Path) -> dict[str, object]:
    """Describe the results of `run`: name -> a value or a hash that has to be the same."""
    from safetensors.torch import load_file

    values: dict[str, object] = {}
    for name in ("memagent", "rememr1"):
        for key, tensor in load_file(runs / name / "model" / "model.safetensors").items():
            sha256 = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            values[f"{name}: weights of {key}"] = sha256
        with (runs / name / "metrics.csv").open() as file:
            for number, line in enumerate(csv.DictReader(file)):
                for column, value in line.items():
                    if not column.endswith(TIMES):
                        values[f"{name}: step {number}, {column}"] = value
        with gzip.open(runs / name / "trajectories.jsonl.gz", "rt", encoding="utf-8") as lines:
            for number, record in enumerate(map(json.loads, lines)):
                values[f"{name}: trajectory {number}"] = _without(record)
    parts = ("agent", "question", "temperature", "length", "id", "sample")
    for name in [*COMMANDS][2:]:
        for line in (runs / name / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = " ".join(str(row[part]) for part in parts)
            values[f"{name}: row {key}"] = _without(row)
    return values


def _without(record: dict) -> dict:
    """Return a row or record without what is measured by a clock, in its counts too."""
    record = {key: value for key, value in record.items() if key not in UNEQUAL}
    if "counts" in record:
        counts = record["counts"].items()
        record["counts"] = {name: n for name, n in counts if not name.endswith(TIMES)}
    return record


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """List the differences of two digests, a line each."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
            old, new = {key: old.get(key) for key in keys}, {key: new.get(key) for key in keys}
        lines.append(f"{name}: {str(old)[:200]} -> {str(new)[:200]}")
    return lines


def main(
    against: Annotated[str, typer.Option(help="the commit to compare this checkout with")] = "",
    keep: Annotated[
        Path | None, typer.Option(help="write this checkout's digest to a file and compare nothing")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(help="compare with a digest written by --keep on this machine")
    ] = None,
) -> None:
    """Compare the results of this checkout with those of another commit."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        run(HERE, Path(folder, "after"))
        after = digest(Path(folder, "after"))
        if keep:
            keep.write_text(json.dumps(after), encoding="utf-8")
            return typer.echo(f"{len(after)} values")
        if before:
            old = json.loads(before.read_text(encoding="utf-8"))
        else:
            checkout, git = Path(folder, "checkout"), ["git", "-C", HERE, "worktree"]
            subprocess.run([*git, "add", "--detach", "-q", checkout, against], check=True)
            try:
                run(checkout, Path(folder, "before"))
            finally:
                subprocess.run([*git, "remove", "--force", checkout], check=True)
            old = digest(Path(folder, "before"))
    lines = differences(old, json.loads(json.dumps(after)))
    typer.echo("\n".join(lines[:100]) or f"{len(after)} values, all the same")
    raise typer.Exit(bool(lines))


if __name__ == "__main__":
    typer.run(main)
