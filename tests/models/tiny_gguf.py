"""Write a random two-layer model with a byte-level tokenizer as a GGUF file, quantised or not."""

import json
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
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 16


def vocabulary() -> tuple[list[str], list[str]]:
    """The tokens and merges of a tokenizer trained on `TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def stored(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """A model's weights by their names in a GGUF file, queries and keys in llama.cpp's order: pairs
    of a rotation side by side."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    weights = {}
    for name, weight in model.named_parameters():
        name = names.get_name(name, (".weight",))
        if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2]):
            pairs = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
            weight = pairs.reshape(weight.shape)
        weights[name] = weight.detach()
    return weights


def write_gguf(path: Path, kind: str = "F32") -> LlamaForCausalLM:
    """Write a GGUF file and return its model before quantisation.

    kind: F32, Q8_0 or Q4_1, of the matrices.
    """
    tokens, merges = vocabulary()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH,
        intermediate_size=96, max_position_embeddings=2048, rope_theta=1e4, rms_norm_eps=1e-5,
        initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_token_scores([0.0] * len(tokens))
    for name, weight in stored(model).items():
        quantisation = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        values = gguf.quantize(weight.numpy(), quantisation)
        writer.add_tensor(name, values, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a weight in a file, as bfloat16."""
    quantisation = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
    packed = gguf.quantize(weight.detach().numpy(), quantisation)
    return torch.from_numpy(gguf.dequantize(packed, quantisation).copy()).to(torch.bfloat16)
