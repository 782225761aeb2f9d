"""The update on a GPU: Qwen3-4B's geometry with random weights, LoRA and full, in packed rows of 16,384 tokens, `shared` against `paper`.

Holds: tokens a second, utilisation, peak memory, and the mean difference of log-probs in bfloat16 between the packed row and one
sequence at a time. Leaves out: rollouts, and the product's own full fine-tuning in mixed precision.
Exercise it: `python -m bench.gpu` on a machine with a GPU, `python -m bench.gpu --tiny` without one (does it run?). Read next: trie.py.

Tasks of G = 8 members, at every turn 2,048 tokens of section and problem in common, 512 of memory and 512 of response of each member's own.
LoRA: bfloat16 weights, rank 16 on all linear layers. Full: float32 weights and AdamW, bfloat16 arithmetic. Layers are recomputed.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from statistics import median

import torch

from bench.common import finish, line, table
from grpo import Row, logprobs, pack, policy_loss, recompute, token_weights
from models import with_lora
from plan import CARDS
from settings import GRPOConfig

SHAPE = {"group": 8, "common": 2048, "own": 512, "response": 512, "row_tokens": 16384}
TINY = {"group": 4, "common": 48, "own": 12, "response": 12, "row_tokens": 256}
TARGETS = {"lora": {"tokens_per_s": 14_000, "gib": 30}, "full": {"tokens_per_s": 10_000, "gib": 85}}
SHARED_OVER_PAPER = 1.8
REPEATS = 5


def make_model(mode: str, tiny: bool, device: str):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
    )
    if not tiny:
        sizes = dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                     head_dim=128, vocab_size=151_936)  # fmt: skip
    config = Qwen3Config(**sizes, max_position_embeddings=40_960, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if mode == "lora" and not tiny else torch.float32).eval()
    return with_lora(model, GRPOConfig(lora_rank=16)) if mode == "lora" else model


def turns(layout: str, groups: int, shape: dict, vocab: int) -> list[Row]:
    rng = random.Random(0)
    some = lambda n: [rng.randrange(2, vocab) for _ in range(n)]  # noqa: E731
    rows = []
    for _ in range(groups):
        common = some(shape["common"])
        for k in range(shape["group"]):
            own, response = some(shape["own"]), some(shape["response"])
            prompt = common + own if layout == "shared" else own + common
            rows.append(Row(prompt, response, [0.0] * len(response), rng.gauss(0, 1), trajectory=k))
    return rows


def update(policy, rows: list[Row], optimizer, row_tokens: int, mixed: bool) -> int:
    """One optimizer step; returns the tokens that went through the model."""
    config, model = GRPOConfig(importance="none"), policy.get_base_model() if hasattr(policy, "peft_config") else policy
    recompute(model, True)
    weights, computed = token_weights(rows, config), 0
    for batch in pack(rows, row_tokens):
        computed += len(batch.trie)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            logp = logprobs(model, batch)
        sizes = torch.tensor([len(rows[i].response_ids) for i in batch.index])
        advantage, weight = (
            torch.tensor([of(i) for i in batch.index]).repeat_interleave(sizes).to(model.device)
            for of in (lambda i: rows[i].advantage, weights.__getitem__)
        )
        loss, _ = policy_loss(logp, logp.detach(), logp.detach(), advantage, weight, config)
        loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return computed


def rounding(policy, rows: list[Row], row_tokens: int) -> float:
    """Mean |log-prob of the packed row - that of one sequence at a time|, both in the model's own precision."""
    model, differences = policy.get_base_model() if hasattr(policy, "peft_config") else policy, []
    with torch.no_grad():
        for batch in pack(rows, row_tokens):
            ours, at = logprobs(model, batch).float(), 0
            for i in batch.index:
                ids, p = torch.tensor([rows[i].prompt_ids + rows[i].response_ids], device=model.device), len(rows[i].prompt_ids)
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, p - 1 : -1]
                alone = model.lm_head(hidden).float().log_softmax(-1).gather(1, ids[0, p:, None])[:, 0]
                differences.append((ours[at : at + len(alone)] - alone).abs())
                at += len(alone)
    return torch.cat(differences).mean().item()


def cell(mode: str, tiny: bool, device: str) -> dict:
    shape = TINY if tiny else SHAPE
    policy = make_model(mode, tiny, device)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device == "cuda")
    vocab = 500 if tiny else 151_000
    out: dict = {"mode": mode, "mean_dlogp": rounding(policy, turns("shared", 1, shape, vocab), shape["row_tokens"])}
    layers = [p for name, p in policy.named_parameters() if ".layers." in name]
    per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in layers)
    card = torch.cuda.get_device_name() if device == "cuda" else ""
    peak = next((tflops * 1e12 for name, (tflops, _) in CARDS.items() if name in card), float("nan"))
    for layout in ("paper", "shared"):
        rows = turns(layout, 2, shape, vocab)
        seconds, computed = [], 0
        for repeat in range(REPEATS + 1):  # the first one compiles
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            computed = update(policy, rows, optimizer, shape["row_tokens"], mixed=mode == "full" and device == "cuda")
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:
                seconds.append(time.perf_counter() - start)
        s = median(seconds)
        out[layout] = {
            "seconds": [round(x, 4) for x in seconds], "turn_tokens": sum(map(len, rows)), "computed_tokens": computed,
            "tokens_per_s": round(computed / s), "conversations_per_s": round(len(rows) / s, 3), "mfu": round(computed / s * per_token / peak, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        }  # fmt: skip
    out["shared_over_paper"] = round(out["shared"]["conversations_per_s"] / out["paper"]["conversations_per_s"], 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is; writes no result")
    tiny = parser.parse_args().tiny
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise SystemExit("bench.gpu needs a GPU; --tiny shows on a CPU that it runs.")
    cells, lines, shown = [], [], []
    for mode, target in TARGETS.items():
        c = cell(mode, tiny, device)
        cells.append(c)
        best, ratio = c["paper"], c["shared_over_paper"]
        for layout in ("paper", "shared"):
            x = c[layout]
            shown.append((f"{mode}, {layout}", f"{x['tokens_per_s']:,}", x["conversations_per_s"], x["mfu"], x["peak_gib"]))
        gib = max(c[layout]["peak_gib"] or 0 for layout in ("paper", "shared"))
        lines += [
            line(f"{mode}: tokens/s computed", f"{best['tokens_per_s']:,}", f"at least {target['tokens_per_s']:,}", best["tokens_per_s"] >= target["tokens_per_s"]),
            line(f"{mode}: peak GiB", gib, f"at most {target['gib']}", gib <= target["gib"]),
            line(f"{mode}: shared / paper, conversations/s", f"{ratio}x", f"at least {SHARED_OVER_PAPER}x", ratio >= SHARED_OVER_PAPER),
        ]  # fmt: skip
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    table("Update in packed rows", ("", "tokens/s computed", "conversations/s", "MFU", "peak GiB"), shown)
    for c in cells:
        print(f"{c['mode']}: mean |log-prob of the packed row - alone| = {c['mean_dlogp']:.2g}")
    if not tiny:
        finish("gpu", {"device": torch.cuda.get_device_name(), "shape": SHAPE, "cells": cells}, lines)


if __name__ == "__main__":
    main()
