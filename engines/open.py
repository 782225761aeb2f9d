"""Open any engine: a model folder's own, a server's, or the one that samples for a trainer.

Holds: `open_engine`, `open_endpoint`, `codec_of`, `engine_for`, `fingerprint`. Leaves out: the engines themselves.
Exercise it: `python cli.py ask FILE "question" --engine vllm`. Read next: engines/hf.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.baselines import SECTIONWISE
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from memagent import AgentConfig, window_of
from models.plan import GRAPHS_GIB, geometry, plan

if TYPE_CHECKING:  # torch comes with it
    from rollout import Engine
    from tokens.codec import Codec


def open_engine(
    model: str,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    rows: int = 256,
    thinking: bool = False,
    name: str = "transformers",
    window: int | None = None,
    kv_gib: float = 0.0,
):
    """The engine `name` with a model folder's weights, its codec inside. vLLM reserves a window: None = all that the model takes."""
    import torch

    from engines.hf import TransformersEngine
    from models.load import load_model, settle_threads
    from tokens.codec import Codec

    codec = Codec.load(model or EMBEDDED, trust_remote_code=trust_remote_code, thinking=thinking)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    dtype = ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype
    if name == "vllm":
        from engines.vllm_colocated import ColocatedEngine
        from models.load import window_of_model

        if on_gpu != torch.cuda.is_available():
            raise UserError("vLLM computes on the GPU where there is one: leave --device out.")
        most = window_of_model(model or EMBEDDED, trust_remote_code)
        return ColocatedEngine(
            model or EMBEDDED,
            codec,
            min(window or most, most),
            rows,
            kv_gib or (0.0 if on_gpu else 1.0),
            0.9,
            dtype,
            trust_remote_code=trust_remote_code,
        )
    loaded = load_model(model or EMBEDDED, dtype, device, trust_remote_code)
    settle_threads(loaded)
    return TransformersEngine(loaded, codec, max_rows=rows)


def open_endpoint(
    urls: Sequence[str],
    served_as: str,
    chat: bool,
    model: str,
    in_flight: int,
    thinking: bool,
    trust_remote_code: bool,
):
    """An engine over servers of an OpenAI-compatible protocol; `model` is only where the tokenizer comes from. Without it nobody knows
    the tokens: text is sent, and lengths are estimated."""
    from engines.endpoint import EndpointEngine
    from tokens.codec import Characters, Codec

    codec = (
        Codec.load(model, trust_remote_code=trust_remote_code, thinking=thinking)
        if model
        else Characters()
    )
    return EndpointEngine(urls, served_as, codec, concurrency=in_flight, chat=chat or not model)


def codec_of(model: str, thinking: bool, trust_remote_code: bool):
    from tokens.codec import Codec

    return Codec.load(model or EMBEDDED, trust_remote_code=trust_remote_code, thinking=thinking)


def reserved(agents: Sequence[str], config: AgentConfig) -> int | None:
    """The window that these agents need; None = all that the model has."""
    own = max(window_of(config, agent) for agent in agents)
    return (
        own if {*agents} <= {*SECTIONWISE} else max(own, config.window) if config.window else None
    )


# ---------------------------------------------------------------- evaluation


def fingerprint(model: str, dtype: object = "") -> str:
    """What tells one policy from another: the folder's weights, configuration, tokenizer and chat template by content, a hub model by its
    name, and the type of its numbers."""
    import hashlib

    folder = Path(model or EMBEDDED)
    if not any(folder.glob("*.safetensors")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")  # .../snapshots/COMMIT/config.json
        return f"{model} {Path(cached).parent.name if isinstance(cached, str) else ''} {dtype}"
    digest = hashlib.blake2b(str(dtype).encode(), digest_size=16)
    for path in sorted(
        p
        for p in folder.iterdir()
        if p.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
    ):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def engine_for(
    run: RunConfig, config: GRPOConfig, agent_config: AgentConfig, policy, codec: Codec
) -> Engine:
    """What samples for the trainer of `policy`."""
    import torch

    from engines import vllm_colocated
    from engines.hf import TransformersEngine
    from models.load import dequantised_folder, dtype_of, inner, on_gpu, policy_of, sharded

    dtype = dtype_of(run, config)
    dtype = "bfloat16" if dtype == "mixed" else dtype
    if run.engine == "transformers":
        shards = sharded(run, config)
        model = policy_of(run, config, mixed=dtype).requires_grad_(False) if shards else policy
        return TransformersEngine(inner(model), codec, max_rows=config.in_flight, copy=shards)
    window = min(
        run.engine_window or window_of(agent_config, run.agent),
        inner(policy).config.max_position_embeddings,
    )
    sleep, kv_gib, share = run.sleep, run.kv_gib, 0.9
    if on_gpu(run):
        gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        mode = "qlora" if config.quantise else "lora" if config.lora_rank else "full"
        p = plan(
            geometry(run.model),
            mode,
            gpu_gib,
            run.devices * run.num_nodes,
            config,
            agent_config,
            reader=run.agent,
        )
        if not p.fits and (sleep == "auto" or not kv_gib):
            raise UserError(
                f"By the plan this does not fit the GPU's {gpu_gib:.0f} GiB (cli.py plan); --sleep and --kv-gib try it all the same."
            )
        sleep, kv_gib = p.sleep if sleep == "auto" else sleep, kv_gib or p.cache
        share = min(0.95, (p.sampler + kv_gib + GRAPHS_GIB) / gpu_gib)
    elif sleep == "auto":
        sleep = "1"  # nothing is given up on a CPU, but the calls are the same
    with (
        dequantised_folder(policy, dtype)
        if config.quantise
        else contextlib.nullcontext(run.model or EMBEDDED) as weights
    ):
        return vllm_colocated.ColocatedEngine(
            weights,
            codec,
            window,
            config.in_flight,
            kv_gib or 1.0,
            share,
            dtype,
            config.lora_rank,
            sleep,
            run.trust_remote_code,
        )
