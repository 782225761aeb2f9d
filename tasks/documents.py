"""Documents that people have: text, Markdown, HTML, PDF, docx and epub, files and folders as one.

Holds: `Document` (a text that knows its pages), `read`, one function per form. Leaves out: files of
tasks (tasks/readers.py), sections and tokens (tokens/codec.py). No torch.
Exercise it: `python cli.py ask report.pdf notes/ "question"`. Read next: commands/ask.py.

What a file is follows from its first bytes, so that standard input needs no name:

    path -> bytes -> Contents -> [(text, number, name), ...] -> Document
            -       contents     pages, chapters, or one       together

Every file is foreign: what is unpacked is limited, libraries may raise anything, and each mistake
is one sentence. PDF is read by pypdf and HTML by Beautiful Soup. An epub is a zip of XHTML whose
order its package names, which needs no library; docx needs mammoth, which is optional.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import posixpath
import re
import sys
import unicodedata
import zipfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from config.errors import UserError, clip, first_line
from config.files import is_file
from data import normalize_answer

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

STDIN = "-"
UNPACKED = 1 << 28
"""Most bytes of text that are unpacked from one file."""
LARGEST = 1 << 30
"""Most bytes of a file, of which pictures may be the most."""
SNIFFED = 1 << 16  # bytes that tell whether the rest is worth loading
BETWEEN = "\n\n"  # pages, chapters and files

Range = tuple[int, int]  # characters of a document, from the first to before the last


# ---------------------------------------------------------------- a text and its pages


@dataclass(frozen=True, slots=True)
class Part:
    """A page, a chapter, or a file that has neither; it goes on to the next part's start."""

    start: int  # character of the document
    file: str
    kind: str  # page, chapter or file
    number: int = 0  # of the page or chapter, from 1 in each file
    name: str = ""  # of the chapter


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the places that its characters come from."""

    text: str
    parts: tuple[Part, ...]  # in reading order, at least one
    title: str
    remarks: tuple[str, ...] = ()  # on what of the files was not read, one sentence each

    def size(self) -> str:
        """Return how much that is, in pages, chapters or files: "212 pages"; "" for one plain
        file."""
        kinds = Counter(part.kind for part in self.parts)
        if kinds == {"file": 1}:
            return ""
        return ", ".join(f"{n:,} {kind}{'s' if n > 1 else ''}" for kind, n in kinds.items())

    def where(self, ranges: Iterable[Range], most: int = 8) -> str:
        """Say where characters stand: "pages 3-5, 9"; "" in a document of one plain file.

        With several files their names come first; at most so many places are named.
        """
        if not self.size():
            return ""
        starts = [part.start for part in self.parts]
        found = {
            k
            for start, end in ranges
            for k in range(
                max(0, bisect_right(starts, start) - 1), max(1, bisect_right(starts, end - 1))
            )
        }
        named = [(run[0].file, run[0].kind, run) for run in _runs(self.parts, sorted(found))]
        several, said = len({part.file for part in self.parts}) > 1, []
        for file, group in groupby(named[:most], lambda place: place[0]):
            (_, kind, first), *others = group
            words = [file] if several or kind == "file" else []
            if kind != "file":
                runs = [first, *(run for _, _, run in others)]
                plural = "s" if len(runs) > 1 or len(first) > 1 else ""
                words.append(f"{kind}{plural} {', '.join(map(_named, runs))}")
            said.append(" ".join(words))
        more = f" and {len(named) - most:,} more" if len(named) > most else ""
        return "; ".join(said) + more

    def find(self, answer: str) -> tuple[list[Range], bool] | None:
        """Return where the words of an answer stand, and whether as the phrase that they are.

        Letters and digits count, in any case and however they are encoded, broken into lines or,
        in a long answer, run together. Where the phrase is nowhere, its rarest words near each
        other do: at least two of them, and at least half. ([], False) if nothing is found; None if
        there is nothing to look for, as in yes and no.
        """
        wanted = _wanted(answer, LETTERS_ALONE)
        if not wanted or normalize_answer(answer) in ("yes", "no"):
            return None
        words = [*_words(self.text, LETTERS_ALONE)]
        phrases = {
            place for read in _readings(words, self.text) for place in _phrases(read, wanted)
        }
        if phrases or (phrases := {*_run_together(words, wanted)}):
            return sorted(phrases), True
        wanted = _wanted(answer, WORD)
        for read in _readings([*_words(self.text, WORD)], self.text):
            if places := _near(read, wanted):
                return places, False
        return [], False

    def plain(self) -> dict:
        """Return it as JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict) -> Document:
        """Make it again of what `plain` returned."""
        parts = tuple(Part(**part) for part in plain["parts"])
        return cls(plain["text"], parts, plain["title"], tuple(plain["remarks"]))


UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3" + (
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Letters of scripts without blanks between words, and of Korean, whose endings are written on:
each counts as a word of a phrase."""
MARKS_ON = "\u0300-\u036f\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a"  # accents of the letter before
WRITTEN = re.compile(rf"[^\W_](?:[^\W_]|[{MARKS_ON}])*")
WORD = re.compile(r"[^\W_]+")
LETTERS_ALONE = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
BREAK = re.compile(r"[-\u2010]\s*\n\s*|\xad\s*")  # within a word, at the end of a line or page
ARTICLES = {"a", "an", "the"}
NEAR = 40  # words, within which the words of an answer stand near each other
RUN_TOGETHER = 8  # characters from which words without blanks are the phrase, not part of a word

Word = tuple[str, int, int]  # as it is compared, and the range of its characters


def _words(text: str, kind: re.Pattern) -> Iterator[Word]:
    for match in WRITTEN.finditer(text):
        start, end = match.span()
        if match[0].isascii():  # most words, and most of the time
            yield match[0].lower(), start, end
            continue
        written = unicodedata.normalize("NFKC", match[0]).casefold()
        same = len(written) == end - start  # else each word in it stands for all of it
        for word in kind.finditer(written):
            a, b = word.span() if same else (0, end - start)
            yield word[0], start + a, start + b


def _wanted(answer: str, kind: re.Pattern) -> list[str]:
    """Return the words of an answer without its articles, which say nothing."""
    return [word for word, _, _ in _words(answer, kind) if normalize_answer(word)]


def _readings(words: Sequence[Word], text: str) -> list[list[Word]]:
    """Return words without articles: as they stand, and those that a line's end breaks as one.

    Some hyphens there are a word's own: both readings count.
    """
    both = words, _rejoined(words, text)
    return [[word for word in read if word[0] not in ARTICLES] for read in both]


def _rejoined(words: Iterable[Word], text: str) -> list[Word]:
    joined: list[Word] = []
    for word, start, end in words:
        before, first, last = joined[-1] if joined else ("", 0, 0)
        if before.isalpha() and word.isalpha() and BREAK.fullmatch(text, last, start):
            joined[-1] = (before + word, first, end)
        else:
            joined.append((word, start, end))
    return joined


def _phrases(words: Sequence[Word], wanted: Sequence[str]) -> list[Range]:
    """Return the places at which `wanted` stands, word for word."""
    n, first, wanted = len(wanted), wanted[0], list(wanted)
    return [
        (start, words[k + n - 1][2])
        for k, (word, start, _) in enumerate(words)
        if word == first and [other for other, _, _ in words[k : k + n]] == wanted
    ]


def _run_together(words: Sequence[Word], wanted: Sequence[str]) -> list[Range]:
    """Return the places of a long answer with no regard to blanks, which files often lose."""
    sought = "".join(wanted)
    if len(sought) < RUN_TOGETHER or sought.isdigit():  # columns of numbers would hold it
        return []
    text = "".join(word for word, _, _ in words)
    ends = [*accumulate(len(word) for word, _, _ in words)]
    return [
        (words[bisect_right(ends, match.start())][1], words[bisect_right(ends, match.end() - 1)][2])
        for match in re.finditer(re.escape(sought), text)
    ]


def _near(words: Sequence[Word], wanted: Sequence[str]) -> list[Range]:
    """Return stretches of at most `NEAR` words with the most of the five rarest wanted words."""
    asked = {word for word in wanted if len(word) > 2 or word.isdigit()}
    at: dict[str, list[int]] = {word: [] for word in asked}
    for k, (word, _, _) in enumerate(words):
        if word in at:
            at[word].append(k)
    rarest = sorted((word for word in asked if at[word]), key=lambda word: (len(at[word]), word))
    rarest = rarest[:5]
    need = max(2, -(-min(len(asked), 5) // 2))
    hits = sorted((k, word) for word in rarest for k in at[word])
    best, found, start = need, [], 0
    counts: dict[str, int] = {}
    for k, word in hits:  # a window over the hits
        counts[word] = counts.get(word, 0) + 1
        while k - hits[start][0] >= NEAR or counts[hits[start][1]] > 1:
            counts[hits[start][1]] -= 1
            start += 1
        n = sum(count > 0 for count in counts.values())
        if n > best:
            best, found = n, []
        if n == best:
            found.append((words[hits[start][0]][1], words[k][2]))
    return found


def _runs(parts: Sequence[Part], chosen: Sequence[int]) -> list[list[Part]]:
    """Group the chosen parts that follow each other in one file, by place and by number."""
    runs: list[list[Part]] = []
    for before, k in zip((-1, *chosen), chosen, strict=False):
        last, part = runs[-1][-1] if runs else None, parts[k]
        if last and k == before + 1 and (part.file, part.number) == (last.file, last.number + 1):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _named(run: Sequence[Part]) -> str:
    first, last = run[0], run[-1]
    if len(run) > 1:
        return f"{first.number:,}-{last.number:,}"
    return f"{first.number:,}" + (f" ({clip(first.name, 40)})" if first.name else "")


# ---------------------------------------------------------------- all files together

Piece = tuple[str, int, str]  # text, number (0 = a whole file), name of a chapter


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says."""

    kind: str  # page, chapter or file
    pieces: Sequence[Piece]
    title: str = ""
    remark: str = ""


