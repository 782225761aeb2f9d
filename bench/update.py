"""The update: our loss and gradient against TRL's GRPOTrainer, one thread, float32.

`python -m bench.update [--tiny]` (needs `trl`) compares gradients and times of ours, TRL's and ten
obvious lines. A group is G turns as a memory agent makes them: 512 tokens in common (section and
problem), 128 of each member's own (its memory), a response of 32 to 128 tokens. In the layout
`shared` the common tokens come first. In `paper` the memory does, and no two turns begin alike.
DAPO's normaliser, no KL, the first update on a rollout.

Ours is timed from rows to gradient, building the trie included. TRL gets finished tensors and is
timed in `compute_loss` and the backward pass alone, at its fastest size of batches. Two costs of
TRL cannot be switched off: the entropy of every token, and, without Triton, the head at every place
of the batch. They depend on the vocabulary, so the comparison is also made with random weights of
the same sizes and 32,000 tokens, there one turn at a time, which was TRL's fastest way.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
from collections.abc import Callable
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
from models.load import load_model
from models.logprobs import Row

SIZES = (512, 128, (32, 128))  # tokens in common, of one's own, written
TINY = (48, 12, (4, 12))
BARS = {"paper": 3.0, "shared": 6.0}
WIDE = 32_000
CONFIG, _ = find.resolve("demo", EMBEDDED, {}, {})  # token_mean is DAPO's normaliser


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


def make_model(wide: bool):
    """Load the embedded policy, or make one of its sizes with random weights for 32,000 tokens."""
    model = load_model(EMBEDDED, device="cpu")
    if not wide:
        return model
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.vocab_size = WIDE
    return type(model)(config)


def cell(wide: bool, group: int, layout: str, folder: str, tiny: bool) -> dict:
    """Compare gradients and seconds of one group."""
    model, sizes = make_model(wide), TINY if tiny else SIZES
    rows = turns(layout, model.config.vocab_size, group, *sizes)
    obvious(model, rows)
    expected = gradient(model)
    computed = our_update(model, rows, CONFIG)
    ours = gradient(model)
    peers: dict[str, Callable[[], object]] = {}
    models = {}
    for micro in (1,) if wide else (group, group // 4, 1):
        args = (make_model(wide), CONFIG, group, micro, sizes[2][1], folder)
        trainer = trl_peer.update_trainer(*args)
        peers[str(micro)] = partial(trl_peer.update, trainer, trl_peer.inputs(rows, micro))
        models[str(micro)] = trainer.model
    trials = paired({"obvious": partial(obvious, model, rows)} | peers, 1)
    best = min(peers, key=lambda micro: median(trials[micro]))
    repeats = 1 if tiny else 3 if wide else 7
    sides = {"ours": partial(our_update, model, rows, CONFIG), "trl": peers[best]}
    seconds = paired(sides, repeats) | {"obvious": trials.pop("obvious")}
    reference = gradient(models[best])
    return {
        "vocabulary": model.config.vocab_size,
        "repeats": repeats,
        "group": group,
        "layout": layout,
        "tokens": sum(map(len, rows)),
        "tokens_computed_ours": computed,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "trl_batch": int(best),
        "trl_trials": {micro: spread(values) for micro, values in trials.items()},
        **against(seconds["trl"], seconds["ours"], BARS[layout]),
        "gradient_ours_trl": difference(ours, reference),
        "gradient_ours_obvious": difference(ours, expected),
        "gradient_trl_obvious": difference(reference, expected),
    }


def main(tiny: bool) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cells, lines, shown = [], [], []
    kinds = [(False, group, layout) for layout in BARS for group in (8, 16)]
    kinds += [(True, 8, layout) for layout in BARS]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            cells.append(cell(*kind, folder, tiny))
    for c in cells:
        name = f"{c['layout']}, G={c['group']}, vocabulary {c['vocabulary']:,}"
        ratio, bar = f"{c['ratio']:.2f}x", f"at least {c['bar']:g}x"
        lines.append(line(f"update, {name}: TRL / ours", ratio, bar, c["met"]))
        times = (c["seconds"][side]["median"] for side in ("ours", "trl", "obvious"))
        shown.append((name, c["tokens"], c["tokens_computed_ours"], *times, ratio, bar))
    header = ("group", "tokens", "in ours", "ours, s", "TRL, s", "obvious, s", "TRL/ours", "asked")
    table("Update: loss and gradient of one group", header, shown)
    furthest = max(c["gradient_ours_trl"] for c in cells)
    lines.append(line("gradients of TRL and ours, relative", furthest, "", furthest < 1e-4))
    if not tiny:
        finish("update", {"unit": "s", "cells": cells}, lines)


if __name__ == "__main__":
    main("--tiny" in sys.argv)
