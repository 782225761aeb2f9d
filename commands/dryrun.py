"""A dry run: a training with everything but the weights, in a minute on a CPU and before anything
is downloaded.

Holds: `dry_run`. Leaves out: the training itself (commands/train.py), what fits
(commands/plan.py).
Exercise it: `python cli.py train --config recipes/laptop.yaml --dry-run`. Read next:
commands/train.py.

The settings are the run's own, and so is every line of code between them and the export. What is
not here stands in, and is named: a model of the same architecture with two thin layers of random
weights, the embedded tokenizer, generated English, made-up rewards, fewer and shorter answers, two
processes of a CPU for eight GPUs.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from config import files, stops
from config.errors import UserError, loading
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.terminal import next_step
from memagent import Agent, Trajectory
from models.packaged import ready_if_here
from models.plan import SIZES
from suites._training import check_sources, parts_of, training_tasks
from tasks.hub import is_hub
from tokens.codec import Codec

# of the model that stands in; vLLM's attention on a CPU knows no smaller heads
LAYERS, HIDDEN, HEAD = 2, 64, 32
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

    from commands.train import check_folder, resolved, train

    run, config, _ = resolved(run, config, agent, here=False)
    if run.name:
        check_folder(files.run_path(run.runs, run.name), resume)
    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    changes: dict = {}
    if run.adapter:
        changes["adapter"] = ""
        say(f"New adapters of rank {config.lora_rank} stand in for those in {run.adapter}.")
    missing: list[str] = []  # what the run needs, and this machine or folder lacks
    if run.engine == "vllm" and not importlib.util.find_spec("vllm"):
        changes["engine"] = "transformers"
        missing.append("vLLM")
        say("vLLM is not installed here: the transformers engine stands in.")
    devices = min(run.devices * run.num_nodes, 2)
    if devices < run.devices * run.num_nodes:
        say(f"{devices} processes stand in for {run.num_nodes} x {run.devices} devices.")
    data, validation = (_readable(source, missing, say) for source in (run.data, run.validation))
    with tempfile.TemporaryDirectory(prefix="memagent-") as temporary:
        model = str(_stand_in(run, Path(temporary, "base"), missing, say))
        if data == run.data:  # then it has what the run's own steps ask for
            source = training_tasks(run, config)
            for level, n in enumerate(config.tasks_per_step):
                source.batch(0, min(level, source.levels), n)
        small_run = replace(
            run,
            runs=temporary,
            name="dry",
            model=model,
            data=data,
            validation=validation,
            validation_n=2,
            devices=devices,
            num_nodes=1,
            device="cpu",
            dtype=_dtype(run, config),
            kv_gib=0.1 if changes.get("engine", run.engine) == "vllm" else 0.0,
            save_every=1,
            keep_checkpoints=run.keep_checkpoints or 1,
            logger=(),
            **changes,
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
        say(_outcome(train(small_run, small, _brief(agent), reward=made_up)))
    say(f"Not tried, since not here: {', '.join(missing)}." if missing else "The run can begin.")
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    next_step("begin it once that is here" if missing else "begin it", *words)


def _brief(agent: Agent) -> Agent:
    """Return the agent with short memories, responses and answers, in two sections."""
    config, names = agent.config, vars(type(agent.config)).get("__slots__", ())
    limits = {n: 2 * TOKENS for n in names if n.endswith("_tokens") and n != "chunk_tokens"}
    limits |= {"memory_tokens": TOKENS, "final_tokens": TOKENS}
    brief = {n: min(limit, getattr(config, n) or limit) for n, limit in limits.items()}
    return agent.with_settings(**brief, max_sections=min(2, config.max_sections or 2))


def made_up(trajectory: Trajectory) -> float:
    """Return a reward that follows from the tokens: random weights never answer right."""
    return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97


def _dtype(run: RunConfig, config: GRPOConfig) -> str:
    """Return the dtype that it would be on a GPU, wherever this is."""
    if run.dtype != "auto" or run.device == "cpu" or not run.model:
        return run.dtype
    return "bfloat16" if config.lora_rank else "mixed"


def _stand_in(run: RunConfig, folder: Path, missing: list[str], say) -> Path:
    """Make a model of the same architecture, with its tokenizer where that is found, else that is
    missing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name = run.model or str(EMBEDDED)
    here, code = ready_if_here(name), run.trust_remote_code
    try:
        codec = Codec.load(here, trust_remote_code=code, local=True)
    except UserError:
        codec = Codec.load(EMBEDDED)
        missing.append(f"the tokenizer of {name}")
        say(f"The tokenizer of {name} is not here: that of the embedded policy stands in.")
    try:
        with loading(f"The configuration of {name}"):
            config = AutoConfig.from_pretrained(here, trust_remote_code=code, local_files_only=True)
    except UserError:
        if name not in SIZES:
            raise UserError(
                f"Neither the files nor the sizes of {name} are here: a dry run needs its "
                "config.json."
            ) from None
        kind = "qwen3" if "Qwen3" in name else "qwen2" if "Qwen2" in name else "llama"
        config = AutoConfig.for_model(
            kind, tie_word_embeddings=SIZES[name].tied, max_position_embeddings=32768
        )
    kinds = getattr(config, "layer_types", None)
    small = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": 2 * HIDDEN,
        # as published ones are rounded up: the model's class of tokenizer may add one of its own
        "vocab_size": -(-len(codec.tokenizer) // 64) * 64,
        "layer_types": kinds and kinds[:LAYERS],
    }
    if hasattr(config, "kv_lora_rank"):  # keys and values have sizes of their own, all heads theirs
        small |= {"num_key_value_heads": HIDDEN // HEAD, "head_dim": getattr(config, "head_dim", 0)}
    if hasattr(config, "quantization_config"):  # the stand-in's weights are stored as they are
        del config.quantization_config
    with loading(f"A small model like {name}"):
        config.update({key: value for key, value in small.items() if hasattr(config, key)})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=code)
        model.save_pretrained(folder)
    say(
        f"{LAYERS} layers of width {HIDDEN}, random, stand in for the weights "
        f"({type(model).__name__})."
    )
    codec.tokenizer.save_pretrained(folder)
    return folder


def _readable(source: str, missing: list[str], say) -> str:
    """Return a `--data` whose tasks can be made or read here, else generated English: then that is
    missing."""
    parts = [part for part, _ in parts_of(source)]
    try:
        check_sources(parts)
        if not any(map(is_hub, parts)):
            return source
        why = f"{source} is fetched when the run begins."
    except UserError as error:
        why = str(error)
    missing.append(source)
    say(f"{why} Generated English stands in.")
    return "world"


def _outcome(folder: Path) -> str:
    """Load the export of a run, and say what the run has left."""
    import torch
    from transformers import AutoModelForCausalLM

    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        if not torch.isfinite(model(torch.tensor([[2, 3, 4]])).logits).all():
            raise RuntimeError("The export computes no numbers.")
    written = sum(int(float(row["written_tokens"])) for row in rows)
    return (
        f"{len(rows)} steps, {written} tokens written, sampler and trainer agree to "
        f"{float(rows[-1]['mismatch_mean']):.1g}, the export loads."
    )
