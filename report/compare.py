"""Put several runs side by side: evaluations on the questions that they have in common, trainings
by their curves and last steps; a sentence says which is better, or that it is not shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from config.errors import UserError
from report.folder import Run, read_run, settings_of
from report.page import page_of, render
from report.plots import plot
from report.rows import Cell
from report.runlog import gain
from report.summary import bounds, compare, count, measured, percent, question_key, summarise
from report.training import read_training
from suites import name_of

COMMON = "sub_em"  # which all rows have, of evaluations that are measured otherwise
OF_A_FOLDER = {"name", "runs"}  # settings that differ without a difference
LAST = 10  # steps of a training that say what it has come to


def read_named(folder: Path, name: str) -> Run:
    """Read a run as far as it has come, under a name of its own."""
    run = read_run(folder)
    run.title = name
    return run


# ---------------------------------------------------------------- evaluations


def side_by_side(runs: Sequence[Run]) -> dict:
    """Return the summary of several evaluations, each agent under the names of run and agent.

    paired has every agent of the later runs against the agent of the first run that has its name,
    else against the first run's first agent; overall the same, over all cells together. left_out:
    for each such pair {a, b, only_a, only_b}, the questions that one of the two alone was asked;
    asked at two temperatures counts twice. settings_differ: sentences. UserError if the runs were
    asked or measured otherwise, or if two have no question in common.
    """
    if empty := [run.title for run in runs if not run.rows]:
        raise UserError(f"{empty[0]} holds no rows of an evaluation, as the others do.")
    first, *others = runs
    settings = {run.title: settings_of(run.config).get("eval", {}) for run in runs}
    for given in filter(None, settings.values()):
        given["suite"] = name_of(given)
    for other in others:
        for name in ("suite", "unit"):
            ours, theirs = (
                settings[run.title].get(name, run.summary.get(name)) for run in (first, other)
            )
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
    summary["altered"] = {
        f"{run.title}: {agent}": changed
        for run in runs
        for agent, changed in run.summary.get("altered", {}).items()
    }
    summary["settings_differ"] = _settings_that_differ(settings)
    if len({*metrics.values()}) > 1:
        each = ", ".join(f"{run} by {name}" for run, name in metrics.items())
        summary["settings_differ"].append(f"Measured are {each}; here all of them by {metric}.")
    summary["left_out"], summary["overall"] = [], []
    for other in others:
        pairs = []
        for agent, theirs in by_run[other.title].items():
            ours = by_run[first.title].get(agent) or next(iter(by_run[first.title].values()))
            names = {"a": ours[0]["agent"], "b": theirs[0]["agent"]}
            pairs += [names | pair for pair in _differences(ours, theirs, metric)]
            summary["overall"].append(names | _overall(ours, theirs, metric))
            left, right = (
                {(*question_key(r), r["temperature"]) for r in rows} for rows in (ours, theirs)
            )
            only = {"only_a": len(left - right), "only_b": len(right - left)}
            summary["left_out"].append(names | only)
        if not pairs:
            raise UserError(
                f"{first.title} and {other.title} have no question in common at one temperature: "
                "give `eval` the same suite, --seed, --lengths and --temperatures for both "
                "(those of a demo: --suite world --split test --seed 1000000)."
            )
        summary["paired"] += pairs
    return summary


def _settings_that_differ(settings: dict[str, dict]) -> list[str]:
    known = {run: given for run, given in settings.items() if given}  # a demo has none
    names = dict.fromkeys(name for given in known.values() for name in given)

    def shown(value: object) -> object:
        return "the default" if value in ("", None) else value

    return [
        f"{name}: {', '.join(f'{run} {shown(given.get(name))}' for run, given in known.items())}."
        for name in names
        if name not in OF_A_FOLDER and len({str(given.get(name)) for given in known.values()}) > 1
    ]


def _by_agent(run: Run) -> dict[str, list[dict]]:
    """Return the rows of each agent, which they name with the run."""
    rows: dict[str, list[dict]] = {}
    for row in run.rows:
        named = row | {"agent": f"{run.title}: {row['agent']}"}
        rows.setdefault(row["agent"], []).append(named)
    return rows


def _by_cell(rows: Sequence[dict]) -> dict[Cell, list[dict]]:
    cells: dict[Cell, list[dict]] = {}
    for row in rows:
        cells.setdefault(replace(Cell.from_row(row), agent=""), []).append(row)
    return cells


def _differences(a: Sequence[dict], b: Sequence[dict], metric: str) -> Iterator[dict]:
    """Yield the differences of two agents, cell by cell, as `summarise` has them."""
    left, right = _by_cell(a), _by_cell(b)
    for cell in sorted(left, key=lambda cell: (cell.question, cell.temperature, cell.length)):
        if difference := compare(left[cell], right.get(cell, []), metric):
            place = {name: value for name, value in asdict(cell).items() if name != "agent"}
            yield place | difference


def _overall(a: Sequence[dict], b: Sequence[dict], metric: str) -> dict:
    """Return the difference of two agents over all cells that both have: {mean, n, low, high}."""
    cells = _by_cell(a).keys() & _by_cell(b).keys()
    sides = ([r for r in rows if replace(Cell.from_row(r), agent="") in cells] for rows in (a, b))
    return compare(*sides, metric)


# ---------------------------------------------------------------- trainings


def trainings_side_by_side(runs: Sequence[Run]) -> dict:
    """Return {curves: name -> points, overall: differences of the last steps}, of trainings.

    The interval is of chance in the tasks and samples of these steps, not of the seed (`gain`).
    UserError: they are no trainings, or measured otherwise.
    """
    measures = {"loss" if "loss" in run.summary else "reward" for run in runs}
    trained = {run.title: read_training(run.folder, min(measures)).values for run in runs}
    if len(measures) > 1 or any(run.rows or not trained[run.title] for run in runs):
        raise UserError("Compare evaluations with evaluations, and trainings of one kind.")
    first, *others = trained
    overall = []
    for other in others:
        steps = min(LAST, len(trained[first]), len(trained[other]))
        values = [v for run in (other, first) for _, v in trained[run][-steps:]]
        found = gain(values, steps) or {"first": values[-1], "last": values[0], "low": None}
        overall.append({
            "a": first, "b": other, "n": steps, "mean": found["last"] - found["first"],
            "low": found["low"], "high": found.get("high"),
        })  # fmt: skip
    return {"measure": min(measures), "curves": trained, "overall": overall}


# ---------------------------------------------------------------- shown


def verdicts(summary: dict) -> list[str]:
    """Say of each two which is better, or that it is not shown.

    A difference is shown if its 95 % interval excludes 0; of losses the smaller is better.
    """
    sentences = []
    for pair in filter(lambda pair: "mean" in pair, summary["overall"]):
        a, b = pair["a"], pair["b"]
        if trained := "curves" in summary:
            low, high = pair["low"], pair["high"]
            about = f"{pair['mean']:+.3f} {summary['measure']}, the last {pair['n']} steps"
            about += f", 95 % interval {low:+.3f} to {high:+.3f}" * (low is not None)
        else:
            about = f"{percent(pair['mean'], '+')} points, "
            about += f"95 % interval {bounds(pair, ' to ', '+')}, {count(pair)}"
        shown = pair["low"] is not None and (pair["low"] > 0 or pair["high"] < 0)
        better = (pair["mean"] > 0) != (trained and summary["measure"] == "loss")
        if not shown:
            sentences.append(f"Which is better is not shown: {a} minus {b} is {about}.")
        else:
            sentences.append(f"{a if better else b} is better: {a} minus {b} is {about}.")
    return sentences


def remarks(summary: dict) -> list[str]:
    """Say in which settings evaluations differ, and which questions a comparison leaves out."""
    return summary.get("settings_differ", []) + [
        f"{pair['a']} and {pair['b']} were not asked the same: {pair['only_a']:,} questions of "
        f"the first alone and {pair['only_b']:,} of the second alone are left out."
        for pair in summary.get("left_out", ())
        if pair["only_a"] or pair["only_b"]
    ]


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


def comparison_page(summary: dict, title: str, notes: Sequence[str]) -> str:
    """Return the page of a comparison. notes: `remarks`, and runs that are not finished."""
    lead = "\n".join(verdicts(summary))
    if "curves" not in summary:
        return page_of(Run(Path(), summary, title=title), notes=notes, lead=lead)
    measure = summary["measure"]
    drawn = plot(summary["curves"], measure.capitalize(), "training step", f"mean {measure}")
    return render(title, lead=lead, warnings=notes, plots=[drawn])
