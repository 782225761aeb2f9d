"""Say at the foot of a page on which machine a run was made, by which code, and what it took.

Holds: `note_machine`, `foot`. Leaves out: the page (report/page.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

    FOLDER/machine.json   of the last call that filled the folder, written with each of its pages
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

from config.foreign import from_json
from models.dtypes import taken
from report.summary import write_text

NAME, AUTO = "machine.json", "with --dtype auto"
PACKAGES = ("torch", "transformers", "vllm")  # if they are loaded
ROOT = Path(__file__).resolve().parent.parent


@cache
def _commit() -> str:
    """Return the commit of this checkout, with + where its files differ; "" without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def note_machine(folder: Path) -> None:
    """Write the machine of this process, its code, and how long it has taken so far."""
    torch, gib = sys.modules.get("torch"), psutil.virtual_memory().total / 2**30
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_initialized() else "no GPU"
    loaded = [f"{name} {sys.modules[name].__version__}" for name in PACKAGES if name in sys.modules]
    seconds = round(time.time() - psutil.Process().create_time())
    # where nothing was chosen anew, what goes on has what was chosen before
    auto = "; ".join(f"{model} in {why}" for model, why in taken.items())
    auto = auto or _noted(folder).get(AUTO)
    noted = {
        "on": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB, "
        f"{gpu}",
        "by": f"commit {_commit() or 'unknown'}",
        "with": ", ".join([f"Python {platform.python_version()}", *loaded]),
        **({AUTO: auto} if auto else {}),
        "until": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "last call took": str(timedelta(seconds=seconds)),
    }
    write_text(folder / NAME, json.dumps(noted) + "\n")


def foot(folder: Path, tokens: Mapping[str, float], readings: int) -> str:
    """Return the foot of a page: what `note_machine` has noted, nothing of an earlier version's
    run, and the tokens of all readings by what was done with them, such as {"read": 12345}."""
    parts = [f"{name} {text}" for name, text in _noted(folder).items()]
    amounts = [f"{n:,.0f} tokens {done}" for done, n in tokens.items() if n]
    parts += [f"{readings:,} readings"] * bool(readings) + [", ".join(amounts)] * bool(amounts)
    return "; ".join(parts)


def _noted(folder: Path) -> dict[str, str]:
    """Return what a folder says of its machine, {} where that is not there or is damaged."""
    try:
        noted = from_json((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
