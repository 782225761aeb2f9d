"""Shared by the benchmarks: the machine, random turns, timing side by side, the table, the line."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from config.options import GRPOConfig
from models.load import cast_parameters
from models.logprobs import Row, logprobs, pack
from models.plan import Geometry

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
Name = TypeVar("Name")
LOAD = os.getloadavg()  # before the benchmark adds its own

torch.set_num_threads(1)


def _git(*words: str) -> str:
    command = ["git", "--no-optional-locks", *words]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def machine() -> dict:
    """Describe where, when and on what code a benchmark ran, without host names and paths."""
    cpuinfo = Path("/proc/cpuinfo")
    texts = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [text.partition(":")[2].strip() for text in texts if text.startswith("model name")]
    versions = {"python": platform.python_version()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    more = ("triton", "peft", "vllm") if gpu else ()
    for package in ("torch", "transformers", "trl", *more):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return gpu | {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": [round(x, 2) for x in LOAD],
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "versions": versions,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!bench/results")),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
    }


def paired(
    functions: dict[Name, Callable[[], object]], repeats: int = 7
) -> dict[Name, list[float]]:
    """Time functions in turns; returns the seconds of every call, [repeats] per name.

    A warm-up each, then a, b, c, a, b, c, ..: what disturbs one disturbs all.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median, least and largest value."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def show(values: Sequence[float], digits: int = 3) -> str:
    """Format the same for a table: "0.512 (0.490-0.630)"."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def against(peer: Sequence[float], ours: Sequence[float], bar: float | None = None) -> dict:
    """Compare seconds of two sides, round by round: how many times faster is ours?

    Returns `ratio` (of the medians), `ratio_min` and `ratio_max` (of a round); with a bar, also
    `bar` and `met`.
    """
    rounds = [a / b for a, b in zip(peer, ours, strict=True)]
    ratio = median(peer) / median(ours)
    out = {
        "ratio": round(ratio, 2),
        "ratio_min": round(min(rounds), 2),
        "ratio_max": round(max(rounds), 2),
    }
    return out if bar is None else out | {"bar": bar, "met": ratio >= bar}


def verdict(result: dict) -> str:
    """Format the outcome of a bar: "at least 6x: met" or "at least 6x: MISSED"."""
    return f"at least {result['bar']:g}x: {'met' if result['met'] else 'MISSED'}"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    out = Table(title=title)
    for column, name in enumerate(header):
        out.add_column(name, justify="right" if column else "left")
    for row in rows:
        out.add_row(*map(str, row))
    Console(width=150).print(out)


def line(what: str, measured: object, bar: str, met: bool) -> dict:
    """Make a line of the table over all benchmarks."""
    return {"what": what, "measured": str(measured), "bar": bar, "met": bool(met)}


def finish(name: str, result: dict, lines: Sequence[dict]) -> None:
    """Write a result with its machine to bench/results/NAME.json, and print it as the last line."""
    result = {"benchmark": name, "lines": list(lines), **result, "machine": machine()}
    write(RESULTS / f"{name}.json", result)
    print(json.dumps(result))


def write(path: Path, result: dict) -> None:
    """Write a result as indented JSON, atomically."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def random_qwen3(sizes: Geometry, dtype: torch.dtype, device: str, window: int = 40_960):
    """Make a Qwen3 of these sizes with random weights, the same at every call on one device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=window,
        tie_word_embeddings=sizes.tied,
        dtype=str(dtype).removeprefix("torch."),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return cast_parameters(model, dtype).eval()


def turns(
    layout: str,
    vocab: int,
    group: int,
    common: int,
    own: int,
    response: tuple[int, int],
    groups: int = 1,
) -> list[Row]:
    """Make random turns of groups with so many tokens in common and of each member's own.

    response: fewest and most that are written. The pieces are the same in both layouts; advantages
    are not 0 and sum to 0.
    """
    rng, rows = random.Random(group), []

    def some(n: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(n)]

    for _ in range(groups):
        first = some(common)
        for k in range(group):
            mine, written = some(own), some(rng.randint(*response))
            prompt = first + mine if layout == "shared" else mine + first
            rows.append(Row(prompt, written, [0.0] * len(written), rng.gauss(0, 1), trajectory=k))
    mean = sum(row.advantage for row in rows) / len(rows)
    for row in rows:
        row.advantage -= mean
    return rows


def our_update(model, rows: list[Row], config: GRPOConfig) -> int:
    """Leave the gradient of the rows in the model, as GRPO.update does; returns the number of
    tokens that went through it.

    Its log-probs are the sampler's too, since the peers weigh no token by its importance: in
    bfloat16 those of another implementation would make another loss of it.
    """
    from grpo import policy_loss, token_weights  # Lightning with it, which not every script needs

    model.zero_grad()
    weights, computed = token_weights(rows, config), 0
    for batch in pack(rows, config.micro_tokens):
        computed += len(batch.trie)
        logp = logprobs(model, batch, temperature=1.0)
        old, weight = logp.detach(), batch.per_token(weights)
        loss, _ = policy_loss(logp, old, old, batch.advantage, weight, config)
        loss.backward()
    return computed
