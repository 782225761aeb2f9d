"""What a stream says: success by epoch for every way of remembering, and what its bank is like.

    solved         sr   share of the tasks solved in an epoch; what crashed or timed out was not
    solved so far  csr  share solved in this epoch or an earlier one: without a memory this is
                        pass@epochs
    forgotten      fr   of the failures of an epoch, the share that the epoch before had solved

Where responses say how sure they are, the calibration error of report/summary.py stands beside what
was solved. A way of remembering is an arm in the files and a method wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from config.errors import UserError
from config.foreign import from_json
from config.options import StreamConfig
from config.terminal import console, say
from report.machine import foot, note_machine
from report.page import figure_of, render, table_of
from report.plots import plot
from report.summary import bounds, calibration, interval, percent, write_summary, write_text

LIMITS = ("steps", "window")  # failures of a task that used up all that it was given
MEANS = ("steps", "read_tokens", "written_tokens")  # of a task


def summarise_stream(config: StreamConfig, outcomes: Sequence[dict], rule: str = "") -> dict:
    """Return {environment, epochs, rule, cells, leaks, digests, frozen, differences}.

    outcomes: of `Stream.outcome`. rule: by which tasks were solved where no model did. frozen: the
    bank that was read alone, {} where every arm has its own.
    """
    return {
        "environment": config.suite,
        "epochs": config.epochs,
        "rule": rule,
        "cells": [cell for outcome in outcomes for cell in epochs_of(outcome)],
        "leaks": {o["arm"]: o["leaks"] for o in outcomes if o["leaks"]},
        "digests": {o["arm"]: o["digest"] for o in outcomes},
        "frozen": next((o["frozen"] for o in outcomes if o["frozen"]), {}),
        "differences": _differences(outcomes, config.epochs - 1),
    }


def epochs_of(outcome: dict) -> list[dict]:
    """Return a record of each epoch: n, sr with interval, csr, fr, means of a task (steps, tokens,
    seconds), the bank.

    fr: lost / failed, of which lost are those that the epoch before had solved; fr_p1: lost /
    solved in the epoch before. 0 where nothing could be lost.
    """
    by_epoch: dict[int, dict[str, dict]] = {}
    for row in outcome["rows"]:
        by_epoch.setdefault(row["epoch"], {})[row["id"]] = row
    cells, ever, before = [], set(), set()
    stats, seconds = (dict(enumerate(outcome[name])) for name in ("stats", "seconds"))
    for epoch, by_id in sorted(by_epoch.items()):
        rows, solved = [*by_id.values()], {id for id, row in by_id.items() if row["success"]}
        sure = calibration((row["confidence"], row["success"]) for row in rows)
        ever |= solved
        n, lost, failed = len(rows), len(before - solved), len(rows) - len(solved)
        means = {name: fmean(row[name] for row in rows) for name in MEANS}
        cells.append(
            {
                "arm": outcome["arm"],
                "epoch": epoch + 1,
                "n": n,
                "sr": sure.accuracy,
                "low": sure.low,
                "high": sure.high,
                "calibration_error": sure.error,  # None: no response says how sure it is
                "csr": len(ever) / n,
                "fr": lost / failed if failed else 0.0,
                "fr_p1": lost / len(before) if before else 0.0,
                "crashed": sum(bool(r["error"] or r["failure"] not in ("", *LIMITS)) for r in rows),
                "ran_out": sum(row["failure"] in LIMITS for row in rows),
                "cut": sum(row.get("cut", False) for row in rows),
                "shown": fmean(len(row["shown"]) for row in rows),
                **means,
                "seconds": (seconds.get(epoch) or 0.0) / n,
                "bank": stats.get(epoch) or {},
            }
        )
        before = solved
    return cells


def _differences(outcomes: Sequence[dict], epoch: int) -> list[dict]:
    """Compare every arm with those before it, task by task, in one epoch."""
    solved = {
        o["arm"]: {r["id"]: float(r["success"]) for r in o["rows"] if r["epoch"] == epoch}
        for o in outcomes
    }
    found = []
    for other, arm in combinations(solved, 2):
        values = [solved[arm][id] - solved[other][id] for id in solved[arm] if id in solved[other]]
        if values:
            low, high = interval(values, least=-1.0)
            about = {"arm": arm, "than": other, "n": len(values)}
            found.append(about | {"mean": fmean(values), "low": low, "high": high})
    return found


# ---------------------------------------------------------------- where it is written


def write_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], rule: str = ""
) -> None:
    """Write summary.json and report.html into a stream's folder, and print the table."""
    from rich.table import Table

    summary = summarise_stream(config, outcomes, rule)
    write_summary(folder / "summary.json", summary)
    methods = _methods(summary)
    shown = Table(*methods["head"], *methods["columns"])
    for names, row in methods["rows"].items():
        shown.add_row(*names, *(row.get(name, "") for name in methods["columns"]))
    console.print(shown)
    for d in summary["differences"]:
        say(f"{d['arm']} − {d['than']}, last epoch: {_points(d)} points, n {d['n']}")
    for sentence in _remarks(summary):
        say(sentence)
    note_machine(folder)
    write_text(folder / "report.html", stream_page(summary, config, outcomes, folder))
    say(f"Rows, banks and report.html are in {folder}, the banks as METHOD.db.")


