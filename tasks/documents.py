"""Documents that people have: files of many forms, and folders, as one text.

Holds: `Document` (a text that knows its pages), `read`. Leaves out: the forms (tasks/forms.py),
files of tasks (tasks/readers.py), sections and tokens (tokens/codec.py). No torch.
Exercise it: `python cli.py ask report.pdf notes/ "question"`. Read next: commands/ask.py.

What a file is follows from its first bytes, so that standard input needs no name:

    path -> bytes -> Contents -> [(text, number, name), ...] -> Document
            -       contents     pages, chapters, or one       together

The pieces of an exported chat are its sessions, each under its date.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from config.errors import UserError, clip
from config.files import is_file
from config.options import AskConfig
from tasks import quotes
from tasks.conversations import Session, Utterance
from tasks.forms import SNIFFED, Contents, NotText, check_form, contents, few
from tasks.limited import Readers
from tasks.quotes import Range

STDIN = "-"
LARGEST = 1 << 30
"""Most bytes of a file, of which pictures may be the most."""
BETWEEN = "\n\n"  # pages, chapters and files


# ---------------------------------------------------------------- a text and its pages


@dataclass(frozen=True, slots=True)
class Part:
    """A page, a chapter, a session of a chat, or a file that has none; it goes on to the next
    part's start."""

    start: int  # character of the document
    file: str
    kind: str  # page, chapter, session or file
    number: int = 0  # of the page, chapter or session, from 1 in each file
    name: str = ""  # of the chapter, or the session's day


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the places that its characters come from."""

    text: str
    parts: tuple[Part, ...]  # in reading order, at least one
    title: str
    remarks: tuple[str, ...] = ()  # on what of the files was not read, one sentence each
    # where a file is a chat: the parts as sessions, numbered through; those of other files have no
    # date
    sessions: tuple[Session, ...] = ()

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
        """Return where the words of an answer stand (tasks/quotes.py)."""
        return quotes.places(self.text, answer)

    def stands(self, answer: str, question: str) -> dict[str, bool | str | None]:
        """Return whether an answer is found, None if there is nothing to look for; the sentence to
        quote, where it is, and both in words."""
        found = self.find(answer)
        if not found or not found[0]:
            nowhere = None if found is None else False
            return {"found": nowhere, "quote": "", "where": "", "stands": ""}
        ranges, phrase = found
        starts = {part.start for part in self.parts}
        quote = quotes.best_quote(self.text, ranges, question, starts)
        where, elsewhere = self.where([quote.place]), self.where(quote.others)
        at = f"{'on' if where.startswith('page') else 'in'} {where or 'the text'}"
        words = f"Found {at}" if phrase else f"Its rarest words stand near each other {at}"
        if not quote.shared:
            words = f"{words.replace('Found', 'Its words stand')}, in a sentence that shares no "
            words += "word with the question"
        words += f": '{quote.text}'"
        if n := len(quote.others):
            words += f", and in {n:,} more place{'s' if n > 1 else ''}"
            words += f": {elsewhere}" if elsewhere else ""
        return {"found": True, "quote": quote.text, "where": where, "stands": words}

    def plain(self) -> dict:
        """Return it as JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict) -> Document:
        """Make it again of what `plain` returned."""
        parts = tuple(Part(**part) for part in plain["parts"])
        sessions = [
            Session(
                **session | {"utterances": tuple(Utterance(**u) for u in session["utterances"])}
            )
            for session in plain.get("sessions", ())  # earlier versions knew no chats
        ]
        return cls(plain["text"], parts, plain["title"], tuple(plain["remarks"]), tuple(sessions))


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

Named = tuple[Path, int, Contents]
"""A file's path as it was given, how many of its last parts are its name, and what it says."""


