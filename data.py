"""Tasks: what is read, what is asked, how an answer is graded; the readers and writers of every data form.

Holds: `Task`, `Pool`; readers and writers. Leaves out: graders and metrics (data.py), generated English (tasks/worlds.py), RULER-HQA (tasks/hqa.py),
RULER's tasks (tasks/ruler.py), tokens (tokens/codec.py). No torch.
Exercise it: `python cli.py data look FILE`. Read next: memagent.py.

A file has a container (parquet, a JSON array, JSON lines; the last two also as .gz) and a form (the fields of its records).
`_records` knows the containers, `FORMS` the forms; any form may come in any container. What cannot be read is a `UserError` that
names the file, the line (or row, or item) and the reason. Writers write beside the file and rename when all is well.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import Protocol

from config.errors import UserError

FRAMES: dict[str, tuple[Callable[[int, str, str], str], str]] = {
    "documents": (
        lambda i, title, text: f"Document {i}:\n{title}\n{text}",
        "\n\n",
    ),  # MemAgent's and RULER's (spec memagent.md 7)
    "lines": (lambda i, title, text: text, "\n"),
    "words": (lambda i, title, text: text, " "),
    "numbered": (lambda i, title, text: f"{i}. {text}", " "),
}
"""How passages become a document: the text of passage i (from 1) with its title, and what stands between two of them."""


@dataclass(slots=True)
class Pool:
    """Passages that documents are composed of, stored once and shared by many tasks. Only whole documents have titles; the passages
    of other frames are sentences or words."""

    titles: Sequence[str]
    texts: Sequence[str]
    frame: str = "documents"
    _digests: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def document(self, order: Iterable[int]) -> str:
        shape, between = FRAMES[self.frame]
        if self.frame == "documents":
            return between.join(
                shape(i, self.titles[k], self.texts[k]) for i, k in enumerate(order, 1)
            )
        return between.join(shape(i, "", self.texts[k]) for i, k in enumerate(order, 1))

    def digest(self, order: Iterable[int]) -> bytes:
        """What tells one document from another, without making either."""
        if not self._digests:
            titles = self.titles if self.frame == "documents" else repeat("")
            pairs = zip(titles, self.texts, strict=False)
            self._digests = [
                blake2b(repr(pair).encode(errors="surrogatepass"), digest_size=16).digest()
                for pair in pairs
            ]
        return blake2b(
            self.frame.encode() + b"".join(self._digests[k] for k in order), digest_size=16
        ).digest()


@dataclass(slots=True)
class Task:
    """One question about one document.

    The document is either `text`, or `order`: indices into `pool`, in reading order, expanded each time `document` is read.
    """

    id: str
    question: str
    answers: tuple[
        str, ...
    ]  # accepted answers; the first is the gold one (RULER's own tasks: all of them are asked for)
    text: str | None = None
    pool: Pool | None = field(default=None, repr=False)
    order: Sequence[int] = ()
    gold: tuple[
        int, ...
    ] = ()  # positions in `order`, from 0, of the passages that hold the evidence, in hop order
    kind: str = ""  # e.g. one_fact, two_hop, bridge, comparison
    dataset: str = ""
    split: str = ""  # the source's own split where it names one: train, validation
    level: str = ""  # how hard the source says it is: easy, medium, hard
    num_docs: int = field(
        default=0, compare=False
    )  # documents in `text` as the source counts them, 0 if it does not say
    tokens: int = field(
        default=0, compare=False
    )  # RULER's own tasks: the length in tokens that they were made for

    @property
    def document(self) -> str:
        if self.text is not None:
            return self.text
        assert self.pool is not None, f"task {self.id} has neither text nor pool"
        return self.pool.document(self.order)

    @property
    def n_documents(self) -> int:
        """Documents that `document` is made of: those in `order`, else what the source says, else those numbered in the text, at least 1."""
        if self.pool is not None:
            return len(self.order) if self.pool.frame == "documents" else 1
        return self.num_docs or max(1, len(re.findall(r"^Document \d+:", self.text or "", re.M)))

    @property
    def characters(self) -> int:
        """Length of the document, about: without making it."""
        if self.pool is None:
            return len(self.text or "")
        texts, titles = self.pool.texts, self.pool.titles if self.pool.frame == "documents" else ()
        return sum(len(texts[k]) + (len(titles[k]) + 16 if titles else 1) for k in self.order)

    @property
    def digest(self) -> str:
        """What tells one task from another: question, accepted answers and how they are graded, document and evidence."""
        document = (
            self.pool.digest(self.order)
            if self.pool is not None
            else (self.text or "").encode(errors="surrogatepass")
        )
        said = json.dumps([self.question, self.answers, self.gold, self.asks_for_all]).encode()
        return blake2b(said + b"\0" + document, digest_size=8).hexdigest()

    @property
    def question_digest(self) -> str:
        """What tells one question from another, whatever its id and its document: 8 bytes of its normalised text, as hex digits.

        RULER's own tasks ask in the same words again and again: of these the answers count too.
        """
        said = [
            normalize_answer(self.question) or self.question,
            *(sorted(self.answers) if self.asks_for_all else ()),
        ]
        return blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()

    @property
    def evidence(self) -> str | None:
        """The passages that hold the evidence, in reading order, framed like the document; None where it is not known which they are.

        RULER's cwe and fwe count words: all of their document is evidence.
        """
        if self.dataset == "ruler" and self.kind in ("cwe", "fwe"):
            return self.document
        if self.pool is None or not self.gold:
            return None
        return self.pool.document(self.order[k] for k in sorted({*self.gold}))

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each piece of evidence stands, as a share of the document's passages, in hop order; () where it is not known."""
        return (
            tuple((k + 0.5) / len(self.order) for k in self.gold) if self.pool is not None else ()
        )

    @property
    def clues(self) -> tuple[str, ...]:
        """What a memory with evidence in it is likely to name: the title of each passage that holds it or, of passages without titles, the
        passage; in hop order. () where it is not known which they are."""
        if self.pool is None:
            return ()
        names = self.pool.titles if self.pool.frame == "documents" else self.pool.texts
        return tuple(names[self.order[k]] for k in dict.fromkeys(self.gold))

    @property
    def asks_for_all(self) -> bool:
        """Whether every one of `answers` is asked for: RULER's own tasks but its questions, which accept any one (spec memagent.md 10)."""
        return self.dataset == "ruler" and not self.kind.startswith("qa")


