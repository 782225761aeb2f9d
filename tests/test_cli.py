"""The commands as a user types them: mistakes, settings from flags to files, kills."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import cell_of, forked, parts_of, until
from test_front_page import blocks, commands
from typer.testing import CliRunner

import cli
from agents import find
from commands import train
from config import files
from config.options import EMBEDDED
from report.rows import Rows
from tasks import downloads

ROOT = Path(cli.__file__).parent
STEP = "--steps 1 --tasks-per-step 1 --group-size 2 --lengths 1"


def run(*arguments, code=0):
    """Run a command in this process; returns what it printed. A lone text is its whole line."""
    words = arguments[0].split() if len(arguments) == 1 else map(str, arguments)
    result = CliRunner().invoke(cli.app, [*words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, **kwargs
    ).stdout


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"question": f"Where is {who}?", "answer": "Lima", "context": f"{who} reached Lima."}
        for who in ("Anna", "Boris")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


HELPED = ("", "train", "eval", "ask", "show", "plan", "doctor", "demo", "data", "data build")


def test_help_is_quick_to_come_for_it_imports_little_and_no_torch():
    code = (
        "import sys\nimport cli\nfrom typer.testing import CliRunner\n"
        "for module in [*sys.modules.values()]: print(getattr(module, '__file__', None))\n"
        f"for command in {HELPED!r}:\n"
        "    said = CliRunner().invoke(cli.app, [*command.split(), '--help']).output\n"
        "    assert 'Usage: ' in said and command in said\n"
        "assert 'torch' not in sys.modules"
    )
    paths = [Path(line) for line in python(code).splitlines()]
    ours = [p for p in paths if p.is_relative_to(ROOT) and ".venv" not in p.parts]
    assert ours and sum(len(path.read_text().splitlines()) for path in ours) <= 5000


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("train --data nowhere.jsonl", "nowhere.jsonl"),
        ("train --agent nowhere.py", "nowhere.py"),
        ("train --config nowhere.yaml", "nowhere.yaml"),
        ("train --lr -1", "lr"),
        ("train --max-sections -1", "max_sections"),
        ("train --lengths=", "lengths"),
        ("train --name ..", "--name"),
        (f"train --runs {__file__}", "test_cli.py"),
        ("train --data \x1b]0;title\x07file", "\ufffd]0;title\ufffdfile"),
        ("demo --agent full", "section by section"),
        ("demo --short --name=", "--name"),
        ("demo --short --name ../other", "--name"),
        ("plan --agent bm25", "section by section"),
        ("eval --agents=", "agents"),
        ("eval --suite world --split tset", "tset"),
        (f"eval --runs {__file__}", "test_cli.py"),
        ("eval --n 0", "n must"),
        ("ask nowhere.txt why?", "nowhere.txt"),
        ("show nowhere", "nowhere"),
        ("data look nowhere.jsonl", "nowhere.jsonl"),
        ("data build nowhere.json out", "nowhere.json"),
    ],
)
def test_a_mistake_is_one_sentence_with_exit_code_2_and_leaves_nothing(
    tmp_path, monkeypatch, line, word
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, line.split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    message = result.stderr.strip()
    assert message.startswith("memagent: ") and "\n" not in message and word in message
    assert not {"\x1b", "\x07"} & {*result.output} and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


# every argument of every command that takes a path, P
PATHS = """
train --data P
train --model P
train --config P
train --templates P
train --runs P
train --name P
train --validation P
train --agent P
train --reward P
train --name P --resume
train --runs P --name a --resume
export P
export RUN --out P
eval --data P
eval --model P
eval --config P
eval --agents P
eval --runs P --lengths 1
eval --name P --lengths 1
eval --untrained P --agents memagent@untrained
eval --suite P
eval --suite ruler-hqa --data P
eval --suite ruler-hqa --data OWN --filler P
eval --suite ruler --data P
eval --suite ruler --haystack P
eval --suite ruler --squad P
ask P why?
ask OWN why? --model P
ask OWN why? --agent P
ask OWN why? --templates P
show P
show RUN --agent P
plan --model P
demo --short --name P
demo --short --runs P
data look P
data build P out
data build SET P --lengths 12 --n 1
data build SET out --lengths 12 --n 1 --filler P
data build out --suite ruler --haystack P
data build out --suite ruler --squad P
data build P out --suite ruler
data build out --suite P
data build out --suite ruler --tokenizer P --ruler-tasks vt
data get musique --out P
"""


@pytest.mark.parametrize(
    ("path", "part"), [("x" * 300, 1), ("loop/x", 3), ("x/" * 3000, 3), ("own.jsonl/x", 3)]
)
def test_a_path_that_cannot_be_is_one_sentence_whatever_the_command(
    tmp_path, monkeypatch, own, path, part
):
    """part: of the lines; a NUL byte is refused before they are looked at (tests/config)."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    passages = [{"title": f"T{k}", "text": "t"} for k in range(9)]
    records = [
        {"id": str(i), "question": f"Who is {i}?", "answers": ["a"], "paragraphs": passages}
        for i in range(2)
    ]
    Path("set.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("run/checkpoints/step-1").mkdir(parents=True)
    Path("run/config.yaml").write_text("run: {}\ngrpo: {}\nagent: {}\n")
    there = sorted(tmp_path.rglob("*"))
    names = {"P": path, "OWN": "own.jsonl", "SET": "set.jsonl", "RUN": "run"}
    for line in PATHS.strip().splitlines()[::part]:
        if path.endswith("/x") and "--name P" in line:
            continue  # inside the folder of all runs there is neither file nor link
        words = [names.get(word, word) for word in line.split()]
        words += STEP.split() if words[0] == "train" and "--resume" not in words else []
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2, (line, result.output, result.exception)
        message = result.stderr.strip()
        assert message.startswith("memagent: ") and "\n" not in message, line
        assert len(message) < 2100 and "Traceback" not in result.output, line
        assert sorted(tmp_path.rglob("*")) == there, line


def test_look(own, tmp_path):
    assert "Where is Anna?" in run("data", "look", own)
    assert "evidence at" in run("data look world --sections 2")
    run("data look world --sections 0", code=2)
    ledger = run("data look ledger --n 1 --sections 12")
    assert "2024-01-12" in ledger and "2024-01-13" not in ledger
    qa = [{"question": "Who?", "answer": "A"}]
    talk = {"id": "t", "memories": [{"text": "Ada left."}], "qa": qa}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk))
    assert "Ada left." in run("data", "look", f"own:{tmp_path / 'talks.jsonl'}")


