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
ENDS = ("bos", "eos", "pad")


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder, as bfloat16 safetensors and tokenizer.

    The file's content is known (`Packaged.gguf_sha256`): a Llama with a byte-level tokenizer.
    UserError: it cannot be read or written.
    """
    # progress bars that cannot be switched off, and hints
    with contextlib.redirect_stderr(io.StringIO()), loading(f"The GGUF file {path}"):
        tokenizer = _tokenizer(path)
        _save(_weights(path), tokenizer, folder)
        tokenizer.save_pretrained(folder)


def _tokenizer(path: Path):
    """Return the tokenizer of a GGUF file, with the special tokens and words of its metadata."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{short}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for short, name in kinds.items()
    }
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    control = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in control if kind == SPECIAL]
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
        **special,
    )


def _weights(path: Path):
    """Load the model as transformers dequantises it."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="sdpa",
    )


def _save(model, tokenizer, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig

    config = model.config
    config.dtype = torch.bfloat16
    ends = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ENDS}
    for name, i in ends.items():
        setattr(config, name, i)
    with torch.device("meta"):
        plain = type(model)(config)  # the loaded one refuses: it takes itself for quantised
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(**ends)
    plain.save_pretrained(folder)
