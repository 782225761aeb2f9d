"""GRPO over the turns of memory agents: advantages, log-probs, the loss, and the LightningModule whose training step is the algorithm.

Holds: `advantages`, `rows_of`, `pack`, `logprobs`, `policy_loss`, `GRPO`.
Leaves out: settings (config/options.py), prompts (memagent.py), sampling (rollout.py, engines/hf.py), run folders (report/runlog.py, commands/train.py).
Exercise it: `python cli.py train --help`. Read next: eval.py.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice, repeat
from typing import Literal

import lightning
import torch

from config.errors import UserError
from config.options import GRPOConfig
from data import Task, Tasks, seed_of
from engines.checks import SamplerChecks
from memagent import Agent, Group, Trajectory, Turn, place_of
from models import ranks
from models.load import inner, optimizer_of, recompute
from models.logprobs import Row, TokenBatch, logprobs, pack, policy_logprobs
from models.proof import WeightMatch, WeightSnapshot, agreement
from report.metrics import UPDATE_METRICS, Clock, PeakMemory, describe, describe_turns, on_gpu
from rollout import Engine, Sampling, rollout
from tokens.trie import Cost

# ---------------------------------------------------------------- advantages


def advantages(rewards: Sequence[float], normalisation: str = "mean") -> list[float]:
    """Advantages of one group's rewards [G] -> [G] (arXiv 2507.02259 eq. 4). In a group of one the mean counts as 0.

    >>> [round(a, 3) for a in advantages([1, 1, 1, 1] + 12 * [0], "std")][3:5]
    [1.677, -0.559]
    """
    if len(rewards) == 1:
        return list(rewards)
    if max(rewards) - min(rewards) < 1e-9:  # the same: rounding is no signal
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if normalisation == "mean":
        return centred
    std = math.sqrt(sum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


def advantages_of(group: Group, config: GRPOConfig) -> list[list[float]]:
    """Return the advantages of a group's turns, [trajectories][turns].

    Without rewards of single turns every turn has its trajectory's (credit = split: its share of it).
    With them it is alpha times that, plus 1 - alpha times the turn's own: the sum of its rewards against
    those of the group's turns at the same place (`memagent.place_of`); arXiv 2509.23040, eq. 8 and 9.
    """
    outcome = advantages([t.reward for t in group.trajectories], config.normalisation)
    out = []
    for a, trajectory in zip(outcome, group.trajectories, strict=True):
        split = config.credit == "split"
        shares = sum(turn.trained for turn in trajectory.turns) if split else 1
        out.append([a / max(1, shares)] * len(trajectory.turns))
    compared: dict[Hashable, list[tuple[int, int]]] = {}  # place -> indices in `out`
    for i, trajectory in enumerate(group.trajectories):
        for k, turn in enumerate(trajectory.turns):
            if turn.rewards and turn.prompt.trained and not turn.prompt.frozen:
                compared.setdefault(place_of(turn, k), []).append((i, k))
    for indices in compared.values():
        turns = [group.trajectories[i].turns[k] for i, k in indices]
        rewards = [config.turn_reward_scale * sum(turn.rewards.values()) for turn in turns]
        own = advantages(rewards, config.normalisation)
        for (i, k), a in zip(indices, own, strict=True):
            out[i][k] = config.alpha * out[i][k] + (1 - config.alpha) * a
    return out


def training_rows(
    groups: Sequence[Group], config: GRPOConfig, seed: int = 0, rank: int = 0, world: int = 1
) -> list[Row]:
    """Return the rows of all groups with a signal (without_signal = keep: of all groups), in order.

    groups: this rank's share of the step (`ranks.snake_order`). Advantages are normalised per trajectory and
    expanded to turns afterwards: long documents do not weigh more in the baseline.
    """
    rows = []
    for place, group in zip(ranks.snake_order(rank, world), groups, strict=False):
        outcome = advantages([t.reward for t in group.trajectories], config.normalisation)
        each = advantages_of(group, config)
        signal = group.signal or any(any(of_turns) for of_turns in each)
        if config.without_signal == "skip" and not signal:
            continue
        usual = sum(map(abs, outcome)) / len(outcome) * (1 + 1e-9)
        for k, trajectory in enumerate(group.trajectories):
            pairs = zip(trajectory.turns, each[k], strict=True)
            turns = [(turn, advantage) for turn, advantage in pairs if turn.trained]
            # the rare outcome of a group, the one failure or success, has the larger advantage: all of it
            thinned = config.turns_per_trajectory if abs(outcome[k]) <= usual else 0
            number = place * config.group_size + k
            rows += _rows_of(trajectory, turns, thinned, seed, number)
    return rows


def _rows_of(
    trajectory: Trajectory, turns: list[tuple[Turn, float]], n: int, seed: int, number: int
) -> list[Row]:
    """Return the rows of one trajectory: its answer and, of its updates, n drawn at random (0 = all).

    Drawn rows are weighted up, so that their gradient is that of all rows on average.
    """
    updates = [turn for turn, _ in turns if not turn.prompt.final]
    weight = 1.0
    if 0 < n < len(updates):
        seed = seed_of(seed, trajectory.task.id, trajectory.sample) >> 1
        order = torch.randperm(len(updates), generator=torch.Generator().manual_seed(seed))
        chosen = {id(updates[i]) for i in order[:n].tolist()}
        turns = [(t, a) for t, a in turns if t.prompt.final or id(t) in chosen]
        weight = len(updates) / n
    return [
        Row(
            turn.prompt_ids,
            turn.response_ids,
            turn.logprobs,
            advantage,
            1.0 if turn.prompt.final else weight,
            number,
        )
        for turn, advantage in turns
    ]


# ---------------------------------------------------------------- the loss


def updates_of(rows: Sequence[Row], n_trajectories: int, config: GRPOConfig) -> int:
    """How many optimizer steps the rows of a rollout give, those of other ranks included; each has whole trajectories, of `n_trajectories`."""
    n = config.updates_per_rollout
    if config.rows_per_update:
        n = max(1, int(ranks.all_reduce_sum(len(rows))) // config.rows_per_update)
    return min(n, n_trajectories)


def token_weights(rows: Sequence[Row], config: GRPOConfig, final_tokens: int = 1) -> list[float]:
    """The weight of every token of each row, [rows]: the loss is normalised here, once for all rows of an update, those of other ranks
    included.

    A row that stands for several (`turns_per_trajectory`) counts as so many in the normaliser too.
    """
    n = ranks.all_reduce_sum(
        {
            "tokens": sum(r.weight * len(r.response_ids) for r in rows),
            "turns": sum(r.weight for r in rows),
            "trajectories": len({r.trajectory for r in rows}),
        }
    )
    of_trajectory: dict[int, float] = {}  # turns; a trajectory's rows are all here
    for r in rows:
        of_trajectory[r.trajectory] = of_trajectory.get(r.trajectory, 0.0) + r.weight
    per_row = {
        "token_mean": lambda r: 1 / n["tokens"],
        "row_mean": lambda r: 1 / (len(r.response_ids) * n["trajectories"]),
        "turn_mean": lambda r: 1 / (len(r.response_ids) * n["turns"]),
        "trajectory_mean": lambda r: (
            1 / (len(r.response_ids) * of_trajectory[r.trajectory] * n["trajectories"])
        ),
        "constant": lambda r: 1 / (final_tokens * n["turns"]),
    }[config.aggregation]
    return [r.weight * per_row(r) for r in rows]


def policy_loss(
    logp: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    config: GRPOConfig,
    reference: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum over tokens of the clipped surrogate, with truncated importance correction and k3 KL. All inputs [R]; `turn`, the
    number of each token's turn, is asked for by importance = mask_turn alone.

    ratio = exp(logp - old); surrogate = min(ratio A, clip(ratio) A), for A < 0 bounded by dual_clip A (arXiv 1912.09729);
    correction = min(exp(old - sampler), cap), detached; KL: exp(d) - d - 1 with d = reference - logp, at most 10 (upstream's clamp).
    The statistics are sums of the same weights; divided by the weights' sum they are means. Those of the sampler's distance from
    the trainer are plain: mismatch_kl and apart are sums over tokens (k3 estimate of KL(sampler, trainer), |old - sampler|), mismatch is
    the largest.
    """
    ratio = (logp - old).exp()
    surrogate = torch.minimum(
        ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    )
    clipped = surrogate < ratio * advantage
    if config.dual_clip:
        surrogate = torch.where(
            advantage < 0, torch.maximum(surrogate, config.dual_clip * advantage), surrogate
        )
    apart = (old - sampler).detach()
    mismatch = apart.exp()
    if config.importance == "truncate":
        surrogate = surrogate * mismatch.clamp_max(config.importance_cap)
    elif config.importance == "mask":
        surrogate = surrogate * mismatch * (mismatch <= config.importance_cap)
    elif config.importance == "mask_turn":
        sizes = turn.bincount()
        mean = (
            torch.zeros(len(sizes), device=logp.device).index_add_(0, turn, apart.float()) / sizes
        )
        surrogate = surrogate * (mean.abs() <= math.log(config.importance_cap))[turn]
    loss = -(weight * surrogate).sum()
    stats = {
        "ratio": (weight * ratio).sum().detach(),
        "clipped": (weight * clipped).sum().detach(),
        "mismatch_kl": (apart.expm1() - apart).sum(),
        "mismatch": apart.abs().max(),
        "apart": apart.abs().sum(),
    }
    if reference is not None:
        d = (reference - logp).clamp(
            -20, 20
        )  # against overflow: past 10 the estimate is clamped anyway
        kl = (weight * (d.exp() - d - 1).clamp(-10, 10)).sum()
        loss = loss + config.kl * kl
        stats["kl"] = kl.detach()
    return loss, stats


