"""A PDF as text: pages as a viewer counts them, filled fields, comments, and what cannot be read.

Holds: `of_pdf`. Leaves out: other forms (tasks/forms.py), text in pictures of pages (ocrmypdf).
Exercise it: `python cli.py ask report.pdf "question"`. Read next: tasks/documents.py.

PDFium, Chrome's library, reads text in the order in which a page draws it. That order is left alone
but on two kinds of page: with form fields, whose values are drawn apart from their labels, and with
columns that are drawn line by line across all of them. There it follows from where things stand:

    run    a stretch of text within a line, with its box
    band   runs between two that go across the columns: column by column, each from top to bottom
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import median

from config.errors import UserError
from tasks.forms import Contents, Piece, check_size, damage, few

PASSWORD = 4  # PDFium's error code
HIDDEN = 1 << 1 | 1 << 5  # flags of an annotation that no screen shows
FULL = 0.6  # share of the text's width from which a run goes across the columns
GUTTER = 8.0  # points between two columns, at least
MOST_RUNS = 5_000  # of a page that is put in order; one with more is a drawing
UNKNOWN = "\ufffd"  # stands for a stretch of glyphs that no font says the letters of
GARBLED = 20  # such glyphs, from which a page is named
SAMPLED = 8  # one glyph of so many is looked at first


@dataclass(frozen=True, slots=True)
class Run:
    left: float
    bottom: float
    right: float
    top: float
    text: str
    name: str = ""  # of a field

    @property
    def middle(self) -> float:
        return (self.bottom + self.top) / 2


@dataclass(slots=True)
class Remarks:
    """What a reader has to know of a PDF: numbers of pages, names of what is not read."""

    empty: list[int] = field(default_factory=list)
    garbled: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)

    def sentence(self, name: str, n: int) -> str:
        """Return them as one sentence; "" if there are none."""
        parts = [
            f"{_pages(self.empty, 'has', 'have')} no text (empty, or a picture: recognise it by "
            "ocrmypdf)" if self.empty else "",
            f"{_pages(self.garbled, 'has', 'have')} letters that the file does not name (recognise "
            "them by ocrmypdf --force-ocr)" if self.garbled else "",
            f"{_pages(self.damaged, 'is', 'are')} damaged and cannot be read" if self.damaged else "",
            f"attached and not read: {few(self.attached)}" if self.attached else "",
        ]  # fmt: skip
        found = ", ".join(filter(None, parts))
        return f"{name}: of {n:,} pages {found}." if found else ""


def of_pdf(content: bytes, name: str) -> Contents:
    """Read a PDF page by page; pages count from 1 as a viewer counts them.

    Encryption with an empty password, which only forbids printing and the like, is no obstacle.
    UserError: a password, damage, no page with text.
    """
    import pypdfium2 as pdfium

    with damage(name, "PDF"):
        try:
            document = pdfium.PdfDocument(content)
        except pdfium.PdfiumError as error:
            if error.err_code == PASSWORD:
                raise UserError(
                    f"{name} is encrypted: save it without its password, for example by printing "
                    "it to a new PDF."
                ) from None
            raise
        with document:
            document.init_forms()
            title = document.get_metadata_value("Title")
            names = [document.get_attachment(k).get_name() for k in range(_attached(document))]
            remarks = Remarks(attached=names)
            pages = list(_read_pages(document, name, remarks))
    if not any(text for text, _, _ in pages):
        raise UserError(_why_nothing(name, len(pages), remarks))
    return Contents("page", pages, title, remarks.sentence(name, len(pages)))


def _attached(document) -> int:
    from pypdfium2 import raw

    return raw.FPDFDoc_GetAttachmentCount(document)


def _why_nothing(name: str, n: int, remarks: Remarks) -> str:
    if len(remarks.damaged) == n:
        return f"{name} is damaged: none of its {n:,} pages can be read."
    if remarks.garbled:
        return (
            f"{name} does not say which letters its glyphs are: recognise its text first, for "
            "example by ocrmypdf --force-ocr."
        )
    return (
        f"{name} holds pictures of pages and no text, as scans do: recognise its text first, "
        "for example by ocrmypdf."
    )


def _read_pages(document, name: str, remarks: Remarks) -> Iterator[Piece]:
    """Yield the text of every page, with what is written on it, and note what cannot be read."""
    length = 0
    for number in range(1, len(document) + 1):
        text = ""
        try:
            with closing(document[number - 1]) as page, closing(page.get_textpage()) as letters:
                fields, comments = _annotations(page, document.formenv)
                text, n_unknown = _text(letters, fields)
                text = "\n".join(filter(None, [text, *comments])).strip()
        except (MemoryError, UserError):
            raise
        except Exception:  # a page may break in any way; it must not take the others with it
            remarks.damaged.append(number)
        else:
            garbled = n_unknown > GARBLED or (not text.strip(f"{UNKNOWN}\n ") and n_unknown)
            if garbled:
                remarks.garbled.append(number)
                text = text if text.strip(f"{UNKNOWN}\n ") else ""
            elif not text:
                remarks.empty.append(number)
        length += len(text)
        check_size(length, name)
        yield text, number, ""


def _text(letters, fields: Sequence[Run]) -> tuple[str, int]:
    """Return the text of a page with its fields, and how many glyphs in it are unknown."""
    from pypdfium2 import raw

    n = letters.count_chars()

    def lacking(k: int) -> bool:
        return raw.FPDFText_HasUnicodeMapError(letters, k) == 1

    if any(map(lacking, range(0, n, SAMPLED))):  # to ask for each takes longer than all else
        unknown = [*map(lacking, range(n))]
        ranges = [(bad, len([*same])) for bad, same in groupby(unknown)]
        pieces, at = [f"{run.text}\n" for run in fields], 0
        for bad, count in ranges:
            pieces.append(UNKNOWN if bad else letters.get_text_range(at, count))
            at += count
        return _plain("".join(pieces)), sum(unknown)
    runs = [letters.get_rect(k) for k in range(letters.count_rects())]
    gutters = _gutters(runs) if len(runs) <= MOST_RUNS else []
    if len(runs) > MOST_RUNS or not (fields or gutters):
        return _plain(letters.get_text_range()) + "".join(f"\n{run.text}" for run in fields), 0
    found = [Run(*box, _plain(letters.get_text_bounded(*box))) for box in runs]
    return _ordered([*found, *(_labelled(run, found) for run in fields)], gutters), 0


def _labelled(run: Run, others: Sequence[Run]) -> Run:
    """Return a field with its name where no text stands beside it."""
    beside = any(other.bottom < run.middle < other.top for other in others)
    return run if beside else replace(run, text=f"{run.name}: {run.text}")


def _plain(text: str) -> str:
    """Return PDFium's text with a hyphen where it has divided a word."""
    text = text.replace("\r\n", "\n").replace("\ufffe", "-\n").replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


