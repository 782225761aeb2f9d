"""GRPO over the turns of a memory agent. Read from top to bottom this file is the algorithm.

    tasks --sample, reward--> groups --advantages--> rows --loss--> gradient --step--> new weights

A new advantage is `advantages` or `advantages_of`, a new loss `policy_loss`; both are functions of
numbers. G is the number of trajectories in a group, R that of response tokens in a batch of rows. A
row is one turn, ready for training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Literal

import lightning
import torch

from agents.rewards import grade, reward_of
from config.errors import UserError
from config.options import GRPOConfig, TrainConfig
from data import Task, Tasks, seed_of
from engines.proof import SamplerChecks, WeightMatch, WeightSnapshot, agreement
from memagent import Agent, Group, Trajectory, Turn, differ, place_of
from models import ranks
from models.load import inner, optimizer_of, recompute
from models.loads import balance, passes
from models.logprobs import Row, TokenBatch, logprobs, policy_logprobs
from report.metrics import UPDATE_METRICS, Clock, PeakMemory, describe, describe_turns, times_of
from rollout import Engine, Sampling, rollout

# ---------------------------------------------------------------- sample, reward


def sample_groups(
    engine: Engine,
    agent: Agent,
    tasks: Sequence[Task],
    sampling: Sampling,
    seed: int,
    config: GRPOConfig,
) -> list[Group]:
    """Sample G trajectories of each task, and reward them."""
    groups = {task.id: Group(task, []) for task in tasks}
    jobs = ((task, g) for task in tasks for g in range(config.group_size))
    for trajectory in rollout(engine, agent, jobs, sampling, seed, config.in_flight):
        grade(agent, trajectory, config.outcome)
        group = groups[trajectory.task.id]
        (group.left_out if trajectory.reward is None else group.trajectories).append(trajectory)
    for group in groups.values():  # trajectories come in the order in which they finish
        group.trajectories.sort(key=lambda t: t.sample)
    return list(groups.values())


# ---------------------------------------------------------------- advantages


def advantages(rewards: Sequence[float], normalisation: str = "mean") -> list[float]:
    """Return the advantages [G] of one group's rewards [G] (arXiv 2507.02259, eq. 4).

    mean: r - mean(r); std: that over the standard deviation. A group of one has mean 0.

    >>> [round(a, 3) for a in advantages([1, 1, 1, 1] + 12 * [0], "std")][3:5]
    [1.677, -0.559]
    """
    if len(rewards) == 1:
        return list(rewards)
    if not differ(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if normalisation == "mean":
        return centred
    std = math.sqrt(sum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


def outcome_advantages(group: Group, config: GRPOConfig) -> list[float]:
    """Return the advantages of a group's trajectories: 0 for one that is left alone in it."""
    rewards = [t.reward for t in group.trajectories]
    return advantages(rewards, config.normalisation) if group.signal else [0.0] * len(rewards)


def advantages_of(group: Group, config: GRPOConfig) -> list[list[float]]:
    """Return the advantages of a group's turns, [trajectories][turns].

    A turn has its trajectory's advantage (credit = split: an equal share of it). If it has rewards
    of its own (arXiv 2509.23040, eq. 8 and 9), it has alpha times that plus 1 - alpha times its
    own: their sum against the group's turns at the same place (`memagent.place_of`), 0 if alone.
    """
    out = []
    for a, trajectory in zip(outcome_advantages(group, config), group.trajectories, strict=True):
        shares = sum(turn.trained for turn in trajectory.turns) if config.credit == "split" else 1
        out.append([a / max(1, shares)] * len(trajectory.turns))
    at_place: dict[int, list[tuple[int, int]]] = {}  # indices in `out` of its turns
    for i, trajectory in enumerate(group.trajectories):
        for k, turn in enumerate(trajectory.turns):
            if turn.rewards and turn.prompt.trained and not turn.prompt.frozen:
                at_place.setdefault(place_of(turn, k), []).append((i, k))
    for indices in at_place.values():
        turns = [group.trajectories[i].turns[k] for i, k in indices]
        rewards = [sum(turn.rewards.values()) for turn in turns]
        lone = len(rewards) == 1 < len(group.sampled)  # there is nothing to compare it with
        compared = [0.0] if lone else advantages(rewards, config.normalisation)
        for (i, k), a in zip(indices, compared, strict=True):
            out[i][k] = config.alpha * out[i][k] + (1 - config.alpha) * a
    return out


