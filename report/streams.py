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

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
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
    """Return {environment, epochs, rule, cells, differences, held_out, leaks, digests, frozen}.

    outcomes: of `Stream.outcome`. rule: by which tasks were solved where no model did. frozen: the
    bank that was read alone, {} where every arm has its own.
    """
    found = {
        "environment": config.suite,
        "epochs": config.epochs,
        "rule": rule,
        "cells": [cell for outcome in outcomes for cell in epochs_of(outcome)],
        "held_out": [_held_out(outcome) for outcome in outcomes if outcome["held_out"]],
        "leaks": {o["arm"]: o["leaks"] for o in outcomes if o["leaks"]},
        "digests": {o["arm"]: o["digest"] for o in outcomes},
        "frozen": next((o["frozen"] for o in outcomes if o["frozen"]), {}),
    }
    found["differences"] = _differences(outcomes, config.epochs)
    return found


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
    for epoch, rows in sorted(by_epoch.items()):
        n, solved = len(rows), {id for id, row in rows.items() if row["success"]}
        ever |= solved
        lost, failed = len(before - solved), n - len(solved)
        low, high = wilson(len(solved) / n, n)
        stats = outcome["stats"][epoch] if epoch < len(outcome["stats"]) else None
        cells.append({
            "arm": outcome["arm"],
            "epoch": epoch + 1,
            "n": n,
            "sr": len(solved) / n,
            "low": low,
            "high": high,
            "csr": len(ever) / n,
            "fr": lost / failed if failed else 0.0,
            "fr_p1": lost / len(before) if before else 0.0,
            "crashed": sum(
                bool(row["error"] or row["failure"] not in ("", *LIMITS)) for row in rows.values()
            ),
            "ran_out": sum(row["failure"] in LIMITS for row in rows.values()),
            "cut": sum(row.get("cut", False) for row in rows.values()),
            "steps": fmean(row["steps"] for row in rows.values()),
            "shown": fmean(len(row["shown"]) for row in rows.values()),
            "read_tokens": fmean(row["read_tokens"] for row in rows.values()),
            "written_tokens": fmean(row["written_tokens"] for row in rows.values()),
            "seconds": (outcome["seconds"][epoch] or 0.0) / n if epoch < len(outcome["seconds"])
            else 0.0,
            "calibration_error": _calibration_error(rows.values()),
            "bank": stats or {},
        })  # fmt: skip
        before = solved
    return cells


def _calibration_error(rows: Iterable[dict]) -> float | None:
    """Return how far off responses are that say how sure they are; None: none of them does."""
    return calibration((row["confidence"], row["success"]) for row in rows).error


def _held_out(outcome: dict) -> dict:
    rows = outcome["held_out"]
    sr = fmean(row["success"] for row in rows)
    low, high = wilson(sr, len(rows))
    return {"arm": outcome["arm"], "n": len(rows), "sr": sr, "low": low, "high": high,
            "calibration_error": _calibration_error(rows)}  # fmt: skip


def _differences(outcomes: Sequence[dict], epochs: int) -> list[dict]:
    """Compare every arm with those before it, task by task, in the last epoch."""
    last = {
        outcome["arm"]: {
            row["id"]: float(row["success"])
            for row in outcome["rows"]
            if row["epoch"] == epochs - 1
        }
        for outcome in outcomes
    }
    found = []
    arms = [*last]
    for k, arm in enumerate(arms):
        for other in arms[:k]:
            common = [id for id in last[arm] if id in last[other]]
            if common:
                values = [last[arm][id] - last[other][id] for id in common]
                low, high = difference_interval(values, common)
                found.append(
                    {"arm": arm, "than": other, "n": len(common), "mean": fmean(values),
                     "low": low, "high": high}
                )  # fmt: skip
    return found


# ---------------------------------------------------------------- on the terminal and on the page


