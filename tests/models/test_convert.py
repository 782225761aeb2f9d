"""GGUF files: the weights are the file's, each trap is mended, what is not read is refused."""

import json
from pathlib import Path

import pytest
import tiny_gguf
import torch
from tiny_gguf import CHAT, TEXT, rounded, tiny_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from config.errors import UserError
from models.convert import SAMPLE, convert, read_header
from models.load import load_model
from models.plan import geometry
from tokens.codec import Codec

IDS = torch.tensor([[5, 9, 70, 33, 120, 7, 255, 41]])


def made(path: Path, **how) -> Path:
    """Write a GGUF file to PATH.gguf, convert it, and return its folder."""
    write_gguf(path.with_suffix(".gguf"), **how)
    path.mkdir()
    convert(path.with_suffix(".gguf"), path)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gguf") / "tiny", kind="Q8_0")


@pytest.fixture
def file(converted):
    return converted.with_suffix(".gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_weights_are_the_files_own_and_transformers_loading_computes_the_same(tmp_path, kind):
    model = write_gguf(tmp_path / "tiny.gguf", kind)
    (tmp_path / "model").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    again = load_model(tmp_path / "model", "bfloat16", "cpu").eval()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], rounded(weight, kind)), name
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, theirs(IDS).logits)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


MORE = {
    "mistral": {"general.name": "Tiny Mistral"},  # such files call themselves Llama
    "qwen2": {"general.architecture": "qwen2", "tokenizer.ggml.pre": "qwen2"},
    "qwen3": {
        "general.architecture": "qwen3",
        "tokenizer.ggml.pre": "qwen2",
        "qwen3.attention.key_length": 128,
        "qwen3.attention.value_length": 128,
    },
}


@pytest.mark.parametrize("kind", [*MORE])
def test_other_families_compute_what_the_model_in_the_file_does(tmp_path, kind):
    """The same weights, and the same logits: those of the model that was written, in bfloat16."""
    path, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    model = write_gguf(path, model=tiny_model(kind), more=MORE[kind]).eval()
    folder.mkdir()
    convert(path, folder)
    again = load_model(folder, "bfloat16", "cpu").eval()
    assert again.config.model_type == ("llama" if kind == "mistral" else kind)
    assert Codec.load(folder).eos_ids == {2}
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], rounded(weight, "F32")), name
    some = {name.rpartition("layers.0.")[2] for name in before}
    assert ("self_attn.q_proj.bias" in some, "self_attn.q_norm.weight" in some) == (
        kind == "qwen2",
        kind == "qwen3",
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16
    ).eval()
    for weight in model.parameters():  # not `to`, which rounds the angles of the positions too
        weight.data = weight.data.to(torch.bfloat16)
    with torch.no_grad():
        logits = again(IDS).logits
        assert torch.equal(logits, model(IDS).logits) and torch.equal(logits, theirs(IDS).logits)
    g = geometry(str(path))
    assert (g.layers, g.weights) == (2, sum(p.numel() for p in model.parameters()))


def test_a_response_ends_where_the_model_ends_it(file, converted):
    unmended = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert unmended.eos_token == "<|im_start|>"  # the trap: nothing would ever stop
    codec = Codec.load(converted)
    assert codec.tokenizer.eos_token == "<|im_end|>" and codec.tokenizer.eos_token_id == 2
    assert codec.eos_ids == {2}
    generation = GenerationConfig.from_pretrained(converted)
    assert generation.eos_token_id == generation.pad_token_id == codec.tokenizer.pad_token_id == 2
    config = json.loads((converted / "config.json").read_text())
    assert config["eos_token_id"] == 2 and config["dtype"] == "bfloat16"
    assert "quantization_config" not in config  # which transformers leaves there


def _backend(folder):
    return AutoTokenizer.from_pretrained(folder).backend_tokenizer


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["in", "Ġ19367"]),
        ("smollm", ["in", "Ġ", "1", "9", "3", "6", "7"]),
        ("llama-bpe", ["in", "Ġ", "193", "67"]),
        ("qwen2", ["in", "Ġ", "1", "9", "3", "6", "7"]),
        ("default", ["in", "Ġ", "193", "67"]),
        (None, ["in", "Ġ", "193", "67"]),  # llama.cpp's own fallback
    ],
)
def test_other_rules(tmp_path, rule, words):
    key = "tokenizer.ggml.pre"
    more, without = ({key: rule}, ()) if rule else ({}, (key,))
    found = _backend(
        made(tmp_path / "tiny", more=more, without=without)
    ).pre_tokenizer.pre_tokenize_str("in 19367")
    assert [w for w, _ in found] == words


