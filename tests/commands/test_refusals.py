"""Models beside the policy: what is refused before anything is loaded, and which of it may move."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import HANG_S
from typer.testing import CliRunner

import cli
import models.embedder as embedders
from agents import find
from commands import train
from commands.dryrun import dry_run
from config import machine
from config.errors import UserError
from config.options import (
    EvalConfig,
    GRPOConfig,
    RunConfig,
    ServeConfig,
    settings_of_rows,
    without_url,
)
from config.realmodels import check_model
from dev import keeper
from embedded import tiny
from engines.open import check_frozen
from eval import Conditions
from tokens.codec import Codec

GRPO = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2, warmup=0, kl=0.0)
CONDITIONS = Conditions()
DOWN = "openai:http://127.0.0.1:9/v1#m"


def refused(*words) -> str:
    """The one sentence of a command that the user has got wrong."""
    done = CliRunner().invoke(cli.app, [*map(str, words)])
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]
    assert last.startswith("memagent: ") and "Traceback" not in done.output
    return last


def commands_of(tmp_path, agent, *flags):
    """The three commands that ask an agent, each with a ledger or a file of its own."""
    text = tmp_path / "notes.txt"
    text.write_text("2024-01-01\nAnna reached Oslo.\n")
    runs = ["--runs", tmp_path / "runs", "--device", "cpu"]
    data = ["--data", "ledger", "--lengths", 5]
    return [
        ["eval", "--agents", agent, *data, "--n", 1, *runs, *flags],
        ["train", "--agent", agent, *data, "--steps", 1, "--name", "t", *runs, *flags],
        ["ask", text, "Where is Anna?", "--agent", agent, "--model", keeper.WEIGHTS, *runs, *flags],
    ]


# ---------------------------------------------------------------- embedders


DENSE = "--search dense"


@pytest.mark.parametrize("agent, flags", [
    ("facts", DENSE), ("memupdate", DENSE),  # no embedder, and three that are not there
    ("memupdate", f"{DENSE} --embedder {DOWN}"), ("memupdate", f"{DENSE} --embedder hf:/nowhere"),
    ("memupdate", f"{DENSE} --embedder minilm"),
])  # fmt: skip
def test_an_agent_that_compares_meanings_needs_its_embedder(tmp_path, monkeypatch, agent, flags):
    monkeypatch.setattr(embedders, "PATIENCE_S", 0)
    for words in commands_of(tmp_path, agent, *flags.split()):
        assert "embed" in refused(*words).lower()
    written = {path.name for path in (tmp_path / "runs").rglob("*")}
    assert not written & {"rows.jsonl", "metrics.csv"}
    with pytest.raises(UserError, match="compares meanings"):
        find.make("facts", {"search": "dense"})
    assert find.make("facts", {"search": "dense", "embedder": "hash:256"}).needs_embedder
    assert find.find("facts")().label == "facts"  # as a report makes one, to show its turns


# ---------------------------------------------------------------- questions of frozen weights


def test_vllm_is_refused_where_it_loses_the_weights_from_before(tmp_path):
    """It holds one set: the base's under adapters that begin at it, else those that are trained."""
    agent, settings = keeper.agent(), {"model": str(keeper.WEIGHTS), "data": "ledger"}
    run = RunConfig(runs=str(tmp_path), lengths=(5,), device="cpu", engine="vllm", **settings)
    for begin in (train.train, lambda *how: dry_run(*how, lambda line: None)):
        with pytest.raises(UserError, match="vLLM holds one set of weights: give a --lora-rank"):
            begin(run, GRPO, agent)
    check_frozen(run, 2, agent)
    check_frozen(replace(run, engine="transformers"), 0, agent)
    check_frozen(run, 0, tiny.agent())
    with pytest.raises(UserError, match="no --adapter"):
        check_frozen(replace(run, adapter="a"), 2, agent)
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------- a server that moves


def test_only_the_url_of_a_served_model_may_change():
    """Neither a run that goes on nor rows hang on it."""
    here, usual = "openai:http://127.0.0.1:8000/v1#org/m", keeper.agent().config

    def differs(before, after):
        now, was = replace(usual, embedder=after), replace(usual, embedder=before)
        rows = settings_of_rows(now, "") != settings_of_rows(was, "")
        assert rows is bool(find.changed({"agent": {"embedder": before}}, agent=now))
        return rows

    for same in (here, "openai:https://other.example/api#org/m"):
        assert not differs(here, same) and not differs(same, here)
    for other in ("openai:http://127.0.0.1:8000/v1#m", "hf:org/m", "hash:256", ""):
        assert differs(here, other) and differs(other, here)
    assert without_url(None) is None and without_url(3) == 3 and without_url("#m") == "#m"


