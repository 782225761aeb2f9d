"""Draw docs/ask.svg, the terminal of the front page, from what its first command really prints.

Holds: `shown`, what a command leaves on a terminal; `drawn`, the same as an SVG file's text.
Leaves out: the document that is asked about (dev/town.py), plots (dev/picture.py).
Exercise it: `python -m dev.terminal`, a minute on two cores. Read next: commands/ask.py.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
OUT, COLUMNS = ROOT / "docs/ask.svg", 92
COMMAND = 'python cli.py ask examples/town.pdf "Who designed the Iron Bridge?"'
# fonts of the reader's own: a picture on a page fetches nothing
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)
FORMAT = FORMAT.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def printed(command: str) -> str:
    """Return what a command writes to a terminal of its own, with everything that steers it."""
    reading, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, COLUMNS))
    words = [sys.executable, *shlex.split(command)[1:]]
    with tempfile.TemporaryDirectory() as folder:  # runs/ of the checkout stays as it is
        for name in ("cli.py", "examples"):
            (Path(folder) / name).symlink_to(ROOT / name)
        given = {"stdin": subprocess.DEVNULL, "stdout": terminal, "stderr": terminal}
        with subprocess.Popen(words, cwd=folder, env=os.environ | {"TERM": "xterm"}, **given) as it:
            os.close(terminal)
            out = b""
            try:
                while piece := os.read(reading, 2**16):
                    out += piece
            except OSError:  # on Linux the end of a terminal is an error
                pass
        if it.returncode:
            raise SystemExit(out.decode())
    return out.decode()


def shown(output: str) -> str:
    """Return the lines that are left on the terminal, colours included: bars are drawn over.

    >>> shown("one\\r\\nbar 1/2\\r\\x1b[2Kbar 2/2\\r\\n")
    'one\\nbar 2/2'
    """
    lines, row = [""], 0
    for part in re.split(r"(\n|\x1b\[\d*[AK])", output.replace("\r", "")):
        if part == "\n":
            row += 1
        elif part.endswith("A") and part.startswith("\x1b["):
            row -= int(part[2:-1] or 1)
        elif part.startswith("\x1b[") and part.endswith("K"):
            lines[row] = ""
        else:
            lines += [""] * (row + 1 - len(lines))
            lines[row] += re.sub(r"\x1b\[\?\d+[hl]", "", part)
    return "\n".join(lines).rstrip()


def drawn(command: str, lines: str) -> str:
    """Return a picture of a terminal with a command and the lines that it left."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(lines))
    svg = console.export_svg(
        title="", theme=MONOKAI, code_format=FORMAT, unique_id="terminal", font_aspect_ratio=0.61
    )
    return re.sub(r"[ \t]+\n", "\n", svg)


if __name__ == "__main__":
    OUT.write_text(drawn(COMMAND, shown(printed(COMMAND))), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1024:.0f} KiB")
