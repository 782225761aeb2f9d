"""MemAgent and GRPO in one file, in plain PyTorch: read it from top to bottom, then run it.

    python examples/minimal.py      # some six minutes on two cores; one where `stages` are 8 steps

A language model reads a document of 64 sections through a memory of thirteen tokens. It is shown
one section and its memory, and writes the memory anew; at the end it answers from the memory alone.
Nobody tells it what to keep: of sixteen readings of one document those with the right answer are
made more likely than those without (GRPO), in all of their turns.

It trains the policy that ships with the repository, which can read, but forgets; docs/tutorial.md
shows one reading of it and one update. The product does the same (`cli.py train --preset demo`)
with fast engines, shared prefixes computed once, several GPUs, checkpoints, other agents and data;
tests/test_minimal.py holds the two together: the same trajectories, advantages, loss and gradient.
Read next: memagent.py.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, Python looks in examples/ alone

from data import Task, boxed_reward, seed_of  # noqa: E402
from tasks.worlds import make_task  # noqa: E402


@dataclass(frozen=True)
class Settings:
    model: str = str(ROOT / "embedded" / "weights")
    seed: int = 0
    chunk_tokens: int = 24  # of a section: six sentences
    memory_tokens: int = 13  # most tokens of a memory, its end included: three sentences
    answer_tokens: int = 24
    # (steps, sections, temperature): failures are the signal, and heat brings them back
    stages: tuple[tuple[int, int, float], ...] = ((25, 2, 1.3), (20, 4, 1.6), (10, 8, 1.9))
    tasks_per_step: int = 8
    group_size: int = 16  # readings of one document
    lr: float = 4e-4
    warmup: int = 5  # steps
    rows_per_pass: int = 256  # turns that one forward and backward pass computes


# ---------------------------------------------------------------- the agent

UPDATE = (
    "You read a long document one section at a time and carry a short memory from section to "
    "section. Read the section below, then write the memory anew: keep every old detail that helps "
    "to solve the problem, add what this section contributes, leave out the rest.\n\n<section>\n",
    "\n</section>\n\n<problem>\n",
    "\n</problem>\n\n<memory>\n",
    "\n</memory>\n\nUpdated memory:\n",
)
FINAL = (
    "Solve the problem with the help of the memory alone. Give the answer inside \\boxed{}.\n\n"
    "<problem>\n",
    "\n</problem>\n\n<memory>\n",
    "\n</memory>\n\nYour answer:\n",
)
NO_MEMORY = "No previous memory"


def read(task: Task, tokenizer, s: Settings) -> Generator[tuple[list[int], int] | None, list[int]]:
    """Yield each prompt with the most tokens of its response, and None at the end; be sent the ids
    of the response. Tokens in, tokens out: a section is a slice of the document's ids, a memory the
    ids that were sampled, and so what is trained on is what was read."""

    def prompt(pieces: Sequence[str], *slots: list[int]) -> list[int]:
        parts = zip_longest(map(tokenizer.encode, pieces), slots, fillvalue=[])
        return [token for piece, slot in parts for token in (*piece, *slot)]

    document, problem = tokenizer.encode(task.document), tokenizer.encode(task.question)
    memory = nothing = tokenizer.encode(NO_MEMORY)
    for start in range(0, len(document), s.chunk_tokens):
        section = document[start : start + s.chunk_tokens]
        response = yield prompt(UPDATE, section, problem, memory), s.memory_tokens
        memory = response if tokenizer.decode(response).strip() else nothing
    yield prompt(FINAL, problem, memory), s.answer_tokens
    yield None


# ---------------------------------------------------------------- sampling


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on a seed and a position alone (splitmix64)."""
    most = (1 << 64) - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & most
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & most
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & most
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def padded(rows: Sequence[list[int]]) -> torch.Tensor:
    """Return rows of ids as one tensor; a causal model never sees what fills them on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def log_probs(model, ids: torch.Tensor, temperature: float, last=None) -> torch.Tensor:
    """Return the log-probs [rows, positions, vocabulary] of what follows each position of ids;
    last: of this position of each row alone. Padding is never said."""
    hidden = model.model(ids)[0]
    if last is not None:
        hidden = hidden[torch.arange(len(ids)), last][:, None]
    logits = model.lm_head(hidden).float()
    logits[..., model.config.pad_token_id] = -torch.inf
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def respond(
    model, prompts: Sequence[list[int]], most: int, temperature: float, seeds: Sequence[int]
) -> list[tuple[list[int], list[float]]]:
    """Return a response to each prompt and the log-probs of its ids, the end's included. Every
    token costs a pass over all before it: this is what an engine's cache saves."""
    rows, out = [[*prompt] for prompt in prompts], [([], []) for _ in prompts]
    running = list(range(len(prompts)))
    for position in range(most):
        batch = [rows[i] for i in running]
        last = torch.tensor([len(row) - 1 for row in batch])
        logp = log_probs(model, padded(batch), temperature, last)[:, 0]
        drawn = torch.tensor([uniform(seeds[i], position) for i in running])
        cdf = logp.exp().cumsum(-1)  # the first id with more than the drawn share up to it
        ids = (cdf <= drawn[:, None] * cdf[:, -1:]).sum(-1)
        for k, (i, token) in enumerate(zip(running, ids.tolist(), strict=True)):
            rows[i].append(token)
            out[i][0].append(token)
            out[i][1].append(logp[k, token].item())
        running = [i for i in running if rows[i][-1] != model.config.eos_token_id]
        if not running:
            break
    return out