# ---------------------------------------------------------------- before torch is loaded


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 268435456\n"
WHOLE = ("config.json", "tokenizer.json", "model.safetensors")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


def adapters(base: object) -> str:
    named = {"base_model_name_or_path": base}
    return json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | named)


def folder(*names, **contents):
    """Files of a model folder, {} in each but those that are given."""
    return {name.replace("_", ".", 1): text for name, text in contents.items()} | {
        name: "{}" for name in names if name.replace(".", "_", 1) not in contents
    }


MODELS = {  # files in a folder, what is given as --model (behind the folder), what is said of it
    "a folder that is not there": ({}, "/nowhere", "No model folder at"),
    "an empty folder": ({"x/": ""}, "/x", "has no config.json"),
    "a pointer for weights": (folder(*WHOLE) | {"model.safetensors": POINTER}, "", "git lfs pull"),
    "a pointer for a part": (
        folder(*WHOLE[:2], "model.safetensors.index.json") | {"model-2.safetensors": POINTER}, "",
        "model-2.safetensors is a git-LFS pointer"),
    "a pointer for a tokenizer": (folder(*WHOLE) | {"tokenizer.json": POINTER}, "",
                                  "tokenizer.json is a git-LFS pointer"),
    "a pointer for adapters": (folder(*ADAPTERS) | {ADAPTERS[1]: POINTER}, "", "git lfs pull"),
    "adapters without weights": ({ADAPTERS[0]: adapters("a/b")}, "", "adapter_model.safetensors"),
    "adapters of a base that is gone": (
        {ADAPTERS[0]: adapters("/nowhere/base"), ADAPTERS[1]: ""}, "",
        "name /nowhere/base as their base in adapter_config.json, which can name another place."),
    "adapters of no base": ({ADAPTERS[0]: adapters(None), ADAPTERS[1]: ""}, "", "That is no model"),
    "pickled weights": (folder(*WHOLE[:2], "pytorch_model.bin"), "", "has no model.safetensors"),
    "weights of others": (folder(*WHOLE[:2], "tf_model.h5"), "", "has no model.safetensors"),
    "no weights": (folder(*WHOLE[:2]), "", "has no model.safetensors"),
    "no tokenizer": (folder("config.json", "model.safetensors", "tokenizer_config.json"), "",
                     "has no tokenizer.json"),
    "a tokenizer alone": (folder("tokenizer.json"), "", "has no config.json"),
    "weights alone": (folder("model.safetensors"), "", "has no config.json"),
    "a folder around it": ({f"x/{name}": "{}" for name in WHOLE}, "", "has no config.json"),
    "a GGUF file": ({"a.gguf": "GGUF"}, "/a.gguf", "a.gguf is a file: give a folder"),
    "a folder of GGUF files": ({"a.gguf": "GGUF"}, "", "has no config.json"),
    "a file of weights": ({"model.safetensors": ""}, "/model.safetensors", "is a file: give a"),
}  # fmt: skip
PATHS = ("./nowhere", "../nowhere", "/nowhere/x", "~/nowhere", "a/b/c", "a/", "models/nothing",
         "C:\\models\\x", "no.gguf", "no.safetensors", "https://huggingface.co/a/b")  # fmt: skip
CHILD = """
import json, sys, cli
from typer.testing import CliRunner
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli.app, words)
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([done.exit_code, done.output, loaded]))
"""
PIPED = r"""
import sys, cli, typer
from config.terminal import console
for text in ("\u6771\u4eac \u2192 Bern", "\ud800", "\u00e9"):
    console.print(text)
    typer.echo(text)
cli.app(["train", "--help"])
"""


def written(path, files):
    path.mkdir()
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).mkdir() if name.endswith("/") else (path / name).write_text(text)


@pytest.fixture
def no_hub(monkeypatch):
    """Count the addresses that are asked for; there is none."""
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *place, **_: asked.append(place) or [])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_model_is_said_and_not_looked_for_elsewhere(tmp_path, no_hub, name):
    files, behind, words = MODELS[name]
    written(tmp_path / "model", files)
    model = f"{tmp_path / 'model'}{behind}"
    with pytest.raises(UserError, match=re.escape(words)) as error:
        check_model(model, tokenizer=True)
    assert str(tmp_path) in str(error.value)
    for command in (["eval"], ["train", "--name", "t"], ["serve"]):
        assert words in refused(*command, "--model", model)
    assert not no_hub


@pytest.mark.parametrize("path", PATHS)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(tmp_path, monkeypatch, no_hub, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert f"No model folder at {path}" in refused("plan", "--model", path)
    with pytest.raises(UserError, match="No model folder at"):
        Codec.load(path)
    assert not no_hub


def python(*words, **how):
    """Run a Python of its own, in the repository's root."""
    root = Path(cli.__file__).parent
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, **how)