# ---------------------------------------------------------------- the loop


def seed_of(*parts) -> int:
    """A 64-bit seed from anything printable, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


class Tasks(Protocol):
    """Where training tasks come from. `level` counts how often the tasks have grown; `levels` is how often they can."""

    levels: int

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        """The n tasks of a step: a function of its arguments alone, so that a resumed run reads the same ones."""


TAIL_CHARACTERS = 300  # the reward looks no further back than this
PUNCTUATION = str.maketrans("", "", string.punctuation)


# ---- What the response answers ----


def strip_thinking(text: str) -> str:
    """The text after the last `</think>`. Thinking that never ends is all dropped: nothing was answered."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box, as it stands; None without a (closed) one.

    >>> extract_boxed(r"It is \boxed{a \text{b}}."), extract_boxed(r"So $\boxed Paris$."), extract_boxed(r"\boxed{Par")
    ('a \\text{b}', 'Paris', None)
    """
    if r"\boxed " in text:  # goes before any box with braces, wherever that stands
        return text.rpartition(r"\boxed ")[2].partition("$")[0]
    _, found, rest = text.rpartition(r"\boxed")
    if not found or not rest.startswith("{"):
        return None
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i]
    return None


def extract_sentence(text: str) -> str | None:
    """What follows the last "the answer is", without asterisks and the final dot; None if that was not said.

    >>> extract_sentence("Therefore, the answer is **Paris**.")
    'Paris'
    """
    _, found, rest = text.replace("*", "").rpartition("the answer is")
    return rest.strip().rstrip(".").strip() if found else None


ANSWER_FORMS = {
    "boxed": r"\boxed{...}",
    "sentence": '"the answer is ..."',
}  # form -> what a prompt asks for


def extract_answer(response: str, form: str = "") -> tuple[str, bool]:
    r"""What a response answers, for a person, and whether in the form asked for: without it, all of the response is its answer.

    Thinking is dropped. form: "boxed" or "sentence"; "" = either, where nobody knows which was asked for.

    >>> extract_answer(r"It is \boxed{Lima}.", "boxed"), extract_answer("Lima", "boxed")
    (('Lima', True), ('Lima', False))
    """
    text = strip_thinking(response).strip()
    said = [
        extract(text)
        for name, extract in (("boxed", extract_boxed), ("sentence", extract_sentence))
        if form in ("", name)
    ]
    found = next((one.strip() for one in said if one and one.strip()), "")
    return found or text, bool(found)


# ---- The reward ----

# Old and new, in this order.
LATEX = [
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
]
LATEX += [
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
    (r"\%", ""),
    (" .", " 0."),
    ("{.", "{0."),
    (" ", ""),
]


def _bare(answer: str) -> str:
    for old, new in LATEX:
        answer = answer.replace(old, new)
    return answer


def same_answer(prediction: str | None, answers: Iterable[str]) -> float:
    """1.0 if the prediction equals an accepted answer but for case, spaces and LaTeX spelling; articles and full stops count."""
    return float(
        bool(prediction)
        and any(_bare(prediction.lower()) == _bare(answer.lower()) for answer in answers)
    )


def boxed_reward(response: str, answers: Iterable[str]) -> float:
    r"""MemAgent's reward: 1.0 if the last box in the response's last 300 characters holds an accepted answer, else 0.0.

    `response` is the final turn's alone; thinking is dropped first, as in evaluation. Eq. 6 of the paper; upstream's `\fbox` fails
    there and is a plain 0 here.
    """
    return same_answer(extract_boxed(strip_thinking(response)[-TAIL_CHARACTERS:].lower()), answers)


# ---- The metrics ----


def normalize_answer(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str | None, answers: Iterable[str]) -> float:
    return float(
        bool(prediction)
        and normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}
    )


def f1(prediction: str | None, answers: Iterable[str]) -> float:
    """The best harmonic mean of word precision and recall; yes, no and noanswer earn nothing but by equality (HotpotQA)."""
    return (
        max(
            (_f1(normalize_answer(prediction), normalize_answer(answer)) for answer in answers),
            default=0.0,
        )
        if prediction
        else 0.0
    )


def _f1(prediction: str, answer: str) -> float:
    if prediction != answer and {prediction, answer} & {"yes", "no", "noanswer"}:
        return 0.0
    words, gold = prediction.split(), answer.split()
    n_common = (Counter(words) & Counter(gold)).total()
    return 2 * n_common / (len(words) + len(gold)) if n_common else 0.0


def sub_em(prediction: str | None, answers: Iterable[str]) -> float:
    """Ours, one way: an accepted answer stands in the prediction. An answer of articles alone ("A") must equal it."""
    said = normalize_answer(prediction or "")
    golds = ((normalize_answer(answer), answer) for answer in answers)
    return float(
        bool(prediction)
        and any(
            gold in said if gold else raw.lower() == prediction.strip().lower()
            for gold, raw in golds
        )
    )


def sub_em_upstream(prediction: str | None, answers: Sequence[str]) -> float:
    """Compute MemAgent's (`judge_sub_em` of its ruler_hqa.py), two ways, first answer only: "a" is
    right for "apple", "The" and a box of blanks for anything, an empty box for nothing. For
    published numbers alone.

    What still differs is what counts as the prediction. `grade` drops thinking that never ends and
    finds nothing where nothing follows `</think>`: MemAgent grades the thoughts in both cases.
    DeepSeek's special tokens and dots before a sentence's answer stay here. A response that is
    empty, or whose only box is `\\fbox{..}` or has no brace, is 0 and counts: MemAgent leaves the
    first out and ends with an error at the others.
    """
    if not prediction or not answers:
        return 0.0
    said, gold = normalize_answer(prediction), normalize_answer(answers[0])
    return float(gold in said or said in gold)


def ruler_match(prediction: str | None, golds: Sequence[str]) -> float:
    """RULER's: the share of the gold strings that stand in the prediction, whatever the case."""
    return (
        sum(gold.lower() in prediction.lower() for gold in golds) / len(golds)
        if prediction and golds
        else 0.0
    )


