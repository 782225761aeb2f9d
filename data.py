"""Tasks, each one question about one document, and the grading of their answers. No torch.

An answer within a longer text is found in tasks/mentions.py.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol
from unicodedata import category, normalize

from config.errors import UserError

# frame -> text of passage i (counted from 1) with its title, separator between passages.
# "documents" is the frame of MemAgent (arXiv 2507.02259) and of RULER (arXiv 2404.06654).
FRAMES: dict[str, tuple[Callable[[int, str, str], str], str]] = {
    "documents": (lambda i, title, text: f"Document {i}:\n{title}\n{text}", "\n\n"),
    "lines": (lambda i, title, text: text, "\n"),
    "words": (lambda i, title, text: text, " "),
    "numbered": (lambda i, title, text: f"{i}. {text}", " "),
}


NOT_FOUND = "not found in the document"  # the answer where a document does not hold one

# ---------------------------------------------------------------- tasks


@dataclass(slots=True)
class Pool:
    """Store passages once, for many tasks to compose their documents from.

    Only the frame "documents" has titles; the passages of other frames are sentences or words.
    """

    titles: Sequence[str]
    texts: Sequence[str]
    frame: str = "documents"
    _digests: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def document(self, order: Iterable[int]) -> str:
        """Compose the passages with these indices into one text."""
        form, separator = FRAMES[self.frame]
        titles = self.titles if self.frame == "documents" else [""] * len(self.texts)
        return separator.join(form(i, titles[k], self.texts[k]) for i, k in enumerate(order, 1))

    def digest(self, order: Iterable[int]) -> bytes:
        """Return 16 bytes that identify `document(order)`, without composing it."""
        if not self._digests:
            titles = self.titles if self.frame == "documents" else [""] * len(self.texts)
            pairs = zip(titles, self.texts, strict=False)
            self._digests = [_hash(repr(pair).encode(errors="surrogatepass")) for pair in pairs]
        return _hash(self.frame.encode() + b"".join(self._digests[k] for k in order))


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


@dataclass(slots=True)
class Task:
    """Hold one question about one document.

    The document is `text`, or it is composed at each access from `order`: indices into `pool`, in
    reading order.
    """

    id: str
    question: str
    answers: tuple[str, ...]  # accepted answers, the gold one first; all required if `asks_for_all`
    text: str | None = None
    pool: Pool | None = field(default=None, repr=False)
    order: Sequence[int] = ()
    gold: tuple[int, ...] = ()  # positions in `order`, from 0, of the evidence, in hop order
    kind: str = ""  # e.g. one_fact, two_hop, bridge, comparison
    dataset: str = ""
    split: str = ""  # the source's own split where it names one: train, validation
    level: str = ""  # difficulty as the source labels it: easy, medium, hard
    num_docs: int = field(default=0, compare=False)  # documents in `text` as the source counts
    tokens: int = field(default=0, compare=False)  # RULER's own tasks: the target length in tokens
    sessions = memories = probes = ()  # of a conversation (tasks/episodes.py); here there are none
    probe, beginning = None, ""  # likewise: the probe that asks, and a fingerprint of the memories

    @property
    def document(self) -> str:
        if self.text is not None:
            return self.text
        assert self.pool is not None, f"task {self.id} has neither text nor pool"
        return self.pool.document(self.order)

    @property
    def n_documents(self) -> int:
        """Count documents: of `order`, else of the source, else lines "Document N:"; at least 1."""
        if self.pool is not None:
            return len(self.order) if self.pool.frame == "documents" else 1
        return self.num_docs or max(1, len(re.findall(r"^Document \d+:", self.text or "", re.M)))

    @property
    def characters(self) -> int:
        """Estimate the length of the document without composing it."""
        if self.pool is None:
            return len(self.text or "")
        texts, titles = self.pool.texts, self.pool.titles if self.pool.frame == "documents" else ()
        return sum(len(texts[k]) + (len(titles[k]) + 16 if titles else 1) for k in self.order)

    @property
    def digest(self) -> str:
        """Return a hex fingerprint of question, answers, grading, document and evidence."""
        rest = json.dumps([self.question, self.answers, self.gold, self.asks_for_all]).encode()
        return blake2b(rest + b"\0" + self._document_bytes, digest_size=8).hexdigest()

    @property
    def document_digest(self) -> str:
        """Return a hex fingerprint of the document, the same for all questions about it."""
        return blake2b(self._document_bytes, digest_size=8).hexdigest()

    @property
    def _document_bytes(self) -> bytes:
        text = (self.text or "").encode(errors="surrogatepass")
        return text if self.pool is None else self.pool.digest(self.order)

    @property
    def question_digest(self) -> str:
        """Return a hex fingerprint of the normalised question, whatever its id and document."""
        # RULER's own tasks repeat the same wording: their answers count too
        question = normalize_answer(self.question) or self.question
        parts = [question, *(sorted(self.answers) if self.asks_for_all else ())]
        return blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    @property
    def evidence(self) -> str | None:
        """Compose the passages with the evidence, in reading order; None if unknown."""
        # RULER's cwe and fwe count words: all of their document is evidence
        if self.dataset == "ruler" and self.kind in ("cwe", "fwe"):
            return self.document
        if self.pool is None or not self.gold:
            return None
        return self.pool.document(self.order[k] for k in sorted({*self.gold}))

    @property
    def clues(self) -> tuple[str, ...]:
        """Return strings that a memory of the evidence is likely to contain, in hop order: titles
        of its passages or, without titles, the passages; () if unknown."""
        if self.pool is None:
            return ()
        names = self.pool.titles if self.pool.frame == "documents" else self.pool.texts
        return tuple(names[self.order[k]] for k in dict.fromkeys(self.gold))

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return (words, passage) of each piece of evidence, in hop order: what a careful reader
        writes down of it. () if that is not known.

        The words are the answer or, in a passage without it, the title of the next one. Passages
        without titles are sentences, and noted whole.
        """
        notes = []
        for k in dict.fromkeys(self.gold if self.pool is not None else ()):
            passage = self.pool.texts[self.order[k]]
            titled = self.pool.frame == "documents"
            # a "no" in a text is not that which compares two
            answers = [x for x in self.answers if normalize_answer(x) not in ("yes", "no")]
            names = (*answers, *reversed(self.clues)) if titled else (passage,)
            title = self.pool.titles[self.order[k]] if titled else ""
            words = next((x for x in names if x != title and any(places(x, passage))), "")
            if words == "":
                return ()
            notes.append((words, passage))
        return tuple(notes)

    def score(self, prediction: str | None) -> float | None:
        """Return the task's own score of an answer, in [0, 1]; None: `answers` decide."""
        return None

    def beside(self, prediction: str | None) -> dict[str, float]:
        """Return metrics of an answer beside its score, which replace `grade`'s of that name."""
        return {}

    @property
    def absent(self) -> bool:
        """Tell whether the document does not hold the answer."""
        return self.answers == (NOT_FOUND,)

    @property
    def asks_for_all(self) -> bool:
        """Tell whether all `answers` are required, as in RULER's own tasks other than qa."""
        return self.dataset == "ruler" and not self.kind.startswith("qa")


