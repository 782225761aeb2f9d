"""A folder of documents becomes a reader for them, without a single question.

    documents --cloze--> tasks --sft--> warm --train--> adapter; before and after: unseen passages

Holds: `stages`, `learn`. Leaves out: how questions are made (tasks/cloze.py), what the commands do
(commands/, by `python cli.py`).
Exercise it: `python cli.py learn examples --name mine --sft-steps 2 --steps 1`.
Read next: tasks/cloze.py.

Every tenth passage is held out. Each step is a command line that is printed and can be given alone;
a call that was stopped goes on by the same words.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from agents import find
from commands.stages import Stage, make
from config.errors import UserError, clean
from config.files import make_folder, replacing, run_path
from config.options import LearnConfig
from config.realmodels import SHIPPED
from config.terminal import console, next_step, say
from data import seed_of
from tasks import cloze

TRAIN, TEST = "train.jsonl", "test.jsonl"  # passages
HELD_OUT = "0/10"  # of the articles of --questions
TRAINED = "--not-found say --fused lora --micro-tokens 3072 --save-every 10 --seed 0"
# of two cores without instructions for bfloat16: means of two calls, 80 steps of `sft`, 16 of
# `train` and some 600 answers; what else the second took, which fetched the model; with such
# instructions, by a guess from two other runs
SFT_STEP_S, TRAIN_STEP_S, ANSWER_S, REST_S = 37.0, 36.0, 1.9, 270.0
IN_BFLOAT16 = 0.3  # of that time


def stages(config: LearnConfig, folder: Path) -> list[Stage]:
    """Return all command lines, in order."""
    built, questions = folder / "data", [*config.questions]
    model, adapter = "smollm2", str(SHIPPED["smollm2-reader"])
    common = ["--lengths", "1,4", "--together", "8", "--seed", "0", "--n", "100000"]
    common += ["--absent", "0.15"]
    plan = [_built("cloze", [str(folder / TRAIN)], built, common)]
    data = {built / "cloze_1.jsonl.gz": 3, built / "cloze_4.jsonl.gz": 3}
    if questions:
        rule = ["--source-split", "train", "--test-articles", HELD_OUT]
        plan.append(_built("passages", questions, built, [*common, *rule]))
        data |= {built / "passages_1.jsonl.gz": 3, built / "passages_4.jsonl.gz": 3}
    mixture = ",".join(f"{path}={weight}" for path, weight in data.items())
    reader = "smollm2-reader"
    plan += _asked("before", reader, config, folder)
    runs = ["--model", model, "--runs", str(folder), "--data", mixture, *TRAINED.split()]
    if config.devices:
        runs += ["--device", "cpu", "--devices", str(config.devices)]
    how = f"--lr {config.sft_lr} --tasks-per-step 16 --others 1 --mistakes 0.3 --also full=0.1"
    words = ["sft", "--name", "warm", "--adapter", adapter, "--steps", str(config.sft_steps)]
    warm = folder / "warm"
    plan.append(Stage("warm", (*words, *how.split(), *runs), (warm / "model",), run=warm))
    last = warm
    if config.steps:
        how = f"--lr {config.lr} --tasks-per-step 4 --group-size 8 --outcome f1"
        words = ["train", "--name", "grpo", "--adapter", str(warm / "adapter")]
        words += ["--steps", str(config.steps), *how.split()]
        last = folder / "grpo"
        plan.append(Stage("grpo", (*words, *runs), (last / "model",), run=last))
    return [*plan, *_asked("after", str(last / "model"), config, folder)]


def _built(suite: str, files: Sequence[str], folder: Path, words: Sequence[str]) -> Stage:
    made = [folder / f"{suite}_{n}.jsonl.gz" for n in (1, 4)]
    return Stage(suite, ("data", "build", *files, str(folder), "--suite", suite, *words), (*made,))


def _asked(when: str, model: str, config: LearnConfig, folder: Path) -> list[Stage]:
    """Return the evaluations of a model: gaps of unseen passages and, where given, questions."""
    asked = {"spans": ("cloze", [str(folder / TEST)], [])}
    if config.questions:
        rule = ["--source-split", "test", "--test-articles", HELD_OUT]
        asked["questions"] = ("passages", config.questions, rule)
    found = []
    for name, (suite, files, rest) in asked.items():
        words = ["eval", "--model", model, "--suite", suite, "--data", ",".join(files), *rest]
        how = f"--lengths 4 --n {config.n} --together 8 --agents {find.DEFAULT} --not-found say"
        words += how.split()
        words += ["--temperatures", "0", "--runs", str(folder), "--name", f"{name}-{when}"]
        result = folder / f"{name}-{when}" / "summary.json"
        found.append(Stage(f"{name}-{when}", tuple(words), (result,)))
    return found


def learn(docs: Sequence[str], config: LearnConfig) -> Path:
    """Make a reader for documents; return its folder. UserError: a step of it failed."""
    from models.setup import bfloat16_instructions

    folder = run_path(config.runs, config.name)
    say(f"Reading {clean(', '.join(docs))} ...")
    learnt, held_out = _divided(cloze.read(docs))
    questions, held = cloze.questions(learnt), cloze.questions(held_out)
    if min(len(questions), len(held)) < 8:
        n = f"{len(questions)} questions, and {len(held)} about the passages that are held out"
        raise UserError(f"These documents give {n}: too few to learn from. Give more text.")
    n_asked = 2 * min(config.n, len(held)) * (1 + bool(config.questions))
    seconds = config.sft_steps * SFT_STEP_S + config.steps * TRAIN_STEP_S + n_asked * ANSWER_S
    seconds *= IN_BFLOAT16 if bfloat16_instructions() else 1
    seconds += REST_S
    say(
        f"{len(questions):,} questions to learn from, {len(held):,} held out; some "
        f"{seconds / 60:.0f} minutes on two cores, by guess."
    )
    plan = stages(config, folder)
    _begin(folder, plan, {TRAIN: learnt, TEST: held_out})
    make(plan)
    last = folder / ("grpo" if config.steps else "warm") / "model"
    model = folder / "model"
    if not model.exists():
        shutil.copytree(last, model)
    _show(folder, config)
    next_step("ask it", "ask", docs[0], "...", "--model", model)
    return model


def _divided(found: cloze.Passages) -> tuple[cloze.Passages, cloze.Passages]:
    """Return the passages that are learnt from, and every tenth, by a hash of its text."""
    parts: tuple[list, list] = [], []
    for title, text in zip(found.titles, found.texts, strict=True):
        parts[seed_of(text) % 10 == 0].append((title, text))
    learnt, held_out = (
        cloze.Passages([title for title, _ in part], [text for _, text in part]) for part in parts
    )
    return learnt, held_out


def _begin(folder: Path, plan: Sequence[Stage], parts: Mapping[str, cloze.Passages]) -> None:
    """Write the passages. UserError: the folder was begun with others, or with other settings, and
    what is done there would be taken for done."""
    files = {"commands.txt": "".join(f"{' '.join(stage.words)}\n" for stage in plan)}
    for name, part in parts.items():
        pairs = zip(part.titles, part.texts, strict=True)
        files[name] = "".join(json.dumps({"title": a, "text": b}) + "\n" for a, b in pairs)
    make_folder(folder)
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{folder} was begun with other documents or settings: give another --name."
            )
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _show(folder: Path, config: LearnConfig) -> None:
    """Print what was answered before and after."""
    table = Table("", "before", "after", "n", title="Right answers among four passages, per cent")
    names = {"spans": "masked spans of unseen passages", "questions": "questions"}
    for name, title in names.items():
        if name == "questions" and not config.questions:
            continue
        cells = [json.loads((folder / f"{name}-{when}" / "summary.json").read_text())["cells"][0]
                 for when in ("before", "after")]  # fmt: skip
        shown = [
            f"{100 * c['mean']:.0f} ({100 * c['low']:.0f}-{100 * c['high']:.0f})" for c in cells
        ]
        table.add_row(title, *shown, str(cells[0]["n"]))
    console.print(table)
    if not config.questions:
        say(
            "No questions of people were asked: name a file of SQuAD's form by --questions to see "
            "that they are answered no worse."
        )
