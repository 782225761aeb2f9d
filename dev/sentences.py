"""Questions that come with the sentence that answers them, and no answer: the answer by rule.

    {question, sentence, answer?}  --one span of the kind that is asked for-->  SQuAD's form

Holds: `answer`, `write`. Leaves out: what a span is (tasks/cloze.py).
Exercise it: `python -m dev.sentences squad_sentences.jsonl.gz out.json`. Read next: dev/reader.py.

A question for a date or a year is kept where its sentence has exactly one that the question lacks.
Of the 500 sentences that come with their answer the rule finds the very answer of 27 in 31 (years
14 of 15, dates 13 of 16, and in 2 of these a part of it); of those that ask who, where and how many
it was right in 17 of 30, so these are left out.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

from data import normalize_answer
from tasks.cloze import gaps

ASKED = {"year": r"(?:what|which) year\b", "date": r"\bwhen\b|\b(?:what|which) da(?:te|y)\b"}


def answer(question: str, sentence: str) -> str:
    """Return the date or year that a question asks for, "" where it asks for none or for one of
    several.

    >>> answer("When did Ida leave?", "Ida, born in 1911, left in 1931.")
    ''
    >>> answer("When did Ida leave?", "Ida left in 1931.")
    '1931'
    """
    kind = next((kind for kind, words in ASKED.items() if re.search(words, question, re.I)), "")
    found = [gap for gap in gaps(sentence) if gap.kind in (kind, "year") and kind]
    dates = [gap for gap in found if gap.kind == "date"]
    given = normalize_answer(question).split()
    spans = {gap.span for gap in dates or found if normalize_answer(gap.span) not in given}
    return spans.pop() if len(spans) == 1 else ""


def write(source: Path, out: Path) -> int:
    """Write what has an answer in SQuAD's form; return how many."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    paragraphs: dict[str, list[dict]] = {}
    for k, record in enumerate(records):
        text = record["sentence"]
        found = record.get("answer") or answer(record["question"], text)
        if found and (start := text.find(found)) >= 0:
            paragraphs.setdefault(text, []).append({
                "id": f"s{k}", "question": record["question"],
                "answers": [{"text": found, "answer_start": start}],
            })  # fmt: skip
    pairs = [{"context": text, "qas": asked} for text, asked in paragraphs.items()]
    data = [{"title": "", "paragraphs": [pair]} for pair in pairs]
    out.write_text(json.dumps({"version": "1.1", "data": data}), encoding="utf-8")
    return sum(len(pair["qas"]) for pair in pairs)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), Path(sys.argv[2])), "questions with an answer")
