"""A PDF as text: pages as a viewer counts them, filled fields, comments, and what cannot be read.

PDFium, Chrome's library, reads text in the order in which a page draws it. A page is looked at word
by word only where it draws a line in several pieces, which may be columns or raised digits; and
only where it draws more than dark words and thin lines is its picture asked what can be seen.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import groupby, pairwise
from math import inf
from statistics import median
from typing import NamedTuple
from unicodedata import category

import pypdfium2 as pdfium
from pypdfium2 import raw

from config.errors import UserError
from tasks.forms import Contents, check_size, damage, few

WORDLESS = (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET)
HIDDEN = 1 << 1 | 1 << 5  # flags of an annotation that no screen shows
FULL = 0.6  # share of the widest line of a column that most of its lines have
GUTTER = 8.0  # points between two columns, at least
GAP = 3.0  # times the height of a line: what stands so far below all else is no column's
LINE_ENDS = ("", "\r\n", "\r\n ")  # PDFium ends a line where letters are raised
RISE = 0.15  # of the height of a line, from which a digit is raised
SMALL = 0.75  # points that letters are high whose font has about one
THIN = 3.0  # points of a line, which hides no word
DARK, LIGHT = 500, 600  # of 3 x 255 shades of red, green and blue: of words, and of their ground
MOST_WORDS = 5_000  # of a page that is put in order; one with more is a drawing
MANY = 99  # places of a page that are looked at one by one
MOST_DRAWN = 50_000  # objects of a page of which is asked what can be seen
MOST_PIXELS = 1 << 24  # and points of it
CONTRAST = 12  # of 255 shades, by which letters differ from what they stand on
UNKNOWN = "\ufffd"  # stands for a stretch of glyphs that no font says the letters of
CAPTION = 100  # letters, with fewer of which a picture of a page remains one
EDGE = 3  # lines at the top and the bottom of a page that may be running heads
WORD = re.compile("[^\\s\ufffe]+\ufffe?")  # its hyphen is where a line divides it
DIGIT = re.compile(r"[-+\u2212]?\d")
NUMBER = re.compile(r"\d{1,5}")
SCANNED = "no text, or little beside a picture (recognise a scan by ocrmypdf)"
NAMELESS = "letters that the file does not name (if they are wrong: ocrmypdf --force-ocr)"


Box = tuple[float, float, float, float]  # left, low, right, top, in points from below
EVERYWHERE = (-inf, -inf, inf, inf)


class Run(NamedTuple):
    """A word, or several of a line, and where it stands."""

    left: float
    low: float
    right: float
    top: float
    text: str
    first: int = 0  # of its letters, and the one behind its last
    end: int = 0
    name: str = ""  # of a field

    @property
    def middle(self) -> float:
        return (self.low + self.top) / 2


def of_pdf(content: bytes, name: str) -> Contents:
    """Read a PDF page by page. UserError: a password, damage, no page with text.

    Encryption with an empty password, which only forbids printing and the like, is no obstacle.
    """
    try:
        document = pdfium.PdfDocument(content)
    except pdfium.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            raise UserError(f"{name} has a password: save it without.") from None
        raise UserError(f"{name} is damaged or no PDF: no page is found in it.") from None
    with damage(name, "PDF"), document:
        document.init_forms()
        if document.get_formtype() == raw.FORMTYPE_XFA_FULL and len(document) == 1:
            raise UserError(
                f"{name} is a form that only Adobe Reader shows: print it there to a new PDF."
            )
        reader = Reader(document, name)
        texts = reader.pages()
        labels = [document.get_page_label(k) for k in range(len(texts))]
        title = document.get_metadata_value("Title")
    if not any(texts):
        raise UserError(f"{name} holds no text that can be read: {reader.remark()}.")
    pages = [
        (text, n, label * (label != str(n)))
        for n, (text, label) in enumerate(zip(texts, labels, strict=True), 1)
    ]
    remark = f"{name} ({len(pages):,} page{'s' * (len(pages) > 1)}): {reader.remark()}."
    return Contents("page", pages, title, remark * bool(reader.remark()))


class Reader:
    """What is read of a PDF, and the numbers of the pages of which something is not."""

    def __init__(self, document: pdfium.PdfDocument, name: str):
        self.document, self.name = document, name
        self.lacking: dict[str, list[str]] = {}  # what is the matter -> pages
        self.unseen, self.heads = 0, ""
        n = raw.FPDFDoc_GetAttachmentCount(document)
        self.attached = [document.get_attachment(k).get_name() for k in range(n)]

    def remark(self) -> str:
        """Say what was not read, or ""."""
        parts = [
            f"pages {few(numbers, ', ')} have {what}"
            if numbers[1:]
            else f"page {numbers[0]} has {what}"
            for what, numbers in self.lacking.items()
        ]
        if self.unseen:
            parts.append(f"left out: {self.unseen:,} words that nobody sees (small, hidden, ...)")
        if self.attached:
            parts.append(f"attached and not read: {few(self.attached)}")
        return "; ".join(parts + [self.heads] * bool(self.heads))

    def pages(self) -> list[str]:
        texts, length = [], 0
        for index in range(len(self.document)):
            try:
                text, lack = self.page(index)
            except (MemoryError, UserError):
                raise
            except Exception:  # a page may break in any way; it must not take the others with it
                text, lack = "", "damage"
            if lack:
                self.lacking.setdefault(lack, []).append(f"{index + 1:,}")
            length += len(text)
            check_size(length, self.name)
            texts.append(text)
        texts, self.heads = without_heads(texts)
        return texts

    def page(self, index: int) -> tuple[str, str]:
        """Return the text of a page, and what of it cannot be read, or ""."""
        page = self.document[index]
        fields, comments, has_stamps = self.annotations(page)
        if has_stamps:  # which have become text of the page when it is loaded again
            page.close()
            page = self.document[index]
        text, nameless = self.text(page, fields)
        text = text if text.strip(f"{UNKNOWN}\n ") else ""
        text, lack = "\n".join(filter(None, [text, *comments])).strip(), NAMELESS * nameless
        if len(text) < CAPTION and not lack:
            half = page.get_width() * page.get_height() / 2
            pictures = page.get_objects([raw.FPDF_PAGEOBJ_IMAGE]) if text else ()
            sides = (each.get_bounds() for each in pictures)
            covered = any((right - left) * (top - low) > half for left, low, right, top in sides)
            lack = SCANNED * (covered or not text)
        page.close()
        return text, lack

    def annotations(self, page: pdfium.PdfPage) -> tuple[list[Run], list[str], bool]:
        """Return the filled fields of a page, the comments on it, and whether stamps and signatures
        were made text of it; note what is attached to it."""
        fields, comments, drawn = [], [], []
        count, form = raw.FPDFPage_GetAnnotCount(page), self.document.formenv
        for k in range(count):
            note = raw.FPDFPage_GetAnnot(page, k)
            if not note or raw.FPDFAnnot_GetFlags(note) & HIDDEN:
                continue
            kind = raw.FPDFAnnot_GetSubtype(note)
            if kind == raw.FPDF_ANNOT_WIDGET and form:
                if text := field_value(form, note):
                    box = raw.FS_RECTF()
                    raw.FPDFAnnot_GetRect(note, box)
                    name = string(raw.FPDFAnnot_GetFormFieldName, form, note)
                    sides = box.left, box.bottom, box.right, box.top
                    fields.append(Run(*sides, text, name=name))
                elif raw.FPDFAnnot_GetFormFieldType(form, note) == raw.FPDF_FORMFIELD_SIGNATURE:
                    drawn.append(k)
            elif kind not in WORDLESS:
                if kind == raw.FPDF_ANNOT_FILEATTACHMENT:
                    attached = raw.FPDFAnnot_GetFileAttachment(note)
                    self.attached.append(string(raw.FPDFAttachment_GetName, attached))
                text = string(raw.FPDFAnnot_GetStringValue, note, b"Contents").strip()
                who = string(raw.FPDFAnnot_GetStringValue, note, b"T")
                if text:
                    comments.append(f"[Comment{f' by {who}' if who else ''}: {text}]")
                elif kind in (raw.FPDF_ANNOT_STAMP, raw.FPDF_ANNOT_FREETEXT):
                    drawn.append(k)
            raw.FPDFPage_CloseAnnot(note)
        if drawn:  # alone: other annotations are read already
            for k in reversed(range(count)):
                if k not in drawn:
                    raw.FPDFPage_RemoveAnnot(page, k)
            raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
        return fields, comments, bool(drawn)

    def text(self, page: pdfium.PdfPage, fields: Sequence[Run]) -> tuple[str, bool]:
        """Return the text of a page with its fields, and whether glyphs of it have no name."""
        with closing(page.get_textpage()) as letters:
            whole = letters.get_text_range()
            if len(whole) != letters.count_chars():  # one of them is two in UTF-16
                codes = (raw.FPDFText_GetUnicode(letters, k) for k in range(letters.count_chars()))
                whole = "".join(map(chr, codes)).replace("\2", "\ufffe")  # a divided word
            starts = [match.start() for match in WORD.finditer(whole)]
            nameless = any(raw.FPDFText_HasUnicodeMapError(letters, k) == 1 for k in starts)
            if nameless and (known := known_text(letters, whole)):
                return "\n".join([*(run.text for run in fields), plain(known)]), True
            # each piece of a line has a rectangle
            boxes = [*map(letters.get_rect, range(min(letters.count_rects(), MOST_WORDS)))]
            in_pieces = any(a[1] < b[3] and b[1] < a[3] for a, b in pairwise(boxes))
            doubts = find_doubts(page)
            doubtful = any(touch(box, doubt) for doubt in doubts for box in boxes)
            if not (in_pieces or doubtful or fields):
                return plain(whole), nameless
            words = Words(letters, whole)
            if doubtful:
                self.unseen += words.leave_out_unseen(page, doubts)
            ordered = page.get_rotation() == 0 and len(words.words) <= MOST_WORDS
            return (
                words.in_order(fields)
                if ordered
                else "\n".join([words.text(words.words, False), *(run.text for run in fields)])
            ), nameless


def known_text(letters: pdfium.PdfTextPage, text: str) -> str:
    """Return a text with one sign for each stretch of glyphs without a name; "" where PDFium has
    guessed letters for them, and not the numbers of glyphs: fonts number their blank 3."""
    nameless = [raw.FPDFText_HasUnicodeMapError(letters, k) == 1 for k in range(len(text))]
    guesses = (letter for letter, bad in zip(text, nameless, strict=True) if bad)
    if not any(category(letter) in ("Cc", "Cn", "Co", "Cs") for letter in guesses):
        return ""
    stretches = groupby(zip(text, nameless, strict=True), key=lambda pair: pair[1])
    return "".join(UNKNOWN if bad else "".join(c for c, _ in same) for bad, same in stretches)


def plain(text: str) -> str:
    """Return PDFium's text with a hyphen where it has divided a word."""
    text = text.replace("\r\n", "\n").replace("\ufffe", "-\n").replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


