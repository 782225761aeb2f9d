"""Models loaded, adapted and merged: what is trained is what is computed, or it is refused."""

import json
import sys
from dataclasses import fields, replace
from importlib import import_module
from unittest import mock

import psutil
import pytest
import torch
from conftest import random_policy
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from commands import train
from commands.dryrun import dry_run, made_up
from config import options
from config.errors import UserError
from config.options import EvalConfig, GRPOConfig, RunConfig
from config.realmodels import base_of, is_adapter
from embedded import tiny
from engines.open import open_reader
from models.checkpoints import load_checkpoint
from models.load import (
    cast_parameters,
    dequantised_folder,
    import_bitsandbytes,
    inner,
    load_model,
    merge_adapters,
    optimizer_of,
    share_kept,
    start_weights,
    with_lora,
)
from models.policy import (
    Policy,
    adapt_training,
    divide_adapter,
    fingerprint,
    mode_of,
    stored_as,
)
from tokens.codec import Codec

STEP = dict(steps=1, tasks_per_step=(2,), group_size=4)
LORA = GRPOConfig(**STEP, lora_rank=4)
IDS = torch.arange(10, 40)[None]


@pytest.fixture
def folder(codec, tmp_path):
    path = tmp_path / "model"
    # bitsandbytes wants matrices of at least its block of 64 weights
    random_policy(codec, hidden_size=64, intermediate_size=128).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


def load(folder, **how):
    return load_model(folder, device="cpu", **how)


@torch.no_grad()
def logits(folder):
    """What a folder computes, or a model."""
    model = folder if isinstance(folder, torch.nn.Module) else load(folder)
    return inner(model)(IDS).logits


def perturb(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def run_config(folder, tmp_path, name="a"):
    usual = dict(lengths=(2,), device="cpu", save_every=2)
    return RunConfig(name=name, runs=str(tmp_path / "runs"), model=str(folder), **usual)


# ---------------------------------------------------------------- loaded, in 4 bits, and merged


@pytest.mark.parametrize("quantise", [False, True])
def test_a_merged_model_computes_what_was_trained(folder, tmp_path, quantise):
    model = with_lora(load(folder, quantise=quantise), LORA).eval()
    plain = logits(model)
    start = start_weights(model)
    before = {name: p.clone() for name, p in perturb(model).named_parameters()}
    merged = merge_adapters(model)
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    assert (logits(again) - logits(model)).abs().max() < 2e-5
    assert (logits(model) - plain).abs().max() > 1e-2
    assert all(p.dtype == torch.float32 for p in again.parameters())
    assert not hasattr(again.config, "quantization_config")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with dequantised_folder(model, "bfloat16") as half:  # which vLLM reads
        assert torch.equal(logits(half), logits(cast_parameters(again).float()))
    if not quantise:
        assert {*start} == {name for name, _ in merged.named_parameters() if "proj" in name}
        assert share_kept(start, merged, torch.float32) == pytest.approx(1)
        assert 0.9 < share_kept(start, merged) < 1


def test_a_small_change_is_rounded_away(folder):
    model = load(folder).to(torch.bfloat16).float()
    start = start_weights(model)
    assert share_kept(start, model) == 1
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-5)
    assert share_kept(start, model) < 0.1 and share_kept(start, model, torch.float32) > 0.9


