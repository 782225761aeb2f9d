"""Word documents: what a person sees of them is read, in its place, or named in a remark."""

import io
import zipfile

import pytest

from config.errors import UserError
from tasks.docx import written
from tasks.forms import Contents, contents

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
STRICT = "http://purl.oclc.org/ooxml"
NAMES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": f"{OFFICE}/math",
    "r": f"{OFFICE}/relationships",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
}


STYLES = (
    "<w:docDefaults><w:pPr/></w:docDefaults>"
    '<w:style w:styleId="Head"><w:pPr><w:numPr><w:numId w:val="5"/></w:numPr></w:pPr></w:style>'
    '<w:style w:styleId="Sub"><w:basedOn w:val="Head"/></w:style>'
    '<w:style w:styleId="Unseen"><w:rPr><w:vanish/></w:rPr></w:style>'
    '<w:style w:styleId="Struck"><w:basedOn w:val="Line"/></w:style>'
    '<w:style w:styleId="Line"><w:rPr><w:strike/></w:rPr></w:style>'
    '<w:style w:styleId="Round"><w:basedOn w:val="Round"/></w:style>'
)


def docx(body: str, main="word/document.xml", names=NAMES, head="", **parts: str | bytes) -> bytes:
    """Make a document of the markup of its body.

    head: before the root element. parts: by their kind and number, as header1.
    """
    declared = "".join(f' xmlns:{prefix}="{name}"' for prefix, name in names.items())
    kinds = {name: name.rstrip("0123456789") for name in parts}
    files = {
        name: f"{name}.{'html' if kind == 'aFChunk' else 'xml'}" for name, kind in kinds.items()
    }
    relation = f'<Relationship Id="{{}}" Type="{OFFICE}/relationships/{{}}" Target="{{}}"/>'
    relations = "".join(relation.format(name, kinds[name], files[name]) for name in parts)
    roots = {"header": "hdr", "footer": "ftr"}
    folder, _, file = main.rpartition("/")
    first = relation.format("r", "officeDocument", f"/{main}")
    members = {
        "_rels/.rels": f"<Relationships>{first}</Relationships>",
        main: f"{head}<w:document{declared}><w:body>{body}</w:body></w:document>",
        f"{folder}/_rels/{file}.rels": f"<Relationships>{relations}</Relationships>",
    }
    for name, kind in kinds.items():
        root = roots.get(kind, kind)
        whole = f"<w:{root}{declared}>{parts[name]}</w:{root}>"
        members[f"{folder}/{files[name]}"] = parts[name] if kind == "aFChunk" else whole
    return zipped(**members)


def zipped(**members: str | bytes) -> bytes:
    """Make a zip file; __ stands for / in a name, ___ for a dot."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("___", ".").replace("__", "/"), content)
    return out.getvalue()


def p(text: str = "", properties: str = "", inside: str = "") -> str:
    run = f"<w:r><w:t>{text}</w:t></w:r>" if text else ""
    return f"<w:p><w:pPr>{properties}</w:pPr>{run}{inside}</w:p>"


def r(text: str, properties: str) -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


def reading(body: str, **more) -> Contents:
    return contents(docx(body, **more), "a.docx")


def text(body: str, **more) -> str:
    return reading(body, **{"styles": STYLES} | more).pieces[0][0]


def table(*rows: str) -> str:
    return "<w:tbl><w:tblPr/>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"


def tc(*paragraphs: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{''.join(map(p, paragraphs))}</w:tc>"


def m(name: str, **parts: str) -> str:
    """Make an element of an equation; a part's name ends where its number begins."""
    inside = "".join(
        f"<m:{part.rstrip('0123')}>{e}</m:{part.rstrip('0123')}>" for part, e in parts.items()
    )
    return f"<m:{name}>{inside}</m:{name}>"


def x(letters: str) -> str:
    return f"<m:r><m:t>{letters}</m:t></m:r>"


