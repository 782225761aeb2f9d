"""The words of a text in any script: the one way in which it is taken apart to be compared.

Holds: `folded`, `words`; `WORD` and `BREAK`. Leaves out: what single agents drop of them
(agents/retrieval.py), where an answer stands (tasks/quotes.py). No torch.
Exercise it: `pytest tests/tasks/test_lexicon.py`. Read next: tasks/quotes.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from unicodedata import category, decimal, decomposition, normalize


def _class(kind: Callable[[str], bool]) -> str:
    """Return the characters of a kind below the Han ones, as they stand in a pattern's class."""
    return "".join(c for c in map(chr, range(0xAA, 0x3400)) if kind(c))


# scripts without blanks between words, and Korean, whose endings are written on
_RANGES = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u31ff]"
UNSPACED = _class(lambda c: category(c)[0] in "LMN" and re.match(_RANGES, c) is not None) + (
    "\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
# written above and below letters, and nothing that can be seen: what is left of them when letters
# are composed is no part of a word. Marks of other scripts are vowels.
OPTIONAL = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u200b-\u200f\u2060\ufeff"
MARKS = _class(lambda c: category(c)[0] == "M" and not re.match(f"[{OPTIONAL}]", c))
RAISED = re.compile(f"[{_class(lambda c: decomposition(c).startswith('<super>'))}]+")
BESIDE = re.compile(f"[{_class(lambda c: decomposition(c)[:4] in ('<cir', '<fra'))}]")
DIGIT = re.compile(f"[{_class(str.isdecimal)}]")
DROPPED = re.compile(rf"\xad\s*+|[{OPTIONAL}]+")
# what is not plain, with the letter before, on which it may be written; not more at once, since to
# put n marks in order takes n squared
ODD = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,256}+(?:(?<=\xad)\s++)?")
BREAK = re.compile(  # of a word at the end of a line
    r"[-\u2010](?<=[^\W\d_][-\u2010])[^\S\n]*+\n\s*+(?=[^\W\d_])"
)
BROKEN = re.compile(rf"(?<![^\W_])([^\W\d_]++){BREAK.pattern}([^\W\d_]++)")
ASCII = re.compile("[a-z0-9]+")
PLAIN = re.compile(r"[^\W_]+")
WORD = re.compile(rf"[{UNSPACED}]++|[^\W_{UNSPACED}]++(?:[{MARKS}]++[^\W_{UNSPACED}]*+)*+")
SCRIPT = re.compile(f"[{UNSPACED}{MARKS}]")


def folded(text: str) -> str:
    """Return a text in lower case and in one spelling of each character (NFKC), raised digits
    after a ^.

    >>> folded("Zu\u0308rich, \uff11\uff12 \ufb01nale 10\u2075")
    'zürich, 12 finale 10^5'
    """
    if text.isascii():
        return text.lower()
    return ODD.sub(_folded, text).lower()


@lru_cache(1 << 16)
def _fold(run: str) -> str:
    run = BESIDE.sub(r" \g<0>", RAISED.sub(r"^\g<0>", run))
    run = DIGIT.sub(lambda digit: str(decimal(digit[0])), normalize("NFKC", run))
    return DROPPED.sub("", run.casefold())


def _folded(match: re.Match) -> str:
    return _fold(match[0])


def words(text: str) -> list[str]:
    """List the words of a text; of scripts without blanks the pairs of characters.

    A word that the end of a line divides is there whole and, at the end of the list, in pieces:
    some hyphens are its own.

    >>> words("On 8 May, Ann's refi-\\nnancing: 张三去")
    ['on', '8', 'may', 'ann', 's', 'refinancing', '张三', '三去', 'refi', 'nancing']
    """
    text = folded(text)
    pieces = []
    if BREAK.search(text):
        pieces = [piece for both in BROKEN.findall(text) for piece in both]
        text = BREAK.sub("", text)
    if text.isascii():
        return ASCII.findall(text) + pieces
    if not SCRIPT.search(text):
        return PLAIN.findall(text) + pieces
    found = WORD.findall(text)
    return [part for word in found for part in _parts(word)] + pieces


def _parts(word: str) -> list[str]:
    if len(word) < 3 or word < "\u0e00" or not SCRIPT.match(word):
        return [word]
    return [a + b for a, b in pairwise(word)]
