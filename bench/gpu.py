"""What one wants to know of one's own card: `python -m bench.gpu PART`, on a machine with a GPU.

`--tiny` shows on a CPU that a part runs. The first three take a quarter of an hour; each has a
limit, and what it has measured by then stays in bench/results/gpu.json:

    update    Qwen3-4B's LoRA update in both layouts: speed, memory
    step      training steps of Qwen3-4B with vLLM: rollout, switch, update, the plan's GiB beside
    pipeline  SmolLM2: warm start, GRPO with vLLM, evaluations
    full-1.7b the update of all weights of Qwen3-1.7B: FSDP2 over one rank, float32 weights,
              bfloat16 arithmetic; full-4b of Qwen3-4B
    sleep     every sleep level of vLLM, proven
    step-full-1.7b, step-full-4b: steps of full fine-tuning

Weights are random but for `pipeline`. Updates are of packed rows of 16,384 tokens, of tasks of
G = 8 members, at every turn 2,048 tokens of section and problem in common, 512 of memory and 512 of
response of each member's own. Layers are recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from bench import colocated, pipeline
from bench.common import line, random_qwen3, table, turns
from bench.parts import Benchmark, Keep
from config.options import GRPOConfig
from grpo import policy_loss, token_weights
from models import ranks
from models.load import inner, optimizer_of, recompute, with_lora
from models.logprobs import Row, logprobs, pack, policy_logprobs
from models.plan import GIB, KNOWN, Geometry, dense
from report.metrics import PeakMemory, on_gpu

SHAPE = {"group": 8, "common": 2048, "own": 512, "response": 512, "row_tokens": 16384}
TINY = {"group": 4, "common": 48, "own": 12, "response": 12, "row_tokens": 256}
TINY_MODEL = dense(2, 64, 4, 2, 16, 96, 512, True)
TARGETS = {
    "update": {"tokens_per_s": 14_000, "gib": 30},
    "full-4b": {"tokens_per_s": 10_000, "gib": 85},
}
SHARED_OVER_PAPER = 1.8
REPEATS = 5
CONFIG = GRPOConfig(importance="none", lora_rank=16, lr=1e-6)
LAYOUTS = ("paper", "shared")
PHASES = ("passes_s", "clip_s", "optimizer_s")


@contextmanager
def policy_of(mode: str, sizes: Geometry, device: str) -> Iterator[torch.nn.Module]:
    """Make a policy as `train` holds it on one device.

    lora: bfloat16 weights (on a CPU float32) under adapters. full: float32 weights that FSDP2 holds
    over a process group of one rank; on a GPU they are computed with in bfloat16.
    """
    on_card = device == "cuda"
    if mode == "lora":
        dtype = torch.bfloat16 if on_card else torch.float32
        yield with_lora(random_qwen3(sizes, dtype, device), CONFIG)
        return
    from torch.distributed.device_mesh import init_device_mesh

    with ranks.process_group(on_card):
        model = random_qwen3(sizes, torch.float32, device)
        mesh = init_device_mesh(device, (1,))
        ranks.shard(model, mesh, mixed=on_card, logprobs=logprobs)
        yield model


def update(policy, rows: list[Row], optimizer, row_tokens: int) -> dict[str, float]:
    """Make one optimizer step as GRPO.update does; layers are recomputed.

    Returns `tokens`, those that went through the model, the seconds in all and of its phases.
    """
    model = inner(policy)
    recompute(model, True)
    weights, tokens = token_weights(rows, CONFIG), 0
    clock = [now(model.device)]
    for batch in pack(rows, row_tokens):
        tokens += len(batch.trie)
        logp = policy_logprobs(model, batch)
        batch = batch.to(model.device)
        weight, old = batch.per_token(weights), logp.detach()
        loss, _ = policy_loss(logp, old, old, batch.advantage, weight, CONFIG)
        loss.backward()
    clock.append(now(model.device))
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CONFIG.grad_clip)
    clock.append(now(model.device))
    optimizer.step()
    optimizer.zero_grad()
    clock.append(now(model.device))
    phases = (b - a for a, b in pairwise(clock))
    seconds = dict(zip(("seconds", *PHASES), (clock[-1] - clock[0], *phases), strict=True))
    return {"tokens": tokens} | seconds


def now(device: torch.device) -> float:
    """Return the seconds of a clock, after all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def setting(tiny: bool, model: str) -> tuple[dict, Geometry, int, str]:
    """Return the turns' shape, the model's sizes, how many token ids are drawn from, the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, sizes = (TINY, TINY_MODEL) if tiny else (SHAPE, KNOWN[model])
    return shape, sizes, sizes.vocab * 99 // 100, device


def cell(mode: str, tiny: bool, keep: Keep, model: str = "Qwen/Qwen3-4B") -> dict:
    """Measure the update of one model in both layouts."""
    shape, sizes, vocab, device = setting(tiny, model)
    out: dict = {"mode": mode, "model": "tiny" if tiny else model, "shape": shape}
    sizes_of_turns = shape["common"], shape["own"], (shape["response"], shape["response"])
    with policy_of(mode, sizes, device) as policy:
        optimizer = optimizer_of([p for p in policy.parameters() if p.requires_grad], CONFIG)
        for layout in LAYOUTS:
            rows = turns(layout, vocab, shape["group"], *sizes_of_turns, groups=2)
            out[layout] = repeated(policy, rows, optimizer, shape["row_tokens"])
            print(layout, out[layout], flush=True)
            keep(out)
    speeds = [out[layout]["conversations_per_s"] for layout in ("shared", "paper")]
    out["shared_over_paper"] = round(speeds[0] / speeds[1], 2)
    return out


def repeated(policy, rows: list[Row], optimizer, row_tokens: int) -> dict:
    """Measure one update several times, the first time apart: it compiles attention's kernel."""
    device = inner(policy).device.type
    updates = []
    for _ in range(REPEATS + 1):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        updates.append(update(policy, rows, optimizer, row_tokens))
    first, *updates = updates
    tokens, s = first["tokens"], median(x["seconds"] for x in updates)
    on_card = on_gpu(inner(policy), tokens, s, PeakMemory())
    if on_card:  # of torch alone
        on_card["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return on_card | {
        "first_s": round(first["seconds"], 4),
        "seconds": [round(x["seconds"], 4) for x in updates],
        **{phase: round(median(x[phase] for x in updates), 4) for phase in PHASES},
        "turn_tokens": sum(map(len, rows)),
        "computed_tokens": tokens,
        "tokens_per_s": round(tokens / s),
        "conversations_per_s": round(len(rows) / s, 3),
    }


