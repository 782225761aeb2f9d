"""The commands as a user types them."""

import csv
import errno
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
from config.options import EMBEDDED
from report.rows import Rows
from tasks import downloads

ROOT = Path(cli.__file__).parent


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


HELPED = ("", "train", "eval", "ask", "show", "plan", "doctor", "demo", "data",
          "data build")  # fmt: skip


@pytest.fixture(scope="module")
def helped():
    """Ask for the help of one command after the other in one process.

    Gives {command: what is printed, and whether torch is loaded by then}, and under "files" what
    was imported at the start.
    """
    code = (
        "import contextlib, io, json, sys\nimport cli\n"
        "said = {'files': [getattr(m, '__file__', None) for m in [*sys.modules.values()]]}\n"
        f"for command in {HELPED!r}:\n"
        "    sys.argv = ['cli.py', *command.split(), '--help']\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try: cli.app()\n        except SystemExit: pass\n"
        "    said[command] = out.getvalue(), 'torch' in sys.modules\n"
        "print(json.dumps(said))"
    )
    return json.loads(python(code))


@pytest.mark.parametrize("command", HELPED)
def test_help_names_every_flag_and_imports_no_torch(command, helped):
    said, loads_torch = helped[command]
    assert " ".join(f"Usage: cli.py {command}".split()) in said and not loads_torch