def touch(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tell whether two boxes (left, low, right, top) have a point in common."""
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


def find_doubts(page: pdfium.PdfPage) -> list[Box]:
    """Return where a page draws other things than dark words on light ground and thin lines: there
    may be words that nobody sees. [] of a drawing with too many objects to be looked at."""
    count, doubts, has_words = raw.FPDFPage_CountObjects(page), [], False
    left, low, right, top = page.get_bbox()
    box, colour = [ctypes.c_float() for _ in range(4)], [ctypes.c_uint() for _ in range(4)]
    filling = ctypes.c_int()
    for k in range(count if count < MOST_DRAWN else 0):
        each = raw.FPDFPage_GetObject(page, k)
        raw.FPDFPageObj_GetBounds(each, *box)
        a, b, c, d = (side.value for side in box)
        filled = raw.FPDFPageObj_GetFillColor(each, *colour) and colour[3].value == 255
        light = sum(shade.value for shade in colour[:3])
        kind = raw.FPDFPageObj_GetType(each)
        has_words = has_words or kind == raw.FPDF_PAGEOBJ_TEXT
        if kind == raw.FPDF_PAGEOBJ_TEXT:
            mode = raw.FPDFTextObj_GetTextRenderMode(each)
            dark = filled and light <= DARK and mode == raw.FPDF_TEXTRENDERMODE_FILL
            within = left <= a and low <= b and c <= right and d <= top
            fine = dark and within and d - b >= SMALL and not is_layer(each)
        else:
            is_path = raw.FPDFPath_GetDrawMode(each, filling, ctypes.c_int())
            ground = filled and light > LIGHT and not has_words
            hides = filling.value != raw.FPDF_FILLMODE_NONE and min(c - a, d - b) >= THIN
            fine = is_path and (ground or not hides)
        if not fine:
            doubts.append((a - 1, b - 1, c + 1, d + 1))
    return doubts if len(doubts) < MANY else [EVERYWHERE]


def is_layer(each: raw.FPDF_PAGEOBJECT) -> bool:
    """Tell whether an object belongs to a layer, which may be off."""
    name, size = ctypes.create_string_buffer(8), ctypes.c_ulong()
    for k in range(raw.FPDFPageObj_CountMarks(each)):
        mark = raw.FPDFPageObj_GetMark(each, k)
        raw.FPDFPageObjMark_GetName(
            mark, ctypes.cast(name, ctypes.POINTER(raw.FPDF_WCHAR)), 8, size
        )
        if size.value == 6 and name.raw[:4] == "OC".encode("utf-16-le"):
            return True
    return False


# ---------------------------------------------------------------- words of a page


class Words:
    """The words of a page in the order in which it draws them."""

    def __init__(self, letters: pdfium.PdfTextPage, text: str):
        self.letters, self.letter, self.words = letters, text, []
        a, b = raw.FS_RECTF(), raw.FS_RECTF()
        for match in WORD.finditer(text):
            first, end = match.span()
            raw.FPDFText_GetLooseCharBox(letters, first, a)  # as high as the font is
            raw.FPDFText_GetLooseCharBox(letters, end - 1, b)
            left, right = min(a.left, b.left), max(a.right, b.right)
            low, top = min(a.bottom, b.bottom), max(a.top, b.top)
            self.words.append(Run(left, low, right, top, match[0], first, end))

    def base(self, k: int) -> float:
        """Return the height of the line on which a letter stands."""
        x, y = ctypes.c_double(), ctypes.c_double()
        raw.FPDFText_GetCharOrigin(self.letters, k, x, y)
        return y.value

    def leave_out_unseen(self, page: pdfium.PdfPage, doubts: Sequence[Box]) -> int:
        """Leave out the words that nobody sees, and count them; doubts: where they may be."""
        turned = page.get_rotation() != 0
        page.set_rotation(0)
        left, _, _, top = page.get_bbox()
        width, height = page.get_size()
        if not 0 < width * height < MOST_PIXELS:
            return 0
        picture, seen = Picture(page.render(grayscale=True)), []
        a, b = ([ctypes.c_double() for _ in range(4)] for _ in range(2))  # left, right, low, top
        for word in self.words:
            if not any(touch(word, doubt) for doubt in doubts):
                seen.append(word)
                continue
            raw.FPDFText_GetCharBox(self.letters, word.first, *a)
            raw.FPDFText_GetCharBox(self.letters, word.end - 1, *b)
            x0, x1 = min(a[0].value, b[0].value) - left, max(a[1].value, b[1].value) - left
            y0, y1 = top - max(a[3].value, b[3].value), top - min(a[2].value, b[2].value)
            is_word = sum(map(str.isalnum, word.text)) > 1
            small = is_word and not turned and y1 - y0 < SMALL
            rim = 0 if is_word else 2  # a full stop fills its box
            varies = picture.varies(x0 - rim, y0 - rim, x1 + rim, y1 + rim)
            if (varies and not small) or not self.is_hidden(word, small or varies is None):
                seen.append(word)
        unseen, self.words = len(self.words) - len(seen), seen
        return unseen

    def is_hidden(self, word: Run, surely: bool) -> bool:
        """Tell whether a word that the page's picture does not show is hidden on purpose.

        The letters over a scan, which are there to be searched in, are not, nor is what a font
        that is not in the file might draw elsewhere.
        """
        drawn = raw.FPDFText_GetTextObject(self.letters, word.first)
        if not drawn or (
            raw.FPDFTextObj_GetTextRenderMode(drawn) == raw.FPDF_TEXTRENDERMODE_INVISIBLE
        ):
            return False
        embedded = raw.FPDFFont_GetIsEmbedded(raw.FPDFTextObj_GetFont(drawn)) == 1
        return surely or embedded or word.text.isascii()

    def in_order(self, fields: Sequence[Run]) -> str:
        """Return the text with fields beside their labels, and columns one after the other."""
        lines = self.lines()
        runs = [
            Run(min(w.left for w in line), min(w.low for w in line), max(w.right for w in line),
                max(w.top for w in line), line[0].text)
            for line in lines
        ]  # fmt: skip
        gutters = find_gutters(runs)
        if not fields and not gutters:
            return self.text(self.words)
        texts = (" ".join(self.text(line).split()) for line in lines)
        runs = [run._replace(text=text) for run, text in zip(runs, texts, strict=True)]
        for field in fields:
            beside = any(run.low < field.middle < run.top for run in runs)
            text = field.text if beside else f"{field.name}: {field.text}"
            runs.append(field._replace(text=text))
        return "\n".join(put_in_order(runs, gutters))

    def lines(self) -> list[list[Run]]:
        """Return words that are close to each other in a line, line by line."""
        lines: list[list[Run]] = []
        for word in self.words:
            before = lines[-1][-1] if lines else word
            high, gap = before.top - before.low, word.left - before.right
            same = word.low < before.top and before.low < word.top and -high / 2 < gap < high
            lines[-1].append(word) if lines and same else lines.append([word])
        return lines

    def text(self, words: Sequence[Run], upright: bool = True) -> str:
        """Return the text of words that follow each other; raised digits as in 10^5."""
        pieces: list[str] = []
        ground = before = None  # the last word that stands on the line, and the last one
        for word in words:
            between = re.sub(r"\S+", "", self.letter[before.end : word.first]) if before else ""
            high = ground.top - ground.low if ground else 0
            follows = False  # whether it stands right behind another, higher or lower
            if before and upright and between in LINE_ENDS:
                rise = self.base(word.first) - self.base(ground.first)
                gap = word.left - before.right
                if abs(rise) < 0.7 * high and -0.3 * high < gap < high:
                    follows = gap <= 0.2 * high and abs(rise) > RISE * high
                    between = " " if gap > 0.2 * high or between.endswith(" ") else ""
            ground = ground if follows else word
            text, line = word.text, ground.top - ground.low
            if upright and line and DIGIT.search(text):
                text = self.raised(word, self.base(ground.first) + RISE * line, follows)
            pieces += [between, text]
            before = word
        return plain("".join(pieces))

    def raised(self, word: Run, above: float, follows: bool) -> str:
        """Return a word with a mark before digits that stand above a height, behind something."""
        out, up = "", False
        for k in range(word.first, word.end):
            number = DIGIT.match(self.letter, k)
            was, up = up, bool(number) and self.base(k) > above and (follows or k > word.first)
            out += "^" * (up and not was) + self.letter[k]
        return out


class Picture:
    """A page as it is drawn, a point a pixel, in shades of grey."""

    def __init__(self, bitmap: pdfium.PdfBitmap):
        self.shades, self.stride = bytes(bitmap.buffer), bitmap.stride
        self.width, self.height = bitmap.width, bitmap.height

    def varies(self, left: float, top: float, right: float, low: float) -> bool | None:
        """Tell whether there is anything to see in a box, which goes down; None if it is off."""
        x0, x1 = max(0, int(left)), min(self.width, int(right) + 1)
        y0, y1 = max(0, int(top)), min(self.height, int(low) + 1)
        if x0 >= x1 or y0 >= y1:
            return None
        darkest, lightest = 255, 0
        for y in ((y0 + y1) // 2, *range(y0, y1)):  # mostly the first one says it
            row = self.shades[y * self.stride + x0 : y * self.stride + x1]
            darkest, lightest = min(darkest, min(row)), max(lightest, max(row))
            if lightest - darkest > CONTRAST:
                return True
        return False


# ---------------------------------------------------------------- fields


def field_value(form: pdfium.PdfFormEnv, note: raw.FPDF_ANNOTATION) -> str:
    """Return what stands in a field; a box that is ticked or not as [x] or [ ]."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, note)
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        return "[x]" if raw.FPDFAnnot_IsChecked(form, note) else "[ ]"
    if kind in (raw.FPDF_FORMFIELD_PUSHBUTTON, raw.FPDF_FORMFIELD_SIGNATURE):
        return ""
    chosen = (
        string(raw.FPDFAnnot_GetOptionLabel, form, note, k)
        for k in range(max(0, raw.FPDFAnnot_GetOptionCount(form, note)))
        if raw.FPDFAnnot_IsOptionSelected(form, note, k)
    )
    text = ", ".join(chosen) or string(raw.FPDFAnnot_GetFormFieldValue, form, note)
    return " ".join(text.split())


def string(function: Callable, *arguments) -> str:
    """Call a function of PDFium's that writes UTF-16 into a buffer and returns its bytes."""
    n = function(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(max(n, 2))
    function(*arguments, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), n)
    return buffer.raw[: max(n - 2, 0)].decode("utf-16-le", "replace")


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
            keys = {k: head_keys(here[side], k) for k, here in enumerate(lines) if here[1:]}
            times = Counter(key for of_line in keys.values() for key in of_line)
            for k, of_line in keys.items():
                if max(times[key] for key in of_line) >= most and (k or side):
                    heads[k].append(lines[k].pop(side))
        for k, head in enumerate(heads):
            if len(head) <= EDGE:
                found += head
            elif side == 0:  # all of the page repeats: it is no head
                lines[k] = head + lines[k]
            else:
                lines[k] += head[::-1]
    shown = ", ".join(f"'{line.strip()}'" for line in [*dict.fromkeys(found)][:3])
    remark = f"left out: {len(found):,} lines that repeat on pages ({shown})" if found else ""
    return ["\n".join(here).strip() for here in lines], remark


def head_keys(line: str, page: int) -> set[str]:
    """Return a line as it stands, and with each of its numbers as counted from the page's."""
    numbers = (
        f"{line[: match.start()]}\0{int(match[0]) - page}{line[match.end() :]}"
        for match in NUMBER.finditer(line[:200])
    )
    return {line, *numbers}


# ---------------------------------------------------------------- where things stand


def find_gutters(runs: Sequence[Run]) -> list[float]:
    """Return the middles of the gaps between columns of text that is drawn across all of them; []
    where there is one column, or text that is drawn column by column, or a table.

    A title or the number of a page may stand across a gap that most lines respect. What stands in
    columns of text fills them: the cells of a table are shorter.
    """
    gaps = [
        (first.right, second.left)
        for first, second in pairwise(runs)
        if second.left - first.right >= GUTTER and first.low < second.middle < first.top
    ]
    gutters: list[float] = []
    middles = {round((left + right) / 2) for left, right in gaps}
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
    for column in columns:
        widths = [run.right - run.left for run in column]
        fills = widths and max(widths) >= 60 and median(widths) >= FULL * max(widths)
        if not fills or len(widths) < (2 if goes_on else 6):
            return []
    return sorted(gutters)


def put_in_order(runs: Sequence[Run], gutters: Sequence[float]) -> Iterator[str]:
    """Yield the lines of runs: those between two that go across the columns column by column, each
    from top to bottom."""
    bands: list[list[Run]] = []
    ended, lowest = True, 0.0
    for run in sorted(runs, key=lambda run: -run.top):
        across = any(run.left < gutter < run.right for gutter in gutters)
        if across or ended or lowest - run.top > GAP * (run.top - run.low):
            bands.append([])
        bands[-1].append(run)
        ended, lowest = across, run.low
    for band in bands:
        for column in range(len(gutters) + 1):
            line: list[Run] = []  # of runs whose middles stand within the first one's height
            inside = [r for r in band if sum(r.left > gutter for gutter in gutters) == column]
            for run in [*sorted(inside, key=lambda run: -run.middle), None]:
                if line and (run is None or run.middle < line[0].low):
                    yield " ".join(run.text for run in sorted(line, key=lambda run: run.left))
                    line = []
                line += [run] if run else []
