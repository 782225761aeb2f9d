"""Draw docs/passages.svg, the plot of real text of the front page, from a table of results.

Holds: accuracy by number of passages of the reader, the whole document in the prompt and BM25, with
95 % intervals and n, as docs/results.md has them under "Single facts in real text": when that table
is measured anew, this draws it anew. Leaves out: measuring (dev/reader.py --evaluate).
Exercise it: `python -m dev.passages`. Read next: dev/picture.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from dev.picture import standalone
from report.plots import STYLE, length_axis, looks, panel

ROOT = Path(__file__).resolve().parent.parent
OUT, RESULTS = ROOT / "docs/passages.svg", ROOT / "docs/results.md"
ROWS = {"memagent": "memagent", "full": "full", "bm25": "bm25, two sections"}  # agent -> its row
LABELS = {
    "memagent": "the reader",
    "full": "whole document in the prompt",
    "bm25": "two best sections by BM25",
}
CELL = re.compile(r"([01]?\.\d\d) \(([01]?\.\d\d)-([01]?\.\d\d)\)")
Points = dict[str, list[tuple[float, ...]]]


def table(text: str) -> tuple[Points, int]:
    """Return (passages, mean, low, high) of each agent in the text of the results, and n."""
    section = text[text.index("### Single facts in real text") :]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if "|" in line]
    by_name = {name: cells for name, *cells in reversed(rows)}  # the first of a name
    passages = [int(cell) for cell in by_name["passages"]]
    points = {
        agent: [
            (count, *map(float, CELL.fullmatch(cell).groups()))
            for count, cell in zip(passages, by_name[row], strict=True)
        ]
        for agent, row in ROWS.items()
    }
    return points, int(re.search(r"n = (\d+) a cell", section)[1])


def drawn(points: Points, n: int) -> str:
    """Return the plot as an SVG file's text; the same figures give the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    beside = {  # intervals that begin at the same height stay apart
        agent: [(x * 1.05 ** (k - 1), *rest) for x, *rest in line]
        for k, (agent, line) in enumerate(points.items())
    }
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}):
        figure = Figure(figsize=(7.2, 3.9), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        axes = figure.add_subplot()
        entries, _ = panel(axes, beside, looks(points))
        length_axis(axes, [x for x, *_ in points["memagent"]])
        title = f"Right answers to questions about real articles, n = {n} a point"
        axes.set(xlabel="passages of the document", title=title)
        handles, names = zip(*entries, strict=True)
        figure.legend(handles, [*map(LABELS.get, names)], loc="outside lower center", ncols=3)
        return standalone(figure, f"{title}, with 95 % intervals")


if __name__ == "__main__":
    OUT.write_text(drawn(*table(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")
