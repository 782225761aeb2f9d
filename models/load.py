"""Models: loading, 4-bit weights, adapters, optimizers, and the weights that an export writes."""

from __future__ import annotations

import contextlib
import copy
import ctypes
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from config.errors import UserError, alone, first_line, loading
from config.machine import check_hub
from config.options import TrainConfig
from config.realmodels import base_of, check_model, is_adapter, named_folder
from models.dtypes import check_device
from models.policy import FOUR_BITS, stored_as, with_adapter
from tokens.attention import use_our_attention


@alone()
def load_model(
    path: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantise: bool = False,
    base: str | Path = "",
):
    """Load a causal LM from safetensors onto a device; UserError where that fails.

    A folder of adapters is loaded with their base model: base, or the one that they name.

    device: cpu, cuda, mps, auto, or "unset": the model is built in uninitialised host memory, which
    is committed lazily, and no weights are read. That is for ranks whose weights rank 0 will send.
    quantise: load the linear layers except the lm_head in 4 bits, as NF4 with doubly quantised
    scales, computing in `dtype` (arXiv 2305.14314). Weights that are stored in 4 bits stay as they
    are, quantise or not.
    """
    from transformers import AutoModelForCausalLM

    if is_adapter(path):
        named = base or base_of(path)
        model = load_model(named, dtype, device, trust_remote_code, quantise)
        with torch.random.fork_rng(devices=[]):  # what is drawn is overwritten
            policy = with_lora(model, with_adapter(TrainConfig(), path))
        load_adapter(policy, path)
        return inner(policy.requires_grad_(False))
    if device == "unset":
        return _uninitialised_model(path, dtype, trust_remote_code)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    check_device(device)
    stored = stored_as(path) == FOUR_BITS
    quantisation = _four_bits(dtype, device, stored) if quantise or stored else {}
    model = from_safetensors(
        AutoModelForCausalLM,
        path,
        dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation="sdpa",
        **quantisation,
    )
    with loading(f"The model {path}"):
        model = model if quantisation else model.to(device)
    for module in model.modules():
        if quantisation and hasattr(module, "compute_dtype"):  # stored with another one
            module.compute_dtype = getattr(torch, dtype)
        # In passes without gradient bitsandbytes would repack its weights and compute in bfloat16:
        # neither what is trained nor what can be saved.
        if hasattr(module, "support_avx512bf16_for_cpu"):
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
        try:
            model, report = kind.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **settings,
            )
        except SafetensorError as error:
            raise UserError(
                f"The weights of {path} are no valid safetensors file: {error}."
            ) from error
    wrong = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if wrong := sorted(key for key in wrong if not (unread and key.startswith(unread))):
        raise UserError(
            f"The weights of {path} do not fit its config.json: {wrong[0]} ({len(wrong)} in all) "
            f"is missing or of another shape."
        )
    return model


def _uninitialised_model(path: str | Path, dtype: str, trust_remote_code: bool):
    """Build a model in uninitialised host memory, with its buffers, from its config alone."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = config_of(path, trust_remote_code)
    with loading(f"The model {path}"), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
        )
    # buffers, such as rotary frequencies, are computed by the model and never sent
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model.to_empty(device="cpu").tie_weights()
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
    return model.eval()


def meta_model(path: str, download: bool = True):
    """Build a model on the meta device, which has names and shapes alone, from its config.

    path: a folder, or a name on the hub.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if download:
        check_hub(path)
    config = AutoConfig.from_pretrained(
        path, local_files_only=not download, trust_remote_code=False
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_checked(path, config))


def _four_bits(dtype: str, device: str, stored: bool) -> dict:
    """Return the arguments of `from_pretrained` for 4-bit weights; stored: they are so already."""
    from transformers import BitsAndBytesConfig

    import_bitsandbytes()
    if stored:
        return {"device_map": {"": device}}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )
    return {"quantization_config": config, "device_map": {"": device}}


