"""What a stream says: success by epoch for every way of remembering, and what its bank is like.

Holds: `summarise_stream` (a flat list, one record for each arm and epoch), `write_stream_report`,
`rewrite_stream_report`.
Leaves out: the loop that makes the rows (commands/stream.py), plots (report/plots.py).
Exercise it: `python cli.py stream`. Read next: report/page.py.

    solved         sr   share of the tasks solved in an epoch; what crashed or timed out was not
    solved so far  csr  share solved in this epoch or an earlier one: without a memory this is
                        pass@epochs
    forgotten      fr   of the failures of an epoch, the share that the epoch before had solved

Where responses say how sure they are, the calibration error of report/summary.py stands beside what
was solved. A way of remembering is an arm in the files and a method wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from config.errors import UserError
from config.foreign import from_json
from config.options import StreamConfig
from config.terminal import console, say
from report import plots
from report.machine import foot, note_machine
from report.markup import (
    Markup,
    Section,
    bounds,
    figures,
    fill,
    joined,
    macro,
    page,
    parts,
    percent,
    table,
)
from report.summary import calibration, interval, write_summary, write_text

LIMITS = ("steps", "window")  # failures of a task that used up all that it was given
EXCERPT = 100  # characters of an experience that a task was shown
SOLVED, SO_FAR = "Tasks solved", "Tasks solved so far"  # plots


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
    rows = [_ends(cells[0], cells[-1]) for cells in _by_arm(summary).values()]
    columns = dict.fromkeys(name for row in rows for name in row)
    shown = Table(*columns)
    for row in rows:
        shown.add_row(*(row.get(name, "") for name in columns))
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
        "method": last["arm"],
        "n": str(last["n"]),
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


def _begin(text: str, most: int) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."


def _one_task(outcome: dict) -> Markup:
    """Show what the task was shown whose success changed most often."""
    by_task: dict[str, list[dict]] = {}
    for row in outcome["rows"]:
        by_task.setdefault(row["id"], []).append(row)

    def changes(rows: list[dict]) -> int:
        return sum(a["success"] != b["success"] for a, b in pairwise(rows))

    lines = []
    rows = max(by_task.values(), key=changes, default=[])
    for row in rows:
        shown = joined(
            fill(
                "<div>{} (Q {}, similarity {}): {}</div>", each["id"], f"{each['q']:.2f}",
                f"{each['sim']:.2f}", _begin(each["experience"], EXCERPT),
            )
            for each in row["shown"]
        )  # fmt: skip
        names = [str(row["epoch"] + 1), "solved" if row["success"] else "failed"]
        action = _begin(row["action"], 2 * EXCERPT)
        lines.append((names, {"shown": shown or "nothing", "last action": action}))
    title = f"{outcome['arm']}, task {rows[0]['id']}" if rows else ""
    return table(title, ["epoch", "it was"], lines)


# ---------------------------------------------------------------- the page


def _curves(summary: dict) -> Markup:
    """Draw success by epoch; nothing of a single epoch, which the tables tell of."""
    if len({cell["epoch"] for cell in summary["cells"]}) < 2:
        return Markup()
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {SOLVED: {}, SO_FAR: {}}
    for cell in summary["cells"]:
        point = cell["epoch"], cell["sr"], cell["low"], cell["high"]
        panels[SOLVED].setdefault(cell["arm"], []).append(point)
        panels[SO_FAR].setdefault(cell["arm"], []).append((cell["epoch"], cell["csr"]))
    return figures(plots.curves(panels, "epoch", shares=[*panels]))


def _page(
    summary: dict,
    config: StreamConfig,
    outcomes: Sequence[dict],
    folder: Path,
    status: str = "",
) -> str:
    by_arm = _by_arm(summary)
    ends = [cells[-1] for cells in by_arm.values()]
    best = max(ends, key=itemgetter("sr"))
    arms = ", ".join(cell["arm"] for cell in ends if cell["sr"] == best["sr"])
    lead = (
        f"Most was solved with {arms}: {percent(best['sr'])}\u00a0% of {best['n']} tasks of "
        f"{config.suite} in epoch {best['epoch']}. {' '.join(_remarks(summary))}"
    )
    about = {o["arm"]: o["about"] for o in outcomes if o["about"]}
    learning = [o for o in outcomes if any(row["shown"] for row in o["rows"])]
    epochs = [([cell["arm"], str(cell["epoch"])], cell) for cell in summary["cells"]]
    banks = [
        (first, {name.replace("_", " "): f"{n:,.6g}" for name, n in cell["bank"].items()})
        for first, cell in epochs
        if cell["bank"].get("entries")
    ]
    last = [_ends(cells[0], cells[-1]) for cells in by_arm.values()]
    differences = [
        ([f"{d['arm']} − {d['than']}", ""], {"difference": _difference(d), "n": str(d["n"])})
        for d in summary["differences"]
    ]
    result = (
        _curves(summary)
        + table("By method", ["method", "n"], [([r.pop("method"), r.pop("n")], r) for r in last])
        + table("Solved in the last epoch, minus another method, in percentage points", ["", ""],
                differences)
        + (macro("facts", about) if about else "")
    )  # fmt: skip
    details = [
        Section("Every epoch", table(
            "Means of a task; tokens read and written", ["method", "epoch"],
            [(first, _epoch(cell)) for first, cell in epochs],
        ), (
            "Forgotten: of the tasks that failed, the share that the epoch before had solved; ran "
            "out: tasks that used up their steps or the model's window; cut: tasks whose intent is "
            "longer than what similarity takes in."
        )),
        Section("Utilities", table("The bank", ["method", "epoch"], banks),
                "At the end of each epoch."),
    ]  # fmt: skip
    sections = [
        Section("Result", result, (
            "Shares of all tasks; what crashed or timed out was not solved. 95 % intervals; lines "
            "that are alike lie on each other."
        )),
        Section("Readings", _texts(joined(map(_one_task, learning))), (
            "Of each method the task whose success changed most often, and what it was shown."
        )),
        Section("Details", parts(details)),
    ]  # fmt: skip
    tokens = {
        done: sum(row[f"{done}_tokens"] for o in outcomes for row in o["rows"])
        for done in ("read", "written")
    }
    end = foot(folder, tokens, sum(len(o["rows"]) for o in outcomes))
    above = macro("lead", status, lead, "")
    return page(f"Stream {config.name}", above, sections, foot=end)


def _texts(tables: Markup) -> Markup:
    """Set tables whose cells are sentences."""
    return tables and fill('<div class="texts">{}</div>', tables)
