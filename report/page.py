"""Write report.html, the page on which a person looks at a run.

Holds: `write_report`, the three parts of the page: Result, Readings, Details; `try_report`,
`finish_report`; `write_reading`, the page of one question. Leaves out: the numbers
(report/summary.py), plots (report/plots.py), HTML and its escaping (report/markup.py), single
readings (report/transcripts.py), which of them are kept (report/runlog.py, eval.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: cli.py.

What one folds out is one small function that returns a `Section`; `_details` lists them in the
order of the page.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from config.errors import Unshown, clean, clip
from report import plots
from report.counted import pooled, total
from report.folder import Run, read_run, settings_of
from report.machine import foot, note_machine
from report.markup import (
    Markup,
    Section,
    Text,
    bounds,
    by_length,
    count,
    figures,
    fill,
    heat,
    html,
    joined,
    macro,
    page,
    parts,
    percent,
    table,
)
from report.plots import FEW
from report.rows import FATES, Cell
from report.summary import (
    DEPTHS,
    cells,
    csv_of,
    labelled,
    markdown_of,
    measured,
    overlaps,
    with_pooled,
    write_text,
)
from report.training import Training, amiss, numbers, read_training, steps_section
from report.transcripts import examples, n_sections, trace, transcript
from report.viewer import viewer_section
from report.words import lead_of, nothing_right, reader, reads_all
from tasks.words import title_of

FIRST = 2  # plots in the first part; those of other kinds of questions are details
OF_TRAINING = 4  # readings of the last recorded step, beside the examples
EXAMPLE_STEPS, EXAMPLE_CHARACTERS = 4, 400  # sections of an example, characters of each

# below the first plots
HOW_TO_READ = (
    "Bars are 95 % intervals (Student's t over questions, or over documents that several share; "
    "Wilson's where all agree). Failures, and answers that are empty or without the form that was "
    f"asked for, count as wrong. What fewer than {FEW} questions say is faint. Sampled at "
    "temperature 1 where that was asked, else at the first temperature."
)
CHANGES = Markup("<ins>added</ins>, <del>removed</del>.")  # of a memory

# ---------------------------------------------------------------- tables of cells


def _faint(cell: Markup, n: int) -> Markup:
    """Draw what few questions say faint."""
    return fill('<span class="few">{}</span>', cell) if n < FEW else cell


def _noted(text: str, note: str) -> Text:
    """Return a cell with a note in small letters."""
    return text + fill("<small>{}</small>", note) if note else text


def _tables(
    head: Sequence[str], entries: Iterable[tuple[str, tuple[Text, ...], int, Text]]
) -> Markup:
    """Return a table for each caption, with a row for each leading cells and a column per length.

    head: names of the leading columns. entries: (caption, leading cells, length, cell).
    """
    tables: dict[str, dict[tuple[Text, ...], dict[int, Text]]] = {}
    for caption, first, length, cell in entries:
        tables.setdefault(caption, {}).setdefault(first, {})[length] = cell
    return joined(
        table(caption, head, rows.items(), by_length(rows.items()))
        for caption, rows in tables.items()
    )


def _place(cell: Cell) -> list[str]:
    """Return the cells that name a cell of the evaluation in a table with a line for each."""
    return [f"{cell.agent}, {cell.question}", f"{cell.length:,}", cell.temperature]


def every_cell(summary: dict) -> Section:
    entries = []
    for cell, record in cells(with_pooled(summary)):
        label, words = labelled(summary, cell.agent), reader(cell.agent)
        names = _noted(label, words if words != cell.agent else ""), cell.temperature
        note = f"{bounds(record)}, {count(record)}"
        shown = _noted(fill("<b>{}</b>", percent(record["mean"])), note)
        caption = f"{title_of(cell.question)}, by {summary['unit']}"
        entries.append((caption, names, cell.length, _faint(shown, record["n"])))
    return Section(
        "Accuracy in numbers",
        _tables(["agent", "temp."], entries),
        f"{measured(summary).capitalize()} in per cent, 95 % interval, number of questions; faint: "
        f"fewer than {FEW}.",
    )


# ---------------------------------------------------------------- differences


def _difference(pair: dict) -> Markup:
    """Return the cell of a difference, bold where its interval excludes 0."""
    note = f"{bounds(pair, ' … ', '+')}, {count(pair)}"
    sure = pair["low"] > 0 or pair["high"] < 0
    return _faint(macro("difference", percent(pair["mean"], "+"), note, sure), pair["n"])


def _matters(pair: dict) -> int:
    """Return the place of a comparison: first with itself before training, then with an agent that
    reads all at once."""
    name, _, weights = pair["b"].partition("@")
    if name.startswith("untrained") or (name, weights) == (pair["a"], "untrained"):
        return 0
    return 2 - (not weights and reads_all(name))


def comparisons(summary: dict, note: str = "") -> Section:
    entries = []
    for pair in sorted(summary["paired"], key=_matters):
        words = reader(pair["b"])
        against = f"{pair['a']} minus {pair['b']}" + f" ({words})" * (words != pair["b"])
        first = title_of(pair["question"]), pair["temperature"]
        caption = f"{against}, by {summary['unit']}"
        entries.append((caption, first, pair["length"], _difference(pair)))
    return Section(
        "Differences between agents",
        _tables(["", "temp."], entries),
        note
        or "The trained agent, or the first, against every other one, and each against itself "
        "before training: differences in percentage points on the same questions, with 95 % "
        "intervals; bold where these exclude 0.",
    )


def _seeds(summary: dict) -> Section:
    entries = []
    for pair in summary.get("seeds", ()):
        seed = "all" if pair["seed"] is None else f"seed {pair['seed']}"
        first = pair.get("against", "the second"), seed, pair["temperature"]
        caption = f"difference, by {summary['unit']}"
        entries.append((caption, first, pair["length"], _difference(pair)))
    return Section(
        "Seed by seed",
        _tables(["minus", "", "temp."], entries),
        "The first agent minus another on the same questions; "
        "all: the seeds of a question averaged first.",
    )


# ---------------------------------------------------------------- where answers are lost


def _depths(summary: dict) -> Section:
    """Show a table per kind of question: agents by tenths of the document, lengths pooled."""
    tables: dict[str, dict[tuple[str, str], list[list[tuple]]]] = {}
    for cell, depths in cells(summary, "depths"):
        rows = tables.setdefault(cell.question, {})
        tenths = [*zip(depths["n"], depths["mean"], strict=True)]
        rows.setdefault((cell.agent, cell.temperature), []).append(tenths)

    def pooled_tenths(lengths: Sequence[Sequence[tuple[int, float | None]]]) -> dict[str, Text]:
        shown = {}
        for k, tenth in enumerate(zip(*lengths, strict=True)):
            n = sum(n for n, _ in tenth)
            right = sum(n * (mean or 0.0) for n, mean in tenth)
            cell = _faint(heat(right / n, f"n {n}"), n) if n else ""
            shown[f"{10 * k}–{10 * k + 100 // DEPTHS} %"] = cell
        return shown

    return Section(
        "By depth of the evidence",
        joined(
            table(
                f"{title_of(question)}, by where the first piece of evidence stands",
                ["agent", "temp."],
                [(name, pooled_tenths(lengths)) for name, lengths in rows.items()],
            )
            for question, rows in tables.items()
        ),
        "All lengths together; of several pieces of evidence the first one read counts.",
    )


def _fates(summary: dict) -> Section:
    rows = []
    for cell, fates in cells(summary, "fates"):
        counts = {name: str(fates[name]) for name in ("wrong", *FATES)}
        counts["not looked for"] = counts.pop("unknown")
        counts["lost in tenth 1 … 10"] = " ".join(map(str, fates["left"])) * any(fates["left"])
        rows.append((_place(cell), counts))
    return Section(
        "What was lost where",
        table(
            "readings that were not fully right",
            ["agent, question", summary["unit"], "temp."],
            rows,
        ),
        "Where an accepted answer stands, as whole words: in no section that was read (not shown), "
        "in a section and never in the memory (never kept), in the memory and not at its end "
        "(lost), all that it ever held still there and more was needed (kept in part), at its end "
        "and answered wrong all the same (kept). Yes and no are not looked for.",
    )


# ---------------------------------------------------------------- what agents count


def _counted(summary: dict) -> Section:
    """Return what agents count of their turns: `rates` and `tallies`."""
    rates = [
        (_place(cell), {n.replace("_", " "): f"{x:.3g}" for n, x in rates.items() if x is not None})
        for cell, rates in cells(summary, "rates")
    ]
    head, tallies = ["agent, question", summary["unit"], "temp."], _tallies(summary)
    notes = (
        (rates, "Shares and means that each agent counts of its own turns (Agent.rates), over all "
         "readings of a cell."),
        (tallies, "Lists of counts (an agent's tallies): how many an episode has on average, and "
         "their share of the line, the most frequent first. An episode is a reading that has read "
         "its document itself."),
    )  # fmt: skip
    return Section(
        "What the agents did",
        table("what agents count of their turns", head, rates) + tallies,
        " ".join(note for shown, note in notes if shown) + _about_ends(summary),
    )


def _ends(summary: dict) -> list[tuple[str, dict]]:
    """Return (name, record) of the first and the last step that a training has recorded."""
    ends = zip(("at first", "at last"), summary.get("ends", ()), strict=False)
    return [(f"{name}, step {end['step']:,}", end) for name, end in ends]


def _about_ends(summary: dict) -> str:
    """Say what steps these are; "" without any."""
    levels = {end.get("level") for _, end in _ends(summary)}
    longer = " Training went on to longer documents between the two." * (len(levels) > 1)
    return (
        " The first and the last step of which readings were recorded; those of step 0 were "
        f"sampled before training.{longer}"
        if levels
        else ""
    )


def _tallies(summary: dict) -> Markup:
    """Return a table for each title of an agent's `tallies`: counts by episode, their shares."""
    head = ["agent, question", summary["unit"], "temp.", "episodes"]
    records = [(_place(cell), record) for cell, record in cells(summary)]
    if ends := _ends(summary):
        head, records = ["", "", "episodes"], [([name, ""], end) for name, end in ends]
    tables: dict[str, list[tuple[list[str], int, dict]]] = {}
    for first, record in records:
        for title, tally in record.get("tallies", {}).items():
            tables.setdefault(title, []).append((first, record["episodes"], tally))

    def per_episode(tally: Mapping[str, float], name: str, episodes: int) -> Text:
        share = 100 * tally.get(name, 0) / sum(tally.values())
        return _noted(f"{tally.get(name, 0) / episodes:,.2f}", f"{share:.0f} %")

    made = []
    for title, rows in tables.items():
        names = [name for name, _ in Counter(total(tally for *_, tally in rows)).most_common()]
        body = [
            (
                [*first, f"{episodes:,}"],
                {name.replace("_", " "): per_episode(tally, name, episodes) for name in names},
            )
            for first, episodes, tally in rows
        ]
        made.append(table(title, head, body))
    return joined(made)


