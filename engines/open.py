"""Open any engine: a model's own, a server's, or the one that samples for a trainer.

Holds: `open_engine`, `open_endpoint`, `open_reader`, `open_sampler`, `fingerprint`. Leaves out: the
engines themselves, what they compute with (models/setup.py).
Exercise it: `python cli.py ask FILE "question" --engine vllm`. Read next: engines/hf.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError
from config.options import EMBEDDED, EvalConfig
from config.realmodels import base_of, is_adapter
from memagent import Agent
from models.packaged import ready
from models.plan import GRAPHS_GIB, geometry, plan
from models.setup import Setup, TrainingSetup

if TYPE_CHECKING:  # torch comes with it
    from engines.endpoint import Terms
    from rollout import Engine
    from tokens.codec import Codec


def give_embedder(agents: Sequence[Agent]) -> None:
    """Open the embedder that the settings of some agents name, once for all of them."""
    from models.embedder import embedder_of

    opened: dict[str, object] = {}
    for agent in agents:
        if spec := getattr(agent.config, "embedder", ""):
            agent.embed = opened.get(spec) or opened.setdefault(spec, embedder_of(spec))


# ---------------------------------------------------------------- for reading


def open_engine(
    setup: Setup, name: str = "transformers", rows: int = 256, kv_gib: float = 0.0
) -> Engine:
    """Open the engine `name` with a model's weights, its codec inside.

    rows: most turns in flight. kv_gib: of vLLM's key/value cache; 0 = its default.
    """
    import torch

    from engines.hf import TransformersEngine
    from models.load import load_model, settle_threads, window_of_model

    codec = setup.codec()
    if name == "vllm":
        from engines.vllm_colocated import ColocatedEngine

        if is_adapter(setup.model):
            raise UserError(
                "vLLM takes whole models here: give the folder that `train` or `export` wrote "
                "beside the adapters, or --engine transformers."
            )
        if setup.on_gpu != torch.cuda.is_available():
            raise UserError("vLLM computes on the GPU where there is one: leave --device out.")
        most = window_of_model(setup.folder, setup.trust_remote_code)
        return ColocatedEngine(
            setup.folder,
            codec,
            min(setup.window or most, most),
            rows,
            kv_gib or (0.0 if setup.on_gpu else 1.0),
            setup.dtype,
            gpu_memory_utilization=0.9,
            trust_remote_code=setup.trust_remote_code,
        )
    model = load_model(setup.folder, setup.dtype, setup.device, setup.trust_remote_code)
    settle_threads(model)
    return TransformersEngine(model, codec, max_rows=rows)


def open_endpoint(
    config: EvalConfig,
    served_as: str,
    thinking: bool,
    window: int | None = None,
    terms: Terms | None = None,
) -> Engine:
    """Open an engine over servers of an OpenAI-compatible protocol.

    config.model is only where the tokenizer comes from; without it text is sent and lengths are
    estimated. served_as: the model's name at the servers. window: theirs, where they do not say.
    terms: None = those of an evaluation, which waits for long.
    """
    from engines.endpoint import EndpointEngine, Terms
    from tokens.codec import Characters

    setup = Setup(config.model, "", "", None, thinking, config.trust_remote_code)
    codec: Codec = setup.codec() if config.model else Characters()
    chat = config.chat or not config.model
    urls, terms = config.endpoint, terms or Terms()
    return EndpointEngine(urls, served_as, codec, window, config.in_flight, chat, terms)


def open_reader(
    config: EvalConfig,
    agents: Sequence[Agent],
    untrained: bool = False,
    window: int | None = None,
    terms: Terms | None = None,
) -> Engine:
    """Open the engine that answers agents, with the one or the other weights of an evaluation.

    window: of an endpoint whose server does not say. terms: see `open_endpoint`.
    """
    give_embedder(agents)
    if config.engine == "extractive":
        from engines.extractive import ExtractiveEngine

        return ExtractiveEngine(agents[0].config.form)
    if config.endpoint:  # the policy before training is another model of the same server
        thinking = any(agent.config.thinking for agent in agents)
        name = config.untrained if untrained else config.served_as
        return open_endpoint(config, name, thinking, window, terms)
    setup = Setup.of_evaluation(config, agents, untrained)
    engine = open_engine(setup, config.engine, config.in_flight, config.kv_gib)
    if not config.answerer:
        return engine
    from engines.frozen import WithFrozen

    other = replace(setup, model=config.answerer)
    return WithFrozen(engine, open_engine(other, config.engine, config.in_flight, config.kv_gib))


# ---------------------------------------------------------------- for training


def open_sampler(setup: TrainingSetup, policy, codec: Codec) -> Engine:
    """Open what samples for the trainer of `policy`."""
    give_embedder([setup.agent])
    if setup.run.engine == "transformers":
        return _transformers_sampler(setup, policy, codec)
    return _vllm_sampler(setup, policy, codec)


def _transformers_sampler(setup: TrainingSetup, policy, codec: Codec) -> Engine:
    """Sample from the trainer's own weights, or from a copy where those are shards."""
    from engines.frozen import WithFrozen
    from engines.hf import TransformersEngine
    from models.load import inner, load_policy

    rows = setup.training.in_flight

    def copy_of_policy():
        return load_policy(setup, dtype=setup.compute_dtype).requires_grad_(False)

    model = copy_of_policy() if setup.sharded else policy
    engine = TransformersEngine(inner(model), codec, max_rows=rows, copy=setup.sharded)
    if not setup.agent.frozen_turns:
        return engine
    # adapters that training went on from are not switched off: they are part of what was before
    off = setup.training.lora_rank and not setup.run.adapter
    before = model if off else copy_of_policy()
    frozen = TransformersEngine(inner(before), codec, max_rows=rows)
    return WithFrozen(engine, frozen, before.disable_adapter if off else nullcontext)


