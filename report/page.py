"""Write report.html: one file that needs no other and no network.

A run's folder (report/folder.py) becomes numbers, plots and readings, and page.html.j2 says where
they stand. Questions, documents and answers are foreign text: the template escapes every `str`, and
`clean` takes out control characters; only report/plots.py and `mark` make Markup.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from config.errors import Unshown, clean, clip
from report.evaluation import key_of
from report.folder import Run, read_run
from report.machine import foot, note_machine
from report.plots import plot
from report.rows import Cell
from report.summary import (
    FEW,
    bounds,
    by_length,
    count,
    labelled,
    markdown_of,
    measured,
    overlaps,
    percent,
    write_text,
)
from report.training import (
    SERIES_OF_STEPS,
    TROUBLES,
    Training,
    amiss,
    numbers,
    read_training,
    troubles,
)
from report.transcripts import end_of, origin, runs_of, steps_of, verdict
from report.words import lead_of, nothing_right, reader, reads_all, temperatures_of
from tasks.words import METRICS, title_of

HERE = Path(__file__).parent
SHOWN, CHARACTERS = 400, 4_000_000  # readings of a page at most, and characters of their sections
OF_A_SECTION = 3000  # characters of a section in the list
ORDER = ("wrong", "partly right", "failed", "right")  # of the list


# ---------------------------------------------------------------- the template


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "bounds": bounds, "count": count, "clip": clip}
    return environment


def render(title: str, **parts: object) -> str:
    """Return a page. parts: what the template names; what is missing is left out.

    The page's policy lets one script run, by its digest: report/page.js, which knows no text.
    """
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(parts, title=title, script=Markup(script), digest=digest, style=style)
        .lstrip()
    )


def mark(text: str, passages: Iterable[str]) -> Markup:
    """Return a text whose passages are marked, whatever stands between their words.

    >>> mark("Built by <Anna>\\nHolm.", ["anna> holm"])
    Markup('Built by &lt;<mark>Anna&gt;\\nHolm</mark>.')
    """
    parts = (r"\s+".join(map(re.escape, clean(passage).split())) for passage in passages)
    if not (pattern := "|".join(part for part in parts if part)):
        return escape(clean(text))
    pieces = re.split(f"({pattern})", clean(text), flags=re.IGNORECASE)
    marks = (
        Markup("<mark>{}</mark>").format(x) if k % 2 else escape(x) for k, x in enumerate(pieces)
    )
    return Markup("").join(marks)


# ---------------------------------------------------------------- readings


def reading_of(
    record: dict, score: float | None = None, most: int | None = 24, passages: Sequence[str] = ()
) -> dict:
    """Return what the template shows of a record. score, most: as in `verdict` and `runs_of`."""
    steps = steps_of(record)
    runs = [*runs_of(steps, most)]
    clipped = OF_A_SECTION if most else 1 << 60
    shown = [step for note, run in runs for step in run if not note or not most]
    return {
        "verdict": verdict(record, score),
        "title": record["question"] or record["id"],
        "where": origin(record),
        "n": len(steps),
        "runs": runs,
        "end": end_of(record),
        "sections": {
            step.number: mark(clip(step.section.strip(), clipped), passages) for step in shown
        },
        "at_once": mark(clip(end_of(record).section, clipped), passages),
    }


def _scores_of(run: Run) -> Callable[[dict], float | None]:
    """Return the function that looks up the score of a record's row; None: it has none."""
    scores = {key_of(row)[:3]: row[run.summary["metric"]] for row in run.rows}
    return lambda record: scores.get((record.get("settings"), record["id"], record["sample"]))


def _listed(run: Run, lead: str) -> tuple[list[dict], str]:
    """Return the readings of a page, the leading agent's first, of these what went wrong; and how
    many are left out."""
    score_of = _scores_of(run)

    def place(record: dict) -> tuple:
        word = verdict(record, score_of(record))
        theirs = record.get("cell", {}).get("agent", lead) != lead
        return theirs, ORDER.index(word) if word in ORDER else len(ORDER)

    records, size, shown = sorted(run.records, key=place), 0, []
    for record in records[:SHOWN]:
        size += sum(min(OF_A_SECTION, len(turn["section"])) for turn in record["turns"])
        if size > CHARACTERS and shown:
            break
        shown.append(reading_of(record, score_of(record)))
    n, left = len(run.records), len(run.records) - len(shown)
    more = f"{left:,} of {n:,} readings are left out here: `show` prints them." if left else ""
    return shown, more


