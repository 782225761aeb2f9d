"""Where the sections of a document, which are made of tokens, stand in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from tasks.documents import Range
from tokens.codec import Sections

PROBE = 48  # characters of a section by which it is found again
SLACK = 64  # characters that it may stand behind where it is looked for
BROKEN = "\ufffd"  # what a character is decoded to that two sections share


class Places:
    """The places of a document's sections as ranges of its characters.

    A section is a slice of ids, and ids are decoded to about, not exactly, the characters that they
    came from: a character of several tokens may be cut in two, and some tokenizers put a blank
    before a text. Lengths are therefore added up, and each section is looked for where it should
    begin, so that errors do not add up.
    """

    def __init__(
        self,
        text: str,
        sections: Sections,
        decode: Callable[[Sequence[int]], str],
        over: str,
    ):
        """sections: of `text`; over: which part of a longer text they keep (`ReadConfig.over`)."""
        n, total = sections.n_tokens, len(sections.ids)
        head = total // 2 if sections.left_out and over == "center" else total
        self.texts = [str(section) for section in sections]
        before = [s if (k + 1) * n <= head else str(decode(sections.ids[k * n : head]))
                  for k, s in enumerate(self.texts[: -(-head // n)])]  # fmt: skip
        first = head // n  # the first section with ids from behind the gap, if there is one
        after = [s if (first + k) * n >= head else str(decode(sections.ids[head : (first + 1) * n]))
                 for k, s in enumerate(self.texts[first:])] if head < total else []  # fmt: skip
        self.ranges: list[list[Range]] = [[] for _ in self.texts]
        for k, place in enumerate(_placed(before, text, 0)):
            self.ranges[k].append(place)
        start = max(0, len(text) - sum(map(len, after)))
        for k, place in enumerate(_placed(after, text, start), first):
            self.ranges[k].append(place)
        self._next = 0

    def locate(self, read: str) -> list[Range]:
        """Return where the text that a prompt shows stands.

        That is one section, the next one if several are alike; else every section whose beginning
        is in it, for agents that read several at once.
        """
        if not read:
            return []
        n = len(self.texts)
        for k in chain(range(self._next, n), range(min(self._next, n))):
            if self.texts[k] == read:
                self._next = k + 1
                return self.ranges[k]
        return [
            place
            for text, places in zip(self.texts, self.ranges, strict=True)
            if (probe := text.strip(BROKEN)[: 4 * PROBE].strip()) and probe in read
            for place in places
        ]


def _placed(pieces: Sequence[str], text: str, cursor: int) -> Iterator[Range]:
    """Yield where pieces that follow each other stand in a text, from `cursor` on."""
    for piece in pieces:
        known = piece.strip(BROKEN).lstrip()
        probe = known[:PROBE]
        at = text.find(probe, cursor, cursor + PROBE + SLACK) if probe else -1
        start = cursor if at < 0 else at
        cursor = min(len(text), start + len(known if at >= 0 else piece))
        yield start, cursor
