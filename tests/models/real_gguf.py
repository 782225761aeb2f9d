"""GGUF files in llama.cpp itself: the same tokens of a text, the same tokens after a prompt.

For `make test-real`: a wheel of llama.cpp is fetched from the package index.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from bench.common import ROOT
from bench.real import llama_server, post
from models.convert import convert
from models.load import load_model
from models.to_gguf import RULES, write_gguf

RULE = "tokenizer.ggml.pre"
PIECES = (
    "We've DON'T I'll 's 'S re-read été naïve a\u0301 日本 の 🙂 12345 1,234,567 3.14 7 42 ½ ² Ⅳ ١٢٣ "
    "x9 9x ab12cd f(x) _ ... !? : $ + <=> ^ ~ | — … “ ” ( ) # @ \\ / * -- ="
).split(" ") + [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000"]


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """Start llama.cpp's server, in the version of the benchmarks, with a file."""
    site = tmp_path_factory.mktemp("site")
    requirements = (ROOT / "bench/requirements.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^xllamacpp==\S+", requirements, re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(site), pin], check=True)
    return lambda model: llama_server(model, Path(sys.executable), str(site))


def some_text(rng):
    pieces = (rng.choice(PIECES) + rng.choice(["", " ", ""]) for _ in range(rng.randint(3, 40)))
    return "".join(pieces)


@pytest.fixture(scope="module")
def across_words():
    """Tokens and merges learnt across the borders of words: a wrong border changes the tokens."""
    import json

    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=tiny_gguf.SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([some_text(rng) for _ in range(400)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


@pytest.mark.parametrize("rule", [*RULES, None])
def test_text_becomes_the_same_tokens(tmp_path, llama_cpp, across_words, monkeypatch, rule):
    tokens, merges = across_words
    monkeypatch.setattr(tiny_gguf, "vocabulary", lambda: (list(tokens), list(merges)))
    file, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    folder.mkdir()
    if rule:
        tiny_gguf.write_gguf(file, more={RULE: rule})
    else:
        tiny_gguf.write_gguf(file, without=(RULE,))
    convert(file, folder)
    ours, rng = AutoTokenizer.from_pretrained(folder), random.Random(1)
    with llama_cpp(file) as url:
        for text in (some_text(rng) for _ in range(200)):
            body = {"content": text, "add_special": False, "parse_special": False}
            theirs = post(f"{url}/tokenize", body)["tokens"]
            assert ours.encode(text, add_special_tokens=False) == theirs, text


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_exported_model_goes_on_with_the_same_tokens(tmp_path, llama_cpp, kind):
    arch = kind if kind.startswith("qwen") else "llama"
    size = len(tiny_gguf.vocabulary()[0])
    tiny = tiny_gguf.tiny_llama
    model = tiny(vocab_size=size) if kind == "llama" else tiny_gguf.tiny_model(kind)
    model.config.sliding_window = None
    rule = "qwen2" if arch == kind else "smollm"
    more = {"general.architecture": arch, RULE: rule}
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model=model, more=more)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)  # for its tokenizer
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.save_pretrained(folder)
    write_gguf(folder, "Tiny")
    ours = load_model(folder, "float32", "cpu").eval()
    torch.manual_seed(1)
    prompts = torch.randint(3, size, (4, 24))
    answers = ours.generate(prompts, max_new_tokens=24, do_sample=False)[:, 24:].tolist()
    with llama_cpp(folder / "model.gguf") as url:
        for prompt, answer in zip(prompts.tolist(), answers, strict=True):
            if 2 in answer:
                answer = answer[: answer.index(2)]
            body = dict(prompt=prompt, n_predict=24, temperature=0.0, return_tokens=True)
            theirs = post(f"{url}/completion", body)["tokens"]
            assert [t for t in theirs if t != 2] == answer
