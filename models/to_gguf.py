"""A model as a GGUF file, which llama.cpp and what is built upon it run.

Holds: `write_gguf`. Leaves out: reading it (models/convert.py), quantising it (llama.cpp).
Exercise it: `python cli.py export RUN --gguf`. Read next: models/convert.py.

The package gguf writes the format and knows the names of weights. What llama.cpp takes for granted
of an architecture (order of rows, plain positions, no biases) is seen to here, or refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers.models import BPE

from config.errors import UserError
from models.convert import pre_tokenizer
from models.load import load_model, stored_dtype
from tokens.codec import Codec

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of config.json -> what llama.cpp calls it."""
RULES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "default")
PROBE = "We've said: DON'T  go in 12345 x9!?\n\n  \tf(été_naïve)\r\n 日本's ...  "
"""A text that each of these rules cuts into other words."""


def write_gguf(folder: Path, name: str) -> None:
    """Write the model of a folder into it once more, as `model.gguf`, in the type it is stored in.

    Vectors become float32, as llama.cpp wants them. UserError: what would compute otherwise there.
    """
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    model = load_model(folder, stored_dtype(folder), "cpu")
    config, state = model.config, model.state_dict()
    _check(config, state)
    writer = GGUFWriter(folder / "model.gguf", ARCHITECTURES[config.model_type])
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, Codec.load(folder).tokenizer, config.vocab_size)
    for key, weight in _named(config, state):
        short = weight.dtype == torch.bfloat16 and weight.ndim > 1
        kind = GGMLQuantizationType.BF16 if short else GGMLQuantizationType.F32
        writer.add_tensor(key, quantize(weight.cpu().float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse(what: str) -> None:
    raise UserError(
        f"{what} is not written as GGUF; llama.cpp's convert_hf_to_gguf.py may know it."
    )


def _check(config, state: dict) -> None:
    """Refuse a model that llama.cpp or transformers would compute otherwise from its file."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        _refuse(f"A model of the type {kind} (known are {', '.join(ARCHITECTURES)})")
    special = {
        "stretched positions": config.rope_parameters.get("rope_type", "default") != "default",
        "a sliding window": getattr(config, "sliding_window", None) is not None,
        "biases": kind != "qwen2" and any(name.endswith(".bias") for name in state),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
    }
    for what in (what for what, is_so in special.items() if is_so):
        _refuse(f"A model of the type {kind} with {what}")


def _named(config, state: dict) -> Iterator[tuple]:
    """Yield names in the file and weights; the two rows that a position turns lie side by side."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    arch = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in state.items():
        if arch == "llama" and (n := heads.get(name.split(".")[-2])):
            weight = weight.unflatten(0, (n, 2, -1)).transpose(1, 2).reshape(weight.shape)
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            yield names.get_name(name, try_suffixes=(".weight", ".bias")), weight


def _add_tokenizer(writer, tokenizer, rows: int) -> None:
    """Write tokens, merges, special tokens and the chat template; rows: of the embeddings."""
    from gguf import SpecialVocab, TokenType

    tokens = [f"[PAD{i}]" for i in range(rows)]  # a row without a token
    types = [TokenType.UNUSED] * rows
    kinds = {False: TokenType.USER_DEFINED, True: TokenType.CONTROL}
    for token, i in tokenizer.get_vocab().items():
        added = tokenizer.added_tokens_decoder.get(i)
        tokens[i], types[i] = token, kinds[added.special] if added else TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_add_space_prefix(False)
    writer.add_tokenizer_pre(_rule(tokenizer.backend_tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        tokenizer.save_pretrained(folder)
        special = SpecialVocab(folder, load_merges=True, n_vocab=rows)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _rule(backend) -> str:
    """Return what llama.cpp calls the way in which a byte-level BPE cuts text into words."""
    normal, cut = backend.normalizer, backend.pre_tokenizer
    plain = isinstance(backend.model, BPE) and (not normal or normal.normalize_str(PROBE) == PROBE)
    words = cut.pre_tokenize_str(PROBE) if plain and cut else None
    for rule in RULES:
        if pre_tokenizer(rule).pre_tokenize_str(PROBE) == words:
            return rule
    _refuse(f"A tokenizer that is no byte-level BPE of a known rule ({', '.join(RULES)})")
