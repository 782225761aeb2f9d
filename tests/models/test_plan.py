"""The arithmetic of what fits: the figures of docs/train.md, and models that are counted."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import transformers

from commands.plan import card_of
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, PlanConfig
from memagent import MemAgent
from models.load import load_model, with_lora
from models.plan import (
    CARDS,
    CONTEXT_GIB,
    FRAGMENTS,
    GRAPHS_GIB,
    KNOWN,
    MODES,
    USUAL,
    activations_gib,
    checkpoint_gb,
    dense,
    geometry,
    plan,
    smallest,
    step_seconds,
    turns_in_cache,
)

GRPO, AGENT = GRPOConfig(tasks_per_step=(8,), group_size=8), MemAgent()
FOUR = KNOWN["Qwen/Qwen3-4B"]


def planned(mode, gib, g=FOUR, devices=1, agent=AGENT, **grpo):
    return plan(g, mode, gib, devices, replace(GRPO, **grpo), agent)


def seconds(p, g=FOUR, devices=1, agent=AGENT, card="H100", **grpo):
    return step_seconds(g, p, devices, replace(GRPO, **grpo), agent, card=card)


# ---------------------------------------------------------------- sizes


def test_sizes_are_those_of_the_model_that_is_loaded():
    model = load_model(EMBEDDED, "float32", "cpu")
    g = geometry("")
    assert g == geometry(str(EMBEDDED))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == g.linear + g.embedding
    adapted = with_lora(model, GRPOConfig(lora_rank=4))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == g.adapter(4)


def written(folder, kind, **sizes):
    getattr(transformers, f"{kind}Config")(**sizes).save_pretrained(folder)
    return str(folder)


SMALL = dict(
    vocab_size=96, hidden_size=8, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, intermediate_size=32, num_experts_per_tok=2,
)  # fmt: skip
ATTENTION = 8 * 4 * (2 * 2 + 2 * 1)  # its weights in a layer


@pytest.mark.parametrize(
    ("kind", "more", "billions", "passed"),  # as the models' own pages say, rounded there
    [
        ("Qwen3Moe", dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128,
                          num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32,
                          num_key_value_heads=4, head_dim=128, vocab_size=151936), 30.5, 3.3),
        ("Mixtral", dict(sliding_window=None), 46.7, 12.9),
        ("Qwen2Moe", dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=24,
                          num_attention_heads=16, num_key_value_heads=16, num_experts=60,
                          num_experts_per_tok=4, moe_intermediate_size=1408,
                          shared_expert_intermediate_size=5632), 14.3, 2.7),
    ],
)  # fmt: skip
def test_experts_are_counted(tmp_path, kind, more, billions, passed):
    g = geometry(written(tmp_path, kind, **more))
    assert g.weights / 1e9 == pytest.approx(billions, rel=0.005)
    # the pages count the embeddings, too
    assert (g.passed + g.embedding) / 1e9 == pytest.approx(passed, rel=0.02)
    # fused experts stay in 16 bits, whatever the mode
    assert planned("qlora", 80, g).weights > 0.85 * 2 * g.weights / 2**30


def test_layers_of_a_mixture_are_counted_one_by_one(tmp_path):
    """Dense layers, by list, by rhythm or at the beginning; the router; shared experts."""
    sizes = SMALL | dict(moe_intermediate_size=6, num_experts=5)
    expert, mlp = 3 * 8 * 6, 3 * 8 * 32
    layers = dict(mlp_only_layers=[3], decoder_sparse_step=2)  # so that layer 1 alone is a mixture
    g = geometry(written(tmp_path / "a", "Qwen3Moe", **sizes, **layers))
    assert g.linear == 4 * ATTENTION + 3 * mlp and g.experts == 5 * expert
    assert g.passed == 4 * ATTENTION + 3 * mlp + 2 * expert + 5 * 8
    assert g.intermediate == 32  # the widest of the layers decides what a pass takes
    sizes = SMALL | dict(
        moe_intermediate_size=6, n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    g = geometry(written(tmp_path / "b", "Glm4Moe", **sizes))
    assert g.experts == 3 * 4 * expert
    assert g.passed == 4 * ATTENTION + mlp + 3 * (expert + 2 * expert + 4 * 8)
    one = {k: v for k, v in SMALL.items() if k != "num_experts_per_tok"}
    g, computed = geometry(written(tmp_path / "c", "Qwen3", **one)), dense(4, 8, 2, 1, 4, 32, 96, 0)
    assert g.passed == g.linear == 4 * (ATTENTION + mlp) and not g.experts
    assert (g.adapter(3), g.linear) == (computed.adapter(3), computed.linear)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Gemma3Text", {}), ("Gemma3", {}), ("Qwen3_5", {}), ("Mistral", {}), ("GptOss", {}),
        ("Granite", {"logits_scaling": 8.0}), ("GPT2", {}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ],
)  # fmt: skip
def test_a_model_that_no_engine_trains_is_not_planned(tmp_path, kind, more):
    with pytest.raises(UserError):
        geometry(written(tmp_path, kind, **more))


@pytest.mark.parametrize("wrong", [
    lambda: geometry("./nowhere"), lambda: planned("full", 80, devices=2, optimizer="adamw8bit"),
    lambda: PlanConfig(gpu_gib=0), lambda: PlanConfig(devices=0), lambda: PlanConfig(sections=0),
    lambda: card_of(24, "B300"), *(partial(card_of, None, n) for n in ("4070", "H10", "a1000")),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(wrong):
    with pytest.raises(UserError):
        wrong()


# ---------------------------------------------------------------- memory


def test_the_sampler_sleeps_before_a_pass_is_cut():
    """Awake beside the trainer it would leave room for short passes alone."""
    for gib in range(20, 90):
        p = planned("lora", gib)
        if p.fits:
            awake = p.sampler + p.cache + GRAPHS_GIB
            rest = p.weights + p.gradients + p.optimizer + CONTEXT_GIB + awake
            whole = activations_gib(FOUR, GRPO.micro_tokens, "lora") + rest <= gib * (1 - FRAGMENTS)
            assert p.sleep == ("never" if whole else "1"), gib


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KNOWN)
def test_a_plan_never_takes_more_than_the_card_and_grows_with_it(name, mode):
    g, sizes = KNOWN[name], (8, 16, 24, 40, 48, 80, 141, 288)
    plans = {gib: planned(mode, gib, g) for gib in sizes}
    assert all(max(p.rollout, p.update) <= gib for gib, p in plans.items() if p.fits)
    for p, larger in pairwise(plans.values()):
        assert larger.turns >= p.turns and larger.micro_tokens >= p.micro_tokens
        assert larger.fits >= p.fits
    assert larger.fits
    assert smallest(lambda gib: planned(mode, gib, g)) == next(
        (gib for gib in USUAL if plans[gib].fits), 0
    )
    if mode != "qlora":  # whose weights are on every rank
        two = planned(mode, 288, g, devices=2)
        assert two.weights == pytest.approx(larger.weights / 2)
        assert seconds(two, g, devices=2)[0] < seconds(larger, g)[0]


def test_eight_bits_of_optimizer_and_the_rank_are_counted():
    usual, eight, wide = (
        planned("lora", 80, **c) for c in ({}, {"optimizer": "adamw8bit"}, {"lora_rank": 64})
    )
    assert eight.optimizer == pytest.approx(usual.optimizer / 4)
    assert wide.optimizer == pytest.approx(2 * usual.optimizer)
    assert checkpoint_gb(FOUR, "lora", GRPO) == 12 * FOUR.adapter(32) / 1e9
    assert checkpoint_gb(FOUR, "full", replace(GRPO, optimizer="adamw8bit")) == pytest.approx(
        6 * FOUR.weights / 1e9
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_long_turn_stands_in_a_pass_alone(mode):
    # a turn of more tokens than --micro-tokens stands in a pass alone, if that has room
    long, few = AGENT.with_settings(chunk_tokens=20_000), dict(tasks_per_step=(1,), group_size=2)
    plans = {gib: planned(mode, gib, agent=long, **few) for gib in range(8, 200)}
    gib, p = next((gib, p) for gib, p in plans.items() if p.fits)
    assert p.micro_tokens == GRPO.micro_tokens < long.turn_tokens() < 1 << 15
    assert p.weights + p.gradients + p.optimizer + activations_gib(FOUR, 1 << 15, mode) < gib


def test_a_cache_holds_as_many_turns_as_their_tokens_fit():
    """Qwen3-4B has 144 KiB of keys and values a token: 2 x 36 layers x 8 heads x 128 x 2 bytes."""
    assert FOUR.kv_bytes == 144 * 1024
    assert turns_in_cache(FOUR, 9.0, 4096) == 16  # of .5625 GiB each
    assert [turns_in_cache(FOUR, gib, 4096) for gib in (0.1, 1.12, 1.125)] == [1, 1, 2]


# ---------------------------------------------------------------- time


def test_every_pass_forward_of_an_update_is_counted():
    """8 FLOP a weight and token with recomputation, 12 in the published settings."""
    p = planned("full", 141)
    rollout_s, update_s = seconds(p)
    for more, flop in (
        ({"kl": 0.001}, 10), ({"updates_per_rollout": 16}, 10), ({"rows_per_update": 64}, 10),
        ({"updates_per_rollout": 16, "kl": 0.001}, 12), ({"rows_per_update": 64, "kl": 0.1}, 12),
    ):  # fmt: skip
        assert seconds(p, **more) == pytest.approx((rollout_s, flop / 8 * update_s))


def test_the_shared_layout_takes_less_time():
    p = planned("lora", 80)
    shared, paper = seconds(p), seconds(p, agent=AGENT.with_settings(layout="paper"))
    assert paper[1] > 1.7 * shared[1] and paper[0] > shared[0]


WRITTEN = {
    "4090": (24, "RTX 4090"), "rtx4090": (24, "RTX 4090"), "h100": (80, "H100"),
    "A100 40GB": (40, "A100"), "l40s": (48, "L40S"),
    "NVIDIA A100-SXM4-80GB": (80, "A100"), "a10": (24, "A10"), "3060": (12, "RTX 3060"),
    "NVIDIA GeForce RTX 4060 Ti": (16, "RTX 4060 Ti"), "mi300x": (192, "MI300X"),
}  # fmt: skip


def test_seconds_and_memory_are_those_of_the_same_card():
    """Seconds of an H100 beside the memory of a 4090 would be of no card at all."""
    assert {CARDS[card][2]: card for card in USUAL.values()} == USUAL
    assert card_of() == (80, "H100")
    assert card_of(None, "L4") == (24, "L4") and card_of(40, "A100") == (40, "A100")
    assert {card: card_of(None, card) for card in WRITTEN} == WRITTEN
    cards = {16: "RTX 4090", 24: "RTX 4090", 25: "L40S", 48: "L40S", 80: "H100", 141: "H200"}
    assert {gib: card_of(gib)[1] for gib in cards} == cards and card_of(200)[1] == "H200"


@pytest.mark.parametrize("name", KNOWN)
def test_the_docs_have_the_planners_figures(name):
    """In each mode the smallest fitting size, and hours on its usual card."""
    cells = [name.split("/")[1].removesuffix("-Instruct")]
    for mode in MODES:
        plans = {gib: planned(mode, gib, KNOWN[name]) for gib in USUAL}
        cells += next(
            (
                [f"{gib} GiB, {p.turns} turns, "
                 f"{sum(seconds(p, KNOWN[name], card=card_of(gib)[1])) / 36:.1f} h"]
                for gib, p in plans.items() if p.fits
            ),
            ["more"],
        )  # fmt: skip
    page = Path(__file__).parents[2] / "docs/train.md"
    assert f"| {' | '.join(cells)} |" in page.read_text(encoding="utf-8").splitlines()
