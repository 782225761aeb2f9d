"""The whole step, rollout and update: ours against TRL's with its transformers backend.

Holds: two shapes of a step, our GRPO module and a real TRL trainer for each, their steps in turns,
on the embedded policy and one thread each. Leaves out: the loss alone (update.py).
Exercise it: `python -m bench.step` (needs `trl`). Read next: update.py.

A row of TRL 1.16's batch is one context, prompt and completion, with one reward; `tools`,
`environment_factory` and the `env_mask` of a `rollout_func` all append to that context and mask
parts of it. A memory agent's turns are contexts of their own. A `rollout_func` that returns a row
for each turn is refused ("returned 24 rewards, but 8 were expected"), unless the trainer is told
that a group has G x T completions, each turn with its trajectory's reward; the loop over turns is
then the user's, and trajectories of fewer than T turns need rows that are masked as a whole. So
there are two shapes, and each is compared with the bar:

  single  one prompt a task, G responses: TRL's own path, nothing of ours in it. The prompts are
          real ones, the second turn of our agent, with the memory that it wrote in the first. A
          group shares its prompt.
  agent   the embedded default itself: T = 3 turns (two sections and the answer), every trajectory
          with its own memory; on TRL's side our agents driven from a `rollout_func`, all
          trajectories turn by turn, with TRL's own generation.

Both sides have the same tasks, prompts, token limits, temperature 1, random rewards, AdamW and
gradient clipping, and a learning rate so small that the policy stays the same. TRL: no
checkpointing, logging, saving or progress; of the whole step in one batch, an update in four
batches, and continuous batching (`generate_batch`) the fastest. TRL's time is from `on_step_begin`
to `on_step_end` of its own `train()`, without the fetching of data; ours is all of `training_step`.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from agents import find
from bench.common import against, finish, line, show, spread, table, verdict
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

TASKS, GROUP, SECTIONS = 8, 16, 2
TURNS = SECTIONS + 1
BAR = 4.0
STEPS = {"single": 15, "agent": 9}
TRIAL = 2  # steps with each way that TRL has
WHAT = {
    "single": "single turn, TRL's own path: one prompt a task, G responses",
    "agent": "memory agents of 3 turns in a rollout_func of ours; TRL takes a turn for a "
    "completion of its own (G x 3 a group)",
}
# the embedded policy's own settings, except that it stays the same and is sampled at temperature 1
CONFIG, _ = find.resolve("demo", EMBEDDED, {"temperature": (1.0,), "lr": 1e-9}, {})
CODEC = Codec.load(EMBEDDED)


@dataclass(slots=True)
class Shape:
    """A kind of step: its tasks and agent. For GRPO it is the source of tasks."""

    name: str
    agent: Agent  # with CODEC
    tasks: list[Task]  # TASKS a step, step after step
    turns: int  # of a trajectory
    max_tokens: int  # of the longest response

    levels = 0  # the tasks do not grow

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        return self.tasks[step * n : (step + 1) * n]


class SecondTurn(MemAgent):
    """MemAgent's second turn alone, whose prompts were made before."""

    second: dict[str, Prompt]  # of each task, by its id

    def run(self, task: Task) -> Iterator[Prompt]:
        yield self.second[task.id]


def make_shapes() -> list[Shape]:
    def tasks(name: str) -> list[Task]:  # those of the demo; the first step is a warm-up
        world = WorldTasks((SECTIONS,), ("one_fact", "two_hop"), seed=0)
        return [task for step in range(1 + STEPS[name]) for task in world.batch(step, 0, TASKS)]

    engine = TransformersEngine(load_model(EMBEDDED, device="cpu"), CODEC)
    agent = tiny.agent("memagent").on(CODEC)
    one_turn = SecondTurn(agent.config, CODEC)
    one_turn.second = {}
    for task in tasks("single"):
        turns = follow(engine, agent, task, Sampling(1.0))
        next(turns)
        one_turn.second[task.id] = next(turns).prompt
    return [
        Shape("single", one_turn, tasks("single"), 1, agent.config.memory_tokens),
        Shape("agent", agent, tasks("agent"), TURNS, agent.config.final_tokens),
    ]


COIN = random.Random(0)


def score(*_) -> float:
    """Draw a random reward: every group has a signal and none is left out of the update."""
    return COIN.random()


@dataclass(slots=True)
class Times:
    """Seconds and sampled tokens of every step of one side."""

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
        times.written.append(grpo.metrics["written_tokens"])
        assert grpo.metrics["trained_rows"] == TASKS * GROUP * shape.turns
        assert not grpo.metrics["skipped_updates"]

    return step


# ---------------------------------------------------------------- TRL's


