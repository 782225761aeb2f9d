"""Put several evaluations side by side, on the questions that they have in common.

Holds: `read_evaluation`, `side_by_side`, and how the result is shown: `differences`, `remarks`,
`comparison_page`. Leaves out: means, intervals and pairs of one evaluation (report/summary.py).
No torch.
Exercise it: `python cli.py compare RUN RUN`. Read next: report/summary.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError
from report import plots
from report.folder import read_run, settings_of
from report.markup import Section, bounds, figures, fill, joined, page, parts, percent
from report.page import comparisons, every_cell
from report.rows import Cell
from report.summary import compare, in_terminal, question_key, summarise

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
    summary, settings = run.summary, settings_of(run.config).get("eval")
    if not run.rows:
        raise UserError(f"{folder} holds no rows of an evaluation; compare takes folders of eval.")
    suite = settings.get("suite") if isinstance(settings, dict) else None
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
    by_run = {run.name: _by_agent(run) for run in runs}
    every = (row for agents in by_run.values() for rows in agents.values() for row in rows)
    summary = summarise(every, first.unit, first.metric, paired=False)
    summary["unfinished"] = [f"{run.name}: {run.status}" for run in runs if run.status]
    summary["altered"] = {
        f"{run.name}: {agent}": settings for run in runs for agent, settings in run.altered.items()
    }
    summary["left_out"] = []
    for other in others:
        pairs = []
        for agent, theirs in by_run[other.name].items():
            ours = by_run[first.name].get(agent) or next(iter(by_run[first.name].values()))
            pairs += _differences(ours, theirs, first.metric)
            sides = [
                {(*question_key(r), r["temperature"]) for r in rows} for rows in (ours, theirs)
            ]
            names = {"a": ours[0]["agent"], "b": theirs[0]["agent"]}
            only = {"only_a": len(sides[0] - sides[1]), "only_b": len(sides[1] - sides[0])}
            summary["left_out"].append(names | only)
        if not pairs:
            raise UserError(
                f"{first.name} and {other.name} have no question in common at one temperature, "
                "there is nothing to compare."
            )
        summary["paired"] += pairs
    return summary


def _by_agent(run: Evaluation) -> dict[str, list[dict]]:
    """Return the rows of each agent, which they name with the run."""
    rows: dict[str, list[dict]] = {}
    for row in run.rows:
        named = row | {"agent": f"{run.name}: {row['agent']}"}
        rows.setdefault(row["agent"], []).append(named)
    return rows


def _differences(a: Sequence[dict], b: Sequence[dict], metric: str) -> list[dict]:
    """Return the differences of two agents, cell by cell, as `summarise` has them."""
    names = {"a": a[0]["agent"], "b": b[0]["agent"]}
    sides: tuple[dict[Cell, list[dict]], ...] = ({}, {})
    for by_cell, rows in zip(sides, (a, b), strict=True):
        for row in rows:
            by_cell.setdefault(replace(Cell.from_row(row), agent=""), []).append(row)
    found = []
    for cell in sorted(sides[0], key=lambda cell: (cell.question, cell.temperature, cell.length)):
        if difference := compare(sides[0][cell], sides[1].get(cell, []), metric):
            place = {name: value for name, value in asdict(cell).items() if name != "agent"}
            found.append(names | place | difference)
    return found


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
    """Build the table of differences by length for a terminal."""
    from rich.text import Text

    grid: dict[tuple[str, str, str], dict[int, Text]] = {}
    for pair in summary["paired"]:
        sure = "bold" if pair["low"] > 0 or pair["high"] < 0 else ""
        interval = f" {bounds(pair, ' … ', '+')}, n {pair['n']:,}"
        cell = Text.assemble((percent(pair["mean"], "+"), sure), (interval, "dim"))
        names = f"{pair['a']} − {pair['b']}", pair["question"], pair["temperature"]
        grid.setdefault(names, {})[pair["length"]] = cell
    title = f"difference in {summary['metric']} by {summary['unit']}, on the same questions"
    return in_terminal(title, grid, "percentage points with 95 % intervals")


def comparison_page(summary: dict, title: str) -> str:
    """Return the page of a comparison: plots and differences, then what each run has by itself."""
    pairs = comparisons(
        summary,
        "Differences in percentage points on the questions that both were asked, with 95 % "
        "intervals by bootstrap over these questions, or over their documents; bold where an "
        "interval excludes 0. The samples of a question are averaged first.",
    )
    drawn = figures(joined(plots.accuracy(summary).values()))
    lead = joined(fill('<p class="note">{}</p>', sentence) for sentence in remarks(summary))
    result = Section("Result", joined([drawn, pairs.body]), pairs.note)
    return page(title, lead, [result, Section("Details", parts([every_cell(summary)]))])
