"""Document length: tokens a second and memory of the agent from 7 thousand to 3.5 million tokens.

`python -m bench.length [--tiny]`: the embedded policy reads one document at a time, in sections of
1,536 tokens, each length in a process of its own, whose memory is looked at after every turn. A
short document is read again and again, for as long as a stretch of the long one takes, before and
after it. "Grown" is the memory that came on top of the document, its text and token ids, while it
was read. Accuracy is the demo's part.
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
from bench.common import finish, line, spread, table
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


def document(codec: Codec, n_tokens: int) -> str:
    """Make n_tokens of generated English: one piece of 48,000 tokens over and over."""
    piece = codec.encode(worlds.make_task("length", 2000, "one_fact").document)
    return codec.decode((piece * (n_tokens // len(piece) + 1))[:n_tokens])


def now_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def read(n_tokens: int, stretch: int = STRETCH) -> dict:
    """Read documents of n_tokens until `stretch` tokens, or one document, are done.

    Returns tokens/s of every stretch, and the memory in MiB before and at most.
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
    before = peak = now_mib()
    rates, tokens, done, start = [], 0, 0, time.perf_counter()
    while done < stretch:
        for turn in follow(engine, agent, long, Sampling(1.0), seed=done):
            tokens += len(turn.prompt_ids) + len(turn.response_ids)
            peak = max(peak, now_mib())
            if tokens >= stretch:
                rates.append(tokens / (time.perf_counter() - start))
                tokens, start = 0, time.perf_counter()
        done += n_tokens
    return {"tokens_per_s": rates, "mib_before": before, "mib_peak": peak}


def cells_of(runs: dict[int, list[dict]]) -> list[dict]:
    """Summarise the readings of each length, one cell a length."""
    rates = {
        n: [rate for run in found for rate in run["tokens_per_s"]] for n, found in runs.items()
    }
    middle = median(median(values) for values in rates.values())
    cells = []
    for n, found in runs.items():
        of_length = spread(rates[n], 0)
        grown = max(run["mib_peak"] - run["mib_before"] for run in found)
        cells.append(
            {
                "tokens": n,
                "tokens_per_s": of_length.pop("median"),
                **of_length,
                "against_median": round(median(rates[n]) / middle - 1, 4),
                "mib_peak": round(max(run["mib_peak"] for run in found)),
                "mib_grown_while_reading": round(grown, 1),
            }
        )
    return cells


def main(tiny: bool) -> None:
    lengths, stretch = (LENGTHS[:2], 7_000) if tiny else (LENGTHS, STRETCH)
    runs: dict[int, list[dict]] = {n: [] for n in lengths}
    for n in (*lengths, *lengths[-2::-1]):  # what disturbs the machine disturbs all lengths
        command = [sys.executable, "-m", "bench.length", str(n), str(stretch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs[n].append(json.loads(done.stdout.splitlines()[-1]))
    cells = cells_of(runs)
    table("One document, one thread, float32", [*cells[0]], [c.values() for c in cells])
    furthest = max((c["against_median"] for c in cells), key=abs)
    last = cells[-1]
    grown, peak = last["mib_grown_while_reading"], last["mib_peak"]
    what = "tokens/s from 7 thousand to 3.5 million tokens, furthest from the median"
    lines = [
        line(what, f"{furthest:+.1%}", "within 10 %", abs(furthest) <= 0.1),
        line(
            "memory grown while reading 3.5 million tokens",
            f"{grown} of {peak} MiB",
            "at most 10 %",
            grown <= 0.1 * peak,
        ),
    ]
    if not tiny:
        finish("length", {"section_tokens": SECTION_TOKENS, "cells": cells}, lines)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(read(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main("--tiny" in sys.argv)
