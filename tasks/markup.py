"""HTML and books made of it (epub) as the text that a person sees.

Holds: `of_html`, `of_epub`, `xml_tree`. Leaves out: what scripts, style sheets beyond simple
selectors and pictures show; nothing is fetched. No torch.
Exercise it: `pytest tests/tasks/test_html.py`. Read next: tasks/forms.py.

Lexbor parses as browsers do (the HTML standard), and one loop walks its tree, however deep.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from urllib.parse import unquote

from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from config.errors import UserError
from tasks.forms import Contents, Members, Piece, check_size, decoded, few

LONGEST_NAME = 200  # characters of a chapter's; a heading that is never closed is all of its text
LEFT_OUT = frozenset(  # no person sees these, but for navigation
    "script style noscript noframes template nav title datalist rp "
    "desc defs metadata annotation annotation-xml".split()
)
NAMED = {"navigation", "katex-html"}  # by their role or class; the latter says its MathML again
COUNTED = {
    **dict.fromkeys(("canvas", "image", "img"), "pictures without words"),
    **dict.fromkeys(("iframe", "frame", "object", "embed"), "frames and objects"),
    **dict.fromkeys(("audio", "video"), "recordings"),
}
HIDDEN, SHOWN = "hidden passages", "what is hidden until a script shows it is read"
KEPT = frozenset(("pre", "textarea", "xmp", "listing", "plaintext"))  # with their blanks and lines
LAYOUT = "table, h1, h2, h3, h4, h5, h6, pre, article, section"  # cells with these keep their lines
AROUND = dict.fromkeys(
    "address article aside blockquote caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend main menu mtable ol "
    "p pre search section summary table text textarea ul".split(),
    ("\n", "\n"),
) | {
    "li": ("\n", ""), "tr": ("\n", ""), "mtr": ("\n", ""),
    "br": ("\n", ""), "td": ("", "\t"), "th": ("", "\t"), "button": (" ", " "), "q": ("“", "”"),
    "rt": ("(", ")"), "mtext": (" ", " "), "mtd": ("", " "), "msqrt": ("√(", ")"),
    "mroot": ("root(", ")"),
}  # fmt: skip
"""What stands before and after an element: of SVG `text` is a block."""
RAISED = {  # elements of MathML -> the marks of their children; . is none
    "msup": ("", "^"), "mover": ("", "^"), "msub": ("", "_"), "munder": ("", "_"),
    "msubsup": ("", "_", "^"), "munderover": ("", "_", "^"), "mroot": ("", ","),
    "mfrac": (".", "/"),
}  # fmt: skip
SIMPLE = re.compile(r"[-+−]?\w*|\W|\[.*\]|\(.*\)", re.S)  # what needs no brackets behind a mark
ORDINALS = frozenset(("", *"st nd rd th er ère ème".split()))  # raised without a mark
INVISIBLE = dict.fromkeys((0xAD, 0x200B, *range(0x2060, 0x2065), 0xFEFF))  # where a line may end
LIFTED = {"sup": "^", "super": "^", "sub": "_"}
STRUCK = frozenset(("del", "s", "strike"))
ALWAYS = ("-document", "html")  # what stands in these is read, hidden or not
Looks = dict[int, dict[str, str]]  # what style sheets say of an element, by its address
LOOK = re.compile(
    r"\b(display|visibility|vertical-align|text-decoration)(?:-line)?\s*:\s*([\w -]{1,40})"
)
COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)")
RULE = re.compile(  # of a style sheet, but for those of media
    r"@[^{};]*+(?:;|\{(?:[^{}]*+\{[^{}]*+\})*+[^{}]*+\})|([^{}@]*+)\{([^{}]*+)\}|[^{}@]++|[{}@]"
)
SELECTOR = re.compile(r"\s*+(?=[a-z.#])\w*+(?:[.#]-?+[^\W\d][\w-]*+)*+\s*+", re.I)
EMPTY = re.compile(r"<(?!br\b)([a-z][\w:.-]*+)([^<>]*+)(?<=/)>", re.I)  # an element of XML


def of_html(markup: str, name: str) -> tuple[str, str, str]:
    """Return the title and the text of a page, one line a paragraph or row, and a remark."""
    xml = markup.startswith("<?xml") or name.lower().endswith(".xhtml")
    tree = xml_tree(markup) if xml else _parsed(markup)
    looks, left_out = _looks(tree, len(markup)), Counter()
    text = _text(tree.root, left_out, looks)
    if not text and left_out[HIDDEN]:
        text = _text(tree.root, left_out := Counter(), looks, (*ALWAYS, "body"))
    title = tree.css_first("head title")
    return " ".join(title.text().split()) if title else "", text, _remark(name, left_out)


def xml_tree(markup: str) -> LexborHTMLParser:
    """Parse XML as if it were HTML, which forgives a bare & and knows &nbsp;."""
    markup = markup.replace("<![CDATA[", "").replace("]]>", "")
    return _parsed(EMPTY.sub(r"<\1\2></\1>", markup))


def _parsed(markup: str) -> LexborHTMLParser:
    try:
        return LexborHTMLParser(markup)
    except SelectolaxError:  # there is no other reason: what is no HTML is text
        raise MemoryError from None


def _remark(name: str, left_out: Counter[str]) -> str:
    counts = ", ".join(f"{what} ({n:,})" for what, n in left_out.items() if n and what != SHOWN)
    said = [f"left out are {counts}"] * bool(counts) + [SHOWN] * left_out[SHOWN]
    return f"{name}: {'; '.join(said)}." if said else ""


def _looks(tree: LexborHTMLParser, size: int) -> Looks:
    """Return what style sheets say of elements, of the rules whose selectors are of one element.

    The larger the page, the fewer rules are looked at.
    """
    looks: Looks = {}
    rules = [
        (selector, found)
        for sheet in tree.css("style:not([media*=print])")
        for selectors, declared in RULE.findall(COMMENT.sub(" ", sheet.text()))
        if (found := LOOK.findall(declared.lower()))
        for selector in selectors.split(",")
        if SELECTOR.fullmatch(selector)
    ]
    hits = (
        (n, found) for each, found in rules[: 300_000_000 // (size + 1)] for n in tree.css(each)
    )
    with suppress(SelectolaxError):
        for node, found in islice(hits, 1_000_000):
            looks.setdefault(node.mem_id, {}).update(found)
    return looks


def _text(
    root: LexborNode, left_out: Counter[str], looks: Looks, shown: Sequence[str] = ALWAYS
) -> str:
    """Join the text of a tree, with one blank for all that stand between two words.

    left_out: counts what is not read. shown: the parents of elements that are read though hidden.
    """
    out = ["\n"]
    for text, kept in _strings(root, left_out, looks, shown):
        if not kept and (out[-1][-1].isspace() or out[-1] in ("^", "_", "^(", "_(")):
            text = text.removeprefix(" ")
        if text:
            out.append(text)
    lines = "".join(out).translate(INVISIBLE).split("\n")
    text = "\n".join("\t".join(map(str.rstrip, line.rstrip().split("\t"))) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def _strings(
    root: LexborNode, left_out: Counter[str], looks: Looks, shown: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Yield the text of a tree and what stands between, each with whether its blanks are kept."""
    numbers: dict[int, int] = {}
    waiting: list[tuple[LexborNode | str, frozenset[str], str]] = [(root, frozenset(), "")]
    while waiting:
        node, inside, mark = waiting.pop()
        if isinstance(node, str):
            row = "row" in inside
            yield (node.replace("\n", " ") if row else node), not row or node == "\t"
            continue
        if node.is_text_node:
            text = node.text_content or ""
            if "pre" not in inside:
                text = text.strip() if "math" in inside else re.sub(r"\s+", " ", text)
            yield text, "pre" in inside
            continue
        if not node.is_element_node:
            continue
        tag, given = node.tag, node.attributes
        if tag in LEFT_OUT or {given.get("role"), given.get("class")} & NAMED:
            continue
        look = {
            **looks.get(node.mem_id, {}),
            **dict(LOOK.findall((given.get("style") or "").lower())),
        }
        if _is_hidden(tag, given, look):
            if node.parent.tag not in shown:
                left_out[HIDDEN] += bool(node.text(strip=True))
                continue
            left_out[SHOWN] = 1
        if (words := _instead(node, tag, given, left_out)) is not None:
            yield f" {words} " if words else "", False
            continue
        before, after = AROUND.get(tag, ("", ""))
        if tag == "li" and node.parent.tag == "ol":
            before += _number(node, numbers)
        lifted = "lifted" in inside
        mark = mark or LIFTED.get(tag) or LIFTED.get(look.get("vertical-align", "").strip(), "")
        if mark and "math" in inside:
            simple = tag in ("mi", "mn", "mo")
        else:  # what is raised within it is not asked for its words again: n times n steps
            words = "" if lifted or not mark else node.text().strip()
            simple = lifted or SIMPLE.fullmatch(words)
            mark = "" if words in ORDINALS and not (lifted and tag in LIFTED) else mark
        before, after = before + mark.strip(".") + "(" * (not simple), ")" * (not simple) + after
        children = [*node.iter(include_text=True)]
        inner = inside | {"lifted"} if mark else inside
        if tag in STRUCK or "line-through" in look.get("text-decoration", ""):
            if "struck" not in inside:
                before, after = f"{before}[struck out: ", f"]{after}"
            inner |= {"struck"}
        if tag in KEPT:
            inner = inner - {"row"} | {"pre"}
        elif tag == "math":
            inner |= {"math"}
        elif tag == "tr" and sum(child.tag in ("td", "th") for child in children) > 1:
            inner |= {"row"}
        elif tag in ("td", "th") and node.css_first(LAYOUT):
            inner -= {"row"}
        marks = iter(RAISED.get(tag, ()))
        waiting.append((after, inside, ""))
        waiting += reversed(
            [(each, inner, next(marks, "") if each.is_element_node else "") for each in children]
        )
        waiting.append((before, inside, ""))


