"""What is done for a GPU, as far as a CPU can show it; bench/results/h100.json is from one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_policy
from safetensors.torch import load_file
from test_train import GRPO, run_config

from commands import export, train
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from embedded import tiny
from engines.hf import TransformersEngine
from models import ranks
from models.load import inner, load_model, optimizer_of, stored_dtype, with_lora
from models.logprobs import logits_of
from models.plan import KNOWN, activations_gib
from report.metrics import PeakMemory, on_gpu

ROOT = Path(__file__).parent.parent
MEASURED = json.loads((ROOT / "bench" / "results" / "h100.json").read_text())


def half(codec, **other):
    return random_policy(codec, **other).to(torch.bfloat16)


# ---- logits in float32


def test_logits_are_not_rounded_and_gradients_are_those_of_a_linear_layer(codec):
    model = half(codec)
    hidden = torch.randn(7, 32).bfloat16().requires_grad_()
    logits = logits_of(model, hidden)
    exact = hidden.detach().double() @ model.lm_head.weight.detach().double().t()
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 1e-5
    assert (model.lm_head(hidden).float() - exact).abs().max() > 1e-3  # what is not done
    weight = torch.randn(logits.shape)
    (logits * weight).sum().backward()
    mine = hidden.grad.clone(), model.lm_head.weight.grad.clone()
    hidden.grad = model.lm_head.weight.grad = None
    (model.lm_head(hidden) * weight.bfloat16()).sum().backward()
    for a, b in zip(mine, (hidden.grad, model.lm_head.weight.grad), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


# ---- adapters


def test_adapters_learn_in_float32_and_compute_in_the_models_type(codec):
    policy = with_lora(half(codec), GRPOConfig(lora_rank=4))
    seen = []
    for name, module in policy.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            module.register_forward_hook(lambda m, x, y: seen.append((x[0].dtype, y.dtype)))
    trained = [p for p in policy.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.add_(0.05 * torch.randn_like(p))
    ids = torch.randint(2, 400, (1, 9))
    logits = inner(policy)(input_ids=ids).logits
    logits.sum().backward()
    assert len(seen) == 2 * 7 * 2 and {x for pair in seen for x in pair} == {torch.bfloat16}
    assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.any() for p in trained)
    # as vLLM computes: with rounded adapters
    rounded = with_lora(half(codec), GRPOConfig(lora_rank=4))
    for p, q in zip((p for p in rounded.parameters() if p.requires_grad), trained, strict=True):
        p.data = q.data.bfloat16()
    assert torch.equal(inner(rounded)(input_ids=ids).logits, logits)


def test_adapters_of_a_float32_model_count_twice_their_product(codec):
    plain = inner(with_lora(random_policy(codec), GRPOConfig(lora_rank=4)))
    layer = plain.model.layers[0].mlp.up_proj
    a, b, x = layer.lora_A["default"].weight, layer.lora_B["default"].weight, torch.randn(5, 32)
    torch.nn.init.normal_(b)
    assert torch.allclose(layer(x), layer.base_layer(x) + 2 * x @ a.t() @ b.t(), atol=1e-5)


# ---- optimizer, ranks, memory


def test_adamw_is_fused_on_a_gpu_alone(monkeypatch):
    used = {}
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **settings: used.update(settings))
    for device, fused in (("cuda", True), ("cpu", None)):
        optimizer_of([SimpleNamespace(device=torch.device(device))], GRPOConfig())
        assert used["fused"] is fused


def test_weights_are_rounded_before_they_are_gathered():
    shard = SimpleNamespace(detach=lambda: shard, to=lambda dtype: SimpleNamespace(
        full_tensor=lambda: ("gathered in", dtype)))  # fmt: skip
    assert ranks.full_tensor(shard, torch.bfloat16) == ("gathered in", torch.bfloat16)
    plain = torch.nn.Parameter(torch.ones(2))
    assert ranks.full_tensor(plain).dtype == torch.float32
    assert ranks.full_tensor(plain, torch.bfloat16).dtype == torch.bfloat16


def test_no_group_of_ranks_is_bound_to_a_device(monkeypatch):
    used = {}

    def init_process_group(backend, **settings):
        used.update(settings, backend=backend)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update(device=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with ranks.process_group(True):
        pass
    assert used["device"] == 3 and used["backend"] == "cpu:gloo,cuda:nccl"
    assert "device_id" not in used


def test_peak_memory_is_what_was_in_use_and_not_what_sleeps(monkeypatch):
    free, gpu, memory = iter([60, 20, 35, 50, 50, 45]), torch.device("cuda"), PeakMemory()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free) * 2**30, 80 * 2**30))
    memory.look(torch.device("cpu"))  # not asked
    for _ in range(3):
        memory.look(gpu)
    assert memory.gib(gpu) == 60
    memory.look(gpu)
    assert memory.gib(gpu) == 30  # anew
    assert on_gpu(SimpleNamespace(device=torch.device("cpu")), 1, 1, memory) == {}


def test_vllm_on_the_cpu_of_a_machine_with_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = RunConfig(engine="vllm", device="cpu", runs=str(tmp_path))
    with pytest.raises(UserError, match="leave --device"):
        train.resolved(run, GRPOConfig(), tiny.agent())
    train.resolved(replace(run, engine="transformers"), GRPOConfig(), tiny.agent())
    train.resolved(run, GRPOConfig(), tiny.agent(), here=False)  # a plan for another machine


# ---- exports


def test_an_export_has_the_bases_type_and_is_made_after_the_engine_is_closed(tmp_path, monkeypatch):
    folder = tmp_path / "base"
    codec = tiny.make_tokenizer()
    random_policy(SimpleNamespace(tokenizer=codec)).to(torch.bfloat16).save_pretrained(folder)
    codec.save_pretrained(folder)
    assert stored_dtype(folder) == "bfloat16" and stored_dtype(EMBEDDED) == "float32"
    events, write = [], export.export
    monkeypatch.setattr(TransformersEngine, "close", lambda self: events.append("closed"))
    monkeypatch.setattr(train, "export", lambda *a, **k: events.append("export") or write(*a, **k))
    run = run_config(folder, tmp_path, "a", dtype="float32")
    out = train.train(run, replace(GRPO, steps=1), tiny.agent())
    assert events == ["closed", "export"]

    def dtypes(model):
        return {p.dtype for p in load_file(model / "model.safetensors").values()}

    assert dtypes(out / "model") == {torch.bfloat16}
    export.export(out, out=tmp_path / "wide", dtype="float32")
    assert dtypes(tmp_path / "wide") == {torch.float32}
    assert load_model(tmp_path / "wide", device="cpu").dtype == torch.float32


# ---- what was measured


def test_the_plan_holds_what_an_update_took_on_an_h100():
    """Adapters in bfloat16 over Qwen3-4B, and all weights of Qwen3-1.7B.

    Rows of 16,384 tokens, layers recomputed.
    """
    four, small, gib = KNOWN["Qwen/Qwen3-4B"], KNOWN["Qwen/Qwen3-1.7B"], 2**30
    update = MEASURED["update_lora_qwen3_4b"]["bfloat16_adapters"]["paper"]
    lora = update["peak_gib"] - 2 * four.weights / gib
    assert lora < activations_gib(four, 16384, "lora") < 1.5 * lora
    updates = next(
        part["updates"]
        for part in MEASURED["update_full_qwen3_1_7b_fsdp2"]
        if part.get("optimizer") == "fused"
    )
    full = max(u["peak_gib"] for u in updates) - 16 * small.weights / gib
    assert full < activations_gib(small, 16384, "full") < 1.5 * full


def test_the_bar_lets_every_right_step_of_a_real_model_pass():
    """SmolLM2 in bfloat16 on an H100 with vLLM: LoRA and full, 21 steps.

    With logits in float32 the distance is two thirds of that without.
    """
    from grpo import GRPO as Module

    parts = MEASURED["smollm2_made_up_rewards"]
    bar = SimpleNamespace(
        config=GRPOConfig(),
        model=torch.nn.Linear(1, 1).bfloat16(),
        sharding="none",
        done_steps=0,
    )
    bar.model.dtype = torch.bfloat16
    for step in (step for part in parts.values() for step in part):
        assert step["mismatch_mean"] > 0.03  # the bar of .02 on the mean would have stopped each
        Module.check_mismatch(bar, step["mismatch_kl"])
    with pytest.raises(UserError, match="does not sample from the trained weights"):
        Module.check_mismatch(bar, 0.02)
    with pytest.raises(UserError, match="does not sample"):
        Module.check_mismatch(bar, math.nan)
    mean = {name: sum(s["mismatch_kl"] for s in part) / len(part) for name, part in parts.items()}
    assert mean["full_float32_lm_head_on_both_sides"] < 0.7 * mean["full"]