def _curves(summary: dict) -> Section:
    """Draw an agent's `curves`: at one temperature and the longest length, or a training's ends."""
    lines = [(name, end["curves"]) for name, end in _ends(summary) if "curves" in end]
    note = f"Means over the episodes that got so far.{_about_ends(summary)}"
    if found := dict(cells(summary, "curves")):
        temperatures = list(dict.fromkeys(cell.temperature for cell in found))
        at = "1.0" if "1.0" in temperatures else temperatures[0], max(c.length for c in found)
        lines = [(c.agent, x) for c, x in found.items() if (c.temperature, c.length) == at]
        note += f" {at[1]:,} {summary['unit']}, temperature {at[0]}."
    panels: dict[str, dict[str, list[dict]]] = {}  # title -> line -> of each kind of question
    for name, curves in lines:
        for title, curve in curves.items():
            panels.setdefault(title, {}).setdefault(name, []).append(curve)
    points = {
        title: {name: pooled(kinds) for name, kinds in panel.items()}
        for title, panel in panels.items()
    }
    return Section("Along an episode", figures(plots.curves(points)), note)


# ---------------------------------------------------------------- cost

# column -> (metric, its digits)
COSTS = {
    "n": ("n", 0),
    "tokens read": ("tokens_read", 0),
    "written": ("tokens_written", 0),
    "model calls": ("model_calls", 1),
    "seconds": ("seconds", 2),
    "MiB at most": ("mib", 0),
}


