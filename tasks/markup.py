"""HTML and books made of it (epub) as the text that a person sees; nothing is fetched.

Lexbor parses as browsers do (the HTML standard), and one loop walks its tree, however deep. Left
out: what scripts, style sheets beyond simple selectors and pictures show.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from typing import NamedTuple
from urllib.parse import unquote

from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from config.errors import UserError
from tasks.docx import written
from tasks.forms import (
    Contents,
    Members,
    Piece,
    check_size,
    decoded,
    few,
    joined,
    remark_on,
    target,
)

LONGEST_NAME = 200  # characters of a chapter's; a heading that is never closed is all of its text
UNSEEN = frozenset(
    "script style noscript noframes template title datalist rp "
    "desc defs metadata annotation annotation-xml".split()
)
COUNTED = {
    "nav": "navigation",
    **dict.fromkeys(("canvas", "image", "img"), "picture without words"),
    **dict.fromkeys(("iframe", "frame", "object", "embed"), "frame"),
    **dict.fromkeys(("audio", "video"), "recording"),
}
KEPT = frozenset(("pre", "textarea", "xmp", "listing", "plaintext"))  # with their blanks and lines
STRUCK = ("[struck out: ", "]")
AROUND = dict.fromkeys(
    "address article aside blockquote caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend main menu mtable ol "
    "p pre search section summary table text textarea ul".split(),
    ("\n", "\n"),
) | {
    **dict.fromkeys(("del", "s", "strike"), STRUCK),
    "li": ("\n", ""), "tr": ("\n", ""), "mtr": ("\n", ""),
    "br": ("\n", ""), "td": ("", "\t"), "th": ("", "\t"), "button": (" ", " "), "q": ("“", "”"),
    "rt": ("(", ")"), "mtext": (" ", " "), "mtd": ("", " "), "msqrt": ("√(", ")"),
    "mroot": ("root(", ")"),
}  # fmt: skip
"""What stands before and after an element: of SVG `text` is a block."""
RAISED = {"sup": "^", "super": "^", "sub": "_"}  # by elements, and by styles
MATH_RAISED = {  # elements of MathML -> what stands before each of their children
    "msup": ("", "^"), "mover": ("", "^"), "msub": ("", "_"), "munder": ("", "_"),
    "msubsup": ("", "_", "^"), "munderover": ("", "_", "^"), "mfrac": (" ", "/"),
    "mroot": ("", ","),
}  # fmt: skip
SIMPLE = re.compile(r"[-+−]?\w*|\W|\[.*\]|\(.*\)", re.S)  # what needs no brackets behind a mark
ORDINALS = frozenset(("", *"st nd rd th er e".split()))  # raised without a mark
INVISIBLE = dict.fromkeys((0xAD, 0x200B, *range(0x2060, 0x2065), 0xFEFF))  # where a line may end
LISTS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
STYLES = ("display", "visibility", "vertical-align", "text-decoration", "text-decoration-line")
COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.S)  # of a style sheet
EMPTY = re.compile(r"<(?!br\b)([a-z][\w:.-]*+)([^<>]*+)(?<=/)>", re.I)  # an element of XML
Rules = dict[str, dict[str, str]]  # selector -> its styles


class Part(NamedTuple):
    """A node, or a string beside one; what it stands in; what raises or lowers it."""

    node: LexborNode | str
    inside: frozenset[str] = frozenset()
    mark: str = ""


def of_html(markup: str, name: str) -> tuple[str, str, str]:
    """Return the title and the text of a page, one line a paragraph or row, and a remark."""
    tree = parsed(markup, markup.startswith("<?xml") or name.lower().endswith(".xhtml"))
    page, title = _Page(tree.root), tree.css_first("head title")
    text = page.text(tree.root)
    return " ".join(title.text().split()) if title else "", text, remark_on(name, page.left_out)


def parsed(markup: str, xml: bool = True) -> LexborHTMLParser:
    """Parse HTML, and XML as if it were HTML, which forgives a bare & and knows &nbsp;."""
    if xml:
        markup = EMPTY.sub(r"<\1\2></\1>", markup.replace("<![CDATA[", "").replace("]]>", ""))
    try:
        return LexborHTMLParser(markup)
    except SelectolaxError:  # there is no other reason: what is no HTML is text
        raise MemoryError from None


# ---------------------------------------------------------------- styles


def _declared(styles: str) -> dict[str, str]:
    pairs = [each.partition(":") for each in styles.lower().split(";")]
    values = {key.strip(): value.partition("!")[0].strip() for key, _, value in pairs}
    return {key: values[key] for key in STYLES if key in values}


def _rules(root: LexborNode) -> Rules:
    """Return what style sheets declare, without @media, which may be paper."""
    rules: Rules = {}
    for sheet in root.css("style:not([media*=print])"):
        depth = 0
        for part in COMMENT.sub("", sheet.text()).split("}"):
            *_, selectors, styles = ["", *part.split("{")]
            depth += part.count("{")
            if depth == 1 and (declared := _declared(styles)):
                for selector in selectors.rpartition(";")[2].split(","):
                    rules.setdefault(selector.strip(), {}).update(declared)
            depth = max(0, depth - 1)
    return rules


def _look(tag: str, given: dict, rules: Rules) -> dict[str, str]:
    """Return the styles of an element, of selectors that name its tag, class or id."""
    look: dict[str, str] = {}
    if rules:
        classes = [f".{each}" for each in (given.get("class") or "").split()[:9]]
        id_ = f"#{given.get('id')}"
        for name in (tag, *classes, *(tag + each for each in classes), id_, tag + id_):
            look |= rules.get(name, {})
    return look | _declared(given.get("style") or "")


def _is_hidden(tag: str, given: dict, look: dict[str, str]) -> bool:
    if tag in ("html", "body"):  # a script shows it
        return False
    closed = (tag == "dialog" and "open" not in given) or "popover" in given or "hidden" in given
    unseen = look.get("visibility") in ("hidden", "collapse") or look.get("display") == "none"
    return closed or unseen


# ---------------------------------------------------------------- text


class _Page:
    """What is known of a page while it is read; `left_out` counts what is not read."""

    def __init__(self, root: LexborNode):
        self.rules = _rules(root)
        self.numbers: dict[int, int] = {}  # of the last item, by list
        self.left_out: Counter[str] = Counter()

    def text(self, root: LexborNode) -> str:
        """Join the text of a tree, with one blank for all that stand between two words."""
        out, waiting = ["\n"], [Part(root)]
        while waiting:
            part = waiting.pop()
            node, inside = part.node, part.inside
            if isinstance(node, str):
                text = node.replace("\n", " ") if "row" in inside else node
            elif node.is_text_node:
                text = node.text_content or ""
                if "pre" not in inside:
                    text = text.strip() if "math" in inside else re.sub(r"\s+", " ", text)
            else:
                if node.is_element_node:
                    waiting += reversed(self._parts(part))
                continue
            if "pre" not in inside and out[-1][-1] in " \n\t^_(":
                text = text.removeprefix(" ")
            if text:
                out.append(text)
        lines = []
        for line in "".join(out).translate(INVISIBLE).split("\n"):
            cells = [cell.rstrip() for cell in line.rstrip().split("\t")]
            lines.append("\t".join(cells))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")

    def _parts(self, part: Part) -> list[Part]:
        """Return what an element consists of: what stands before it, its children, what follows."""
        node, inside = part.node, part.inside
        tag, given = node.tag, node.attributes
        if tag in UNSEEN or given.get("class") == "katex-html":  # its MathML stands beside it
            return []
        look = _look(tag, given, self.rules)
        if _is_hidden(tag, given, look):
            self.left_out["passage that is hidden"] += bool(node.text(strip=True))
            return []
        if tag in COUNTED and not (tag == "img" and given.get("alt")):
            self.left_out[COUNTED[tag]] += 1
            return []
        if tag in ("img", "input", "select"):
            words = _shown(node)
            return [Part(f" {words} ", inside)] if words else []
        before, after = AROUND.get(tag, ("", ""))
        if tag == "li" and node.parent.tag == "ol":
            before += self._number(node)
        if "line-through" in " ".join(look.values()) and before != STRUCK[0]:
            before, after = before + STRUCK[0], STRUCK[1] + after
        inner, children = inside, [*node.iter(include_text=True)]
        mark = part.mark or RAISED.get(tag, "")
        if "raised" not in inside:  # else a style says the same again
            mark = mark or RAISED.get(look.get("vertical-align"), "")
        if mark:
            opening, closing = _raised(mark, node, inside)
            before, after, inner = opening + before, after + closing, inside | {"raised"}
        if tag in KEPT:
            inner = inner - {"row"} | {"pre"}
        elif tag == "math":
            inner |= {"math"}
        elif tag == "table":
            inner -= {"row"}
        elif tag == "tr" and sum(child.tag in ("td", "th") for child in children) > 1:
            inner |= {"row"}  # the lines of its cells are joined
        marks = iter(MATH_RAISED.get(tag, ()))
        parts = [Part(before, inside)]
        for child in children:
            parts.append(Part(child, inner, next(marks, "") if child.is_element_node else ""))
        return [*parts, Part(after, inside)]

    def _number(self, item: LexborNode) -> str:
        """Return what stands before an item of a list in order."""
        ordered, given = item.parent.mem_id, item.parent.attributes
        if "reversed" in given:  # no number rather than a wrong one
            return ""
        number = self.numbers[ordered] + 1 if ordered in self.numbers else _int(given.get("start"))
        self.numbers[ordered] = _int(item.attributes.get("value"), number)
        return f"{written(self.numbers[ordered], LISTS.get(given.get('type'), 'decimal'))}. "


def _int(text: str | None, otherwise: int = 1) -> int:
    return int(text) if text and re.fullmatch("-?[0-9]{1,9}", text) else otherwise


def _raised(mark: str, node: LexborNode, inside: frozenset[str]) -> tuple[str, str]:
    """Return what stands before and after a raised or lowered element."""
    if "math" in inside:
        simple = node.tag in ("mi", "mn", "mo")
    elif "raised" in inside:  # to look at the words of each would take n times n steps
        simple = True
    else:
        words = node.text().strip()
        if words in ORDINALS:
            return "", ""
        simple = SIMPLE.fullmatch(words)
    return (mark, "") if simple else (f"{mark}(", ")")


def _shown(field: LexborNode) -> str:
    """Return the words that a picture or a field shows."""
    given = field.attributes
    kind = (given.get("type") or "").lower()
    if field.tag == "img":
        words = f"[picture: {given['alt']}]"
    elif field.tag == "select":
        options = field.css("option[selected]") or field.css("option")[:1]
        words = ", ".join(option.text() for option in options)
    elif kind in ("checkbox", "radio"):
        words = "[x]" if "checked" in given else "[ ]"
    else:
        words = "" if kind in ("hidden", "password") else given.get("value") or ""
    return " ".join(words.split())


# ---------------------------------------------------------------- books


def of_epub(members: Members, name: str) -> Contents:
    """Read a book chapter by chapter, in the order of its package's spine."""
    package = _tree(members, "META-INF/container.xml")[0].css_first("[full-path]")
    path = package.attributes["full-path"]
    book, folder = _tree(members, path)[0], posixpath.dirname(path)
    titles = [each.text() for each in book.css("*") if each.tag in ("title", "dc:title")]
    files = {each.attributes["id"]: each.attributes["href"] for each in book.css("[id][href]")}
    items = [each.attributes["idref"] or "" for each in book.css("[idref]")]
    hrefs = (unquote((files.get(item) or item).partition("#")[0]) for item in items)
    spine = [target(folder, href) for href in hrefs]
    check_size(sum(members.names[path].file_size for path in spine if path in members.names), name)
    chapters: list[Piece] = []
    unread, remarks, left_out = [], [], Counter()
    for path in spine:
        try:
            tree, remark = _tree(members, path)
        except MemoryError:
            raise
        except Exception:  # missing or damaged in any way; it must not take the others with it
            unread.append(path)
            continue
        page = _Page(tree.root)
        if text := page.text(tree.root):
            heading = tree.css_first("h1, h2, h3")
            words = " ".join(_Page(heading).text(heading).split()) if heading else ""
            chapters.append((text, len(chapters) + 1, words[:LONGEST_NAME]))
        remarks.append(remark)
        left_out += page.left_out
    if unread:
        which = (
            f"of {len(spine):,} chapters {len(unread):,} missing, damaged or in no known encoding"
        )
        remarks.append(f"{name}: {which}, and left out: {few(unread)}.")
    remark = joined([*remarks, remark_on(name, left_out)])
    if not chapters and "META-INF/encryption.xml" in members.names:
        raise UserError(f"{name} is encrypted: its seller's reader alone can open it.")
    if not chapters:
        raise UserError(f"{name} is empty or damaged: none of its chapters has text. {remark}")
    return Contents("chapter", chapters, " ".join(titles[0].split()) if titles else "", remark)


def _tree(members: Members, member: str) -> tuple[LexborHTMLParser, str]:
    markup, remark = decoded(members.read(member), f"{members.name}: {member}", markup=True)
    return parsed(markup), remark
