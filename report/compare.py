"""Put several runs side by side: evaluations on the questions that they have in common, trainings
by their curves and last steps; a sentence says which is better, or that it is not shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from config.errors import UserError
from report.folder import Run, read_run, settings_of
from report.page import PLACE, draw_accuracy, figures_of, render, tables_of
from report.plots import plot
from report.runlog import gain
from report.summary import bounds, compare, count, percent, question_key, summarise
from report.training import numbers, whole_rows
from suites import name_of

COMMON = "sub_em"  # which all rows have, of evaluations that are measured otherwise
OF_A_FOLDER = {"name", "runs", "agents"}  # settings that differ without a difference
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
    else against the first run's first agent; overall the same over all cells that both have, and
    only_a, only_b: how many questions one of the two alone was asked; asked at two temperatures
    counts twice. settings_differ: sentences. UserError if the runs were asked or measured
    otherwise, or if two have no question in common.
    """
    first, *others = runs
    settings = _settings(runs)
    by_run = {run.title: _by_agent(run) for run in runs}
    metrics = {run.title: run.summary["metric"] for run in runs}
    metric = first.summary["metric"] if len({*metrics.values()}) == 1 else COMMON
    every = [row for agents in by_run.values() for rows in agents.values() for row in rows]
    if lacking := [row["agent"] for row in every if row.get(metric) is None]:
        raise UserError(f"{lacking[0]} has no {metric}: they cannot be compared.")
    summary = summarise(every, first.summary["unit"], metric, paired=False) | {"overall": []}
    summary["altered"] = {
        f"{run.title}: {agent}": changed
        for run in runs
        for agent, changed in run.summary.get("altered", {}).items()
    }
    summary["settings_differ"] = _settings_that_differ(settings)
    if len({*metrics.values()}) > 1:
        each = ", ".join(f"{run} by {name}" for run, name in metrics.items())
        summary["settings_differ"].append(f"Measured are {each}; here all of them by {metric}.")
    for other in others:
        before = len(summary["paired"])
        for agent, theirs in by_run[other.title].items():
            ours = by_run[first.title].get(agent) or next(iter(by_run[first.title].values()))
            pairs, overall = _pair(ours, theirs, metric)
            summary["paired"] += pairs
            summary["overall"].append(overall)
        if len(summary["paired"]) == before:
            raise UserError(
                f"{first.title} and {other.title} have no question in common at one temperature: "
                "give `eval` the same suite, --seed, --lengths and --temperatures for both "
                "(those of a demo: --suite world --split test --seed 1000000)."
            )
    return summary


def _settings(runs: Sequence[Run]) -> dict[str, dict]:
    """Return the settings of evaluations by run. UserError if they were asked otherwise."""
    if empty := [run.title for run in runs if not run.rows]:
        raise UserError(f"{empty[0]} holds no rows of an evaluation, as the others do.")
    settings = {run.title: settings_of(run.config).get("eval", {}) for run in runs}
    for given in filter(None, settings.values()):
        given["suite"] = name_of(given)
    for name in ("suite", "unit"):
        known = {run.title: settings[run.title].get(name, run.summary.get(name)) for run in runs}
        if len({*known.values()} - {None}) > 1:
            each = ", ".join(f"{run} has {value}" for run, value in known.items() if value)
            raise UserError(f"The {name} is not the same, {each}: they cannot be compared.")
    return settings


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


def _by_place(rows: Sequence[dict]) -> dict[tuple, list[dict]]:
    places: dict[tuple, list[dict]] = {}
    for row in rows:
        places.setdefault(tuple(row[name] for name in PLACE), []).append(row)
    return places


def _pair(a: Sequence[dict], b: Sequence[dict], metric: str) -> tuple[list[dict], dict]:
    """Return the differences of two agents in each cell, and over all cells that both have."""
    names = {"a": a[0]["agent"], "b": b[0]["agent"]}
    left, right = _by_place(a), _by_place(b)
    both = sorted(left.keys() & right.keys())
    found = [
        names | dict(zip(PLACE, at, strict=True)) | compare(left[at], right[at], metric)
        for at in both
    ]
    pairs = [pair for pair in found if "mean" in pair]
    sides = ([row for at in both for row in cells[at]] for cells in (left, right))
    asked, others = ({(*question_key(r), r["temperature"]) for r in rows} for rows in (a, b))
    left_out = {"only_a": len(asked - others), "only_b": len(others - asked)}
    return pairs, names | compare(*sides, metric) | left_out


