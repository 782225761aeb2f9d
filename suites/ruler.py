"""RULER's thirteen tasks, generated at any length in tokens of the evaluated model, offline.

  niah_*    needles (sentences that bind a key to a value) in a haystack; asks for the values of
            some keys
  vt        a number is passed from name to name over four hops; asks for all five names
  cwe, fwe  ten words of a numbered list, three coded words of a text, are more frequent than the
            others; asks for these words
  qa_1, 2   questions in SQuAD's and HotpotQA's form, their paragraphs among others; any accepted
            answer is right

Numbers are those of NVIDIA/RULER (arXiv 2404.06654) and of MemAgent's copy of it; sentences and
questions are our own. docs/evaluation.md lists what else differs.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError
from data import FRAMES, Pool, Task
from suites import Column, Scope
from suites._sources import Filled, read_filler, select_split, sentences
from tasks import readers
from tokens.codec import Codec

DEPTHS = 40  # needles stand at 0/39, 1/39, .. 39/39 of the haystack
HOPS = 4  # of vt
COMMON = 10  # answers of cwe
REPEATS = ((30, 3), (6, 1))  # cwe: occurrences of answers and of others; where those leave no room
ZETA = math.pi**2 / 6  # fwe: zeta(2), the sum of k ** -2 over the ranks k
# Tokens that upstream reserves for the answer
ALLOWANCE = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
TEMPLATE = 100  # tokens reserved for the prompt around document and question
ROUNDS = 8  # the search for the right size tokenizes at most so many documents,
GROWTH = 32  # each at most so many times as large as the one before
MISSES = 100  # qa: passages tried after the first that does not fit into the remaining room

NEEDLE = "For {key} the archive keeps {type} {value}."
FILLER = (
    "The kettle is warm. Rain runs down the window. A dog sleeps by the door. "
    "Somebody hums an old tune. All is quiet."
)
FIRST = "Now {name} is given the value {value}."
HOP = "Now {name} is given what {other} has."
ONE_VALUE = "Which {type} does the archive keep for {keys}? Answer with this {type} alone."
ALL_VALUES = (
    "Which {type}s does the archive keep for {keys}? Answer with all of them, separated by commas."
)
ALL_NAMES = (
    "Which names are given the value {value}, directly or by way of others? "
    "Answer with all of them, separated by commas."
)
ALL_COMMON = (
    "Which {n} words occur most often in the numbered list? "
    "Answer with these {n} words, separated by commas."
)
ALL_CODED = (
    "Which 3 coded words occur most often in the text, dots not counted? "
    "Answer with these 3 words, separated by commas."
)


class Niah(NamedTuple):
    """Set up a needle task."""

    haystack: str  # filler, essay or needles
    key: str = "word"  # type of the keys: word, number or uuid
    value: str = "number"  # type of the values, likewise
    keys: int = 1
    values: int = 1  # per key
    queries: int = 1  # keys in the question


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
ESSAY = tuple(kind for kind, settings in NIAH.items() if settings.haystack == "essay")
KINDS = (*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2")
# haystack of a needle task, or other task -> frame of its documents (data.FRAMES)
FRAME = {
    "filler": "lines", "needles": "lines", "essay": "words",
    "vt": "lines", "cwe": "numbered", "fwe": "words",
}  # fmt: skip


@dataclass(frozen=True)
class Ruler(Filled):
    """RULER's tasks."""

    ruler_tasks: tuple[str, ...] = ()
    """names of tasks, or all; empty = those whose sources are given"""
    haystack: tuple[str, ...] = ()
    """files of essays or other running text (.txt, .json with a text, passages); empty = the
    passages of --data and --filler"""
    squad: str = ""
    """SQuAD file, for the task qa_1"""

    unit, lengths, may_differ = "tokens", (4096, 8192, 16384), ("ruler_tasks",)

    def columns(self, scope: Scope) -> list[Column]:
        everything = [task for file in scope.data for task in readers.read(file)]
        questions = select_split(everything, self.source_split) if scope.data else []
        squad = readers.read(self.squad) if self.squad else []
        extra = read_filler(self.filler)
        if self.haystack:
            texts = [text for file in self.haystack for text in readers.read_texts(file)]
        else:
            pools = [task.pool for task in questions if task.pool] + ([extra] if extra else [])
            pools = {id(pool): pool for pool in pools}.values()
            texts = [text for pool in pools for text in pool.texts]
        missing = {} if texts else dict.fromkeys(ESSAY, "--haystack, essays or other running text")
        missing |= {} if squad else {"qa_1": "--squad, a file of SQuAD's form"}
        missing |= {} if questions else {"qa_2": "--data, HotpotQA's questions, with paragraphs"}
        essay = cache(partial(sentences, texts))
        questions_of = {"qa_1": squad, "qa_2": questions}

        def make(kind: str, length: int) -> list[Task]:
            asked = questions_of.get(kind, ())
            n = min(scope.n, len(asked)) if asked else scope.n
            haystack = essay() if kind in ESSAY else ()
            return make_tasks(kind, length, n, scope.codec(), scope.seed, haystack, asked, extra)

        kinds = self.kinds(missing)
        return [
            Column(k, length, partial(make, k, length)) for length in scope.lengths for k in kinds
        ]

    def kinds(self, missing: dict[str, str]) -> list[str]:
        """Return the requested tasks; by default, those whose sources are given.

        missing: task -> the source that it lacks. UserError: an unknown task, or one of those.
        """
        for kind in self.ruler_tasks:
            if kind not in (*KINDS, "all"):
                known = ", ".join(KINDS)
                raise UserError(f"Unknown task of RULER {kind!r}: choose among all, {known}.")
        requested = [*KINDS] if "all" in self.ruler_tasks else [*self.ruler_tasks]
        for kind in requested:
            if kind in missing:
                raise UserError(f"{kind} needs {missing[kind]}.")
        return requested or [kind for kind in KINDS if kind not in missing]

    def about(self, scope: Scope, column: Column) -> dict[str, str | int | bool]:
        files = self.haystack or (*scope.data, *self.filler)
        names = ", ".join(Path(file).name for file in files)
        name = names if self.haystack else f"passages of {names}"
        return {"seed": scope.seed} | ({"haystack": name} if column.question in ESSAY else {})


