"""The update: our loss and gradient against TRL's GRPOTrainer, one thread, float32.

`python -m bench.update` (needs `trl`) compares gradients and times of ours, TRL's and ten obvious
lines. A group is G turns as a memory agent makes them: 512 tokens in common (section and problem),
128 of each member's own (its memory), a response of 32 to 128 tokens. In the layout `shared` the
common tokens come first; in `paper` the memory does, and no two turns have a prefix in common.
DAPO's normaliser, no KL, the first update on a rollout.

Ours is timed from rows to gradient, building the trie included. TRL gets finished tensors, padded
and masked as its trainer makes them, and is timed in `compute_loss` and the backward pass alone,
with the whole group in one batch and in micro-batches: the faster of them counts. Some of its work
cannot be switched off: it always computes the entropy of every token, for its metrics, and without
Triton its head scores every place of the batch, prompts and padding too.

The cost of that depends on the vocabulary. The embedded policy's has some four hundred tokens, no
other model's is that small, so the comparison is also made with random weights of the same sizes
and 32,000 tokens (fewer rounds; TRL one turn at a time, which was its fastest way there).
"""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from datasets import Dataset
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from agents import find
from bench.common import (
    against,
    finish,
    line,
    our_update,
    paired,
    show,
    spread,
    table,
    turns,
    verdict,
)
from config.options import EMBEDDED
from models.load import load_model
from models.logprobs import Row
from tokens.codec import Codec

COMMON, OWN, RESPONSE = 512, 128, (32, 128)
BARS = {"paper": 3.0, "shared": 6.0}
REPEATS, TRIALS = 7, 1  # of the comparison; of each size of TRL's batches
WIDE, WIDE_REPEATS = 32_000, 3
# the embedded policy's own settings; token_mean is DAPO's normaliser
CONFIG, _ = find.resolve("demo", EMBEDDED, {}, {})
# the embedded policy's vocabulary
SMALL = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))["vocab_size"]


# ---------------------------------------------------------------- three implementations
# each leaves the gradient in the model


def obvious(model, rows: list[Row]) -> None:
    """Compute one turn at a time with full logits."""
    model.zero_grad()
    total = sum(len(r.response_ids) for r in rows)
    for r in rows:
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        p = len(r.prompt_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, p - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[0, p:, None])[:, 0]
        (-r.advantage * (logp - logp.detach()).exp().sum() / total).backward()


def trl_trainer(model, group: int, micro: int, folder: str) -> GRPOTrainer:
    """Make a real trainer for groups of `group` turns in micro-batches of `micro`.

    Everything that costs time and can be switched off is off.
    """
    args = TRLConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,  # TRL's defaults are bf16 and checkpointing
        gradient_checkpointing=False,
        loss_type="dapo",
        beta=0.0,
        epsilon=CONFIG.clip_low,
        epsilon_high=CONFIG.clip_high,
        temperature=1.0,
        num_generations=group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=group // micro,
        max_completion_length=RESPONSE[1],
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        processing_class=Codec.load(EMBEDDED).tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = group // micro  # what the training loop sets
    return trainer


def trl_inputs(rows: list[Row], micro: int) -> list[dict[str, torch.Tensor]]:
    """Make what TRL's trainer hands to its loss: one dict for each micro-batch.

    Prompts are padded left, completions right, all to one width.
    """
    prompt_width = max(len(r.prompt_ids) for r in rows)
    completion_width = max(len(r.response_ids) for r in rows)
    prompts = torch.zeros(len(rows), prompt_width, dtype=torch.long)
    completions = torch.zeros(len(rows), completion_width, dtype=torch.long)
    prompt_mask, completion_mask = torch.zeros_like(prompts), torch.zeros_like(completions)
    for k, r in enumerate(rows):
        prompts[k, prompt_width - len(r.prompt_ids) :] = torch.tensor(r.prompt_ids)
        prompt_mask[k, prompt_width - len(r.prompt_ids) :] = 1
        completions[k, : len(r.response_ids)] = torch.tensor(r.response_ids)
        completion_mask[k, : len(r.response_ids)] = 1
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([r.advantage for r in rows]),
    }
    n = {"num_items_in_batch": completion_mask.sum()}
    return [
        {name: value[k : k + micro] for name, value in whole.items()} | n
        for k in range(0, len(rows), micro)
    ]


def trl(trainer: GRPOTrainer, inputs: list[dict[str, torch.Tensor]]) -> None:
    trainer.model.zero_grad()
    for part in inputs:
        trainer.compute_loss(trainer.model, part).backward()


