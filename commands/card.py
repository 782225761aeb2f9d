"""The card of an exported model: README.md as the hub shows it, with what was measured.

Holds: `write_card`, `evaluations_of`. Leaves out: the weights (commands/export.py), uploading
(commands/push.py).
Exercise it: `python cli.py export RUN`. Read next: commands/push.py.

Results are looked for where the run lies: its own validation at the exported step, and every
evaluation in the same folder of runs whose model is this export.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from agents import find
from config.errors import UserError, clean
from config.files import read_yaml
from config.foreign import from_json
from config.options import EMBEDDED, RunConfig
from config.realmodels import PACKAGED, base_of, is_adapter, named_folder
from config.terminal import say
from engines.open import fingerprint
from memagent import Agent
from models.checkpoints import validations
from report.runlog import summary as summary_of_run
from report.summary import wilson, write_text

MOST_ROWS = 60
"""Cells of evaluations that a card lists; the rest is in their own reports."""
DTYPES = ("torch.float32", "torch.bfloat16")
NUMBERS = ("length", "n", "mean", "low", "high")
HOW = "`FOLDER` is this one: `agent.yaml` says how the agent reads with these weights."


def write_card(
    folder: Path,
    stored: dict,
    run_folder: Path,
    step: int,
    adapter: bool,
    weights: Sequence[Path] = (),
) -> None:
    """Write README.md into an export's folder.

    stored: what the run began with. adapter: the folder holds adapters, not whole weights. weights:
    the folders in which the export's weights lie by now.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    run = RunConfig(**stored["run"])
    base, licence = _base(run.model)
    agent = find.make(run.agent or find.DEFAULT, stored["agent"])
    name = run.name or run_folder.name
    results, found = [], [*evaluations_of(run_folder, weights)]
    for (dataset, metric), (evaluation, cell) in _best(found, agent.label).items():
        how = f"temperature {cell['temperature']}, 95 % interval {_interval(cell)}, n = {cell['n']}"
        results.append(
            EvalResult(
                task_type="question-answering",
                dataset_type=_slug(dataset),  # of one type the hub shows one name, the first
                dataset_name=dataset,
                metric_type=metric,
                metric_value=round(cell["mean"], 4),
                metric_name=f"{metric}, {how}, evaluation {evaluation}",
            )
        )
    data = ModelCardData(
        base_model=base or None,
        datasets=[*_datasets(run.data)] or None,
        eval_results=results or None,
        model_name=name if results else None,
        library_name="peft" if adapter else "transformers",
        license=_of_adapters(run) or licence or None,
        pipeline_tag="text-generation",
        tags=["memagent", find.section_of(find.training_of(stored)), agent.label, "long-context"],
    )
    text = "\n".join(_lines(name, agent, stored, run_folder, step, adapter, found))
    if (folder / "model.gguf").exists():
        data.tags.append("gguf")
        text = text.replace(HOW, f"{HOW} `model.gguf` is the same model for llama.cpp.")
    content = f"---\n{data.to_yaml()}\n---\n\n{text}\n"
    write_text(folder / "README.md", str(ModelCard(content)))


def _best(
    evaluations: Iterable[tuple[str, str, str, list[dict]]], agent: str
) -> dict[tuple[str, str], tuple[str, dict]]:
    """Return one cell of an agent for each data set and metric, with its evaluation's name: of
    several the coolest, of these the one with most questions."""
    best: dict[tuple[str, str], tuple[str, dict]] = {}

    def worth(cell: dict) -> tuple[float, int]:
        return -float(cell["temperature"]), cell["n"]

    for name, unit, metric, cells in evaluations:
        for cell in cells:
            key = f"{cell['question']}, {cell['length']:,} {unit}", metric
            if cell["agent"] == agent and (key not in best or worth(cell) > worth(best[key][1])):
                best[key] = name, cell
    return dict([*best.items()][:MOST_ROWS])


