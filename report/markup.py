"""Turn data into the HTML of a page: one template, one style sheet, every text escaped.

Holds: `Section`, `page`, `as_table` and other parts of a page; `fill`, for the content of a cell;
`macro`, which calls any macro of the template. Leaves out: what a page says (report/page.py,
report/streams.py), transcripts (report/transcripts.py). No torch.
Exercise it: `pytest tests/report/test_markup.py`. Read next: report/page.html.j2.

Questions, documents and answers are foreign text. A `str` is cleaned of control characters and
escaped wherever it enters a page; `Markup` is HTML already, and is made here and in report/plots.py
only. The page loads nothing, and its Content-Security-Policy forbids every script but the one that
`page` was given, by its digest.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
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
REFRESH = 20  # seconds until a browser loads the page of a run anew that goes on
LONG = 12  # rows of a table that is not folded, at most

# ---------------------------------------------------------------- the template


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


def joined(parts: Iterable[Text], between: str = "") -> Markup:
    """Join parts of a page; what is text among them is escaped. between: HTML, as a literal."""
    return Markup(between).join(map(_finished, parts))


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

    title: Text  # "": it stands in no list of contents
    body: Markup | str  # "" or HTML: a text would be escaped
    note: Text = ""  # how to read the body, above it

    def html(self, anchor: str = "") -> Markup:
        return macro("section", self, anchor)


def as_table(caption: Text, head: Sequence[Text], rows: Iterable[Sequence[Text]]) -> Markup:
    """Return a table, "" without rows; folded away if it is long.

    rows: the first two cells of each name it.
    """
    rows = list(rows)
    made = macro("as_table", caption, head, rows) if rows else Markup()
    return folded(f"{caption} ({len(rows):,} rows)", made) if len(rows) > LONG else made


def by_length(
    rows: Mapping[tuple, Mapping[int, object]], empty: object = ""
) -> tuple[list[int], list[list]]:
    """Return the lengths in ascending order and, of each row, its names and a cell for each length.

    rows: names -> length -> cell; a cell that is missing is `empty`. Every table with a column for
    each length is made here, for the terminal, for Markdown and for the page.
    """
    lengths = sorted({length for cells_ in rows.values() for length in cells_})
    return lengths, [
        [*names, *(cells_.get(n, empty) for n in lengths)] for names, cells_ in rows.items()
    ]


def table_by_length(
    caption: Text, head: Sequence[Text], rows: Mapping[tuple[Text, ...], Mapping[int, Text]]
) -> Markup:
    """Return a table with a column per length, in ascending order, after those named in `head`.

    rows: leading cells -> length -> cell; a cell that is missing stays empty.
    """
    lengths, body = by_length(rows)
    return as_table(caption, [*head, *(f"{n:,}" for n in lengths)], body)


def figures(panels: Markup) -> Markup:
    """Set the figures of report/plots.py side by side; "" without any."""
    return fill('<div class="plots">{}</div>', panels) if panels else Markup()


def folded(label: Text, body: Text) -> Markup:
    return fill("<details><summary>{}</summary>{}</details>", label, body)


def heat(share: float, note: str = "") -> Markup:
    """Return a cell of a heat map: the larger the share, the darker the cell."""
    small = fill("<small>{}</small>", note) if note else ""
    percent = f"{100 * min(1.0, max(0.0, share)):.0f}"
    return fill('<span class="heat" style="--v:{}%">{}</span>{}', percent, f"{share:.2f}", small)


# ---------------------------------------------------------------- the page


def page(
    title: str, lead: Markup, sections: Iterable[Section], script: str = "", refresh: int = 0
) -> str:
    """Return the whole page. lead: what stands above the sections.

    script: JavaScript of our own, the only one that the page's policy lets run. ValueError if it
    would end its element early. refresh: seconds after which a browser loads the page anew; 0:
    never.
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
        sections=[(section, f"s{k}") for k, section in enumerate(kept)],
        style=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
        policy=Markup(policy),
        script=Markup(script),
        refresh=refresh,
    )
