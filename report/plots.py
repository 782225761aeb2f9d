"""Draw plots as SVG for a page: no size, no colours and no script of their own.

Holds: `accuracy`, `reward`, `occupancy`, `curves`, `growth`. Leaves out: the page and its tables
(report/page.py), numbers (report/summary.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.

Each of the five returns HTML: one <figure> a panel, "" where there is nothing to draw.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean

from config.errors import clean
from report.markup import Markup, fill, joined
from report.published import Published
from report.rows import Cell
from report.summary import cells

# placeholder colours, replaced by CSS variables, so that one picture serves light and dark pages
INK, LINE, PAGE = "#0a0b0c", "#0a0b0d", "#0a0b0e"
SERIES = [f"#0a0c{i:02x}" for i in range(6)]
VARIABLES = {INK: "currentColor", LINE: "var(--line)", PAGE: "var(--page)"} | {
    c: f"var(--c{i})" for i, c in enumerate(SERIES)
}
MARKERS = "os^DvPX*"
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


ROOM = 68  # characters in all columns of a legend, about six of them for each handle


def _legend(axes, entries: Entries, columns: int) -> None:
    """Draw a legend below the axes, in fewer columns where the labels are long."""
    longest = max(len(line) for _, label in entries for line in label.split("\n"))
    columns = max(1, min(columns, ROOM // (longest + 6)))
    handles, labels = [handle for handle, _ in entries], [label for _, label in entries]
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _line_style(colour: int, marker: int, greedy: bool) -> dict:
    """Return the style of a line: greedy ones are dashed and hollow."""
    return {
        "color": SERIES[colour % len(SERIES)],
        "marker": MARKERS[marker % len(MARKERS)],
        "linestyle": "--" if greedy else "-",
        "markerfacecolor": PAGE if greedy else SERIES[colour % len(SERIES)],
    }


GREEDY = {"color": INK, "linestyle": "--", "marker": "o", "markerfacecolor": PAGE}

# ---------------------------------------------------------------- accuracy by length


def accuracy(
    summary: dict, published: Callable[[str], Sequence[Published]] = lambda question: ()
) -> Markup:
    """Draw a panel per kind of question: accuracy by length, with 95 % intervals.

    A line per agent and temperature, greedy ones dashed and hollow; published tables as thin grey
    lines, within the range of our lengths.
    """
    records = dict(cells(summary))
    colours = {agent: i for i, agent in enumerate(dict.fromkeys(cell.agent for cell in records))}
    panels = []
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
                ylabel=summary["metric"],
                title=clean(question)[:40],  # a longer one would squeeze the plot
            )
            entries = _accuracy_entries(lines, colours, bool(marks))
            _legend(axes, entries, columns=2 if marks else 3)

        label = f"Accuracy by {summary['unit']}, {question}"
        panels.append(_svg(draw, f"accuracy{len(panels)}", label))
    return _figures(panels)


def _accuracy_lines(
    records: Mapping[Cell, dict], question: str, colours: Mapping[str, int]
) -> dict[tuple[str, str], dict[int, dict]]:
    """Return (agent, temperature) -> length -> record of the summary, agent by agent."""
    lines: dict[tuple[str, str], dict[int, dict]] = {}
    of_question = [cell for cell in records if cell.question == question]
    for cell in sorted(of_question, key=lambda cell: colours[cell.agent]):
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
    lengths = sorted(by_length)
    records = [by_length[n] for n in lengths]
    below = [max(0, record["mean"] - record["low"]) for record in records]
    above = [max(0, record["high"] - record["mean"]) for record in records]
    axes.errorbar(
        [n * shift for n in lengths],
        [record["mean"] for record in records],
        [below, above],
        **_line_style(colour, colour, greedy),
        markersize=6,
        linewidth=1.8,
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
        i = colours[agent]
        sample = _sample(color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)])
        entries.append((sample, clean(agent)[:24]))
    temperatures = {temperature for _, temperature in lines}
    if "0.0" in temperatures:
        entries.append((_sample(**GREEDY), "greedy"))
        if len(temperatures) > 1:
            entries.append((_sample(color=INK), "sampled"))
    if published:
        sample = _sample(color=INK, alpha=0.3, linewidth=0.8, marker=".")
        entries.append((sample, "published, by its own metric:\nother model, other questions"))
    return entries


# ---------------------------------------------------------------- reward by training step


def reward(
    training: Sequence[tuple[int, float, str]],
    validation: Sequence[tuple[int, float]] = (),
    measure: str = "reward",
) -> Markup:
    """Draw the reward by training step, or another measure, with its moving average.

    training: (step, value, sections of the tasks). validation: (step, score).
    """
    steps, rewards, lengths = zip(*training, strict=True)
    window = max(5, len(steps) // 15)

    def draw(axes):
        axes.plot(steps, rewards, ".", color=SERIES[0], alpha=0.55, markersize=5, label="one step")
        means = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, means, color=SERIES[1], linewidth=2, label=f"mean of the last {window}")
        if validation:
            style = dict(color=SERIES[2], markersize=5, linewidth=1, label="validation, greedy")
            axes.plot(*zip(*validation, strict=True), "D-", **style)
        _mark_lengths(axes, steps, lengths)
        axes.set(xlabel="training step", ylabel=f"mean {measure}")
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


# ---------------------------------------------------------------- memory along the document


def occupancy(summary: dict) -> Markup:
    """Draw a panel per agent and temperature: tokens of the memory along the document.

    A line per length, the mean over the kinds of question.
    """
    curves: dict[tuple[str, str], dict[int, list[list[float]]]] = {}
    for cell, record in cells(summary, "occupancy"):
        by_length = curves.setdefault((cell.agent, cell.temperature), {})
        by_length.setdefault(cell.length, []).append(record["mean"])
    panels = []
    for (agent, temperature), by_length in curves.items():

        def draw(axes, by_length=by_length, agent=agent, temperature=temperature):
            for i, (length, of_questions) in enumerate(sorted(by_length.items())):
                size = min(map(len, of_questions))
                parts = zip(*(curve[:size] for curve in of_questions), strict=True)
                axes.plot(
                    [100 * (k + 0.5) / size for k in range(size)],
                    [fmean(part) for part in parts],
                    color=SERIES[i % len(SERIES)],
                    marker=MARKERS[i % len(MARKERS)],
                    markersize=4,
                    linewidth=1.5,
                    label=f"{length:,}",
                )
            axes.set(
                xlim=(0, 100),
                ylim=(0, None),
                xlabel="% of the document read",
                ylabel="tokens in the memory",
                title=clean(f"{agent}, temperature {temperature}")[:40],
            )
            axes.figure.legend(loc="outside lower center", ncols=5)

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
            entries: Entries = []
            for name, points in lines.items():
                if not points:  # its colour is still its own
                    continue
                style = _line_style(names.index(name), names.index(name), greedy=False)
                x, y, *band = zip(*points, strict=True)
                (line,) = axes.plot(x, y, **style, markersize=4, linewidth=1.5)
                if band:
                    axes.fill_between(x, *band, color=style["color"], alpha=0.06, linewidth=0)
                entries.append((line, clean(name)[:32]))
            below = any(point[1] < 0 for points in lines.values() for point in points)
            axes.set(ylim=(None if below else 0, None), title=clean(title)[:48])
            axes.xaxis.get_major_locator().set_params(integer=True)
            _legend(axes, entries, columns=3)

        figures.append(_svg(draw, f"curve{len(figures)}", title))
    return _figures(figures)


# ---------------------------------------------------------------- growth with the document


def growth(summary: dict) -> Markup:
    """Draw two logarithmic panels: seconds of a question and peak memory by document tokens read.

    A line per agent (colour), kind of question (marker) and temperature (greedy ones dashed and
    hollow).
    """
    agents, questions = (
        list(dict.fromkeys(getattr(cell, part) for cell, _ in cells(summary)))
        for part in ("agent", "question")
    )
    tokens = {cell: n for cell, n in cells(summary, "document_tokens") if n > 0}
    panels = []
    for metric, label in (("seconds", "seconds a question"), ("mib", "MiB at most")):
        lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for cell, value in cells(summary, metric):
            if cell in tokens and value > 0:
                line = lines.setdefault((cell.agent, cell.question, cell.temperature), [])
                line.append((tokens[cell], value))

        def draw(axes, metric=metric, label=label, lines=lines):
            for (agent, question, temperature), points in lines.items():
                indices = agents.index(agent), questions.index(question)
                style = _line_style(*indices, greedy=temperature == "0.0")
                axes.plot(*zip(*sorted(points), strict=True), **style, markersize=5, linewidth=1.2)
            entries = _growth_entries(lines, agents, questions)
            if metric == "seconds" and max(tokens.values()) > 2 * min(tokens.values()):
                entries.append(_draw_proportional(axes, lines.values(), tokens.values()))
            xlabel = "tokens of the document that were read"
            axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=label)
            points = [point for points in lines.values() for point in points] or [(1.0, 1.0)]
            _plain_ticks(axes.xaxis, [x for x, _ in points])
            _plain_ticks(axes.yaxis, [y for _, y in points])
            if entries:
                _legend(axes, entries, columns=3)

        panels.append(_svg(draw, f"growth{len(panels)}", label))
    return _figures(panels)


def _growth_entries(
    lines: Iterable[tuple[str, str, str]], agents: Sequence[str], questions: Sequence[str]
) -> Entries:
    """Return the entries for colours, for markers (the first eight) and for the dashes."""
    drawn = dict.fromkeys(agent for agent, _, _ in lines)
    entries = [
        (_sample(color=SERIES[agents.index(agent) % len(SERIES)]), clean(agent)[:24])
        for agent in drawn
    ]
    if len(questions) > 1:
        entries += [
            (_sample(color=INK, linestyle="", marker=marker), clean(question)[:24])
            for marker, question in zip(MARKERS, questions, strict=False)
        ]
    if len(questions) > len(MARKERS):
        entries.append((_sample(linestyle=""), f"and {len(questions) - len(MARKERS)} more"))
    temperatures = {temperature for _, _, temperature in lines}
    if "0.0" in temperatures and len(temperatures) > 1:
        entries.append((_sample(**GREEDY), "greedy"))
    return entries


def _draw_proportional(axes, lines: Iterable[Points], tokens: Collection[float]) -> tuple:
    """Draw a dotted line of values proportional to the tokens; return its legend entry.

    It begins at the least value and the fewest tokens.
    """
    fewest, most = min(tokens), max(tokens)
    start = min((value for points in lines for _, value in points), default=1.0)
    ends = (fewest, most), (start, start * most / fewest)
    (line,) = axes.plot(*ends, color=INK, alpha=0.35, linestyle=":")
    return line, "proportional"


def _number(value: float, _: object = None) -> str:
    """Label a tick with plain digits, never TeX."""
    return f"{value:,.10g}"


def _plain_ticks(axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis at the powers of ten; where `values` span less, between them too."""
    axis.set_major_formatter(_number)
    axis.set_minor_formatter(_number if max(values) < 10 * min(values) else lambda value, at: "")
