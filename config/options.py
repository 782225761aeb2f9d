"""The settings of the commands: every field is a flag, its docstring the help (config/flags.py).

Settings of agents are in memagent.py and agents/, of suites in suites/. No torch, so that `--help`
is quick.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from config.errors import UserError
from config.settings import (
    COUNT,
    LIMIT,
    NOT_EMPTY,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SEED,
    SHARE,
    TOP_P,
    UNFLAGGED,
    Settings,
)

# the base policy that ships with the repository
EMBEDDED = Path(__file__).parent.parent / "embedded" / "weights"
TINY = "tiny"  # its name as a --model
# the real model that reads where nothing else is found, as a --model and for a person
READER, READER_TITLE = "smollm2-reader", "SmolLM2 reader"

PRESETS: dict[str, dict[str, dict]] = {  # of no agent: section -> fields; agents bring their own
    "default": {},
    # for the embedded policy, chosen on the dev split (dev/LESSONS.md). Hotter than evaluated:
    # a failure of probability p at temperature T has about p^T at 1; hotter as documents grow,
    # because failures, the signal, get rare
    "demo": {
        "grpo": {
            "tasks_per_step": (8,),
            "group_size": 16,
            "normalisation": "mean",
            "temperature": (1.3, 1.6, 1.9, 2.2),
            "lr": 4e-4,
            "decay_from": 0.6,
            "turns_per_trajectory": 5,
            "micro_tokens": 4096,
        },
    },
}


def _clip(ratio: float) -> float:
    if ratio != 0 and not ratio > 1:
        raise ValueError("must be above 1, or 0 for none")
    return ratio


Dtype = Literal["auto", "float32", "bfloat16"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, COUNT]
Whole = Annotated[int, LIMIT]
Share = Annotated[float, SHARE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Seed = Annotated[int, SEED]
Names = Annotated[tuple[str, ...], NOT_EMPTY]


def without_url(value: object) -> object:
    """Return the name of a served model, openai:URL#MODEL, without its URL, for the server may
    move; any other value as it is.

    >>> without_url("openai:http://127.0.0.1:8000/v1#org/model")
    'openai:#org/model'
    """
    return re.sub("^openai:[^#]+#", "openai:#", value) if isinstance(value, str) else value


CACHE_TOKENS = 1 << 16
"""Tokens of sections that `ask` and `serve` keep in memory for the next question."""
TEMPLATE_DATE = "2024-07-26"
"""What Llama 3's templates tell where there is no clock, so that nothing depends on one."""


def settings_of_rows(config: Settings, told: str) -> dict:
    """Return the settings of an agent that its rows depend on.

    told: the date that the model is told, "" if it is told none: then it plays no part.
    """
    settings = {name: without_url(value) for name, value in asdict(config).items()}
    return settings | ({"template_date": told} if told else {})