# ---- What a text holds of an answer ----

# Tags of the agents' protocols and LaTeX around a box are no words of the text
MARKUP = re.compile(
    r"</?(?:update|recall|thinking|think)>|\\(?:boxed|fbox|text(?:bf|it|rm)?|math(?:bf|it|rm))(?![a-z])"
)
# Punctuation that belongs to a word or to a number, as in U.S.A., O'Brien, AT&T, 1,200 and 3:45;
# any other is a border between words
INNER = re.compile(r"(?<=[^\W_])['.&_-](?=[^\W_])|(?<=\d)[,:/](?=\d)")
BORDERS = str.maketrans(string.punctuation, " " * len(string.punctuation))


def separate_words(text: str) -> str:
    r"""Normalise as `normalize_answer`, but keep two words two where markup or punctuation stands
    between them.

    `normalize_answer` deletes punctuation, as the metrics must, and makes one word of what it
    joins. A memory in which something is looked for may be `<update>Lima</update>`, as ReMemR1's
    code keeps it, or end in a box.

    >>> separate_words(r"<update>See \boxed{Lima}</update>"), separate_words("O'Brien,Lima: 1,200")
    ('see lima', 'obrien lima 1200')
    """
    return normalize_answer(INNER.sub("", MARKUP.sub(" ", text)).translate(BORDERS))