def write_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], rule: str = ""
) -> None:
    """Write summary.json and report.html into a stream's folder, and print the table."""
    summary = summarise_stream(config, outcomes, rule)
    write_summary(folder / "summary.json", summary)
    if summary["rule"]:
        say(f"No model: the policy {summary['rule']}.")
    console.print(_printed(summary))
    for difference in summary["differences"]:
        say(_said(difference))
    for sentence in filter(None, (_frozen(summary), *_leaks(summary))):
        say(sentence)
    write_text(folder / "report.html", _page(summary, config, outcomes))
    say(f"Rows, banks and report.html are in {folder}.")


def rewrite_stream_report(
    folder: Path, config: StreamConfig, outcomes: Sequence[dict], running: bool
) -> Path:
    """Write report.html from outside, of a stream at any time; return its path."""
    path = folder / "summary.json"
    stored = read_summary(folder) if path.exists() else {}
    begun = [outcome for outcome in outcomes if outcome["rows"]]
    if not begun:
        raise UserError(f"The stream in {folder} has worked on no task yet: there is no page.")
    summary = summarise_stream(config, begun, stored.get("rule", ""))
    summary["leaks"] |= stored.get("leaks", {})
    status = "" if stored and not running else _how_far(config, begun, running)
    refresh = REFRESH if running else 0
    write_text(folder / "report.html", _page(summary, config, begun, status, refresh))
    return folder / "report.html"


def _how_far(config: StreamConfig, begun: Sequence[dict], running: bool) -> str:
    """Say how far a stream has come that is not finished."""
    last = begun[-1]["rows"][-1]["epoch"] + 1
    tasks = sum(row["epoch"] + 1 == last for row in begun[-1]["rows"])
    return (
        f"{'Running' if running else 'Stopped'}: {begun[-1]['arm']}, arm {len(begun)} of "
        f"{len(config.arms)}, epoch {last} of {config.epochs}, {tasks:,} tasks of it done."
    )


def _frozen(summary: dict) -> str:
    """Say which bank was read and never written; "" if every arm has its own."""
    if not (bank := summary["frozen"]):
        return ""
    return f"Frozen: {bank['entries']:,} entries of {bank['path']}; nothing was learnt."


def _leaks(summary: dict) -> list[str]:
    """Say of how many tasks that it should not know a bank holds the solution."""
    return [
        f"{arm}: the bank holds solutions of {len(ids)} held-out tasks ({', '.join(ids[:3])})."
        for arm, ids in summary["leaks"].items()
    ]


def _difference(d: dict) -> str:
    return f"{d['mean']:+.2f} ({d['low']:+.2f} to {d['high']:+.2f})"


def _said(d: dict) -> str:
    return f"{d['arm']} - {d['than']}, last epoch: {_difference(d)[:-1]}, n {d['n']})"


def _share(cell: dict) -> str:
    return f"{cell['sr']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"


def _error(record: dict) -> str:
    error = record["calibration_error"]
    return "" if error is None else f"{error:.2f}"


def _printed(summary: dict):
    from rich.table import Table

    sure = [c["calibration_error"] for c in summary["cells"] if c["calibration_error"] is not None]
    more = ["calibration error"] if sure else []
    shown = Table("arm", "n", "SR first epoch", "SR last epoch", "CSR", "FR", *more, "entries")
    for first, last in _first_and_last(summary):
        shown.add_row(
            last["arm"],
            str(last["n"]),
            _share(first),
            _share(last),
            f"{last['csr']:.2f}",
            f"{last['fr']:.2f}",
            *([_error(last)] if sure else []),
            f"{last['bank'].get('entries', 0):,}",
        )
    return shown


def _first_and_last(summary: dict) -> list[tuple[dict, dict]]:
    by_arm: dict[str, list[dict]] = {}
    for cell in summary["cells"]:
        by_arm.setdefault(cell["arm"], []).append(cell)
    return [(cells[0], cells[-1]) for cells in by_arm.values()]


