"""Documents that cost: each function makes one, of about so many bytes, for a reader of documents.

`FILES` has them by name. None is a file in the repository; what they are written for is in
tests/hostile/test_hostile_documents.py.
"""

import json
import math
import resource
import time
import zlib
from collections.abc import Callable
from importlib import import_module

from test_documents import epub as made_epub
from test_docx import docx
from test_pdf import pdf_of as pdf

from tasks.documents import Document, Part
from tasks.forms import Contents, contents


def epub(chapter: str, package: str = "", times: int = 1) -> bytes:
    """Make a book of one chapter, which its spine names so many times."""
    spine = '<itemref idref="i"/>' * times
    package = package or (
        '<package><metadata/><manifest><item id="i" href="c1 x.xhtml"/></manifest>'
        f"<spine>{spine}</spine></package>"
    )
    return made_epub(chapter, O__b___opf=package)


def stream(content: bytes | str, more: str = "", filters: int = 1) -> bytes:
    """Make a stream that is compressed so many times."""
    content = content if isinstance(content, bytes) else content.encode()
    for _ in range(filters):
        content = zlib.compress(content, 9)
    names = " ".join(["/FlateDecode"] * filters)
    head = f"<< /Length {len(content)} /Filter [{names}] {more} >>\nstream\n"
    return head.encode() + content + b"\nendstream"


CATALOG = "<< /Type /Catalog /Pages 2 0 R >>"
PAGE = (
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 5 0 R >> "
    "/XObject << /X 6 0 R >> >> /Contents 4 0 R >>"
)
FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def page(content: bytes | str, filters: int = 1, **more: str | bytes) -> bytes:
    """Make a PDF of one page; more: objects by number, as o5="..."."""
    objects = {1: CATALOG, 2: "<< /Type /Pages /Count 1 /Kids [3 0 R] >>", 3: PAGE, 5: FONT}
    objects |= {4: stream(content, filters=filters)}
    return pdf(objects | {int(name[1:]): body for name, body in more.items()})


def repeated(unit: str, end: str = "", start: str = "") -> Callable[[int], bytes]:
    """Return what makes a text that repeats a unit."""
    return lambda n: f"{start}{unit * (n // len(unit))}{end}".encode()


def laughs(n: int) -> str:
    """Make entities of entities that stand for many times the n characters of the first one."""
    more = "".join(f'<!ENTITY a{k} "{f"&a{k - 1};" * 10}">' for k in range(1, 9))
    return f'<!DOCTYPE x [<!ENTITY a0 "{"ha" * (n // 2)}">{more}]>'


def quadratic_entity(n: int) -> str:
    """Make one long entity, which is then named many times."""
    return f'<!DOCTYPE x [<!ENTITY a "{"a" * n}">]>'


def form_tree(n: int) -> bytes:
    """Make a page whose picture draws itself n levels deep, twice at each level."""
    depth = 40
    objects = {1: CATALOG, 2: "<< /Type /Pages /Count 1 /Kids [3 0 R] >>", 3: PAGE, 5: FONT}
    objects |= {4: stream("/X Do")}
    for k in range(depth):
        resources = f"/Resources << /XObject << /X {7 + k} 0 R >> /Font << /F1 5 0 R >> >>"
        objects[6 + k] = stream("/X Do /X Do", f"/Type /XObject /Subtype /Form {resources}")
    objects[6 + depth] = stream("BT /F1 9 Tf (Anna) Tj ET", "/Type /XObject /Subtype /Form")
    return pdf(objects)


def page_tree(n: int) -> bytes:
    """Make a tree of pages in which each node names its child a hundred times."""
    objects: dict[int, str | bytes] = {1: CATALOG}
    depth = 12
    for k in range(depth):
        kids = " ".join([f"{3 + k} 0 R"] * 100)
        objects[2 + k] = f"<< /Type /Pages /Count 9 /Kids [{kids}] >>"
    objects[2 + depth] = PAGE
    return pdf(objects)


