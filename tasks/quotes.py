"""Where the words of an answer stand in a text, and the sentence to quote.

Holds: `places`, `Quote`. Leaves out: words (tasks/lexicon.py), pages (tasks/documents.py). No
torch.
Exercise it: `pytest tests/tasks/test_quotes.py`. Read next: tasks/documents.py.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from unicodedata import numeric

from data import normalize_answer
from tasks.lexicon import BREAK, MARKS, OPTIONAL, SCRIPT, WORD, folded, words

Range = tuple[int, int]  # characters of a text, from the first to before the last
Word = tuple[str, int, int]  # as it is compared, and the range of its characters

NOWHERE = {"yes", "no", "none", "unknown", "not known", "nothing", "na", "not applicable",
           "not found", "not mentioned", "not stated", "not specified", "not given"}  # fmt: skip
ARTICLES = {"a", "an", "the"}
NEAR = 40  # words, within which the words of an answer stand near each other
RUN_TOGETHER = 8  # characters from which words without blanks are the phrase, not part of a word
LONGEST = 200  # characters of a quote
REACH = 600  # characters before and behind an answer, in which its sentence ends
MOST = 1000  # sentences of which the best is quoted

# ---------------------------------------------------------------- words and numbers

HALF = "\xbc-\xbe\u2150-\u215e"
RAISED = "\u2070\xb9\xb2\xb3\u2074-\u2079\u207b"
NUMBER = (
    rf"(?P<mixed>(?<!\d)\d{{0,9}}+[{HALF}])|"
    r"(?P<sign>(?:\^|(?<![^\s(\[])[-\u2212\u2013])?+(?:(?<![\w.])\.)?+)"
    r"(?P<body>\d++(?:(?:[.,'\u2019/\xa0\u2007\u2009\u202f]"
    r"| (?=\d{3}(?: \d{3}){0,3}+ ?[^\W\d_]))\d++)*+)"
    rf"(?P<power>\^\{{?[-\u2212]?\d++|[{RAISED}]++)?+"
)
GROUPED = re.compile(
    r"([1-9]\d{0,2}(?:([.,'])\d{3})(?:\2\d{3})*)(?:(?!\2)[.,](\d+))?|(\d+)(?:[.,](\d+))?"
)
ON = rf"[{MARKS}{OPTIONAL}\xad]++"
WRITTEN = rf"{NUMBER}|[^\W\d_][^\W_]*+(?:(?:%s)[^\W_]*+)*+"
APART = re.compile(WRITTEN % ON)
WHOLE = re.compile(WRITTEN % rf"{BREAK.pattern}|\xad\s*+(?=[^\W\d_])|{ON}")
WITHIN = re.compile(rf"\^?+(?:{WORD.pattern})")


def _numbers(match: re.Match) -> list[str]:
    """Return a number in one form, as 1200.5 for 1,200.50; of a date or a list the numbers in it.

    1.200 stays as it is: in some languages it is 1200, in others 1.2.
    """
    if match["mixed"]:
        return [f"{int(match[0][:-1] or 0) + numeric(match[0][-1]):.4g}"]
    body = folded(re.sub("[\u2019\xa0\u2007\u2009\u202f ]", "'", match["body"]))
    form = GROUPED.fullmatch(body)
    if not form and not re.fullmatch(r"\d{1,2}/\d{1,2}", body):
        return re.findall(r"\d+", body)
    if form and not (form[2] == "." and body.count(".") == 1 and not form[3]):
        part = (form[3] or form[5] or "").rstrip("0")
        body = re.sub(r"\D", "", form[1] or form[4]) + (f".{part}" if part else "")
    sign = re.sub("[\u2212\u2013]", "-", match["sign"]).replace(".", "0.")
    return [sign + body + folded(match["power"] or "").replace("{", "")]


def _words(text: str, kind: re.Pattern) -> Iterator[Word]:
    """Yield words without articles; each character of a script without blanks is one."""
    for match in kind.finditer(text):
        piece, (start, end) = match[0], match.span()
        if match.lastgroup:
            for number in _numbers(match):
                yield number, start, end
        elif piece.isascii() and piece.isalnum():  # most words, and most of the time
            if (word := piece.lower()) not in ARTICLES:
                yield word, start, end
        else:
            written = BREAK.sub("", folded(piece))
            same = len(written) == end - start  # else each word in it stands for all of it
            for inner in WITHIN.finditer(written):
                a, b = inner.span()
                parts = range(a, b) if SCRIPT.match(written, a) else (a,)
                for k in parts:
                    last = b if len(parts) == 1 else k + 1
                    place = (start + k, start + last) if same else (start, end)
                    yield written[k:last], *place


class _Index:
    """The words of a text in one string, in which phrases are looked for by `re`."""

    def __init__(self, text: str, kind: re.Pattern):
        self.at, self.starts, self.ends = array("q"), array("q"), array("q")
        joined, n = StringIO(), 0
        for word, start, end in _words(text, kind):
            self.at.append(n)
            self.starts.append(start)
            self.ends.append(end)
            n += joined.write(f" {word} ")
        self.joined = joined.getvalue()

    def find(self, phrase: Sequence[str]) -> list[int]:
        """Return the number of the first word at every place of a phrase."""
        sought = "".join(f" {word} " for word in phrase)
        return [
            bisect_left(self.at, match.start())
            for match in re.finditer(re.escape(sought), self.joined)
        ]

    def phrases(self, phrase: Sequence[str]) -> list[Range]:
        n = len(phrase)
        return [(self.starts[k], self.ends[k + n - 1]) for k in self.find(phrase)]

    def run_together(self, phrase: Sequence[str]) -> list[Range]:
        """Return the places of a long phrase with no regard to blanks, which files often lose."""
        sought = "".join(phrase)
        if len(sought) < RUN_TOGETHER or re.fullmatch(r"[\d.,^/-]+", sought):
            return []  # columns of numbers would hold it

        def word(at: int) -> int:
            return bisect_right(range(len(self.at)), at, key=lambda k: self.at[k] - 2 * k) - 1

        return [
            (self.starts[word(match.start())], self.ends[word(match.end() - 1)])
            for match in re.finditer(re.escape(sought), self.joined.replace(" ", ""))
        ]

    def near(self, sought: Sequence[str]) -> list[Range]:
        """Return stretches of at most `NEAR` words with the most of the five rarest words; all
        numbers among these have to be there."""
        at = {word: self.find(word if SCRIPT.match(word) else [word]) for word in sought}
        numbers = {word for word in sought if not word[0].isalpha()}
        known = sorted((w not in numbers, len(at[w]), w) for w in at if at[w] or w in numbers)
        rarest = [word for *_, word in known[:5]]
        need = max(2, -(-min(len(at), 5) // 2))
        hits = sorted((k, word) for word in rarest for k in at[word])
        counts = dict.fromkeys(rarest, 0)
        best, found, start = need, [], 0
        for k, word in hits:  # a window over the hits
            counts[word] += 1
            while k - hits[start][0] >= NEAR or counts[hits[start][1]] > 1:
                counts[hits[start][1]] -= 1
                start += 1
            n = sum(count > 0 for count in counts.values())
            if n >= best and all(counts[w] for w in rarest if w in numbers):
                found = found if n == best else []
                best = n
                found.append((self.starts[hits[start][0]], self.ends[k]))
        return found


def places(text: str, answer: str) -> tuple[list[Range], bool] | None:
    """Return where the words of an answer stand, and whether as the phrase that they are.

    Letters and digits count, in any case and however they are encoded, broken into lines or, in a
    long answer, run together; a number only as that number, in any of its forms. Where the phrase
    is nowhere, its rarest words near each other do: at least two of them, and at least half.
    ([], False) if nothing is found; None if there is nothing to look for, as in yes and unknown.
    """
    wanted = [word for word, _, _ in _words(answer, APART)]
    if not wanted or normalize_answer(answer) in NOWHERE:
        return None
    indexes = [_Index(text, WHOLE)]
    if BREAK.search(text):  # some hyphens there are a word's own: both readings count
        indexes.append(_Index(text, APART))
    for form in _forms(wanted):
        if found := {place for index in indexes for place in index.phrases(form)}:
            return sorted(found), True
    if found := indexes[0].run_together(wanted):
        return found, True
    others = [w for w in words(answer) if w.isalpha() and (len(w) > 2 or SCRIPT.match(w))]
    numbers = [word for word in wanted if not word[0].isalpha()]
    found = (index.near([*dict.fromkeys(others + numbers)]) for index in indexes)
    return next(filter(None, found), []), False


def _forms(wanted: Sequence[str]) -> Iterator[list[str]]:
    """Yield words as they are, then with each number in forms that may stand for another one."""
    yield [*wanted]
    yield [re.sub(r"^(\d{1,3})(\d{3})$", r"\1.\2", word) for word in wanted]
    yield [re.sub(r"^(\d{1,3})\.(\d{3})$", r"\1\2", word) for word in wanted]
    yield [part for word in wanted
           for part in re.sub(r"^(\d{1,3})(\d{3})$", r"\1 \2", word).split()]  # fmt: skip


# ---------------------------------------------------------------- the sentence

STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u17d4\u104b\u1362"
QUOTES = "\"'\u201d\u2019\u00bb)\\]\u300d\u300f\uff09"
END = re.compile(rf"[.!?\u2026]++[{QUOTES}]*+(?=\s|$)|[{STOPS}]++[{QUOTES}]*+|[^\S\n]*+\n\s*+")
ABBREVIATED = set(
    "abs al approx art bd bzw ca cf chap co corp dept dr ed eds eg etc evtl fig figs fr ggf gen hr "
    "ie inc jr kap lt ltd max min mio mr mrs ms mt no nos nr pp prof rev sec sgt sr st str tel usw "
    "vgl vol vs zb jan feb mar apr jun jul aug sep sept oct okt nov dec dez".split()
)
FULL_LINE = 40  # columns from which a line goes on in the next one


@dataclass(frozen=True, slots=True)
class Quote:
    """A sentence with the words of an answer."""

    text: str  # at most `LONGEST` characters or so, around the answer
    place: Range  # of the answer
    others: list[Range]  # places of the answer in other sentences
    shared: bool  # whether the sentence has a word of the question

    @classmethod
    def best(
        cls, text: str, ranges: Sequence[Range], question: str, starts: Container[int]
    ) -> Quote:
        """Quote the sentence that shares most words with the question, of the first `MOST`.

        ranges: where the answer stands, in order, at least once. starts: of pages, at which no
        sentence has to end.
        """
        sought, best, last = _said(question), None, -1
        for n, (start, end) in enumerate(ranges):
            if start < last:
                continue
            first, last = _sentence(text, start, end, starts)
            shared = len(sought & _stems(text[first:last]))
            if best is None or shared > best[0]:
                best = shared, first, last, (start, end)
            if n == MOST:
                break
        shared, first, last, place = best
        others = [place for place in ranges if not first <= place[0] < last]
        return cls(_cut(text, first, last, place), place, others, bool(shared or not sought))


def _stems(text: str) -> set[str]:
    """Return the beginnings of words, which their endings leave alone."""
    return {word[:5] for word in words(text)}


def _said(question: str) -> set[str]:
    """Return the beginnings of a question's words but the common ones of its language."""
    from bm25s import stopwords

    asked = {*words(question)}
    lists = [{*value} for name, value in vars(stopwords).items() if name.startswith("STOPWORDS")]
    common = max(lists, key=lambda these: len(these & asked))
    return {word[:5] for word in asked - common if len(word) > 1 or not word.isascii()}


