"""The update on a GPU, with random weights of Qwen3's sizes, in packed rows of 16,384 tokens.

Holds: seconds, tokens a second, utilisation and peak memory of LoRA and of full fine-tuning, each
as `train` does it on one GPU, in both layouts; the mean difference of log-probs between the packed
row and one sequence at a time; a profile of a LoRA update.
Leaves out: rollouts and whole steps (colocated.py), the packed row's attention (flex.py, a part of
this one).
Exercise it: `python -m bench.gpu` on a machine with a GPU, `python -m bench.gpu --tiny` without
one, to see that it runs. Read next: parts.py.

Tasks of G = 8 members, at every turn 2,048 tokens of section and problem in common, 512 of memory
and 512 of response of each member's own. Layers are recomputed. The parts, alone with `--part`:

    flex       the packed row's attention: log-probs, gradients, compilations, speed
    update     Qwen3-4B's LoRA update as it is, with each part of --fused, with all of them, and
               with half of the layers recomputed: speed, memory, distance from the first
    lora       Qwen3-4B: bfloat16 weights, adapters of rank 16 on all linear layers
    full-1.7b  Qwen3-1.7B: FSDP2 over one rank, float32 weights, bfloat16 arithmetic
    full-4b    the same of Qwen3-4B, on a card that it fits by the plan's figures
    profile    a LoRA update of Qwen3-4B: its operators by shape and its kernels, by time
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from bench.common import line, random_qwen3, table
from bench.flex import flex, flex_lines, show_flex
from bench.parts import Benchmark
from config.errors import UserError
from config.options import GRPOConfig
from grpo import policy_loss, token_weights
from models import ranks
from models.fused import fuse
from models.load import inner, optimizer_of, recompute, with_lora
from models.logprobs import Row, logprobs, pack, policy_logprobs
from models.plan import CARDS, CONTEXT_GIB, FRAGMENTS, GIB, KNOWN, Geometry, activations_gib, dense

SHAPE = {"group": 8, "common": 2048, "own": 512, "response": 512, "row_tokens": 16384}
TINY = {"group": 4, "common": 48, "own": 12, "response": 12, "row_tokens": 256}
TINY_MODEL = dense(2, 64, 4, 2, 16, 96, 512, True)
TARGETS = {
    "lora": {"tokens_per_s": 14_000, "gib": 30},
    "full-4b": {"tokens_per_s": 10_000, "gib": 85},
}
SHARED_OVER_PAPER = 1.8
REPEATS = 5
CONFIG = GRPOConfig(importance="none", lora_rank=16, lr=1e-6)
LAYOUTS = ("paper", "shared")
# update -> parts of --fused, and of how many layers one is recomputed
VARIANTS: dict[str, tuple[tuple[str, ...], int]] = {
    "as it is": ((), 1),
    "lora": (("lora",), 1),
    "norms": (("norms",), 1),
    "compiled": (("compiled",), 1),
    "liger": (("liger",), 1),
    "flash": (("flash",), 1),
    "together": (("lora", "norms", "compiled"), 1),
    "together, every second layer": (("lora", "norms", "compiled"), 2),
}
LIMIT_S = 150  # after which no further one is begun
TOGETHER = 13_700  # tokens/s by arithmetic
PHASES = ("passes_s", "clip_s", "optimizer_s")
MOST_SHOWN = 25  # operators and kernels of a profile


def check_fits(sizes: Geometry, row_tokens: int, gib: float) -> dict[str, float]:
    """Return the plan's GiB of a full update alone, without a sampler: `state`, `activations`.

    UserError where a card of `gib` GiB has less.
    """
    state, activations = 16 * sizes.weights / GIB, activations_gib(sizes, row_tokens, "full")
    room = gib * (1 - FRAGMENTS) - CONTEXT_GIB
    if state + activations > room:
        raise UserError(
            f"By the plan's figures a full update of {sizes.weights / 1e9:.3g} billion weights "
            f"takes {state + activations:.1f} GiB, "
            f"and a card of {gib:.1f} GiB has room for {room:.1f}."
        )
    return {"state": round(state, 2), "activations": round(activations, 2)}


@contextmanager
def policy_of(mode: str, sizes: Geometry, device: str) -> Iterator[torch.nn.Module]:
    """Make a policy as `train` holds it on one device.

    lora: bfloat16 weights (on a CPU float32) under adapters. full: float32 weights that FSDP2 holds
    over a process group of one rank; on a GPU they are computed with in bfloat16.
    """
    on_gpu = device == "cuda"
    if mode == "lora":
        dtype = torch.bfloat16 if on_gpu else torch.float32
        yield with_lora(random_qwen3(sizes, dtype, device), CONFIG)
        return
    from torch.distributed.device_mesh import init_device_mesh

    with ranks.process_group(on_gpu):
        model = random_qwen3(sizes, torch.float32, device)
        mesh = init_device_mesh(device, (1,))
        ranks.shard(model, mesh, mixed=on_gpu, logprobs=logprobs, alone=alone)
        yield model


def turns(layout: str, groups: int, shape: dict, vocab: int) -> list[Row]:
    """Make random turns of some groups; the same pieces in both layouts."""
    rng = random.Random(0)

    def some(n: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(n)]

    rows = []
    for _ in range(groups):
        common = some(shape["common"])
        for k in range(shape["group"]):
            tail, response = some(shape["own"]), some(shape["response"])
            prompt = common + tail if layout == "shared" else tail + common
            rows.append(Row(prompt, response, [0.0] * len(response), rng.gauss(0, 1), trajectory=k))
    return rows


def update(policy, rows: list[Row], optimizer, row_tokens: int, every: int = 1) -> dict[str, float]:
    """Make one optimizer step as GRPO.update does; every n-th layer is recomputed.

    Returns `tokens`, those that went through the model, `grad_norm`, and the seconds of its phases.
    """
    model = inner(policy)
    recompute(model, True, every)
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
    norm = ranks.full_tensor(
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CONFIG.grad_clip)
    ).item()
    clock.append(now(model.device))
    optimizer.step()
    optimizer.zero_grad()
    clock.append(now(model.device))
    passes, clip, step = (b - a for a, b in pairwise(clock))
    return {
        "tokens": tokens,
        "grad_norm": norm,
        "seconds": clock[-1] - clock[0],
        "passes_s": passes,
        "clip_s": clip,
        "optimizer_s": step,
    }


def now(device: torch.device) -> float:
    """Return the seconds of a clock, after all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def alone(model, row: Row) -> torch.Tensor:
    """Compute log-probs of a row's response ids [R], by transformers' own attention."""
    ids = torch.tensor([row.prompt_ids + row.response_ids], device=model.device)
    p = len(row.prompt_ids)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, p - 1 : -1]
    return model.lm_head(hidden).float().log_softmax(-1).gather(1, ids[0, p:, None])[:, 0]


