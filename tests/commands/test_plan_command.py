"""`plan` from its words to its last line, the command that trains what was planned."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from test_refusals import refused
from typer.testing import CliRunner

import cli
from commands import train
from config import machine, terminal

ROOT = Path(cli.__file__).parent


def said(words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["plan", *words.split()])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.output


PLANS = {  # words -> of the sentence, and what the command at the end trains
    "--model Qwen/Qwen3-4B --card 4090": (
        "On one RTX 4090 of 24 GiB LoRA takes about 101.3 h for 100 steps of 8 x 16 readings of 15 "
        "sections of 2,048 tokens. Hours are good to a factor of two.",
        {"lora_rank": 32, "recompute": True, "data": "FILE", "lr": 2e-5},
    ),
    "--model Qwen/Qwen3-0.6B --lr 3e-6": (
        "H100 of 80 GiB (give yours by --card) full fine-tuning takes",
        {"lora_rank": 0, "data": "FILE", "lr": 3e-6},
    ),
    "--model Qwen/Qwen3-8B --card a100-40gb --preset vime --quantise --lora-rank 16": (
        "A100 of 40 GiB QLoRA takes", {"quantise": True, "lora_rank": 16, "rows_per_update": 64},
    ),
    "--model Qwen/Qwen2.5-14B-Instruct --card l40s --chunk-tokens 700": (
        "L40S of 48 GiB QLoRA takes", {"quantise": True, "lora_rank": 32, "chunk_tokens": 700},
    ),
    "--config R/qwen3-0.6b-24gb.yaml --card l4 --memory-tokens 96 --lora-rank 0 --thinking": (
        "L4 of 24 GiB full fine-tuning takes",
        {"data": "hqa/hqa_20.jsonl.gz", "lora_rank": 0, "lr": 4e-5, "thinking": True},
    ),
    "--config R/qwen3-4b-8x80gb-full.yaml": (
        "On 8 x H100 of 80 GiB (give yours by --card) full fine-tuning takes",
        {"devices": 8, "lora_rank": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_ends_in_a_command_that_trains_what_was_planned(words, monkeypatch, tmp_path):
    sentence, trained = PLANS[words]
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()  # that the user is to name
    for file in (f"{folder}/hqa_{n}.jsonl.gz" for folder in ("hqa", "hqa-dev") for n in (20, 50)):
        Path(file).parent.mkdir(exist_ok=True)  # of the recipes, which `train` looks for
        Path(file).touch()
    out = said(words.replace("R/", f"{ROOT}/recipes/"))
    assert sentence in " ".join(out.split())
    given = []
    monkeypatch.setattr(train, "run_and_report", lambda *settings: given.extend(settings[:3]))
    monkeypatch.setattr(machine, "check_here", lambda run: None)  # no card, and no network
    command = shlex.split(out.splitlines()[-1])[2:]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    settings = {k: v for part in (*given[:2], given[2].config) for k, v in asdict(part).items()}
    assert {name: settings[name] for name in trained} == trained
    assert settings["engine"] == "vllm" and settings["model"].startswith("Qwen/")


@pytest.mark.parametrize(("words", "fits"), [
    ("--gpu-gib 80", "fits │ yes │ yes │ yes │"),
    # its questions are answered by the base, which vLLM does not hold beside new weights
    ("--gpu-gib 80 --agent memupdate", "fits │ yes │ yes │ no │"),
    ("--gpu-gib 4", "fits │ wants 24 GiB │ wants 24 GiB │ wants 24 GiB │"),
])  # fmt: skip
def test_what_does_not_fit_or_is_refused_has_no_command(monkeypatch, words, fits):
    monkeypatch.setattr(terminal.console, "_width", 160)  # in which no cell is cut
    out = said(f"--model Qwen/Qwen3-0.6B {words}")
    assert fits in " ".join(out.split()) and ("cli.py train" in out) is ("yes" in fits)


def test_a_model_that_is_not_named_here_is_counted_from_its_config(tmp_path):
    """A plan needs no weights, a training does."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
                 vocab_size=500)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    assert "LoRA" in said(f"--model {tmp_path} --gpu-gib 24")
    assert "model.safetensors" in refused("train", "--name", "t", "--model", tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "llama", "hidden_size": "x"}',
                                  '{"auto_map": {"AutoConfig": "evil.C"}, "model_type": "evil"}',
                                  "[" * 100_000])  # fmt: skip
def test_a_config_of_a_stranger_is_refused_and_runs_nothing(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "memagent: " in said(f"--model {tmp_path}", 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", [
    "", "--agent bm25 --model Qwen/Qwen3-4B", "--model Qwen/Qwen3-4B --card B300",
    "--model ./nowhere", "--model a/b/c", "--model smollm2 --group-size 1",
])  # fmt: skip
def test_a_mistake_is_one_sentence(words):
    assert "cli.py train" not in said(words, 2)
