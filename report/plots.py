"""Draw plots as SVG for a page: no size, no colours and no script of their own.

Holds: `accuracy`, `reward`, `occupancy`, `growth`, and `curves`, which draws all of them. Leaves
out: the page and its tables (report/page.py), numbers (report/summary.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

Each returns HTML, one <figure> a panel, "" where there is nothing to draw; `accuracy` a list of
these. A line whose points all are of fewer than `FEW` questions is faint.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from statistics import fmean

from config.errors import clean
from report.headline import reader, temperatures_of
from report.markup import Markup, fill, joined
from report.published import Published
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
MARKED = 40  # points of a line with markers, at most
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


def _svg(draw: Callable, label: str) -> Markup:
    """Return what `draw(axes)` draws as an <svg> element without a size of its own.

    label: for screen readers.
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
    # ids of several pictures on one page must not be the same
    name = f"p{sha256((clean(label) + svg).encode()).hexdigest()[:8]}"
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg.replace("xlink:href", "href"))
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = re.search('viewBox="[^"]*"', svg)
    content = svg[svg.index(">") + 1 :]
    opening = fill('<svg {} role="img" aria-label="{}">', Markup(box and box[0]), label)
    return opening + Markup(content)  # matplotlib has escaped the texts


def _figures(panels: Iterable[Markup]) -> Markup:
    return joined(fill("<figure>{}</figure>", panel) for panel in panels)


def _title(text: str) -> str:
    """Return a title in two lines at most: more would squeeze the plot."""
    return "\n".join(textwrap.wrap(clean(text), 44, max_lines=2, placeholder=" …"))


ROOM = 68  # characters in all columns of a legend, about six of them for each handle