@torch.no_grad()
def rounding(policy, rows: list[Row], row_tokens: int) -> float:
    """Return the mean |log-prob of the packed row - that of one sequence at a time|.

    Both are in the precision that the policy is trained in.
    """
    model, differences = inner(policy), []
    logprobs = model.alone if hasattr(model, "alone") else partial(alone, model)
    for batch in pack(rows, row_tokens):
        sizes = [len(rows[i].response_ids) for i in batch.index]
        packed = policy_logprobs(model, batch).float().split(sizes)
        for i, ours in zip(batch.index, packed, strict=True):
            differences.append((ours - logprobs(rows[i])).abs())
    return torch.cat(differences).mean().item()


def setting(tiny: bool, model: str) -> tuple[dict, Geometry, int, str]:
    """Return the turns' shape, the model's sizes, how many token ids are drawn from, the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, sizes = (TINY, TINY_MODEL) if tiny else (SHAPE, KNOWN[model])
    return shape, sizes, sizes.vocab * 99 // 100, device


def cell(mode: str, tiny: bool, model: str = "Qwen/Qwen3-4B") -> dict:
    """Measure the update of one model in both layouts."""
    shape, sizes, vocab, device = setting(tiny, model)
    out: dict = {"mode": mode, "model": "tiny" if tiny else model, "shape": shape}
    if mode == "full" and device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
        out["plan_gib"] = check_fits(sizes, shape["row_tokens"], gib)
    with policy_of(mode, sizes, device) as policy:
        optimizer = optimizer_of([p for p in policy.parameters() if p.requires_grad], CONFIG)
        out["mean_dlogp"] = rounding(policy, turns("shared", 1, shape, vocab), shape["row_tokens"])
        print(f"mean |log-prob of the packed row - alone| {out['mean_dlogp']:.2g}", flush=True)
        for layout in LAYOUTS:
            rows = turns(layout, 2, shape, vocab)
            out[layout] = repeated(policy, rows, optimizer, shape["row_tokens"])
            print(layout, out[layout], flush=True)
    speeds = [out[layout]["conversations_per_s"] for layout in ("shared", "paper")]
    out["shared_over_paper"] = round(speeds[0] / speeds[1], 2)
    return out


def variants(tiny: bool) -> dict:
    """Measure the update with each of `VARIANTS`, on the same weights and turns.

    Each is saved as it comes. dlogp: the mean |difference| of log-probs from those of the first,
    dgradient: of the adapters' gradient, relative to its norm.
    """
    shape, sizes, vocab, device = setting(tiny, "Qwen/Qwen3-4B")
    rows, start, first = turns("paper", 1, shape, vocab), time.perf_counter(), None
    out: dict = {"model": "tiny" if tiny else "Qwen/Qwen3-4B", "shape": shape, "variants": {}}
    for name, (fused, every) in VARIANTS.items():
        if first and time.perf_counter() - start > LIMIT_S:
            out["variants"][name] = {"failed": f"{LIMIT_S} s were over"}
            continue
        with policy_of("lora", sizes, device) as policy:
            for key, weight in policy.named_parameters():
                if "lora_B" in key:  # of zeros the adapters would do nothing
                    torch.nn.init.normal_(weight, std=1e-3)
            try:
                fuse(policy, fused)
            except UserError as error:
                out["variants"][name] = {"failed": str(error)}
                continue
            begun = time.perf_counter()
            computed = both(policy, rows, shape["row_tokens"])
            first = first or computed
            apart = {
                "first_s": round(time.perf_counter() - begun, 2),  # it compiles
                "dlogp": (computed[0] - first[0]).abs().mean().item(),
                "dgradient": ((computed[1] - first[1]).norm() / first[1].norm()).item(),
            }
            optimizer = optimizer_of([p for p in policy.parameters() if p.requires_grad], CONFIG)
            measured = repeated(policy, rows, optimizer, shape["row_tokens"], every)
            out["variants"][name] = measured | apart
        print(name, out["variants"][name], flush=True)
        if not tiny:
            BENCHMARK.save("update", out)
    return out


def both(policy, rows: list[Row], row_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of all response tokens, and the gradient of their mean, flat."""
    policy.zero_grad()
    recompute(inner(policy), True)
    found = []
    for batch in pack(rows, row_tokens):
        logp = policy_logprobs(inner(policy), batch)
        logp.mean().backward()
        found.append(logp.detach().float())
    gradients = [p.grad.flatten() for p in policy.parameters() if p.requires_grad]
    policy.zero_grad()
    return torch.cat(found), torch.cat(gradients)