def test_the_embedded_policy_is_small_and_loads_without_code_of_its_own():
    assert sum(p.stat().st_size for p in EMBEDDED.iterdir()) < 10 * 2**20
    data = {".json", ".safetensors", ".yaml", ".jinja", ".md"}
    assert {p.suffix for p in EMBEDDED.iterdir()} <= data
    assert not [k for k in json.loads((EMBEDDED / "config.json").read_text()) if "auto_map" in k]


@pytest.fixture
def begins(monkeypatch):
    """What a training would begin with: run, how it trains, agent, whether it is resumed."""
    began = []
    monkeypatch.setattr(train, "run_and_report", lambda *given: began.append(given[:4]))

    def of(line):
        run(line)
        return began.pop()

    return of


def test_settings_go_from_preset_file_model_and_flags_to_the_training(
    tmp_path, monkeypatch, begins
):
    monkeypatch.chdir(tmp_path)
    config, how, agent, _ = begins("train --name a --preset rememr1 --retriever bm25 --kl 0.5")
    assert (config.agent, agent.name, agent.config.retriever) == ("rememr1", "rememr1", "bm25")
    assert (how.kl, how.clip_high, config.shuffle) == (0.5, 0.2, False)
    Path("runs/a").mkdir(parents=True)
    files.dump(Path("runs/a/config.yaml"), run=config, grpo=how, agent=agent.config)
    replayed, again, reader, _ = begins("train --name b --config runs/a/config.yaml --recall-k 2")
    assert replayed.name == "b" and again == how
    assert (reader.config.retriever, reader.config.recall_k) == ("bm25", 2)
    *resumed, resume = begins("train --name a --resume --steps 7")
    assert resume and resumed[1].steps == 7 and resumed[2].config == agent.config
    # unless it is said, the agent that the model was trained with, and its settings
    model = Path(shutil.copytree(EMBEDDED, "model"))
    files.dump(model / "agent.yaml", run={"agent": "rememr1"}, agent={"retriever": "bm25"})
    assert begins("train --name c --model model")[2].config.retriever == "bm25"
    assert begins("sft --name c --model model --lr 0.1")[1].lr == 0.1
    Path("notes.txt").write_text("Anna met Otto. Otto reached Lima.")
    for words, retriever in (("tiny --agent rememr1", "word_recall"), ("model", "bm25")):
        run(f"ask notes.txt Where? --name of-{retriever} --final-tokens 4 --model {words}")
        asked = yaml.safe_load(Path(f"runs/of-{retriever}/config.yaml").read_text())
        assert asked["agent"]["retriever"] == retriever
    few = "--n 1 --chunk-tokens 24 --lengths 1 --temperatures 0 --model model"
    run(f"eval --name p --preset rememr1 {few}")
    evaluated = find.begun(Path("runs/p"))
    assert evaluated["eval"]["agents"][0] == "rememr1"
    assert evaluated["agent"]["max_sections"] is None  # a preset's cap is one of training


