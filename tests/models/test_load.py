import json
from dataclasses import replace

import pytest
import torch
from conftest import random_policy, worst_mismatch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from commands import train
from commands.dryrun import dry_run, made_up
from config import options
from config.errors import UserError
from config.options import EvalConfig, GRPOConfig, RunConfig, SFTConfig
from config.realmodels import base_of, is_adapter
from embedded import tiny
from engines.hf import TransformersEngine
from engines.open import fingerprint, open_reader
from models.checkpoints import load_checkpoint
from models.load import (
    check_export,
    import_bitsandbytes,
    inner,
    load_model,
    merge_adapters,
    optimizer_of,
    with_lora,
)
from models.policy import Policy, adapt_training, divide_adapter, mode_of, stored_as
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

LORA = GRPOConfig(lora_rank=4)
IDS = torch.arange(10, 40)[None]


@pytest.fixture
def folder(codec, tmp_path):
    path = tmp_path / "model"
    # bitsandbytes wants matrices of at least its block of 64 weights
    random_policy(codec, hidden_size=64, intermediate_size=128).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


def perturb(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.3 * torch.randn_like(p))


@pytest.mark.parametrize("quantise", [False, True])
def test_a_merged_model_computes_what_was_trained(folder, tmp_path, quantise):
    model = with_lora(load_model(folder, device="cpu", quantise=quantise), LORA).eval()
    plain = inner(model)(IDS).logits
    perturb(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    merge_adapters(model).save_pretrained(tmp_path / "merged")
    again = load_model(tmp_path / "merged", device="cpu")
    with torch.no_grad():
        expected = inner(model)(IDS).logits
        assert (again(IDS).logits - expected).abs().max() < 2e-5
        assert (expected - plain).abs().max() > 1e-2
    assert all(p.dtype == torch.float32 for p in again.parameters())
    assert not hasattr(again.config, "quantization_config")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_four_bits_are_four_bits(folder):
    model = load_model(folder, device="cpu", quantise=True)
    whole = load_model(folder, device="cpu")
    packed = {name: p for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    assert len(packed) == 7 * 2 and all(p.dtype == torch.uint8 for p in packed.values())
    n_weights = sum(whole.get_parameter(name).numel() for name in packed)
    assert sum(p.numel() for p in packed.values()) * 2 == n_weights
    with torch.no_grad():
        apart = (model(IDS).logits - whole(IDS).logits).abs().mean()
    assert 0.005 < apart < 0.5 * whole(IDS).logits.std()  # rounded, and not broken


def test_qlora_samples_and_trains_the_same_weights(folder, codec):
    model = with_lora(load_model(folder, device="cpu", quantise=True), LORA)
    perturb(model)
    engine = TransformersEngine(inner(model), codec)
    jobs = [(task, 0) for task in worlds.make_tasks(0, 3, 2, "one_fact")]
    done = list(rollout(engine, tiny.agent(), jobs, Sampling()))
    assert worst_mismatch(inner(model), [turn for t in done for turn in t.turns]) < 1e-5


def run_config(folder, tmp_path, name):
    usual = dict(lengths=(2,), device="cpu", save_every=2)
    return RunConfig(name=name, runs=str(tmp_path / "runs"), model=str(folder), **usual)


def test_a_step_in_8_bits_raises_the_versions_of_the_weights():
    """What was made of a weight is kept by its version (engines/hf.py)."""
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad, before = torch.ones(5000), weight._version
    optimizer_of([weight], GRPOConfig(optimizer="adamw8bit")).step()
    assert weight._version > before


@pytest.mark.parametrize("more", [dict(quantise=True, lora_rank=4), dict(optimizer="adamw8bit")])
def test_training_goes_on_after_a_stop_to_the_same_weights(tmp_path, more):
    folder = options.EMBEDDED  # what it answers is right now and then
    settings = dict(steps=2, tasks_per_step=(3,), group_size=8, warmup=0, lr=1e-3)
    config = GRPOConfig(**settings, max_mismatch=1e-4, **more)
    whole = train.train(run_config(folder, tmp_path, "whole"), config, tiny.agent())
    train.train(run_config(folder, tmp_path, "parts"), replace(config, steps=1), tiny.agent())
    parts = train.train(run_config(folder, tmp_path, "parts"), config, tiny.agent(), resume=True)
    a, b = (load_model(run / "model", device="cpu") for run in (whole, parts))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    start = load_model(folder, device="cpu")
    pairs = zip(a.parameters(), start.parameters(), strict=True)
    assert any(not torch.equal(p, q) for p, q in pairs)


def test_adapters_are_added_to_the_target_layers(folder):
    def adapt_training(targets):
        config = replace(LORA, lora_targets=targets)
        model = with_lora(load_model(folder, device="cpu"), config)
        return {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}

    assert adapt_training("q_proj,v_proj") == {"q_proj", "v_proj"}
    assert len(adapt_training(LORA.lora_targets)) == 7
    with pytest.raises(UserError, match="cannot name the lm_head"):
        adapt_training("q_proj,lm_head")
    with pytest.raises(UserError, match="its linear layers are down_proj"):
        adapt_training("wq")


def stored(folder, out, **bits):
    """Store a model quantised by bitsandbytes, with half precision to compute in."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import_bitsandbytes()
    how = BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map={"": "cpu"}
    )
    model.save_pretrained(out)
    Codec.load(folder).tokenizer.save_pretrained(out)
    return out


def test_weights_stored_in_4_bits_are_trained_beside_or_refused(folder, tmp_path):
    """The published -bnb-4bit models: their weights cannot be trained, adapters beside them can."""
    packed = stored(folder, tmp_path / "packed", load_in_4bit=True, bnb_4bit_quant_type="fp4")
    assert stored_as(packed) == "4 bits" and stored_as(folder) == stored_as("no/where") == ""
    settings = dict(steps=1, tasks_per_step=(2,), group_size=4, max_mismatch=1e-6)
    run = run_config(packed, tmp_path, "a")
    for go in (train.train, dry_run):
        with pytest.raises(UserError, match=r"stored quantised \(4 bits\)"):
            go(run, GRPOConfig(**settings), tiny.agent())
    assert not (tmp_path / "runs").exists()
    config = GRPOConfig(**settings, lora_rank=4)
    assert mode_of(adapt_training(config, run)) == "qlora"
    done = train.train(run, config, tiny.agent(), reward=made_up)
    one = load_model(done / "adapter", device="cpu")
    assert not hasattr(load_model(done / "model", device="cpu").config, "quantization_config")
    with torch.no_grad():  # computed in float32, which is what was said, not what was stored
        apart = (one(IDS).logits - load_model(done / "model", device="cpu")(IDS).logits).abs()
        moved = (one(IDS).logits - load_model(packed, device="cpu")(IDS).logits).abs()
    assert apart.max() < 2e-5 and moved.max() > 0


@pytest.mark.parametrize(
    "how",
    [{"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "gptq", "bits": 4}],
)
def test_weights_stored_in_another_way_are_refused_before_they_are_read(folder, tmp_path, how):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))
    (folder / "model.safetensors").unlink()
    for config in (GRPOConfig(), GRPOConfig(lora_rank=4)):
        with pytest.raises(UserError, match=rf"stored quantised \({how['quant_method']}\)"):
            train.train(run_config(folder, tmp_path, "a"), config, tiny.agent())


MIXTURE = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
    max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture
def mixture(codec, tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path / "mixture"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(codec.tokenizer), **MIXTURE)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


def test_adapters_on_fused_experts_are_refused_with_the_targets_that_work(mixture, tmp_path):
    run = run_config(mixture, tmp_path, "a")
    settings = dict(steps=1, tasks_per_step=(2,), group_size=4, lora_rank=4)
    for go in (train.train, dry_run):
        with pytest.raises(UserError, match=r"experts .* give --lora-targets") as refused:
            go(run, GRPOConfig(**settings), tiny.agent())
    targets = str(refused.value).rstrip(".").rpartition(" ")[2]
    assert targets == "k_proj,o_proj,q_proj,v_proj"
    config = GRPOConfig(**settings, lora_targets=targets)
    done = train.train(run, config, tiny.agent(), reward=made_up)
    adapted, merged = (load_model(done / name, device="cpu") for name in ("adapter", "model"))
    with torch.no_grad():
        assert (adapted(IDS).logits - merged(IDS).logits).abs().max() < 2e-5
        assert (load_model(mixture, device="cpu")(IDS).logits - merged(IDS).logits).abs().max() > 0


def test_that_an_export_can_be_built_is_proven_before_the_first_step(folder, tmp_path, monkeypatch):
    """Of names and shapes: whatever the model is, no training ends without a policy."""
    model = load_model(folder, device="cpu")
    check_export(model)
    check_export(with_lora(load_model(folder, device="cpu", quantise=True), LORA))
    # a weight that the class does not make, as of a layer that was put in after loading
    whole = Policy.load_trainable

    def with_more(*args):
        policy = whole(*args)
        policy.model.layers[0].mlp.gate = torch.nn.Linear(4, 4)
        return policy

    monkeypatch.setattr(Policy, "load_trainable", with_more)
    config = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=4)
    with pytest.raises(UserError, match=r"could not be exported: .*mlp.gate"):
        train.train(run_config(folder, tmp_path, "a"), config, tiny.agent())
    assert not (tmp_path / "runs").exists()


def test_buffers_that_are_saved_are_exported(folder):
    """As DeepSeek's corrections of its router's scores are, which no gradient reaches."""
    model = load_model(folder, device="cpu")
    kind = type(model)

    class WithBuffer(kind):
        def __init__(self, config):
            super().__init__(config)
            self.model.register_buffer("bias", torch.zeros(3))

    model.__class__ = WithBuffer
    model.model.register_buffer("bias", torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(merge_adapters(model).model.bias, model.model.bias)
    check_export(model)


def test_a_tokenizer_larger_than_the_model_is_refused_at_once(folder, codec, tmp_path):
    rows = len(codec.tokenizer)
    larger = Codec.load(folder).tokenizer
    larger.add_tokens(["<|one|>", "<|two|>"])
    larger.save_pretrained(folder)
    (folder / "model.safetensors").unlink()  # nothing is computed, nothing read
    said = f"{rows + 2:,} tokens and embeddings of {rows:,}"
    config = EvalConfig(model=str(folder), device="cpu")
    with pytest.raises(UserError, match=said):
        open_reader(config, [tiny.agent()])
    with pytest.raises(UserError, match=said):
        open_reader(replace(config, engine="vllm"), [tiny.agent()])
    for kind in (GRPOConfig, SFTConfig):
        with pytest.raises(UserError, match=said):
            train.train(run_config(folder, tmp_path, "a"), kind(), tiny.agent())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_another_rank_sends_are_neither_read_nor_take_memory(codec, tmp_path, tied):
    import psutil

    large = random_policy(codec, hidden_size=1024, intermediate_size=4096, tie_word_embeddings=tied)
    large.config.save_pretrained(tmp_path)  # and no weights
    n_bytes = sum(p.numel() * 4 for p in large.parameters())
    process = psutil.Process()
    before = process.memory_info().rss
    model = load_model(tmp_path, device="unset")
    assert process.memory_info().rss - before < n_bytes / 4
    ours, theirs = ({n: p.shape for n, p in m.named_parameters()} for m in (model, large))
    assert ours == theirs
    buffers = list(zip(model.buffers(), large.buffers(), strict=True))
    assert buffers and all(torch.equal(a, b) for a, b in buffers)
    model.load_state_dict(large.state_dict())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, large.eval()(IDS).logits)


def test_a_checkpoint_of_adapters_holds_nothing_else(tmp_path):
    config = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=4, lora_rank=4)
    run, other = (run_config(options.EMBEDDED, tmp_path, name) for name in "ab")
    folder = train.train(run, config, tiny.agent(), reward=made_up)
    path = folder / "checkpoints" / "step-1"
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [name for name in names if "param_groups" not in name]
    # a weight, two moments and a count of steps each
    assert len(tensors) == 4 * sum(name.startswith("weights.") for name in names)
    assert all(".lora_" in name for name in tensors)
    module = train.build(other, replace(config, lora_targets="q_proj"), tiny.agent())
    with pytest.raises(UserError, match="other names"):
        load_checkpoint(path, module.model)


def test_adapters_are_a_model_with_their_base(codec, tmp_path):
    """As they were trained: not merged, and computed in the base's type."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    random_policy(codec).save_pretrained(base), codec.tokenizer.save_pretrained(base)
    policy = with_lora(load_model(base, device="cpu"), GRPOConfig(lora_rank=4))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn_like(p))
    policy.save_pretrained(folder)
    ids = torch.tensor([codec.encode("Anna joined Boris.")])
    drawn = torch.get_rng_state()
    alone = load_model(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), drawn)  # a reader's program may have its own
    assert torch.equal(alone(ids).logits, policy(ids).logits)
    assert not torch.allclose(alone(ids).logits, load_model(base, device="cpu")(ids).logits)
    assert not any(p.requires_grad for p in alone.parameters())
    assert is_adapter(folder) and not is_adapter(base) and base_of(folder) == str(base)
    run = RunConfig(model=str(folder), device="cpu")  # training goes on from them
    beside, training, policy = train.resolved(run, GRPOConfig(), tiny.agent())
    assert (policy.model, policy.adapter) == (beside.model, beside.adapter)
    assert (policy.model, policy.adapter) == (str(base), str(folder))
    assert training.lora_rank == 4
    with pytest.raises(UserError, match="not as both"):
        divide_adapter(replace(run, adapter=str(folder)))
    # the tokenizer is the base's, and what answers has a fingerprint of both
    config = EvalConfig(model=str(folder), device="cpu")
    policy = Policy.of_evaluation(config, [tiny.agent()])
    assert policy.codec().fingerprint == Codec.load(base).fingerprint
    before = fingerprint(str(folder))
    (base / "generation_config.json").write_text("{}")
    assert fingerprint(str(folder)) != before != fingerprint(str(base))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no LoRA adapters"):
        load_model(folder, device="cpu")


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