def places(words: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield where these words, as whole words, begin and end in a text: "no" is not in "known"."""
    if words in text:
        yield from (m.span() for m in re.finditer(rf"(?<!\w){re.escape(words)}(?!\w)", text))


def stands_in(words: str, passage: str, section: str, context: int = 20) -> bool:
    """Tell whether a section holds these words where the passage has them, not just anywhere.

    The section may cut the passage: `context` characters on one side of the words must be the same.
    Of a passage that has not so many on either side, all of it must be there.
    """
    for start, end in places(words, passage):
        left, right = start - context, end + context
        sides = [passage[left:end]] if left >= 0 else []
        sides += [passage[start:right]] if right <= len(passage) else []
        if any(side in section for side in sides or [passage]):
            return True
    return False


def seed_of(*parts) -> int:
    """Derive a 64-bit seed from anything printable, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest())


class Tasks(Protocol):
    """Supply training tasks. `level` counts how often they have grown, up to `levels` times."""

    levels: int

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        """Return the n tasks of a step, a function of the arguments alone: runs can be resumed."""


# ---------------------------------------------------------------- the answer of a response


def strip_thinking(text: str) -> str:
    """Return the text after the last `</think>`; unfinished thinking is dropped altogether."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last box, unchanged; None without a closed one.

    >>> extract_boxed(r"It is \boxed{a \text{b}}."), extract_boxed(r"So $\boxed Paris$.")
    ('a \\text{b}', 'Paris')
    """
    if r"\boxed " in text:  # takes precedence over any box with braces, wherever that is
        return text.rpartition(r"\boxed ")[2].partition("$")[0]
    _, box, rest = text.rpartition(r"\boxed")
    if not box or not rest.startswith("{"):
        return None
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i]
    return None


def extract_sentence(text: str) -> str | None:
    """Return the words after the last "the answer is", without * and the final "."; None without.

    >>> extract_sentence("Therefore, The Answer is **Paris**.")
    'Paris'
    """
    _, *rest = re.split("the answer is", text.replace("*", ""), flags=re.IGNORECASE)
    return rest[-1].strip().rstrip(".").strip() if rest else None


