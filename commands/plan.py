"""Say what fits on a GPU, how long it takes, and by which command it is trained.

Holds: `show`, `card_of`. Leaves out: the arithmetic (models/plan.py), its formulas
(docs/train.md).
Exercise it: `python cli.py plan --model Qwen/Qwen3-4B --card 4090`. Read next: models/plan.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import chain

from agents import find
from config.errors import UserError
from config.options import EMBEDDED, TINY, PlanConfig, RunConfig
from config.terminal import console, next_step, say
from engines.open import lost_base
from memagent import Agent
from models.plan import (
    CARDS,
    DECODE,
    MODES,
    PREFILL,
    UPDATE,
    USUAL,
    Plan,
    checkpoint_gb,
    geometry,
    longest_section,
    plan,
    smallest,
    step_seconds,
)
from models.policy import LR, mode_of

# lines of the table, of a plan p: those shown of plans that do not fit, too, and the others
MEMORY = {
    "trainer's weights": lambda p: f"{p.weights:.1f}",
    "its gradients": lambda p: f"{p.gradients:.1f}",
    "its optimizer": lambda p: f"{p.optimizer:.1f}",
    "a pass": lambda p: f"{p.activations:.1f}",
    "sampler's weights": lambda p: f"{p.sampler:.1f}",
}
PHASES = {
    "its cache": lambda p: f"{p.cache:.1f}",
    "peak of the rollout": lambda p: f"{p.rollout:.1f}",
    "peak of the update": lambda p: f"{p.update:.1f}",
    "sleep": lambda p: p.sleep,
    "--micro-tokens": lambda p: f"{p.micro_tokens:,}",
    "turns in the cache": lambda p: f"{p.turns:,}",
}
IN_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def card_of(gpu_gib: float | None = None, card: str = "") -> tuple[float, str]:
    """Complete memory (GiB) and name of a card from either.

    card: as people write it (4090, rtx4090, a100-40gb, NVIDIA H100 PCIe). A name alone has its own
    memory; a size alone is the smallest of `USUAL` that has it; nothing at all is an H100 of
    80 GiB. UserError for an unknown name.
    """
    if card:
        short = {_short(name): name for name in CARDS}
        # the longest name first: an A100 is no A10 of 0 GiB
        names = "|".join(sorted(short, key=len, reverse=True))
        found = re.fullmatch(rf"({names})(?:([1-9]\d+)(?:gi?b?)?)?", _short(card))
        if not found:
            near = get_close_matches(_short(card), short, 1, 0.5)
            meant = f"did you mean {short[near[0]]}? Known are" if near else "choose one of"
            raise UserError(
                f"Unknown card {card!r}: {meant} {', '.join(CARDS)}; or give --gpu-gib."
            )
        card = short[found[1]]
        return gpu_gib or float(found[2] or CARDS[card][2]), card
    large_enough = (name for gib, name in USUAL.items() if gib >= (gpu_gib or 80))
    return gpu_gib or 80.0, next(large_enough, USUAL[max(USUAL)])


def _short(card: str) -> str:
    words = re.split(
        r"[^a-z0-9]+", re.sub("rtx|nvidia|geforce|tesla|pcie|sxm.?", " ", card.lower())
    )
    return "".join(words)


def show(
    name: str, preset: str, stored: Mapping[str, Mapping], given: Sequence[Mapping], file: object
) -> None:
    """Say in a sentence what fits, and by which command it is trained; with `explain`, also why.

    stored: sections of the settings in `file`, if any. given: what flags say of the machine, grpo
    and the agent. What `train` would refuse for want of the base weights does not fit.
    UserError: the agent does not read section by section; no model.
    """
    run, (machine, grpo, agent) = stored.get("run", {}), given
    known = {"model": run["model"]} if "model" in run else {}
    c = PlanConfig(**known | {"devices": run.get("devices", 1) * run.get("num_nodes", 1)} | machine)
    fields = stored.get("grpo", {}) | grpo, stored.get("agent", {}) | agent
    reads = name or run.get("agent", "")
    training, reader = find.resolve(preset, c.model or EMBEDDED, *fields, reads)
    if not reader.by_section:
        raise UserError(
            f"A plan is for an agent that is trained section by section, which {reader.label} is "
            "not."
        )
    if not (c.model or file):
        raise UserError("Name the model to plan for, such as --model Qwen/Qwen3-4B, or a --config.")
    # full training leaves vLLM no weights from before; adapters leave it the base's
    lost = lost_base(reader)
    (gpu_gib, card), g = card_of(c.gpu_gib, c.card), geometry(c.model)

    def planned(mode: str, gib: float = gpu_gib, reader: Agent = reader) -> Plan:
        return plan(g, mode, gib, c.devices, training, reader)

    plans = {mode: planned(mode) for mode in MODES}
    seconds = {
        mode: step_seconds(g, p, c.devices, training, reader, c.sections, card)
        for mode, p in plans.items()
        if p.fits and not (lost and mode == "full")
    }
    where = f"{c.devices} x {card}" if c.devices > 1 else f"one {card}"
    where += f" of {gpu_gib:g} GiB" + " (give yours by --card)" * (not (c.card or c.gpu_gib))
    if c.explain:
        passed = f"of which a token passes {g.passed / 1e9:.3g} in the layers, " * bool(g.experts)
        console.print(
            f"{c.model or 'the embedded policy'}: {g.weights / 1e9:.3g} billion weights, {passed}"
            f"{g.kv_bytes / 1024:.0f} KiB of keys and values a token; {where}; agent "
            f"{reader.label}, memories of {reader.config.memory_tokens}, layout "
            f"{reader.config.layout}."
        )
        longest = {
            mode: longest_section(reader, lambda other, mode=mode: planned(mode, reader=other))
            for mode in MODES
            if not (lost and mode == "full")
        }
        _explain(plans, seconds, longest, training.lora_rank or 32, card)
    if lost:
        console.print(f"Full training is refused as it stands. {lost}", markup=False)

    order = sorted(
        dict.fromkeys((mode_of(training), "full", "lora", "qlora")), key=lambda m: m not in seconds
    )
    parts = []
    for mode in order:
        about = f"{sum(seconds.get(mode, ())) / 36:.1f} h"
        if mode in seconds and not parts:
            steps = f"{max(training.tasks_per_step)} x {training.group_size} readings of "
            steps += f"{c.sections} sections of {reader.config.chunk_tokens:,} tokens"
            does = f"fits {where}: about {about} for 100 steps of {steps}"
        elif mode in seconds:
            does = f"fits, too ({about})"
        elif lost and mode == "full":
            does = "is refused as it stands"
        else:
            gib = smallest(lambda gib, mode=mode: planned(mode, gib))
            does = f"wants {gib} GiB" if gib else f"wants more than {max(USUAL)} GiB a GPU"
            does = does if parts else f"does not fit {where} and {does}"
        parts.append(f"{IN_WORDS[mode]} {does}")
    said = "; ".join(parts)
    factor = " Hours are good to a factor of two." * bool(seconds)
    say(f"{said[0].upper()}{said[1:]}.{factor}")
    if not seconds:
        say("A smaller --model, more --devices or sections of fewer --chunk-tokens may fit.")
        return

    mode, kept = order[0], run.get("keep_checkpoints", RunConfig().keep_checkpoints)
    if kept:
        kept += 1 + bool(run.get("validation"))  # one that is written, and the best
        each = checkpoint_gb(g, mode, training)
        say(
            f"Its checkpoints take up to {kept * each:,.2f} GB of disk, {kept} of {each:,.2f} GB: "
            "an older one goes once the newer is whole."
        )
    needed = {
        "lora_rank": 0 if mode == "full" else training.lora_rank or 32,
        "quantise": mode == "qlora",
        "recompute": True,
        "micro_tokens": min(plans[mode].micro_tokens or 1 << 20, training.micro_tokens),
    }
    real = c.model not in ("", TINY)
    if real and "lr" not in fields[0]:
        needed["lr"] = LR[mode]
    flags = {"config": file, "preset": preset, "agent": name, "engine": "vllm" if real else ""}
    flags["data"] = "FILE" if real and "data" not in run else ""
    flags |= {field: machine[field] for field in ("model", "devices") if field in machine}
    flags |= (
        grpo | {n: value for n, value in needed.items() if getattr(training, n) != value} | agent
    )
    usual = {"config": None, "preset": "default", "agent": "", "engine": run.get("engine", "")}
    words = [_flag(n, value) for n, value in flags.items() if value not in ("", usual.get(n))]
    data = "on your FILE of tasks " * bool(flags["data"])
    words = ("train", *chain.from_iterable(words))
    next_step(f"train {data}(--dry-run tries it here, on a CPU)", *words)


def _flag(name: str, value: object) -> tuple[str, ...]:
    """Return a setting as words of a command."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{dashed}" if value else f"--no-{dashed}",)
    return f"--{dashed}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _explain(
    plans: Mapping[str, Plan],
    seconds: Mapping[str, tuple[float, float]],
    longest: Mapping[str, int],
    rank: int,
    card: str,
) -> None:
    """Print what each mode takes, a column a mode; what does not fit has no seconds."""
    from rich.table import Table

    table = Table("GiB a GPU", "QLoRA", f"LoRA, rank {rank}", "full")
    table.add_row("fits", *("yes" if mode in seconds else "no" for mode in MODES))
    for title, cell in MEMORY.items():
        table.add_row(title, *(cell(plans[mode]) for mode in MODES))
    for title, cell in PHASES.items():
        table.add_row(title, *(cell(plans[mode]) if mode in seconds else "" for mode in MODES))
    times = [seconds.get(mode, (0, 0)) for mode in MODES]
    table.add_row("seconds a step", *(f"{a:.0f} + {b:.0f}" if a else "" for a, b in times))
    table.add_row("hours for 100 steps", *(f"{(a + b) / 36:.1f}" if a else "" for a, b in times))
    sections = (longest.get(mode) for mode in MODES)
    table.add_row("longest section, tokens", *(f"{n:,}" if n else "" for n in sections))
    console.print(table)
    console.print(
        "With --recompute; no two turns share anything, and those that the cache does not hold "
        f"wait. Seconds are an estimate for the {card}: rollout + update, at {PREFILL:.0%}, "
        f"{DECODE:.0%} and {UPDATE:.0%} of its peak for prefill, decode and update."
    )
