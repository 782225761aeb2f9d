"""What fits on a GPU, before anything is downloaded or allocated: arithmetic over a model's sizes.

No torch for a model of `SIZES`; any other is built on the meta device, checked and counted.
The formulas stand together in docs/train.md. What is experience rather than arithmetic (a
kernel's share of a card's peak, room for CUDA graphs and fragmentation) is a named constant here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig
from config.realmodels import base_of, check_model
from memagent import Agent

GIB = 2**30
CONTEXT_GIB = 1.0  # CUDA's context and libraries
FRAGMENTS = 0.06  # share of the card lost to fragmentation
GRAPHS_GIB = 2.0  # the sampler's workspace, CUDA graphs, logits of all turns
# Share of the sampler's cache room that stays free: the cache is allocated anew at every wake-up,
# from what is left by then.
CACHE_SLACK = 0.1
# of a 4-bit weight and its share of the doubly quantised scales (arXiv 2305.14314)
NF4_BYTES = 0.516
MODES = ("qlora", "lora", "full")
MIN_TURNS = 4  # in flight; with fewer, decoding reads the weights for hardly anything

# card -> (dense bfloat16 TFLOP/s that are summed in float32, memory TB/s, GiB), by the makers' data
# sheets; an A100 of 40 GiB has 1.6 TB/s
CARDS = {
    "B200": (2250, 8.0, 180), "MI300X": (1307, 5.3, 192), "H200": (989, 4.8, 141),
    "H100": (989, 3.35, 80), "A100": (312, 2.0, 80), "L40S": (362, 0.86, 48),
    "RTX 5090": (210, 1.79, 32), "RTX 4090": (165, 1.0, 24), "RTX 3090": (71, 0.94, 24),
    "L4": (121, 0.3, 24), "A10": (125, 0.6, 24), "RTX 5080": (113, 0.96, 16),
    "RTX 4080": (97, 0.72, 16), "RTX 4060 Ti": (44, 0.29, 16), "RTX 5070": (62, 0.67, 12),
    "RTX 3060": (25, 0.36, 12),
}  # fmt: skip
# GiB of common cards -> the card assumed for such a size without a name
USUAL = {24: "RTX 4090", 48: "L40S", 80: "H100", 141: "H200"}
# shares reached of a card's peak FLOP/s; that of the update was measured (bench/results/h100.json:
# .138 by 4 FLOP a weight and token, of which recomputation makes 6; the lm_head's time was in it,
# which is counted apart here, so an estimate is some per cent long)
PREFILL, UPDATE = 0.5, 0.21
DECODE = 0.6  # share reached of its peak memory bandwidth


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a decoder with gated feed-forward layers, and how many weights its parts have."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of a mixture, of the experts that one token passes
    vocab: int
    tied: bool  # embedding and lm_head are one matrix
    linear: int  # weights of linear layers, which adapters and quantisation reach
    experts: int  # of fused experts, which they do not
    passed: int  # of both, those that one token is multiplied with
    ends: int  # inputs and outputs of the linear layers
    weights: int  # of the whole model

    @property
    def layer(self) -> int:
        """Count the weights of one layer's matrices."""
        return (self.linear + self.experts) // self.layers

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token's keys and values in the sampler's cache."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def adapter(self, rank: int) -> int:
        """Count LoRA weights on all linear layers: rank x (inputs + outputs) of each."""
        return rank * self.ends


def dense(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, between: int, vocab: int,
    tied: bool,
) -> Geometry:  # fmt: skip
    """Return the geometry of a model without experts and biases; between: of `intermediate`."""
    q, kv = heads * head_dim, kv_heads * head_dim
    linear = layers * (hidden * (2 * q + 2 * kv) + 3 * hidden * between)
    ends = layers * (2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + between))
    weights = linear + vocab * hidden * (1 if tied else 2) + (2 * layers + 1) * hidden
    sizes = layers, hidden, heads, kv_heads, head_dim, between, vocab, tied
    return Geometry(*sizes, linear, 0, linear, ends, weights)


