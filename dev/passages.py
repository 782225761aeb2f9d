"""Draw docs/passages.svg, the plot of real text of the front page, from a table of results.

Holds: accuracy by number of passages of the reader, the whole document in the prompt and BM25, with
95 % intervals and n, as docs/results.md has them under "Single facts in real text": when that table
is measured anew, this draws it anew. Leaves out: measuring (dev/reader.py --evaluate).
Exercise it: `python -m dev.passages`. Read next: dev/picture.py.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np

from dev.picture import STANDALONE

ROOT = Path(__file__).resolve().parent.parent
OUT, RESULTS = ROOT / "docs/passages.svg", ROOT / "docs/results.md"
SERIES = {  # row of the table -> label, colour, marker
    "memagent": ("the reader, section by section", "#0072b2", "o"),
    "full": ("the whole document in the prompt", "#007a5a", "s"),
    "bm25, two sections": ("the two best sections of BM25", "#cc79a7", "D"),
}
CELL = re.compile(r"([01]?\.\d\d) \(([01]?\.\d\d)-([01]?\.\d\d)\)")
Points = dict[str, list[tuple[float, ...]]]


def table(text: str) -> tuple[list[int], Points, int]:
    """Return the passages, (mean, low, high) at each of them by row, and n of the section."""
    section = text[text.index("### Single facts in real text") :]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if "|" in line]
    by_name = {name: cells for name, *cells in reversed(rows)}  # the first of a name
    points = {
        name: [tuple(map(float, CELL.fullmatch(cell).groups())) for cell in by_name[name]]
        for name in SERIES
    }
    return (
        list(map(int, by_name["passages"])),
        points,
        int(re.search(r"n = (\d+) a cell", section)[1]),
    )


def drawn(passages: list[int], points: Points, n: int) -> str:
    """Return the plot as an SVG file's text; the same figures give the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STANDALONE):
        figure = Figure(figsize=(7.2, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for k, (name, (label, colour, marker)) in enumerate(SERIES.items()):
            x = [count * 1.05 ** (k - 1) for count in passages]  # bars side by side
            mean, low, high = 100 * np.array(points[name]).T
            spread = [mean - low, high - mean]
            axes.errorbar(x, mean, spread, color=colour, marker=marker, label=label, capsize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(passages, [f"{count:,}" for count in passages])
        axes.minorticks_off()
        axes.set(ylim=(0, 60), xlabel="passages of the document", ylabel="right answers, %")
        axes.set_title(f"Questions about real articles, n = {n} a point, 95 % intervals", size=11)
        figure.legend(loc="outside lower center", ncols=2)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+\n", "\n", file.getvalue())


if __name__ == "__main__":
    OUT.write_text(drawn(*table(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")
