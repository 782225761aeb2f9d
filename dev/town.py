"""Write examples/town.pdf, the document that README asks about, and ask the reader about it.

Holds: the pages of dev/town.txt, the report of an invented town. examples/town.csv has questions
with their answers, all written before the first was asked. Leaves out: reading it (tasks/pdf.py).
Exercise it: `python -m dev.town` writes the file; `python -m dev.town ask` asks all the questions
and says how many are right, in some ten minutes. Read next: dev/terminal.py.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
from pathlib import Path

from data import sub_em

ROOT = Path(__file__).resolve().parent.parent
PDF, TEXT, QUESTIONS = ROOT / "examples/town.pdf", ROOT / "dev/town.txt", ROOT / "examples/town.csv"
WIDTH, HEIGHT, LINES, COLUMNS = 6.9, 9.8, 42, 88  # of a page: inches, lines, characters
# no font is embedded, and no date: the same text gives the same file
STYLE = {"pdf.use14corefonts": True, "font.family": "Times", "font.size": 11}


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


def ask(*flags: str) -> None:
    """Ask every question by the command and print question, answer and whether it is right."""
    with QUESTIONS.open(newline="", encoding="utf-8") as file:
        asked = [(row["question"], row["answer"]) for row in csv.DictReader(file)]
    first, *others = (question for question, _ in asked)
    also = [word for question in others for word in ("--also", question)]
    words = [sys.executable, "cli.py", "ask", str(PDF), first, *also, "--json", *flags]
    found = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    right = 0
    for (question, answer), one in zip(asked, json.loads(found), strict=True):
        right += (good := bool(sub_em(one["answer"], [answer])))
        print(f"{'right' if good else 'WRONG'}  {question}  {one['answer']}  ({answer})")
    print(f"{right} of {len(asked)} right")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        ask(*sys.argv[2:])
    else:
        write(PDF)
        print(f"{PDF.relative_to(ROOT)}: {PDF.stat().st_size / 1024:.0f} KiB")
