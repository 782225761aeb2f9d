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
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from unicodedata import category

import pypdfium2 as pdfium
from pypdfium2 import raw

from config.errors import UserError
from tasks.forms import Contents, Piece, check_size, damage, few

PASSWORD = 4  # PDFium's error code
SIGNATURE = raw.FPDF_FORMFIELD_SIGNATURE
UNSAID = (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET)  # have no words
HIDDEN = 1 << 1 | 1 << 5  # flags of an annotation that no screen shows
FULL = 0.6  # share of the text's width from which a run goes across the columns
GUTTER = 8.0  # points between two columns, at least
GAP = 3.0  # times the height of a line: what stands so far below all else is no column's
RAISED = 0.4  # of the height of a line, tails of letters included, from which a number is raised
SMALL = 0.75  # times the height of a line: what is raised and not so high is no part of it
NUMBER = re.compile(r"[-\u2212+]?\d{1,3}")
MOST_RUNS = 5_000  # of a page that is put in order; one with more is a drawing
UNKNOWN = "\ufffd"  # stands for a stretch of glyphs that no font says the letters of
SAMPLED = 4  # one glyph of so many is looked at first: few unknown words are shorter
CAPTION = 100  # letters, with fewer of which a picture of a page remains one
EMPTY = "no text (empty, or a picture: recognise it by ocrmypdf)"
PICTURE = "a picture with little text beside it (recognise it by ocrmypdf)"
GARBLED = "letters that the file does not name (recognise them by ocrmypdf --force-ocr)"
GUESSED = "letters that the file does not name, read as they seem (if wrong: ocrmypdf --force-ocr)"
DAMAGED = "damage, and cannot be read"


Box = tuple[float, float, float, float]  # left, bottom, right, top, in points from below


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


def of_pdf(content: bytes, name: str) -> Contents:
    """Read a PDF page by page; pages count from 1 as a viewer counts them.

    Encryption with an empty password, which only forbids printing and the like, is no obstacle.
    UserError: a password, damage, no page with text.
    """
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
            reader = Reader(document, name)
            pages = list(reader.pages())
            title = document.get_metadata_value("Title")
    if not any(text for text, _, _ in pages):
        raise UserError(f"{name} holds no text that can be read: {reader.lacks()}.")
    number = f"{len(pages):,} page{'s' * (len(pages) > 1)}"
    remark = f"{name} ({number}): {lacks}." if (lacks := reader.lacks()) else ""
    return Contents("page", pages, title, remark)


class Reader:
    """What is read of a PDF, and the numbers of the pages of which something is not."""

    def __init__(self, document: pdfium.PdfDocument, name: str):
        self.document, self.name = document, name
        self.lacking: dict[str, list[int]] = {}  # what is the matter -> pages
        n = raw.FPDFDoc_GetAttachmentCount(document)
        self.attached = [document.get_attachment(k).get_name() for k in range(n)]

    def lacks(self) -> str:
        """Say what was not read: "page 2 has no text ...; attached and not read: a.txt"; or ""."""
        parts = [
            f"pages {_ranges(k)} have {what}" if k[1:] else f"page {k[0]:,} has {what}"
            for what, k in self.lacking.items()
        ]
        parts += [f"attached and not read: {few(self.attached)}"] if self.attached else []
        return "; ".join(parts)

    def pages(self) -> Iterator[Piece]:
        """Yield the text of every page, with what is written on it."""
        length = 0
        for number in range(1, len(self.document) + 1):
            try:
                text, why = self.page(number - 1)
            except (MemoryError, UserError):
                raise
            except Exception:  # a page may break in any way; it must not take the others with it
                text, why = "", DAMAGED
            if why:
                self.lacking.setdefault(why, []).append(number)
            length += len(text)
            check_size(length, self.name)
            yield text, number, ""

    def page(self, index: int) -> tuple[str, str]:
        """Return the text of a page, and what of it cannot be read ("" = nothing)."""
        with closing(self.document[index]) as page:
            fields, comments, stamped = self.annotations(page)
            text, why = ("", "") if stamped else page_text(page, fields)
        if stamped:  # what was made text of the page is there when it is loaded again
            with closing(self.document[index]) as page:
                text, why = page_text(page, fields)
        readable = text.strip(f"{UNKNOWN}\n ")
        text = "\n".join(filter(None, [readable and text, *comments])).strip()
        why = why or EMPTY * (not text)
        return text, why or PICTURE * (len(text) < CAPTION and self.is_picture(index))

    def is_picture(self, index: int) -> bool:
        """Tell whether a picture covers more than half of a page."""
        with closing(self.document[index]) as page:
            half = page.get_width() * page.get_height() / 2
            boxes = [each.get_bounds() for each in page.get_objects([raw.FPDF_PAGEOBJ_IMAGE])]
        return any((right - left) * (top - low) > half for left, low, right, top in boxes)

    def annotations(self, page: pdfium.PdfPage) -> tuple[list[Run], list[str], bool]:
        """Return the filled fields of a page, where they stand, and the comments on it; and whether
        stamps and signatures on it became text of the page. What is attached to it is noted.
        """
        fields, comments, drawn = [], [], []
        for k in range(raw.FPDFPage_GetAnnotCount(page)):
            annotation = raw.FPDFPage_GetAnnot(page, k)
            if not annotation:
                continue
            kind = raw.FPDFAnnot_GetSubtype(annotation)
            if raw.FPDFAnnot_GetFlags(annotation) & HIDDEN:
                pass
            elif kind == raw.FPDF_ANNOT_WIDGET and (form := self.document.formenv):
                if text := _value(form, annotation):
                    box = raw.FS_RECTF()
                    raw.FPDFAnnot_GetRect(annotation, box)
                    name = _string(raw.FPDFAnnot_GetFormFieldName, form, annotation)
                    fields.append(Run(box.left, box.bottom, box.right, box.top, text, name))
                elif raw.FPDFAnnot_GetFormFieldType(form, annotation) == SIGNATURE:
                    drawn.append(k)
            elif kind not in UNSAID:
                if kind == raw.FPDF_ANNOT_FILEATTACHMENT:
                    attached = raw.FPDFAnnot_GetFileAttachment(annotation)
                    self.attached.append(_string(raw.FPDFAttachment_GetName, attached))
                text = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents").strip()
                who = _string(raw.FPDFAnnot_GetStringValue, annotation, b"T")
                if text:
                    comments.append(f"[Comment{f' by {who}' if who else ''}: {text}]")
                if kind == raw.FPDF_ANNOT_STAMP or (kind == raw.FPDF_ANNOT_FREETEXT and not text):
                    drawn.append(k)
            raw.FPDFPage_CloseAnnot(annotation)
        if drawn:  # alone: other annotations are read already
            for k in reversed(range(raw.FPDFPage_GetAnnotCount(page))):
                if k not in drawn:
                    raw.FPDFPage_RemoveAnnot(page, k)
            raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
        return fields, comments, bool(drawn)


