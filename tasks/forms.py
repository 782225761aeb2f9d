"""What a file's bytes say: files of any form become pieces of text.

Every file is foreign: its first bytes tell its form, what is unpacked is limited, libraries may
raise anything, and each mistake is one sentence.
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
from dataclasses import dataclass, replace
from pathlib import PurePath

from config.errors import UserError, clip

UNPACKED = 1 << 28
"""Most bytes of text that are unpacked from one file."""
SNIFFED = 1 << 16  # bytes that tell whether the rest is worth loading
DECLARED = 1 << 13  # bytes in which a file names its encoding

Piece = tuple[str, int, str]  # text, number (0 = a whole file), name of a chapter or page


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says."""

    kind: str  # page, chapter, message, conversation or file
    pieces: list[Piece]
    title: str = ""
    remark: str = ""


# ---------------------------------------------------------------- what a file is

HTML = re.compile(  # atomic: a comment is not tried as part of another one
    r"\s*+(?:<\?xml[^>]*>)?+(?>\s|<!--.*?-->)*+<(?:!doctype html|html|head|body)\b", re.I | re.S
)
GZIP, ZIP, OLE, RTF, PDF = b"\x1f\x8b", b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"{\\rtf", b"%PDF-"
NAMED = {".pdf": "PDF", ".docx": "docx", ".epub": "epub"}  # what a name promises
IN_OLE = {  # the name of a stream -> what such a file is
    "EncryptedPackage": "", "__properties_version1.0": "msg", "WordDocument": "doc",
    "Workbook": "xls", "PowerPoint Document": "ppt",
}  # fmt: skip
IN_ZIP = {"xl/workbook.xml": "xlsx", "xl/workbook.bin": "xlsb", "ppt/presentation.xml": "pptx"}


def contents(content: bytes, name: str) -> Contents:
    """Read the bytes of a file of any known form.

    name: as it stands in errors; its ending decides where the first bytes do not. UserError in one
    sentence.
    """
    if content.startswith(GZIP):
        return contents(unpacked(content, name), name.removesuffix(".gz"))
    form, found = read_form(content, name)
    if not any(text.strip() for text, _, _ in found.pieces):
        raise UserError(f"{name} is empty: there is no text in it. {found.remark}".strip())
    suffix = PurePath(name).suffix.lower()
    if NAMED.get(suffix, form) == form:
        return found
    return replace(found, remark=joined([f"{name} is named {suffix} and is {form}.", found.remark]))


def read_form(content: bytes, name: str) -> tuple[str, Contents]:
    """Return the name of a file's form, and what the file says."""
    from tasks import mail, markup, records

    if is_pdf(content):
        from tasks.pdf import of_pdf

        return "PDF", of_pdf(content, name)
    if content.startswith(ZIP):
        return of_zip(content, name)
    if content.startswith((OLE, RTF)):
        from tasks.office import of_office

        streams = (kind for word, kind in IN_OLE.items() if word.encode("utf-16-le") in content)
        kind = "rtf" if content.startswith(RTF) else next(streams, "doc")
        if not kind:
            raise UserError(f"{name} has a password: save it without.")
        return kind, of_office(content, kind, name)
    check_form(content[:SNIFFED], name)
    if mail.is_mail(content, name):
        return "mail", mail.of_mail(content, name)
    text, remark = decoded(content, name)
    if is_html(text, name):
        with damage(name, "HTML"):
            title, text, more = markup.of_html(text, name)
        return "HTML", Contents("file", [(text, 0, "")], title, joined([remark, more]))
    found = records.of_text(text, name)
    return "text", replace(found, remark=joined([remark, found.remark]))


def joined(remarks: Sequence[str]) -> str:
    return " ".join(filter(None, remarks))


def is_pdf(content: bytes) -> bool:
    """Tell whether a file is a PDF: viewers allow junk before its mark, and texts name the mark."""
    if PDF in content[:1024] and not content.startswith(PDF):
        try:
            content.decode()
        except UnicodeError:
            return True
    return content.startswith(PDF)


def is_html(text: str, name: str) -> bool:
    return name.lower().endswith((".html", ".htm", ".xhtml")) or bool(HTML.match(text[:4096]))