# what makes the README's commands small; of a flag that is given twice
# the last value counts, and of one with several values all of them
TINY = "--max-sections 2 --memory-tokens 8 --final-tokens 8"
SMALL = {
    "data look": "--n 1",
    "data get": "",
    "data build": "--lengths 200 --n 2",
    "train": f"--steps 2 --tasks-per-step 2 --group-size 2 --save-every 1 {TINY}",
    "show": "--step 1",
    "eval": f"--n 2 --temperatures 0 --window 256 --lengths 12 {TINY}",
    "ask": f"--model tiny {TINY}",
    "plan": "",
}


def test_the_commands_of_the_front_page_and_of_a_run_of_ones_own_work(tmp_path, monkeypatch):
    """In their order, with small numbers on top, on files of the names and forms they speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloads, "get", download)
    Path("notes.txt").write_text("Anna joined Boris. Boris toured Oslo.")
    for folder in ("examples", "recipes"):
        shutil.copytree(ROOT / folder, folder)
    engines = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    text = blocks(engines, "bash")[0] + (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [words for words in commands(text) if "my_agent" not in " ".join(words)]
    used = {name for name in SMALL for words in lines if " ".join(words).startswith(name)}
    assert used == {*SMALL}
    for words in lines:
        name = " ".join(words[: 1 + (words[0] == "data")])
        # a run is resumed with its own settings, and a model that was trained here is asked
        asked = name == "ask" and "--model" in words
        small = [] if "--resume" in words or asked else SMALL[name].split()
        small += "--model tiny --engine transformers".split() * (words[:2] == ["train", "--config"])
        assert run(*words, *small).strip(), words
    assert json.loads(Path("runs/mine/summary.json").read_text())["steps"] == 2
    assert "<html" in Path("runs/mine/report.html").read_text()
    # what is shown is of a step that there is without the small numbers
    shown, trained = (next(w for w in lines if w[0] == name) for name in ("show", "train"))
    assert shown[1] == f"runs/{trained[trained.index('--name') + 1]}"
    assert int(shown[shown.index("--step") + 1]) < int(trained[trained.index("--steps") + 1])
    evaluated = json.loads(Path("runs/hqa/summary.json").read_text())
    (asked,) = evaluated["trained_on"]  # nothing that it was trained on is asked
    assert asked["policy"] == "runs/qwen3-0.6b/model" and asked["known"] == 2
    assert asked["questions"]["hotpotqa"] == {"asked": 2, "seen": 0}
    assert parts_of(evaluated, "agent") == ["memagent", "full", "bm25", "none", "oracle"]
    assert parts_of(evaluated, "question", agent="oracle") == ["hotpotqa"]


def download(name, out, say):
    """Write questions in HotpotQA's form as `data get` would."""
    questions = [
        {
            "id": str(i),
            "question": f"Where is person {10 * i}?",
            "answer": "Lima",
            "type": "bridge",
            "level": "easy",
            "supporting_facts": {"title": [f"Title {10 * i}"], "sent_id": [0]},
            "context": {
                "title": [f"Title {k}" for k in range(10 * i, 10 * i + 10)],
                "sentences": [[f"Person {k} is in Lima. "] for k in range(10 * i, 10 * i + 10)],
            },
        }
        for i in range(66)
    ]
    say(f"{name} comes from a hub")
    (out / name).mkdir(parents=True)
    for k, file in enumerate(downloads.SOURCES[name][2]):
        pq.write_table(pa.Table.from_pylist(questions[22 * k :][:22]), out / name / file.name)