# ---------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Settings of any training: how many steps, and how the weights change."""

    steps: Count = 100
    """training steps, each with one rollout"""
    tasks_per_step: Annotated[tuple[Count, ...], NOT_EMPTY] = (8,)
    """tasks (groups) per step; a list has one per task length, the last for all further ones"""
    outcome: Literal["exact", "em", "f1", "sub_em"] = "exact"
    """reward: exact = 1 for a right answer in the required form; em, f1 = as SQuAD; sub_em = 1 for
    an answer that contains a right one"""
    lr: NotNegative = 7e-4
    """peak learning rate; the default is for the embedded policy, a real model is given its own"""
    warmup: Annotated[Whole, UNFLAGGED] = 5
    """steps of linear warm-up"""
    warmup_from: Annotated[Literal["share", "zero"], UNFLAGGED] = "share"
    """rate of the first step: share = peak / warmup; zero = as in verl, it changes no weight"""
    decay_from: Annotated[Share, UNFLAGGED] = 1.0
    """share of the steps after which the rate falls linearly to a tenth; 1 = constant"""
    betas: Annotated[tuple[Beta, Beta], UNFLAGGED] = (0.9, 0.95)
    """AdamW's betas"""
    weight_decay: Annotated[NotNegative, UNFLAGGED] = 0.0
    """AdamW's weight decay"""
    grad_clip: Annotated[Positive, UNFLAGGED] = 1.0
    """most norm of the gradient; steps with a norm that is not finite are skipped and counted"""
    lora_rank: Whole = 0
    """rank of the LoRA adapters; 0 = full fine-tuning"""
    lora_alpha: Annotated[NotNegative, UNFLAGGED] = 0.0
    """scale of the adapters; 0 = twice the rank"""
    lora_targets: Annotated[str, UNFLAGGED] = "all-linear"
    """linear layers with adapters: all-linear, or names such as q_proj,v_proj"""
    quantise: bool = False
    """QLoRA: keep the base weights in 4 bits (NF4); requires --lora-rank"""
    optimizer: Annotated[Literal["adamw", "adamw8bit"], UNFLAGGED] = "adamw"
    """adamw, or adamw8bit, which keeps its state in 8 bits (one GPU only)"""
    micro_tokens: Count = 16384
    """most tokens of one forward and backward pass; affects memory and speed only"""
    recompute: bool = False
    """gradient checkpointing: saves memory, takes about a third longer"""
    in_flight: Count = 256
    """most readings in flight"""
    seed: Seed = 0
    """of everything random"""

    def __post_init__(self):
        if self.quantise and not self.lora_rank:
            raise UserError("quantise keeps weights that are not trained: give a --lora-rank too.")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainConfig):
    """Settings of reinforcement learning; a preset sets several."""

    group_size: Annotated[int, Field(ge=2, lt=2**63)] = 16
    """G, readings of one task, which are judged by each other"""
    updates_per_rollout: Annotated[Count, UNFLAGGED] = 1
    """optimizer steps per rollout, each on its own share of the readings"""
    rows_per_update: Annotated[Whole, UNFLAGGED] = 0
    """turns per optimizer step, about, instead of updates_per_rollout, which 0 goes by"""
    without_signal: Annotated[Literal["skip", "keep"], UNFLAGGED] = "skip"
    """groups whose advantages are all 0: keep = they count in the loss and in KL, as in verl"""
    credit: Annotated[Literal["share", "split"], UNFLAGGED] = "share"
    """advantage of a turn: that of its reading; split = divided by the number of turns"""
    normalisation: Annotated[Literal["mean", "std"], UNFLAGGED] = "std"
    """advantages in a group: rewards minus their mean; std = divided by their deviation, too"""
    aggregation: Annotated[Literal["token_mean", "turn_mean", "trajectory_mean"], UNFLAGGED] = (
        "token_mean"
    )
    """average of the token losses: over all tokens, or over turns' or readings' means"""
    alpha: Annotated[Share, UNFLAGGED] = 0.8
    """weight of the outcome's advantage in turns with rewards of their own, which have 1 - alpha"""
    clip_low: Annotated[Share, UNFLAGGED] = 0.2
    """clip the ratio below at 1 - clip_low"""
    clip_high: Annotated[NotNegative, UNFLAGGED] = 0.28
    """clip the ratio above at 1 + clip_high"""
    dual_clip: Annotated[float, AfterValidator(_clip), UNFLAGGED] = 0.0
    """c: for negative advantages A the loss is at most -c * A; 0 = off"""
    kl: NotNegative = 0.0
    """weight of KL(policy, reference) in the loss, by the k3 estimate; 0 = no reference model"""
    importance: Annotated[Literal["truncate", "none"], UNFLAGGED] = "truncate"
    """between sampler and trainer: truncate = weight each token by min(trainer/sampler, 2)"""
    max_mismatch: Annotated[NotNegative, UNFLAGGED] = 0.0
    """KL (k3) of sampler and trainer that ends the run; 0 = 1e-6 in float32, else 0.01"""
    turns_per_trajectory: Annotated[Whole, UNFLAGGED] = 0
    """train on so many update turns of a reading, drawn and weighted up, and its answer; 0 = all"""
    temperature: Annotated[tuple[Annotated[Positive, NUMBER], ...], NOT_EMPTY] = (1.0,)
    """of the rollout and of the trainer's log-probs; a list has one per task length"""
    top_p: Annotated[float, TOP_P, UNFLAGGED] = 1.0
    """probability mass of the rollout's nucleus; below 1 the sampler is no longer the trainer"""
    grow_at: Annotated[float, NUMBER, UNFLAGGED] = 0.9
    """move on to the next task length when the running reward reaches this value"""
    grow_steps: Annotated[Whole, UNFLAGGED] = 5
    """least steps at one task length before moving on"""

    def __post_init__(self):
        TrainConfig.__post_init__(self)
        if self.rows_per_update and self.updates_per_rollout > 1:
            raise UserError("Give rows_per_update or updates_per_rollout, not both.")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainConfig):
    """Settings of a warm start from demonstrations."""

    lr: NotNegative = 1e-3
    warmup: Annotated[Whole, UNFLAGGED] = 10
    decay_from: Annotated[Share, UNFLAGGED] = 0.0
    betas: Annotated[tuple[Beta, Beta], UNFLAGGED] = (0.9, 0.98)
    also: tuple[str, ...] = ()
    """further agents whose prompts are learnt on a share of the tasks, such as full=0.1"""
    others: Whole = 3
    """turns of a task that leave the memory as it is, drawn at random; all others are learnt"""
    mistakes: Share = 0.3
    """share of the tasks in which the memory holds a wrong answer, which must be corrected"""
    first_token: Positive = 6.0
    """weight of a response's first token, which decides whether the memory changes; others: 1"""


