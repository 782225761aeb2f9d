"""The card of an exported model: README.md as the hub shows it, with what was measured: the run's
own validation at the exported step, and every evaluation of these weights in the same folder of
runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from agents import find
from config.errors import UserError, clean
from config.files import read_yaml
from config.options import EMBEDDED, RunConfig
from config.realmodels import PACKAGED, base_of, is_adapter, named_folder
from config.terminal import say
from models.checkpoints import validations
from models.policy import fingerprint
from report.folder import reading, stored_summary
from report.runlog import summary
from report.summary import markdown_of, wilson, write_text

ALWAYS = ("lr", "group_size", "tasks_per_step", "lora_rank", "seed")  # settings that a card has
MARKS = re.compile(r"[\\`*~\[\]|<>&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)
NOTHING = "Nothing: no validation, and no evaluation of this export lies beside the run."


def plain(text: object) -> str:
    """Return a stranger's text as Markdown of one line that shows it as it is: by their numbers
    letters mark nothing."""
    return MARKS.sub(lambda mark: f"&#{ord(mark[0])};", " ".join(clean(text).split()))


def _plainly(value: object) -> object:
    """Return what a JSON file holds with all of its texts `plain`."""
    if isinstance(value, dict):
        return {plain(name): _plainly(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_plainly, value)]
    return plain(value) if isinstance(value, str) else value


def write_card(
    folder: Path, stored: dict, run_folder: Path, step: int, adapter: bool, weights: Sequence[Path]
) -> None:
    """Write README.md into an export's folder.

    stored: what the run began with. adapter: the folder holds adapters, not whole weights. weights:
    the folders in which the export's weights lie by now.
    """
    run, training = RunConfig(**stored["run"]), find.training_of(stored)
    name = run.name or run_folder.name
    base, licence = _base(run.model)
    start = run.adapter or run.model or EMBEDDED
    went_on = _licence(named_folder(start)) if is_adapter(start) else ""
    measured, results = [], []
    for row in validations(run_folder):
        if row["step"] == step:
            low, high = wilson(row["score"], row["n"])
            measured.append(
                f"Validation at this step, greedy: {row['score']:.3f} ({low:.2f}-{high:.2f}, n = "
                f"{row['n']}, as if no two shared a document; the step may have been chosen by it)."
            )
    for title, found, table in evaluations_of(run_folder, weights):
        measured.append(f"Evaluation {plain(title)}:\n\n{table}")
        for cell in found["cells"]:
            where = f"{cell['length']} {found['unit']}, temperature {cell['temperature']}"
            dataset = f"{title} {cell['question']}, {where}"
            result = EvalResult("question-answering", title, dataset, found["metric"], cell["mean"])
            result.metric_name = cell["agent"]
            result.metric_args = {name: cell[name] for name in ("n", "low", "high")}
            results.append(result)
    agent = find.make(run.agent or find.DEFAULT, stored["agent"])
    usual = asdict(type(agent.config)()) | {"templates": agent.config.templates}
    settings = {n: v for n, v in asdict(agent.config).items() if v != usual[n]}
    settings |= {n: getattr(training, n) for n in ALWAYS if hasattr(training, n)}
    made = {
        "agent": agent.label,
        "weights": f"{'adapters (LoRA)' if adapter else 'whole'}, step {step} of {training.steps}",
        "base": base or "a policy without a name on the hub",
        "licence of the base": licence or "not known here; see the card of the base",
        "licence of the adapters that it went on from": went_on,
        # without the folders of this machine
        "data": ",".join(d if d.startswith("hf:") else Path(d).name for d in run.data.split(",")),
        "reward": _gain(run_folder),
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
    }
    data = ModelCardData(
        model_name=clean(name),
        eval_results=results or None,
        base_model=base or None,
        datasets=re.findall(r"(?:^|,)hf:([\w.-]+/[\w.-]+)", run.data) or None,
        library_name="peft" if adapter else "transformers",
        license=went_on or licence or None,
        pipeline_tag="text-generation",
        tags=["memagent", find.section_of(training), agent.label, "long-context"],
    )
    lines = "\n".join(f"- {what}: {plain(text)}" for what, text in made.items() if text)
    evidence = "\n\n".join(measured) or NOTHING
    text = f"""---
{data.to_yaml()}
---

# {plain(name)}

A policy that reads documents which are longer than its window, trained with memagent.

    python cli.py ask FILE "question" --model FOLDER
    python cli.py serve --model FOLDER

FOLDER is this one: agent.yaml says how the agent reads with these weights.

## How it was made

{lines}

## What was measured

{evidence}
"""
    write_text(folder / "README.md", str(ModelCard(text)))


def evaluations_of(run_folder: Path, weights: Sequence[Path]) -> Iterator[tuple[str, dict, str]]:
    """Yield the evaluations of a run's export beside it, as name, summary and table: those that
    these weights have answered, for an earlier export may have lain at the same path."""
    exports = {(run_folder / name).resolve() for name in ("model", "adapter")}

    @cache
    def known() -> list[str]:
        dtypes = ("torch.float32", "torch.bfloat16")
        return [fingerprint(str(folder), dtype) for folder in weights for dtype in dtypes]

    for path in sorted(run_folder.parent.glob("*/summary.json")):
        try:
            stored = read_yaml(path.parent / "config.yaml")
            if Path(stored["eval"]["model"] or ".").resolve() not in exports:
                continue
            answered = str(stored["weights"]["model"])
        except (UserError, ValueError, KeyError, TypeError):
            continue  # no evaluation of an export
        try:
            with reading(path):
                found = _plainly(stored_summary(path))
                table = markdown_of(found)
        except UserError as error:
            say(f"{error} It is left out of the card.", "yellow")
            continue
        if any(mark in answered for mark in known()):
            yield path.parent.name, found, table
        else:
            say(f"{path} has no answers of these weights: it is left out of the card.", "yellow")


def _gain(run_folder: Path) -> str:
    """Say how the reward has risen, "" where the run says nothing of it."""
    gain = summary(run_folder).get("gain")
    if not gain:
        return ""
    text = "mean of the first {steps} steps {first:.3f}, of the last {last:.3f}"
    if gain["low"] is not None:
        text += ", difference's 95 % interval {low:+.3f} to {high:+.3f}"
    return text.format(**gain)


def _base(model: str) -> tuple[str, str]:
    """Return the hub name of the base and its licence, "" for what is not known here."""
    model = str(base_of(model or EMBEDDED))
    if model in PACKAGED:
        return PACKAGED[model].hub_name, PACKAGED[model].licence
    if Path(model).resolve() == EMBEDDED.resolve():
        return "", "mit"  # the embedded policy is part of this repository
    return ("", _licence(Path(model))) if Path(model).is_dir() else (model, "")


def _licence(folder: Path) -> str:
    """Return the licence that a model folder's card names, "" if it names none."""
    try:
        return str((metadata_load(folder / "README.md") or {}).get("license") or "")
    except (OSError, ValueError):
        return ""
