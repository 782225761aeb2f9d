"""Seconds to the first line of every command, and to the refusal of thirty mistakes.

Holds: the measurement. Leaves out: the commands and mistakes (bench/first_line.yaml).
Exercise it: `python -m bench.first_line [--rounds 3] [--checkout FOLDER] [PART OF A LINE ...]`.
Read next: config/flags.py.

Each is a process of its own, in a new folder, with its modules compiled before, as they are from a
user's second call on. Other work on the machine stretches wall time, so that the processor's
seconds, user and system, stand beside it. A refusal is one that ends with status 2; any other end
is said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from config.files import read_yaml

ROOT = Path(__file__).parent.parent
NOWHERE = "http://127.0.0.1:9"  # where nothing listens: no network


def run(line: str, checkout: Path, whole: bool) -> tuple[float, float, str, int]:
    """Run a command to its first line with letters, or to its end (`whole`).

    Returns wall and CPU seconds, the first or the last such line, and the status.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("\\n", "\n"), encoding="utf-8")
        words = [sys.executable, str(checkout / "cli.py"), *shlex.split(line)]
        gone = ("HF_HUB_OFFLINE", "PYTHONDONTWRITEBYTECODE")
        environment = {k: v for k, v in os.environ.items() if k not in gone}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir(), "memagent-bench"))
        environment |= {"HF_ENDPOINT": NOWHERE, "HF_HOME": f"{folder}/hub", "COLUMNS": "200"}
        start = time.perf_counter()
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = ""
        for raw in process.stdout:
            if re.search(r"\w", text := raw.decode(errors="replace")):
                said = text
                if not whole:
                    break
        wall = time.perf_counter() - start
        if not whole:
            process.kill()
        _, status, used = os.wait4(process.pid, 0)
        process.stdout.close()
        process.returncode = os.waitstatus_to_exitcode(status)
    return wall, used.ru_utime + used.ru_stime, said.strip(" │\n"), process.returncode


def measured(lines: list[str], rounds: int, checkout: Path, whole: bool) -> list[dict]:
    """Run every line so many times, in turns; returns medians, and what is said at last."""
    runs = [[run(line, checkout, whole) for line in lines] for _ in range(rounds)]
    found = []
    for line, results in zip(lines, zip(*runs, strict=True), strict=True):
        wall, cpu, said, status = zip(*results, strict=True)
        refused = "" if not whole or status[-1] == 2 else f"[status {status[-1]}] "
        found.append({"command": line, "wall_s": round(median(wall), 2),
                      "cpu_s": round(median(cpu), 2), "said": refused + said[-1]})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose cli.py is run")
    parser.add_argument("parts", nargs="*", help="only lines that contain one of these")
    given, load = parser.parse_args(), os.getloadavg()
    results = {}
    for kind in ("commands", "mistakes"):
        lines = [
            each
            for each in LISTED[kind]
            if not given.parts or any(part in each for part in given.parts)
        ]
        results[kind] = measured(lines, given.rounds, given.checkout.absolute(), kind == "mistakes")
        table = Table("", "wall s", "CPU s", "said", title=f"{kind}, median of {given.rounds}")
        for found in results[kind]:
            table.add_row(*(str(value)[:90] for value in found.values()))
        Console(width=200).print(table)
    loads = [round(value, 1) for value in (load[0], os.getloadavg()[0])]
    print(json.dumps(results | {"load": loads, "cores": os.cpu_count()}))


LISTED = read_yaml(Path(__file__).with_suffix(".yaml"))
FILES = LISTED["files"]

if __name__ == "__main__":
    main()