def all_words(text: str) -> set[str]:
    """List all words of the text: normalised as in the metrics, and kept apart where that joins two
    (`separate_words`)."""
    return {*normalize_answer(MARKUP.sub(" ", text)).split(), *separate_words(text).split()}


def answer_recall(
    answers: Iterable[str],
    text: str,
    question: str = "",
    match: str = "words",
    all_asked: bool = False,
    words: str = "unseen",
) -> float | None:
    """ReMemR1's recall(y, text): the share of an answer's words that stand in the text, as whole words, normalised, of the best answer.

    Words that the question has too say nothing about reading and are not looked for, nor are yes and no; with words="all" every word is,
    as in the paper's equations. None: no answer is left with a word that could be found. all_asked: every answer is asked for, the mean
    counts. match="substring" is upstream's instead: of all the answer's words as they are, anywhere, mean over the answers. Markup is no
    word of the text (`separate_words`).

    >>> answer_recall(["UK", "United Kingdom"], "the UK"), answer_recall(["UK", "United Kingdom"], "the UK", match="substring")
    (1.0, 0.5)
    """
    if match == "substring":
        shares = [
            sum(word in text for word in gold) / len(gold)
            for answer in answers
            if (gold := answer.split())
        ]
        return sum(shares) / len(shares) if shares else None
    held, known = all_words(text), set()
    if words == "unseen":
        known = all_words(question)
        answers = (answer for answer in answers if normalize_answer(answer) not in ("yes", "no"))
    golds = [gold for answer in answers if (gold := {*normalize_answer(answer).split()} - known)]
    shares = [len(gold & held) / len(gold) for gold in golds]
    return sum(shares) / len(shares) if all_asked and shares else max(shares, default=None)


def phrases(answers: Iterable[str]) -> list[str]:
    """Accepted answers as `count_phrases` looks for them; such as yes and no stand everywhere and are not looked for."""
    return sorted(
        {
            f" {words} "
            for answer in answers
            if (words := normalize_answer(answer)) not in ("", "yes", "no")
        }
    )


def count_phrases(golds: Sequence[str], text: str) -> int:
    """Count the `phrases` that stand in the text, as whole words, normalised; tags and boxes around
    them are no part of a word (`separate_words`)."""
    if not golds:
        return 0
    joined = f" {normalize_answer(MARKUP.sub(' ', text))} "
    found = {gold for gold in golds if gold in joined}
    missing = [gold for gold in golds if gold not in found]
    # sections are long: taken apart a second time only if all letters of an answer's words are there
    if glued := [gold for gold in missing if all(word in joined for word in gold.split())]:
        apart = f" {separate_words(text)} "
        found.update(gold for gold in glued if gold in apart)
    return sum(gold in found for gold in golds)


# ---- All of them for one response ----


@dataclass(slots=True, frozen=True)
class Scores:
    """What one final response is worth."""

    pred: str | None  # None: the response holds no answer of the form asked for
    reward: float  # boxed: `boxed_reward`; sentence: the same comparison of the sentence's answer; all asked for: `ruler_match`
    em: float
    f1: float
    sub_em: float
    sub_em_upstream: float


def grade(
    response: str, answers: Sequence[str], form: str = "boxed", all_asked: bool = False
) -> Scores:
    """The scores of a final response, "" for a failed one. form: "boxed" or "sentence". Thinking is dropped first.

    all_asked: every answer is asked for, as in RULER's own tasks: `reward` and `sub_em` are then the share of them that the prediction
    holds (paper eq. 7); em, f1 and sub_em_upstream stay what they are.
    """
    if form not in ("boxed", "sentence"):
        raise UserError(f"'{form}' is no answer form; these are: boxed, sentence.")
    text = strip_thinking(response).strip()  # as MemAgent: a bare \boxed at the end is no blank box
    pred = extract_boxed(text) if form == "boxed" else extract_sentence(text)
    found, pred = pred, pred.strip() if pred else pred
    reward = boxed_reward(response, answers) if form == "boxed" else same_answer(pred, answers)
    if all_asked:
        reward = ruler_match(pred, answers)
    metrics = (
        metric(pred, answers) for metric in (exact_match, f1, ruler_match if all_asked else sub_em)
    )
    return Scores(
        pred, reward, *metrics, sub_em_upstream(found, answers)
    )  # which takes blanks, too