# ---------------------------------------------------------------- what several commands have


@dataclass(frozen=True, kw_only=True)
class InFolder(Settings):
    """Where the results of a command go."""

    name: str = ""
    """results go to RUNS/NAME; default: date and time"""
    runs: str = "runs"
    """folder of all runs"""


@dataclass(frozen=True, kw_only=True)
class OneModel(Settings):
    """A model, and where it computes."""

    model: str = ""
    """folder or hub name of a causal LM, or smollm2; empty or tiny = the embedded policy"""
    engine: Literal["transformers", "vllm"] = "transformers"
    """what samples: transformers, or vllm, in this process and with the trainer's weights"""
    dtype: Dtype = "auto"
    """of the weights; auto = bfloat16, on a CPU only where it is the model's own and faster"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where the model computes"""
    trust_remote_code: bool = False
    """run Python code that comes with the model, or that stored settings name"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OneModel):
    """Which model answers, and where; what `eval`, `stream`, `ask` and `serve` share."""

    endpoint: tuple[str, ...] = ()
    """server of OpenAI's protocol, http://127.0.0.1:8000/v1; several = replicas. --model is then
    its tokenizer; the key is read from OPENAI_API_KEY"""
    served_as: str = ""
    """endpoint: the model's name there; empty = the only one it serves"""
    chat: bool = False
    """endpoint: send messages, for servers that take no token ids"""

    def __post_init__(self):
        if self.dtype != "auto" and (self.endpoint or self.engine == "rehearsed"):
            raise UserError("dtype is of weights that are loaded in this process: leave it out.")


@dataclass(frozen=True, kw_only=True)
class QuantisedConfig(ModelConfig):
    """A model that may be rounded."""

    quantise: bool = False
    """keep the weights in 4 bits (NF4) and compute in --dtype; transformers alone"""

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        if self.quantise and (self.engine != "transformers" or self.endpoint):
            raise UserError(
                "quantise rounds weights that transformers loads in this process: give --engine "
                "transformers and no --endpoint, or leave it out."
            )


# ---------------------------------------------------------------- the commands