def _sentence(text: str, start: int, end: int, starts: Container[int]) -> Range:
    """Return the range of the sentence or row around a place."""
    low, high = max(0, start - REACH), min(len(text), end + REACH)
    first = low
    for mark in END.finditer(text, low, start):
        first = mark.end() if _ends(text, mark, starts) else first
    for mark in END.finditer(text, end, high):
        if _ends(text, mark, starts):
            return first, mark.end()
    return first, high


def _ends(text: str, mark: re.Match, starts: Container[int]) -> bool:
    """Tell whether a sentence ends at a stop or a line's end."""
    before = text[max(0, mark.start() - 120) : mark.start()]
    after = text[mark.end() : mark.end() + 80].lstrip()
    if not mark[0].isspace():
        word = re.search(r"[^\W_]*$", before)[0].lower()
        short = len(word) == 1 and word.isalpha() or len(word) < 3 and word.isdigit()
        stop = mark[0][0] in STOPS or not (after[:1].islower())
        return stop and not (mark[0] == "." and (short or word in ABBREVIATED))
    line = before.rpartition("\n")[2]
    if not after or "|" in line or "\t" in line:
        return True
    if mark[0].count("\n") > 1 and mark.end() not in starts:
        return not after[0].islower()
    full = len(line) >= (FULL_LINE if line.isascii() else FULL_LINE // 2)
    goes_on = full and (line[-1].isalpha() or line[-1] in ",-;\u2010") and after[0].isalpha()
    return not (after[0].islower() or goes_on)


def _cut(text: str, first: int, last: int, place: Range) -> str:
    """Return a sentence on one line; of a long one what stands around a place."""
    room = max(0, LONGEST - (place[1] - place[0])) // 2
    a, b = max(first, place[0] - room), min(last, place[0] + LONGEST, place[1] + room)
    if last - first <= LONGEST:
        a, b = first, last
    if a > first:  # from the next word on
        a = min(place[0], a + len(re.match(r"\S{0,20}\s*", text[a:last])[0]))
    if b < last:
        b -= len(re.search(r"\s*\S{0,20}$", text[a:b])[0]) if b > place[1] else 0
    sentence = " ".join(text[a:b].split())
    return "\u2026 " * (a > first) + sentence + " \u2026" * (b < last)