# ---------------------------------------------------------------- rows


def training_rows(
    groups: Sequence[Group], config: GRPOConfig, seed: int = 0, rank: int = 0, world: int = 1
) -> list[Row]:
    """Return the rows of all groups with a signal, in order (without_signal = keep: of all groups).

    groups: this rank's share of the step's (`ranks.snake_order`). Rewards are normalised over
    trajectories, before they are expanded to turns: long documents weigh no more in the baseline.
    """
    rows = []
    for index, group in zip(ranks.snake_order(rank, world), groups, strict=False):
        outcome, of_turns = outcome_advantages(group, config), advantages_of(group, config)
        if config.without_signal == "skip" and not (group.signal or any(map(any, of_turns))):
            continue
        # The rare outcome of a group, such as its only success, has an advantage above the mean.
        # Its turns are all trained; the other trajectories' may be thinned out.
        usual = sum(map(abs, outcome)) / max(1, len(outcome)) * (1 + 1e-9)
        for k, trajectory in enumerate(group.trajectories):
            pairs = zip(trajectory.turns, of_turns[k], strict=True)
            turns = [(turn, advantage) for turn, advantage in pairs if turn.trained]
            n = config.turns_per_trajectory if abs(outcome[k]) <= usual else 0
            rows += _rows_of(trajectory, turns, n, seed, index * config.group_size + k)
    return rows


def _rows_of(
    trajectory: Trajectory, turns: list[tuple[Turn, float]], n: int, seed: int, number: int
) -> list[Row]:
    """Return the rows of a trajectory: its answer and n of its updates, drawn at random (0: all).

    turns: with their advantages. Drawn rows are weighted up, so that their expected gradient is
    that of all rows. number: of the trajectory within the step.
    """
    updates = [turn for turn, _ in turns if not turn.prompt.final]
    weight = 1.0
    if 0 < n < len(updates):
        seed = seed_of(seed, trajectory.task.id, trajectory.sample) >> 1
        order = torch.randperm(len(updates), generator=torch.Generator().manual_seed(seed))
        drawn = {id(updates[i]) for i in order[:n].tolist()}
        turns = [(turn, a) for turn, a in turns if turn.prompt.final or id(turn) in drawn]
        weight = len(updates) / n
    rows = []
    for turn, advantage in turns:
        share = 1.0 if turn.prompt.final else weight
        texts = turn.prompt_ids, turn.response_ids, turn.logprobs
        rows.append(Row(*texts, advantage, share, number))
    return rows


# ---------------------------------------------------------------- the loss


def token_weights(rows: Sequence[Row], config: GRPOConfig) -> list[float]:
    """Return the weight in the loss of every token of each row, [rows] (a collective).

    This normalises the loss once, over the rows of an update on all ranks, so the gradient depends
    neither on batches nor on ranks. A row that stands for several (`turns_per_trajectory`) counts
    as that many.
    """
    n = ranks.all_reduce_sum(
        {
            "tokens": sum(r.weight * len(r.response_ids) for r in rows),
            "turns": sum(r.weight for r in rows),
            "trajectories": len({r.trajectory for r in rows}),
        }
    )
    turns_of: dict[int, float] = {}  # trajectory -> its turns; a trajectory is on one rank
    for r in rows:
        turns_of[r.trajectory] = turns_of.get(r.trajectory, 0.0) + r.weight
    per_token = {
        "token_mean": lambda r: 1 / n["tokens"],
        "turn_mean": lambda r: 1 / (len(r.response_ids) * n["turns"]),
        "trajectory_mean": lambda r: (
            1 / (len(r.response_ids) * turns_of[r.trajectory] * n["trajectories"])
        ),
    }[config.aggregation]
    return [r.weight * per_token(r) for r in rows]


