"""GGUF files: the weights are the file's, each trap is mended, what is not read is refused."""

import json
from pathlib import Path

import pytest
import tiny_gguf
import torch
from tiny_gguf import CHAT, TEXT, rounded, stored, tiny_llama, tiny_model, vocabulary, write_gguf
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


def test_fixture_is_the_models_own_permutation():
    """The file holds other rows than the model: a loader that does not undo that would be seen."""
    model = tiny_llama()
    q = model.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(stored(model)["blk.0.attn_q.weight"], q)


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
    assert GenerationConfig.from_pretrained(converted).eos_token_id == 2
    config = json.loads((converted / "config.json").read_text())
    assert config["eos_token_id"] == 2 and config["dtype"] == "bfloat16"
    assert "quantization_config" not in config  # which transformers leaves there


def test_padding_is_a_token_of_the_model(file, converted, tmp_path):
    assert AutoTokenizer.from_pretrained(converted).pad_token_id == 2
    assert GenerationConfig.from_pretrained(converted).pad_token_id == 2
    folder = made(tmp_path / "none", without=("tokenizer.ggml.padding_token_id",))
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<|im_end|>"


def test_blanks_before_punctuation_survive_decoding(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.clean_up_tokenization_spaces is False
    ids = tokenizer.encode("opened , and long .", add_special_tokens=False)
    assert tokenizer.decode(ids) == "opened , and long ."


def test_text_is_cut_into_words_by_the_models_own_rule(file, converted):
    text = "in  19\n\n36"
    words = [w for w, _ in _backend(converted).pre_tokenizer.pre_tokenize_str(text)]
    assert words == ["in", "ĠĠ", "1", "9", "ĊĊ", "3", "6"]
    unmended = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer
    assert [w for w, _ in unmended.pre_tokenizer.pre_tokenize_str(text)] != words  # the trap


def _backend(folder):
    return AutoTokenizer.from_pretrained(folder).backend_tokenizer


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["in", "Ġ19367"]),
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
    for text in (SAMPLE, TEXT, "Zoë's naïve\tline\n\n  — 12,345 …"):
        assert str(codec.decode(codec.encode(text))) == text
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


def test_user_defined_tokens_stay_whole(tmp_path):
    tokens, _ = vocabulary()
    folder = made(tmp_path / "tiny", more={"test.user_defined": tokens[-1]})
    added = AutoTokenizer.from_pretrained(folder).get_added_vocab()
    assert added[tokens[-1]] == len(tokens) - 1 and len(added) == 4


def test_what_the_template_ends_a_message_with_comes_first(tmp_path):
    codec = Codec.load(made(tmp_path / "tiny", more={"tokenizer.ggml.eos_token_id": 0}))
    assert codec.tokenizer.eos_token == "<|im_end|>" and codec.eos_ids == {0, 2}
    codec = Codec.load(made(tmp_path / "base", without=("tokenizer.chat_template",)))
    assert codec.tokenizer.chat_template is None and codec.eos_ids == {2}


def test_sizes_are_read_without_the_weights(file):
    model = tiny_llama(vocab_size=len(vocabulary()[0]))
    g = geometry(str(file))
    assert g.weights == sum(p.numel() for p in model.parameters())
    assert (g.layers, g.kv_heads, g.tied, g.vocab) == (2, 2, True, len(vocabulary()[0]))


# ---------------------------------------------------------------- refused


def refused(path) -> str:
    folder = path.parent / "refused"
    folder.mkdir(exist_ok=True)
    with pytest.raises(UserError) as error:
        convert(path, folder)
    return str(error.value)


def test_no_gguf_file(tmp_path):
    other = tmp_path / "other.gguf"
    for content in (b"", b"GG", b"PK\3\4 and so on"):
        other.write_bytes(content)
        assert "no GGUF file" in refused(other)
    refused(tmp_path / "missing.gguf")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf")


@pytest.mark.parametrize("share", [0.0002, 0.001, 0.05, 0.5, 0.999])
def test_a_file_cut_off_anywhere(file, tmp_path, share):
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: max(5, int(len(content) * share))])
    assert "damaged or cut-off" in refused(cut)
    assert read_header(file).elements  # the whole one is read


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general.architecture": "clip"}, "architecture clip"),
        ({"llama.rope.scaling.type": "yarn"}, "stretches its positions (yarn)"),
        ({"tokenizer.ggml.pre": "tekken"}, "the rule 'tekken'"),
        ({"tokenizer.chat_template": "{{ raise_exception('never') }}"}, "cannot be rendered"),
        ({"tokenizer.chat_template": "{{ messages[0]['role'] }}"}, "drops the user's message"),
    ],
)
def test_what_transformers_would_not_read_is_refused(tmp_path, more, said):
    write_gguf(tmp_path / "tiny.gguf", more=more)
    assert said in refused(tmp_path / "tiny.gguf")


def test_weights_that_would_be_left_out(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": torch.ones(8)})
    assert "rope_freqs.weight among them" in refused(tmp_path / "tiny.gguf")
    bias = {"blk.0.attn_q.bias": torch.ones(64)}
    write_gguf(tmp_path / "bias.gguf", tensors=bias)
    assert "some would be left out" in refused(tmp_path / "bias.gguf")


def test_a_model_that_never_ends(tmp_path):
    without = ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id")
    write_gguf(tmp_path / "tiny.gguf", without=without)
    assert "no response would end" in refused(tmp_path / "tiny.gguf")


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