def read(paths: Sequence[str | Path], seconds: float = 0, mib: int = 0) -> Document:
    """Read files and folders as one document, in the order in which they are named.

    "-" is standard input. A folder gives its files, those of its folders included, in the natural
    order of their names; what cannot be read of it is left out and named in a remark. Each is read
    in a child process, which may take so many seconds and MiB of memory (0 = as `ask` by itself).
    UserError: nothing there, nothing to read, or a file that was named and cannot be read.
    """
    if not paths:
        raise UserError("Name at least one file or folder to read.")
    if [str(path) for path in paths].count(STDIN) > 1:
        raise UserError("Standard input (-) can be read once: name it once.")
    usual = AskConfig()
    readers = Readers(seconds or usual.document_s, mib or usual.document_mib)
    with closing(readers):
        return _read([str(path) for path in paths], readers)


def _read(paths: Sequence[str], readers: Readers) -> Document:
    found: list[Named] = []
    remarks: list[str] = []
    for path in paths:
        if path == STDIN:
            content = _limited(sys.stdin.buffer, "standard input")
            found.append((Path("standard input"), 1, _said(readers, content, "standard input")))
        elif path and not is_file(path) and Path(path).is_dir():
            files, left_out = _folder(Path(path), readers)
            found += files
            remarks += left_out
        elif path and is_file(path):
            found.append((Path(path), 1, _said(readers, _bytes(Path(path), path), path)))
        elif path and Path(path).exists():  # a pipe, as the shell makes of <(curl ...)
            content = _bytes(Path(path), path)
            found.append((Path(path), len(Path(path).parts), _said(readers, content, path)))
        else:
            raise UserError(f"No file at {path or repr(path)}.")
    remarks += [file.remark for _, _, file in found if file.remark]
    return together(found, remarks)


def _said(readers: Readers, content: bytes, name: str) -> Contents:
    return readers.start(contents, content, name, name=name).result()


def together(found: Sequence[Named], remarks: Sequence[str] = ()) -> Document:
    """Put what files say into one document; the remarks are on what of them was not read."""
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
    sessions = [*_sessions(names, files)] if any(file.sessions for file in files) else []
    return Document(
        "".join(texts), tuple(parts), " ".join(title.split()), tuple(remarks), tuple(sessions)
    )


def _sessions(names: Sequence[str], files: Sequence[Contents]) -> Iterator[Session]:
    """Yield the sessions of all files, numbered through; a piece of another file is one without a
    date, under the place that it comes from."""
    n = 0
    for name, file in zip(names, files, strict=True):
        for k, (text, number, _) in enumerate(file.pieces):
            if not text.strip():
                continue
            place = f"{name}, {file.kind} {number}" if number else name
            undated = Session(0, "", place, (Utterance("", "", text),))
            session, n = file.sessions[k] if file.sessions else undated, n + 1
            said = (replace(u, id=f"D{n}:{m}") for m, u in enumerate(session.utterances, 1))
            yield replace(session, number=n, utterances=tuple(said))


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


def _folder(folder: Path, readers: Readers) -> tuple[list[Named], list[str]]:
    """Return the files of a folder, and what is said of those left out."""
    found, left_out = [], []
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            left_out.append(f"{name} (hidden)")
            continue
        try:
            content = _bytes(path, name, regular=True)
            found.append((path, len(Path(name).parts), _said(readers, content, name)))
        except NotText:
            left_out.append(name)
        except UserError as error:  # its sentence begins with the name
            left_out.append(str(error).rstrip("."))
    if not found:
        what = f": {few(left_out)}" if left_out else ""
        raise UserError(f"The folder {folder} holds no file that can be read{what}.")
    return found, [f"Left out of {folder}: {few(left_out)}."] if left_out else []


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
    check_form(head, name)
    content = head if size > LARGEST else head + file.read(LARGEST + 1 - len(head))
    if max(size, len(content)) > LARGEST:
        raise UserError(f"{name} has more than {LARGEST >> 20:,} MiB: such files are not read.")
    return content
