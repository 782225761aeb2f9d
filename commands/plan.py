"""Print what fits on a GPU and how long a step takes.

Holds: `show`, `card_of`. Leaves out: the arithmetic (models/plan.py), its formulas
(docs/engines.md).
Exercise it: `python cli.py plan --model Qwen/Qwen3-4B --gpu-gib 24`. Read next: models/plan.py.
"""

from __future__ import annotations

from config.errors import UserError
from config.options import GRPOConfig, PlanConfig
from engines.open import gib_of_answerer, refusal_of_answerer
from memagent import Agent
from models.plan import (
    CARD_GIB,
    CARD_OF_SIZE,
    CARDS,
    DECODE,
    MODES,
    PREFILL,
    UPDATE,
    geometry,
    longest_section,
    plan,
    step_seconds,
)

# Lines of the table, of a plan p: those shown of plans that do not fit, too, and the others.
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


def card_of(gpu_gib: float | None = None, card: str = "") -> tuple[float, str]:
    """Complete memory (GiB) and name of a card from either.

    A name alone has its own memory; a size alone is the smallest of `CARD_OF_SIZE` that has it;
    nothing at all is an H100 of 80 GiB. UserError for an unknown name.
    """
    if card and card not in CARDS:
        raise UserError(f"Unknown card {card!r}: choose one of {', '.join(CARDS)}.")
    if gpu_gib is None:
        card = card or "H100"
        return CARD_GIB[card], card
    large_enough = (name for name in CARD_OF_SIZE if CARD_GIB[name] >= gpu_gib)
    return gpu_gib, card or next(large_enough, CARD_OF_SIZE[-1])


def show(machine: PlanConfig, grpo: GRPOConfig, agent: Agent) -> None:
    """Print a column for each mode.

    What `train` would refuse for want of an answerer does not fit, and the reason is said.
    UserError: the agent has no use for an answerer, or does not read section by section.
    """
    from rich.table import Table

    from config.terminal import console

    if not agent.by_section:
        raise UserError(
            f"A plan is for an agent that is trained section by section, which {agent.label} is "
            "not."
        )
    answerer = machine.answerer
    if refused := refusal_of_answerer(answerer, agent, one_set=False):
        raise UserError(refused)
    # full training leaves vLLM no weights from before; adapters leave it the base's
    lost = refusal_of_answerer(answerer, agent, one_set=True)
    beside = gib_of_answerer(answerer)
    gpu_gib, card = card_of(machine.gpu_gib, machine.card)
    g, devices, sections = geometry(machine.model), machine.devices, machine.sections
    passed = f"of which a token passes {g.passed / 1e9:.3g} in the layers, " if g.experts else ""
    console.print(
        f"{machine.model or 'the embedded policy'}: {g.weights / 1e9:.3g} billion weights, {passed}"
        f"{g.kv_bytes / 1024:.0f} KiB of keys and values a token. "
        f"{devices} GPU(s) of {gpu_gib:g} GiB ({card}); "
        f"a step of {max(grpo.tasks_per_step)} x {grpo.group_size} trajectories, "
        f"documents of {sections} sections of {agent.config.chunk_tokens:,} tokens, "
        f"agent {agent.label}, memories of {agent.config.memory_tokens}, layout "
        f"{agent.config.layout}."
    )
    table = Table("GiB a GPU", "QLoRA", f"LoRA, rank {grpo.lora_rank or 32}", "full")
    names = ["fits", *MEMORY, *(["answerer"] if beside else []), *PHASES]
    names += ["seconds a step", "hours for 100 steps", "longest section, tokens"]
    columns = []
    for mode in MODES:

        def planned(reader: Agent, mode: str = mode):
            return plan(g, mode, gpu_gib, devices, grpo, reader, beside)

        p = planned(agent)
        column = {name: cell(p) for name, cell in MEMORY.items()} | {"answerer": f"{beside:.1f}"}
        able = not (lost and mode == "full")
        column["fits"] = "yes" if able and p.fits else "no"
        if able and p.fits:
            rollout_s, update_s = step_seconds(g, p, devices, grpo, agent, sections, card)
            column |= {name: cell(p) for name, cell in PHASES.items()}
            column["seconds a step"] = f"{rollout_s:.0f} + {update_s:.0f}"
            column["hours for 100 steps"] = f"{(rollout_s + update_s) / 36:.1f}"
        if able and (longest := longest_section(agent, planned)):
            column["longest section, tokens"] = f"{longest:,}"
        columns.append(column)
    for name in names:
        table.add_row(name, *(column.get(name, "") for column in columns))
    console.print(table)
    if lost:
        console.print(f"Full training is refused as it stands. {lost}", markup=False)
    console.print(
        "With --recompute; turns that share nothing, more of them wait. "
        f"Seconds are an estimate for the {card}: rollout + update, at {PREFILL:.0%}, {DECODE:.0%} "
        f"and {UPDATE:.0%} of its peak for prefill, decode and update."
    )
