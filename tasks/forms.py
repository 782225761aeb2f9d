"""What a file's bytes say: text, Markdown, HTML, PDF, docx and epub become pieces of text.

Holds: `contents`, one function per form. Leaves out: exported chats (tasks/chats.py), paths,
folders and the document made of all files (tasks/documents.py). No torch.
Exercise it: `pytest tests/tasks/test_documents_damaged.py`. Read next: tasks/documents.py.

Every file is foreign: what is unpacked is limited, libraries may raise anything, and each mistake
is one sentence. PDF is read by pypdf and HTML by Beautiful Soup. An epub is a zip of XHTML whose
order its package names, which needs no library; docx needs mammoth, which is optional.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree

from config.errors import UserError, clip, first_line
from tasks.chats import read_chat
from tasks.conversations import Session
from tasks.notebooks import readable

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

UNPACKED = 1 << 28
"""Most bytes of text that are unpacked from one file."""
SNIFFED = 1 << 16  # bytes that tell whether the rest is worth loading
DECLARED = 1 << 13  # bytes in which HTML names its encoding: looking for it in n takes n squared
LONGEST_NAME = 200  # characters of a chapter's; a heading that is never closed is all of its text

Piece = tuple[str, int, str]  # text, number (0 = a whole file), name of a chapter


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says."""

    kind: str  # page, chapter, session or file
    pieces: Sequence[Piece]
    title: str = ""
    remark: str = ""
    sessions: tuple[Session, ...] = ()  # of a chat, one a piece


class NotText(UserError):
    """A file of a kind that is never read: in a folder it is left out."""


# ---------------------------------------------------------------- what a file is