# sizes of the models' published config.json files
KNOWN = {
    "Qwen/Qwen3-0.6B": dense(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": dense(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen/Qwen3-4B": dense(36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen/Qwen3-8B": dense(36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen/Qwen2.5-3B-Instruct": dense(36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": dense(28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen2.5-14B-Instruct": dense(48, 5120, 40, 8, 128, 13824, 152064, False),
}
# and of those that are packaged
SIZES = KNOWN | {"smollm2": dense(30, 576, 9, 3, 64, 1536, 49152, True)}


CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
"""Names under which configurations say how many experts a token passes."""


def geometry(model: str) -> Geometry:
    """Return a model's sizes: of a name in `SIZES`, a folder, or a hub's config.json, which is
    fetched. UserError where they cannot be read, or for a model that no engine here trains."""
    if (model := str(base_of(model))) in SIZES:
        return SIZES[model]
    check_model(model, weights=False)
    from models.load import check_architecture, meta_model

    lm = meta_model(model or str(EMBEDDED))
    check_architecture(lm)
    config, layers = lm.config, lm.model.layers
    chosen = next(filter(None, (getattr(config, name, None) for name in CHOSEN)), 0)
    experts = passed = widest = 0
    for layer in layers:
        sizes = {"attention": 0.0, "others": 0.0}  # weights that one token passes
        for name, p in layer.named_parameters():
            fused = p.ndim == 3  # [experts, outputs, inputs]
            if ".experts." in name and not (fused and chosen):
                raise UserError(f"{model} is a mixture of a kind whose experts are not counted.")
            experts += p.numel() if fused else 0
            share = chosen / len(p) if fused else 1
            sizes["attention" if "attn" in name else "others"] += share * p.numel() * (p.ndim > 1)
        passed += sum(sizes.values())
        widest = max(widest, sizes["others"])
    linear = [m for m in layers.modules() if hasattr(m, "in_features")]
    heads = config.num_attention_heads
    return Geometry(
        layers=len(layers),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=int(widest) // (3 * config.hidden_size),
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        linear=sum(m.weight.numel() for m in linear),
        experts=experts,
        passed=int(passed),
        ends=sum(m.in_features + m.out_features for m in linear),
        weights=sum(p.numel() for p in lm.parameters()),
    )


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of one GPU in GiB, item by item, and what follows from it."""

    mode: str
    weights: float  # the trainer's
    gradients: float
    optimizer: float
    activations: float  # of a pass over micro_tokens
    sampler: float  # its weights
    cache: float  # its keys and values
    sleep: str  # the sampler's level of sleep during the update: never, 1 or 2
    micro_tokens: int  # most tokens of one forward and backward pass; 0 = not even a turn fits
    turns: int  # turns in flight that the cache holds without sharing; 0 = too few
    rollout: float  # peak of the phase
    update: float  # peak of the phase

    @property
    def fits(self) -> bool:
        return self.micro_tokens > 0 and self.turns > 0


def activations_gib(g: Geometry, tokens: int, mode: str) -> float:
    """Return GiB of a forward and backward pass over a packed row with recomputed layers."""
    stored = g.layers * tokens * g.hidden * 2  # the layers' inputs
    # one layer in 16 bits, forward and gradients: norms, q k v and attention's output, gate, up,
    # their product
    per_token = 6 * g.hidden + 2 * (2 * g.heads + 2 * g.kv_heads) * g.head_dim + 6 * g.intermediate
    layer = tokens * per_token * 2
    gathered = 2 * g.layer * 2 + g.embedding * 2 if mode == "full" else 0
    dequantised = 2 * g.hidden * g.intermediate if mode == "qlora" else 0  # one matrix at a time
    logits = 3 * 512 * g.vocab * 4
    return (stored + layer + gathered + dequantised + logits + tokens * g.hidden * 6) / GIB


def turns_in_cache(g: Geometry, cache_gib: float, window: int) -> int:
    """Return how many turns of `window` tokens a cache holds without sharing; at least one."""
    return max(1, int(cache_gib * GIB / (window * g.kv_bytes) + 1e-6))


def plan(
    g: Geometry, mode: str, gpu_gib: float, devices: int, grpo: GRPOConfig, agent: Agent
) -> Plan:
    """Plan the memory of a training of `mode` (qlora, lora, full) on `devices` GPUs of `gpu_gib`.

    Adapters have rank `grpo.lora_rank`, or 32 where that is 0.
    """
    if grpo.optimizer == "adamw8bit" and devices > 1:
        raise UserError("AdamW in 8 bits works on one GPU only.")
    window = agent.turn_tokens()
    weights, gradients, optimizer = _trainer_gib(g, mode, devices, grpo)
    sampler = 2 * g.weights / GIB  # in 16 bits; of a 4-bit policy the dequantised weights
    room = gpu_gib * (1 - FRAGMENTS) - CONTEXT_GIB

    # The rollout: gradients are freed, the optimizer stays, the cache takes what is left.
    one_turn = window * g.kv_bytes / GIB
    wanted = min(max(grpo.tasks_per_step) * grpo.group_size // devices or 1, grpo.in_flight)
    free = (room - weights - optimizer - sampler - GRAPHS_GIB) * (1 - CACHE_SLACK)
    turns = max(0, min(wanted, int(free / one_turn)))
    if turns < min(wanted, MIN_TURNS):
        turns = 0
    cache = turns * one_turn

    # The update: the lightest sleep that leaves room for full passes. Level 2 drops the sampler's
    # weights, which full training sends anew anyway; level 1 moves them to the host.
    state = weights + gradients + optimizer
    full_pass = min(grpo.micro_tokens, 1 << 15)
    awake = sampler + cache + GRAPHS_GIB
    sleep, resident = "1", GRAPHS_GIB
    if mode == "full":
        sleep = "2"
    elif _most_tokens(g, mode, room, state, awake) >= max(full_pass, window):
        sleep, resident = "never", awake
    most_tokens = _most_tokens(g, mode, room, state, resident)
    # a turn is never cut: one longer than a full pass gets a pass of its own
    micro_tokens = min(most_tokens, full_pass) if most_tokens >= window else 0
    activations = activations_gib(g, micro_tokens or 1024, mode)
    return Plan(
        mode=mode,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        sampler=sampler,
        cache=cache,
        sleep=sleep,
        micro_tokens=micro_tokens,
        turns=turns,
        rollout=CONTEXT_GIB + weights + optimizer + sampler + GRAPHS_GIB + cache,
        update=CONTEXT_GIB + state + activations + resident,
    )


def _trained(g: Geometry, mode: str, grpo: GRPOConfig) -> tuple[int, int]:
    """Return how many weights are trained, and the bytes that the optimizer keeps of each."""
    trained = g.weights if mode == "full" else g.adapter(grpo.lora_rank or 32)
    return trained, 2 if grpo.optimizer == "adamw8bit" else 8


def checkpoint_gb(g: Geometry, mode: str, grpo: GRPOConfig) -> float:
    """Return the GB (10^9 bytes) of a checkpoint: trained weights in float32, optimizer."""
    trained, moments = _trained(g, mode, grpo)
    return (4 + moments) * trained / 1e9


def _trainer_gib(
    g: Geometry, mode: str, devices: int, grpo: GRPOConfig
) -> tuple[float, float, float]:
    """Return GiB of the trainer's weights, gradients and optimizer on each GPU."""
    shards = 1 if mode == "qlora" else devices  # quantised weights are replicated, not sharded
    trained, moments = _trained(g, mode, grpo)
    if mode == "full":
        frozen = 2.0 * g.weights if grpo.kl else 0.0  # the reference
    elif mode == "lora":
        frozen = 2.0 * g.weights
    else:
        frozen = NF4_BYTES * g.linear + 2 * (g.weights - g.linear)
    sizes = frozen + 4 * trained, 4 * trained, moments * trained
    return tuple(n_bytes / shards / GIB for n_bytes in sizes)


def _most_tokens(g: Geometry, mode: str, room: float, state: float, resident: float) -> int:
    """Return the most tokens of a pass, a power of two from 1,024 to 65,536; 0 = none fits."""
    sizes = [1 << k for k in range(10, 17)]
    fitting = (n for n in sizes if state + activations_gib(g, n, mode) + resident <= room)
    return max(fitting, default=0)


def smallest(planned: Callable[[int], Plan]) -> int:
    """Return the smallest of the common cards, in GiB, that a plan fits; 0 = none."""
    return next((gib for gib in USUAL if planned(gib).fits), 0)


# ---------------------------------------------------------------- time


def step_seconds(
    g: Geometry,
    p: Plan,
    devices: int,
    grpo: GRPOConfig,
    agent: Agent,
    sections: int = 15,
    card: str = "H100",
) -> tuple[float, float]:
    """Estimate the seconds of one training step by a plan: (rollout, update).

    sections: of a document. card: one of `CARDS`.
    """
    window = agent.turn_tokens()
    shown, answered = agent.limits().shown, agent.limits().written
    flops, bandwidth = (x * 1e12 for x in CARDS[card][:2])
    groups = max(grpo.tasks_per_step) / devices
    # of a section of a group: first in its prompts, it is computed once for all members
    section, members = agent.config.chunk_tokens, grpo.group_size
    memories = members * (shown * 0.7 + 128)  # question and template beside each
    times = 1 if agent.config.layout == "shared" else members
    prompts = groups * sections * (times * section + memories)
    responses = sections * answered + agent.config.final_tokens
    written = groups * grpo.group_size * responses * 0.7  # responses rarely use all their tokens
    # every decoding step reads the sampler's weights and the cache of all turns in flight
    turns = max(p.turns, 1)
    decode_s = (p.sampler * GIB + turns * window * g.kv_bytes) / (bandwidth * DECODE)
    rollout_s = prompts * 2 * g.passed / (flops * PREFILL) + written / turns * decode_s
    # passes forward: the recomputed layers, log-probs before several updates, the reference's
    forward = 1 + bool(grpo.updates_per_rollout > 1 or grpo.rows_per_update) + bool(grpo.kl)
    factor = (6 if p.mode == "full" else 4) + 2 * forward
    # of the tokens that are learnt the lm_head computes log-probs
    passed = (prompts + written) * g.passed + written * g.vocab * g.hidden
    update_s = passed * factor / (flops * UPDATE)
    return rollout_s, update_s
