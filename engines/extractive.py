"""An engine without a model: it answers with words of the text that a prompt shows.

Holds: `ExtractiveEngine`, `extract`. Leaves out: any model; agents that write memories get nothing
useful out of it, unless a model writes them (engines/open.py). No torch.
Exercise it: `python cli.py eval --suite locomo --data FILE --engine extractive --agents facts`.
Read next: engines/open.py.

For comparing what is found, offline and in seconds: every agent's text is read by the same crude
rule, which finds the line that shares the rarest words with the question. It is no baseline of how
well questions can be answered.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date

from agents.retrieval import tokens
from data import formed
from engines.scripted import ScriptedEngine
from memagent import Prompt
from tasks.conversations import CHOOSE
from tokens.codec import Characters

MOST_WORDS = 8  # of an answer
NOTHING = "Not mentioned"
DAY = re.compile(r"(\d{4}-\d\d-\d\d)\s+")
WHEN = re.compile(r"when|what (?:day|date|month|year)|which (?:day|date|month|year)")
# words of questions and of grammar, which say nothing about an answer
COMMON = frozenset(
    "a an and are as at be been by did do does for from had has have he her his how i in is it its "
    "of on or she that the their them they this to was we were what when where which who whom "
    "whose why will with would you your".split()
)


class ExtractiveEngine(ScriptedEngine):
    """Answers every prompt at once; lengths are estimated at four bytes a token."""

    model = "extractive"
    dtype = "none"

    def __init__(self, form: str = "boxed"):
        self.form = form
        super().__init__(Characters(), self.respond, per_step=64)

    def respond(self, prompt: Prompt) -> str:
        """Answer a question from the text beside it; what is no question gets no response."""
        texts = [str(piece) for piece, constant in prompt.pieces if not constant]
        if not (prompt.final or prompt.frozen) or not texts:
            return ""
        shown = str(prompt.memory or prompt.section)
        question = next((text for text in texts[::-1] if text != shown), "")
        open_question = question.partition(f"\n{CHOOSE}")[0]  # words of answers find their lines
        return formed(extract(open_question, shown.splitlines()), self.form)


def extract(question: str, lines: Sequence[str]) -> str:
    """Return words of the line that shares the rarest words with a question.

    A question about a time is answered by the date at the line's beginning, any other one by the
    first words of the line that the question does not have.

    >>> extract("When did Ann move to Rome?", ["2023-05-08 Ann: I moved to Rome.", "Bob: Hi."])
    '8 May 2023'
    """
    sought = {*tokens(question)} - COMMON
    words = [tokens(line) for line in lines]
    in_lines = Counter(word for line in words for word in {*line})
    scores = [  # fsum: a set has another order in every process, and lines that tie are many
        math.fsum(math.log(1 + len(lines) / in_lines[word]) for word in sought & {*line})
        for line in words
    ]
    best = max(range(len(lines)), key=scores.__getitem__, default=None)
    if best is None or not scores[best]:
        return NOTHING
    dated = DAY.match(lines[best])
    if dated and WHEN.search(question.lower()):
        day = date.fromisoformat(dated[1])
        return f"{day.day} {day:%B %Y}"
    speech = lines[best][dated.end() if dated else 0 :].partition(": ")
    kept = [w for w in re.findall(r"[\w'-]+", speech[2] or speech[0])
            if not {*tokens(w)} <= sought | COMMON]  # fmt: skip
    return " ".join(kept[:MOST_WORDS]) or NOTHING