def choice(first: str, second: str) -> str:
    return (
        f"<mc:AlternateContent><mc:Choice>{first}</mc:Choice>"
        f"<mc:Fallback>{second}</mc:Fallback></mc:AlternateContent>"
    )


def box(words: str) -> str:
    return f"<wps:txbx><w:txbxContent>{p(words)}</w:txbxContent></wps:txbx>"


SUP, SUB = ('<w:vertAlign w:val="superscript"/>', '<w:vertAlign w:val="subscript"/>')


@pytest.mark.parametrize("body, expected", [
    (p("Anna left.") + p() + p("Boris stayed."), "Anna left.\n\nBoris stayed."),
    # signs within a run, and what is raised, lowered or struck out
    (p(inside="<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r>"), "a\tb\nc"),
    (p("10", inside=r("5", SUP)) + p("H", inside=r("2", SUB) + r("O", "")), "10^5\n\nH_2O"),
    (p("CHF ", inside=r("9", "<w:strike/>") + r("00", "<w:dstrike/>") + r(" 950", "")),
     "CHF [struck out: 900] 950"),
    (p("Seen", inside=r(" secret", "<w:vanish/>") + r(".", '<w:vanish w:val="0"/>')), "Seen."),
    (p("By style:", inside=r(" no", '<w:rStyle w:val="Unseen"/>')
       + r(" old", '<w:rStyle w:val="Struck"/>')), "By style: [struck out: old]"),
    # changes that are tracked, and elements that only stand around others
    (p("Due ", inside="<w:del><w:r><w:delText>May</w:delText></w:r></w:del>"
       "<w:ins><w:r><w:t>June</w:t></w:r></w:ins>"), "Due June"),
    (p("See ", inside="<w:hyperlink><w:smartTag><w:r><w:t>Bern</w:t></w:r></w:smartTag>"
       "</w:hyperlink>"), "See Bern"),
    (f"<w:sdt><w:sdtPr/><w:sdtContent>{p('Held.')}</w:sdtContent></w:sdt>", "Held."),
    (p("Page ", inside="<w:r><w:instrText>PAGE</w:instrText></w:r><w:fldSimple><w:r><w:t>7"
       "</w:t></w:r></w:fldSimple>"), "Page 7"),
    (p("Agreed ", inside="<w:r><w:fldChar><w:ffData><w:checkBox><w:default w:val='0'/>"
       "<w:checked/></w:checkBox></w:ffData></w:fldChar></w:r>"), "Agreed [x]"),
    (p(inside="<w:ruby><w:rt><w:r><w:t>kan</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>漢</w:t>"
       "</w:r></w:rubyBase></w:ruby>"), "漢(kan)"),
    # a row is a line; tables within cells, cells within controls
    (table(tc("Region") + tc("Units"), tc("EU", "and UK") + tc("12")),
     "Region\tUnits\nEU and UK\t12"),
    (table(f"<w:sdt><w:sdtContent>{tc('a')}</w:sdtContent></w:sdt>{tc('b')}"), "a\tb"),
    (table(f"<w:tc>{table(tc('x') + tc('y'))}{p()}</w:tc>{tc('z')}"), "x y\tz"),
    # a text box stands beside its paragraph, once
    (p("Body.", inside=choice(box("Boxed."), f"<w:pict><v:textbox>{box('Boxed.')}</v:textbox>"
       "</w:pict>")), "Body.\nBoxed."),
    (p("Body.", inside=choice("<w:drawing/>", box("Old."))), "Body.\nOld."),
    # equations
    (p("F=", inside=f"<m:oMath>{x('42 kN')}</m:oMath>"), "F=42 kN"),
    (p(inside=f"<m:oMathPara><m:oMath>{m('f', num=x('a+b'), den=x('2'))}</m:oMath>"
       "</m:oMathPara>"), "(a+b)/2"),
    (p(inside=f"<m:oMath>{m('sSup', e=x('x'), sup=x('2'))}{m('sSub', e=x('y'), sub=x('i+1'))}"
       f"{m('rad', e=x('z'))}</m:oMath>"), "x^2y_(i+1)√z"),
    (p(inside="<m:oMath><m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr>"
       f"<m:sub>{x('k')}</m:sub><m:sup>{x('n')}</m:sup><m:e>{x('k')}</m:e></m:nary>"
       f"{m('d', e=x('p'), e2=x('q'))}</m:oMath>"), "∑_k^n k(p|q)"),
    (p(inside="<m:oMath><m:f><m:fPr><m:type m:val='noBar'/></m:fPr>"
       f"<m:num>{x('n')}</m:num><m:den>{x('k')}</m:den></m:f></m:oMath>"), "(n over k)"),
    (p(inside=f"<m:oMath><m:m><m:mr><m:e>{x('1')}</m:e><m:e>{x('0')}</m:e></m:mr>"
       f"<m:mr><m:e>{x('0')}</m:e><m:e>{x('1')}</m:e></m:mr></m:m></m:oMath>"), "1 0 0 1"),
])  # fmt: skip
def test_what_a_person_sees_is_the_text(body, expected):
    assert text(body) == expected


