"""Draw docs/ask.svg, the terminal of the front page, from what its first command really prints.

Holds: `printed`, what a command prints; `drawn`, the same as an SVG file's text.
Leaves out: the document that is asked about (dev/town.py), plots (dev/picture.py).
Exercise it: `python -m dev.terminal`, a minute on two idle cores. Read next: commands/ask.py.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
OUT, COLUMNS = ROOT / "docs/ask.svg", 92
COMMAND = 'python cli.py ask examples/town.pdf "Who designed the Iron Bridge?"'
# as on a terminal, but for the bar: it is printed once, as it ends
TERMINAL = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": f"{COLUMNS}"}
# fonts of the reader's own: a picture on a page fetches nothing
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)
FORMAT = FORMAT.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def printed(command: str) -> str:
    """Return what a command of the clone prints, with its colours; its run is not kept."""
    words = [sys.executable, f"{ROOT / 'cli.py'}", *shlex.split(command)[2:]]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        done = subprocess.run(words, cwd=folder, env=os.environ | TERMINAL, text=True, **pipes)
    if done.returncode:
        raise SystemExit(done.stdout)
    return re.sub(r"\x1b\[\?\d+[hl]", "", done.stdout).replace("\n\n", "\n").strip()


def drawn(command: str, lines: str) -> str:
    """Return a picture of a terminal with a command and the lines that it printed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(lines))
    svg = console.export_svg(title="", theme=MONOKAI, code_format=FORMAT, unique_id="terminal")
    return re.sub(r"[ \t]+\n", "\n", svg)


if __name__ == "__main__":
    OUT.write_text(drawn(COMMAND, printed(COMMAND)), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")
