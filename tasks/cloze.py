"""Tasks from any text, without questions: a name, a number or a date is asked for by rule.

    paragraph -> its sentences -> a span that is rare -> a question in another form -> Task

Holds: `Passages`, `read`, `questions`. Leaves out: the paragraph among others
(tasks/passages.py), files (tasks/documents.py, tasks/readers.py). No torch.
Exercise it: `python cli.py data build FILES... OUT --suite cloze`. Read next: suites/cloze.py.

Masked reconstruction and recall are MemTrain's (arXiv 2606.03197); rules, wording and filters are
ours. A gap that stands in the document beside the very words of the question teaches to copy what
stands beside a gap, and questions of people are answered worse. No question here is a sentence of
its document with a gap:

    apart     the sentence with the gap is taken out of the document; another one has the span, and
              shares a rare word with it
    asked     a part of the sentence, turned into a question: "In what year was X opened?"
    keywords  its rarest words, in the order of the alphabet, and what is sought: a date, a name

A span is asked for once. It is rare: it stands in few passages of the text, so that documents can
be filled with others. English alone is turned into questions.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from config.terminal import say
from data import Pool, Task, seed_of
from tasks import documents, readers
from tasks.lexicon import words
from tasks.quotes import sentences

FORMS = ("apart", "asked", "keywords")
LEAST, MOST = 25, 220  # words of a passage
RARE = 3  # passages in which a span may stand, and a word that tells sentences apart
MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
KINDS = {  # of spans, the first that matches; what is asked for
    "date": re.compile(rf"\b(?:\d{{1,2}} {MONTH}|{MONTH} \d{{1,2}},)(?: \d{{4}})\b"),
    "year": re.compile(r"(?<![\d.,-])(?:1[0-9]|20)\d\d(?![\d,.-]*\d)\b"),
    "number": re.compile(r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+|\d{2,}(?:\.\d+)?)(?![\w-])(?!,\d)"),
    "name": re.compile(
        r"\b[A-Z][^\W\d_]+(?:['’-][^\W\d_]+)*"
        r"(?: (?:(?:of|de|von|van|the|of the) )?[A-Z][^\W\d_]+(?:['’-][^\W\d_]+)*)*(?<!['’]s)"
    ),
}
SOUGHT = {
    "date": "Which date",
    "year": "Which year",
    "number": "Which number",
    "name": "Which name",
}
# capitalised for another reason than that they are names
NO_NAMES = {
    *"""A An The This That These Those He She It They We I You His Her Its Their Our My There Here
    In On At By For From To Of With After Before During When While Where As If But And Or So Not No
    Yes One Two Some Many Most Both All Each Such What Which Who How Why Although Though However
    Since Until Under Over Between Also Then Monday Tuesday Wednesday Thursday Friday Saturday
    Sunday January February March April May June July August September October November
    December""".split()
}
PRONOUNS = re.compile(
    r"\b(?:I|(?i:he|she|it|they|we|you|his|her|its|their|this|these|those|there))\b"
)
AUXILIARY = "was|were|is|are|has|had|have|will|would|can|could|may|might|must|did|does"
# what may follow a name that ends there
BEHIND = f"in|on|at|by|from|for|to|of|with|as|during|after|before|until|since|{AUXILIARY}"
ENGLISH = {*"the of and in to a was is for on that with as by were are from".split()}


@dataclass(frozen=True, slots=True)
class Gap:
    """A span of a sentence that can be asked for."""

    sentence: str
    start: int
    end: int
    kind: str

    @property
    def span(self) -> str:
        return self.sentence[self.start : self.end]

    @property
    def rest(self) -> tuple[str, str]:
        """What stands before and behind it."""
        return self.sentence[: self.start], self.sentence[self.end :]


def passages_of(title: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of the passages of a text: its paragraphs, the longer ones cut at the
    ends of sentences, the short ones with those that follow."""
    held: list[str] = []
    size = 0
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in sentences(" ".join(paragraph.split())):
            n = len(sentence.split())
            if held and size + n > MOST:
                yield title, " ".join(held)
                held, size = [], 0
            if n:
                held.append(sentence)
                size += n
        if size >= LEAST:
            yield title, " ".join(held)
            held, size = [], 0
    if held:
        yield title, " ".join(held)


