"""What the benchmarks share: the machine, timing side by side, a group's turns, the table."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from config.files import replacing
from config.options import GRPOConfig
from models.load import cast_parameters
from models.logprobs import Row, logprobs, pack
from models.plan import Geometry

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
torch.set_num_threads(1)


def machine() -> dict:
    """Describe where, when and on what code a benchmark ran, without host names and paths."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.strip()

    cpuinfo = Path("/proc/cpuinfo")
    texts = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [text.partition(":")[2].strip() for text in texts if text.startswith("model name")]
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "trl", *(("triton", "peft", "vllm") if gpu else ())):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return gpu | {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "versions": versions,
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", ".", ":!bench/results")),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
    }


# ---------------------------------------------------------------- timing


def paired(functions: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, list[float]]:
    """Return the seconds of every call of some functions, called in turns (a, b, c, a, b, c, ..):
    what disturbs one disturbs all. The first call of each warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median, least and largest value."""
    middle, least, largest = (round(x, digits) for x in (median(values), min(values), max(values)))
    return {"median": middle, "min": least, "max": largest}


def against(peer: Sequence[float], ours: Sequence[float], bar: float | None = None) -> dict:
    """Compare the seconds of two sides: how many times faster is ours, in all and in a round?"""
    rounds = [a / b for a, b in zip(peer, ours, strict=True)]
    ratio = median(peer) / median(ours)
    values = {"ratio": ratio, "ratio_min": min(rounds), "ratio_max": max(rounds)}
    out = {name: round(value, 2) for name, value in values.items()}
    return out if bar is None else out | {"bar": bar, "met": ratio >= bar}


# ---------------------------------------------------------------- results


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


def markdown(results: Sequence[dict]) -> str:
    """Format the lines of all results as one table, beneath the machine and the commits."""
    where = results[-1]["machine"]
    # there are several commits if only some benchmarks were run again
    commits = ", ".join(sorted({result["machine"]["commit"] for result in results}))
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    head = f"{where['date']}, {where['cpu']}, {where['cores']} cores, one thread each; {versions}; "
    rows = [
        f"| {x['what']} | {x['measured']} | {x['bar']} | {'' if x['met'] else 'missed'} |"
        for result in results
        for x in result["lines"]
    ]
    header = ["| measured | value | asked | |", "|---|---|---|---|"]
    return "\n".join([f"{head}commit {commits}", "", *header, *rows])


def write(path: Path, result: dict) -> None:
    """Write a result as indented JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def finish(name: str, result: dict, lines: Sequence[dict]) -> None:
    """Write a result with its machine to bench/results/NAME.json, and print it as the last line."""
    result = {"benchmark": name, "lines": list(lines), **result, "machine": machine()}
    write(RESULTS / f"{name}.json", result)
    print(json.dumps(result))


# ---------------------------------------------------------------- models and turns


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

    response: fewest and most tokens that are written. The advantages are not 0 and sum to 0.
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
    """Leave the gradient of the rows in the model, as GRPO.update does.

    Returns how many tokens went through it. The sampler's log-probs are its own, since the peers
    weigh no token by its importance.
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


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten().float() for _, p in sorted(model.named_parameters())])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of a - b, relative to the norm of b."""
    return float(f"{((a - b).norm() / b.norm()).item():.2g}")