@dataclass
class Turn:
    prompt: list[int]
    response: list[int]  # the end-of-sequence id included, if it was drawn
    sampled: list[float]  # its log-probs when it was drawn


@dataclass
class Trajectory:
    task: Task
    sample: int  # which reading of the document
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0


def rollout(
    model, tokenizer, tasks: Sequence[Task], samples: int, temperature: float, seed: int, s
) -> list[Trajectory]:
    """Let the agent read every task several times, all readings side by side, and reward them."""
    done = [Trajectory(task, k) for task in tasks for k in range(samples)]
    agents = [read(t.task, tokenizer, s) for t in done]
    seeds = [seed_of(seed, t.task.id, t.sample) for t in done]
    prompts = [next(agent) for agent in agents]
    while prompts[0]:  # the documents are equally long: all readings end together
        texts, (most, *_) = zip(*prompts, strict=True)
        turn_seeds = [x + len(t.turns) for x, t in zip(seeds, done, strict=True)]
        responses = respond(model, texts, most, temperature, turn_seeds)
        for t, text, (response, sampled) in zip(done, texts, responses, strict=True):
            t.turns.append(Turn(text, response, sampled))
        prompts = [
            agent.send([i for i in t.turns[-1].response if i != model.config.eos_token_id])
            for agent, t in zip(agents, done, strict=True)
        ]
    for t in done:
        answer = tokenizer.decode(t.turns[-1].response, skip_special_tokens=True)
        t.reward = boxed_reward(answer, t.task.answers)
    return done


# ---------------------------------------------------------------- GRPO


def training_rows(trajectories: Sequence[Trajectory], group_size: int) -> list[tuple[Turn, float]]:
    """Return every turn with the advantage of its trajectory (arXiv 2507.02259, eq. 4 and 5): how
    much better this reading of the document went than the mean. Where all are right, or all wrong,
    there is nothing to learn."""
    rows = []
    for start in range(0, len(trajectories), group_size):
        group = trajectories[start : start + group_size]
        mean = sum(t.reward for t in group) / group_size
        if 0 < mean < 1:
            rows += [(turn, t.reward - mean) for t in group for turn in t.turns]
    return rows


def losses(model, rows: list[tuple[Turn, float]], temperature: float, s) -> Iterator[torch.Tensor]:
    """Yield the loss in parts, one forward pass each; their sum is the mean over all tokens.

    ratio: to the weights that have sampled. It is 1, and its gradient that of the log-prob; where
    one rollout serves several updates it leaves 1, and is clipped (grpo.py).
    """
    n_tokens = sum(len(turn.response) for turn, _ in rows)
    rows = sorted(rows, key=lambda row: len(row[0].prompt) + len(row[0].response))
    for start in range(0, len(rows), s.rows_per_pass):
        part = rows[start : start + s.rows_per_pass]
        ids = padded([turn.prompt + turn.response for turn, _ in part])
        logp = log_probs(model, ids[:, :-1], temperature).gather(-1, ids[:, 1:, None])[..., 0]
        written = torch.zeros_like(logp, dtype=torch.bool)  # the responses' tokens alone are ours
        for k, (turn, _) in enumerate(part):
            written[k, len(turn.prompt) - 1 : len(turn.prompt) + len(turn.response) - 1] = True
        advantage = torch.tensor([a for _, a in part])[:, None].expand_as(logp)[written]
        ratio = (logp[written] - logp[written].detach()).exp()
        yield -(ratio * advantage).sum() / n_tokens


def train(model, tokenizer, s: Settings) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    stages = [stage[1:] for stage in s.stages for _ in range(stage[0])]
    for step, (sections, temperature) in enumerate(stages):
        names = [f"{s.seed}.{step}.{i}" for i in range(s.tasks_per_step)]
        tasks, seed = [make_task(n, sections, "one_fact") for n in names], seed_of(s.seed, step)
        trajectories = rollout(model, tokenizer, tasks, s.group_size, temperature, seed, s)
        reward = sum(t.reward for t in trajectories) / len(trajectories)
        print(f"step {step + 1}/{len(stages)}: {sections} sections, {reward:.3f} right", flush=True)
        if rows := training_rows(trajectories, s.group_size):
            for loss in losses(model, rows, temperature, s):
                loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = s.lr * min(1.0, (step + 1) / s.warmup)
            optimizer.step()
            optimizer.zero_grad()


def accuracy(model, tokenizer, sections: int, n: int, s: Settings) -> float:
    """Return the share of n questions about facts that training never shows which are answered."""
    tasks = [make_task(f"evaluation.{i}", sections, "one_fact", "test") for i in range(n)]
    done = rollout(model, tokenizer, tasks, 1, 1.0, s.seed, s)
    return sum(trajectory.reward for trajectory in done) / n


if __name__ == "__main__":
    s = Settings()
    model = AutoModelForCausalLM.from_pretrained(s.model)
    tokenizer = AutoTokenizer.from_pretrained(s.model)
    print(f"64 sections, untrained: {accuracy(model, tokenizer, 64, 64, s):.2f} right of 64")
    train(model, tokenizer, s)
    print(f"64 sections, trained: {accuracy(model, tokenizer, 64, 128, s):.2f} right of 128")
