"""RULER's thirteen tasks, generated here at any length in tokens of any tokenizer: nothing is downloaded, the wording is our own.

Holds: `make_tasks`, `sentences`, the table of settings. Leaves out: reading and writing (data.py), RULER-HQA (tasks/hqa.py), grading (data.py:
`ruler_match`), what stands in the haystack (the caller gives the sentences and names them). No torch.
Exercise it: `pytest tests/tasks/test_ruler.py`. Read next: data.py.

  niah_*    needles (sentences that bind a key to a value) in a haystack: values of some keys are asked for
  vt        a number goes from name to name over four hops: all five names are asked for
  cwe, fwe  ten words of a numbered list, three coded words of a text, are more frequent than the others and asked for
  qa_1, 2   questions of SQuAD's and HotpotQA's form, their paragraphs among others: any accepted answer is right

Numbers are upstream's (NVIDIA/RULER and MemAgent's copy of it, spec memagent.md 9); sentences and
questions are not. As there, the questions of several values or keys and of vt do not say how many
answers there are, those of cwe and fwe do. (NVIDIA's prompt for vt ends with the beginning of an
answer that says it; MemAgent's has none, nor has ours.) Where we differ; tokens are those of
SmolLM2's tokenizer:
- Documents are as long as fits: at 8,192 tokens 7,922 (niah_single_1) and 7,883 (niah_multikey_3).
  MemAgent's copy lengthens them by 25 lines at a time and ends at 7,522 and 6,120, so ours are
  harder; NVIDIA's now searches for what fits, too.
- Lengths are in tokens of the model that is asked, or of --tokenizer; the published sets are in
  Qwen2.5's, whatever the model. The same length is another number of words elsewhere.
- Every needle's depth, vt's too, is drawn from the grid of 40; upstream does that in essays only. vt has no example before it.
- Orders are drawn for each item and length. Upstream's permutations (of needles, fwe's words, the
  documents of qa) are one for all items of a seed, so that a policy can learn places.
- Items share their haystack (the distractors of niah_multikey_2 and _3 too, in another order), so that a set is small.
- Distractors share no key or value with an item's own, and no answer stands anywhere else: upstream leaves that to chance.
- Coded words and the names of vt are made of consonants: they spell no word, so none stands in the
  filler and none is a profanity. Such a coded word takes 4.30 tokens, upstream's of all letters
  3.89: at a length there are about a tenth fewer words.
- cwe: single words are used up at 150,000 tokens or so, pairs of them follow (NVIDIA: another list of words; MemAgent: nothing).
- cwe: words occur 30 and 3 times; 6 and 1 times below 4,096 tokens as upstream, and at any length at which 30 and 3 leave no room.
- qa: documents have titles, upstream's of SQuAD none. Of SQuAD, other paragraphs of the same
  article come first, as upstream; of HotpotQA, no other passage has a title of the question's own
  paragraphs, as it might be another version of one.
"""

from __future__ import annotations

import math
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, cycle, islice, pairwise
from typing import NamedTuple

from config.errors import UserError
from data import FRAMES, Pool, Task
from tasks.readers import Passage, pool_of
from tokens.codec import Codec

DEPTHS = 40  # needles stand at 0/39, 1/39, .. 39/39 of the haystack
HOPS, COMMON = 4, 10  # of vt; words asked for in cwe
REPEATS = (
    (30, 3),
    (6, 1),
)  # cwe: how often common words and others occur, and where that leaves no room
ZETA = math.pi**2 / 6  # fwe: zeta(2), the sum of k ** -2 over the ranks k
ALLOWANCE = {
    "niah": 128,
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa": 32,
}  # tokens that upstream keeps for the answer
TEMPLATE = 100  # tokens kept for the prompt around document and question
ROUNDS, GROWTH = (
    8,
    32,
)  # documents tokenized in search of the right size, at most; how many times as long the next may be
MISSES = 100  # qa: passages tried after the first that is too long for what room is left