def page_text(page: pdfium.PdfPage, fields: Sequence[Run]) -> tuple[str, str]:
    """Return the text of a page with its fields, and what of it cannot be read ("" = nothing)."""
    with closing(page.get_textpage()) as letters:
        n, guessed = letters.count_chars(), ""
        if any(_lacks(letters, k) for k in range(0, n, SAMPLED)):  # each takes longer than all else
            lacking = [k for k in range(n) if _lacks(letters, k)]
            if any(map(_is_number, (raw.FPDFText_GetUnicode(letters, k) for k in lacking))):
                return _plain(
                    "\n".join([*(run.text for run in fields), _known(letters, n)])
                ), GARBLED
            guessed = GUESSED
        boxes = [letters.get_rect(k) for k in range(letters.count_rects())]
        raised = dict(_raised(letters, boxes))
        gutters = _gutters(boxes) if len(boxes) <= MOST_RUNS else []
        if len(boxes) <= MOST_RUNS and (fields or gutters):
            runs = _runs(letters, boxes, raised)
            return _ordered([*runs, *(_labelled(run, runs) for run in fields)], gutters), guessed
        pieces = [letters.get_text_range(a, b - a) for a, b in pairwise([0, *raised.values(), n])]
        text = "^".join([*(piece.rstrip() for piece in pieces[:-1]), pieces[-1]])
        return "\n".join([_plain(text), *(run.text for run in fields)]), guessed


def _lacks(letters: pdfium.PdfTextPage, k: int) -> bool:
    """Tell whether no font says which letter a glyph is; PDFium then guesses it."""
    return raw.FPDFText_HasUnicodeMapError(letters, k) == 1


def _is_number(code: int) -> bool:
    """Tell whether a guess is the number of a glyph: fonts number their blank 3, no letter."""
    return category(chr(code)) in ("Cc", "Cn", "Co", "Cs")


def _known(letters: pdfium.PdfTextPage, n: int) -> str:
    """Return the text of a page with one sign for each stretch of unknown glyphs."""
    pieces, at = [], 0
    for bad, same in groupby(_lacks(letters, k) for k in range(n)):
        count = len([*same])
        pieces.append(UNKNOWN if bad else letters.get_text_range(at, count))
        at += count
    return "".join(pieces)