# ---------------------------------------------------------------- the comparison


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of a - b, relative to that of b."""
    return float(f"{((a - b).norm() / b.norm()).item():.2g}")


def make_model(vocabulary: int):
    """Load the embedded policy, or make one of its sizes with random weights for a vocabulary."""
    model = load_model(EMBEDDED, device="cpu")
    if vocabulary == model.config.vocab_size:
        return model
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.vocab_size = vocabulary
    return type(model)(config)


def cell(vocabulary: int, group: int, layout: str, folder: str) -> dict:
    """Compare gradients and seconds of one group."""
    model = make_model(vocabulary)
    small = vocabulary < 1000
    rows = turns(layout, model.config.vocab_size, group, COMMON, OWN, RESPONSE)
    obvious(model, rows)
    expected = gradient(model)
    computed = our_update(model, rows, CONFIG)
    our_gradient = gradient(model)

    # TRL, with batches of several sizes; the fastest of a trial is timed
    peers: dict[int | str, Callable[[], object]] = {}
    models = {}
    for micro in (group, group // 4, 1) if small else (1,):
        trainer = trl_trainer(make_model(vocabulary), group, micro, folder)
        peers[micro] = partial(trl, trainer, trl_inputs(rows, micro))
        models[micro] = trainer.model
    slow = partial(obvious, model, rows)
    trials = paired({"obvious": slow} | (peers if small else {}), TRIALS)
    best = min(peers, key=lambda micro: median(trials[micro])) if small else 1

    repeats = REPEATS if small else WIDE_REPEATS
    ours = partial(our_update, model, rows, CONFIG)
    seconds = paired({"ours": ours, "trl": peers[best]}, repeats)
    seconds["obvious"] = trials.pop("obvious")
    reference = gradient(models[best])
    return {
        "vocabulary": vocabulary,
        "repeats": repeats,
        "group": group,
        "layout": layout,
        "tokens": sum(map(len, rows)),
        "tokens_padded_trl": group * (COMMON + OWN + max(len(r.response_ids) for r in rows)),
        "tokens_computed_ours": computed,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "trl_batch": best,
        "trl_trials": {str(micro): spread(values) for micro, values in trials.items()},
        **against(seconds["trl"], seconds["ours"], BARS[layout]),
        "gradient_ours_trl": difference(our_gradient, reference),
        "gradient_ours_obvious": difference(our_gradient, expected),
        "gradient_trl_obvious": difference(reference, expected),
        "shown": {name: show(values) for name, values in seconds.items()},
    }


def print_table(cells: list[dict]) -> None:
    """Print the cells; takes what is shown of their seconds out of them."""
    header = (
        "layout", "vocabulary", "G", "tokens", "in ours", "ours", "TRL", "batch", "obvious, of 2",
        "TRL/ours", "rounds", "bar", "gradients",
    )  # fmt: skip
    rows = []
    for c in cells:
        seconds = c.pop("shown")
        sizes = (c[name] for name in ("layout", "vocabulary", "group", "tokens"))
        times = (seconds["ours"], seconds["trl"], c["trl_batch"], seconds["obvious"])
        ratios = (f"{c['ratio']:.2f}", f"{c['ratio_min']:.2f}-{c['ratio_max']:.2f}")
        end = (verdict(c), c["gradient_ours_trl"])
        rows.append((*sizes, c["tokens_computed_ours"], *times, *ratios, *end))
    table("Update: loss and gradient of one group, seconds, median (least-largest)", header, rows)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell(SMALL, group, layout, folder) for layout in BARS for group in (8, 16)]
        cells += [cell(WIDE, 8, layout, folder) for layout in BARS]
    print_table(cells)
    lines = []
    for c in cells:
        setting = f"{c['layout']}, G={c['group']}, vocabulary {c['vocabulary']:,}"
        ratio, bar = f"{c['ratio']:.2f}x", f"at least {c['bar']:g}x"
        lines.append(line(f"update, {setting}: TRL / ours", ratio, bar, c["met"]))
    furthest = max(c["gradient_ours_trl"] for c in cells)
    agree = furthest < 1e-4
    lines.append(line("gradients of TRL and ours, relative", furthest, "", agree))
    met = all(c["met"] for c in cells)
    result = {"met": met, "gradients_agree": agree, "unit": "s", "cells": cells}
    finish("update", result, lines)


if __name__ == "__main__":
    main()
