"""The whole step, rollout and update: our GRPO module against TRL's trainer, one thread each.

`python -m bench.step [--tiny]` (needs `trl`). A row of TRL 1.16's batch is one context, prompt and
completion with one reward, and a memory agent's turns are contexts of their own. A `rollout_func`
that returns a row for each turn is refused, unless the trainer is told that a group has G x T
completions. So there are two shapes:

  single  one prompt a task, G responses: TRL's own path, nothing of ours in it. The prompts are
          the second turn of our agent, with the memory that it wrote in the first.
  agent   T = 3 turns (two sections and the answer), every trajectory with its own memory. On TRL's
          side a `rollout_func` drives our agents turn by turn with TRL's own generation.

Both sides have the same tasks, prompts, token limits, temperature 1, random rewards, AdamW and
gradient clipping, and a learning rate so small that the policy stays the same. TRL runs in the
faster of two ways, from `on_step_begin` to `on_step_end`. Ours is all of `training_step`.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from agents import find
from bench import trl_peer
from bench.common import against, finish, line, spread, table
from commands.train import rewarded
from config.options import EMBEDDED
from data import Task
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import GRPO
from memagent import Agent, Finish, MemAgent, Prompt, Turn
from models.load import load_model
from rollout import Sampling, follow
from suites._training import WorldTasks
from tokens.codec import Codec

TASKS, GROUP, TURNS, BAR = 8, 16, 3, 4.0
STEPS, TRIAL = {"single": 15, "agent": 9}, 2  # of the comparison, of each of TRL's ways
CONFIG, _ = find.resolve("demo", EMBEDDED, {"temperature": (1.0,), "lr": 1e-9}, {})
CODEC = Codec.load(EMBEDDED)
COIN = random.Random(0)
WAYS = {"padded": 1, "padded, 4 batches": 4}  # -> batches of an update; continuous ones are slower


def score(*_) -> float:
    """Draw a random reward: every group has a signal and none is left out of the update."""
    return COIN.random()


@dataclass(slots=True)
class Shape:
    """A kind of step: its tasks and agent. GRPO takes it as the source of tasks."""

    name: str
    agent: Agent
    tasks: list[Task]  # TASKS a step, step after step
    turns: int  # of a trajectory
    max_tokens: int  # of the longest response
    levels = 0  # the tasks do not grow

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        return self.tasks[step * n : (step + 1) * n]


@dataclass(slots=True)
class Times:
    """Seconds of every step of one side, the first of which warms up."""

    step: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, list[float]]:
        update = [s - r for s, r in zip(self.step, self.rollout, strict=True)]
        return {"step": self.step[1:], "rollout": self.rollout[1:], "update": update[1:]}


class SecondTurn(MemAgent):
    """MemAgent's second turn alone, whose prompts were made before."""

    second: dict[str, Prompt]  # task's id -> its prompt

    def run(self, task: Task) -> Iterator[Prompt]:
        yield self.second[task.id]


def make_shapes() -> list[Shape]:
    world = WorldTasks((TURNS - 1,), ("one_fact", "two_hop"), seed=0)
    tasks = [t for step in range(1 + max(STEPS.values())) for t in world.batch(step, 0, TASKS)]
    engine = TransformersEngine(load_model(EMBEDDED, device="cpu"), CODEC)
    agent = tiny.agent("memagent").on(CODEC)
    one_turn = SecondTurn(agent.config, CODEC)
    one_turn.second = {}
    for task in tasks:
        turns = follow(engine, agent, task, Sampling(1.0))
        next(turns)
        one_turn.second[task.id] = next(turns).prompt
    return [
        Shape("single", one_turn, tasks, 1, agent.config.memory_tokens),
        Shape("agent", agent, tasks, TURNS, agent.config.final_tokens),
    ]


def our_step(shape: Shape, times: Times) -> Callable[[], None]:
    """Return a function that runs one `training_step` of the real module, without Lightning."""
    model = load_model(EMBEDDED, device="cpu")
    engine = TransformersEngine(model, CODEC, max_rows=CONFIG.in_flight)
    grpo = GRPO(model, engine, rewarded(shape.agent, score), shape, CONFIG)
    optimizer = grpo.configure_optimizers()
    grpo.optimizers = lambda: optimizer
    grpo.manual_backward = lambda loss: loss.backward()

    def step() -> None:
        grpo.training_step(None, 0)
        times.step.append(grpo.metrics["step_s"])
        times.rollout.append(grpo.metrics["rollout_s"])
        assert grpo.metrics["trained_rows"] == TASKS * GROUP * shape.turns
        assert not grpo.metrics["skipped_updates"]

    return step


# ---------------------------------------------------------------- TRL's side


class Timed(GRPOTrainer):
    """TRL's trainer with a timed rollout."""

    times: Times

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.times.rollout.append(time.perf_counter() - start)
        return output


class SideBySide(TrainerCallback):
    """Time TRL's steps, and call `other` after each of them."""

    def __init__(self, times: Times, other: Callable[[], None]):
        self.times, self.other, self.start = times, other, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.step.append(time.perf_counter() - self.start)
        self.other()


