"""The GGUF file of the packaged SmolLM2 as a model folder: bfloat16 weights and tokenizer.

transformers reads the weights of the file rightly and the rest only in part. Mended here: the
end-of-sequence token (the end that it sets is the beginning), the padding token, control tokens
that it leaves to be cut into pieces, and the rule by which text is cut into words.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from config.errors import loading

SPECIAL = 3  # of tokenizer.ggml.token_type
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' and GGUF's


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder, as bfloat16 safetensors and tokenizer.

    The file's content is known (`Packaged.gguf_sha256`): a Llama with a byte-level tokenizer.
    UserError: it cannot be read or written.
    """
    # progress bars that cannot be switched off, and hints
    with contextlib.redirect_stderr(io.StringIO()), loading(f"The GGUF file {path}"):
        tokenizer = _read_tokenizer(path)
        tokenizer.save_pretrained(folder)
        ends = (f"{end}_token_id" for end in ("bos", "eos", "pad"))
        _save_weights(path, {name: getattr(tokenizer, name) for name in ends}, folder)


def _read_tokenizer(path: Path):
    """Return the tokenizer of a GGUF file, with the special tokens and words of its metadata."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind == SPECIAL]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        **{
            f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
            for ours, theirs in NAMES.items()
        },
    )


def _save_weights(path: Path, ends: dict[str, int], folder: Path) -> None:
    """Save the model as transformers dequantises it; ends: the ids that begin, end and pad."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="sdpa",
    )
    # each part by itself: as a whole it takes itself for quantised, and refuses
    weights = {name: p.detach() for name, p in model.named_parameters()}  # shared ones once
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.update(ends | {"dtype": torch.bfloat16, "architectures": [type(model).__name__]})
    config.save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
