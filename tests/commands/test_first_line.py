"""What a command says first, near misses, a hub that does not answer, and code of the user's that
fails."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants
from test_refusals import python, refused
from typer.testing import CliRunner

import cli
from agents import find
from config import machine
from config.errors import UserError
from config.options import RunConfig

NOTES = "Anna reached Oslo. Boris toured Lima."
AGENT = """
from memagent import Agent, MemAgent

class Mine(MemAgent):
    def run(self, task):
        turn = yield from super().run(task)
        raise RuntimeError("no such note")
"""
RUN = "from memagent import MemAgent\n\nclass Mine(MemAgent):\n    def {name}(self, {given}):\n"


# ---------------------------------------------------------------- near misses


@pytest.mark.parametrize("line, offered", [
    ("trian", "train"),
    ("train --stepps 3", "--steps"),
    ("data build a b --lenghts 3", "--lengths"),
    ("train --agent memagnt", "memagent?"),
    ("eval --agents memagent,ful", "full?"),
    ("eval --suite ruler-hq", "ruler-hqa?"),
    ("train --preset papre", "paper?"),
    ("train --resume --name onne --runs R", "R/one?"),
    ("export R/onne", "R/one?"),
])  # fmt: skip
def test_a_near_miss_is_answered_with_what_is_near(tmp_path, line, offered):
    for name, file in (("one", "metrics.csv"), ("onnne", "rows.jsonl")):  # the latter no training
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    done = CliRunner().invoke(cli.app, line.replace("R", str(tmp_path)).split())
    output = " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())
    assert done.exit_code == 2 and offered.replace("R", str(tmp_path)) in output


# ---------------------------------------------------------------- the first line


def test_a_training_says_its_folder(monkeypatch):
    said, agent = [], find.make("memagent", {})
    run = find.beginning(RunConfig(), agent, False, said.append)
    assert run.name and said[-1] == f"Results go to {Path('runs', run.name)}."
    monkeypatch.setenv("RANK", "0")  # torchrun's ranks would have a name each
    assert not find.beginning(RunConfig(), agent, False, print).name


HALTED = """
import json, sys

class Heavy:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers", "lightning", "tokenizers", "numpy", "starlette"):
            raise SystemExit(77)

sys.meta_path.insert(0, Heavy())
import cli
from agents import find
from typer.testing import CliRunner
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli.app, words)
    print(json.dumps([done.exit_code, done.output]))
