"""What a stream says: success by epoch for every way of remembering, and what its bank is like.

    solved         sr   share of the tasks solved in an epoch; what crashed or timed out was not
    solved so far  csr  share solved in this epoch or an earlier one: without a memory this is
                        pass@epochs
    forgotten      fr   of the failures of an epoch, the share that the epoch before had solved

Where responses say how sure they are, the calibration error of report/summary.py stands beside what
was solved. A way of remembering is an arm in the files and a method wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from config.errors import UserError
from config.foreign import from_json
from config.options import StreamConfig
from config.terminal import console, say
from report.machine import foot, note_machine
from report.page import render
from report.plots import plot
from report.summary import bounds, calibration, interval, percent, write_summary, write_text

LIMITS = ("steps", "window")  # failures of a task that used up all that it was given


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


def _success(rows: Collection[dict]) -> dict:
    """Return n, the share solved with its interval, and how far off responses are that say how sure
    they are (None: none of them does)."""
    found = calibration((row["confidence"], row["success"]) for row in rows)
    share = {"n": found.n, "sr": found.accuracy, "low": found.low, "high": found.high}
    return share | {"calibration_error": found.error}


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
    for epoch, by_id in sorted(by_epoch.items()):
        rows, solved = [*by_id.values()], {id for id, row in by_id.items() if row["success"]}
        ever |= solved
        n, lost, failed = len(rows), len(before - solved), len(rows) - len(solved)
        stats, seconds = (dict(enumerate(outcome[name])) for name in ("stats", "seconds"))
        cells.append(
            {"arm": outcome["arm"], "epoch": epoch + 1}
            | _success(rows)
            | {
                "csr": len(ever) / n,
                "fr": lost / failed if failed else 0.0,
                "fr_p1": lost / len(before) if before else 0.0,
                "crashed": sum(bool(r["error"] or r["failure"] not in ("", *LIMITS)) for r in rows),
                "ran_out": sum(row["failure"] in LIMITS for row in rows),
                "cut": sum(row.get("cut", False) for row in rows),
                "steps": fmean(row["steps"] for row in rows),
                "shown": fmean(len(row["shown"]) for row in rows),
                "read_tokens": fmean(row["read_tokens"] for row in rows),
                "written_tokens": fmean(row["written_tokens"] for row in rows),
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
    for arm, other in ((arm, other) for k, arm in enumerate(solved) for other in [*solved][:k]):
        if common := [id for id in solved[arm] if id in solved[other]]:
            values = [solved[arm][id] - solved[other][id] for id in common]
            low, high = interval(values, least=-1.0)
            about = {"arm": arm, "than": other, "n": len(common)}
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
    rows = {arm: _ends(cells[0], cells[-1]) for arm, cells in _by_arm(summary).items()}
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    shown = Table("method", "n", *columns)
    for arm, row in rows.items():
        n = str(_by_arm(summary)[arm][-1]["n"])
        shown.add_row(arm, n, *(row.get(name, "") for name in columns))
    console.print(shown)
    for d in summary["differences"]:
        say(f"{d['arm']} − {d['than']}, last epoch: {_difference(d)} points, n {d['n']}")
    for sentence in _remarks(summary):
        say(sentence)
    note_machine(folder)
    write_text(folder / "report.html", _page(summary, config, outcomes, folder))
    say(f"Rows, banks and report.html are in {folder}, the banks as METHOD.db.")


def rewrite_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], running: bool
) -> Path:
    """Write report.html from outside, of a stream at any time; return its path."""
    path = folder / "report.html"
    stored = read_summary(folder) if (folder / "summary.json").exists() else {}
    begun = [outcome for outcome in outcomes if outcome["rows"]]
    if not begun:
        raise UserError(f"The stream in {folder} has worked on no task yet: there is no page.")
    summary = summarise_stream(config, begun, stored.get("rule", ""))
    status = "" if stored and not running else _how_far(config, begun, running)
    write_text(path, _page(summary, config, begun, folder, status))
    return path


def read_summary(folder: Path) -> dict:
    """Return a stream's summary."""
    return from_json((folder / "summary.json").read_text(encoding="utf-8"))


def _how_far(config: StreamConfig, begun: Sequence[dict], running: bool) -> str:
    """Say how far a stream has come that is not finished."""
    last = begun[-1]["rows"][-1]["epoch"] + 1
    tasks = sum(row["epoch"] + 1 == last for row in begun[-1]["rows"])
    return (
        f"{'Running' if running else 'Stopped'}: {begun[-1]['arm']}, method {len(begun)} of "
        f"{len(config.arms)}, epoch {last} of {config.epochs}, {tasks:,} tasks of it done."
    )


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


