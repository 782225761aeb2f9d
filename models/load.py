"""Models: loading, 4-bit weights, adapters, optimizers, and the weights that an export writes.

Holds: `load_model`, `with_lora`, `inner`, `settle_threads`, `logits_of`, `optimizer_of`, `merge_adapters`. Leaves out: what is trained and how (grpo.py), files of a run (commands/train.py).
Exercise it: `pytest tests/models/test_load.py`. Read next: engines/hf.py.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from config.errors import UserError, loading
from config.options import EMBEDDED, GRPOConfig, RunConfig


def load_model(
    path: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantise: bool = False,
):
    """A causal LM from safetensors, on its device; on the device "unset" its weights are memory of the host
    that nobody has written to, and that costs nothing until somebody does. UserError where that cannot be.

    quantise: its linear layers but the lm_head in 4 bits, NF4 with doubly quantised scales, computing in `dtype` (arXiv 2305.14314).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    if device == "unset":
        from accelerate import init_empty_weights
        from transformers import AutoConfig

        with loading(f"The model {path}"), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, dtype),
                trust_remote_code=trust_remote_code,
                attn_implementation="sdpa",
            )
        buffers = {
            name: b.clone() for name, b in model.named_buffers()
        }  # they are not in the weights' files
        model.to_empty(device="cpu").tie_weights()
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        return model.eval()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("No CUDA device is at hand; use --device cpu.")
    more: dict = {}
    if quantise:
        from transformers import BitsAndBytesConfig

        import_bitsandbytes()
        four = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        more = {"quantization_config": four, "device_map": {"": device}}
    with loading(f"The model {path}"):
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **more,
            )
        except SafetensorError as error:
            raise UserError(
                f"The weights of {path} are no valid safetensors file: {error}."
            ) from error
        model = model if quantise else model.to(device)
        for module in model.modules():
            # without gradient it would repack its weights and compute in bfloat16: not what is trained, nor what can be saved
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    # the library would draw at random what it does not find
    wrong = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if wrong:
        raise UserError(
            f"The weights of {path} do not fit its config.json: {wrong[0]} ({len(wrong)} in all) is missing or of another shape."
        )
    return model


def window_of_model(path: str | Path, trust_remote_code: bool = False) -> int:
    """Most tokens that a model takes, by its config."""
    from transformers import AutoConfig

    with loading(f"The model {path}"):
        return AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code
        ).max_position_embeddings


def stored_dtype(path: str | Path, trust_remote_code: bool = False) -> str:
    """The type that a model's weights are stored in, by its config: float32 or bfloat16; float16 counts as bfloat16."""
    from transformers import AutoConfig

    with loading(f"The model {path}"):
        dtype = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).dtype
    return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"


def import_bitsandbytes() -> None:
    """peft imports bitsandbytes, which on some CPUs fetches compiled code from the hub if the package `kernels` is there, and complains if
    it is not. Imported here first, with that package hidden: nobody asked for either."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    there = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # what an import takes for "not there"
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        sys.modules.update(there)


class _Adapter(torch.nn.Linear):
    """One matrix of an adapter: its weight learns in float32 and is multiplied in the type of what comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def with_lora(model, config: GRPOConfig):
    """The model with LoRA adapters on the linear layers that config.lora_targets names; never on the lm_head.

    They learn in float32 and compute in the model's type: vLLM rounds them to it too, and peft's way, which widens every layer's
    input, took 1.36 times as long for Qwen3-4B's geometry on an H100 (bench/results/h100.json).
    """
    import_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    alpha = config.lora_alpha or 2 * config.lora_rank
    targets = (
        config.lora_targets
        if config.lora_targets == "all-linear"
        else config.lora_targets.split(",")
    )
    if "lm_head" in targets:
        raise UserError(
            "lora_targets cannot name the lm_head: it has no adapter, many models share its weights with the embedding."
        )
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    torch.manual_seed(config.seed)
    try:
        policy = get_peft_model(model, lora)
    except ValueError as error:
        layers = sorted(
            {
                name.rsplit(".")[-1]
                for name, m in model.named_modules()
                if isinstance(m, torch.nn.Linear)
            }
            - {"lm_head"}
        )
        raise UserError(
            f"lora_targets {config.lora_targets!r} do not fit this model; its linear layers are {', '.join(layers)}."
        ) from error
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
        elif ".lora_A." in name or ".lora_B." in name:
            module.__class__ = _Adapter
    return policy


