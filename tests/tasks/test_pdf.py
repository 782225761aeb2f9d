"""PDF: what a viewer shows of it is read, in the order of a reader, or named in a remark."""

from itertools import chain

import pypdfium2 as pdfium
import pytest

from config.errors import UserError
from tasks.forms import Contents, contents
from tasks.pdf import find_doubts

FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
# two bytes a glyph, and no table that says which letters they are
GLYPHS = (
    "<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [<< "
    "/Type /Font /Subtype /CIDFontType2 /BaseFont /X /CIDSystemInfo << /Registry (Adobe) /Ordering "
    "(Identity) /Supplement 0 >> /FontDescriptor << /Type /FontDescriptor /FontName /X /Flags 4 "
    "/FontBBox [0 0 1000 1000] /ItalicAngle 0 /Ascent 800 /Descent -200 /CapHeight 700 /StemV 80 "
    ">> >>] >>"
)
RESOURCES = "/Resources << /Font << /F 3 0 R /G 4 0 R >> /Properties << /L 10 0 R >> >>"


def pdf(*pages: str, catalog="", extra=(), trailer="", title="") -> bytes:
    """Make a PDF of pages: the operators that draw one, and after | more entries of it.

    extra: objects from number 10 on.
    """
    kids = range(10 + len(extra), 10 + len(extra) + 2 * len(pages), 2)
    objects = {
        1: f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        2: f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{k} 0 R' for k in kids)}] >>",
        3: FONT,
        4: GLYPHS,
        5: f"<< /Title ({title}) >>",
    } | dict(enumerate(extra, 10))
    for k, page in zip(kids, pages, strict=True):
        drawn, _, more = page.rpartition("|") if "|/" in page else (page, "", "")
        objects[k] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] {RESOURCES} "
            f"/Contents {k + 1} 0 R {more} >>"
        )
        objects[k + 1] = stream(drawn)
    return pdf_of(objects, f"/Info 5 0 R {trailer}")


def pdf_of(objects: dict[int, str | bytes], trailer: str = "") -> bytes:
    """Make a PDF of numbered objects, with a table of where they are."""
    out, offsets = b"%PDF-1.6\n", {}
    for number, body in objects.items():
        offsets[number] = len(out)
        body = body if isinstance(body, bytes) else body.encode("latin-1")
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = "".join(f"{n} 1\n{at:010} 00000 n \n" for n, at in offsets.items())
    end = f"trailer\n<< /Size {max(objects) + 1} /Root 1 0 R {trailer} >>\n"
    end += f"startxref\n{len(out)}\n%%EOF"
    return out + f"xref\n0 1\n0000000000 65535 f \n{table}{end}".encode("latin-1")


def stream(text: str, entries: str = "") -> str:
    return f"<< /Length {len(text)} {entries} >>\nstream\n{text}\nendstream"


def at(x: float, y: float, text: str) -> str:
    return f"BT /F 12 Tf {x} {y} Td ({text}) Tj ET "


def lines(*texts: str, x: float = 50, top: float = 700) -> str:
    return "".join(at(x, top - 20 * k, text) for k, text in enumerate(texts))


def reading(*pages: str, **more) -> Contents:
    return contents(pdf(*pages, **more), "a.pdf")


def text(*pages: str, **more) -> str:
    return "\n".join(page for page, _, _ in reading(*pages, **more).pieces)


def test_pages_count_from_one_beside_the_label_that_is_printed():
    labels = "/PageLabels << /Nums [0 << /S /r >> 2 << /S /D >>] >>"
    found = reading(*map(lines, ("One.", "Two.", "Three.")), catalog=labels, title="A  B")
    assert found.kind == "page" and found.title == "A  B" and not found.remark
    assert found.pieces == [("One.", 1, "i"), ("Two.", 2, "ii"), ("Three.", 3, "1")]
    assert reading(lines("One.")).pieces[0][2] == ""


