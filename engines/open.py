"""Open any engine: a model's own, a server's, or the one that samples for a trainer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from config.errors import UserError, alone
from config.files import is_file
from config.options import EvalConfig, RunConfig, TrainConfig
from config.realmodels import is_adapter
from memagent import Agent
from models.plan import GRAPHS_GIB, geometry, plan, turns_in_cache
from models.policy import Policy, fingerprint, mode_of

if TYPE_CHECKING:  # torch comes with it
    import torch

    from rollout import Engine
    from tasks.served import Terms
    from tokens.codec import Codec


def give_embedder(agents: Sequence[Agent]) -> None:
    """Open the embedder that the settings of some agents name, once for all of them.

    UserError: there is none of this name, or its server does not answer.
    """
    from models.embedder import embedder_of

    opened: dict[str, object] = {}
    for agent in agents:
        if spec := agent.embedder:
            agent.embed = opened.get(spec) or opened.setdefault(spec, embedder_of(spec))


# ---------------------------------------------------------------- for reading


@dataclass(frozen=True, slots=True)
class Use:
    """What an engine is opened for, beside the settings of an evaluation."""

    window: int | None = None
    """of servers that do not say theirs"""
    terms: Terms | None = None
    """of servers; None = those of an evaluation, which waits for long"""
    cache_tokens: int = 0
    """of our own engine's cache, in which finished turns stay as long as there is room, for texts
    that are read again; 0 = as an evaluation needs it"""
    settle: bool = True
    """choose the process's threads by the model"""


def open_engine(policy: Policy, config: EvalConfig = EvalConfig(), use: Use = Use()) -> Engine:
    """Open what answers with a policy by an evaluation's settings, its codec inside.

    With config.endpoint servers answer. The policy's model then is only where the tokenizer comes
    from; without one text is sent and lengths are estimated.
    """
    if config.endpoint:
        return _open_servers(policy, config, use)
    with alone():
        if config.engine == "vllm":
            return _open_vllm(policy, config)
        return _open_transformers(policy, config, use)


def _open_servers(policy: Policy, config: EvalConfig, use: Use) -> Engine:
    from engines.endpoint import EndpointEngine
    from tasks.served import Terms
    from tokens.codec import Characters

    return EndpointEngine(
        config.endpoint,
        config.served_as,
        policy.codec(weights=False) if policy.model else Characters(),
        window=use.window,
        concurrency=config.in_flight,
        chat=config.chat or not policy.model,
        terms=use.terms or Terms(),
    )


_loaded: WeakValueDictionary[tuple, torch.nn.Module] = WeakValueDictionary()
"""Models of the engines that live, by policy and the state of its files. Engines compute with
copies: the very weights, in modules of their own, since an engine hooks them."""