HTML = re.compile(  # atomic: a comment is not tried as part of another one
    r"\s*+(?:<\?xml[^>]*>)?+(?>\s|<!--.*?-->)*+<(?:!doctype html|html)\b", re.I | re.S
)
MARKS = (
    (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"),
)  # fmt: skip
OTHERS = (  # first bytes -> what that is, of formats that people take for text
    (b"\xd0\xcf\x11\xe0", "an old Word or Office file: save it as docx or PDF"),
    (b"{\\rtf", "RTF: save it as docx or as text"),
)


def contents(content: bytes, name: str) -> Contents:
    """Read the bytes of a file of any known form.

    name: as it stands in errors; its ending decides nothing but HTML without a beginning. UserError
    in one sentence, `NotText` for forms that are never read.
    """
    if content[:2] == b"\x1f\x8b":
        return contents(_unpacked(content, name), name.removesuffix(".gz"))
    if content[:4] == b"PK\x03\x04":
        return _of_zip(content, name)
    if _is_pdf(content):
        from tasks.pdf import of_pdf

        return of_pdf(content, name)
    check_form(content[:SNIFFED], name)
    text, title = decoded(content, name), ""
    if _is_html(text, name):
        with damage(name, "HTML"):
            title, text = text_of_html(text)
    _check_not_empty(text, name)
    if (chat := read_chat(text, name)).sessions:
        pieces = [(session.dated, session.number, session.date) for session in chat.sessions]
        return Contents("session", pieces, chat.title, chat.remark, chat.sessions)
    text, remark = readable(text, name)
    return Contents("file", [(text, 0, "")], title, f"{chat.remark} {remark}".strip())


def _is_pdf(content: bytes) -> bool:
    """Tell whether a file is a PDF: viewers allow junk before its mark, and texts name the mark."""
    if b"%PDF-" not in content[:1024] or content.startswith(b"%PDF-"):
        return content.startswith(b"%PDF-")
    try:
        content.decode()
    except UnicodeError:
        return True
    return False


def _is_html(text: str, name: str) -> bool:
    ending = name.lower().endswith((".html", ".htm", ".xhtml"))
    return ending or bool(HTML.match(text[:4096]))


def check_form(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes are those of no form that is read."""
    for first, what in OTHERS:
        if head.startswith(first):
            raise NotText(f"{name} is {what}.")
    packed = head.startswith((b"\x1f\x8b", b"PK\x03\x04")) or b"%PDF-" in head[:1024]
    wide = any(head.startswith(mark) for mark, _ in MARKS)
    if b"\0" in head and not packed and not wide:
        raise NotText(f"{name} is a binary file, not a text.")


def _check_not_empty(text: str, name: str) -> None:
    if not text.strip():
        raise UserError(f"{name} is empty: there is no text in it.")


def decoded(content: bytes, name: str) -> str:
    """Decode a text: UTF-8, UTF-16 and UTF-32 by their marks, HTML by what it says of itself.

    Nothing is guessed: a wrong guess would put wrong letters before the model in silence.
    """
    encoding = _encoding(content, _is_html(content[:4096].decode("latin-1"), name))
    try:
        text = content.decode(encoding)
    except LookupError:
        raise UserError(
            f"{name} says that it is written in {clip(encoding, 50)}, which is unknown."
        ) from None
    except UnicodeError as error:
        if _binary(content) and encoding == "utf-8":
            raise NotText(f"{name} is a binary file, not a text.") from None
        raise UserError(
            f"{name} is no {encoding.removesuffix('-sig').upper()} text "
            f"(byte {getattr(error, 'start', 0) + 1:,}): save it as UTF-8, "
            "for example by iconv -f WINDOWS-1252 -t UTF-8."
        ) from None
    if "\0" in text or _strange(text):
        raise NotText(f"{name} is a binary file, not a text.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoding(content: bytes, markup: bool) -> str:
    """Return the encoding of a text: by its mark, else what markup names in itself, else UTF-8."""
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return encoding
    if not markup:
        return "utf-8"
    from bs4.dammit import EncodingDetector

    said = EncodingDetector.find_declared_encoding(content[:DECLARED], is_html=True) or "utf-8"
    # what could be read up to there has one byte a letter, whatever it says
    return "utf-8" if said.startswith(("utf-16", "utf-32")) else said


def _binary(content: bytes) -> bool:
    """Tell whether bytes that are no UTF-8 look like no text of one byte a letter either."""
    sample = content[: 1 << 16]
    control = sum(sample.count(bytes([byte])) for byte in range(32) if byte not in b"\t\n\f\r\x1b")
    letters = sum(byte in LETTERS for byte in sample)
    return b"\0" in sample or control > len(sample) // 100 or letters < len(sample) // 2


LETTERS = frozenset(b" \n\tabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def _strange(text: str) -> bool:
    """Tell whether many characters of a text are control characters."""
    sample = text[: 1 << 16]
    strange = sum(character < " " and character not in "\t\n\f\r\x1b" for character in sample)
    return strange > len(sample) // 20


def _unpacked(content: bytes, name: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{name} is damaged: it cannot be unpacked ({first_line(error)})."
        ) from None
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


# ---------------------------------------------------------------- HTML

LEFT_OUT = {"script", "style", "noscript", "template", "nav", "title", "svg", "iframe", "button",
            "select", "dialog"}  # fmt: skip
UNENDED = (  # what is text behind the last end of its kind: html.parser would look for each one's
    (re.compile(r"<(?=!--)"), re.compile(r"--\s*>")),
    (re.compile(r"<(?!!\[)"), re.compile(">")),
)
BLOCKS = frozenset(
    (
        "address article aside blockquote caption dd details div dl dt fieldset figcaption figure "
        "footer form h1 h2 h3 h4 h5 h6 header hr li main ol p pre section summary table tbody "
        "tfoot thead tr ul"
    ).split()
)


def text_of_html(markup: str) -> tuple[str, str]:
    """Return the title and the text of a page of HTML, one line a paragraph.

    Scripts, styles, navigation and what is hidden are left out.
    """
    soup = _tree(markup)
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    return title, _text(soup)


def _text(tag: Tag) -> str:
    # a single blank is left of what stood between two tags; lines of a <pre> keep theirs
    text = "".join(_strings(tag))
    lines = [re.sub(r"^ (?! )", "", line.rstrip()) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _tree(markup: str) -> BeautifulSoup:
    import warnings

    from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning

    class Tree(BeautifulSoup):
        def _linkage_fixer(self, el):
            """Repair nothing: html.parser only appends, and a look at all ancestors of each tag
            takes minutes where thousands of <p> are left open."""

    for begin, end in UNENDED:
        last = max((match.end() for match in end.finditer(markup)), default=0)
        markup = markup[:last] + begin.sub("&lt;", markup[last:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # XHTML is read as HTML on purpose
        return Tree(markup, "html.parser")


def _strings(soup: Tag) -> Iterator[str]:
    """Yield the text of a tree and the breaks in it: one walk, however deep the tree is."""
    from bs4 import CData, NavigableString, Tag

    waiting: list[tuple[object, bool]] = [(soup, False)]  # and whether blanks and lines are kept
    while waiting:
        element, kept = waiting.pop()
        if isinstance(element, Tag):
            if _is_left_out(element):
                continue
            before, after = _breaks(element.name)
            yield before
            kept = kept or element.name == "pre"
            waiting.append((after, True))
            waiting += [(child, kept) for child in reversed(element.contents)]
        elif type(element) is NavigableString and not kept:
            yield re.sub(r"\s+", " ", element)
        elif type(element) in (str, NavigableString, CData):  # no comment, no script
            yield element


def _is_left_out(tag: Tag) -> bool:
    hidden = "hidden" in tag.attrs or tag.attrs.get("role") == "navigation"
    return hidden or tag.name in LEFT_OUT


def _breaks(name: str) -> tuple[str, str]:
    """Return what stands before and after a tag of that name."""
    if name in BLOCKS:
        return "\n", "\n"
    return ("\n" if name == "br" else ""), ("\t" if name in ("td", "th") else "")


# ---------------------------------------------------------------- zip files: docx and epub


def _of_zip(content: bytes, name: str) -> Contents:
    with damage(name, "zip file"), zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = Members(archive, name)
        if "_rels/.rels" in members.names and (main := main_part(members)):
            from tasks.docx import of_docx

            return of_docx(members, main, name)
        if "META-INF/container.xml" in members.names:
            return of_epub(members, name)
        if any(member.startswith(("word/", "xl/", "ppt/")) for member in members.names) or (
            "mimetype" in members.names and b".opendocument." in members.read("mimetype")
        ):
            raise NotText(f"{name} is an office file other than docx: save it as docx or PDF.")
    raise NotText(f"{name} is a zip file, neither docx nor epub: unpack it, and name its folder.")


class Members:
    """The files in a zip file, of which no more than `UNPACKED` bytes are ever unpacked.

    What the file says of its members' sizes may be a lie: `read` without a number would unpack all
    the same.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        self.archive, self.name, self.unpacked = archive, name, 0
        self.names = archive.namelist()

    def read(self, member: str) -> bytes:
        size = self.archive.getinfo(member).file_size
        self.unpacked += size
        check_size(self.unpacked, self.name)
        with self.archive.open(member) as file:
            return file.read(size)


def main_part(members: Members) -> str:
    """Return the member that holds a Word document's text, as its package names it; "" if none."""
    for each in ElementTree.fromstring(members.read("_rels/.rels")):
        kind, target = each.get("Type", ""), each.get("Target", "").lstrip("/")
        if kind.endswith("/officeDocument") and target in members.names:
            if b"wordprocessingml" in members.read(target)[:8192]:
                return target
    return ""


def of_epub(members: Members, name: str) -> Contents:
    """Read a book chapter by chapter, in the order of its package's spine."""
    if {"META-INF/encryption.xml", "META-INF/rights.xml"} <= {*members.names}:
        raise UserError(f"{name} is encrypted: its seller's reader alone can open it.")
    with damage(name, "epub"):
        container = ElementTree.fromstring(members.read("META-INF/container.xml"))
        package = container.find(".//{*}rootfile").attrib["full-path"]
        book = ElementTree.fromstring(members.read(package))
        title = next(
            (e.text or "" for e in book.iterfind(".//{http://purl.org/dc/elements/1.1/}title")), ""
        )
        spine = _spine(book, posixpath.dirname(package))
        if _locked(members) & {*spine}:
            raise UserError(f"{name} is encrypted: its seller's reader alone can open it.")
        chapters, left_out = _chapters(members, spine)
    if not chapters:
        if left_out:
            raise UserError(f"{name} is damaged: no chapter of its {len(spine):,} can be read.")
        raise UserError(f"{name} is empty: there is no text in it.")
    return Contents("chapter", chapters, title, _said_of_chapters(name, len(spine), left_out))


def _spine(book: ElementTree.Element, folder: str) -> list[str]:
    """Return the members of a book in reading order; one that its manifest lacks by its id."""
    files = {e.attrib["id"]: e.attrib["href"] for e in book.iterfind(".//{*}manifest/{*}item")}
    ids = [item.attrib["idref"] for item in book.iterfind(".//{*}spine/{*}itemref")]
    paths = [unquote(files.get(id, id).partition("#")[0]) for id in ids]
    return [posixpath.normpath(posixpath.join(folder, path)) for path in paths]


def _locked(members: Members) -> set[str]:
    """Return the members that are encrypted; fonts often are, in books that anyone can read."""
    if "META-INF/encryption.xml" not in members.names:
        return set()
    listed = ElementTree.fromstring(members.read("META-INF/encryption.xml"))
    uris = (e.attrib.get("URI", "") for e in listed.iterfind(".//{*}CipherReference"))
    return {posixpath.normpath(unquote(uri)) for uri in uris}


def _chapters(members: Members, spine: Sequence[str]) -> tuple[list[Piece], list[str]]:
    """Return the chapters that hold text, and the members that cannot be read."""
    chapters: list[Piece] = []
    left_out = []
    for path in spine:
        try:
            heading, text = _chapter(members.read(path))
        except (UserError, MemoryError):  # too large
            raise
        except Exception:  # missing or damaged in any way; it must not take the others with it
            left_out.append(path)
            continue
        if text:
            chapters.append((text, len(chapters) + 1, heading))
    return chapters, left_out


def _said_of_chapters(name: str, n: int, left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    are = "is" if len(left_out) == 1 else "are"
    return (
        f"{name}: of {n:,} chapters {len(left_out):,} {are} missing, damaged or in no known "
        f"encoding, and left out: {few(left_out)}."
    )


def _chapter(content: bytes) -> tuple[str, str]:
    """Return the first heading and the text of a file of a book; ValueError if it is no text."""
    markup = content.decode(_encoding(content, markup=True))
    if "\0" in markup or _strange(markup):
        raise ValueError("a binary file")
    soup = _tree(markup)
    heading = soup.find(["h1", "h2", "h3"])
    name = _text(heading).replace("\n", " ") if heading else ""
    return name[:LONGEST_NAME], _text(soup)


def few(names: Sequence[str], most: int = 6) -> str:
    """Name the first of what was left out, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more