# ---------------------------------------------------------------- texts


@cache
def _words() -> tuple[list[str], list[str], list[str]]:
    """Return wonderwords' adjectives, nouns, and all words: lower-case, single, no profanities."""
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
    """Yield what `draw` returns, without repetition and without substrings of the text `barred`."""
    seen = set()
    while True:
        if (text := draw()) not in seen and text not in barred:
            seen.add(text)
            yield text


class CachedIterator:
    """Give repeated access to the first items of an endless iterator."""

    def __init__(self, source: Iterator):
        self.source, self.items = source, []

    def first(self, n: int) -> list:
        self.items += islice(self.source, max(0, n - len(self.items)))
        return self.items[:n]


# ---------------------------------------------------------------- items
# An item is drawn from its key alone. Its length is not known yet: `_fit` finds the largest size
# whose document has at most so many tokens.
#
#   ItemKey --_niah, _vt, _cwe, _fwe, _qa--> Item --_fit--> pieces, places --make_tasks--> Task


class ItemKey(NamedTuple):
    """Identify an item and its length: all that it is drawn from."""

    kind: str
    seed: int
    number: int
    tokens: int

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.seed}.{self.number}"

    @property
    def rng(self) -> random.Random:
        """Return the generator of what is the same at every length: question, keys, answers."""
        return random.Random(self.id)

    def depths(self, n: int) -> list[int]:
        return random.Random(f"{self.id}:{self.tokens}:depths").sample(range(DEPTHS), n)

    def shuffled(self, pieces: list) -> list:
        random.Random(f"{self.id}:{self.tokens}:order").shuffle(pieces)
        return pieces