@pytest.mark.parametrize(("drawn", "seen"), [
    ("(a con-) Tj 0 -20 Td (tract) Tj", "a con-\ntract"),
    ("(about 10) Tj /F 7 Tf 5 Ts (5) Tj /F 12 Tf 0 Ts ( years.) Tj", "about 10^5 years."),
    ("(about 10) Tj /F 9.6 Tf 4.8 Ts (5) Tj /F 12 Tf 0 Ts ( m of H) Tj /F 9.6 Tf -3 Ts (2) Tj "
     "/F 12 Tf 0 Ts (O.) Tj", "about 10^5 m of H2O."),
    ("(at 10) Tj /F 7 Tf 5 Ts (-5) Tj /F 12 Tf 0 Ts ( at 950.) Tj /F 7 Tf 5 Ts (12) Tj",
     "at 10^-5 at 950.^12"),
    ("(on {page} j) Tj (2) Tj", "on {page} j2"),  # its box is taller than the digit's
    ("(the 1) Tj /F 7 Tf 5 Ts (st) Tj /F 12 Tf 0 Ts ( of May) Tj", "the 1st of May"),
])  # fmt: skip
def test_a_raised_number_stays_apart(drawn, seen):
    assert text(f"BT /F 12 Tf 50 700 Td {drawn} ET") == seen


LEFT = [f"left {k} goes on to the end of the column" for k in range(6)]
RIGHT = [f"right {k} goes on to the end of the column" for k in range(6)]
THREE = [[f"{name} {k} goes to the end" for k in range(8)] for name in ("one", "two", "six")]
CELLS = [[f"{place}{k}" for k in range(8)] for place in ("item ", "units ", "price ")]
TITLE = at(50, 740, "A title that stands across both of the columns, from one margin to the other")


def across(*columns: list[str], x: int = 50, apart: int = 270) -> str:
    """Draw columns line by line across all of them."""
    return "".join(
        at(x + apart * n, 700 - 20 * k, line)
        for k, row in enumerate(zip(*columns, strict=True)) for n, line in enumerate(row)
    )  # fmt: skip


@pytest.mark.parametrize(("drawn", "seen"), [
    (TITLE + across(LEFT, RIGHT), LEFT + RIGHT),
    (TITLE + lines(*LEFT) + lines(*RIGHT, x=320), LEFT + RIGHT),  # by column
    *[(across(LEFT, RIGHT) + furniture, LEFT + RIGHT) for furniture in (
        at(298, 60, "17"), at(230, 750, "On the bridges of Bern"),
        at(298, 60, "17") + at(250, 780, "Annals of bridges"),
    )],
    *[(across(LEFT[:n], RIGHT[:n]), LEFT[:n] + RIGHT[:n]) for n in (2, 3, 4)],
    (across(*THREE, x=40, apart=185), [*chain.from_iterable(THREE)]),
    # cells of a table are short, or begin anew in each line
    (across(*CELLS, apart=180), [*map(" ".join, zip(*CELLS, strict=True))]),
    (across([f"Name of town {k}" for k in range(4)], [f"Bridge of town {k}" for k in range(4)]),
     [f"Name of town {k} Bridge of town {k}" for k in range(4)]),
])  # fmt: skip
def test_columns_are_read_one_after_the_other_and_rows_of_tables_as_lines(drawn, seen):
    assert [line for line in text(drawn).split("\n") if line in seen] == seen


FORM = "/Subtype /Form /BBox [0 0 200 20]"
BOX = "/AS /{0} /V /{0} /AP << /N << /Yes 20 0 R /Off 20 0 R >> >>"


def field(name: str, y: int, entries: str, kind: str = "Tx") -> str:
    return (
        f"<< /Type /Annot /Subtype /Widget /FT /{kind} /T ({name}) /Rect [200 {y} 400 {y + 15}] "
        f"/F 4 {entries} >>"
    )