def _side_by_side(run: Run, lead: str) -> list[tuple[str, dict]]:
    """Return a document read before training and after it: (heading, reading) of both, the longest
    that only the trained policy has read rightly, else the longest; [] without such a pair.

    Of a training the documents differ: it is a reading of the first step recorded and of the last.
    """
    if not run.summary["cells"]:
        ends = [*run.first[:1], *run.records[:1]]
        if len({record["step"] for record in ends}) < 2:
            return []
        return [(f"Step {record['step']:,}", reading_of(record)) for record in ends]
    sides = {lead: "after", f"{lead}@untrained": "before", "untrained": "before"}
    found: dict[tuple, dict[str, dict]] = {}
    for record in (record for record in run.records if "cell" in record):  # not of an old version
        cell = record["cell"]
        key = record["id"], record["sample"], cell["temperature"], cell["length"], cell["question"]
        found.setdefault(key, {})[sides.get(cell["agent"], "")] = record
    score_of = _scores_of(run)

    def fitness(pair: dict[str, dict]) -> tuple:
        before, after = (score_of(pair[which]) or 0.0 for which in ("before", "after"))
        return after >= 1 > before, after >= 1, pair["after"]["cell"]["length"]

    pairs = [pair for pair in found.values() if {"before", "after"} <= pair.keys()]
    best = max(pairs, key=fitness, default={})
    return [
        (heading, reading_of(best[which], score_of(best[which])))
        for heading, which in (("Untrained", "before"), ("Trained", "after"))
        if best
    ]


# ---------------------------------------------------------------- an evaluation


def _shown(summary: dict) -> list[dict]:
    """Return the records of the cells that are shown where one temperature is: of each agent and
    kind of question 1.0, or else the first."""
    at = temperatures_of(map(Cell.from_row, summary["cells"]))
    return [r for r in summary["cells"] if r["temperature"] == at[r["agent"], r["question"]]]


def _three_figures(summary: dict, lead: str) -> list[dict]:
    """Return the leading agent at its longest documents, the same before training, and another way
    of reading: {value, label, note}."""
    records = _shown(summary)
    question = next((r["question"] for r in records if r["agent"] == lead), "")
    mine = [r for r in records if (r["agent"], r["question"]) == (lead, question)]
    length = max((r["length"] for r in mine), default=0)
    same = {r["agent"]: r for r in records if (r["question"], r["length"]) == (question, length)}
    before = next((name for name in (f"{lead}@untrained", "untrained") if name in same), "")
    others = sorted((n for n in same if n not in (lead, before)), key=lambda n: not reads_all(n))
    place = f"{title_of(question)}, {length:,} {summary['unit']}"
    return [
        {
            "value": f"{percent(same[name]['mean'])} %",
            "label": reader(name),
            "note": f"{bounds(same[name])} %, {count(same[name])}; {place}",
        }
        for name in (lead, before, *others[:1])
        if name in same
    ]


def _accuracy_plots(summary: dict, lead: str) -> list[Markup]:
    """Draw right answers by length, a plot for each kind of question; faint is what few say."""
    kinds: dict[str, dict[str, list[dict]]] = {}
    for record in _shown(summary):
        lines = kinds.setdefault(record["question"], {})
        lines.setdefault(reader(record["agent"]), []).append(record)
    # of an evaluation the reward is the task's own score
    other = summary["metric"] not in ("reward", "sub_em")
    measure = METRICS.get(summary["metric"], "right answers") if other else "right answers"
    return [
        plot(
            {
                name: [(r["length"], r["mean"], r["low"], r["high"]) for r in records]
                for name, records in sorted(lines.items(), key=lambda x: x[0] != reader(lead))
            },
            title_of(kind), summary["unit"], measure, share=True, lengths=True,
            faint=[name for name, records in lines.items() if all(r["n"] < FEW for r in records)],
        )
        for kind, lines in kinds.items()
    ]  # fmt: skip


