"""Documents that are damaged, locked, endless or not what they seem: each is one sentence."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANG_S
from test_documents import epub, pdf, put, said

from config.errors import UserError
from tasks import documents, forms
from tasks.documents import read
from tasks.forms import contents

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- HTML and other forms


def test_html_whose_head_does_not_end_is_read():
    head = contents(b"<html><head><title>T</title><meta charset=utf-8><body><p>Hello", "x")
    assert (head.title, head.pieces) == ("T", [("Hello", 0, "")])
    page = "<!--a-->\n<!-- > -->" * 9 + "<html><p>Anna"
    assert contents(page.encode(), "x").pieces[0][0] == "Anna"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_html_with_a_mark_is_html(encoding):
    page = "<html><meta charset=latin-1><script>no</script><p>né".encode(encoding)
    assert contents(page, "standard input").pieces[0][0] == "né"


def test_a_text_that_names_pdf_is_no_pdf():
    note = "A PDF begins with %PDF-1.4, né."
    assert contents(note.encode(), "note.md").pieces[0][0] == note
    late = b"\x80\r\n" + pdf("Anna.")  # mail programs put lines before it
    assert contents(late, "a.pdf").kind == "page"


def test_the_text_of_a_pdf_is_limited(monkeypatch):
    monkeypatch.setattr(forms, "UNPACKED", 99)
    said(pdf(*["Anna left for Lima."] * 9))


# ---------------------------------------------------------------- books

CHAPTER = "<html><body><p>Anna reached Lima.</p></body></html>"


def test_a_book_with_locked_chapters_is_refused_and_one_with_locked_fonts_read():
    locked, noise = {"META-INF__encryption___xml": "<encryption/>"}, bytes(range(256)) * 9
    fonts = epub(CHAPTER, **locked)
    assert contents(fonts, "a.epub").pieces[0][0] == "Anna reached Lima."
    assert "is encrypted" in said(epub(noise, **locked), "a.epub")


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ('<?xml version="1.0" encoding="ISO-8859-1"?>', "latin-1"),
        ('<html><head><meta charset="windows-1252"/></head>', "cp1252"),
        ("", "utf-8"),
        ("", "utf-8-sig"),
        ('<?xml version="1.0" encoding="utf-16"?>', "utf-16"),
    ],
)
def test_a_chapter_is_read_in_its_encoding(head, encoding):
    found = contents(epub((head + "<p>né à Zürich</p>").encode(encoding)), "a.epub")
    assert found.pieces[0][0] == "né à Zürich" and not found.remark


def test_chapters_that_are_missing_or_unreadable_are_left_out_and_said(monkeypatch):
    latin = "<p>né</p>".encode("latin-1")
    book = epub(CHAPTER, latin, "<p>\x01\0", CHAPTER, b"\x89PNG\0")
    found = contents(book.replace(b"c2 x.xhtml", b"c2_x.xhtml"), "a.epub")
    assert [number for _, number, _ in found.pieces] == [1]
    assert "of 5 chapters 4 " in found.remark
    assert all(f"O/c{k} x.xhtml" in found.remark for k in (4, 3, 2, 1))
    said(epub(latin))


# ---------------------------------------------------------------- files that are none


def test_in_a_folder_pipes_are_left_out(tmp_path):
    """As a process of its own, for the reading of a pipe cannot be interrupted."""
    put(tmp_path, a___txt=b"Anna.")
    os.mkfifo(tmp_path / "pipe")
    code = f"from tasks.documents import read; print(read([{str(tmp_path)!r}]).remarks[0])"
    process = [sys.executable, "-c", code]
    found = subprocess.run(process, cwd=ROOT, timeout=HANG_S, capture_output=True, text=True)
    assert "pipe is no regular file" in found.stdout


def test_a_pipe_that_is_named_is_read():
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
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was loaded"))
    (remark,) = read([tmp_path]).remarks
    assert "film" in remark and "large.txt has more than 1,024 MiB" in remark
    with pytest.raises(UserError, match=r"large\.txt has more than 1,024 MiB"):
        read([tmp_path / "large.txt"])
    monkeypatch.setattr(documents, "LARGEST", 9)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Anna." * 9)))
    with pytest.raises(UserError, match="standard input"):
        read(["-"])
