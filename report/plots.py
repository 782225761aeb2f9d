"""Draw plots as SVG for a page: no size, no colours and no script of their own.

Holds: `accuracy`, `reward`, `occupancy`, and `curves`, which draws all of them; `panel` and
`written`, for a picture in a file (dev/picture.py). Leaves out: the page and its tables
(report/page.py), numbers (report/summary.py), which agent has which colour (agents/find.py). No
torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

Each returns HTML, one <figure> a panel, "" where there is nothing to draw; `accuracy` a panel for
each kind of question. Shares are drawn in per cent. A line whose points all are of fewer than `FEW`
questions is faint.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from math import isfinite, log2
from statistics import fmean

from agents import find
from config.errors import clean
from report.markup import Markup, fill, joined
from report.summary import cells
from report.words import reader, temperatures_of
from tasks.words import METRICS, title_of

# placeholder colours, replaced by CSS variables, so that one picture serves light and dark pages
INK, LINE, PAGE = "#0a0b0c", "#0a0b0d", "#0a0b0e"
SERIES = [f"#0a0c{i:02x}" for i in range(8)]
VARIABLES = {INK: "currentColor", LINE: "var(--line)", PAGE: "var(--page)"} | {
    c: f"var(--c{i})" for i, c in enumerate(SERIES)
}
MARKERS = "os^DvPX*"
DASHES = ("-", "--", ":", "-.")  # of one agent in several states, such as before training
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

# ---------------------------------------------------------------- colours


def looks(names: Iterable[str]) -> dict[str, dict]:
    """Return the style of each line: a colour and a marker an agent, on every page the same ones.

    names: of agents, with what they are before or after: "RUN: NAME", "NAME@untrained", "untrained
    NAME". One agent in several states has one colour, and other dashes. What is no agent of ours,
    and of two that share a colour the second one, takes the next colour that is free.
    """
    states: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        agent = name.rpartition(": ")[2].partition("@")[0]
        agent = "trained" if agent == "untrained" else agent.removeprefix("untrained ")
        states.setdefault(agent, []).append(name)
    places: dict[int, str] = {}  # place of a colour -> agent
    # those with a colour of their own choose first
    for agent in sorted(states, key=lambda agent: agent not in find.COLOURS):
        wanted = find.COLOURS.get(agent, 0)
        free = (k % len(SERIES) for k in range(wanted, wanted + len(SERIES)))
        places[next((k for k in free if k not in places), len(places))] = agent
    return {
        name: {
            "color": SERIES[place % len(SERIES)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[k % len(DASHES)],
            "markerfacecolor": PAGE if k else SERIES[place % len(SERIES)],
        }
        for place, agent in places.items()
        for k, name in enumerate(sorted(states[agent], key=lambda name: "untrained" in name))
    }


# ---------------------------------------------------------------- parts of a plot


def _svg(draw: Callable, label: str) -> Markup:
    """Return what `draw(axes)` draws as an <svg> element without a size of its own.

    label: for screen readers.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        draw(figure.add_subplot())
        return written(figure, label)


def written(figure, label: str) -> Markup:
    """Return a figure as an <svg> element."""
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