# ---------------------------------------------------------------- trainings


def trainings_side_by_side(runs: Sequence[Run]) -> dict:
    """Return {curves: name -> points, overall: differences of the last steps}, of trainings.

    The interval is of chance in the tasks and samples of these steps, not of the seed (`gain`).
    UserError: they are no trainings, or measured otherwise.
    """
    measures = {"loss" if "loss" in run.summary else "reward" for run in runs}
    measure = min(measures)
    curves = {run.title: numbers(whole_rows(run.folder / "metrics.csv"), measure) for run in runs}
    if len(measures) > 1 or not all(curves.values()) or any(run.rows for run in runs):
        raise UserError("Compare evaluations with evaluations, and trainings of one kind.")
    first, *others = curves
    overall = []
    for other in others:
        steps = min(LAST, len(curves[first]), len(curves[other]))
        values = [value for run in (other, first) for _, value in curves[run][-steps:]]
        found = gain(values, steps) or {"first": values[-1], "last": values[0], "low": None}
        ends = {"low": found["low"], "high": found.get("high")}
        mean = found["last"] - found["first"]
        overall.append({"a": first, "b": other, "n": steps, "mean": mean} | ends)
    return {"measure": measure, "curves": curves, "overall": overall}


# ---------------------------------------------------------------- shown


def verdicts(summary: dict) -> list[str]:
    """Say of each two which is better and by how much, or that it is not shown.

    A difference is shown if its 95 % interval excludes 0; of losses the smaller is better.
    """
    sentences = []
    for pair in filter(lambda pair: "mean" in pair, summary["overall"]):
        a, b, mean, low, high = (pair[name] for name in ("a", "b", "mean", "low", "high"))
        shown = low is not None and (low > 0 or high < 0)
        if shown and (mean > 0) == (summary.get("measure") == "loss"):
            a, b = b, a
        if shown and mean < 0:
            mean, low, high = -mean, -high, -low
        if "curves" in summary:
            about = f"{mean:+.3f} {summary['measure']} over the last {pair['n']} steps"
            about += f" (95 % interval {low:+.3f} to {high:+.3f})" if low is not None else ""
        else:
            ends = bounds({"low": low, "high": high}, " to ", "+")
            about = f"{percent(mean, '+')} points (95 % interval {ends}, {count(pair)})"
        if shown:
            sentences.append(f"{a} is better than {b} by {about}.")
        else:
            unclear = f"{a} is not shown to be better or worse than {b}"
            sentences.append(f"{unclear}: the difference is {about}.")
    return sentences


def remarks(summary: dict) -> list[str]:
    """Say in which settings evaluations differ, and which questions a comparison leaves out."""
    return summary.get("settings_differ", []) + [
        f"{pair['a']} and {pair['b']} were not asked the same: {pair['only_a']:,} questions of "
        f"the first alone and {pair['only_b']:,} of the second alone are left out."
        for pair in summary["overall"]
        if pair.get("only_a") or pair.get("only_b")
    ]


def comparison_page(summary: dict, title: str, notes: Sequence[str]) -> str:
    """Return the page of a comparison. notes: `remarks`, and runs that are not finished.

    Figures and plots are of the first run's leading agent and of whom it is compared with; the
    tables have all agents.
    """
    lead, *more = verdicts(summary)
    if "curves" in summary:
        measure = summary["measure"]
        curves = plot(summary["curves"], measure.capitalize(), "training step", f"mean {measure}")
        parts = {"plots": [curves]}
    else:
        pairs = summary["overall"]
        named = [pair["a"] for pair in pairs if pair["a"].endswith(": trained")]
        first = (named or [pairs[0]["a"]])[0]
        rivals = [pair["b"] for pair in pairs if pair["a"] == first]
        drawn = draw_accuracy(summary, first, rivals)
        parts = {"figures": figures_of(summary, first, rivals), "plots": drawn[:1]}
        parts |= {"more_plots": drawn[1:]} | tables_of(summary)
        parts["tables"].sort(key=lambda table: not table["sign"])  # differences first
    return render(title, lead=lead, found="\n".join(more), warnings=notes, **parts)
