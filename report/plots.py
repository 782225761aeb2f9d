"""Draw plots as SVG for a page: no size, no colours and no script of their own.

Holds: `accuracy`, `reward`, `occupancy`, `curves`, `growth`. Leaves out: the page and its tables
(report/page.py), numbers (report/summary.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

Each returns HTML, one <figure> a panel, "" where there is nothing to draw; `accuracy` a list of
these. What fewer than `FEW` questions say is drawn faint.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil, floor, isfinite, log10
from statistics import fmean

from config.errors import clean
from report.headline import reader, temperatures_of
from report.markup import Markup, fill, joined
from report.published import Published
from report.rows import Cell
from report.summary import cells
from tasks.words import METRICS, title_of

# placeholder colours, replaced by CSS variables, so that one picture serves light and dark pages
INK, LINE, PAGE = "#0a0b0c", "#0a0b0d", "#0a0b0e"
SERIES = [f"#0a0c{i:02x}" for i in range(6)]
VARIABLES = {INK: "currentColor", LINE: "var(--line)", PAGE: "var(--page)"} | {
    c: f"var(--c{i})" for i, c in enumerate(SERIES)
}
MARKERS = "os^DvPX*"
FEW = 8  # questions: what fewer say is faint
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "memagent",
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "xtick.color": INK,
    "axes.labelcolor": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}

Points = Sequence[tuple[float, ...]]
Entries = list[tuple[object, str]]  # of a legend: (handle, label)

# ---------------------------------------------------------------- parts of a plot


def _svg(draw: Callable, name: str, label: str) -> Markup:
    """Return what `draw(axes)` draws as an <svg> element without a size of its own.

    name: prefix of all ids, so that several pictures fit into one page. label: for screen readers.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.0), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>| xmlns(:xlink)?=\"[^\"]*\"",
        "",
        svg[svg.index("<svg") :],
        flags=re.S,
    )
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg.replace("xlink:href", "href"))
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = re.search('viewBox="[^"]*"', svg)
    content = svg[svg.index(">") + 1 :]
    opening = fill('<svg {} role="img" aria-label="{}">', Markup(box and box[0]), label)
    return opening + Markup(content)  # matplotlib has escaped the texts


def _figures(panels: Iterable[Markup]) -> Markup:
    return joined(fill("<figure>{}</figure>", panel) for panel in panels)


