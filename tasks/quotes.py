"""Where the words of an answer stand in a text, and the sentence to quote.

Holds: `places`, `best_quote`. Leaves out: words (tasks/lexicon.py), pages (tasks/documents.py). No
torch.
Exercise it: `pytest tests/tasks/test_quotes.py`. Read next: tasks/documents.py.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from io import StringIO
from itertools import product
from typing import NamedTuple
from unicodedata import numeric

from config.errors import clean
from data import normalize_answer
from tasks.lexicon import BREAK, LETTERS, MARKS, OPTIONAL, SCRIPT, UNSPACED, folded, words

Range = tuple[int, int]  # characters of a text, from the first to before the last

NOWHERE = {"yes", "no", "none", "unknown", "not known", "nothing", "na", "not applicable",
           "not found", "not mentioned", "not stated", "not specified", "not given"}  # fmt: skip
UNITS = {*"percent prozent chf eur usd gbp dollar dollars euro euros franc francs pounds".split()}
NEAR = 40  # words, within which the words of an answer stand near each other
RUN_TOGETHER = 8  # characters from which words without blanks are the phrase, not part of a word
LONGEST = 200  # characters of a quote
REACH = 600  # characters before and behind an answer, in which its sentence ends
MOST = 1000  # sentences of which the best is quoted

# ---------------------------------------------------------------- words and numbers

NUMBER = (
    r"(?P<mixed>\d{0,9}+[\xbc-\xbe\u2150-\u215e])|"
    r"(?P<sign>(?:\^|(?<![^\s(\[])[-\u2212\u2013])?+(?:(?<![\w.])\.)?+)"
    r"(?P<body>\d++(?:(?:[.,'\u2019/\xa0\u2007\u2009\u202f]"
    r"| (?=\d{3}(?: \d{3}){0,3}+ ?[^\W\d_]))\d++)*+)"
    r"(?P<power>\^\{?[-\u2212]?\d++|[\xb9\xb2\xb3\u2070-\u207b]++)?+"
)
GROUPED = re.compile(
    r"([1-9]\d{0,2}(?:([.,'])\d{3})(?:\2\d{3})*)(?:(?!\2)[.,](\d+))?|(\d+)(?:[.,](\d+))?"
)
ON = rf"[{MARKS}{OPTIONAL}\xad]++"
WRITTEN = rf"{NUMBER}|\b(?:[A-Z]{{3}}|[vV])(?=\d)|[^\W\d_][^\W_]*+(?:(?:%s)[^\W_]*+)*+"
APART = re.compile(WRITTEN % ON)
WHOLE = re.compile(WRITTEN % rf"{BREAK.pattern}|\xad\s*+(?=[^\W\d_])|{ON}")
WITHIN = re.compile(rf"[{UNSPACED}]|\^?+{LETTERS}")
FORMS = (  # of numbers, in the order in which they are looked for; the last three are ambiguous
    ("", ""), (r"^(\d{1,3})(\d{3})$", r"\1.\2"), (r"^(\d{1,3})\.(\d{3})$", r"\1\2"),
    (r"^(\d{1,3})(\d{3})$", r"\1 \2"),
)  # fmt: skip


def _words(text: str, kind: re.Pattern) -> Iterator[tuple[str, int, int]]:
    """Yield words and where they stand, without articles; of scripts without blanks characters."""
    for match in kind.finditer(text):
        piece, (start, end) = match[0], match.span()
        if piece.isascii() and piece.isalnum():  # most words, and most of the time
            if (word := piece.lower()) not in ("a", "an", "the"):
                yield word, start, end
        elif match.lastgroup:
            for number in _numbers(match):
                yield number, start, end
        else:
            written = BREAK.sub("", folded(piece))
            same = len(written) == end - start  # else each word in it stands for all of it
            for inner in WITHIN.finditer(written):
                a, b = inner.span() if same else (0, end - start)
                yield inner[0], start + a, start + b


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
    if form and (form[2] != "." or form[3] or body.count(".") > 1):
        part = (form[3] or form[5] or "").rstrip("0")
        body = re.sub(r"\D", "", form[1] or form[4]) + (f".{part}" if part else "")
    sign = re.sub("[\u2212\u2013]", "-", match["sign"]).replace(".", "0.")
    power = re.sub("[^-\u2212\\d]", "", folded(match["power"] or "")).replace("\u2212", "-")
    return [sign + body + (f"^{power}" if power else "")]


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
        found = re.finditer(re.escape(sought), self.joined)
        return [bisect_left(self.at, match.start()) for match in found]

    def run_together(self, phrase: Sequence[str]) -> Iterator[Range]:
        """Yield the places of a long phrase with no regard to blanks, which files often lose."""
        sought, bare = "".join(phrase), self.joined.replace(" ", "")
        if len(sought) < RUN_TOGETHER or not any(map(str.isalpha, sought)):
            return  # columns of numbers would hold it
        for match in re.finditer(re.escape(sought), bare):
            a, b = match.span()
            around = bare[max(0, a - 1) : a + 1], bare[b - 1 : b + 1]
            if not any(len(two) > 1 and two.isdigit() for two in around):  # a part of a number
                first, last = (
                    bisect_right(range(len(self.at)), k, key=lambda n: self.at[n] - 2 * n) - 1
                    for k in (a, b - 1)
                )
                yield self.starts[first], self.ends[last]

    def near(self, sought: Sequence[str]) -> list[Range]:
        """Return stretches of at most `NEAR` words with the most of the five rarest words; all
        numbers among these have to be there."""
        at = {word: self.find(word if SCRIPT.match(word) else [word]) for word in sought}
        known = sorted((w[0].isalpha(), len(at[w]), w) for w in at if at[w] or not w[0].isalpha())
        rarest = [word for *_, word in known[:5]]
        best, found, start = max(2, -(-min(len(at), 5) // 2)), [], 0
        hits, counts = sorted((k, w) for w in rarest for k in at[w]), dict.fromkeys(rarest, 0)
        for k, word in hits:  # a window over the hits
            counts[word] += 1
            while k - hits[start][0] >= NEAR or counts[hits[start][1]] > 1:
                counts[hits[start][1]] -= 1
                start += 1
            n = sum(map(bool, counts.values()))
            if n >= best and all(counts[w] or w[0].isalpha() for w in rarest):
                found, best = found if n == best else [], n
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
    # some hyphens at the ends of lines are a word's own: both readings count
    indexes = [_Index(text, kind) for kind in (WHOLE, APART)[: 1 + bool(BREAK.search(text))]]
    bare = [word for word in wanted if word not in UNITS] or wanted
    phrases = [
        tuple(part for word in plain for part in re.sub(pattern, form, word).split())
        for plain, (pattern, form) in product((wanted, bare), FORMS)
    ]
    for phrase in dict.fromkeys(phrases):
        last = len(phrase) - 1
        found = {(i.starts[k], i.ends[k + last]) for i in indexes for k in i.find(phrase)}
        if found:
            return sorted(found), True
    if found := [*indexes[0].run_together(wanted)]:
        return found, True
    sought = [word for word in wanted if not word[0].isalpha()]
    sought += [w for w in words(answer) if w.isalpha() and (len(w) > 2 or SCRIPT.match(w))]
    found = (index.near([*dict.fromkeys(sought)]) for index in indexes)
    return next(filter(None, found), []), False


# ---------------------------------------------------------------- the sentence

STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u17d4\u104b\u1362"
CLOSING = "\"'\u201d\u2019\u00bb)\\]\u300d\u300f\uff09"
END = re.compile(rf"[.!?\u2026]{{1,9}}+[{CLOSING}]{{0,9}}+(?=\s|$)|[{STOPS}]++[{CLOSING}]*+|\n\s*+")
ABBREVIATED = set(
    "abs al approx art bd bzw ca cf chap co corp dept dr ed eds eg etc evtl fig figs fr ggf gen hr "
    "ie inc jr kap lt ltd max min mio mr mrs ms mt no nos nr pp prof rev sec sgt sr st str tel usw "
    "vgl vol vs zb jan feb mar apr jun jul aug sep sept oct okt nov dec dez".split()
)
FULL_LINE = 40  # columns from which a line goes on in the next one


class Quote(NamedTuple):
    """A sentence with the words of an answer."""

    text: str  # at most `LONGEST` characters or so, around the answer
    place: Range  # of the answer
    others: list[Range]  # places of the answer in other sentences
    shared: bool  # whether the sentence has a word of the question


def best_quote(
    text: str, ranges: Sequence[Range], question: str, starts: Container[int] = ()
) -> Quote:
    """Quote the sentence that shares most words with the question, of the first `MOST`.

    ranges: where the answer stands, in order, at least once. starts: of pages, at which no
    sentence has to end. Of words their beginnings are compared, which endings leave alone, and
    the common ones of the question's language say nothing.
    """
    from bm25s import stopwords

    sought, found, last = {*words(question)}, [], -1
    common = (value for name, value in vars(stopwords).items() if name.startswith("STOPWORDS"))
    sought -= {*max(common, key=lambda these: len(sought.intersection(these)))}
    sought = {word[:5] for word in sought if len(word) > 1 or not word.isascii()}
    for start, end in ranges:
        if start >= last and len(found) < MOST:
            first, last = _sentence(text, start, end, starts)
            shared = len(sought & {word[:5] for word in words(text[first:last])})
            found.append((shared, first, last, (start, end)))
    shared, first, last, place = max(found, key=lambda each: each[0])
    others = [other for other in ranges if not first <= other[0] < last]
    return Quote(_cut(text, first, last, place), place, others, bool(shared or not sought))


def _sentence(text: str, start: int, end: int, starts: Container[int]) -> Range:
    """Return the range of the sentence or row around a place."""
    first, high = max(0, start - REACH), min(len(text), end + REACH)
    for mark in END.finditer(text, first, start):
        first = mark.end() if _ends(text, mark, starts) else first
    marks = (mark.end() for mark in END.finditer(text, end, high) if _ends(text, mark, starts))
    return first, next(marks, high)


def _ends(text: str, mark: re.Match, starts: Container[int]) -> bool:
    """Tell whether a sentence ends at a stop, or at the end of a line."""
    before = text[max(0, mark.start() - 120) : mark.start()].rpartition("\n")[2].rstrip()
    after = text[mark.end() : mark.end() + 80].lstrip()[:1]
    if not mark[0].isspace():
        word = re.search(r"[^\W_]*$", before)[0].lower()
        short = (len(word) < 3 and word.isdigit()) or len(word) == 1 or word in ABBREVIATED
        return mark[0][0] in STOPS or not (after.islower() or (mark[0] == "." and short))
    if not after or "|" in before or "\t" in before:
        return True
    paragraph = mark[0].count("\n") > 1 and mark.end() not in starts
    full = len(before) >= (FULL_LINE if before.isascii() else FULL_LINE // 2)
    open_ended = full and after.isalpha() and re.search(r"[^\W\d_][,;\u2010-]?$", before)
    return not (after.islower() or (open_ended and not paragraph))


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
