"""Prefill and training tokens of both layouts, counted exactly over one rollout; no timing.

Holds: the fixture of 8 tasks x 8 members x 14 sections of 2,048 tokens, memories of up to 512.
Leaves out: speed (rollout.py, update.py).
Exercise it: `python -m bench.prefill`. Read next: length.py.

A model of one narrow layer with random weights reads and writes, on a real engine: counts do not
depend on what it says, only on when it says it. In `full` every memory has its 512 tokens, which is
the most that the layouts cannot share, and is compared with the bars; in `drawn` a memory ends at
random, after 256 tokens on average, so that the members of a group drift apart.
"""

from __future__ import annotations

import torch

from bench.common import finish, line, table
from config.options import EMBEDDED
from engines.hf import TransformersEngine
from memagent import MemAgent, MemAgentConfig
from models.logprobs import Row, pack
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

TASKS, GROUP, SECTIONS, SECTION_TOKENS = 8, 8, 14, 2048
MEMORY, ANSWER, ROW_TOKENS = 512, 256, 16384
BARS = {"prefill": 0.35, "training": 1 / 2.2}  # shared / paper, at most


def policy(codec: Codec, ends: float):
    """Make a model of one narrow layer whose responses end with probability `ends` at any token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(codec.tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    ).eval()
    head = torch.nn.Linear(16, len(codec.tokenizer))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    n = len(codec.tokenizer) - len(codec.eos_ids)
    for token in codec.eos_ids:
        head.bias.data[token] = torch.tensor(n * ends / (1 - ends)).log() if ends else -1e9
    model.lm_head = head
    return model


def count(layout: str, ends: float) -> dict:
    """Count the tokens of one rollout, and of training on all its turns."""
    codec = Codec.load(EMBEDDED)
    config = MemAgentConfig(
        chunk_tokens=SECTION_TOKENS,
        memory_tokens=MEMORY,
        final_tokens=ANSWER,
        max_sections=SECTIONS,
        over="head",
        layout=layout,
    )
    sentences = SECTIONS * SECTION_TOKENS // 24 + 1  # six of 4 tokens make 24
    tasks = [worlds.make_task(str(i), sentences, "one_fact") for i in range(TASKS)]
    engine = TransformersEngine(policy(codec, ends), codec)
    jobs = ((task, g) for task in tasks for g in range(GROUP))
    done = list(rollout(engine, MemAgent(config), jobs, Sampling(1.0)))
    done.sort(key=lambda t: (t.task.id, t.sample))
    turns = [turn for t in done for turn in t.turns]
    assert len(done) == TASKS * GROUP and not any(t.error for t in done)
    assert len(turns) == len(done) * (SECTIONS + 1)
    rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in turns]
    return {
        "turns": len(turns),
        "prompt_tokens": sum(len(r.prompt_ids) for r in rows),
        "written_tokens": sum(len(r.response_ids) for r in rows),
        **{name: n for name, n in engine.counts().items() if name != "generated_tokens"},
        "turn_tokens": sum(map(len, rows)),
        "trained_in_tokens": sum(len(batch.trie) for batch in pack(rows, ROW_TOKENS)),
    }


def main() -> None:
    cells, rows = {}, []
    for memories, ends in (("full", 0.0), ("drawn", 1 / 256)):
        paper, shared = count("paper", ends), count("shared", ends)
        ratios = {
            "prefill": shared["prefilled_tokens"] / paper["prefilled_tokens"],
            "training": shared["trained_in_tokens"] / paper["trained_in_tokens"],
        }
        for layout, c in (("paper", paper), ("shared", shared)):
            rows.append((f"{memories}, {layout}", *(f"{c[name]:,}" for name in list(c)[1:])))
        shares = {name: f"{ratio:.3f}" for name, ratio in ratios.items()}
        rows.append(("shared / paper", "", "", shares["prefill"], "", "", shares["training"]))
        rounded = {name: round(ratio, 4) for name, ratio in ratios.items()}
        cells[memories] = {"paper": paper, "shared": shared, "ratios": rounded}
    title = "8 tasks x 8 members x 14 sections of 2,048 tokens, memories up to 512: exact counts"
    header = (
        "memories, layout", "prompts", "written", "prefilled", "reused", "turns", "trained in",
    )  # fmt: skip
    table(title, header, rows)
    lines = []
    for name, bar in BARS.items():
        ratio, what = cells["full"]["ratios"][name], f"{name} tokens, shared / paper"
        lines.append(line(what, f"{ratio:.3f}", f"at most {bar:.3f}", ratio <= bar))
    met = all(each["met"] for each in lines)
    finish("prefill", {"met": met, "row_tokens": ROW_TOKENS, "cells": cells}, lines)


if __name__ == "__main__":
    main()
