"""What a training step reports: numbers about its rollout and, on a GPU, about its update. They are a line of metrics.csv.

Holds: `describe`, `on_gpu`, the names of what an update reports. Leaves out: the update (grpo.py), files (runs.py).
Exercise it: `python cli.py train --steps 3`. Read next: grpo.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

import ranks
from graders import strip_thinking
from memagent import Finish, Group
from plan import CARDS

# what an update reports; 0 in a step without signal, so that every line of metrics.csv has the same columns
UPDATE_METRICS = (
    "loss", "ratio", "clipped", "mismatch_kl", "mismatch", "mismatch_mean", "kl", "grad_norm", "skipped_updates", "computed_tokens",
    "share_saved",
)  # fmt: skip


def describe(groups: Sequence[Group], counted: dict[str, int]) -> dict[str, float]:
    """What happened in a rollout, over all ranks: means of this rank's groups and theirs, sums of what was counted."""
    trajectories = [t for group in groups for t in group.trajectories]
    updates = [t for trajectory in trajectories for t in trajectory.turns if not t.prompt.final]
    sampled = [lp for t in trajectories for turn in t.turns for lp in turn.logprobs]
    n = ranks.total({
        "trajectories": len(trajectories),
        "groups": len(groups),
        "reward": sum(t.reward for t in trajectories),
        "groups_without_signal": sum(not g.signal for g in groups),
        "failed": sum(bool(t.error) for t in trajectories),
        "turns": sum(len(t.turns) for t in trajectories),
        "updates": len(updates),
        "memory_tokens": sum(len(t.response_ids) for t in updates),
        "memory_cut": sum(t.finish is Finish.LENGTH for t in updates),
        "memory_empty": sum(not strip_thinking(t.response).strip() for t in updates),
        "read_tokens": sum(len(turn.prompt_ids) for t in trajectories for turn in t.turns),
        "written_tokens": len(sampled),
        "surprisal": -sum(sampled),
        **counted,
    })  # fmt: skip
    each, update = n["trajectories"], max(1, n["updates"])
    return (
        {
            "reward": n["reward"] / each,
            "groups_without_signal": n["groups_without_signal"] / n["groups"],
            "failed": n["failed"] / each,
            "turns": n["turns"] / each,
            "memory_tokens": n["memory_tokens"] / update,
            "memory_cut": n["memory_cut"] / update,
            "memory_empty": n["memory_empty"] / update,
            "read_tokens": n["read_tokens"],
            "written_tokens": n["written_tokens"],
            "surprisal": n["surprisal"] / max(1, n["written_tokens"]),  # of the sampled tokens: an estimate of the entropy
        }
        | dict.fromkeys(UPDATE_METRICS, 0.0)
        | {name: n[name] for name in counted}
    )


def on_gpu(model, computed_tokens: float, update_s: float) -> dict[str, float]:
    """Utilisation of the update (MFU: matrix multiplications of the layers alone, of a card in plan.CARDS) and peak memory; {} on a CPU."""
    if model.device.type != "cuda":
        return {}
    layers = list(model.model.layers.parameters())
    per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in layers)  # a frozen weight has no gradient of its own
    name = torch.cuda.get_device_name(model.device)
    peak = next((tflops * 1e12 for card, (tflops, _) in CARDS.items() if card in name), math.nan)
    peak_gib = ranks.most(torch.cuda.max_memory_allocated(model.device) / 2**30)
    torch.cuda.reset_peak_memory_stats(model.device)
    return {"mfu": computed_tokens * per_token / update_s / peak / ranks.world(), "peak_gib": peak_gib}