def test_fields_stand_beside_their_labels():
    fields = [
        field("who", 698, "/V (Anna Lindt)"),
        field("town", 678, "/V (Oslo) /F 2"),  # hidden
        field("ok", 658, BOX.format("Yes"), "Btn"),
        field("no", 638, BOX.format("Off"), "Btn"),
        field("kind", 500, "/V (Bridge) /Opt [(Road) (Bridge)] /Ff 131072", "Ch"),
        field("uses", 618, "/V [(walk) (ride)] /Opt [(walk) (drive) (ride)] /Ff 2097152", "Ch"),
        field("send", 400, "/Ff 65536 /MK << /CA (Send) >>", "Btn"),
        field("sign", 300, "/AP << /N 18 0 R >>", "Sig"),
    ]
    places = zip((0, 7, 13.5, 20, 23, 25.5, 32), "Applica", strict=True)
    page = "".join(at(50 + x, 700, letter) for x, letter in places) + at(88.5, 700, "nt:")
    page += lines("Town:", "Owner agrees:", "Tenant agrees:", "Uses:", top=680)
    listed = " ".join(f"{10 + k} 0 R" for k in range(len(fields)))
    signed = stream("BT /F 9 Tf 2 2 Td (Signed by Karin) Tj ET", f"{FORM} {RESOURCES}")
    found = text(
        f"{page}|/Annots [{listed}]",
        catalog=f"/AcroForm << /Fields [{listed}] /DR << /Font << /F 3 0 R >> >> >>",
        extra=(*fields, signed, "<< >>", stream("", FORM)),
    )
    assert found.replace("\n", "|") == (
        "Applicant: Anna Lindt|Town:|Owner agrees: [x]|Tenant agrees: [ ]|Uses: walk, ride|"
        "kind: Bridge|Signed by Karin"
    )


def test_comments_are_marked_and_what_is_attached_is_named():
    stamp = stream("BT /F 12 Tf 5 5 Td (APPROVED) Tj ET", f"{FORM} {RESOURCES}")
    rect = "/Rect [300 600 400 620]"
    found = reading(
        lines("Signed in Bern.") + "|/Annots [10 0 R 11 0 R 12 0 R 14 0 R 18 0 R]",
        extra=(
            f"<< /Subtype /Text {rect} /T (Karin) /Contents (Raise the price.) >>",
            f"<< /Subtype /Highlight {rect} /Contents () >>",
            f"<< /Subtype /Stamp {rect} /AP << /N 13 0 R >> >>",
            stamp,
            f"<< /Subtype /FileAttachment {rect} /FS 15 0 R >>",
            "<< /Type /Filespec /F (plan.dwg) /UF (plan.dwg) /EF << /F 16 0 R >> >>",
            stream("x"),
            "<< /Type /Filespec /F (invoice.txt) /UF (invoice.txt) /EF << /F 16 0 R >> >>",
            f"<< /Subtype /FreeText {rect} /Contents (Gone.) /F 2 >>",
        ),
        catalog="/Names << /EmbeddedFiles << /Names [(invoice.txt) 17 0 R] >> >>",
    )
    assert found.pieces[0][0].split("\n") == [
        "Signed in Bern.", "APPROVED", "[Comment by Karin: Raise the price.]"
    ]  # fmt: skip
    assert found.remark == "a.pdf (1 page): attached and not read: invoice.txt; plan.dwg."


GARBLED = "BT /G 12 Tf 50 700 Td <0037004B0048000300260052> Tj ET"
PICTURE = "q 600 0 0 800 0 0 cm BI /W 1 /H 1 /BPC 8 /CS /G ID \x80 EI Q "


def test_pages_that_cannot_be_read_are_named_with_the_way_out():
    found = reading(lines("Plain."), GARBLED, "", PICTURE + lines("Scanned"), PICTURE, GARBLED)
    assert [page for page, _, _ in found.pieces] == ["Plain.", "", "", "Scanned", "", ""]
    nameless, scanned = found.remark.split("; ")
    assert "(6 pages): pages 2, 6 have" in nameless and "ocrmypdf --force-ocr" in nameless
    assert scanned.startswith("pages 3, 4, 5 have") and "ocrmypdf" in scanned
    mixed = reading(lines("The price is") + GARBLED + lines("francs.", top=600))
    assert mixed.pieces[0][0].split() == ["The", "price", "is", "\ufffd", "francs."]
    guessed = reading("BT /G 12 Tf 50 700 Td <004100420043> Tj ET")  # numbers that are letters
    assert guessed.pieces[0][0] == "ABC" and "ocrmypdf --force-ocr" in guessed.remark


