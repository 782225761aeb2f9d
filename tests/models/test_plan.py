from dataclasses import replace
from pathlib import Path

import pytest

from commands.plan import card_of
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig
from memagent import MemAgent
from models.plan import (
    CARD_GIB,
    CARD_OF_SIZE,
    CARDS,
    KNOWN,
    MODES,
    SIZES_GIB,
    Geometry,
    activations_gib,
    answerer_gib,
    geometry,
    longest_section,
    plan,
    step_seconds,
)

GRPO, AGENT = GRPOConfig(tasks_per_step=(8,), group_size=8), MemAgent()
FOUR = KNOWN["Qwen/Qwen3-4B"]


def seconds(g, p, devices=1, agent=AGENT, **more):
    return step_seconds(g, p, devices, GRPO, agent, **more)


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),  # as the models' own pages say, rounded there
    [
        ("Qwen3-0.6B", 0.6, 112), ("Qwen3-1.7B", 1.72, 112), ("Qwen3-4B", 4.02, 144),
        ("Qwen3-8B", 8.19, 144), ("Qwen2.5-3B-Instruct", 3.09, 36),
        ("Qwen2.5-7B-Instruct", 7.62, 56), ("Qwen2.5-14B-Instruct", 14.77, 192),
    ],
)  # fmt: skip
def test_sizes_of_known_models(name, billions, kv_kib):
    g = KNOWN[f"Qwen/{name}"]
    assert g.weights / 1e9 == pytest.approx(billions, rel=0.007) and g.kv_bytes == kv_kib * 1024


def test_sizes_are_those_of_the_model_that_is_loaded():
    from models.load import load_model, with_lora

    model = load_model(EMBEDDED, "float32", "cpu")
    g = geometry("")
    assert g == geometry(str(EMBEDDED))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == g.linear + g.embedding
    adapted = with_lora(model, GRPOConfig(lora_rank=4))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == g.adapter(4)


def test_a_model_that_answers_beside_vllm_takes_its_part_of_both_phases():
    """Adapters of 4 billion weights and another such model: a card of 24 GiB holds one of them."""
    beside = answerer_gib(FOUR)
    assert beside > 2 * FOUR.weights / 2**30
    alone, both = (plan(FOUR, "lora", 80, 1, GRPO, AGENT, taken) for taken in (0.0, beside))
    assert (both.sleep, both.turns, both.fits) == (alone.sleep, alone.turns, True)
    assert both.rollout - alone.rollout == pytest.approx(beside)
    assert both.update - alone.update == pytest.approx(beside)
    assert plan(FOUR, "qlora", 24, 1, GRPO, AGENT).fits
    assert not plan(FOUR, "qlora", 24, 1, GRPO, AGENT, beside).fits


def test_a_model_of_unknown_size_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(UserError, match=r"cannot be read \('num_attention_heads'\)"):
        geometry(str(tmp_path))


def test_the_usual_trainings_of_a_model_of_4_billion_weights_fit_the_usual_cards():
    lora = plan(FOUR, "lora", 80, 1, GRPO, AGENT)
    assert lora.fits and lora.sleep == "never" and lora.micro_tokens == 16384
    # the target of the LoRA update (bench/gpu.py)
    assert lora.weights + lora.gradients + lora.optimizer + lora.activations < 30
    full = plan(FOUR, "full", 141, 1, GRPO, AGENT)
    assert full.fits and full.sleep == "2" and 60 < full.update < 85
    assert not plan(FOUR, "full", 48, 1, GRPO, AGENT).fits
    assert plan(FOUR, "full", 80, 8, GRPO, AGENT).fits
    small = plan(FOUR, "qlora", 24, 1, GRPO, AGENT)
    assert small.fits and small.sleep == "1" and small.weights < 3


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_never_takes_more_than_the_card_and_grows_with_it(mode):
    for g in KNOWN.values():
        before = None
        for gpu_gib in (8, 16, 24, 40, 48, 80, 141, 288):
            p = plan(g, mode, gpu_gib, 1, GRPO, AGENT)
            if p.fits:
                assert max(p.rollout, p.update) <= gpu_gib
            if before:
                assert p.turns >= before.turns and p.micro_tokens >= before.micro_tokens
                assert p.fits >= before.fits
            before = p
        assert before.fits
        if mode != "qlora":  # whose weights are on every rank
            two = plan(g, mode, 288, 2, GRPO, AGENT)
            assert two.weights == pytest.approx(before.weights / 2)
            assert seconds(g, two, devices=2)[0] < seconds(g, before)[0]