def test_texts_come_back_and_the_template_renders(converted):
    codec = Codec.load(converted)
    for text in (SAMPLE, TEXT, " Zoë's naïve\tline\n\n  — 12,345 … , and long ."):
        assert (
            str(codec.decode(codec.encode(text)))
            == text
            == codec.tokenizer.decode(codec.tokenizer.encode(text, add_special_tokens=False))
        )
    prompt = codec.chat([("Who?", False)])
    spelt = codec.tokenizer.decode(prompt)
    assert spelt == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt[0] == 1 and prompt.count(2) == 1


def test_a_tokenizer_that_puts_a_blank_before_a_text_is_converted(tmp_path, monkeypatch):
    """As SentencePiece's are, in files of Llama 2 and Mistral 7B: what comes back has none."""
    letters = [*map(chr, range(33, 127))]
    tokens = [*tiny_gguf.SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters, "▁t", "▁th"]
    monkeypatch.setattr(tiny_gguf, "vocabulary", lambda: (tokens, ["▁ t", "▁t h"]))
    codec = Codec.load(made(tmp_path / "tiny", more={"tokenizer.ggml.model": "llama"}))
    assert codec.tokenizer.tokenize("the")[0] == "▁th"  # the blank
    for text in (SAMPLE, "the", " the", "\nthe"):
        assert str(codec.decode(codec.encode(text))) == text
    assert "".join(codec.cut(SAMPLE, 5)) == SAMPLE


def test_what_the_template_ends_a_message_with_comes_first(tmp_path):
    codec = Codec.load(made(tmp_path / "tiny", more={"tokenizer.ggml.eos_token_id": 0}))
    assert codec.tokenizer.eos_token == "<|im_end|>" and codec.eos_ids == {0, 2}
    codec = Codec.load(made(tmp_path / "base", without=("tokenizer.chat_template",)))
    assert codec.tokenizer.chat_template is None and codec.eos_ids == {2}


def test_tokens_that_the_file_defines_stay_whole_and_padding_is_one_of_its_own(tmp_path):
    tokens, _ = tiny_gguf.vocabulary()
    how = {
        "more": {"test.user_defined": tokens[-1]},
        "without": ("tokenizer.ggml.padding_token_id",),
    }
    tokenizer = AutoTokenizer.from_pretrained(made(tmp_path / "tiny", **how))
    assert tokenizer.get_added_vocab()[tokens[-1]] == len(tokens) - 1 == len(tokenizer) - 1
    assert tokenizer.pad_token == "<|im_end|>"


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("how", [
    {"more": {"general.architecture": "clip"}},
    {"more": {"llama.rope.scaling.type": "yarn"}},
    {"more": {"tokenizer.ggml.pre": "tekken"}},
    {"more": {"tokenizer.chat_template": "{{ raise_exception('never') }}"}},
    {"more": {"tokenizer.chat_template": "{{ messages[0]['role'] }}"}},  # without the text
    {"tensors": {"rope_freqs.weight": torch.ones(8)}},  # would be left out
    {"tensors": {"blk.0.attn_q.bias": torch.ones(64)}},
    {"without": ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id")},  # would never end
])  # fmt: skip
def test_what_would_not_be_read_rightly_is_refused(tmp_path, how):
    write_gguf(tmp_path / "tiny.gguf", **how)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError):
        convert(tmp_path / "tiny.gguf", tmp_path / "folder")


@pytest.mark.parametrize("content", [
    None, b"", b"GG", b"PK\3\4 and so on", *(0.0002, 0.001, 0.05, 0.5, 0.999),
])  # fmt: skip
def test_a_file_that_is_none_or_is_cut_off_is_refused(file, tmp_path, content):
    """A share of the whole file, or its bytes; None: a folder."""
    other = tmp_path / "other.gguf"
    if isinstance(content, float):
        content = file.read_bytes()[: max(5, int(file.stat().st_size * content))]
    other.mkdir() if content is None else other.write_bytes(content)
    with pytest.raises(UserError):
        read_header(other)


def test_a_conversion_that_computes_something_else_is_refused(file, tmp_path, monkeypatch):
    """One weight that was written wrongly is noticed."""
    from models import convert as module

    save = module._save

    def wrong(model, *rest):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 5] += 2.0
        save(model, *rest)

    monkeypatch.setattr(module, "_save", wrong)
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="computes something else"):
        convert(file, tmp_path / "model")


def test_files_beside_it_play_no_part(file, converted, tmp_path):
    """transformers would take a tokenizer.json or a tokenizer_config.json from the same folder."""
    (tmp_path / "tiny.gguf").write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x", "chat_template": "no"}')
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert Codec.load(tmp_path / "model").fingerprint == Codec.load(converted).fingerprint
    assert CHAT == AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