SMALL = 50_000_000
"""Weights below which a second thread gains nothing on a CPU: to wake it takes as long as its share of the work."""


def settle_threads(model) -> None:
    """Compute with one thread if the model is small and on a CPU; OMP_NUM_THREADS, where it is set, decides instead."""
    small = sum(p.numel() for p in model.parameters()) < SMALL and model.device.type == "cpu"
    if small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def inner(model):
    """The causal LM inside a peft wrapper, adapters included; the model itself if there is none."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def optimizer_of(parameters, config: GRPOConfig) -> torch.optim.Optimizer:
    """AdamW, or with config.optimizer = adamw8bit the one of bitsandbytes, whose two moments take a byte each instead of four."""
    settings = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if (
        config.optimizer == "adamw"
    ):  # fused: torch would take shards one by one (H100, 1.7 billion weights: 55 ms, fused 27)
        return torch.optim.AdamW(
            parameters, **settings, fused=all(p.device.type == "cuda" for p in parameters) or None
        )
    import_bitsandbytes()
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **settings)


@torch.no_grad()
def merge_adapters(model):
    """The model inside a peft wrapper anew, for `save_pretrained`: on the host in float32, 4-bit weights unpacked, adapters added.

    All arithmetic is in float32, and nothing is merged in place: in 16 bits that would wear the base weights down.
    """
    weights = {}
    for name, module in inner(model).named_modules():
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
            weights[f"{name}.{key}"] = value.cpu()
    config = copy.deepcopy(inner(model).config)
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        whole = type(inner(model))(config)
    missing, unexpected = whole.load_state_dict(weights, strict=False, assign=True)
    whole.tie_weights()
    left = [name for name, p in whole.named_parameters() if p.is_meta]
    if unexpected or left:
        raise RuntimeError(
            f"An export does not fit the model: {unexpected[:1] or left[:1]}, {len(missing)} missing."
        )
    whole.generation_config = inner(model).generation_config
    return whole


def recompute(model, on: bool) -> None:
    """Whether layers drop their activations and compute them anew in the backward pass, from now on until somebody calls eval().

    transformers does so in training mode alone, which would switch dropout on: the sampler's and the trainer's log-probs would differ.
    So only the layers themselves are put into it, nothing inside them.
    """
    if on and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = on


def on_gpu(run: RunConfig) -> bool:
    return run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available())


def dtype_of(run: RunConfig, config: GRPOConfig) -> str:
    """float32, bfloat16 or mixed, where the setting is auto."""
    if run.dtype != "auto":
        return run.dtype
    return "float32" if not on_gpu(run) else "bfloat16" if config.lora_rank else "mixed"


def policy_of(run: RunConfig, config: GRPOConfig, device: str = "", mixed: str = "float32"):
    """The untrained policy: a causal LM, in a peft model if it has adapters. mixed: the type of its weights where the setting is mixed."""
    dtype = dtype_of(run, config)
    dtype = mixed if dtype == "mixed" else dtype
    model = load_model(
        run.model or EMBEDDED, dtype, device or run.device, run.trust_remote_code, config.quantise
    )
    return with_lora(model, config) if config.lora_rank else model


def sharded(run: RunConfig, config: GRPOConfig) -> bool:
    """Whether FSDP2 holds the weights: on several ranks, and where they are computed with in another type."""
    return run.devices * run.num_nodes > 1 or dtype_of(run, config) == "mixed"


@contextlib.contextmanager
def dequantised_folder(policy, dtype: str) -> Iterator[Path]:
    """A folder with the weights that a 4-bit policy's stand for: vLLM would round its own, and not to the same."""
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        model = cast_parameters(merge_adapters(policy), getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
        model.config.save_pretrained(
            folder
        )  # the model's own save_pretrained writes on rank 0 alone
        save_file(
            {name: p.detach() for name, p in model.named_parameters()},
            Path(folder, "model.safetensors"),
            {"format": "pt"},
        )
        yield Path(folder)


def cast_parameters(model, dtype: torch.dtype = torch.bfloat16):
    """The model with its weights, and nothing else, in `dtype`: the angles of the positions stay exact."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model
