"""Files of many forms, and folders, as one text that knows its pages.

path -> bytes -> Contents -> [(text, number, name), ...] -> Document
        -       contents     pages, chapters, or one       together
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from stat import S_ISREG

from config.errors import UserError, clip
from config.files import is_file
from config.options import AskConfig
from data import NOT_FOUND
from tasks import quotes
from tasks.forms import SNIFFED, Contents, check_form, contents, few
from tasks.limited import Readers
from tasks.quotes import Range

STDIN, STDIN_NAME = "-", "standard input"
LARGEST = 1 << 30
"""Most bytes of a file, of which pictures may be the most."""
BETWEEN = "\n\n"  # pages, chapters and files


# ---------------------------------------------------------------- a text and its pages


@dataclass(frozen=True, slots=True)
class Part:
    """A page, a chapter, or a file that has none; it goes on to the next part's start."""

    start: int  # character of the document
    file: str
    kind: str  # page, chapter, message, conversation or file
    number: int = 0  # of the page or chapter, from 1 in each file
    name: str = ""  # of the chapter, or what is printed on the page as its number


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the places that its characters come from."""

    text: str
    parts: tuple[Part, ...]  # in reading order, at least one
    title: str
    remarks: tuple[str, ...] = ()  # on what of the files was not read, one sentence each

    def size(self) -> str:
        """Return how much that is: "212 pages"; "" for one plain file."""
        kinds = Counter(part.kind for part in self.parts)
        if kinds == {"file": 1}:
            return ""
        return ", ".join(f"{n:,} {kind}{'s' if n > 1 else ''}" for kind, n in kinds.items())

    def where(self, ranges: Iterable[Range], most: int = 8) -> str:
        """Say where characters stand, at most so many places: "pages 3-5, 9"; with several files
        "a.pdf page 3; b.txt"; "" in a document of one plain file."""
        if not self.size():
            return ""
        several = len({part.file for part in self.parts}) > 1
        runs: list[list[Part]] = []  # of parts that follow each other, by number too
        for k in self._touched(ranges):
            part, last = self.parts[k], runs[-1][-1] if runs else None
            follows = last is self.parts[k - 1] and last.file == part.file
            if k and follows and part.number == last.number + 1:
                runs[-1].append(part)
            else:
                runs.append([part])
        named = []
        for (file, kind), group in groupby(runs[:most], lambda run: (run[0].file, run[0].kind)):
            numbers = [_number(run) for run in group]
            plural = "s" if len(numbers) > 1 or "-" in numbers[0].partition(" ")[0] else ""
            place = f"{kind}{plural} {', '.join(numbers)}" if kind != "file" else ""
            named.append(f"{file if several or not place else ''} {place}".strip())
        return "; ".join(named) + (f" and {len(runs) - most:,} more" if runs[most:] else "")

    def find(self, answer: str) -> list[Range] | None:
        """Return where the words of an answer stand (tasks/quotes.py); None where there is nothing
        to look for, as in the answer that nothing was found."""
        return None if answer == NOT_FOUND else quotes.places(self.text, answer)

    def _touched(self, ranges: Iterable[Range]) -> list[int]:
        """Return which parts have some of these characters, in order."""
        starts = [part.start for part in self.parts]
        within = (
            range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end) or 1)
            for start, end in ranges
        )
        return sorted({*chain.from_iterable(within)})

    def pages(self, ranges: Iterable[Range]) -> list[int]:
        """Return the numbers of the pages on which characters stand."""
        parts = (self.parts[k] for k in self._touched(ranges))
        return [part.number for part in parts if part.kind == "page"]

    def stands(self, answer: str, question: str) -> tuple[dict, str]:
        """Return whether an answer is found, None if there is nothing to look for; the sentence to
        quote, its page before those of other places, and where it is; then all of it in words."""
        ranges = self.find(answer)
        if not ranges:
            nowhere = None if ranges is None else False
            return {"found": nowhere, "pages": [], "quote": "", "where": ""}, ""
        quote = quotes.best_quote(self.text, ranges, question)
        where, elsewhere = self.where([quote.place]), self.where(quote.others)
        pages = dict.fromkeys([*self.pages([quote.place]), *self.pages(quote.others)])
        words = f"Found {'on' if where.startswith('page') else 'in'} {where or 'the text'}"
        if not quote.shared:
            words += ", in a sentence that shares no word with the question"
        words += f": '{quote.text}'"
        if n := len(quote.others):
            words += f", and in {n:,} more place{'s' if n > 1 else ''}"
            words += f": {elsewhere}" if elsewhere else ""
        found = {"found": True, "pages": [*pages], "quote": quote.text, "where": where}
        return found | {"shared": quote.shared}, words


def _number(run: Sequence[Part]) -> str:
    first, last = run[0], run[-1]
    if first is not last:
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
    names = [str(path) for path in paths]
    if not names or names.count(STDIN) > 1:
        raise UserError("Name at least one file or folder to read, and standard input (-) once.")
    usual, found, remarks = AskConfig(), [], []
    with closing(Readers(seconds or usual.document_s, mib or usual.document_mib)) as readers:
        for name in names:
            path = Path(name)
            if name == STDIN:
                found.append((Path(STDIN_NAME), 1, _file(readers, None, STDIN_NAME)))
            elif name and not is_file(name) and path.is_dir():
                files, left_out = _folder(path, readers)
                found += files
                remarks += [f"Left out of {path}: {few(left_out)}."] if left_out else []
            else:  # or a pipe: <(curl ...)
                shown = 1 if is_file(name) else len(path.parts)
                found.append((path, shown, _file(readers, path, name)))
    return together(found, remarks + [file.remark for *_, file in found if file.remark])


def together(found: Sequence[Named], remarks: Sequence[str] = ()) -> Document:
    """Put what files say into one document; the remarks are on what of them was not read."""
    names, files = _names(found), [file for *_, file in found]
    texts, parts, length = [], [], 0
    for name, file in zip(names, files, strict=True):
        for text, number, label in file.pieces:
            parts.append(Part(length, name, file.kind, number, label))
            texts.append(text)
            length += len(text) + len(BETWEEN)
    title = files[0].title or names[0] if len(files) == 1 else f"{len(files):,} files"
    return Document(BETWEEN.join(texts), tuple(parts), " ".join(title.split()), tuple(remarks))


def _names(found: Sequence[Named]) -> list[str]:
    """Return the ends of paths, of so many parts each, or of as many more as tell them apart."""
    shown = [n for _, n, _ in found]
    while True:
        ends = [path.parts[-n:] for (path, *_), n in zip(found, shown, strict=True)]
        times = Counter(ends)
        longer = [n + (times[end] > 1 and n < len(path.parts))
                  for (path, *_), n, end in zip(found, shown, ends, strict=True)]  # fmt: skip
        if longer == shown:  # a path that is named twice is called alike twice
            return [Path(*end).as_posix() for end in ends]
        shown = longer


def _folder(folder: Path, readers: Readers) -> tuple[list[Named], list[str]]:
    """Return the files of a folder in natural order, and those left out."""
    found, left_out = [], []
    for name, why in sorted(_listed(folder).items(), key=lambda item: natural(item[0])):
        if why:
            left_out.append(f"{name} ({why})")
            continue
        path = folder / name
        try:
            file = _file(readers, path, name, regular=True)
            found.append((path, len(Path(name).parts), file))
        except UserError as error:  # its sentence begins with the name
            left_out.append(str(error).rstrip("."))
    if not found:
        what = f": {few(left_out)}" if left_out else ""
        raise UserError(f"The folder {folder} holds no file that can be read{what}.")
    return found, left_out


def _listed(folder: Path) -> dict[str, str]:
    """Return the names of a folder's files, and of each why it is left out, "" where it is not.

    A folder may be a stranger's, and what is read of it may be sent to a server: no link leads out
    of it. What several links lead to is read once, under its own name where that is not hidden.
    """
    root, names, seen = os.path.realpath(folder), {}, set()
    paths = deque([folder])
    while paths:
        path = paths.popleft()
        name, place = path.relative_to(folder).as_posix(), Path(os.path.realpath(path))
        if path != folder and path.name.startswith("."):
            names[name] = "hidden"
        elif not place.is_relative_to(root):
            names[name] = "a link out of the folder"
        elif place in seen:
            continue
        elif place.is_dir():
            seen.add(place)
            try:
                for below in path.iterdir():  # links come after all else
                    (paths.append if below.is_symlink() else paths.appendleft)(below)
            except OSError as error:
                names[name] = error.strerror
        else:
            seen.add(place)
            names[name] = ""
    return names


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sorting key by which 2 comes before 10, folder by folder.

    >>> sorted(["b10", "b2", "a/x", "B1"], key=natural)
    ['a/x', 'B1', 'b2', 'b10']
    """
    pieces = re.split(r"(\d+)", name.casefold().replace("/", "\0"))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces if p]


def _file(readers: Readers, path: Path | None, name: str, regular: bool = False) -> Contents:
    """Read a file, or standard input: at most `LARGEST` bytes, and of what is no text only the
    beginning."""
    try:
        status = path.stat() if path else None
        if regular and not S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            raise UserError(f"{name} is no regular file.")
        size = status.st_size if status else 0
        with path.open("rb") if path else nullcontext(sys.stdin.buffer) as file:
            content = file.read(SNIFFED)
            check_form(content, name)
            content += b"" if size > LARGEST else file.read(LARGEST + 1 - len(content))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{name or repr(name)} cannot be read: {why}.") from error
    if max(size, len(content)) > LARGEST:
        raise UserError(f"{name} has more than {LARGEST >> 20:,} MiB: such files are not read.")
    return readers.start(contents, name, content=content, name=name).result()
