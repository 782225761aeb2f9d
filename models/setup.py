"""What a command computes with: model, device, dtype, adapters, shards, window, resolved once.

Holds: `Setup`, `TrainingSetup`. Leaves out: loading (models/load.py), engines (engines/open.py).
Exercise it: `python cli.py train --dry-run`. Read next: models/load.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError, first_line
from config.options import EMBEDDED, EvalConfig, RunConfig, TrainConfig
from memagent import Agent
from models.packaged import ready

if TYPE_CHECKING:  # transformers comes with it
    from tokens.codec import Codec


def resolve_device(device: str) -> str:
    """Return cpu or cuda, with `auto` resolved."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and how it is computed with."""

    model: str | Path  # as the user wrote it: a folder, a hub name, smollm2, a GGUF file
    device: str  # cpu or cuda
    dtype: str  # float32, bfloat16, or mixed: weights in float32, computed with in bfloat16
    window: int | None = None  # that a sampler must reserve; None = all that the model has
    thinking: bool = False
    trust_remote_code: bool = False

    @property
    def folder(self) -> str | Path:
        """What is loaded: the model, of a packaged one or a GGUF file its converted folder.

        That folder is made on first use, and only where weights or tokenizer are needed.
        """
        return ready(self.model)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def compute_dtype(self) -> str:
        """The dtype of the forward pass: float32 or bfloat16."""
        return "bfloat16" if self.dtype == "mixed" else self.dtype

    def codec(self) -> Codec:
        """Load the model's tokenizer and chat template."""
        from tokens.codec import Codec

        return Codec.load(
            self.folder, trust_remote_code=self.trust_remote_code, thinking=self.thinking
        )

    @classmethod
    def of_evaluation(
        cls, config: EvalConfig, agents: Sequence[Agent], untrained: bool = False
    ) -> Setup:
        """Resolve what answers agents: the model, or `untrained` the policy before training."""
        device = resolve_device(config.device)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        return cls(
            (config.untrained if untrained else config.model) or EMBEDDED,
            device,
            dtype,
            window_of(agents),
            any(agent.config.thinking for agent in agents),
            config.trust_remote_code,
        )


def window_of(agents: Sequence[Agent]) -> int | None:
    """Return the window that all of these agents need; None = all that the model has."""
    needed = [agent.window_needed() for agent in agents]
    return None if not needed or None in needed else max(needed)


def _as_adapter(folder: str, training: TrainConfig) -> TrainConfig:
    """Return the settings with rank, scale and targets of the adapters in a folder."""
    path = Path(folder, "adapter_config.json")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = saved["r"], float(saved["lora_alpha"])
        targets = saved["target_modules"]
        targets = targets if isinstance(targets, str) else ",".join(sorted(targets))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no LoRA adapters: {first_line(error)}.") from error
    if training.lora_rank not in (0, rank):
        raise UserError(
            f"The adapters in {folder} have rank {rank}, not {training.lora_rank}: leave "
            "--lora-rank out."
        )
    return replace(training, lora_rank=rank, lora_alpha=alpha, lora_targets=targets)


@dataclass(frozen=True, slots=True)
class TrainingSetup(Setup):
    """A training: its settings, and what follows from them."""

    run: RunConfig = None  # type: ignore[assignment]  # these three are given by `of`
    training: TrainConfig = None  # type: ignore[assignment]
    agent: Agent = None  # type: ignore[assignment]

    @property
    def mode(self) -> str:
        """What is trained: qlora, lora or full."""
        if self.training.quantise:
            return "qlora"
        return "lora" if self.training.lora_rank else "full"

    @property
    def ranks(self) -> int:
        return self.run.devices * self.run.num_nodes

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the weights: on several ranks, and for the dtype mixed."""
        return self.ranks > 1 or self.dtype == "mixed"

    @property
    def sharding(self) -> str:
        """How `GRPO` holds the weights: none, same or mixed."""
        if not self.sharded:
            return "none"
        return "mixed" if self.dtype == "mixed" else "same"

    @classmethod
    def of(cls, run: RunConfig, training: TrainConfig, agent: Agent) -> TrainingSetup:
        """Resolve the settings of a training; adapters to go on from decide their rank."""
        if run.adapter:
            training = _as_adapter(run.adapter, training)
        device = resolve_device(run.device)
        dtype = run.dtype
        if dtype == "auto":
            trained = "bfloat16" if training.lora_rank else "mixed"
            dtype = trained if device.startswith("cuda") else "float32"
        return cls(
            run.model or EMBEDDED,
            device,
            dtype,
            run.engine_window or agent.turn_tokens(),
            agent.config.thinking,
            run.trust_remote_code,
            run,
            training,
            agent,
        )
