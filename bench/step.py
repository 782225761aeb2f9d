"""The whole step: rollout and update of the embedded policy, ours against TRL's with its transformers backend, one thread each.

Holds: two shapes of a step, our GRPO module and a real TRL trainer for each, their steps side by side.
Leaves out: the loss alone (update.py).
Exercise it: `python -m bench.step` (needs `trl`). Read next: update.py.

What TRL 1.16 can express. A row of its batch is one context, prompt and completion, with one reward; `tools`,
`environment_factory` and the `env_mask` of a `rollout_func` all append to that context and mask parts of it. A memory agent's
turns are contexts of their own. A `rollout_func` that returns a row for each turn is refused ("returned 24 rewards, but 8 were
expected"), unless the trainer is told that a group has G x T completions, each turn with its trajectory's reward; the loop over
turns is then the user's, trajectories of fewer than T turns need rows that are masked as a whole. So there are two shapes, and
each is held against the bar:

  single  one prompt a task, G responses: TRL's own path, nothing of ours in it. The prompts are real ones, the second turn of our
          agent, with the memory that it wrote in the first. A group shares its prompt.
  agent   the embedded default itself: T = 3 turns (two sections and the answer), every trajectory with its own memory; on TRL's
          side our agents driven from a `rollout_func`, all trajectories turn by turn, with TRL's own generation.

Both sides have the same tasks, prompts, limits of tokens, temperature 1, random rewards, AdamW and clipping of the gradient, and
a learning rate so small that the policy stays the same. TRL: no checkpointing, logging, saving or progress; of the whole step in
one batch, an update in four batches, and continuous batching (`generate_batch`) the fastest. TRL's time is from `on_step_begin`
to `on_step_end` of its own `train()`, without the fetching of data; ours is all of `training_step`.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from agents import find
from bench.common import against, finish, line, show, spread, table, verdict
from config.options import EMBEDDED
from data import Task
from embedded import tiny
from engines.hf import TransformersEngine
from grpo import GRPO
from memagent import Agent, Finish, Prompt, Turn, memagent
from models.load import load_model
from rollout import Sampling, follow
from tasks.sources import WorldTasks
from tokens.codec import Codec

TASKS, GROUP, SECTIONS = 8, 16, 2
TURNS = SECTIONS + 1
BAR = 4.0
STEPS = {"single": 15, "agent": 9}
TRIAL = 2  # steps with each way that TRL has
WHAT = {
    "single": "single turn, TRL's own path: one prompt a task, G responses",
    "agent": "memory agents of 3 turns in a rollout_func of ours; TRL takes a turn for a completion of its own (G x 3 a group)",
}
# the embedded policy's own settings, but for a policy that stays the same, sampled as it is evaluated
CONFIG, _ = find.resolve("demo", EMBEDDED, {"temperature": (1.0,), "lr": 1e-9}, {})
CODEC = Codec.load(EMBEDDED)


@dataclass(slots=True)
class Shape:
    """A kind of step: the tasks of every step, the agent that answers them, the contexts that it makes of each."""

    name: str
    agent: Agent
    tasks: list[Task]  # TASKS a step, step after step
    turns: int
    max_tokens: int  # of the longest response

    levels = 0  # for GRPO: the tasks do not grow

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        return self.tasks[step * n : (step + 1) * n]


def make_shapes() -> list[Shape]:
    def tasks(
        name: str,
    ) -> list[Task]:  # those of the demo, step after step; the first step is a warm-up
        world = WorldTasks((SECTIONS,), ("one_fact", "two_hop"), seed=0)
        return [task for step in range(1 + STEPS[name]) for task in world.batch(step, 0, TASKS)]

    engine = TransformersEngine(load_model(EMBEDDED, device="cpu"), CODEC)
    second: dict[str, Prompt] = {}
    for task in tasks("single"):
        turns = follow(engine, memagent, task, tiny.AGENT, Sampling(1.0))
        next(turns)
        second[task.id] = next(turns).prompt

    def one_turn(task, config, codec):
        yield second[task.id]

    return [
        Shape("single", one_turn, tasks("single"), 1, tiny.AGENT.memory_tokens),
        Shape("agent", memagent, tasks("agent"), TURNS, tiny.AGENT.final_tokens),
    ]


COIN = random.Random(0)


def score(*_) -> float:
    """The reward: random, so that every group has a signal and none is left out of the update."""
    return COIN.random()


@dataclass(slots=True)
class Times:
    """Of every step of one side."""

    step: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # sampled tokens

    @property
    def update(self) -> list[float]:
        return [s - r for s, r in zip(self.step, self.rollout, strict=True)]

    def after_warm_up(self) -> Times:
        return Times(self.step[1:], self.rollout[1:], self.written[1:])


# ---------------------------------------------------------------- ours


def our_step(shape: Shape, times: Times) -> Callable[[], None]:
    """One call = one `training_step` of the real module, without a Lightning Trainer around it."""
    model = load_model(EMBEDDED, device="cpu")
    engine = TransformersEngine(model, CODEC, max_rows=CONFIG.in_flight)
    grpo = GRPO(model, engine, shape.agent, score, shape, CONFIG, tiny.AGENT)
    optimizer = grpo.configure_optimizers()
    grpo.optimizers = lambda: optimizer
    grpo.manual_backward = lambda loss: loss.backward()

    def step() -> None:
        grpo.training_step(None, 0)
        times.step.append(grpo.metrics["step_s"])
        times.rollout.append(grpo.metrics["rollout_s"])
        times.written.append(grpo.metrics["written_tokens"])
        assert (
            grpo.metrics["trained_rows"] == TASKS * GROUP * shape.turns
            and not grpo.metrics["skipped_updates"]
        )

    return step


# ---------------------------------------------------------------- TRL's


class Timed(GRPOTrainer):
    """TRL's trainer, its rollout timed."""

    times: Times

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.times.rollout.append(time.perf_counter() - start)
        self.times.written.append(int(output["num_items_in_batch"]))
        return output


