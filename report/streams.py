"""What a stream says: success by epoch for every way of remembering, and what its bank is like.

Holds: `summarise_stream` (a flat list, one record for each arm and epoch), `write_stream_report`,
`rewrite_stream_report`.
Leaves out: the loop that makes the rows (commands/stream.py), plots (report/plots.py).
Exercise it: `python cli.py stream`. Read next: report/page.py.

    SR   share of the tasks solved in an epoch; what crashed or timed out was not
    CSR  share solved in this epoch or an earlier one: without a memory this is pass@epochs
    FR   of the failures of an epoch, the share that the epoch before had solved

Where responses say how sure they are, SR has the calibration error of report/summary.py beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from config.errors import UserError
from config.foreign import from_json
from config.options import StreamConfig
from config.terminal import console, say
from report import plots
from report.markup import (
    REFRESH,
    Markup,
    Section,
    Text,
    as_table,
    figures,
    fill,
    folded,
    joined,
    macro,
    page,
)
from report.summary import calibration, difference_interval, wilson, write_summary, write_text

MOST_SHOWN = 12  # experiences that helped, and that hurt
LIMITS = ("steps", "window")  # failures of a task that used up all that it was given
EXCERPT = 100  # characters of an experience that a task was shown
FOLDED = 120  # characters of an experience, whose rest is folded away


def summarise_stream(config: StreamConfig, outcomes: Sequence[dict], rule: str = "") -> dict:
    """Return {environment, epochs, rule, cells, held_out, leaks, digests, frozen, differences}.

    outcomes: of `Stream.outcome`. rule: by which tasks were solved where no model did. frozen: the
    bank that was read alone, {} where every arm has its own.
    """
    return {
        "environment": config.suite,
        "epochs": config.epochs,
        "rule": rule,
        "cells": [cell for outcome in outcomes for cell in epochs_of(outcome)],
        "held_out": [
            {"arm": o["arm"]} | _success(o["held_out"]) for o in outcomes if o["held_out"]
        ],
        "leaks": {o["arm"]: o["leaks"] for o in outcomes if o["leaks"]},
        "digests": {o["arm"]: o["digest"] for o in outcomes},
        "frozen": next((o["frozen"] for o in outcomes if o["frozen"]), {}),
        "differences": _differences(outcomes, config.epochs - 1),
    }


def _success(rows: Collection[dict]) -> dict:
    """Return n, the share solved with its interval, and how far off responses are that say how sure
    they are (None: none of them does)."""
    sr = sum(row["success"] for row in rows) / len(rows)
    low, high = wilson(sr, len(rows))
    error = calibration((row["confidence"], row["success"]) for row in rows).error
    return {"n": len(rows), "sr": sr, "low": low, "high": high, "calibration_error": error}


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
        success = _success(rows)
        error = success.pop("calibration_error")
        cells.append(
            {"arm": outcome["arm"], "epoch": epoch + 1}
            | success
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
                "calibration_error": error,
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
            low, high = difference_interval(values, common)
            about = {"arm": arm, "than": other, "n": len(common)}
            found.append(about | {"mean": fmean(values), "low": low, "high": high})
    return found


# ---------------------------------------------------------------- on the terminal and on the page


def write_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], rule: str = ""
) -> None:
    """Write summary.json and report.html into a stream's folder, and print the table."""
    from rich.table import Table

    summary = summarise_stream(config, outcomes, rule)
    write_summary(folder / "summary.json", summary)
    if summary["rule"]:
        say(f"No model: the policy {summary['rule']}.")
    columns = _known(LAST, summary["cells"])
    table = Table(*columns)
    for epochs in _by_arm(summary).values():
        table.add_row(*(show(epochs[0], epochs[-1]) for show in columns.values()))
    console.print(table)
    for d in summary["differences"]:
        interval = f"{_difference(d)[:-1]}, n {d['n']})"
        say(f"{d['arm']} - {d['than']}, last epoch: {interval}")
    for sentence in _remarks(summary):
        say(sentence)
    write_text(folder / "report.html", _page(summary, config, outcomes))
    say(f"Rows, banks and report.html are in {folder}.")


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
    summary["leaks"] |= stored.get("leaks", {})
    status = "" if stored and not running else _how_far(config, begun, running)
    write_text(path, _page(summary, config, begun, status, REFRESH if running else 0))
    return path


def read_summary(folder: Path) -> dict:
    """Return a stream's summary."""
    return from_json((folder / "summary.json").read_text(encoding="utf-8"))


def _how_far(config: StreamConfig, begun: Sequence[dict], running: bool) -> str:
    """Say how far a stream has come that is not finished."""
    last = begun[-1]["rows"][-1]["epoch"] + 1
    tasks = sum(row["epoch"] + 1 == last for row in begun[-1]["rows"])
    return (
        f"{'Running' if running else 'Stopped'}: {begun[-1]['arm']}, arm {len(begun)} of "
        f"{len(config.arms)}, epoch {last} of {config.epochs}, {tasks:,} tasks of it done."
    )