def level(k: int, form: str, written: str, more: str = "") -> str:
    return (
        f'<w:lvl w:ilvl="{k}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>'
        f'<w:lvlText w:val="{written}"/>{more}</w:lvl>'
    )


NUMBERING = (
    '<w:abstractNum w:abstractNumId="0">'
    + level(0, "decimal", "%1.", '<w:pStyle w:val="Head"/>')
    + level(1, "lowerLetter", "%1.%2)", '<w:pStyle w:val="Sub"/>')
    + '</w:abstractNum><w:abstractNum w:abstractNumId="1">'
    + level(0, "bullet", "o")
    + level(1, "upperRoman", "(%2)")
    + '</w:abstractNum><w:num w:numId="5"><w:abstractNumId w:val="0"/></w:num>'
    '<w:num w:numId="6"><w:abstractNumId w:val="1"/></w:num>'
    '<w:num w:numId="7"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">'
    '<w:startOverride w:val="4"/></w:lvlOverride></w:num>'
    '<w:num w:numId="8"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">'
    + level(0, "decimal", "§ %1")
    + "</w:lvlOverride></w:num>"
)


def item(words: str, number: int = 0, at: int = 0, style: str = "") -> str:
    place = f'<w:numPr><w:ilvl w:val="{at}"/><w:numId w:val="{number}"/></w:numPr>'
    return p(words, f'<w:pStyle w:val="{style}"/>' if style else place)


LIST = (
    item("Scope", style="Head") + item("Part", style="Sub") + item("Part", style="Sub")
    + item("Term", 5) + item("Part", 5, 1) + item("Dot", 6) + item("Deep", 6, 1) + item("Anew", 7)
    + item("Next", 7) + item("Other", 8) + item("None", 0) + item("Circle", style="Round")
    + p("Overridden", '<w:pStyle w:val="Head"/><w:numPr><w:numId w:val="0"/></w:numPr>')
)  # fmt: skip
MARGINS = {f"header{k}": p(f"Head {k}") for k in (1, 2, 3)} | {"footer1": p("Foot")}
NOTES = {
    "footnotes": f'<w:footnote w:id="-1">{p("line")}</w:footnote>'
                 f'<w:footnote w:id="2">{p("A month.")}</w:footnote>',
    "endnotes": f'<w:endnote w:id="1">{p("Two years.")}</w:endnote>',
    "comments": f'<w:comment w:id="0" w:author="Ann">{p("Longer!")}{p("Please.")}</w:comment>',
}  # fmt: skip


def section(more: str = "", **shown: str) -> str:
    """Make the end of a section: which of its margins stand on which of its pages."""
    references = "".join(
        f'<w:{name[:6]}Reference w:type="{kind}" r:id="{name}"/>' for name, kind in shown.items()
    )
    return f"<w:sectPr>{references}{more}</w:sectPr>"