def plain_adapters(base, folder):
    """Write adapters of rank 4 on two layers by peft, with weights that count."""
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(load_model(base, device="cpu"), how)
    perturb(policy)
    policy.save_pretrained(folder)


def test_adapters_are_computed_as_peft_does_or_refused_whatever_they_set(folder, tmp_path):
    """Each setting in a config alone: all tensors of plain LoRA would fit, and another sum."""
    from dataclasses import fields

    from peft import LoraConfig, PeftModel

    assert {field.name for field in fields(LoraConfig)} <= {*SAME, *OTHER}
    adapters = tmp_path / "adapters"
    plain_adapters(folder, adapters)
    path = adapters / "adapter_config.json"
    saved, computed = json.loads(path.read_text()), []
    for name, value in CHANGES:
        path.write_text(json.dumps(saved | {name: value}))
        try:
            ours = load_model(adapters, device="cpu")
        except UserError:
            continue
        theirs = PeftModel.from_pretrained(load_model(folder, device="cpu"), adapters).eval()
        with torch.no_grad():
            assert torch.allclose(ours(IDS).logits, theirs(IDS).logits, atol=1e-5), name
        computed.append((name, value))
    expected = [*SAME.items(), *(("init_lora_weights", x) for x in BEGUN)]
    assert computed == [change for change in CHANGES if change in expected]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.b.lora_A"])
