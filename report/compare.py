"""Put several evaluations side by side, on the questions that they have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from config.errors import UserError
from report.folder import Run, read_run, settings_of
from report.page import page_of
from report.rows import Cell
from report.summary import bounds, compare, count, measured, percent, question_key, summarise
from suites import name_of

COMMON = "sub_em"  # which all rows have, of evaluations that are measured otherwise
OF_A_FOLDER = {"name", "runs"}  # settings that differ without a difference


def _plain(value: object) -> object:
    return "the default" if value in ("", None) else value


def read_evaluation(folder: Path, name: str) -> Run:
    """Read the evaluation in a folder, as far as it has come, under a name of its own. UserError if
    there is none."""
    run = read_run(folder)
    if not run.rows:
        raise UserError(f"{folder} holds no rows of an evaluation, which alone can be compared.")
    run.title = name
    return run


def side_by_side(runs: Sequence[Run]) -> dict:
    """Return the summary of several evaluations, each agent under the names of run and agent.

    paired has every agent of the later runs against the agent of the first run that has its name,
    else against the first run's first agent. left_out: for each such pair {a, b, only_a, only_b},
    the questions that one of the two alone was asked; asked at two temperatures counts twice.
    unfinished, settings_differ: sentences on evaluations that are partly there, and on settings.
    UserError if the runs were asked or measured otherwise, or if two have no question in common.
    """
    settings = {run.title: settings_of(run.config).get("eval", {}) for run in runs}
    for given in filter(None, settings.values()):
        given["suite"] = name_of(given)
    first, *others = runs
    for other in others:
        for name in ("suite", "unit"):
            ours, theirs = (settings[run.title].get(name, run.summary.get(name))
                            for run in (first, other))  # fmt: skip
            if ours != theirs and None not in (ours, theirs):
                raise UserError(
                    f"{first.title} has the {name} {ours}, {other.title} has {theirs}: they cannot "
                    "be compared."
                )
    by_run = {run.title: _by_agent(run) for run in runs}
    metrics = {run.title: run.summary["metric"] for run in runs}
    metric = first.summary["metric"] if len({*metrics.values()}) == 1 else COMMON
    every = [row for agents in by_run.values() for rows in agents.values() for row in rows]
    if lacking := [row["agent"] for row in every if row.get(metric) is None]:
        raise UserError(f"{lacking[0]} has no {metric}: they cannot be compared.")
    summary = summarise(every, first.summary["unit"], metric, paired=False)
    summary["unfinished"] = [f"{run.title}: {run.status}" for run in runs if run.status]
    known = {run: given for run, given in settings.items() if given}  # a demo has none
    names = dict.fromkeys(name for given in known.values() for name in given)
    summary["settings_differ"] = [
        f"{name}: {', '.join(f'{run} {_plain(g.get(name))}' for run, g in known.items())}."
        for name in names
        if name not in OF_A_FOLDER and len({str(g.get(name)) for g in known.values()}) > 1
    ]
    if len({*metrics.values()}) > 1:
        each = ", ".join(f"{run} by {name}" for run, name in metrics.items())
        summary["settings_differ"].append(f"Measured are {each}; here all of them by {metric}.")
    summary["altered"] = {
        f"{run.title}: {agent}": changed
        for run in runs
        for agent, changed in run.summary.get("altered", {}).items()
    }
    summary["left_out"] = []
    for other in others:
        pairs = []
        for agent, theirs in by_run[other.title].items():
            ours = by_run[first.title].get(agent) or next(iter(by_run[first.title].values()))
            pairs += _differences(ours, theirs, metric)
            sides = [
                {(*question_key(r), r["temperature"]) for r in rows} for rows in (ours, theirs)
            ]
            names = {"a": ours[0]["agent"], "b": theirs[0]["agent"]}
            only = {"only_a": len(sides[0] - sides[1]), "only_b": len(sides[1] - sides[0])}
            summary["left_out"].append(names | only)
        if not pairs:
            raise UserError(
                f"{first.title} and {other.title} have no question in common at one temperature: "
                "give `eval` the same suite, --seed, --lengths and --temperatures for both "
                "(those of a demo: --suite world --split test --seed 1000000)."
            )
        summary["paired"] += pairs
    return summary


def _by_agent(run: Run) -> dict[str, list[dict]]:
    """Return the rows of each agent, which they name with the run."""
    rows: dict[str, list[dict]] = {}
    for row in run.rows:
        named = row | {"agent": f"{run.title}: {row['agent']}"}
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
    """Say in which settings evaluations differ, which are not finished, and which questions a
    comparison leaves out."""
    return (
        summary["settings_differ"]
        + summary["unfinished"]
        + [
            f"{pair['a']} and {pair['b']} were not asked the same: {pair['only_a']:,} questions of "
            f"the first alone and {pair['only_b']:,} of the second alone are left out."
            for pair in summary["left_out"]
            if pair["only_a"] or pair["only_b"]
        ]
    )


def differences(summary: dict) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of the differences, which a pipe shows whole, too: a heading for two
    agents, below it a line for each cell, bold where the interval excludes 0."""
    about = f"on the same questions, in percentage points of {measured(summary)}, 95 % intervals"
    heading = ""
    for pair in summary["paired"]:
        if heading != (heading := f"{pair['a']} − {pair['b']}"):
            yield f"\n{heading}, {about}", ""
        place = "{question}, {length:,} {unit}, temperature {temperature}".format(
            **pair, unit=summary["unit"]
        )
        interval = f"{bounds(pair, ' … ', '+')}, {count(pair)}"
        sure = "bold" if pair["low"] > 0 or pair["high"] < 0 else ""
        yield f"  {percent(pair['mean'], '+'):>6}  ({interval})  {place}", sure


def comparison_page(summary: dict, title: str) -> str:
    """Return the page of a comparison: plots and differences, then what each run has by itself."""
    return page_of(Run(Path(), summary, title=title), notes=remarks(summary))
