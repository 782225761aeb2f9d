"""The packaged model's kind of GGUF file: the weights are the file's, each trap is mended."""

import json

import pytest
import torch
from tiny_gguf import SPECIAL, TEXT, rounded, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.convert import convert
from models.load import load_model
from tokens.codec import Codec

IDS = torch.tensor([[5, 9, 70, 33, 120, 7, 255, 41]])


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
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


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, "Q8_0")
    return path


@pytest.fixture(scope="module")
def converted(file):
    folder = file.with_suffix("")
    folder.mkdir()
    convert(file, folder)
    return folder


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
    assert "quantization_config" not in config


def test_texts_come_back_and_the_template_renders(converted):
    codec = Codec.load(converted)
    cut = codec.tokenizer.backend_tokenizer.pre_tokenizer
    assert [word for word, _ in cut.pre_tokenize_str("in 193")] == ["in", "Ġ", "1", "9", "3"]
    for text in (TEXT, " Zoë's naïve\tline\n\n  — 12,345 … , and long ."):
        assert (
            str(codec.decode(codec.encode(text)))
            == text
            == codec.tokenizer.decode(codec.tokenizer.encode(text, add_special_tokens=False))
        )
    assert codec.tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]
    prompt = codec.chat([("Who?", False)])
    spelt = codec.tokenizer.decode(prompt)
    assert spelt == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt[0] == 1 and prompt.count(2) == 1
