"""What a command computes with: model, device, dtype, adapters, shards, window, resolved once.

Holds: `Setup`, `adapted`, `base_and_adapter`, `auto_dtype`, `settled`, `check_rate`. Leaves out:
loading (models/load.py), engines (engines/open.py).
Exercise it: `python cli.py train --dry-run`. Read next: models/load.py.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError, alone
from config.foreign import from_json
from config.options import (
    EMBEDDED,
    TEMPLATE_DATE,
    EvalConfig,
    ModelConfig,
    RunConfig,
    SFTConfig,
    TrainConfig,
)
from config.realmodels import PACKAGED, adapter_config, base_of, is_adapter, titled
from memagent import Agent

if TYPE_CHECKING:  # transformers comes with it
    from tokens.codec import Codec

# ---------------------------------------------------------------- device and dtype


def resolve_device(device: str) -> str:
    """Return cpu, cuda or mps, with `auto` resolved."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise a UserError if this machine, or this torch, does not have the device."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("No CUDA device was found; use --device cpu.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("No GPU of Apple's (mps) was found; use --device cpu.")


BFLOAT16 = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
"""Instructions by which a processor computes in bfloat16, as torch calls them."""


def bfloat16_instructions() -> list[str]:
    """List the processor's own instructions for bfloat16."""
    import torch

    able = torch.cpu.get_capabilities()
    return [name for name in BFLOAT16 if able.get(name)]


FASTER = 1.3
"""How many times as fast as in float32 products must be in bfloat16: on some processors that have
the instructions they take up to twice as long."""
ROWS, WIDEST = 64, (1024, 2048)
"""Tokens of the products that are timed, and the most of a model's sizes, hidden and intermediate:
with these all of it takes less than 100 ms where nothing else computes."""
taken: dict[str, str] = {}
"""By model what `auto` has taken in this process, and why."""


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
        dtype, why = "float32", "in which all weights are trained on a CPU"
    elif not (sizes := _sizes_in_bfloat16(base_of(model))):
        dtype, why = "float32", "since the weights are not stored in bfloat16"
    elif not bfloat16_instructions():
        dtype, why = "float32", "since the processor has no instructions for bfloat16"
    else:
        dtype, why = faster(sizes, *product_seconds(*sizes))
    taken[titled("" if model == EMBEDDED else model)] = f"{dtype}, {why}"
    return dtype


def _sizes_in_bfloat16(model: str | Path) -> tuple[int, int] | None:
    """Return the sizes of the products to be timed for a model that is stored in bfloat16, else
    None; read from config.json, without loading or fetching anything."""
    from models.plan import SIZES

    try:
        if str(model) in PACKAGED:  # stored so, once it is converted
            known = SIZES.get(str(model))
            sizes = (known.hidden, known.intermediate) if known else WIDEST
        else:
            config = from_json(Path(model, "config.json").read_text(encoding="utf-8"))
            if (config.get("dtype") or config.get("torch_dtype")) != "bfloat16":
                return None
            text = config.get("text_config") or config
            sizes = text.get("hidden_size"), text.get("intermediate_size")
    except (OSError, ValueError, AttributeError):
        return None
    hidden, between = (
        min(size, most) if isinstance(size, int) and size > 0 else most
        for size, most in zip(sizes, WIDEST, strict=True)
    )
    return hidden, between


@alone()
@cache
def product_seconds(hidden: int, between: int) -> tuple[float, float]:
    """Return the seconds of a product [`ROWS`, hidden] x [hidden, between] in float32, and in
    bfloat16: the shortest of several in turn, beside whatever else the machine does."""
    import torch

    shapes = (ROWS, hidden), (between, hidden)
    factors = [
        [torch.ones(shape, dtype=dtype) for shape in shapes]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    best, end = [math.inf, math.inf], time.perf_counter() + 0.05
    for turn in range(10):  # the first warms up
        if turn > 1 and time.perf_counter() > end:
            break
        for k, (x, weight) in enumerate(factors):
            begun = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best[k] = min(best[k], time.perf_counter() - begun)
    return best[0], best[1]


def faster(sizes: tuple[int, int], float32_s: float, bfloat16_s: float) -> tuple[str, str]:
    """Return the dtype to compute in by the times of a product of these sizes, and why."""
    hidden, between = sizes
    dtype = "bfloat16" if float32_s >= FASTER * bfloat16_s else "float32"
    return dtype, (
        f"since a product of {hidden:,} x {between:,} is {float32_s / bfloat16_s:.1f} times as "
        f"fast in bfloat16 as in float32 ({FASTER} are asked for)"
    )


def settled(config: ModelConfig, before: str = "auto") -> ModelConfig:
    """Return the settings of an evaluation, a stream or a reading with `auto` resolved, for all of
    its models alike; as they are where none is loaded in this process.

    before: the dtype of what it goes on with, which stays.
    """
    if config.dtype != "auto" or config.endpoint or config.engine == "rehearsed":
        return config
    if before == "auto":
        before = auto_dtype(config.model or EMBEDDED, resolve_device(config.device))
    return replace(config, dtype=before)


FOUR_BITS = "4 bits"


def stored_as(model: str | Path) -> str:
    """Return how the weights of a folder or of a hub's cached model are stored, by its config.json.

    "" = as plain numbers, `FOUR_BITS` = in 4 bits by bitsandbytes, else the method's name. Nothing
    is fetched: "" also for what is not here.
    """
    try:
        from huggingface_hub import hf_hub_download

        path = Path(model or EMBEDDED, "config.json")
        if not path.is_file():
            path = Path(hf_hub_download(str(model), "config.json", local_files_only=True))
        stored = from_json(path.read_text(encoding="utf-8")).get("quantization_config")
        method = stored and stored.get("quant_method", "bitsandbytes")
    except (OSError, ValueError, AttributeError):
        return ""
    return FOUR_BITS if method == "bitsandbytes" and stored.get("load_in_4bit") else method or ""


def check_stored(model: str | Path, quantise: bool) -> None:
    """Raise a UserError for stored weights that cannot be trained as the settings say."""
    stored = stored_as(model)
    if stored and not (stored == FOUR_BITS and quantise):
        raise UserError(
            f"The weights of {model} are stored quantised ({stored}), which are not trained: give "
            "--lora-rank, which trains adapters beside 4 bits of bitsandbytes, or the model as it "
            "was before."
        )


# ---------------------------------------------------------------- the setup


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and how it is computed with: plain values, the same for all that a command does."""

    model: str | Path  # as the user wrote it: a folder, a hub name, smollm2
    device: str  # cpu, cuda or mps
    dtype: str  # float32, bfloat16, or mixed: weights in float32, computed with in bfloat16
    window: int | None = None  # that a sampler must reserve; None = all that the model has
    thinking: bool = False
    trust_remote_code: bool = False
    quantise: bool = False  # weights in 4 bits, only to be read with
    date: str = TEMPLATE_DATE  # that a chat template tells
    adapter: str = ""  # folder of the adapters that a training goes on from
    ranks: int = 1  # that train together
    # of `models.packaged.located`: what is loaded, of a packaged model its converted folder; and
    # what tokenizer and configuration come from, of adapters their base model
    folder: str | Path = ""
    base_folder: str | Path = ""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def compute_dtype(self) -> str:
        """The dtype of the forward pass: float32 or bfloat16."""
        return "bfloat16" if self.dtype == "mixed" else self.dtype

    @property
    def sharding(self) -> str:
        """How `GRPO` holds the weights: none, or by FSDP2 in shards that are the same or mixed.

        Shards are for several ranks, and for the dtype mixed.
        """
        if self.dtype == "mixed":
            return "mixed"
        return "same" if self.ranks > 1 else "none"

    @property
    def sharded(self) -> bool:
        return self.sharding != "none"

    def codec(self) -> Codec:
        """Load the model's tokenizer and chat template, and say what of it is not known.

        UserError: it has tokens that the model has no weights for.
        """
        from models.ranks import is_first
        from tokens.codec import Codec

        codec = Codec.load(
            self.base_folder,
            trust_remote_code=self.trust_remote_code,
            thinking=self.thinking,
            date=self.date,
        )
        if codec.unknown_marks and is_first():
            print(
                f"{self.model}: its chat template speaks of thoughts, but has no marks of theirs "
                "that are known (docs/engines.md): they would pass for memories and answers.",
                file=sys.stderr,
                flush=True,
            )
        if self.device:  # else an endpoint's, and the weights are elsewhere
            from models.load import config_of

            config = config_of(self.base_folder, self.trust_remote_code)
            rows = config.get_text_config().vocab_size
            if (n := max(codec.tokenizer.get_vocab().values(), default=0) + 1) > rows:
                raise UserError(
                    f"{self.base_folder} has {n:,} tokens and embeddings of {rows:,}: its "
                    "tokenizer is another model's, or tokens were added and the embeddings not "
                    "resized."
                )
        return codec

    @classmethod
    def of_evaluation(
        cls, config: EvalConfig, agents: Sequence[Agent], untrained: bool = False
    ) -> Setup:
        """Resolve what answers agents: the model, or `untrained` the policy before training."""
        device = resolve_device(config.device)
        model = (config.untrained if untrained else config.model) or EMBEDDED
        return cls(
            model,
            device,
            auto_dtype(model, device) if config.dtype == "auto" else config.dtype,
            window_of(agents),
            any(agent.config.thinking for agent in agents),
            config.trust_remote_code,
            config.quantise,
            date_of(agents),
        )

    @classmethod
    def of_training(cls, run: RunConfig, training: TrainConfig, agent: Agent) -> Setup:
        """Resolve what is trained: of the settings that `base_and_adapter` and `adapted` return."""
        device = resolve_device(run.device)
        model = run.model or EMBEDDED
        return cls(
            model,
            device,
            auto_dtype(model, device, training) if run.dtype == "auto" else run.dtype,
            agent.turn_tokens(),
            agent.config.thinking,
            run.trust_remote_code,
            training.quantise,
            agent.config.template_date,
            run.adapter,
            run.devices * run.num_nodes,
        )


def window_of(agents: Sequence[Agent]) -> int | None:
    """Return the window that all of these agents need; None = all that the model has."""
    needed = [agent.window_needed() for agent in agents]
    return None if not needed or None in needed else max(needed)


def date_of(agents: Sequence[Agent]) -> str:
    """Return the date that these agents' model is told; flags and model folders set it for all."""
    return agents[0].config.template_date if agents else TEMPLATE_DATE


# ---------------------------------------------------------------- adapters to go on from


def base_and_adapter(run: RunConfig) -> RunConfig:
    """Return the settings with adapters that were given as --model as --adapter of their base."""
    if not is_adapter(run.model):
        return run
    if run.adapter:
        raise UserError("Give adapters as --model or as --adapter, not as both.")
    return replace(run, model=str(base_of(run.model)), adapter=run.model)


def adapted(training: TrainConfig, run: RunConfig) -> TrainConfig:
    """Return the settings of a training as its model decides them.

    Adapters to go on from have their own rank, and beside weights in 4 bits adapters are qlora.
    """
    if run.adapter:
        training = with_adapter(training, run.adapter)
    in_four_bits = training.lora_rank and stored_as(run.model) == FOUR_BITS
    return replace(training, quantise=True) if in_four_bits else training


def with_adapter(training: TrainConfig, folder: str | Path) -> TrainConfig:
    """Return the settings with rank, scale and targets of the adapters in a folder."""
    saved = adapter_config(folder)
    if training.lora_rank not in (0, saved["r"]):
        raise UserError(
            f"The adapters in {folder} have rank {saved['r']}, not {training.lora_rank}: leave "
            "--lora-rank out."
        )
    return replace(
        training,
        lora_rank=saved["r"],
        lora_alpha=saved["lora_alpha"],
        lora_targets=saved["target_modules"],
    )


LR = {"full": 1e-6, "lora": 2e-5, "qlora": 2e-5, "sft": 1e-5}
"""Learning rates of GRPO with a real model, by what is trained, as in recipes/; sft = a warm start
of all weights, a usual one."""


LARGE = 80_000_000
"""Bytes of the weights of a model that is no embedded policy."""


def is_large(model: str) -> bool:
    """Return whether these weights, by the bytes of their files, are a real model's.

    A model of the hub is one: nothing is fetched to see how large it is.
    """
    folder = Path(base_of(model or EMBEDDED))
    return (
        not folder.is_dir()
        or sum(file.stat().st_size for file in folder.glob("*.safetensors")) > LARGE
    )


def check_rate(run: RunConfig, training: TrainConfig) -> None:
    """Raise a UserError where a real model would get the embedded policy's learning rate.

    For settings to which neither a flag, a file nor a preset for such models has brought one.
    """
    warm = isinstance(training, SFTConfig)
    if warm and (training.lora_rank or run.adapter or is_adapter(run.model)):
        return  # the packaged reader's were warmed up with the default
    if is_large(run.model):
        usual = f"{LR['sft']:g}" if warm else f"{LR['full']:g}, with adapters {LR['lora']:g}"
        raise UserError(
            f"A learning rate of {training.lr:g} is the embedded policy's: give one for "
            f"{run.model} by --lr, such as {usual}."
        )


def mode_of(training: TrainConfig) -> str:
    """Return what is trained: qlora, lora or full."""
    if training.quantise:
        return "qlora"
    return "lora" if training.lora_rank else "full"
