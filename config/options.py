"""Settings: one frozen dataclass a command, a docstring under every field. The docstrings are the flags' help.

Holds: `GRPOConfig`, `RunConfig`, `BaseConfig`, `EvalConfig`; `docs`, reading and writing of config.yaml, and what a
resumed run takes from it. `AgentConfig` is in memagent.py.
Leaves out: what the settings do. No torch, so that `--help` is quick.
Exercise it: `python cli.py train --help`. Read next: config/presets.py.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from config.errors import UserError

EMBEDDED = (
    Path(__file__).parent.parent / "embedded" / "weights"
)  # the base policy that ships with the repository


@dataclass(frozen=True, slots=True)
class Bound:
    """What the values of a field have to be, beside their type; annotate the field with it. NaN meets no bound."""

    holds: Callable[..., bool]
    words: str


COUNT = Bound(lambda n: n >= 1, "at least 1")
NOT_NEGATIVE = Bound(lambda x: 0 <= x < math.inf, "0 or more")
LIMIT = Bound(lambda n: n >= 0, "at least 1, or 0 for no limit")
POSITIVE = Bound(lambda x: x > 0, "above 0")
SHARE = Bound(lambda x: 0 <= x <= 1, "between 0 and 1")
TOP_P = Bound(lambda x: 0 < x <= 1, "above 0 and at most 1")
SEED = Bound(lambda n: 0 <= n < 2**63, "0 or more and below 2^63")
ABOVE_ONE = Bound(lambda c: c == 0 or c > 1, "above 1, or 0 for none")
BETA = Bound(lambda x: 0 <= x < 1, "at least 0 and below 1")
SAMPLED = Bound(lambda t: 0 < t < math.inf, "above 0, training samples")
NUMBER = Bound(lambda x: x == x, "a number")
SECTIONS = Bound(lambda n: n >= 1, "at least 1 section")
HEADS = Bound(lambda n: n > 0 and n % 32 == 0, "a multiple of 32, the width of a head")
SUITE = Bound(lambda name: name in ("", "ruler-hqa", "ruler"), "ruler-hqa or ruler, or empty")
NOT_EMPTY = "not empty"  # of a tuple: it must have an item

Device = Literal["auto", "cpu", "cuda"]
EngineName = Literal["transformers", "vllm"]


@lru_cache(maxsize=64)
def hints_of(cls: type) -> dict[str, tuple[object, tuple]]:
    """Return each field's type and the metadata of its annotation (`Bound`, `NOT_EMPTY`)."""
    types = typing.get_type_hints(cls)
    annotated = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: (types[field.name], getattr(annotated[field.name], "__metadata__", ()))
        for field in fields(cls)
    }