def test_four_bits_are_four_bits(folder):
    model, whole = load(folder, quantise=True), load(folder)
    packed = {name: p for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    assert len(packed) == 7 * 2 and all(p.dtype == torch.uint8 for p in packed.values())
    n_weights = sum(whole.get_parameter(name).numel() for name in packed)
    assert sum(p.numel() for p in packed.values()) * 2 == n_weights
    apart = (logits(model) - logits(whole)).abs().mean()
    assert 0.005 < apart < 0.5 * logits(whole).std()  # rounded, and not broken


def test_a_step_in_8_bits_raises_the_versions_of_the_weights():
    """What was made of a weight is kept by its version (engines/hf.py)."""
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad, before = torch.ones(5000), weight._version
    optimizer_of([weight], GRPOConfig(optimizer="adamw8bit")).step()
    assert weight._version > before


@pytest.mark.parametrize("more", [dict(quantise=True, lora_rank=4), dict(optimizer="adamw8bit")])
def test_training_goes_on_after_a_stop_to_the_same_weights(tmp_path, more):
    folder = options.EMBEDDED
    settings = dict(steps=2, tasks_per_step=(2,), group_size=2, warmup=0, lr=1e-3)
    config = GRPOConfig(**settings, max_mismatch=1e-4, **more)

    def trained(name, steps=2, resume=False):
        run, less = run_config(folder, tmp_path, name), replace(config, steps=steps)
        return train.train(run, less, tiny.agent(), resume, reward=made_up)

    whole, _ = trained("whole"), trained("parts", steps=1)
    parts = trained("parts", resume=True)
    a, b, start = (load(path).state_dict() for path in (whole / "model", parts / "model", folder))
    assert all(torch.equal(a[name], b[name]) for name in start)
    assert any(not torch.equal(a[name], start[name]) for name in start)


def test_weights_stored_in_4_bits_are_trained_beside_or_refused(folder, tmp_path, codec):
    """The published -bnb-4bit models: their weights cannot be trained, adapters beside them can."""
    import_bitsandbytes()
    bits = dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16)
    how = dict(quantization_config=BitsAndBytesConfig(**bits), device_map={"": "cpu"})
    packed = tmp_path / "packed"
    AutoModelForCausalLM.from_pretrained(folder, **how).save_pretrained(packed)
    codec.tokenizer.save_pretrained(packed)
    assert stored_as(packed) == "4 bits" and stored_as(folder) == stored_as("no/where") == ""
    run = run_config(packed, tmp_path)
    for go in (train.train, dry_run):
        with pytest.raises(UserError, match="--lora-rank"):
            go(run, GRPOConfig(**STEP), tiny.agent())
    assert not (tmp_path / "runs").exists()
    config = replace(LORA, max_mismatch=1e-6)
    assert mode_of(adapt_training(config, run)) == "qlora"
    done = train.train(run, config, tiny.agent(), reward=made_up)
    # computed in float32, which is what was said, not what was stored
    assert (logits(done / "adapter") - logits(done / "model")).abs().max() < 2e-5
    assert not torch.equal(logits(done / "adapter"), logits(packed))


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize(
    "how",
    [{"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "gptq", "bits": 4}],
)
def test_weights_stored_in_another_way_are_refused_before_they_are_read(
    folder, tmp_path, how, lora_rank
):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=how["quant_method"]):
        train.train(run_config(folder, tmp_path), GRPOConfig(lora_rank=lora_rank), tiny.agent())


def test_buffers_that_are_saved_are_exported(folder):
    """As DeepSeek's corrections of its router's scores are, which no gradient reaches."""
    model = load(folder)
    kind = type(model)

    class WithBuffer(kind):
        def __init__(self, config):
            super().__init__(config)
            self.model.register_buffer("bias", torch.zeros(3))

    model.__class__ = WithBuffer
    model.model.register_buffer("bias", torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(merge_adapters(model).model.bias, model.model.bias)
    model.model.layers[0].mlp.gate = torch.nn.Linear(4, 4)  # of a layer put in after loading
    with pytest.raises(RuntimeError):
        merge_adapters(model)


def test_a_tokenizer_larger_than_the_model_is_refused_at_once(folder, tmp_path):
    larger = Codec.load(folder).tokenizer
    larger.add_tokens(["<|one|>", "<|two|>"])
    larger.save_pretrained(folder)
    (folder / "model.safetensors").unlink()  # nothing is computed, nothing read
    config = EvalConfig(model=str(folder), device="cpu")
    for go in (
        lambda: open_reader(config, [tiny.agent()]),
        lambda: open_reader(replace(config, engine="vllm"), [tiny.agent()]),
        lambda: train.train(run_config(folder, tmp_path), GRPOConfig(), tiny.agent()),
    ):
        with pytest.raises(UserError, match="tokens and embeddings of"):
            go()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_another_rank_sends_are_neither_read_nor_take_memory(codec, tmp_path, tied):
    large = random_policy(codec, hidden_size=1024, intermediate_size=4096, tie_word_embeddings=tied)
    large.config.save_pretrained(tmp_path)  # and no weights
    process = psutil.Process()
    before = process.memory_info().rss
    model = load_model(tmp_path, weights=False)
    assert process.memory_info().rss - before < sum(p.numel() * 4 for p in large.parameters()) / 4
    buffers = list(zip(model.buffers(), large.buffers(), strict=True))
    assert buffers and all(torch.equal(a, b) for a, b in buffers)
    model.load_state_dict(large.state_dict())
    assert len([*model.parameters()]) == len([*large.parameters()])
    assert torch.equal(logits(model), logits(large.eval()))


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("targets", "found"), [("q_proj,v_proj", 2), ("all-linear", 7), ("q_proj,lm_head", 0), ("q", 0)]
)
def test_adapters_are_added_to_the_target_layers(folder, targets, found):
    config = replace(LORA, lora_targets=targets)
    if not found:
        with pytest.raises(UserError, match="down_proj,gate_proj,k_proj"):
            with_lora(load(folder), config)
        return
    model = with_lora(load(folder), config)
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == found and (found == 7 or trained == {*targets.split(",")})


def test_adapters_on_fused_experts_are_refused_with_the_targets_that_work(codec, tmp_path):
    torch.manual_seed(0)
    mixture = tmp_path / "mixture"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(codec.tokenizer), hidden_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, num_experts=4,
        moe_intermediate_size=64, num_experts_per_tok=2, max_position_embeddings=4096,
        pad_token_id=0, eos_token_id=1, initializer_range=0.2,
    )).save_pretrained(mixture)  # fmt: skip
    codec.tokenizer.save_pretrained(mixture)
    run = run_config(mixture, tmp_path)
    for go in (train.train, dry_run):
        with pytest.raises(UserError, match="experts") as refused:
            go(run, LORA, tiny.agent())
    targets = str(refused.value).rstrip(".").rpartition(" ")[2]
    assert targets == "k_proj,o_proj,q_proj,v_proj"
    config = replace(LORA, lora_targets=targets)
    done = train.train(run, config, tiny.agent(), reward=made_up)
    adapted, merged = (logits(done / name) for name in ("adapter", "model"))
    assert (adapted - merged).abs().max() < 2e-5 and not torch.equal(logits(mixture), merged)


