"""The update: our loss and gradient against TRL's GRPOTrainer.

`python -m bench.update [--tiny]` (needs `trl`) compares gradients and times of ours, TRL's and ten
obvious lines, one thread, float32. A group is G turns as a memory agent makes them: 512 tokens in
common (section and problem), 128 of each member's own (its memory), a response of 32 to 128 tokens.
In the layout `shared` the common tokens come first. In `paper` the memory does, and no two turns
begin alike.

Ours is timed from rows to gradient, building the trie included. TRL gets finished tensors and is
timed in `compute_loss` and the backward pass alone, at its fastest size of batches. Two costs of
TRL cannot be switched off: the entropy of every token, and, without Triton, the head at every place
of the batch. They depend on the vocabulary, so `wide` has random weights of the same sizes and
32,000 tokens.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from agents import find
from bench import trl_peer
from bench.common import (
    against,
    difference,
    finish,
    gradient,
    line,
    our_update,
    paired,
    spread,
    table,
    turns,
)
from config.options import EMBEDDED
from models import packaged
from models.load import load_model
from models.logprobs import Row

SIZES = (512, 128, (32, 128))  # tokens in common, of one's own, written
TINY = (48, 12, (4, 12))
WIDE = 32_000
CONFIG, _ = find.resolve("demo", EMBEDDED, {}, {})  # token_mean is DAPO's normaliser
BARS = {"paper": 3.0, "shared": 6.0}
CASES = [
    ("embedded", "float32", group, layout, BARS[layout]) for layout in BARS for group in (8, 16)
]
CASES += [("wide", "float32", 8, layout, BARS[layout]) for layout in BARS]


def obvious(model, rows: list[Row]) -> None:
    """Leave the gradient in the model, computed one turn at a time with full logits."""
    model.zero_grad()
    total = sum(len(row.response_ids) for row in rows)
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        p = len(row.prompt_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, p - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[0, p:, None])[:, 0]
        (-row.advantage * (logp - logp.detach()).exp().sum() / total).backward()


def make_model(name: str, dtype: str):
    """Load the embedded policy or SmolLM2, or make a wide one of the policy's sizes."""
    folder = packaged.ready("smollm2") if name == "smollm2" else EMBEDDED
    model = load_model(folder, dtype, "cpu")
    if name != "wide":
        return model
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.vocab_size = WIDE
    return type(model)(config)


def cell(
    name: str, dtype: str, group: int, layout: str, bar: float, tiny: bool, repeats: int
) -> dict:
    """Compare gradients and seconds of one group."""
    model, sizes = make_model(name, dtype), TINY if tiny else SIZES
    rows = turns(layout, model.config.vocab_size, group, *sizes)
    sides: dict[str, Callable[[], object]] = {"obvious": partial(obvious, model, rows)}
    sides["ours"] = partial(our_update, model, rows, CONFIG)
    found = {}
    for side, run in sides.items():
        computed = run()
        found[side] = gradient(model)
    with tempfile.TemporaryDirectory() as folder:
        for micro in (group, group // 4, 1):
            peer = make_model(name, dtype)
            trainer = trl_peer.update_trainer(peer, CONFIG, group, micro, sizes[2][1], folder)
            sides[str(micro)] = partial(trl_peer.update, trainer, trl_peer.inputs(rows, micro))
    ours = sides.pop("ours")
    trials = paired(sides, 1)
    slow = trials.pop("obvious")
    best = min(trials, key=lambda micro: median(trials[micro]))
    found["trl"] = gradient(sides[best].args[0].model)
    seconds = paired({"ours": ours, "trl": sides[best]}, 1 if tiny else repeats)
    apart = [("ours", "trl"), ("ours", "obvious"), ("trl", "obvious")]
    return {
        "vocabulary": model.config.vocab_size,
        "dtype": dtype,
        "repeats": repeats,
        "group": group,
        "layout": layout,
        "tokens": sum(map(len, rows)),
        "tokens_computed_ours": computed,
        "seconds": {side: spread(x) for side, x in (seconds | {"obvious": slow}).items()},
        "trl_batch": int(best),
        "trl_trials": {micro: spread(values) for micro, values in trials.items()},
        **against(seconds["trl"], seconds["ours"], bar),
        **{f"gradient_{a}_{b}": difference(found[a], found[b]) for a, b in apart},
    }


def show(cells: Sequence[dict]) -> None:
    """Print the table of all cells."""
    rows = [
        (
            f"{c['layout']}, {c['dtype']}, G={c['group']}, vocabulary {c['vocabulary']:,}",
            c["tokens"],
            c["tokens_computed_ours"],
            *(c["seconds"][side]["median"] for side in ("ours", "trl", "obvious")),
            f"{c['ratio']:.2f}x",
            c["gradient_ours_trl"],
        )
        for c in cells
    ]
    header = ("group", "tokens", "in ours", "ours, s", "TRL, s", "obvious, s", "TRL/ours", "apart")
    table("Update: loss and gradient of one group", header, rows)


def main(tiny: bool) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cells = [cell(*case, tiny, 3 if case[0] == "wide" else 7) for case in CASES]
    show(cells)
    lines = []
    for c in cells:
        name = f"{c['layout']}, G={c['group']}, vocabulary {c['vocabulary']:,}"
        bar = f"at least {c['bar']:g}x"
        lines.append(line(f"update, {name}: TRL / ours", f"{c['ratio']:.2f}x", bar, c["met"]))
    furthest = max(c["gradient_ours_trl"] for c in cells)
    lines.append(line("gradients of TRL and ours, relative", furthest, "", furthest < 1e-4))
    if not tiny:
        finish("update", {"unit": "s", "cells": cells}, lines)


if __name__ == "__main__":
    main("--tiny" in sys.argv)