def _open_transformers(policy: Policy, config: EvalConfig, use: Use) -> Engine:
    """Load the weights, unless another engine that lives has them."""
    from engines.hf import TransformersEngine
    from models.load import settle_threads

    codec = policy.codec()
    folders = dict.fromkeys(map(Path, (policy.folder, policy.base_folder)))
    paths = [path for folder in folders for path in sorted(folder.glob("*")) if is_file(path)]
    key = policy, *((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    if (model := _loaded.get(key)) is None:
        model = _loaded[key] = policy.load()
    if use.settle:
        settle_threads(model)
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    kept = {"max_cache_tokens": use.cache_tokens, "remember": True} if use.cache_tokens else {}
    engine = TransformersEngine(
        copy.deepcopy(model, weights), codec, max_rows=config.in_flight, **kept
    )
    engine.loaded = model  # whoever opens the same meanwhile finds it
    return engine


def _open_vllm(policy: Policy, config: EvalConfig) -> Engine:
    import torch

    from engines.vllm_colocated import ColocatedEngine
    from models.load import config_of, longest_context

    if is_adapter(policy.model):
        raise UserError(
            "vLLM takes whole models here: give the folder that `train` or `export` wrote "
            "beside the adapters, or --engine transformers."
        )
    if policy.device == "mps" or policy.on_gpu != torch.cuda.is_available():
        raise UserError("vLLM computes on CUDA's GPU where there is one: leave --device out.")
    most = longest_context(config_of(policy.folder, policy.trust_remote_code))
    return ColocatedEngine(
        policy.folder,
        policy.codec(),
        window=min(policy.window or most, most),
        rows=config.in_flight,
        kv_gib=config.kv_gib or (0.0 if policy.on_gpu else 1.0),
        dtype=policy.dtype,
        packed=True,
        gpu_memory_utilization=0.9,
        trust_remote_code=policy.trust_remote_code,
    )


def open_reader(
    config: EvalConfig, agents: Sequence[Agent], untrained: bool = False, use: Use = Use()
) -> Engine:
    """Open the engine that answers agents, with the one or the other weights of an evaluation."""
    give_embedder(agents)
    if not config.endpoint:
        return open_engine(Policy.of_evaluation(config, agents, untrained), config, use)
    policy = Policy(
        config.model,
        thinking=any(agent.config.thinking for agent in agents),
        trust_remote_code=config.trust_remote_code,
    )
    if untrained:  # another model of the same server
        config = replace(config, served_as=config.untrained)
    return open_engine(policy, config, use)


# ---------------------------------------------------------------- for training


def check_frozen(run: RunConfig, lora_rank: int, agent: Agent) -> None:
    """Raise a UserError if frozen prompts would have no answer: vLLM holds one set of weights."""
    if run.engine == "vllm" and (not lora_rank or run.adapter) and (lost := lost_base(agent)):
        raise UserError(lost)


def lost_base(agent: Agent) -> str:
    """Say why vLLM cannot sample for an agent where training changes its weights, "" if it can."""
    if not agent.frozen_turns:
        return ""
    return (
        f"The agent {agent.label} asks the policy as it was before training, and vLLM holds one "
        "set of weights: give a --lora-rank and no --adapter, or --engine transformers."
    )


def open_sampler(
    run: RunConfig, training: TrainConfig, agent: Agent, policy: Policy, model, codec: Codec
) -> Engine:
    """Open what samples for the trainer of `model`, and what answers frozen prompts."""
    give_embedder([agent])
    if run.engine == "vllm":
        return _vllm_sampler(run, training, agent, policy, model, codec)
    from engines.frozen import WithFrozen
    from engines.hf import TransformersEngine
    from models.load import inner

    rows = training.in_flight

    def load_copy():
        return policy.load_trainable(training, dtype=policy.compute_dtype).requires_grad_(False)

    ours = load_copy() if policy.sharded else model  # else the trainer's own weights
    engine = TransformersEngine(inner(ours), codec, max_rows=rows, copy=policy.sharded)
    if not agent.frozen_turns:
        return engine
    # adapters that training went on from are not switched off: they are part of what was before
    off = training.lora_rank and not policy.adapter
    before = ours if off else load_copy()
    frozen = TransformersEngine(inner(before), codec, max_rows=rows)
    return WithFrozen(engine, frozen, before.disable_adapter if off else nullcontext)


def _vllm_sampler(
    run: RunConfig, training: TrainConfig, agent: Agent, policy: Policy, model, codec: Codec
) -> Engine:
    """Sample with vLLM in this process; memory is shared out by the plan."""
    import torch

    from engines.vllm_colocated import ColocatedEngine
    from models.load import dequantised_folder, inner, longest_context

    sleep, kv_gib, share, rows = run.sleep, run.kv_gib, 0.9, training.in_flight
    if policy.on_gpu:
        gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        sizes = geometry(str(policy.folder))
        p = plan(sizes, mode_of(training), gpu_gib, policy.ranks, training, agent)
        if not p.fits and (sleep == "auto" or not kv_gib):
            raise UserError(
                f"By the plan this does not fit the GPU's {gpu_gib:.0f} GiB (cli.py plan); "
                "sleep and kv_gib in a --config try it all the same."
            )
        sleep, kv_gib = p.sleep if sleep == "auto" else sleep, kv_gib or p.cache
        share = min(0.95, (p.sampler + kv_gib + GRAPHS_GIB) / gpu_gib)
        # more would only wait for room in the cache, or be thrown out of it and computed again
        rows = min(rows, turns_in_cache(sizes, kv_gib, agent.turn_tokens()))
    elif sleep == "auto":
        sleep = "1"  # a CPU releases nothing, but the calls are the same
    dtype = policy.compute_dtype
    weights = dequantised_folder(model, dtype) if policy.quantise else nullcontext(policy.folder)
    with weights as folder:
        return ColocatedEngine(
            folder,
            codec,
            window=min(policy.window, longest_context(inner(model).config)),
            rows=rows,
            kv_gib=kv_gib or 1.0,
            dtype=dtype,
            lora_rank=training.lora_rank,
            sleep=sleep,
            gpu_memory_utilization=share,
            trust_remote_code=policy.trust_remote_code,
        )


# ---------------------------------------------------------------- fingerprints


def engine_fingerprint(config: EvalConfig, engine: Engine, untrained: bool = False) -> str:
    """Fingerprint what answers: the weights, or the server's model; where it is plays no part."""
    if config.endpoint:
        route = "chat" if config.chat or not config.model else "completions"
        return f"{route} {engine.model} {engine.codec.fingerprint}"
    model = config.untrained if untrained else config.model
    bits = " in 4 bits" if config.quantise else ""
    return f"{config.engine} {fingerprint(model, engine.dtype)}{bits}"
