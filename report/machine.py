"""The foot of a page: on which machine a run was made, by which code, and what it took.

FOLDER/machine.json is of the last call that filled the folder.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import psutil

from config.foreign import read_json
from models.dtypes import taken
from report.summary import write_text

NAME, AUTO = "machine.json", "with --dtype auto"
PACKAGES = ("torch", "transformers", "vllm")  # if they are loaded
ROOT = Path(__file__).resolve().parent.parent


@cache
def _commit() -> str:
    """Return the commit of this checkout, with + where its files differ; unknown without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def note_machine(folder: Path) -> None:
    """Write the machine of this process, its code, and how long it has taken so far."""
    torch, gib = sys.modules.get("torch"), psutil.virtual_memory().total / 2**30
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_initialized() else "no GPU"
    loaded = [f"{name} {sys.modules[name].__version__}" for name in PACKAGES if name in sys.modules]
    system = f"{platform.system()} {platform.machine()}"
    # where nothing was chosen anew, what goes on has what was chosen before
    auto = "; ".join(f"{model} in {why}" for model, why in taken.items())
    auto = auto or _noted(folder).get(AUTO, "")
    seconds = round(time.time() - psutil.Process().create_time())
    noted = {
        "on": f"{system}, {os.cpu_count()} cores, {gib:.0f} GiB, {gpu}",
        "by": f"commit {_commit()}",
        "with": ", ".join([f"Python {platform.python_version()}", *loaded]),
        AUTO: auto,
        "until": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "last call took": str(timedelta(seconds=seconds)),
    }
    known = {name: text for name, text in noted.items() if text}
    write_text(folder / NAME, json.dumps(known) + "\n")


def foot(folder: Path, tokens: Mapping[str, float], readings: int) -> str:
    """Return the foot of a page: what `note_machine` has noted, nothing of an earlier version's
    run, and the tokens of all readings by what was done with them, such as {"read": 12345}."""
    parts = [f"{name} {text}" for name, text in _noted(folder).items()]
    if readings:
        parts.append(f"{readings:,} readings")
    if amounts := [f"{n:,.0f} tokens {done}" for done, n in tokens.items() if n]:
        parts.append(", ".join(amounts))
    return "; ".join(parts)


def _noted(folder: Path) -> dict[str, str]:
    """Return what a folder says of its machine, {} where that is not there or is damaged."""
    try:
        noted = read_json(folder / NAME)
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