def _by_length(summary: dict) -> list[dict]:
    """Return the tables of right answers: a caption, lengths, rows of names and records."""
    return [
        _table(f"{title_of(kind)}, by {summary['unit']}", ["agent", "temp."], rows)
        for kind, rows in by_length(summary).items()
    ]


def _differences(summary: dict) -> list[dict]:
    """Return the tables of paired differences, the comparison with itself before training first."""

    def matters(pair: dict) -> int:
        name, _, weights = pair["b"].partition("@")
        if name.startswith("untrained") or (name, weights) == (pair["a"], "untrained"):
            return 0
        return 2 - (not weights and reads_all(name))

    tables: dict[str, dict[tuple, dict[int, dict]]] = {}
    for pair in sorted(summary["paired"], key=matters):
        caption = f"{reader(pair['a'])} minus {reader(pair['b'])}, by {summary['unit']}"
        names = title_of(pair["question"]), pair["temperature"]
        tables.setdefault(caption, {}).setdefault(names, {})[pair["length"]] = pair
    return [_table(caption, ["", "temp."], rows) for caption, rows in tables.items()]


def _table(caption: str, head: list[str], rows: dict[tuple, dict[int, dict]]) -> dict:
    lengths = sorted({length for row in rows.values() for length in row})
    return {"caption": caption, "head": head, "lengths": lengths, "rows": rows}


COSTS = {  # column -> (field of a cell's record, its digits)
    "n": ("n", 0), "tokens read": ("tokens_read", 0), "written": ("tokens_written", 0),
    "model calls": ("model_calls", 1), "seconds": ("seconds", 2), "MiB at most": ("mib", 0),
    "failed": ("failed", 2), "no form": ("unformed", 2),
}  # fmt: skip


def _costs(summary: dict) -> dict:
    """Return the table of what a question costs, and what its agent counts: a row for each cell."""
    rows, columns = [], {}
    for record in summary["cells"]:
        row = {
            name: f"{record[field]:,.{k}f}" for name, (field, k) in COSTS.items() if field in record
        }
        rates = record.get("rates", {}).items()
        row |= {name.replace("_", " "): f"{x:.3g}" for name, x in rates if x is not None}
        columns |= dict.fromkeys(row)
        agent = f"{labelled(summary, record['agent'])}, {record['question']}"
        rows.append(((agent, f"{record['length']:,}", record["temperature"]), row))
    head = ["agent, question", summary["unit"], "temp."]
    return {"caption": "Means of a question", "head": head, "columns": columns, "rows": rows}


# ---------------------------------------------------------------- a training


def _training_figures(summary: dict) -> tuple[list[dict], str]:
    """Return the mean reward of the first steps and of the last, and their difference in a
    sentence."""
    gain = summary.get("gain")
    if not gain:
        return [], ""
    n, change = gain["steps"], gain["last"] - gain["first"]
    figures = [
        {"value": f"{gain[which]:.2f}", "label": f"mean reward, {which} {n} steps", "note": ""}
        for which in ("first", "last")
    ]
    sentence = f"From the first {n} steps to the last {n} the reward changed by {change:+.2f}"
    if gain["low"] is not None:
        sentence += f" (95 % interval {gain['low']:+.2f} to {gain['high']:+.2f}, over steps)"
    return figures, f"{sentence}."


