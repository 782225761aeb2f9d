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

import torch

from agents.find import resolve
from bench.common import against, finish, line, spread, table
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


def tokens(done: list[Trajectory]) -> tuple[int, int]:
    """Count the tokens (read, written) of all turns."""
    turns = [turn for trajectory in done for turn in trajectory.turns]
    return sum(len(t.prompt_ids) for t in turns), sum(len(t.response_ids) for t in turns)


def measure(kind: str, n_tasks: int, engine: TransformersEngine, tiny: bool) -> dict:
    """Run both sides in turns, the first time to warm up, and compare their tokens a second."""
    model, codec = engine.model, engine.codec
    agent = resolve("demo", EMBEDDED, {}, {}, "memagent")[1].on(codec)
    trajectories, longest, repeats = (8, 3, 1) if tiny else (64, 32, 5)
    n_tasks = min(n_tasks, trajectories)
    rates: dict[str, list[float]] = {"generate": [], "ours": []}
    written: dict[str, list[float]] = {"generate": [], "ours": []}
    before = engine.counts()
    for repeat in range(-1, repeats):
        rng = random.Random(f"{kind}/{repeat}")
        lengths = [rng.randint(2, longest) for _ in range(n_tasks)]
        tasks = [
            worlds.make_task(f"{kind}.{repeat}.{i}", n, "two_hop") for i, n in enumerate(lengths)
        ]
        jobs = [(task, g) for task in tasks for g in range(trajectories // n_tasks)]
        before = before if repeat else engine.counts()
        for task in tasks:  # cut and encode once for both sides: the codec remembers it
            next(agent.run(task))
        for side in rates:
            torch.manual_seed(repeat)
            start = time.perf_counter()
            if side == "generate":
                done = with_barrier(model, codec, jobs, agent)
            else:
                done = list(rollout(engine, agent, jobs, Sampling(1.0), seed=repeat))
            seconds = time.perf_counter() - start
            if repeat >= 0:
                rates[side].append(sum(tokens(done)) / seconds)
                written[side].append(tokens(done)[1] / seconds)
    counts = {name: n - before[name] for name, n in engine.counts().items()}
    reused = counts["reused_tokens"] / (counts["reused_tokens"] + counts["prefilled_tokens"])
    sides = {
        side: {
            "tokens_per_s": spread(rates[side], 0),
            "written_per_s": spread(written[side], 0),
        }
        for side in rates
    }
    # of rates: the larger one first
    ratios = against(rates["ours"], rates["generate"], BAR)
    return {"trajectories": kind, **ratios, "share_of_prompts_reused": round(reused, 3), **sides}


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