Named = tuple[Path, int, Contents]
"""A file's path as it was given, how many of its last parts are its name, and what it says."""


class NotText(UserError):
    """A file of a kind that is never read: in a folder it is left out."""


def read(paths: Sequence[str | Path]) -> Document:
    """Read files and folders as one document, in the order in which they are named.

    "-" is standard input. A folder gives its files, those of its folders included, in the natural
    order of their names; what cannot be read of it is left out and named in a remark. UserError:
    nothing there, nothing to read, or a file that was named and cannot be read.
    """
    if not paths:
        raise UserError("Name at least one file or folder to read.")
    if [str(path) for path in paths].count(STDIN) > 1:
        raise UserError("Standard input (-) can be read once: name it once.")
    found: list[Named] = []
    remarks: list[str] = []
    for path in map(str, paths):
        if path == STDIN:
            content = _limited(sys.stdin.buffer, "standard input")
            found.append((Path("standard input"), 1, contents(content, "standard input")))
        elif path and not is_file(path) and Path(path).is_dir():
            files, left_out = _folder(Path(path))
            found += files
            remarks += left_out
        elif path and is_file(path):
            found.append((Path(path), 1, contents(_bytes(Path(path), path), path)))
        elif path and Path(path).exists():  # a pipe, as the shell makes of <(curl ...)
            content = _bytes(Path(path), path)
            found.append((Path(path), len(Path(path).parts), contents(content, path)))
        else:
            raise UserError(f"No file at {path or repr(path)}.")
    remarks += [file.remark for _, _, file in found if file.remark]
    return _together(found, remarks)


def _together(found: Sequence[Named], remarks: Sequence[str]) -> Document:
    names = _names([(path, shown) for path, shown, _ in found])
    files = [file for _, _, file in found]
    texts, parts, length = [], [], 0
    for name, file in zip(names, files, strict=True):
        for text, number, label in file.pieces:
            if parts:
                texts.append(BETWEEN)
                length += len(BETWEEN)
            parts.append(Part(length, name, file.kind, number, label))
            texts.append(text)
            length += len(text)
    title = files[0].title or names[0] if len(files) == 1 else f"{len(files):,} files"
    return Document("".join(texts), tuple(parts), " ".join(title.split()), tuple(remarks))


def _names(paths: Sequence[tuple[Path, int]]) -> list[str]:
    """Return the ends of paths, of so many parts each, or of as many more as tell them apart."""
    shown = [n for _, n in paths]
    while True:
        names = [
            Path(*path.parts[-n:]).as_posix() for (path, _), n in zip(paths, shown, strict=True)
        ]
        times = Counter(names)
        short = [
            k for k, (path, _) in enumerate(paths)
            if times[names[k]] > 1 and shown[k] < len(path.parts)
        ]  # fmt: skip
        if not short:  # a path that is named twice is called alike twice
            return names
        for k in short:
            shown[k] += 1


