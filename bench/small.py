"""Small operations: what `--help`, an entry of a store and a search of a bank take.

Holds: four measurements in processor time, which other work moves less than the clock. Leaves out:
models; `make bench`, whose table these are no part of.
Exercise it: `python -m bench.small`. Read next: agents/bank.py.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from agents.bank import Bank, BankConfig
from agents.store import Entry, Store
from bench.common import ROOT, finish, line, show, spread, table

REPEATS, INTENTS, NUMBERS = 5, 10_000, 1024
BARS_S = {
    "train --help": 1.0,
    "an operation of a store of 1,000 entries": 2e-4,
    "opening a bank of 10,000 intents": 2.0,
    "a search of it": 5e-3,
}


class Directions:
    """An embedder whose vectors are random."""

    name, dim = "random", NUMBERS

    def cut(self, texts, query=False):
        return [False] * len(texts)

    def embed(self, texts, query=False):
        return unit(np.random.default_rng(len(texts[0])).normal(size=(len(texts), self.dim)))


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def seconds(function: Callable[[], object], times: int = 1) -> float:
    """Return the processor time of one of so many calls."""
    begun = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - begun) / times


def of_help() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "cli.py", "train", "--help"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_store() -> float:
    store = Store([Entry("", f"Fact number {k}.", date="2023-05-08") for k in range(1000)])
    old = store.snapshot().get("m500")

    def two() -> None:
        nonlocal old
        store.record("search_memory", {"query": "x"}, "Error: x", ok=False, code="x")
        old = replace(old, text="Now.", version=old.version + 1)
        store.record("manage_memory", {"content": "x"}, "Updated.", after=[old])
        store.snapshot()

    return seconds(two, 500) / 2


def opened(path: Path, frozen: bool = False) -> Bank:
    config = BankConfig(retrieve="dense", embedder="hash:8", same_intent=1.1, delta=-1.0)
    return Bank(path, config, Directions(), frozen=frozen)


def fill(path: Path) -> None:
    bank = opened(path)
    rows = unit(np.random.default_rng(0).normal(size=(INTENTS, NUMBERS)))
    with bank.batch():
        bank._db.executemany(
            "INSERT INTO intent VALUES (?, 'default', ?, ?)",
            [(k + 1, f"task {k}", row.tobytes()) for k, row in enumerate(rows)],
        )
        bank._db.executemany(
            "INSERT INTO entry VALUES (NULL, ?, 'script', 'x', 1, 0, 0, 0, ?, 0, 1, '[]', '{}', 0)",
            [(k + 1, f"t{k}") for k in range(INTENTS)],
        )
    bank.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bank.db")
        fill(path)
        bank = opened(path, frozen=True)  # a bank has one writer
        bank.likeness.embedded(["query"])  # the embedder's own time is not measured
        measures = (of_help, of_store, lambda: seconds(lambda: opened(path).close()),
                    lambda: seconds(lambda: bank.retrieve("query"), 40))  # fmt: skip
        found = {
            what: [measure() for _ in range(REPEATS)]
            for what, measure in zip(BARS_S, measures, strict=True)
        }
        bank.close()
    result = {what: spread(times, 6) for what, times in found.items()}
    lines = [
        line(what, f"{spread(times, 6)['median']:.2g} s", f"at most {bar:g} s", min(times) <= bar)
        for (what, times), bar in zip(found.items(), BARS_S.values(), strict=True)
    ]
    header = ("", "processor time: median (min-max)", "bar")
    shown = [(x["what"], show(found[x["what"]], 5), x["bar"]) for x in lines]
    table("Small operations", header, shown)
    finish("small", result, lines)


if __name__ == "__main__":
    main()
