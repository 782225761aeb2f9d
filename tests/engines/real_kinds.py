"""Every causal LM of transformers that can be made tiny: `make test-real` runs this.

Each is computed by the engine and the trainer as by its own forward pass, or refused in a sentence.
"""

import inspect
import random

import pytest
import torch
from conftest import obvious_logprobs, worst_mismatch
from test_hf import check, of_ids
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

from config.errors import UserError
from engines.hf import TransformersEngine
from models.load import merge_adapters
from models.loads import passes
from models.logprobs import Row, policy_logprobs
from rollout import Sampling

ROWS = 320
SIZES = {  # by the names that configurations have for them
    32: "hidden_size d_model n_embd", 2: "num_hidden_layers num_layers n_layer decoder_layers "
    "encoder_layers num_key_value_heads num_experts_per_tok moe_topk", 8: "head_dim d_kv "
    "qk_nope_head_dim qk_rope_head_dim state_size mamba_d_state linear_key_head_dim "
    "linear_value_head_dim", 4: "num_attention_heads n_head num_heads attention_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts mamba_n_heads linear_num_value_heads", 12: "v_head_dim", 1: "n_group "
    "topk_group n_shared_experts first_k_dense_replace eos_token_id", 48: "intermediate_size d_ff "
    "ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner", 16: "kv_lora_rank q_lora_rank "
    "moe_intermediate_size shared_expert_intermediate_size", 256: "max_position_embeddings "
    "n_positions max_seq_len", ROWS: "vocab_size", 0.2: "initializer_range", 0: "pad_token_id",
}  # fmt: skip
LATENT = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"}  # as many keys as queries
FULL = {"cohere2", "exaone4", "gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash", "qwen3_5_text",
        "qwen3_next"}  # fmt: skip
LARGE = 30_000_000  # weights of one that its settings do not make small, such as by a vision tower


def build(kind):
    """Make a tiny model; skip what cannot be made by these settings."""
    cls = CONFIG_MAPPING[kind]
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    if kind in LATENT:
        sizes["num_key_value_heads"] = 4
    if kind in FULL:
        sizes["layer_types"] = ["full_attention"] * 2
    try:
        known = {*inspect.signature(cls.__init__).parameters, *cls().to_dict()}
        config = cls(**{name: size for name, size in sizes.items() if name in known})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) < LARGE
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    except Exception as error:
        pytest.skip(f"it cannot be made tiny: {error}")
    for p in (p for p in model.parameters() if p.ndim > 1 and p.is_floating_point()):
        p.data.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_of_model_is_computed_as_by_itself_or_refused(kind, codec):
    model = build(kind)
    try:
        engine = TransformersEngine(model, codec)
    except UserError as error:
        return print(error)
    head = [random.Random(0).randrange(20, 280) for _ in range(100)]
    turns = check(engine, [(of_ids(ids, 5), Sampling()) for ids in (head, head[:40], head[:20])])
    assert worst_mismatch(model, turns) < 1e-5
    rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in turns]
    gradients = []
    for batch in passes(rows, 1 << 14, 1):
        logp = policy_logprobs(model, batch, 1.0)
        sampled = torch.tensor([x for i in batch.index for x in rows[i].sampler])
        assert (logp - sampled).abs().max() < 1e-5
        logp.sum().backward()
    gradients.append(gradient_of(model))
    for turn in turns:
        obvious_logprobs(model, turn).sum().backward()
    gradients.append(gradient_of(model))
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()
    merge_adapters(model)  # an export has all of its weights


def gradient_of(model):
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return gradient
