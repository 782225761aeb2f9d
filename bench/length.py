"""Document length: tokens a second and memory of the agent from 7 thousand to 3.5 million tokens.

Holds: the measurement with the embedded policy and its plot (bench/results/length.png).
Leaves out: accuracy (the demo measures it up to 1,024 sections).
Exercise it: `python -m bench.length`. Read next: real.py.

One document at a time, in sections of 1,536 tokens. Every length is read in a process of its own,
whose memory is sampled after every turn; a short document is read again and again, for as long as a
stretch of the long one takes, before and after it. "Grown" is the memory that came on top of the
document, its text and token ids, while it was read.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from agents.find import resolve
from bench.common import RESULTS, finish, line, table
from config.options import EMBEDDED
from data import Task
from engines.hf import TransformersEngine
from models.load import load_model
from rollout import Sampling, follow
from tasks import worlds
from tokens.codec import Codec

LENGTHS = (7_000, 56_000, 448_000, 3_500_000)
SECTION_TOKENS = 1536
STRETCH = 200_000  # tokens that one rate is measured over
BAR = 0.1  # tokens/s at any length within 10 % of the median of all


def document(codec: Codec, n_tokens: int):
    """Make n_tokens of generated English: one piece of 48,000 tokens over and over.

    It is read and not asked about.
    """
    piece = codec.encode(worlds.make_task("length", 2000, "one_fact").document)
    ids = piece * (n_tokens // len(piece) + 1)
    return codec.decode(ids[:n_tokens])


def now_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def read(n_tokens: int) -> dict:
    """Read documents of n_tokens until STRETCH tokens, or one document, are done.

    For a process of its own. Returns `tokens_per_s` of every stretch and the memory in MiB.
    """
    codec = Codec.load(EMBEDDED)
    engine = TransformersEngine(load_model(EMBEDDED, "float32", "cpu"), codec)
    _, agent = resolve("demo", EMBEDDED, {}, {"chunk_tokens": SECTION_TOKENS}, "memagent")
    warm, long = (
        Task(name, "Where is Anna?", ("Lima",), document(codec, n))
        for name, n in (("warm", 6 * SECTION_TOKENS), ("long", n_tokens))
    )
    for _ in follow(engine, agent, warm, Sampling(1.0)):
        pass
    before, rates, tokens, start = now_mib(), [], 0, time.perf_counter()
    turns, done, peak = 0, 0, before
    while done < STRETCH:
        for turn in follow(engine, agent, long, Sampling(1.0), seed=done):
            tokens += len(turn.prompt_ids) + len(turn.response_ids)
            turns += 1
            peak = max(peak, now_mib())
            if tokens >= STRETCH:
                now = time.perf_counter()
                rates.append(tokens / (now - start))
                tokens, start = 0, now
        done += n_tokens
    return {
        "tokens": n_tokens,
        "turns": turns,
        "tokens_per_s": rates,
        "mib_before": before,
        "mib_peak": peak,
    }


def measure() -> dict[int, list[dict]]:
    """Read every length in processes of their own: length -> results of `read`.

    Up and down again: what disturbs the machine disturbs all lengths.
    """
    runs: dict[int, list[dict]] = {n: [] for n in LENGTHS}
    for n in (*LENGTHS, *LENGTHS[-2::-1]):
        command = [sys.executable, "-m", "bench.length", str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs[n].append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def cells_of(runs: dict[int, list[dict]]) -> list[dict]:
    """Summarise the runs, one cell a length."""
    rates = {n: [r for run in runs[n] for r in run["tokens_per_s"]] for n in LENGTHS}
    middle = median(median(r) for r in rates.values())
    cells = []
    for n in LENGTHS:
        grown = [run["mib_peak"] - run["mib_before"] for run in runs[n]]
        cells.append(
            {
                "tokens": n,
                "tokens_per_s": round(median(rates[n])),
                "min": round(min(rates[n])),
                "max": round(max(rates[n])),
                "looks": len(rates[n]),
                "against_median": round(median(rates[n]) / middle - 1, 4),
                "mib_peak": round(max(run["mib_peak"] for run in runs[n])),
                "mib_grown_while_reading": round(max(grown), 1),
            }
        )
    return cells


def print_table(cells: list[dict]) -> None:
    header = (
        "tokens", "tokens/s", "least", "largest", "against the median", "MiB at most",
        "grown while reading",
    )  # fmt: skip
    numbers = ("tokens", "tokens_per_s", "min", "max")
    rows = [
        (
            *(f"{c[name]:,}" for name in numbers),
            f"{c['against_median']:+.1%}",
            c["mib_peak"],
            c["mib_grown_while_reading"],
        )
        for c in cells
    ]
    table("One document, sections of 1,536 tokens, one thread, float32", header, rows)


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(read(int(sys.argv[1]))))
        return
    runs = measure()
    cells = cells_of(runs)
    met = {
        "speed": all(abs(c["against_median"]) <= BAR for c in cells),
        "memory": all(c["mib_grown_while_reading"] <= 0.1 * c["mib_peak"] for c in cells),
    }
    print_table(cells)
    furthest = max((c["against_median"] for c in cells), key=abs)
    grown = f"{cells[-1]['mib_grown_while_reading']} of {cells[-1]['mib_peak']} MiB"
    what = "tokens/s from 7 thousand to 3.5 million tokens, furthest from the median"
    lines = [
        line(what, f"{furthest:+.1%}", "within 10 %", met["speed"]),
        line("memory grown while reading 3.5 million tokens", grown, "at most 10 %", met["memory"]),
    ]
    long = runs[LENGTHS[-1]][0]["tokens_per_s"]
    plot(cells, long)
    result = {
        "met": all(met.values()),
        "met_each": met,
        "section_tokens": SECTION_TOKENS,
        "cells": cells,
        "long_document_tokens_per_s": [round(x) for x in long],
    }
    finish("length", result, lines)


def plot(cells: list[dict], long: list[float]) -> None:
    """Draw speed and memory over the length; long: rates inside the longest document."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    x = [c["tokens"] for c in cells]
    for axes, name, label in (
        (left, "tokens_per_s", "tokens/s"),
        (right, "mib_peak", "MiB at most"),
    ):
        axes.plot(x, [c[name] for c in cells], "o-")
        axes.set(xscale="log", xlabel="tokens of the document", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    left.fill_between(x, [c["min"] for c in cells], [c["max"] for c in cells], alpha=0.2)
    read = [STRETCH * (k + 1) for k in range(len(long))]
    left.plot(read, long, ".", color="gray", markersize=3, label="inside the longest")
    left.legend(loc="lower left", frameon=False)
    figure.savefig(RESULTS / "length.png", dpi=120)


if __name__ == "__main__":
    main()
