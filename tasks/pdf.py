"""A PDF as text: pages as a viewer counts them, filled fields, comments, and what cannot be read.

PDFium, Chrome's library, reads text in the order in which a page draws it. That order is left alone
but on two kinds of page: with form fields, whose values are drawn apart from their labels, and with
columns that are drawn line by line across all of them. There it follows from where things stand:

    word   letters without a blank between them, with their box
    run    words close to each other in a line
    band   runs between two that go across the columns: column by column, each from top to bottom
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from unicodedata import category

import pypdfium2 as pdfium
from pypdfium2 import raw

from config.errors import UserError
from tasks.forms import Contents, Piece, check_size, damage, few

SIGNATURE = raw.FPDF_FORMFIELD_SIGNATURE
PASSWORD = 4  # PDFium's error code
UNSAID = (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET)  # have no words
HIDDEN = 1 << 1 | 1 << 5  # flags of an annotation that no screen shows
INVISIBLE = 3  # how letters are drawn over a scan, to be searched in
FULL = 0.6  # share of the widest line of a column that most of its lines have
GUTTER = 8.0  # points between two columns, at least
GAP = 3.0  # times the height of a line: what stands so far below all else is no column's
LINE_ENDS = ("", "\r\n", "\r\n ")  # PDFium ends a line where letters are raised
RISE = 0.15  # of the height of a line, from which a digit is raised
SMALL = 0.75  # points that letters are high whose font has about one
MOST_RUNS = 5_000  # of a page that is put in order; one with more is a drawing
MOST_PIXELS = 1 << 24  # and points of it
MOST_DRAWN = 50_000  # objects of a page that is drawn to see what can be seen of it
CONTRAST = 12  # of 255 shades, by which letters differ from what they stand on
UNKNOWN = "\ufffd"  # stands for a stretch of glyphs that no font says the letters of
SAMPLED = 4  # one glyph of so many is looked at first: few unknown words are shorter
CAPTION = 100  # letters, with fewer of which a picture of a page remains one
EDGE = 3  # lines at the top and the bottom of a page that may be running heads
BLANKS = re.compile(r"\S+")  # what nobody sees between two words is none
WORD = re.compile("[^\\s\ufffe]+\ufffe?")  # its hyphen is where a line divides it
DIGIT = re.compile(r"[-+\u2212]?\d")
NUMBER = re.compile(r"\d{1,5}")
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
                    f"{name} has a password: save it without, for example by printing it to a new "
                    "PDF."
                ) from None
            raise UserError(f"{name} is damaged or no PDF: no page is found in it.") from None
        with document:
            document.init_forms()
            if document.get_formtype() == raw.FORMTYPE_XFA_FULL and len(document) == 1:
                raise UserError(
                    f"{name} is a form that only Adobe Reader shows: print it there to a new PDF."
                )
            reader = Reader(document, name)
            pages = reader.pages()
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
        self.unseen, self.heads = 0, ""
        n = raw.FPDFDoc_GetAttachmentCount(document)
        self.attached = [document.get_attachment(k).get_name() for k in range(n)]

    def lacks(self) -> str:
        """Say what was not read: "page 2 has no text ...; attached and not read: a.txt"; or ""."""
        parts = [
            f"pages {_ranges(k)} have {what}" if k[1:] else f"page {k[0]:,} has {what}"
            for what, k in self.lacking.items()
        ]
        if self.unseen:
            parts.append(f"left out: {self.unseen:,} words that nobody sees (small, hidden, ...)")
        parts += [self.heads] if self.heads else []
        parts += [f"attached and not read: {few(self.attached)}"] if self.attached else []
        return "; ".join(parts)

    def pages(self) -> list[Piece]:
        """Return the text of every page, with what is written on it."""
        texts, length = [], 0
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
            texts.append(text)
        labels = [self.document.get_page_label(k) for k in range(len(texts))]
        printed = [label * (label != str(n)) for n, label in enumerate(labels, 1)]
        texts, self.heads = without_heads(texts)
        return [
            (text, n, label) for n, (text, label) in enumerate(zip(texts, printed, strict=True), 1)
        ]

    def page(self, index: int) -> tuple[str, str]:
        """Return the text of a page, and what of it cannot be read ("" = nothing)."""
        with closing(self.document[index]) as page:
            fields, comments, stamped = self.annotations(page)
            text, why = ("", "") if stamped else self.text(page, fields)
        if stamped:  # what was made text of the page is there when it is loaded again
            with closing(self.document[index]) as page:
                text, why = self.text(page, fields)
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

    def text(self, page: pdfium.PdfPage, fields: Sequence[Run]) -> tuple[str, str]:
        """Return the text of a page with its fields, and what of it cannot be read, or ""."""
        with closing(page.get_textpage()) as letters:
            n, guessed = letters.count_chars(), ""
            if any(
                _lacks(letters, k) for k in range(0, n, SAMPLED)
            ):  # each takes longer than all else
                lacking = [k for k in range(n) if _lacks(letters, k)]
                if any(map(_is_number, (raw.FPDFText_GetUnicode(letters, k) for k in lacking))):
                    known = _plain(_known(letters, n))
                    return "\n".join([*(run.text for run in fields), known]), GARBLED
                guessed = GUESSED
            words = Words(page, letters)
            self.unseen += words.leave_out_unseen()
            lines = [] if words.turned or len(words.words) > MOST_RUNS else words.lines()
            gutters = _gutters([words.run(line, whole=False) for line in lines])
            if lines and (fields or gutters):
                runs = [words.run(line) for line in lines]
                runs += [_labelled(run, runs) for run in fields]
                return _ordered(runs, gutters), guessed
            return "\n".join([words.text(words.words), *(run.text for run in fields)]), guessed


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


def _plain(text: str) -> str:
    """Return PDFium's text with a hyphen where it has divided a word."""
    text = text.replace("\r\n", "\n").replace("\ufffe", "-\n").replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