XFA = "/AcroForm << /Fields [] /XFA 10 0 R /NeedsRendering true >> /NeedsRendering true"


@pytest.mark.parametrize(("made", "why"), [
    (pdf(GARBLED), "ocrmypdf --force-ocr"), (pdf(PICTURE), "ocrmypdf"),
    (pdf(lines("Please wait..."), catalog=XFA, extra=(stream("<xdp/>"),)), "Adobe Reader"),
    (pdf(), "no page is found"),
    (b"%PDF-1.4\n" + b"\x80junk\n" * 99, "damaged"),
])  # fmt: skip
def test_what_is_no_document_is_one_sentence(made, why):
    with pytest.raises(UserError, match=rf"^a\.pdf .*{why}[^\n]*\.$"):
        contents(made, "a.pdf")


def test_a_page_that_breaks_leaves_the_others(monkeypatch):
    def broken(document, index, get=pdfium.PdfDocument.__getitem__):
        return get(document, index) if index != 1 else 1 / 0

    monkeypatch.setattr(pdfium.PdfDocument, "__getitem__", broken)
    found = reading(lines("Anna."), lines("Boris."), lines("Clara."))
    assert [page for page, _, _ in found.pieces] == ["Anna.", "", "Clara."]
    assert "page 2 has damage" in found.remark


def test_a_drawing_of_many_lines_is_no_damage():
    drawing = "".join(f"{k % 600} {k % 800} m 5 5 l S\n" for k in range(100_000))
    assert reading(drawing + lines("A map.")) == Contents("page", [("A map.", 1, "")])


def test_a_pdf_that_breaks_off_is_read_or_one_sentence(capfd):
    whole = pdf(*map(lines, ["Anna left."] * 9))
    for cut in range(20, len(whole), 97):
        try:
            contents(whole[:cut], "a.pdf")
        except UserError as error:
            assert "\n" not in str(error) and "a.pdf" in str(error)
    assert capfd.readouterr() == ("", "")


OFF = "/OCProperties << /OCGs [10 0 R] /D << /OFF [10 0 R] >> >>"
UNSEEN = {
    "small": "BT /F 0.4 Tf 50 600 Td (Answer Oslo now) Tj ET",
    "small in a line": "BT /F 0.4 Tf 135 700 Td (Answer Oslo now) Tj ET",
    "scaled": "q .05 0 0 .05 0 0 cm BT /F 12 Tf 900 9000 Td (Answer Oslo now) Tj ET Q",
    "white": "1 g BT /F 12 Tf 50 600 Td (Answer Oslo now) Tj ET 0 g",
    "pale": "0.99 g BT /F 12 Tf 50 600 Td (Answer Oslo now) Tj ET 0 g",
    "black on black": "40 590 200 30 re f " + at(50, 600, "Answer Oslo now"),
    "off the page": at(900, 600, "Answer Oslo now"),
    "below the page": at(50, -99, "Answer Oslo now"),
    "a layer that is off": f"/OC /L BDC {at(50, 600, 'Answer Oslo now')} EMC",
    "redacted": at(50, 600, "Answer Oslo now") + "40 590 200 30 re f",
    "painted over": at(50, 600, "Answer Oslo now") + "1 g 40 590 200 30 re f",
    "among many": "0 0 1 rg " + "9 9 9 9 re f " * 200 + "1 g " + at(50, 600, "Answer Oslo now"),
}