def check_fields(config: object) -> None:
    """Raise a UserError "NAME must be WORDS, not VALUE" for the first field outside its annotation.

    A `Literal` names the values that are allowed, a `Bound` what they have to be; of a tuple every
    item is checked, and None passes where the type allows it.
    """
    for name, (kind, bounds) in hints_of(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
            allowed = ", ".join(typing.get_args(kind))
            raise UserError(f"{name} must be one of {allowed}, not {value!r}.")
        for bound in bounds:
            if bound == NOT_EMPTY:
                if not value:
                    raise UserError(f"{name} must name at least one.")
                continue
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and not bound.holds(item):
                    raise UserError(f"{name} must be {bound.words}, not {item!r}.")


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """What is optimised and how. Every field is a flag of `train`; a preset fills several at once (spec memagent.md 2)."""

    steps: Annotated[int, COUNT] = 100
    """training steps: one rollout each"""
    tasks_per_step: Annotated[tuple[int, ...], NOT_EMPTY, COUNT] = (8,)
    """tasks (groups) of one step; several numbers: one for each length that the tasks grow to, the last one for all further ones"""
    group_size: Annotated[int, COUNT] = 16
    """G, trajectories of one task"""
    updates_per_rollout: Annotated[int, COUNT] = 1
    """optimizer steps on one rollout, each on its own part of the trajectories"""
    rows_per_update: Annotated[int, NOT_NEGATIVE] = 0
    """turns of one optimizer step, about: the longer the documents, the more steps a rollout gives, each on whole trajectories; instead of
    updates_per_rollout. 0 = that one"""
    without_signal: Literal["skip", "keep"] = "skip"
    """groups whose advantages are all 0: skip = not trained on; keep = they count in what the loss is normalised by and have the KL term,
    as in verl and vime"""
    outcome: Literal["exact", "em", "f1"] = "exact"
    """what a trajectory earns: exact = 1 for an accepted answer in the box but for case, blanks and
    LaTeX, as MemAgent and ReMemR1, which look into thinking too (here it is dropped first);
    em = 1 for one after SQuAD's normalisation, without articles and punctuation; f1 = the share of
    its words, so normalised (ReMemR1's own f1 is not)"""
    credit: Literal["share", "split"] = "share"
    """share = every turn of a trajectory gets its advantage; split = divided by the number of its turns"""
    normalisation: Literal["mean", "std"] = "std"
    """of the rewards of a group: mean = minus the mean; std = also divided by the unbiased standard deviation + 1e-6"""
    aggregation: Literal["token_mean", "row_mean", "turn_mean", "trajectory_mean", "constant"] = (
        "token_mean"
    )
    """token_mean = over all tokens of an optimizer step on all ranks, with without_signal = skip those of groups with a signal alone;
    row_mean = sum over turns of their token mean, per trajectory; turn_mean = mean over turns
    of their token mean; trajectory_mean = mean over trajectories of the mean over their turns of the token mean; constant = sum over tokens / (turns x longest response allowed)"""
    alpha: Annotated[float, SHARE] = 0.8
    """weight of the outcome's advantage where turns have rewards of their own, which have the rest;
    1 = outcome alone"""
    turn_reward_scale: Annotated[float, NOT_NEGATIVE] = 1.0
    """factor on the rewards of single turns, of agents that give such"""
    clip_low: Annotated[float, SHARE] = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.28
    """and above at 1 + clip_high"""
    dual_clip: Annotated[float, ABOVE_ONE] = 0.0
    """bound c of the loss for negative advantages, -c * A; 0 = off"""
    kl: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the k3 estimate of KL(policy, reference) in the loss; 0 = no reference model is kept"""
    importance: Literal["truncate", "mask", "mask_turn", "none"] = "truncate"
    """correction of sampler/trainer mismatch: truncate = min(trainer/sampler, importance_cap) for each token; mask = the same, but 0 past
    the cap; mask_turn = a turn whose mean ratio (geometric, over its tokens) leaves 1/importance_cap ... importance_cap is not trained; none"""
    importance_cap: Annotated[float, POSITIVE] = 2.0
    """cap of that correction"""
    max_mismatch: Annotated[float, NOT_NEGATIVE] = 0.0
    """the run stops when the sampler is further than this from the trainer in a step, by the k3 estimate of the KL divergence: they have not
    the same weights; 0 = 1e-6 in float32, else 0.01. With top_p below 1 they differ anyway, and nothing is compared"""
    turns_per_trajectory: Annotated[int, NOT_NEGATIVE] = 0
    """train on this many update turns of a trajectory, drawn at random and weighted up to stay unbiased, and on its answer; 0 = all. The
    rare outcome of a group (failures among successes, or the reverse) is trained whole"""
    lr: Annotated[float, NOT_NEGATIVE] = 7e-4
    """peak learning rate"""
    warmup: Annotated[int, NOT_NEGATIVE] = 5
    """steps of linear warm-up"""
    warmup_from: Literal["share", "zero"] = "share"
    """the first rate of the warm-up: share = one warmup-th of the peak; zero = 0, as verl's, which changes no weight in the first step"""
    decay_from: Annotated[float, SHARE] = 1.0
    """share of the steps after which the rate falls linearly to a tenth; 1 = constant"""
    betas: Annotated[tuple[float, float], BETA] = (
        0.9,
        0.95,
    )
    """AdamW's"""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """AdamW's"""
    grad_clip: Annotated[float, POSITIVE] = 1.0
    """largest norm of the gradient; a step whose norm is not finite is skipped and counted"""
    temperature: Annotated[tuple[float, ...], NOT_EMPTY, SAMPLED] = (1.0,)
    """sampling temperature of the rollout, the trainer's log-probs are taken at it too; several numbers: one for each length that the
    tasks grow to, the last one for all further ones"""
    top_p: Annotated[float, TOP_P] = 1.0
    """nucleus of the rollout; below 1 the sampler's distribution is no longer the trainer's"""
    grow_at: Annotated[float, NUMBER] = 0.9
    """tasks grow to the next length when the running reward reaches this"""
    grow_steps: Annotated[int, NOT_NEGATIVE] = 5
    """and at least this many steps were spent at the present one"""
    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    """rank of LoRA adapters on all linear layers; 0 = full fine-tuning"""
    lora_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """scale of the adapters; 0 = twice the rank"""
    lora_targets: str = "all-linear"
    """which linear layers have adapters: all-linear, or names such as q_proj,v_proj"""
    quantise: bool = False
    """QLoRA: the base weights in 4 bits (NF4); with --lora-rank alone"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw, or adamw8bit: its state in 8 bits (one GPU)"""
    micro_tokens: Annotated[int, COUNT] = 16384
    """most tokens of one forward and backward pass, those that turns share counted once; changes nothing but memory and speed"""
    recompute: bool = False
    """gradient checkpointing: compute the layers' activations anew in the backward pass instead of keeping them; a third more time"""
    in_flight: Annotated[int, COUNT] = 256
    """trajectories in flight"""
    seed: Annotated[int, SEED] = 0
    """everything random follows from it"""

    def __post_init__(self):
        check_fields(self)
        if self.rows_per_update and self.updates_per_rollout > 1:
            raise UserError(
                "Give --rows-per-update or --updates-per-rollout, not both: "
                "either says how often a rollout is trained on."
            )
        if len(self.betas) != 2:
            raise UserError(f"betas must be two numbers, such as 0.9,0.95, not {len(self.betas)}.")
        if self.quantise and not self.lora_rank:
            raise UserError(
                "quantise keeps the base weights in 4 bits, which are not trained: "
                "give a --lora-rank too."
            )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What `train` works on and where it leaves the results."""

    name: str = ""
    """name of the run: results lie in RUNS/NAME; default: a date and time"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors; empty = the embedded base policy"""
    data: Annotated[str, NOT_EMPTY] = "world"
    """training tasks: a file of any form `data look` can read, world = generated English, or
    path.py:function, which returns a list of tasks"""
    shuffle: bool = True
    """a file's tasks in an order drawn anew for every pass over it, else as they stand in it"""
    lengths: Annotated[tuple[int, ...], NOT_EMPTY, SECTIONS] = (2, 4, 8, 16)
    """world: sections of a document; training goes from each length to the next (--grow-at)"""
    kinds: Annotated[tuple[str, ...], NOT_EMPTY] = ("one_fact", "two_hop")
    """world: kinds of question, in equal shares"""
    agent: str = "memagent"
    """the agent that is trained; the command: unless said, the preset's, else the one that the model was trained with"""
    reward: str = ""
    """path.py:function of a finished trajectory instead of the agent's own reward"""
    save_every: Annotated[int, COUNT] = 20
    """steps between checkpoints; there is always one at the end"""
    keep_checkpoints: Annotated[int, NOT_NEGATIVE] = 1
    """checkpoints that are kept: so many of the last, and the best by validation; 0 = none is
    written and nothing is exported, for a run that is only measured"""
    validation: str = ""
    """tasks that are answered greedily at every checkpoint: a file, or world = generated English about facts that are not trained on"""
    validation_n: Annotated[int, COUNT] = 64
    """how many of them"""
    devices: Annotated[int, COUNT] = 1
    """GPUs, or processes on a CPU, that train together on shards of the weights (FSDP2); each rolls out its own share of a step's tasks"""
    num_nodes: Annotated[int, COUNT] = 1
    """machines with so many devices each; start the command on all of them with torchrun"""
    keep_trajectories: Annotated[int, NOT_NEGATIVE] = 1
    """every how many steps all trajectories are written; 0 = never"""
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """float32, bfloat16, or mixed = weights and optimizer in float32, computing in bfloat16; auto = float32 on a CPU, on a GPU mixed for full
    fine-tuning and bfloat16 under adapters"""
    device: Device = "auto"
    """cpu, cuda or auto"""
    engine: EngineName = "transformers"
    """what samples: transformers = the trainer's own weights; vllm = vLLM in this process, given the weights at every step"""
    engine_window: Annotated[int, NOT_NEGATIVE] = 0
    """vllm: most tokens of a prompt and its response; 0 = a section, two memories (of an agent that looks back: one, what it recalls,
    a response), and 1,024 for the question and the template"""
    kv_gib: Annotated[float, NOT_NEGATIVE] = 0.0
    """vllm: GiB of its key/value cache; 0 = on a GPU what `plan` says, on a CPU one"""
    sleep: Literal["auto", "never", "1", "2"] = "auto"
    """vllm, while the trainer updates: never = keeps all; 1 = weights to the host's memory, cache dropped; 2 = both dropped (not with
    LoRA); auto = what `plan` says for this GPU"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Settings of the base policy's supervised training (embedded/tiny.py)."""

    steps: Annotated[int, COUNT] = 8000
    """optimizer steps with a demonstrator that is always careful"""
    careless_steps: Annotated[int, NOT_NEGATIVE] = 1600
    """optimizer steps after them, with one that is careful now and then"""
    careful: Annotated[float, SHARE] = 0.3
    """how often that one keeps the facts that matter, and only those; else it keeps the last one it read"""
    dense_steps: Annotated[int, NOT_NEGATIVE] = 120
    """of the first steps, those that train mostly on lists of facts given twice"""
    lr: Annotated[float, NOT_NEGATIVE] = 1.5e-3
    """peak learning rate of AdamW"""
    absent: Annotated[float, SHARE] = 0.3
    """how often a question is asked whose answer is not there; "unknown" is right then"""
    updates: Annotated[int, NOT_NEGATIVE] = 40
    """update turns a step"""
    answers: Annotated[int, NOT_NEGATIVE] = 12
    """answers from a memory a step"""
    recalls: Annotated[int, NOT_NEGATIVE] = 40
    """update turns of rememr1 a step"""
    recall_answers: Annotated[int, NOT_NEGATIVE] = 12
    """answers of rememr1 a step"""
    full: Annotated[int, NOT_NEGATIVE] = 4
    """documents a step that are read whole"""
    full_sections: Annotated[int, COUNT] = 16
    """longest document that is read whole"""
    hidden: Annotated[int, HEADS] = 128
    """width of the model"""
    layers: Annotated[int, COUNT] = 3
    """layers of the model"""
    intermediate: Annotated[int, COUNT] = 256
    """width of its feed-forward layers"""
    seed: Annotated[int, SEED] = 0
    """everything random follows from it"""
    layout: Literal["shared", "paper"] = "shared"
    """order of the update prompt, as in AgentConfig"""

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What `eval` measures and where it leaves the results."""

    name: str = "eval"
    """name of the evaluation: results lie in RUNS/NAME; a second call goes on with it"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors; empty = the embedded base policy"""
    untrained: str = ""
    """folder or hub name of the policy before training; agents with @untrained after their name answer with it (endpoint: its name there)"""
    suite: Annotated[str, SUITE] = ""
    """ruler-hqa = documents made of the questions of --data and --filler at every length; ruler = RULER's tasks, generated; empty = the
    files of --data as they are, or generated English"""
    data: Annotated[tuple[str, ...], NOT_EMPTY] = ("world",)
    """files of tasks, or world = generated English; ruler-hqa and ruler: questions with their own paragraphs"""
    agents: Annotated[tuple[str, ...], NOT_EMPTY] = ("memagent", "full", "bm25")
    """who answers: memagent; full = the whole document in one prompt; bm25 = the best sections; none = the question alone; oracle = the
    evidence alone. The first one is compared with the others, each other one with itself before training"""
    lengths: Annotated[tuple[int, ...], COUNT] = ()
    """sections of a document of generated English, documents of ruler-hqa, tokens of ruler; 50,...,6400 doubles; empty = 4,16,64,
    50,200,800 or 4096,8192,16384"""
    filler: tuple[str, ...] = ()
    """ruler-hqa, ruler: files of further passages {title, text}"""
    source_split: str = ""
    """ruler-hqa, ruler: only questions of this split of the source: train or validation"""
    evidence_order: Literal["any", "forward", "reverse"] = "any"
    """ruler-hqa: order of the evidence in the document: any, forward = in hop order, reverse = the last hop first"""
    min_distance: Annotated[float, NOT_NEGATIVE] = 0.0
    """ruler-hqa: distance between pieces of evidence: below 1 the share of the documents that it exceeds, else at least so many documents.
    ReMemR1's distant evidence is reverse with 0.5 in its paper, reverse with 100 ... 1600 in its code"""
    compat_seed4: bool = False
    """ruler-hqa: upstream's constant shuffle, which has the evidence always in the same places"""
    ruler_tasks: tuple[str, ...] = ()
    """ruler: tasks, or all; empty = those whose sources are given"""
    haystack: tuple[str, ...] = ()
    """ruler: files of essays or other running text (.txt, .json with a text, passages); empty = the passages that are there"""
    squad: str = ""
    """ruler: file of SQuAD's form, for qa_1"""
    kinds: Annotated[tuple[str, ...], NOT_EMPTY] = ("one_fact", "two_hop")
    """world: kinds of question"""
    split: str = "dev"
    """world: split of the facts asked for: dev to choose settings, test to report"""
    n: Annotated[int, COUNT] = 64
    """questions per length and kind"""
    samples: Annotated[int, COUNT] = 1
    """answers sampled per question; a question counts with their mean"""
    temperatures: Annotated[tuple[float, ...], NOT_EMPTY, NOT_NEGATIVE] = (1.0, 0.0)
    """sampling temperatures; 0 is greedy and asked once"""
    top_p: Annotated[float, TOP_P] = 1.0
    """nucleus"""
    transcripts: Annotated[int, NOT_NEGATIVE] = 2
    """trajectories kept whole of each agent, length and temperature; the report chooses among them"""
    in_flight: Annotated[int, COUNT] = 256
    """trajectories side by side; fewer where their documents would fill the memory"""
    retries: Annotated[int, NOT_NEGATIVE] = 1
    """how often a trajectory that failed is begun anew before it is written as failed, which counts as wrong"""
    redo_failed: bool = False
    """make rows again that an earlier call wrote as failed"""
    engine: EngineName = "transformers"
    """what answers: transformers, or vllm = vLLM in this process"""
    kv_gib: Annotated[float, NOT_NEGATIVE] = 0.0
    """vllm: GiB of its key/value cache; 0 = on a GPU nine tenths of it without the weights, on a CPU one"""
    endpoint: tuple[str, ...] = ()
    """ask a server of OpenAI's protocol, such as http://127.0.0.1:8000/v1, instead of loading the weights; several: replicas that share
    the work. --model then says whose tokenizer it is; without it text is sent, lengths are estimated at four bytes a token, and nothing is
    taken from the embedded policy. A key is taken from the environment variable OPENAI_API_KEY"""
    served_as: str = ""
    """endpoint: the model's name there; empty = the only one it serves"""
    chat: bool = False
    """endpoint: send text and let the server apply its chat template, for servers that take no token ids"""
    seed: Annotated[int, SEED] = 0
    """of questions and sampling"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights: float32, bfloat16; auto = float32 on a CPU, else bfloat16"""
    device: Device = "auto"
    """cpu, cuda or auto"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""

    def __post_init__(self):
        check_fields(self)
        for name in ("agents", "temperatures", "lengths", "kinds"):
            values = getattr(self, name)
            if twice := [value for k, value in enumerate(values) if value in values[:k]]:
                raise UserError(f"{name} has {twice[0]!r} twice.")
        of_suites = {
            "ruler-hqa": "evidence_order min_distance compat_seed4 filler source_split",
            "ruler": "ruler_tasks haystack squad filler source_split",
        }
        used = of_suites.get(self.suite, "").split()
        for name in {name for names in of_suites.values() for name in names.split()} - {*used}:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UserError(
                    f"{name} means nothing {f'to the suite {self.suite}' if self.suite else 'without --suite'}: leave it out."
                )
        if not self.suite and self.data != ("world",) and self.lengths:
            raise UserError(
                "lengths mean nothing to files as they are, which have their own: leave them out, or give --suite ruler-hqa."
            )


EVERYDAY = {  # command -> the flags of the first panel
    "train": (
        "config preset resume dry_run name model data agent steps tasks_per_step group_size lr "
        "temperature lora_rank devices engine validation save_every seed"
    ).split(),
    "eval": (
        "config preset name model untrained agents data suite lengths n samples temperatures engine "
        "endpoint seed"
    ).split(),
}

# title of a panel of `--help` -> the flags in it; everyday flags stand before all panels
PANELS: dict[str, str] = {
    "Where the run lives": "runs keep_checkpoints keep_trajectories transcripts",
    "What it is trained on": "data shuffle lengths kinds validation_n grow_at grow_steps",
    "What is learnt": "outcome reward credit normalisation aggregation without_signal alpha "
    "turn_reward_scale turns_per_trajectory clip_low clip_high dual_clip kl importance importance_cap",
    "How the weights change": "updates_per_rollout rows_per_update warmup warmup_from decay_from betas "
    "weight_decay grad_clip optimizer lora_alpha lora_targets quantise",
    "How it is sampled": "top_p in_flight engine_window kv_gib sleep max_mismatch retries redo_failed",
    "What it runs on": "num_nodes dtype device micro_tokens recompute trust_remote_code served_as chat",
    "Which questions": "filler source_split evidence_order min_distance compat_seed4 ruler_tasks "
    "haystack squad split",
    "How the agent reads": "chunk_tokens memory_tokens final_tokens max_sections over layout form "
    "thinking templates",
}


def panel_of(name: str) -> str:
    """Return the title of the panel of a flag."""
    return next((title for title, names in PANELS.items() if name in names.split()), "More")


def docs(cls: type) -> dict[str, str]:
    """Map each field, inherited ones included, to the docstring under it, on one line."""
    found = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" not in base.__dict__:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, doc in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                text = getattr(doc.value, "value", "")
                found[field.target.id] = " ".join(str(text).split())  # type: ignore[union-attr]
    return found