def repeated(policy, rows: list[Row], optimizer, row_tokens: int, every: int = 1) -> dict:
    """Measure one update several times, the first time apart: it compiles."""
    device = inner(policy).device.type
    updates = []
    for _ in range(REPEATS + 1):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        updates.append(update(policy, rows, optimizer, row_tokens, every))
    first, *updates = updates
    tokens, s = first["tokens"], median(x["seconds"] for x in updates)
    peak_gib = round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else None
    return {
        "first_s": round(first["seconds"], 4),
        "seconds": [round(x["seconds"], 4) for x in updates],
        **{phase: round(median(x[phase] for x in updates), 4) for phase in PHASES},
        "turn_tokens": sum(map(len, rows)),
        "computed_tokens": tokens,
        "tokens_per_s": round(tokens / s),
        "conversations_per_s": round(len(rows) / s, 3),
        "mfu": round(tokens / s * flop_per_token(policy) / peak_flops(device), 4),
        "peak_gib": peak_gib,
    }


def flop_per_token(policy) -> int:
    """Count the FLOP of matrix multiplications in the layers: frozen weights have no gradient."""
    layers = [p for name, p in policy.named_parameters() if ".layers." in name]
    return sum((6 if p.requires_grad else 4) * p.numel() for p in layers)


def peak_flops(device: str) -> float:
    """Return the card's peak FLOP/s, nan for an unknown card or a CPU."""
    card = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((tflops * 1e12 for name, (tflops, _) in CARDS.items() if name in card), math.nan)