def gaps(sentence: str) -> Iterator[Gap]:
    """Yield the spans of a sentence that can be asked for; those of several kinds once."""
    taken: list[tuple[int, int]] = []
    for kind, pattern in KINDS.items():
        for match in pattern.finditer(sentence):
            start, end = match.span()
            while kind == "name" and (first := sentence[start:end].split(" ")[0]) in NO_NAMES:
                start += len(first) + 1  # "The Iron Bridge": the article is no part of the name
                if start >= end:
                    break
            alone = kind == "name" and start == 0 and " " not in sentence[:end]
            if start >= end or alone or any(a < end and start < b for a, b in taken):
                continue
            taken.append((start, end))
            yield Gap(sentence, start, end, kind)


# ---------------------------------------------------------------- a sentence as a question


def asked(gap: Gap) -> str:
    """Return the part of the sentence around the gap as a question, "" where no rule fits.

    >>> sentence = "The bridge, a toll bridge, was opened in 1931 by the mayor."
    >>> asked(Gap(sentence, 41, 45, "year"))
    'In what year was the bridge opened by the mayor?'
    """
    before, after = gap.rest
    if gap.kind in ("date", "year") and (
        born := re.match(r"([^,(]+?),? \((?:[^()]*[;,] )?born (?:on )?$", before)
    ):
        return f"When was {born[1]} born?"
    # what stands between commas or brackets and is no part of the clause
    before = re.sub(rf" ?\([^()]*\)|, [^,]{{1,60}},(?= (?:{AUXILIARY})\b)", "", before)
    after = re.split(r"[,;:(]| (?:which|who|whose|where|when|while|although|but|and)\b", after)[0]
    before = re.split(r"[;:] |, (?:and|but|while|although) ", before)[-1]
    if PRONOUNS.search(before) or "(" in before or before[:1].islower():
        return ""
    before, after = before.strip(), after.strip(" .")
    if not before:  # the gap is the subject
        if gap.kind != "name" or not re.match(rf"(?:{AUXILIARY}|\w+(?:ed|s))\b", after):
            return ""
        return f"Who or what {after}?" if len(after.split()) > 2 else ""
    wh, before, after = _sought(gap.kind, before, after)
    found = re.fullmatch(rf"((?:[^\s,]+ ){{1,8}}?)({AUXILIARY}) (.*)", f"{before} ")
    if not wh or len(before.split()) < 2:
        return ""
    if (
        found
        and wh != "Who or what"
        and not re.match(r"(?:a|an|the|one|part|among)\b", found[3] or "a")
    ):
        subject, auxiliary, rest = (part.strip() for part in found.groups())
        pieces = [wh, auxiliary, _lower(subject), rest, after]
        return " ".join(filter(None, pieces)) + "?"
    if "," in before:  # which may begin with what is no subject
        return ""
    return f"{before} {_lower(wh)} {after}".strip() + "?"


def _sought(kind: str, before: str, after: str) -> tuple[str, str, str]:
    """Return the words that ask for a gap, and what is left before and behind it."""
    match = re.search(r"(?:^| )(in|on|at|by|from|since|until|near|to|of)$", before)
    preposition = match[1] if match else ""
    without = before[: match.start()].strip() if match else before
    if kind in ("date", "year"):
        if preposition not in ("in", "on", "since", "until", "from", "by"):
            return "", before, after
        what = "what year" if kind == "year" else "what date"
        return f"{preposition.capitalize()} {what}", without, after
    if kind == "number":
        noun = re.match(r"((?:[a-z]+ )?[a-z]+s)\b", after)
        if not noun or preposition:
            return "", before, after
        return f"How many {noun[1]}", before, after[noun.end() :].strip()
    if re.search(r"(?:^|\s)[^\sa-z]\S*$", before) or not re.match(rf"$|(?:{BEHIND})\b", after):
        return "", before, after  # it is a part of what its neighbours name
    if preposition in ("in", "at", "near"):
        return "Where", without, after
    if preposition in ("by", "from"):
        return f"{preposition.capitalize()} whom or what", without, after
    return "Who or what", re.sub(r"\b(?:the|a|an) ?$", "", before), after


def _lower(text: str) -> str:
    """Return the beginning of a sentence as it stands within one."""
    first, blank, rest = text.partition(" ")
    return (
        f"{first.lower()}{blank}{rest}" if first in NO_NAMES or first.istitle() is False else text
    )


# ---------------------------------------------------------------- all passages


