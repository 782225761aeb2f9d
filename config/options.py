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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from config.errors import UserError

EMBEDDED = (
    Path(__file__).parent.parent / "embedded" / "weights"
)  # the base policy that ships with the repository


def need(config: object, names: str, right: Callable[..., bool], words: str) -> None:
    """UserError "NAME must be WORDS, not VALUE" for the first of the fields (or of their items) that is not `right`; nan never is."""
    for name in names.split():
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if not right(item):
                raise UserError(f"{name} must be {words}, not {item!r}.")


def need_values(config: object, names: str) -> None:
    """UserError for the first of the fields that is an empty tuple."""
    for name in names.split():
        if not getattr(config, name):
            raise UserError(f"{name} must name at least one.")


def one_of(*allowed: str) -> tuple[Callable[[str], bool], str]:
    """The last two arguments of `need` for a field with few values."""
    return lambda value: value in allowed, f"one of {', '.join(allowed)}"


COUNT = (lambda n: n >= 1), "at least 1"
NOT_NEGATIVE = (lambda x: 0 <= x < math.inf), "0 or more"
SHARE = (lambda x: 0 <= x <= 1), "between 0 and 1"
TOP_P = (lambda x: 0 < x <= 1), "above 0 and at most 1"
SEED = (lambda n: 0 <= n < 2**63), "0 or more and below 2^63"
DTYPE = one_of("auto", "float32", "bfloat16")
DEVICE = one_of("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """What is optimised and how. Every field is a flag of `train`; a preset fills several at once (spec memagent.md 2)."""

    steps: int = 100
    """training steps: one rollout each"""
    tasks_per_step: tuple[int, ...] = (8,)
    """tasks (groups) of one step; several numbers: one for each length that the tasks grow to, the last one for all further ones"""
    group_size: int = 16
    """G, trajectories of one task"""
    updates_per_rollout: int = 1
    """optimizer steps on one rollout, each on its own part of the trajectories"""
    rows_per_update: int = 0
    """turns of one optimizer step, about: the longer the documents, the more steps a rollout gives, each on whole trajectories; instead of
    updates_per_rollout. 0 = that one"""
    without_signal: str = "skip"
    """groups whose advantages are all 0: skip = not trained on; keep = they count in what the loss is normalised by and have the KL term,
    as in verl and vime"""
    outcome: str = "exact"
    """what a trajectory earns: exact = 1 for an accepted answer in the box but for case, blanks and
    LaTeX, as MemAgent and ReMemR1, which look into thinking too (here it is dropped first);
    em = 1 for one after SQuAD's normalisation, without articles and punctuation; f1 = the share of
    its words, so normalised (ReMemR1's own f1 is not)"""
    credit: str = "share"
    """share = every turn of a trajectory gets its advantage; split = divided by the number of its turns"""
    normalisation: str = "std"
    """of the rewards of a group: mean = minus the mean; std = also divided by the unbiased standard deviation + 1e-6"""
    aggregation: str = "token_mean"
    """token_mean = over all tokens of an optimizer step on all ranks, with without_signal = skip those of groups with a signal alone;
    row_mean = sum over turns of their token mean, per trajectory; turn_mean = mean over turns
    of their token mean; state_mean = mean over trajectories of the mean over their turns of the token mean; constant = sum over tokens / (turns x longest response allowed)"""
    alpha: float = 0.8
    """rememr1: weight of the outcome's advantage; that of the turn's own reward has the rest. 1 = outcome alone"""
    memory_reward: str = "gain"
    """rememr1, a turn's reward for its memory: gain = what of an accepted answer the update has added; level = what the memory then holds"""
    callback_reward: str = "seen"
    """rememr1, a turn's reward for its look back: what of an accepted answer it has brought that was not yet seen in memory and section;
    prompt = nor anywhere in the prompt, as upstream"""
    format_reward: str = "all"
    """rememr1, a turn's reward for its form: all = all tags, by the parser; one_line = one update on one line, which is then all that the
    memory reward sees too, as upstream"""
    recall_match: str = "words"
    """rememr1, how these rewards look for an answer: words = whole words, of the best answer; substring = all its words anywhere, mean over
    the answers, as upstream"""
    recall_words: str = "unseen"
    """rememr1, which whole words of an answer these rewards look for: unseen = those that the question has not, and not yes or no, which say
    nothing about reading; all = every word, as equations 5 and 6 are printed"""
    state_reward_scale: float = 1.0
    """rememr1: factor on a turn's own reward; upstream's is 2 by accident"""
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.28
    """and above at 1 + clip_high"""
    dual_clip: float = 0.0
    """bound c of the loss for negative advantages, -c * A; 0 = off"""
    kl: float = 0.0
    """weight of the k3 estimate of KL(policy, reference) in the loss; 0 = no reference model is kept"""
    importance: str = "truncate"
    """correction of sampler/trainer mismatch: truncate = min(trainer/sampler, importance_cap) for each token; mask = the same, but 0 past
    the cap; mask_turn = a turn whose mean ratio (geometric, over its tokens) leaves 1/importance_cap ... importance_cap is not trained; none"""
    importance_cap: float = 2.0
    """cap of that correction"""
    max_mismatch: float = 0.0
    """the run stops when the sampler is further than this from the trainer in a step, by the k3 estimate of the KL divergence: they have not
    the same weights; 0 = 1e-6 in float32, else 0.01. With top_p below 1 they differ anyway, and nothing is compared"""
    turns_per_trajectory: int = 0
    """train on this many update turns of a trajectory, drawn at random and weighted up to stay unbiased, and on its answer; 0 = all. The
    rare outcome of a group (failures among successes, or the reverse) is trained whole"""
    lr: float = 7e-4
    """peak learning rate"""
    warmup: int = 5
    """steps of linear warm-up"""
    warmup_from: str = "share"
    """the first rate of the warm-up: share = one warmup-th of the peak; zero = 0, as verl's, which changes no weight in the first step"""
    decay_from: float = 1.0
    """share of the steps after which the rate falls linearly to a tenth; 1 = constant"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's"""
    weight_decay: float = 0.0
    """AdamW's"""
    grad_clip: float = 1.0
    """largest norm of the gradient; a step whose norm is not finite is skipped and counted"""
    temperature: tuple[float, ...] = (1.0,)
    """sampling temperature of the rollout, the trainer's log-probs are taken at it too; several numbers: one for each length that the
    tasks grow to, the last one for all further ones"""
    top_p: float = 1.0
    """nucleus of the rollout; below 1 the sampler's distribution is no longer the trainer's"""
    grow_at: float = 0.9
    """tasks grow to the next length when the running reward reaches this"""
    grow_steps: int = 5
    """and at least this many steps were spent at the present one"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers; 0 = full fine-tuning"""
    lora_alpha: float = 0.0
    """scale of the adapters; 0 = twice the rank"""
    lora_targets: str = "all-linear"
    """which linear layers have adapters: all-linear, or names such as q_proj,v_proj"""
    quantise: bool = False
    """QLoRA: the base weights in 4 bits (NF4); with --lora-rank alone"""
    optimizer: str = "adamw"
    """adamw, or adamw8bit: its state in 8 bits (one GPU)"""
    micro_tokens: int = 16384
    """most tokens of one forward and backward pass, those that turns share counted once; changes nothing but memory and speed"""
    recompute: bool = False
    """gradient checkpointing: compute the layers' activations anew in the backward pass instead of keeping them; a third more time"""
    in_flight: int = 256
    """trajectories in flight"""
    seed: int = 0
    """everything random follows from it"""

    def __post_init__(self):
        need(self, "outcome", *one_of("exact", "em", "f1"))
        need(self, "credit", *one_of("share", "split"))
        need(self, "normalisation", *one_of("mean", "std"))
        need(
            self,
            "aggregation",
            *one_of("token_mean", "row_mean", "turn_mean", "state_mean", "constant"),
        )
        need(self, "memory_reward", *one_of("gain", "level"))
        need(self, "callback_reward", *one_of("seen", "prompt"))
        need(self, "format_reward", *one_of("all", "one_line"))
        need(self, "recall_match", *one_of("words", "substring"))
        need(self, "recall_words", *one_of("unseen", "all"))
        need(self, "without_signal", *one_of("skip", "keep"))
        need(self, "warmup_from", *one_of("share", "zero"))
        need(self, "importance", *one_of("truncate", "mask", "mask_turn", "none"))
        need_values(self, "tasks_per_step temperature")
        need(
            self,
            "steps tasks_per_step group_size updates_per_rollout micro_tokens in_flight",
            *COUNT,
        )
        need(
            self,
            "rows_per_update turns_per_trajectory warmup grow_steps lora_rank lora_alpha lr weight_decay kl clip_high max_mismatch state_reward_scale",
            *NOT_NEGATIVE,
        )
        if self.rows_per_update and self.updates_per_rollout > 1:
            raise UserError(
                "Give --rows-per-update or --updates-per-rollout, not both: either says how often a rollout is trained on."
            )
        need(self, "clip_low decay_from alpha", *SHARE)
        need(self, "dual_clip", lambda c: c == 0 or c > 1, "above 1, or 0 for none")
        need(self, "importance_cap grad_clip", lambda x: x > 0, "above 0")
        if len(self.betas) != 2:
            raise UserError(f"betas must be two numbers, such as 0.9,0.95, not {len(self.betas)}.")
        need(self, "betas", lambda x: 0 <= x < 1, "at least 0 and below 1")
        need(self, "temperature", lambda t: 0 < t < math.inf, "above 0, training samples")
        need(self, "top_p", *TOP_P)
        need(self, "optimizer", *one_of("adamw", "adamw8bit"))
        if self.quantise and not self.lora_rank:
            raise UserError(
                "quantise keeps the base weights in 4 bits, which are not trained: give a --lora-rank too."
            )
        need(self, "grow_at", lambda x: x == x, "a number")
        need(self, "seed", *SEED)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What `train` works on and where it leaves the results."""

    name: str = ""
    """name of the run: results lie in RUNS/NAME; default: a date and time"""
    runs: str = "runs"
    """folder of all runs"""
    model: str = ""
    """folder or hub name of a causal LM with safetensors; empty = the embedded base policy"""
    data: str = "world"
    """training tasks: a file of any form `data look` can read, or world = generated English"""
    shuffle: bool = True
    """a file's tasks in an order drawn anew for every pass over it, else as they stand in it"""
    lengths: tuple[int, ...] = (2, 4, 8, 16)
    """world: sections of a document; training goes from each length to the next (--grow-at)"""
    kinds: tuple[str, ...] = ("one_fact", "two_hop")
    """world: kinds of question, in equal shares"""
    agent: str = "memagent"
    """the agent that is trained; the command: unless said, the preset's, else the one that the model was trained with"""
    save_every: int = 20
    """steps between checkpoints; there is always one at the end"""
    keep_checkpoints: int = 1
    """checkpoints that are kept: so many of the last, and the best by validation; 0 = none is
    written and nothing is exported, for a run that is only measured"""
    validation: str = ""
    """tasks that are answered greedily at every checkpoint: a file, or world = generated English about facts that are not trained on"""
    validation_n: int = 64
    """how many of them"""
    devices: int = 1
    """GPUs, or processes on a CPU, that train together on shards of the weights (FSDP2); each rolls out its own share of a step's tasks"""
    num_nodes: int = 1
    """machines with so many devices each; start the command on all of them with torchrun"""
    keep_trajectories: int = 1
    """every how many steps all trajectories are written; 0 = never"""
    dtype: str = "auto"
    """float32, bfloat16, or mixed = weights and optimizer in float32, computing in bfloat16; auto = float32 on a CPU, on a GPU mixed for full
    fine-tuning and bfloat16 under adapters"""
    device: str = "auto"
    """cpu, cuda or auto"""
    engine: str = "transformers"
    """what samples: transformers = the trainer's own weights; vllm = vLLM in this process, given the weights at every step"""
    engine_window: int = 0
    """vllm: most tokens of a prompt and its response; 0 = a section, two memories (of an agent that looks back: one, what it recalls,
    a response), and 1,024 for the question and the template"""
    kv_gib: float = 0.0
    """vllm: GiB of its key/value cache; 0 = on a GPU what `plan` says, on a CPU one"""
    sleep: str = "auto"
    """vllm, while the trainer updates: never = keeps all; 1 = weights to the host's memory, cache dropped; 2 = both dropped (not with
    LoRA); auto = what `plan` says for this GPU"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""

    def __post_init__(self):
        need_values(self, "data lengths kinds")
        need(self, "engine", *one_of("transformers", "vllm"))
        need(self, "sleep", *one_of("auto", "never", "1", "2"))
        need(self, "engine_window kv_gib", *NOT_NEGATIVE)
        need(self, "lengths", lambda n: n >= 1, "at least 1 section")
        need(self, "save_every validation_n devices num_nodes", *COUNT)
        need(self, "keep_trajectories keep_checkpoints", *NOT_NEGATIVE)
        need(self, "dtype", *one_of("auto", "float32", "bfloat16", "mixed"))
        need(self, "device", *DEVICE)


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Settings of the base policy's supervised training (embedded/tiny.py)."""

    steps: int = 8000
    """optimizer steps with a demonstrator that is always careful"""
    careless_steps: int = 1600
    """optimizer steps after them, with one that is careful now and then"""
    careful: float = 0.3
    """how often that one keeps the facts that matter, and only those; else it keeps the last one it read"""
    dense_steps: int = 120
    """of the first steps, those that train mostly on lists of facts given twice"""
    lr: float = 1.5e-3
    """peak learning rate of AdamW"""
    absent: float = 0.3
    """how often a question is asked whose answer is not there; "unknown" is right then"""
    updates: int = 40
    """update turns a step"""
    answers: int = 12
    """answers from a memory a step"""
    recalls: int = 40
    """update turns of rememr1 a step"""
    recall_answers: int = 12
    """answers of rememr1 a step"""
    full: int = 4
    """documents a step that are read whole"""
    full_sections: int = 16
    """longest document that is read whole"""
    hidden: int = 128
    """width of the model"""
    layers: int = 3
    """layers of the model"""
    intermediate: int = 256
    """width of its feed-forward layers"""
    seed: int = 0
    """everything random follows from it"""
    layout: str = "shared"
    """order of the update prompt, as in AgentConfig"""

    def __post_init__(self):
        need(self, "steps full_sections layers intermediate", *COUNT)
        need(
            self,
            "careless_steps dense_steps updates answers recalls recall_answers full lr",
            *NOT_NEGATIVE,
        )
        need(self, "careful absent", *SHARE)
        need(
            self, "hidden", lambda n: n > 0 and n % 32 == 0, "a multiple of 32, the width of a head"
        )
        need(self, "seed", *SEED)
        need(self, "layout", *one_of("shared", "paper"))


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
    suite: str = ""
    """ruler-hqa = documents made of the questions of --data and --filler at every length; ruler = RULER's tasks, generated; empty = the
    files of --data as they are, or generated English"""
    data: tuple[str, ...] = ("world",)
    """files of tasks, or world = generated English; ruler-hqa and ruler: questions with their own paragraphs"""
    agents: tuple[str, ...] = ("memagent", "full", "bm25")
    """who answers: memagent; full = the whole document in one prompt; bm25 = the best sections; none = the question alone; oracle = the
    evidence alone. The first one is compared with the others, each other one with itself before training"""
    lengths: tuple[int, ...] = ()
    """sections of a document of generated English, documents of ruler-hqa, tokens of ruler; 50,...,6400 doubles; empty = 4,16,64,
    50,200,800 or 4096,8192,16384"""
    filler: tuple[str, ...] = ()
    """ruler-hqa, ruler: files of further passages {title, text}"""
    source_split: str = ""
    """ruler-hqa, ruler: only questions of this split of the source: train or validation"""
    evidence_order: str = "any"
    """ruler-hqa: order of the evidence in the document: any, forward = in hop order, reverse = the last hop first"""
    min_distance: float = 0.0
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
    kinds: tuple[str, ...] = ("one_fact", "two_hop")
    """world: kinds of question"""
    split: str = "dev"
    """world: split of the facts asked for: dev to choose settings, test to report"""
    n: int = 64
    """questions per length and kind"""
    samples: int = 1
    """answers sampled per question; a question counts with their mean"""
    temperatures: tuple[float, ...] = (1.0, 0.0)
    """sampling temperatures; 0 is greedy and asked once"""
    top_p: float = 1.0
    """nucleus"""
    transcripts: int = 2
    """trajectories kept whole of each agent, length and temperature; the report chooses among them"""
    in_flight: int = 256
    """trajectories side by side; fewer where their documents would fill the memory"""
    retries: int = 1
    """how often a trajectory that failed is begun anew before it is written as failed, which counts as wrong"""
    redo_failed: bool = False
    """make rows again that an earlier call wrote as failed"""
    engine: str = "transformers"
    """what answers: transformers, or vllm = vLLM in this process"""
    kv_gib: float = 0.0
    """vllm: GiB of its key/value cache; 0 = on a GPU nine tenths of it without the weights, on a CPU one"""
    endpoint: tuple[str, ...] = ()
    """ask a server of OpenAI's protocol, such as http://127.0.0.1:8000/v1, instead of loading the weights; several: replicas that share
    the work. --model then says whose tokenizer it is; without it text is sent, lengths are estimated at four bytes a token, and nothing is
    taken from the embedded policy. A key is taken from the environment variable OPENAI_API_KEY"""
    served_as: str = ""
    """endpoint: the model's name there; empty = the only one it serves"""
    chat: bool = False
    """endpoint: send text and let the server apply its chat template, for servers that take no token ids"""
    seed: int = 0
    """of questions and sampling"""
    dtype: str = "auto"
    """of the weights: float32, bfloat16; auto = float32 on a CPU, else bfloat16"""
    device: str = "auto"
    """cpu, cuda or auto"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; off unless you trust it"""

    def __post_init__(self):
        need_values(self, "data agents kinds temperatures")
        need(self, "lengths n samples in_flight", *COUNT)
        for name in ("agents", "temperatures", "lengths", "kinds"):
            values = getattr(self, name)
            if twice := [value for k, value in enumerate(values) if value in values[:k]]:
                raise UserError(f"{name} has {twice[0]!r} twice.")
        need(
            self,
            "suite",
            lambda name: name in ("", "ruler-hqa", "ruler"),
            "ruler-hqa or ruler, or empty",
        )
        need(self, "evidence_order", *one_of("any", "forward", "reverse"))
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
        need(self, "engine", *one_of("transformers", "vllm"))
        need(self, "transcripts temperatures kv_gib retries min_distance", *NOT_NEGATIVE)
        need(self, "top_p", *TOP_P)
        need(self, "seed", *SEED)
        need(self, "dtype", *DTYPE)
        need(self, "device", *DEVICE)


def docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, doc in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(doc.value.value).split())  # type: ignore[union-attr]
    return found