def _runs(letters: pdfium.PdfTextPage, boxes: Sequence[Box], raised: Container[int]) -> list[Run]:
    """Return the runs of a page with their letters.

    Boxes stand in the order of the letters, and may overlap.
    """
    n, starts = letters.count_chars(), [0]
    for at in range(n):
        left, low, right, top = letters.get_charbox(at)
        here, *following = boxes[len(starts) - 1 : len(starts) + 1]
        x, y = (left + right) / 2, (low + top) / 2
        if following and not _holds(here, x, y) and _holds(following[0], x, y):
            starts.append(at)
    starts += [n] * (len(boxes) + 1 - len(starts))
    texts = [letters.get_text_range(a, b - a) for a, b in pairwise(starts)]
    runs = []
    for box, first, end in _joined(boxes):
        text = ""
        for k in range(first, end):
            text = f"{text.rstrip()}^{texts[k]}" if k in raised else text + texts[k]
        runs.append(Run(*box, " ".join(_plain(text).split())))
    return runs


def _holds(box: Box, x: float, y: float) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _raised(letters: pdfium.PdfTextPage, boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the raised numbers, as in 10^5: the number of the run, and of its first letter."""
    for k, ((_, low, right, top), box) in enumerate(pairwise(boxes), 1):
        tall, left, bottom = top - low, box[0], box[1]
        near = -1 <= left - right < tall / 4 and low + RAISED * tall < bottom < top
        if near and box[3] - bottom < SMALL * tall:
            if NUMBER.fullmatch(letters.get_text_bounded(*box).strip()):
                at = raw.FPDFText_GetCharIndexAtPos(
                    letters, left + 0.5, (bottom + box[3]) / 2, 2, 2
                )
                if at > 0:
                    yield k, at


def _labelled(run: Run, others: Sequence[Run]) -> Run:
    """Return a field with its name where no text stands beside it."""
    beside = any(other.bottom < run.middle < other.top for other in others)
    return run if beside else replace(run, text=f"{run.name}: {run.text}")


def _plain(text: str) -> str:
    """Return PDFium's text with a hyphen where it has divided a word."""
    text = text.replace("\r\n", "\n").replace("\ufffe", "-\n").replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


def _value(form: pdfium.PdfFormEnv, annotation: raw.FPDF_ANNOTATION) -> str:
    """Return what stands in a field; a box that is ticked or not as [x] or [ ]."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        return "[x]" if raw.FPDFAnnot_IsChecked(form, annotation) else "[ ]"
    if kind in (raw.FPDF_FORMFIELD_PUSHBUTTON, raw.FPDF_FORMFIELD_SIGNATURE):
        return ""
    chosen = (
        _string(raw.FPDFAnnot_GetOptionLabel, form, annotation, k)
        for k in range(max(0, raw.FPDFAnnot_GetOptionCount(form, annotation)))
        if raw.FPDFAnnot_IsOptionSelected(form, annotation, k)
    )
    text = ", ".join(chosen) or _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
    return " ".join(text.split())


def _string(function: Callable, *arguments) -> str:
    """Call a function of PDFium's that writes UTF-16 into a buffer and returns its bytes."""
    n = function(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(max(n, 2))
    function(*arguments, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), n)
    return buffer.raw[: max(n - 2, 0)].decode("utf-16-le", "replace")


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers in rising order.

    >>> _ranges([1, 3, 4, 5])
    '1, 3-5'
    """
    runs = [[n for _, n in same] for _, same in
            groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]  # fmt: skip
    shown = few([f"{run[0]:,}-{run[-1]:,}" if run[1:] else f"{run[0]:,}" for run in runs])
    return shown.replace(";", ",")


# ---------------------------------------------------------------- where things stand


def _gutters(boxes: Sequence[Box]) -> list[float]:
    """Return the middles of the gaps between columns of text that is drawn across all of them; []
    where there is one column, or text that is drawn column by column, or a table.

    What stands in columns of text fills them: the cells of a table are shorter.
    """
    lines = [box for box, _, _ in _joined(boxes)]
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


def _joined(boxes: Sequence[Box]) -> list[tuple[Box, int, int]]:
    """Join boxes that follow each other closely in one line, as words in bold and kerned letters
    do; return each with the number of its first box, and that behind its last one."""
    lines: list[tuple[Box, int, int]] = []
    for k, box in enumerate(boxes):
        (left, low, right, top), first, _ = lines[-1] if lines else ((0, 0, 0, 0), 0, 0)
        near = -(top - low) / 2 < box[0] - right < top - low and low < box[3] and box[1] < top
        if lines and near:
            union = left, min(low, box[1]), max(right, box[2]), max(top, box[3])
            lines[-1] = union, first, k + 1
        else:
            lines.append((box, k, k + 1))
    return lines


def _ordered(runs: Sequence[Run], gutters: Sequence[float]) -> str:
    """Return the text of runs by bands, columns and lines."""
    bands: list[list[Run]] = []
    ended, lowest = True, 0.0
    for run in sorted(runs, key=lambda run: -run.top):
        across = any(run.left < gutter < run.right for gutter in gutters)
        if across or ended or lowest - run.top > GAP * (run.top - run.bottom):
            bands.append([])
        bands[-1].append(run)
        ended, lowest = across, run.bottom
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