def _remarks(summary: dict) -> list[str]:
    """Say which bank was read and never written, if there is one, and of how many tasks that it
    should not know a bank holds the solution."""
    told = "Frozen: {entries:,} entries of {path}; nothing was learnt."
    return [told.format(**bank) for bank in (summary["frozen"],) if bank] + [
        f"{arm}: the bank holds solutions of {len(ids)} held-out tasks ({', '.join(ids[:3])})."
        for arm, ids in summary["leaks"].items()
    ]


def _difference(d: dict) -> str:
    return f"{d['mean']:+.2f} ({d['low']:+.2f} to {d['high']:+.2f})"


def _share(record: dict) -> str:
    return f"{record['sr']:.2f} ({record['low']:.2f}-{record['high']:.2f})"


def _error(record: dict) -> str:
    error = record["calibration_error"]
    return "" if error is None else f"{error:.2f}"


# ---------------------------------------------------------------- tables: column -> what it shows

SURE = "calibration error"  # a column where responses say how sure they are
LAST = {  # of the first and the last epoch of an arm, for the terminal
    "arm": lambda first, last: last["arm"],
    "n": lambda first, last: str(last["n"]),
    "SR first epoch": lambda first, last: _share(first),
    "SR last epoch": lambda first, last: _share(last),
    "CSR": lambda first, last: f"{last['csr']:.2f}",
    "FR": lambda first, last: f"{last['fr']:.2f}",
    SURE: lambda first, last: _error(last),
    "entries": lambda first, last: f"{last['bank'].get('entries', 0):,}",
}
EPOCH = {
    "arm": lambda c: c["arm"],
    "epoch": lambda c: str(c["epoch"]),
    "SR": _share,
    **{name.upper(): lambda c, name=name: f"{c[name]:.2f}" for name in ("csr", "fr")},
    **{
        name: lambda c, key=name.replace(" ", "_"): f"{c[key]:,}" for name in ("crashed", "ran out")
    },
    **{name: lambda c, name=name: f"{c[name]:.1f}" for name in ("steps", "shown")},
    **{name: lambda c, key=f"{name}_tokens": f"{c[key]:,.0f}" for name in ("read", "written")},
    "seconds": lambda c: f"{c['seconds']:.3g}",
    "cut": lambda c: f"{c['cut']:,}",
    SURE: _error,
}
STATS = ("entries", "never_shown", "q_negative", "q_zero", "q_positive", "q_mean", "q_min", "q_10",
         "q_median", "q_90", "q_max")  # fmt: skip
UTILITIES = {name: EPOCH[name] for name in ("arm", "epoch")} | {
    name.replace("_", " "): lambda c, name=name: f"{c['bank'][name]:.4g}" for name in STATS
}
COUNT = {"n": lambda record: f"{record['n']:,}"}
DIFFERENCE = {
    "": lambda d: f"{d['arm']} - {d['than']}", " ": lambda d: "", "difference": _difference, **COUNT
}  # fmt: skip
HELD_OUT = {"": lambda h: h["arm"], " ": lambda h: "", "solved": _share, **COUNT, SURE: _error}
WORTH = {
    "entry": lambda e: str(e["id"]),
    "of task": lambda e: e["task"],
    "succeeded": lambda e: f"{e['wins']} of {e['visits']}",
    "Q": lambda e: f"{e['q']:.2f}",
    "experience": lambda e: _long(e["experience"]),
}
TASK = {
    "epoch": lambda row: str(row["epoch"] + 1),
    "it was": lambda row: "solved" if row["success"] else "failed",
    "shown": lambda row: joined(map(_shown, row["shown"])) or "nothing",
    "last action": lambda row: _begin(row["action"], 2 * EXCERPT),
}


def _known(columns: Mapping[str, Callable], cells: Iterable[dict]) -> dict[str, Callable]:
    """Return the columns without `SURE` where no response says how sure it is."""
    sure = any(cell["calibration_error"] is not None for cell in cells)
    return {name: show for name, show in columns.items() if sure or name != SURE}


def _table(caption: str, columns: Mapping[str, Callable], records: Iterable[dict]) -> Markup:
    """Return a table of records, a line each."""
    rows = [[show(record) for show in columns.values()] for record in records]
    return as_table(caption, [name.strip() for name in columns], rows)


def _long(text: str) -> Text:
    """Return a text whose end is folded away."""
    begin, rest = text[:FOLDED], text[FOLDED:]
    return folded(f"{begin} ...", rest) if rest else text


def _begin(text: str, most: int) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."


def _shown(found: dict) -> Markup:
    text = _begin(found["experience"], EXCERPT)
    why = f"Q {found['q']:.2f}, similarity {found['sim']:.2f}"
    return fill("<div>{}</div>", f"{found['id']} ({why}): {text}")


# ---------------------------------------------------------------- the page


def _by_arm(summary: dict) -> dict[str, list[dict]]:
    """Return the records of the epochs of each arm."""
    by_arm: dict[str, list[dict]] = {}
    for cell in summary["cells"]:
        by_arm.setdefault(cell["arm"], []).append(cell)
    return by_arm