# ---------------------------------------------------------------- the module


class GRPO(SamplerChecks, lightning.LightningModule):
    """One policy, one engine, one agent; `training_step` is the algorithm.

    Its state beyond weights and optimizer is three numbers (step, level, running reward): every random choice follows from
    (seed, step, task, sample), so a run that is killed and resumed goes on as if nothing had happened.
    """

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
        """sharding: how the weights are held: whole; in shards of their own type; or in shards of
        float32 that are computed with in bfloat16."""
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
        self.validated: dict[str, float] = {}  # what the last one gave
        self.memory = PeakMemory()
        self.kept: WeightSnapshot | None = (
            None  # the weights that training began with, until the sampler was seen to leave them
        )
        self.proofs: list[
            tuple[int, WeightMatch]
        ] = []  # (steps done, what was seen): of a sampler that follows the trainer's weights

    def training_step(self, batch, batch_idx: int) -> None:
        """Sample groups, turn them into rows, update; this is the whole algorithm."""
        config, step, clock = self.config, self.done_steps, Clock()
        if batch_idx == 0:
            self.prove_before()
        counted = self.engine.counts()
        clock.start("rollout", "switch")
        with self.engine.awake(self.model):
            clock.stop("switch")
            self.memory.look(self.device)
            self.groups = self.sample_groups(self.tasks.batch(step, self.level, self.n_tasks), step)
            clock.start("switch")  # the time to wake the engine, bring it weights, put it to sleep
            self.memory.look(self.device)
        clock.stop("switch")
        rows = training_rows(
            self.groups, config, seed_of(config.seed, step), ranks.rank(), ranks.world()
        )
        self.describe(rows, counted)
        self.prove_after(batch_idx)
        clock.stop("rollout")  # after the first all-reduce, which waits for the slowest rank
        clock.start("update")
        if self.metrics["trained_rows"]:
            self.update(rows)
        else:
            self.compare()
        self.grow()
        self.done_steps += 1
        clock.stop("update")
        self.time(clock.seconds)

    def describe(self, rows: list[Row], counted: dict[str, int]) -> None:
        """Start the metrics of a step with what the rollout was like; `counted`: the engine's counts before it."""
        counts = {name: n - counted[name] for name, n in self.engine.counts().items()} | {
            "trained_rows": len(rows),
            "turn_tokens": sum(map(len, rows)),
            "trained_tokens": sum(len(r.response_ids) for r in rows),
        }
        self.metrics = {
            "step": self.done_steps,
            "level": self.level,
            "lr": self.rate(self.done_steps),
        }
        self.metrics |= describe(self.groups, counts)
        self.metrics |= describe_turns(self.groups, self.agent)

    def time(self, seconds: dict[str, float]) -> None:
        """End the metrics of a step with its seconds and rates."""
        step_s = seconds["rollout"] + seconds["update"]
        tokens = self.metrics["read_tokens"] + self.metrics["written_tokens"]
        self.metrics |= {f"{phase}_s": seconds[phase] for phase in ("rollout", "switch", "update")}
        self.metrics |= {"step_s": step_s, "tokens_per_s": tokens / step_s}
        computed, update_s = self.metrics["computed_tokens"], seconds["update"]
        self.metrics |= on_gpu(inner(self.model), computed, update_s, self.memory)

    def at_level(self, values: Sequence):
        """The value for the present length of the tasks; the last one holds for all further lengths."""
        return values[min(self.level, len(values) - 1)]

    @property
    def cost(self) -> Cost | None:
        """What a trie is chosen by; on a GPU one kernel computes any of them, and sharing everything is best."""
        return Cost.of(inner(self.model)) if self.device.type == "cpu" else None

    @property
    def n_tasks(self) -> int:
        return self.at_level(self.config.tasks_per_step)

    @property
    def temperature(self) -> float:
        return self.at_level(self.config.temperature)

    def sample_groups(self, tasks: list[Task], step: int) -> list[Group]:
        """G trajectories of each task of this rank's share, graded."""
        config = self.config
        if len({task.id for task in tasks}) < len(tasks):
            raise UserError("Two tasks of one step have the same id; ids must be unique.")
        tasks = ranks.share(tasks)
        groups = {task.id: Group(task, []) for task in tasks}
        jobs = ((task, g) for task in tasks for g in range(config.group_size))
        sampling = Sampling(self.temperature, config.top_p)
        for trajectory in rollout(
            self.engine,
            self.agent,
            jobs,
            sampling,
            seed_of(config.seed, step),
            config.in_flight,
        ):
            self.grade(trajectory)
            groups[trajectory.task.id].trajectories.append(trajectory)
        for group in groups.values():  # trajectories finish in any order: nothing may depend on it
            group.trajectories.sort(key=lambda t: t.sample)
        errors = [t.error for group in groups.values() for t in group.trajectories]
        if not ranks.all_reduce_sum({"right": sum(not error for error in errors)})["right"]:
            raise UserError(
                f"Every trajectory of step {step} failed, there is nothing to learn from: {errors[0]}."
            )
        self.remember(list(groups.values()))
        return list(groups.values())

    def grade(self, trajectory: Trajectory) -> None:
        """Give a trajectory its reward and its turns theirs."""
        outcome = self.config.outcome
        trajectory.reward = 0.0 if trajectory.error else self.agent.reward(trajectory, outcome)
        rewards = self.agent.turn_rewards(trajectory)
        if rewards is not None:
            for turn, own in zip(trajectory.turns, rewards, strict=True):
                turn.rewards = dict(own)

    def remember(self, groups: list[Group]) -> None:
        """Let the agent learn from the groups of all ranks, where it has a memory that outlives a task."""
        if type(self.agent).after_group is Agent.after_group:
            return
        shares = ranks.all_gather_object(groups)
        order = [
            [*islice(ranks.snake_order(k, len(shares)), len(share))]
            for k, share in enumerate(shares)
        ]
        numbered = [
            pair
            for at, share in zip(order, shares, strict=True)
            for pair in zip(at, share, strict=True)
        ]
        for _, group in sorted(numbered, key=lambda pair: pair[0]):  # as they stand in the step
            self.agent.after_group(group)

    def update(self, rows: list[Row]) -> None:
        """One or several optimizer steps on the rows of a rollout: this rank's, and in step with it those of the others."""
        config, model = self.config, inner(self.model)
        recompute(model, config.recompute)
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.rate(self.done_steps)
        ids = sorted(set().union(*ranks.all_gather_object({r.trajectory for r in rows})))
        n = updates_of(rows, len(ids), config)
        part_of = {t: i * n // len(ids) for i, t in enumerate(ids)}  # whole trajectories, in order
        parts = [[r for r in rows if part_of[r.trajectory] == k] for k in range(n)]
        # with several updates the old log-probs are the trainer's own, from before the first one
        olds = [self.frozen(part, model) if n > 1 else None for part in parts]
        if n > 1:
            self.check_mismatch(
                agreement(
                    [r.sampler for part in parts for r in part], [x for old in olds for x in old]
                ).kl
            )
        metrics = dict.fromkeys(UPDATE_METRICS, 0.0)
        for part, old in zip(parts, olds, strict=True):
            sums = self.gradient(part, old)
            apart, kl = sums["apart"] / sums["tokens"], sums["mismatch_kl"] / sums["tokens"]
            if n == 1:
                self.check_mismatch(kl)
            norm = ranks.full_tensor(
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
            ).item()
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            means = {name: sums[name] / sums["weight"] for name in ("ratio", "clipped", "kl")}
            means |= {
                "loss": sums["loss"],
                "mismatch_mean": apart,
                "mismatch_kl": kl,
                "grad_norm": norm,
            }
            for name, value in means.items():
                metrics[name] += value / n
            metrics["mismatch"] = max(metrics["mismatch"], sums["mismatch"])
            metrics["computed_tokens"] += sums["computed_tokens"]
            metrics["skipped_updates"] += not math.isfinite(norm)
        metrics["share_saved"] = 1 - metrics["computed_tokens"] / ranks.all_reduce_sum(
            sum(map(len, rows))
        )
        self.metrics |= metrics

    def gradient(self, rows: list[Row], old: list[list[float]] | None) -> dict[str, float]:
        """Add the gradient of the loss to the parameters', pass by pass; returns what `policy_loss` and we count, over all ranks."""
        config, model = self.config, inner(self.model)
        longest = max(self.agent.limits().written, self.agent.config.final_tokens)
        weights = token_weights(rows, config, longest)
        reference = self.reference_logprobs(rows) if config.kl else None
        sums = dict.fromkeys(
            ("loss", "ratio", "clipped", "mismatch_kl", "kl", "apart", "computed_tokens"), 0.0
        )
        sums["tokens"] = sum(len(r.response_ids) for r in rows)
        sums["weight"] = sum(w * len(r.response_ids) for w, r in zip(weights, rows, strict=True))
        worst = 0.0
        for batch in self.passes(rows):
            logp = policy_logprobs(model, batch, self.temperature)
            if not batch.index:  # another rank still has rows
                self.manual_backward(0.0 * logp.sum())
                continue
            sums["computed_tokens"] += len(batch.trie)
            batch = batch.to(logp.device)
            loss, stats = policy_loss(
                logp,
                batch.flat(old) if old else logp.detach(),
                batch.sampler,
                batch.advantage,
                batch.per_token(weights),
                config,
                batch.flat(reference) if reference else None,
                batch.row,
            )
            self.manual_backward(loss * ranks.world())  # of the ranks' gradients the mean is taken
            self.memory.look(self.device)
            worst = max(worst, stats.pop("mismatch").item())
            for name, value in (stats | {"loss": loss}).items():
                sums[name] += value.item()
        return ranks.all_reduce_sum(sums) | {"mismatch": ranks.all_reduce_max(worst)}

    def passes(self, rows: list[Row]) -> Iterator[TokenBatch]:
        """The tries that some rows go through the model as: as many on every rank, because in each pass all give their shards of the
        weights. A rank that has fewer ends with empty ones."""
        batches = list(pack(rows, self.config.micro_tokens, self.cost))
        n = int(ranks.all_reduce_max(len(batches)))  # before the first one is computed with
        (nothing,) = pack([Row([0], [0], [])], 2)
        nothing.index = []
        yield from batches
        yield from repeat(nothing, n - len(batches))

    @torch.no_grad()
    def frozen(self, rows: list[Row], model) -> list[list[float]]:
        """Log-probs of every row under a model, without gradient: [rows][response ids]."""
        out: list[list[float]] = [[]] * len(rows)
        for batch in self.passes(rows):
            flat = policy_logprobs(model, batch, self.temperature)
            sizes = [len(rows[i].response_ids) for i in batch.index]
            for i, part in zip(batch.index, flat.split(sizes) if sizes else (), strict=True):
                out[i] = part.tolist()
        return out

    def reference_logprobs(self, rows: list[Row]) -> list[list[float]]:
        """Under the policy as it was before training: adapters off, or the frozen copy."""
        if self.config.lora_rank:
            with self.model.disable_adapter():
                return self.frozen(rows, inner(self.model))
        return self.frozen(rows, self.reference[0])

    def validate(self) -> dict[str, float]:
        """Mean reward of greedy answers to the validation tasks, each rank's share of them, and how many."""
        sampling, config = Sampling(0.0), self.config
        with self.engine.awake(self.model):
            jobs = ((task, 0) for task in ranks.share(self.validation))
            done = list(
                rollout(
                    self.engine,
                    self.agent,
                    jobs,
                    sampling,
                    config.seed,
                    config.in_flight,
                )
            )
        rewards = [0.0 if t.error else self.agent.reward(t, config.outcome) for t in done]
        n = ranks.all_reduce_sum({"score": sum(rewards), "n": len(done)})
        self.validated = {"score": n["score"] / n["n"], "n": int(n["n"])}
        return self.validated

    def grow(self) -> None:
        """Longer tasks once the present ones are learnt."""
        self.level_steps += 1
        self.running += (self.metrics["reward"] - self.running) / min(self.level_steps, 5)
        if (
            self.level < self.tasks.levels
            and self.running >= self.config.grow_at
            and self.level_steps >= self.config.grow_steps
        ):
            self.level, self.level_steps, self.running = self.level + 1, 0, 0.0

    def rate(self, step: int) -> float:
        config = self.config
        late = (step / config.steps - config.decay_from) / max(1e-9, 1 - config.decay_from)
        warm = (step + (config.warmup_from == "share")) / config.warmup if config.warmup else 1.0
        return config.lr * min(1.0, warm) * (1 - 0.9 * max(0.0, late))

    def configure_optimizers(self):
        config = self.config
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return optimizer_of(trained, config)

    def configure_model(self) -> None:
        """Lightning's place for shards: the ranks know each other."""
        if self.sharding != "none" and not self.sharded:
            mixed = self.sharding == "mixed"
            for model in filter(None, (self.model, *self.reference)):
                ranks.shard(model, self.device_mesh["data_parallel"], mixed, logprobs=logprobs)
            self.sharded = True
        self.kept = WeightSnapshot(self.model.parameters())  # before a checkpoint is loaded

    @property
    def counters(self) -> dict[str, float]:
        """Its state beyond weights and optimizer."""
        return {
            name: getattr(self, name) for name in ("done_steps", "level", "level_steps", "running")
        }