def _cost(summary: dict) -> Section:
    """Show a line for each cell; rows of an earlier version lack some costs."""
    rows = [
        (
            _place(cell),
            {name: f"{record[m]:,.{k}f}" for name, (m, k) in COSTS.items() if m in record},
        )
        for cell, record in cells(summary)
    ]
    return Section(
        "Cost of one question",
        table("means of a question", ["agent, question", summary["unit"], "temp."], rows),
        "Tokens read and written, calls of the model, and seconds from first prompt to answer with "
        "others in flight beside it; the memory of the whole process.",
    )


# ---------------------------------------------------------------- the page


def _warnings(run: Run) -> Markup:
    """Return warnings of what was not learnt from, of an evaluation without a right answer and of
    questions that a policy was trained on, or a note that there are none of these."""
    summary = run.summary
    sentences = [*(f"In all {what}." for what in amiss(summary)), *overlaps(summary)]
    sentences += filter(None, [nothing_right(summary, run.rows) if not run.status else ""])
    parts = [fill('<p class="warning">{}</p>', sentence) for sentence in sentences]
    for policy in summary.get("trained_on", ()):
        questions = policy["questions"].values()
        if not any(n["seen"] for n in questions):
            sentence = (
                f"None of the {sum(n['asked'] for n in questions):,} questions is among the "
                f"{policy['known']:,} that {policy['policy']} was trained on."
            )
            parts.append(fill('<p class="note">{}</p>', sentence))
    return joined(parts)