NEEDLE = "For {key} the archive keeps {type} {value}."
FILLER = "The kettle is warm. Rain runs down the window. A dog sleeps by the door. Somebody hums an old tune. All is quiet."
FIRST = "Now {name} is given the value {value}."
HOP = "Now {name} is given what {other} has."
ONE_VALUE = "Which {type} does the archive keep for {keys}? Answer with this {type} alone."
ALL_VALUES = (
    "Which {type}s does the archive keep for {keys}? Answer with all of them, separated by commas."
)
ALL_NAMES = "Which names are given the value {value}, directly or by way of others? Answer with all of them, separated by commas."
ALL_COMMON = "Which {n} words occur most often in the numbered list? Answer with these {n} words, separated by commas."
ALL_CODED = "Which 3 coded words occur most often in the text, dots not counted? Answer with these 3 words, separated by commas."


class Niah(NamedTuple):
    """A needle task's settings."""

    haystack: str  # filler, essay or needles
    key: str = "word"  # what keys and values are: word, number or uuid
    value: str = "number"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys that are asked for


NIAH = {
    "niah_single_1": Niah("filler"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuid"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuid", value="uuid"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}
KINDS = (*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2")
FRAME = {
    "filler": "lines",
    "needles": "lines",
    "essay": "words",
    "vt": "lines",
    "cwe": "numbered",
    "fwe": "words",
}


@cache
def _words() -> tuple[list[str], list[str], list[str]]:
    """wonderwords' adjectives, nouns, and all of its words: single lower-case ones, none of them a profanity."""
    from wonderwords import RandomWord, filter_profanity

    lists = RandomWord(enhanced_prefixes=False)
    adjectives, nouns, verbs = (
        sorted({*filter_profanity(lists.filter(include_categories=[c], regex="[a-z]+"))})
        for c in ("adjective", "noun", "verb")
    )
    return adjectives, nouns, sorted({*adjectives, *nouns, *verbs})


CONSONANTS = "bcdfghjklmnpqrstvwxz"
DRAW: dict[str, Callable[[random.Random], str]] = {
    "word": lambda rng: "-".join(map(rng.choice, _words()[:2])),  # adjective-noun
    "number": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def _distinct(draw: Callable[[], str], barred: str = "") -> Iterator[str]:
    """What `draw` gives, nothing twice and nothing that stands in the text `barred`."""
    seen = set()
    while True:
        if (text := draw()) not in seen and text not in barred:
            seen.add(text)
            yield text


class CachedIterator:
    """The beginning of an endless iterator, kept."""

    def __init__(self, source: Iterator):
        self.source, self.kept = source, []

    def first(self, n: int) -> list:
        self.kept += islice(self.source, max(0, n - len(self.kept)))
        return self.kept[:n]


def sentences(texts: Iterable[str]) -> list[str]:
    """Running texts (essays, articles) as sentences, to be a haystack: a blank is a border where ., ! or ? stands before it, closing
    quotes or brackets allowed, and a capital letter or a digit after it, opening ones allowed. White space becomes one blank.

    It cuts after "Dr." and "J." and misses sentences that begin with a small letter, headings, and scripts without these marks.
    """
    border = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)\]]))\s+(?=["'“‘(\[]?[A-Z0-9])""")
    return [
        sentence for text in texts for sentence in border.split(" ".join(text.split())) if sentence
    ]


class ItemKey(NamedTuple):
    """Which item, and how long: all that it is drawn from."""

    kind: str
    seed: int
    number: int
    tokens: int

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.seed}.{self.number}"

    @property
    def rng(self) -> random.Random:
        """For what is the same at every length: question, keys, answers."""
        return random.Random(self.id)

    def depths(self, n: int) -> list[int]:
        return random.Random(f"{self.id}:{self.tokens}:depths").sample(range(DEPTHS), n)

    def shuffled(self, pieces: list) -> list:
        random.Random(f"{self.id}:{self.tokens}:order").shuffle(pieces)
        return pieces


