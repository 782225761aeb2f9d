"""What a training step reports: numbers about its rollout and, on a GPU, about its update. They are a line of metrics.csv.

Holds: `describe`, `on_gpu`, `PeakMemory`, the names of what an update reports. Leaves out: the update (grpo.py), files (report/runlog.py).
Exercise it: `python cli.py train --steps 3`. Read next: grpo.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence

import torch

from data import strip_thinking
from memagent import Agent, Finish, Group, place_of
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


def describe_turns(groups: Sequence[Group], agent: Agent) -> dict[str, float]:
    """Describe what agents count and what single turns earn, over all ranks.

    The agent's `rates` of its counts; the mean of each reward of single turns, over the turns that
    update and over those that answer; the share of places at which all turns of a group earn the same.
    """
    n: Counter[str] = Counter()
    for group in groups:
        totals: dict[Hashable, set[float]] = {}  # place -> rewards, rounded as in `advantages`
        for trajectory in group.trajectories:
            for k, turn in enumerate(trajectory.turns):
                n.update(agent.count(trajectory.task, turn))
                if not turn.rewards:
                    continue
                where = place_of(turn, k)
                totals.setdefault(where, set()).add(round(sum(turn.rewards.values()), 9))
                kind = "final" if turn.prompt.final else "update"
                n[f"turns {kind}"] += 1
                for name, reward in turn.rewards.items():
                    n[f"reward {kind} {name}"] += reward
        n["places"] += len(totals)
        n["places alike"] += sum(len(rewards) == 1 for rewards in totals.values())
    names = sorted({name for names in ranks.all_gather_object(list(n)) for name in names})
    n = Counter(ranks.all_reduce_sum({name: float(n[name]) for name in names}))

    def share(above: str, below: str) -> float:
        return n[above] / max(1.0, n[below])

    rates = {column: share(above, below) for column, (above, below) in agent.rates.items()}
    if not n["places"]:
        return rates
    rewards = {
        f"turn_reward_{name.split(' ', 2)[2]}{'_final' * final}": share(name, f"turns {kind}")
        for kind, final in (("update", False), ("final", True))
        for name in names
        if name.startswith(f"reward {kind} ")
    }
    return rates | rewards | {"turn_groups_without_signal": share("places alike", "places")}


class Clock:
    """The seconds of the phases of a step, which may overlap or come in parts."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def start(self, *phases: str) -> None:
        self._started |= dict.fromkeys(phases, time.perf_counter())

    def stop(self, phase: str) -> None:
        elapsed = time.perf_counter() - self._started.pop(phase)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed


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