def _is_hidden(tag: str, given: dict, look: dict[str, str]) -> bool:
    closed = (tag == "dialog" and "open" not in given) or "popover" in given or "hidden" in given
    gone = look.get("visibility", "").startswith(("hidden", "collapse"))
    return closed or gone or look.get("display", "").startswith("none")


def _instead(node: LexborNode, tag: str, given: dict, left_out: Counter[str]) -> str | None:
    """Return the words that a picture or field shows; None of what shows its own content."""
    kind = (given.get("type") or "").lower()
    if tag == "select":
        options = node.css("option[selected]") or node.css("option:first-of-type")[:1]
        return ", ".join(" ".join(option.text().split()) for option in options)
    if tag == "input" and kind in ("checkbox", "radio"):
        return "[x]" if "checked" in given else "[ ]"
    if tag == "input" and kind != "image":
        return "" if kind in ("hidden", "password") else given.get("value") or ""
    if tag in ("img", "input") and (words := " ".join((given.get("alt") or "").split())):
        return f"[picture: {words}]"
    if tag in COUNTED:
        left_out[COUNTED[tag]] += 1
        return ""
    return None


def _number(item: LexborNode, numbers: dict[int, int]) -> str:
    """Return what stands before an item of a list in order; numbers: of the next one, by list."""
    ordered, given = item.parent, item.parent.attributes
    step = -1 if "reversed" in given else 1
    if (number := numbers.get(ordered.mem_id)) is None:
        items = sum(each.tag == "li" for each in ordered.iter()) if step < 0 else 1
        number = _integer(given.get("start"), items)
    number = _integer(item.attributes.get("value"), number)
    numbers[ordered.mem_id] = number + step
    kind, shown = given.get("type") or "1", str(number)
    if kind in "aA" and 0 < number < 27:
        shown = chr(96 + number)
    elif kind in "iI" and 0 < number < 40:  # Unicode has the numerals from 1 to 12
        ones = chr(0x216F + number % 10) if number % 10 else ""
        shown = "x" * (number // 10) + unicodedata.normalize("NFKC", ones).lower()
    return f"{shown.upper() if kind in 'AI' else shown}. "


def _integer(text: str | None, otherwise: int) -> int:
    found = re.fullmatch(r"\s*(-?[0-9]{1,9})\s*", text or "")
    return int(found[1]) if found else otherwise


# ---------------------------------------------------------------- books


def of_epub(members: Members, name: str) -> Contents:
    """Read a book chapter by chapter, in the order of its package's spine."""
    title, spine = _package(members)
    bought = {"META-INF/encryption.xml", "META-INF/rights.xml"} <= {*members.names}
    if bought or _locked(members) & {*spine}:
        raise UserError(f"{name} is encrypted: its seller's reader alone can open it.")
    chapters, remark = _chapters(members, spine, name)
    if not chapters:
        reason = f"none of its {len(spine):,} chapters has text. {remark}".strip()
        raise UserError(f"{name} is empty or damaged: {reason}")
    return Contents("chapter", chapters, title, remark)


def _package(members: Members) -> tuple[str, list[str]]:
    """Return a book's title and the members that are its chapters, in reading order."""
    package = ""
    if "META-INF/container.xml" in members.names:
        named = _tree(members, "META-INF/container.xml")[0].css_first("[full-path]")
        package = named.attributes["full-path"] if named else ""
    if package not in members.names:
        package = next((each for each in members.names if each.endswith(".opf")), "")
    book, folder = _tree(members, package)[0], posixpath.dirname(package)
    titles = (each.text() for each in book.css("*") if each.tag.rpartition(":")[2] == "title")
    files = {each.attributes["id"]: each.attributes for each in book.css("[id][href]")}
    cases = {each.lower(): each for each in members.names}
    spine = []
    for each in book.css("[idref]"):
        item = files.get(each.attributes["idref"], {"href": each.attributes["idref"]})
        path, _, _ = (item["href"] or "").replace("\\", "/").partition("#")
        path = posixpath.normpath(posixpath.join(folder, unquote(path)))
        contents = "nav" in (item.get("properties") or "").split()
        if not contents and item.get("media-type") != "application/x-dtbncx+xml":
            spine.append(path if path in members.names else cases.get(path.lower(), path))
    return " ".join(next(titles, "").split()), spine


def _tree(members: Members, member: str) -> tuple[LexborHTMLParser, str]:
    markup, remark = decoded(members.read(member), f"{members.name}: {member}", markup=True)
    return xml_tree(markup), remark


def _locked(members: Members) -> set[str]:
    """Return the members that are encrypted; fonts often are, in books that anyone can read."""
    if "META-INF/encryption.xml" not in members.names:
        return set()
    listed = _tree(members, "META-INF/encryption.xml")[0].css("[uri]")
    return {posixpath.normpath(unquote(each.attributes["uri"] or "")) for each in listed}


def _chapters(members: Members, spine: Sequence[str], name: str) -> tuple[list[Piece], str]:
    """Return the chapters that hold text, and a remark on what is left out."""
    sizes = [members.names[path].file_size for path in spine if path in members.names]
    check_size(sum(sizes), name)
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
        remarks.append(remark)
        if text := _text(tree.root, left_out, _looks(tree, members.names[path].file_size)):
            heading = tree.css_first("h1, h2, h3")
            words = " ".join(_text(heading, Counter(), {}).split()) if heading else ""
            chapters.append((text, len(chapters) + 1, words[:LONGEST_NAME]))
    if unread:
        are = "is" if len(unread) == 1 else "are"
        remarks.append(
            f"{name}: of {len(spine):,} chapters {len(unread):,} {are} missing, damaged or in no "
            f"known encoding, and left out: {few(unread)}."
        )
    return chapters, " ".join(filter(None, (*remarks, _remark(name, left_out))))
