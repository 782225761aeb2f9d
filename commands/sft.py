"""A warm start: supervised training on what a careful reader would write.

    tasks  --demonstration-->  trajectories  --chosen_turns-->  rows  --update-->  new weights
            Agent.demonstrate                 some that keep the memory

An untrained model is almost never right, so reinforcement learning has nothing to start from. Here
an agent reads each document as always, but its responses are written by `Agent.demonstrate`, which
knows the evidence. The model learns these responses in the very prompts that it will see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace

from agents import find
from agents.rewards import grade
from config.errors import UserError
from data import Task, places, seed_of
from grpo import GRPO, rate_of
from memagent import Agent, Finish, Group, Prompt, Trajectory, Turn
from models import ranks
from models.load import inner, recompute
from models.loads import new_tokens, stretches
from models.logprobs import Row, policy_logprobs
from report.metrics import Clock
from rollout import advance, given, start

KINDS = ("changed", "kept", "answer")  # of turns: the memory changes, it stays, the final turn
SHARE = "0.1"  # of the tasks, for an agent of `also` that names none
Shown = tuple[list[Group], list[Row], list[str]]  # demonstrated: one trajectory a group; kinds
ATTEMPTS, BEYOND = 10, 10**6  # at a step with tasks that can be demonstrated; steps between them


def demonstration(agent: Agent, task: Task, mistake: str = "") -> Trajectory | None:
    """Run an agent whose responses are its own demonstrations; None where it cannot show the task.

    That is so if the evidence is not known or is cut by a section's end, or if a response is longer
    than its turn may be. mistake: words to note in the first section instead, unless that section
    has evidence; the mistake itself is not trained.
    """
    trajectory, steps, prompt = Trajectory(task), start(agent, task), None
    prompt = advance(agent, steps)
    while prompt is not None:
        turn = given(prompt, agent.codec)
        if turn is None:
            text = agent.demonstrate(task, prompt)
            if text is None:
                return None
            if mistake and not trajectory.turns and kind_of(prompt, text) == "kept":
                prompt, text = replace(prompt, trained=False), mistake
            ids = [*agent.codec.reply(text), agent.codec.end_id]
            if len(ids) > prompt.max_tokens:
                return None
            asked, unsampled = prompt.ids(agent.codec), [0.0] * len(ids)
            response = agent.codec.response(ids)
            turn = Turn(prompt, asked, ids, unsampled, Finish.STOP, response)
        trajectory.turns.append(turn)
        prompt = advance(agent, steps, turn)
    pieces = trajectory.turns[-1].prompt.pieces
    # not in the question or the template, which may have the words too
    read = [text for text, constant in pieces if not constant and text != task.question]
    noted = (any(words in text for text in read) for words, _ in task.notes)
    return trajectory if all(noted) else None


def kind_of(prompt: Prompt, text: str) -> str:
    """Return which of KINDS a demonstrated response is."""
    if prompt.final:
        return "answer"
    return "changed" if text.strip() and text != prompt.memory else "kept"


def chosen_turns(trajectory: Trajectory, others: int, rng: random.Random) -> list[Turn]:
    """Return the turns to learn: all that change the memory or answer, `others` of the rest."""
    turns = [turn for turn in trajectory.turns if turn.trained]
    kept = [turn for turn in turns if kind_of(turn.prompt, turn.response) == "kept"]
    left_out = {id(turn) for turn in rng.sample(kept, max(0, len(kept) - others))}
    return [turn for turn in turns if id(turn) not in left_out]


def token_weights(rows: Sequence[Row], first: float) -> list[list[float]]:
    """Return the weight of every response token, [rows][response ids] (a collective).

    They sum to 1 over all ranks. The first token of a response weighs `first` times another.
    """
    total = ranks.all_reduce_sum(sum(first + len(row.response_ids) - 1 for row in rows))
    return [[first / total] + [1 / total] * (len(row.response_ids) - 1) for row in rows]


def deal(rows: Sequence[Row], n: int) -> list[list[int]]:
    """Deal rows to n ranks, as indices: about as many tokens each, what is shared counted once.

    Lexicographic neighbours, such as questions about one section, stay together.
    """
    order, new = new_tokens(rows)
    return [[order[i] for i in part] for part in stretches(new, n)]


class SFT(GRPO):
    """Train one policy on the demonstrations of one agent, or of several.

    Engine, validation, checkpoints and randomness are those of `GRPO`; a step samples nothing, and
    its loss is the negative log-likelihood of the demonstrated responses.
    """

    samples = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        codec, window = self.agent.codec, self.agent.window
        self.agents, self.shares = [self.agent], [1.0]
        for name, share in map(_share, self.config.also):
            self.agents.append(find.make(name, asdict(self.agent.config)).on(codec, window))
            self.shares.append(share)
            self.shares[0] -= share
        if self.shares[0] <= 0:
            raise UserError("The shares of --also must leave something to the agent itself.")

    def training_step(self, batch, batch_idx: int) -> None:
        """Demonstrate a step's tasks and take an optimizer step on them.

        Every rank demonstrates all of them, which takes milliseconds, and learns its part of the
        turns: the step does not depend on the number of ranks. UserError: none of the tasks can be
        demonstrated.
        """
        step, clock = self.done_steps, Clock()
        clock.start("rollout")
        level, tasks, (groups, rows, kinds) = self.draw(step)
        self.groups = ranks.share(groups)
        clock.stop("rollout")
        if not rows:
            raise UserError(
                f"None of the tasks of step {step} can be demonstrated: give the agent "
                f"{self.agent.label} a `demonstrate`, as a subclass of MemAgent has one, or tasks "
                "that say where their evidence is."
            )
        clock.start("update")
        self.metrics = {
            "step": step,
            "level": level,
            "lr": rate_of(self.config, step),
            "tasks": len(tasks),
            "not_shown": len(tasks) - len(groups),
            "trained_rows": len(rows),
            "read_tokens": sum(len(row.prompt_ids) for row in rows),
            "written_tokens": sum(len(row.response_ids) for row in rows),
        }
        mine = deal(rows, ranks.world())[ranks.rank()]
        self.update([rows[i] for i in mine], [kinds[i] for i in mine])
        self.done_steps += 1
        clock.stop("update")
        self.add_times(clock.seconds)

    def draw(self, step: int) -> tuple[int, list[Task], Shown]:
        """Draw a level, each as likely as another, and demonstrate a step's tasks of it; where none
        can be, those of a step far beyond the last: the next one trains on its own."""
        rng = random.Random(seed_of(self.config.seed, "level", step))
        level, sizes = rng.randint(0, self.tasks.levels), self.config.tasks_per_step
        n = sizes[min(level, len(sizes) - 1)]
        for attempt in range(ATTEMPTS):
            tasks = self.tasks.batch(step + attempt * BEYOND, level, n)
            if (shown := self.shown(step, tasks))[0]:
                break
        return level, tasks, shown

    def shown(self, step: int, tasks: Sequence[Task]) -> Shown:
        """Demonstrate tasks; return groups of one trajectory, rows to train on, and their kinds."""
        groups, rows, kinds = [], [], []
        for number, task in enumerate(tasks):
            rng = random.Random(seed_of(self.config.seed, step, task.id))
            trajectory = self.demonstrate(task, tasks[number - 1], rng)
            if trajectory is None:
                continue
            grade(self.agent, trajectory, self.config.outcome)
            groups.append(Group(task, [trajectory]))
            for turn in chosen_turns(trajectory, self.config.others, rng):
                rows.append(Row(turn.prompt_ids, turn.response_ids, turn.logprobs, 1.0))
                kinds.append(kind_of(turn.prompt, turn.response))
        return groups, rows, kinds

    def demonstrate(self, task: Task, other: Task, rng: random.Random) -> Trajectory | None:
        """Show how one of the agents reads a task, perhaps with a mistake: another task's answer.

        One that holds what is to be noted would not look mistaken, and of a task without an answer
        nothing is noted.
        """
        (agent,) = rng.choices(self.agents, self.shares)
        mistake = other.answers[0] if rng.random() < self.config.mistakes else ""
        right = (*task.answers, *(words for words, _ in task.notes))
        held = any(any(places(words, mistake)) for words in right)
        return demonstration(agent, task, "" if task.absent or other.absent or held else mistake)

    def update(self, rows: list[Row], kinds: list[str]) -> None:
        """Take one optimizer step on this rank's rows (a collective).

        kinds: of each row. Metrics beside the loss: the mean probability of a response's first
        token, by kind.
        """
        recompute(inner(self.model), self.config.recompute)
        weights = token_weights(rows, self.config.first_token)
        sums = {"loss": 0.0, "computed_tokens": 0.0, "tokens": sum(map(len, rows))}
        sums |= {f"n_{kind}": kinds.count(kind) for kind in KINDS}
        sums |= {f"first_{kind}": 0.0 for kind in KINDS}
        for batch in self.passes(rows):
            logp = policy_logprobs(inner(self.model), batch, 1.0)
            if not batch.index:  # no rows left here, but on another rank
                self.manual_backward(0.0 * logp.sum())
                continue
            batch = batch.to(logp.device)
            loss = -(batch.flat(weights) * logp).sum()
            self.manual_backward(loss * ranks.world())  # sharding averages gradients over ranks
            sums["loss"] += loss.item()
            sums["computed_tokens"] += len(batch.trie)
            sizes = [len(rows[i].response_ids) for i in batch.index]
            for i, part in zip(batch.index, logp.detach().split(sizes), strict=True):
                sums[f"first_{kinds[i]}"] += part[0].exp().item()
        sums = ranks.all_reduce_sum(sums)
        for kind in KINDS:
            n = sums[f"n_{kind}"]
            sums[f"first_{kind}"] = sums[f"first_{kind}"] / n if n else math.nan
        sums["share_saved"] = 1 - sums["computed_tokens"] / sums.pop("tokens")
        norm = self.clip_and_step()
        skipped = not math.isfinite(norm)
        self.metrics |= sums | {"grad_norm": norm, "skipped_updates": skipped}

    def temperature_at(self, level: int) -> float:
        return 1.0

    @property
    def progress(self) -> str:
        m = self.metrics
        return f"loss {m['loss']:.3f}  sure of a memory " + ", ".join(
            f"{kind} {m[f'first_{kind}']:.0%}".replace("answer", "an answer")
            for kind in KINDS
            if m[f"n_{kind}"]
        )


def _share(entry: str) -> tuple[str, float]:
    """Return the agent and the share of the tasks that an entry of `also` names."""
    name, _, share = entry.partition("=")
    try:
        value = float(share or SHARE)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UserError(f"--also takes NAME or NAME=SHARE, such as full=0.1, not {entry!r}.")
    return name, value