class Item(NamedTuple):
    """One item of a length not yet known. `build` makes a document of a size: its pieces, and where the needles are among them.

    Sizes count pieces of the haystack (niah, vt), words beside the common ones (cwe), words before rounding (fwe), tokens (qa).
    """

    task: Task  # without its document
    build: Callable[[int], tuple[list, tuple[int, ...]]]
    least: int  # the smallest size that makes sense
    most: float = math.inf  # pieces that there are


def _insert(
    haystack: list[str], needles: Sequence[str], depths: Sequence[int]
) -> tuple[list[str], tuple[int, ...]]:
    """Needle j at depth depths[j] of the grid, and where each then stands."""
    pieces, places = list(haystack), [0] * len(needles)
    for before, (depth, j) in enumerate(sorted(zip(depths, range(len(needles)), strict=True))):
        places[j] = len(haystack) * depth // (DEPTHS - 1) + before
        pieces.insert(places[j], needles[j])
    return pieces, tuple(places)


def _niah(kind: str, seed: int, haystack: Sequence[str]) -> Callable[[ItemKey], list[Item]]:
    """What makes the items of a needle task."""
    task, lines = NIAH[kind], [FILLER]
    if task.haystack == "essay" and not (
        lines := [line for text in haystack if (line := " ".join(text.split()))]
    ):
        raise UserError(f"{kind} needs the sentences of a haystack; give some.")
    taken = " ".join(lines).casefold()

    def needle(bound: tuple[str, str]) -> str:
        return NEEDLE.format(type=task.value, key=bound[0], value=bound[1])

    def drawn(rng: random.Random, barred: str = "") -> tuple[Iterator[str], Iterator[str]]:
        return tuple(
            _distinct(lambda draw=DRAW[what]: draw(rng), barred) for what in (task.key, task.value)
        )

    distractors = CachedIterator(zip(*drawn(random.Random(f"{seed}:{kind}")), strict=True))

    def item(key: ItemKey) -> list[Item]:
        keys, values = drawn(key.rng, taken)
        bound = [(key, next(values)) for key in islice(keys, task.keys) for _ in range(task.values)]
        total, wanted = (
            len(bound),
            task.queries * task.values,
        )  # the first keys are asked for; where they stand is drawn
        own = {text for pair in bound for text in pair}

        def build(size: int) -> tuple[list[str], tuple[int, ...]]:
            if task.haystack == "needles":
                others = (
                    pair for pair in distractors.first(size + 2 * total) if own.isdisjoint(pair)
                )
                pieces = key.shuffled([*map(needle, islice(others, size))])
            else:
                pieces = list(islice(cycle(lines), size))
            pieces, places = _insert(pieces, [*map(needle, bound)], key.depths(total))
            return pieces, places[:wanted]

        asked = ", ".join(dict(bound[:wanted]))
        question = (ALL_VALUES if wanted > 1 else ONE_VALUE).format(type=task.value, keys=asked)
        return [
            Item(
                Task(key.id, question, tuple(value for _, value in bound[:wanted])),
                build,
                2 * total,
            )
        ]

    return item


def _vt(key: ItemKey) -> list[Item]:
    rng = key.rng
    value = str(rng.randint(10000, 99999))
    names = [*islice(_distinct(lambda: "".join(rng.choices(CONSONANTS.upper(), k=5))), HOPS + 1)]
    chained = [FIRST.format(name=names[0], value=value)]
    chained += [HOP.format(name=b, other=a) for a, b in pairwise(names)]
    depths = sorted(key.depths(HOPS + 1))
    task = Task(key.id, ALL_NAMES.format(value=value), tuple(names))
    return [Item(task, lambda size: _insert([FILLER] * size, chained, depths), HOPS + 1)]


def _cwe(key: ItemKey) -> list[Item]:
    rng = key.rng
    words, common = rng.sample(_words()[2], len(_words()[2])), []
    for word in words:
        if (
            len(common) < COMMON
            and len(word) > 3
            and not any(word in other or other in word for other in common)
        ):
            common.append(word)
    endless = _distinct(chain(words, iter(lambda: DRAW["word"](rng), "")).__next__)
    others = CachedIterator(
        word for word in endless if not any(answer in word for answer in common)
    )  # it would be taken for the answer

    def build(repeats: tuple[int, int], size: int) -> tuple[list[str], tuple[int, ...]]:
        return key.shuffled(common * repeats[0] + others.first(size) * repeats[1]), ()

    task = Task(key.id, ALL_COMMON.format(n=COMMON), tuple(common))
    return [Item(task, partial(build, repeats), COMMON) for repeats in REPEATS[key.tokens < 4096 :]]


