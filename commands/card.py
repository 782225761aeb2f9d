"""The card of an exported model: README.md as the hub shows it, with what was measured.

Holds: `write_card`, `evaluations_of`. Leaves out: the text (card.md.j2), the weights
(commands/export.py).
Exercise it: `python cli.py export RUN`. Read next: commands/export.py.

Results are looked for where the run lies: its own validation at the exported step, and every
evaluation in the same folder of runs whose model is this export.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from agents import find
from config.errors import UserError, clean
from config.files import read_yaml
from config.foreign import from_json
from config.options import EMBEDDED, RunConfig
from config.realmodels import PACKAGED, base_of, is_adapter, named_folder
from config.terminal import say
from models.checkpoints import validations
from models.policy import fingerprint
from report.runlog import summary as summary_of_run
from report.summary import wilson, write_text

MOST_ROWS = 60
"""Cells of an evaluation that a card lists; the rest is in its own report."""
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
    from huggingface_hub import ModelCard, ModelCardData
    from jinja2 import Environment

    run, training = RunConfig(**stored["run"]), find.training_of(stored)
    agent = find.make(run.agent or find.DEFAULT, stored["agent"])
    base, licence = _base(run.model)
    begun = run.adapter or run.model or EMBEDDED
    adapters_licence = _licence(named_folder(begun)) if is_adapter(begun) else ""
    data = ModelCardData(
        base_model=base or None,
        datasets=re.findall(r"(?:^|,)hf:([\w.-]+/[\w.-]+)", run.data) or None,
        library_name="peft" if adapter else "transformers",
        license=adapters_licence or licence or None,
        pipeline_tag="text-generation",
        tags=["memagent", find.section_of(training), agent.label, "long-context"],
    )
    default, reading = asdict(type(agent.config)()), asdict(agent.config)
    changed = {name for name in reading if reading[name] != default[name]} - {"templates"}
    try:
        gain = summary_of_run(run_folder).get("gain")
    except (OSError, ValueError, KeyError, IndexError):
        gain = None
    # what a run or another's file says is foreign text
    form = Environment(finalize=clean, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    text = form.render(
        name=run.name or run_folder.name,
        agent=agent,
        about=(type(agent).__doc__ or f"The agent {agent.label}.").strip().partition("\n")[0],
        adapter=adapter,
        step=step,
        training=training,
        base=base,
        licence=licence,
        adapters_licence=adapters_licence,
        # without the folders of this machine
        data=",".join(d if d.startswith("hf:") else Path(d).name for d in run.data.split(",")),
        gain=gain,
        settings=[
            *((name, reading[name]) for name in reading if name in changed),
            *((name, getattr(training, name)) for name in ALWAYS if hasattr(training, name)),
        ],
        scores=[
            (row, *wilson(row["score"], row["n"]))
            for row in validations(run_folder)
            if row["step"] == step
        ],
        found=[*evaluations_of(run_folder, weights)],
        most_rows=MOST_ROWS,
    )
    write_text(folder / "README.md", str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")))


def evaluations_of(
    run_folder: Path, weights: Sequence[Path] = ()
) -> Iterator[tuple[str, str, str, list[dict]]]:
    """Yield the evaluations of a run's export beside it: name, unit, metric, cells.

    weights: folders of the export; of an evaluation that says which weights answered, it must have
    been these, for an earlier export may have lain at the same path.
    """
    exports = {(run_folder / name).resolve() for name in ("model", "adapter")}
    known: list[str] = []  # fingerprints, once one is asked for
    for path in sorted(run_folder.parent.glob("*/summary.json")):
        try:
            stored = read_yaml(path.parent / "config.yaml")
            config, answered = stored.get("eval", {}), stored.get("weights", {}).get("model", "")
            summary = from_json(path.read_text(encoding="utf-8"))
            unit, metric, cells = summary["unit"], summary["metric"], summary["cells"]
            numbers = [float(cell["temperature"]) for cell in cells]
            numbers += [cell[name] + 0.0 for cell in cells for name in NUMBERS]
        except (UserError, OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # no evaluation, or one of another version
        model, wrong = config.get("model") or "", ""
        if not (cells and model and Path(model).resolve() in exports):
            continue
        if not all(map(math.isfinite, numbers)):
            wrong = "has values that are no numbers"
        elif weights and answered and not config.get("endpoint"):
            known = known or [fingerprint(str(f), dtype) for f in weights for dtype in DTYPES]
            if not any(mark in answered for mark in known):
                wrong = "is of other weights"
        if wrong:
            say(f"{path} {wrong}: it is left out of the card.", "yellow")
        else:
            yield path.parent.name, unit, metric, cells


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