# ---------------------------------------------------------------- words of a page


@dataclass(slots=True)
class Word:
    first: int  # of its letters, and the one behind its last
    end: int
    tight: Box = ()  # around its first and last letter
    box: Box = ()  # as high as its line
    high: float = 0.0  # that height; 0 for what stands upright


class Words:
    """The words of a page in the order in which it draws them."""

    def __init__(self, page: pdfium.PdfPage, letters: pdfium.PdfTextPage):
        self.page, self.letters = page, letters
        self.sides = [ctypes.c_double() for _ in range(4)]
        self.turned = page.get_rotation() != 0  # where the lines of its text may stand upright
        self.letter = letters.get_text_range()
        if len(self.letter) != letters.count_chars():  # one of them is two in UTF-16
            n = range(letters.count_chars())
            codes = "".join(chr(raw.FPDFText_GetUnicode(letters, k)) for k in n)
            self.letter = codes.replace("\2", "\ufffe")  # a divided word
        self.words = [Word(*match.span()) for match in WORD.finditer(self.letter)]
        below, above, end = 0.0, 0.0, 0  # of the line, which ends at the first word in another one
        for word in self.words:
            a, b = self.box(word.first), self.box(word.end - 1)
            left, right = min(a[0], b[0]), max(a[2], b[2])
            low, top = min(a[1], b[1]), max(a[3], b[3])
            word.tight = left, low, right, top
            if right - left > top - low or word.end - word.first < 3:  # else it stands upright
                if not end or "\n" in self.letter[end : word.first]:
                    _, below, _, above = letters.get_charbox(word.first, loose=True)
                low, top = min(low, below), max(top, above)
                word.high = top - low
            word.box, end = (left, low, right, top), word.end

    def box(self, k: int) -> Box:
        """Return the box around a letter."""
        raw.FPDFText_GetCharBox(self.letters.raw, k, *self.sides)
        left, right, low, top = self.sides
        return left.value, low.value, right.value, top.value

    def base(self, k: int) -> float:
        """Return the height of the line on which a letter stands."""
        x, y = ctypes.c_double(), ctypes.c_double()
        raw.FPDFText_GetCharOrigin(self.letters, k, x, y)
        return y.value

    def leave_out_unseen(self) -> int:
        """Leave out the words that nobody sees, and count them."""
        width, height = map(round, self.page.get_size())
        drawn = (
            raw.FPDFPage_CountObjects(self.page) < MOST_DRAWN and 0 < width * height < MOST_PIXELS
        )
        if not self.words or not drawn:
            return 0
        bitmap = self.page.render(grayscale=True)
        picture = Picture(bytes(bitmap.buffer), bitmap.stride, bitmap.width, bitmap.height)
        x, y, points = ctypes.c_int(), ctypes.c_int(), []
        for a, b in ((0, 0), (1000, 0), (0, 1000)):
            raw.FPDF_PageToDevice(self.page, 0, 0, 100 * width, 100 * height, 0, a, b, x, y)
            points.append((x.value / 100, y.value / 100))
        (x0, y0), (x1, y1), (x2, y2) = points
        (ax, ay), (bx, by) = (
            ((x1 - x0) / 1000, (y1 - y0) / 1000),
            ((x2 - x0) / 1000, (y2 - y0) / 1000),
        )
        seen = []
        for word in self.words:
            left, low, right, top = word.tight
            xs = sorted((x0 + ax * left + bx * low, x0 + ax * right + bx * top))
            ys = sorted((y0 + ay * left + by * low, y0 + ay * right + by * top))
            text = self.letter[word.first : word.end]
            wordy = sum(map(str.isalnum, text)) > 1
            small = wordy and not self.turned and top - low < SMALL
            around = 0 if wordy else 2  # a full stop fills its box
            shown = not small and picture.varies(xs[0] - around, ys[0] - around,
                                                 xs[1] + around, ys[1] + around)  # fmt: skip
            if shown or not self.is_hidden(word, small or shown is None):
                seen.append(word)
        unseen, self.words = len(self.words) - len(seen), seen
        return unseen

    def is_hidden(self, word: Word, surely: bool) -> bool:
        """Tell whether a word that the page's picture does not show is hidden on purpose.

        The letters over a scan, which are there to be searched in, are not, nor is what a font
        that is not in the file might draw elsewhere.
        """
        drawn = raw.FPDFText_GetTextObject(self.letters, word.first)
        if not drawn or raw.FPDFTextObj_GetTextRenderMode(drawn) == INVISIBLE:
            return False
        embedded = raw.FPDFFont_GetIsEmbedded(raw.FPDFTextObj_GetFont(drawn)) == 1
        return surely or embedded or self.letter[word.first : word.end].isascii()

    def lines(self) -> list[list[Word]]:
        """Return words that are close to each other in a line, line by line."""
        lines: list[list[Word]] = []
        right = low = top = 0.0
        for word in self.words:
            box, high = word.box, top - low
            if -high / 2 < box[0] - right < high and low < box[3] and box[1] < top and lines:
                lines[-1].append(word)
            else:
                lines.append([word])
            _, low, right, top = box
        return lines

    def run(self, line: Sequence[Word], whole: bool = True) -> Run:
        """Return a line as a run, with its text or with its first letter alone."""
        left, low, right, top = zip(*(word.box for word in line), strict=True)
        text = " ".join(self.text(line).split()) if whole else self.letter[line[0].first]
        return Run(min(left), min(low), max(right), max(top), text)

    def text(self, words: Sequence[Word]) -> str:
        """Return the text of words that follow each other; raised digits as in 10^5."""
        pieces: list[str] = []
        ground = before = None  # the last word that stands on the line, and the last one
        for word in words:
            between = BLANKS.sub("", self.letter[before.end : word.first]) if before else ""
            text = self.letter[word.first : word.end]
            off_line = False
            if before and not self.turned and between in LINE_ENDS:
                rise = self.base(word.first) - self.base(ground.first)
                gap, high = word.box[0] - before.box[2], ground.high
                if abs(rise) < 0.7 * high and -0.3 * high < gap < high:
                    off_line = gap <= 0.2 * high and abs(rise) > RISE * high
                    between = " " if gap > 0.2 * high or between.endswith(" ") else ""
            ground = ground if off_line else word
            if DIGIT.search(text) and ground.high and not self.turned:
                text = self.raised(word, self.base(ground.first) + RISE * ground.high, off_line)
            pieces += [between, text]
            before = word
        return _plain("".join(pieces))

    def raised(self, word: Word, above: float, follows: bool) -> str:
        """Return a word with a mark before digits that stand above a height.

        follows: whether something stands right before it.
        """
        out, up = "", False
        for k in range(word.first, word.end):
            number = DIGIT.match(self.letter, k)
            was, up = up, bool(number) and self.base(k) > above and (follows or k > word.first)
            out += "^" * (up and not was) + self.letter[k]
        return out