def _fwe(key: ItemKey) -> list[Item]:
    rng = key.rng
    coded = CachedIterator(chain(["..."], _distinct(lambda: "".join(rng.choices(CONSONANTS, k=6)))))

    def build(size: int) -> tuple[list[str], tuple[int, ...]]:
        counts = [n for rank in range(1, key.tokens // 50 + 1) if (n := int(size / rank**2 / ZETA))]
        pieces = [
            word for word, n in zip(coded.first(len(counts)), counts, strict=True) for _ in range(n)
        ]
        return key.shuffled(pieces), ()

    task = Task(key.id, ALL_CODED, tuple(coded.first(4)[1:]))
    return [
        Item(task, build, 80)
    ]  # from 80 words on, the second to the fifth rank differ in their counts


def _qa(
    questions: Sequence[Task], extra: Pool | None, seed: int, count: Callable[[str], int]
) -> Callable[[ItemKey], list[Item]]:
    """What makes the items of a qa task. `count` gives a text's tokens."""
    if not questions or any(
        task.pool is None or task.pool.frame != "documents" for task in questions
    ):
        raise UserError(
            "The qa tasks need questions with paragraphs of their own, such as SQuAD's or HotpotQA's; give some."
        )
    chosen = list(questions)
    random.Random(str(seed)).shuffle(chosen)
    pools = {id(pool): pool for pool in (*(task.pool for task in questions), extra) if pool}
    passages = sorted(
        {
            passage
            for pool in pools.values()
            for passage in zip(pool.titles, pool.texts, strict=True)
        }
    )

    @cache
    def cost(passage: Passage) -> int:  # about what the passage adds to a document
        return count("\n\n" + FRAMES["documents"][0](100, *passage))

    def item(key: ItemKey) -> list[Item]:
        task = chosen[key.number]
        own = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        needed = [own[k] for k in dict.fromkeys(task.gold or range(len(own)))]
        titles, texts = {title.casefold() for title, _ in own}, {text for _, text in own}
        drawn = random.Random(f"{seed}:{task.id}").sample(passages, len(passages))
        fresh = [p for p in drawn if p[1] not in texts]
        alike = [
            p for p in fresh if p[0].casefold() in titles
        ]  # SQuAD: the same article's; else other versions of a gold paragraph
        others = (
            [p for p in own if p not in needed]
            + (alike if task.dataset == "squad" else [])
            + [p for p in fresh if p[0].casefold() not in titles]
        )

        def build(size: int) -> tuple[list[Passage], tuple[int, ...]]:
            pieces, room, misses = list(needed), size - sum(map(cost, needed)), 0
            for passage in others:
                if cost(passage) <= room:
                    pieces.append(passage)
                    room -= cost(passage)
                elif (misses := misses + 1) == MISSES:
                    break
            return key.shuffled(pieces), tuple(pieces.index(own[k]) for k in task.gold)

        return [Item(task, build, sum(map(cost, needed)), len(needed) + len(others))]

    return item


def _fit(
    item: Item, count: Callable[[list], int], limit: int
) -> tuple[list, tuple[int, ...], int] | None:
    """Pieces, places and tokens of the longest document of at most `limit` tokens, but for a piece or a thousandth; None if there is none.

    Each is tokenized as a whole, since tokenizers are not additive. Small ones tell the tokens of a piece, so that few long ones follow.
    """
    made = item.build(item.least)
    least = low = item.least, count(made[0])
    if low[1] > limit:
        return None
    high, size, aim = None, 2 * item.least + 20, limit - limit // 2000
    for _ in range(ROUNDS):
        attempt = item.build(size)
        if (got := count(attempt[0])) > limit:
            high, aim = (
                (size, got),
                aim - (limit - aim + 1),
            )  # lower each time: passages are large, a size less may change nothing
        else:
            low, made = (size, got), attempt
        (a, x), (b, y) = (
            (low, high) if high else (least, low)
        )  # sizes and their tokens: the aim is on the line through them
        size = low[0] + int((aim - low[1]) * (b - a) / max(1, y - x))
        size = min(size, high[0] - 1 if high else GROWTH * low[0])
        if size <= low[0] or limit - low[1] <= limit // 1000:
            break
    return *made, low[1]


def make_tasks(
    kind: str,
    tokens: int,
    n: int,
    codec: Codec,
    seed: int = 0,
    haystack: Sequence[str] = (),
    questions: Sequence[Task] = (),
    extra: Pool | None = None,
) -> list[Task]:
    """n tasks of one of `KINDS`, for contexts of `tokens` tokens; they share one pool.

    Document (tokenized by itself, as a whole), question, `ALLOWANCE` for the answer and `TEMPLATE` for the prompt around them are at most
    `tokens` together. They are less by a piece or so (a line, a needle, three entries of cwe, the shortest passages of qa) or by a
    thousandth: 95 % is reached from 4,096 tokens on, unless a piece has hundreds of tokens, as long sentences, passages of qa and a
    tokenizer that knows few words can make it.

    haystack: sentences (`sentences` makes them from texts), for NIAH's kinds with an essay; repeated from the start when they end.
    questions: tasks with paragraphs as `data.read` gives them, for qa_1 and qa_2. extra: further passages to fill documents with.

    Everything follows from (seed, kind, number of the item, tokens), nothing from n or other items. Ids, questions, keys and answers are
    the same at every length; depths and orders are not. gold are the positions of the needles that are asked for, in the order of the
    answers; of vt's five assignments; of a qa question's supporting paragraphs. cwe and fwe have none: all of the document is evidence.

    UserError: unknown kind, no haystack or questions, too few tokens, questions or passages.
    """
    if kind not in KINDS:
        raise UserError(f"'{kind}' is no task of RULER; these are: {', '.join(KINDS)}.")
    if n < 1:
        raise UserError(f"The number of tasks must be 1 or more, not {n}.")
    family = kind.partition("_")[0]
    frame = (
        "documents" if family == "qa" else FRAME[NIAH[kind].haystack if family == "niah" else kind]
    )

    def count(text: str) -> int:
        return len(codec.ids(text))

    def of(pieces: Iterable) -> Pool:
        return pool_of(pieces if family == "qa" else (("", piece) for piece in pieces), frame)

    if family == "qa":
        items = _qa(questions, extra, seed, count)
        if n > len(questions):
            raise UserError(f"{n} questions are wanted and there are {len(questions)}.")
    else:
        items = (
            _niah(kind, seed, haystack)
            if family == "niah"
            else {"vt": _vt, "cwe": _cwe, "fwe": _fwe}[kind]
        )

    tasks, place = [], {}
    for number in range(n):
        for item in items(ItemKey(kind, seed, number, tokens)):
            room = tokens - count(item.task.question) - ALLOWANCE[family] - TEMPLATE
            if made := _fit(
                item, lambda pieces: count(of(pieces).document(range(len(pieces)))), room
            ):
                break
        else:
            raise UserError(
                f"{tokens} tokens are too few for {item.task.id}: its smallest document has more than {max(0, room)}."
            )
        pieces, gold, used = made
        if len(pieces) == item.most and used < 0.95 * room:
            raise UserError(
                f"{item.task.id}: all {len(pieces)} passages have {used} tokens and {room} are wanted; give more."
            )
        order = tuple(place.setdefault(piece, len(place)) for piece in pieces)
        tasks.append(
            replace(
                item.task,
                pool=None,
                order=order,
                gold=gold,
                kind=kind,
                dataset="ruler",
                tokens=tokens,
            )
        )
    pool = of(place)
    return [replace(task, pool=pool) for task in tasks]
