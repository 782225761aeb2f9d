"""The words of a text in any script: the one way in which it is taken apart to be compared."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import add
from unicodedata import category, combining, decimal, decomposition, is_normalized, normalize

_LOW = [*map(chr, range(0xAA, 0x3400))]  # below the Han characters
_SCRIPTS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u31ff]")
UNSPACED = "".join(c for c in _LOW if _SCRIPTS.match(c) and category(c)[0] in "LMN") + (
    "\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
"""What words are made of in scripts without blanks, and in Korean, whose endings are written on."""
OPTIONAL = (  # accents that are left when letters are composed, vowel points, and what has no width
    "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u200b-\u200f\u2060\ufeff"
)
_DROPPED = re.compile(rf"\xad\s*+|[{OPTIONAL}]+")
MARKS = "".join(c for c in _LOW if category(c)[0] == "M" and not _DROPPED.match(c))
_SET_OFF = {"<super>": "^", "<circle>": " ", "<fraction>": " "}  # a note's number is no digit more
SPELLED = {
    ord(c): str(decimal(c, "")) or _SET_OFF[decomposition(c).split()[0]] + c
    for c in _LOW
    if c.isdecimal() or decomposition(c).partition(" ")[0] in _SET_OFF
}
# what lower case alone does not spell alike, after the letter on which it may be written; not more
# at once, since to put n marks in order takes n squared
_ODDITIES = "\u1161-\u11ff\ua640-\uabff\uf900-\uffff\U00010000-\U0001ffff\U0002f800-\U0002fa1f" + (
    "".join(c for c in _LOW if not is_normalized("NFKC", c) or combining(c) or ord(c) in SPELLED)
)
_ODD = re.compile(rf"(?s).?[\xad\u200b-\u200f\u2060{_ODDITIES}]{{1,256}}+(?:(?<=\xad)\s++)?")
BREAK = re.compile(  # of a word, at the end of a line
    r"[-\u2010](?<=[^\W\d_][-\u2010])[^\S\n]*+\n\s*+(?=[^\W\d_])"
)
_BROKEN = re.compile(rf"(?<![^\W_])([^\W\d_]++){BREAK.pattern}([^\W\d_]++)")
_ASCII, _PLAIN = re.compile("[a-z0-9]+"), re.compile(r"[^\W_]+")
LETTERS = rf"[^\W_{UNSPACED}]++(?:[{MARKS}]++[^\W_{UNSPACED}]*+)*+"
_WORD = re.compile(rf"[{UNSPACED}]++|{LETTERS}")
SCRIPT = re.compile(f"[{UNSPACED}{MARKS}]")


def folded(text: str) -> str:
    """Return a text in lower case and in one spelling of each character (NFKC); raised digits
    stand after a ^.

    >>> folded("Zu\u0308rich, \uff11\uff12 \ufb01nale 10\u2075")
    'zürich, 12 finale 10^5'
    """
    return text.lower() if text.isascii() else _ODD.sub(_fold, text.casefold())


def _fold(run: re.Match) -> str:
    return _spelled(run[0])


@lru_cache(1 << 16)
def _spelled(run: str) -> str:
    lower = normalize("NFKC", run.translate(SPELLED)).casefold()
    return _DROPPED.sub("", normalize("NFKC", lower))


def words(text: str) -> list[str]:
    """List the words of a text; of scripts without blanks the pairs of characters.

    A word that the end of a line divides is there whole and, at the end of the list, in pieces:
    some hyphens are its own.

    >>> words("On 8 May, Ann's refi-\\nnancing: 张三去")
    ['on', '8', 'may', 'ann', 's', 'refinancing', '张三', '三去', 'refi', 'nancing']
    """
    text, pieces = folded(text), []
    if BREAK.search(text):
        pieces = [piece for both in _BROKEN.findall(text) for piece in both]
        text = BREAK.sub("", text)
    if text.isascii():
        return _ASCII.findall(text) + pieces
    if not SCRIPT.search(text):
        return _PLAIN.findall(text) + pieces
    return [*chain.from_iterable(map(_parts, _WORD.findall(text))), *pieces]


def _parts(word: str) -> Iterable[str]:
    unspaced = len(word) > 2 and word >= "\u0e00" and SCRIPT.match(word)
    return map(add, word, word[1:]) if unspaced else (word,)
