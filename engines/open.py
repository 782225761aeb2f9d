"""Open any engine: a model folder's own, a server's, or the one that samples for a trainer.

Holds: `open_engine`, `open_endpoint`, `codec_of`, `engine_for`, `window_of`, `fingerprint`. Leaves out: the engines themselves.
Exercise it: `python cli.py ask FILE "question" --engine vllm`. Read next: engines/hf.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError
from config.options import EMBEDDED, EvalConfig, GRPOConfig, RunConfig
from memagent import Agent
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
            dtype,
            gpu_memory_utilization=0.9,
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


def window_of(agents: Sequence[Agent]) -> int | None:
    """Return the window that these agents need; None = all that the model has."""
    needed = [agent.window_needed() for agent in agents]
    return None if None in needed else max(needed)


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


def open_reader(config: EvalConfig, agents: Sequence[Agent], untrained: bool = False) -> Engine:
    """Open the engine that answers agents, with the one or the other weights of an evaluation."""
    thinking = any(agent.config.thinking for agent in agents)
    if config.endpoint:  # the policy before training is another model of the same server
        served = config.untrained if untrained else config.served_as
        return open_endpoint(
            config.endpoint, served, config.chat, config.model, config.in_flight, thinking,
            config.trust_remote_code,
        )  # fmt: skip
    return open_engine(
        config.untrained if untrained else config.model, config.device, config.dtype,
        config.trust_remote_code, config.in_flight, thinking, config.engine, window_of(agents),
        config.kv_gib,
    )  # fmt: skip


def engine_fingerprint(config: EvalConfig, engine: Engine, untrained: bool = False) -> str:
    """Fingerprint what answers: the weights, or the server's model; which replica plays no part."""
    if config.endpoint:
        route = "chat" if config.chat or not config.model else "completions"
        return f"{route} {engine.model} {engine.codec.fingerprint}"
    model = config.untrained if untrained else config.model
    return f"{config.engine} {fingerprint(model, engine.dtype)}"


def engine_for(run: RunConfig, config: GRPOConfig, agent: Agent, policy, codec: Codec) -> Engine:
    """What samples for the trainer of `policy`."""
    import torch

    from engines import vllm_colocated
    from engines.frozen import WithFrozen
    from engines.hf import TransformersEngine
    from models.load import dequantised_folder, dtype_of, inner, on_gpu, policy_of, sharded

    dtype = dtype_of(run, config)
    dtype = "bfloat16" if dtype == "mixed" else dtype
    if run.engine == "transformers":
        shards = sharded(run, config)
        model = policy_of(run, config, mixed=dtype).requires_grad_(False) if shards else policy
        engine = TransformersEngine(inner(model), codec, max_rows=config.in_flight, copy=shards)
        if not agent.frozen_turns:
            return engine
        before = model
        if not config.lora_rank:
            before = policy_of(run, config, mixed=dtype).requires_grad_(False)
        frozen = TransformersEngine(inner(before), codec, max_rows=config.in_flight)
        return WithFrozen(engine, frozen, getattr(before, "disable_adapter", nullcontext))
    if agent.frozen_turns and not config.lora_rank:
        raise UserError(
            f"The agent {agent.label} asks the policy as it was before training, and vLLM holds one "
            "set of weights: give a --lora-rank, or --engine transformers."
        )
    window = min(
        run.engine_window or agent.turn_tokens(),
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
            agent,
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
        else nullcontext(run.model or EMBEDDED) as weights
    ):
        return vllm_colocated.ColocatedEngine(
            weights,
            codec,
            window,
            config.in_flight,
            kv_gib or 1.0,
            dtype,
            config.lora_rank,
            sleep,
            gpu_memory_utilization=share,
            trust_remote_code=run.trust_remote_code,
        )
