"""The packed row's attention: FlexAttention against the bucket path.

Holds: `flex`, a part of gpu.py: log-probs, gradients, graphs compiled, speed of attention alone.
Leaves out: the update.
Exercise it: `python -m bench.gpu flex --tiny`. Read next: tokens/trie.py.

Without a GPU flex is traced and differentiated (aot_eager), but no kernel is generated: that
checks the mask, the layout and the graphs, not the kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from unittest.mock import patch

import torch

from bench.common import line, random_qwen3, table
from bench.parts import Keep
from models.load import recompute
from models.logprobs import Row, TokenBatch, logprobs, pack
from models.plan import dense
from tokens import attention as tokens_attention
from tokens import trie

# common, own, response, members
ROWS = ((200, 30, 30, 4), (1500, 200, 100, 4), (700, 100, 60, 3), (100, 20, 20, 2))
TINY_ROWS = ((40, 6, 5, 3), (700, 20, 10, 2), (20, 4, 3, 2))
ATTENTION = {
    "shared, 16k": (2048, 512, 512, 13),
    "shared, 32k": (2048, 512, 512, 29),
    "alone, 16k": (0, 2560, 512, 5),
}
# head size -> sizes; grouped heads, and in the last a key for each query
MODELS = {
    128: dense(4, 512, 32, 8, 128, 1024, 8192, True),
    64: dense(4, 576, 9, 3, 64, 1024, 8192, True),
    32: dense(4, 512, 4, 4, 32, 1024, 8192, True),
}
TINY_MODEL = dense(2, 64, 4, 2, 16, 96, 512, True)
BARS = {"float32": 1e-3, "bfloat16": 5e-2}  # of the gradients' difference, relative to their norm


def batch_of(common: int, tail: int, response: int, members: int, vocab: int) -> TokenBatch:
    """Make one group's turns as one trie; common = 0: nothing in common."""
    rng = random.Random(0)

    def some(n: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(n)]

    section = some(common)
    rows = [Row(section + some(tail), some(response), [0.0] * response) for _ in range(members)]
    (batch,) = pack(rows, 1 << 16)
    return batch


@lru_cache(maxsize=1)
def traced():
    """Return flex_attention for a CPU with its gradient, which the library refuses there."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, backend="aot_eager")


@contextmanager
def path(flex: bool, device: str) -> Iterator[None]:
    """Have the trie's attention take one path: FlexAttention, or buckets."""
    with patch.object(tokens_attention, "takes_flex", lambda _: flex):
        if device == "cuda" or not flex:
            yield
            return
        refusal = "torch.nn.attention.flex_attention._validate_device"
        with patch.object(tokens_attention, "_flex", traced), patch(refusal, lambda *_: None):
            yield


def both(model, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute log-probs [R], and every parameter's gradient of their sum."""
    model.zero_grad()
    logp = logprobs(model, batch)
    logp.sum().backward()
    gradients = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    return logp.detach().float(), gradients


def compare(model, batch: TokenBatch, device: str) -> dict:
    """Measure the distance of the two paths.

    `logp` on average, `grad` in relative norm; `again`: of two runs of flex.
    """
    from torch._dynamo.utils import counters

    start = time.perf_counter()
    with path(True, device):
        ours, gradient = both(model, batch)
        again, _ = both(model, batch)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with path(False, device):
        expected, reference = both(model, batch)
    norm = sum(g.pow(2).sum() for g in reference.values()) ** 0.5
    apart = sum((gradient[name] - reference[name]).pow(2).sum() for name in reference) ** 0.5
    return {
        "tokens": len(batch.trie),
        "logp": (ours - expected).abs().mean().item(),
        "again": (ours - again).abs().max().item(),
        "grad": (apart / norm).item(),
        "seconds": round(seconds, 2),
        "graphs": counters["stats"]["unique_graphs"],
    }


def speed(batch: TokenBatch) -> dict:
    """Measure attention alone on a GPU, with Qwen3-4B's heads in bfloat16: milliseconds, TFLOP/s.

    The pairs that the mask leaves out are not counted.
    """
    device, heads, head = torch.device("cuda"), 32, 128
    start = time.perf_counter()
    attention = tokens_attention.TrieAttention(batch.trie, trie.Cost(1, 1, 1), device)
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    n = len(batch.trie) + tokens_attention.padding(batch.trie, device)
    q, k, v = (
        torch.randn(1, h, n, head, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, 8, 8)
    )
    upstream = torch.randn(1, n, heads, head, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        return attention(0, q, k, v, head**-0.5)

    forward_ms = milliseconds(forward)
    both_ms = milliseconds(lambda: forward().backward(upstream))
    pairs = sum(s.depth * len(s) + len(s) * (len(s) + 1) / 2 for s in batch.trie.segments)
    flop = 4 * heads * head * pairs
    return {
        "tokens": len(batch.trie),
        "mask_ms": round(built * 1e3, 1),
        "forward_ms": round(forward_ms, 3),
        "both_ms": round(both_ms, 3),
        "forward_tflops": round(flop / forward_ms / 1e9, 1),
        "backward_tflops": round(2.5 * flop / (both_ms - forward_ms) / 1e9, 1),
    }


def milliseconds(function: Callable[[], object]) -> float:
    """Time a function on a GPU: the mean of ten calls, after three to warm up."""
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def flex(tiny: bool, keep: Keep) -> dict:
    """Compare the paths in several models and rows and, on a GPU, time attention alone."""
    import torch._dynamo

    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [(128, torch.float32), *[(head, torch.bfloat16) for head in (128, 64, 32)]]
    paths: list[dict] = []
    for head, dtype in models[: 1 if tiny else None]:
        model = random_qwen3(TINY_MODEL if tiny else MODELS[head], dtype, device)
        recompute(model, True)
        for rows in TINY_ROWS if tiny else ROWS:
            batch = batch_of(*rows, model.config.vocab_size - 8)
            # four models in one process need more graphs than a training's one
            with torch._dynamo.config.patch(recompile_limit=64):
                result = compare(model, batch, device)
            name = str(dtype).removeprefix("torch.")
            paths.append({"head": model.config.head_dim, "dtype": name} | result)
            print(paths[-1], flush=True)
            keep({"paths": paths, "attention": {}, "graphs": result["graphs"]})
    alone = {} if tiny else {name: speed(batch_of(*rows, 8000)) for name, rows in ATTENTION.items()}
    return {"attention": alone}


def show_flex(result: dict) -> None:
    """Print both tables."""
    rows = [
        [f"{x:.2g}" if isinstance(x, float) else x for x in p.values()] for p in result["paths"]
    ]
    table("FlexAttention against buckets", list(result["paths"][0]), rows)
    if result["attention"]:
        names = list(next(iter(result["attention"].values())))
        rows = [(name, *row.values()) for name, row in result["attention"].items()]
        table("Attention alone", ("", *names), rows)


def flex_lines(result: dict) -> list[dict]:
    """Compare the largest distance of the gradients, for each type, with its bar."""
    lines = []
    for dtype, bar in BARS.items():
        distances = [path["grad"] for path in result["paths"] if path["dtype"] == dtype]
        if distances:
            worst, what = max(distances), f"flex: gradients from the buckets', {dtype}"
            lines.append(line(what, f"{worst:.2g}", f"at most {bar:g}", worst <= bar))
    return lines
