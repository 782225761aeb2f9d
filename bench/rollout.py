"""The rollout: our engine against padded `model.generate` with a barrier at each section.

`with_barrier` is the padded rollout as MemAgent's own code does it. The same agent, model, tasks
and temperature on both sides, 64 trajectories of 2 to 32 sections. In `groups` eight trajectories
read the same document, as in training; in `documents` every trajectory reads its own, as in
evaluation. Responses are sampled, so the two sides do not write the same number of tokens: the
comparison is of tokens a second, read and written, and both are reported.
"""

from __future__ import annotations

import random
import time

import torch

from agents.find import resolve
from bench.common import against, finish, line, spread, table, verdict
from config.options import EMBEDDED
from data import Task
from engines.hf import TransformersEngine
from memagent import Agent, Finish, Trajectory, Turn
from models.load import load_model
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

TRAJECTORIES, SECTIONS, REPEATS, BAR = 64, (2, 32), 5, 2.0


def with_barrier(
    model, codec: Codec, jobs: list[tuple[Task, int]], agent: Agent
) -> list[Trajectory]:
    """Run all trajectories in step: one padded batch a section.

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
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    responses = out[:, width:].tolist()
    ends = [
        next((n + 1 for n, token in enumerate(row) if token in codec.eos_ids), len(row))
        for row in responses
    ]
    return [row[:end] for row, end in zip(responses, ends, strict=True)]


def tokens(done: list[Trajectory]) -> tuple[int, int]:
    """Count the tokens (read, written) of all turns."""
    turns = [turn for t in done for turn in t.turns]
    return sum(len(t.prompt_ids) for t in turns), sum(len(t.response_ids) for t in turns)


def tasks_of(name: str, n: int, rng: random.Random) -> list[Task]:
    """Make n tasks with documents of 2 to 32 sections."""
    lengths = [rng.randint(*SECTIONS) for _ in range(n)]
    return [worlds.make_task(f"{name}.{i}", length, "two_hop") for i, length in enumerate(lengths)]


def measure(kind: str, n_tasks: int, engine: TransformersEngine) -> dict:
    """Run both sides in turns, the first time as a warm-up, and compare their tokens a second."""
    model, codec = engine.model, engine.codec
    agent = resolve("demo", EMBEDDED, {}, {}, "memagent")[1].on(codec)
    sides = {
        "generate": lambda jobs, seed: with_barrier(model, codec, jobs, agent),
        "ours": lambda jobs, seed: list(rollout(engine, agent, jobs, Sampling(1.0), seed=seed)),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    written: dict[str, list[float]] = {side: [] for side in sides}
    before = engine.counts()
    for repeat in range(-1, REPEATS):
        tasks = tasks_of(f"{kind}.{repeat}", n_tasks, random.Random(f"{kind}/{repeat}"))
        jobs = [(task, g) for task in tasks for g in range(TRAJECTORIES // n_tasks)]
        if not repeat:
            before = engine.counts()
        for task in tasks:  # cut and encode once for both sides: the codec remembers it
            next(agent.run(task))
        for side, run in sides.items():
            torch.manual_seed(repeat)
            start = time.perf_counter()
            done = run(jobs, repeat)
            seconds = time.perf_counter() - start
            if repeat >= 0:
                rates[side].append(sum(tokens(done)) / seconds)
                written[side].append(tokens(done)[1] / seconds)
    counts = {name: n - before[name] for name, n in engine.counts().items()}
    reused = counts["reused_tokens"] / (counts["reused_tokens"] + counts["prefilled_tokens"])
    result = {
        "trajectories": kind,
        "tasks": n_tasks,
        **against(rates["ours"], rates["generate"], BAR),  # of rates: the larger one first
        "share_of_prompts_reused": round(reused, 3),
    }
    for side in sides:
        result[side] = {
            "tokens_per_s": spread(rates[side], 0),
            "written_per_s": spread(written[side], 0),
        }
    return result


def print_table(cells: list[dict]) -> None:
    rows = []
    for c in cells:
        for side in ("generate", "ours"):
            rates = (
                f"{c[side][name]['median']:,.0f}" for name in ("tokens_per_s", "written_per_s")
            )
            comparison = ("", "", "")
            if side == "ours":
                faster = f"{c['ratio']}x ({c['ratio_min']}-{c['ratio_max']})"
                comparison = (faster, f"{c['share_of_prompts_reused']:.0%}", verdict(c))
            rows.append((f"{c['trajectories']}, {side}", *rates, *comparison))
    header = (
        "64 trajectories", "tokens/s read and written", "tokens/s written", "faster",
        "of the prompts reused", "bar",
    )  # fmt: skip
    table("Rollout, 2 to 32 sections, one thread, float32", header, rows)


def main() -> None:
    codec, model = Codec.load(EMBEDDED), load_model(EMBEDDED, "float32", "cpu")
    engine = TransformersEngine(model, codec)
    cells = [measure("groups", 8, engine), measure("documents", 64, engine)]
    print_table(cells)
    lines = []
    for c in cells:
        what = f"rollout, {c['trajectories']}: ours / generate"
        lines.append(line(what, f"{c['ratio']}x", f"at least {BAR:g}x", c["met"]))
    met = all(c["met"] for c in cells)
    finish("rollout", {"met": met, "repeats": REPEATS, "cells": cells}, lines)


if __name__ == "__main__":
    main()