IMPORTANCE_CAP = 2.0
"""Ratio trainer / sampler up to which a token counts as sampled by the trainer's policy."""


def policy_loss(
    logp: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    config: GRPOConfig,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, a scalar, and its statistics; every input is [R].

        ratio      = exp(logp - old)
        surrogate  = min(ratio A, clip(ratio) A), for A < 0 at least dual_clip A (arXiv 1912.09729)
        importance = min(exp(old - sampler), cap), detached; 1 with importance = none
        loss       = -sum(weight surrogate importance) + kl sum(weight k3)
        k3         = exp(d) - d - 1 with d = reference - logp, at most 10 (upstream's clamp)

    logp, old, sampler, reference: log-probs under the policy, the same before the rollout's first
    update, the sampler, the policy before training. Statistics: weighted sums of ratio, clipped and
    kl; plain sums of mismatch_kl (k3 estimate of KL(sampler, trainer)) and apart (|old - sampler|);
    the largest |old - sampler| as mismatch.
    """
    ratio = (logp - old).exp()
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    clipped = surrogate < ratio * advantage
    if config.dual_clip:
        bounded = torch.maximum(surrogate, config.dual_clip * advantage)
        surrogate = torch.where(advantage < 0, bounded, surrogate)
    apart = (old - sampler).detach()
    if config.importance == "truncate":
        surrogate = surrogate * apart.exp().clamp_max(IMPORTANCE_CAP)
    loss = -(weight * surrogate).sum()
    stats = {
        "ratio": (weight * ratio).sum().detach(),
        "clipped": (weight * clipped).sum().detach(),
        "mismatch_kl": (apart.expm1() - apart).sum(),
        "mismatch": apart.abs().max(),
        "apart": apart.abs().sum(),
    }
    if reference is not None:
        d = (reference - logp).clamp(-20, 20)  # no overflow; past 10 the estimate is clamped anyway
        kl = (weight * (d.exp() - d - 1).clamp(-10, 10)).sum()
        loss = loss + config.kl * kl
        stats["kl"] = kl.detach()
    return loss, stats


# ---------------------------------------------------------------- the step


def rate_of(config: TrainConfig, step: int) -> float:
    """Return a step's learning rate: linear warm-up, constant, linear decay to a tenth."""
    late = (step / config.steps - config.decay_from) / max(1e-9, 1 - config.decay_from)
    warm = (step + (config.warmup_from == "share")) / config.warmup if config.warmup else 1.0
    return config.lr * min(1.0, warm) * (1 - 0.9 * max(0.0, late))


class GRPO(SamplerChecks, lightning.LightningModule):
    """Trains one policy through one engine and one agent; `training_step` is the algorithm.

    Its state beyond weights and optimizer is four numbers (`counters`). Every random choice follows
    from (seed, step, task, sample), so a resumed run continues as if it had never been interrupted.
    """

    samples = True
    """whether a step samples, so that the sampler's weights are to be proven"""

    def __init__(
        self,
        model,
        engine: Engine,
        agent: Agent,
        tasks: Tasks | None,
        config: GRPOConfig,
        reference=None,
        sharding: Literal["none", "same", "mixed"] = "none",
        validation: Sequence[Task] = (),
    ):
        """sharding: the weights are whole (none), in shards of their own type (same), or in shards
        of float32 that are computed with in bfloat16 (mixed)."""
        super().__init__()
        self.automatic_optimization = False
        self.model, self.engine, self.tasks, self.config = model, engine, tasks, config
        self.agent = agent.on(engine.codec, engine.window)
        self.sharding, self.sharded = sharding, False
        self.reference = (reference,)  # in a tuple: a frozen copy is neither trained nor saved
        self.done_steps, self.level, self.level_steps, self.running = 0, 0, 0, 0.0
        self.metrics: dict[str, float] = {}
        self.groups: list[Group] = []
        self.validation = validation
        self.validated: dict[str, float] = {}  # result of the last validation
        self.memory = PeakMemory()
        # for SamplerChecks; proofs with the number of steps done before each
        self.initial_weights: WeightSnapshot | None = None
        self.proofs: list[tuple[int, WeightMatch]] = []

    def training_step(self, batch, batch_idx: int) -> None:
        """Sample groups, turn them into rows, update: the whole algorithm."""
        config, step, clock = self.config, self.done_steps, Clock()
        seed = seed_of(config.seed, step)
        if batch_idx == 0:
            self.prove_before()
        before = self.engine.counts()
        clock.start("rollout", "switch")  # switch: wake the engine with new weights, then stop it
        with self.engine.awake(self.model):
            clock.stop("switch")
            self.memory.look(self.device)
            self.groups = self.sample(self.tasks.batch(step, self.level, self.n_tasks), seed)
            clock.start("switch")
            self.memory.look(self.device)
        clock.stop("switch")
        rows = training_rows(self.groups, config, seed, ranks.rank(), ranks.world())
        self.describe_rollout(rows, before)
        self.prove_after(batch_idx)
        clock.stop("rollout")  # after the first all-reduce, which waits for the slowest rank
        clock.start("update")
        if self.metrics["trained_rows"]:
            self.update(rows)
        else:
            self.check_agreement()
        self.next_level()
        self.done_steps += 1
        clock.stop("update")
        self.add_times(clock.seconds)

    def sample(self, tasks: list[Task], seed: int) -> list[Group]:
        """Sample and reward groups of this rank's share of a step's tasks."""
        if len({task.id for task in tasks}) < len(tasks):
            raise UserError("Two tasks of one step have the same id; ids must be unique.")
        sampling = Sampling(self.temperature, self.config.top_p)
        groups = sample_groups(
            self.engine, self.agent, ranks.share(tasks), sampling, seed, self.config
        )
        self.check_rollout(groups)
        self.update_agent(groups)
        return groups

    def update(self, rows: list[Row]) -> None:
        """Take one or several optimizer steps on this rank's rows of a rollout (a collective)."""
        recompute(inner(self.model), self.config.recompute)
        parts = self.parts_of(rows)
        n = len(parts)
        # A single update is on-policy: its old log-probs are those of its own forward pass.
        # Several updates need the trainer's from before the first one.
        olds = [self.row_logprobs(part, inner(self.model)) if n > 1 else None for part in parts]
        if n > 1:
            sampler = [r.sampler for part in parts for r in part]
            found = agreement(sampler, [logps for old in olds for logps in old])
            self.check_mismatch(found["mismatch_kl"])
        metrics = dict.fromkeys(UPDATE_METRICS, 0.0)
        for part, old in zip(parts, olds, strict=True):
            sums = self.gradient(part, old)
            means = {name: sums[name] / sums["weight"] for name in ("ratio", "clipped", "kl")}
            means["loss"] = sums["loss"]
            means["mismatch_mean"] = sums["apart"] / sums["tokens"]
            means["mismatch_kl"] = sums["mismatch_kl"] / sums["tokens"]
            if n == 1:
                self.check_mismatch(means["mismatch_kl"])
            means["grad_norm"] = self.clip_and_step()
            for name, value in means.items():
                metrics[name] += value / n
            metrics["mismatch"] = max(metrics["mismatch"], sums["mismatch"])
            metrics["computed_tokens"] += sums["computed_tokens"]
            metrics["skipped_updates"] += not math.isfinite(means["grad_norm"])
        all_tokens = ranks.all_reduce_sum(sum(map(len, rows)))
        metrics["share_saved"] = 1 - metrics["computed_tokens"] / all_tokens
        self.metrics |= metrics

    def gradient(self, rows: list[Row], old: list[list[float]] | None) -> dict[str, float]:
        """Add the gradient of one update's loss to the parameters', one trie at a time.

        old: log-probs before the rollout's first update, [rows][response ids]; None: those of this
        pass, detached. Return the sums of `policy_loss` over all ranks, the largest mismatch, and
        the numbers of tokens (tokens, computed_tokens) and their weight.
        """
        config, model = self.config, inner(self.model)
        weights = token_weights(rows, config)
        reference = self.reference_logprobs(rows) if config.kl else None
        names = ("loss", "ratio", "clipped", "mismatch_kl", "kl", "apart", "computed_tokens")
        sums = dict.fromkeys(names, 0.0)
        sums["tokens"] = sum(len(r.response_ids) for r in rows)
        sums["weight"] = sum(w * len(r.response_ids) for w, r in zip(weights, rows, strict=True))
        mismatch = 0.0
        for batch in self.passes(rows):
            logp = policy_logprobs(model, batch, self.temperature)
            if not batch.index:  # no rows left here, but on another rank
                self.manual_backward(0.0 * logp.sum())
                continue
            sums["computed_tokens"] += len(batch.trie)
            batch = batch.to(logp.device)
            old_logp = batch.flat(old) if old else logp.detach()
            ref = batch.flat(reference) if reference else None
            weight = batch.per_token(weights)
            loss, stats = policy_loss(
                logp, old_logp, batch.sampler, batch.advantage, weight, config, ref
            )
            self.manual_backward(loss * ranks.world())  # sharding averages gradients over ranks
            self.memory.look(self.device)
            mismatch = max(mismatch, stats.pop("mismatch").item())
            for name, value in (stats | {"loss": loss}).items():
                sums[name] += value.item()
        return ranks.all_reduce_sum(sums) | {"mismatch": ranks.all_reduce_max(mismatch)}

    def clip_and_step(self) -> float:
        """Clip the gradient, step unless its norm is not finite, and return the norm."""
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(self.config, self.done_steps)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        norm = ranks.full_tensor(norm).item()
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def next_level(self) -> None:
        """Go on to longer tasks once the present ones are learnt."""
        self.level_steps += 1
        # the mean over a level's first five steps, an exponential moving average from there on
        if math.isfinite(reward := self.metrics["reward"]):  # of a step with any
            self.running += (reward - self.running) / min(self.level_steps, 5)
        learnt = self.running >= self.config.grow_at and self.level_steps >= self.config.grow_steps
        if learnt and self.level < self.tasks.levels:
            self.level, self.level_steps, self.running = self.level + 1, 0, 0.0

    def validate(self) -> dict[str, float]:
        """Return the mean reward (score) of greedy answers to all ranks' n validation tasks."""
        sampling, config = Sampling(0.0), self.config
        with self.engine.awake(self.model):
            jobs = ((task, 0) for task in ranks.share(self.validation))
            done = rollout(self.engine, self.agent, jobs, sampling, config.seed, config.in_flight)
            rewards = [reward_of(self.agent, trajectory, config.outcome) for trajectory in done]
        rewards = [reward for reward in rewards if reward is not None]
        n = ranks.all_reduce_sum({"score": sum(rewards), "n": len(rewards)})
        self.validated = {"score": n["score"] / n["n"] if n["n"] else math.nan, "n": int(n["n"])}
        return self.validated

    # ---------------------------------------------------------------- beneath: passes and ranks

    def parts_of(self, rows: list[Row]) -> list[list[Row]]:
        """Cut rows into one part per update: whole trajectories, in order, on all ranks alike.

        Of each part every rank gets about as much to compute, whoever sampled it.
        """
        ids = sorted(set().union(*ranks.all_gather_object({r.trajectory for r in rows})))
        n = self.config.updates_per_rollout
        if self.config.rows_per_update:
            n = max(1, int(ranks.all_reduce_sum(len(rows))) // self.config.rows_per_update)
        n = min(n, len(ids))
        part_of = {trajectory: i * n // len(ids) for i, trajectory in enumerate(ids)}
        return [balance([r for r in rows if part_of[r.trajectory] == k]) for k in range(n)]

    def passes(self, rows: list[Row]) -> Iterator[TokenBatch]:
        """Yield rows packed into tries, one per pass through the model (a collective)."""
        return passes(rows, self.config.micro_tokens, self.agent.codec.end_id or 0)

    @torch.no_grad()
    def row_logprobs(self, rows: list[Row], model) -> list[list[float]]:
        """Compute log-probs under a model, without gradient: [rows][response ids]; a collective."""
        out: list[list[float]] = [[]] * len(rows)
        for batch in self.passes(rows):
            flat = policy_logprobs(model, batch, self.temperature)
            sizes = [len(rows[i].response_ids) for i in batch.index]
            for i, part in zip(batch.index, flat.split(sizes) if sizes else (), strict=True):
                out[i] = part.tolist()
        return out

    def reference_logprobs(self, rows: list[Row]) -> list[list[float]]:
        """Compute log-probs under the policy before training: the frozen copy, or adapters off."""
        if self.reference[0] is None:
            with self.model.disable_adapter():
                return self.row_logprobs(rows, inner(self.model))
        return self.row_logprobs(rows, self.reference[0])

    def update_agent(self, groups: list[Group]) -> None:
        """Let an agent that defines `after_group` learn from all ranks' groups, in order."""
        if type(self.agent).after_group is Agent.after_group:
            return
        shares = ranks.all_gather_object(groups)
        orders = (ranks.snake_order(rank, len(shares)) for rank in range(len(shares)))
        numbered = chain.from_iterable(map(zip, orders, shares))  # (index in the step, group)
        for _, group in sorted(numbered, key=itemgetter(0)):
            self.agent.after_group(group)

    def describe_rollout(self, rows: Sequence[Row], before: dict[str, int]) -> None:
        """Start the metrics of a step with its rollout; before: what the engine had counted."""
        counts = {name: n - before[name] for name, n in self.engine.counts().items()} | {
            "trained_rows": len(rows),
            "turn_tokens": sum(map(len, rows)),
            "trained_tokens": sum(len(r.response_ids) for r in rows),
        }
        rate = rate_of(self.config, self.done_steps)
        self.metrics = {"step": self.done_steps, "level": self.level, "lr": rate}
        self.metrics |= describe(self.groups, counts) | describe_turns(self.groups, self.agent)

    def add_times(self, seconds: dict[str, float]) -> None:
        """Complete the metrics of a step with its seconds and rates."""
        self.metrics |= times_of(self.metrics, seconds, inner(self.model), self.memory)

    @property
    def n_tasks(self) -> int:
        """The tasks of a step at their present length; the last number holds from there on."""
        sizes = self.config.tasks_per_step
        return sizes[min(self.level, len(sizes) - 1)]

    def temperature_at(self, level: int) -> float:
        return self.config.temperature[min(level, len(self.config.temperature) - 1)]

    @property
    def temperature(self) -> float:
        return self.temperature_at(self.level)

    @property
    def progress(self) -> str:
        """Describe the last step to a person, in a few words."""
        m = self.metrics
        memory = m.get("memory_length", m["memory_tokens"])
        return (
            f"reward {m['reward']:.3f}  turns {m['turns']:>5.1f}  memory {memory:>5.1f} tokens  "
            f"{m['groups_without_signal']:.0%} of the groups without a signal"
        )

    def configure_optimizers(self):
        return optimizer_of([p for p in self.model.parameters() if p.requires_grad], self.config)

    def configure_model(self) -> None:
        """Shard the weights and take a snapshot, with ranks connected and no checkpoint loaded."""
        if self.sharding != "none" and not self.sharded:
            mixed = self.sharding == "mixed"
            for model in filter(None, (self.model, *self.reference)):
                ranks.shard(model, self.device_mesh["data_parallel"], mixed, logprobs=logprobs)
            self.sharded = True
        if self.samples:
            self.initial_weights = WeightSnapshot(self.model.parameters())

    @property
    def counters(self) -> dict[str, float]:
        """The state beyond weights and optimizer, as a checkpoint keeps it."""
        names = ("done_steps", "level", "level_steps", "running")
        return {name: getattr(self, name) for name in names}
