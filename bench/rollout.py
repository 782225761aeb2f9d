"""The rollout: our engine against `model.generate` on padded batches with a barrier between sections, as MemAgent's own code does it.

Holds: the padded, waiting rollout (`with_barrier`) and the comparison. Leaves out: training (update.py, step.py).
Exercise it: `python -m bench.rollout`. Read next: prefill.py.

The same agent, model, tasks and temperature on both sides, 64 trajectories of 2 to 32 sections. In `groups` eight trajectories read the
same document, as in training; in `documents` everybody reads another one, as in evaluation. The responses are sampled, so the two
sides do not write the same number of tokens: what is compared is tokens a second, read and written, and both are reported.
"""

from __future__ import annotations

import random
import time
from statistics import median

import torch

from agents.find import resolve
from bench.common import against, finish, line, spread, table, verdict
from config.options import EMBEDDED
from data import Task
from engines.hf import TransformersEngine
from memagent import Finish, Trajectory, Turn, memagent
from models.load import load_model
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

TRAJECTORIES, SECTIONS, REPEATS, BAR = 64, (2, 32), 5, 2.0


def with_barrier(model, codec: Codec, jobs: list[tuple[Task, int]], config) -> list[Trajectory]:
    """One padded batch of all trajectories a section; who has read all waits, and all answer together."""
    steps = [(Trajectory(task, sample=g), memagent(task, config, codec)) for task, g in jobs]
    prompts = {k: next(agent) for k, (_, agent) in enumerate(steps)}
    while prompts:
        chosen = [k for k, p in prompts.items() if not p.final] or list(prompts)
        ids = [codec.chat(prompts[k].pieces) for k in chosen]
        width = max(map(len, ids))
        padded = torch.tensor([[codec.pad_id] * (width - len(x)) + x for x in ids])
        mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in ids])
        limit = prompts[chosen[0]].max_tokens
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        for k, x, row in zip(chosen, ids, out[:, width:].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in codec.eos_ids), len(row))
            finish = Finish.STOP if row[end - 1] in codec.eos_ids else Finish.LENGTH
            trajectory, agent = steps[k]
            turn = Turn(prompts.pop(k), x, row[:end], [], finish, codec.response(row[:end]))
            trajectory.turns.append(turn)
            try:
                prompts[k] = agent.send(turn)
            except StopIteration:
                pass
    return [trajectory for trajectory, _ in steps]


def tokens(done: list[Trajectory]) -> tuple[int, int]:
    """(read, written) by all turns."""
    turns = [turn for t in done for turn in t.turns]
    return sum(len(t.prompt_ids) for t in turns), sum(len(t.response_ids) for t in turns)


def main() -> None:
    codec, model = Codec.load(EMBEDDED), load_model(EMBEDDED, "float32", "cpu")
    _, config = resolve("demo", EMBEDDED, {}, {})
    engine = TransformersEngine(model, codec)
    results, shown = [], []
    for kind, n_tasks in (("groups", 8), ("documents", 64)):
        rates: dict[str, list[float]] = {"generate": [], "ours": []}
        written: dict[str, list[float]] = {"generate": [], "ours": []}
        before = engine.counts()
        for repeat in range(-1, REPEATS):  # the first one warms up
            rng = random.Random(f"{kind}/{repeat}")
            tasks = [
                worlds.make_task(f"{kind}.{repeat}.{i}", rng.randint(*SECTIONS), "two_hop")
                for i in range(n_tasks)
            ]
            jobs = [(task, g) for task in tasks for g in range(TRAJECTORIES // n_tasks)]
            if not repeat:
                before = engine.counts()
            for task in tasks:
                next(
                    memagent(task, config, codec)
                )  # cut and encoded once for both sides, which remember it
            for side in rates:
                torch.manual_seed(repeat)
                start = time.perf_counter()
                if side == "ours":
                    done = list(rollout(engine, memagent, jobs, config, Sampling(1.0), seed=repeat))
                else:
                    done = with_barrier(model, codec, jobs, config)
                seconds = time.perf_counter() - start
                if repeat >= 0:
                    rates[side].append(sum(tokens(done)) / seconds)
                    written[side].append(tokens(done)[1] / seconds)
        counts = {name: n - before[name] for name, n in engine.counts().items()}
        ratio = against(rates["ours"], rates["generate"], BAR)  # of rates: the larger one first
        reused = counts["reused_tokens"] / (counts["reused_tokens"] + counts["prefilled_tokens"])
        results.append(
            {
                "trajectories": kind,
                "tasks": n_tasks,
                **ratio,
                "share_of_prompts_reused": round(reused, 3),
            }
        )
        for side in rates:
            results[-1][side] = {
                "tokens_per_s": spread(rates[side], 0),
                "written_per_s": spread(written[side], 0),
            }
            shown.append(
                (
                    f"{kind}, {side}",
                    f"{median(rates[side]):,.0f}",
                    f"{median(written[side]):,.0f}",
                    f"{ratio['ratio']}x ({ratio['ratio_min']}-{ratio['ratio_max']})"
                    if side == "ours"
                    else "",
                    f"{reused:.0%}" if side == "ours" else "",
                    verdict(ratio) if side == "ours" else "",
                )
            )
    header = (
        "64 trajectories",
        "tokens/s read and written",
        "tokens/s written",
        "faster",
        "of the prompts reused",
        "bar",
    )
    table("Rollout, 2 to 32 sections, one thread, float32", header, shown)
    lines = [
        line(
            f"rollout, {c['trajectories']}: ours / generate",
            f"{c['ratio']}x",
            f"at least {BAR:g}x",
            c["met"],
        )
        for c in results
    ]
    finish(
        "rollout",
        {"met": all(c["met"] for c in results), "repeats": REPEATS, "cells": results},
        lines,
    )


if __name__ == "__main__":
    main()