def test_a_full_disk_is_one_sentence(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("commands.data.show_tasks", full)
    assert "No space left on device" in run("data", "look", "world", code=2)


def test_little_is_imported_at_the_start(helped):
    ours = {Path(file) for file in helped["files"] if file and Path(file).is_relative_to(ROOT)}
    ours = [path for path in ours if ".venv" not in path.parts]
    assert ours
    assert sum(len(path.read_text().splitlines()) for path in ours) <= 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("train", "--model", "./nowhere"), "./nowhere"),
        (("train", "--preset", "papre"), "papre"),
        (("train", "--agent", "nowhere.py"), "nowhere.py"),
        (("demo", "--agent", "full"), "section by section"),
        (("plan", "--agent", "bm25"), "section by section"),
        (("train", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("eval", "--agents", "memgent"), "memgent"),
        (("eval", "--suite", "world", "--split", "tset"), "tset"),
        (("eval", "--data", "nowhere.parquet"), "nowhere.parquet"),
        (("ask", "nowhere.txt", "why?"), "nowhere.txt"),
        (("show", "nowhere"), "nowhere"),
        (("data", "look", "nowhere.jsonl"), "nowhere.jsonl"),
        (("data", "build", "nowhere.json", "out"), "nowhere.json"),
        (("train", "--lr", "-1"), "lr"),
        (("train", "--max-sections", "-1"), "max_sections"),
        (("train", "--lengths", ""), "lengths"),
        (("train", "--name", ".."), "--name"),
        (("train", "--resume"), "--name"),
        (("train", "--resume", "--name", "nowhere"), "nowhere"),
        (("train", "--runs", __file__), "test_cli.py"),
        (("eval", "--runs", __file__), "test_cli.py"),
        (("eval", "--n", "0"), "n must"),
        (("eval", "--agents", ""), "agents"),
        (("eval", "--suite", "hqa"), "suite"),
        (("demo", "--short", "--name", ""), "--name"),
        (("demo", "--short", "--name", "."), "--name"),
        (("demo", "--short", "--name", "../other"), "--name"),
    ],
)
def test_a_mistake_is_one_sentence_with_exit_code_2_and_leaves_nothing(
    tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    message = result.stderr.strip()
    assert message.startswith("memagent: ") and "\n" not in message and words in message
    assert "Traceback" not in result.output
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
eval --templates P
eval --agents P
eval --runs P --lengths 1
eval --name P --lengths 1
eval --untrained P --agents memagent@untrained
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
data build P --suite ruler --ruler-tasks vt --n 1
data build out --suite ruler --haystack P
data build out --suite ruler --squad P
data build P out --suite ruler
data build out --suite ruler --filler P
data build out --suite P
eval --suite P
data build out --suite ruler --tokenizer P --ruler-tasks vt
data get musique --out P
"""
NO_PATHS = {
    "name too long": "x" * 300,
    "NUL": "a\0b",
    "path too long": "x/" * 3000,  # these three for a third of the lines each
    "loop": "loop/x",
    "inside a file": "own.jsonl/x",
}


@pytest.mark.parametrize("third, path", enumerate(NO_PATHS.values(), -2), ids=[*NO_PATHS])
def test_a_path_that_cannot_be_is_one_sentence_whatever_the_command(
    tmp_path, monkeypatch, own, third, path
):
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
    for k, line in enumerate(PATHS.strip().splitlines()):
        if (third >= 0 and k % 3 != third) or (path.endswith("/x") and "--name P" in line):
            continue  # inside the folder of all runs there is neither file nor link
        words = [names.get(word, word) for word in line.split()]
        if words[0] == "train" and "--resume" not in words:
            words += "--steps 1 --tasks-per-step 1 --group-size 2".split()
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2, (line, result.output, result.exception)
        assert isinstance(result.exception, SystemExit), line
        message = result.stderr.strip()
        # no shell can give a NUL byte; the library refuses some of these itself, in its own form
        if "\0" not in path:
            assert message.startswith("memagent: ") and "\n" not in message, line
            assert len(message) < 2100, line
        assert "Traceback" not in result.output, line
        assert sorted(tmp_path.rglob("*")) == there, line


def test_look(own, tmp_path):
    assert "Where is Anna?" in run("data", "look", own)
    assert "evidence at" in run("data", "look", "world", "--sections", 2)
    assert "evidence at" in run("data", "look", "world")
    run("data", "look", "world", "--sections", 0, code=2)
    ledger = run("data", "look", "ledger", "--n", 1)
    assert "question  Where is " in ledger and "2024-01-06" in ledger and "2024-01-07" not in ledger
    assert "2024-01-12" in run("data", "look", "ledger", "--n", 1, "--sections", 12)
    run("data", "look", "ledger", "--sections", 0, code=2)
    qa = [{"question": "Who?", "answer": "A"}]
    talk = {"id": "t", "memories": [{"text": "Ada left."}], "qa": qa}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk))
    looked = run("data", "look", f"own:{tmp_path / 'talks.jsonl'}")
    assert "Ada left." in looked and "1 tasks: 1 questions, word F1" in looked


def test_train_show_eval_ask_on_the_embedded_policy(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train --name a --steps 2 --tasks-per-step 2 --group-size 4 --lengths 1,2")
    folder = Path("runs/a")
    made = "config.yaml metrics.csv checkpoints trajectories.jsonl.gz model tensorboard"
    assert {path.name for path in folder.iterdir()} >= {*made.split()}
    shown = run("show", folder, "--n", 2)
    assert "Where is" in shown and "reward" in shown
    run("train", "--config", folder / "config.yaml", "--name", "b")
    weights = [Path("runs", name, "model/model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]  # replayed
    line = "eval --model runs/a/model --lengths 1,2 --n 4 --name e --temperatures 1.0"
    out = run(line)
    summary = json.loads(Path("runs/e/summary.json").read_text())
    assert cell_of(summary, "memagent", "two_hop", "1.0", 2)["n"] == 4 and "memagent" in out
    assert "<html" in Path("runs/e/report.html").read_text()
    rows = Path("runs/e/rows.jsonl").read_text()
    run(line)
    assert Path("runs/e/rows.jsonl").read_text() == rows  # nothing is asked twice
    run(f"eval --data {own} --n 2 --name own --agents memagent --temperatures 0")
    Path("doc.txt").write_text(
        "Clara joined Otto. Anna reached Lima. Emil met Ida. "
        "Hugo toured Nice. Max met Vera. Paula met Leon."
    )
    asking = ("ask", "doc.txt", "Where is Anna?", "--model", "tiny", "--agent")
    out = run(*asking, "full")
    assert "answer: Lima" in out and "Found in the text: '" in out
    assert "section 1" in run(*asking, "memagent")


def test_the_embedded_policy_is_small_and_loads_without_code_of_its_own():
    size = sum(p.stat().st_size for p in EMBEDDED.iterdir())
    assert size < 10 * 2**20
    data = {".json", ".safetensors", ".yaml", ".jinja", ".md"}
    assert {p.suffix for p in EMBEDDED.iterdir()} <= data
    assert not [k for k in json.loads((EMBEDDED / "config.json").read_text()) if "auto_map" in k]


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


def test_settings_of_an_agent_go_from_preset_and_flags_to_the_config_and_the_model(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    small = "--steps 1 --tasks-per-step 1 --group-size 2 --lengths 1"
    run(
        f"train --name a --preset rememr1 --retriever bm25 --chunk-tokens 24 --step-tokens 20 "
        f"--final-tokens 20 --kl 0.5 {small}"
    )
    stored = find.begun(Path("runs/a"))
    assert stored["run"]["agent"] == "rememr1" and stored["agent"]["retriever"] == "bm25"
    assert (stored["grpo"]["kl"], stored["grpo"]["clip_high"]) == (0.5, 0.2)
    run("train --name b --config runs/a/config.yaml --recall-k 2")
    run("train --name b --resume --steps 2")
    stored = find.begun(Path("runs/b"))
    assert (stored["agent"]["retriever"], stored["agent"]["recall_k"]) == ("bm25", 2)
    # unless it is said, the agent that the model was trained with
    run(f"train --name c --model runs/a/model {small}")
    assert find.begun(Path("runs/c"))["run"]["agent"] == "rememr1"
    few = "--model runs/a/model --lengths 1 --temperatures 0"
    run(f"eval --name e --agents rememr1,memagent --n 1 {few}")
    Path("notes.txt").write_text(
        "Otto reached Lima. Ida met Emil. Olga toured Oslo. Nils joined Max. "
        "Rosa entered Rome. Karin toured Graz. Anna met Otto."
    )
    asking = ("ask", "notes.txt", "Where is Anna?", "--model")
    for words, retriever in (
        (("tiny", "--agent", "rememr1"), "word_recall"), (("runs/a/model",), "bm25"),
        (("tiny",), None),
    ):  # fmt: skip
        run(*asking, *words, "--name", f"of {retriever}")
        asked = yaml.safe_load(Path(f"runs/of {retriever}/config.yaml").read_text())
        assert asked["agent"].get("retriever") == retriever
    run(f"eval --name p --preset rememr1 --n 1 --chunk-tokens 24 {few}")
    evaluated = yaml.safe_load(Path("runs/p/config.yaml").read_text())
    assert evaluated["eval"]["agents"][0] == "rememr1"
    assert evaluated["agent"]["max_sections"] is None  # a preset's cap is one of training


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
    assert "Reward by training step" in Path("runs/mine/report.html").read_text()
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


def dies_in_the_second_step(self, trainer, module, *_):
    if module.done_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_command_goes_on_by_its_name_alone_to_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "train --steps 3 --tasks-per-step 1 --group-size 2 --lengths 1,2 --lr 0.001 "
        "--save-every 1 --chunk-tokens 30 --name"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.TrainingProgress, "on_train_batch_end", dies_in_the_second_step)
        process = forked([*words.split(), "killed"])
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = Path("runs/killed/config.yaml").read_bytes()
    said = run("train --name killed --resume --seed 9 --lr 0.5", code=2)
    assert "grpo.lr 0.001, not 0.5" in said and "grpo.seed 0, not 9" in said
    assert "Traceback" not in said and Path("runs/killed/config.yaml").read_bytes() == before
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
    assert len(numbers("killed")[0]) == 4
    assert json.loads(Path("runs/killed/summary.json").read_text())["steps"] == 4


def test_an_evaluation_that_is_killed_then_stopped_by_ctrl_c_loses_nothing(tmp_path, monkeypatch):
    """A second one beside it is refused; a last call finishes what they left, every row once.

    The one that is stopped is a process as a user starts it, traps of signals included.
    """
    monkeypatch.chdir(tmp_path)
    small = "--data world --lengths 2 --kinds one_fact --n 50 --agents memagent --in-flight 2"
    words = ["eval", *small.split(), "--name", "e"]
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
    assert 6 <= lines() < 100
    run(*words)
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(made) == 100 == len({(row["temperature"], row["id"]) for row in made})
    summary = json.loads(Path("runs/e/summary.json").read_text())
    assert [cell_of(summary, "memagent", "one_fact", t, 2)["n"] for t in ("1.0", "0.0")] == [50, 50]


def test_an_error_that_quotes_somebody_elses_text_cannot_steer_the_terminal():
    result = CliRunner().invoke(cli.app, ["train", "--data", "\x1b]0;title\x07file"])
    assert result.exit_code == 2 and "file" in result.stderr
    assert not {"\x1b", "\x07"} & {*result.stderr}


def test_nothing_goes_to_the_network_without_being_asked(own):
    """Reading a file of the user's works where every connection is refused."""
    refuse = (
        "import socket\ndef no(*a, **k): raise OSError('no network')\nsocket.socket.connect = no\n"
    )
    code = f"{refuse}from tasks import readers\nprint(len(readers.read({str(own)!r})))"
    assert python(code, env=os.environ | {"HF_HUB_OFFLINE": "0"}).strip() == "2"
