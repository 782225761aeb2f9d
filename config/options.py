"""The settings of the commands, whose fields are their flags.

Holds: `TrainConfig`, `GRPOConfig`, `SFTConfig`, `RunConfig`, `ModelConfig`, `EvalConfig`,
`StreamConfig` and smaller ones; `without_url`, `settings_of_rows`; the panels of `--help`. Leaves
out: settings of agents (`ReadConfig` in memagent.py, agents/) and suites, YAML (config/files.py),
flags (config/flags.py). No torch, so that `--help` is quick.
Exercise it: `python cli.py train --help`. Read next: config/presets.py.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import date
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


def _day(text: str) -> str:
    try:
        is_day = date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_day = False
    if not is_day:
        raise ValueError("must be a day such as 2024-07-26")
    return text


def _clip(ratio: float) -> float:
    if ratio != 0 and not ratio > 1:
        raise ValueError("must be above 1, or 0 for none")
    return ratio


Device = Literal["auto", "cpu", "cuda", "mps"]
EngineName = Literal["transformers", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, COUNT]


def without_url(value: object) -> object:
    """Return the name of a served model, openai:URL#MODEL, without its URL, for the server may
    move; any other value as it is.

    >>> without_url("openai:http://127.0.0.1:8000/v1#org/model")
    'openai:#org/model'
    """
    return re.sub("^openai:[^#]+#", "openai:#", value) if isinstance(value, str) else value


TEMPLATE_DATE = "2024-07-26"
"""What Llama 3's templates tell where there is no clock, so that nothing depends on one."""


@dataclass(frozen=True, slots=True, kw_only=True)  # behind the fields of those who inherit it
class TemplateConfig(Settings):
    """What a chat template is told beside the messages."""

    template_date: Annotated[str, AfterValidator(_day), UNFLAGGED] = TEMPLATE_DATE
    """the day that a model is told whose chat template tells one (Llama 3, Granite), whatever the
    clock says: prompts stay the same"""


def settings_of_rows(config: TemplateConfig, told: str) -> dict:
    """Return the settings of an agent that its rows depend on.

    told: the date that the model is told, "" if it is told none: then the setting plays no part.
    """
    settings = {name: without_url(value) for name, value in asdict(config).items()}
    del settings["template_date"]
    return settings | ({"template_date": told} if told else {})


@dataclass(frozen=True, slots=True)
class TrainConfig(Settings):
    """Settings of any training: how many steps, and how the weights change."""

    steps: Count = 100
    """training steps, each with one rollout"""
    tasks_per_step: Annotated[tuple[Count, ...], NOT_EMPTY] = (8,)
    """tasks (groups) per step; a list has one number per task length, the last one for all further
    lengths"""
    outcome: Literal["exact", "em", "f1", "sub_em"] = "exact"
    """reward of a reading: exact = 1 for an accepted answer in the required form, ignoring case,
    blanks and LaTeX; em = 1 for an exact match after SQuAD's normalisation (no articles, no
    punctuation); f1 = the F1 score of its words after the same normalisation; sub_em = 1 for an
    answer that contains an accepted one after it: a list of many candidates does, and "unknown"
    contains "no". Thinking is dropped first"""
    lr: Annotated[float, NOT_NEGATIVE] = 7e-4
    """peak learning rate; the default is for the embedded policy, a real model is given its own, as
    recipes have it: 1e-6, with adapters 2e-5"""
    warmup: Annotated[int, NOT_NEGATIVE] = 5
    """steps of linear warm-up"""
    warmup_from: Annotated[Literal["share", "zero"], UNFLAGGED] = "share"
    """learning rate of the first step: share = peak / warmup; zero = 0, as in verl, so that the
    first step changes no weight"""
    decay_from: Annotated[float, SHARE, UNFLAGGED] = 1.0
    """fraction of the steps after which the learning rate falls linearly to a tenth of its peak; 1
    = constant"""
    betas: Annotated[tuple[Beta, Beta], UNFLAGGED] = (0.9, 0.95)
    """AdamW's betas"""
    weight_decay: Annotated[float, NOT_NEGATIVE, UNFLAGGED] = 0.0
    """AdamW's weight decay"""
    grad_clip: Annotated[float, POSITIVE, UNFLAGGED] = 1.0
    """maximum norm of the gradient; steps with a non-finite norm are skipped and counted"""
    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    """rank of the LoRA adapters (--lora-targets); 0 = full fine-tuning"""
    lora_alpha: Annotated[float, NOT_NEGATIVE, UNFLAGGED] = 0.0
    """scale of the adapters; 0 = twice the rank"""
    lora_targets: str = "all-linear"
    """linear layers with adapters: all-linear, or names such as q_proj,v_proj"""
    quantise: bool = False
    """QLoRA: keep the base weights in 4 bits (NF4); requires --lora-rank"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw, or adamw8bit, which keeps its state in 8 bits (one GPU only)"""
    micro_tokens: Count = 16384
    """maximum tokens of one forward and backward pass, with tokens that turns share counted once;
    affects memory and speed only"""
    recompute: bool = False
    """gradient checkpointing: recompute activations in the backward pass instead of storing them;
    saves memory, takes about a third longer"""
    in_flight: Count = 256
    """maximum number of readings in flight"""
    seed: Annotated[int, SEED] = 0
    """seed of everything random"""

    def __post_init__(self):
        if self.quantise and not self.lora_rank:
            raise UserError(
                "quantise keeps the base weights in 4 bits, which are not trained: "
                "give a --lora-rank too."
            )


