"""Documents that people have: every form, every mistake, and the pages of characters and tokens."""

import gzip
import io
import os
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_docx import docx, p, zipped
from test_pdf import lines
from test_pdf import pdf as drawn

from config.errors import UserError
from tasks import documents, forms
from tasks.documents import Document, Part, natural, read
from tasks.forms import contents
from tasks.pages import Places
from tokens.codec import Characters

ROOT = Path(__file__).parents[2]


def pdf(*pages: str, title: str = "") -> bytes:
    """Make a PDF of one line a page; "" is a page without text."""
    return drawn(*(lines(page) if page else "" for page in pages), title=title)


def epub(*chapters: str | bytes, **more: str | bytes) -> bytes:
    """Make a book whose files are named against their order."""
    names = [f"c{len(chapters) - k} x.xhtml" for k in range(len(chapters))]
    items, spine = "", ""
    for k, name in enumerate(names):
        items += f'<item id="i{k}" href="{name.replace(" ", "%20")}"/>'
        spine += f'<itemref idref="i{k}"/>'
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="d"><dc:title>A Book'
        f"</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = '<container><rootfiles><rootfile full-path="O/b.opf"/></rootfiles></container>'
    parts = {"META-INF__container___xml": container, "O__b___opf": package}
    parts |= {f"O__{name}": text for name, text in zip(names, chapters, strict=True)}
    return zipped(mimetype="application/epub+zip", **parts | more)


def said(content: bytes, name: str = "f.x") -> str:
    """The sentence about a file that cannot be read."""
    with pytest.raises(UserError) as error:
        contents(content, name)
    assert "\n" not in str(error.value) and name in str(error.value)
    return str(error.value)


