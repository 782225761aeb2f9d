"""What fits on a GPU, before anything is downloaded or allocated: arithmetic over a model's sizes.

Holds: `Geometry` and the sizes of common models, `Plan` and `plan` (memory of each phase, what the sampler does meanwhile, seconds a
step), the tables that `cli.py plan` prints. Leaves out: the training itself (commands/train.py). No torch.
Exercise it: `python cli.py plan --model Qwen/Qwen3-4B --gpu-gib 24`. Read next: commands/train.py.

Every figure is a formula in `FORMULAS`; what is no arithmetic but experience (a kernel's share of a card's peak, room for graphs and
fragments) is a named constant here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig
from memagent import Agent

GIB = 2**30
CONTEXT_GIB = 1.0  # CUDA's context and libraries
FRAGMENTS = 0.06  # share of the card that the allocator cannot use
GRAPHS_GIB = 2.0  # the sampler's workspace, CUDA graphs, logits of all turns
SPARED = 0.1  # share of the room for the sampler's cache that stays free: it is taken anew at every wake-up, from what is left by then
NF4_BYTES = (
    0.516  # a weight of 4 bits and its share of the doubly quantised scales (arXiv 2305.14314)
)
MODES = ("qlora", "lora", "full")

# card -> (dense bfloat16 TFLOP/s, memory TB/s), by the makers' data sheets
CARDS = {
    "H200": (989, 4.8),
    "H100": (989, 3.35),
    "A100": (312, 2.0),
    "L40S": (362, 0.86),
    "RTX 4090": (165, 1.0),
    "L4": (121, 0.3),
    "A10": (125, 0.6),
}
CARD_GIB = {"H200": 141, "H100": 80, "A100": 80, "L40S": 48, "RTX 4090": 24, "L4": 24, "A10": 24}
OF_SIZE = (
    "RTX 4090",
    "L40S",
    "H100",
    "H200",
)  # the card that a size stands for, where none is named; in the order of `SIZES_GIB`
FEWEST_TURNS = 4  # side by side; with fewer the weights are read for hardly anything
SIZES_GIB = (24, 48, 80, 141)  # of common cards
PREFILL, DECODE, UPDATE = (
    0.5,
    0.6,
    0.25,
)  # shares of the card's peak: floating point, memory, floating point


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a decoder with gated feed-forward layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool  # embedding and lm_head are one matrix

    @property
    def layer(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def linear(self) -> int:
        """Weights that adapters and quantisation reach: all layers' matrices."""
        return self.layers * self.layer

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        return self.linear + self.embedding + (2 * self.layers + 1) * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def adapter(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear layers: rank x (inputs + outputs) of each."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_layer = (
            2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.intermediate)
        )
        return self.layers * rank * per_layer