@dataclass(frozen=True, slots=True)
class GRPOConfig(TrainConfig):
    """Settings of reinforcement learning. Each is a flag of `train`; a preset sets several."""

    group_size: Annotated[int, Field(ge=2)] = 16
    """G, readings of one task, which are judged by each other"""
    updates_per_rollout: Count = 1
    """optimizer steps per rollout, each on its own share of the readings"""
    rows_per_update: Annotated[int, NOT_NEGATIVE, UNFLAGGED] = 0
    """approximate number of turns per optimizer step, instead of updates_per_rollout: longer
    documents then give more steps, each on whole readings; 0 = use updates_per_rollout"""
    without_signal: Annotated[Literal["skip", "keep"], UNFLAGGED] = "skip"
    """groups whose advantages are all 0: skip = do not train on them; keep = count them in the
    normaliser of the loss and apply the KL term to them, as verl and vime do"""
    credit: Literal["share", "split"] = "share"
    """advantage of a turn: share = the advantage of its reading; split = that advantage divided
    by the number of turns"""
    normalisation: Literal["mean", "std"] = "std"
    """advantages within a group: mean = rewards minus their mean; std = also divided by their
    unbiased standard deviation + 1e-6"""
    aggregation: Literal["token_mean", "turn_mean", "trajectory_mean"] = "token_mean"
    """average of the token losses: token_mean = over all tokens of an optimizer step on all
    ranks; turn_mean = over turns, of their token means; trajectory_mean = over readings, of the
    mean over turns of their token means. Groups left out by without_signal do not count"""
    alpha: Annotated[float, SHARE] = 0.8
    """weight of the outcome's advantage in turns with rewards of their own, whose weight is 1 -
    alpha; 1 = outcome alone"""
    clip_low: Annotated[float, SHARE] = 0.2
    """clip the ratio below at 1 - clip_low"""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.28
    """clip the ratio above at 1 + clip_high"""
    dual_clip: Annotated[float, AfterValidator(_clip), UNFLAGGED] = 0.0
    """c: for negative advantages A the loss is at most -c * A; 0 = off"""
    kl: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of KL(policy, reference) in the loss, by the k3 estimate; 0 = no reference model"""
    importance: Literal["truncate", "none"] = "truncate"
    """correction of the mismatch between sampler and trainer: truncate = weight each token by
    min(trainer/sampler, 2); none = no correction"""
    max_mismatch: Annotated[float, NOT_NEGATIVE, UNFLAGGED] = 0.0
    """stop the run when the sampler is further than this from the trainer, by the k3 estimate of
    the KL divergence in a step, because their weights must differ; 0 = 1e-6 in float32, else 0.01.
    Not checked with --top-p below 1, where they differ anyway"""
    turns_per_trajectory: Annotated[int, NOT_NEGATIVE, UNFLAGGED] = 0
    """train on this many update turns of a reading, drawn at random and weighted up to stay
    unbiased, and on its answer; 0 = all. The rare outcome of a group (a failure among successes, or
    the reverse) is always trained whole"""
    temperature: Annotated[tuple[Annotated[float, POSITIVE, NUMBER], ...], NOT_EMPTY] = (1.0,)
    """sampling temperature of the rollout, also applied to the trainer's log-probs; a list has one
    per task length, the last one for all further lengths"""
    top_p: Annotated[float, TOP_P] = 1.0
    """probability mass of the rollout's nucleus; below 1 the sampler's distribution is no longer
    the trainer's"""
    grow_at: Annotated[float, NUMBER, UNFLAGGED] = 0.9
    """move on to the next task length when the running reward reaches this value"""
    grow_steps: Annotated[int, NOT_NEGATIVE, UNFLAGGED] = 5
    """minimum steps at one task length before moving on"""

    def __post_init__(self):
        TrainConfig.__post_init__(self)
        if self.rows_per_update and self.updates_per_rollout > 1:
            raise UserError(
                "Give rows_per_update or updates_per_rollout, not both: "
                "either says how often a rollout is trained on."
            )


