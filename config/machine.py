"""What the settings of a command need and this machine lacks, said before torch is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from config.errors import UserError
from config.realmodels import HUB, PACKAGED, base_of, check_model, named_folder

HUB_S = 3.0
"""Longest time in which the hub must take a connection."""


def check_here(config: object) -> None:
    """Raise a UserError for what the settings of a command name and this machine lacks: a device,
    vLLM, a model's files (`check_model`) or one of the hub (`check_hub`). No torch is loaded."""
    if _lacks(config.device):
        raise UserError(f"No device {config.device} was found; use --device cpu.")
    if getattr(config, "endpoint", ()):
        return
    if config.engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise UserError(
            "The engine vllm is not installed: pip install -r requirements-gpu.txt, in an "
            "environment of its own, or use --engine transformers."
        )
    for name in filter(None, (config.model, getattr(config, "untrained", ""))):
        check_model(name, tokenizer=True)
        check_hub(base_of(name))


def _lacks(device: str) -> bool:
    """Tell whether a device is certainly none of this machine's, or of the installed torch."""
    if device == "mps":
        return sys.platform != "darwin"
    found = importlib.util.find_spec("torch") if device == "cuda" else None
    version = Path(found.origin).with_name("version.py") if found and found.origin else Path()
    if not version.is_file():
        return False
    return not re.search(r"^(cuda|hip)\b.*= '", version.read_text(encoding="utf-8"), re.M)


def check_hub(model: str | Path) -> None:
    """Raise a UserError for a model of the hub that is not in its cache and cannot be fetched now.

    Where the hub does not answer, what is in the cache is taken from there without asking it again:
    each file would otherwise be tried for, five times over.
    """
    name = str(model)
    if name in PACKAGED or named_folder(model).exists() or not HUB.fullmatch(name):
        return
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        if _answers(constants.ENDPOINT):
            return
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that begin from here
        why = f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached"
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    if not any(cached.glob("*/config.json")):
        raise UserError(
            f"{model} is not in the cache of the hub, and {why}: connect, or give a model folder, "
            "or a name that needs no hub, such as smollm2; --served-as names a server's model."
        )


def _answers(url: str) -> bool:
    """Tell whether a server takes a connection, or a proxy stands before it."""
    place, found = urlsplit(url), threading.Event()
    if place.scheme in getproxies():
        return True

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((place.hostname, place.port or 443), HUB_S).close()
            found.set()

    trial = threading.Thread(target=connect, daemon=True)  # a look-up of a name has no time limit
    trial.start()
    trial.join(HUB_S)
    return found.is_set()
