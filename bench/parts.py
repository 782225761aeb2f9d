"""Benchmarks of several parts: each part has its own process, and its result is saved at once.

Holds: `Benchmark`, `streamed`. Leaves out: the measurements (gpu.py, colocated.py, real.py).
Exercise it: `python -m bench.gpu --tiny --part lora`. Read next: gpu.py.

Time on a GPU is often rented by the minute. bench/results/NAME.json is replaced after each part, so
a kill loses no part but the running one, and the next call continues with the missing parts.
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
    """Run a command and pass its output on, line by line, as it comes.

    Returns the JSON of the last line of output that begins with "{", or None if the command failed
    or there is none; and the last lines of its errors.
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
    tail = "".join(errors).strip()
    if process.returncode or not last:
        return None, tail or f"exit code {process.returncode}, and it printed no result"
    return json.loads(last), tail


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of several parts. `main` is its command line."""

    name: str  # of its module in bench/ and of its result
    parts: dict[str, Callable[[bool], dict]]  # name -> its measurement; the argument: tiny
    show: Callable[[str, dict], None]  # prints the table of one part
    lines: Callable[[str, dict], list[dict]]  # of one part, against the bars (`common.line`)
    module: str = ""  # empty = bench.NAME
    needs_gpu: bool = True  # unless tiny

    def saved(self) -> dict[str, dict]:
        """Read the results so far: part -> result, in the order of the parts."""
        path = common.RESULTS / f"{self.name}.json"
        if not path.exists():
            return {}
        results = json.loads(path.read_text(encoding="utf-8"))["parts"]
        return {part: results[part] for part in self.parts if part in results}

    def save(self, part: str, result: dict) -> None:
        """Save a part's result beside the others'. A failure never replaces numbers."""
        results = self.saved()
        if "failed" in result and "failed" not in results.get(part, {"failed": ""}):
            return
        results[part] = result
        parts = {name: results[name] for name in self.parts if name in results}
        whole = {"benchmark": self.name, "lines": self.all_lines(parts), "parts": parts}
        common.write(common.RESULTS / f"{self.name}.json", whole)

    def all_lines(self, results: dict[str, dict]) -> list[dict]:
        """List the lines of all parts; of a failed part, the end of its error."""
        out = []
        for part, result in results.items():
            if "failed" in result:
                reason = result["failed"].splitlines()[-1]
                out.append(common.line(part, f"failed: {reason}", "", False))
            else:
                out += self.lines(part, result)
        return out

    def here(self, part: str, tiny: bool) -> dict:
        """Measure one part in this process; print its table and, unless tiny, save its result."""
        start = time.perf_counter()
        try:
            result = self.parts[part](tiny)
        except UserError as error:
            raise SystemExit(str(error)) from error
        result |= {"wall_s": round(time.perf_counter() - start, 1), "machine": common.machine()}
        self.show(part, result)
        if not tiny:
            self.save(part, result)
        print(json.dumps(result), flush=True)
        return result

    def main(self, arguments: Sequence[str] | None = None) -> dict[str, dict]:
        """Measure one part here, or each missing part in its own process; returns the results.

        Ends with exit code 1 if a part has failed.
        """
        args = self._parse(arguments)
        if self.needs_gpu and not args.tiny and not torch.cuda.is_available():
            raise SystemExit(f"bench.{self.name} needs a GPU; --tiny shows on a CPU that it runs.")
        if args.part:
            return {args.part: self.here(args.part, args.tiny)}
        results = {}
        if not args.tiny and not args.again:
            results = {p: r for p, r in self.saved().items() if "failed" not in r}
        for part in self.parts:
            if part in results:
                print(f"{part}: there is a result", flush=True)
                continue
            print(f"{part} ...", flush=True)
            results[part] = self._elsewhere(part, args.tiny)
        results = {part: results[part] for part in self.parts}
        # tiny results are compared with no bar
        compared = {p: r for p, r in results.items() if not args.tiny or "failed" in r}
        lines = self.all_lines(compared)
        rows = [(x["what"], x["measured"], x["bar"], "" if x["met"] else "missed") for x in lines]
        if rows:
            common.table(self.name, ("measured", "value", "asked", ""), rows)
        print(json.dumps(results), flush=True)
        if any("failed" in result for result in results.values()):
            raise SystemExit(1)
        return results

    def _parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}")
        help = "small, on whatever device there is; saves no result"
        parser.add_argument("--tiny", action="store_true", help=help)
        help = "this one alone, in this process, even if there is a result of it"
        parser.add_argument("--part", choices=self.parts, help=help)
        help = "all parts, not only those without a result"
        parser.add_argument("--again", action="store_true", help=help)
        return parser.parse_args(arguments)

    def _elsewhere(self, part: str, tiny: bool) -> dict:
        """Measure one part in a process of its own, which saves its result unless it fails."""
        command = [sys.executable, "-m", self.module or f"bench.{self.name}", "--part", part]
        if tiny:
            command.append("--tiny")
        result, errors = streamed(command)
        if result:
            return result
        failure = {"failed": errors[-800:]}
        if not tiny:
            self.save(part, failure)
        return failure