@dataclass(frozen=True, slots=True)
class SFTConfig(TrainConfig):
    """Settings of a warm start from demonstrations. Each is a flag of `sft`."""

    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    warmup: Annotated[int, NOT_NEGATIVE] = 10
    decay_from: Annotated[float, SHARE, UNFLAGGED] = 0.0
    betas: Annotated[tuple[Beta, Beta], UNFLAGGED] = (0.9, 0.98)
    also: tuple[str, ...] = ()
    """further agents whose prompts are learnt on a part of the tasks, such as full=0.1: its share,
    0.1 if none is given"""
    others: Annotated[int, NOT_NEGATIVE] = 3
    """turns of a task that leave the memory as it is, drawn at random; all others are learnt"""
    mistakes: Annotated[float, SHARE] = 0.3
    """share of the tasks in which the memory holds another task's answer before the evidence comes:
    a mistake that is not learnt itself, but must be corrected"""
    first_token: Annotated[float, POSITIVE] = 6.0
    """weight of a response's first token, which decides whether the memory changes; other tokens
    have 1"""


@dataclass(frozen=True, slots=True)
class RunConfig(Settings):
    """Settings of a training run: model, tasks, devices, and the folder of the results."""

    name: str = ""
    """name of the run; results go to RUNS/NAME; default: date and time"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors, or smollm2 (a real model of 135
    million weights, fetched at first use); empty or tiny = the embedded policy"""
    data: Annotated[str, NOT_EMPTY] = "world"
    """training tasks: world = generated English; a file in any format that `data look` reads;
    hf:ORG/NAME@REVISION:SPLIT = a data set of the hub, without @REVISION at its present commit;
    path.py:function, which returns a list of tasks; ledger = generated sessions;
    locomo:FILE#RULE/PART/adversarial/START = LoCoMo's conversations, with parts as in eval
    --source-split; adversarial = category 5 is paid for too; own:FILE = conversations of yours
    (docs/evaluation.md); several with weights: a.jsonl=3,b.jsonl=1"""
    shuffle: Annotated[bool, UNFLAGGED] = True
    """shuffle the tasks of a file anew for every pass; otherwise keep their order"""
    lengths: Annotated[tuple[Count, ...], NOT_EMPTY] = (2, 4, 8, 16)
    """world: sections per document; training moves from each length to the next (grow_at)"""
    kinds: Annotated[tuple[str, ...], NOT_EMPTY] = ("one_fact", "two_hop")
    """world: kinds of question, in equal shares"""
    agent: str = "memagent"
    """agent to train, by name or as a file (my_agent.py); if not given, the preset's agent, else
    the one that the model was trained with"""
    adapter: str = ""
    """folder of LoRA adapters to go on from, as a run leaves them in RUNS/NAME/adapter; --lora-rank
    is theirs"""
    reward: str = ""
    """path.py:function that scores a finished reading, instead of the agent's own reward"""
    save_every: Count = 20
    """steps between checkpoints; there is always one at the end"""
    keep_checkpoints: Annotated[int, NOT_NEGATIVE] = 1
    """checkpoints to keep: this many of the latest, and the best by validation; 0 = write none and
    export nothing, for a run that is only measured"""
    validation: str = ""
    """tasks answered greedily at every checkpoint: a file, world = generated English about facts
    that are not trained on, or conversations as in --data, each read whole"""
    validation_n: Count = 64
    """number of validation tasks; of conversations, of their questions in all"""
    devices: Count = 1
    """GPUs, or processes on a CPU, that train together on sharded weights (FSDP2); each rolls out
    its share of a step's tasks"""
    num_nodes: Annotated[Count, UNFLAGGED] = 1
    """machines with --devices devices each; start the command on all of them with torchrun"""
    keep_trajectories: Annotated[int, NOT_NEGATIVE, UNFLAGGED] = 1
    """write all readings of every n-th step; 1 = of every step, 0 = never"""
    logger: tuple[str, ...] = ()
    """further loggers of Lightning's, as dotted paths such as
    lightning.pytorch.loggers.WandbLogger (docs/engines.md)"""
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """float32, bfloat16 (with adapters, which learn in float32), or mixed = weights and optimizer
    in float32, computation in bfloat16; auto = on a CPU float32, or bfloat16 with adapters where
    the model is stored in it and the processor is faster in it; on a GPU mixed for full
    fine-tuning, bfloat16 with adapters"""
    device: Device = "auto"
    """cpu, cuda, mps or auto"""
    engine: EngineName = "transformers"
    """engine that samples: transformers = with the trainer's own weights; vllm = vLLM in this
    process, given the weights at every step"""
    kv_gib: Annotated[float, NOT_NEGATIVE, UNFLAGGED] = 0.0
    """vllm: GiB of the key/value cache; 0 = what `plan` recommends on a GPU, 1 on a CPU"""
    sleep: Annotated[Literal["auto", "never", "1", "2"], UNFLAGGED] = "auto"
    """vllm, during the update: never = keep everything; 1 = move the weights to host memory and
    drop the cache; 2 = drop both (not with LoRA); auto = what `plan` recommends for this GPU"""
    trust_remote_code: bool = False
    """run Python code that comes with the model, or that stored settings name; only where you trust
    both"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Settings):
    """Which model answers, and where; what `eval`, `stream`, `ask` and `serve` share."""

    model: str = ""
    """folder or hub name of a causal LM with safetensors, or smollm2 (a real model of 135
    million weights, fetched at first use); empty or tiny = the embedded policy"""
    engine: EngineName = "transformers"
    """what answers: transformers; vllm = vLLM in this process"""
    endpoint: tuple[str, ...] = ()
    """ask a server of OpenAI's protocol, such as http://127.0.0.1:8000/v1, instead of loading the
    weights; several = replicas that share the work. --model is then its tokenizer; without it
    prompts are sent as text, lengths are estimated at four bytes per token, and no settings come
    from the embedded policy. The key is read from OPENAI_API_KEY"""
    served_as: str = ""
    """endpoint: the model's name there; empty = the only one it serves"""
    chat: bool = False
    """endpoint: send text and let the server apply its chat template, for servers that take no
    token ids"""
    dtype: Dtype = "auto"
    """type of the weights: float32, bfloat16; auto = bfloat16, on a CPU only where the model is
    stored in it and the processor is faster in it, else float32; what goes on keeps its own"""
    device: Device = "auto"
    """where the model computes: cpu, cuda, mps or auto"""

    def __post_init__(self):
        if self.dtype != "auto" and (self.endpoint or self.engine == "rehearsed"):
            raise UserError("dtype is of weights that are loaded in this process: leave it out.")