def _details(run: Run, training: Training, panels: Sequence[Markup]) -> Iterator[Section]:
    """Yield what one folds out; what has no body is left out. panels: of the rarer questions."""
    summary = run.summary
    yield Section("Other kinds of questions", figures(joined(panels)))
    if summary["cells"]:
        name = f"{training.measure.capitalize()} by training step"
        yield Section(name, figures(training.drawn()), training.note)
    yield steps_section(training)
    yield _seeds(summary)
    yield _depths(summary)
    yield _fates(summary)
    yield Section("Memory along the document", figures(plots.occupancy(summary)))
    yield _curves(summary)
    yield _counted(summary)
    yield _cost(summary)
    yield Section("Settings", fill("<pre>{}</pre>", run.config) if run.config else "")


def _sections(run: Run, training: Training, listed: Section) -> Iterator[Section]:
    """Yield the three parts of the page. listed: the readings of an evaluation."""
    summary = run.summary
    panels = [*plots.accuracy(summary).values()]
    first, note = (panels[:FIRST], HOW_TO_READ) if panels else ([training.drawn()], training.note)
    tables = parts([every_cell(summary), comparisons(summary)])
    how = fill('<p class="note">{}</p>', note) if any(first) else ""
    yield Section("Result", joined([figures(joined(first)), how, tables]))
    shown = examples(run.records, lead_of(cell for cell, _ in cells(summary)))
    rest = [r for r in run.records if r not in shown and not r["sample"] and not summary["cells"]]
    told = joined(
        transcript(record, record in shown, EXAMPLE_STEPS, EXAMPLE_CHARACTERS)
        for record in (*shown, *rest[:OF_TRAINING])
    )
    body = joined([fill('<div class="examples">{}</div>', told) if told else "", listed.body])
    about = fill("What was read, and what became of the memory: {}", CHANGES) if told else ""
    yield Section("Readings", body, joined([about, " " * bool(told), listed.note]))
    yield Section("Details", parts(_details(run, training, panels[FIRST:])))


def write_report(folder: Path, title: str = "") -> Path:
    """Write folder/report.html from what the folder holds; return its path.

    One file that needs no other and no network; with an evaluation, table.md and table.csv beside
    it. UserError as `read_run`.
    """
    note_machine(folder)
    return rewrite_report(folder, title)


def try_report(folder: Path) -> str:
    """Write the page of this process's run; return why it could not be, which is never worth a
    run."""
    try:
        write_report(folder)
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


def rewrite_report(folder: Path, title: str = "") -> Path:
    """Write the page anew from outside, finished or not, as `write_report`."""
    run = read_run(folder)
    summary = run.summary
    training = read_training(
        folder, settings_of(run.config), "loss" if "loss" in summary else "reward"
    )
    listed, script = viewer_section(run.rows, summary, run.records)
    lead = macro("lead", run.status, "", _warnings(run))
    if summary["cells"]:
        write_text(folder / "table.md", markdown_of(summary))
        write_text(folder / "table.csv", csv_of(summary))
    end = foot(folder, _spent(run, training), len(run.rows))
    sections = _sections(run, training, listed)
    html = page(title or run.title, lead, sections, script, end)
    write_text(folder / "report.html", html)
    return folder / "report.html"


def _spent(run: Run, training: Training) -> dict[str, float]:
    """Return the tokens of all readings, else of all steps, by what was done with them."""
    done = ("read", "written")
    if run.rows:
        return {name: sum(row.get(f"tokens_{name}", 0) for row in run.rows) for name in done}
    return {name: sum(n for _, n in numbers(training.rows, f"{name}_tokens")) for name in done}


def write_reading(
    folder: Path,
    record: dict,
    facts: Mapping[str, str],
    answer: str = "",
    found: str = "",
) -> Path:
    """Write folder/report.html about one question and its whole trace; return its path.

    record: of `report.records`. answer, and found: where it is, in words; both above all else.
    facts: label -> text, between them and the trace.
    """
    nodes = trace(record, most=None, characters=1 << 60)
    note = fill("Every section, and what became of the memory: {}", CHANGES)
    read = Section(
        "What was read",
        joined(map(html, nodes[:-1] if answer else nodes)),  # the last one says how it ended
        note if n_sections(record) else "",
    )
    lead = macro("about", answer, found, {k: fact for k, fact in facts.items() if fact})
    write_text(folder / "report.html", page(record["question"], lead, [read]))
    return folder / "report.html"