def config_of(path: str | Path, trust_remote_code: bool = False):
    """Return a model's config by transformers; UserError: it cannot be read, or cannot be true."""
    from transformers import AutoConfig

    check_hub(path)
    with loading(f"The model {path}"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return _checked(path, config)


LAYERS = 1000
"""Most layers of a model; the largest published ones have fewer than 200."""


def _checked(path: str | Path, config):
    """Return a model's config. UserError: it declares more layers, or weights, than there can be.

    transformers would build all of them before it looks into the weights' files. A weight takes
    a bit or more there, and a layer has one matrix of these sizes at least.
    """
    text = config.get_text_config()
    names = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size")
    sizes = [getattr(text, name, 0) for name in names]
    layers, vocabulary, width, between = (n if isinstance(n, int) else 0 for n in sizes)
    weights = (vocabulary + layers * max(width, between)) * width
    held = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if layers > LAYERS or (held and weights > 8 * held):
        raise UserError(
            f"{path} does not hold what its config.json declares, {layers:,} layers and "
            f"{weights:,} weights or more: its .safetensors files, which are damaged or another "
            f"model's, have {held:,} bytes."
        )
    return config


def longest_context(config) -> int:
    """Return the longest context of a model in tokens, by its config; 0 where it names none.

    A model of the type longrope has a rotary table up to original_max_position_embeddings tokens
    and another beyond, and transformers takes one for all tokens of a pass, by the largest of their
    positions: prompts that are packed or cached would change each other's. So only the first is
    used, which is the library's for every text that fits; vLLM chooses by its window, the same one.
    """
    window = getattr(config, "max_position_embeddings", 0)
    tables = (rope for rope in _ropes(config) if rope.get("rope_type") == "longrope")
    shorter = min((rope["original_max_position_embeddings"] for rope in tables), default=window)
    if shorter < window:
        _say_window(config.model_type, shorter, window)
    return min(shorter, window)


def window_for_vllm(config) -> int:
    """Return `longest_context`; UserError where vLLM's rotary table is not transformers'.

    Of the type dynamic transformers stretches positions beyond the window alone, vLLM all of them.
    """
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        raise UserError(
            "vLLM stretches the positions of this model otherwise than transformers (rope_type "
            "dynamic): give --engine transformers."
        )
    return longest_context(config)


def _ropes(config) -> list[dict]:
    """List the settings of a model's rotary tables: one for all layers, or one a type of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]


@functools.cache
def _say_window(kind: str, window: int, longest: int) -> None:
    print(
        f"The window of this {kind} is {window:,} tokens, not {longest:,}: its rotary table for "
        "longer texts (longrope) is not used.",
        file=sys.stderr,
    )


LOGITS = ("logits_scaling", "logit_scale", "final_logit_softcapping", "attn_logit_softcapping")
"""Settings by which models of transformers change their logits or scores."""


def check_architecture(model) -> None:
    """Raise a UserError for a model that neither our engine nor the trainer computes rightly.

    Its weights are not read: they may be on the meta device.
    """
    config, window = model.config, longest_context(model.config)
    layers = getattr(config, "layer_types", None) or ()
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if any(kind != "full_attention" for kind in layers) or (
        not layers and slides and slides < window
    ):
        raise UserError(
            "The transformers engine serves models with full attention in every layer; "
            "give another --model."
        )
    body = getattr(model, "model", None)
    if not (window and hasattr(body, "layers") and hasattr(model, "lm_head")):
        raise UserError(
            f"The transformers engine cannot serve a {type(model).__name__}: "
            "it has no .model.layers and .lm_head like Llama or Qwen."
        )
    changes = (name for name in LOGITS if getattr(config, name, None) not in (None, 1.0))
    if name := next(changes, ""):
        raise UserError(
            f"The transformers engine cannot serve a {type(model).__name__}: its logits are not "
            f"those of lm_head(model) ({name}); give another --model."
        )
    use_our_attention(model)


def stored_dtype(path: str | Path, trust_remote_code: bool = False) -> str:
    """Return the type of a model's stored weights, by its config.

    float32 or bfloat16; float16 counts as bfloat16.
    """
    dtype = config_of(path, trust_remote_code).dtype
    return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"


def import_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, without its downloads and complaints.

    peft imports it anyway. On some CPUs it then fetches compiled code from the hub if the package
    `kernels` is installed, and warns if it is not. Imported here first, with `kernels` hidden, it
    does neither, and loads no compiler.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    hidden = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it now fails
    try:
        with contextlib.suppress(ImportError), _compiled_when_called():
            importlib.import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)


@contextlib.contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Put off what `torch.compile` does to the first call of what it returns.

    It loads the compiler at once otherwise: two seconds in every process that imports a module with
    a function to be compiled, called or not.
    """
    compile = torch.compile

    def put_off(function=None, **settings):
        if function is None:
            return functools.partial(put_off, **settings)
        compiled = functools.cache(lambda: compile(function, **settings))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = put_off
    try:
        yield
    finally:
        torch.compile = compile


# ---------------------------------------------------------------- adapters


class _Adapter(torch.nn.Linear):
    """One matrix of an adapter: a float32 weight that computes in the type of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def with_lora(model, config: TrainConfig):
    """Add LoRA adapters to the linear layers named by config.lora_targets, never to the lm_head.

    They learn in float32 and compute in the model's type. vLLM rounds them to that type too, and
    peft's way, widening every layer's input, took 1.36 times as long for Qwen3-4B's geometry on an
    H100 (bench/results/h100.json).
    """
    import_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets
    if targets != "all-linear":
        targets = targets.split(",")
    linear = ",".join(_linear_layers(model))
    if "lm_head" in targets:
        raise UserError(
            "lora_targets cannot name the lm_head: it has no adapter, many models share its "
            "weights with the embedding."
        )
    weights = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experts and shared weights: refused below
            policy = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(
            f"lora_targets {config.lora_targets!r} do not fit this model; its linear layers are "
            f"{linear.replace(',', ', ')}."
        ) from error
    if fused := policy.base_model.targeted_parameter_names:
        raise UserError(
            f"lora_targets {config.lora_targets!r} reach the fused experts of this mixture "
            f"({fused[0]}), whose adapters cannot be exported: give --lora-targets {linear}."
        )
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A"):
            if weights[id(module.base_layer.weight)] > 1:
                raise UserError(
                    f"lora_targets cannot name {name.rpartition('.')[2]}: this model shares its "
                    f"weights with another layer; its linear layers are {linear}."
                )
            module.cast_input_dtype_enabled = False
        elif ".lora_A." in name or ".lora_B." in name:
            module.__class__ = _Adapter
    return policy


def load_adapter(policy, folder: str | Path) -> None:
    """Load the adapters in a folder into those of a peft model. UserError if they do not fit."""
    from peft import set_peft_model_state_dict

    with loading(f"The adapters in {folder}"):
        weights = load_file(named_folder(folder) / "adapter_model.safetensors")
        found = set_peft_model_state_dict(policy, weights)
    adapters = {name for name, _ in policy.named_parameters() if "lora_" in name}
    # layers that were trained whole, or resized; below an adapter peft keeps an embedding as it was
    whole = [name for name in weights if ".lora_" not in name and ".base_layer." not in name]
    wrong = [*found.unexpected_keys, *whole, *(adapters & {*found.missing_keys})]
    if wrong or not weights:
        what = wrong[0] if wrong else "they are empty"
        raise UserError(f"The adapters in {folder} do not fit the model: {what}.")


def _linear_layers(model) -> list[str]:
    """List the last names of a model's linear layers except the lm_head."""
    linear = (name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    return sorted({name.rsplit(".")[-1] for name in linear} - {"lm_head"})


def inner(model):
    """Return the causal LM inside a peft wrapper, adapters included, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


@torch.no_grad()
def merge_adapters(model):
    """Build the plain model that a peft model computes, for `save_pretrained`.

    On the host in float32, 4-bit weights dequantised, adapters added. All arithmetic is in float32
    and nothing is merged in place: in 16 bits that would wear the base weights down.
    """
    return _plain(inner(model), _merged_weights(inner(model)))


@torch.no_grad()
def check_export(model) -> None:
    """Build what `merge_adapters` would of names and shapes alone, in no memory.

    UserError where they do not fit, so that no training ends without a policy.
    """
    lm = inner(model)
    try:
        _plain(lm, _merged_weights(lm, values=False))
    except Exception as error:  # of transformers or torch: whatever it is would end the export
        raise UserError(
            f"A training of this {type(lm).__name__} could not be exported: {first_line(error)}. "
            "Give another --model or other --lora-targets."
        ) from error


def _plain(lm, weights: dict[str, torch.Tensor]):
    """Make a model of the same class of some weights; RuntimeError where they do not fit it."""
    config = copy.deepcopy(lm.config)
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(lm)(config)
    missing, unexpected = plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    unset = sorted(
        {*missing} & {name for name, _ in (*plain.named_parameters(), *plain.named_buffers())}
    )
    if unexpected or unset:
        raise RuntimeError(
            f"An export does not fit the model: {unexpected[:1] or unset[:1]}, "
            f"{len(missing)} missing."
        )
    plain.generation_config = lm.generation_config
    return plain


def _merged_weights(lm, values: bool = True) -> dict[str, torch.Tensor]:
    """Return the weights of a plain model by their names, or without `values` their shapes."""
    weights = {}
    for name, _, base in _plain_modules(lm):
        for key in base._buffers.keys() - base._non_persistent_buffers_set:
            weights[f"{name}.{key}"] = base._buffers[key].detach().cpu()
        if not values:
            for key, value in base.named_parameters(recurse=False):
                shape = getattr(value, "quant_state", value).shape
                weights[f"{name}.{key}"] = torch.empty(shape, device="meta")
    if values:
        weights |= {name: value.cpu() for name, value in _plain_weights(lm)}
    return weights


def _plain_modules(lm) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """Yield the modules of a model but adapters: name, module, and what the adapter is around."""
    for name, module in lm.named_modules():
        if not (name.endswith(".base_layer") or ".lora_" in name):
            yield name, module, getattr(module, "base_layer", module)


def _plain_weights(lm) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the plain model that a peft model computes, by their names, in float32.

    4-bit weights are dequantised, adapters added.
    """
    for name, module, base in _plain_modules(lm):
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
    modules = (
        (name, base) for name, module, base in _plain_modules(inner(model)) if module is not base
    )
    return {f"{name}.weight": base.weight for name, base in modules}


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


KEPT = 1 << 30
"""Bytes of a freed block that malloc keeps for the next one."""


def keep_freed_memory(model) -> None:
    """Let the C library keep what a step on a CPU frees, instead of returning it to the system.

    The next step asks for the same blocks again, and each page of theirs costs an interrupt: 1.3 of
    25 CPU seconds of a SmolLM2 update in float32 (dev/LESSONS.md). Does nothing but under glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if model.device.type == "cpu" and mallopt:
        mallopt(-3, KEPT)  # M_MMAP_THRESHOLD: larger blocks are still returned at once
        mallopt(-1, KEPT)  # M_TRIM_THRESHOLD: so much is kept at the end of the heap


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

    def written(optimizer, *_) -> None:
        # its kernels write through pointers, and what was made of a weight is kept by its version
        for group in optimizer.param_groups:
            torch.autograd.graph.increment_version(group["params"])

    optimizer.register_step_post_hook(written)
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
