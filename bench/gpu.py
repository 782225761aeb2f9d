"""What one wants to know of one's own card: `python -m bench.gpu PART`, on a machine with a GPU.

    update    Qwen3-4B's LoRA update in both layouts: speed, memory
    step      training steps of Qwen3-4B with vLLM: rollout, switch, update, the plan's GiB beside
    pipeline  SmolLM2: warm start, GRPO with vLLM, evaluations

A part ends with what it has at its limit (`--limit` another one), and saves what it measures as it
comes in bench/results/gpu.json. `--tiny` shows on a CPU that it runs, and saves nothing. Weights
are random but for `pipeline`. An update is of packed rows of 16,384 tokens, of tasks of G = 8
members, at every turn 2,048 tokens of section and problem in common, 512 of memory and 512 of
response of each member's own. Layers are recomputed. Steps write no checkpoint: they take the disk
of the base weights alone, 8 GB, or memory (TMPDIR=/dev/shm).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from bench import common, pipeline
from bench.common import line, random_qwen3, table, turns
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from grpo import policy_loss, token_weights
from models.load import inner, optimizer_of, recompute, with_lora
from models.logprobs import Row, pack, policy_logprobs
from models.plan import CARDS, GIB, GRAPHS_GIB, KNOWN, Geometry, dense, plan, step_seconds
from report.metrics import PeakMemory, on_gpu

MODEL = "Qwen/Qwen3-4B"
SHAPE = {"group": 8, "common": 2048, "own": 512, "response": 512, "row_tokens": 16384}
TINY = {"group": 4, "common": 48, "own": 12, "response": 12, "row_tokens": 256}
TINY_MODEL = dense(2, 64, 4, 2, 16, 96, 512, True)
# but for the number of sections as recipes/qwen3-4b-80gb-lora.yaml
STEP = {
    "sections": 2, "chunk": 2048, "memory": 512, "final": 128, "tasks": 4, "group": 8, "steps": 3,
}  # fmt: skip
TINY_STEP = {"sections": 2, "chunk": 64, "memory": 12, "final": 12, "tasks": 2, "group": 2,
             "steps": 2}  # fmt: skip
CONFIG = GRPOConfig(importance="none", lora_rank=16, lr=1e-6)
LAYOUTS, REPEATS = ("paper", "shared"), 5
PHASES = ("passes_s", "clip_s", "optimizer_s")
COLUMNS = (
    "mismatch_mean", "mismatch_kl", "read_tokens", "reused_tokens", "written_tokens",
    "trained_tokens", "computed_tokens", "share_saved", "rollout_s", "switch_s", "update_s",
    "step_s", "tokens_per_s", "mfu", "peak_gib",
)  # fmt: skip
Keep = Callable[[dict], None]  # saves what a part has measured so far


# ---------------------------------------------------------------- the update


def update(tiny: bool, keep: Keep) -> dict:
    """Measure the LoRA update of one model in both layouts, in bfloat16 (on a CPU float32)."""
    on_card = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_card else ("cpu", torch.float32)
    shape, sizes = (TINY, TINY_MODEL) if tiny else (SHAPE, KNOWN[MODEL])
    out: dict = {"model": "tiny" if tiny else MODEL, "shape": shape}
    policy = with_lora(random_qwen3(sizes, dtype, device), CONFIG)
    optimizer = optimizer_of([p for p in policy.parameters() if p.requires_grad], CONFIG)
    lengths = shape["common"], shape["own"], (shape["response"], shape["response"])
    for layout in LAYOUTS:
        rows = turns(layout, sizes.vocab * 99 // 100, shape["group"], *lengths, groups=2)
        out[layout] = repeated(policy, rows, optimizer, shape["row_tokens"])
        print(layout, out[layout], flush=True)
        keep(out)
    paper, shared = (out[layout]["turns_per_s"] for layout in LAYOUTS)
    return out | {"shared_over_paper": round(shared / paper, 2)}


def repeated(policy, rows: list[Row], optimizer, row_tokens: int) -> dict:
    """Measure one update several times, the first time apart: it compiles attention's kernel."""
    device = inner(policy).device.type
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first, *updates = (one_update(policy, rows, optimizer, row_tokens) for _ in range(REPEATS + 1))
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
        "turns_per_s": round(len(rows) / s, 3),
    }


