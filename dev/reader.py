"""How a reader of real text is made of SmolLM2: command lines, and where its questions come from.

    questions  --data build-->  sets  --sft, sft, sft, train-->  adapter  --export-->  reader

Run it by `python -m dev.reader --data DIR` (on two cores `--processes 2`). What is there is skipped
and a training that was stopped goes on, so the script can be stopped and called again. An untrained
model of this size is right almost never: three warm starts teach it what a careful reader writes,
on short documents, on longer ones and two hops, on short ones again. Reinforcement learning goes on
from there. Only questions of train splits are trained on. XQuAD is evaluated as a whole.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from config.errors import UserError
from config.files import make_folder
from data import normalize_answer

ROOT = Path(__file__).resolve().parent.parent
LOCAL = {  # source -> its file below --data
    "squad": "squad_train_part.json.gz",
    "sentences": "squad_sentences.jsonl.gz",
    "2wiki": "2wikimultihopqa_dev.jsonl.gz",
    "hotpotqa": "hotpotqa_dev.jsonl.gz",
    "extra": "passages_extra.jsonl.gz",
    "xquad": "xquad_en.json.gz",  # evaluated, never trained on
}
SENTENCES = "data/sentences.json"  # questions with the sentence that answers them, below --out
WEIGHTS = "adapter_model.safetensors"
# set -> how it is built; the last of its files shows that it is whole
SPLIT = "--source-split train --n 4000"
SETS = {
    "passages/passages_16": "{squad} --suite passages --lengths 1,4,16 --source-split train "
    "--test-articles 4/20 --together 8 --n 100000 --filler {extra} --absent 0.15",
    "sentences/passages_1": "{sentences} --suite passages --lengths 1 --together 8 --n 100000 "
    "--absent 0.15",
    "hops-2wiki/hqa_10": "{2wiki} --suite ruler-hqa --lengths 10 " + SPLIT,
    "hops-hotpotqa/hqa_10": "{hotpotqa} --suite ruler-hqa --lengths 10 " + SPLIT,
}
# training -> command, steps, files with their weights, settings. Later ones go on from the adapter
# before. Short documents give the most answers for a token read
EVERY = "--not-found say --micro-tokens 3072 --save-every 20 --seed 0"
TRAININGS = {
    "short": (
        "sft", 200, "passages/passages_1=6 passages/passages_4=2 sentences/passages_1=1.5",
        "--lora-rank 16 --lr 1e-3 --tasks-per-step 16 --others 2 --mistakes 0.3 --also full=0.1",
    ),
    "hops": (
        "sft", 100, "passages/passages_1=3 passages/passages_4=4 passages/passages_16=2 "
        "hops-2wiki/hqa_10=1 hops-hotpotqa/hqa_10=1.5",
        "--lr 7e-4 --tasks-per-step 16 --others 3 --mistakes 0.4 --also full=0.1",
    ),
    "reading": (
        "sft", 160, "passages/passages_1=8 passages/passages_4=3 hops-2wiki/hqa_10=0.5 "
        "hops-hotpotqa/hqa_10=1",
        "--lr 7e-4 --tasks-per-step 24 --others 1 --mistakes 0.3 --also full=0.1",
    ),
    "grpo": (
        "train", 50, "passages/passages_1=2 passages/passages_4=3 hops-hotpotqa/hqa_10=0.5",
        "--lr 2e-4 --tasks-per-step 8 --group-size 8 --outcome f1",
    ),
}  # fmt: skip
HELD_OUT = {  # suite -> which questions are evaluated, here and by bench.pipeline
    "passages": "--together 16 --n 96",
    "ruler-hqa": "--source-split validation --n 128",
}
# evaluation of what ships -> questions, lengths
EVALUATIONS = {
    "passages": ("passages", "4,16,64"),
    "passages-256": ("passages", "256"),
    "absent": ("passages --absent 1", "4,16,64"),
    "absent-256": ("passages --absent 1", "256"),
}


# ---------------------------------------------------------------- command lines


def found(folder: str | Path) -> dict[str, str]:
    """Return the sources in a folder. UserError: one is missing."""
    paths = {name: Path(folder, file) for name, file in LOCAL.items()}
    if missing := [path.name for path in paths.values() if not path.is_file()]:
        raise UserError(f"{folder} lacks {', '.join(missing)}.")
    return {name: str(path) for name, path in paths.items()}


def sets(sources: dict[str, str], out: Path) -> dict[Path, list[str]]:
    """Return the commands that build the sets of training, by the file that each makes last."""
    names = {name: shlex.quote(path) for name, path in sources.items()}
    names["sentences"] = shlex.quote(str(out / SENTENCES))
    commands = {}
    for last, how in SETS.items():
        path = out / "data" / f"{last}.jsonl.gz"
        source, *words = shlex.split(how.format(**names))
        commands[path] = ["data", "build", source, str(path.parent), *words, "--seed", "0"]
    return commands


def training(name: str, out: Path, adapter: Path | None, scale: float = 1) -> list[str]:
    """Return the command of a training, which goes on from an adapter or begins one."""
    command, steps, files, settings = TRAININGS[name]
    parts = (part.split("=") for part in files.split())
    data = ",".join(f"{out}/data/{file}.jsonl.gz={weight}" for file, weight in parts)
    words = [command, "--model", "smollm2", "--runs", str(out), "--name", name, "--data", data]
    words += ["--steps", str(max(1, round(steps * scale))), *settings.split(), *EVERY.split()]
    if adapter is not None:
        return [*words, "--adapter", str(adapter)]
    return words if "--lora-rank" in words else [*words, "--lora-rank", "16"]


def recipe(sources: dict[str, str], out: Path, processes: int = 0) -> dict[Path, list[str]]:
    """Return all commands in order, by what each makes. processes: that train side by side."""
    commands, adapter = sets(sources, out), None
    side_by_side = ["--device", "cpu", "--devices", str(processes)] if processes else []
    for name in TRAININGS:
        commands[out / name / "model"] = training(name, out, adapter) + side_by_side
        adapter = out / name / "adapter"
    words = ["export", str(adapter.parent), "--out", str(out / "reader")]
    return commands | {out / "reader-adapter": words}


def evaluations(sources: dict[str, str], out: Path) -> dict[Path, list[str]]:
    """Return the commands of the evaluations, greedy, by the summary that each makes."""
    commands = {}
    for name, (how, lengths) in EVALUATIONS.items():
        words = ["eval", "--model", str(out / "shipped"), "--suite", *how.split()]
        words += [*HELD_OUT["passages"].split(), "--data", sources["xquad"]]
        words += ["--filler", sources["extra"], "--lengths", lengths, "--agents"]
        words += ["memagent,full,bm25", "--top-k", "2"]  # sections that bm25 reads
        words += ["--not-found", "say", "--temperatures", "0"]
        commands[out / name / "summary.json"] = [*words, "--runs", str(out), "--name", name]
    return commands


def run(commands: dict[Path, list[str]]) -> None:
    """Run the commands whose results are not there. UserError: one of them failed."""
    for made, words in commands.items():
        if made.exists():
            continue
        if words[0] in ("sft", "train") and made.parent.exists():
            words = [*words, "--resume"]
        print(f"python cli.py {shlex.join(words)}", flush=True)
        if code := subprocess.call([sys.executable, str(ROOT / "cli.py"), *words]):
            raise UserError(f"That ended with exit code {code}. The same call goes on from here.")


# ---------------------------------------------------------------- what ships


def ship(adapter: Path, folder: Path) -> None:
    """Write the adapter with its weights in bfloat16, in which it computes, and its settings."""
    weights = {name: w.to(torch.bfloat16) for name, w in load_file(adapter / WEIGHTS).items()}
    make_folder(folder)
    for name in ("adapter_config.json", "agent.yaml", "trained_on.csv"):
        shutil.copy(adapter / name, folder)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


# ---------------------------------------------------------------- questions with their sentence

MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
SPANS = re.compile(
    rf"(?P<date>\b(?:\d{{1,2}} {MONTH}|{MONTH} \d{{1,2}},)(?: \d{{4}})\b)"
    r"|(?P<year>(?<![\d.,-])(?:1[0-9]|20)\d\d(?![\d,.-]*\d)\b)"
)
ASKED = {"year": r"(?:what|which) year\b", "date": r"\bwhen\b|\b(?:what|which) da(?:te|y)\b"}


def answer(question: str, sentence: str) -> str:
    """Return the one date or year of the sentence that the question asks for and lacks, else "".

    Of 500 sentences that come with their answer it finds the very answer of 27 in 31.
    """
    kind = next((kind for kind, words in ASKED.items() if re.search(words, question, re.I)), "")
    spans = [(m.lastgroup, m[0]) for m in SPANS.finditer(sentence) if m.lastgroup in (kind, "year")]
    dates = [span for span in spans if span[0] == "date"]
    given = normalize_answer(question).split()
    left = {text for _, text in dates or spans if normalize_answer(text) not in given}
    return left.pop() if kind and len(left) == 1 else ""


def write_sentences(source: str | Path, out: Path) -> None:
    """Write the questions {question, sentence, answer?} that have an answer, in SQuAD's form."""
    paragraphs: dict[str, list[dict]] = {}
    with gzip.open(source, "rt", encoding="utf-8") as file:
        for k, record in enumerate(map(json.loads, file)):
            text = record["sentence"]
            right = record.get("answer") or answer(record["question"], text)
            if right and (start := text.find(right)) >= 0:
                answers = [{"text": right, "answer_start": start}]
                asked = {"id": f"s{k}", "question": record["question"], "answers": answers}
                paragraphs.setdefault(text, []).append(asked)
    pairs = [{"context": text, "qas": asked} for text, asked in paragraphs.items()]
    articles = [{"title": "", "paragraphs": [pair]} for pair in pairs]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.reader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    help = f"folder with {', '.join(LOCAL.values())}"
    parser.add_argument("--data", metavar="DIR", required=True, help=help)
    parser.add_argument("--out", type=Path, default=Path("runs/reader"), help="folder of it all")
    parser.add_argument("--processes", type=int, default=0, help="train in so many, on the CPU")
    parser.add_argument("--evaluate", action="store_true", help="then evaluate what ships")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    out, shipped = given.out, given.out / "shipped"
    try:
        sources = found(given.data)
        commands = recipe(sources, out, given.processes)
        after = evaluations(sources, out) if given.evaluate else {}
        if given.list:
            lines = (f"python cli.py {shlex.join(words)}" for words in (commands | after).values())
            print("\n".join(lines))
            return 0
        write_sentences(sources["sentences"], out / SENTENCES)
        run(commands)
        ship(out / "reader-adapter", shipped)
        run(after)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"The reader is in {out / 'reader'}, its adapter in {shipped}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
