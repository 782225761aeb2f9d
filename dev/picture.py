"""Draw docs/accuracy.svg, the picture of the front page, from the summary of a demo.

Holds: accuracy by document length of the trained policy, the untrained one and the full context,
with 95 % bands. Leaves out: the plots of a report (report/plots.py), measuring.
Exercise it: `python cli.py demo --name picture`, then `python -m dev.picture runs/picture`.
Read next: report/plots.py.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import yaml

from report.plots import STYLE

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/accuracy.svg"
INK, LINE, PAGE = "#1c1e21", "#c9cdd2", "#ffffff"
SERIES = {  # agent -> label, colour, marker
    "trained": ("trained, one bounded memory", "#0072b2", "o"),
    "full": ("full context, untrained", "#007a5a", "s"),
    "untrained": ("untrained, one bounded memory", "#d55e00", "^"),
}
PANELS = {"one_fact": "One fact answers the question", "two_hop": "Two facts answer it"}
# the report's colours stand for CSS variables; here the page is white in dark mode too
STANDALONE = STYLE | {
    "svg.fonttype": "path",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": LINE,
    "grid.color": LINE,
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
}


def curve(summary: dict, agent: str, question: str) -> list[tuple[int, float, float, float]]:
    """Return (sections, mean, low, high) of an agent at temperature 1, by length."""
    return sorted(
        (cell["length"], cell["mean"], cell["low"], cell["high"])
        for cell in summary["cells"]
        if (cell["agent"], cell["question"], cell["temperature"]) == (agent, question, "1.0")
    )


def panel(axes, summary: dict, question: str, trained_on: tuple[int, ...]) -> None:
    """Draw the three agents on one kind of question, the lengths of training shaded."""
    # to the left edge: training begins below the shortest document that is asked about
    axes.axvspan(1, max(trained_on), color=LINE, alpha=0.35, linewidth=0)
    axes.text(
        max(trained_on) * 0.9, 0.5, "lengths in training", rotation=90, ha="right", va="center"
    )
    for agent, (label, colour, marker) in SERIES.items():
        lengths, means, low, high = zip(*curve(summary, agent, question), strict=True)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(lengths, means, color=colour, marker=marker, label=label, clip_on=False)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set(ylim=(-0.02, 1.02), xlabel="sections of the document", title=PANELS[question])


def picture(summary: dict, trained_on: tuple[int, ...]) -> str:
    """Return the picture as an SVG file's text; the same summary gives the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STANDALONE):
        figure = Figure(figsize=(9.2, 3.9), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, question in zip(panels, PANELS, strict=True):
            panel(axes, summary, question, trained_on)
        panels[0].set_ylabel("accuracy, with a 95 % band")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(SERIES))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+\n", "\n", file.getvalue())


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/picture")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    run = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["run"]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(picture(summary, tuple(run["lengths"])), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