def one_update(policy, rows: list[Row], optimizer, row_tokens: int) -> dict[str, float]:
    """Make one optimizer step as GRPO.update does; layers are recomputed.

    Returns `tokens`, those that went through the model, and the seconds in all and of its phases.
    """
    model = inner(policy)
    recompute(model, True)
    weights, tokens, clock = token_weights(rows, CONFIG), 0, [now()]
    for batch in pack(rows, row_tokens):
        tokens += len(batch.trie)
        logp = policy_logprobs(model, batch)
        batch = batch.to(model.device)
        old, weight = logp.detach(), batch.per_token(weights)
        loss, _ = policy_loss(logp, old, old, batch.advantage, weight, CONFIG)
        loss.backward()
    clock.append(now())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CONFIG.grad_clip)
    clock.append(now())
    optimizer.step()
    optimizer.zero_grad()
    clock.append(now())
    phases = (b - a for a, b in pairwise(clock))
    return {
        "tokens": tokens,
        "seconds": clock[-1] - clock[0],
        **dict(zip(PHASES, phases, strict=True)),
    }


def now() -> float:
    """Return the seconds of a clock, after all work queued on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------- training steps


def step(tiny: bool, keep: Keep) -> dict:
    """Measure real training steps with vLLM: documents of random words, made-up rewards.

    Every step is reported as it ends. Beside the steps stands what the plan expects, and of memory
    the larger of its two peaks.
    """
    import lightning

    from commands.dryrun import made_up
    from commands.train import train
    from engines.vllm_colocated import ColocatedEngine
    from memagent import MemAgent, MemAgentConfig

    shape, sizes = (TINY_STEP, dense(4, 256, 8, 4, 32, 512, 512, True)) if tiny else (
        STEP, KNOWN[MODEL]
    )  # fmt: skip
    config = GRPOConfig(
        steps=shape["steps"],
        tasks_per_step=(shape["tasks"],),
        group_size=shape["group"],
        lora_rank=32,
        lr=2e-5,
        normalisation="std",
        in_flight=shape["tasks"] * shape["group"],  # few CUDA graphs are captured then
        recompute=True,
        max_mismatch=1.0,  # two bfloat16 passes of these random weights are .03 apart
    )
    agent = MemAgent(MemAgentConfig(
        chunk_tokens=shape["chunk"], memory_tokens=shape["memory"], final_tokens=shape["final"]
    ))  # fmt: skip
    planned = expected(sizes, config, agent, shape["sections"])
    out = {"model": "tiny" if tiny else MODEL, "shape": shape, "plan": planned, "steps": []}
    begin = ColocatedEngine.__init__

    def timed(self, *arguments, **options) -> None:
        free, start = free_gib(), time.perf_counter()
        begin(self, *arguments, **options)
        out["start_s"] = round(time.perf_counter() - start, 2)
        out["start_gib"] = round(free - free_gib(), 2)
        keep(out)

    class Steps(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_) -> None:
            found = {k: round(float(module.metrics[k]), 6) for k in COLUMNS if k in module.metrics}
            out["steps"].append(found)
            print(f"step {len(out['steps'])}", found, flush=True)
            keep(out)

    watched = patch.object(ColocatedEngine, "__init__", timed)
    with tempfile.TemporaryDirectory() as temporary, watched:
        folder = Path(temporary)
        save_model(folder / "base", sizes, torch.float32 if tiny else torch.bfloat16)
        run = RunConfig(
            name="step",
            runs=temporary,
            model=str(folder / "base"),
            data=str(write_tasks(folder / "tasks.jsonl", shape)),
            engine="vllm",
            keep_checkpoints=0,
            keep_trajectories=0,
            kv_gib=0.1 if tiny else 0.0,
        )
        train(run, config, agent, callbacks=[Steps()], reward=made_up)
    return out


def expected(sizes: Geometry, config: GRPOConfig, agent, sections: int) -> dict:
    """Return what the plan says of a step on this card, or without one on an H100."""
    card, gib = "H100", 80.0
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        card = next((known for known in CARDS if known in name), card)
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    p = plan(sizes, "lora", gib, 1, config, agent)
    rollout_s, update_s = step_seconds(sizes, p, 1, config, agent, sections, card)
    peak, start = max(p.rollout, p.update), p.sampler + p.cache + GRAPHS_GIB
    found = dict(rollout_s=rollout_s, update_s=update_s, peak_gib=peak, start_gib=start)
    found = {name: round(x, 2) for name, x in found.items()}
    return found | dict(card=card, sleep=p.sleep, turns=p.turns, micro_tokens=p.micro_tokens)


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0


def save_model(folder: Path, sizes: Geometry, dtype: torch.dtype) -> None:
    """Save a Qwen3 of random weights and the embedded tokenizer; nothing stays on the GPU."""
    from embedded import tiny

    on_card = torch.cuda.is_available()
    model = random_qwen3(sizes, dtype, "cuda" if on_card else "cpu", window=8192)
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    del model
    if on_card:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write_tasks(path: Path, shape: dict) -> Path:
    """Write the tasks of all steps, documents of random words; returns the path."""
    rng = random.Random(0)
    words = ["Anna", "Boris", "Clara", "Lima", "Oslo", "reached", "joined"]  # each a token
    with path.open("w") as file:
        for i in range(shape["tasks"] * shape["steps"]):
            text = " ".join(rng.choices(words, k=shape["sections"] * shape["chunk"] - 8))
            task = {"question": f"Where is {i}?", "answer": "Lima", "context": text}
            file.write(json.dumps(task) + "\n")
    return path


# ---------------------------------------------------------------- the command


def show(part: str, result: dict) -> None:
    """Print a part's table."""
    if part == "pipeline":
        pipeline.show(result)
    elif part == "step":
        planned, steps = result["plan"], result["steps"]
        start = f"{result['start_gib']} GiB (planned {planned['start_gib']}), {result['start_s']} s"
        print(f"vLLM's start: {start}")
        rows = [(k, planned.get(k, ""), *(x[k] for x in steps)) for k in (steps or [{}])[0]]
        table("Training steps", ("", "planned", *map(str, range(len(steps)))), rows)
    else:
        columns = ("tokens_per_s", "mfu", "peak_gib", *PHASES, "first_s", "turns_per_s")
        rows = [(x, *map(result[x].get, columns)) for x in LAYOUTS if x in result]
        table("Update in packed rows", ("", *columns), rows)


