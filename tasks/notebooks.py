"""JSON, notebooks and data: URLs as text that a person would read.

Holds: `readable`. Leaves out: other forms (tasks/forms.py). No torch.
Exercise it: `python cli.py ask study.ipynb "question"`. Read next: tasks/forms.py.

Of a notebook (nbformat 4) cells and what they print are read, of other JSON the text as it stands,
with its escapes decoded: numbers, fields and their order are not touched. What is no JSON, such as
JSON with comments, keeps its escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ValidationError

DATA = re.compile(  # in JSON, slashes and line ends may be escaped; lines after the first are long
    r"data:(?P<kind>[\w.+/\\-]{0,160}+)(?:;[\w.=+%*-]{1,40}+){0,4};base64,"
    r"(?P<bits>(?:[\w+/=%-]|\\[/nr]){20,}+(?:\n[\w+/=-]{40,}+)*+)",
    re.ASCII,
)
# a value of JSON that is not said to be base64: longer than keys, with signs of all kinds
BASE64 = re.compile(
    r'"(?=[^"a-z]*+[a-z])(?=[^"A-Z]*+[A-Z])(?=[^"0-9]*+[0-9])(?P<bits>[\w+/=\r\n-]{1000,}+)"',
    re.ASCII,
)
ESCAPES = re.compile(r"(?:\\(?:u\w{4}|.))+")  # together, as a letter may be two of them
ESCAPED = re.compile('["\\\\\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ud800-\udfff]')  # these stay escapes
COLOURS = re.compile(r"\x1b\[[0-?]*+[ -/]*+[@-~]")  # of terminals


def readable(text: str, name: str) -> tuple[str, str]:
    """Return the text of a file as it is read, and a remark on what was left out ("" = nothing).

    name: the file's, as it begins the remark.
    """
    left_out = LeftOut()
    text = left_out.without(text)
    shown = _notebook(text, left_out) or _json(text, left_out)
    shown = COLOURS.sub("", shown.replace("\r\n", "\n").replace("\r", "\n"))
    return shown, f"{name}: left out: {left_out}." if left_out.sizes else ""


class LeftOut:
    """Takes pictures and other data out of texts, and counts them."""

    def __init__(self):
        self.sizes: dict[str, list[float]] = {}  # KB of each, by the kind of thing

    def __str__(self) -> str:
        """Say what was left out: "2 pictures (120.0 KB)"; "" = nothing."""
        return " and ".join(
            f"{len(sizes):,} {what}{'s' * (len(sizes) > 1)} ({sum(sizes):,.1f} KB)"
            for what, sizes in self.sizes.items()
        )

    def add(self, what: str, bits: str) -> str:
        """Count something that is written in base64; return what stands in its place."""
        self.sizes.setdefault(what, []).append(0.75 * len(bits) / 1000)
        return f"{what} left out"

    def without(self, text: str) -> str:
        """Return a text without the data: URLs in it that are in base64."""

        def place(match: re.Match) -> str:
            picture = match["kind"].startswith("image")
            return self.add("picture" if picture else "data block", match["bits"])

        return DATA.sub(place, text)


# ---------------------------------------------------------------- JSON


def _json(text: str, left_out: LeftOut) -> str:
    """Return JSON, or lines of JSON, with decoded strings and without base64; else the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    lines = [text] if _is_json(text) else text.split("\n")
    shown = "\n".join(ESCAPES.sub(_letters, line) if _is_json(line) else line for line in lines)
    return BASE64.sub(lambda match: f'"{left_out.add("data block", match["bits"])}"', shown)


def _letters(escapes: re.Match) -> str:
    """Return what escapes stand for, but for those that neither JSON nor a text can do without."""
    letters = json.loads(f'"{escapes[0]}"')
    return ESCAPED.sub(lambda letter: json.dumps(letter[0])[1:-1], letters)


def _is_json(text: str) -> bool:
    """Tell whether a text is JSON, without keeping what it says."""
    try:
        json.loads(text, object_pairs_hook=bool, parse_int=bool, parse_float=bool)
    except (ValueError, RecursionError):
        return False
    return True


# ---------------------------------------------------------------- notebooks


class Output(BaseModel):
    """What a cell prints, shows or fails with."""

    text: str | list[str] = ""
    data: dict[str, Any] = {}  # by its kind
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []


class Cell(BaseModel):
    """A cell of a notebook."""

    cell_type: str
    source: str | list[str] = ""
    attachments: dict[str, dict[str, Any]] = {}  # by name and kind
    outputs: list[Output] = []


class Notebook(BaseModel):
    """A notebook, nbformat 4."""

    nbformat: int
    cells: list[Cell]


SHOWN = ("text/markdown", "text/html", "text/latex", "application/json")


def _notebook(text: str, left_out: LeftOut) -> str:
    """Return the cells of a notebook with what they print; "" for what is none."""
    if '"nbformat"' not in text:
        return ""
    try:
        notebook = Notebook.model_validate_json(text)
    except ValidationError:
        return ""
    pieces = []
    for cell in notebook.cells:
        source = _joined(cell.source)
        pieces.append(f"```\n{source}\n```" if cell.cell_type == "code" and source else source)
        pieces += [_seen(attached, left_out) for attached in cell.attachments.values()]
        for output in cell.outputs:
            error = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
            printed = error if output.ename else output.text
            pieces.append(_seen(output.data or {"text/plain": printed}, left_out))
    return "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())


def _joined(value: object) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seen(kinds: dict[str, Any], left_out: LeftOut) -> str:
    """Return an output as text: plain, unless that only names an object that is shown otherwise."""
    from tasks.markup import of_html

    texts = {kind: _joined(value) for kind, value in kinds.items()}
    plain = texts.pop("text/plain", "")
    if texts and re.fullmatch(r"<[^\n]*>", plain):
        plain = ""
    if pictures := [text for kind, text in texts.items() if kind.startswith("image/")]:
        return f"{plain}\n[{left_out.add('picture', max(pictures, key=len))}]"
    if plain or not texts:
        return plain
    for kind in SHOWN:
        text = texts.get(kind, "")
        if kind == "text/html":
            text = of_html(text, "")[1]
        if text:
            return text
    return f"[{left_out.add('data block', ''.join(texts.values()))}]"
