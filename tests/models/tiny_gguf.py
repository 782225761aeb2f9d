"""Write a random two-layer model with a byte-level tokenizer as a GGUF file, quantised or not."""

from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

TEXT = "The bridge was opened in 1936, and rebuilt twice. It is 2,737 m long; nobody's car crossed."
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
END = "<|endoftext|>"  # what Qwen's files have instead of the first: transformers adds it if absent
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
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
CONFIGS = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_llama(seed: int = 0, vocab_size: int = 300) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SIZES))


def tiny_model(kind: str) -> PreTrainedModel:
    """A model of another family, its biases and norms as random as its matrices.

    Qwen3's heads are as large as they are in all published sizes: GGUF files of it are read so.
    """
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(vocabulary()[0]), "head_dim": 128 if kind == "qwen3" else 16}
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**sizes))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key matrix in llama.cpp's order: pairs of a rotation side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def stored(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's weights by their names in a GGUF file; Llama's and Mistral's are permuted there."""
    pairs = model.config.model_type in ("llama", "mistral")
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    state, weights = model.model.state_dict(), {}
    weights["token_embd.weight"] = state["embed_tokens.weight"]
    weights["output_norm.weight"] = state["norm.weight"]
    for layer in range(model.config.num_hidden_layers):
        for name, short in NAMES.items():
            for part in ("weight", "bias"):
                weight = state.get(f"layers.{layer}.{name}.{part}")
                if weight is None:
                    continue
                if pairs and short in ("attn_q", "attn_k"):
                    weight = permuted(weight, heads[short == "attn_k"])
                weights[f"blk.{layer}.{short}.{part}"] = weight
    return weights


def write_gguf(
    path: Path,
    kind: str = "F32",
    model: PreTrainedModel | None = None,
    more: dict | None = None,
    tensors: dict | None = None,
    without: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Write a GGUF file and return its model before quantisation.

    kind: F32, F16, Q8_0 or Q4_1, of the matrices. more: strings and numbers of the metadata, which
    go before the usual ones; `without` names some to leave out. tensors: further weights.
    """
    tokens, merges = vocabulary()
    model = model or tiny_llama(vocab_size=len(tokens))
    config, arch = model.config, (more or {}).get("general.architecture", "llama")
    usual = {
        "general.name": "Tiny",
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": 1e4,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (usual | (more or {})).items():
        if key in without or key == "general.architecture":
            continue
        adds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        adds[type(value)](key, value)
    user_defined = (more or {}).get("test.user_defined", "")
    if arch.startswith("qwen"):
        tokens[0] = END
    types = [3 if t in (*SPECIAL, END) else 4 if t == user_defined else 1 for t in tokens]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_token_scores([0.0] * len(tokens))
    quantisation = getattr(gguf.GGMLQuantizationType, kind)
    for name, weight in (stored(model) | (tensors or {})).items():
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