# ---------------------------------------------------------------- where things stand

Box = tuple[float, float, float, float]  # left, bottom, right, top, in points from below


def _gutters(boxes: Sequence[Box]) -> list[float]:
    """Return the middles of the gaps between columns of text that is drawn across all of them; []
    where there is one column, or text that is drawn column by column, or a table.

    What stands in columns of text fills them: the cells of a table are shorter.
    """
    lines = _joined(boxes)
    if len(lines) < 6:
        return []
    first, last = min(b[0] for b in lines), max(b[2] for b in lines)
    within = [b for b in lines if b[2] - b[0] < FULL * (last - first)]
    gaps, reached = [], first
    for left, right in sorted((b[0], b[2]) for b in within):
        if left - reached >= GUTTER and reached > first:
            gaps.append((reached + left) / 2)
        reached = max(reached, right)
    columns = [sum(b[0] > gap for gap in gaps) for b in within]
    for column in range(len(gaps) + 1):
        widths = [b[2] - b[0] for b, k in zip(within, columns, strict=True) if k == column]
        if len(widths) < 3 or median(widths) < FULL * max(widths) or max(widths) < 60:
            return []
    changes = sum(a != b for a, b in pairwise(columns))
    return gaps if 2 * changes > len(columns) else []


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Join runs that follow each other closely in one line, as words in bold do."""
    lines: list[Box] = []
    for box in boxes:
        left, bottom, right, top = lines[-1] if lines else (0, 0, 0, 0)
        near = (
            lines and 0 <= box[0] - right + 1 < (top - bottom) and bottom < box[3] and box[1] < top
        )
        if near:
            lines[-1] = (left, min(bottom, box[1]), max(right, box[2]), max(top, box[3]))
        else:
            lines.append(box)
    return lines


def _ordered(runs: Sequence[Run], gutters: Sequence[float]) -> str:
    """Return the text of runs by bands, columns and lines."""
    bands: list[list[Run]] = []
    ended = True
    for run in sorted(runs, key=lambda run: -run.top):
        across = any(run.left < gutter < run.right for gutter in gutters)
        if across or ended:
            bands.append([])
        bands[-1].append(run)
        ended = across
    lines: list[str] = []
    for band in bands:
        for column in range(len(gutters) + 1):
            inside = [r for r in band if sum(r.left > gutter for gutter in gutters) == column]
            lines += _lines(inside)
    return "\n".join(lines)


def _lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines from top to bottom: runs whose middles stand within the first one's height."""
    line: list[Run] = []
    for run in [*sorted(runs, key=lambda run: -run.middle), None]:
        if line and (run is None or run.middle < line[0].bottom):
            yield " ".join(run.text for run in sorted(line, key=lambda run: run.left))
            line = []
        line += [run] if run else []


