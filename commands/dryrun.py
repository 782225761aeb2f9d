"""A dry run: a training with everything but the weights, in a minute on a CPU and before anything
is downloaded.

Holds: `dry_run`. Leaves out: the training itself (commands/train.py), the arithmetic of memory
(models/plan.py).
Exercise it: `python cli.py train --config recipes/laptop.yaml --dry-run`. Read next:
commands/train.py.

The settings are the run's own, and so is every line of code between them and the export. What is
not here stands in, and is named: a model of the same architecture with two thin layers of random
weights, the embedded tokenizer, generated English, made-up rewards, fewer and shorter answers, two
processes of a CPU for eight GPUs.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path

from config import files, stops
from config.errors import UserError, loading
from config.options import EMBEDDED, GRPOConfig, RunConfig
from memagent import Agent, Trajectory
from models.packaged import if_here
from models.plan import SIZES, SIZES_GIB, geometry, plan
from models.setup import TrainingSetup
from tasks import readers
from tasks.episodes import conversations_of, is_conversations
from tasks.sources import GENERATED
from tokens.codec import Codec

LAYERS, HIDDEN, HEAD = (
    2,
    64,
    32,
)  # of the model that stands in; vLLM's attention on a CPU knows no smaller heads
TOKENS = 24  # of a response


@stops.saying("A dry run leaves nothing: the same command begins it anew.")
def dry_run(
    run: RunConfig, config: GRPOConfig, agent: Agent, say=print, resume: bool = False
) -> None:
    """Two steps, two checkpoints and an export; `say` is told what stands in and what came out.

    UserError if the run cannot be.
    """
    import torch
    from transformers.utils import logging as hf_logging

    from commands.train import check, check_folder, train
    from engines.open import check_answerer
    from tasks.sources import training_tasks

    setup = TrainingSetup.of(run, config, agent)
    check(setup, here=False)
    check_answerer(setup)
    run, config = setup.run, setup.training
    if run.adapter:
        say(f"New adapters of rank {config.lora_rank} stand in for those in {run.adapter}.")
        run = replace(run, adapter="")
    folder = files.run_path(run.runs, run.name) if run.name else None
    if folder:
        check_folder(folder, resume)
    hf_logging.disable_progress_bar()
    _say_plan(run, config, agent, say)
    with tempfile.TemporaryDirectory(prefix="memagent-") as temporary:
        model = _stand_in(run, Path(temporary, "base"), say)
        tasks, validation = _tasks(run, run.data, say), _tasks(run, run.validation, say)
        if tasks == run.data:
            source = training_tasks(run, config)
            for level, n in enumerate(config.tasks_per_step):
                source.batch(0, min(level, source.levels), n)
        devices = min(run.devices * run.num_nodes, 2)
        if devices < run.devices * run.num_nodes:
            say(f"{devices} processes stand in for {run.num_nodes} x {run.devices} devices.")
        answerer = run.answerer
        if answerer != "base":
            answerer = f"hf:{model}"
            say("The model that stands in answers the frozen prompts, too.")
        engine = run.engine
        if engine == "vllm" and not importlib.util.find_spec("vllm"):
            engine = "transformers"
            say("vLLM is not installed here: the transformers engine stands in.")
        short = replace(
            run,
            runs=temporary,
            name="dry",
            model=str(model),
            data=tasks,
            validation=validation,
            validation_n=2,
            devices=devices,
            num_nodes=1,
            device="cpu",
            engine=engine,
            answerer=answerer,
            dtype=_dtype(run, config),
            engine_window=0,
            kv_gib=0.1 if engine == "vllm" else 0.0,
            save_every=1,
            keep_checkpoints=run.keep_checkpoints or 1,
            logger=(),
        )
        small = replace(
            config,
            steps=2,
            tasks_per_step=(devices,),
            group_size=2,
            updates_per_rollout=min(2, config.updates_per_rollout),
            rows_per_update=min(4, config.rows_per_update),
            max_mismatch=0.0,
        )
        brief = _brief(agent)
        torch.set_num_threads(1)
        missing = [
            source
            for source in (run.data, run.validation)
            if source not in GENERATED and not _is_here(source)
        ]
        _look(train(short, small, brief, reward=made_up), missing, say)


def _brief(agent: Agent) -> Agent:
    """Return the agent with short memories, responses and answers, in two sections."""
    fields = {
        name: min(TOKENS, getattr(agent.config, name)) for name in ("memory_tokens", "final_tokens")
    }
    for name in vars(type(agent.config)).get("__slots__", ()):
        if name.endswith("_tokens") and name != "chunk_tokens" and name not in fields:
            fields[name] = min(2 * TOKENS, getattr(agent.config, name) or 2 * TOKENS)
    return agent.with_settings(**fields, max_sections=min(2, agent.config.max_sections or 2))


def made_up(trajectory: Trajectory) -> float:
    """Return a reward that follows from the tokens: random weights never answer right."""
    return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97


def _dtype(run: RunConfig, config: GRPOConfig) -> str:
    """What it would be on a GPU, wherever this is."""
    if run.dtype != "auto" or run.device == "cpu" or not run.model:
        return run.dtype
    return "bfloat16" if config.lora_rank else "mixed"


def _say_plan(run: RunConfig, config: GRPOConfig, agent: Agent, say) -> None:
    if run.device == "cpu":
        return
    from engines.open import gib_of_answerer

    mode, beside = TrainingSetup.of(run, config, agent).mode, 0.0
    try:
        sizes = geometry(run.model, download=False)
    except UserError:
        say(f"The sizes of {run.model} are not known here: no plan.")
        return
    try:
        beside = gib_of_answerer(run.answerer, download=False)
    except UserError:
        say(f"The sizes of {run.answerer} are not known here: the plan has no room for it.")
    devices = run.devices * run.num_nodes
    for gib in SIZES_GIB:
        p = plan(sizes, mode, gib, devices, config, agent, beside)
        if p.fits:
            say(
                f"The plan, {mode} of {sizes.weights / 1e9:.3g} billion weights: {devices} GPU(s) "
                f"of {gib} GiB are enough, at most {p.rollout:.0f} GiB "
                f"of it in the rollout and {p.update:.0f} in the update; {p.turns} turns in the "
                f"cache, --sleep {p.sleep}."
            )
            return
    say(
        f"The plan: {mode} of {sizes.weights / 1e9:.3g} billion weights does not fit {devices} "
        f"GPU(s) of {SIZES_GIB[-1]} GiB."
    )


def _stand_in(run: RunConfig, folder: Path, say) -> Path:
    """A folder with a model of the same architecture and its tokenizer, where that is at hand."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name = run.model or str(EMBEDDED)
    here = if_here(name)
    try:
        codec = Codec.load(here, trust_remote_code=run.trust_remote_code, local=True)
    except UserError:
        codec = Codec.load(EMBEDDED)
        say(f"The tokenizer of {name} is not here: that of the embedded policy stands in.")
    try:
        with loading(f"The configuration of {name}"):
            config = AutoConfig.from_pretrained(
                here, trust_remote_code=run.trust_remote_code, local_files_only=True
            )
    except UserError:
        if name not in SIZES:
            raise UserError(
                f"Neither the files nor the sizes of {name} are here: a dry run needs its "
                "config.json."
            ) from None
        g = SIZES[name]
        kind = "qwen3" if "Qwen3" in name else "qwen2" if "Qwen2" in name else "llama"
        config = AutoConfig.for_model(
            kind, tie_word_embeddings=g.tied, max_position_embeddings=32768
        )
    small = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": 2 * HIDDEN,
        # as published ones are rounded up: the model's class of tokenizer may add one of its own
        "vocab_size": -(-len(codec.tokenizer) // 64) * 64,
        "layer_types": None,
    }
    if getattr(config, "layer_types", None):
        small["layer_types"] = config.layer_types[:LAYERS]
    if hasattr(config, "quantization_config"):  # the stand-in's weights are stored as they are
        del config.quantization_config
    config.update({key: value for key, value in small.items() if hasattr(config, key)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=run.trust_remote_code)
    say(
        f"{LAYERS} layers of width {HIDDEN}, random, stand in for the weights "
        f"({type(model).__name__})."
    )
    model.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    return folder


def _is_here(source: str) -> bool:
    """Tell whether the file of a `--data` is there."""
    file = source.partition(":")[2].partition("#")[0] if is_conversations(source) else source
    return Path(file).exists()


def _tasks(run: RunConfig, source: str, say) -> str:
    if source in GENERATED:
        return source
    if is_conversations(source) and _is_here(source):
        say(f"{len(conversations_of(source).conversations):,} conversations are in {source}.")
        return source
    if _is_here(source):
        say(f"{len(readers.read(source)):,} tasks are in {source}.")
        return source
    say(f"{source} is not here: generated English stands in.")
    return "world"


def _look(folder: Path, missing: list[str], say) -> None:
    """Say what the run has left, load its export, and say what is missing."""
    import csv

    import torch
    from transformers import AutoModelForCausalLM

    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        if not torch.isfinite(model(torch.tensor([[2, 3, 4]])).logits).all():
            raise RuntimeError("The export computes no numbers.")
    say(
        f"{len(rows)} steps, {int(sum(float(r['written_tokens']) for r in rows))} tokens written, "
        "sampler and trainer "
        f"{float(rows[-1]['mismatch_mean']):.1g} apart, {int(float(rows[-1]['trained_rows']))} "
        "turns trained on in the last, the export loads."
    )
    say(
        f"The run can begin once {' and '.join(missing)} can be read."
        if missing
        else "The run can begin."
    )
