"""Draw docs/accuracy.svg, the picture of the front page, from the summary of a demo.

`python cli.py demo --name picture`, then `python -m dev.picture runs/picture`: accuracy by document
length of the trained policy, the untrained one and the whole document in the prompt.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import yaml

from report.plots import LINE, STYLE, draw_lines, label_ends, set_lengths, svg_text

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/accuracy.svg"
AGENTS = {  # of a demo -> label
    "trained": "bounded memory, trained",
    "untrained": "bounded memory, untrained",
    "full": "whole document in the prompt",
}
PANELS = {"one_fact": "One fact answers the question", "two_hop": "Two facts answer it"}


def curve(summary: dict, agent: str, question: str) -> list[tuple[int, float, float, float]]:
    """Return (sections, mean, low, high) of an agent at temperature 1, by length."""
    return sorted(
        (cell["length"], cell["mean"], cell["low"], cell["high"])
        for cell in summary["cells"]
        if (cell["agent"], cell["question"], cell["temperature"]) == (agent, question, "1.0")
    )


def picture(summary: dict, trained_on: tuple[int, ...]) -> str:
    """Return the picture as an SVG file's text, on a ground of its own, which is light or dark as
    the reader's screen is, the lengths of training shaded; the same summary gives the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    # the letters as curves: a file that stands alone brings its font
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}):
        figure = Figure(figsize=(9.2, 3.9), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        for axes, (question, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            lines = {label: curve(summary, agent, question) for agent, label in AGENTS.items()}
            draw_lines(axes, lines, share=True)
            set_lengths(axes, sorted({point[0] for line in lines.values() for point in line}))
            # to the left edge: training begins below the shortest document that is asked about
            axes.axvspan(1, max(trained_on), color=LINE, alpha=0.35, linewidth=0)
            axes.text(max(trained_on) * 0.9, 50, "lengths in training", rotation=90, ha="right",
                      va="center")  # fmt: skip
            axes.set(xlabel="sections of the document", title=title)
        label_ends(axes, lines, 100)
        svg = svg_text(figure, "Accuracy by document length, with 95 % intervals")
    colours = (ROOT / "report/page.css").read_text(encoding="utf-8").partition("\n\n")[0]
    opening, _, content = svg.partition(">")
    ground = '<rect width="100%" height="100%" rx="6" fill="var(--page)"/>'
    style = f"<style>\n{colours}\nsvg {{ color: var(--ink); }}\n</style>"
    svg = f'{opening} xmlns="http://www.w3.org/2000/svg">{style}{ground}{content}\n'
    return re.sub(r"[ \t]+\n", "\n", svg)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/picture")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    run = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["run"]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(picture(summary, tuple(run["lengths"])), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
