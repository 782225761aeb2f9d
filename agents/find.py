"""Find an agent by name or path, and resolve the settings that it reads with.

Holds: `pick`, `resolve`, `resumed`, `of_model`, `reader_of`. Leaves out: the settings (config/options.py).
Exercise it: `python cli.py train --help`. Read next: agents/baselines.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agents.baselines import AGENTS
from config.errors import UserError
from config.files import load
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.presets import COMPAT, NOT_IMITATED, OF_AGENT, preset_fields
from memagent import AgentConfig

# what `train --resume` may change of a run: nothing that its steps so far depend on. How much is computed at once may change, for a run
# that has run out of memory; sums are then rounded in another order
MAY_CHANGE = {
    "run": {
        "name",
        "runs",
        "save_every",
        "keep_checkpoints",
        "keep_trajectories",
        "device",
        "kv_gib",
        "sleep",
        "devices",
        "num_nodes",
    },
    "grpo": {"steps", "micro_tokens", "in_flight", "recompute", "max_mismatch"},
    "agent": set(),
}


def begun(folder: Path) -> dict:
    """The settings that a run in this folder began with, {} if it was stopped before they were written: section -> fields."""
    if not (folder / "config.yaml").exists() and not any((folder / "checkpoints").glob("step-*")):
        return {}
    return load(folder / "config.yaml", run=RunConfig, grpo=GRPOConfig, agent=AgentConfig)


def changed(stored: dict, **now: object) -> list[str]:
    """The settings in which a run, by `begun`, differs from the settings now and may not, as "grpo.lr 0.1, not 0.2"."""
    return [
        f"{section}.{name} {value!r}, not {getattr(now[section], name)!r}"
        for section, values in stored.items()
        for name, value in values.items()
        if name not in MAY_CHANGE[section] and value != getattr(now[section], name)
    ]


def of_model(model: str | Path | None) -> dict:
    """How a model of ours wants to read: the fields of AgentConfig in its folder's agent.yaml, {} without one, or of nobody knows which (None).

    A cap on sections is never taken from there (only a flag or a preset cuts documents); `templates` counts from the model's folder.
    """
    path = Path(model or "", "agent.yaml")
    found = (
        load(path, agent=AgentConfig, run=RunConfig).get("agent", {})
        if model and path.exists()
        else {}
    )
    found.pop("max_sections", None)
    if found.get("templates"):
        found["templates"] = str(Path(model, found["templates"]))
    return found


def axes(agent: AgentConfig, grpo: GRPOConfig | None = None, compat: str = "") -> str:
    """What a run with ReMemR1 has chosen where its paper and its code differ, in one line; in a second one what `--compat` cannot bring."""
    names = [list(fields) for fields in COMPAT["paper"]]
    chosen = {name: getattr(agent, name) for name in names[1]} | {
        name: getattr(grpo, name) for name in names[0] if grpo
    }
    return (
        "rememr1: "
        + ", ".join(
            f"{name} {str(value).lower() if value in (True, False) else value}"
            for name, value in chosen.items()
        )
        + (f"\nnot as {compat}: {NOT_IMITATED[compat]}" if compat in NOT_IMITATED else "")
    )


def policy(model: str, endpoint: object = ()) -> str | Path | None:
    """Whose settings hold where none are given: those of the model that is named, else of the embedded policy; None, of neither, where a
    server of some model is asked."""
    return model or (None if endpoint else EMBEDDED)


def reader_of(preset: str, model: str | Path | None) -> str:
    """Who reads unless it is said: the preset's agent, else the one that the model was trained with, else memagent."""
    path = Path(model or "", "agent.yaml")
    trained = (
        load(path, agent=AgentConfig, run=RunConfig).get("run", {})
        if model and path.exists()
        else {}
    )
    return preset_fields(preset)[2].get("agent") or trained.get("agent") or "memagent"


def resumed(preset: str, run: dict, grpo: dict, agent: dict) -> list[dict]:
    """What `resolve` and RunConfig need to go on with a run: the fields it began with, below the preset's and the fields given now."""
    if not run.get("name"):
        raise UserError("--resume goes on with a run: say which by --name.")
    run = {
        "runs": RunConfig().runs
    } | run  # where it lies now: it may have been moved since it began
    stored = begun(Path(run["runs"], run["name"]))
    preset_grpo, preset_agent, preset_run = preset_fields(preset)
    given = {"run": preset_run | run, "grpo": preset_grpo | grpo, "agent": preset_agent | agent}
    return [stored.get(section, {}) | values for section, values in given.items()]


def resolve(
    name: str, model: str | Path | None, grpo: dict, agent: dict, reader: str = ""
) -> tuple[GRPOConfig, AgentConfig]:
    """Settings from, in rising order: the defaults, the model's own agent.yaml, the preset, `presets.OF_AGENT` of the agent that is trained
    (`reader`), single fields."""
    preset_grpo, preset_agent, _ = preset_fields(name)
    try:
        return replace(GRPOConfig(**preset_grpo | OF_AGENT.get(reader, {})), **grpo), replace(
            AgentConfig(**(of_model(model) | preset_agent)), **agent
        )
    except TypeError as error:
        raise UserError(f"The settings do not fit: {error}.") from error


def pick(name: str):
    if name not in AGENTS:
        raise UserError(f"Unknown agent {name!r}: choose one of {', '.join(AGENTS)}.")
    return AGENTS[name]