@dataclass(frozen=True, slots=True)
class EvalConfig(ModelConfig):
    """Settings of an evaluation: agents, questions, engine, and the folder of the results."""

    name: str = "eval"
    """name of the evaluation; results go to RUNS/NAME; a second call continues it or adds agents,
    lengths or questions, with the same model, suite and settings"""
    runs: str = "runs"
    """folder of all runs"""
    untrained: str = ""
    """folder or hub name of the policy before training, which answers for agents with @untrained
    after their name (with --endpoint: its name on the server)"""
    suite: str = ""
    """what is asked: a suite by name, such as ruler-hqa, locomo or llb-db (docs/evaluation.md), or
    a file (my_suite.py); each has settings of its own (--suite NAME --help-all); empty = files of
    --data as they are, or generated English"""
    data: Annotated[tuple[str, ...], NOT_EMPTY] = ("world",)
    """files of tasks, or what the suite makes tasks of; splits of the hub
    (hf:ORG/NAME@REVISION:SPLIT); world = generated English; ledger = generated sessions"""
    agents: Annotated[tuple[str, ...], NOT_EMPTY] = ("memagent", "full", "bm25")
    """agents to compare: names in agents/ or files (my_agent.py); full = the whole document in one
    prompt; bm25 = the best sections; none = the question alone; oracle = the
    evidence alone. The first one is compared with the others, each other one with itself before
    training"""
    lengths: tuple[Count, ...] = ()
    """lengths of the documents in what the suite counts: sections, documents or tokens;
    50,...,6400 doubles; empty = the suite's own"""
    n: Count = 64
    """questions per length and kind"""
    samples: Count = 1
    """answers sampled per question, which counts with their mean"""
    temperatures: Annotated[tuple[Annotated[float, NOT_NEGATIVE], ...], NOT_EMPTY] = (1.0, 0.0)
    """sampling temperatures, 0 = greedy: one answer per question"""
    top_p: Annotated[float, TOP_P] = 1.0
    """probability mass of the nucleus"""
    transcripts: Annotated[int, NOT_NEGATIVE] = 2
    """readings to keep whole per agent, length and temperature, right or not; those that are not
    fully right are kept anyway, up to a size that the report says"""
    in_flight: Count = 256
    """maximum number of readings in flight; fewer where their documents would fill the
    memory, and on a CPU, where more make it no faster"""
    retries: Annotated[int, NOT_NEGATIVE, UNFLAGGED] = 1
    """restarts of a failed reading before it is recorded as failed, which counts as wrong"""
    redo_failed: bool = False
    """repeat rows that an earlier call recorded as failed"""
    kv_gib: Annotated[float, NOT_NEGATIVE, UNFLAGGED] = 0.0
    """vllm: GiB of the key/value cache; 0 = nine tenths of a GPU minus the weights, 1 on a CPU"""
    seed: Annotated[int, SEED] = 0
    """seed of questions and sampling"""
    quantise: bool = False
    """keep the weights in 4 bits (NF4) and compute in --dtype; transformers alone"""
    trust_remote_code: bool = False
    """run Python code that comes with the model, or that stored settings name; only where you trust
    both"""

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        for name in ("agents", "temperatures", "lengths"):
            values = getattr(self, name)
            if twice := [value for k, value in enumerate(values) if value in values[:k]]:
                raise UserError(f"{name} has {twice[0]!r} twice.")
        if self.quantise and (self.engine != "transformers" or self.endpoint):
            raise UserError(
                "quantise rounds weights that transformers loads in this process: give --engine "
                "transformers and no --endpoint, or leave it out."
            )


