"""Which device and which dtype a model is computed with, where `auto` leaves it to the machine.

A CPU with instructions for bfloat16 may still be slower in it than in float32, so products of the
model's own sizes are timed, once in a process.
"""

from __future__ import annotations

import timeit
from dataclasses import replace
from functools import cache
from pathlib import Path

from config.errors import UserError, alone
from config.foreign import read_json
from config.options import EMBEDDED, ModelConfig, TrainConfig
from config.realmodels import PACKAGED, base_of, titled

BFLOAT16 = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
"""Instructions by which a processor computes in bfloat16, as torch calls them."""
FASTER = 1.3
"""How many times as fast as in float32 products must be in bfloat16: on some processors that have
the instructions they take up to twice as long."""
ROWS, WIDEST = 64, (1024, 2048)
"""Tokens of the products that are timed, and the most of a model's sizes, hidden and intermediate:
with these all of it takes less than 100 ms where nothing else computes."""
taken: dict[str, str] = {}
"""By model what `auto` has taken in this process, and why."""


def resolve_device(device: str) -> str:
    """Return cpu, cuda or mps, with `auto` resolved."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise a UserError if this machine, or this torch, does not have the device."""
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (device.startswith("cuda") and not cuda) or (device == "mps" and not mps):
        raise UserError(f"No device {device} was found; use --device cpu.")


def bfloat16_instructions() -> list[str]:
    """List the processor's own instructions for bfloat16."""
    import torch

    able = torch.cpu.get_capabilities()
    return [name for name in BFLOAT16 if able.get(name)]


def auto_dtype(model: str | Path, device: str, training: TrainConfig | None = None) -> str:
    """Choose the dtype of a model: bfloat16 where the device computes faster in it, else float32.

    On a CPU that is looked at for models stored in bfloat16, and in training for adapters alone:
    they learn in float32 beside weights that stay as they are. On a GPU, full fine-tuning is mixed.
    """
    full = training is not None and not training.lora_rank
    if device.startswith("cuda"):
        dtype, why = ("mixed" if full else "bfloat16"), "on a GPU"
    elif device == "mps":
        dtype, why = "float32", "on a GPU of Apple's"
    elif full:
        dtype, why = "float32", "since all weights are trained"
    elif not (sizes := _sizes_in_bfloat16(base_of(model))):
        dtype, why = "float32", "since the weights are not stored in bfloat16"
    elif not bfloat16_instructions():
        dtype, why = "float32", "since the processor has no instructions for bfloat16"
    else:
        dtype, why = choose_by_time(*product_seconds(*sizes))
    taken[titled("" if model == EMBEDDED else model)] = f"{dtype}, {why}"
    return dtype


def _sizes_in_bfloat16(model: str | Path) -> tuple[int, ...] | None:
    """Return the sizes of the products to be timed for a model that is stored in bfloat16, else
    None; read from config.json, without loading or fetching anything."""
    from models.plan import SIZES

    if str(model) in PACKAGED:  # stored so, once it is converted
        return SIZES[str(model)].hidden, SIZES[str(model)].intermediate
    try:
        config = read_json(Path(model, "config.json"))
        if (config.get("dtype") or config.get("torch_dtype")) != "bfloat16":
            return None
        text = config.get("text_config") or config
        sizes = text.get("hidden_size"), text.get("intermediate_size")
    except (OSError, ValueError, AttributeError):
        return None
    return tuple(
        min(size, most) if isinstance(size, int) and size > 0 else most
        for size, most in zip(sizes, WIDEST, strict=True)
    )


@alone()
@cache
def product_seconds(hidden: int, between: int) -> tuple[float, ...]:
    """Return the seconds of a product [`ROWS`, hidden] x [hidden, between] in float32, and in
    bfloat16: the shortest of several, beside whatever else the machine does."""
    import torch

    def measure(dtype: torch.dtype) -> float:
        x, weight = torch.ones(ROWS, hidden, dtype=dtype), torch.ones(between, hidden, dtype=dtype)
        return min(timeit.repeat(lambda: torch.nn.functional.linear(x, weight), number=1, repeat=6))

    return measure(torch.float32), measure(torch.bfloat16)


def choose_by_time(float32_s: float, bfloat16_s: float) -> tuple[str, str]:
    """Return the dtype to compute in by the times of a product, and why."""
    dtype = "bfloat16" if float32_s >= FASTER * bfloat16_s else "float32"
    return dtype, f"{float32_s / bfloat16_s:.1f} times as fast in bfloat16 as in float32 here"


def settle_dtype(config: ModelConfig, before: str = "auto") -> ModelConfig:
    """Return the settings of an evaluation, a stream or a reading with `auto` resolved, for all of
    its models alike; as they are where none is loaded in this process.

    before: the dtype of what it goes on with, which stays.
    """
    if config.dtype != "auto" or config.endpoint or config.engine == "rehearsed":
        return config
    if before == "auto":
        before = auto_dtype(config.model or EMBEDDED, resolve_device(config.device))
    return replace(config, dtype=before)
