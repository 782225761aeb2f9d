"""Metrics of a training step, a line of metrics.csv: its rollout, its turns, its time and GPU."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from data import strip_thinking
from memagent import Agent, Finish, Group, differ, place_of
from models import ranks
from models.plan import CARDS

# of an update; 0 in a step without signal, so that all lines of metrics.csv have the same columns
UPDATE_METRICS = (
    "loss", "ratio", "clipped", "mismatch_kl", "mismatch", "mismatch_mean", "kl", "grad_norm",
    "skipped_updates", "computed_tokens", "share_saved",
)  # fmt: skip
SHARES = {  # of a rollout: a sum -> what it is divided by
    "groups_without_signal": "groups",
    "failed": "trajectories",
    "turns": "trajectories",
    "memory_tokens": "updates",
    "memory_cut": "updates",
    "memory_empty": "updates",
    "answer_empty": "answers",
    "surprisal": "written_tokens",  # an estimate of the entropy
}
SUMS = ("faults", "documents_cut", "read_tokens", "written_tokens")


def describe(groups: Sequence[Group], counted: dict[str, int]) -> dict[str, float]:
    """Describe a rollout over the groups of all ranks: shares and means, and sums of `counted`.

    reward: the mean of the trajectories that have one, nan without any; reward_se: its standard
    error over groups, which each have one task. faults: of those without a reward the ones that an
    engine or a server failed. groups, counted: of this rank. `UPDATE_METRICS` are set to 0.
    """
    trajectories = [t for group in groups for t in group.sampled]
    rewarded = [[t.reward for t in group.trajectories] for group in groups]
    # what a frozen policy answers is no part of the policy that is trained
    unfrozen = [turn for t in trajectories for turn in t.turns if not turn.prompt.frozen]
    updates = [turn for turn in unfrozen if not turn.prompt.final]
    answers = [turn for turn in unfrozen if turn.prompt.final]
    sampled = [lp for turn in unfrozen for lp in turn.logprobs]
    means = [fmean(rewards) for rewards in rewarded if rewards]
    n = ranks.all_reduce_sum(
        {
            "group_means": sum(means),
            "squared_means": sum(mean * mean for mean in means),
            "trajectories": len(trajectories),
            "groups": len(groups),
            "groups_rewarded": len(means),
            "rewarded": sum(map(len, rewarded)),
            "reward": sum(map(sum, rewarded)),
            "groups_without_signal": sum(not g.signal for g in groups),
            "failed": sum(bool(t.error) for t in trajectories),
            "faults": sum(t.fault for t in trajectories),
            "documents_cut": sum(any(turn.prompt.cut for turn in t.turns) for t in trajectories),
            "turns": sum(len(t.turns) for t in trajectories),
            "updates": len(updates),
            "memory_tokens": sum(len(t.response_ids) for t in updates),
            "memory_cut": sum(t.finish is Finish.LENGTH for t in updates),
            "memory_empty": sum(not strip_thinking(t.response).strip() for t in updates),
            "answers": len(answers),
            "answer_empty": sum(not strip_thinking(t.response).strip() for t in answers),
            "read_tokens": sum(len(turn.prompt_ids) for t in trajectories for turn in t.turns),
            "written_tokens": len(sampled),
            "surprisal": -sum(sampled),
            **counted,
        }
    )
    error = _standard_error(n["group_means"], n["squared_means"], n["groups_rewarded"])
    return {
        "reward": n["reward"] / n["rewarded"] if n["rewarded"] else math.nan,
        "reward_se": error,
        "unrewarded": n["trajectories"] - n["rewarded"],
        **{name: n[name] / max(1, n[whole]) for name, whole in SHARES.items()},
        **dict.fromkeys(UPDATE_METRICS, 0.0),
        **{name: n[name] for name in (*SUMS, *counted)},
    }


def _standard_error(total: float, squares: float, n: float) -> float:
    """Return the standard error of the mean of n values, by their sum and that of their squares;
    nan of fewer than two.

    >>> _standard_error(1.0 + 3.0, 1.0 + 9.0, 2)
    1.0
    """
    return math.sqrt(max(0.0, squares - total * total / n) / (n - 1) / n) if n > 1 else math.nan


def describe_turns(groups: Sequence[Group], agent: Agent) -> dict[str, float]:
    """Describe the agent's counts and the rewards of single turns, over all ranks.

    The agent's `rates` of its counts; the mean of each reward of single turns, over update turns
    and over final ones; the share of places at which all turns of a group have the same reward.
    """
    n: Counter[str] = Counter()
    for group in groups:
        totals: dict[int, list[float]] = {}  # place -> rewards
        for trajectory in group.sampled:
            for k, turn in enumerate(trajectory.turns):
                n.update(agent.count(trajectory.task, turn))
                if not turn.rewards or trajectory.reward is None:
                    continue
                where = place_of(turn, k)
                totals.setdefault(where, []).append(sum(turn.rewards.values()))
                kind = "final" if turn.prompt.final else "update"
                n[f"turns {kind}"] += 1
                for name, reward in turn.rewards.items():
                    n[f"reward {kind} {name}"] += reward
        n["places"] += len(totals)
        n["places alike"] += sum(not differ(rewards) for rewards in totals.values())
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


def times_of(
    metrics: Mapping[str, float], seconds: Mapping[str, float], model, memory: PeakMemory
) -> dict[str, float]:
    """Return the times of a step's phases, its tokens a second, and what is known of the GPU."""
    step_s = seconds["rollout"] + seconds["update"]
    tokens = metrics["read_tokens"] + metrics["written_tokens"]
    times = {f"{p}_s": seconds.get(p, 0.0) for p in ("rollout", "switch", "update")}
    times |= {"step_s": step_s, "tokens_per_s": tokens / step_s}
    return times | on_gpu(model, metrics["computed_tokens"], seconds["update"], memory)


class Clock:
    """Seconds of the phases of a step, which may overlap or come in parts."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def start(self, *phases: str) -> None:
        self._started |= dict.fromkeys(phases, time.perf_counter())

    def stop(self, phase: str) -> None:
        elapsed = time.perf_counter() - self._started.pop(phase)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed


class PeakMemory:
    """Peak of a GPU's memory in use, sampled by calls of `look`.

    torch's own statistics do not tell the memory that vLLM holds from the memory that it has
    released while it sleeps.
    """

    def __init__(self):
        self.least_free = math.inf

    def look(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.least_free = min(self.least_free, torch.cuda.mem_get_info(device)[0])

    def gib(self, device: torch.device) -> float:
        """Return the peak of all ranks since the last call, in GiB."""
        peak = ranks.all_reduce_max((torch.cuda.mem_get_info(device)[1] - self.least_free) / 2**30)
        self.least_free = math.inf
        return peak


def on_gpu(model, computed_tokens: float, update_s: float, memory: PeakMemory) -> dict[str, float]:
    """Return the update's utilisation (MFU) and the peak memory in GiB; {} on a CPU.

    MFU counts the matrix multiplications of the layers alone; NaN for a card not in `plan.CARDS`.
    """
    if model.device.type != "cuda":
        return {}
    layers = list(model.model.layers.parameters())
    # FLOPs: 2 forward, 2 for the gradient of the input, 2 for that of the weight unless frozen
    per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in layers)
    name = torch.cuda.get_device_name(model.device)
    peak = next((tflops * 1e12 for card, (tflops, *_) in CARDS.items() if card in name), math.nan)
    mfu = computed_tokens * per_token / update_s / peak / ranks.world()
    return {"mfu": mfu, "peak_gib": memory.gib(model.device)}