@dataclass(frozen=True, slots=True)
class AnsweringConfig(ModelConfig):
    """What answers in `ask` and `serve`."""

    model: str = ""
    """folder or hub name of a causal LM, smollm2, or tiny = the embedded policy; empty
    = what is found: the server of OPENAI_BASE_URL, a running Ollama, else the SmolLM2 reader"""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """0 is greedy"""
    quantise: bool = False
    """keep the weights in 4 bits (NF4) and compute in --dtype; transformers alone"""
    trust_remote_code: bool = False
    """run code that comes with the model, or that stored settings name"""
    cache_tokens: Count = 1 << 16
    """transformers: tokens of sections that stay in memory, so that another question about a
    document is quickly read; 1.5 GB for the SmolLM2 reader in bfloat16"""
    document_s: Annotated[float, POSITIVE] = 120.0
    """longest time in which a document's text is taken out of its file; 1,000 dense pages of PDF
    take half a minute"""
    document_mib: Count = 1024
    """most memory that this may take beyond the file, in MiB; on Linux alone"""


@dataclass(frozen=True, slots=True)
class AskConfig(AnsweringConfig):
    """What answers in `ask`, and where the reading is kept."""

    name: str = ""
    """name of the reading, kept in RUNS/NAME; empty = ask-DATE"""
    runs: str = "runs"
    """folder of all runs"""
    json: bool = False
    """print a JSON list of the answers alone; all else goes to standard error"""