def page_chain(n: int) -> bytes:
    """Make a tree of pages as deep as the file is long."""
    objects: dict[int, str | bytes] = {1: CATALOG}
    depth = n // 80
    for k in range(depth):
        objects[2 + k] = f"<< /Type /Pages /Count 1 /Kids [{3 + k} 0 R] /Parent {1 + k} 0 R >>"
    objects[2 + depth] = PAGE
    return pdf(objects)


def one_page_often(n: int) -> bytes:
    """Name one page with much on it as often as the file is long."""
    objects = {1: CATALOG, 2: f"<< /Type /Pages /Count {n // 6} /Kids [{'3 0 R ' * (n // 6)}] >>"}
    return pdf(objects | {3: PAGE, 4: stream("BT /F1 9 Tf (Anna) Tj ET " * 10_000), 5: FONT})


def no_table(n: int) -> bytes:
    """Make a PDF without the table of its objects, which has to be looked for."""
    whole = page("BT /F1 9 Tf (Anna) Tj ET")
    return whole[: whole.index(b"xref")] + b"1 0 obj\n" * (n // 8) + b"%%EOF"


P = "<w:p><w:r><w:t>Anna</w:t></w:r></w:p>"
FIELD = '<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r>'
HEAD = "From: a\nDate: b\n"
UNITS = {  # kind -> (what is repeated, what stands behind it, in front of it)
    "html": [(unit,) for unit in (
        # what is begun and not ended
        "<!--", "<!", "<![", "<![CDATA[", "<?", "</", "</a", "<a", "<", "<a b=", "<a b='",
        '<a b="', "<a/", "<!doctype ", "<a ", "&", "&#9", "&#x", "&a", "<script>", "<style><!--",
        "<title>", "<textarea>", "<meta ", "<meta charset=", "<h1", "<h1>", "--", "<!-- --", "<p>",
        "<table><tr><td>", "<b>", "<pre>", "<ul><li>", "<form>", "</p>", "<!--x>", "<![CDATA[x>",
        "<![ignore x>", "<![if x>", "<script></x>", "<!x '>", "<a b=\"'>x", "<a b='>\">x",
        "<b><i></b></i>", "<sup>x", "<table><tr><td>a<td>", "<math><msup><mfrac>", "<b hidden>x",
        "<ol reversed><li>", "<select><option>x", "<b style='display:a;'>",
    )] + [
        ("<!--", ">"), ("<!--", "x>"), ("<![CDATA[", ">"), ("<?", "x>"), ("<a", ">"),
        ("<a b='", ">"), (" a=1", ">", "<a"), ("a", "", "<a b="), ("/", "", "<a"), (" ", "", "<a"),
        (" ", "x", "</a"), ("'\"", "", "<a "), ("=", "", "<a "), (" ", "x", "<pre>"), ("\n", "x"),
        ("<td colspan=1000000000 rowspan=1000000000>x", "", "<table><tr>"), ("&amp;", "Anna"),
        ("<meta charset", "<p>Anna"), ("<li>", "", "<ol reversed>"), ("9", ";Anna", "&#"),
        (".a{display:none}", "</style><b class=a>x", "<style>"), ("@media{", "", "<style>"),
        ("b{display:block}", "</style>" + "<b>x" * 9_999, "<style>"), ("/*", "", "<style>"),
        ("display:a;", "'>x", "<b style='"),
    ],
    "txt": [
        (" ", "x"), ("a",), ("a-\n",), ("00:01.000 --> 00:02.000\n", "Anna", "WEBVTT\n\n"),
        ("<v a>", "Anna", "WEBVTT\n\n00:01.000 --> 00:02.000\n"),
        # of HTML, without its first tag
        ("<?xml ", "<html>"), ("<!--a-->", "Anna", " "), ("<a/>", "", "<?xml?><html>"),
    ],
    "json": [
        ("[", "", "[{"), ('{"a":',), ("9", "}]", '[{"text": "x", "from": "y", "date": '),
        ("9", '"}]', '[{"text": "x", "from": "y", "date": "'), (" ", "x", "["), (" \n", "x"),
        ("\\ud800", '"}]', '[{"text": "'), ('"a\\u00fc",', "1]", "["),
        ("data:image/a;base64,aA", '"]', '["'), ('{"a": "\\u00fc"}\n',),
        ('{"cell_type": "code"},', "{}]}", '{"nbformat": 4, "cells": ['),
        ('{"png": "a"},', "{}]}]}", '{"nbformat": 4, "cells": [{"cell_type": "code", "outputs": ['),
        ("[", "", '{"nbformat": 4, "cells": '), ('{"a": {"parent": "a"}},', "{}]", '[{"mapping": '),
        ('{"text": "x", "from": "y", "date": 1}\n',),
        *((f",{value}", "]", '[{"date": "2024-01-01", "from": "A", "text": "hi"}')
          for value in "0 []".split()),
    ],
    "eml": [
        ("A: b\n", "\nAnna", HEAD), (" a\n", "\nAnna", HEAD), ("From a 10:00\nA: b\n\n", "Anna"),
        ("=?utf-8?q?a?= ", "\n\nAnna", f"{HEAD}Subject: "),
        ("--b\n\nAnna\n", "", f'{HEAD}Content-Type: multipart/mixed; boundary="b"\n\n'),
        ("Content-Type: message/rfc822\n\n", "Anna", HEAD),
    ],
}  # fmt: skip
ONE_PASS: dict[str, Callable[[int], bytes]] = {
    f"{kind} {row}": repeated(unit, end, "<html>" * (kind == "html") + start)
    for kind, rows in UNITS.items() for row in rows
    for unit, end, start in [(*row, "", "")[:3]]
} | {
    "txt accents": lambda n: "a{}".format("\u0301\u0316" * (n // 4)).encode(),
    "json branches": lambda n: json.dumps([{"title": "", "current_node": "0", "mapping": {
        str(k): {"parent": str(k + 1), "message": None} for k in range(n // 40)}}]).encode(),
}  # fmt: skip
FILES = ONE_PASS | {
    "html attributes": lambda n: (
        f"<html><a {' '.join(f'a{k}=1' for k in range(n // 8))}>x".encode()
    ),
    "html stray ends": lambda n: f"<html>{'<div>' * (n // 9)}{'</p>' * (n // 9)}Anna".encode(),
    "html divs": lambda n: f"<html>{'<div>' * (n // 11)}Anna{'</div>' * (n // 11)}".encode(),
    **{f"epub {unit}": lambda n, unit=unit: epub(f"<html>{unit * (n // len(unit))}</html>")
       for unit in ("<h1", "<h1>", "<h1>a</h2>", "<!--", "<meta charset=")},
    "epub spine": lambda n: epub("<p>" + "Anna. " * 99_999, times=n // 20),
    "epub long chapter": lambda n: epub("<p>Anna. " * (40 * n)),
    "epub tags": lambda n: epub("<b>" * (40 * n)),
    "epub laughs": lambda n: epub(
        "<p>Anna", f"{laughs(n)}<package><spine>&a8;</spine></package>"
    ),
    "epub one entity": lambda n: epub(
        "<p>Anna", f"{quadratic_entity(n)}<package><spine>{'&a;' * n}</spine></package>"
    ),
    "epub deep package": lambda n: epub("<p>Anna", "<package>" + "<a>" * (40 * n)),
    **{f"epub {form}": lambda n, form=form: epub(
        "<p>Anna", f"<package {' '.join(form.format(k=k) for k in range(2 * n))}/>"
    ) for form in ('xmlns:a{k}="u{k}"', 'a{k}="1"')},
    "epub manifest": lambda n: epub(
        "<p>Anna", "<package><manifest>" + '<item id="i" href="c"/>' * (4 * n) + "</manifest>"
    ),
    "epub zeros": lambda n: epub("<p>" + "\x01" * (400 * n)),
    "docx paragraphs": lambda n: docx(P * (2 * n)),
    "docx deep": lambda n: docx("<w:p>" * n + "</w:p>" * n),
    "docx deep table": lambda n: docx(
        "<w:tbl><w:tr><w:tc>" * (n // 40) + P + "</w:tc></w:tr></w:tbl>" * (n // 40)
    ),
    "docx laughs": lambda n: docx("<w:p><w:r><w:t>&a8;</w:t></w:r></w:p>", head=laughs(n)),
    "docx one entity": lambda n: docx(
        f"<w:p><w:r><w:t>{'&a;' * (n // 4)}</w:t></w:r></w:p>", head=quadratic_entity(n)
    ),
    "docx wide cells": lambda n: docx(
        f'<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="999999999"/></w:tcPr>{P}</w:tc></w:tr>'
        "</w:tbl>"
    ),
    "docx merged cells": lambda n: docx(
        "<w:tbl>" + ("<w:tr>" + '<w:tc><w:tcPr><w:vMerge w:val="continue"/></w:tcPr></w:tc>' * 99
        + "</w:tr>") * (n // 99) + "</w:tbl>"
    ),
    "docx styles": lambda n: docx(
        f"<w:p><w:pPr><w:pStyle w:val='a'/></w:pPr>{'<w:r><w:rPr><w:b/></w:rPr></w:r>' * n}</w:p>"
    ),
    "docx fields": lambda n: docx(FIELD * n),
    "docx instruction": lambda n: docx(
        f"{FIELD}<w:r><w:instrText>{'HYPERLINK ' * n}</w:instrText></w:r><w:r><w:fldChar "
        'w:fldCharType="separate"/></w:r></w:p>'
    ),
    "docx notes": lambda n: docx('<w:p><w:r><w:footnoteReference w:id="1"/></w:r></w:p>' * n + P),
    **{f"pdf {unit}": lambda n, unit=unit, times=times: page(unit * (times * n))
       for unit, times in (
           ("BT /F1 9 Tf (Anna) Tj ET ", 20), ("q ", 100), ("1 ", 100), ("(", 100), ("[", 10),
           ("<<", 10), ("/A", 50), ("%", 100), ("BI ID ", 20),
       )},
    "pdf compressed often": lambda n: page(b"\0" * (1 << 28), filters=3),
    "pdf forms of forms": form_tree,
    "pdf form in itself": lambda n: page(
        "/X Do", o6=stream("/X Do", "/Type /XObject /Subtype /Form /Resources << /XObject << /X "
        "6 0 R >> >>")
    ),
    "pdf page tree": page_tree,
    "pdf page cycle": lambda n: pdf(
        {1: CATALOG, 2: "<< /Type /Pages /Count 2 /Kids [3 0 R 2 0 R] >>", 3: PAGE}
    ),
    "pdf page chain": page_chain,
    "pdf one page often": one_page_often,
    "pdf count": lambda n: pdf({1: CATALOG, 2: "<< /Type /Pages /Count 999999999 /Kids [] >>"}),
    "pdf without a table": no_table,
    "pdf generations": lambda n: b"%PDF-1.5\n" + b"9 9 obj\n" * (n // 8) + b"startxref\n0\n%%EOF",
    "pdf junk": lambda n: b"%PDF-1.5\n" + b"startxref\n" * (n // 10),
}  # fmt: skip


MOST_S = 2  # of a processor, for what takes a twentieth: n squared steps would be five or more


def limit_processor() -> None:
    """End this process when what comes takes more of a processor than it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most_s = math.ceil(time.process_time()) + MOST_S  # in whole seconds, none of which is lost
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))


def bounded(content: bytes, name: str) -> Contents:
    limit_processor()
    return contents(content, name)


def passes(name: str, once: bool, units: list[str], n: int) -> int:
    """Try a pattern, or call a function, on many of each unit and with what fits nothing around
    them; once: at the beginning alone."""
    module, _, what = name.rpartition(".")
    found = getattr(import_module(module), what)
    for unit in units:
        many = unit * (n // len(unit))
        for made in (many + "\0", "-" + many + "("):
            limit_processor()
            if callable(found):
                found(made)
            else:
                text = made.encode() if isinstance(found.pattern, bytes) else made
                found.match(text) if once else [*found.finditer(text)]
    return len(units)


def places(written: str, answer: str) -> int:
    """Return how many places of an answer are found in a text."""
    limit_processor()
    found = Document(written, (Part(0, "a.txt", "file"),), "").find(answer)
    return len(found or ())