@dataclass(frozen=True, kw_only=True)
class RunConfig(OneModel, InFolder):
    """Settings of a training run: model, tasks, devices, and the folder of the results."""

    data: Annotated[str, NOT_EMPTY] = "world"
    """training tasks: world = generated; ledger = generated sessions; a file; path.py:function;
    hf:ORG/NAME@REVISION:SPLIT; locomo:FILE#RULE/PART/adversarial/START; own:FILE = conversations
    (docs/evaluation.md); several: a.jsonl=3,b.jsonl=1"""
    shuffle: Annotated[bool, UNFLAGGED] = True
    """shuffle the tasks of a file anew for every pass"""
    lengths: Annotated[tuple[Count, ...], NOT_EMPTY] = (2, 4, 8, 16)
    """world: sections per document, one length after the other (grow_at)"""
    kinds: Annotated[Names, UNFLAGGED] = ("one_fact", "two_hop")
    """world: kinds of question, in equal shares"""
    filler: Annotated[tuple[str, ...], UNFLAGGED] = ()
    """world: files of running text, whose sentences stand between the facts"""
    agent: str = "memagent"
    """agent to train, by name or as a file; default: the preset's, else the model's"""
    adapter: str = ""
    """folder of LoRA adapters to go on from, such as RUNS/NAME/adapter; --lora-rank is theirs"""
    reward: str = ""
    """path.py:function that scores a finished reading, instead of the agent's own reward"""
    save_every: Count = 20
    """steps between checkpoints; there is always one at the end"""
    keep_checkpoints: Whole = 1
    """checkpoints to keep beside the best by validation; 0 = write none and export nothing"""
    validation: str = ""
    """tasks answered greedily at every checkpoint: a file, world, or conversations as in --data"""
    validation_n: Annotated[Count, UNFLAGGED] = 64
    """number of validation tasks"""
    devices: Count = 1
    """GPUs, or processes on a CPU, that train together on sharded weights (FSDP2)"""
    num_nodes: Annotated[Count, UNFLAGGED] = 1
    """machines with --devices devices each; start the command on all of them with torchrun"""
    keep_trajectories: Annotated[Whole, UNFLAGGED] = 1
    """write all readings of every n-th step; 0 = never"""
    logger: tuple[str, ...] = ()
    """further loggers, by dotted paths such as lightning.pytorch.loggers.WandbLogger"""
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """mixed = weights in float32, computation in bfloat16; auto = by device (docs/train.md)"""
    kv_gib: Annotated[NotNegative, UNFLAGGED] = 0.0
    """vllm: GiB of the key/value cache; 0 = what `plan` recommends on a GPU, 1 on a CPU"""
    sleep: Annotated[Literal["auto", "never", "1", "2"], UNFLAGGED] = "auto"
    """vllm, during the update: never = keep all; 1 = weights to host memory, no cache; 2 = drop
    both (not with LoRA); auto = what `plan` recommends"""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(QuantisedConfig, InFolder):
    """Settings of an evaluation: agents, questions, engine, and the folder of the results."""

    name: str = "eval"
    """results go to RUNS/NAME; a second call continues it or adds agents, lengths or questions"""
    untrained: str = ""
    """the policy before training, which answers for agents with @untrained after their name"""
    suite: str = ""
    """what is asked: ruler-hqa, locomo, ... or a file (my_suite.py), each with settings of its own
    (--suite NAME --help-all); empty = --data as it is"""
    data: Names = ("world",)
    """files of tasks, or what the suite makes them of; hf:ORG/NAME@REVISION:SPLIT; world, ledger"""
    agents: Names = ("memagent", "full", "bm25")
    """agents to compare, names or files; full = the whole document in one prompt; bm25 = the best
    sections; none = the question alone; oracle"""
    lengths: tuple[Count, ...] = ()
    """of the documents in what the suite counts; 50,...,6400 doubles; empty = the suite's own"""
    n: Count = 64
    """questions per length and kind"""
    samples: Count = 1
    """answers sampled per question, which counts with their mean"""
    temperatures: Annotated[tuple[NotNegative, ...], NOT_EMPTY] = (1.0, 0.0)
    """sampling temperatures, 0 = greedy: one answer per question"""
    top_p: Annotated[float, TOP_P] = 1.0
    """probability mass of the nucleus"""
    in_flight: Count = 256
    """most readings in flight"""
    redo_failed: bool = False
    """repeat rows that an earlier call recorded as failed"""
    kv_gib: Annotated[NotNegative, UNFLAGGED] = 0.0
    """vllm: GiB of the key/value cache; 0 = nine tenths of a GPU minus the weights, 1 on a CPU"""
    seed: Seed = 0
    """of questions and sampling"""

    def __post_init__(self):
        QuantisedConfig.__post_init__(self)
        for name in ("agents", "temperatures", "lengths"):
            _check_once(name, getattr(self, name))


def _check_once(name: str, values: tuple) -> None:
    if twice := [value for k, value in enumerate(values) if value in values[:k]]:
        raise UserError(f"{name} has {twice[0]!r} twice.")


@dataclass(frozen=True, kw_only=True)
class AnsweringConfig(QuantisedConfig):
    """What answers in `ask` and `serve`."""

    model: str = ""
    """folder or hub name of a causal LM, smollm2, or tiny = the embedded policy; empty
    = what is found: the server of OPENAI_BASE_URL, a running Ollama, else the SmolLM2 reader"""
    temperature: NotNegative = 0.0
    """0 is greedy, in `serve` where a request names none"""
    document_s: Positive = 120.0
    """longest time in which a document's text is taken out of its file"""
    document_mib: Count = 1024
    """most memory that this may take beyond the file, in MiB; on Linux alone"""


