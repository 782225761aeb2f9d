"""Draw plots as SVG for a page: no size, no colours and no script of their own.

Holds: `accuracy`, `reward`, `occupancy`, `growth`, and `curves`, which draws the others. Leaves
out: the page and its tables (report/page.py), numbers (report/summary.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

Each returns HTML, one <figure> a panel, "" where there is nothing to draw; `accuracy` a list of
these. What fewer than `FEW` questions say is drawn faint.
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


def _sample(**style):
    """Return a line that stands for others in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _title(text: str) -> str:
    """Return a title in two lines at most: more would squeeze the plot."""
    return "\n".join(textwrap.wrap(clean(text), 44, max_lines=2, placeholder=" …"))


ROOM = 68  # characters in all columns of a legend, about six of them for each handle


def _legend(axes, entries: Entries, columns: int = 3) -> None:
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
        by_agent = _accuracy_lines(records, question, colours)
        lengths = sorted({n for by_length in by_agent.values() for n in by_length})
        marks = [
            points
            for table in published(question)
            for row in table.rows.values()
            if (points := [(n, row[n]) for n in sorted(row) if lengths[0] <= n <= lengths[-1]])
        ]

        def draw(axes, question=question, by_agent=by_agent, lengths=lengths, marks=marks):
            for k, ((agent, temperature), by_length) in enumerate(by_agent.items()):
                # a little to the side, so that the intervals do not hide each other
                shift = 1.03 ** (k - (len(by_agent) - 1) / 2)
                _draw_intervals(axes, by_length, shift, colours[agent], temperature == "0.0")
            for points in marks:
                style = dict(color=INK, alpha=0.22, linewidth=0.8, marker=".", markersize=3)
                axes.plot(*zip(*points, strict=True), **style, zorder=0)
            _length_axis(axes, lengths)
            measure = METRICS.get(summary["metric"], clean(summary["metric"]))
            axes.set(ylim=(-0.02, 1.02), xlabel=clean(summary["unit"]), ylabel=measure)
            axes.set_title(_title(title_of(question)))
            entries = _accuracy_entries(by_agent, colours, bool(marks))
            _legend(axes, entries, columns=2 if marks else 3)

        label = f"{title_of(question)}: accuracy by {summary['unit']}"
        panels[question] = _figures([_svg(draw, label)])
    return panels


def _accuracy_lines(
    records: Mapping[Cell, dict], question: str, colours: Mapping[str, int]
) -> dict[tuple[str, str], dict[int, dict]]:
    """Return (agent, temperature) -> length -> record of the summary, agent by agent."""
    by_agent: dict[tuple[str, str], dict[int, dict]] = {}
    of_question = [cell for cell in records if cell.question == question]
    alone, temperatures = len({c.agent for c in of_question}) == 1, temperatures_of(of_question)
    for cell in sorted(of_question, key=lambda cell: colours[cell.agent]):
        shown = temperatures[cell.agent, question]
        if cell.temperature in (shown, "0.0" if alone else shown):
            by_length = by_agent.setdefault((cell.agent, cell.temperature), {})
            by_length[cell.length] = records[cell]
    return by_agent


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


def _accuracy_entries(
    by_agent: Iterable[tuple[str, str]], colours: Mapping[str, int], published: bool
) -> Entries:
    """Return a legend entry per agent, and those of what else is in the plot."""
    entries: Entries = []
    for agent in dict.fromkeys(agent for agent, _ in by_agent):
        entries.append((_sample(**_line_style(colours[agent])), _short_reader(agent)))
    if len({temperature for _, temperature in by_agent}) > 1:
        greedy = _sample(color=INK, linestyle="--", marker="o", markerfacecolor=PAGE)
        entries += [(_sample(color=INK), "sampled"), (greedy, "greedy")]
    if published:
        sample = _sample(color=INK, alpha=0.3, linewidth=0.8, marker=".")
        entries.append((sample, "published, by its own metric:\nother model, other questions"))
    return entries


# ---------------------------------------------------------------- lines over a number


def curves(
    panels: Mapping[str, Mapping[str, Points]],
    xlabel: str = "",
    ylabel: str = "",
    order: Sequence[str] = (),
    logarithmic: Collection[str] = (),
    label: Callable[[str], str] = clean,
    finish: Callable = lambda axes, points: [],
) -> Markup:
    """Draw a panel per title, with a line per name.

    A point may be (x, y, low, high): an interval, shown as a band. A name may have no points.
    order: all names, whose places decide their colours. logarithmic: titles of panels whose values
    are drawn so; a 0 there is left out. label: of a name, in the legend. finish(axes, points): is
    called at the end with the points of all lines; it returns further entries of the legend.
    """
    order = [*order] or [*dict.fromkeys(name for by_name in panels.values() for name in by_name)]
    made = []
    for title, by_name in panels.items():

        def draw(axes, title=title, by_name=by_name):
            log, entries, drawn = title in logarithmic, [], []
            axes.xaxis.get_major_locator().set_params(integer=True)
            for name, points in by_name.items():
                points = [point for point in points if point[1] > 0 or not log]
                if points:
                    look = _line_style(order.index(name)) | {"markersize": 4, "linewidth": 1.5}
                    look |= {"marker": ""} if len(points) > MARKED else {}
                    x, y, *band = zip(*points, strict=True)
                    (line,) = axes.plot(x, y, **look)
                    if band:
                        axes.fill_between(x, *band, color=look["color"], alpha=0.06, linewidth=0)
                    entries.append((line, label(name)[:40]))
                    drawn += points
            entries += finish(axes, drawn)
            axes.set(xlabel=clean(xlabel), ylabel=ylabel, title=_title(title))
            values = [point[1] for point in drawn] or [0]
            if log:
                _value_axis(axes)
            else:
                top = 1.02 if title.startswith("Share") and max(values) <= 1 else None
                axes.set_ylim(None if min(values) < 0 else 0, top)
            if len(entries) > 1:
                _legend(axes, entries)

        made.append(_svg(draw, f"{title}, by {xlabel}" if xlabel else title))
    return _figures(made)


def occupancy(summary: dict) -> Markup:
    """Draw a panel per agent, at its `temperatures_of`: tokens of the memory along the document.

    A line per length, the mean over the kinds of question.
    """
    found = dict(cells(summary, "occupancy"))
    at = temperatures_of(found)
    means_of: dict[str, dict[int, list[list[float]]]] = {}
    for cell, record in found.items():
        if cell.temperature == at[cell.agent, cell.question]:
            by_length = means_of.setdefault(cell.agent, {})
            by_length.setdefault(cell.length, []).append(record["mean"])
    panels: dict[str, dict[str, Points]] = {}
    for agent, by_length in means_of.items():
        for length, kinds in sorted(by_length.items()):
            means = [fmean(part) for part in zip(*kinds, strict=False)]  # as long as the shortest
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

    agents = [*dict.fromkeys(cell.agent for cell in records)]
    return curves(panels, summary["unit"], "", agents, [*panels], _short_reader, finish)


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
        for k in range(1, len(steps)):
            if lengths[k] != lengths[k - 1]:
                axes.axvline(steps[k], color=INK, linestyle=":", linewidth=1)
        axes.set(xlabel="training step", ylabel=f"mean {measure}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(-0.02, 1.02 if measure == "reward" else None)
        axes.figure.legend(loc="outside lower center", ncols=2)

    return _figures([_svg(draw, f"{measure.capitalize()} by training step")])