class Item(NamedTuple):
    """Describe an item whose size is still open.

    `build(size)` returns the pieces of a document and the positions of the needles among them.
    Sizes count pieces of the haystack (niah, vt), words other than the answers (cwe), words before
    rounding (fwe), tokens (qa).
    """

    task: Task  # without its document
    build: Callable[[int], tuple[list, tuple[int, ...]]]
    least: int  # the smallest useful size
    most: float = math.inf  # number of available pieces


Maker = Callable[[ItemKey], list[Item]]  # the items to try, in this order


def _insert(
    haystack: list[str], needles: Sequence[str], depths: Sequence[int]
) -> tuple[list[str], tuple[int, ...]]:
    """Insert needle j at depth depths[j] of the grid; return the pieces and each needle's place."""
    pieces, places = list(haystack), [0] * len(needles)
    for before, (depth, j) in enumerate(sorted(zip(depths, range(len(needles)), strict=True))):
        places[j] = len(haystack) * depth // (DEPTHS - 1) + before
        pieces.insert(places[j], needles[j])
    return pieces, tuple(places)


def _niah(kind: str, seed: int, haystack: Sequence[str]) -> Maker:
    """Return the maker of a needle task's items."""
    niah, lines = NIAH[kind], [FILLER]
    if niah.haystack == "essay":
        lines = [line for text in haystack if (line := " ".join(text.split()))]
    haystack_text = " ".join(lines).casefold()

    def needle(pair: tuple[str, str]) -> str:
        return NEEDLE.format(type=niah.value, key=pair[0], value=pair[1])

    def draws(rng: random.Random, barred: str = "") -> tuple[Iterator[str], Iterator[str]]:
        """Return endless keys and values."""
        key, value = (partial(DRAW[type_], rng) for type_ in (niah.key, niah.value))
        return _distinct(key, barred), _distinct(value, barred)

    distractors = CachedIterator(zip(*draws(random.Random(f"{seed}:{kind}")), strict=True))

    def make(item: ItemKey) -> list[Item]:
        keys, values = draws(item.rng, haystack_text)
        bound = [(key, next(values)) for key in islice(keys, niah.keys) for _ in range(niah.values)]
        # The first keys are asked for; their positions are drawn
        queried = bound[: niah.queries * niah.values]
        bound_texts = {text for pair in bound for text in pair}

        def build(size: int) -> tuple[list[str], tuple[int, ...]]:
            if niah.haystack == "needles":
                pairs = distractors.first(size + 2 * len(bound))
                others = (pair for pair in pairs if bound_texts.isdisjoint(pair))
                pieces = item.shuffled([*map(needle, islice(others, size))])
            else:
                pieces = list(islice(cycle(lines), size))
            pieces, places = _insert(pieces, [*map(needle, bound)], item.depths(len(bound)))
            return pieces, places[: len(queried)]

        question = ALL_VALUES if len(queried) > 1 else ONE_VALUE
        question = question.format(type=niah.value, keys=", ".join(dict(queried)))
        task = Task(item.id, question, tuple(value for _, value in queried))
        return [Item(task, build, 2 * len(bound))]

    return make


def _vt(item: ItemKey) -> list[Item]:
    rng = item.rng
    value = str(rng.randint(10000, 99999))
    names = [*islice(_distinct(lambda: "".join(rng.choices(CONSONANTS.upper(), k=5))), HOPS + 1)]
    chained = [FIRST.format(name=names[0], value=value)]
    chained += [HOP.format(name=b, other=a) for a, b in pairwise(names)]
    depths = sorted(item.depths(HOPS + 1))
    task = Task(item.id, ALL_NAMES.format(value=value), tuple(names))
    return [Item(task, lambda size: _insert([FILLER] * size, chained, depths), HOPS + 1)]


def _cwe(item: ItemKey) -> list[Item]:
    rng = item.rng
    words = rng.sample(_words()[2], len(_words()[2]))
    common: list[str] = []
    for word in words:
        if len(common) == COMMON:
            break
        if len(word) > 3 and not any(word in other or other in word for other in common):
            common.append(word)
    endless = _distinct(chain(words, iter(lambda: DRAW["word"](rng), "")).__next__)
    # A word that contains an answer would be taken for it
    others = CachedIterator(
        word for word in endless if not any(answer in word for answer in common)
    )

    def build(repeats: tuple[int, int], size: int) -> tuple[list[str], tuple[int, ...]]:
        return item.shuffled(common * repeats[0] + others.first(size) * repeats[1]), ()

    task = Task(item.id, ALL_COMMON.format(n=COMMON), tuple(common))
    choices = REPEATS[1:] if item.tokens < 4096 else REPEATS
    return [Item(task, partial(build, repeats), COMMON) for repeats in choices]