def rewrite_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], running: bool
) -> Path:
    """Write report.html from outside, of a stream at any time; return its path."""
    stored = read_summary(folder) if (folder / "summary.json").exists() else {}
    begun = [outcome for outcome in outcomes if outcome["rows"]]
    if not begun:
        raise UserError(f"The stream in {folder} has worked on no task yet: there is no page.")
    summary, status = summarise_stream(config, begun, stored.get("rule", "")), ""
    if running or not stored:
        last = begun[-1]["rows"][-1]["epoch"]
        tasks = sum(row["epoch"] == last for row in begun[-1]["rows"])
        status = (
            f"{'Running' if running else 'Stopped'}: {begun[-1]['arm']}, method {len(begun)} of "
            f"{len(config.arms)}, epoch {last + 1} of {config.epochs}, {tasks:,} tasks of it done."
        )
    write_text(folder / "report.html", stream_page(summary, config, begun, folder, status))
    return folder / "report.html"


def read_summary(folder: Path) -> dict:
    """Return a stream's summary."""
    return from_json((folder / "summary.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what is shown


def _remarks(summary: dict) -> list[str]:
    """Say by which rule tasks were solved without a model, which bank was read and never written,
    and of how many tasks that it should not know a bank holds the solution."""
    rule, bank = summary["rule"], summary["frozen"]
    remarks = [f"No model took part: the policy {rule}."] if rule else []
    if bank:
        told = "Frozen: {entries:,} entries of {path}; nothing was learnt."
        remarks.append(told.format(**bank))
    return remarks + [
        f"{arm}: the bank holds solutions of {len(ids)} tasks ({', '.join(ids[:3])})."
        for arm, ids in summary["leaks"].items()
    ]


def _by_arm(summary: dict) -> dict[str, list[dict]]:
    """Return the records of the epochs of each arm."""
    return {arm: [*cells] for arm, cells in groupby(summary["cells"], itemgetter("arm"))}


def _points(difference: dict) -> str:
    return f"{percent(difference['mean'], '+')} ({bounds(difference, ' to ', '+')})"


def _solved(cell: dict) -> str:
    return f"{percent(cell['sr'])} % ({bounds(cell)})"


def _shares(cell: dict) -> dict[str, str]:
    """Return the columns of an epoch that are shares; the last one where responses say how sure
    they are."""
    names = {"solved so far": "csr", "forgotten": "fr", "calibration error": "calibration_error"}
    return {name: f"{percent(cell[x])} %" for name, x in names.items() if cell[x] is not None}


def _methods(summary: dict) -> dict:
    """Return the table of all methods, by their first epoch and their last."""
    rows = {}
    for arm, (first, *more) in _by_arm(summary).items():
        last = [first, *more][-1]
        ends = {"solved, first epoch": _solved(first), "last epoch": _solved(last)}
        entries = {"entries": f"{last['bank'].get('entries', 0):,}"}
        rows[arm, str(last["n"])] = ends | _shares(last) | entries
    return table_of("By method", ["method", "n"], rows)


def _epoch(cell: dict) -> dict[str, str]:
    counts = {name.replace("_", " "): f"{cell[name]:,}" for name in ("crashed", "ran_out", "cut")}
    means = {name: f"{cell[name]:.1f}" for name in ("steps", "shown")}
    tokens = {name: f"{cell[f'{name}_tokens']:,.0f}" for name in ("read", "written")}
    seconds = {"seconds": f"{cell['seconds']:.3g}"}
    return {"solved": _solved(cell)} | _shares(cell) | counts | means | tokens | seconds


def _curves(summary: dict) -> list[Markup]:
    """Draw success by epoch."""
    by_arm = _by_arm(summary)
    solved, so_far = (
        {
            arm: [(c["epoch"], *(c[x] for x in fields)) for c in cells]
            for arm, cells in by_arm.items()
        }
        for fields in (("sr", "low", "high"), ("csr",))
    )
    return [
        plot(solved, "Tasks solved", "epoch", share=True),
        plot(so_far, "Tasks solved so far", "epoch", share=True),
    ]


def stream_page(
    summary: dict, config: StreamConfig, outcomes: Sequence[dict], folder: Path, status: str = ""
) -> str:
    """Return the page of a stream. status: how far it has come, of one that is not finished."""
    last = [cells[-1] for cells in _by_arm(summary).values()]
    figures = [
        figure_of(
            f"solved with {cell['arm']}", cell | {"mean": cell["sr"]}, f"epoch {cell['epoch']}"
        )
        for cell in sorted(last, key=itemgetter("sr"), reverse=True)[:3]
    ]
    differences = {
        (f"{d['arm']} minus {d['than']}",): {"points": _points(d), "n": str(d["n"])}
        for d in summary["differences"]
    }
    cells = {(cell["arm"], str(cell["epoch"])): cell for cell in summary["cells"]}
    banks = {
        names: {name.replace("_", " "): f"{n:,.6g}" for name, n in cell["bank"].items()}
        for names, cell in cells.items()
        if cell["bank"].get("entries")
    }
    about = "Means of a task. Forgotten: of the tasks that failed, those solved the epoch before."
    head = ["method", "epoch"]
    tables = [
        _methods(summary),
        table_of("Solved in the last epoch, in percentage points", [""], differences),
        table_of(about, head, {names: _epoch(cell) for names, cell in cells.items()}),
    ]
    bank = table_of("The bank at the end of each epoch", head, banks)
    tokens = {
        done: sum(row[f"{done}_tokens"] for o in outcomes for row in o["rows"])
        for done in ("read", "written")
    }
    return render(
        f"Stream {config.name}",
        status=status,
        warnings=_remarks(summary),
        figures=figures,
        plots=_curves(summary),
        facts={o["arm"]: o["about"] for o in outcomes if o["about"]},
        tables=[table for table in tables if table["rows"]],
        details=[bank] if banks else [],
        foot=foot(folder, tokens, sum(len(o["rows"]) for o in outcomes)),
    )