def _training_plots(training: Training, measure: str) -> tuple[list[Markup], list[Markup]]:
    """Draw a training: its measure with its band, then what else metrics.csv says."""
    if not training.values:
        return [], []
    steps, values = zip(*training.values, strict=True)
    window = max(5, len(steps) // 15)
    means = [fmean(values[max(0, k + 1 - window) : k + 1]) for k in range(len(values))]
    # of shares the band ends at 0 and 1
    least, most = (0, 1) if all(0 <= v <= 1 for v in values) else (-inf, inf)
    each = [
        (k, v, max(least, v - 2 * e), min(most, v + 2 * e)) if isfinite(e) else (k, v, v, v)
        for (k, v), e in zip(training.values, training.errors, strict=True)
    ]
    lines = {
        "one step": each,
        f"mean of {window}": [*zip(steps, means, strict=True)],
        "validation": training.validation,
    }
    first = plot(lines, measure.capitalize(), "training step", f"mean {measure}", band=True)
    rest = [
        plot({name: numbers(training.rows, column) for name, column in columns.items()},
             title, "training step")
        for title, columns in SERIES_OF_STEPS.items()
    ]  # fmt: skip
    return [first], [drawn for drawn in rest if drawn]


# ---------------------------------------------------------------- pages


def page_of(run: Run, title: str = "", notes: Sequence[str] = (), lead: str = "") -> str:
    """Return the page of an evaluation or of a training. notes, lead: the caller's warnings and
    sentences."""
    summary, leader = run.summary, lead_of(map(Cell.from_row, run.summary["cells"]))
    warnings = [*notes, *(f"In all {what}." for what in amiss(summary)), *overlaps(summary)]
    measure = "loss" if "loss" in summary else "reward"
    training = read_training(run.folder, measure)
    warnings += [TROUBLES[kind] for kind in troubles(training.rows)]
    drawn, more_plots = _training_plots(training, measure)
    figures, sentence = _training_figures(summary)
    if summary["cells"]:
        warnings += filter(None, [nothing_right(summary, run.rows) if not run.status else ""])
        more_plots = [*drawn, *more_plots]
        drawn, figures, sentence = [], _three_figures(summary, leader), lead
        drawn, rest = (plots := _accuracy_plots(summary, leader))[:1], plots[1:]
        more_plots = rest + more_plots
    readings, more = _listed(run, leader)
    done = ("read", "written")
    spent = {name: sum(row.get(f"tokens_{name}", 0) for row in run.rows) for name in done}
    if not run.rows:
        spent = {n: sum(x for _, x in numbers(training.rows, f"{n}_tokens")) for n in done}
    return render(
        title or run.title,
        status=run.status,
        warnings=warnings,
        figures=figures,
        lead=sentence,
        plots=drawn,
        pair=_side_by_side(run, leader),
        readings=readings,
        more=more,
        tables=_by_length(summary) if summary["cells"] else "",
        differences=_differences(summary),
        details={"plots": more_plots, "costs": _costs(summary) if summary["cells"] else ""},
        note=measured(summary) if summary["cells"] else "",
        settings=run.config,
        foot=foot(run.folder, spent, len(run.rows)),
    )


def write_report(
    folder: Path, title: str = "", note: bool = True, running: bool | None = None
) -> Path:
    """Write folder/report.html from what the folder holds, and with an evaluation table.md; return
    its path. UserError as `read_run`.

    note: that this process fills the folder, on this machine. running: as in `read_run`.
    """
    if note:
        note_machine(folder)
    run = read_run(folder, running)
    if run.summary["cells"]:
        write_text(folder / "table.md", markdown_of(run.summary))
    write_text(folder / "report.html", page_of(run, title))
    return folder / "report.html"


def try_report(folder: Path, running: bool = False) -> str:
    """Write the page of this process's run, which goes on or ends; return why that failed, which
    is never worth a run."""
    try:
        write_report(folder, running=running)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # while a library was being loaded
            raise KeyboardInterrupt from None
        why = " ".join(clean(f"{type(error).__name__}: {error}").split()).rstrip(".")
        return f"The page could not be written ({clip(why, 300)})."
    return ""


def finish_report(folder: Path, kept: str) -> None:
    """Write the page of a run that is over. Unshown: it could not be; kept: what is, where."""
    if failure := try_report(folder):
        again = f"python cli.py report {shlex.quote(str(folder))}"
        raise Unshown(f"{failure[:-1]}. {kept}; once that is mended, {again} writes it.")


def write_reading(
    folder: Path,
    record: dict,
    facts: Mapping[str, str],
    answer: str = "",
    found: str = "",
    passages: Sequence[str] = (),
) -> Path:
    """Write folder/report.html about one question and its whole trace; return its path.

    record: of `report.records`. answer, and found: where it is, in words. facts: label -> text.
    passages: marked in the sections.
    """
    page = render(
        record["question"],
        lead=f"Answer: {answer}" if answer else "",
        found=found,
        facts={name: fact for name, fact in facts.items() if fact},
        whole=reading_of(record, most=None, passages=passages),
    )
    write_text(folder / "report.html", page)
    return folder / "report.html"
