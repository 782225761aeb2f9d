"""What a file's bytes say: text, Markdown, HTML, PDF, docx and epub become pieces of text.

Holds: `contents`, encodings, gz and zip. Leaves out: the forms themselves (tasks/markup.py, pdf.py,
docx.py, notebooks.py), paths, folders and the document made of all files (tasks/documents.py). No
torch.
Exercise it: `pytest tests/tasks/test_documents_damaged.py`. Read next: tasks/documents.py.

Every file is foreign: what is unpacked is limited, libraries may raise anything, and each mistake
is one sentence.
"""

from __future__ import annotations

import codecs
import gzip
import io
import posixpath
import re
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from config.errors import UserError, clip
from tasks.notebooks import readable

UNPACKED = 1 << 28
"""Most bytes of text that are unpacked from one file."""
SNIFFED = 1 << 16  # bytes that tell whether the rest is worth loading
DECLARED = 1 << 13  # bytes in which a file names its encoding

Piece = tuple[str, int, str]  # text, number (0 = a whole file), name of a chapter


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says."""

    kind: str  # page, chapter or file
    pieces: Sequence[Piece]
    title: str = ""
    remark: str = ""


class NotText(UserError):
    """A file of a kind that is never read: in a folder it is left out."""


# ---------------------------------------------------------------- what a file is

HTML = re.compile(  # atomic: a comment is not tried as part of another one
    r"\s*+(?:<\?xml[^>]*>)?+(?>\s|<!--.*?-->)*+<(?:!doctype html|html|head|body)\b", re.I | re.S
)
FIRST = {
    b"\xd0\xcf\x11\xe0": "an old Word or Office file: save it as docx or PDF",
    b"{\\rtf": "RTF: save it as docx or as text",
}  # of formats that people take for text


def contents(content: bytes, name: str) -> Contents:
    """Read the bytes of a file of any known form.

    name: as it stands in errors; its ending decides nothing but HTML without a beginning. UserError
    in one sentence, `NotText` for forms that are never read.
    """
    if content.startswith(b"\x1f\x8b"):
        return contents(_unpacked(content, name), name.removesuffix(".gz"))
    if content.startswith(b"PK\x03\x04"):
        return _of_zip(content, name)
    if _is_pdf(content):
        from tasks.pdf import of_pdf

        return of_pdf(content, name)
    check_form(content[:SNIFFED], name)
    text, remark = decoded(content, name)
    title = ""
    if _is_html(text, name):
        from tasks.markup import of_html

        with damage(name, "HTML"):
            title, text, more = of_html(text, name)
    else:
        text, more = readable(text, name)
    remark = joined([remark, more])
    if not text.strip():
        raise UserError(f"{name} is empty: there is no text in it. {remark}".strip())
    return Contents("file", [(text, 0, "")], title, remark)


def joined(remarks: Sequence[str]) -> str:
    return " ".join(filter(None, remarks))


def _is_pdf(content: bytes) -> bool:
    """Tell whether a file is a PDF: viewers allow junk before its mark, and texts name the mark."""
    if b"%PDF-" in content[:1024] and not content.startswith(b"%PDF-"):
        try:
            content.decode()
        except UnicodeError:
            return True
    return content.startswith(b"%PDF-")


def _is_html(text: str, name: str) -> bool:
    return name.lower().endswith((".html", ".htm", ".xhtml")) or bool(HTML.match(text[:4096]))


def check_form(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes are those of no form that is read."""
    for first, what in FIRST.items():
        if head.startswith(first):
            raise NotText(f"{name} is {what}.")
    other = head.startswith((b"\x1f\x8b", b"PK\x03\x04", *MARKS)) or b"%PDF-" in head[:1024]
    if b"\0" in head and not other and not _wide(head):
        _check_text(head.decode("latin-1"), name)


# ---------------------------------------------------------------- encodings

