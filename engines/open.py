"""Open any engine: a model's own, a server's, or the one that samples for a trainer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from config.errors import UserError, alone
from config.files import is_file
from config.options import EMBEDDED, TEMPLATE_DATE, EvalConfig, RunConfig, TrainConfig
from config.realmodels import base_of, is_adapter
from memagent import Agent
from models.packaged import ready
from models.plan import GIB, GRAPHS_GIB, geometry, plan, turns_in_cache
from models.policy import Policy, date_of, mode_of

if TYPE_CHECKING:  # torch comes with it
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


class _Weights:
    """A model as it was loaded, which never computes itself: engines compute with its copies."""

    def __init__(self, model):
        self.model = model

    def copy(self):
        """Return a model with the very weights, and with modules of its own: an engine hooks
        them."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})


_weights: WeakValueDictionary[tuple, _Weights] = WeakValueDictionary()
"""What engines of this process have at this moment, by policy and by the state of its files."""


def _shared(policy: Policy) -> _Weights:
    """Return the weights of a policy: loaded, unless another engine that lives has them."""
    folders = dict.fromkeys(map(Path, (policy.folder, policy.base_folder)))
    paths = [path for folder in folders for path in sorted(folder.glob("*")) if is_file(path)]
    key = policy, *((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    if (found := _weights.get(key)) is None:
        found = _weights[key] = _Weights(policy.load())
    return found


@alone()
def open_engine(
    policy: Policy, config: EvalConfig = EvalConfig(), cache_tokens: int = 0, settle: bool = True
) -> Engine:
    """Open the engine of an evaluation's settings with a policy's weights, its codec inside.

    cache_tokens: of our engine's cache, in which finished turns stay as long as there is room, for
    texts that are read again; 0 = as an evaluation needs it. settle: choose the process's threads
    by the model.
    """
    codec = policy.codec()
    if config.engine == "vllm":
        return _open_vllm(policy, codec, config)
    from engines.hf import TransformersEngine
    from models.load import settle_threads

    weights = _shared(policy)
    if settle:
        settle_threads(weights.model)
    room = {"max_cache_tokens": cache_tokens, "remember": True} if cache_tokens else {}
    engine = TransformersEngine(weights.copy(), codec, max_rows=config.in_flight, **room)
    engine.weights = weights  # whoever opens the same meanwhile finds them
    return engine


def _open_vllm(policy: Policy, codec: Codec, config: EvalConfig) -> Engine:
    import torch

    from engines.vllm_colocated import ColocatedEngine
    from models.load import config_of, window_for_vllm

    if is_adapter(policy.model):
        raise UserError(
            "vLLM takes whole models here: give the folder that `train` or `export` wrote "
            "beside the adapters, or --engine transformers."
        )
    if policy.device == "mps" or policy.on_gpu != torch.cuda.is_available():
        raise UserError("vLLM computes on CUDA's GPU where there is one: leave --device out.")
    most = window_for_vllm(config_of(policy.folder, policy.trust_remote_code))
    return ColocatedEngine(
        policy.folder,
        codec,
        window=min(policy.window or most, most),
        rows=config.in_flight,
        kv_gib=config.kv_gib or (0.0 if policy.on_gpu else 1.0),
        dtype=policy.dtype,
        packed=True,
        gpu_memory_utilization=_share_of_card(policy, config.kv_gib) if policy.on_gpu else 0.9,
        trust_remote_code=policy.trust_remote_code,
    )


def _gpu_gib() -> float:
    """Return the memory of this process's GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


def _share_of_card(policy: Policy, kv_gib: float) -> float:
    """Return the share of the GPU's memory that vLLM is given for reading.

    .9; no more than weights and cache take where the size of the cache is given, and the model's
    sizes are known.
    """
    share = 0.9
    if not kv_gib:
        return share
    try:
        weights = geometry(str(policy.folder)).weights
    except UserError:  # an architecture whose sizes are not known
        return share
    weights_gib = weights * (4 if policy.dtype == "float32" else 2) / GIB
    return min(share, (weights_gib + kv_gib + GRAPHS_GIB) / _gpu_gib())


def open_endpoint(
    config: EvalConfig,
    served_as: str,
    thinking: bool,
    window: int | None = None,
    terms: Terms | None = None,
    date: str = TEMPLATE_DATE,
) -> Engine:
    """Open an engine over servers of an OpenAI-compatible protocol.

    config.model is only where the tokenizer comes from; without it text is sent and lengths are
    estimated. served_as: the model's name at the servers. window: theirs, where they do not say.
    terms: None = those of an evaluation, which waits for long. date: that a chat template tells.
    """
    from engines.endpoint import EndpointEngine
    from tasks.served import Terms
    from tokens.codec import Characters

    codec: Codec = Characters()
    if config.model:
        policy = Policy(
            config.model, thinking=thinking, trust_remote_code=config.trust_remote_code, date=date
        )
        codec = policy.codec(weights=False)
    chat = config.chat or not config.model
    urls, terms = config.endpoint, terms or Terms()
    return EndpointEngine(urls, served_as, codec, window, config.in_flight, chat, terms)


def weights_of(config: EvalConfig) -> dict[bool, list[str]]:
    """Group the agents by whether the policy before training answers, as they are named in
    --agents."""
    groups: dict[bool, list[str]] = {}
    for name in config.agents:
        _, at, weights = name.partition("@")
        if at and (weights != "untrained" or not config.untrained):
            only = f"{name!r}: after an agent's name only @untrained may stand"
            raise UserError(f"{only}: say by --untrained which policy that is.")
        groups.setdefault(bool(at), []).append(name)
    return groups


def policy_folder(config: EvalConfig, untrained: bool) -> str:
    """Return where the policy that answers lies, or its name; "" for an unknown model of an
    endpoint."""
    named = config.untrained if untrained else config.model
    return named or ("" if config.endpoint else str(EMBEDDED))


def open_reader(
    config: EvalConfig,
    agents: Sequence[Agent],
    untrained: bool = False,
    window: int | None = None,
    terms: Terms | None = None,
    cache_tokens: int = 0,
    settle: bool = True,
) -> Engine:
    """Open the engine that answers agents, with the one or the other weights of an evaluation.

    window: of an endpoint whose server does not say. terms: see `open_endpoint`. cache_tokens,
    settle: see `open_engine`.
    """
    give_embedder(agents)
    if config.endpoint:  # the policy before training is another model of the same server
        thinking = any(agent.config.thinking for agent in agents)
        name = config.untrained if untrained else config.served_as
        return open_endpoint(config, name, thinking, window, terms, date_of(agents))
    policy = Policy.of_evaluation(config, agents, untrained)
    return open_engine(policy, config, cache_tokens, settle)


SMALL, ON_A_CPU = 10_000_000, (64, 16)  # weights of a model; trajectories of such, and of others


def most_in_flight(config: EvalConfig, policy: Policy) -> int:
    """Return how many trajectories an evaluation keeps in flight.

    On a CPU, where our engine is no faster with more, few: rows then come as documents are read,
    and not all at the end.
    """
    if config.engine != "transformers" or config.endpoint or policy.device != "cpu":
        return config.in_flight
    try:
        small = geometry(str(policy.base_folder)).weights < SMALL
    except UserError:  # an architecture whose sizes are not known
        small = False
    return min(config.in_flight, ON_A_CPU[not small])


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
    opened = _vllm_sampler if run.engine == "vllm" else _transformers_sampler
    return opened(run, training, agent, policy, model, codec)


def _transformers_sampler(
    run: RunConfig, training: TrainConfig, agent: Agent, policy: Policy, model, codec: Codec
) -> Engine:
    """Sample from the trainer's own weights, or from a copy where those are shards.

    Where the policy before training answers frozen prompts it is here, too.
    """
    from engines.frozen import WithFrozen
    from engines.hf import TransformersEngine
    from models.load import inner

    rows = training.in_flight

    def load_copy():
        return policy.load_trainable(training, dtype=policy.compute_dtype).requires_grad_(False)

    ours = load_copy() if policy.sharded else model
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
    from engines.vllm_colocated import ColocatedEngine
    from models.load import dequantised_folder, inner, window_for_vllm

    sleep, kv_gib, share, rows = run.sleep, run.kv_gib, 0.9, training.in_flight
    if policy.on_gpu:
        gpu_gib, sizes = _gpu_gib(), geometry(str(policy.folder))
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
            window=min(policy.window, window_for_vllm(inner(model).config)),
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