def show(part: str, result: dict) -> None:
    """Print a part's table."""
    if part == "pipeline":
        pipeline.show(result)
    elif part == "sleep" or part.startswith("step"):
        colocated.show(part, result)
    else:
        columns = ("tokens_per_s", "mfu", "peak_gib", *PHASES, "first_s", "conversations_per_s")
        rows = [(f"{part}, {x}", *map(result[x].get, columns)) for x in LAYOUTS if x in result]
        table("Update in packed rows", ("", *columns), rows)


def lines(part: str, result: dict) -> list[dict]:
    """List what was measured against the bars, where there are any."""
    if part == "sleep":
        return colocated.lines(result)
    if "shared_over_paper" not in result:  # of another kind, or cut
        return []
    speed, ratio = result["paper"]["tokens_per_s"], result["shared_over_paper"]
    gib = max(result[layout].get("peak_gib", 0) for layout in LAYOUTS)
    bars = [("", True)] * 3
    if target := TARGETS.get(part):
        bars = [
            (f"at least {target['tokens_per_s']:,}", speed >= target["tokens_per_s"]),
            (f"at most {target['gib']}", gib <= target["gib"]),
            (f"at least {SHARED_OVER_PAPER}x", ratio >= SHARED_OVER_PAPER),
        ]
    return [
        line(f"{part}: tokens/s computed", f"{speed:,}", *bars[0]),
        line(f"{part}: peak GiB", gib, *bars[1]),
        line(f"{part}: shared / paper, conversations/s", f"{ratio}x", *bars[2]),
    ]


# part -> its measurement, and the seconds of its limit
PARTS = {
    "update": (partial(cell, "lora"), 150),
    "step": (partial(colocated.step, "lora"), 200),
    "pipeline": (pipeline.pipeline, 480),
    "full-1.7b": (partial(cell, "full", model="Qwen/Qwen3-1.7B"), 120),
    "full-4b": (partial(cell, "full"), 180),
    "sleep": (colocated.sleep, 420),
    "step-full-1.7b": (partial(colocated.step, "full", model="Qwen/Qwen3-1.7B"), 240),
    "step-full-4b": (partial(colocated.step, "full"), 300),
}
BENCHMARK = Benchmark(
    "gpu",
    {name: measure for name, (measure, _) in PARTS.items()},
    show,
    lines,
    limits={name: seconds for name, (_, seconds) in PARTS.items()},
)

if __name__ == "__main__":
    BENCHMARK.main()
