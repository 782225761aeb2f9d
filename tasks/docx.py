"""A docx as text: headers, footers, body, list numbers, tables a row a line, notes, comments.

Elements and attributes are those of ECMA-376, without their namespaces: strict files have others.
What a paragraph refers to stands beside it, so that a section has both: "[Note 1: ...]",
"[Comment by Anna: ...]". What is deleted or hidden is not read.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from xml.etree import ElementTree

from tasks.forms import Contents, Members, damage, remark_on, target

Element = ElementTree.Element
Run = tuple[str, str]  # how it is written, a key of WRITTEN, and the text

WRITTEN = {"": "{}", "superscript": "^{}", "subscript": "_{}", "struck": "[struck out: {}]"}
UNSEEN = set("del moveFrom instrText pPr rPr tblPr trPr tcPr sdtPr sectPr".split())
SIGNS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
LEFT_OUT = {
    "blip": "picture", "imagedata": "picture", "textpath": "picture", "chart": "chart",
    "relIds": "diagram", "OLEObject": "embedded file", "altChunk": "embedded file",
}  # fmt: skip
BESIDE = {"footnoteReference": "footnotes", "endnoteReference": "endnotes",
          "commentReference": "comments"}  # fmt: skip


def main_part(members: Members) -> str:
    """Return the member that holds a Word document's text, as its package names it; "" if none."""
    for each in ElementTree.fromstring(members.read("_rels/.rels")):
        path = target("", value(each, "Target"))
        if value(each, "Type").endswith("/officeDocument") and path in members.names:
            if b"wordprocessingml" in members.read(path)[:8192]:
                return path
    return ""


def of_docx(members: Members, main: str, name: str) -> Contents:
    """Read a Word document; main: the member that holds its body. UserError: it is damaged."""
    with damage(name, "docx file"):
        document = Docx(members, main)
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(document.lines())).strip()
    return Contents("file", [(text, 0, "")], remark=remark_on(name, document.left_out))