def test_a_checkpoint_of_adapters_holds_nothing_else(tmp_path):
    run = run_config(options.EMBEDDED, tmp_path)
    path = train.train(run, LORA, tiny.agent(), reward=made_up) / "checkpoints" / "step-1"
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [name for name in names if "param_groups" not in name]
    # a weight, two moments and a count of steps each
    assert len(tensors) == 4 * sum(name.startswith("weights.") for name in names)
    assert all(".lora_" in name for name in tensors)
    with pytest.raises(UserError, match="other names"):
        load_checkpoint(
            path, with_lora(load(options.EMBEDDED), replace(LORA, lora_targets="q_proj"))
        )


def test_adapters_are_a_model_with_their_base(folder, tmp_path):
    """As they were trained: not merged, and computed in the base's type."""
    base, adapters = folder, tmp_path / "adapter"
    policy = perturb(with_lora(load(base), LORA))
    policy.save_pretrained(adapters)
    drawn = torch.get_rng_state()
    alone = load(adapters)
    assert torch.equal(torch.get_rng_state(), drawn)  # a reader's program may have its own
    assert torch.equal(logits(alone), logits(policy))
    assert not torch.allclose(logits(alone), logits(base))
    assert not any(p.requires_grad for p in alone.parameters())
    assert is_adapter(adapters) and not is_adapter(base) and base_of(adapters) == str(base)
    run = RunConfig(model=str(adapters), device="cpu")  # training goes on from them
    beside, training, policy = train.resolved(run, GRPOConfig(), tiny.agent())
    assert (policy.model, policy.adapter) == (beside.model, beside.adapter)
    assert (policy.model, policy.adapter) == (str(base), str(adapters))
    assert training.lora_rank == 4
    assert torch.equal(logits(policy.load_trainable(training)), logits(alone))
    with pytest.raises(UserError, match="--adapter"):
        divide_adapter(replace(run, adapter=str(adapters)))
    # the tokenizer is the base's, and what answers has a fingerprint of both
    config = EvalConfig(model=str(adapters), device="cpu")
    policy = Policy.of_evaluation(config, [tiny.agent()])
    assert policy.codec().fingerprint == Codec.load(base).fingerprint
    before = fingerprint(str(adapters))
    (base / "generation_config.json").write_text("{}")
    assert fingerprint(str(adapters)) != before != fingerprint(str(base))
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError):
        load(adapters)


