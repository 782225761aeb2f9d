"""A GGUF file as a model folder: bfloat16 weights and tokenizer, mended and checked.

Holds: `read_header`, `config_of`, `pre_tokenizer`, `convert`. Leaves out: where the file comes from
and where the folder lies (models/packaged.py), writing such files (models/to_gguf.py). No torch
until something is converted.
Exercise it: `pytest tests/models/test_convert.py`. Read next: models/packaged.py.

transformers reads the weights of a GGUF file rightly and the rest only in part. Mended here: the
end-of-sequence and padding tokens (the end that it sets is the beginning), control tokens that it
leaves to be cut into pieces, the rule by which text is cut into words, blanks that decoding would
drop, and the entry in config.json that says the weights are still quantised. What it would leave
out without a word (weights, stretched positions) is refused.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError, clip, first_line, loading
from config.realmodels import split_file

VALUES = 1 << 21
"""Most values that a file may declare; Llama 4's 202,048 tokens and 439,802 merges take 1.5 million
(a text counts twice, by its length too)."""
SPECIAL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SAMPLE = (
    "The bridge was opened in 1936, and rebuilt twice.\n\nIt is 2,737 m long; nobody's car has "
    "crossed it since  May 12."
)
"""What a converted model is compared on with the file it came from."""
TOLERANCE = 1e-3
"""Most that a log-prob may differ: weights, type and kernels are the same, so 0 is expected and
one rounding of a bfloat16 weight shows; a kernel may still choose its order by the alignment."""

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": (_CASED + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_CASED + r"\p{N}" + _REST,),
    "default": (
        r"[\p{P}$+<=>^~|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9]{3}",
    ),
}
"""How text is cut into words before it becomes tokens, by tokenizer.ggml.pre: by the first pattern,
the pieces by the next, and so on. `default` is what llama.cpp does where a file names no rule."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of its model."""

    fields: dict  # its metadata
    elements: dict[str, int]  # tensor -> number of weights

    @property
    def architecture(self) -> str:
        return self.fields["general.architecture"]

    def get(self, key: str, default=None):
        """Return a value by its name behind the architecture's, such as `block_count`."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def token(self, kind: str) -> str | None:
        """Return the special token of a kind (eos, bos, padding, ...), None if none is named."""
        tokens, i = self.tokens, self.fields.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[i] if i is not None and 0 <= i < len(tokens) else None

    @property
    def tokens(self) -> list[str]:
        return self.fields.get("tokenizer.ggml.tokens", [])

    def tokens_of_type(self, number: int) -> list[str]:
        types = self.fields.get("tokenizer.ggml.token_type", [])
        return [token for token, kind in zip(self.tokens, types, strict=False) if kind == number]


def read_header(path: Path) -> Header:
    """Read a GGUF file's metadata and the table of its tensors; UserError if it holds none."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"The model {path} cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise UserError(f"{path} is no GGUF file: it does not begin with the letters GGUF.")
    try:
        import numpy as np
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise UserError(
            "GGUF files need the package gguf: pip install -r requirements.txt."
        ) from error

    class Bounded(GGUFReader):
        """A reader that ends where the file does, or has more values than any vocabulary: the
        library would go on with empty values as often as a count says."""

        values = 0

        def _get(self, offset: int, dtype, count: int = 1, override_order=None):
            self.values += 1
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it declares more than it holds")
            if self.values > VALUES:
                raise ValueError(f"it has more than {VALUES:,} values")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int):
            if raw_type == GGUFValueType.ARRAY:
                kind, count = self._get(orig_offs, "<u4")[0], self._get(orig_offs + 4, "<u8")[0]
                if kind == GGUFValueType.ARRAY or count > VALUES:
                    raise ValueError(f"arrays in arrays, or of more than {VALUES:,} values")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        reader = Bounded(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        elements = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        layers = fields.get(f"{fields['general.architecture'].lower()}.block_count", 0)
        if not layers <= len(elements):
            raise ValueError(f"{layers:,} layers of {len(elements):,} tensors")
    except Exception as error:  # of numpy or the reader's own, by where the file is damaged
        reason = clip(first_line(error), 200) or type(error).__name__
        raise UserError(
            f"{path} is a damaged or cut-off GGUF file: get it anew ({reason})."
        ) from error
    if fields.get("split.count", 1) > 1:
        raise split_file(path, fields.get("split.no", 0) + 1, fields["split.count"])
    return Header(fields, elements)


# ---------------------------------------------------------------- conversion


def config_of(path: Path):
    """Return transformers' config of a GGUF file's model; UserError as of `convert`."""
    header = read_header(path)
    with _by_itself(path) as alone:
        return _config_of(path, header, alone)


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder, as bfloat16 safetensors and tokenizer.

    The written model is loaded again and must compute the log-probs of transformers' own loading
    of the file (`TOLERANCE`); the tokenizer must give every text of `SAMPLE` back, the chat
    template must render, and a response must be able to end.
    UserError: no or a damaged GGUF file, one that transformers does not read, or reads in part.
    """
    header = read_header(path)
    with _by_itself(path) as alone, _quiet():
        _config_of(path, header, alone)
        with loading(f"The tokenizer of {path}"):
            tokenizer = _tokenizer(path, header, alone)
            ends = _end_ids(path, header, tokenizer)
        with loading(f"The GGUF file {path}"):
            model = _weights(path, header, alone, len(tokenizer))
        pad = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
        expected = _logprobs(model, tokenizer)
        with loading(f"The GGUF file {path}"):
            _save(model, tokenizer, ends, pad, folder)
        del model  # one copy at a time
        _check(path, folder, tokenizer, ends, expected)


@contextlib.contextmanager
def _by_itself(path: Path) -> Iterator[Path]:
    """Provide a folder with a link to the file: transformers would read what lies beside it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        Path(folder, "model.gguf").symlink_to(path.absolute())
        yield Path(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mute progress bars that cannot be switched off, and hints on standard error."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _config_of(path: Path, header: Header, alone: Path):
    """Return transformers' config of the model.

    UserError: an architecture that it cannot read from GGUF, or positions it would not stretch.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES as KNOWN

    with loading(f"The GGUF file {path}"):
        try:
            config = AutoConfig.from_pretrained(alone, gguf_file="model.gguf")
        except ValueError as error:
            if "not supported" not in str(error):
                raise
            raise UserError(
                f"{path} holds a model of the architecture {header.architecture}, which "
                f"transformers {transformers.__version__} cannot read from GGUF; it reads "
                f"{', '.join(sorted(KNOWN))}."
            ) from error
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = header.get("rope.scaling.type", "none")
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        raise UserError(
            f"{path} stretches its positions ({scaling}), which transformers does not read from "
            "GGUF: take the model's safetensors."
        )
    return config


def _tokenizer(path: Path, header: Header, alone: Path):
    """Return the tokenizer of a GGUF file, with the special tokens and words of its metadata."""
    from tokenizers import AddedToken, decoders
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    special = {
        "bos_token": header.token("bos"),
        "eos_token": header.token("eos"),
        "unk_token": header.token("unknown"),
        "pad_token": header.token("padding"),
    }
    special = {name: token for name, token in special.items() if token is not None}
    # none is left out: transformers would add tokens of its own, which the model has no weights for
    some = next(iter(special.values()), None) or header.tokens[0]
    needed = {"bos_token": some, "eos_token": some} | special
    backend = AutoTokenizer.from_pretrained(
        alone, gguf_file="model.gguf", **needed
    ).backend_tokenizer
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in header.tokens_of_type(SPECIAL)]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t in header.tokens_of_type(USER_DEFINED)]
    )
    if header.fields.get("tokenizer.ggml.model") == "gpt2":
        rule = header.fields.get("tokenizer.ggml.pre", "default")
        if (cut := pre_tokenizer(rule)) is None:
            known = ", ".join(sorted((*_AS_GPT2, *_DIGITS_APART, *_PATTERNS)))
            raise UserError(
                f"{path} cuts text into words by the rule {rule!r}, which is not known here; known "
                f"are {known}."
            )
        backend.pre_tokenizer = cut
        if header.fields.get("tokenizer.ggml.add_space_prefix", True):
            backend.decoder = decoders.ByteLevel()  # theirs would drop a blank at the beginning
    special.setdefault("pad_token", special.get("eos_token", some))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=header.get("context_length", 1 << 30),
        **special,
    )


def pre_tokenizer(rule: str):
    """Return how a byte-level tokenizer cuts text into words, None for a rule not known here."""
    from tokenizers import Regex, pre_tokenizers

    if rule in _PATTERNS:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[rule]]
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, plain])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return level if rule in _AS_GPT2 else None


def _end_ids(path: Path, header: Header, tokenizer) -> list[int]:
    """Return the ids that end a response, the chat template's first, and set the tokenizer's.

    The metadata name one; what the template puts behind an assistant's message is the other.
    """
    from jinja2 import TemplateError

    from tokens.chat_templates import rendered

    ends = [header.token("eos"), header.token("eot")]
    if tokenizer.chat_template:
        mark = "MEMAGENT-ANSWER"
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        try:
            tail = rendered(tokenizer, messages).rpartition(mark)[2]
        except TemplateError as error:
            raise UserError(f"The chat template of {path} cannot be rendered: {error}.") from error
        control = {*header.tokens_of_type(SPECIAL), *header.tokens_of_type(USER_DEFINED)}
        ids = tokenizer.encode(tail, add_special_tokens=False)
        behind = [t for t in tokenizer.convert_ids_to_tokens(ids) if t in control]
        ends = [*behind[:1], *ends]
    names = list(dict.fromkeys(filter(None, ends)))
    if not names:
        raise UserError(f"{path} names no end-of-sequence token: no response would end.")
    tokenizer.eos_token = names[0]
    return tokenizer.convert_tokens_to_ids(names)


def _weights(path: Path, header: Header, alone: Path, vocabulary: int):
    """Load the model as transformers dequantises it; refuse one of which it leaves weights out."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        alone,
        gguf_file="model.gguf",
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    held = {t.data_ptr(): t.numel() for t in model.state_dict().values()}  # tied weights once
    in_file, in_model = sum(header.elements.values()), sum(held.values())
    if report["missing_keys"] or in_file != in_model:
        ropes = [name for name in header.elements if name.startswith("rope_")]
        lost = f", {ropes[0]} among them" if ropes else ""
        raise UserError(
            f"{path} holds {in_file:,} weights and transformers makes a model of {in_model:,} of "
            f"it: some would be left out{lost}. Take the model's safetensors."
        )
    if vocabulary > (rows := model.get_input_embeddings().weight.shape[0]):
        raise UserError(f"{path} has {vocabulary:,} tokens and embeddings of {rows:,}.")
    return model.eval()


def _logprobs(model, tokenizer):
    """Return the log-probs [T-1] of `SAMPLE`, each of a token given those before it."""
    import torch

    ids = torch.tensor([tokenizer.encode(SAMPLE, add_special_tokens=False)])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


def _save(model, tokenizer, ends: list[int], pad: int, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig

    config = model.config
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        part.eos_token_id = ends if len(ends) > 1 else ends[0]
        part.pad_token_id, part.bos_token_id = pad, tokenizer.bos_token_id
        part.dtype = torch.bfloat16
    with torch.device("meta"):
        plain = type(model)(config)  # the loaded one refuses: it takes itself for quantised
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=pad, bos_token_id=tokenizer.bos_token_id
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check(path: Path, folder: Path, tokenizer, ends: list[int], expected) -> None:
    """Compare the written folder with what was read from the file; UserError at a difference."""
    from models.load import load_model
    from tokens.codec import Codec

    codec = Codec.load(folder, local=True)  # renders the chat template
    ids = codec.tokenizer.encode(SAMPLE, add_special_tokens=False)
    if ids != tokenizer.encode(SAMPLE, add_special_tokens=False):
        raise UserError(f"The converted tokenizer of {path} gives other tokens than the file's.")
    if str(codec.decode(codec.encode(SAMPLE))) != SAMPLE:
        raise UserError(f"The converted tokenizer of {path} does not give a text back.")
    if not {*ends} <= codec.eos_ids:
        raise UserError(f"The converted tokenizer of {path} does not know where a response ends.")
    again = load_model(folder, "bfloat16", "cpu").eval()
    apart = float((_logprobs(again, tokenizer) - expected).abs().max())
    if not apart <= TOLERANCE:  # NaN is refused too
        raise UserError(
            f"The converted model of {path} computes something else than the file's: log-probs "
            f"are {apart:.2g} apart."
        )
