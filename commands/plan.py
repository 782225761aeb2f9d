"""Say what fits on a GPU, how long it takes, and by which command it is trained.

Holds: `show`, `card_of`. Leaves out: the arithmetic (models/plan.py), its formulas
(docs/engines.md).
Exercise it: `python cli.py plan --model Qwen/Qwen3-4B --card 4090`. Read next: models/plan.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain

from agents import find
from config.errors import UserError
from config.options import EMBEDDED, PlanConfig
from config.terminal import console, next_step, say
from engines.open import gib_of_answerer, refusal_of_answerer
from memagent import Agent
from models.plan import (
    CARD_GIB,
    CARD_OF_SIZE,
    CARDS,
    DECODE,
    MODES,
    PREFILL,
    SIZES_GIB,
    UPDATE,
    Plan,
    geometry,
    longest_section,
    plan,
    smallest,
    step_seconds,
)
from models.setup import mode_of

IN_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True, slots=True)
class Column:
    """What is planned of a mode."""

    plan: Plan
    fits: bool
    seconds: tuple[float, float] = (0.0, 0.0)  # of a step: rollout, update; of a plan that fits
    longest: int = 0  # section, in tokens

    @property
    def hours(self) -> str:
        """Of 100 steps."""
        hours = sum(self.seconds) / 36
        return f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}"


# lines of the table: those of plans that do not fit, too, and the others
ALWAYS = {
    "fits": lambda c: "yes" if c.fits else "no",
    "trainer's weights": lambda c: f"{c.plan.weights:.1f}",
    "its gradients": lambda c: f"{c.plan.gradients:.1f}",
    "its optimizer": lambda c: f"{c.plan.optimizer:.1f}",
    "a pass": lambda c: f"{c.plan.activations:.1f}",
    "sampler's weights": lambda c: f"{c.plan.sampler:.1f}",
    "longest section, tokens": lambda c: f"{c.longest:,}" if c.longest else "",
}
FITTING = {
    "its cache": lambda c: f"{c.plan.cache:.1f}",
    "peak of the rollout": lambda c: f"{c.plan.rollout:.1f}",
    "peak of the update": lambda c: f"{c.plan.update:.1f}",
    "sleep": lambda c: c.plan.sleep,
    "--micro-tokens": lambda c: f"{c.plan.micro_tokens:,}",
    "turns in the cache": lambda c: f"{c.plan.turns:,}",
    "seconds a step": lambda c: "{:.0f} + {:.0f}".format(*c.seconds),
    "hours for 100 steps": lambda c: c.hours,
}


def card_of(gpu_gib: float | None = None, card: str = "") -> tuple[float, str]:
    """Complete memory (GiB) and name of a card from either.

    card: as people write it (4090, rtx4090, a100-40gb, NVIDIA H100 PCIe). A name alone has its own
    memory; a size alone is the smallest of `CARD_OF_SIZE` that has it; nothing at all is an H100 of
    80 GiB. UserError for an unknown name.
    """
    if card:
        short = {_short(name): name for name in CARDS}
        # the longest name first: an A100 is no A10 of 0 GiB
        names = "|".join(sorted(short, key=len, reverse=True))
        found = re.fullmatch(rf"({names})(?:(\d\d+)(?:gi?b?)?)?", _short(card))
        if not found:
            near = get_close_matches(_short(card), short, 1, 0.5)
            meant = f"did you mean {short[near[0]]}? Known are" if near else "choose one of"
            raise UserError(
                f"Unknown card {card!r}: {meant} {', '.join(CARDS)}; or give --gpu-gib."
            )
        card = short[found[1]]
        return gpu_gib or float(found[2] or CARD_GIB[card]), card
    large_enough = (name for name in CARD_OF_SIZE if CARD_GIB[name] >= (gpu_gib or 80))
    return gpu_gib or 80.0, next(large_enough, CARD_OF_SIZE[-1])


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
    and the agent. What `train` would refuse for want of an answerer does not fit.
    UserError: the agent has no use for an answerer, or does not read section by section; no model.
    """
    run, (machine, grpo, agent) = stored.get("run", {}), given
    known = {field: run[field] for field in ("model", "answerer") if field in run}
    c = PlanConfig(**known | {"devices": run.get("devices", 1) * run.get("num_nodes", 1)} | machine)
    if not (c.model or file):
        raise UserError("Name the model to plan for, such as --model Qwen/Qwen3-4B, or a --config.")
    fields = stored.get("grpo", {}) | grpo, stored.get("agent", {}) | agent
    reads = name or run.get("agent", "")
    training, reader = find.resolve(preset, c.model or EMBEDDED, *fields, reads)
    if not reader.by_section:
        raise UserError(
            f"A plan is for an agent that is trained section by section, which {reader.label} is "
            "not."
        )
    if refused := refusal_of_answerer(c.answerer, reader, one_set=False):
        raise UserError(refused)
    # full training leaves vLLM no weights from before; adapters leave it the base's
    lost = refusal_of_answerer(c.answerer, reader, one_set=True)
    (gpu_gib, card), beside = card_of(c.gpu_gib, c.card), gib_of_answerer(c.answerer)
    g = geometry(c.model)

    def planned(mode: str, gib: float = gpu_gib, n: int = c.devices, reader: Agent = reader):
        return plan(g, mode, gib, n, training, reader, beside)

    def column(mode: str) -> Column:
        p = planned(mode)
        if lost and mode == "full":
            return Column(p, False)
        longest = longest_section(reader, lambda other: planned(mode, reader=other))
        if not p.fits:
            return Column(p, False, longest=longest)
        each = step_seconds(g, p, c.devices, training, reader, c.sections, card)
        return Column(p, True, each, longest)

    def wish(mode: str) -> str:
        """Say what a mode that does not fit would fit."""
        if lost and mode == "full":
            return "is refused as it stands"
        most = c.devices if training.optimizer == "adamw8bit" else min(training.tasks_per_step)
        for n in sorted({c.devices, *(n for n in (2, 4, 8) if c.devices < n <= most)}):
            if gib := smallest(lambda gib, n=n, mode=mode: planned(mode, gib, n)):
                return f"wants {gib} GiB" if n == c.devices else f"wants {n} GPUs of {gib} GiB"
        return f"wants more than {n} GPUs of {SIZES_GIB[-1]} GiB"

    columns = {mode: column(mode) for mode in MODES}
    where = f"{c.devices} x {card}" if c.devices > 1 else f"one {card}"
    where += f" of {gpu_gib:g} GiB"
    if not (c.card or c.gpu_gib):
        where += " (give yours by --card)"
    if c.explain:
        passed = f"of which a token passes {g.passed / 1e9:.3g} in the layers, " * bool(g.experts)
        console.print(
            f"{c.model or 'the embedded policy'}: {g.weights / 1e9:.3g} billion weights, {passed}"
            f"{g.kv_bytes / 1024:.0f} KiB of keys and values a token; {where}; agent "
            f"{reader.label}, memories of {reader.config.memory_tokens}, layout "
            f"{reader.config.layout}."
        )
        _explain(columns, training.lora_rank or 32, card, beside)
    if lost:
        console.print(f"Full training is refused as it stands. {lost}", markup=False)

    order = [*dict.fromkeys((mode_of(training), "full", "lora", "qlora"))]
    order.sort(key=lambda mode: (not columns[mode].fits, not columns[mode].longest))
    mode, best = order[0], columns[order[0]]
    sections = f"{c.sections} sections of {reader.config.chunk_tokens:,} tokens"
    step = f"{max(training.tasks_per_step)} x {training.group_size} readings of {sections}"
    parts = [f"fits {where}: about {best.hours} h for 100 steps of {step}"]
    if not best.fits:
        parts = [f"does not fit {where} and {wish(mode)}"]
    if not best.fits and best.longest:
        parts = [f"fits {where} in sections of {best.longest:,} tokens only, not in {sections}"]
        agent = agent | {"chunk_tokens": best.longest}
    parts[0] = f"{IN_WORDS[mode][0].upper()}{IN_WORDS[mode][1:]} {parts[0]}"
    for other in order[1:]:
        fits = f"fits, too ({columns[other].hours} h)"
        parts.append(f"{IN_WORDS[other]} {fits if columns[other].fits else wish(other)}")
    say("; ".join(parts) + ".")

    needed = {
        "lora_rank": 0 if mode == "full" else training.lora_rank or 32,
        "quantise": mode == "qlora",
        "recompute": True,
        "micro_tokens": min(best.plan.micro_tokens or 1 << 20, training.micro_tokens),
    }
    changed = {name: value for name, value in needed.items() if getattr(training, name) != value}
    flags = {"config": file, "preset": preset} if file else {"preset": preset}
    flags |= {n: machine[n] for n in ("model", "devices", "answerer") if n in machine}
    flags |= {"agent": name, "engine": "vllm" if c.model else ""} | grpo | changed | agent
    usual = {"preset": "default", "agent": "", "engine": run.get("engine", "") if c.model else ""}
    words = chain.from_iterable(
        flag(name, value) for name, value in flags.items() if value != usual.get(name)
    )
    next_step("train (--dry-run tries it here, on a CPU)", "train", *words)


