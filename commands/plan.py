"""Print what fits on a GPU and how long a step takes.

Holds: `show`. Leaves out: the arithmetic (models/plan.py).
Exercise it: `python cli.py plan --model Qwen/Qwen3-4B --gpu-gib 24`. Read next: models/plan.py.
"""

from __future__ import annotations

from config.errors import UserError
from config.options import GRPOConfig
from memagent import Agent
from models.plan import (
    CARD_GIB,
    CARDS,
    DECODE,
    FORMULAS,
    MODES,
    OF_SIZE,
    PREFILL,
    UPDATE,
    geometry,
    longest_section,
    plan,
)

# what the table says of a plan
LINES = {
    "trainer's weights": lambda p: f"{p.weights:.1f}",
    "its gradients": lambda p: f"{p.gradients:.1f}",
    "its optimizer": lambda p: f"{p.optimizer:.1f}",
    "a pass": lambda p: f"{p.activations:.1f}",
    "sampler's weights": lambda p: f"{p.sampler:.1f}",
    "its cache": lambda p: f"{p.cache:.1f}",
    "peak of the rollout": lambda p: f"{p.rollout:.1f}",
    "peak of the update": lambda p: f"{p.update:.1f}",
    "--sleep": lambda p: p.sleep,
    "--micro-tokens": lambda p: f"{p.micro_tokens:,}",
    "turns in the cache": lambda p: f"{p.turns:,}",
    "seconds a step": lambda p: f"{p.rollout_s:.0f} + {p.update_s:.0f}",
    "hours for 100 steps": lambda p: f"{(p.rollout_s + p.update_s) / 36:.1f}",
}


def card_of(gpu_gib: float | None = None, card: str = "") -> tuple[float, str]:
    """Memory and name of the card that is meant: a name alone has its own memory, a size alone is the smallest of `OF_SIZE` that has it,
    nothing is an H100 of 80 GiB."""
    if card and card not in CARDS:
        raise UserError(f"Unknown card {card!r}: choose one of {', '.join(CARDS)}.")
    if gpu_gib is None:
        return CARD_GIB[card or "H100"], card or "H100"
    return gpu_gib, card or next(
        (name for name in OF_SIZE if CARD_GIB[name] >= gpu_gib), OF_SIZE[-1]
    )


def show(
    model: str,
    gpu_gib: float | None,
    devices: int,
    card: str,
    sections: int,
    grpo: GRPOConfig,
    agent: Agent,
) -> None:
    """Print what fits, one line a mode, and the formulas. gpu_gib, card: as in `card_of`."""
    from rich.table import Table

    from config.terminal import console

    gpu_gib, card = card_of(gpu_gib, card)
    g = geometry(model)
    name = model or "the embedded policy"
    console.print(
        f"{name}: {g.weights / 1e9:.3g} billion weights, {g.kv_bytes / 1024:.0f} KiB of keys and values a token. {devices} GPU(s) of {gpu_gib:g} GiB ({card}); "
        f"a step of {max(grpo.tasks_per_step)} x {grpo.group_size} trajectories, documents of {sections} sections of {agent.config.chunk_tokens:,} tokens, "
        f"agent {agent.label}, memories of {agent.config.memory_tokens}, layout {agent.config.layout}."
    )
    plans = [plan(g, mode, gpu_gib, devices, grpo, agent, sections, card) for mode in MODES]
    table = Table("GiB a GPU", "QLoRA", f"LoRA, rank {grpo.lora_rank or 32}", "full")
    table.add_row("fits", *("yes" if p.fits else "no" for p in plans))
    for number, (line, value) in enumerate(LINES.items()):
        table.add_row(line, *(value(p) if p.fits or number < 5 else "" for p in plans))
    longest = [longest_section(g, mode, gpu_gib, devices, grpo, agent) for mode in MODES]
    table.add_row("longest section, tokens", *(f"{n:,}" if n else "" for n in longest))
    console.print(table)
    console.print(
        f"With --recompute; turns that share nothing, more of them wait. Seconds are an estimate for the {card}: rollout + update, at {PREFILL:.0%}, {DECODE:.0%} and {UPDATE:.0%} of its peak for prefill, decode and update."
    )
    console.print(f"\n{FORMULAS}", markup=False, highlight=False)