class Timed(GRPOTrainer):
    """TRL's trainer with a timed rollout."""

    times: Times

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.times.rollout.append(time.perf_counter() - start)
        self.times.written.append(int(output["num_items_in_batch"]))
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

    Its prompts are task ids, each G x T times; T of them in a row are one trajectory, and a turn of
    it is a row of the batch.
    """
    tasks = {task.id: task for task in shape.tasks}

    def rollout(names: list[str], trainer: GRPOTrainer) -> dict[str, list | None]:
        starts = range(0, len(names), shape.turns)
        assert all(len(set(names[k : k + shape.turns])) == 1 for k in starts)
        running = [shape.agent.run(tasks[names[k]]) for k in starts]
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
        rewards = [score() for _ in running]
        return {
            "prompt_ids": [turn.prompt_ids for of_one in turns for turn in of_one],
            "completion_ids": [turn.response_ids for of_one in turns for turn in of_one],
            "logprobs": None,
            "reward": [reward for reward in rewards for _ in range(shape.turns)],
        }

    return rollout


def reward_in_trl(
    completion_ids: list[list[int]], reward: list[float] | None = None, **_
) -> list[float]:
    """Return the rewards of `agents_in_trl`, or draw one for every response."""
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
    """Run `steps` steps of TRL's own `train()`, and one step of `other` after each of them.

    parts: batches of one update. cache: of continuous batching, None = padded batches.
    """
    if shape.turns == 1:
        prompts = [next(shape.agent.run(task)) for task in shape.tasks]
        names = [prompt.text for prompt in prompts]
        ids = [prompt.ids(CODEC) for prompt in prompts]
        assert CODEC.tokenizer(text=names)["input_ids"] == ids, "TRL would read other tokens"
    else:
        names = [task.id for task in shape.tasks]
    trainer = Timed(
        load_model(EMBEDDED, device="cpu"),
        reward_funcs=reward_in_trl,
        args=trl_config(shape, steps, folder, parts, cache),
        train_dataset=Dataset.from_dict({"prompt": names}),
        processing_class=Codec.load(EMBEDDED).tokenizer,
        rollout_func=agents_in_trl(shape) if shape.turns > 1 else None,
        callbacks=[SideBySide(times, other)],
    )
    trainer.times = times
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def trl_config(shape: Shape, steps: int, folder: str, parts: int, cache: dict | None) -> TRLConfig:
    """Make TRL's settings: ours where it has them, and nothing that only costs time."""
    return TRLConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,  # TRL's defaults are bf16 and checkpointing
        gradient_checkpointing=False,
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


# ---------------------------------------------------------------- side by side


def cell(shape: Shape, folder: str) -> dict:
    """Try each of TRL's variants, then run the fastest and our module in turns."""
    trials = {}
    for name, variant in VARIANTS.items():
        times = Times()
        trl_run(shape, 1 + TRIAL, folder, times, lambda: None, **variant)
        trials[name] = times.after_warm_up()
    best = min(trials, key=lambda name: median(trials[name].step))
    theirs, ours = Times(), Times()
    trl_run(shape, 1 + STEPS[shape.name], folder, theirs, our_step(shape, ours), **VARIANTS[best])
    sides = {"trl": theirs.after_warm_up(), "ours": ours.after_warm_up()}
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


def print_table(cells: list[dict]) -> None:
    """Print the cells; takes the times of their steps out of them."""
    header = (
        "side", "TRL's way", "rows", "written", "step", "rollout", "update", "TRL/ours", "steps",
        "bar",
    )  # fmt: skip
    rows = []
    for c in cells:
        for side, t in c.pop("shown").items():
            variant, ratios = c["trl_variant"], ("", "", "")
            if side == "ours":
                rounds = f"{c['ratio_min']:.2f}-{c['ratio_max']:.2f}"
                variant, ratios = "", (f"{c['ratio']:.2f}", rounds, verdict(c))
            written = f"{median(t.written):.0f}"
            times = [show(values) for values in (t.step, t.rollout, t.update)]
            rows.append((f"{c['shape']}: {side}", variant, c["rows"], written, *times, *ratios))
    table("Step: rollout and update, seconds, median (least-largest)", header, rows)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell(shape, folder) for shape in make_shapes()]
    print_table(cells)
    lines = []
    for c in cells:
        ratio, bar = f"{c['ratio']:.2f}x", f"at least {c['bar']:g}x"
        lines.append(line(f"step, {c['shape']}: TRL / ours", ratio, bar, c["met"]))
    finish("step", {"met": all(c["met"] for c in cells), "unit": "s", "cells": cells}, lines)


if __name__ == "__main__":
    main()