def check_form(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes are those of no form that is read."""
    other = head.startswith((GZIP, ZIP, OLE, RTF, *MARKS)) or PDF in head[:1024]
    if b"\0" in head and not other and not wide(head):
        check_text(head.decode("latin-1"), name)


# ---------------------------------------------------------------- encodings

MARKS = {
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig",
}  # fmt: skip
MARKUP = re.compile(
    r"<!--(?:[^-]|-(?!->))*+|"
    r"<(?:\?xml|meta)\b[^<>]*?\b(?:encoding|charset)\s*+=\s*+[\"']?\s*+([-\w.:]{1,50})", re.I
)  # fmt: skip
CODING = re.compile(r"[^\n]{0,200}?coding[:=]\s*+([-\w.]{1,50})")  # of programs, in the first line
CONTROL = re.compile(r"[\x01-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
LONE = re.compile(r"(?<!\0)\0(?!\0|\Z)")


def decoded(content: bytes, name: str, markup: bool = False, label: str = "") -> tuple[str, str]:
    """Decode a text, and say in a remark what was taken for granted or left out of it.

    By its mark; UTF-16 without one where that alone fits; by what it declares (label: what is said
    of it elsewhere), as browsers understand it (encoding.spec.whatwg.org); else UTF-8. Nothing else
    is guessed: a wrong guess would put wrong letters before the model in silence.
    """
    head, remark = content[:DECLARED].decode("latin-1"), ""
    encoding = next((each for mark, each in MARKS.items() if content.startswith(mark)), "")
    if not encoding and b"\0" in content and (encoding := wide(content[:SNIFFED])):
        remark = f"{name} has no mark of its encoding: it is read as {encoding.upper()}."
    elif not encoding:
        markup = markup or is_html(head, name) or head.startswith("<?xml")
        found = MARKUP.finditer(head) if markup else filter(None, [CODING.match(head)])
        label = label or next((match[1] for match in found if match[1]), "")
        encoding = codec(label, name) if label else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeError as error:
        check_text(content[:SNIFFED].decode("latin-1"), name)
        line = content.count(b"\n", 0, getattr(error, "start", 0)) + 1
        says = f"says that it is written in {label}" if label else "names no encoding"
        raise UserError(
            f"{name} {says}, and line {line:,} is not {label or 'UTF-8'}: save all of it as UTF-8."
        ) from None
    check_text(text, name)
    if n := text.count("\0"):
        text = re.sub("\0+", "\n", text)
        remark += f" {name}: {n:,} NULs, as a power loss leaves them in a log, are left out."
    return text.replace("\r\n", "\n").replace("\r", "\n"), remark.strip()


def codec(label: str, name: str) -> str:
    """Return Python's name of the encoding that browsers take a label for."""
    import webencodings

    found = webencodings.lookup(label) or webencodings.lookup(label.replace("-", ""))
    if not found or found.name in ("replacement", "x-user-defined"):
        raise UserError(f"{name} says that it is written in {label}, which is unknown.")
    if found.name.startswith("utf-16"):  # what could be read up to there has one byte a letter
        return "utf-8"
    wider = {"gbk": "gb18030", "euc-jp": "euc_jis_2004"}
    return wider.get(found.name, found.codec_info.name)


def wide(head: bytes) -> str:
    """Return the UTF-16 in which all of a beginning is text."""
    for encoding in ("utf-16-le", "utf-16-be"):
        with suppress(UnicodeError):
            letters = {*codecs.getincrementaldecoder(encoding)().decode(head)}
            kinds = {unicodedata.category(letter) for letter in letters - {*"\t\n\f\r"}}
            # in the wrong order no blank is a blank and no line ends
            if not kinds & {"Cc", "Cn", "Co"} and letters & {" ", "\n"}:
                return encoding
    return ""


def check_text(text: str, name: str) -> None:
    """Refuse what has lone NULs, any other control characters beside NULs, or many of them."""
    sample = text[:SNIFFED]
    most = 0 if "\0" in sample else len(sample) // 20
    empty = "\0" in sample and not sample.strip("\0")
    if empty or LONE.search(sample) or len(CONTROL.findall(sample)) > most:
        raise UserError(f"{name} is a binary file, not a text.")


# ---------------------------------------------------------------- what is packed


def unpacked(content: bytes, name: str) -> bytes:
    with damage(name, "gzip file"), gzip.open(io.BytesIO(content)) as file:
        inside = file.read(UNPACKED + 1)
    check_size(len(inside), name)
    if inside.startswith(GZIP):
        raise UserError(f"{name} is packed more than once: unpack it, and give what is in it.")
    return inside


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


def of_zip(content: bytes, name: str) -> tuple[str, Contents]:
    """Read what is packed as a zip file: a docx, a book, another office file."""
    from tasks import docx, markup
    from tasks.office import of_office

    with damage(name, "zip file"), zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = Members(archive, name)
        if any(info.flag_bits & 1 for info in members.names.values()):
            raise UserError(f"{name} has a password: save it without.")
        if "_rels/.rels" in members.names and (main := docx.main_part(members)):
            return "docx", docx.of_docx(members, main, name)
        if "META-INF/container.xml" in members.names:
            return "epub", markup.of_epub(members, name)
        kind = next((kind for part, kind in IN_ZIP.items() if part in members.names), "")
        if "mimetype" in members.names:
            kind = ODF.get(members.read("mimetype").decode("latin-1").strip(), kind)
        about = "META-INF/manifest.xml"
        if about in members.names and b"encryption-data" in members.read(about):
            raise UserError(f"{name} has a password: save it without.")
        if kind:
            check_size(sum(info.file_size for info in members.names.values()), name)
            return kind, of_office(content, kind, name)
    raise UserError(f"{name} is a zip file: unpack it, and give the folder.")


ODF = {f"application/vnd.oasis.opendocument.{long}": short for long, short in
       (("text", "odt"), ("spreadsheet", "ods"), ("presentation", "odp"))}  # fmt: skip


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


def target(folder: str, path: str) -> str:
    """Return the member that a path within a member of a folder names."""
    return posixpath.normpath(posixpath.join("/", folder, path.replace("\\", "/")))[1:]


def few(names: Sequence[str], between: str = "; ") -> str:
    """Name the first six of what was left out, and how many more there are."""
    more = f" and {len(names) - 6:,} more" if names[6:] else ""
    return between.join(names[:6]) + more


def remark_on(name: str, left_out: dict[str, int]) -> str:
    """Say how many of each were left out: "a.html: left out: 1 picture, 2 passages that are
    hidden."; "" if nothing was."""
    pairs = ((n, *what.partition(" ")) for what, n in left_out.items() if n)
    counts = [f"{n:,} {noun}{'s' * (n > 1)}{blank}{more}" for n, noun, blank, more in pairs]
    return f"{name}: left out: {', '.join(counts)}." if counts else ""