class SideBySide(TrainerCallback):
    """Times TRL's steps, and after each of them lets `other` do one."""

    def __init__(self, times: Times, other: Callable[[], None]):
        self.times, self.other, self.start = times, other, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.step.append(time.perf_counter() - self.start)
        self.other()


def agents_in_trl(shape: Shape):
    """TRL's `rollout_func`: the prompts are task ids, each G x T times; every T of them are one trajectory, a row for each turn."""
    tasks = {task.id: task for task in shape.tasks}

    def rollout(names: list[str], trainer: GRPOTrainer) -> dict[str, list | None]:
        assert all(
            len(set(names[k : k + shape.turns])) == 1 for k in range(0, len(names), shape.turns)
        )
        agents = [shape.agent(tasks[name], tiny.AGENT, CODEC) for name in names[:: shape.turns]]
        asked = [next(agent) for agent in agents]
        turns: list[list[Turn]] = [[] for _ in agents]
        for n in range(1, shape.turns + 1):
            trainer.generation_config.max_new_tokens = asked[0].max_tokens
            prompts = [CODEC.chat(prompt.pieces) for prompt in asked]
            responses, _ = trainer._generate_single_turn(prompts, None, {}, 1)
            for k, (ids, response) in enumerate(zip(prompts, responses, strict=True)):
                turns[k].append(
                    Turn(asked[k], ids, response, [], Finish.STOP, CODEC.response(response))
                )
                if n < shape.turns:
                    asked[k] = agents[k].send(turns[k][-1])
        flat = [turn for of_one in turns for turn in of_one]
        return {
            "prompt_ids": [turn.prompt_ids for turn in flat],
            "completion_ids": [turn.response_ids for turn in flat],
            "logprobs": None,
            "reward": [reward for of_one in turns for reward in [score()] * len(of_one)],
        }

    return rollout


def reward_in_trl(
    completion_ids: list[list[int]], reward: list[float] | None = None, **_
) -> list[float]:
    """What `agents_in_trl` gave every turn, or a reward for every response."""
    return reward or [score() for _ in completion_ids]