def evaluations_of(
    run_folder: Path, weights: Sequence[Path] = ()
) -> Iterator[tuple[str, str, str, list[dict]]]:
    """Yield the evaluations of a run's export beside it: name, unit, metric, cells.

    weights: folders of the export; of an evaluation that says which weights answered, it must have
    been these, for an earlier export may have lain at the same path.
    """
    known: list[str] = []
    exports = {(run_folder / name).resolve() for name in ("model", "adapter")}
    for path in sorted(run_folder.parent.glob("*/summary.json")):
        try:
            stored = read_yaml(path.parent / "config.yaml")
            config, answered = stored.get("eval", {}), stored.get("weights", {}).get("model", "")
            summary = from_json(path.read_text(encoding="utf-8"))
            metric, cells = summary["metric"], summary["cells"]
            numbers = [float(cell["temperature"]) for cell in cells]
            numbers += [cell[name] + 0.0 for cell in cells for name in NUMBERS]
        except (UserError, OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # no evaluation, or one of another version
        if not all(map(math.isfinite, numbers)):
            say(f"{path} has values that are no numbers: it is left out of the card.", "yellow")
            continue
        model = config.get("model") or ""
        if cells and model and Path(model).resolve() in exports:
            if weights and answered and not config.get("endpoint"):
                known = known or [fingerprint(str(f), dtype) for f in weights for dtype in DTYPES]
                if not any(mark in answered for mark in known):
                    say(f"{path} is of other weights: it is left out of the card.", "yellow")
                    continue
            yield path.parent.name, summary["unit"], metric, cells


def _base(model: str) -> tuple[str, str]:
    """Return the hub name of the base and its licence, "" for what is not known here."""
    if is_adapter(model or EMBEDDED):
        model = str(base_of(model))
    if model in PACKAGED:
        return PACKAGED[model].hub_name, PACKAGED[model].licence
    if not model or Path(model).resolve() == EMBEDDED.resolve():
        return "", "mit"  # the embedded policy is part of this repository
    folder = Path(model)
    if not folder.is_dir():
        return model, _licence_in_cache(model)
    return _named(folder), _licence(folder / "README.md")


def _of_adapters(run: RunConfig) -> str:
    """Return the licence of the adapters that a run went on from, "" if it is not said."""
    begun = run.adapter or run.model or EMBEDDED
    return _licence(named_folder(begun) / "README.md") if is_adapter(begun) else ""


def _named(folder: Path) -> str:
    """Return the hub name that a folder's config.json says its weights came from."""
    try:
        name = from_json((folder / "config.json").read_text(encoding="utf-8"))["_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""


def _licence(card: Path) -> str:
    from huggingface_hub import metadata_load

    try:
        return str((metadata_load(card) or {}).get("license") or "")
    except (OSError, ValueError):
        return ""


def _licence_in_cache(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "README.md")
    except ValueError:  # no name of the hub's
        return ""
    return _licence(Path(cached)) if isinstance(cached, str) else ""


def _datasets(data: str) -> Iterator[str]:
    for source in data.split(","):
        if match := re.match(r"hf:([\w.-]+/[\w.-]+)", source):
            yield match[1]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-").lower() or "unknown"


def _interval(cell: dict) -> str:
    return f"{cell['low']:.2f}-{cell['high']:.2f}"


# ---------------------------------------------------------------- the text


def _lines(
    name: str, agent: Agent, stored: dict, run_folder: Path, step: int, adapter: bool, found: list
) -> Iterator[str]:
    run, training = RunConfig(**stored["run"]), find.training_of(stored)
    base, licence = _base(run.model)
    doc = (type(agent).__doc__ or "").strip().splitlines()
    about = doc[0] if doc else f"The agent {agent.label}."
    yield f"# {clean(name)}"
    yield ""
    yield "A policy that reads documents which are longer than its window, trained with memagent."
    yield f"Its agent is `{agent.label}`: {about}"
    yield ""
    yield "```bash"
    yield 'python cli.py ask FILE "question" --model FOLDER'
    yield "python cli.py serve --model FOLDER"
    yield "```"
    yield ""
    yield HOW
    yield ""
    yield "## How it was made"
    yield ""
    way = "adapters (LoRA)" if adapter else "whole weights"
    yield f"- weights: {way}, step {step} of {training.steps}"
    yield f"- base: {f'`{base}`' if base else 'a policy without a name on the hub'}"
    yield f"- licence of the base: {licence or 'not known here; see the card of the base'}"
    if adapters := _of_adapters(run):
        yield f"- licence of the adapters that it went on from: {adapters}"
    yield f"- data: `{clean(_without_folders(run.data))}`"
    yield from _reward(run_folder)
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    yield from _settings(agent.config, type(agent.config)())
    yield from _settings(
        training, None, ("lr", "group_size", "tasks_per_step", "lora_rank", "seed")
    )
    yield ""
    yield "## What was measured"
    yield ""
    yield from _results(run_folder, step, found)


def _without_folders(data: str) -> str:
    """Return sources of tasks without the folders of this machine."""
    return ",".join(
        source if source.startswith("hf:") else Path(source).name for source in data.split(",")
    )


def _settings(config: object, default: object, names: Sequence[str] = ()) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        shown = field.name in names or (
            default is not None and value != getattr(default, field.name, None)
        )
        if shown and field.name != "templates":
            yield f"| {field.name} | {clean(value)} |"


def _reward(run_folder: Path) -> Iterator[str]:
    try:
        summary = summary_of_run(run_folder)
    except (OSError, ValueError, KeyError, IndexError):
        return
    gain = summary.get("gain")
    if gain:
        between = "" if gain["low"] is None else (
            f", difference's 95 % interval {gain['low']:+.3f} to {gain['high']:+.3f}"
        )  # fmt: skip
        yield (
            f"- reward: mean of the first {gain['steps']} steps {gain['first']:.3f}, of the last "
            f"{gain['last']:.3f}{between}"
        )


def _results(run_folder: Path, step: int, found: list) -> Iterator[str]:
    scores = [row for row in validations(run_folder) if row["step"] == step]
    for row in scores:
        low, high = wilson(row["score"], row["n"])
        yield (
            f"Validation at this step, greedy: {row['score']:.3f} "
            f"({low:.2f}-{high:.2f}, n = {row['n']}; the step may have been chosen by it)."
        )
        yield ""
    if not found and not scores:
        yield "Nothing: no validation, and no evaluation of this export lies beside the run."
    for name, unit, metric, cells in found:
        yield f"Evaluation `{clean(name)}`: {metric} by {unit}, 95 % intervals over questions."
        yield ""
        yield f"| agent | question | temperature | {unit} | n | {metric} | interval |"
        yield "|---|---|---|---|---|---|---|"
        for cell in cells[:MOST_ROWS]:
            cellular = (cell["agent"], cell["question"], cell["temperature"], f"{cell['length']:,}")
            words = " | ".join(clean(word) for word in cellular)
            yield f"| {words} | {cell['n']} | {cell['mean']:.3f} | {_interval(cell)} |"
        if len(cells) > MOST_ROWS:
            yield f"| {len(cells) - MOST_ROWS} more | | | | | | |"
        yield ""