def lines(part: str, result: dict) -> list[dict]:
    """List what an update has measured against its targets."""
    if "shared_over_paper" not in result:  # of another part, or cut
        return []
    speed, ratio = result["paper"]["tokens_per_s"], result["shared_over_paper"]
    gib = max(result[layout].get("peak_gib", 0) for layout in LAYOUTS)
    return [
        line("update: tokens/s computed", f"{speed:,}", "at least 14,000", speed >= 14_000),
        line("update: peak GiB", gib, "at most 30", gib <= 30),
        line("update: shared / paper, turns/s", f"{ratio}x", "at least 1.8x", ratio >= 1.8),
    ]


PARTS = {  # part -> its measurement, and the seconds of its limit
    "update": (update, 150),
    "step": (step, 200),
    "pipeline": (pipeline.pipeline, 480),
}


class OutOfTime(BaseException):
    """The limit of a part is reached. No Exception: one that fails is counted, and it goes on."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds; for the main thread."""

    def over(*_) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def save(part: str, result: dict) -> None:
    """Save a part's result in gpu.json beside the other parts'."""
    path = common.RESULTS / "gpu.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    parts[part] = result | {"machine": common.machine()}
    found = [x for name, of in parts.items() for x in lines(name, of)]
    common.write(path, {"benchmark": "gpu", "lines": found, "parts": parts})


def main(arguments: Sequence[str] | None = None) -> dict:
    """Measure one part; its table is printed and, unless tiny, its result saved as it comes."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("part", choices=PARTS)
    help = "small, on whatever device there is; saves no result"
    parser.add_argument("--tiny", action="store_true", help=help)
    help = "seconds after which the part ends with what it has, instead of its own"
    parser.add_argument("--limit", type=int, help=help)
    args = parser.parse_args(arguments)
    if not (args.tiny or torch.cuda.is_available()):
        raise SystemExit("bench.gpu needs a GPU; --tiny shows on a CPU that it runs.")
    measure, limit = PARTS[args.part]
    limit, start = args.limit or limit, time.perf_counter()
    result: dict = {}

    def keep(so_far: dict) -> None:
        result.update(so_far)
        if not args.tiny:
            save(args.part, result)

    try:
        with limited(limit):
            result |= measure(args.tiny, keep)
    except UserError as error:
        raise SystemExit(str(error)) from error
    except OutOfTime:
        if not result:
            raise SystemExit(f"Nothing was measured within {limit} s.") from None
        print(f"The limit of {limit} s was reached; what is missing was not measured.")
        result["cut_s"] = limit
    result["wall_s"] = round(time.perf_counter() - start, 1)
    keep({})
    show(args.part, result)
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
