"""Forms that an optional library reads: with a stand-in for it, and refused without it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from test_documents import said
from test_docx import zipped

from tasks.forms import contents

OLE = b"\xd0\xcf\x11\xe0" + bytes(600)
ODF = "application/vnd.oasis.opendocument.text"
FILES = {
    "xlsx": zipped(xl__workbook___xml="<x/>"),
    "pptx": zipped(ppt__presentation___xml="<x/>"),
    "odt": zipped(mimetype=ODF, content___xml="<x/>"),
    "rtf": b"{\\rtf1 Anna}",
    "msg": OLE + "__properties_version1.0".encode("utf-16-le"),
    "doc": OLE + "WordDocument".encode("utf-16-le"),
}


@pytest.fixture
def library(monkeypatch):
    """A stand-in for kreuzberg, whose calls it lists."""
    module, calls = ModuleType("kreuzberg"), []

    def extract(content, mime, config):
        calls.append((mime, config.output_format))
        return SimpleNamespace(content="Anna | 950")

    module.ExtractionConfig, module.extract_bytes_sync = SimpleNamespace, extract
    monkeypatch.setitem(sys.modules, "kreuzberg", module)
    return calls


@pytest.mark.parametrize("kind", FILES)
def test_a_form_is_known_by_its_bytes_and_read_through_one_door(library, kind):
    found = contents(FILES[kind], "a.dat")
    assert found.pieces == [("Anna | 950", 0, "")] and "kreuzberg" in found.remark
    assert [form for _, form in library] == ["markdown" if kind == "xlsx" else "plain"]


@pytest.mark.parametrize("kind", FILES)
def test_without_the_library_it_is_one_sentence(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "kreuzberg", None)
    sentence = said(FILES[kind], "a.dat")
    assert f"a.dat is {kind}, " in sentence and "pip install kreuzberg" in sentence


def test_a_password_is_called_a_password(library):
    locked = bytearray(zipped(a___txt="x", word__document___xml="x"))
    locked[locked.index(b"PK\x01\x02") + 8] |= 1  # of the first member, in the directory
    manifest = "<manifest:encryption-data/>"
    for content in (
        OLE + "EncryptedPackage".encode("utf-16-le"), bytes(locked),
        zipped(**{"mimetype": ODF, "META-INF__manifest___xml": manifest}),
    ):  # fmt: skip
        assert "password" in said(content, "a.docx")
    assert library == []


@pytest.mark.parametrize("suffix", ["pdf", "docx", "epub"])
def test_a_name_that_promises_another_form_is_remarked_on(suffix):
    found = contents(b"<html><h1>403 Forbidden</h1>", f"a.{suffix}")
    assert found.remark == f"a.{suffix} is named .{suffix} and is HTML."
    assert "is text." in contents(b"{}", f"a.{suffix}").remark
