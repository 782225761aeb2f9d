"""Benchmarks of several parts: each part has its own process, and its result is saved at once.

Holds: `Benchmark`, `limited`, `left`, `streamed`. Leaves out: the measurements (gpu.py, real.py).
Exercise it: `python -m bench.gpu lora --tiny`. Read next: gpu.py.

Time on a GPU is often rented by the minute. bench/results/NAME.json is replaced after each part,
and as a part with a limit of its time goes on: a kill loses only what was being measured, and the
next call continues with the missing parts.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bench import common
from config.errors import UserError

Keep = Callable[[dict], None]
"""Saves what a part with a limit has measured so far; what was kept last is its result then."""
HUNG_S = 60  # past its limit a process that cannot be interrupted is ended


class OutOfTime(BaseException):
    """The limit of a part is reached. No Exception: one that fails is counted, and it goes on."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds; 0 = never. For the main thread."""

    def over(*_) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    if seconds:
        faulthandler.dump_traceback_later(seconds + HUNG_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def left() -> float:
    """Return the seconds that are left of a limit."""
    return signal.getitimer(signal.ITIMER_REAL)[0] or math.inf


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
    parts: dict[str, Callable[..., dict]]  # name -> its measurement; the argument: tiny
    show: Callable[[str, dict], None]  # prints the table of one part
    lines: Callable[[str, dict], list[dict]]  # of one part, against the bars (`common.line`)
    needs_gpu: bool = True  # unless tiny
    # part -> seconds after which it ends with what it has; such a part is given a `Keep`, too
    limits: dict[str, int] = field(default_factory=dict)

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

    def here(self, part: str, tiny: bool, limit: int = 0) -> dict:
        """Measure one part in this process; print its table and, unless tiny, save its result.

        limit: instead of the part's own. Where it is reached, `cut_s` says so in the result.
        """
        start, limit = time.perf_counter(), limit or self.limits.get(part, 0)
        result: dict = {}

        def keep(so_far: dict) -> None:
            result.update(so_far)
            if not tiny:
                self.save(part, result | {"machine": common.machine()})

        try:
            with limited(limit):
                result |= self.parts[part](tiny, *([keep] if part in self.limits else []))
        except UserError as error:
            raise SystemExit(str(error)) from error
        except OutOfTime:
            if not result:
                raise SystemExit(f"Nothing was measured within {limit} s.") from None
            result["cut_s"] = limit
        result |= {"wall_s": round(time.perf_counter() - start, 1), "machine": common.machine()}
        self.show(part, result)
        if "cut_s" in result:
            print(f"{part}: the limit of {limit} s was reached; what is missing was not measured.")
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
            return {args.part: self.here(args.part, args.tiny, args.limit)}
        results = {}
        if not args.tiny and not args.again:
            results = {p: r for p, r in self.saved().items() if "failed" not in r}
        for part in self.parts:
            if part in results:
                print(f"{part}: there is a result", flush=True)
                continue
            print(f"{part} ...", flush=True)
            results[part] = self._elsewhere(part, args.tiny, args.limit)
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
        help = (
            f"{', '.join(self.parts)}: this one alone, in this process, even if there is a result"
        )
        parser.add_argument("part", nargs="?", choices=self.parts, help=help, metavar="PART")
        help = "seconds after which a part ends with what it has, instead of its own"
        parser.add_argument("--limit", type=int, default=0, help=help)
        help = "all parts, not only those without a result"
        parser.add_argument("--again", action="store_true", help=help)
        return parser.parse_args(arguments)

    def _elsewhere(self, part: str, tiny: bool, limit: int) -> dict:
        """Measure one part in a process of its own, which saves its result unless it fails."""
        command = [sys.executable, "-m", f"bench.{self.name}", part, "--limit", str(limit)]
        if tiny:
            command.append("--tiny")
        result, errors = streamed(command)
        if result:
            return result
        failure = {"failed": errors[-800:]}
        if not tiny:
            self.save(part, failure)
        return failure
