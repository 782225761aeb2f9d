"""Plots as SVG that stands inside a page: no size, no colours and no script of its own.

Holds: `accuracy`, `reward`, `occupancy`, `growth`. Leaves out: the page and its tables (report/page.py), numbers (report/summary.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/page.py.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from statistics import fmean

from config.errors import clean
from report.published import Published
from report.summary import cells

# drawn in colours that stand for CSS variables, so that one picture serves light and dark pages
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


def _svg(draw: Callable, name: str, label: str) -> str:
    """What `draw(axes)` draws, as SVG to stand inside a page: no size of its own, ids with `name` before them, colours as variables."""
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
    return f'<svg {box and box[0]} role="img" aria-label="{html.escape(clean(label))}">{svg[svg.index(">") + 1 :]}'


def accuracy(
    summary: dict, published: Callable[[str], Sequence[Published]] = lambda question: ()
) -> str:
    """A panel per kind of question: a line per agent and temperature, greedy ones dashed and hollow, with 95 % intervals; published
    tables as thin lines in grey, where they have lengths of ours."""
    from matplotlib.lines import Line2D

    leaves, unit = dict(cells(summary)), summary["unit"]
    agents = {agent: i for i, agent in enumerate(dict.fromkeys(cell.agent for cell in leaves))}
    panels = []
    for question in dict.fromkeys(cell.question for cell in leaves):
        here = sorted(
            (cell for cell in leaves if cell.question == question),
            key=lambda cell: agents[cell.agent],
        )
        lines: dict[tuple[str, str], dict[int, dict]] = {}
        for cell in here:
            lines.setdefault((cell.agent, cell.temperature), {})[cell.length] = leaves[cell]
        lengths = sorted({cell.length for cell in here})

        def draw(axes, lines=lines, lengths=lengths, question=question):
            logarithmic = lengths[0] > 0
            for k, ((agent, temperature), by) in enumerate(lines.items()):
                i, greedy = agents[agent], temperature == "0.0"
                aside = 1.03 ** (
                    k - (len(lines) - 1) / 2
                )  # so that intervals do not hide each other
                points = sorted(by.items())
                means, low, high = (
                    [leaf[name] for _, leaf in points] for name in ("mean", "low", "high")
                )
                bars = [
                    [max(0, m - x) for m, x in zip(means, low, strict=True)],
                    [max(0, x - m) for m, x in zip(means, high, strict=True)],
                ]
                axes.errorbar(
                    [n * aside for n, _ in points],
                    means,
                    bars,
                    color=SERIES[i % 6],
                    linestyle="--" if greedy else "-",
                    marker=MARKERS[i % 8],
                    markersize=6,
                    markerfacecolor=PAGE if greedy else SERIES[i % 6],
                    linewidth=1.8,
                    elinewidth=1,
                    capsize=2,
                    clip_on=False,
                )
            marks = [
                [(n, by[n]) for n in sorted(by) if lengths[0] <= n <= lengths[-1]]
                for t in published(question)
                for by in t.rows.values()
            ]
            for points in filter(None, marks):
                axes.plot(
                    *zip(*points, strict=True),
                    color=INK,
                    alpha=0.22,
                    linewidth=0.8,
                    marker=".",
                    markersize=3,
                    zorder=0,
                )
            if logarithmic:
                axes.set_xscale("log", base=2)
            axes.set_xlim((lengths[0] / 1.5, lengths[-1] * 1.5) if logarithmic else None)
            axes.set_xticks(shown := lengths[:: -(-len(lengths) // 10)], [f"{n:,}" for n in shown])
            axes.minorticks_off()
            axes.set(
                ylim=(-0.02, 1.02),
                xlabel=clean(unit),
                ylabel=summary["metric"],
                title=clean(question)[:40],
            )  # a longer one would squeeze the plot
            here = dict.fromkeys(agent for agent, _ in lines)
            handles = [
                Line2D([], [], color=SERIES[i % 6], marker=MARKERS[i % 8])
                for i in map(agents.get, here)
            ]
            labels = [clean(agent)[:24] for agent in here]
            if "0.0" in (temperatures := {t for _, t in lines}):
                handles += [
                    Line2D([], [], color=INK, linestyle="--", marker="o", markerfacecolor=PAGE),
                    Line2D([], [], color=INK),
                ]
                labels += ["greedy", "sampled"][: len(temperatures)]
            handles = handles[: len(labels)]
            if any(marks):
                handles.append(Line2D([], [], color=INK, alpha=0.3, linewidth=0.8, marker="."))
                labels.append("published, by its own metric:\nother model, other questions")
            axes.figure.legend(
                handles, labels, loc="outside lower center", ncols=2 if any(marks) else 3
            )

        panels.append(_svg(draw, f"accuracy{len(panels)}", f"Accuracy by {unit}, {question}"))
    return "".join(f"<figure>{panel}</figure>" for panel in panels)


def reward(
    training: list[tuple[int, float, str]], validated: Sequence[tuple[int, float]] = ()
) -> str:
    """Reward by training step, (step, reward, sections); `validated`: (step, score on the validation tasks)."""
    steps, rewards, lengths = zip(*training, strict=True)
    window = max(5, len(steps) // 15)

    def draw(axes):
        axes.plot(steps, rewards, ".", color=SERIES[0], alpha=0.55, markersize=5, label="one step")
        means = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, means, color=SERIES[1], linewidth=2, label=f"mean of the last {window}")
        if validated:
            axes.plot(
                *zip(*validated, strict=True),
                "D-",
                color=SERIES[2],
                markersize=5,
                linewidth=1,
                label="validation, greedy",
            )
        row, width = 0, 0.2 * (steps[-1] - steps[0])  # of a label, about
        starts = [
            i for i in range(len(steps)) if lengths[i] and (i == 0 or lengths[i] != lengths[i - 1])
        ]
        for before, i in zip([None, *starts], starts, strict=False):
            row = row + 1 if before is not None and steps[i] - steps[before] < width else 0
            axes.axvline(steps[i], color=INK, linestyle=":", linewidth=1)
            place = {"transform": axes.get_xaxis_transform(), "fontsize": 9}
            axes.text(
                steps[i], 1.02 + 0.06 * (row % 3), f"{clean(lengths[i])[:9]} sections", **place
            )
        axes.set(ylim=(-0.02, 1.02), xlabel="training step", ylabel="mean reward")
        axes.figure.legend(loc="outside lower center", ncols=2)

    return f"<figure>{_svg(draw, 'reward', 'Reward by training step')}</figure>"


def occupancy(summary: dict) -> str:
    """A panel per agent and temperature: tokens of the memory along the document, a line per length, kinds of questions averaged."""
    found: dict[tuple[str, str], dict[int, list[list[float]]]] = {}
    for cell, leaf in cells(summary, "occupancy"):
        found.setdefault((cell.agent, cell.temperature), {}).setdefault(cell.length, []).append(
            leaf["mean"]
        )
    panels = []
    for (agent, temperature), by_length in found.items():

        def draw(axes, by_length=by_length, agent=agent, temperature=temperature):
            for i, (length, curves) in enumerate(sorted(by_length.items())):
                size = min(map(len, curves))
                means = [
                    fmean(parts) for parts in zip(*(curve[:size] for curve in curves), strict=True)
                ]
                at = [100 * (k + 0.5) / size for k in range(size)]
                axes.plot(
                    at,
                    means,
                    color=SERIES[i % 6],
                    marker=MARKERS[i % 8],
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
    return "".join(f"<figure>{panel}</figure>" for panel in panels)


def _number(value: float, _: object = None) -> str:
    """A tick's label: plain digits, never TeX."""
    return f"{value:,.10g}"


