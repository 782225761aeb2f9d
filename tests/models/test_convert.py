"""The packaged model's kind of GGUF file: the weights are the file's, each trap is mended."""

import json

import pytest
import torch
from tiny_gguf import SPECIAL, TEXT, rounded, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from config.errors import UserError
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


def test_the_end_the_padding_and_the_words_are_mended(tmp_path):
    file, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_gguf(file, "Q8_0")
    folder.mkdir()
    convert(file, folder)
    unmended = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert unmended.eos_token == "<|im_start|>"  # the trap: nothing would ever stop
    codec = Codec.load(folder)
    tokenizer = codec.tokenizer
    assert tokenizer.eos_token == "<|im_end|>" and codec.eos_ids == {2}
    generation, config = (
        GenerationConfig.from_pretrained(folder),
        json.loads((folder / "config.json").read_text()),
    )
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id, config["eos_token_id"]]
    assert ends == [generation.eos_token_id, generation.pad_token_id, 2] == [2] * 3
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
        convert(file, folder)