# sizes of the models' published config.json files
KNOWN = {
    "Qwen/Qwen3-0.6B": Geometry(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": Geometry(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen/Qwen3-4B": Geometry(36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen/Qwen3-8B": Geometry(36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen/Qwen2.5-3B-Instruct": Geometry(36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": Geometry(28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen2.5-14B-Instruct": Geometry(48, 5120, 40, 8, 128, 13824, 152064, False),
}


def geometry(model: str, download: bool = True) -> Geometry:
    """The sizes of a model: of the table above, of a folder's config.json, or of the hub's (a few kilobytes; without `download` what was
    downloaded before). UserError otherwise."""
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model or EMBEDDED, "config.json")
    try:
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
        else:
            import logging

            from huggingface_hub import hf_hub_download

            logging.getLogger("huggingface_hub").setLevel(
                logging.CRITICAL
            )  # it reports every retry
            config = json.loads(
                Path(
                    hf_hub_download(model, "config.json", local_files_only=not download)
                ).read_text(encoding="utf-8")
            )
        heads = config["num_attention_heads"]
        return Geometry(
            config["num_hidden_layers"],
            config["hidden_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["intermediate_size"],
            config["vocab_size"],
            bool(config.get("tie_word_embeddings", False)),
        )
    except Exception as error:  # of a file, of JSON, or any of the hub's: what went wrong is said in one line all the same
        reason = str(error).strip().split("\n")[0]
        known = ", ".join(name.split("/")[1] for name in KNOWN)
        raise UserError(
            f"The sizes of {model!r} cannot be read ({reason}); known without a download are {known}."
        ) from error


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of one GPU in GiB, by what takes it, and what follows from it."""

    mode: str
    weights: float  # the trainer's
    gradients: float
    optimizer: float
    activations: float  # of micro_tokens
    sampler: float  # its weights
    cache: float  # its keys and values
    sleep: str  # what the sampler does while the trainer updates
    micro_tokens: int  # most tokens of one forward and backward pass; 0 = not even a turn fits
    turns: int  # turns in flight that the cache holds without sharing; 0 = too few
    rollout: float  # peak of the phase
    update: float  # peak of the phase
    rollout_s: float  # of one step
    update_s: float

    @property
    def fits(self) -> bool:
        return self.micro_tokens > 0 and self.turns > 0


FORMULAS = """\
W weights, L those of the layers' matrices, E of embedding and lm_head, A of the adapters, N GPUs; bytes:
weights      full 4W/N; lora (2W + 4A)/N; qlora 0.516 L + 2E + 4A         gradients  4/N a trained weight
optimizer    AdamW 8/N a trained weight, in 8 bits 2                      sampler    2W
reference    full with --kl 2W/N, else the base weights, which are there
activations  with recomputation: layers x T x hidden x 2, one layer of T tokens in full, two gathered layers in 16 bits (full),
             three chunks of 512 x vocabulary x 4; T = micro_tokens
cache        turns x window x 4 x layers x kv_heads x head_dim
rollout      weights + optimizer + sampler + cache                        update     weights + gradients + optimizer + activations + what sleep leaves
seconds      prefill 2L, decode (sampler + cache read) / bandwidth a token of all turns, update (6L full, 4L adapters) + 2L recomputed, each a token"""


def _gib(n_bytes: float) -> float:
    return n_bytes / GIB


def activations_gib(g: Geometry, tokens: int, mode: str) -> float:
    """Of a forward and backward pass over a packed row with recomputed layers."""
    kept = g.layers * tokens * g.hidden * 2
    # of one layer, forward and its gradients: norms, q k v and the attention's output, gate, up, their product, in 16 bits
    inside = (
        tokens
        * (6 * g.hidden + 2 * (2 * g.heads + 2 * g.kv_heads) * g.head_dim + 6 * g.intermediate)
        * 2
    )
    gathered = 2 * g.layer * 2 + g.embedding * 2 if mode == "full" else 0
    unpacked = 2 * g.hidden * g.intermediate if mode == "qlora" else 0  # one matrix at a time
    return _gib(kept + inside + gathered + unpacked + 3 * 512 * g.vocab * 4 + tokens * g.hidden * 6)


def plan(
    g: Geometry,
    mode: str,
    gpu_gib: float,
    devices: int,
    grpo: GRPOConfig,
    agent: Agent,
    sections: int = 15,
    card: str = "H100",
) -> Plan:
    """What a training of `mode` (qlora, lora, full) takes of each of `devices` GPUs of `gpu_gib` GiB.

    sections: of a document, for the time alone. Adapters have rank `grpo.lora_rank`, or 32 where that is 0.
    """
    if mode not in MODES:
        raise UserError(f"The mode must be one of {', '.join(MODES)}, not {mode!r}.")
    if grpo.optimizer == "adamw8bit" and devices > 1:
        raise UserError("AdamW in 8 bits works on one GPU only.")
    if devices < 1 or gpu_gib <= 0 or sections < 1:
        raise UserError(
            "A plan needs at least one GPU, of more than 0 GiB, and documents of at least one section."
        )
    if card not in CARDS:
        raise UserError(f"Unknown card {card!r}: choose one of {', '.join(CARDS)}.")
    shards = 1 if mode == "qlora" else devices  # every rank has all of the quantised weights
    trained = g.weights if mode == "full" else g.adapter(grpo.lora_rank or 32)
    frozen = {
        "full": 2.0 * g.weights * bool(grpo.kl),
        "lora": 2.0 * g.weights,
        "qlora": NF4_BYTES * g.linear + 2 * (g.weights - g.linear),
    }[mode]
    weights, gradients = _gib((frozen + 4 * trained) / shards), _gib(4 * trained / shards)
    optimizer = _gib((2 if grpo.optimizer == "adamw8bit" else 8) * trained / shards)
    sampler = _gib(2 * g.weights)  # with 4-bit weights, too: it is given what they stand for

    room = gpu_gib * (1 - FRAGMENTS) - CONTEXT_GIB
    state = weights + gradients + optimizer
    window = agent.turn_tokens()
    shown, answered = agent.limits().shown, agent.limits().written
    wanted = max(grpo.tasks_per_step) * grpo.group_size // devices or 1
    wanted = min(wanted, grpo.in_flight)
    one_turn = _gib(window * g.kv_bytes)

    def most_tokens(left: float) -> int:
        sizes = [1 << k for k in range(10, 17)]
        return max(
            (n for n in sizes if state + activations_gib(g, n, mode) + left <= room), default=0
        )

    # the rollout: gradients are dropped, the optimizer stays. What is left after the weights is the cache's
    free = (room - weights - optimizer - sampler - GRAPHS_GIB) * (1 - SPARED)
    turns = max(0, min(wanted, int(free / one_turn)))
    turns *= turns >= min(wanted, FEWEST_TURNS)
    cache = turns * one_turn
    # the update: as little sleep as leaves room for full passes
    resident = {"never": sampler + cache + GRAPHS_GIB, "1": GRAPHS_GIB, "2": GRAPHS_GIB}
    enough = min(grpo.micro_tokens, 1 << 15)
    if mode == "full":
        sleep = "2"
    else:
        sleep = "never" if most_tokens(resident["never"]) >= max(enough, window) else "1"
    in_a_pass = most_tokens(resident[sleep])
    micro_tokens = min(in_a_pass, enough) * (
        in_a_pass >= window
    )  # a turn is never cut: longer ones stand in a pass alone
    activations = activations_gib(g, micro_tokens or 1024, mode)

    flops, bandwidth = (x * 1e12 for x in CARDS[card])
    groups = max(grpo.tasks_per_step) / devices
    prompts = (
        groups
        * sections
        * _tokens_of_group(agent.config.layout, grpo.group_size, agent.config.chunk_tokens, shown)
    )
    written = (
        groups * grpo.group_size * (sections * answered + agent.config.final_tokens) * 0.7
    )  # memories are not always full
    per_step = (sampler * GIB + max(turns, 1) * window * g.kv_bytes) / (bandwidth * DECODE)
    rollout_s = prompts * 2 * g.linear / (flops * PREFILL) + written / max(turns, 1) * per_step
    factor = (6 if mode == "full" else 4) + 2
    update_s = (prompts + written) * factor * g.linear / (flops * UPDATE)
    return Plan(
        mode,
        weights,
        gradients,
        optimizer,
        activations,
        sampler,
        cache,
        sleep,
        micro_tokens,
        turns,
        CONTEXT_GIB + weights + optimizer + sampler + GRAPHS_GIB + cache,
        CONTEXT_GIB + state + activations + resident[sleep],
        rollout_s,
        update_s,
    )


def longest_section(
    g: Geometry,
    mode: str,
    gpu_gib: float,
    devices: int,
    grpo: GRPOConfig,
    agent: Agent,
) -> int:
    """Most tokens of a section, a power of two up to 32,768, with which a training still fits; 0 = none. How many sections a document has
    takes no memory."""
    sizes = [1 << k for k in range(9, 16)]
    return max(
        (
            n
            for n in sizes
            if plan(g, mode, gpu_gib, devices, grpo, agent.with_settings(chunk_tokens=n)).fits
        ),
        default=0,
    )


def _tokens_of_group(layout: str, members: int, section: int, shown: int) -> float:
    """Prompt tokens of one section of a group that are computed: with the section first all members share it."""
    memory = shown * 0.7 + 128  # question and template beside it
    return section + members * memory if layout == "shared" else members * (section + memory)