def profile(tiny: bool) -> dict:
    """Profile a LoRA update.

    Lists its operators by the shapes of their inputs and, on a GPU, its kernels, each with the
    milliseconds of its own. An operator's are those of the kernels that it starts; on a CPU they
    are the processor's.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    shape, sizes, vocab, device = setting(tiny, "Qwen/Qwen3-4B")
    with policy_of("lora", sizes, device) as policy:
        optimizer = optimizer_of([p for p in policy.parameters() if p.requires_grad], CONFIG)
        rows = turns("paper", 1, shape, vocab)
        measure = partial(update, policy, rows, optimizer, shape["row_tokens"])
        measure()  # compiles
        undisturbed = measure()
        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            measure()
    events = profiler.key_averages(group_by_input_shape=True)
    operators = [e for e in events if e.device_type == DeviceType.CPU]
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    own_time = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return {
        "tokens": undisturbed["tokens"],
        "seconds": round(undisturbed["seconds"], 4),
        "shape": shape,
        "operators": longest(operators, own_time),
        "kernels": longest(kernels, own_time),
    }


def longest(events: list, own_time: str) -> dict:
    """List the profiler's events that take the most time, and the time of all."""
    total = sum(getattr(e, own_time) for e in events)
    events = sorted(events, key=lambda e: -getattr(e, own_time))[:MOST_SHOWN]
    return {
        "ms": round(total / 1e3, 3),
        "most": [
            {
                "name": e.key,
                "shapes": str([s for s in e.input_shapes or () if s]),
                "calls": e.count,
                "ms": round(getattr(e, own_time) / 1e3, 3),
                "share": round(getattr(e, own_time) / max(total, 1e-9), 4),
            }
            for e in events
        ],
    }


def show(part: str, result: dict) -> None:
    """Print a part's table."""
    if part == "flex":
        show_flex(result)
    elif part == "profile":
        show_profile(result)
    elif part == "update":
        columns = ("tokens_per_s", "mfu", "peak_gib", *PHASES, "first_s", "dlogp", "dgradient")
        rows = [
            (name, *([result["failed"]] if "failed" in result else map(result.get, columns)))
            for name, result in result["variants"].items()
        ]
        table("LoRA update in packed rows", ("", *columns), rows)
    else:
        columns = (
            "tokens_per_s", "conversations_per_s", "mfu", "peak_gib", *PHASES, "first_s",
        )  # fmt: skip
        rows = [(f"{part}, {layout}", *map(result[layout].get, columns)) for layout in LAYOUTS]
        table("Update in packed rows", ("", *columns), rows)
        print(f"{part}: mean |log-prob of the packed row - alone| = {result['mean_dlogp']:.2g}")


def show_profile(result: dict) -> None:
    print(f"A LoRA update of {result['tokens']:,} tokens takes {result['seconds']} s.")
    for kind in ("operators", "kernels"):
        rows = [
            (x["name"][:70], x["shapes"][:50], x["calls"], x["ms"], f"{x['share']:.1%}")
            for x in result[kind]["most"]
        ]
        if rows:
            header = ("own time", "shapes", "calls", "ms", "share")
            table(f"{kind}: {result[kind]['ms']:,} ms in all", header, rows)


def lines(part: str, result: dict) -> list[dict]:
    """List what was measured against the bars; full-1.7b has none."""
    if part == "flex":
        return flex_lines(result)
    if part == "profile":
        return []
    if part == "update":
        speed = result["variants"].get("together", {}).get("tokens_per_s", 0)
        what = "update: tokens/s with lora, norms and compiled"
        return [line(what, f"{speed:,}", f"at least {TOGETHER:,}", speed >= TOGETHER)]
    speed, ratio = result["paper"]["tokens_per_s"], result["shared_over_paper"]
    gib = max(result[layout]["peak_gib"] or 0 for layout in LAYOUTS)
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


BENCHMARK = Benchmark(
    "gpu",
    {
        "flex": flex,
        "update": variants,
        "lora": partial(cell, "lora"),
        "full-1.7b": partial(cell, "full", model="Qwen/Qwen3-1.7B"),
        "full-4b": partial(cell, "full"),
        "profile": profile,
    },
    show,
    lines,
)

if __name__ == "__main__":
    BENCHMARK.main()
