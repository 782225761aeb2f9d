"""A dry run: a training with everything but the weights, in a minute on a CPU and before anything
is downloaded.

The settings are the run's own, and so is every line of code between them and the export. What is
too large has a stand-in, which is named: a model of the same architecture with two thin layers of
random weights, made-up rewards, fewer and shorter answers, two processes of a CPU for eight GPUs;
generated English stands for data that is not here.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from config import files, stops
from config.errors import UserError, loading
from config.options import EMBEDDED, GRPOConfig, RunConfig
from config.terminal import next_step
from memagent import Agent, Trajectory
from models.packaged import ready_if_here
from models.plan import SIZES
from report.training import whole_rows
from suites._training import check_sources, parts_of
from tasks.hub import is_hub
from tokens.codec import Codec

# of the model that stands in
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

    from commands.train import check_folder, resolved, train

    run, config, _ = resolved(run, config, agent, here=False)
    if run.name:
        check_folder(files.run_path(run.runs, run.name), resume)
    torch.set_num_threads(1)
    devices = min(run.devices * run.num_nodes, 2)
    if devices < run.devices * run.num_nodes:
        say(f"Here stand {devices} processes for {run.num_nodes} x {run.devices} devices.")
    if run.engine == "vllm":
        say("Here stands the transformers engine for vLLM.")
    if run.adapter:
        say(f"Here stand new adapters of rank {config.lora_rank} for those in {run.adapter}.")
    data, validation = (_readable(source, say) for source in (run.data, run.validation))
    with tempfile.TemporaryDirectory(prefix="memagent-") as temporary:
        small_run = replace(
            run,
            runs=temporary,
            name="dry",
            model=str(_stand_in(run, Path(temporary, "base"), say)),
            adapter="",
            data=data,
            validation=validation,
            validation_n=2,
            devices=devices,
            num_nodes=1,
            device="cpu",
            engine="transformers",
            save_every=1,
            keep_checkpoints=run.keep_checkpoints or 1,
            logger=(),
        )
        small = replace(config, steps=2, tasks_per_step=(devices,), group_size=2, max_mismatch=0.0)
        say(_outcome(train(small_run, small, _brief(agent), reward=made_up)))
    say("But for what stood in here, the run can begin.")
    next_step("begin it", *(word for word in sys.argv[1:] if word != "--dry-run"))


def _brief(agent: Agent) -> Agent:
    """Return the agent with short memories, responses and answers, in two sections."""
    config = agent.config
    names = {field.name for field in fields(config) if field.name.endswith("_tokens")}
    limits = dict.fromkeys(names - {"chunk_tokens"}, 2 * TOKENS)
    limits |= {"memory_tokens": TOKENS, "final_tokens": TOKENS}
    brief = {n: min(limit, getattr(config, n) or limit) for n, limit in limits.items()}
    return agent.with_settings(**brief, max_sections=min(2, config.max_sections or 2))


def made_up(trajectory: Trajectory) -> float:
    """Return a reward that follows from the tokens: random weights never answer right."""
    return sum(i for turn in trajectory.turns for i in turn.response_ids) % 97 / 97


def _stand_in(run: RunConfig, folder: Path, say) -> Path:
    """Make a model of the same architecture, with its tokenizer where that is found."""
    import torch
    from transformers import AutoModelForCausalLM

    name = run.model or str(EMBEDDED)
    here, code = ready_if_here(name), run.trust_remote_code
    try:
        codec = Codec.load(here, trust_remote_code=code, local=True)
    except UserError:
        codec = Codec.load(EMBEDDED)
        say(f"Here stands the tokenizer of the embedded policy for that of {name}.")
    config = _config_of(name, here, code)
    latent = hasattr(config, "kv_lora_rank")
    small = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HIDDEN // HEAD,
        # with latent attention keys and values have sizes of their own, all heads theirs
        "num_key_value_heads": HIDDEN // HEAD if latent else 1,
        "head_dim": getattr(config, "head_dim", 0) if latent else HEAD,
        "intermediate_size": 2 * HIDDEN,
        # as published ones are rounded up: the model's class of tokenizer may add one of its own
        "vocab_size": -(-len(codec.tokenizer) // 64) * 64,
        "layer_types": (getattr(config, "layer_types", None) or [])[:LAYERS] or None,
    }
    if hasattr(config, "quantization_config"):  # the stand-in's weights are stored as they are
        del config.quantization_config
    with loading(f"A small model like {name}"):
        config.update({key: value for key, value in small.items() if hasattr(config, key)})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=code)
        model.save_pretrained(folder)
    say(f"Here stand {LAYERS} random layers of width {HIDDEN} for a {type(model).__name__}.")
    codec.tokenizer.save_pretrained(folder)
    return folder


def _config_of(name: str, here: str | Path, code: bool):
    """Return the configuration of a model that is here, or of one whose sizes are known."""
    from transformers import AutoConfig

    try:
        with loading(f"The configuration of {name}"):
            return AutoConfig.from_pretrained(here, trust_remote_code=code, local_files_only=True)
    except UserError:
        if name not in SIZES:
            raise UserError(
                f"Neither the files nor the sizes of {name} are here: a dry run needs its "
                "config.json."
            ) from None
    kind = "qwen3" if "Qwen3" in name else "qwen2" if "Qwen2" in name else "llama"
    tied = SIZES[name].tied
    return AutoConfig.for_model(kind, tie_word_embeddings=tied, max_position_embeddings=32768)


def _readable(source: str, say) -> str:
    """Return a source of tasks that can be read here, else generated English."""
    sources = [part for part, _ in parts_of(source)]
    why = f"{source} is fetched when the run begins." if any(map(is_hub, sources)) else ""
    try:
        check_sources(sources)
    except UserError as error:
        why = str(error)
    if why:
        say(f"{why} Here stands generated English.")
    return "world" if why else source


def _outcome(folder: Path) -> str:
    """Load the export of a run, and say what the run has left."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = whole_rows(folder / "metrics.csv")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        if not torch.isfinite(model(torch.tensor([[2, 3, 4]])).logits).all():
            raise RuntimeError("The export computes no numbers.")
    return (
        f"{len(rows)} steps, sampler and trainer agree to "
        f"{float(rows[-1]['mismatch_mean']):.1g}, the export loads."
    )