def _fwe(item: ItemKey) -> list[Item]:
    rng = item.rng
    coded = CachedIterator(chain(["..."], _distinct(lambda: "".join(rng.choices(CONSONANTS, k=6)))))

    def build(size: int) -> tuple[list[str], tuple[int, ...]]:
        ranks = range(1, item.tokens // 50 + 1)
        counts = [n for rank in ranks if (n := int(size / rank**2 / ZETA))]
        words = zip(coded.first(len(counts)), counts, strict=True)
        return item.shuffled([word for word, n in words for _ in range(n)]), ()

    task = Task(item.id, ALL_CODED, tuple(coded.first(4)[1:]))
    # From 80 words on, the counts of the second to the fifth rank differ
    return [Item(task, build, 80)]


def _qa(
    questions: Sequence[Task], extra: Pool | None, seed: int, count: Callable[[str], int]
) -> Maker:
    """Return the maker of a qa task's items. `count` returns a text's tokens."""
    if any(task.pool is None or task.pool.frame != "documents" for task in questions):
        needed = "questions with paragraphs of their own, such as SQuAD's or HotpotQA's"
        raise UserError(f"The qa tasks need {needed}; give some.")
    chosen = list(questions)
    random.Random(str(seed)).shuffle(chosen)
    pools = {id(pool): pool for pool in (*(task.pool for task in questions), extra) if pool}
    passages = readers.distinct_passages(pools.values())

    @cache
    def cost(passage: readers.Passage) -> int:
        """Estimate the tokens that the passage adds to a document."""
        return count("\n\n" + FRAMES["documents"][0](100, *passage))

    def make(item: ItemKey) -> list[Item]:
        task = chosen[item.number]
        own = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        needed = [own[k] for k in dict.fromkeys(task.gold or range(len(own)))]
        shuffled = random.Random(f"{seed}:{task.id}").sample(passages, len(passages))
        titles, texts = {title.casefold() for title, _ in own}, {text for _, text in own}
        fresh = [passage for passage in shuffled if passage[1] not in texts]
        others = [passage for passage in own if passage not in needed]
        # Under one of their titles: in SQuAD other paragraphs of the article, elsewhere maybe other
        # versions of a gold paragraph
        same_title = [passage for passage in fresh if passage[0].casefold() in titles]
        others += same_title if task.dataset == "squad" else []
        others += [passage for passage in fresh if passage[0].casefold() not in titles]

        def build(size: int) -> tuple[list[readers.Passage], tuple[int, ...]]:
            pieces, room, misses = list(needed), size - sum(map(cost, needed)), 0
            for passage in others:
                if cost(passage) <= room:
                    pieces.append(passage)
                    room -= cost(passage)
                elif (misses := misses + 1) == MISSES:
                    break
            return item.shuffled(pieces), tuple(pieces.index(own[k]) for k in task.gold)

        return [Item(task, build, sum(map(cost, needed)), len(needed) + len(others))]

    return make


# ---------------------------------------------------------------- sizes and tasks


def _fit(
    item: Item, count: Callable[[list], int], limit: int
) -> tuple[list, tuple[int, ...], int] | None:
    """Return pieces, places and tokens of the longest document of at most `limit` tokens, short of
    it by at most a piece or a thousandth; None if even the smallest is too long.

    Each is tokenized as a whole, since tokenizers are not additive. The search interpolates between
    sizes (secant method); small documents come first and reveal the tokens of a piece, so that few
    long ones are needed:

        tokens  limit - - - - - - - - - - - - - - - x high: too long
                aim   - - - - - - - - - - - + next
                                      x low: the longest so far that fits
                     x least
    """
    built = item.build(item.least)
    least = low = item.least, count(built[0])
    if low[1] > limit:
        return None
    high, size, aim = None, 2 * item.least + 20, limit - limit // 2000
    for _ in range(ROUNDS):
        attempt = item.build(size)
        if (n_tokens := count(attempt[0])) > limit:
            high = size, n_tokens
            # Aim lower each time: pieces may be large, so a size less may change nothing
            aim -= limit - aim + 1
        else:
            low, built = (size, n_tokens), attempt
        # The aim lies on the line through two known (size, tokens)
        (size_a, tokens_a), (size_b, tokens_b) = (low, high) if high else (least, low)
        step = (aim - low[1]) * (size_b - size_a) / max(1, tokens_b - tokens_a)
        size = low[0] + int(step)
        size = min(size, high[0] - 1 if high else GROWTH * low[0])
        if size <= low[0] or limit - low[1] <= limit // 1000:
            break
    return *built, low[1]


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
    """Make n tasks of one of `KINDS`, for contexts of `tokens` tokens; they share one pool.

    Document (tokenized by itself, as a whole), question, `ALLOWANCE` for the answer and `TEMPLATE`
    for the prompt around them have at most `tokens` tokens together. They fall short by a piece or
    so (a line, a needle, three entries of cwe, the shortest passages of qa) or by a thousandth:
    from 4,096 tokens on they reach 95 %, unless a piece has hundreds of tokens (long sentences,
    passages of qa, a tokenizer that knows few words).

    haystack: sentences (`sentences` makes them from texts), for the needle tasks with an essay;
    repeated from the start when they end.
    questions: tasks with paragraphs as `readers.read` returns them, for qa_1 and qa_2.
    extra: further passages to lengthen documents with.

    Everything follows from (seed, kind, number of the item, tokens), nothing from n or other items.
    Ids, questions, keys and answers are the same at every length; depths and orders are not.
    `gold` has the positions of the needles in question, in the order of the answers; of vt's five
    assignments; of a qa question's supporting paragraphs. cwe and fwe have none: all of their
    document is evidence.

    UserError: questions without paragraphs, too few tokens or passages.
    """
    family = kind.partition("_")[0]

    def count(text: str) -> int:
        return len(codec.ids(text))

    if family == "qa":
        frame, make = "documents", _qa(questions, extra, seed, count)
    elif family == "niah":
        frame, make = FRAME[NIAH[kind].haystack], _niah(kind, seed, haystack)
    else:
        frame, make = FRAME[kind], {"vt": _vt, "cwe": _cwe, "fwe": _fwe}[kind]

    def pool_of_pieces(pieces: Iterable) -> Pool:
        return readers.pool_of(
            pieces if family == "qa" else (("", piece) for piece in pieces), frame
        )

    def count_pieces(pieces: list) -> int:
        return count(pool_of_pieces(pieces).document(range(len(pieces))))

    tasks, index = [], {}
    for number in range(n):
        items = make(ItemKey(kind, seed, number, tokens))
        task = items[0].task  # all have the same
        room = tokens - count(task.question) - ALLOWANCE[family] - TEMPLATE
        # The first that fits at all is taken
        fitted = ((item, found) for item in items if (found := _fit(item, count_pieces, room)))
        item, (pieces, gold, used) = next(fitted, (None, ((), (), 0)))
        if item is None:
            reason = f"its smallest document has more than {max(0, room)}"
            raise UserError(f"{tokens} tokens are too few for {task.id}: {reason}.")
        if len(pieces) == item.most and used < 0.95 * room:
            shortage = f"all {len(pieces)} passages have {used} tokens and {room} are wanted"
            raise UserError(f"{task.id}: {shortage}; give more.")
        order = tuple(index.setdefault(piece, len(index)) for piece in pieces)
        labels = {"kind": kind, "dataset": "ruler", "tokens": tokens}
        tasks.append(replace(task, pool=None, order=order, gold=gold, **labels))
    pool = pool_of_pieces(index)
    return [replace(task, pool=pool) for task in tasks]
