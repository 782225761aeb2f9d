"""Models written as GGUF: what is read back is the model, what llama.cpp would compute otherwise
is refused. llama.cpp itself: real_gguf.py."""

import pytest
import torch
from tiny_gguf import TEXT, tiny_llama, tiny_model, vocabulary
from tiny_gguf import write_gguf as write_by_hand
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from config.errors import UserError
from config.options import EMBEDDED
from models.convert import SAMPLE, convert, read_header
from models.load import load_model
from models.to_gguf import write_gguf
from tokens.codec import Codec

IDS = torch.tensor([[5, 9, 70, 33, 120, 7, 255, 41]])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tokenizers of two GGUF files, as they are read here."""
    found = {}
    for rule in ("smollm", "qwen2"):
        folder = tmp_path_factory.mktemp(rule)
        arch = {"general.architecture": "qwen2"} if rule == "qwen2" else {}
        model = tiny_model("qwen2") if arch else None
        write_by_hand(folder / "tiny.gguf", model=model, more=arch | {"tokenizer.ggml.pre": rule})
        (folder / "model").mkdir()
        convert(folder / "tiny.gguf", folder / "model")
        found[rule] = AutoTokenizer.from_pretrained(folder / "model")
    return found


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers["smollm"]


def saved(folder, model, tokenizer, dtype=torch.float32):
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "dtype"), [
    ("llama", torch.float32), ("llama", torch.bfloat16), ("mistral", torch.bfloat16),
    ("qwen2", torch.float32), ("qwen3", torch.bfloat16),
], ids=str)  # fmt: skip
def test_what_is_read_back_is_the_model_and_its_tokenizer(tmp_path, tokenizers, kind, dtype):
    rule = "qwen2" if kind.startswith("qwen") else "smollm"
    model = tiny_llama(vocab_size=len(vocabulary()[0])) if kind == "llama" else tiny_model(kind)
    model.config.sliding_window = None
    if (kind, dtype) == ("llama", torch.bfloat16):  # with an output matrix of its own
        sizes = model.config.to_dict() | {"tie_word_embeddings": False}
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    folder = saved(tmp_path, model, tokenizers[rule], dtype)
    write_gguf(folder, "Tiny")
    header = read_header(folder / "model.gguf")
    assert header.fields["general.name"] == "Tiny"
    assert header.fields["tokenizer.ggml.pre"] == rule
    (tmp_path / "again").mkdir()
    convert(folder / "model.gguf", tmp_path / "again")  # which reads weights as bfloat16
    before = load_model(folder, "bfloat16", "cpu").eval()
    after = load_model(tmp_path / "again", "bfloat16", "cpu").eval()
    with torch.no_grad():
        assert torch.equal(before(IDS).logits, after(IDS).logits)
    codec, again = Codec.load(folder), Codec.load(tmp_path / "again")
    assert again.eos_ids == codec.eos_ids == {2}
    for text in (SAMPLE, TEXT, " Zoë's naïve\tline\n\n  — 12,345 …", "<|im_end|>"):
        ids = again.tokenizer.encode(text)
        assert ids == codec.tokenizer.encode(text)
        assert str(again.decode(ids)) == str(codec.decode(ids))
        assert again.chat([(text, False)]) == codec.chat([(text, False)])


def test_weights_are_stored_in_their_own_type(tmp_path, tokenizer):
    from gguf import GGUFReader

    model = tiny_llama(vocab_size=len(vocabulary()[0]) + 5)  # rows without a token
    for dtype, matrices in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        write_gguf(saved(tmp_path, model, tokenizer, dtype), "Tiny")
        tensors = GGUFReader(tmp_path / "model.gguf").tensors
        assert {t.tensor_type.name for t in tensors if len(t.shape) > 1} == {matrices}
        assert {t.tensor_type.name for t in tensors if len(t.shape) == 1} == {"F32"}
    header = read_header(tmp_path / "model.gguf")
    assert header.tokens[-5:] == [f"[PAD{len(header.tokens) - k}]" for k in range(5, 0, -1)]
    assert header.tokens_of_type(3) == ["<unk>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("change", [
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    {"attention_bias": True},
    {"hidden_act": "gelu"},
    {"kind": "mistral", "sliding_window": 64},
    {"kind": "gpt2"},
    {"tokenizer": EMBEDDED},  # no byte-level BPE
], ids=str)  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, tokenizer, change):
    change = dict(change)
    kind, other = change.pop("kind", "llama"), change.pop("tokenizer", None)
    sizes = tiny_llama(vocab_size=500).config.to_dict() | change
    sizes.pop("model_type")
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=500)),
    }[kind]()
    saved(tmp_path, model, AutoTokenizer.from_pretrained(other) if other else tokenizer)
    with pytest.raises(UserError):
        write_gguf(tmp_path, "Tiny")
    assert not (tmp_path / "model.gguf").exists()