@dataclass(frozen=True, slots=True)
class Picture:
    """A page as it is drawn, a point a pixel, in shades of grey."""

    shades: bytes
    stride: int
    width: int
    height: int

    def varies(self, left: float, top: float, right: float, low: float) -> bool | None:
        """Tell whether there is anything to see in a box, which goes down; None if it is off."""
        x0, x1 = max(0, int(left)), min(self.width, int(right) + 1)
        y0, y1 = max(0, int(top)), min(self.height, int(low) + 1)
        if x0 >= x1 or y0 >= y1:
            return None
        darkest, lightest = 255, 0
        middle = (y0 + y1) // 2
        for y in (middle, *range(y0, y1)):  # mostly the first one says it
            row = self.shades[y * self.stride + x0 : y * self.stride + x1]
            darkest, lightest = min(darkest, min(row)), max(lightest, max(row))
            if lightest - darkest > CONTRAST:
                return True
        return False


# ---------------------------------------------------------------- fields


def _labelled(run: Run, others: Sequence[Run]) -> Run:
    """Return a field with its name where no text stands beside it."""
    beside = any(other.bottom < run.middle < other.top for other in others)
    return run if beside else replace(run, text=f"{run.name}: {run.text}")


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


# ---------------------------------------------------------------- what repeats on pages


