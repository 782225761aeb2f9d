"""A model of transformers out of safetensors: loaded, given adapters, trained, and plain again.

Nothing of a model's folder is unpickled, and none of its code runs without `trust_remote_code`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from config.errors import UserError, alone, loading
from config.machine import check_hub
from config.options import TrainConfig
from config.realmodels import base_of, check_model, is_adapter, named_folder
from models.dtypes import check_device, resolve_device
from models.packaged import ready
from models.policy import FOUR_BITS, stored_as, with_adapter
from tokens.attention import use_our_attention


@alone()
def load_model(
    path: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantise: bool = False,
    weights: bool = True,
):
    """Load a causal LM from safetensors onto a device; UserError where that fails.

    A folder of adapters is loaded with the base model that they name.

    quantise: load the linear layers except the lm_head in 4 bits, as NF4 with doubly quantised
    scales, computing in `dtype` (arXiv 2305.14314). Weights that are stored in 4 bits stay as they
    are, quantise or not. weights: False = rank 0 will send them; they are not read, and lie in
    uninitialised memory of the host, which is committed lazily.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if is_adapter(path):
        model = load_model(ready(base_of(path)), dtype, device, trust_remote_code, quantise)
        with torch.random.fork_rng(devices=[]):  # what is drawn is overwritten
            policy = with_lora(model, with_adapter(TrainConfig(), path))
        load_adapter(policy, path)
        return inner(policy.requires_grad_(False))
    how = {"trust_remote_code": trust_remote_code, "attn_implementation": "sdpa"}
    if not weights:
        return _load_without_weights(path, dtype, how)
    device = resolve_device(device)
    check_device(device)
    stored = stored_as(path) == FOUR_BITS
    if not (quantise or stored):
        model = from_safetensors(AutoModelForCausalLM, path, dtype, **how)
        with loading(f"The model {path}"):
            return model.to(device)
    import_bitsandbytes()
    from bitsandbytes.nn import Linear4bit

    if not stored:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    model = from_safetensors(AutoModelForCausalLM, path, dtype, device_map={"": device}, **how)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = getattr(torch, dtype)  # it may be stored with another one
            # In passes without gradient bitsandbytes would repack its weights and compute in
            # bfloat16: neither what is trained nor what can be saved.
            module.support_avx512bf16_for_cpu = False
    return model


def from_safetensors(kind, path: str | Path, dtype: str, unread: str | None = None, **settings):
    """Load a model by a class of transformers (`AutoModel`, ...); UserError where that fails.

    Weights that are missing or of another shape are refused: transformers would initialise them at
    random. unread: beginning of the names of those that nothing is computed with.
    """
    check_model(path)
    config_of(path, settings["trust_remote_code"])  # checked before anything is built
    with loading(f"The model {path}"):
        model, report = kind.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **settings,
        )
    wrong = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if wrong := sorted(key for key in wrong if not (unread and key.startswith(unread))):
        raise UserError(
            f"The weights of {path} do not fit its config.json: {wrong[0]} ({len(wrong)} in all) "
            f"is missing or of another shape."
        )
    return model


def _load_without_weights(path: str | Path, dtype: str, how: dict):
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = config_of(path, how["trust_remote_code"])
    # buffers, such as rotary frequencies, are computed by the model and never sent
    with loading(f"The model {path}"), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **how)
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, torch.nn.Parameter(torch.empty_like(p, device="cpu")))
    model.tie_weights()
    return model.eval()


