"""Write examples/town.pdf, the document that README asks about, and the questions about it.

Holds: the pages of dev/town.txt, the report of an invented town; the suite of the questions of
examples/town.csv, all of which were written before the first was asked (one answer was put into
the document's words afterwards); ten of thirty ask what the report does not hold. Leaves out:
reading a PDF (tasks/pdf.py).
Read next: dev/terminal.py. Exercise it: `python -m dev.town` writes the file, and

    python cli.py eval --name town --suite dev/town.py --n 30 --model smollm2-reader \\
        --agents memagent,bm25 --temperatures 0 --not-found say
"""

from __future__ import annotations

import csv
import textwrap
from dataclasses import dataclass
from pathlib import Path

from data import NOT_FOUND, Task
from suites import Column, Scope, Suite
from tasks import documents

ROOT = Path(__file__).resolve().parent.parent
PDF, TEXT, QUESTIONS = ROOT / "examples/town.pdf", ROOT / "dev/town.txt", ROOT / "examples/town.csv"
WIDTH, HEIGHT, LINES, COLUMNS = 6.9, 9.8, 42, 88  # of a page: inches, lines, characters
# no font is embedded, and no date: the same text gives the same file
STYLE = {
    "pdf.use14corefonts": True,
    "font.family": "Times",
    "font.size": 11,
    "font.weight": "roman",
}


def lines() -> list[tuple[str, bool]]:
    """Return the lines of the report, and whether each is a heading."""
    out: list[tuple[str, bool]] = []
    for paragraph in TEXT.read_text(encoding="utf-8").split("\n\n"):
        words = paragraph.strip()
        heading = words.startswith("# ")
        if heading and len(out) % LINES > LINES - 4:  # no heading at the foot of a page
            out += [("", False)] * (LINES - len(out) % LINES)
        out += [(line, heading) for line in textwrap.wrap(words.removeprefix("# "), COLUMNS)]
        out.append(("", False))
    return out


def write(path: Path) -> None:
    """Write the report as a PDF whose text can be read again."""
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    undated = {"CreationDate": None, "Creator": None, "Producer": None}
    every = lines()
    with matplotlib.rc_context(STYLE), PdfPages(path, metadata=undated) as pages:
        for start in range(0, len(every), LINES):
            figure = Figure(figsize=(WIDTH, HEIGHT))
            for k, (line, heading) in enumerate(every[start : start + LINES]):
                weight = "bold" if heading else "roman"
                figure.text(0.1, 0.93 - k * 0.0207, line, weight=weight)
            figure.text(0.5, 0.03, str(start // LINES + 1), ha="center")
            pages.savefig(figure)


@dataclass(frozen=True)
class Town(Suite):
    """The questions of examples/town.csv about the report, as `ask` puts them."""

    unit, lengths, metric = "pages", (14,), "sub_em"

    def columns(self, scope: Scope) -> list[Column]:
        """Return the one column: all questions, whose text is what is read of the PDF."""
        with QUESTIONS.open(newline="", encoding="utf-8") as file:
            asked = [(row["question"], row["answer"]) for row in csv.DictReader(file)]
        text = documents.read([PDF]).text
        tasks = [
            Task(f"town-{k}", question, (right or NOT_FOUND,), text, kind=kind)
            for k, (question, right) in enumerate(asked)
            for kind in ["town" if right else "absent"]
        ]
        return [Column("", self.lengths[0], lambda: tasks[: scope.n])]


if __name__ == "__main__":
    write(PDF)
    print(f"{PDF.relative_to(ROOT)}: {PDF.stat().st_size / 1024:.0f} KiB")