"""


def test_a_command_says_what_it_will_do_before_anything_heavy_is_loaded(tmp_path):
    """The import of torch or numpy ends each: what stands there by then is the first line."""
    runs = ["--runs", str(tmp_path)]
    step = tmp_path / "old" / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (tmp_path / "old" / "config.yaml").write_text("run: {}\ngrpo: {}\nagent: {}\n")
    begins = {
        ("train", "--name", "a", *runs): "memagent learns from world, beginning with the embedded "
        "policy.",
        ("train", "--resume", "--name", "old", *runs): "memagent learns from world",
        ("sft", "--name", "a", *runs): "memagent learns from world",
        ("eval", "--name", "e", *runs): "memagent, full, bm25 by the embedded policy: world.",
        ("eval", "--endpoint", "http://127.0.0.1:9", *runs): "bm25 by http://127.0.0.1:9: world.",
        ("serve", "--model", "tiny", "--port", "0"): "Beginning a server at http://127.0.0.1:0.",
        ("demo", "--short", *runs): "The demo trains memagent",
        ("export", f"{tmp_path}/old"): f"Writing the policy of {tmp_path}/old",
        ("doctor",): "Looking at this machine",
    }
    done = python("-c", HALTED, json.dumps([*begins]), text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(begins), done.stderr
    for (words, line), (code, output) in zip(begins.items(), found, strict=True):
        assert line in output.splitlines()[0] and code == 77, (words, code, output)
    assert f"Results go to {tmp_path}/a." in found[0][1]
    assert f"It goes on in {tmp_path}/old." in found[1][1]
    assert "Opening the embedded policy ..." in found[3][1]  # which takes seconds


@pytest.mark.parametrize("built, lacks", [
    ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
    ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", False),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
])  # fmt: skip
def test_a_torch_without_cuda_is_told_by_its_version(tmp_path, monkeypatch, built, lacks):
    (tmp_path / "version.py").write_text(built)

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: Spec)
    assert machine._lacks("cuda") is lacks
    assert not machine._lacks("cpu") and not machine._lacks("auto")


def test_a_device_that_is_not_here_is_refused_before_torch_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_lacks", lambda device: device == "cuda")
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(NOTES)
    for words in (["train", "--name", "t"], ["sft"], ["eval"], ["ask", "notes.txt", "Who?"],
                  ["serve"], ["stream", "--engine", "transformers"]):  # fmt: skip
        sentence = refused(*words, "--device", "cuda")
        assert sentence == "memagent: No device cuda was found; use --device cpu."
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    for words in (["train", "--name", "t"], ["eval"], ["ask", "notes.txt", "Who?"]):
        assert "The engine vllm is not installed" in refused(*words, "--engine", "vllm")
    assert not Path("runs").exists()


# ---------------------------------------------------------------- no network


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A hub at whose address nothing listens, and an empty cache, whose folder is returned."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", None)  # nothing is tried again
    return tmp_path / "hub"


def test_without_a_network_a_model_of_the_hub_is_refused_in_one_sentence(no_network, tmp_path):
    (tmp_path / "notes.txt").write_text(NOTES)
    runs = ["--runs", tmp_path / "runs"]
    for words in (
        ["train", "--name", "t", "--lr", 1e-6, *runs], ["sft", "--name", "t", "--lr", 1e-6, *runs],
        ["eval", *runs], ["serve"],
        ["ask", tmp_path / "notes.txt", "Where?", *runs],
        ["stream", "--engine", "transformers", *runs], ["plan"],
    ):  # fmt: skip
        constants.HF_HUB_OFFLINE = False
        sentence = refused(*words, "--model", "org/unknown")
        assert "org/unknown is not in the cache of the hub, and 127.0.0.1 cannot be reached" in (
            sentence
        )
    assert not (tmp_path / "runs").exists()
    assert sentence.endswith("--served-as names a server's model.")
    constants.HF_HUB_OFFLINE = True
    assert "and HF_HUB_OFFLINE is set" in refused("eval", "--model", "org/unknown", *runs)


def test_without_a_network_a_model_in_the_cache_is_taken_from_there(no_network):
    snapshot = no_network / "models--org--known" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be reached"):
        machine.check_hub("org/known")
    constants.HF_HUB_OFFLINE = False
    (snapshot / "config.json").write_text("{}")
    machine.check_hub("org/known")
    assert constants.HF_HUB_OFFLINE  # and is not asked for again


# ---------------------------------------------------------------- the user's own code


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes mine.py into a folder of its own, where the commands then run; returns its path."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(NOTES)
    path = tmp_path / "mine.py"
    return lambda text: path.write_text(text) and str(path)


SMALL = "--steps 1 --tasks-per-step 1 --group-size 2 --lengths 1 --name t"


@pytest.mark.parametrize("line", ["ask notes.txt Where? --model tiny", f"train {SMALL}"])
def test_an_exception_of_an_agents_run_is_one_sentence_with_its_line(mine, line):
    words = [*line.split(), "--agent", mine(AGENT)]
    place = "memagent: mine.py, line 7, in run: RuntimeError: no such note (--debug shows the"
    assert refused(*words).startswith(place)
    done = CliRunner().invoke(cli.app, [*words, "--debug", "--name", "u"])
    assert done.exit_code == 2 and "Traceback" in done.stderr and place in done.stderr


@pytest.mark.parametrize("name, given", [
    ("__init__", "*given"), ("reward", "*given"), ("turn_rewards", "*given"), ("check", "task"),
])  # fmt: skip
def test_an_exception_of_any_of_its_methods_is_one_sentence(mine, name, given):
    path = mine(RUN.format(name=name, given=given) + "        return 1 / 0\n")
    sentence = refused("train", "--agent", path, *SMALL.split())
    assert f"mine.py, line 5, in {name}: ZeroDivisionError: division by zero" in sentence


def test_an_evaluation_counts_such_a_reading_as_failed_and_says_why_once(mine):
    words = "eval --suite world --lengths 1 --n 2 --kinds one_fact --name e --agents"
    done = CliRunner().invoke(cli.app, [*words.split(), mine(AGENT)])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("mine.py, line 7, in run: RuntimeError: no such note; such") == 1
    rows = [json.loads(line) for line in Path("runs/e/rows.jsonl").read_text().splitlines()]
    assert {row["error"] for row in rows} == {"RuntimeError: no such note"}


@pytest.mark.parametrize("text, sentence", [
    ("from memagent import Agent\n\nclass Mine(Agent):\n    x = y\n",
     "mine.py, line 4, in Mine cannot be imported: NameError: name 'y' is not defined."),
    ("import nothing_of_this_name\n", "mine.py, line 1 cannot be imported: ModuleNotFound"),
    ("from memagent import Agent\n\nclass Mine(Agent):\n    pass\n", "has no method run."),
])  # fmt: skip
def test_a_file_that_holds_no_agent_is_one_sentence(mine, text, sentence):
    path = mine(text)
    for words in (["train", "--agent"], ["eval", "--agents"], ["serve", "--agent"]):
        assert sentence in refused(*words, path)
