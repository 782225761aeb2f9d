"""Say what fits on a GPU, how long it takes, and by which command it is trained; the arithmetic is
models/plan.py's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain

from rich.table import Table

from agents import find
from config.errors import UserError
from config.options import EMBEDDED, TINY, PlanConfig, RunConfig
from config.terminal import console, next_step, say
from engines.open import lost_base
from models.plan import (
    CARDS,
    MODES,
    USUAL,
    checkpoint_gb,
    geometry,
    plan,
    smallest,
    step_seconds,
)
from models.policy import LR, mode_of

NAMES = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def card_of(gpu_gib: float | None = None, card: str = "") -> tuple[float, str]:
    """Complete memory (GiB) and name of a card from either.

    card: with its maker or not, and maybe its memory (4090, a100-40gb, NVIDIA H100 PCIe). A name
    alone has its own memory; a size alone is the smallest of `USUAL` that has it; nothing at all is
    an H100 of 80 GiB. UserError for an unknown name.
    """
    if not card:
        large_enough = (name for gib, name in USUAL.items() if gib >= (gpu_gib or 80))
        return gpu_gib or 80.0, next(large_enough, USUAL[max(USUAL)])
    words = re.sub("[^a-z0-9]+", " ", card.lower().replace("rtx", " "))
    names = {name.lower().removeprefix("rtx "): name for name in CARDS}
    found = [name for name in names if re.search(rf"\b{name}\b", words)]
    if len(found) != 1:
        raise UserError(
            f"Unknown card {card!r}: choose one of {', '.join(CARDS)}; or give --gpu-gib."
        )
    gib = re.search(r"\b(\d+) ?gi?b?\b", words)
    name = names[found[0]]
    return gpu_gib or float(gib[1] if gib else CARDS[name][2]), name


def show(
    name: str, preset: str, stored: Mapping[str, Mapping], given: Sequence[Mapping], file: object
) -> None:
    """Print what each way of training takes, and by which command the one that fits is trained.

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
            f"A plan is for an agent that reads section by section, not {reader.label}."
        )
    if not (c.model or file):
        raise UserError("Name the model to plan for, such as --model Qwen/Qwen3-4B, or a --config.")
    (gib, card), sizes = card_of(c.gpu_gib, c.card), geometry(c.model)
    plans = {mode: plan(sizes, mode, gib, c.devices, training, reader) for mode in MODES}
    # full training leaves vLLM no weights from before; adapters leave it the base's
    lost = lost_base(reader)
    seconds = {
        mode: sum(step_seconds(sizes, p, c.devices, training, reader, c.sections, card))
        for mode, p in plans.items()
        if p.fits and not (lost and mode == "full")
    }
    lines = {
        "GiB a GPU": lambda mode: f"{max(plans[mode].rollout, plans[mode].update):.0f}",
        "turns at once": lambda mode: f"{plans[mode].turns:,}",
        "seconds a step": lambda mode: f"{seconds[mode]:,.0f}",
        "hours for 100 steps": lambda mode: f"{seconds[mode] / 36:.1f}",
    }

    def fits(mode: str) -> str:
        if mode in seconds:
            return "yes"
        if lost and mode == "full":
            return "no"
        gib = smallest(lambda gib: plan(sizes, mode, gib, c.devices, training, reader))
        return f"wants {gib} GiB" if gib else f"wants more than {max(USUAL)} GiB"

    table = Table("", *(NAMES[mode] for mode in MODES))
    table.add_row("fits", *map(fits, MODES))
    for title, cell in lines.items():
        table.add_row(title, *(cell(mode) if mode in seconds else "" for mode in MODES))
    console.print(table)
    where = f"{c.devices} x {card}" if c.devices > 1 else f"one {card}"
    where += f" of {gib:g} GiB" + " (give yours by --card)" * (not (c.card or c.gpu_gib))
    if lost:
        say(f"Full training is refused as it stands. {lost}")
    if not seconds:
        say(
            f"Nothing fits {where}: a smaller --model, more --devices or sections of fewer "
            "--chunk-tokens may."
        )
        return
    mode = next(m for m in (mode_of(training), "full", "lora", "qlora") if m in seconds)
    say(
        f"On {where} {NAMES[mode]} takes about {seconds[mode] / 36:.1f} h for 100 steps of "
        f"{max(training.tasks_per_step)} x {training.group_size} readings of {c.sections} sections "
        f"of {reader.config.chunk_tokens:,} tokens. Hours are good to a factor of two."
    )
    if kept := run.get("keep_checkpoints", RunConfig().keep_checkpoints):
        kept += 1 + bool(run.get("validation"))  # one that is written, and the best
        each = checkpoint_gb(sizes, mode, training)
        say(f"Its {kept} checkpoints take {each:,.2f} GB of disk each.")

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
    flags |= grpo | {n: v for n, v in needed.items() if getattr(training, n) != v} | agent
    usual = {"config": None, "preset": "default", "agent": "", "engine": run.get("engine", "")}
    words = [_flag(n, value) for n, value in flags.items() if value not in ("", usual.get(n))]
    data = "on your FILE of tasks " * bool(flags["data"])
    next_step(
        f"train {data}(--dry-run tries it here, on a CPU)",
        *("train", *chain.from_iterable(words)),
    )


def _flag(name: str, value: object) -> tuple[str, ...]:
    """Return a setting as words of a command."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{dashed}" if value else f"--no-{dashed}",)
    return f"--{dashed}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