def put(folder: Path, **files: bytes) -> Path:
    """Write files as `zipped` names them."""
    for name, content in files.items():
        path = folder / name.replace("___", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_is_read_by_its_mark(encoding):
    content = "né à Zürich\r\n".encode(encoding)
    for packed in (content, gzip.compress(content)):
        assert contents(packed, "a.txt").pieces[0][0] == "né à Zürich\n"
    page = "<html><meta charset=latin-1><script>no</script><p>né".encode(encoding)
    if encoding in ("utf-8-sig", "utf-16"):
        assert contents(page, "standard input").pieces[0][0] == "né"


def test_the_first_bytes_tell_the_form():
    note = "A PDF begins with %PDF-1.4, né."
    assert contents(note.encode(), "note.md").pieces[0][0] == note
    assert contents(b"\x80\r\n" + pdf("Anna."), "a.pdf").kind == "page"  # as mail programs do
    assert contents(b"<p>Anna", "x.html").pieces[0][0] == "Anna"  # by its name
    assert contents(b"<p>Anna", "x.md").pieces[0][0] == "<p>Anna"
    page = "<!--a-->\n<!-- > -->" * 9 + "<html><title>T</title><p>Anna"
    found = contents(page.encode(), "x")
    assert (found.title, found.pieces) == ("T", [("Anna", 0, "")])


MISTAKES = [
    b"", b" \n\t ", "Anna lived in Zürich.".encode("latin-1"), "Anna".encode("utf-16") + b"\0",
    bytes(range(256)) * 8, b"Anna\0Boris", b"\x89PNG\r\n\x1a\n" + bytes(200), b"{\\rtf1 Anna}",
    b"\xd0\xcf\x11\xe0" + bytes(99), b"PK\x03\x04" + bytes(9), zipped(a___txt="Anna"),
    b"<html><meta charset=nonsense>Anna", b"<html><meta charset=undefined>Anna",
    gzip.compress(b"Anna." * 99, mtime=0)[:-9],
    gzip.compress(gzip.compress(b"Anna.", mtime=0), mtime=0),
    epub("<html></html>"), epub("x", O__b___opf="<package"), epub("<p>né".encode("latin-1")),
]  # fmt: skip


@pytest.mark.parametrize("content", MISTAKES, ids=[str(k) for k in range(len(MISTAKES))])
def test_a_mistake_is_one_sentence(content):
    said(content)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_text_or_one_sentence(content):
    for head in (b"", b"%PDF-1.4\n", b"PK\x03\x04", b"\x1f\x8b", b"<html>"):
        try:
            found = contents(head + content, "f.x")
            assert any(text.strip() for text, _, _ in found.pieces)
        except UserError as error:
            assert "\n" not in str(error)


def test_what_unpacks_to_too_much_is_refused_unread(monkeypatch):
    monkeypatch.setattr(forms, "UNPACKED", 1 << 16)
    big = "Anna. " * 20_000
    for content in (gzip.compress(big.encode()), epub(big)):
        assert len(content) < 4096 and "unpacks to more than" in said(content)
    monkeypatch.setattr(forms, "UNPACKED", 99)
    assert "unpacks to more than" in said(docx(p("Anna."))) and said(pdf(*["Anna left."] * 20))


def test_sizes_that_lie_and_entities_without_end_unpack_nothing(monkeypatch):
    honest = zipped(**{"META-INF__container___xml": "<x>" + " " * 100_000})
    place = honest.rindex(b"PK\x01\x02")  # the directory, which says how large a member is
    lying = honest[: place + 24] + (9).to_bytes(4, "little") + honest[place + 28 :]
    read, most = zipfile.ZipExtFile.read, []

    def watched(file, n=-1):
        most.append(n)
        return read(file, n)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", watched)
    assert "damaged" in said(lying) and most == [9]
    laughs = "".join(f'<!ENTITY a{k} "{f"&a{k - 1};" * 10}">' for k in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY a0 "ha">{laughs}]><x>&a11;</x>'
    assert "damaged" in said(epub("x", O__b___opf=bomb))


CHAPTER = "<html><body><p>Anna reached Lima.</p></body></html>"


def test_an_epub_is_its_chapters_in_the_order_of_its_spine():
    one = "<h1>One &amp; <i>all</i></h1>Anna left."
    two = "<html><!-- <h1>No</h1> --><body><h2>Two</h2><p>Anna reached Lima.</p></body></html>"
    book = epub(f"<title>x</title><body>{one}</body>", two, "<html><img src='x'/></html>")
    found = contents(book, "a.epub")
    assert found.title == "A Book" and found.kind == "chapter"
    assert [(number, name) for _, number, name in found.pieces] == [(1, "One & all"), (2, "Two")]
    assert "Anna reached Lima." in found.pieces[1][0]


def test_a_book_with_locked_chapters_is_refused_and_one_with_locked_fonts_read():
    locked, noise = {"META-INF__encryption___xml": "<encryption/>"}, bytes(range(256)) * 9
    assert contents(epub(CHAPTER, **locked), "a.epub").pieces[0][0] == "Anna reached Lima."
    assert "is encrypted" in said(epub(noise, **locked), "a.epub")


@pytest.mark.parametrize(("head", "encoding"), [
    ('<?xml version="1.0" encoding="ISO-8859-1"?>', "latin-1"),
    ('<html><head><meta charset="windows-1252"/></head>', "cp1252"),
    ("", "utf-8-sig"),
    ('<?xml version="1.0" encoding="utf-16"?>', "utf-16"),
])  # fmt: skip
def test_a_chapter_is_read_in_its_encoding(head, encoding):
    found = contents(epub((head + "<p>né à Zürich</p>").encode(encoding)), "a.epub")
    assert found.pieces[0][0] == "né à Zürich" and not found.remark


def test_chapters_that_are_missing_or_unreadable_are_left_out_and_said():
    book = epub(CHAPTER, "<p>né</p>".encode("latin-1"), "<p>\x01\0", CHAPTER, b"\x89PNG\0")
    found = contents(book.replace(b"c2 x.xhtml", b"c2_x.xhtml"), "a.epub")
    assert [number for _, number, _ in found.pieces] == [1]
    assert all(f"O/c{k} x.xhtml" in found.remark for k in (4, 3, 2, 1))


def test_a_folder_is_one_document_in_natural_order_and_says_what_it_leaves_out(tmp_path, read_here):
    put(tmp_path / "d", b10___txt=b"Ten.", b2___md=b"Two.", a__x___pdf=pdf("One.", "Two."),
        ___git__config=b"no", ___hidden=b"no", photo___png=b"\x89PNG" + bytes(99),
        z___txt=b"")  # fmt: skip
    document = read([tmp_path / "d"])
    assert document.text == "One.\n\nTwo.\n\nTwo.\n\nTen."
    assert [part.file for part in document.parts] == ["a/x.pdf", "a/x.pdf", "b2.md", "b10.txt"]
    assert document.size() == "2 pages, 2 files" and document.title == "3 files"
    (remark,) = document.remarks
    assert all(name in remark for name in (".git", ".hidden", "photo.png", "z.txt"))
    whole = [(0, len(document.text))]
    assert document.where(whole) == "a/x.pdf pages 1-2; b2.md; b10.txt"
    assert document.where(whole, most=2) == "a/x.pdf pages 1-2; b2.md and 1 more"
    named = read([tmp_path / "d" / name for name in ("b10.txt", "b2.md")])
    assert named.text == "Ten.\n\nTwo."  # files that are named keep their order
    alone = read([tmp_path / "d" / "b2.md"])
    assert (alone.size(), alone.where([(0, 3)]), alone.title) == ("", "", "b2.md")
    names = ["c10", "c9", "b/2", "b/10", "C1"]
    assert sorted(names, key=natural) == ["b/2", "b/10", "C1", "c9", "c10"]


# name -> what it is a link to; beside a.txt, sub/b.txt, .c.txt, .d/e.txt, and ../out with f.txt
LINKS = {
    "a file outside": ({"key": "../out/f.txt"}, "A B", "key (a link out of the folder)"),
    "by its whole path": ({"key": "/etc/hostname"}, "A B", "key (a link out of the folder)"),
    "a folder outside": ({"sub/out": "../../out"}, "A B", "sub/out (a link out of the folder)"),
    "a chain": ({"x": "y", "y": "sub/z", "sub/z": "../../out/f.txt"}, "A B",
                "sub/z (a link out of the folder); x (a link out of the folder); "
                "y (a link out of the folder)"),
    "through a folder": ({"s": "sub", "t": "s/../../out"}, "A B", "t (a link out of the folder)"),
    "to what is not there": ({"key": "../none"}, "A B", "key (a link out of the folder)"),
    "a neighbour whose name begins alike": ({"key": "../folder-2/g.txt"}, "A B",
                                            "key (a link out of the folder)"),
    "out and in again": ({"key": "../folder/a.txt"}, "A B", ""),
    "to a file inside": ({"0": "a.txt", "sub/1": "../a.txt"}, "A B", ""),
    "to a folder inside": ({"0": "sub", "sub/1": "."}, "A B", ""),
    "to the folder": ({"0": ".", "sub/1": "..", "sub/2": "../../folder"}, "A B", ""),
    "to what is hidden": ({"0": ".c.txt", "1": ".c.txt", "d": ".d"}, "C A E B", ""),
    "in a circle": ({"x": "y", "y": "x"}, "A B",
                    "x cannot be read: Too many levels of symbolic links; "
                    "y cannot be read: Too many levels of symbolic links"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("given", ["folder", "link", "sub/../folder"])
def test_links_of_a_folder_lead_nowhere_out_of_it(tmp_path, monkeypatch, read_here, kind, given):
    """What one may send to a server is what the folder holds, once; it may be a link itself."""
    links, text, left_out = LINKS[kind]
    monkeypatch.chdir(tmp_path)
    folder = put(
        Path("folder"), a___txt=b"A", sub__b___txt=b"B", ___c___txt=b"C", ___d__e___txt=b"E"
    )
    put(Path("out"), f___txt=b"F"), put(Path("folder-2"), g___txt=b"G"), Path("sub").mkdir()
    Path("link").symlink_to("folder")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    document = read([given])
    assert document.text.split() == text.split()
    left_out = "; ".join(filter(None, (".c.txt (hidden); .d (hidden)", left_out)))
    assert document.remarks == (f"Left out of {given}: {left_out}.",)


def test_standard_input_may_be_any_form_once(monkeypatch, read_here):
    stdin = SimpleNamespace(buffer=io.BytesIO(pdf("Anna.", "", "Boris.", title="A  Report")))
    monkeypatch.setattr(sys, "stdin", stdin)
    document = read(["-"])
    assert document.text == "Anna.\n\n\n\nBoris." and document.title == "A Report"
    assert document.where([(0, len(document.text))]) == "pages 1-3"
    for names in (["-", "-"], []):
        with pytest.raises(UserError):
            read(names)


def test_nothing_to_read_is_one_sentence(tmp_path, read_here):
    for path in ("nowhere.txt", "", "x" * 300, "a\0b", tmp_path):
        with pytest.raises(UserError):
            read([path])
    put(tmp_path, x___bin=b"\0\1")
    for path in (tmp_path, tmp_path / "x.bin"):  # a file that is named is an error
        with pytest.raises(UserError, match=r"x\.bin"):
            read([path])


def test_pipes_of_a_folder_are_left_out_and_one_that_is_named_is_read(tmp_path, read_here):
    put(tmp_path, a___txt=b"Anna.")
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is no regular file" in read([tmp_path]).remarks[0]
    end, other = os.pipe()
    os.write(other, pdf("Anna.", "Boris."))
    os.close(other)
    document = read([f"/dev/fd/{end}"])
    os.close(end)
    assert document.size() == "2 pages" and document.parts[0].file == f"/dev/fd/{end}"


def test_large_files_are_left_unread(tmp_path, monkeypatch, read_here):
    put(tmp_path, a___txt=b"Anna.", large___txt=b"Anna " * (1 << 14), film=b"\0\0\0\x18ftypmp42")
    for name in ("large.txt", "film"):  # sparse: so large, and nothing on the disk
        os.truncate(tmp_path / name, 20 << 30)
    (remark,) = read([tmp_path]).remarks
    assert "film" in remark and "large.txt has more than 1,024 MiB" in remark
    monkeypatch.setattr(documents, "LARGEST", 4)  # what a pipe gives has no size that is known
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Anna.")))
    with pytest.raises(UserError, match="has more than"):
        read(["-"])


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path, read_here):
    report = pdf("One.", "Two.", "Three.", "Four.")
    put(tmp_path, y__2023__report___pdf=report, y__2024__report___pdf=report, z___txt=b"Z.")
    document = read([tmp_path / "y/2023/report.pdf", tmp_path / "y/2024/report.pdf"])
    pages = [(part.start, part.start + 1) for part in document.parts]
    assert document.where([pages[2], pages[7]]) == "2023/report.pdf page 3; 2024/report.pdf page 4"
    put(tmp_path, a__d__README___md=b"1", b__d__README___md=b"2", README___md=b"3")
    named = [tmp_path / "a/d", tmp_path / "b/d", tmp_path / "README.md"]
    names = [part.file for part in read(named).parts]
    assert names == ["a/d/README.md", "b/d/README.md", f"{tmp_path.name}/README.md"]
    twice = read([tmp_path / "README.md"] * 2)  # the same path: nothing tells them apart
    assert [part.file for part in twice.parts] == [str(tmp_path / "README.md")] * 2


def test_pages_of_two_files_of_one_name_are_no_run():
    parts = (Part(0, "a.pdf", "page", 3), Part(1, "a.pdf", "page", 1), Part(2, "a.pdf", "page", 4))
    assert Document("abc", parts, "").where([(0, 1), (2, 3)]) == "pages 3, 4"
    named = tuple(Part(k, "a", "page", k + 1, f"{k}-{k}") for k in range(3))
    assert Document("abc", named, "").where([(0, 1), (2, 3)]) == "pages 1 (0-0), 3 (2-2)"
    assert Document("abc", named, "").where([(1, 2)]) == "page 2 (1-1)"


@pytest.mark.parametrize(("most", "over"), [(None, "center"), (4, "center"), (3, "center"),
                                            (3, "head"), (1, "center")])  # fmt: skip
def test_a_section_stands_where_its_text_does(most, over):
    codec, text = Characters(), "Anna né à Zürich met. " * 60
    sections = codec.cut(text, 30, most, over)
    places = Places(text, sections, codec.decode, over)
    for section, ranges in zip(sections, places.ranges, strict=True):
        assert "".join(text[a:b] for a, b in ranges).split() == section.split()
    assert bool(sections.left_out) == (most is not None)
    if over == "center":
        assert places.ranges[0][0][0] == 0 and places.ranges[-1][-1][1] == len(text)


def test_a_tokenizer_that_cuts_characters_in_two_loses_no_page(codec):
    """The embedded tokenizer has bytes for what it does not know, and a blank before a text."""
    text = "".join(f"Señor {n} né à Zürich – “naïve” 東京. " for n in range(400))
    sections = codec.cut(text, 37)
    places = Places(text, sections, codec.decode, "center")
    assert any("\ufffd" in section for section in places.texts)
    for section, ((start, end),) in zip(places.texts, places.ranges, strict=True):
        assert text[start:end].strip() == section.strip("\ufffd").strip()
    ends = [(a, b) for ((a, b),) in places.ranges]
    assert all(0 <= b - a <= 3 for (_, a), (b, _) in pairwise(ends))


def test_what_a_prompt_shows_is_found_again():
    codec = Characters()
    text = "Anna left. " * 6 + "Boris reached Lima. " + "Anna left. " * 6
    sections = codec.cut(text, 11)
    places = Places(text, sections, codec.decode, "center")
    # alike, and yet one after the other
    assert [places.locate(s) for s in sections] == places.ranges
    both = str(sections[1]) + str(sections[-1])
    assert {*places.locate(both)} >= {*places.ranges[1], *places.ranges[-1]}
    assert places.locate("") == [] and places.locate("nothing of it") == []
    assert len(places.locate(text)) == len(sections)