def _curves(summary: dict, panels: dict[str, Sequence[Callable[[dict], float | None]]]) -> Markup:
    """Draw values of cells by epoch, of a value and the ends of its interval; a value of None is
    left out, and all of a single epoch, which the tables tell of."""
    arms = _by_arm(summary)
    if len({cell["epoch"] for cell in summary["cells"]}) < 2:
        return Markup()

    def points(cells: Iterable[dict], values: Sequence[Callable]) -> list[tuple]:
        found = [(cell["epoch"], *(value(cell) for value in values)) for cell in cells]
        return [point for point in found if None not in point]

    lines = {
        title: {arm: points(cells, values) for arm, cells in arms.items()}
        for title, values in panels.items()
    }
    return figures(plots.curves(lines))


def _of_bank(name: str) -> Callable[[dict], float | None]:
    """Return what reads a figure of a cell's bank; None: it has no entries."""
    return lambda cell: cell["bank"][name] if cell["bank"].get("entries") else None


def _page(
    summary: dict,
    config: StreamConfig,
    outcomes: Sequence[dict],
    status: str = "",
    refresh: int = 0,
) -> str:
    best = max((cells[-1] for cells in _by_arm(summary).values()), key=itemgetter("sr"))
    rule = f"No model took part: the policy {summary['rule']}." if summary["rule"] else ""
    rules = outcomes[0].get("judged_by", "")
    judged = f", judged by {rules}," if rules else ""
    lead = (
        f"{best['arm']} solved {best['sr']:.0%} of {best['n']} tasks of {config.suite}"
        f"{judged} in epoch {best['epoch']}. {' '.join(filter(None, (rule, *_remarks(summary))))}"
    )
    about = {o["arm"]: o["about"] for o in outcomes}
    learning = [o for o in outcomes if o["bank"]]
    banks = [cell for cell in summary["cells"] if cell["bank"].get("entries")]
    success = {
        "tasks solved in an epoch": [itemgetter(name) for name in ("sr", "low", "high")],
        "tasks solved so far": [itemgetter("csr")],
    }
    utilities = {
        "mean utility": [_of_bank("q_mean")],
        "never shown, share of entries": [_of_bank("never_shown")],
    }
    cells, each = summary["cells"], "Means of a task; tokens read and written"
    against = "Share solved in the last epoch, minus that of another arm"
    sections = [
        Section("Success by epoch", _curves(summary, success), (
            "Share of all tasks; what crashed or timed out was not solved. Bands are 95 % "
            "intervals; lines that are alike lie on each other."
        )),
        Section("Ways of remembering", macro("facts", about) if any(about.values()) else ""),
        Section("Every epoch", _table(each, _known(EPOCH, cells), cells), (
            "SR: share of the tasks solved, with Wilson's 95 % interval; CSR: share solved so far; "
            "FR: of the tasks that failed, the share that the epoch before had solved; ran out: "
            "tasks that used up their steps or the model's window; cut: tasks whose intent is "
            "longer than what similarity takes in."
        )),
        Section("Compared task by task", _table(against, DIFFERENCE, summary["differences"]),
                "95 % intervals by bootstrap over the tasks."),
        Section("Other tasks, with the bank as it was",
                _table("Held-out tasks", HELD_OUT, summary["held_out"])),
        Section("Utilities",
                _curves(summary, utilities) + _table("The bank", UTILITIES, banks) if banks else "",
                "At the end of each epoch."),
        *(Section(f"What helped and what hurt: {o['arm']}", _texts(_worth(o)),
                  "Experiences by the share of tasks that succeeded with them.")
          for o in learning),
        Section("One task, epoch by epoch", _texts(joined(map(_one_task, learning)))),
    ]  # fmt: skip
    return page(f"Stream {config.name}", macro("lead", status, lead, ""), sections, refresh=refresh)


def _texts(tables: Markup) -> Markup:
    """Set tables whose cells are sentences."""
    return tables and fill('<div class="texts">{}</div>', tables)


def _worth(outcome: dict) -> Markup:
    """List the experiences that were shown most often with success, and with failure."""

    def ranked(sign: int) -> list[dict]:
        return sorted(
            outcome["bank"], key=lambda e: (sign * e["wins"] / e["visits"], -e["visits"], e["id"])
        )

    helped = [entry for entry in ranked(-1) if entry["wins"]]
    hurt = [entry for entry in ranked(1) if entry["wins"] < entry["visits"]]
    tables = {"Helped": helped[:MOST_SHOWN], "Hurt": hurt[:MOST_SHOWN]}
    return joined(_table(title, WORTH, entries) for title, entries in tables.items())


def _one_task(outcome: dict) -> Markup:
    """Show what the task was shown whose success changed most often."""
    by_task: dict[str, list[dict]] = {}
    for row in outcome["rows"]:
        by_task.setdefault(row["id"], []).append(row)

    def changes(rows: list[dict]) -> int:
        return sum(a["success"] != b["success"] for a, b in pairwise(rows))

    rows = max(by_task.values(), key=changes, default=[])
    return _table(f"{outcome['arm']}, task {rows[0]['id']}", TASK, rows) if rows else Markup()