def noted(words: str, *notes: str) -> str:
    """Make a paragraph that refers to notes, as "footnote 2"."""
    runs = [note.split() for note in notes]
    return p(words, inside="".join(f'<w:r><w:{k}Reference w:id="{n}"/></w:r>' for k, n in runs))


ALL = dict(header1="default", header2="first", header3="even", footer1="default")
OTHERS = {
    prefix: name.replace("http://schemas.openxmlformats.org", STRICT)
    for prefix, name in NAMES.items()
}


@pytest.mark.parametrize(("body", "more", "seen"), [
    # the headers and footers that pages show
    (p("Body.") + section(**ALL), MARGINS, "[Header: Head 1]\nBody.\n\n[Footer: Foot]"),
    (p("Body.") + section("<w:titlePg/>", **ALL),
     MARGINS | {"settings": "<w:evenAndOddHeaders/>"},
     "[Header: Head 1]\n[Header: Head 2]\n[Header: Head 3]\nBody.\n\n[Footer: Foot]"),
    # a section goes on with the margins of those before
    (p("One.", section(header1="first")) + p("Two.") + section("<w:titlePg/>"),
     {"header1": p("Head")}, "[Header: Head]\nOne.\n\nTwo."),
    # notes and comments stand beside what they are about
    (noted("Fee.", "footnote 2") + noted("Term.", "endnote 1", "comment 0"), NOTES,
     "Fee.[Note 1]\n[Note 1: A month.]\n\n"
     "Term.[End note 1]\n[End note 1: Two years.]\n[Comment by Ann: Longer! Please.]"),
    (noted("Fee.", "comment 0", "comment 0"), NOTES, "Fee.\n[Comment by Ann: Longer! Please.]"),
    # the numbers of a list are those that Word shows
    (LIST, {"numbering": NUMBERING},
     "1. Scope\n\n1.a) Part\n\n1.b) Part\n\n2. Term\n\n2.a) Part\n\n• Dot\n\n(I) Deep\n\n"
     "4. Anew\n\n5. Next\n\n§ 6 Other\n\nNone\n\nCircle\n\nOverridden"),
    # the main part is the one that the package names
    (p("Anna."), {"main": "word/document2.xml"}, "Anna."), (p("Anna."), {"names": OTHERS}, "Anna."),
])  # fmt: skip
def test_what_stands_in_other_parts_is_read_in_its_place(body, more, seen):
    assert text(body, **more) == seen


@pytest.mark.parametrize(("n", "form", "expected"), [
    (29, "decimal", "29"), (26, "lowerLetter", "z"), (29, "lowerLetter", "cc"), (29, "none", ""),
    (29, "upperRoman", "XXIX"), (29, "japaneseCounting", "29"),
])  # fmt: skip
def test_numbers_are_written_in_the_form_of_their_level(n, form, expected):
    assert written(n, form) == expected


def test_what_is_set_in_is_counted():
    drawn = p("Body.", inside="<w:drawing><a:blip/></w:drawing><v:textpath string='x'/><a:chart/>")
    found = reading(drawn + p(inside="<w:r><w:sym/></w:r>") + '<w:altChunk r:id="gone"/>')
    assert found.pieces[0][0] == "Body.\n\n\ufffd"
    assert found.remark == (
        "a.docx: left out: 2 pictures, 1 chart, 1 sign that a font alone knows, 1 embedded file."
    )


@pytest.mark.parametrize(("body", "why"), [
    (p(), r"empty: there is no text in it\.$"), ("<w:p", "damaged"),
    (p(inside="<w:pict><a:blip/></w:pict>"), "empty: .* 1 picture"),
])  # fmt: skip
def test_a_document_without_text_is_a_sentence(body, why):
    with pytest.raises(UserError, match=rf"^a\.docx is {why}"):
        reading(body)
