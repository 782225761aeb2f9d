"""Put several evaluations side by side, on the questions that they have in common.

Holds: `read_evaluation`, `side_by_side`, and how the result is shown: `differences`, `remarks`,
`comparison_page`. Leaves out: means, intervals and pairs of one evaluation (report/summary.py).
No torch.
Exercise it: `python cli.py compare RUN RUN`. Read next: report/summary.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError, clean
from report import plots
from report.folder import read_run, settings_of
from report.markup import Section, figures, fill, joined, page
from report.page import comparisons, every_cell
from report.rows import Cell
from report.summary import compare, question_key, summarise

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: its rows, and what they were asked and measured by."""

    name: str
    rows: list[dict]
    unit: str
    metric: str
    suite: str | None  # None: of a run that does not say
    status: str = ""  # how far it has come, of one that is not finished
    altered: dict = field(default_factory=dict)  # agent -> settings that are not the usual ones


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """Read the evaluation in a folder, as far as it has come. UserError if there is none."""
    run = read_run(folder)
    summary, asked = run.summary, settings_of(run.config).get("eval")
    if not run.rows:
        raise UserError(f"{folder} holds no rows of an evaluation; compare takes folders of eval.")
    suite = asked.get("suite") if isinstance(asked, dict) else None
    altered = summary.get("altered", {})
    return Evaluation(
        name, run.rows, summary["unit"], summary["metric"], suite, run.status, altered
    )


def side_by_side(runs: Sequence[Evaluation]) -> dict:
    """Return the summary of several evaluations, each agent under the names of run and agent.

    paired has every agent of the later runs against the agent of the first run that has its name,
    else against the first run's first agent. left_out: for each such pair {a, b, only_a, only_b},
    the questions that one of the two alone was asked; asked at two temperatures counts twice.
    unfinished: sentences on evaluations that are partly there.
    UserError if the runs were asked or measured otherwise, or if two have no question in common.
    """
    first, *others = runs
    for other in others:
        for name in ("suite", "unit", "metric"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs and None not in (ours, theirs):
                raise UserError(
                    f"{first.name} has the {name} {ours or 'none'}, {other.name} has "
                    f"{theirs or 'none'}: they cannot be compared."
                )
    agents = {run.name: _by_agent(run) for run in runs}
    labelled = {
        _label(run, agent): [row | {"agent": _label(run, agent)} for row in rows]
        for run, of in agents.items()
        for agent, rows in of.items()
    }
    summary = summarise(
        (row for rows in labelled.values() for row in rows), first.unit, first.metric, paired=False
    )
    summary["unfinished"] = [f"{run.name}: {run.status}" for run in runs if run.status]
    summary["altered"] = {_label(r.name, agent): x for r in runs for agent, x in r.altered.items()}
    summary["left_out"] = []
    own = agents[first.name]
    for other in others:
        pairs = []
        for agent in agents[other.name]:
            a = _label(first.name, agent if agent in own else next(iter(own)))
            b = _label(other.name, agent)
            pairs += _differences(labelled[a], labelled[b], first.metric)
            summary["left_out"].append({"a": a, "b": b} | _asked_of_one(labelled[a], labelled[b]))
        if not pairs:
            raise UserError(
                f"{first.name} and {other.name} have no question in common at one temperature, "
                "there is nothing to compare."
            )
        summary["paired"] += pairs
    return summary


def _label(run: str, agent: str) -> str:
    return f"{run}: {agent}"


def _by_agent(run: Evaluation) -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {}
    for row in run.rows:
        rows.setdefault(row["agent"], []).append(row)
    return rows


def _by_cell(rows: Sequence[dict]) -> dict[Cell, list[dict]]:
    """Return the rows of one agent by their cell, which here has no agent."""
    by_cell: dict[Cell, list[dict]] = {}
    for row in rows:
        cell = Cell("", row["question"], row["temperature"], row["length"])
        by_cell.setdefault(cell, []).append(row)
    return by_cell


def _differences(a: Sequence[dict], b: Sequence[dict], metric: str) -> list[dict]:
    """Return the differences of two agents, cell by cell, as `summarise` has them."""
    theirs = _by_cell(b)
    return [
        {"a": a[0]["agent"], "b": b[0]["agent"], "question": cell.question,
         "temperature": cell.temperature, "length": cell.length} | difference
        for cell, rows in sorted(_by_cell(a).items(), key=lambda item: astuple(item[0]))
        if (difference := compare(rows, theirs.get(cell, []), metric, fail=False))
    ]  # fmt: skip


def _asked_of_one(a: Sequence[dict], b: Sequence[dict]) -> dict[str, int]:
    ours, theirs = ({(*question_key(row), row["temperature"]) for row in rows} for rows in (a, b))
    return {"only_a": len(ours - theirs), "only_b": len(theirs - ours)}


# ---------------------------------------------------------------- shown


def remarks(summary: dict) -> list[str]:
    """Say which evaluations are not finished, and which questions a comparison leaves out."""
    return summary["unfinished"] + [
        f"{pair['a']} and {pair['b']} were not asked the same: {pair['only_a']:,} questions of the "
        f"first alone and {pair['only_b']:,} of the second alone are left out."
        for pair in summary["left_out"]
        if pair["only_a"] or pair["only_b"]
    ]


def differences(summary: dict) -> Table:
    """Build the table of differences for a terminal, a line for each cell."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title=f"difference in {summary['metric']}, on the same questions", box=None)
    result.add_column("")
    for name in ("T", summary["unit"], "difference", "95 % interval", "n"):
        result.add_column(name, justify="right", no_wrap=True)
    of_pair: dict[str, list[dict]] = {}
    for pair in summary["paired"]:
        of_pair.setdefault(f"{pair['a']} − {pair['b']}", []).append(pair)
    for names, pairs in of_pair.items():
        result.add_row(Text(clean(names), "bold"))
        for pair in pairs:
            sure = "bold" if pair["low"] > 0 or pair["high"] < 0 else ""
            interval = f"{pair['low']:+.2f} … {pair['high']:+.2f}"
            about = f" {pair['question']}", pair["temperature"], f"{pair['length']:,}"
            said = Text(f"{pair['mean']:+.3f}", sure), interval, f"{pair['n']:,}"
            result.add_row(*(Text(clean(text)) for text in about), *said)
    return result


def comparison_page(summary: dict, title: str) -> str:
    """Return the page of a comparison: differences first, then what each run has by itself."""
    pairs = replace(
        comparisons(summary),
        title="Differences",
        note="On the questions that both were asked, with 95 % intervals by bootstrap over these "
        "questions, or over their documents; bold where an interval leaves out 0. The samples of "
        "a question are averaged first.",
    )
    drawn = Section("Accuracy", figures(joined(plots.accuracy(summary).values())))
    lead = joined(fill('<p class="note">{}</p>', sentence) for sentence in remarks(summary))
    return page(title, lead, [pairs, drawn, every_cell(summary)])