def _folder(folder: Path) -> tuple[list[Named], list[str]]:
    """Return the files of a folder, and what is said of those left out."""
    found, left_out = [], []
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            left_out.append(f"{name} (hidden)")
            continue
        try:
            content = _bytes(path, name, regular=True)
            found.append((path, len(Path(name).parts), contents(content, name)))
        except NotText:
            left_out.append(name)
        except UserError as error:  # its sentence begins with the name
            left_out.append(str(error).rstrip("."))
    if not found:
        what = f": {_few(left_out)}" if left_out else ""
        raise UserError(f"The folder {folder} holds no file that can be read{what}.")
    return found, [f"Left out of {folder}: {_few(left_out)}."] if left_out else []


def _few(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def _files(folder: Path) -> list[Path]:
    """List the files in a folder and its folders in natural order; hidden folders as such."""
    found = []
    for at, folders, names in os.walk(folder):
        found += [Path(at, name) for name in names]
        found += [Path(at, name) for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found, key=lambda path: natural(path.relative_to(folder).as_posix()))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sorting key by which 2 comes before 10, folder by folder.

    >>> sorted(["b10", "b2", "a/x", "B1"], key=natural)
    ['a/x', 'B1', 'b2', 'b10']
    """
    pieces = re.split(r"(\d+)", name.casefold().replace("/", "\0"))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces if p]


def _bytes(path: Path, name: str, regular: bool = False) -> bytes:
    try:
        status = path.stat()
        if regular and not S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            raise UserError(f"{name} is no regular file.")
        with path.open("rb") as file:
            return _limited(file, name, status.st_size)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from error


def _limited(file: BinaryIO, name: str, size: int = 0) -> bytes:
    """Read at most `LARGEST` bytes, and of what is no text only its beginning.

    size: in bytes, as far as it is known beforehand.
    """
    head = file.read(SNIFFED)
    _check_form(head, name)
    content = head if size > LARGEST else head + file.read(LARGEST + 1 - len(head))
    if max(size, len(content)) > LARGEST:
        raise UserError(f"{name} has more than {LARGEST >> 20:,} MiB: such files are not read.")
    return content


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
        return of_pdf(content, name)
    _check_form(content[:SNIFFED], name)
    text, title = decoded(content, name), ""
    if _is_html(text, name):
        with _damage(name, "HTML"):
            title, text = text_of_html(text)
    _check_not_empty(text, name)
    return Contents("file", [(text, 0, "")], title)


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


def _check_form(head: bytes, name: str) -> None:
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
            f"{name} says that it is written in {encoding}, which is unknown."
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

    said = EncodingDetector.find_declared_encoding(content, is_html=True) or "utf-8"
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
    _check_size(len(unpacked), name)
    return unpacked


def _check_size(n: int, name: str) -> None:
    if n > UNPACKED:
        raise UserError(
            f"{name} unpacks to more than {UNPACKED >> 20} MiB of text: such files are not read."
        )


@contextmanager
def _damage(name: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises on a damaged file into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(". ")
        raise UserError(
            f"{name} is damaged or no {what}: it cannot be read ({clip(reason, 200)})."
        ) from error


# ---------------------------------------------------------------- PDF


def of_pdf(content: bytes, name: str) -> Contents:
    """Read a PDF page by page; pages count from 1 as a viewer counts them.

    Encryption with an empty password, which only forbids printing and the like, is no obstacle.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    log = logging.getLogger("pypdf")  # it reports every oddity of a file on the screen
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with _damage(name, "PDF"):
            try:
                reader = PdfReader(io.BytesIO(content))
                locked = reader.is_encrypted and not reader.decrypt("")
                n = 0 if locked else len(reader.pages)
            except FileNotDecryptedError:
                locked = True
            except DependencyError:
                raise UserError(
                    f"{name} is encrypted by AES, which needs a package: "
                    "pip install -r requirements-documents.txt."
                ) from None
            if locked:
                raise UserError(
                    f"{name} is encrypted: save it without its password, for example by printing "
                    "it to a new PDF."
                )
            if not n:
                raise UserError(f"{name} has no pages.")
            title = str((reader.metadata or {}).get("/Title") or "")
            pages, damaged = _pages(reader, n, name)
    finally:
        log.setLevel(level)
    if not any(text.strip() for text, _, _ in pages):
        if len(damaged) == n:
            raise UserError(f"{name} is damaged: none of its {n:,} pages can be read.")
        raise UserError(
            f"{name} holds pictures of pages and no text, as scans do: recognise its text first, "
            "for example by ocrmypdf."
        )
    return Contents("page", pages, title, _said_of_pages(name, pages, damaged))


def _pages(reader, n: int, name: str) -> tuple[list[Piece], list[int]]:
    """Return the text of every page, and the numbers of those that cannot be read."""
    pages, damaged, length = [], [], 0
    for number in range(1, n + 1):
        try:
            text = reader.pages[number - 1].extract_text()
        except Exception:  # a page may break in any way; it must not take the others with it
            text = ""
            damaged.append(number)
        text = text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        length += len(text)
        _check_size(length, name)
        pages.append((text.strip(), number, ""))
    return pages, damaged


def _said_of_pages(name: str, pages: Sequence[Piece], damaged: Sequence[int]) -> str:
    empty = [number for text, number, _ in pages if not text and number not in damaged]
    said = []
    if empty:
        said.append(f"{_counted(empty)} no text (empty, or a picture)")
    if damaged:
        said.append(f"{_counted(damaged)} damage and cannot be read")
    return f"{name}: of {len(pages):,} pages " + ", ".join(said) + "." if said else ""


def _counted(numbers: Sequence[int]) -> str:
    return f"{len(numbers):,} {'has' if len(numbers) == 1 else 'have'}"


# ---------------------------------------------------------------- HTML

LEFT_OUT = {"script", "style", "noscript", "template", "nav", "title", "svg", "iframe", "button",
            "select", "dialog"}  # fmt: skip
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
    # a single blank is left of what stood between two tags; lines of a <pre> keep theirs
    text = "".join(_strings(soup))
    lines = [re.sub(r"^ (?! )", "", line.rstrip()) for line in text.split("\n")]
    return title, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _tree(markup: str) -> BeautifulSoup:
    import warnings

    from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning

    class Tree(BeautifulSoup):
        def _linkage_fixer(self, el):
            """Repair nothing: html.parser only appends, and a look at all ancestors of each tag
            takes minutes where thousands of <p> are left open."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # XHTML is read as HTML on purpose
        return Tree(markup, "html.parser")


def _strings(soup: BeautifulSoup) -> Iterator[str]:
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


# ---------------------------------------------------------------- docx and epub


def _of_zip(content: bytes, name: str) -> Contents:
    with _damage(name, "zip file"), zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = Members(archive, name)
        if "word/document.xml" in members.names:
            return of_docx(members, name)
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
        _check_size(self.unpacked, self.name)
        with self.archive.open(member) as file:
            return file.read(size)


def of_docx(members: Members, name: str) -> Contents:
    """Read a file of Word's; pages are made by the program that shows it, so it has none here."""
    try:
        import mammoth
    except ImportError:
        raise UserError(
            f"{name} is a docx file, for which the package mammoth is needed: "
            "pip install -r requirements-documents.txt."
        ) from None
    text_alone = io.BytesIO()
    with _damage(name, "docx file"):
        with zipfile.ZipFile(text_alone, "w") as archive:
            for member in dict.fromkeys(members.names):
                if member.endswith((".xml", ".rels")):
                    archive.writestr(member, members.read(member))
        made = mammoth.convert_to_html(text_alone, convert_image=lambda image: [])
    _, text = text_of_html(made.value)
    _check_not_empty(text, name)
    return Contents("file", [(text, 0, "")])


def of_epub(members: Members, name: str) -> Contents:
    """Read a book chapter by chapter, in the order of its package's spine."""
    if {"META-INF/encryption.xml", "META-INF/rights.xml"} <= {*members.names}:
        raise UserError(f"{name} is encrypted: its seller's reader alone can open it.")
    with _damage(name, "epub"):
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
        except UserError:  # too large
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
        f"encoding, and left out: {_few(left_out)}."
    )


def _chapter(content: bytes) -> tuple[str, str]:
    """Return the first heading and the text of a file of a book; ValueError if it is no text."""
    markup = content.decode(_encoding(content, markup=True))
    if "\0" in markup or _strange(markup):
        raise ValueError("a binary file")
    _, text = text_of_html(markup)
    heading = re.search(r"<h[1-3][^>]*>(.*?)</h[1-3]>", markup, re.S | re.I)
    return (text_of_html(heading[1])[1].replace("\n", " ") if heading else ""), text
