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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from config.foreign import from_json
from report.summary import write_text

NAME = "machine.json"
PACKAGES = ("torch", "transformers", "lightning", "peft", "bitsandbytes", "vllm")  # if loaded
ROOT = Path(__file__).resolve().parent.parent


@cache
def _commit() -> str:
    """Return the commit of this checkout, with + where files differ from it; "" without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} of this checkout"


def note_machine(folder: Path) -> None:
    """Write the machine of this process, its code, and how long it has taken so far."""
    torch = sys.modules.get("torch")
    on_gpu = torch and torch.cuda.is_initialized()
    gib = psutil.virtual_memory().total / 2**30
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"
    machine += f", {torch.cuda.get_device_name()}" if on_gpu else ""
    packages = [f"Python {platform.python_version()}"]
    packages += [_version(name) for name in PACKAGES if name in sys.modules]
    noted = {
        "machine": machine, "commit": _commit(), "versions": ", ".join(packages),
        "ended": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(time.time() - psutil.Process().create_time()),
    }  # fmt: skip
    write_text(folder / NAME, json.dumps(noted) + "\n")


def foot(folder: Path, tokens: Mapping[str, float], readings: int = 0) -> str:
    """Return the foot of a page: what `note_machine` has noted, none of an earlier version's run,
    and tokens by what was done with them, such as {"read": 12345}."""
    parts = []
    try:
        noted = from_json((folder / NAME).read_bytes())
        took = timedelta(seconds=int(noted["seconds"]))
        parts.append(
            "{machine}; commit {commit}; {versions}; last call until {ended}".format(**noted)
        )
        parts.append(f"it took {took} hours")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    amounts = [f"{round(n):,} tokens {done}" for done, n in tokens.items() if n]
    of = [f"in {readings:,} readings"] * bool(readings and amounts)
    return "; ".join([*parts, " ".join([", ".join(amounts), *of])]).strip("; ")