def without_heads(pages: Sequence[str]) -> tuple[list[str], str]:
    """Return pages without the lines that repeat at the top or the bottom of most of them, but for
    the first page's head, and a remark on these. A number in them may count the pages.

    >>> without_heads(["Report\\nOne\\n7", "Report\\nTwo\\n8"])
    (['Report\\nOne', 'Two'], "left out: 3 lines that repeat on pages ('Report', '7')")
    """
    lines = [page.split("\n") for page in pages]
    most = max(2, (sum(map(bool, pages)) + 1) // 2)
    found: list[str] = []
    for side in (0, -1):
        heads: list[list[str]] = [[] for _ in pages]
        for _ in range(EDGE + 1):
            keys = {k: _keys(here[side], k) for k, here in enumerate(lines) if here[1:]}
            times = Counter(key for of_line in keys.values() for key in of_line)
            for k, of_line in keys.items():
                if max(times[key] for key in of_line) >= most and (k or side):
                    heads[k].append(lines[k].pop(side))
        for k, head in enumerate(heads):
            if len(head) > EDGE:  # all of the page repeats: it is no head
                lines[k][:0], lines[k][len(lines[k]) :] = (
                    (head, ()) if side == 0 else ((), head[::-1])
                )
            else:
                found += head
    shown = ", ".join(f"'{line.strip()}'" for line in [*dict.fromkeys(found)][:3])
    remark = f"left out: {len(found):,} lines that repeat on pages ({shown})" if found else ""
    return ["\n".join(here).strip() for here in lines], remark


def _keys(line: str, page: int) -> set[str]:
    """Return a line as it stands, and with each of its numbers as counted from the page's."""
    numbers = (
        f"{line[: match.start()]}\0{int(match[0]) - page}{line[match.end() :]}"
        for match in NUMBER.finditer(line[:200])
    )
    return {line, *numbers} - {""}


# ---------------------------------------------------------------- where things stand


def _gutters(runs: Sequence[Run]) -> list[float]:
    """Return the middles of the gaps between columns of text that is drawn across all of them; []
    where there is one column, or text that is drawn column by column, or a table.

    A title or the number of a page may stand across a gap that most lines respect. What stands in
    columns of text fills them: the cells of a table are shorter.
    """
    gaps = [
        (first.right, second.left)
        for first, second in pairwise(runs)
        if second.left - first.right >= GUTTER and first.bottom < second.middle < first.top
    ]
    gutters: list[float] = []
    middles = {round((left + right) / 2): None for left, right in gaps}
    found = sorted((-sum(left < x < right for left, right in gaps), x) for x in middles)
    for n, x in found:
        across = sum(run.left < x < run.right for run in runs)
        near = any(abs(x - other) < 4 * GUTTER for other in gutters)
        if -n >= max(2, 2 * across) and -n * 2 >= -found[0][0] and not near:
            gutters.append(x)
    within = [run for run in runs if not any(run.left < x < run.right for x in gutters)]
    columns = [
        [run for run in within if sum(run.left > x for x in gutters) == column]
        for column in range(len(gutters) + 1)
    ]
    goes_on = any(run.text[0].islower() for column in columns for run in column[1:])
    for of_column in columns:
        widths = [run.right - run.left for run in of_column]
        fills = median(widths) >= FULL * max(widths) and max(widths) >= 60 if widths else False
        if not fills or len(widths) < (2 if goes_on else 6):
            return []
    return sorted(gutters)


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
