"""Turn data into the HTML of a page: one template, one style sheet, every text escaped.

Holds: `Section`, `page`, `table` and other parts of a page; `fill`, for the content of a cell;
`macro`, which calls any macro of the template; `by_length`. Leaves out: what a page says
(report/page.py, report/streams.py), transcripts (report/transcripts.py). No torch.
Exercise it: `pytest tests/report/test_markup.py`. Read next: report/page.html.j2.

Questions, documents and answers are foreign text. A `str` is cleaned of control characters and
escaped wherever it enters a page; `Markup` is HTML already, and is made here and in report/plots.py
only. The page loads nothing, and its Content-Security-Policy forbids every script but the one that
`page` was given, by its digest.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.environment import TemplateModule
from markupsafe import Markup

from config.errors import clean

STYLE_SHEET = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Text = str | Markup  # a str is escaped


def _finished(value: object) -> object:
    return value if isinstance(value, Markup) else clean(value)


@cache
def _template() -> TemplateModule:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").module


def macro(name: str, *values: object, **named: object) -> Markup:
    """Return what a macro of the template makes of these values."""
    return getattr(_template(), name)(*values, **named)


def fill(pattern: str, *values: object) -> Markup:
    """Fill values into a short pattern of HTML. Give the pattern as a literal.

    >>> fill("<b>{}</b>", "1 < 2")
    Markup('<b>1 &lt; 2</b>')
    """
    return Markup(pattern).format(*map(_finished, values))


def joined(parts: Iterable[Text]) -> Markup:
    """Join parts of a page; what is text among them is escaped."""
    return Markup("").join(map(_finished, parts))


# ---------------------------------------------------------------- transcripts

Node = list  # [tag, class, *children]; a child is a text, cleaned, or a node


def node(tag: str, *children: str | Node, style: str = "") -> Node:
    """Return an element as plain data, which a page's script can build without parsing HTML."""
    return [tag, style, *(clean(x) if isinstance(x, str) else x for x in children)]


def html(tree: Node) -> Markup:
    """Write a node as HTML.

    >>> html(node("p", node("b", "1 < 2"), " or", style="memory"))
    Markup('<p class="memory"><b>1 &lt; 2</b> or</p>')
    """
    tag, style, *children = tree
    content = joined(html(child) if isinstance(child, list) else child for child in children)
    attribute = fill(' class="{}"', style) if style else ""
    return fill("<{}{}>{}</{}>", Markup(tag), attribute, content, Markup(tag))


# ---------------------------------------------------------------- parts of a page


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the page. A section without a body is left out."""

    title: Text
    body: Markup | str  # "" or HTML: a text would be escaped
    note: Text = ""  # how to read the body, above it


# of a table: (the cells that name it, column -> cell) for each row
Rows = Collection[tuple[Sequence[Text], Mapping[object, Text]]]


def table(
    caption: Text,
    head: Sequence[Text],
    rows: Rows,
    columns: Collection[object] | None = None,
) -> Markup:
    """Return a table, "" without rows.

    head: names of the leading columns. rows: the leading cells, and column -> cell; one that is
    missing stays empty. columns: those after the leading ones, by default all that rows have, in
    the order in which they come.
    """
    if not rows:
        return Markup()
    if columns is None:
        columns = dict.fromkeys(name for _, cells in rows for name in cells)
    lines = [[*first, *(cells.get(name, "") for name in columns)] for first, cells in rows]
    return macro("table", caption, [*head, *map(_column, columns)], lines)


def _column(name: object) -> Text:
    return f"{name:,}" if isinstance(name, int) else name


def by_length(rows: Rows) -> list[int]:
    """Return the columns of rows whose cells are by length: the lengths in order."""
    return sorted({length for _, cells in rows for length in cells})


def parts(sections: Iterable[Section]) -> Markup:
    """Return sections that one folds out, below each other; those without a body are left out."""
    return joined(macro("part", section) for section in sections if section.body)


def figures(panels: Markup) -> Markup:
    """Set the figures of report/plots.py side by side; "" without any."""
    return fill('<div class="plots">{}</div>', panels) if panels else Markup()


def heat(share: float, note: str = "") -> Markup:
    """Return a cell of a heat map, in per cent: the larger the share, the darker the cell."""
    small = fill("<small>{}</small>", note) if note else ""
    dark = f"{100 * min(1.0, max(0.0, share)):.0f}"
    return fill('<span class="heat" style="--v:{}%">{}</span>{}', dark, percent(share), small)


def percent(share: float, sign: str = "") -> str:
    """Write a share, or with a sign + the difference of two, on the one scale of all reports.

    >>> percent(0.375), percent(-0.125, "+"), percent(-0.0)
    ('37.5', '-12.5', '0.0')
    """
    return f"{round(100 * share, 1) + 0.0:{sign}.1f}"  # + 0.0: no -0.0


def bounds(record: Mapping[str, float], between: str = "–", sign: str = "") -> str:
    """Write the interval of a record, in whole per cent.

    >>> bounds({"low": 0.118, "high": 0.766}), bounds({"low": -0.1, "high": 0.004}, " … ", "+")
    ('12–77', '-10 … +0')
    """
    return between.join(f"{round(100 * record[end]) + 0:{sign}d}" for end in ("low", "high"))


def count(record: Mapping[str, float]) -> str:
    """Write how many questions a record is about, and where they share a single document, that.

    >>> count({"n": 1540, "documents": 10}), count({"n": 16, "documents": 1})
    ('n 1,540', 'n 16, one document')
    """
    return f"n {record['n']:,}" + ", one document" * (record.get("documents") == 1)


# ---------------------------------------------------------------- the page


def page(
    title: str,
    lead: Markup,
    sections: Iterable[Section],
    script: str = "",
    foot: Text = "",
) -> str:
    """Return the whole page. lead, foot: what stands above and below the sections.

    script: JavaScript of our own, the only one that the page's policy lets run. ValueError if it
    would end its element early.
    """
    if "</" in script or "<!--" in script:
        raise ValueError("a script that holds </ or <!-- cannot stand in a page")
    kept = [section for section in sections if section.body]
    policy = POLICY
    if script:
        policy += f"; script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    return macro(
        "page",
        title=title,
        lead=lead,
        foot=foot,
        sections=[(section, f"s{k}") for k, section in enumerate(kept)],
        style=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
        policy=Markup(policy),
        script=Markup(script),
    )