# Layers around a plain answer, which is the last group: a box, "the answer is", a full stop that is
# not of initials (U.S.), emphasis and quotes with nothing of their kind inside but apostrophes
MARKS = "*** ** __ * _ ``` ` \" ' “” ‘’ „“ „” ‚‘ ‚’ «» »« ‹› 「」 『』".split()
ENDS = (map(re.escape, mark if len({*mark}) == 2 else (mark, mark)) for mark in MARKS)
LAYERS = [re.compile(layer, re.IGNORECASE | re.DOTALL) for layer in (
    r"\$*\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})+)\}\$*",
    r"([*_]*)(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|short|final|correct)\s+)*answer"
    r"(?:\s+is(?![^\W_])(?:\s*:)?\1(?:\s*:)?|:\1|\1\s*:)\s*(.+)",
    r"(.*)[.。](?<!\.[^\W\d_]\.)",
    *(rf"{a}((?:(?<=\w)['’](?=\w)|(?!{a}|{b}).)+){b}" for a, b in ENDS),
)]  # fmt: skip
ANSWER_FORMS = {"boxed": r"\boxed{...}", "sentence": '"the answer is ..."', "plain": "plain text"}


def unwrapped(text: str) -> str:
    """Return an answer, of however many lines, without the `LAYERS` around the whole of it.

    >>> [unwrapped(text) for text in ('**Answer:** "Lima".', "the U.S.", "'A' or 'B'")]
    ['Lima', 'the U.S.', "'A' or 'B'"]
    """
    inner = text = text.strip()
    while inner:
        text, found = inner, (layer.fullmatch(inner) for layer in LAYERS)
        inner = next((match[match.lastindex].strip() for match in found if match), "")
    return text


def extract_answer(response: str, form: str = "") -> tuple[str, bool]:
    r"""Return the answer of a response for display, and whether it has the requested form.

    Thinking is dropped. Without that form, the whole response is the answer.
    form: of `ANSWER_FORMS`; "" accepts a box or a sentence, where the requested form is unknown.

    >>> extract_answer(r"It is \boxed{Lima}.", "boxed"), extract_answer("Lima", "boxed")
    (('Lima', True), ('Lima', False))
    """
    text = strip_thinking(response).strip()
    if form == "plain":
        return unwrapped(text), bool(text)
    for name, extract in (("boxed", extract_boxed), ("sentence", extract_sentence)):
        if form in ("", name) and (answer := (extract(text) or "").strip()):
            return answer, True
    return text, False


def formed(answer: str, form: str) -> str:
    """Return a response that gives the answer in a form."""
    forms = {"boxed": f"\\boxed{{{answer}}}", "sentence": f"The answer is {answer}."}
    return forms.get(form, answer)


# ---------------------------------------------------------------- the reward