SAME = {  # settings of peft that change nothing of what adapters compute, or that are taken over
    "auto_mapping": {"base_model_class": "A", "parent_library": "b"}, "corda_config": {"a": 1},
    "ensure_weight_tying": True, "eva_config": {"a": 1}, "inference_mode": False,
    "loftq_config": {"a": 1}, "lora_alpha": 64, "lora_dropout": 0.5,
    "lora_ga_config": {"a": 1}, "megatron_core": "a.b", "peft_version": "0.9",
    "qalora_group_size": 8, "target_modules": ["v_proj", "q_proj"], "task_type": None,
}  # fmt: skip
OTHER = {
    "alora_invocation_tokens": [20, 21], "alpha_pattern": {"q_proj": 8}, "arrow_config": {"a": 1},
    "base_model_name_or_path": None, "bias": "all", "exclude_modules": ["v_proj"],
    "fan_in_fan_out": True, "init_lora_weights": "pissa_niter_4", "kasa_config": {"a": 1},
    "layer_replication": [[0, 1]], "layers_pattern": "layers", "layers_to_transform": 0,
    "lora_bias": True,
    "megatron_config": {"a": 1}, "modules_to_save": ["lm_head"], "monteclora_config": {"a": 1},
    "peft_type": "IA3", "r": 2, "rank_pattern": {"q_proj": 8}, "revision": "v1",
    "runtime_config": {"a": 1}, "target_parameters": ["q_proj.weight"],
    "trainable_token_indices": [20], "use_bdlora": {"a": 1}, "use_dora": True, "use_qalora": True,
    "use_rslora": True, "velora_config": {"a": 1}, "of_a_later_version": 1,
}  # fmt: skip
CHANGES = [*SAME.items(), *OTHER.items(), ("lora_alpha", 0), ("r", 0), ("target_modules", ".*proj")]
CHANGES += [("target_modules", ["q_proj"]), ("task_type", "SEQ_CLS"), ("r", 8)]
BEGUN = {True, False, "gaussian", "orthogonal", "eva", "mica"}  # with the base's own weights
CHANGES += [("init_lora_weights", x) for x in (*BEGUN, "pissa", "olora", "corda", "lora_ga")]


@pytest.fixture
def adapters(folder, tmp_path):
    """Adapters of rank 4 on two layers by peft, with weights that count."""
    how = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    perturb(get_peft_model(load(folder), how)).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_computed_as_peft_does_or_refused_whatever_they_set(folder, adapters):
    """Each setting in a config alone: all tensors of plain LoRA would fit, and another sum."""
    assert {field.name for field in fields(LoraConfig)} <= {*SAME, *OTHER}
    path = adapters / "adapter_config.json"
    saved, computed = json.loads(path.read_text()), []
    for name, value in CHANGES:
        path.write_text(json.dumps(saved | {name: value}))
        try:
            ours = load(adapters)
        except UserError:
            continue
        theirs = PeftModel.from_pretrained(load(folder), adapters).eval()
        assert torch.allclose(logits(ours), logits(theirs), atol=1e-5), name
        computed.append((name, value))
    expected = [*SAME.items(), *(("init_lora_weights", x) for x in BEGUN)]
    assert computed == [change for change in CHANGES if change in expected]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.b.lora_A"])
@pytest.mark.parametrize("rows", [None, 600])
def test_adapters_with_other_tensors_are_refused(folder, adapters, name, rows):
    """Layers that were trained whole, or that have more rows: peft would put them into the base."""
    tensors = load_file(adapters / "adapter_model.safetensors")
    whole = load(folder).state_dict().get(name, torch.zeros(4, 64))
    tensors[f"base_model.model.{name}"] = whole[:1].expand(rows, -1).clone() if rows else whole
    save_file(tensors, adapters / "adapter_model.safetensors")
    with pytest.raises(UserError):
        load(adapters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", ["embed_tokens,q_proj", "embed_tokens"])
def test_weights_that_two_layers_share_have_no_adapter(codec, folder, tmp_path, targets):
    """The export would add it to both. Where nothing is shared an embedding may have one."""
    config = replace(LORA, lora_targets=targets)
    model = perturb(with_lora(load(folder), config).eval())
    merge_adapters(model).save_pretrained(tmp_path / "merged")
    assert (logits(model) - logits(tmp_path / "merged")).abs().max() < 1e-3
    assert not torch.equal(logits(model), logits(folder))
    tied, adapters = tmp_path / "tied", tmp_path / "adapters"
    random_policy(codec, tie_word_embeddings=True).save_pretrained(tied)
    codec.tokenizer.save_pretrained(tied)
    how = LoraConfig(r=4, target_modules=targets.split(","), task_type="CAUSAL_LM")
    get_peft_model(load(tied), how).save_pretrained(adapters)
    for go in (
        lambda: load(adapters),
        lambda: dry_run(run_config(tied, tmp_path), config, tiny.agent()),
        lambda: train.train(run_config(tied, tmp_path), config, tiny.agent()),
    ):
        with pytest.raises(UserError, match="embed_tokens"):
            go()
    assert not (tmp_path / "runs").exists()


def test_adapters_fetch_no_compiled_code(tmp_path, monkeypatch):
    """bitsandbytes, which peft imports, fetches kernels from the hub where `kernels` is installed;
    here both packages are stand-ins."""
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "bitsandbytes.py").write_text("import kernels\n")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in ("bitsandbytes", "kernels"):
            sys.modules.pop(name, None)
        import_bitsandbytes()
        assert "bitsandbytes" not in sys.modules and import_module("kernels")