def _lines(
    summary: dict, *values: Callable[[dict], float | None]
) -> dict[str, list[tuple[float, ...]]]:
    """Return the points of every arm; a value of None has none."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for cell in summary["cells"]:
        points = lines.setdefault(cell["arm"], [])
        point = (cell["epoch"], *(value(cell) for value in values))
        points += [point] if None not in point else []
    return lines


def _curves(summary: dict, panels: dict[str, tuple[Callable[[dict], float | None], ...]]) -> Markup:
    """Draw the values of cells by epoch; "" of a single epoch, which the tables tell of."""
    if len({cell["epoch"] for cell in summary["cells"]}) < 2:
        return Markup()
    return figures(plots.curves({title: _lines(summary, *of) for title, of in panels.items()}))


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
    best = max((last for _, last in _first_and_last(summary)), key=lambda cell: cell["sr"])
    rule = f"No model took part: the policy {summary['rule']}." if summary["rule"] else ""
    more = " ".join(filter(None, (rule, _frozen(summary), *_leaks(summary))))
    rules = outcomes[0].get("judged_by", "")
    judged = f", judged by {rules}," if rules else ""
    lead = macro(
        "lead",
        status,
        f"{best['arm']} solved {best['sr']:.0%} of {best['n']} tasks of {config.suite}"
        f"{judged} in epoch {best['epoch']}. {more}",
        "",
    )
    about = {o["arm"]: o["about"] for o in outcomes}
    learning = [o for o in outcomes if o["bank"]]
    sections = [
        Section(
            "Success by epoch",
            _curves(summary, {
                "tasks solved in an epoch": (
                    lambda c: c["sr"], lambda c: c["low"], lambda c: c["high"]
                ),
                "tasks solved so far": (lambda c: c["csr"],),
            }),
            "Share of all tasks; what crashed or timed out was not solved. Bands are 95 % "
            "intervals; lines that are alike lie on each other.",
        ),
        Section("Ways of remembering", macro("facts", about) if any(about.values()) else ""),
        Section(
            "Every epoch",
            _epochs(summary),
            "SR: share of the tasks solved, with Wilson's 95 % interval; CSR: share solved so far; "
            "FR: of the tasks that failed, the share that the epoch before had solved; ran out: "
            "tasks that used up their steps or the model's window; cut: tasks whose intent is "
            "longer than what similarity takes in.",
        ),
        Section("Compared task by task", as_table(
            "Share solved in the last epoch, minus that of another arm",
            ["", "", "difference", "n"],
            [[f"{d['arm']} - {d['than']}", "", _difference(d), f"{d['n']:,}"]
             for d in summary["differences"]],
        ), "95 % intervals by bootstrap over the tasks."),
        Section("Other tasks, with the bank as it was", as_table(
            "Held-out tasks", ["", "", "solved", "n", "calibration error"],
            [[h["arm"], "", _share(h), f"{h['n']:,}", _error(h)]
             for h in summary["held_out"]],
        )),
        Section("Utilities", _curves(summary, {
            "mean utility": (_of_bank("q_mean"),),
            "never shown, share of entries": (_of_bank("never_shown"),),
        }) + _utilities(summary) if _utilities(summary) else "", "At the end of each epoch."),
        *(Section(f"What helped and what hurt: {o['arm']}", _texts(_worth(o)),
                  "Experiences by the share of tasks that succeeded with them.")
          for o in learning),
        Section("One task, epoch by epoch", _texts(joined(map(_one_task, learning)))),
    ]  # fmt: skip
    return page(f"Stream {config.name}", lead, sections, refresh=refresh)


def _long(text: str) -> Text:
    """Return a text whose end is folded away."""
    begin, rest = text[:FOLDED], text[FOLDED:]
    return folded(f"{begin} ...", rest) if rest else text


def _texts(tables: Markup) -> Markup:
    """Set tables whose cells are sentences."""
    return tables and fill('<div class="texts">{}</div>', tables)


def _epochs(summary: dict) -> Markup:
    sure = any(c["calibration_error"] is not None for c in summary["cells"])
    rows = [
        [c["arm"], str(c["epoch"]), _share(c), f"{c['csr']:.2f}", f"{c['fr']:.2f}",
         f"{c['crashed']:,}", f"{c['ran_out']:,}", f"{c['steps']:.1f}", f"{c['shown']:.1f}",
         f"{c['read_tokens']:,.0f}", f"{c['written_tokens']:,.0f}", f"{c['seconds']:.3g}",
         f"{c['cut']:,}", *([_error(c)] if sure else [])]
        for c in summary["cells"]
    ]  # fmt: skip
    head = ["arm", "epoch", "SR", "CSR", "FR", "crashed", "ran out", "steps", "shown", "read",
            "written", "seconds", "cut", *(["calibration error"] if sure else [])]  # fmt: skip
    return as_table("Means of a task; tokens read and written", head, rows)


def _utilities(summary: dict) -> Markup:
    names = ("entries", "never_shown", "q_negative", "q_zero", "q_positive", "q_mean", "q_min",
             "q_10", "q_median", "q_90", "q_max")  # fmt: skip
    rows = [
        [c["arm"], str(c["epoch"]), *(f"{c['bank'][name]:.4g}" for name in names)]
        for c in summary["cells"]
        if c["bank"].get("entries")
    ]
    head = ["arm", "epoch", *(name.replace("_", " ") for name in names)]
    return as_table("The bank", head, rows)


def _worth(outcome: dict) -> Markup:
    """List the experiences that were shown most often with success, and with failure."""

    def share(entry: dict) -> float:
        return entry["wins"] / entry["visits"]

    shown = outcome["bank"]
    helped = [e for e in shown if e["wins"]]
    hurt = [e for e in shown if e["wins"] < e["visits"]]
    helped.sort(key=lambda e: (-share(e), -e["visits"], e["id"]))
    hurt.sort(key=lambda e: (share(e), -e["visits"], e["id"]))
    parts = []
    for title, chosen in (("Helped", helped), ("Hurt", hurt)):
        rows = [
            [str(e["id"]), e["task"], f"{e['wins']} of {e['visits']}", f"{e['q']:.2f}",
             _long(e["experience"])]
            for e in chosen[:MOST_SHOWN]
        ]  # fmt: skip
        parts.append(as_table(title, ["entry", "of task", "succeeded", "Q", "experience"], rows))
    return joined(parts)


def _begin(text: str, most: int) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."


def _shown(found: dict) -> Markup:
    said = _begin(found["experience"], EXCERPT)
    why = f"Q {found['q']:.2f}, similarity {found['sim']:.2f}"
    return fill("<div>{}</div>", f"{found['id']} ({why}): {said}")


def _one_task(outcome: dict) -> Markup:
    """Show what the task was shown whose success changed most often."""
    by_task: dict[str, list[dict]] = {}
    for row in outcome["rows"]:
        by_task.setdefault(row["id"], []).append(row)

    def changes(rows: list[dict]) -> int:
        return sum(a["success"] != b["success"] for a, b in pairwise(rows))

    rows = max(by_task.values(), key=changes, default=[])
    lines = [
        [str(row["epoch"] + 1), "solved" if row["success"] else "failed",
         joined(_shown(found) for found in row["shown"]) or "nothing",
         _begin(row["action"], 2 * EXCERPT)]
        for row in rows
    ]  # fmt: skip
    head = ["epoch", "it was", "shown", "last action"]
    return as_table(f"{outcome['arm']}, task {rows[0]['id']}", head, lines) if rows else ""


def read_summary(folder: Path) -> dict:
    """Return a stream's summary."""
    return from_json((folder / "summary.json").read_text(encoding="utf-8"))