@dataclass(frozen=True, slots=True)
class ServeConfig(AnsweringConfig):
    """What answers in `serve`, where it listens, and what it takes."""

    host: Annotated[str, NOT_EMPTY] = "127.0.0.1"
    """address to listen on; any but this machine's own needs --api-key"""
    port: Annotated[int, NOT_NEGATIVE] = 8000
    """port; 0 = any that is free"""
    api_key: str = ""
    """file that holds the key which clients must send; empty = MEMAGENT_API_KEY, if that is set"""
    cors: tuple[str, ...] = ()
    """origin of web pages that may ask, such as http://localhost:3000; as often as needed"""
    allow_host: tuple[str, ...] = ()
    """name by which programs ask, beside localhost, without a key: host.docker.internal"""
    called: str = ""
    """name of the model for clients; empty = the model's own and the agent's"""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """where a request names none; 0 is greedy"""
    in_flight: Count = 16
    """requests that are read side by side"""
    waiting: Annotated[int, NOT_NEGATIVE] = 64
    """requests that wait for that; any more get 503"""
    body_mib: Count = 64
    """largest body of a request in MiB, files included; larger ones get 413"""
    timeout_s: Annotated[float, POSITIVE] = 3600.0
    """longest time from a request to its answer; past it 503"""
    grace_s: Annotated[float, NOT_NEGATIVE] = 30.0
    """time that requests in flight have to finish after SIGTERM or Ctrl-C"""


@dataclass(frozen=True, slots=True)
class StreamConfig(ModelConfig):
    """A stream: the tasks of an environment, again and again, and what is remembered of them."""

    name: str = "stream"
    """name of the stream; results go to RUNS/NAME; a second call continues it"""
    runs: str = "runs"
    """folder of all runs"""
    suite: str = "bandit"
    """whose tasks are worked on, a suite whose tasks answer back (docs/streams.md): bandit =
    generated, needs nothing; others by name, such as llb-db, or as a file (my_suite.py); each has
    settings of its own (--suite NAME --help-all)"""
    path: str = ""
    """file of the tasks, a folder for alfworld; empty = the suite's own few, where it has some"""
    frozen: str = ""
    """a bank that was learnt elsewhere: the tasks are worked on once with it; it is opened to be
    read and nothing is learnt, and tasks whose solution it holds are named"""
    arms: tuple[str, ...] = ()
    """ways of remembering that are compared: none, reflection, rag, memp, memrl; empty = all but
    reflection; with a frozen bank none, rag (by similarity alone) and memrl"""
    constants: Literal["default", "paper"] = "default"
    """settings by suite: paper = those of its table 8; flags go on top"""
    epochs: Annotated[int | None, COUNT] = None
    """how often the tasks are worked on; by default 10, with a frozen bank 1"""
    batch: Count = 32
    """tasks that see the same bank, before it learns from them"""
    n: Annotated[int, LIMIT] = 0
    """only the first so many tasks; 0 = all"""
    fixed_order: bool = False
    """the tasks in their order in every epoch, instead of shuffled by the seed"""
    engine: Literal["transformers", "vllm", "rehearsed"] = "rehearsed"
    """what answers: transformers; vllm; rehearsed = no model, of the suite bandit a rule that is
    printed with the results, to compare ways of remembering"""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """0 is greedy"""
    in_flight: Count = 64
    """tasks worked on side by side"""
    retries: Annotated[int, NOT_NEGATIVE] = 1
    """how often a task is begun anew whose engine, embedder or judge failed, before it counts as
    failed"""
    seed: Annotated[int, SEED] = 0
    """of the order, of sampling and of what chance decides"""

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        if twice := [arm for k, arm in enumerate(self.arms) if arm in self.arms[:k]]:
            raise UserError(f"arms has {twice[0]!r} twice.")
        if self.model and self.engine == "rehearsed" and not self.endpoint:
            raise UserError(
                f"The engine rehearsed asks no model: leave --model {self.model} out, or give "
                "--engine transformers."
            )


