"""Settings: one frozen dataclass a command, a docstring under every field. The docstrings are the flags' help.

Holds: `GRPOConfig` and the presets, `RunConfig`, `BaseConfig`; `docs`, reading and writing of config.yaml. `AgentConfig` is in memagent.py.
Leaves out: what the settings do. No torch, so that `--help` is quick.
Exercise it: `python cli.py train --help`. Read next: data.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from memagent import AgentConfig
from text import UserError

EMBEDDED = Path(__file__).parent / "base_policy"  # the base policy that ships with the repository


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """What is optimised and how. Every field is a flag of `train`; a preset fills several at once (spec memagent.md 2)."""

    steps: int = 100
    """training steps: one rollout each"""
    tasks_per_step: tuple[int, ...] = (8,)
    """tasks (groups) of one step; several numbers: one for each length that the tasks grow to, the last one for all further ones"""
    group_size: int = 16
    """G, trajectories of one task"""
    updates_per_rollout: int = 1
    """optimizer steps on one rollout, each on its own part of the groups"""
    credit: str = "share"
    """share = every turn of a trajectory gets its advantage; split = divided by the number of its turns"""
    normalisation: str = "std"
    """of the rewards of a group: mean = minus the mean; std = also divided by the unbiased standard deviation + 1e-6"""
    aggregation: str = "token_mean"
    """token_mean = over all trained tokens; row_mean = sum over turns of their token mean, per trajectory; turn_mean = mean over turns
    of their token mean; constant = sum over tokens / (turns x longest response allowed)"""
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.28
    """and above at 1 + clip_high"""
    dual_clip: float = 0.0
    """bound c of the loss for negative advantages, -c * A; 0 = off"""
    kl: float = 0.0
    """weight of the k3 estimate of KL(policy, reference) in the loss; 0 = no reference model is kept"""
    importance: str = "truncate"
    """correction of sampler/trainer mismatch per token: truncate = min(trainer/sampler, importance_cap); mask = 0 past the cap; none"""
    importance_cap: float = 2.0
    """cap of that correction"""
    turns_per_trajectory: int = 0
    """train on this many update turns of a trajectory, drawn at random and weighted up to stay unbiased, and on its answer; 0 = all"""
    lr: float = 7e-4
    """peak learning rate"""
    warmup: int = 5
    """steps of linear warm-up"""
    decay_from: float = 1.0
    """share of the steps after which the rate falls linearly to a tenth; 1 = constant"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's"""
    weight_decay: float = 0.0
    """AdamW's"""
    grad_clip: float = 1.0
    """largest norm of the gradient; a step whose norm is not finite is skipped and counted"""
    temperature: float = 1.0
    """sampling temperature of the rollout; the trainer's log-probs are taken at it too"""
    top_p: float = 1.0
    """nucleus of the rollout; below 1 the sampler's distribution is no longer the trainer's"""
    grow_at: float = 0.9
    """tasks grow to the next length when the running reward reaches this"""
    grow_steps: int = 5
    """and at least this many steps were spent at the present one"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers; 0 = full fine-tuning"""
    lora_alpha: float = 0.0
    """scale of the adapters; 0 = twice the rank"""
    micro_tokens: int = 16384
    """most tokens, padding included, of one forward and backward pass; changes nothing but memory and speed"""
    in_flight: int = 256
    """trajectories in flight"""
    seed: int = 0
    """everything random follows from it"""

    def __post_init__(self):
        for name, allowed in (
            ("credit", ("share", "split")),
            ("normalisation", ("mean", "std")),
            ("aggregation", ("token_mean", "row_mean", "turn_mean", "constant")),
            ("importance", ("truncate", "mask", "none")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
        for name in ("steps", "group_size", "updates_per_rollout", "micro_tokens", "in_flight"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not self.tasks_per_step or min(self.tasks_per_step) < 1:
            raise UserError("tasks_per_step must be at least 1.")
        if self.temperature <= 0:
            raise UserError("Training samples at a temperature above 0.")


# name -> (fields of GRPOConfig, fields of AgentConfig), spec memagent.md 2 and 6
PRESETS: dict[str, tuple[dict, dict]] = {
    "default": ({}, {}),
    # for the embedded policy, chosen on the dev split (dev/LOG.md). Sampled hotter than it is evaluated: what is safe at 1.25 is safer at 1.
    "demo": (
        dict(tasks_per_step=(8,), group_size=16, normalisation="mean", temperature=1.25, lr=4e-4, decay_from=0.4,
             turns_per_trajectory=5, micro_tokens=4096),
        {},
    ),
    "paper": (
        dict(tasks_per_step=(128,), group_size=16, updates_per_rollout=16, credit="share", normalisation="mean", aggregation="token_mean",
             clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl=1e-3, lr=1e-6, warmup=20, betas=(0.9, 0.999), weight_decay=0.01),
        dict(chunk_tokens=5000, memory_tokens=1024, final_tokens=1024, max_sections=8, over="center", layout="paper", empty="placeholder"),
    ),
    "vime": (
        dict(tasks_per_step=(8,), group_size=8, credit="split", normalisation="std", aggregation="row_mean", clip_low=0.2, clip_high=0.3,
             kl=1e-3, lr=1e-6, warmup=0, betas=(0.9, 0.98), weight_decay=0.1),
        dict(chunk_tokens=2048, memory_tokens=1024, final_tokens=256, max_sections=64, over="head", layout="paper", empty="keep"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What `train` works on and where it leaves the results."""

    name: str = ""
    """name of the run: results lie in RUNS/NAME; default: a date and time"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors; empty = the embedded base policy"""
    data: str = "world"
    """training tasks: a file of any form `data look` can read, or world = generated English"""
    lengths: tuple[int, ...] = (2, 4, 8, 16)
    """world: sections of a document; training goes from each length to the next (--grow-at)"""
    kinds: tuple[str, ...] = ("one_fact", "two_hop")
    """world: kinds of question, in equal shares"""
    agent: str = "memagent"
    """the agent that is trained"""
    save_every: int = 20
    """steps between checkpoints; there is always one at the end"""
    keep_trajectories: int = 1
    """every how many steps all trajectories are written; 0 = never"""
    dtype: str = "auto"
    """of the weights: float32, bfloat16; auto = float32 on a CPU and for full fine-tuning, else bfloat16"""
    device: str = "auto"
    """cpu, cuda or auto"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Settings of the base policy's supervised training (base.py)."""

    steps: int = 5400
    """optimizer steps with a demonstrator that is always careful"""
    careless_steps: int = 1200
    """optimizer steps after them, with one that is careful now and then"""
    careful: float = 0.3
    """how often that one keeps the facts that matter, and only those; else it keeps the last one it read"""
    dense_steps: int = 120
    """of the first steps, those that train mostly on lists of facts given twice"""
    lr: float = 1.5e-3
    """peak learning rate of AdamW"""
    absent: float = 0.3
    """how often a question is asked whose answer is not there; "unknown" is right then"""
    updates: int = 40
    """update turns a step"""
    answers: int = 12
    """answers from a memory a step"""
    full: int = 4
    """documents a step that are read whole"""
    full_sections: int = 16
    """longest document that is read whole"""
    hidden: int = 128
    """width of the model"""
    layers: int = 3
    """layers of the model"""
    intermediate: int = 256
    """width of its feed-forward layers"""
    seed: int = 0
    """everything random follows from it"""
    layout: str = "shared"
    """order of the update prompt, as in AgentConfig"""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What `eval` measures and where it leaves the results."""

    name: str = "eval"
    """name of the evaluation: results lie in RUNS/NAME; a second call goes on with it"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors; empty = the embedded base policy"""
    data: tuple[str, ...] = ("world",)
    """files of tasks, or world = generated English"""
    agents: tuple[str, ...] = ("memagent", "full_context", "bm25")
    """agents that answer the same questions"""
    lengths: tuple[int, ...] = (4, 16, 64)
    """world: sections of a document"""
    kinds: tuple[str, ...] = ("one_fact", "two_hop")
    """world: kinds of question"""
    split: str = "dev"
    """world: split of the facts asked for: dev to choose settings, test to report"""
    n: int = 64
    """questions per length and kind"""
    samples: int = 1
    """answers sampled per question; a question counts with their mean"""
    temperatures: tuple[float, ...] = (1.0, 0.0)
    """sampling temperatures; 0 is greedy and asked once"""
    top_p: float = 1.0
    """nucleus"""
    transcripts: int = 2
    """trajectories kept whole of each agent, length and temperature; the report chooses among them"""
    in_flight: int = 256
    """trajectories side by side"""
    seed: int = 0
    """of questions and sampling"""
    dtype: str = "auto"
    """of the weights: float32, bfloat16; auto = float32 on a CPU, else bfloat16"""
    device: str = "auto"
    """cpu, cuda or auto"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""


def docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, doc in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[field.target.id] = " ".join(str(doc.value.value).split())  # type: ignore[union-attr]
    return found


def dump(path: Path, **sections) -> None:
    """Write settings as YAML, one section per dataclass."""
    import yaml

    plain = {name: asdict(value) if hasattr(value, "__dataclass_fields__") else value for name, value in sections.items()}
    path.write_text(yaml.safe_dump(_lists(plain), sort_keys=False))


def _lists(value):
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def load(path: str | Path, **classes: type) -> dict:
    """Read settings written by `dump`: section name -> dict of fields. A wrong file, section or field is a UserError.

    classes: section name -> the dataclass it belongs to.
    """
    import yaml

    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"The settings {path} cannot be read: {error.strerror}.") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings: it must have the sections {', '.join(classes)}.")
    out = {}
    for section, values in data.items():
        if section not in classes:
            raise UserError(f"{path} has an unknown section {section!r}; known are {', '.join(classes)}.")
        known = {f.name: f for f in fields(classes[section])}
        for name in values or {}:
            if name not in known:
                raise UserError(f"{path}: {section} has no setting {name!r}; known are {', '.join(known)}.")
        out[section] = {k: tuple(v) if isinstance(v, list) else v for k, v in (values or {}).items()}
    return out


def of_model(model: str | Path) -> dict:
    """How a model of ours wants to read: the fields of AgentConfig in its folder's agent.yaml, {} without one.

    A cap on sections is never taken from there (only a flag or a preset cuts documents); `templates` counts from the model's folder.
    """
    path = Path(model) / "agent.yaml"
    found = load(path, agent=AgentConfig).get("agent", {}) if path.exists() else {}
    found.pop("max_sections", None)
    if found.get("templates"):
        found["templates"] = str(Path(model, found["templates"]))
    return found


def resolve(name: str, model: str | Path, grpo: dict, agent: dict) -> tuple[GRPOConfig, AgentConfig]:
    """Settings from, in rising order: the defaults, the model's own agent.yaml, the preset, single fields."""
    if name not in PRESETS:
        raise UserError(f"Unknown preset {name!r}: choose one of {', '.join(PRESETS)}.")
    preset_grpo, preset_agent = PRESETS[name]
    try:
        return replace(GRPOConfig(**preset_grpo), **grpo), replace(AgentConfig(**(of_model(model) | preset_agent)), **agent)
    except TypeError as error:
        raise UserError(f"The settings do not fit: {error}.") from error
