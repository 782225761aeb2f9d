"""Write a random two-layer model with a byte-level tokenizer as a GGUF file, quantised or not."""

from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = "The bridge was opened in 1936, and rebuilt twice. It is 2,737 m long; nobody's car crossed."
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> tuple[list[str], list[str]]:
    """The tokens and merges of a tokenizer trained on `TEXT`."""
    import json

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


SIZES = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=2048,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    tie_word_embeddings=True,
)


def tiny_llama(seed: int = 0, vocab_size: int = 300) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SIZES))


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key matrix in llama.cpp's order: pairs of a rotation side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def stored(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """A model's weights by their names in a GGUF file; some are permuted there."""
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    state, weights = model.model.state_dict(), {}
    weights["token_embd.weight"] = state["embed_tokens.weight"]
    weights["output_norm.weight"] = state["norm.weight"]
    for layer in range(model.config.num_hidden_layers):
        for name, short in NAMES.items():
            weight = state[f"layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = permuted(weight, heads[short == "attn_k"])
            weights[f"blk.{layer}.{short}.weight"] = weight
    return weights


def write_gguf(path: Path, kind: str = "F32") -> LlamaForCausalLM:
    """Write a GGUF file and return its model before quantisation.

    kind: F32, Q8_0 or Q4_1, of the matrices.
    """
    tokens, merges = vocabulary()
    model = tiny_llama(vocab_size=len(tokens))
    config = model.config
    metadata = {
        "general.name": "Tiny",
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 1e4,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }
    writer = gguf.GGUFWriter(path, "llama")
    adds = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
    }
    for key, value in metadata.items():
        adds[type(value)](key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_token_scores([0.0] * len(tokens))
    quantisation = getattr(gguf.GGMLQuantizationType, kind)
    for name, weight in stored(model).items():
        values = weight.detach().float().numpy()
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a weight in a file, as bfloat16."""
    if weight.ndim > 1 and kind != "F32":
        quantisation = getattr(gguf.GGMLQuantizationType, kind)
        packed = gguf.quantize(weight.detach().float().numpy(), quantisation)
        weight = torch.from_numpy(gguf.dequantize(packed, quantisation).copy())
    return weight.detach().to(torch.bfloat16)
