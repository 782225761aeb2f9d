"""Plots as SVG for a page: no size of their own, colours by the page's style, no script.

A line's name stands at its end. A point is (x, y) or (x, y, low, high), an interval: a bar, or of
many points a band.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from markupsafe import Markup, escape

from config.errors import clean

# placeholder colours, replaced by CSS variables, so that one picture serves light and dark pages
INK, LINE = "#0a0b0c", "#0a0b0d"
SERIES = [f"#0a0c{i:02x}" for i in range(8)]
VARIABLES = {INK: "currentColor", LINE: "var(--line)"} | {
    colour: f"var(--c{i})" for i, colour in enumerate(SERIES)
}
MARKED = 40  # points of a line with markers and bars, at most
GAP = 0.075  # of the axes' height, between the names of two lines
NAME = 30  # characters of a line's name
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "memagent", "font.size": 11, "text.parse_math": False,
    "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": LINE, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.linewidth": 0.6,
}  # fmt: skip

Points = Sequence[tuple[float, ...]]


def plot(
    lines: Mapping[str, Points],
    title: str,
    xlabel: str,
    ylabel: str = "",
    share: bool = False,
    lengths: bool = False,
    band: bool = False,
) -> Markup:
    """Draw lines in one panel, as a <figure>; "" without any point.

    share: values are from 0 to 1, and drawn in per cent. lengths: x is logarithmic, with a tick
    for each length. band: intervals are bands, however few the points.
    """
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Markup("")

    def draw(axes) -> None:
        draw_lines(axes, lines, share, band)
        if lengths:
            set_lengths(axes, sorted({point[0] for points in lines.values() for point in points}))
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        heading = textwrap.fill(clean(title), 44, max_lines=2, placeholder=" …")
        axes.set(xlabel=clean(xlabel), ylabel=clean(ylabel), title=heading)
        label_ends(axes, lines, 100 if share else 1)

    return Markup("<figure>{}</figure>").format(svg_of(draw, f"{title} by {xlabel}"))


def svg_of(draw: Callable, label: str) -> Markup:
    """Return what `draw(axes)` draws as an <svg> element. label: for screen readers."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        draw(figure.add_subplot())
        return svg_text(figure, label)


def svg_text(figure, label: str) -> Markup:
    """Return a figure as an <svg> element."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    unread = r"<!--.*?-->|<metadata>.*?</metadata>| xmlns(:xlink)?=\"[^\"]*\""
    svg = re.sub(unread, "", svg[svg.index("<svg") :], flags=re.S)
    # ids of several pictures on one page must not be the same
    name = f"p{sha256((clean(label) + svg).encode()).hexdigest()[:8]}"
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg.replace("xlink:href", "href"))
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = re.search('viewBox="[^"]*"', svg)[0]
    opening = f'<svg {box} role="img" aria-label="{escape(clean(label))}">'
    return Markup(opening + svg[svg.index(">") + 1 :])  # matplotlib has escaped the texts


def draw_lines(axes, lines: Mapping[str, Points], share: bool = False, band: bool = False) -> None:
    scale = 100 if share else 1
    for k, points in enumerate(lines.values()):
        x, y, *ends = zip(*((x, *(v * scale for v in ys)) for x, *ys in points), strict=True)
        few, colour = len(points) <= MARKED, SERIES[k % len(SERIES)]
        axes.plot(x, y, marker="os^DvPX*"[k % 8] if few else "", markersize=5, color=colour)
        if ends and few and not band:
            axes.vlines(x, *ends, linewidth=1, color=colour)
        elif ends:
            axes.fill_between(x, *ends, color=colour, alpha=0.2, linewidth=0)
    if share:
        axes.set_ylim(-4, 104)  # points at either end lie inside
        axes.set_yticks(range(0, 101, 20), [f"{n} %" for n in range(0, 101, 20)])
    elif min(point[1] for points in lines.values() for point in points) >= 0:
        axes.set_ylim(0)


def set_lengths(axes, lengths: Sequence[float]) -> None:
    """Make x logarithmic, with a tick for each length, of many of them for seven."""
    if lengths[0] <= 0:
        return
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    ticks = lengths[:: len(lengths) // -7]  # backwards: the longest one has its own
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()


def label_ends(axes, lines: Mapping[str, Points], scale: float = 1) -> None:
    """Write the name of each line at its end, in its colour, where there are several; names that
    would lie on each other are moved apart."""
    if len(lines) < 2:
        return
    low, high = axes.get_ylim()
    at = {name: (points[-1][1] * scale - low) / (high - low) for name, points in lines.items()}
    upwards, floor, ceiling = sorted(at, key=at.__getitem__), -1.0, 1.0
    for name in upwards:
        at[name] = floor = max(at[name], floor + GAP)
    for name in reversed(upwards):
        at[name] = min(at[name], ceiling)
        ceiling = at[name] - GAP
    for k, name in enumerate(lines):
        short = clean(name) if len(name) <= NAME else f"{clean(name)[: NAME - 1]}…"
        where = {"transform": axes.transAxes, "va": "center"}
        axes.text(1.02, at[name], short, color=SERIES[k % len(SERIES)], **where)