def _legend(axes, entries: Entries) -> None:
    """Draw a legend below the axes, in fewer columns where the labels are long; the figure grows
    with its lines."""
    longest = max(len(label) for _, label in entries)
    columns = max(1, min(3, ROOM // (longest + 6)))
    handles, labels = [handle for handle, _ in entries], [label for _, label in entries]
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    axes.figure.set_figheight(axes.figure.get_figheight() + 0.22 * -(-len(entries) // columns))


def _short_reader(agent: str) -> str:
    return clean(reader(agent))[:40]


AXIS = 52  # characters in all labels of an axis


def length_axis(axes, lengths: Sequence[float]) -> None:
    """Make the x axis logarithmic if all lengths are positive, with as many ticks as have room."""
    logarithmic = lengths[0] > 0
    place = log2 if logarithmic else float
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    whole = (place(lengths[-1]) - place(lengths[0])) or 1.0
    ticks: list[float] = []
    for n in reversed(lengths):  # the longest one always has its own
        apart = (place(ticks[-1]) - place(n)) / whole if ticks else 1.0
        if apart * AXIS >= len(f"{n:,}") + 1:
            ticks.append(n)
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
    styles: Mapping[str, dict] | None = None,
    label: Callable[[str], str] = clean,
    finish: Callable = lambda axes, points: [],
) -> Markup:
    """Draw a panel per title, with a line per name.

    A point may be (x, y, low, high): an interval, shown as a bar, of many points as a band. A name
    may have no points. shares: titles of panels whose values are from 0 to 1, drawn in per cent.
    logarithmic: titles of panels whose values are drawn so; a 0 there is left out. styles: name ->
    style, by default the `looks` of all names. label: of a name, in the legend. finish(axes,
    points): is called at the end with the points of all lines; it returns further entries of the
    legend.
    """
    styles = styles or looks(name for by_name in panels.values() for name in by_name)
    made = []
    for title, by_name in panels.items():

        def draw(axes, title=title, by_name=by_name):
            axes.xaxis.get_major_locator().set_params(integer=True)
            share, log = title in shares, title in logarithmic
            entries, drawn = panel(axes, by_name, styles, share, log)
            entries = [(line, label(name)[:40]) for line, name in entries] + finish(axes, drawn)
            axes.set(xlabel=clean(xlabel), ylabel=ylabel, title=_title(title))
            if log:
                _value_axis(axes)
            if len(entries) > 1:
                _legend(axes, entries)

        made.append(_svg(draw, f"{title} by {xlabel}" if xlabel else title))
    return _figures(made)


def panel(
    axes,
    by_name: Mapping[str, Points],
    styles: Mapping[str, dict],
    share: bool = True,
    log: bool = False,
) -> tuple[Entries, list[tuple[float, ...]]]:
    """Draw the lines of one panel; return (handle, name) of each, and all points as they are drawn.

    share: values are from 0 to 1 and drawn in per cent, whose whole range is shown, so that panels
    can be compared. log: what is 0 is left out.
    """
    entries, drawn = [], []
    for k, (name, points) in enumerate(by_name.items()):
        points = [(x, *(100 * y if share else y for y in values)) for x, *values in points]
        points = [point for point in points if point[1] > 0 or not log]
        if points:
            entries.append((_draw_line(axes, points, styles[name], k), name))
            drawn += points
    if share:
        axes.set_ylim(-4, 104)  # bars at either end, with their caps, lie inside
        axes.set_yticks(range(0, 101, 20), [f"{n} %" for n in range(0, 101, 20)])
    elif not log and all(value >= 0 for _, value, *_ in drawn):
        axes.set_ylim(0)
    return entries, drawn


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
    return axes.errorbar(x, y, bars, **look, elinewidth=1, capsize=2 + k % 4)


def accuracy(summary: dict) -> dict[str, Markup]:
    """Draw a panel per kind of question: accuracy by length, with 95 % intervals; a line per agent,
    at its `temperatures_of`."""
    records = dict(cells(summary))
    agents, panels = looks(cell.agent for cell in records), {}
    for question in dict.fromkeys(cell.question for cell in records):
        ours = [cell for cell in records if cell.question == question]
        at, lines, styles = temperatures_of(ours), {}, {}
        for cell in ours:
            if cell.temperature == at[cell.agent, question]:
                record = records[cell]
                point = cell.length, record["mean"], record["low"], record["high"]
                lines.setdefault(cell.agent, []).append(point)
                faint = record["n"] < FEW and styles.get(cell.agent, {}).get("alpha", 0) != 1
                styles[cell.agent] = agents[cell.agent] | {"alpha": 0.35 if faint else 1}

        def finish(axes, points: Points) -> Entries:
            length_axis(axes, sorted({length for length, *_ in points}))
            return []

        title, unit = title_of(question), summary["unit"]
        measure = METRICS.get(summary["metric"], clean(summary["metric"]))
        style = dict(shares=[title], styles=styles, label=_short_reader, finish=finish)
        panels[question] = curves({title: {n: lines[n] for n in agents if n in lines}}, unit,
                                  measure, **style)  # fmt: skip
    return panels


def occupancy(summary: dict) -> Markup:
    """Draw a panel per agent, at its `temperatures_of`: tokens of the memory along the document, on
    one scale for all.

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
    each = (y for lines in panels.values() for points in lines.values() for _, y in points)
    most = max(each, default=0.0)

    def finish(axes, points: Points) -> Entries:
        axes.set_ylim(0, 1.05 * most or 1.0)
        return []

    return curves(panels, "% of the document read", "tokens in the memory", finish=finish)


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
        margins = [2 * error if isfinite(error) else 0 for error in errors]
        each = [(k, r, r - m, r + m) for (k, r), m in zip(each, margins, strict=True)]
    means = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
    lines = {
        "one step, 2 standard errors" if len(each[0]) > 2 else "one step": each,
        f"mean of the last {window}": [*zip(steps, means, strict=True)],
        "validation, greedy": [*validation],
    }
    dots = {"color": SERIES[0], "marker": ".", "linestyle": ""}
    mean = {"color": SERIES[1], "marker": "", "linestyle": "-", "linewidth": 2}
    score = {"color": SERIES[2], "marker": "D", "linestyle": "-", "linewidth": 1}

    def finish(axes, points: Points) -> Entries:
        """Show all of a reward from 0 to 1, and mark where the documents get longer."""
        if measure == "reward" and all(0 <= value <= 1 for _, value, *_ in points):
            axes.set_ylim(-0.04, 1.04)
        for k in range(1, len(steps)):
            if lengths[k] != lengths[k - 1]:
                axes.axvline(steps[k], color=INK, linestyle=":", linewidth=1)
        return []

    style = dict(styles=dict(zip(lines, (dots, mean, score), strict=True)), finish=finish)
    return curves({measure.capitalize(): lines}, "training step", f"mean {measure}", **style)