# ---------------------------------------------------------------- rows of tables: column -> text


def _difference(d: dict) -> str:
    return f"{percent(d['mean'], '+')} ({bounds(d, ' to ', '+')})"


def _share(record: dict) -> str:
    return f"{percent(record['sr'])} % ({bounds(record)})"


def _sure(record: dict) -> dict[str, str]:
    """Return the column of records whose responses say how sure they are."""
    error = record["calibration_error"]
    return {} if error is None else {"calibration error": f"{percent(error)} %"}


def _ends(first: dict, last: dict) -> dict[str, str]:
    """Return the row of an arm in the terminal, of its first and its last epoch."""
    return {
        "solved, first epoch": _share(first),
        "last epoch": _share(last),
        "so far": f"{percent(last['csr'])} %",
        "forgotten": f"{percent(last['fr'])} %",
        "entries": f"{last['bank'].get('entries', 0):,}",
    } | _sure(last)


def _epoch(cell: dict) -> dict[str, str]:
    return {
        "solved": _share(cell),
        "solved so far": f"{percent(cell['csr'])} %",
        "forgotten": f"{percent(cell['fr'])} %",
        "crashed": f"{cell['crashed']:,}",
        "ran out": f"{cell['ran_out']:,}",
        "steps": f"{cell['steps']:.1f}",
        "shown": f"{cell['shown']:.1f}",
        "read": f"{cell['read_tokens']:,.0f}",
        "written": f"{cell['written_tokens']:,.0f}",
        "seconds": f"{cell['seconds']:.3g}",
        "cut": f"{cell['cut']:,}",
    } | _sure(cell)


# ---------------------------------------------------------------- the page


def _table(caption: str, head: list[str], rows: list[tuple[tuple[str, ...], dict]]) -> dict:
    columns = dict.fromkeys(name for _, row in rows for name in row)
    return {"caption": caption, "head": head, "columns": columns, "rows": rows}


def _curves(summary: dict) -> list[Markup]:
    """Draw success by epoch; nothing of a single epoch, which the tables tell of."""
    by_arm = _by_arm(summary)
    if max(map(len, by_arm.values())) < 2:
        return []
    names = {"Tasks solved": ("sr", "low", "high"), "Tasks solved so far": ("csr",)}
    return [
        plot(
            {a: [(c["epoch"], *map(c.get, fields)) for c in cells] for a, cells in by_arm.items()},
            title, "epoch", share=True,
        )
        for title, fields in names.items()
    ]  # fmt: skip


def _page(
    summary: dict, config: StreamConfig, outcomes: Sequence[dict], folder: Path, status: str = ""
) -> str:
    by_arm = _by_arm(summary)
    ends = {arm: cells[-1] for arm, cells in by_arm.items()}
    best = sorted(ends.items(), key=lambda item: -item[1]["sr"])[:3]
    figures = [
        {
            "value": f"{percent(cell['sr'])} %",
            "label": f"solved with {arm}",
            "note": f"{bounds(cell)} %, n {cell['n']}, epoch {cell['epoch']}",
        }
        for arm, cell in best
    ]
    methods = [((arm, str(c["n"])), _ends(by_arm[arm][0], c)) for arm, c in ends.items()]
    differences = [
        ((f"{d['arm']} minus {d['than']}",), {"points": _difference(d), "n": str(d["n"])})
        for d in summary["differences"]
    ]
    every = [((c["arm"], str(c["epoch"])), c) for c in summary["cells"]]
    banks = [
        (first, {name.replace("_", " "): f"{n:,.6g}" for name, n in cell["bank"].items()})
        for first, cell in every
        if cell["bank"].get("entries")
    ]
    about = "Means of a task. Forgotten: of the tasks that failed, those solved the epoch before."
    plain = [
        _table("By method", ["method", "n"], methods),
        _table("Solved in the last epoch, in percentage points", [""], differences),
        _table(about, ["method", "epoch"], [(first, _epoch(cell)) for first, cell in every]),
        _table("The bank at the end of each epoch", ["method", "epoch"], banks),
    ]
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
        plain=[table for table in plain if table["rows"]],
        foot=foot(folder, tokens, sum(len(o["rows"]) for o in outcomes)),
    )