def _vllm_sampler(setup: TrainingSetup, policy, codec: Codec) -> Engine:
    """Sample with vLLM in this process; memory is shared out by the plan."""
    import torch

    from engines.vllm_colocated import ColocatedEngine
    from models.load import dequantised_folder, inner

    run, grpo, agent = setup.run, setup.training, setup.agent
    if agent.frozen_turns and (not grpo.lora_rank or run.adapter):
        raise UserError(
            f"The agent {agent.label} asks the policy as it was before training, and vLLM holds "
            "one set of weights: give a --lora-rank and no --adapter, or --engine transformers."
        )
    sleep, kv_gib, share = run.sleep, run.kv_gib, 0.9
    if setup.on_gpu:
        gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        p = plan(geometry(run.model), setup.mode, gpu_gib, setup.ranks, grpo, agent)
        if not p.fits and (sleep == "auto" or not kv_gib):
            raise UserError(
                f"By the plan this does not fit the GPU's {gpu_gib:.0f} GiB (cli.py plan); "
                "--sleep and --kv-gib try it all the same."
            )
        sleep, kv_gib = p.sleep if sleep == "auto" else sleep, kv_gib or p.cache
        share = min(0.95, (p.sampler + kv_gib + GRAPHS_GIB) / gpu_gib)
    elif sleep == "auto":
        sleep = "1"  # a CPU releases nothing, but the calls are the same
    dtype = setup.compute_dtype
    weights = dequantised_folder(policy, dtype) if grpo.quantise else nullcontext(setup.folder)
    with weights as folder:
        return ColocatedEngine(
            folder,
            codec,
            min(setup.window, inner(policy).config.max_position_embeddings),
            grpo.in_flight,
            kv_gib or 1.0,
            dtype,
            grpo.lora_rank,
            sleep,
            gpu_memory_utilization=share,
            trust_remote_code=setup.trust_remote_code,
        )


# ---------------------------------------------------------------- fingerprints


def engine_fingerprint(config: EvalConfig, engine: Engine, untrained: bool = False) -> str:
    """Fingerprint what answers: the weights, or the server's model; which replica plays no part."""
    if config.engine == "extractive":
        return config.engine
    if config.endpoint:
        route = "chat" if config.chat or not config.model else "completions"
        return f"{route} {engine.model} {engine.codec.fingerprint}"
    model = config.untrained if untrained else config.model
    other = f" {fingerprint(config.answerer)}" if config.answerer else ""
    return f"{config.engine} {fingerprint(model, engine.dtype)}{other}"


SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")


def fingerprint(model: str, dtype: object = "") -> str:
    """Fingerprint a policy: hashes of the folder's weights, configuration and tokenizer, and the
    dtype.

    A hub model counts by its name and the commit that is in the cache.
    """
    folder = Path(ready(model or EMBEDDED))
    base = f"{fingerprint(str(base_of(model)))} " if is_adapter(model) else ""
    if not any(folder.glob("*.safetensors")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")  # .../snapshots/COMMIT/config.json
        return f"{model} {Path(cached).parent.name if isinstance(cached, str) else ''} {dtype}"
    digest = hashlib.blake2b(f"{base}{dtype}".encode(), digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