@dataclass(slots=True)
class Passages:
    """Passages, and where their words stand."""

    titles: list[str]
    texts: list[str]
    left_out: Counter = field(default_factory=Counter)  # why spans are not asked for
    counts: Counter = field(default_factory=Counter)  # word -> passages

    def __post_init__(self):
        for text in self.texts:
            self.counts.update({*words(text)})

    def rare(self, text: str) -> list[str]:
        """Return the words of a text by which it can be told from others, the rarest first."""
        n = max(RARE, len(self.texts) // 100)
        found = {word for word in words(text) if len(word) > 3 and self.counts[word] <= n}
        return sorted(found, key=lambda word: (self.counts[word], word))


def questions(
    found: Passages, forms: Sequence[str] = FORMS, most: int = 2, seed: int = 0
) -> list[Task]:
    """Return questions about passages, each with its paragraph as the only one; all share a pool.

    most: questions about one passage. `found.left_out` counts what was not asked for, by reason.
    The order in which forms are tried is drawn for each passage by (seed, passage).
    """
    titles, texts = [*found.titles], [*found.texts]
    tasks: list[tuple] = []
    used: set[str] = set()
    common = max(RARE, len(texts) // 50)
    for k, (title, text) in enumerate(zip(found.titles, found.texts, strict=True)):
        if not LEAST <= len(text.split()) <= 2 * MOST:
            found.left_out["passage too short or too long"] += 1
            continue
        rng = random.Random(seed_of(seed, title, text))
        free = []
        for gap in (gap for sentence in sentences(text) for gap in gaps(sentence)):
            seen = min((found.counts[word] for word in words(gap.span)), default=len(texts))
            if seen > (RARE if gap.kind == "name" else common):
                found.left_out["span in many passages"] += 1
            elif " ".join(words(gap.span)) not in used:
                free.append(gap)
        rng.shuffle(free)
        # the form first: a span that fits it is found more often than a form that fits a span
        pairs = ((gap, form) for form in rng.sample(forms, len(forms)) for gap in free)
        n = 0
        for gap, form in pairs:
            key, again = " ".join(words(gap.span)), form == "keywords" and n > 0
            made = None if key in used or again else _made(found, form, title, text, gap)
            if made is None:
                continue
            question, document = made
            place = k
            if document != text:
                place = len(texts)
                titles.append(title)
                texts.append(document)
            used.add(key)
            tasks.append((f"{k}.{n}", question, gap.span, place, f"{form} {gap.kind}"))
            n += 1
            if n == most:
                break
        if not n:
            found.left_out["passage without a span that fits"] += 1
    pool = Pool(titles, texts)
    return [
        Task(name, question, (span,), pool=pool, order=(place,), gold=(0,), kind=kind)
        for name, question, span, place, kind in tasks
    ]


def _made(found: Passages, form: str, title: str, text: str, gap: Gap) -> tuple[str, str] | None:
    """Return the question, and the passage as the document has it; None: the form does not fit."""
    before, after = gap.rest
    if form == "apart":
        others = [sentence for sentence in sentences(text) if sentence != gap.sentence]
        holders = [s for s in others if re.search(rf"(?<!\w){re.escape(gap.span)}(?!\w)", s)]
        clues = {*found.rare(before + after)}
        if len(others) < 2 or not any(clues & {*words(s)} for s in holders):
            return None
        return f"Fill the gap: {before}____{after}", " ".join(others)
    if form == "asked":
        english = len(ENGLISH & {*words(text)}) > 4
        question = asked(gap) if english else ""
        return (question, text) if question and len(found.rare(question)) > 1 else None
    clues = sorted(found.rare(before + after)[:4])
    if len(clues) < 2:
        return None
    return f"{SOUGHT[gap.kind]} goes with: {', '.join(clues)}?", text


def read(files: Sequence[str]) -> Passages:
    """Read passages of files and folders: of JSON {title, text}, of anything else its paragraphs,
    each once; what of them was not read is said."""
    tables = [name for name in files if re.search(r"\.(jsonl?|parquet)(\.gz)?$", name)]
    pools = [readers.read_passages(name) for name in tables]
    found = [pair for pool in pools for pair in zip(pool.titles, pool.texts, strict=True)]
    if others := [name for name in files if name not in tables]:
        document = documents.read(others)
        for remark in document.remarks:
            say(remark, "yellow")
        ends = [*(part.start for part in document.parts[1:]), len(document.text)]
        for part, end in zip(document.parts, ends, strict=True):
            found += passages_of(part.name or part.file, document.text[part.start : end])
    found = [*dict.fromkeys(found)]
    return Passages([title for title, _ in found], [text for _, text in found])