# ---------------------------------------------------------------- what is killed goes on


def dies_in_the_second_step(self, trainer, module, *_):
    if module.done_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_command_goes_on_by_its_name_alone_to_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"train {STEP} --steps 3 --lr 0.001 --save-every 1 --chunk-tokens 30 --name"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.TrainingProgress, "on_train_batch_end", dies_in_the_second_step)
        process = forked([*words.split(), "killed"])
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = Path("runs/killed/config.yaml").read_bytes()
    said = run("train --name killed --resume --seed 9 --lr 0.5", code=2)
    assert "grpo.lr 0.001, not 0.5" in said and "grpo.seed 0, not 9" in said
    run("train --name killed --resume")
    assert Path("runs/killed/config.yaml").read_bytes() == before
    run(f"{words} whole")

    def numbers(name):
        with Path("runs", name, "metrics.csv").open(newline="") as file:
            rows = [
                {k: v for k, v in row.items() if not k.endswith("_s")}
                for row in csv.DictReader(file)
            ]
        return rows, Path("runs", name, "model", "model.safetensors").read_bytes()

    assert numbers("killed") == numbers("whole") and len(numbers("killed")[0]) == 3
    run("train --name killed --resume --steps 4")  # and past its end
    assert json.loads(Path("runs/killed/summary.json").read_text())["steps"] == 4
    shown = run("show runs/killed --n 1")
    assert "Where is" in shown and "reward" in shown


def test_an_evaluation_that_is_killed_then_stopped_by_ctrl_c_loses_nothing(tmp_path, monkeypatch):
    """A second one beside it is refused; a last call finishes what they left, every row once.

    The one that is stopped is a process as a user starts it, traps of signals included.
    """
    monkeypatch.chdir(tmp_path)
    small = "--data world --lengths 2 --kinds one_fact --n 50 --agents memagent --in-flight 2"
    words = ["eval", *small.split(), "--temperatures", "0", "--name", "e"]
    rows = Path("runs/e/rows.jsonl")

    def lines():
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    with pytest.MonkeyPatch.context() as patch:
        append, wait = Rows.append, threading.Event().wait
        patch.setattr(Rows, "append", lambda *row: append(*row) if lines() < 3 else wait())
        killed = forked(words)
    until(lambda: lines() >= 3)
    assert killed.exitcode is None
    assert "is being written" in run(*words, code=2)
    killed.kill()
    killed.join()
    stopped = subprocess.Popen(
        [sys.executable, ROOT / "cli.py", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: lines() >= 6)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate()
    assert stopped.returncode == 130
    assert "stopped" in said and "Traceback" not in said
    assert 6 <= lines() < 50
    run(*words)
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(made) == 50 == len({row["id"] for row in made})
    summary = json.loads(Path("runs/e/summary.json").read_text())
    assert cell_of(summary, "memagent", "one_fact", "0.0", 2)["n"] == 50


def test_nothing_goes_to_the_network_without_being_asked(own):
    """Reading a file of the user's works where every connection is refused."""
    refuse = (
        "import socket\ndef no(*a, **k): raise OSError('no network')\nsocket.socket.connect = no\n"
    )
    code = f"{refuse}from tasks import readers\nprint(len(readers.read({str(own)!r})))"
    assert python(code, env=os.environ | {"HF_HUB_OFFLINE": "0"}).strip() == "2"
