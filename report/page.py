"""Write report.html: one file that needs no other and no network.

A run's folder (report/folder.py) becomes numbers, plots and readings, and page.html.j2 says where
they stand. Questions, documents and answers are foreign text: the template escapes every `str`, and
`clean` takes out control characters; only report/plots.py and `mark` make Markup.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from config.errors import Unshown, clean, clip, one_line
from report.folder import Run, read_run
from report.machine import foot, note_machine
from report.plots import plot
from report.summary import (
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
    TROUBLES,
    amiss,
    draw_training,
    gain_in_words,
    numbers,
    troubles,
    whole_rows,
)
from report.transcripts import MOST, end_of, facts_of, origin, runs_of, steps_of, verdict
from report.words import lead_of, nothing_right, reader, reads_all
from tasks.words import METRICS, title_of

HERE = Path(__file__).parent
SHOWN, CHARACTERS = 400, 4_000_000  # readings of a page at most, and characters of their sections
OF_A_SECTION = 3000  # characters of a section in the list
ORDER = ("wrong", "partly right", "failed", "right")  # of the list
PLACE = ("question", "temperature", "length")  # of a cell, for all agents


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
    environment.filters |= {"percent": percent, "bounds": bounds, "count": count}
    environment.filters |= {"clip": clip, "mark": mark}
    return environment


def render(title: str, **parts: object) -> str:
    """Return a page. parts: what the template names; what is missing is left out.

    The page's policy lets one script run, by its digest: report/page.js, which knows no text.
    """
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    parts |= {"title": title, "script": Markup(script), "digest": digest, "style": Markup(style)}
    return _environment().get_template("page.html.j2").render(parts).lstrip()


def mark(text: str, passages: Iterable[str]) -> Markup:
    """Return a text whose passages are marked, whatever stands between their words.

    >>> mark("Built by <Anna>\\nHolm.", ["anna> holm"])
    Markup('Built by &lt;<mark>Anna&gt;\\nHolm</mark>.')
    """
    parts = (r"\s+".join(map(re.escape, clean(passage).split())) for passage in passages)
    if not (pattern := "|".join(filter(None, parts))):
        return escape(clean(text))
    pieces = re.split(f"({pattern})", clean(text), flags=re.IGNORECASE)
    found = Markup("<mark>{}</mark>")
    return Markup("").join(found.format(x) if k % 2 else x for k, x in enumerate(pieces))


# ---------------------------------------------------------------- readings


def reading_of(record: dict, most: int | None = MOST, passages: Sequence[str] = ()) -> dict:
    """Return what the template shows of a record. most: of sections that are shown, and their texts
    are clipped; None: all of all. passages: marked in them."""
    steps = steps_of(record)
    return {
        "verdict": verdict(record),
        "title": record["question"] or record["id"],
        "where": origin(record),
        "n": len(steps),
        "runs": [*runs_of(steps, most)],
        "end": end_of(record),
        "facts": facts_of(record),
        "characters": OF_A_SECTION if most else 1 << 60,
        "passages": passages,
    }


def _list_readings(records: Sequence[dict], lead: str) -> tuple[list[dict], str]:
    """Return the readings of a page, the leading agent's first, of these what went wrong; and how
    many are left out."""

    def place(record: dict) -> tuple:
        word, theirs = verdict(record), record.get("cell", {}).get("agent", lead) != lead
        return theirs, ORDER.index(word) if word in ORDER else len(ORDER)

    size, shown = 0, []
    for record in sorted(records, key=place)[:SHOWN]:
        size += sum(min(OF_A_SECTION, len(turn["section"])) for turn in record["turns"])
        if size > CHARACTERS and shown:
            break
        shown.append(reading_of(record))
    n, left = len(records), len(records) - len(shown)
    more = f"{left:,} of {n:,} readings are left out here: `show` prints them." if left else ""
    return shown, more


def _steps_apart(first: Sequence[dict], last: Sequence[dict]) -> dict[str, dict]:
    """Return a reading of the first step of a training and one of its last, by headings."""
    ends = {f"Step {record['step']:,}": record for record in (*first[:1], *last[:1])}
    return ends if len(ends) > 1 else {}


def _before_and_after(records: Sequence[dict], lead: str) -> dict[str, dict]:
    """Return a document read before training and after it, by headings: the longest that only the
    trained policy has read rightly, else the longest; {} without such a pair."""
    asked: dict[tuple, dict[str, dict]] = {}
    for record in records:
        if cell := record.get("cell"):  # one of an old version has none
            place = record["id"], record["sample"], *(cell[name] for name in PLACE)
            asked.setdefault(place, {})[cell["agent"]] = record
    pairs = []
    for same in asked.values():
        before, after = same.get(f"{lead}@untrained") or same.get("untrained"), same.get(lead)
        if before and after:
            was, became = (verdict(record) == "right" for record in (before, after))
            fitness = became and not was, became, after["cell"]["length"]
            pairs.append((fitness, {"Untrained": before, "Trained": after}))
    return max(pairs, key=itemgetter(0), default=((), {}))[1]


# ---------------------------------------------------------------- an evaluation


def _at_one_temperature(summary: dict) -> list[dict]:
    """Return the cells, of each agent and kind of question at 1.0, or else at the first."""
    at: dict[tuple, str] = {}
    for record in summary["cells"]:
        asked = record["agent"], record["question"]
        if asked not in at or record["temperature"] == "1.0":
            at[asked] = record["temperature"]
    return [r for r in summary["cells"] if r["temperature"] == at[r["agent"], r["question"]]]


def figures_of(summary: dict, lead: str, agents: Sequence[str] = ()) -> list[dict]:
    """Return the leading agent at its longest documents and others on the same: {value, label,
    note}. agents: the others; (): the same one before training, and another way of reading."""
    records = _at_one_temperature(summary)
    places = {(r["agent"], r["question"], r["length"]) for r in records}
    question = next(r["question"] for r in records if r["agent"] == lead)
    lengths = [r["length"] for r in records if (r["agent"], r["question"]) == (lead, question)]
    shared = [n for n in lengths if all((agent, question, n) in places for agent in agents)]
    length = max(shared or lengths)
    same = {r["agent"]: r for r in records if (r["question"], r["length"]) == (question, length)}
    if not agents:
        before = [f"{lead}@untrained", "untrained"]
        others = sorted((n for n in same if n not in (lead, *before)), key=reads_all, reverse=True)
        agents = [*[name for name in before if name in same][:1], *others[:1]]
    place = f"{title_of(question)}, {length:,} {summary['unit']}"
    named = (name for name in (lead, *agents) if name in same)
    return [figure_of(reader(name), same[name], place) for name in named]


def figure_of(label: str, record: Mapping[str, float], place: str) -> dict[str, str]:
    """Return what the template shows large: a share with what it is of, and its interval."""
    note = f"{bounds(record)} %, {count(record)}; {place}"
    return {"value": f"{percent(record['mean'])} %", "label": label, "note": note}


def draw_accuracy(summary: dict, lead: str, agents: Sequence[str] = ()) -> list[Markup]:
    """Draw right answers by length, a plot for each kind of question. agents: draw these and the
    leading one alone."""
    kinds: dict[str, dict[str, list[tuple]]] = {}
    for r in sorted(_at_one_temperature(summary), key=lambda r: r["agent"] != lead):
        if not agents or r["agent"] in (lead, *agents):
            line = kinds.setdefault(r["question"], {}).setdefault(reader(r["agent"]), [])
            line.append((r["length"], r["mean"], r["low"], r["high"]))
    # of an evaluation the reward is the task's own score
    is_share = summary["metric"] in ("reward", "sub_em")
    axis = "right answers" if is_share else METRICS.get(summary["metric"], "right answers")
    return [
        plot(lines, title_of(kind), summary["unit"], axis, share=True, lengths=True)
        for kind, lines in kinds.items()
    ]


def table_of(caption: str, head: Sequence[str], rows: Mapping[tuple, dict], sign: str = "") -> dict:
    """Return what the template shows as a table. rows: names -> column -> a text, or of a length a
    record with n, mean, low and high. sign: "+" of differences."""
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    lengths = all(isinstance(name, int) for name in columns)
    columns = sorted(columns) if lengths else [*columns]
    return {"caption": caption, "head": head, "columns": columns, "rows": rows, "sign": sign}


def _differences(summary: dict) -> list[dict]:
    """Return the tables of paired differences, the comparison with itself before training first."""

    def place(pair: dict) -> int:
        name, _, weights = pair["b"].partition("@")
        if name.startswith("untrained") or (name, weights) == (pair["a"], "untrained"):
            return 0
        return 2 - (not weights and reads_all(name))

    tables: dict[str, dict[tuple, dict[int, dict]]] = {}
    for pair in sorted(summary["paired"], key=place):
        caption = f"{reader(pair['a'])} minus {reader(pair['b'])}, by {summary['unit']}"
        names = title_of(pair["question"]), pair["temperature"]
        tables.setdefault(caption, {}).setdefault(names, {})[pair["length"]] = pair
    return [table_of(caption, ["", "temp."], rows, "+") for caption, rows in tables.items()]


COSTS = {  # field of a cell's record -> column
    "n": "n", "tokens_read": "tokens read", "tokens_written": "written", "seconds": "seconds",
    "model_calls": "model calls", "mib": "MiB at most", "failed": "failed", "unformed": "no form",
}  # fmt: skip


def _costs(summary: dict) -> dict:
    """Return the table of what a question costs, and what its agent counts: a row for each cell."""
    rows = {}
    for record in summary["cells"]:
        agent = f"{labelled(summary, record['agent'])}, {record['question']}"
        means = {name: record.get(field) for field, name in COSTS.items()}
        means |= {name.replace("_", " "): x for name, x in record.get("rates", {}).items()}
        rows[agent, f"{record['length']:,}", record["temperature"]] = {
            name: f"{x:,.4g}" if x < 1e4 else f"{x:,.0f}"
            for name, x in means.items()
            if x is not None
        }
    return table_of("Means of a question", ["agent, question", summary["unit"], "temp."], rows)


def tables_of(summary: dict) -> dict:
    """Return the parts of a page that are the tables of an evaluation."""
    tables = [
        table_of(f"{title_of(kind)}, by {summary['unit']}", ["agent", "temp."], rows)
        for kind, rows in by_length(summary).items()
    ]
    words = measured(summary)
    return {
        "note": words[0].upper() + words[1:],
        "tables": tables + _differences(summary),
        "details": [_costs(summary)],
    }


# ---------------------------------------------------------------- pages


def page_of(run: Run, title: str = "") -> str:
    """Return the page of an evaluation or of a training."""
    summary, steps = run.summary, whole_rows(run.folder / "metrics.csv")
    lead = lead_of(record["agent"] for record in summary["cells"])
    measure = "loss" if "loss" in summary else "reward"
    warnings = [*(f"In all {what}." for what in amiss(summary)), *overlaps(summary)]
    warnings += [TROUBLES[kind] for kind in troubles(steps)]
    curves = draw_training(run.folder, steps, measure)
    parts: dict[str, object] = {}
    if summary["cells"]:
        if not run.status and (why := nothing_right(summary, run.rows)):
            warnings.append(why)
        parts = tables_of(summary) | {"figures": figures_of(summary, lead)}
        curves = draw_accuracy(summary, lead) + curves
    elif gain := summary.get("gain"):
        parts["lead"] = gain_in_words(gain)
        parts["figures"] = [
            {"value": f"{gain[which]:.2f}", "label": f"mean reward, {which} {gain['steps']} steps"}
            for which in ("first", "last")
        ]
    done = ("read", "written")
    spent = {name: sum(row.get(f"tokens_{name}", 0) for row in run.rows) for name in done}
    if not run.rows:
        spent = {n: sum(x for _, x in numbers(steps, f"{n}_tokens")) for n in done}
    scores = {(r["settings"], r["id"], r["sample"]): r[summary["metric"]] for r in run.rows}
    records = [
        r | {"score": scores.get((r.get("settings"), r["id"], r["sample"]))} for r in run.records
    ]
    readings, more = _list_readings(records, lead)
    pair = _before_and_after(records, lead) if lead else _steps_apart(run.first, records)
    return render(
        title or run.title,
        status=run.status,
        warnings=warnings,
        plots=curves[:1],
        more_plots=curves[1:],
        pair={heading: reading_of(record) for heading, record in pair.items()},
        readings=readings,
        more=more,
        settings=run.config,
        foot=foot(run.folder, spent, len(run.rows)),
        **parts,
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
        return f"The page could not be written ({clip(clean(one_line(error)), 300)})."
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

    record: of `report.records`. answer: a line of it; found: where it is. facts: label -> text.
    passages: marked in the sections.
    """
    page = render(
        record["question"],
        lead=answer[:1].upper() + answer[1:],
        found=found,
        facts={name: fact for name, fact in facts.items() if fact},
        whole=reading_of(record, most=None, passages=passages),
    )
    write_text(folder / "report.html", page)
    return folder / "report.html"