def _sample(**style):
    """Return a line that stands for others in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _title(text: str) -> str:
    """Return a title in two lines at most: more would squeeze the plot."""
    return "\n".join(textwrap.wrap(clean(text), 44, max_lines=2, placeholder=" …"))


ROOM = 68  # characters in all columns of a legend, about six of them for each handle


def _legend(axes, entries: Entries, columns: int) -> None:
    """Draw a legend below the axes, in fewer columns where the labels are long."""
    longest = max(len(line) for _, label in entries for line in label.split("\n"))
    columns = max(1, min(columns, ROOM // (longest + 6)))
    handles, labels = [handle for handle, _ in entries], [label for _, label in entries]
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _line_style(k: int, greedy: bool = False) -> dict:
    """Return the style of the k-th line: greedy ones are dashed and hollow."""
    colour = SERIES[k % len(SERIES)]
    return {
        "color": colour,
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": "--" if greedy else "-",
        "markerfacecolor": PAGE if greedy else colour,
    }


def _draw_lines(
    axes, lines: Mapping[str, Points], names: Sequence[str], label: Callable = clean, **style
) -> Entries:
    """Draw lines by name, with bands where points have them; return their legend entries.

    names: of all lines, also those without points, whose place decides the colour.
    """
    entries: Entries = []
    for name, points in lines.items():
        if points:
            look = _line_style(names.index(name)) | style
            x, y, *band = zip(*points, strict=True)
            (line,) = axes.plot(x, y, **look)
            if band:
                axes.fill_between(x, *band, color=look["color"], alpha=0.06, linewidth=0)
            entries.append((line, label(name)))
    return entries


def _reader(agent: str) -> str:
    return clean(reader(agent))[:40]


GREEDY = {"color": INK, "linestyle": "--", "marker": "o", "markerfacecolor": PAGE}

# ---------------------------------------------------------------- accuracy by length


def accuracy(
    summary: dict, published: Callable[[str], Sequence[Published]] = lambda question: ()
) -> dict[str, Markup]:
    """Draw a panel per kind of question: accuracy by length, with 95 % intervals.

    A line per agent, at its `temperatures_of`; of one agent alone a second one, greedy and dashed,
    if it has both. Published tables as thin grey lines, within the range of our lengths.
    """
    records = dict(cells(summary))
    colours = {agent: i for i, agent in enumerate(dict.fromkeys(cell.agent for cell in records))}
    panels: dict[str, Markup] = {}
    for question in dict.fromkeys(cell.question for cell in records):
        lines = _accuracy_lines(records, question, colours)
        lengths = sorted({n for by_length in lines.values() for n in by_length})
        marks = _published_lines(published(question), lengths)

        def draw(axes, question=question, lines=lines, lengths=lengths, marks=marks):
            for k, ((agent, temperature), by_length) in enumerate(lines.items()):
                # a little to the side, so that the intervals do not hide each other
                shift = 1.03 ** (k - (len(lines) - 1) / 2)
                _draw_intervals(axes, by_length, shift, colours[agent], temperature == "0.0")
            for points in marks:
                style = dict(color=INK, alpha=0.22, linewidth=0.8, marker=".", markersize=3)
                axes.plot(*zip(*points, strict=True), **style, zorder=0)
            _length_axis(axes, lengths)
            axes.set(
                ylim=(-0.02, 1.02),
                xlabel=clean(summary["unit"]),
                ylabel=METRICS.get(summary["metric"], clean(summary["metric"])),
                title=_title(title_of(question)),
            )
            entries = _accuracy_entries(lines, colours, bool(marks))
            _legend(axes, entries, columns=2 if marks else 3)

        label = f"{title_of(question)}: accuracy by {summary['unit']}"
        panels[question] = _figures([_svg(draw, f"accuracy{len(panels)}", label)])
    return panels


def _accuracy_lines(
    records: Mapping[Cell, dict], question: str, colours: Mapping[str, int]
) -> dict[tuple[str, str], dict[int, dict]]:
    """Return (agent, temperature) -> length -> record of the summary, agent by agent."""
    lines: dict[tuple[str, str], dict[int, dict]] = {}
    of_question = [cell for cell in records if cell.question == question]
    alone, temperatures = len({c.agent for c in of_question}) == 1, temperatures_of(of_question)
    for cell in sorted(of_question, key=lambda cell: colours[cell.agent]):
        shown = temperatures[cell.agent, question]
        if cell.temperature in (shown, "0.0" if alone else shown):
            lines.setdefault((cell.agent, cell.temperature), {})[cell.length] = records[cell]
    return lines


def _published_lines(tables: Sequence[Published], lengths: Sequence[int]) -> list[Points]:
    """Return the rows of published tables as far as they lie between our lengths."""
    rows = [by_length for table in tables for by_length in table.rows.values()]
    lines = [
        [(n, by_length[n]) for n in sorted(by_length) if lengths[0] <= n <= lengths[-1]]
        for by_length in rows
    ]
    return [points for points in lines if points]


def _draw_intervals(
    axes, by_length: Mapping[int, dict], shift: float, colour: int, greedy: bool
) -> None:
    """Draw one line with its error bars. shift: factor of the lengths."""
    lengths, style = sorted(by_length), _line_style(colour, greedy)
    means = [by_length[n]["mean"] for n in lengths]
    axes.plot([n * shift for n in lengths], means, **style | {"marker": ""}, linewidth=1.8)
    for few, alpha in ((False, 1.0), (True, 0.35)):
        chosen = [n for n in lengths if (by_length[n].get("n", FEW) < FEW) == few]
        records = [by_length[n] for n in chosen]
        if records:
            axes.errorbar(
                [n * shift for n in chosen],
                [record["mean"] for record in records],
                [
                    [max(0, record["mean"] - record["low"]) for record in records],
                    [max(0, record["high"] - record["mean"]) for record in records],
                ],
                **style | {"linestyle": ""},
                alpha=alpha,
                markersize=6,
                elinewidth=1,
                capsize=2,
                clip_on=False,
            )


def _length_axis(axes, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic if all lengths are positive, with at most ten ticks."""
    logarithmic = lengths[0] > 0
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlim((lengths[0] / 1.5, lengths[-1] * 1.5) if logarithmic else None)
    ticks = lengths[:: -(-len(lengths) // 10)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()


def _accuracy_entries(
    lines: Iterable[tuple[str, str]], colours: Mapping[str, int], published: bool
) -> Entries:
    """Return a legend entry per agent, and those of what else is in the plot."""
    entries: Entries = []
    for agent in dict.fromkeys(agent for agent, _ in lines):
        entries.append((_sample(**_line_style(colours[agent])), _reader(agent)))
    if len({temperature for _, temperature in lines}) > 1:
        entries += [(_sample(color=INK), "sampled"), (_sample(**GREEDY), "greedy")]
    if published:
        sample = _sample(color=INK, alpha=0.3, linewidth=0.8, marker=".")
        entries.append((sample, "published, by its own metric:\nother model, other questions"))
    return entries


# ---------------------------------------------------------------- reward by training step


def reward(
    training: Sequence[tuple[int, float, str]],
    validation: Sequence[tuple[int, float]] = (),
    measure: str = "reward",
    errors: Sequence[float] = (),
) -> Markup:
    """Draw the reward by training step, or another measure, with its moving average.

    training: (step, value, sections of the tasks). validation: (step, score). errors: standard
    error of each value, nan where it is unknown; none without any.
    """
    steps, rewards, lengths = zip(*training, strict=True)
    window = max(5, len(steps) // 15)

    def draw(axes):
        if any(map(isfinite, errors)):
            low, high = (
                [r + side * 1.959964 * e for r, e in zip(rewards, errors, strict=True)]
                for side in (-1, 1)
            )
            style = dict(color=SERIES[0], alpha=0.2, linewidth=0, label="95 % interval")
            axes.fill_between(steps, low, high, **style)
        axes.plot(steps, rewards, ".", color=SERIES[0], alpha=0.55, markersize=5, label="one step")
        means = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, means, color=SERIES[1], linewidth=2, label=f"mean of the last {window}")
        if validation:
            style = dict(color=SERIES[2], markersize=5, linewidth=1, label="validation, greedy")
            axes.plot(*zip(*validation, strict=True), "D-", **style)
        _mark_lengths(axes, steps, lengths)
        axes.set(xlabel="training step", ylabel=f"mean {measure}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(-0.02, 1.02 if measure == "reward" else None)
        axes.figure.legend(loc="outside lower center", ncols=2)

    return _figures([_svg(draw, "reward", f"{measure.capitalize()} by training step")])


def _mark_lengths(axes, steps: Sequence[int], lengths: Sequence[str]) -> None:
    """Draw a dotted line with a label at each step from which the documents have another length."""
    starts = [
        i for i in range(len(steps)) if lengths[i] and (i == 0 or lengths[i] != lengths[i - 1])
    ]
    label_width = 0.2 * (steps[-1] - steps[0])  # roughly, in steps
    row = 0  # a label moves up a row where the one before it is too near
    for before, i in zip([None, *starts], starts, strict=False):
        row = row + 1 if before is not None and steps[i] - steps[before] < label_width else 0
        axes.axvline(steps[i], color=INK, linestyle=":", linewidth=1)
        label, height = f"{clean(lengths[i])[:9]} sections", 1.02 + 0.06 * (row % 3)
        axes.text(steps[i], height, label, transform=axes.get_xaxis_transform(), fontsize=9)


def by_step(panels: Mapping[str, Mapping[str, Points]], logarithmic: Collection[str]) -> Markup:
    """Draw a panel per title, with a line per name, by training step.

    logarithmic: titles of panels whose values are drawn so. A 0 there is left out: a step that had
    nothing to train has no such value.
    """
    figures = []
    for title, lines in panels.items():

        def draw(axes, title=title, lines=lines):
            entries: Entries = []
            for k, (name, points) in enumerate(lines.items()):
                style = dict(color=SERIES[k % len(SERIES)], linewidth=1.2)
                points = [p for p in points if p[1] > 0 or title not in logarithmic]
                mark = "." if len(points) < 40 else ""
                (line,) = axes.plot(*zip(*points, strict=True), **style, marker=mark)
                entries.append((line, name))
            values = [value for points in lines.values() for _, value in points]
            if title in logarithmic:
                _value_axis(axes, [value for value in values if value > 0])
            else:
                axes.set_ylim(0, 1.02 if max(values) <= 1 and title.startswith("Share") else None)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set(xlabel="training step", title=title)
            if len(entries) > 1:
                _legend(axes, entries, columns=3)

        figures.append(_svg(draw, f"step{len(figures)}", f"{title}, by training step"))
    return _figures(figures)


# ---------------------------------------------------------------- memory along the document


def occupancy(summary: dict) -> Markup:
    """Draw a panel per agent, at its `temperatures_of`: tokens of the memory along the document.

    A line per length, the mean over the kinds of question.
    """
    found = dict(cells(summary, "occupancy"))
    at = temperatures_of(found)
    curves: dict[str, dict[int, list[list[float]]]] = {}
    for cell, record in found.items():
        if cell.temperature == at[cell.agent, cell.question]:
            by_length = curves.setdefault(cell.agent, {})
            by_length.setdefault(cell.length, []).append(record["mean"])
    panels = []
    for agent, by_length in curves.items():
        lines = {}
        for length, kinds in sorted(by_length.items()):
            means = [fmean(part) for part in zip(*kinds, strict=False)]  # as long as the shortest
            lines[f"{length:,}"] = [
                (100 * (k + 0.5) / len(means), mean) for k, mean in enumerate(means)
            ]

        def draw(axes, lines=lines, agent=agent):
            entries = _draw_lines(axes, lines, [*lines], markersize=4, linewidth=1.5)
            axes.set(
                xlim=(0, 100),
                ylim=(0, None),
                xlabel="% of the document read",
                ylabel="tokens in the memory",
                title=_title(reader(agent)),
            )
            _legend(axes, entries, columns=5)

        panels.append(_svg(draw, f"occupancy{len(panels)}", f"Tokens in the memory of {agent}"))
    return _figures(panels)


# ---------------------------------------------------------------- what agents count along the way


def curves(panels: Mapping[str, Mapping[str, Points]]) -> Markup:
    """Draw a panel per title, with a line per name, over whole numbers.

    A point may be (x, y, low, high): an interval, shown as a band. A name may have no points.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figures = []
    for title, lines in panels.items():

        def draw(axes, title=title, lines=lines):
            style = dict(markersize=4, linewidth=1.5)
            entries = _draw_lines(axes, lines, names, lambda name: clean(name)[:32], **style)
            below = any(point[1] < 0 for points in lines.values() for point in points)
            axes.set(ylim=(None if below else 0, None), title=clean(title)[:48])
            axes.xaxis.get_major_locator().set_params(integer=True)
            _legend(axes, entries, columns=3)

        figures.append(_svg(draw, f"curve{len(figures)}", title))
    return _figures(figures)


# ---------------------------------------------------------------- growth with the document


def growth(summary: dict) -> Markup:
    """Draw two logarithmic panels by the length of the document: seconds of a question and peak
    memory.

    A line per agent, at its `temperatures_of`: the mean over kinds of question, of memory the most.
    """
    records = dict(cells(summary))
    agents, at = list(dict.fromkeys(cell.agent for cell in records)), temperatures_of(records)
    shown = {c: r for c, r in records.items() if c.temperature == at[c.agent, c.question]}
    panels = []
    for metric, label, pool in (
        ("seconds", "seconds a question", fmean),
        ("mib", "MiB at most", max),
    ):
        lines = {agent: _grown(shown, agent, metric, pool) for agent in agents}
        lines = {agent: points for agent, points in lines.items() if points}
        if not lines:
            continue

        def draw(axes, metric=metric, label=label, lines=lines):
            entries = _draw_lines(axes, lines, agents, _reader, markersize=5)
            lengths = sorted({x for points in lines.values() for x, _ in points})
            if metric == "seconds" and lengths[-1] > 2 * lengths[0]:
                entries.append(_draw_proportional(axes, lines.values(), lengths))
            _length_axis(axes, lengths)
            axes.set(xlabel=clean(summary["unit"]), ylabel=label)
            _value_axis(axes, [y for points in lines.values() for _, y in points])
            _legend(axes, entries, columns=3)

        panels.append(_svg(draw, f"growth{len(panels)}", label))
    return _figures(panels)


def _grown(
    records: Mapping[Cell, dict], agent: str, metric: str, pool: Callable
) -> list[tuple[float, float]]:
    """Return (length, value) of an agent, its kinds of question pooled."""
    by_length: dict[int, list[float]] = {}
    for cell, record in records.items():
        if cell.agent == agent and record.get(metric, 0) > 0 < cell.length:
            by_length.setdefault(cell.length, []).append(record[metric])
    return [(length, pool(values)) for length, values in sorted(by_length.items())]


def _draw_proportional(axes, lines: Iterable[Points], lengths: Sequence[float]) -> tuple:
    """Draw a dotted line of values proportional to the length; return its legend entry.

    It begins at the least value and the shortest documents.
    """
    start = min(value for points in lines for _, value in points)
    ends = (lengths[0], lengths[-1]), (start, start * lengths[-1] / lengths[0])
    (line,) = axes.plot(*ends, color=INK, alpha=0.35, linestyle=":")
    return line, "proportional"


TICKS = 6  # of a logarithmic axis of values, at most


def _value_axis(axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with a few ticks at 1, 2 and 5 or at powers of ten."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps, every in (((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        ticks = [step * 10.0**k for k in decades[::every] for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= TICKS:
            break
    if len(ticks) < 2:  # a narrow range: its ends
        ticks = sorted({float(f"{value:.2g}") for value in (min(values), max(values))})
    axes.set_yticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.minorticks_off()