def _legend(axes, entries: Entries, columns: int = 3) -> None:
    """Draw a legend below the axes, in fewer columns where the labels are long."""
    longest = max(len(label) for _, label in entries)
    columns = max(1, min(columns, ROOM // (longest + 6)))
    handles, labels = [handle for handle, _ in entries], [label for _, label in entries]
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _look(k: int, greedy: bool = False) -> dict:
    """Return the style of the k-th line: greedy ones are dashed and hollow."""
    colour = SERIES[k % len(SERIES)]
    return {
        "color": colour,
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": "--" if greedy else "-",
        "markerfacecolor": PAGE if greedy else colour,
    }


def _short_reader(agent: str) -> str:
    return clean(reader(agent))[:40]


def _length_axis(axes, lengths: Sequence[float]) -> None:
    """Make the x axis logarithmic if all lengths are positive, with at most ten ticks."""
    logarithmic = lengths[0] > 0
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlim((lengths[0] / 1.5, lengths[-1] * 1.5) if logarithmic else None)
    ticks = lengths[:: -(-len(lengths) // 10)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()


def _value_axis(axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5, over many decades at powers of ten."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=6))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()


# ---------------------------------------------------------------- lines over a number


def curves(
    panels: Mapping[str, Mapping[str, Points]],
    xlabel: str = "",
    ylabel: str = "",
    shares: Collection[str] = (),
    logarithmic: Collection[str] = (),
    looks: Mapping[str, dict] | None = None,
    label: Callable[[str], str] = clean,
    finish: Callable = lambda axes, points: [],
) -> Markup:
    """Draw a panel per title, with a line per name.

    A point may be (x, y, low, high): an interval, shown as a bar, of many points as a band. A name
    may have no points. shares: titles of panels whose values are from 0 to 1. logarithmic: titles
    of panels whose values are drawn so; a 0 there is left out. looks: name -> style, by default by
    the place among all names. label: of a name, in the legend. finish(axes, points): is called at
    the end with the points of all lines; it returns further entries of the legend.
    """
    names = dict.fromkeys(name for by_name in panels.values() for name in by_name)
    looks = looks or {name: _look(k) for k, name in enumerate(names)}
    made = []
    for title, by_name in panels.items():

        def draw(axes, title=title, by_name=by_name):
            log, entries, drawn = title in logarithmic, [], []
            axes.xaxis.get_major_locator().set_params(integer=True)
            for k, (name, points) in enumerate(by_name.items()):
                points = [point for point in points if point[1] > 0 or not log]
                if points:
                    line = _draw_line(axes, points, looks[name], k)
                    entries.append((line, label(name)[:40]))
                    drawn += points
            entries += finish(axes, drawn)
            axes.set(xlabel=clean(xlabel), ylabel=ylabel, title=_title(title))
            if log:
                _value_axis(axes)
            elif title in shares:
                axes.set_ylim(-0.02, 1.02)
            elif all(value >= 0 for _, value, *_ in drawn):
                axes.set_ylim(0)
            if len(entries) > 1:
                _legend(axes, entries)

        made.append(_svg(draw, f"{title} by {xlabel}" if xlabel else title))
    return _figures(made)


def _draw_line(axes, points: Points, look: dict, k: int) -> object:
    """Draw a line with its intervals; return its handle. k: how many lines are there already, whose
    bars it must not hide."""
    x, y, *band = zip(*points, strict=True)
    look = {"markersize": 5, "linewidth": 1.5} | look
    if len(points) > MARKED:
        (line,) = axes.plot(x, y, **look | ({"marker": ""} if look["linestyle"] else {}))
        if band:
            axes.fill_between(x, *band, color=look["color"], alpha=0.2, linewidth=0)
        return line
    bars = None
    if band:
        low, high = band
        bars = [
            [max(0, mean - end) for mean, end in zip(y, low, strict=True)],
            [max(0, end - mean) for mean, end in zip(y, high, strict=True)],
        ]
    return axes.errorbar(x, y, bars, **look, elinewidth=1, capsize=2 + k, clip_on=False)


def accuracy(
    summary: dict, published: Callable[[str], Sequence[Published]] = lambda question: ()
) -> dict[str, Markup]:
    """Draw a panel per kind of question: accuracy by length, with 95 % intervals.

    A line per agent, at its `temperatures_of`; of one agent alone a second one, greedy and dashed,
    if it has both. Published tables as thin grey lines, within the range of our lengths.
    """
    records = dict(cells(summary))
    places = {agent: k for k, agent in enumerate(dict.fromkeys(cell.agent for cell in records))}
    panels: dict[str, Markup] = {}
    for question in dict.fromkeys(cell.question for cell in records):
        ours = [cell for cell in records if cell.question == question]
        alone, at = len({cell.agent for cell in ours}) == 1, temperatures_of(ours)
        lines: dict[str, list[tuple[float, ...]]] = {}
        looks, labels = {}, {}
        for cell in sorted(ours, key=lambda cell: places[cell.agent]):
            greedy = cell.temperature == "0.0"
            if cell.temperature == at[cell.agent, question] or (greedy and alone):
                record, name = records[cell], f"{cell.agent} {cell.temperature}"
                point = cell.length, record["mean"], record["low"], record["high"]
                lines.setdefault(name, []).append(point)
                labels[name] = _short_reader(cell.agent) + ", greedy" * greedy
                faint = record["n"] < FEW and looks.get(name, {}).get("alpha", 0) != 1
                looks[name] = _look(places[cell.agent], greedy) | {"alpha": 0.35 if faint else 1}
        marks = [
            sorted(row.items()) for table in published(question) for row in table.rows.values()
        ]

        def finish(axes, points: Points, marks=marks) -> Entries:
            """Draw published numbers, as far as they lie between our lengths."""
            lengths = sorted({point[0] for point in points})
            entries = []
            for row in marks:
                if points := [(n, x) for n, x in row if lengths[0] <= n <= lengths[-1]]:
                    style = dict(color=INK, alpha=0.22, linewidth=0.8, marker=".", markersize=3)
                    (line,) = axes.plot(*zip(*points, strict=True), **style, zorder=0)
                    entries = [(line, "published: other model, questions, metric")]
            _length_axis(axes, lengths)
            return entries

        title, unit = title_of(question), summary["unit"]
        measure = METRICS.get(summary["metric"], clean(summary["metric"]))
        style = dict(shares=[title], looks=looks, label=labels.__getitem__, finish=finish)
        panels[question] = curves({title: lines}, unit, measure, **style)
    return panels


def occupancy(summary: dict) -> Markup:
    """Draw a panel per agent, at its `temperatures_of`: tokens of the memory along the document.

    A line per length, the mean over the kinds of question.
    """
    found = dict(cells(summary, "occupancy"))
    at = temperatures_of(found)
    kinds: dict[str, dict[int, list[list[float]]]] = {}
    for cell, record in found.items():
        if cell.temperature == at[cell.agent, cell.question]:
            by_length = kinds.setdefault(cell.agent, {})
            by_length.setdefault(cell.length, []).append(record["mean"])
    panels: dict[str, dict[str, Points]] = {}
    for agent, by_length in kinds.items():
        for length, parts in sorted(by_length.items()):
            means = [fmean(part) for part in zip(*parts, strict=False)]  # as long as the shortest
            points = [(100 * (k + 0.5) / len(means), mean) for k, mean in enumerate(means)]
            panels.setdefault(agent, {})[f"{length:,} {summary['unit']}"] = points
    return curves(panels, "% of the document read", "tokens in the memory")


SECONDS, MIB = "seconds a question", "MiB at most"


def growth(summary: dict) -> Markup:
    """Draw two logarithmic panels by the length of the document: seconds of a question and peak
    memory.

    A line per agent, at its `temperatures_of`: the mean over kinds of question, of memory the most.
    """
    records = dict(cells(summary))
    at = temperatures_of(records)
    values: dict[str, dict[str, dict[int, list[float]]]] = {SECONDS: {}, MIB: {}}
    for cell, record in records.items():
        for title, metric in ((SECONDS, "seconds"), (MIB, "mib")):
            shown = cell.temperature == at[cell.agent, cell.question] and cell.length > 0
            if shown and record.get(metric, 0) > 0:
                by_length = values[title].setdefault(cell.agent, {})
                by_length.setdefault(cell.length, []).append(record[metric])
    panels = {
        title: {
            agent: [(n, (fmean if title == SECONDS else max)(each)) for n, each in found.items()]
            for agent, found in by_agent.items()
        }
        for title, by_agent in values.items()
        if by_agent
    }

    def finish(axes, points: Points) -> Entries:
        """Draw a dotted line of values proportional to the length, from the least value."""
        lengths = sorted({length for length, _ in points})
        start = min(value for _, value in points)
        ends = (start, start * lengths[-1] / lengths[0])
        (line,) = axes.plot((lengths[0], lengths[-1]), ends, color=INK, alpha=0.35, linestyle=":")
        _length_axis(axes, lengths)
        return [(line, "proportional")]

    style = dict(logarithmic=[*panels], label=_short_reader, finish=finish)
    return curves(panels, summary["unit"], **style)


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
    each = [*zip(steps, rewards, strict=True)]
    if any(map(isfinite, errors)):
        margins = [1.959964 * error if isfinite(error) else 0 for error in errors]
        each = [(k, r, r - m, r + m) for (k, r), m in zip(each, margins, strict=True)]
    means = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
    lines = {
        "one step, 95 % interval" if len(each[0]) > 2 else "one step": each,
        f"mean of the last {window}": [*zip(steps, means, strict=True)],
        "validation, greedy": [*validation],
    }
    dots = {"color": SERIES[0], "marker": ".", "linestyle": ""}
    mean = {"color": SERIES[1], "marker": "", "linestyle": "-", "linewidth": 2}
    score = {"color": SERIES[2], "marker": "D", "linestyle": "-", "linewidth": 1}

    def finish(axes, points: Points) -> Entries:
        """Mark where the documents get longer."""
        for k in range(1, len(steps)):
            if lengths[k] != lengths[k - 1]:
                axes.axvline(steps[k], color=INK, linestyle=":", linewidth=1)
        return []

    looks = dict(zip(lines, (dots, mean, score), strict=True))
    title = measure.capitalize()
    style = dict(shares=["Reward"] * (min(rewards) >= 0), looks=looks, finish=finish)
    return curves({title: lines}, "training step", f"mean {measure}", **style)
