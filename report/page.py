"""What a person looks at: report.html of a run.

Holds: `write_report` and the parts of the page but the transcripts. Leaves out: where the numbers come from (report/summary.py), plots (report/plots.py),
single trajectories (report/transcripts.py), which of them are kept (report/runlog.py, eval.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: cli.py.

Questions, documents and answers are somebody else's text: all of it is escaped. The page loads nothing, and its policy forbids scripts in
case one got through after all.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from math import isfinite
from pathlib import Path
from statistics import fmean

from config.errors import UserError
from report import plots
from report.published import TABLES, TEN, Published
from report.records import CELL, is_record
from report.rows import FATES, Cell
from report.summary import DEPTHS, METRICS, cells, csv_of, markdown_of, overlaps, write_text
from report.transcripts import esc, transcript

# ---------------------------------------------------------------- the page's parts


def _choose(records: Sequence[dict], most: int) -> list[dict]:
    """At most so many, in their order: of each agent and kind the last right and the last wrong one, then those before, and so on."""
    turns: dict[tuple, count] = {}
    ranks = []
    for i, record in reversed(
        [*enumerate(records)]
    ):  # the last ones: an evaluation goes on to longer documents
        cell = record.get("cell", {})
        kind = cell.get("agent"), cell.get("question", record["kind"]), record["reward"] > 0
        ranks.append((next(turns.setdefault(kind, count())), i))
    return [records[i] for i in sorted(i for _, i in sorted(ranks)[:most])]


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the first two columns name the row."""
    body = "".join(
        f"<tr><th>{'</th><th>'.join(row[:2])}</th><td>{'</td><td>'.join(row[2:])}</td></tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    return f'<div class="scroll"><table><caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _pivots(summary: dict, show: Callable[[Cell], str]) -> str:
    """One table a question: a line per agent and temperature, a column per length; `show` gives the HTML of a cell that is there."""
    asked = [cell for cell, _ in cells(summary)]
    tables = []
    for question in dict.fromkeys(cell.question for cell in asked):
        here = [cell for cell in asked if cell.question == question]
        lengths = sorted({cell.length for cell in here})
        rows: dict[tuple[str, str], dict[int, str]] = {}
        for cell in here:
            rows.setdefault((cell.agent, cell.temperature), {})[cell.length] = show(cell)
        body = [
            [esc(agent), esc(temperature), *(row.get(n, "") for n in lengths)]
            for (agent, temperature), row in rows.items()
        ]
        tables.append(
            _table(
                f"{esc(question)}, by {esc(summary['unit'])}",
                ["agent", "temp.", *(f"{n:,}" for n in lengths)],
                body,
            )
        )
    return "".join(tables)


def _matches(table: Published, summary: dict, question: str) -> bool:
    """Whether a published table is about this kind of question, as it is named before a comma. Files that do not name their dataset
    are taken for HotpotQA, which MemAgent's are; evidence that was placed makes another question."""
    name, _, more = question.partition(",")
    if summary["unit"] == "documents" and name == "questions":
        name = "hotpotqa"
    return (
        table.unit == summary["unit"]
        and table.question == name
        and not more.startswith(" evidence")
    )


def published_of(summary: dict, question: str) -> list[Published]:
    return [table for table in TABLES if _matches(table, summary, question)]


def _published(summary: dict) -> str:
    """Our agents beside each published table, by the table's own metric; published rows are grey."""
    parts = []
    means = _ten(summary)
    for table in TABLES:
        metric = "sub_em_upstream" if "sub_em_upstream" in table.metric else "sub_em"
        ours: dict[tuple[str, str], dict[int, float]] = {}
        for cell, share in cells(summary, metric):
            if _matches(table, summary, cell.question):
                ours.setdefault((f"{cell.agent}, {cell.question}", cell.temperature), {})[
                    cell.length
                ] = share
        if table.unit == summary["unit"] and table.question.startswith("mean of ten"):
            ours = means
        if ours:
            lengths = sorted({n for by in (*table.rows.values(), *ours.values()) for n in by})
            rows = [([esc(agent), esc(t)], by) for (agent, t), by in ours.items()]
            rows += [
                (
                    [
                        f'<span class="pub">{esc(model)}</span>',
                        '<span class="pub">published</span>',
                    ],
                    by,
                )
                for model, by in table.rows.items()
            ]
            body = [
                [*name, *(f"{by[n]:.3f}" if n in by else "" for n in lengths)] for name, by in rows
            ]
            source = f"{esc(table.source)}{' (second-hand, as others quote it)' if table.second_hand else ''}"
            caption = f"{esc(table.question)}, {esc(table.metric)}, by {table.unit}; grey: {source}: other model, other questions"
            parts.append(_table(caption, ["", "temp.", *(f"{n:,}" for n in lengths)], body))
    return "".join(parts)


def _ten(summary: dict) -> dict[tuple[str, str], dict[int, float]]:
    """(agent, temperature) -> length -> the mean of RULER's ten tasks of the paper's average, where all ten are there."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for cell, leaf in cells(summary):
        if summary["unit"] == "tokens" and cell.question in TEN:
            found.setdefault((cell.agent, cell.temperature), {}).setdefault(cell.length, []).append(
                leaf["mean"]
            )
    means = {
        who: {n: fmean(shares) for n, shares in by.items() if len(shares) == len(TEN)}
        for who, by in found.items()
    }
    return {who: by for who, by in means.items() if by}


def _shade(share: float | None, note: str = "") -> str:
    """A cell of a heat map: darker is more."""
    if share is None:
        return ""
    small = f"<small>{note}</small>" if note else ""
    return f'<span class="heat" style="--v:{100 * min(1.0, max(0.0, share)):.0f}%">{share:.2f}</span>{small}'


def _heatmaps(summary: dict) -> str:
    """RULER: one map per agent and temperature, tasks down, lengths across, the mean of the ten tasks of the paper's average below."""
    maps: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for cell, leaf in cells(summary):
        maps.setdefault((cell.agent, cell.temperature), {}).setdefault(cell.question, {})[
            cell.length
        ] = leaf["mean"]
    parts, means = [], _ten(summary)
    for (agent, temperature), tasks in maps.items():
        lengths = sorted({n for by in tasks.values() for n in by})
        body = [
            [esc(task), "", *(_shade(by.get(n)) for n in lengths)] for task, by in tasks.items()
        ]
        if ten := means.get((agent, temperature)):
            body.append(["mean of the paper's ten", "", *(_shade(ten.get(n)) for n in lengths)])
        parts.append(
            _table(
                f"{esc(agent)}, temperature {esc(temperature)}, by tokens",
                ["task", "", *(f"{n:,}" for n in lengths)],
                body,
            )
        )
    return "".join(parts)


def _depths(summary: dict) -> str:
    """One table a kind of question: agents down, tenths of the document across, all lengths together."""
    sums: dict[str, dict[tuple[str, str], list[list[float]]]] = {}
    for cell, leaf in cells(summary, "depths"):
        bins = sums.setdefault(cell.question, {}).setdefault(
            (cell.agent, cell.temperature), [[0, 0.0] for _ in leaf["n"]]
        )
        for one, n, mean in zip(bins, leaf["n"], leaf["mean"], strict=True):
            one[0] += n
            one[1] += n * (mean or 0.0)
    parts = []
    for question, by_agent in sums.items():
        head = ["agent", "temp.", *(f"{10 * k}–{10 * k + 10} %" for k in range(DEPTHS))]
        body = [
            [esc(agent), esc(t), *(_shade(total / n, f"n {n}") if n else "" for n, total in bins)]
            for (agent, t), bins in by_agent.items()
        ]
        parts.append(
            _table(f"{esc(question)}, by where the first piece of evidence stands", head, body)
        )
    return "".join(parts)


def _fates(summary: dict) -> str:
    names = [name for name in FATES if name != "unknown"]
    body = []
    for cell, leaf in cells(summary, "fates"):
        left = " ".join(str(n) for n in leaf["left"]) if any(leaf["left"]) else ""
        body.append(
            [
                f"{esc(cell.agent)}, {esc(cell.question)}",
                f"{cell.length:,}",
                esc(cell.temperature),
                str(leaf["wrong"]),
                *(str(leaf[name]) for name in names),
                str(leaf["unknown"]),
                left,
            ]
        )
    head = [
        "agent, question",
        esc(summary["unit"]),
        "temp.",
        "wrong",
        *names,
        "not looked for",
        "lost in tenth 1 … 10",
    ]
    return _table("trajectories that were not wholly right", head, body)


def _counted(summary: dict) -> str:
    """Return a table of what agents counted (`Agent.rates` and `splits`): one line a cell."""
    rated = list(cells(summary, "rates"))
    columns = list(dict.fromkeys(column for _, rates in rated for column in rates))
    splits = dict(cells(summary, "splits"))
    names = list(dict.fromkeys(name for split in splits.values() for name in split))
    body = []
    for cell, rates in rated:
        split = splits.get(cell, {})
        body.append(
            [f"{esc(cell.agent)}, {esc(cell.question)}", f"{cell.length:,}", esc(cell.temperature)]
            + ["" if rates.get(column) is None else f"{rates[column]:.2f}" for column in columns]
            + [
                _side(split.get(name, {}).get(side))
                for name in names
                for side in ("with", "without")
            ]
        )
    head = ["agent, question", esc(summary["unit"]), "temp."]
    head += [esc(column.replace("_", " ")) for column in columns]
    head += [
        f"{summary['metric']} {side} {esc(name)}" for name in names for side in ("with", "without")
    ]
    return _table("what agents count of their turns", head, body)


def _side(part: dict | None) -> str:
    return f"{part['mean']:.2f}<small>n {part['n']:,}</small>" if part and part["n"] else ""


def _pairs(summary: dict) -> str:
    lengths = sorted({p["length"] for p in summary["paired"]})
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for p in summary["paired"]:
        sure = ' class="sure"' if p["low"] > 0 or p["high"] < 0 else ""
        shown = f"<span{sure}>{p['mean']:+.3f}</span><small>{p['low']:+.2f} … {p['high']:+.2f}, n {p['n']:,}</small>"
        rows.setdefault((f"{p['a']} − {p['b']}", p["question"], p["temperature"]), {})[
            p["length"]
        ] = shown
    body = [[*map(esc, name), *(by.get(n, "") for n in lengths)] for name, by in rows.items()]
    return _table(
        f"difference, by {esc(summary['unit'])}",
        ["", "question", "temp.", *(f"{n:,}" for n in lengths)],
        body,
    )


def _seeds(summary: dict) -> str:
    lengths = sorted({p["length"] for p in summary["seeds"]})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for p in summary["seeds"]:
        who = "all" if p["seed"] is None else f"seed {p['seed']}"
        shown = f"{p['mean']:+.3f}<small>{p['low']:+.2f} … {p['high']:+.2f}, n {p['n']:,}</small>"
        rows.setdefault((who, p["temperature"]), {})[p["length"]] = shown
    body = [[*map(esc, name), *(by.get(n, "") for n in lengths)] for name, by in rows.items()]
    return _table(
        f"difference, by {esc(summary['unit'])}", ["", "temp.", *(f"{n:,}" for n in lengths)], body
    )


def _warnings(summary: dict) -> str:
    """On questions that a policy was trained on; and, where none is, that they were looked for."""
    parts = [f'<p class="warning">{esc(sentence)}</p>' for sentence in overlaps(summary)]
    for policy in summary.get("trained_on", ()):
        asked = sum(n["asked"] for n in policy["questions"].values())
        if not any(n["seen"] for n in policy["questions"].values()):
            parts.append(
                f'<p class="note">None of the {asked:,} questions is among the {policy["known"]:,} that {esc(policy["policy"])} was trained on.</p>'
            )
    return "".join(parts)


def headline(summary: dict, trained_on: int | None = None) -> str:
    """The result in one sentence: the agent named trained (else the first) at its longest documents, the others at the same.

    trained_on: the longest documents of training, in the summary's unit.
    """
    leaves = dict(cells(summary))
    if not leaves and "reward" in summary:
        return f"{summary['steps']} training steps; the mean reward of the last ones is {summary['reward']:.2f}. Nothing has been evaluated yet."
    if not leaves:
        return "Nothing has been evaluated yet."
    agents = list(dict.fromkeys(cell.agent for cell in leaves))
    lead = "trained" if "trained" in agents else agents[0]
    own = [cell for cell in leaves if cell.agent == lead]
    # what the others were asked too, if there is such a question
    compared = {cell.question for cell in leaves if cell.agent != lead} & {
        cell.question for cell in own
    }
    places = []  # the lead's longest cell of each kind of question, sampled where it was
    for question in dict.fromkeys(cell.question for cell in own):
        if compared and question not in compared:
            continue
        asked = [cell for cell in own if cell.question == question]
        temperature = (
            "1.0" if any(cell.temperature == "1.0" for cell in asked) else asked[0].temperature
        )
        places.append(
            max(
                (cell for cell in asked if cell.temperature == temperature),
                key=lambda cell: cell.length,
            )
        )
    first = [leaves[cell] for cell in places]
    says = " and ".join(
        f"{100 * v['mean']:.3g} % [{100 * v['low']:.0f}, {100 * v['high']:.0f}] of the {cell.question}"
        for cell, v in zip(places, first, strict=True)
    )
    if len(first) > 3:  # RULER's tasks
        says = f"{100 * fmean(leaf['mean'] for leaf in first):.3g} % of {len(first)} kinds of"
    others = ""
    for agent in agents:
        if agent != lead:
            theirs = [leaves.get(replace(cell, agent=agent)) for cell in places]
            if len(first) > 3:
                others += f"; {agent}: " + (
                    f"{100 * fmean(leaf['mean'] for leaf in theirs):.3g} %"
                    if all(theirs)
                    else "not asked all of it"
                )
                continue
            others += f"; {agent}: " + " and ".join(
                f"{100 * leaf['mean']:.3g} %" if leaf else "not asked" for leaf in theirs
            )

    def joined(values: Iterable) -> str:
        return " and ".join(dict.fromkeys(map(str, values)))

    seen = (
        f", training saw at most {trained_on:,} {summary['unit']}"
        if trained_on and lead == "trained"
        else ""
    )
    return (
        f"At {joined(f'{cell.length:,}' for cell in places)} {summary['unit']} the {lead} agent answers {says} questions right{others} "
        f"({'' if len(first) > 3 else '95 % intervals in brackets, '}n = {joined(v['n'] for v in first)} questions, temperature {joined(cell.temperature for cell in places)}{seen})."
    )


# ---------------------------------------------------------------- the page

CSS = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c1e21;--muted:#5b6169;--line:#c9cdd2;--box:#f5f6f7;--in:#d8f3dc;--out:#fde2e1;
--c0:#0072b2;--c1:#d55e00;--c2:#007a5a;--c3:#a8487e;--c4:#8a6d00;--c5:#2b8cc4}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--ink:#e4e6e9;--muted:#9aa1aa;--line:#454b54;--box:#1f2227;--in:#1d4a2c;--out:#5a2527;
--c0:#56b4e9;--c1:#f0883e;--c2:#2fc495;--c3:#e59cc4;--c4:#f0e442;--c5:#8ab4f8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:76rem;font:1rem/1.5 system-ui,sans-serif;background:var(--page);color:var(--ink)}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{margin:1rem 0 .2rem;font-size:.9rem;color:var(--muted)}
.headline{font-size:1.15rem;max-width:48rem}.note,.gap,small,caption{color:var(--muted)}.note{font-size:.9rem;max-width:48rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;max-width:38rem}svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto;margin:.75rem 0;border:1px solid var(--line);border-radius:.4rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
caption{text-align:left;padding:.4rem .6rem}th,td{padding:.3rem .6rem;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{color:var(--muted);font-weight:600}th:nth-child(-n+2){text-align:left;font-weight:600}td small{display:block}
.box{border:1px solid var(--line);border-radius:.4rem;margin:.5rem 0;padding:.5rem .75rem}summary{cursor:pointer;overflow-wrap:anywhere}
.section,.memory,pre,dd{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;unicode-bidi:isolate}
.section{max-height:12rem;overflow-y:auto;color:var(--muted);font-size:.9rem}
.recall{margin:.2rem 0;padding:.2rem .6rem;border-left:3px solid var(--muted);overflow-wrap:anywhere;unicode-bidi:isolate}.recall b{font-size:.8rem;color:var(--muted);margin-right:.3rem}
.memory{background:var(--box);padding:.4rem .6rem;border-radius:.3rem}.memory b{font-size:.8rem;color:var(--muted);margin-right:.3rem}
ins{background:var(--in)}del{background:var(--out)}.tag{font-size:.8rem;padding:.05rem .4rem;border:1px solid var(--line);border-radius:.3rem}
.pub{color:var(--muted);font-weight:400}.sure{font-weight:700}
.heat{display:block;padding:.1rem .3rem;border-radius:.2rem;background:color-mix(in srgb,var(--c2) calc(var(--v)*.6),transparent)}
.warning{background:var(--out);padding:.4rem .6rem;border-radius:.3rem;max-width:48rem;font-weight:600}
.good{background:var(--in)}.bad{background:var(--out)}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .8rem}dt{color:var(--muted)}
dd{margin:0}pre{font-size:.85rem}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _load(folder: Path) -> tuple[dict, list[dict]]:
    """The folder's summary and transcripts; of transcripts only those of the evaluation that the summary is of, once each."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_bytes())
        if "accuracy" in summary:
            raise UserError(
                f"{path} was written by an earlier version: run the same eval or train --resume again, which writes it anew."
            )
        summary["unit"], list(cells(summary))  # a KeyError if this is no summary
        path = folder / "transcripts.jsonl"
        lines = (
            path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        )  # what follows the last newline is torn
        records = {(r.get("settings"), r["id"], r["sample"]): r for r in map(json.loads, lines)}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Evaluate first.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another kind: {error!r}.") from error
    for name, empty in (("metric", "reward"), ("paired", [])):
        summary.setdefault(name, empty)  # a training's has none of them
    known = summary.get("settings", [])
    kept = [r for (settings, _, _), r in records.items() if settings is None or settings in known]
    return summary, [r for r in kept if is_record(r) and {*r.get("cell", CELL)} >= CELL]


def _training(folder: Path, lengths: Sequence[int]) -> list[tuple[int, float, str]]:
    """(step, reward, sections of the tasks or "") from metrics.csv; lines without step or reward, as a torn last one, are passed over.

    lengths: sections by level, for files that name the level alone.
    """
    path = folder / "metrics.csv"
    found = []
    for row in csv.DictReader(
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        try:
            step, reward, level = int(row["step"]), float(row["reward"]), int(row.get("level") or 0)
        except (KeyError, TypeError, ValueError):
            continue
        if isfinite(reward):
            found.append(
                (
                    step,
                    reward,
                    row.get("sections") or (str(lengths[level]) if level < len(lengths) else ""),
                )
            )
    return found


def _validated(folder: Path) -> list[tuple[int, float]]:
    """(step, score) from validation.csv; torn or foreign lines are passed over."""
    path, found = folder / "validation.csv", []
    for row in csv.DictReader(
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        try:
            found.append((int(row["step"]), float(row["score"])))
        except (KeyError, TypeError, ValueError):
            continue
    return [(step, score) for step, score in found if isfinite(score)]


def _lengths(config: str) -> list[int]:
    """Sections of the tasks of each level of training on generated English, from config.yaml's text; [] if it does not say."""
    import yaml

    try:
        run = yaml.safe_load(config)["run"]
        return [int(n) for n in run["lengths"]] if run["data"] == "world" else []
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return []


def write_report(folder: Path, title: str = "") -> Path:
    """Write folder/report.html from summary.json and, where they are there, metrics.csv, config.yaml and transcripts.jsonl.

    One file that needs no other and no network. No summary, or one that cannot be read, is a `UserError`.
    """
    summary, records = _load(folder)
    config = folder / "config.yaml"
    settings = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    training = _training(folder, _lengths(settings))
    seen = [int(length) for _, _, length in training if length.isdigit()]
    leaves, unit = dict(cells(summary)), summary["unit"]

    def has(name: str) -> bool:
        return any(name in leaf for leaf in leaves.values())

    def share(cell: Cell) -> str:
        leaf = leaves[cell]
        return f"<b>{leaf['mean']:.3f}</b><small>{leaf['low']:.2f}–{leaf['high']:.2f}, n {leaf['n']:,}</small>"

    def cost(cell: Cell) -> str:
        read, written, seconds = (
            leaves[cell][metric] for metric in ("tokens_read", "tokens_written", "seconds")
        )
        right = leaves[cell]["mean"]
        each = (
            f"{(read + written) / right:,.0f} tokens, {seconds / right:,.2f} s a right answer"
            if right
            else "no right answer"
        )
        return f"{read:,.0f} read<small>{written:,.0f} written</small><small>{seconds:,.2f} s</small><small>{each}</small>"

    parts = []

    def section(name: str, body: str, note: str = "") -> None:
        parts.append(
            f"<section><h2>{name}</h2>{f'<p class=note>{note}</p>' if note else ''}{body}</section>"
        )

    several = len({cell.agent for cell in leaves}) > 1
    if leaves:
        section(
            f"Accuracy by {esc(unit)}",
            f'<div class="plots">{plots.accuracy(summary, lambda q: published_of(summary, q))}</div>',
            f"{esc(summary['metric'])}. Bars are 95 % intervals (bootstrap over questions; Wilson's where all agree). Failures and empty answers "
            "count as wrong.",
        )
    if leaves and unit == "tokens":
        section(
            "RULER, task by length",
            _heatmaps(summary),
            "The share of the answers asked for that were given; questions (qa) by sub_em.",
        )
    if training:
        section(
            "Reward by training step",
            f'<div class="plots">{plots.reward(training, _validated(folder))}</div>',
            "Dotted lines: training goes on to longer documents." if len(set(seen)) > 1 else "",
        )
    if leaves:
        section("Every cell", _pivots(summary, share), "Mean, 95 % interval, number of questions.")
    if summary["paired"] and several:
        section(
            "Paired differences",
            _pairs(summary),
            "The trained agent, or the first, against every other one, and each against itself before training, "
            "question by question; bold where the 95 % interval leaves out 0.",
        )
    if summary.get("seeds"):
        section(
            "Seed by seed",
            _seeds(summary),
            "The first agent minus the second on the same questions; all: the seeds of a question averaged first.",
        )
    if published := _published(summary):
        section(
            "Beside published numbers",
            published,
            "Published: other model, other questions. Marks to look at, no lines of the same experiment.",
        )
    if has("depths"):
        section(
            "By depth of the evidence",
            _depths(summary),
            "All lengths together; of several pieces of evidence the first one read counts.",
        )
    if has("occupancy"):
        section("Memory along the document", f'<div class="plots">{plots.occupancy(summary)}</div>')
    if has("fates"):
        section(
            "What was lost where",
            _fates(summary),
            "Where an accepted answer stands, as whole words: in no section that was read (not shown), in a section and never in the memory "
            "(never kept), in the memory and not at its end (lost), at its end and answered wrong all the same (kept). Yes and no "
            "are not looked for.",
        )
    if has("rates"):
        section(
            "What the agents did",
            _counted(summary),
            "Shares and means that each agent counts of its own turns (Agent.rates), over all trajectories of "
            "a cell; with and without: the trajectories that have any of a count, and those that have none.",
        )
    if records:
        section(
            "Transcripts",
            "".join(transcript(record, n == 0) for n, record in enumerate(_choose(records, 10))),
            "What was read, and what became of the memory: <ins>came in</ins>, <del>went out</del>.",
        )
    if leaves:
        section(
            "Cost of one question",
            _pivots(summary, cost),
            "Mean tokens read and written, and seconds from first prompt to answer with others in flight beside it.",
        )
    if any(tokens for _, tokens in cells(summary, "document_tokens")):
        section(
            "Growth with the document",
            f'<div class="plots">{plots.growth(summary)}</div>',
            "Seconds of one question with the others in flight beside it; memory of the process, the documents in flight among it. With "
            "--in-flight 1 it is one document's.",
        )
    if leaves:
        shown = [
            metric
            for metric in METRICS
            if metric not in ("tokens_read", "tokens_written", "seconds") and has(metric)
        ]
        rows = [
            [
                esc(c.question),
                esc(c.agent),
                esc(c.temperature),
                f"{c.length:,}",
                *(f"{leaf.get(m, 0.0):.3f}" for m in shown),
            ]
            for c, leaf in leaves.items()
        ]
        note = "failed, empty: shares of the trajectories (empty: no answer in the form that was asked for, whatever else was said); memory_cut, memory_empty: turns of a trajectory; cut: tokens never read"
        section(
            "All metrics",
            f"<details><summary>table</summary>{_table(note, ['question', 'agent', 'temp.', esc(unit), *shown], rows)}</details>",
        )
        section(
            "For papers",
            f"<details><summary>Markdown</summary><pre>{esc(markdown_of(summary))}</pre></details>",
            "table.md and table.csv beside this page.",
        )
        write_text(folder / "table.md", markdown_of(summary))
        write_text(folder / "table.csv", csv_of(summary))
    if settings:
        section(
            "Settings",
            f"<details><summary>config.yaml</summary><pre>{esc(settings)}</pre></details>",
        )
    title = esc(title or folder.resolve().name)
    said = esc(headline(summary, max(seen) if seen and unit == "sections" else None)).replace(
        " %", "&nbsp;%"
    )
    write_text(
        folder / "report.html",
        f'''<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>
<body><main><h1>{title}</h1><p class="headline">{said}</p>{_warnings(summary)}{"".join(parts)}</main></body></html>
''',
    )
    return folder / "report.html"
