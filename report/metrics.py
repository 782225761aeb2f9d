"""What a training step reports: numbers about its rollout and, on a GPU, about its update. They are a line of metrics.csv.

Holds: `describe`, `on_gpu`, `PeakMemory`, the names of what an update reports. Leaves out: the update (grpo.py), files (report/runlog.py).
Exercise it: `python cli.py train --steps 3`. Read next: grpo.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from agents.rememr1 import COUNTS, ERRORS, Looks
from data import strip_thinking
from memagent import AgentConfig, Finish, Group
from models import ranks
from models.plan import CARDS

# what an update reports; 0 in a step without signal, so that every line of metrics.csv has the same columns
UPDATE_METRICS = (
    "loss",
    "ratio",
    "clipped",
    "mismatch_kl",
    "mismatch",
    "mismatch_mean",
    "kl",
    "grad_norm",
    "skipped_updates",
    "computed_tokens",
    "share_saved",
)


def describe(groups: Sequence[Group], counted: dict[str, int]) -> dict[str, float]:
    """What happened in a rollout, over all ranks: means of this rank's groups and theirs, sums of what was counted."""
    trajectories = [t for group in groups for t in group.trajectories]
    updates = [t for trajectory in trajectories for t in trajectory.turns if not t.prompt.final]
    sampled = [lp for t in trajectories for turn in t.turns for lp in turn.logprobs]
    n = ranks.all_reduce_sum(
        {
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
        }
    )
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
            "surprisal": n["surprisal"]
            / max(1, n["written_tokens"]),  # of the sampled tokens: an estimate of the entropy
        }
        | dict.fromkeys(UPDATE_METRICS, 0.0)
        | {name: n[name] for name in counted}
    )


def describe_states(groups: Sequence[Group], config: AgentConfig) -> dict[str, float]:
    """What happened turn by turn where turns have rewards of their own (ReMemR1), over all ranks: means of the rewards, each alone; shares of
    the updates with each error of `rememr1.ERRORS` and stray tags; looks back (`recall_*`) as shares of the updates or of one another."""
    n: Counter[str] = Counter()
    for group in groups:
        by_place: dict[int, set[float]] = {}
        for trajectory in group.trajectories:
            looks = Looks(trajectory.task, config)
            for k, (turn, state) in enumerate(
                zip(trajectory.turns, trajectory.states, strict=True)
            ):
                looks.add(turn)
                by_place.setdefault(-1 if turn.prompt.final else k, set()).add(
                    round(state["state"], 9)
                )  # as in `advantages`
                name = "final" if turn.prompt.final else "update"
                n.update({f"{name}_turns": 1, f"{name}_format": state["format"]})
                n["memory_length"] += (
                    len(getattr(turn.prompt.memory, "ids", ())) if k else 0
                )  # as the update before has left it
                n.update(
                    {
                        key: state[key]
                        for key in ("gain", "level", "callback", "covered")
                        if not turn.prompt.final
                    }
                )
            n.update(looks.n)
        n.update(
            state_groups=len(by_place),
            alike=sum(len(rewards) == 1 for rewards in by_place.values()),
        )
    names = "update_turns final_turns update_format final_format gain level callback covered state_groups alike memory_length".split()
    n = ranks.all_reduce_sum({name: float(n[name]) for name in (*names, *COUNTS, *ERRORS)})

    def share(name: str, of: str) -> float:
        return n[name] / max(1.0, n[of])

    return (
        {
            f"state_{name}": share(name, "update_turns")
            for name in ("gain", "level", "callback", "covered")
        }
        | {
            "state_format": share("update_format", "update_turns"),
            "state_format_final": share("final_format", "final_turns"),
        }
        | {"state_groups_without_signal": share("alike", "state_groups")}
        | {f"format_{error}": share(error, "updates") for error in (*ERRORS, "stray_tag")}
        | {
            "recall_queries": share("queries", "updates"),
            "recall_degenerate": share("degenerate", "updates"),
        }
        | {"recall_current": share("current", "hits"), "recall_holds": share("holds", "sought")}
        | {"recall_evidence": share("evidence", "evidence_sought")}
        | {"recall_hits": share("hits", "queries"), "recall_age": share("ages", "hits")}
        | {
            name: share(name, "updates")
            for name in ("memory_length", "memory_capped", "query_capped")
        }
    )


class PeakMemory:
    """The most memory of a GPU that was in use when somebody looked. torch's own statistics would count what vLLM holds and what
    it has given up while it sleeps alike."""

    def __init__(self):
        self.least_free = math.inf

    def look(self, device: torch.device) -> None:
        """Look now, where `device` is a GPU."""
        if device.type == "cuda":
            self.least_free = min(self.least_free, torch.cuda.mem_get_info(device)[0])

    def gib(self, device: torch.device) -> float:
        """The most since the last call, in GiB, of any rank."""
        peak = ranks.all_reduce_max((torch.cuda.mem_get_info(device)[1] - self.least_free) / 2**30)
        self.least_free = math.inf
        return peak


def on_gpu(model, computed_tokens: float, update_s: float, memory: PeakMemory) -> dict[str, float]:
    """Utilisation of the update (MFU: matrix multiplications of the layers alone, of a card in plan.CARDS) and peak memory; {} on a CPU."""
    if model.device.type != "cuda":
        return {}
    layers = list(model.model.layers.parameters())
    per_token = sum(
        (6 if p.requires_grad else 4) * p.numel() for p in layers
    )  # a frozen weight has no gradient of its own
    name = torch.cuda.get_device_name(model.device)
    peak = next((tflops * 1e12 for card, (tflops, _) in CARDS.items() if card in name), math.nan)
    mfu = computed_tokens * per_token / update_s / peak / ranks.world()
    return {"mfu": mfu, "peak_gib": memory.gib(model.device)}