TAIL_CHARACTERS = 300  # length of the end of the response that the reward examines
LATEX = [  # (old, new), applied in this order
    ("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""),
    (r"\right", ""), (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""), (r"\%", ""), (" .", " 0."),
    ("{.", "{0."), (" ", ""),
]  # fmt: skip


def _plain(answer: str) -> str:
    answer = answer.lower()
    for old, new in LATEX:
        answer = answer.replace(old, new)
    return answer


def same_answer(prediction: str | None, answers: Iterable[str]) -> float:
    """Return 1.0 if the prediction equals an accepted answer apart from case, spaces and LaTeX
    spelling, else 0.0. Articles and full stops matter."""
    return float(bool(prediction) and any(_plain(prediction) == _plain(a) for a in answers))


def boxed_reward(response: str, answers: Iterable[str]) -> float:
    r"""Return MemAgent's reward (arXiv 2507.02259, eq. 6): 1.0 if the last box within the last 300
    characters of the response holds an accepted answer, else 0.0.

    `response` is the final turn's alone; thinking is dropped first, as in evaluation. On `\fbox`
    upstream's code fails; here it earns 0.
    """
    return same_answer(extract_boxed(strip_thinking(response)[-TAIL_CHARACTERS:].lower()), answers)


# ---------------------------------------------------------------- the metrics

PUNCTUATION = str.maketrans("", "", string.punctuation)
STYLE = r"\\+(?:(?:text|math)[a-z]*|emph|operatorname\*?|mbox|underline)(?=\s*\{)"
# A word, or a character of a script without blanks: Thai to Burmese, Khmer, kana, bopomofo, Han
UNSPACED = r"\u0e00-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u312f\u3400-\u9fff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def normalize_answer(text: str) -> str:
    """Normalise as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def _key(text: str | None) -> str:
    """Return an answer as the metrics compare it: `normalize_answer` of what a reader sees, without
    LaTeX styles (their braces are punctuation) and Unicode's punctuation, as MLQA's evaluation.

    What would vanish ("A", "...") comes between two NULs and so equals nothing but itself, and that
    an answer is not found (`NOT_FOUND`) shares no word with any answer.
    """
    if text and text.strip().rstrip(".").lower() == NOT_FOUND:
        return "\0\0"
    seen = re.sub(r"\\[,;: ]", " ", re.sub(STYLE, "", text or ""))
    seen = re.sub("[\uff00-\uffef]+", lambda wide: normalize("NFKC", wide[0]), seen)
    seen = "".join(c for c in normalize("NFC", seen) if not re.match("P|Cf", category(c)))
    bare = "".join((seen.lower().translate(PUNCTUATION).strip() or text or "").split())
    return normalize_answer(seen) or (bare and f"\0{bare}\0")


def exact_match(prediction: str | None, answers: Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised answer, else 0.0."""
    return float((pred := _key(prediction)) != "" and pred in map(_key, answers))


def f1(prediction: str | None, answers: Iterable[str]) -> float:
    """Return the best harmonic mean of word precision and recall over the answers (HotpotQA's); in
    scripts without blanks between words each character is one, as MLQA has it for Chinese."""
    best, pred = 0.0, _key(prediction)
    for gold in map(_key, answers):
        # yes, no and noanswer earn no partial credit
        if pred == gold or not {pred, gold} & {"yes", "no", "noanswer"}:
            words, golds = WORD.findall(pred), WORD.findall(gold)
            n_common = (Counter(words) & Counter(golds)).total()
            best = max(best, 2 * n_common / max(1, len(words) + len(golds)))
    return best


def sub_em(prediction: str | None, answers: Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction contains a normalised answer, else 0.0."""
    pred = _key(prediction)
    return float(any(gold in pred for gold in map(_key, answers) if gold))


def sub_em_upstream(prediction: str | None, answers: Sequence[str]) -> float:
    """Return MemAgent's metric (`judge_sub_em` of its ruler_hqa.py): containment either way, first
    answer only. For comparison with published numbers: "a" is right for "apple", "The" and a box of
    blanks for anything, an empty box for nothing.

    Predictions still differ. `grade` drops unfinished thinking and finds none where nothing follows
    `</think>`: MemAgent grades the thoughts in both cases. DeepSeek's special tokens and full stops
    before a sentence's answer remain here. A response that is empty, or whose only box is
    `\\fbox{..}` or has no brace, scores 0: MemAgent omits the first and fails on the others.
    """
    if not prediction or not answers:
        return 0.0
    pred, gold = normalize_answer(prediction), normalize_answer(answers[0])
    return float(gold in pred or pred in gold)


def ruler_match(prediction: str | None, golds: Sequence[str]) -> float:
    """Return RULER's metric: the share of the golds that the prediction contains, ignoring case."""
    if not prediction or not golds:
        return 0.0
    return sum(gold.lower() in prediction.lower() for gold in golds) / len(golds)


@dataclass(slots=True, frozen=True)
class Scores:
    """Collect the scores of one final response."""

    pred: str | None  # None: the response has no answer of the requested form
    # boxed: `boxed_reward`; others: `same_answer`; all answers required: `ruler_match`
    reward: float
    em: float
    f1: float
    sub_em: float
    sub_em_upstream: float


def grade(
    response: str, answers: Sequence[str], form: str = "boxed", all_asked: bool = False
) -> Scores:
    """Score a final response, "" for a failed one, after dropping its thinking.

    form: of `ANSWER_FORMS`, else UserError. A plain answer may equal what an accepted one wraps.
    all_asked: all answers are required, as in RULER's own tasks: `reward` and `sub_em` are then the
    share of them that the prediction contains (arXiv 2507.02259, eq. 7); em, f1 and sub_em_upstream
    are unaffected.
    """
    if form not in ANSWER_FORMS:
        raise UserError(f"'{form}' is no answer form; these are: {', '.join(ANSWER_FORMS)}.")
    text = strip_thinking(response).strip()  # as MemAgent: a bare \boxed at the end is no blank box
    extract = {"boxed": extract_boxed, "sentence": extract_sentence, "plain": unwrapped}[form]
    raw = extract(text) if text else None
    pred = raw.strip() if raw else raw
    accepted = [*answers, *map(unwrapped, answers)] if form == "plain" else answers
    reward = boxed_reward(response, answers) if form == "boxed" else same_answer(pred, accepted)
    return Scores(
        pred=pred,
        reward=ruler_match(pred, answers) if all_asked else reward,
        em=exact_match(pred, answers),
        f1=f1(pred, answers),
        sub_em=ruler_match(pred, answers) if all_asked else sub_em(pred, answers),
        sub_em_upstream=sub_em_upstream(raw, answers),  # accepts blanks, hence the unstripped text
    )
