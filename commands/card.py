"""The card of an exported model: README.md as the hub shows it, with what was measured: the run's
own validation at the exported step, and every evaluation in the same folder of runs whose model is
this export.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationError

from agents import find
from config.errors import UserError, clean
from config.files import read_yaml
from config.options import EMBEDDED, RunConfig
from config.realmodels import PACKAGED, base_of, is_adapter, named_folder
from config.terminal import say
from models.checkpoints import validations
from models.policy import fingerprint
from report.runlog import summary as summary_of_run
from report.summary import markdown_of, wilson, write_text

ALWAYS = ("lr", "group_size", "tasks_per_step", "lora_rank", "seed")  # settings that a card has


MARKS = re.compile(r"[\\`*~\[\]|<>&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)


def plain(text: object) -> str:
    """Return a stranger's text as Markdown of one line that shows it as it is: by their numbers
    letters mark nothing."""
    return MARKS.sub(lambda mark: f"&#{ord(mark[0])};", " ".join(clean(text).split()))


Plain = Annotated[str, AfterValidator(plain)]


class Cell(BaseModel):
    """What a card reads of a cell of an evaluation."""

    agent: Plain
    question: Plain
    temperature: Annotated[str, Field(pattern=r"^\d+(\.\d+)?$")]
    length: int
    n: int
    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    documents: int = 0


class Evaluation(BaseModel):
    """What a card reads of an evaluation."""

    unit: Plain
    metric: Plain
    cells: Annotated[list[Cell], Field(min_length=1, max_length=200)]


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

    run, training = RunConfig(**stored["run"]), find.training_of(stored)
    agent, name = find.make(run.agent or find.DEFAULT, stored["agent"]), run.name or run_folder.name
    base, licence = _base(run.model)
    start = run.adapter or run.model or EMBEDDED
    went_on = _licence(named_folder(start)) if is_adapter(start) else ""
    default, reading = asdict(type(agent.config)()), asdict(agent.config)
    settings = {n: v for n, v in reading.items() if v != default[n] and n != "templates"}
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
    measured, results = [], []
    for row in validations(run_folder):
        if row["step"] == step:
            low, high = wilson(row["score"], row["n"])
            measured.append(
                f"Validation at this step, greedy: {row['score']:.3f} ({low:.2f}-{high:.2f}, n = "
                f"{row['n']}, as if no two shared a document; the step may have been chosen by it)."
            )
    for title, found in evaluations_of(run_folder, weights):
        for c in found.cells:
            dataset = f"{title} {c.question}, {c.length} {found.unit}, temperature {c.temperature}"
            numbers = {"n": c.n, "low": c.low, "high": c.high}
            result = EvalResult("question-answering", title, dataset, found.metric, c.mean)
            result.metric_name, result.metric_args = c.agent, numbers
            results.append(result)
        table = markdown_of(found.model_dump(exclude_defaults=True))
        measured.append(f"Evaluation {plain(title)}:\n\n{table}")
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
    nothing = "Nothing: no validation, and no evaluation of this export lies beside the run."
    evidence = "\n\n".join(measured) or nothing
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


def evaluations_of(
    run_folder: Path, weights: Sequence[Path] = ()
) -> Iterator[tuple[str, Evaluation]]:
    """Yield the evaluations of a run's export beside it, by name.

    weights: folders of the export; of an evaluation that says which weights answered, it must have
    been these, for an earlier export may have lain at the same path.
    """
    exports = {(run_folder / name).resolve() for name in ("model", "adapter")}
    dtypes = ("torch.float32", "torch.bfloat16")
    known: list[str] = []  # fingerprints, once one is asked for
    for path in sorted(run_folder.parent.glob("*/summary.json")):
        try:
            stored = read_yaml(path.parent / "config.yaml")
            config, answered = stored["eval"], stored.get("weights", {}).get("model", "")
            model = config.get("model") or ""
            ours = model and Path(model).resolve() in exports
        except (UserError, OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # no evaluation, or one of another version
        if not ours:
            continue
        if weights and answered and not config.get("endpoint"):
            known = known or [fingerprint(str(f), dtype) for f in weights for dtype in dtypes]
            if not any(mark in answered for mark in known):
                say(f"{path} is of other weights: it is left out of the card.", "yellow")
                continue
        try:
            yield path.parent.name, Evaluation.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            say(f"{path} cannot be read: it is left out of the card.", "yellow")


def _gain(run_folder: Path) -> str:
    """Say how the reward has risen, "" where the run says nothing of it."""
    try:
        gain = summary_of_run(run_folder).get("gain")
    except (OSError, ValueError, KeyError, IndexError):
        gain = None
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
    folder = Path(model)
    return ("", _licence(folder)) if folder.is_dir() else (model, "")


def _licence(folder: Path) -> str:
    """Return the licence that a model folder's card names, "" if it names none."""
    from huggingface_hub import metadata_load

    try:
        return str((metadata_load(folder / "README.md") or {}).get("license") or "")
    except (OSError, ValueError):
        return ""