def kind(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def value(element: Element | None, name: str = "val", default: str = "") -> str:
    """Return an attribute, whatever its namespace."""
    attributes = {} if element is None else element.attrib
    return next((v for k, v in attributes.items() if k.rpartition("}")[2] == name), default)


def child(element: Element | None, *path: str) -> Element | None:
    """Return the first element at a path of names."""
    return None if element is None else element.find("/".join(f"{{*}}{name}" for name in path))


def on(properties: Element | None, name: str) -> bool:
    """Tell whether a property is set: it stands there, and no value takes it back."""
    found = child(properties, name)
    return found is not None and value(found, default="1") not in ("0", "false", "off")


class Docx:
    """The parts of a document, and how far its notes are counted."""

    def __init__(self, members: Members, main: str):
        self.members, self.main = members, main
        self.left_out: Counter[str] = Counter()
        self.n_notes: Counter[str] = Counter()
        folder, file = posixpath.split(main)
        self.targets: dict[str, str] = {}  # members by the ids under which the main part names them
        parts: defaultdict[str, Element] = defaultdict(lambda: Element("none"))
        for each in self.xml(f"{folder}/_rels/{file}.rels".lstrip("/")):
            path = self.targets[value(each, "Id")] = target(folder, value(each, "Target"))
            what = posixpath.basename(value(each, "Type"))
            if what in ("styles", "numbering", "settings", *BESIDE.values()):
                parts[what] = self.xml(path)
        self.settings = parts["settings"]
        self.styles = Styles(parts["styles"])
        self.lists = Lists(parts["numbering"], self.styles)
        # notes and comments that no paragraph has referred to so far
        self.beside = {(k, value(each, "id")): each for k in BESIDE.values() for each in parts[k]}

    def xml(self, path: str) -> Element:
        """Return a part; an empty one if the file lacks it."""
        if path not in self.members.names:
            return Element("none")
        return ElementTree.fromstring(self.members.read(path))

    def lines(self) -> Iterator[str]:
        body = child(self.xml(self.main), "body")
        if body is not None:
            yield from self.margins(body, "header")
            yield from self.blocks(body)
            yield from self.margins(body, "footer")

    def margins(self, body: Element, which: str) -> Iterator[str]:
        """Yield the different headers or footers that pages show."""
        even = on(self.settings, "evenAndOddHeaders")
        named: dict[str, str] = {}  # a section has those that it names, and else those before it
        shown: dict[str, None] = {}
        for section in body.iterfind(".//{*}sectPr"):
            for each in section.iterfind(f"{{*}}{which}Reference"):
                named[value(each, "type")] = self.targets.get(value(each, "id"), "")
            kinds = {"default": True, "first": on(section, "titlePg"), "even": even}
            shown |= dict.fromkeys(path for name, path in named.items() if kinds.get(name))
        texts = (" ".join(" ".join(self.blocks(self.xml(path))).split()) for path in shown)
        yield from (f"[{which.title()}: {text}]" for text in dict.fromkeys(texts) if text)

    def blocks(self, parent: Element) -> Iterator[str]:
        """Yield the paragraphs and the rows of tables in an element, and empty lines between."""
        for element in parent:
            name = kind(element)
            self.left_out += Counter([LEFT_OUT[name]] if name in LEFT_OUT else ())
            if name == "p":
                yield from self.paragraph(element)
            elif name == "tr":
                cells = (" ".join(self.blocks(cell)).split() for cell in cells_of(element))
                yield "\t".join(map(" ".join, cells))
            elif name == "AlternateContent":
                yield from self.blocks(alternative(element))
            elif name not in UNSEEN:
                yield from self.blocks(element)
                yield from ("",) * (name == "tbl")

    def paragraph(self, element: Element) -> Iterator[str]:
        beside: list[str] = []
        text = self.lists.number(child(element, "pPr"))
        for how, same in groupby(self.runs(element, beside), key=lambda run: run[0]):
            piece = "".join(words for _, words in same)
            if letters := piece.strip():  # blanks stay outside the mark
                piece = piece.replace(letters, WRITTEN[how].format(letters))
            text += piece
        yield from (text, *beside, "")

    def runs(self, parent: Element, beside: list[str], how: str = "") -> Iterator[Run]:
        """Yield the runs in an element; what stands beside them goes into `beside`."""
        for element in parent:
            name = kind(element)
            self.left_out += Counter([LEFT_OUT[name]] if name in LEFT_OUT else ())
            if name == "t":
                yield how, element.text or ""
            elif name in SIGNS:
                yield how, SIGNS[name]
            elif name == "sym":
                self.left_out["sign that a font alone knows"] += 1
                yield how, "\ufffd"
            elif name == "checkBox":
                is_checked = child(element, "checked") is not None
                yield how, "[x]" if on(element, "checked" if is_checked else "default") else "[ ]"
            elif name in BESIDE:
                note, line = self.note(name, value(element, "id"))
                yield "", note
                beside += line
            elif name == "txbxContent":
                beside += filter(None, self.blocks(element))
            elif name == "oMath":
                yield "", formula(element)
            elif name == "AlternateContent":
                yield from self.runs(alternative(element), beside, how)
            elif name == "ruby":
                yield from self.runs(child(element, "rubyBase"), beside, how)
                yield how, f"({''.join(child(element, 'rt').itertext())})"
            elif name == "r":
                if not self.styles.has(element, "vanish"):
                    struck = any(self.styles.has(element, way) for way in ("strike", "dstrike"))
                    where = "struck" if struck else value(child(element, "rPr", "vertAlign"))
                    yield from self.runs(element, beside, where if where in WRITTEN else "")
            elif name not in UNSEEN:
                yield from self.runs(element, beside, how)

    def note(self, name: str, identity: str) -> tuple[str, list[str]]:
        """Return the mark of a note or comment, and its line the first time that it is named."""
        found = self.beside.pop((BESIDE[name], identity), Element("none"))
        text = " ".join(" ".join(self.blocks(found)).split())
        mark, title = "", f"Comment by {value(found, 'author')}".removesuffix(" by ")
        if name != "commentReference":
            self.n_notes[name] += 1
            title = f"{'End note' if name[0] == 'e' else 'Note'} {self.n_notes[name]}"
            mark = f"[{title}]"
        return mark, [f"[{title}: {text}]"] if text else []


def cells_of(row: Element) -> Iterator[Element]:
    """Yield the cells of a row, also those within content controls."""
    for element in row:
        if kind(element) == "tc":
            yield element
        elif kind(element) not in UNSEEN:
            yield from cells_of(element)


def alternative(choices: Element) -> Element:
    """Return the first of several forms of one thing that holds text, else the first."""
    texts = (each for each in choices if any(kind(e) == "t" for e in each.iter()))
    return next(texts, next(iter(choices), choices))


# ---------------------------------------------------------------- styles and list numbers


class Styles:
    """The styles of a document by their names, each with those that it is based on."""

    def __init__(self, styles: Iterable[Element]):
        self.nodes = {value(each, "styleId"): each for each in styles if kind(each) == "style"}

    def based(self, name: str) -> Iterator[Element]:
        """Yield a style and those that it is based on."""
        seen = set()
        while name in self.nodes and name not in seen:
            seen.add(name)
            yield self.nodes[name]
            name = value(child(self.nodes[name], "basedOn"))

    def has(self, run: Element, name: str) -> bool:
        """Tell whether a run is written in a way, by itself or by its style."""
        style = value(child(run, "rPr", "rStyle"))
        ways = [child(run, "rPr"), *(child(each, "rPr") for each in self.based(style))]
        return on(next((way for way in ways if child(way, name) is not None), None), name)


class Lists:
    """The numbers of paragraphs in lists, counted as Word counts them."""

    def __init__(self, numbering: Iterable[Element], styles: Styles):
        self.styles = styles
        self.nodes = {value(e, "numId") or f"#{value(e, 'abstractNumId')}": e for e in numbering}
        self.counts: dict[tuple[str, int], int] = {}  # by abstract list and level
        self.begun: set[tuple[str, str]] = set()  # numIds and levels with a start of their own

    def number(self, properties: Element | None) -> str:
        """Return what stands before a paragraph: "2.1 ", "• " or ""."""
        number, level = self.place(properties)
        shared, levels = self.levels(number)
        if level not in levels:
            return ""
        for change in self.nodes[number].iterfind("{*}lvlOverride"):
            start = value(child(change, "startOverride"))
            if value(change, "ilvl") == level and start and (number, level) not in self.begun:
                self.begun.add((number, level))
                self.counts[shared, int(level)] = int(start) - 1
        at = int(level)
        for k in range(at + 1):
            start = int(value(child(levels.get(str(k)), "start"), default="1"))
            self.counts.setdefault((shared, k), start - (k == at))
        self.counts[shared, at] += 1
        for deeper in range(at + 1, 9):
            self.counts.pop((shared, deeper), None)
        text = value(child(levels[level], "lvlText"))
        if value(child(levels[level], "numFmt")) == "bullet":
            return "• " if text.strip() else ""
        for k in range(at + 1):
            form = value(child(levels.get(str(k)), "numFmt"), default="decimal")
            text = text.replace(f"%{k + 1}", written(self.counts[shared, k], form))
        return f"{text} " if text.strip() else ""

    def levels(self, number: str) -> tuple[str, dict[str, Element]]:
        """Return the name of the abstract list of a list, and its levels."""
        shared = f"#{value(child(self.nodes.get(number), 'abstractNumId'))}"
        levels = {value(e, "ilvl"): e for e in self.nodes.get(shared, ()) if kind(e) == "lvl"}
        for change in self.nodes.get(number, Element("none")).iterfind("{*}lvlOverride/{*}lvl"):
            levels[value(change, "ilvl")] = change
        return shared, levels

    def place(self, properties: Element | None) -> tuple[str, str]:
        """Return the list and the level of a paragraph: its own, or those of its style."""
        own, style = child(properties, "numPr"), value(child(properties, "pStyle"))
        if number := value(child(own, "numId")):
            return number, value(child(own, "ilvl"), default="0")
        names, level = [], ""
        for each in self.styles.based(style):
            names.append(value(each, "styleId"))
            place = child(each, "pPr", "numPr")
            level = level or value(child(place, "ilvl"))
            if number := value(child(place, "numId")):
                break
        _, levels = self.levels(number)
        named = {value(child(each, "pStyle")): at for at, each in levels.items()}
        return number, level or next((named[name] for name in names if name in named), "0")


def written(n: int, form: str) -> str:
    """Return a number as lists write it.

    >>> written(4, "lowerLetter"), written(28, "upperLetter"), written(9, "upperRoman")
    ('d', 'BB', 'IX')
    """
    text = str(n)
    if form.endswith("Letter") and 0 < n < 1000:
        text = chr(97 + (n - 1) % 26) * ((n - 1) // 26 + 1)
    elif form.endswith("Roman") and 0 < n < 4000:
        signs = zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
                    "m cm d cd c xc l xl x ix v iv i".split(), strict=True)  # fmt: skip
        text = ""
        for size, sign in signs:
            text, n = text + n // size * sign, n % size
    return "" if form == "none" else text.upper() if form.startswith("upper") else text


# ---------------------------------------------------------------- equations

FORMS = {  # of an equation's elements, by their parts
    "f": "{num}/{den}", "sSup": "{e}^{sup}", "sSub": "{e}_{sub}", "sSubSup": "{e}_{sub}^{sup}",
    "rad": "√{deg}{e}", "nary": "{chr}_{sub}^{sup} {e}",
}  # fmt: skip


def formula(element: Element) -> str:
    """Return an equation as one line, such as (a + b)/2 or x_i^2."""
    name = kind(element)
    if name == "t":
        return element.text or ""
    parts = [(kind(each), formula(each)) for each in element if kind(each) not in UNSEEN]
    if name in FORMS:
        grouped = {part: text if text.isalnum() else f"({text})" for part, text in parts if text}
        grouped["chr"] = value(child(element, "naryPr", "chr"), default="∫")
        flat = value(child(element, "fPr", "type")) == "noBar"
        form = "({num} over {den})" if flat else FORMS[name]
        return form.format_map(defaultdict(str, grouped))
    texts = [text for _, text in parts if text]
    if name == "d":
        first, last = (child(element, "dPr", each) for each in ("begChr", "endChr"))
        return value(first, default="(") + "|".join(texts) + value(last, default=")")
    return " ".join(texts) if name in ("m", "mr", "eqArr") else "".join(texts)
