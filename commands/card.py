"""The card of an exported model: README.md as the hub shows it, with what was measured.

Holds: `write_card`, `evaluations_of`. Leaves out: the text (card.md.j2), the weights
(commands/export.py), uploading (commands/push.py).
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
from models.checkpoints import validations
from report.runlog import summary as summary_of_run
from report.summary import wilson, write_text

MOST_ROWS = 60
"""Cells of evaluations that a card lists; the rest is in their own reports."""
DTYPES = ("torch.float32", "torch.bfloat16")
NUMBERS = ("length", "n", "mean", "low", "high")
ALWAYS = ("lr", "group_size", "tasks_per_step", "lora_rank", "seed")  # settings that a card has
TEMPLATE = Path(__file__).with_name("card.md.j2")


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
    from jinja2 import Environment

    run, training = RunConfig(**stored["run"]), find.training_of(stored)
    agent = find.make(run.agent or find.DEFAULT, stored["agent"])
    name, gguf = run.name or run_folder.name, (folder / "model.gguf").exists()
    (base, licence), of_adapters = _base(run.model), _of_adapters(run)
    found = [*evaluations_of(run_folder, weights)]
    results = [
        EvalResult(
            task_type="question-answering",
            dataset_type=_slug(dataset),  # of one type the hub shows one name, the first
            dataset_name=dataset,
            metric_type=metric,
            metric_value=round(cell["mean"], 4),
            metric_name=f"{metric}, temperature {cell['temperature']}, 95 % interval "
            f"{cell['low']:.2f}-{cell['high']:.2f}, n = {cell['n']}, evaluation {evaluation}",
        )
        for (dataset, metric), (evaluation, cell) in _best(found, agent.label).items()
    ]
    tags = ["memagent", find.section_of(training), agent.label, "long-context"]
    data = ModelCardData(
        base_model=base or None,
        datasets=re.findall(r"(?:^|,)hf:([\w.-]+/[\w.-]+)", run.data) or None,
        eval_results=results or None,
        model_name=name if results else None,
        library_name="peft" if adapter else "transformers",
        license=of_adapters or licence or None,
        pipeline_tag="text-generation",
        tags=tags + ["gguf"] * gguf,
    )
    # what a run or another's file says is foreign text
    form = Environment(finalize=clean, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    text = form.render(
        name=name,
        agent=agent,
        about=(type(agent).__doc__ or f"The agent {agent.label}.").strip().partition("\n")[0],
        gguf=gguf,
        adapter=adapter,
        step=step,
        training=training,
        base=base,
        licence=licence,
        adapters_licence=of_adapters,
        # without the folders of this machine
        data=",".join(d if d.startswith("hf:") else Path(d).name for d in run.data.split(",")),
        gain=_gain(run_folder),
        settings=[
            *_settings(agent.config),
            *((name, getattr(training, name)) for name in ALWAYS if hasattr(training, name)),
        ],
        scores=[
            (row, *wilson(row["score"], row["n"]))
            for row in validations(run_folder)
            if row["step"] == step
        ],
        found=found,
        most_rows=MOST_ROWS,
    )
    write_text(folder / "README.md", str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")))


def _settings(config: object) -> list[tuple[str, object]]:
    """Return an agent's settings that are not as they are by default."""
    default, names = type(config)(), [field.name for field in fields(config)]
    each = [(name, getattr(config, name)) for name in names if name != "templates"]
    return [(name, value) for name, value in each if value != getattr(default, name)]


def _gain(run_folder: Path) -> dict | None:
    try:
        return summary_of_run(run_folder).get("gain")
    except (OSError, ValueError, KeyError, IndexError):
        return None


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


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-").lower() or "unknown"