def test_what_needs_no_torch_is_refused_without_it(tmp_path):
    written(tmp_path / "lacking", folder(*WHOLE[:2]))
    (tmp_path / "t").mkdir()
    (tmp_path / "notes.txt").write_text("Anna reached Oslo.")
    ask, runs = ["ask", str(tmp_path / "notes.txt"), "Where?"], ["--runs", str(tmp_path)]
    (tmp_path / "t" / "config.yaml").write_text("")
    (tmp_path / "damaged.jsonl").write_text('{"question": "Wh')
    wrong = {
        (*kind, *flags): words
        for kind in (ask, ["eval"], ["train"], ["sft"], ["serve"])
        for flags, words in {
            ("--model", "./nowhere"): "No model folder",
            ("--model", "openai:http://localhost:9/v1#m"): "by --endpoint URL --served-as NAME.",
            ("--model", f"{tmp_path}/lacking"): "has no model.safetensors",
            ("--device", "tpu"): "tpu", ("--agent", "nobody"): "nobody",
        }.items()
    } | {
        ("train", *runs, "--name", "t"): "there already", ("sft", *runs, "--name", "t"): "there al",
        (*ask, *runs, "--name", "t"): "another --name", ("eval", "--suite", "nobody"): "nobody",
        ("train", "--data", "no.json"): "No file at no.json",
        ("eval", "--data", "world.json", "--data", "no.json"): "No file at world.json",
        ("serve", "--cors", "http://a.b", "--cors", "a.b"): "'a.b' is no origin",
        ("serve", "--cors", "a.b", "--cors", "http://a.b"): "'a.b' is no origin",
        ("sft", "--validation", "no.json"): "No file at no.json",
        ("train", "--data", "world=1,no.json=2"): "No file at no.json",
        ("train", "--data", "locomo:no.json#turns"): "No file at no.json",
        ("sft", "--data", "hotpotqa"): "`python cli.py data get NAME`",
        ("train", "--data", "s/hqa_50.jsonl.gz"): "`data build FILE OUT`",
        ("train", "--data", str(tmp_path)): "No file at",
        ("train", "--group-size", "1"): "group_size must be greater than or equal to 2",
        ("plan", "--model", "smollm2", "--group-size", "1"): "group_size must be greater than",
        ("train", "--tasks-per-step", "4,0"): "tasks_per_step must be",
        ("train", "--temperature", "1,0"): "temperature must be",
        ("eval", "--config", "recipes/laptop.yaml"): "is of a training",
        ("train", "--resume", *runs, "--name", "none"): "There is no run",
        ("train", "--data", f"{tmp_path}/damaged.jsonl"): "line 1: this is not JSON",
        ("export", f"{tmp_path}/t"): "checkpoint. Name the folder of a `train` or `sft`.",
        ("ask", "no.txt", "Where?"): "no.txt cannot be read",
        ("plan", "--model", "a/b/c"): "No model",
    }  # fmt: skip
    done = python("-c", CHILD, json.dumps([*wrong]), text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(wrong), done.stderr
    for (words, said_of_it), (code, output, loaded) in zip(wrong.items(), found, strict=True):
        assert code == 2 and said_of_it in output and not loaded, (words, output, loaded)


def test_a_folder_that_is_no_model_is_refused_before_anything_is_imported_for_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for config in (EvalConfig(untrained=str(tmp_path)), ServeConfig(model=str(tmp_path))):
        with pytest.raises(UserError, match="has no"):
            machine.check_here(config)


# ---------------------------------------------------------------- standard output


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_letters_that_cannot_be_encoded_are_replaced(encoding):
    done = python("-c", PIPED, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and b"Bern" in done.stdout and not done.stderr
    assert b"--group-size" in done.stdout


def test_a_pipe_that_is_closed_ends_a_command_without_a_traceback():
    out, end = os.pipe()
    os.close(out)
    command = [sys.executable, "cli.py", "plan", "--model", "smollm2"]
    root = Path(cli.__file__).parent
    done = subprocess.run(command, cwd=root, stdout=end, stderr=subprocess.PIPE)
    os.close(end)
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_a_hub_whose_name_is_looked_up_without_end_does_not_answer(monkeypatch):
    over = threading.Event()

    def look_up(*_):
        over.wait(HANG_S)
        raise OSError

    monkeypatch.setattr(machine.socket, "create_connection", look_up)
    monkeypatch.setattr(machine, "HUB_S", 0.01)
    monkeypatch.setattr(machine, "getproxies", dict)
    assert not machine._answers("https://hub.example") and not over.is_set()
    over.set()