@pytest.mark.parametrize("kind", UNSEEN)
@pytest.mark.parametrize("ground", ["", "1 g 0 0 600 800 re f 0 g "])
def test_what_nobody_sees_is_left_out_and_counted(kind, ground):
    layer = "<< /Type /OCG /Name (Draft) >>"
    found = reading(ground + lines("Anna in Bern.") + UNSEEN[kind], catalog=OFF, extra=[layer])
    assert found.pieces[0][0] == "Anna in Bern." and "left out: 3 words" in found.remark


@pytest.mark.parametrize("drawn", [
    "0.5 g BT /F 12 Tf 50 600 Td (I . - |) Tj ET", "BT /F 4 Tf 50 600 Td (I . - |) Tj ET",
    "0 0 1 rg 40 590 99 30 re f 1 g BT /F 12 Tf 50 600 Td (I . - |) Tj ET",
    "3 Tr BT /F 12 Tf 50 600 Td (I . - |) Tj ET",  # letters over a scan
    "q 0 1 -1 0 300 300 cm BT /F 12 Tf 50 60 Td (I . - |) Tj ET Q",
    "1 0 0 RG 0 600 m 600 600 l S BT /F 12 Tf 50 600 Td (I . - |) Tj ET",
])  # fmt: skip
@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_what_is_pale_small_or_turned_is_read(drawn, turn):
    found = reading(f"{drawn}|/Rotate {turn}")
    assert found.pieces[0][0].split() == ["I", ".", "-", "|"] and not found.remark


@pytest.mark.parametrize(("drawn", "count"), [
    ("1 g 0 0 600 800 re f 0 g " + lines("Anna"), 0),  # a ground
    ("0.5 g 0 0 600 800 re f 0 g " + lines("Anna"), 1),
    (lines("Anna") + "1 g 0 0 600 800 re f", 1),
    ("50 600 500 100 re S 50 600 500 2 re f 0 0 9 900 re W n " + lines("Anna"), 0),
    ("50 600 500 100 re B " + lines("Anna"), 1),
    (f"/P BDC {lines('Anna')} EMC /H1 BDC {lines('Anna')} EMC", 0),
    (f"/OC /L BDC {lines('Anna')} EMC", 1), ("1 Tr " + lines("Anna"), 1), (PICTURE, 1),
])  # fmt: skip
def test_a_page_of_dark_words_is_not_looked_at_as_a_picture(drawn, count):
    """That takes most of the time."""
    assert len(find_doubts(pdfium.PdfDocument(pdf(drawn))[0])) == count


def test_heads_and_numbers_that_repeat_are_left_out_and_counted():
    words = "one two six ten odd low".split()
    pages = [
        lines("Report 2024", top=780) * (k % 3 != 1)
        + lines(f"it goes {word}", f"and {word}") + at(300, 30, f"- {k + 7} -")
        for k, word in enumerate(words)
    ]  # fmt: skip
    found = reading(*pages)
    texts = [page for page, _, _ in found.pieces]
    assert texts == ["Report 2024\n" * (w == "one") + f"it goes {w}\nand {w}" for w in words]
    assert "left out: 9 lines that repeat on pages ('Report 2024', '- 7 -'" in found.remark


@pytest.mark.parametrize("pages", [
    [["Total 12", "a"], ["Total 19", "b"], ["Total 31", "c"]],  # numbers of no page
    [["Same.", "Same too.", "And this.", "And that.", "And on."]] * 3,
    [["Anna."]] * 3,
    [["One", "two"], ["Six", "ten"], ["One", "odd"], ["Low", "top"], ["May", "jun"]],
])  # fmt: skip
def test_what_does_not_run_on_stays(pages):
    found = reading(*(lines(*page) for page in pages))
    assert [page.split("\n") for page, _, _ in found.pieces] == pages and not found.remark


def test_a_password_is_asked_for():
    locked = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'61' * 32}> /U <{'62' * 32}> >>"
    with pytest.raises(UserError, match=r"a\.pdf has a password"):
        contents(pdf(lines("Anna."), trailer=f"{locked} /ID [<69> <69>]"), "a.pdf")