@pytest.mark.parametrize("rows", [None, 600])
def test_adapters_with_other_tensors_are_refused(folder, tmp_path, name, rows):
    """Layers that were trained whole, or that have more rows: peft would put them into the base."""
    adapters = tmp_path / "adapters"
    plain_adapters(folder, adapters)
    tensors = load_file(adapters / "adapter_model.safetensors")
    whole = load_model(folder, device="cpu").state_dict().get(name, torch.zeros(4, 64))
    tensors[f"base_model.model.{name}"] = whole[:1].expand(rows, -1).clone() if rows else whole
    save_file(tensors, adapters / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"do not fit|cannot be loaded"):
        load_model(adapters, device="cpu")


@pytest.mark.parametrize("targets", ["embed_tokens,q_proj", "embed_tokens"])
def test_weights_that_two_layers_share_have_no_adapter(codec, folder, tmp_path, targets):
    """The export would add it to both. Where nothing is shared an embedding may have one."""
    from peft import LoraConfig, get_peft_model

    tied, adapters = tmp_path / "tied", tmp_path / "adapters"
    random_policy(codec, tie_word_embeddings=True).save_pretrained(tied)
    codec.tokenizer.save_pretrained(tied)
    config = replace(LORA, lora_targets=targets)
    model = with_lora(load_model(folder, device="cpu"), config).eval()
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.copy_(torch.randn_like(p))
        merge_adapters(model).save_pretrained(tmp_path / "merged")
        merged = load_model(tmp_path / "merged", device="cpu")(IDS).logits
        assert (inner(model)(IDS).logits - merged).abs().max() < 1e-3
    how = LoraConfig(r=4, target_modules=targets.split(","), task_type="CAUSAL_LM")
    get_peft_model(load_model(tied, device="cpu"), how).save_pretrained(adapters)
    run = run_config(tied, tmp_path, "a")
    for go in (
        lambda: with_lora(load_model(tied, device="cpu"), config),
        lambda: load_model(adapters, device="cpu"),
        lambda: dry_run(run, config, tiny.agent()),
        lambda: train.train(run, config, tiny.agent()),
    ):
        with pytest.raises(UserError, match="cannot name embed_tokens"):
            go()
    assert not (tmp_path / "runs").exists()