MARKS = {
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig",
}  # fmt: skip
MARKUP = re.compile(
    r"<!--(?:[^-]|-(?!->))*+|"
    r"<(?:\?xml|meta)\b[^<>]*?\b(?:encoding|charset)\s*+=\s*+[\"']?\s*+([-\w.:]{1,50})", re.I
)  # fmt: skip
CODING = re.compile(r"coding[:=]\s*+([-\w.]{1,50})")  # of programs and their settings
CONTROL = re.compile(r"[\x01-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
LONE = re.compile(r"(?<!\0)\0(?!\0|\Z)")


def decoded(content: bytes, name: str, markup: bool = False) -> tuple[str, str]:
    """Decode a text, and say in a remark what was taken for granted or left out of it.

    By its mark; UTF-16 without one where that alone fits; HTML and XML by what they declare, as
    browsers understand it (encoding.spec.whatwg.org); else UTF-8. Nothing else is guessed: a wrong
    guess would put wrong letters before the model in silence.
    """
    head, remark, label = content[:DECLARED].decode("latin-1"), "", ""
    encoding = next((each for mark, each in MARKS.items() if content.startswith(mark)), "")
    if not encoding and b"\0" in content and (encoding := _wide(content[:SNIFFED])):
        remark = f"{name} has no mark of its encoding: it is read as {encoding.upper()}."
    elif not encoding:
        markup = markup or _is_html(head, name) or head.startswith("<?xml")
        found = (MARKUP if markup else CODING).finditer(head)
        label = next((match[1] for match in found if match[1]), "")
        encoding = _codec(label, name) if markup and label else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeError as error:
        if encoding == "utf-8":
            _check_text(content[:SNIFFED].decode("latin-1"), name)
        written = "WINDOWS-1252" if label.lower() in ("", "utf-8", "utf8") else label
        raise UserError(
            f"{name} is no {encoding.upper()} text (byte {getattr(error, 'start', 0) + 1:,}): "
            f"save it as UTF-8, for example by iconv -f {written} -t UTF-8."
        ) from None
    _check_text(text, name)
    if n := text.count("\0"):
        text = re.sub("\0+", "\n", text)
        remark += f" {name}: {n:,} NULs, as a power loss leaves them in a log, are left out."
    return text.replace("\r\n", "\n").replace("\r", "\n"), remark.strip()


def _codec(label: str, name: str) -> str:
    """Return Python's name of the encoding that browsers take a label for."""
    import webencodings

    found = webencodings.lookup(label) or webencodings.lookup(label.replace("-", ""))
    if not found or found.name in ("replacement", "x-user-defined"):
        raise UserError(
            f"{name} says that it is written in {label}, which is unknown: save it as UTF-8, "
            f"for example by iconv -f {label} -t UTF-8."
        )
    if found.name.startswith("utf-16"):  # what could be read up to there has one byte a letter
        return "utf-8"
    wider = {"gbk": "gb18030", "euc-jp": "euc_jis_2004"}
    return wider.get(found.name, found.codec_info.name)


def _wide(head: bytes) -> str:
    """Return the UTF-16 in which all of a beginning is text."""
    for encoding in ("utf-16-le", "utf-16-be"):
        with suppress(UnicodeError):
            letters = {*codecs.getincrementaldecoder(encoding)().decode(head)}
            kinds = {unicodedata.category(letter) for letter in letters - {*"\t\n\f\r"}}
            # in the wrong order no blank is a blank and no line ends
            if not kinds & {"Cc", "Cn", "Co"} and letters & {" ", "\n"}:
                return encoding
    return ""


def _check_text(text: str, name: str) -> None:
    """Refuse what has lone NULs, any other control characters beside NULs, or many of them."""
    sample = text[:SNIFFED]
    most = 0 if "\0" in sample else len(sample) // 20
    empty = "\0" in sample and not sample.strip("\0")
    if empty or LONE.search(sample) or len(CONTROL.findall(sample)) > most:
        raise NotText(f"{name} is a binary file, not a text.")


# ---------------------------------------------------------------- what is packed


def _unpacked(content: bytes, name: str) -> bytes:
    with damage(name, "gzip file"), gzip.open(io.BytesIO(content)) as file:
        unpacked = file.read(UNPACKED + 1)
    check_size(len(unpacked), name)
    if unpacked[:2] == b"\x1f\x8b":
        raise UserError(f"{name} is packed more than once: unpack it, and give what is in it.")
    return unpacked


def check_size(n: int, name: str) -> None:
    if n > UNPACKED:
        raise UserError(
            f"{name} unpacks to more than {UNPACKED >> 20} MiB of text: such files are not read."
        )


@contextmanager
def damage(name: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises on a damaged file into one sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(". ")
        raise UserError(
            f"{name} is damaged or no {what}: it cannot be read ({clip(reason, 200)})."
        ) from error


def _of_zip(content: bytes, name: str) -> Contents:
    with damage(name, "zip file"), zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = Members(archive, name)
        if "_rels/.rels" in members.names and (main := main_part(members)):
            from tasks.docx import of_docx

            return of_docx(members, main, name)
        if "META-INF/container.xml" in members.names:
            from tasks.markup import of_epub

            return of_epub(members, name)
    raise NotText(
        f"{name} is packed, and neither docx nor epub: save another office file as docx or PDF, "
        f"unpack a zip file and name its folder."
    )


class Members:
    """The files in a zip file, of which no more than `UNPACKED` bytes are ever unpacked.

    What the file says of its members' sizes may be a lie: `read` without a number would unpack all
    the same. names: with slashes, whatever wrote them.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        self.archive, self.name, self.unpacked = archive, name, 0
        self.names = {info.filename.replace("\\", "/"): info for info in archive.infolist()}

    def read(self, member: str) -> bytes:
        info = self.names[member]
        self.unpacked += info.file_size
        check_size(self.unpacked, self.name)
        with self.archive.open(info) as file:
            return file.read(info.file_size)


def main_part(members: Members) -> str:
    """Return the member that holds a Word document's text, as its package names it; "" if none."""
    from tasks.markup import parsed

    relations, _ = decoded(members.read("_rels/.rels"), members.name, markup=True)
    for each in parsed(relations).css('[type$="/officeDocument"][target]'):
        target = posixpath.normpath(each.attributes["target"].replace("\\", "/")).lstrip("/")
        if target in members.names and b"wordprocessingml" in members.read(target)[:8192]:
            return target
    return ""


def few(names: Sequence[str], most: int = 6) -> str:
    """Name the first of what was left out, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more