def config_of(path: str | Path, trust_remote_code: bool = False):
    """Return a model's config by transformers; UserError: it cannot be read, or cannot be true."""
    from transformers import AutoConfig

    check_hub(path)
    with loading(f"The model {path}"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    _check_sizes(path, config)
    return config


LAYERS = 1000
"""Most layers of a model; the largest published ones have fewer than 200."""


def _check_sizes(path: str | Path, config) -> None:
    """Raise a UserError for a config that declares more layers, or weights, than there can be.

    transformers would build all of them before it looks into the weights' files. A weight takes
    a bit or more there, and a layer has one matrix of these sizes at least.
    """
    names = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size")
    sizes = (getattr(config.get_text_config(), name, 0) for name in names)
    layers, vocabulary, width, between = (n if isinstance(n, int) else 0 for n in sizes)
    weights = (vocabulary + layers * max(width, between)) * width
    held = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if layers > LAYERS or (held and weights > 8 * held):
        raise UserError(
            f"{path} does not hold what its config.json declares, {layers:,} layers and "
            f"{weights:,} weights or more: its .safetensors files have {held:,} bytes."
        )


def meta_model(path: str):
    """Build a model on the meta device, which has names and shapes alone, from its config."""
    from transformers import AutoModelForCausalLM

    config = config_of(path)
    with loading(f"The model {path}"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def stored_dtype(path: str | Path, trust_remote_code: bool = False) -> str:
    """Return the type of a model's stored weights, by its config: float32 or bfloat16, for which
    float16 counts too."""
    dtype = config_of(path, trust_remote_code).dtype
    return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"


def import_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, without its downloads, complaints and compiler.

    peft imports it anyway. On some CPUs it then fetches compiled code from the hub if the package
    `kernels` is installed, and warns if it is not; and what it decorates with `torch.compile` loads
    the compiler at once, 4.5 s of a processor, though nothing of it is ever called here.
    """
    if "bitsandbytes" in sys.modules:
        return
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    kernels, compile = sys.modules.get("kernels"), torch.compile
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it now fails
    torch.compile = lambda function=None, **_: function or (lambda function: function)
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("bitsandbytes")
    finally:
        torch.compile = compile
        del sys.modules["kernels"]
        if kernels:
            sys.modules["kernels"] = kernels


# ---------------------------------------------------------------- what can be computed


def longest_context(config) -> int:
    """Return the longest context of a model in tokens, by its config; 0 where it names none.

    A model of the type longrope has a rotary table up to original_max_position_embeddings tokens
    and another beyond, and transformers takes one for all tokens of a pass, by the largest of their
    positions: prompts that are packed or cached would change each other's. So only the first is
    used, which is the library's for every text that fits; vLLM chooses by its window, the same one.
    """
    window = getattr(config, "max_position_embeddings", 0)
    ropes = getattr(config, "rope_parameters", None) or {}  # of all layers, or by their type
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            shorter = min(window, rope["original_max_position_embeddings"])
            if shorter < window:
                _say_once(
                    f"The window of this {config.model_type} is {shorter:,} tokens, not "
                    f"{window:,}: its rotary table for longer texts (longrope) is not used."
                )
            return shorter
    return window


@functools.cache  # a line a model, however many engines
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


LOGITS = ("logits_scaling", "logit_scale", "final_logit_softcapping", "attn_logit_softcapping")
"""Settings by which models of transformers change their logits or scores."""


def check_architecture(model) -> None:
    """Raise a UserError for a model that neither our engine nor the trainer computes rightly.

    Its weights are not read: they may be on the meta device.
    """
    config, window, why = model.config, longest_context(model.config), ""
    layers = getattr(config, "layer_types", None) or ()
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    changes = [name for name in LOGITS if getattr(config, name, None) not in (None, 1.0)]
    body = getattr(model, "model", None)
    if {*layers} - {"full_attention"} or (not layers and slides and slides < window):
        why = "not every layer of it has full attention"
    elif not (window and hasattr(body, "layers") and hasattr(model, "lm_head")):
        why = "it has no .model.layers and .lm_head like Llama or Qwen"
    elif changes:
        why = f"its logits are not those of lm_head(model) ({changes[0]})"
    if why:
        raise UserError(
            f"The transformers engine cannot serve a {type(model).__name__}: {why}; give another "
            "--model."
        )
    use_our_attention(model)


# ---------------------------------------------------------------- adapters


class _Adapter(torch.nn.Linear):
    """One matrix of an adapter: a float32 weight that computes in the type of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def with_lora(model, config: TrainConfig):
    """Add LoRA adapters to the layers named by config.lora_targets; UserError where they do not fit
    or could not be exported: of the lm_head, of fused experts, of weights that two layers share.

    They learn in float32 and compute in the model's type. vLLM rounds them to that type too, and
    peft's way, widening every layer's input, took 1.36 times as long for Qwen3-4B's geometry on an
    H100 (bench/results/h100.json).
    """
    import_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets
    linear = (name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    linear = sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})

    def refusal(why: str) -> UserError:
        return UserError(f"lora_targets {targets!r} {why}: set lora_targets: {','.join(linear)}.")

    if "lm_head" in targets.split(","):
        raise refusal("name the lm_head, whose weights are the embedding's in many models")
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        task_type="CAUSAL_LM",
    )
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    torch.manual_seed(config.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experts and shared weights: refused below
            policy = get_peft_model(model, lora)
    except ValueError as error:
        raise refusal("do not fit this model") from error
    if fused := policy.base_model.targeted_parameter_names:
        raise refusal(f"reach the fused experts of this mixture ({fused[0]})")
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A"):
            if uses[id(module.base_layer.weight)] > 1:
                raise refusal(f"name {name}, which shares its weights with another layer")
            module.cast_input_dtype_enabled = False
        elif ".lora_A." in name or ".lora_B." in name:
            module.__class__ = _Adapter
    return policy


@torch.no_grad()
def load_adapter(policy, folder: str | Path) -> None:
    """Load the adapters in a folder into those of a peft model. UserError if they do not fit."""
    ours = {n.replace(".default", ""): p for n, p in policy.named_parameters() if ".lora_" in n}
    with loading(f"The adapters in {folder}"):
        weights = load_file(named_folder(folder) / "adapter_model.safetensors")
    # below an adapter peft keeps an embedding as it was
    given = {name: w.shape for name, w in weights.items() if ".base_layer." not in name}
    if wrong := given.items() ^ {name: p.shape for name, p in ours.items()}.items():
        raise UserError(f"The adapters in {folder} do not fit the model: {min(wrong)[0]}.")
    for name, p in ours.items():
        p.copy_(weights[name])


def inner(model):
    """Return the causal LM inside a peft wrapper, adapters included, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ---------------------------------------------------------------- and back to plain weights


@torch.no_grad()
def merge_adapters(model):
    """Build the plain model that a peft model computes, for `save_pretrained`.

    On the host in float32, 4-bit weights dequantised, adapters added. All arithmetic is in float32
    and nothing is merged in place: in 16 bits that would wear the base weights down.
    """
    lm = inner(model)
    config = copy.deepcopy(lm.config)
    config.dtype = torch.float32
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(lm)(config)
    weights = {name: value.cpu() for name, value in _plain_weights(lm)}
    saved = plain.state_dict()
    weights |= {name: b.detach().cpu() for name, b in lm.named_buffers() if name in saved}
    missing, unexpected = plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()  # after it a shared weight has one name
    unset = {*missing} & {name for name, _ in (*plain.named_parameters(), *plain.named_buffers())}
    if unexpected or unset:
        raise RuntimeError(f"An export does not fit the model: {min({*unexpected, *unset})}.")
    plain.generation_config = lm.generation_config
    return plain


def _plain_weights(lm) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the plain model that a peft model computes, by its names, in float32."""
    for name, module in lm.named_modules():
        if name.endswith(".base_layer") or ".lora_" in name:
            continue
        base = getattr(module, "base_layer", module)
        for key, value in base.named_parameters(recurse=False):
            if hasattr(value, "quant_state"):
                from bitsandbytes.functional import dequantize_4bit

                value = dequantize_4bit(value.data, value.quant_state)
            value = value.detach().float()
            if key == "weight" and base is not module:
                value = value + sum(
                    module.get_delta_weight(adapter).float() for adapter in module.active_adapters
                )
            yield f"{name}.{key}", value


def start_weights(model) -> dict[str, torch.Tensor]:
    """Return the weights that a training moves, as they are, by their names in `merge_adapters`.

    Beside adapters they are those of the base, which stay and are not copied.
    """
    if inner(model) is model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = inner(model).named_parameters()
    return {name.replace(".base_layer", ""): p for name, p in weights if ".base_layer." in name}


@torch.no_grad()
def share_kept(start: dict[str, torch.Tensor], model, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return which share of what a training has changed is left in a type: 1 = all of it.

    It is the projection of the rounded change on the change, over all weights of `start`.
    """
    left = whole = 0.0
    for name, before in start.items():
        after = model.get_parameter(name).float()
        change = after - before
        left += (change * (after.to(dtype) - before)).sum(dtype=torch.float64).item()
        whole += change.square().sum(dtype=torch.float64).item()
    return left / whole if whole else 1.0


def cast_parameters(model, dtype: torch.dtype = torch.bfloat16):
    """Cast parameters only, in place; rotary tables, which are buffers, stay in float32."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


@contextlib.contextmanager
def dequantised_folder(policy, dtype: str) -> Iterator[Path]:
    """Provide a temporary model folder with the dequantised weights of a 4-bit policy.

    vLLM would quantise them itself, and not to the same values.
    """
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        model = cast_parameters(merge_adapters(policy), getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
        # config and weights apart: the model's own save_pretrained writes on rank 0 alone
        model.config.save_pretrained(folder)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        save_file(weights, Path(folder, "model.safetensors"), {"format": "pt"})
        yield Path(folder)


# ---------------------------------------------------------------- training

SMALL = 50_000_000
"""Weights below which a second CPU thread gains nothing: waking it takes as long as its work."""


def settle_threads(model, processes: int = 1) -> None:
    """Choose the threads of a model on a CPU, unless OMP_NUM_THREADS is set: one for a small model,
    else this process's share of the cores.

    processes: that compute side by side on this machine. Two threads on a core that others use
    took six times as long as one (SmolLM2).
    """
    if model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    small = sum(p.numel() for p in model.parameters()) < SMALL
    torch.set_num_threads(1 if small else max(1, len(allowed) // processes))


def optimizer_of(parameters, config: TrainConfig) -> torch.optim.Optimizer:
    """Make AdamW, or for config.optimizer = adamw8bit that of bitsandbytes.

    Its two moments take one byte each instead of four.
    """
    settings = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        # Unfused, torch steps through shards one by one: 55 ms instead of 27 for 1.7 billion
        # weights on an H100. On a CPU None leaves the choice to torch.
        fused = all(p.device.type == "cuda" for p in parameters) or None
        return torch.optim.AdamW(parameters, **settings, fused=fused)
    import_bitsandbytes()
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(parameters, **settings)

    def raise_versions(optimizer, *_) -> None:
        # its kernels write through pointers, and what was made of a weight is kept by its version
        for group in optimizer.param_groups:
            torch.autograd.graph.increment_version(group["params"])

    optimizer.register_step_post_hook(raise_versions)
    return optimizer


def recompute(model, on: bool) -> None:
    """Switch activation checkpointing on or off, until the next eval().

    transformers checkpoints in training mode alone, which would switch dropout on as well, and the
    sampler's and trainer's log-probs would differ. So only the layers themselves are put into that
    mode, nothing inside them.
    """
    if on and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = on