@dataclass(frozen=True, kw_only=True)
class AskConfig(AnsweringConfig, InFolder):
    """What answers in `ask`, and where the reading is kept."""

    name: str = ""
    """name of the reading, kept in RUNS/NAME; empty = ask-DATE"""
    json: bool = False
    """print a JSON list of the answers alone; all else goes to standard error"""
    quick: bool = False
    """answer from the sections that match the question best, and read no more"""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AnsweringConfig):
    """What answers in `serve`, where it listens, and what it takes."""

    host: Annotated[str, NOT_EMPTY] = "127.0.0.1"
    """address to listen on; any but this machine's own needs --api-key"""
    port: Whole = 8000
    """port; 0 = any that is free"""
    api_key: str = ""
    """file that holds the key which clients must send; empty = MEMAGENT_API_KEY, if that is set"""
    cors: tuple[str, ...] = ()
    """origin of web pages that may ask, such as http://localhost:3000; as often as needed"""
    allow_host: tuple[str, ...] = ()
    """name by which programs ask, beside localhost, without a key: host.docker.internal"""
    called: str = ""
    """name of the model for clients; empty = the model's own and the agent's"""
    in_flight: Count = 16
    """requests that are read side by side"""
    waiting: Whole = 64
    """requests that wait for that; any more get 503"""
    body_mib: Count = 64
    """largest body of a request in MiB, files included; larger ones get 413"""
    timeout_s: Positive = 3600.0
    """longest time from a request to its answer; past it 503"""
    grace_s: NotNegative = 30.0
    """time that requests in flight have to finish after SIGTERM or Ctrl-C"""


@dataclass(frozen=True, kw_only=True)
class StreamConfig(ModelConfig, InFolder):
    """A stream: the tasks of an environment, again and again, and what is remembered of them."""

    name: str = "stream"
    """results go to RUNS/NAME; a second call continues the stream"""
    suite: str = "bandit"
    """whose tasks are worked on: bandit = generated, needs nothing; llb-db, ... or a file
    (my_suite.py); each has settings of its own (--suite NAME --help-all)"""
    path: str = ""
    """file of the tasks, a folder for alfworld; empty = the suite's own few, where it has some"""
    frozen: str = ""
    """bank of another stream: the tasks are worked on once with it, and nothing is learnt"""
    arms: tuple[str, ...] = ()
    """ways of remembering: none, reflection, rag (by similarity alone), memp, memrl; empty = all
    but reflection, with a frozen bank none, rag and memrl"""
    constants: Literal["default", "paper"] = "default"
    """settings by suite: paper = those of its table 8; flags go on top"""
    epochs: Annotated[int | None, COUNT] = None
    """how often the tasks are worked on; by default 10, with a frozen bank 1"""
    batch: Count = 32
    """tasks that see the same bank, before it learns from them"""
    n: Whole = 0
    """only the first so many tasks; 0 = all"""
    engine: Literal["transformers", "vllm", "rehearsed"] = "rehearsed"
    """what answers: transformers; vllm; rehearsed = no model: for bandit a rule, which is shown"""
    temperature: NotNegative = 0.0
    """0 is greedy"""
    in_flight: Count = 64
    """tasks worked on side by side"""
    seed: Seed = 0
    """of the order, of sampling and of what chance decides"""

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        _check_once("arms", self.arms)
        if self.model and self.engine == "rehearsed" and not self.endpoint:
            raise UserError(
                f"The engine rehearsed asks no model: leave --model {self.model} out, or give "
                "--engine transformers."
            )


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Settings):
    """The machine of `plan`."""

    model: str = ""
    """a name such as Qwen/Qwen3-4B or smollm2, or a folder; empty or tiny = the embedded policy"""
    gpu_gib: Annotated[float | None, POSITIVE] = None
    """memory of one GPU; empty = the card's"""
    devices: Count = 1
    """GPUs"""
    card: str = ""
    """H200, H100, A100, L40S, RTX 4090, L4 or A10, such as 4090 or a100-40gb; empty = by its
    memory, an H100 by default"""
    sections: Count = 15
    """of a document, for the seconds"""


@dataclass(frozen=True, kw_only=True)
class BuildConfig(Settings):
    """The sets of `data build`."""

    suite: str = "ruler-hqa"
    """whose tasks are written: ruler-hqa = questions with paragraphs of their own, passages = with
    one, ruler; or a file (my_suite.py); each has settings of its own (--suite NAME --help-all)"""
    lengths: tuple[Count, ...] = ()
    """of a task in what the suite counts; 50,...,6400 doubles; empty = the suite's own"""
    n: Count = 128
    """questions per length and kind"""
    seed: Seed = 0
    """of the draws"""
    tokenizer: str = ""
    """of the model whose tokens count; empty = the embedded policy's"""
    trust_remote_code: bool = False
    """run code that comes with the tokenizer"""
