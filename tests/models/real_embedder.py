"""Folders of sentence-transformers, by hand, and the one that can be fetched: `make test-real`.

They run where requirements-embeddings.txt is installed. The cache is the user's own.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_search import LOCOMO, recalls
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from agents.search import Search
from config.errors import UserError
from config.realmodels import cache_folder
from models.embedder import embedder_of, fetch_embedder

TEXTS = ["ida is in lima", "ida", "otto has a dog and ann has a cat", "ann met otto", "a a a a a a"]


def unit(row) -> np.ndarray:
    row = np.asarray(row, np.float64)
    return row / np.linalg.norm(row)


def write_tokenizer(folder: Path) -> None:
    words = "[PAD] [UNK] [CLS] [SEP] ida is in lima otto has a dog and ann cat met find".split()
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)


def write_json(folder: Path, name: str, value) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


@pytest.fixture(params=["bert", "llama"])
def folder(request, tmp_path):
    """A tiny random model with absolute or rotary positions, and its tokenizer."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    bert = request.param == "bert"
    model = BertModel(BertConfig(**sizes)) if bert else LlamaModel(LlamaConfig(**sizes))
    path = tmp_path / "model"
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def states(folder: Path, text: str, most: int = 32) -> np.ndarray:
    """The last states of one text alone, without any padding."""
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    ids = ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


POOLED = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "last": lambda s: s[-1]}


PLAIN = {"pooling_mode_mean_tokens": True}


def describe(folder: Path, pooling: dict, prompts: dict, most: int = 32) -> Path:
    """Write the files by which sentence-transformers knows a folder."""
    kinds = ("Transformer", "Pooling", "Normalize")
    write_json(folder, "modules.json", [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)
    ])  # fmt: skip
    write_json(folder, "1_Pooling/config.json", {"word_embedding_dimension": 16} | pooling)
    write_json(folder, "config_sentence_transformers.json", {"prompts": prompts})
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": most})
    (folder / "2_Normalize").mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("pooling, mode", [
    ("mean", PLAIN), ("cls", {"pooling_mode_cls_token": True}),
    ("last", {"pooling_mode_lasttoken": True, "include_prompt": True}),
    ("last", {"pooling_mode": "lasttoken", "embedding_dimension": 16}),
])  # fmt: skip
def test_the_folders_own_files_say_how_it_embeds(folder, pooling, mode):
    if pooling != "mean":
        mode = {"pooling_mode_mean_tokens": False} | mode
    describe(folder, mode, {"query": "find ", "document": "a "}, most=5)
    embedder, text = embedder_of(f"hf:{folder}"), "otto has a dog and ann"
    assert embedder.dim == 16 and embedder.embed([]).shape == (0, 16)
    for query, before in ((True, "find "), (False, "a ")):
        wanted = unit(POOLED[pooling](states(folder, before + text, most=5)))
        assert embedder.embed([text], query)[0] == pytest.approx(wanted, abs=1e-5)
    rows = embedder.embed(TEXTS)  # padding does not change them
    assert rows.dtype == np.float32 and rows.shape == (5, 16)
    for row, text in zip(rows, TEXTS, strict=True):
        assert embedder.embed([text])[0] == pytest.approx(row, abs=1e-5)


def test_texts_that_are_not_read_to_their_end_are_told(folder):
    embedder = embedder_of(f"hf:{describe(folder, PLAIN, {'query': 'find '}, most=6)}")
    texts = ["ida is in lima", "ida is in lima otto", "ida"]  # 6, 7 and 3 tokens
    assert embedder.cut(texts) == [False, True, False]
    assert embedder.cut(texts, query=True) == [True, True, False]
    whole, cut = embedder.embed(texts[:2])
    assert whole == pytest.approx(cut, abs=1e-5)  # and so it is
    assert embedder.cut([]) == []


def weights(change):
    def changed(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return changed


def without_a_layer(state):
    return {name: value for name, value in state.items() if "layers.1" not in name
            and "layer.1" not in name}  # fmt: skip


def in_every_layer(state):
    return {name: value[:-1].clone() if value.ndim == 2 else value for name, value in state.items()}


@pytest.mark.parametrize("change", [
    lambda f: weights(lambda state: {n: torch.zeros_like(w) for n, w in state.items()})(f),
    lambda f: (f / "modules.json").write_text("{"),
    lambda f: (f / "model.safetensors").unlink(),
    lambda f: (f / "model.safetensors").write_bytes(b"x" * 50),
    lambda f: (f / "tokenizer.json").unlink(),
    lambda f: (f / "config.json").unlink(),
    lambda f: (f / "config.json").write_text("{}"),
    weights(without_a_layer),
    weights(in_every_layer),
])  # fmt: skip
def test_a_damaged_folder_is_refused(folder, change):
    """Nothing is made up: transformers alone would fill in random weights."""
    assert embedder_of(f"hf:{describe(folder, PLAIN, {})}").dim == 16
    change(folder)
    with pytest.raises(UserError):
        embedder_of(f"hf:{folder}").embed(["ida"])


def test_a_folder_runs_no_code_and_nobody_is_asked_whether_it_may(folder, monkeypatch):
    describe(folder, PLAIN, {})
    (folder / "notes.py").write_text("from pathlib import Path\nPath('mark').touch()\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda words: "y")
    own = {"auto_map": {"AutoConfig": "notes.Mine", "AutoTokenizer": ["notes.Mine", None]}}
    write_json(folder, "config.json", {"model_type": "mine"} | own)
    write_json(folder, "tokenizer_config.json", own)
    settings = {"trust_remote_code": True}
    write_json(folder, "sentence_bert_config.json", dict.fromkeys(
        ("model_args", "config_args", "tokenizer_args"), settings))  # fmt: skip
    with pytest.raises(UserError, match="cannot be loaded"):
        embedder_of(f"hf:{folder}")
    assert not (folder / "mark").exists()


@pytest.mark.skipif(not LOCOMO.is_file(), reason=f"LoCoMo is not at {LOCOMO}")
def test_dated_observations_of_locomo_are_found_as_often_as_measured_elsewhere():
    """It takes a minute or two: 4,081 texts are embedded."""
    embedder = embedder_of(f"hf:{fetch_embedder(cache_folder())}")
    assert embedder.dim == 384
    dense = Search("dense", embedder)
    assert recalls(dense, "dated", (5, 10))[0] == pytest.approx((0.527, 0.601), abs=0.01)