@dataclass(frozen=True, slots=True)
class PlanConfig(Settings):
    """The machine of `plan`."""

    model: str = ""
    """a name such as Qwen/Qwen3-4B or smollm2, or a folder; empty or tiny = the
    embedded policy"""
    gpu_gib: Annotated[float | None, POSITIVE] = None
    """memory of one GPU; empty = the card's"""
    devices: Count = 1
    """GPUs"""
    card: str = ""
    """H200, H100, A100, L40S, RTX 4090, L4 or A10, as people write it (4090, a100-40gb); empty = by
    its memory an RTX 4090 (24 GiB), L40S (48), H100 (80, and by default) or H200 (141)"""
    sections: Count = 15
    """of a document, for the seconds"""
    explain: bool = False
    """also show what takes the memory and the time, line by line"""


@dataclass(frozen=True, slots=True)
class BuildConfig(Settings):
    """The sets of `data build`."""

    suite: str = "ruler-hqa"
    """whose tasks are written, each with settings of its own (--suite NAME --help-all): ruler-hqa =
    questions with several paragraphs of their own, all kept; passages = those of SQuAD's form, with
    one; ruler = RULER's tasks; or a file (my_suite.py)"""
    lengths: tuple[Count, ...] = ()
    """of a task in what the suite counts: documents or tokens; 50,...,6400 doubles; empty = the
    suite's own"""
    n: Count = 128
    """questions per length and kind"""
    seed: Annotated[int, SEED] = 0
    """of the draws"""
    tokenizer: str = ""
    """folder or hub name of the model whose tokens count, or smollm2; empty = the
    embedded policy's"""
    trust_remote_code: bool = False
    """run code that comes with the tokenizer"""


EVERYDAY = {  # command -> the flags that its short help shows, in this order, 15 with --help
    "train": "name model data agent steps tasks_per_step group_size lr lora_rank devices preset "
    "config resume dry_run",
    "sft": "name model data agent steps tasks_per_step lr lora_rank adapter also validation config "
    "resume",
    "eval": "name model agents data suite lengths n samples temperatures untrained engine endpoint "
    "preset config",
    "ask": "model agent also json name resume endpoint served_as device chunk_tokens memory_tokens "
    "preset",
    "serve": "model agent host port api_key cors allow_host called endpoint served_as device "
    "in_flight chunk_tokens memory_tokens",
    "plan": "model gpu_gib devices card sections explain agent preset lora_rank "
    "tasks_per_step group_size chunk_tokens",
    "stream": "name suite path frozen arms epochs batch n model engine endpoint judge seed",
}

# fields of the settings classes that mean nothing to a command, which then has no such flag
UNUSED = {"sft": "reward engine".split()}

# title of a panel of `--help` -> its flags; everyday flags come first, before all panels
PANELS: dict[str, str] = {
    "Where the run lives": "name runs save_every keep_checkpoints transcripts logger",
    "What it is trained on": "data lengths kinds validation validation_n",
    "What is learnt": "outcome also others mistakes first_token reward credit normalisation "
    "aggregation alpha clip_low clip_high kl importance",
    "How the weights change": "updates_per_rollout warmup optimizer adapter lora_targets",
    "How it is sampled": "temperature top_p steps tasks_per_step group_size lr in_flight "
    "redo_failed constants fixed_order retries seed",
    "What it runs on": "engine dtype quantise device micro_tokens recompute "
    "trust_remote_code served_as chat cache_tokens document_s document_mib lora_rank",
    "What a server takes": "waiting body_mib timeout_s grace_s",
    "How the agent reads": "chunk_tokens memory_tokens final_tokens max_sections layout form "
    "thinking not_found templates",
}


def panel_of(name: str) -> str:
    """Return the title of the panel of a flag."""
    return next((title for title, names in PANELS.items() if name in names.split()), "More")
