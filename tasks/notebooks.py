"""JSON, notebooks and data: URLs as text that a person would read.

Holds: `readable`, `LeftOut`. Leaves out: JSON that is a chat (tasks/chats.py). No torch.
Exercise it: `python cli.py ask study.ipynb "question"`. Read next: tasks/forms.py.

Of a notebook (nbformat 2 to 4) cells and what they print are read, of other JSON the text as it
stands, with its escapes decoded: numbers, fields and their order are not touched. What is no JSON,
such as JSON with comments, keeps its escapes.
"""

from __future__ import annotations

import json
import re
from itertools import chain

from pydantic import AliasChoices, BaseModel, Field, ValidationError

STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"|, ?(?=["\[{])')  # of JSON, or a comma between values
KIND, SETTINGS = r"[\w.+-]{1,80}+/[\w.+-]{1,80}+", r"(?:;[\w.=+%*-]{1,40}+){0,4}"
CLEAR = rf"(?=(?:image|audio|video|font|model|application)/)(?P<clear>{KIND}){SETTINGS}(?<!;base64)"
DATA = re.compile(  # lines of base64 after the first are long; between quotes there may be blanks
    r"""data:(?:(?<=(["'`])data:))?"""  # the search is quick, as its beginning is no choice
    rf"""(?:(?P<kind>{KIND})?{SETTINGS};base64,(?P<bits>[A-Za-z0-9+/=_%-]{{20,}}+"""
    rf"""(?:\n[ \t>]*+[A-Za-z0-9+/=_-]{{40,}}+)*+)|{CLEAR},"""
    r"""(?P<signs>(?(1)(?:(?!\1)[^\n])++|[^\s"'`<>()\\]++)))""",
    re.ASCII,
)
BASE64 = re.compile(r"(?=[^a-z]*+[a-z])(?=[^A-Z]*+[A-Z])(?=[^0-9]*+[0-9])[\w+/=\r\n-]++", re.ASCII)
SHORTEST = 1000  # characters of base64 that is not said to be such: longer than hashes and keys
PICTURES = ("iVBOR", "/9j/", "R0lGOD", "UklGR")  # PNG, JPEG, GIF and WebP begin so in base64
COLOURS = re.compile(r"\x1b\[[0-?]*+[ -/]*+[@-~]")  # of terminals
UNSHOWN = re.compile("[\0-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # no text, or half a letter


def readable(text: str, name: str) -> tuple[str, str]:
    """Return the text of a file as it is read, and a remark on what was left out ("" = nothing).

    name: the file's, as it begins the remark.
    """
    left_out = LeftOut()
    shown = _notebook(text, left_out) or left_out.without(_json(text, left_out))
    return shown, f"{name}: left out: {left_out}." if left_out.sizes else ""


class LeftOut:
    """Takes pictures and other data out of texts, and counts them."""

    def __init__(self):
        self.sizes: dict[str, list[int]] = {}  # bytes of each, by the kind of thing

    def __str__(self) -> str:
        """Say what was left out: "2 pictures (2.1 MB)"; "" = nothing."""
        kinds = []
        for what, sizes in self.sizes.items():
            n, kb = len(sizes), sum(sizes) / 1000
            size = f"{kb / 1000:,.1f} MB" if kb >= 1000 else f"{kb:.1f} KB"
            kinds.append(f"{n:,} {what}{'s' * (n > 1)} ({size})")
        return " and ".join(kinds)

    def add(self, picture: bool, size: int) -> str:
        """Count a thing of so many bytes, and return what stands in its place."""
        what = "picture" if picture else "data block"
        self.sizes.setdefault(what, []).append(size)
        return f"{what} left out"

    def without(self, text: str) -> str:
        """Return a text without the data: URLs in it; those that are text in clear stay."""
        return DATA.sub(self._url, text) if "data:" in text else text

    def _url(self, match: re.Match) -> str:
        kind, bits, signs = match["kind"] or match["clear"] or "", match["bits"], match["signs"]
        size = 3 * len(bits) // 4 if bits else len(signs)
        return self.add(kind.startswith("image/"), size)


# ---------------------------------------------------------------- JSON


def _json(text: str, left_out: LeftOut) -> str:
    """Return JSON, or lines of which the first is JSON, with decoded strings; else the text."""

    def decoded(match: re.Match) -> str:
        if match[0][0] == ",":
            return ",\n" if of_one_line else match[0]
        string = match[0][1:-1]
        if escaped := "\\" in string:
            string = COLOURS.sub("", _lines(json.loads(match[0])))
        if len(string) >= SHORTEST and BASE64.fullmatch(string):
            return f'"{left_out.add(string.startswith(PICTURES), 3 * len(string) // 4)}"'
        if "data:" in string:
            string = left_out.without(f"`{string}`")[1:-1]  # a URL that is all of it has blanks
        if escaped:
            string = string.replace("\\", r"\\").replace('"', r"\"")
            string = UNSHOWN.sub(lambda sign: f"\\u{ord(sign[0]):04x}", string)
        return f'"{string}"'

    of_one_line = "\n" not in text.strip()
    if _is_json(text):
        return STRING.sub(decoded, text)
    if not _is_json(text.lstrip().partition("\n")[0]):
        return text
    return "\n".join(STRING.sub(decoded, e) if _is_json(e) else e for e in text.split("\n"))


def _is_json(text: str) -> bool:
    """Tell whether a text is JSON, without keeping what it says."""
    try:
        json.loads(text, object_pairs_hook=bool, parse_int=bool, parse_float=bool)
    except (ValueError, RecursionError):
        return False
    return True


# ---------------------------------------------------------------- notebooks


class Cell(BaseModel):
    """A cell of a notebook; code has outputs, and in nbformat 3 it is an `input`."""

    cell_type: str
    source: str | list[str] = Field("", validation_alias=AliasChoices("source", "input"))
    attachments: dict[str, dict] = {}
    outputs: list[dict] = []


class Sheet(BaseModel):
    """The cells of a notebook, or of one of its sheets in nbformat 3."""

    cells: list[Cell] = []


class Notebook(Sheet):
    """A notebook of any format."""

    nbformat: int
    worksheets: list[Sheet] = []


OLD = {"text": "text/plain", "html": "text/html", "latex": "text/latex", "png": "image/png",
       "jpeg": "image/jpeg", "svg": "image/svg+xml"}  # fmt: skip
"""Names of kinds in nbformat 3; what is printed is a text in both."""
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
    for cell in chain(notebook.cells, *(sheet.cells for sheet in notebook.worksheets)):
        source = _joined(cell.source)
        pieces.append(f"```\n{source}\n```" if cell.cell_type == "code" and source else source)
        pieces += [_output(attached, left_out) for attached in cell.attachments.values()]
        pieces += [_output(_kinds(output), left_out) for output in cell.outputs]
    shown = "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())
    return left_out.without(COLOURS.sub("", _lines(shown)))


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _joined(value: object) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kinds(output: dict) -> dict:
    """Return what a cell shows, by its kind."""
    if "ename" in output:
        lines = output.get("traceback") or [f"{output['ename']}: {output.get('evalue')}"]
        return {"text/plain": "\n".join(map(_joined, lines)) if isinstance(lines, list) else lines}
    if isinstance(data := output.get("data"), dict):
        return data
    return {OLD[key]: value for key, value in output.items() if key in OLD}


def _output(kinds: dict, left_out: LeftOut) -> str:
    """Return an output as text: plain, unless that only names an object that is shown otherwise."""
    from tasks.markup import of_html

    texts = {kind: _joined(value) for kind, value in kinds.items()}
    plain = texts.pop("text/plain", "")
    named = "" if re.fullmatch(r"<[^\n]*>", plain) else plain
    if pictures := [text for kind, text in texts.items() if kind.startswith("image/")]:
        return f"{named}\n[{left_out.add(True, 3 * max(map(len, pictures)) // 4)}]"
    for kind in () if named else SHOWN:
        text = texts.get(kind, "")
        if text := of_html(text, "")[1] if kind == "text/html" else text:
            return text
    if texts and not named:
        plain += f"\n[{left_out.add(False, sum(map(len, texts.values())))}]"
    return plain