def _plain(axis, values: Sequence[float]) -> None:
    """Labels for a logarithmic axis: its powers of ten, and where the values span less than one, the ticks between."""
    axis.set_major_formatter(_number)
    axis.set_minor_formatter(_number if max(values) < 10 * min(values) else lambda value, at: "")


def growth(summary: dict) -> str:
    """Two panels, both logarithmic: seconds of a question, and the most memory, against the tokens of the document that were read; a line
    per agent (colour), kind of question (marker) and temperature (greedy ones dashed and hollow)."""
    from matplotlib.lines import Line2D

    agents, questions = (
        list(dict.fromkeys(getattr(cell, part) for cell, _ in cells(summary)))
        for part in ("agent", "question")
    )
    panels = []
    for metric, label in (("seconds", "seconds a question"), ("mib", "MiB at most")):

        def draw(axes, metric=metric, label=label):
            at = {cell: tokens for cell, tokens in cells(summary, "document_tokens") if tokens > 0}
            most, least = max(at.values()), min(at.values())
            lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
            for cell, value in cells(summary, metric):
                if cell in at and value > 0:
                    lines.setdefault((cell.agent, cell.question, cell.temperature), []).append(
                        (at[cell], value)
                    )
            for (agent, question, temperature), points in lines.items():
                colour, greedy = SERIES[agents.index(agent) % 6], temperature == "0.0"
                axes.plot(
                    *zip(*sorted(points), strict=True),
                    color=colour,
                    marker=MARKERS[questions.index(question) % 8],
                    markersize=5,
                    linewidth=1.2,
                    linestyle="--" if greedy else "-",
                    markerfacecolor=PAGE if greedy else colour,
                )
            handles = [
                (Line2D([], [], color=SERIES[agents.index(a) % 6]), a)
                for a in dict.fromkeys(agent for agent, _, _ in lines)
            ]
            if len(questions) > 1:
                shown = [
                    (Line2D([], [], color=INK, linestyle="", marker=MARKERS[i % 8]), q)
                    for i, q in enumerate(questions[:8])
                ]
                handles += shown + [
                    (Line2D([], [], linestyle=""), f"and {len(questions) - 8} more")
                ] * (len(questions) > 8)
            if len({temperature for _, _, temperature in lines}) > 1 and any(
                temperature == "0.0" for _, _, temperature in lines
            ):
                handles.append(
                    (
                        Line2D([], [], color=INK, linestyle="--", marker="o", markerfacecolor=PAGE),
                        "greedy",
                    )
                )
            if metric == "seconds" and most > 2 * least:
                start = min(
                    (value for points in lines.values() for _, value in points), default=1.0
                )
                (line,) = axes.plot(
                    (least, most),
                    (start, start * most / least),
                    color=INK,
                    alpha=0.35,
                    linestyle=":",
                )
                handles.append((line, "proportional"))
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="tokens of the document that were read",
                ylabel=label,
            )
            points = [point for points in lines.values() for point in points] or [(1.0, 1.0)]
            for axis, values in (
                (axes.xaxis, [x for x, _ in points]),
                (axes.yaxis, [y for _, y in points]),
            ):
                _plain(axis, values)
            if handles:
                axes.figure.legend(
                    [line for line, _ in handles],
                    [clean(name)[:24] for _, name in handles],
                    loc="outside lower center",
                    ncols=3,
                )

        panels.append(_svg(draw, f"growth{len(panels)}", label))
    return "".join(f"<figure>{panel}</figure>" for panel in panels)
