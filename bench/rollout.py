"""The rollout: our engine against padded `model.generate` with a barrier at each section.

`python -m bench.rollout [--tiny]`. `with_barrier` is the padded rollout as MemAgent's own code does
it. Both sides have the same agent, model, tasks and temperature, 64 trajectories of 2 to 32
sections. In `groups` eight trajectories read the same document, as in training. In `documents`
every trajectory reads its own, as in evaluation. Responses are sampled, so the two sides do not
write the same number of tokens: tokens a second are compared, read and written.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from agents.find import resolve
from bench.common import against, finish, line, spread, table
from config.errors import UserError
from config.options import EMBEDDED
from data import Task
from engines.hf import TransformersEngine
from memagent import Agent, Finish, Trajectory, Turn
from models.load import load_model
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

BAR = 2.0


def with_barrier(model, codec: Codec, jobs: list[tuple[Task, int]], agent: Agent):
    """Run all trajectories in step, one padded batch a section; return them.

    A trajectory that has read its document waits for the others, and all answer together.
    """
    running = [(Trajectory(task, sample=g), agent.run(task)) for task, g in jobs]
    prompts = {k: next(steps) for k, (_, steps) in enumerate(running)}
    while prompts:
        chosen = [k for k, p in prompts.items() if not p.final] or list(prompts)
        ids = [prompts[k].ids(codec) for k in chosen]
        responses = generate(model, codec, ids, prompts[chosen[0]].max_tokens)
        for k, x, response in zip(chosen, ids, responses, strict=True):
            finish = Finish.STOP if response[-1] in codec.eos_ids else Finish.LENGTH
            trajectory, steps = running[k]
            turn = Turn(prompts.pop(k), x, response, [], finish, codec.response(response))
            trajectory.turns.append(turn)
            try:
                prompts[k] = steps.send(turn)
            except StopIteration:
                pass
    return [trajectory for trajectory, _ in running]


def generate(model, codec: Codec, ids: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Sample a response to each prompt in one batch, padded left; cut after its end token."""
    width = max(map(len, ids))
    padded = torch.tensor([[codec.end_id] * (width - len(x)) + x for x in ids])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in ids])
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    out = model.generate(padded, attention_mask=mask, max_new_tokens=max_tokens, **sampling)
    responses = out[:, width:].tolist()
    ends = [
        next((n + 1 for n, token in enumerate(row) if token in codec.eos_ids), len(row))
        for row in responses
    ]
    return [row[:end] for row, end in zip(responses, ends, strict=True)]


def rate(run: Callable[[], Iterable[Trajectory]], seed: int) -> float:
    """Return the tokens a second, read and written, of trajectories that a side runs."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    done = list(run())
    seconds = time.perf_counter() - start
    if errors := [trajectory.error for trajectory in done if trajectory.error]:
        raise UserError(f"A trajectory of the rollout failed: {errors[0]}.")
    turns = [turn for trajectory in done for turn in trajectory.turns]
    return sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns) / seconds


def measure(kind: str, n_tasks: int, engine: TransformersEngine, tiny: bool) -> dict:
    """Run both sides in turns, the first time to warm up, and compare their tokens a second."""
    model, codec = engine.model, engine.codec
    agent = resolve("demo", EMBEDDED, {}, {}, "memagent")[1].on(codec)
    trajectories, longest, repeats = (8, 3, 1) if tiny else (64, 32, 5)
    n_tasks = min(n_tasks, trajectories)
    rates: dict[str, list[float]] = {"generate": [], "ours": []}
    for repeat in range(-1, repeats):
        rng = random.Random(f"{kind}/{repeat}")
        lengths = [rng.randint(2, longest) for _ in range(n_tasks)]
        tasks = [
            worlds.make_task(f"{kind}.{repeat}.{i}", n, "two_hop") for i, n in enumerate(lengths)
        ]
        jobs = [(task, g) for task in tasks for g in range(trajectories // n_tasks)]
        for task in tasks:  # cut and encode once for both sides: the codec remembers it
            next(agent.run(task))
        if repeat <= 0:
            before = engine.counts()
        theirs = rate(partial(with_barrier, model, codec, jobs, agent), repeat)
        ours = rate(partial(rollout, engine, agent, jobs, Sampling(1.0), seed=repeat), repeat)
        if repeat >= 0:
            rates["generate"].append(theirs)
            rates["ours"].append(ours)
    counts = {name: n - before[name] for name, n in engine.counts().items()}
    reused = counts["reused_tokens"] / (counts["reused_tokens"] + counts["prefilled_tokens"])
    return {
        "trajectories": kind,
        **against(rates["ours"], rates["generate"], BAR),  # of rates: the larger one first
        "share_of_prompts_reused": round(reused, 3),
        **{side: {"tokens_per_s": spread(values, 0)} for side, values in rates.items()},
    }


def main(tiny: bool) -> None:
    engine = TransformersEngine(load_model(EMBEDDED, "float32", "cpu"), Codec.load(EMBEDDED))
    cells = [measure(kind, n, engine, tiny) for kind, n in (("groups", 8), ("documents", 64))]
    rows, lines = [], []
    for c in cells:
        rates = (c[side]["tokens_per_s"]["median"] for side in ("generate", "ours"))
        ratio = f"{c['ratio']}x"
        rows.append((c["trajectories"], *rates, ratio, f"{c['share_of_prompts_reused']:.0%}"))
        what = f"rollout, {c['trajectories']}: ours / generate"
        lines.append(line(what, ratio, f"at least {BAR:g}x", c["met"]))
    header = ("trajectories", "generate, tokens/s", "ours", "faster", "prompts reused")
    table("Rollout, one thread, float32", header, rows)
    if not tiny:
        finish("rollout", {"repeats": 5, "cells": cells}, lines)


if __name__ == "__main__":
    main("--tiny" in sys.argv)