def agents_in_trl(shape: Shape):
    """Make TRL's `rollout_func` for our agents.

    Its prompts are task ids, each G x T times. T of them in a row are one trajectory, and a turn of
    it is a row of the batch.
    """
    tasks = {task.id: task for task in shape.tasks}

    def rollout(names: list[str], trainer: GRPOTrainer) -> dict[str, list | None]:
        running = [shape.agent.run(tasks[name]) for name in names[:: shape.turns]]
        prompts = [next(steps) for steps in running]
        turns: list[list[Turn]] = [[] for _ in running]
        for n in range(1, shape.turns + 1):
            trainer.generation_config.max_new_tokens = prompts[0].max_tokens
            prompt_ids = [prompt.ids(CODEC) for prompt in prompts]
            responses, _ = trainer._generate_single_turn(prompt_ids, None, {}, 1)
            for k, (ids, response) in enumerate(zip(prompt_ids, responses, strict=True)):
                text = CODEC.response(response)
                turns[k].append(Turn(prompts[k], ids, response, [], Finish.STOP, text))
                if n < shape.turns:
                    prompts[k] = running[k].send(turns[k][-1])
        return {
            "prompt_ids": [turn.prompt_ids for of_one in turns for turn in of_one],
            "completion_ids": [turn.response_ids for of_one in turns for turn in of_one],
            "logprobs": None,
            "reward": [reward for _ in running for reward in [score()] * shape.turns],
        }

    return rollout


def reward_in_trl(completion_ids, reward: list[float] | None = None, **_) -> list[float]:
    """Return the rewards of `agents_in_trl`, or draw one for every response."""
    return reward or [score() for _ in completion_ids]


def run_trl(shape, steps, folder, parts, other=lambda: None) -> Times:
    """Run `steps` steps of TRL's own `train()`, and one step of `other` after each of them.

    parts: batches of one update.
    """
    names, times = [task.id for task in shape.tasks], Times()
    if shape.turns == 1:
        prompts = [next(shape.agent.run(task)) for task in shape.tasks]
        names = [prompt.text for prompt in prompts]
        ids = [prompt.ids(CODEC) for prompt in prompts]
        assert CODEC.tokenizer(text=names)["input_ids"] == ids, "TRL would read other tokens"
    args = trl_peer.settings(
        folder,
        CONFIG,
        scale_rewards="none",
        num_generations=GROUP * shape.turns,
        max_completion_length=shape.max_tokens,
        per_device_train_batch_size=TASKS * GROUP * shape.turns // parts,
        gradient_accumulation_steps=parts,
        max_steps=steps,
        shuffle_dataset=False,
        learning_rate=CONFIG.lr,
        lr_scheduler_type="constant",
        adam_beta1=CONFIG.betas[0],
        adam_beta2=CONFIG.betas[1],
        max_grad_norm=CONFIG.grad_clip,
    )
    trainer = Timed(
        load_model(EMBEDDED, device="cpu"),
        reward_funcs=reward_in_trl,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": names}),
        processing_class=Codec.load(EMBEDDED).tokenizer,
        rollout_func=agents_in_trl(shape) if shape.turns > 1 else None,
        callbacks=[SideBySide(times, other)],
    )
    trainer.times = times
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return times


# ---------------------------------------------------------------- side by side


def cell(shape: Shape, folder: str, tiny: bool) -> dict:
    """Try each of TRL's ways, then run the fastest and our module in turns."""
    trial, steps = (1, 1) if tiny else (TRIAL, STEPS[shape.name])
    trials = {name: run_trl(shape, 1 + trial, folder, parts) for name, parts in WAYS.items()}
    best = min(trials, key=lambda name: median(trials[name].step[1:]))
    ours = Times()
    theirs = run_trl(shape, 1 + steps, folder, WAYS[best], our_step(shape, ours))
    sides = {"trl": theirs.summary(), "ours": ours.summary()}
    ratios = {name: against(sides["trl"][name], sides["ours"][name]) for name in sides["ours"]}
    return {
        "shape": shape.name,
        "rows": TASKS * GROUP * shape.turns,
        "steps": steps,
        "trl_way": best,
        "trl_trials": {name: spread(times.step[1:]) for name, times in trials.items()},
        "seconds": {
            side: {name: spread(values) for name, values in found.items()}
            for side, found in sides.items()
        },
        "ratio_rollout": ratios["rollout"]["ratio"],
        "ratio_update": ratios["update"]["ratio"],
        **against(sides["trl"]["step"], sides["ours"]["step"], BAR),
    }


def main(tiny: bool) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell(shape, folder, tiny) for shape in make_shapes()]
    phases = ("step", "rollout", "update")
    rows = [
        (f"{c['shape']}: {side}", c["rows"], *(found[name]["median"] for name in phases),
         f"{c['ratio']}x ({c['ratio_min']}-{c['ratio_max']})", c["trl_way"])
        for c in cells for side, found in c["seconds"].items()
    ]  # fmt: skip
    header = ("side", "rows", *(f"{name}, s" for name in phases), "TRL/ours", "TRL's way")
    table("Step: rollout and update, medians", header, rows)
    lines = []
    for c in cells:
        what, bar = f"step, {c['shape']}: TRL / ours", f"at least {BAR:g}x"
        lines.append(line(what, f"{c['ratio']:.2f}x", bar, c["met"]))
    if not tiny:
        finish("step", {"unit": "s", "cells": cells}, lines)


if __name__ == "__main__":
    main("--tiny" in sys.argv)