# ---------------------------------------------------------------- fields and comments


def _annotations(page, form) -> tuple[list[Run], list[str]]:
    """Return the filled fields of a page, where they stand, and the comments on it."""
    from pypdfium2 import raw

    fields, comments = [], []
    for k in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, k)
        if not annotation:
            continue
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        try:
            if raw.FPDFAnnot_GetFlags(annotation) & HIDDEN:
                continue
            if kind == raw.FPDF_ANNOT_WIDGET:
                if form and (value := _value(form, annotation)):
                    box = raw.FS_RECTF()
                    raw.FPDFAnnot_GetRect(annotation, box)
                    title = _string(raw.FPDFAnnot_GetFormFieldName, form, annotation)
                    fields.append(Run(box.left, box.bottom, box.right, box.top, value, title))
            elif kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP):
                said = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
                who = _string(raw.FPDFAnnot_GetStringValue, annotation, b"T")
                if said.strip():
                    comments.append(f"[Comment{f' by {who}' if who else ''}: {said.strip()}]")
        finally:
            raw.FPDFPage_CloseAnnot(annotation)
    return fields, comments


def _value(form, annotation) -> str:
    """Return what stands in a field; a box that is ticked or not as [x] or [ ]."""
    from pypdfium2 import raw

    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        return "[x]" if raw.FPDFAnnot_IsChecked(form, annotation) else "[ ]"
    if kind in (raw.FPDF_FORMFIELD_PUSHBUTTON, raw.FPDF_FORMFIELD_SIGNATURE):
        return ""
    return " ".join(_string(raw.FPDFAnnot_GetFormFieldValue, form, annotation).split())


def _string(function: Callable, *arguments) -> str:
    """Call a function of PDFium's that writes UTF-16 into a buffer and returns its bytes."""
    from pypdfium2 import raw

    n = function(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(max(n, 2))
    function(*arguments, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), n)
    return buffer.raw[: max(n - 2, 0)].decode("utf-16-le", "replace")


def _pages(numbers: Sequence[int], verb: str, verbs: str) -> str:
    return f"{len(numbers):,} {verb if len(numbers) == 1 else verbs}"