def test_eight_bits_of_optimizer_and_the_rank_are_counted():
    usual, eight, wide = (
        plan(FOUR, "lora", 80, 1, replace(GRPO, **c), AGENT)
        for c in ({}, {"optimizer": "adamw8bit"}, {"lora_rank": 64})
    )
    assert eight.optimizer == pytest.approx(usual.optimizer / 4)
    assert wide.optimizer == pytest.approx(2 * usual.optimizer)
    with pytest.raises(UserError, match="one GPU"):
        plan(FOUR, "full", 80, 2, replace(GRPO, optimizer="adamw8bit"), AGENT)


def test_levels_of_sleep_follow_from_the_room():
    levels = [plan(FOUR, "lora", gpu_gib, 1, GRPO, AGENT).sleep for gpu_gib in SIZES_GIB]
    assert levels == ["1", "1", "never", "never"]
    # in full training the trainer sends all weights anyway
    full = {plan(FOUR, "full", gpu_gib, 1, GRPO, AGENT).sleep for gpu_gib in (80, 141, 288)}
    assert full == {"2"}


def test_the_shared_layout_takes_less_time():
    p = plan(FOUR, "lora", 80, 1, GRPO, AGENT)
    rollout_s, update_s = seconds(FOUR, p)
    paper_rollout_s, paper_update_s = seconds(FOUR, p, agent=AGENT.with_settings(layout="paper"))
    assert paper_update_s > 1.7 * update_s and paper_rollout_s > rollout_s


@pytest.mark.parametrize("wrong", [("half", 80, 1), ("lora", 0, 1), ("lora", 80, 0)])
def test_a_plan_of_nothing_is_refused(wrong):
    with pytest.raises(UserError):
        plan(Geometry(1, 8, 1, 1, 8, 8, 8, True), *wrong, GRPO, AGENT)


@pytest.mark.parametrize("wrong", [{"sections": 0}, {"card": "B300"}])
def test_seconds_of_nothing_are_refused(wrong):
    with pytest.raises(UserError):
        seconds(FOUR, plan(FOUR, "lora", 80, 1, GRPO, AGENT), **wrong)


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_holds_a_turn_and_the_longest_section_is_the_last_that_fits(mode):
    for gib in SIZES_GIB:
        longest = longest_section(FOUR, mode, gib, 1, GRPO, AGENT)
        fits = [
            plan(FOUR, mode, gib, 1, GRPO, AGENT.with_settings(chunk_tokens=n)).fits
            for n in (longest or 512, 2 * longest or 512)
        ]
        assert fits == [bool(longest), False] or longest == 32768
    assert longest > longest_section(FOUR, mode, SIZES_GIB[0], 1, GRPO, AGENT)
    # a turn of more tokens than --micro-tokens stands in a pass alone, if that has room
    long = AGENT.with_settings(chunk_tokens=20_000)
    alone = replace(GRPO, tasks_per_step=(1,), group_size=1)
    fitting = [gib for gib in range(8, 200) if plan(FOUR, mode, gib, 1, alone, long).fits]
    p = plan(FOUR, mode, fitting[0], 1, alone, long)
    assert p.micro_tokens == GRPO.micro_tokens < long.turn_tokens() < 1 << 15
    assert p.weights + p.gradients + p.optimizer + activations_gib(FOUR, 1 << 15, mode) < fitting[0]


def test_seconds_and_memory_are_those_of_the_same_card():
    """Seconds of an H100 beside the memory of a 4090 would be of no card at all."""
    assert CARDS.keys() == CARD_GIB.keys()
    assert tuple(CARD_GIB[card] for card in CARD_OF_SIZE) == SIZES_GIB
    assert card_of() == (80, "H100")
    assert card_of(None, "L4") == (24, "L4") and card_of(40, "A100") == (40, "A100")
    cards = {16: "RTX 4090", 24: "RTX 4090", 25: "L40S", 48: "L40S", 80: "H100", 141: "H200"}
    assert {gib: card_of(gib)[1] for gib in cards} == cards and card_of(200)[1] == "H200"
    with pytest.raises(UserError, match="Unknown card 'B300'"):
        card_of(24, "B300")


def docs_row(name):
    """Return a model's row: in each mode the smallest fitting size, and hours on its usual card."""
    g, cells = KNOWN[name], []
    for mode in MODES:
        fitting = []
        for gib in SIZES_GIB:
            p = plan(g, mode, gib, 1, GRPO, AGENT)
            if p.fits:
                hours = sum(seconds(g, p, card=card_of(gib)[1])) / 36  # for 100 steps
                fitting.append(f"{gib} GiB, {p.turns} turns, {hours:.1f} h")
        cells.append(fitting[0] if fitting else "more")
    return f"| {name.split('/')[1].removesuffix('-Instruct')} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", KNOWN)
def test_the_docs_have_the_planners_figures(name):
    page = Path(__file__).parents[2] / "docs/engines.md"
    assert docs_row(name) in page.read_text(encoding="utf-8").splitlines()
