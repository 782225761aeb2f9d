"""Benchmarks of several parts: each has a process of its own and is kept as it ends.

Holds: `Benchmark`, `streamed`. Leaves out: what is measured (gpu.py, engines/vllm_colocated.py).
Exercise it: `python -m bench.gpu --tiny --part lora`. Read next: gpu.py.

Time on a GPU is lent by the minute. bench/results/NAME.json is replaced after each part, so that
a kill loses the part that runs and no other, and the next call goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench import common
from config.errors import UserError


def streamed(command: Sequence[str]) -> tuple[dict | None, str]:
    """Run a command and pass on what it prints, line by line, as it comes.

    Returns the JSON of the last line of its output that begins with "{", or None if it failed or
    there is none; and the last lines of its errors.
    """
    last, errors = "", deque(maxlen=20)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=common.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:

        def pass_on() -> None:
            for text in process.stderr:
                print(text, end="", file=sys.stderr, flush=True)
                errors.append(text)

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        try:
            for text in process.stdout:
                print(text, end="", flush=True)
                last = text if text.startswith("{") else last
            thread.join()
        except BaseException:
            process.terminate()
            raise
    said = "".join(errors).strip()
    if process.returncode or not last:
        return None, said or f"exit code {process.returncode}, and it printed no result"
    return json.loads(last), said


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of several parts. `main` is its command line."""

    name: str  # of its module in bench/ and of its result
    parts: dict[str, Callable[[bool], dict]]  # name -> what measures it; the argument: tiny
    show: Callable[[str, dict], None]  # prints the table of one part
    lines: Callable[[str, dict], list[dict]]  # of one part: against what was asked (`common.line`)
    module: str = ""  # if it is another than bench.NAME

    def kept(self) -> dict[str, dict]:
        """Read the results so far: part -> result, in the order of the parts."""
        path = common.RESULTS / f"{self.name}.json"
        found = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
        return {part: found[part] for part in self.parts if part in found}

    def keep(self, part: str, result: dict) -> None:
        """Put a part's result beside the others'. A failure never replaces numbers."""
        found = self.kept()
        if "failed" in result and "failed" not in found.get(part, {"failed": ""}):
            return
        found[part] = result
        parts = {name: found[name] for name in self.parts if name in found}
        whole = {"benchmark": self.name, "lines": self.all_lines(parts), "parts": parts}
        common.write(common.RESULTS / f"{self.name}.json", whole)

    def all_lines(self, results: dict[str, dict]) -> list[dict]:
        """Say of all parts what was measured and what was asked."""
        out = []
        for part, result in results.items():
            if "failed" in result:
                reason = result["failed"].splitlines()[-1]
                out.append(common.line(part, f"failed: {reason}", "", False))
            else:
                out += self.lines(part, result)
        return out

    def here(self, part: str, tiny: bool) -> dict:
        """Measure one part in this process, show it and keep it."""
        start = time.perf_counter()
        try:
            result = self.parts[part](tiny)
        except UserError as error:
            raise SystemExit(str(error)) from error
        result |= {"wall_s": round(time.perf_counter() - start, 1), "machine": common.machine()}
        self.show(part, result)
        if not tiny:
            self.keep(part, result)
        print(json.dumps(result), flush=True)
        return result

    def main(self, arguments: Sequence[str] | None = None) -> dict[str, dict]:
        """Measure one part here, or each missing part in a process of its own; returns the results.

        Ends with exit code 1 if a part has failed.
        """
        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}")
        add = parser.add_argument
        add(
            "--tiny",
            action="store_true",
            help="small, on whatever device there is; keeps no result",
        )
        add(
            "--part",
            choices=self.parts,
            help="this one alone, here, also if there is a result of it",
        )
        add("--again", action="store_true", help="all parts, not only those without a result")
        args = parser.parse_args(arguments)
        if not args.tiny and not torch.cuda.is_available():
            raise SystemExit(f"bench.{self.name} needs a GPU; --tiny shows on a CPU that it runs.")
        if args.part:
            return {args.part: self.here(args.part, args.tiny)}
        results = (
            {}
            if args.tiny or args.again
            else {p: r for p, r in self.kept().items() if "failed" not in r}
        )
        for part in self.parts:
            if part in results:
                print(f"{part}: there is a result", flush=True)
                continue
            print(f"{part} ...", flush=True)
            module = self.module or f"bench.{self.name}"
            found, said = streamed(
                [sys.executable, "-m", module, "--part", part, *["--tiny"] * args.tiny]
            )
            results[part] = found or {"failed": said[-800:]}
            if not found and not args.tiny:
                self.keep(part, results[part])
        results = {part: results[part] for part in self.parts}
        # what is tiny is held against nothing
        held = {p: r for p, r in results.items() if not args.tiny or "failed" in r}
        lines = self.all_lines(held)
        rows = [(x["what"], x["measured"], x["bar"], "" if x["met"] else "missed") for x in lines]
        if rows:
            common.table(self.name, ("measured", "value", "asked", ""), rows)
        print(json.dumps(results), flush=True)
        if any("failed" in result for result in results.values()):
            raise SystemExit(1)
        return results