VARIANTS: dict[str, dict] = {
    "padded": {},
    "padded, 4 batches": {"parts": 4},
    # with its own choice of a cache, half of the memory, a step takes 10 to 50 seconds
    "continuous": {"cache": {"num_blocks": 256, "block_size": 64, "max_batch_tokens": 256}},
}


def trl_run(
    shape: Shape,
    steps: int,
    folder: str,
    times: Times,
    other: Callable[[], None],
    parts: int = 1,
    cache: dict | None = None,
) -> None:
    """`steps` steps of TRL's own `train()`, one step of `other` after each of them. parts: batches that the update is made in."""
    if shape.turns == 1:
        prompts = [next(shape.agent(task, tiny.AGENT, CODEC)) for task in shape.tasks]
        names = [prompt.text for prompt in prompts]
        assert CODEC.tokenizer(text=names)["input_ids"] == [
            CODEC.chat(p.pieces) for p in prompts
        ], "TRL would read other tokens"
    else:
        names = [task.id for task in shape.tasks]
    args = TRLConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's defaults: bf16 and checkpointing on
        loss_type="dapo",
        beta=0.0,
        epsilon=CONFIG.clip_low,
        epsilon_high=CONFIG.clip_high,
        temperature=1.0,
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
        use_transformers_continuous_batching=bool(cache),
        transformers_continuous_batching_config=cache,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
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


# ---------------------------------------------------------------- side by side


def cell(shape: Shape, folder: str) -> dict:
    trials = {}
    for name, variant in VARIANTS.items():
        times = Times()
        trl_run(shape, 1 + TRIAL, folder, times, lambda: None, **variant)
        trials[name] = times.after_warm_up()
    best = min(trials, key=lambda name: median(trials[name].step))
    theirs, own = Times(), Times()
    trl_run(shape, 1 + STEPS[shape.name], folder, theirs, our_step(shape, own), **VARIANTS[best])
    sides = {"trl": theirs.after_warm_up(), "ours": own.after_warm_up()}
    return {
        "shape": shape.name,
        "what": WHAT[shape.name],
        "rows": TASKS * GROUP * shape.turns,
        "steps": STEPS[shape.name],
        "trl_variant": best,
        "trl_trials": {
            name: {"step": spread(t.step), "rollout": spread(t.rollout)}
            for name, t in trials.items()
        },
        "seconds": {
            side: {"step": spread(t.step), "rollout": spread(t.rollout), "update": spread(t.update)}
            for side, t in sides.items()
        },
        "tokens_written": {side: spread(t.written) for side, t in sides.items()},
        "ratio_rollout": against(sides["trl"].rollout, sides["ours"].rollout)["ratio"],
        "ratio_update": against(sides["trl"].update, sides["ours"].update)["ratio"],
        **against(sides["trl"].step, sides["ours"].step, BAR),
        "shown": sides,
    }


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell(shape, folder) for shape in make_shapes()]
    rows = []
    for c in cells:
        for side, t in c.pop("shown").items():
            times = [show(values) for values in (t.step, t.rollout, t.update)]
            name = c["trl_variant"] if side == "trl" else ""
            rows.append(
                (
                    f"{c['shape']}: {side}",
                    name,
                    c["rows"],
                    f"{median(t.written):.0f}",
                    *times,
                    "",
                    "",
                    "",
                )
            )
        rows[-1] = (
            *rows[-1][:-3],
            f"{c['ratio']:.2f}",
            f"{c['ratio_min']:.2f}-{c['ratio_max']:.2f}",
            verdict(c),
        )
    table(
        "Step: rollout and update, seconds, median (least-largest)",
        (
            "side",
            "TRL's way",
            "rows",
            "written",
            "step",
            "rollout",
            "update",
            "TRL/ours",
            "steps",
            "bar",
        ),
        rows,
    )
    lines = [
        line(
            f"step, {c['shape']}: TRL / ours",
            f"{c['ratio']:.2f}x",
            f"at least {c['bar']:g}x",
            c["met"],
        )
        for c in cells
    ]
    finish("step", {"met": all(c["met"] for c in cells), "unit": "s", "cells": cells}, lines)


if __name__ == "__main__":
    main()