def flag(name: str, value: object) -> tuple[str, ...]:
    """Return a setting as words of a command."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{dashed}" if value else f"--no-{dashed}",)
    several = isinstance(value, tuple | list)
    return f"--{dashed}", ",".join(map(str, value)) if several else str(value)


def _explain(columns: Mapping[str, Column], rank: int, card: str, beside: float) -> None:
    """Print what each mode takes, a column a mode."""
    from rich.table import Table

    table = Table("GiB a GPU", "QLoRA", f"LoRA, rank {rank}", "full")
    for title, cell in ALWAYS.items():
        table.add_row(title, *(cell(columns[mode]) for mode in MODES))
    if beside:
        table.add_row("answerer", *[f"{beside:.1f}"] * len(MODES))
    for title, cell in FITTING.items():
        cells = (cell(columns[mode]) if columns[mode].fits else "" for mode in MODES)
        table.add_row(title, *cells)
    console.print(table)
    console.print(
        "With --recompute, for turns that share nothing; where the cache holds fewer turns than a "
        f"step has, the others wait. Seconds are an estimate for the {card}: rollout + update, at "
        f"{PREFILL:.0%}, {DECODE:.0%} and {UPDATE:.0%} of its peak for prefill, decode and update. "
        "The formulas are in docs/engines.md."
    )
