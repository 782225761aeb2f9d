"""Where the words of an answer stand in a text, and the sentence to quote."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import NamedTuple

from config.errors import clean
from data import normalize_answer
from tasks.lexicon import BREAK, LETTERS, MARKS, OPTIONAL, UNSPACED, folded, words

Range = tuple[int, int]  # characters of a text, from the first to before the last

NOWHERE = {"yes", "no", "none", "unknown", "not known", "nothing", "na", "not applicable",
           "not found", "not mentioned", "not stated", "not specified", "not given"}  # fmt: skip
LONGEST = 200  # characters of a quote
REACH = 600  # characters before and behind an answer, in which its sentence ends
MOST = 1000  # sentences of which the best is quoted

# ---------------------------------------------------------------- words

NUMBER = (  # with its sign, parts and power, so that 105 is no part of 1,050, 10^5 or -105
    r"(?P<number>(?:\^|(?<![^\s(\[])[-\u2212\u2013])?+(?:(?<![\w.])\.)?+"
    r"(?:\d++(?:[.,'\u2019\xa0\u202f]\d++)*+[\xbc-\xbe]?+|[\xbc-\xbe])"
    r"(?:\^\{?[-\u2212]?\d++|[\xb9\xb2\xb3\u2070-\u207b]++)?+)"
)
ON = rf"[{MARKS}{OPTIONAL}\xad]++"
WRITTEN = rf"{NUMBER}|\b(?:[A-Z]{{3}}|[vV])(?=\d)|[^\W\d_][^\W_]*+(?:(?:%s)[^\W_]*+)*+"
APART = re.compile(WRITTEN % ON)
WHOLE = re.compile(WRITTEN % rf"{BREAK.pattern}|\xad\s*+(?=[^\W\d_])|{ON}")
WITHIN = re.compile(rf"[{UNSPACED}]|{LETTERS}")


def _words(text: str, kind: re.Pattern) -> Iterator[tuple[str, int, int]]:
    """Yield words and where they stand, without articles; of scripts without blanks characters."""
    for match in kind.finditer(text):
        piece, (start, end) = match[0], match.span()
        if piece.isascii() and piece.isalnum():  # most words, and most of the time
            if (word := piece.lower()) not in ("a", "an", "the"):
                yield word, start, end
        elif match.lastgroup:
            yield re.sub("[{ ]", "", folded(piece)).replace("\u2212", "-"), start, end
        else:
            written = BREAK.sub("", folded(piece))
            same = len(written) == end - start  # else each word in it stands for all of it
            for inner in WITHIN.finditer(written):
                a, b = inner.span() if same else (0, end - start)
                yield inner[0], start + a, start + b


class _Index:
    """The words of a text in one string, in which phrases are looked for."""

    def __init__(self, text: str, kind: re.Pattern):
        self.at, self.starts, self.ends = array("q"), array("q"), array("q")
        joined, n = StringIO(), 0
        for word, start, end in _words(text, kind):
            self.at.append(n)
            self.starts.append(start)
            self.ends.append(end)
            n += joined.write(f" {word} ")
        self.joined = joined.getvalue()

    def find(self, phrase: Sequence[str]) -> Iterator[Range]:
        """Yield every place of a phrase."""
        for match in re.finditer(re.escape("".join(f" {word} " for word in phrase)), self.joined):
            first = bisect_left(self.at, match.start())
            yield self.starts[first], self.ends[first + len(phrase) - 1]


def places(text: str, answer: str) -> list[Range] | None:
    """Return where the words of an answer stand as the phrase that they are.

    Letters and digits count, in any case and however they are encoded or broken into lines; a
    number only as it is written. None if there is nothing to look for, as in yes and unknown.
    """
    wanted = [word for word, _, _ in _words(answer, APART)]
    if not wanted or normalize_answer(answer) in NOWHERE:
        return None
    # some hyphens at the ends of lines are a word's own: both readings count
    indexes = [_Index(text, kind) for kind in (WHOLE, APART)[: 1 + bool(BREAK.search(text))]]
    return sorted({place for index in indexes for place in index.find(wanted)})


# ---------------------------------------------------------------- the sentence

STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u17d4\u104b\u1362"
CLOSING = "\"'\u201d\u2019\u00bb)\\]\u300d\u300f\uff09"
END = re.compile(rf"[.!?\u2026]{{1,9}}+[{CLOSING}]{{0,9}}+(?=\s|$)|[{STOPS}]++[{CLOSING}]*+|\n\s*+")
SHORT = re.compile(  # words behind which a full stop ends no sentence
    r"(?:^|[\W_])(?:\d{1,2}|[^\W\d_]|abs|art|approx|bd|bzw|ca|cf|chap|co|corp|dept|dr|ed|etc|figs?|"
    r"fr|gen|hr|inc|jr|kap|ltd|max|min|mio|mrs?|ms|mt|nos?|nr|pp|prof|rev|sec|sgt|sr|st|str|usw|"
    r"vgl|vol|vs|jan|feb|mar|apr|jun|jul|aug|sept?|oct|okt|nov|dec|dez)$", re.I
)  # fmt: skip
FULL_LINE = 40  # columns from which a line goes on in the next one


class Quote(NamedTuple):
    """A sentence with the words of an answer."""

    text: str  # at most `LONGEST` characters or so, around the answer
    place: Range  # of the answer
    others: list[Range]  # places of the answer in other sentences
    shared: bool  # whether the sentence has a word of the question


def best_quote(text: str, ranges: Sequence[Range], question: str) -> Quote:
    """Quote the sentence that shares most words with the question, of the first `MOST`.

    ranges: where the answer stands, in order, at least once. Of words their beginnings are
    compared, which endings leave alone, and the common ones of the question's language say nothing.
    """
    from bm25s import stopwords

    sought, found, last = {*words(question)}, [], -1
    common = (value for name, value in vars(stopwords).items() if name.startswith("STOPWORDS"))
    sought -= {*max(common, key=lambda these: len(sought.intersection(these)))}
    sought = {word[:5] for word in sought if len(word) > 1 or not word.isascii()}
    for start, end in ranges:
        if start >= last and len(found) < MOST:
            first, last = _sentence(text, start, end)
            shared = len(sought & {word[:5] for word in words(text[first:last])})
            found.append((shared, first, last, (start, end)))
    shared, first, last, place = max(found, key=lambda each: each[0])
    others = [other for other in ranges if not first <= other[0] < last]
    return Quote(_cut(text, first, last, place), place, others, bool(shared or not sought))


def _sentence(text: str, start: int, end: int) -> Range:
    """Return the range of the sentence or row around a place."""
    low, high = max(0, start - REACH), min(len(text), end + REACH)
    before = (mark.end() for mark in END.finditer(text, low, start) if _ends(text, mark))
    after = (mark.end() for mark in END.finditer(text, end, high) if _ends(text, mark))
    return max(before, default=low), next(after, high)


def _ends(text: str, mark: re.Match) -> bool:
    """Tell whether a sentence ends at a stop, or at the end of a line."""
    before = text[max(0, mark.start() - 120) : mark.start()].rpartition("\n")[2].rstrip()
    after = text[mark.end() : mark.end() + 80].lstrip()[:1]
    if not mark[0].isspace():
        short = mark[0] == "." and SHORT.search(before[-8:])
        return mark[0][0] in STOPS or not (after.islower() or short)
    if not after or "|" in before or "\t" in before:
        return True
    full = len(before) >= (FULL_LINE if before.isascii() else FULL_LINE // 2)
    goes_on = full and after.isalpha() and (before[-1].isalpha() or before[-1] in ",;-\u2010")
    return not (after.islower() or goes_on)


def _cut(text: str, first: int, last: int, place: Range) -> str:
    """Return a sentence on one line; of a long one what stands around a place."""
    room = max(0, LONGEST - (place[1] - place[0])) // 2
    a, b = max(first, place[0] - room), min(last, place[0] + LONGEST, place[1] + room)
    if last - first <= LONGEST:
        a, b = first, last
    if a > first:  # from the next word on
        a = min(place[0], a + len(re.match(r"\S{0,20}\s*", text[a:last])[0]))
    if place[1] < b < last:
        b -= len(re.search(r"\s*\S{0,20}$", text[place[1] : b])[0])
    sentence = clean(" ".join(BREAK.sub("-", text[a:b]).split()))
    return "\u2026 " * (a > first) + sentence + " \u2026" * (b < last)
