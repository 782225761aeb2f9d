"""RULER's thirteen tasks: sizes, needles, answers, and that nothing depends on other items."""

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from test_readers import SHARED, real
from wonderwords import is_profanity

from config.errors import UserError
from data import Pool, Task, grade
from embedded import tiny
from suites import ruler
from suites.ruler import KINDS, NIAH, make_tasks, sentences
from tasks.environments import fingerprint
from tasks.readers import read, read_passages
from tasks.writers import write_built
from tokens.codec import Characters, Codec

EVIDENT = [kind for kind in KINDS if kind not in ("cwe", "fwe")]  # evidence stands somewhere


def prose(seed: int, n: int) -> list[str]:
    """n sentences of 5 to 12 of wonderwords' words."""
    rng, words = random.Random(seed), ruler._words()[2]
    return [" ".join(rng.choices(words, k=rng.randint(5, 12))).capitalize() + "." for _ in range(n)]


HAYSTACK = prose(0, 400)
FILLER = Pool(
    [f"Filler {i}" for i in range(800)], [" ".join(prose(100 + i, 2 + i % 4)) for i in range(800)]
)


def questions(own: int) -> list[Task]:
    """Make twelve questions with `own` paragraphs, of which one (or two, if there are so many)
    supports; the answer is in the last of these."""
    pool = Pool([f"Own {i}.{k}" for i in range(12) for k in range(own)], [])
    tasks = []
    for i in range(12):
        texts = HAYSTACK[10 * i : 10 * i + own]
        texts[min(own, 2) - 1] = f"{' '.join(prose(5000 + i, 2))} It says zyx{i}."
        order, gold = range(own * i, own * i + own), (0,) if own == 1 else (i % 2, 1 - i % 2)
        asked = f"What is said in {i}?", (f"zyx{i}.",)
        tasks.append(Task(f"q{i}", *asked, pool=pool, order=order, gold=gold))
        pool.texts += texts
    return tasks


QUESTIONS = {"qa_1": questions(1), "qa_2": questions(6)}


@cache
def codec(name: str) -> Codec:
    if name == "embedded":
        return Codec(tiny.make_tokenizer())
    if name == "characters":
        return Characters()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(prose(1, 600), trainer)
    return Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))


@cache
def made(kind: str, tokens: int = 4096, n: int = 3, name: str = "bpe", seed: int = 0) -> list[Task]:
    return make_tasks(kind, tokens, n, codec(name), seed, HAYSTACK, QUESTIONS.get(kind, ()), FILLER)


def passages(task: Task) -> list[str]:
    return [task.pool.texts[k] for k in task.order]


def check_length(task: Task, encoder: Codec, least: float = 0.95) -> None:
    room = ruler.ALLOWANCE[task.kind.partition("_")[0]] + 100
    used = len(encoder.encode(task.document)) + len(encoder.encode(task.question)) + room
    assert least * task.tokens <= used <= task.tokens, (task.id, used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["embedded", "bpe"])
def test_the_length_is_held_and_used(kind, name):
    for task in made(kind, 4096, 3, name):
        check_length(task, codec(name))
        assert (task.kind, task.dataset, task.tokens) == (kind, "ruler", 4096)
    check_length(*made(kind, 1500, 1, name), codec(name), 0.7)
    if kind in ("niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_2") and name == "bpe":
        check_length(*made(kind, 32768, 1), codec("bpe"), 0.99)


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answers_stand_in_the_evidence_and_nothing_else_is_worth_anything(kind):
    def scored(task: Task, said: list[str]) -> float:
        return grade(f"\\boxed{{{', '.join(said)}}}", task.answers, "boxed", not qa).sub_em

    qa, tasks = kind.startswith("qa"), made(kind)
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        texts, gold = passages(task), {*task.gold}
        assert task.asks_for_all == (not qa) and (len(texts) > 20 or qa)
        assert scored(task, list(task.answers[-1:] if qa else task.answers)) == 1
        assert scored(task, []) == scored(task, ["I do not know"]) == 0
        if kind in EVIDENT:  # the ten words of the others may come again
            assert scored(task, list(other.answers)) == 0
            for answer in task.answers:
                holders = {k for k, text in enumerate(texts) if answer.lower() in text.lower()}
                assert answer not in task.question and holders and holders <= gold
        if kind in NIAH:
            pairs = zip(task.answers, task.gold, strict=True)
            assert all(answer in texts[k] for answer, k in pairs)
        wrong = {text for k, text in enumerate(texts) if k not in gold}
        assert scored(task, sorted(wrong - {*task.answers})) == 0  # all else of the document


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_decided_by_its_seed_and_comes_back(kind, tmp_path):
    def anew(seed: int, n: int = 3, tokens: int = 2000) -> list[Task]:
        given = HAYSTACK, QUESTIONS.get(kind, ()), FILLER
        return make_tasks(kind, tokens, n, codec("characters"), seed, *given)

    tasks, longer = anew(5), anew(5, 5, 4000)
    write_built(tmp_path / "a.jsonl", tasks, seed=5)
    back = read(tmp_path / "a.jsonl")
    assert back == tasks and [task.tokens for task in back] == [2000] * 3
    assert [task.document for task in back] == [task.document for task in tasks]
    pool, used = tasks[0].pool, {k for task in tasks for k in task.order}
    assert all(task.pool is pool for task in tasks) and used == {*range(len(pool.texts))}
    assert all(a.document != b.document for a, b in zip(tasks, anew(6), strict=True))
    for a, b, c in zip(tasks, anew(5, 5), longer, strict=False):
        assert (a.id, a.answers, a.document, a.gold) == (b.id, b.answers, b.document, b.gold)
        assert (a.id, a.question, a.answers) == (c.id, c.question, c.answers)
        assert len(a.document) < len(c.document)
    assert len({task.id for task in longer}) == len({task.answers for task in longer}) == 5


DIGESTS = {
    "niah_single_1": "aea05c4e68da6c10",
    "niah_single_2": "d27b6b3c1bcf0d5f",
    "niah_single_3": "9cf60b1a09c09eb3",
    "niah_multikey_1": "031929bca6e1eee4",
    "niah_multikey_2": "c55ace7f18cc42d6",
    "niah_multikey_3": "a9954193c8182e11",
    "niah_multivalue": "6dd166ab947f049d",
    "niah_multiquery": "6a6023ea70cea662",
    "vt": "043e7c6401de63f1",
    "cwe": "e2ad078f91b33aa0",
    "fwe": "33c13839a0f4b55a",
    "qa_1": "046ffcc92ad0ba60",
    "qa_2": "056ba7bca25a0af9",
}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_those_of_always(kind):
    """Rows of an earlier version go on only if not a letter has changed."""
    tasks = made(kind, 3000, 3, "characters", 7)
    assert (
        fingerprint([(t.id, t.question, t.answers, t.document, t.gold) for t in tasks])
        == (DIGESTS[kind])
    )


SHAPES = {
    "word": "[a-z]+-[a-z]+",
    "number": "[1-9][0-9]{6}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}


@pytest.mark.parametrize("kind", NIAH)
def test_needles(kind):
    setting = NIAH[kind]
    form = ruler.NEEDLE.format(key="(?P<k>\\S+)", type=setting.value, value="(?P<v>\\S+)")
    for task in made(kind):
        found = [re.fullmatch(form, text) for text in passages(task)]
        keys = Counter(match["k"] for match in found if match)
        values = [match["v"] for match in found if match]
        assert len({*values}) == len(values) and {*keys.values()} == {setting.values}
        assert all(re.fullmatch(SHAPES[setting.key], key) for key in keys)
        assert all(re.fullmatch(SHAPES[setting.value], value) for value in values)
        assert sum(key in task.question for key in keys) == setting.queries
        assert len(task.answers) == setting.queries * setting.values
        rest = [t for t, match in zip(passages(task), found, strict=True) if not match]
        lines = HAYSTACK if setting.haystack == "essay" else [ruler.FILLER]
        assert rest == [lines[k % len(lines)] for k in range(len(rest))]
        assert len(keys) == setting.keys or (setting.haystack == "needles" and not rest)


def test_vt_is_one_chain_in_reading_order():
    form = r"Now ([A-Z]{5}) is given (?:the value (\d+)|what ([A-Z]{5}) has)\."
    for task in made("vt", 4096, 5):
        before, names, places = re.search(r"\d{5}", task.question)[0], [], []
        for place, text in enumerate(passages(task)):
            if text != ruler.FILLER:
                name, value, other = re.fullmatch(form, text).groups()
                # Each from the one before, the first from the value
                assert before == (value or other) and bool(value) == (not names)
                before = name
                names.append(name)
                places.append(place)
        assert (tuple(names), tuple(places)) == (task.answers, task.gold) and len({*names}) == 5


def test_cwe_counts():
    single = {*ruler._words()[2]}
    assert len(single) > 7800 and not any(map(is_profanity, single))
    for tokens, repeats in ((8192, (30, 3)), (4000, (6, 1))):
        for task in made("cwe", tokens, 2):
            said = re.findall(r"(\d+)\. (\S+)", task.document)
            assert [int(number) for number, _ in said] == [*range(1, len(said) + 1)]
            counts = Counter(word for _, word in said)
            assert {word for word, n in counts.most_common(10)} == {*task.answers}
            assert {n for word, n in counts.items() if word in task.answers} == {repeats[0]}
            assert {n for word, n in counts.items() if word not in task.answers} == {repeats[1]}
            assert {*counts} <= single and min(map(len, task.answers)) > 3
            assert not any(a in word for word in counts for a in task.answers if a != word)
    # 300 entries do not fit in
    assert Counter(passages(made("cwe", 4096, 3, "embedded")[0])).most_common(1)[0][1] == 6
    item, _ = ruler._cwe(ruler.ItemKey("cwe", 0, 0, 4096))
    counts = Counter(item.build(9000)[0])  # more than there are single words: pairs follow
    pairs = {*counts} - single
    assert len(counts) == 9010 and len(pairs) > 900
    assert all({*word.split("-")} <= single for word in pairs)


@pytest.mark.parametrize(("tokens", "n"), [(700, 5), (4096, 5), (32768, 1)])
def test_fwe_counts(tokens, n):
    for task in made("fwe", tokens, n):
        counts = Counter(task.document.split())
        noise, *ranks = counts.most_common()
        assert noise[0] == "..." and tuple(word for word, _ in ranks[:3]) == task.answers
        assert noise[1] > ranks[0][1] > ranks[1][1] > ranks[2][1] > ranks[3][1] >= 1
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranks)
        assert noise[1] / ranks[0][1] == pytest.approx(4, abs=0.5)
        assert noise[1] / ranks[1][1] == pytest.approx(9, abs=2)


@pytest.mark.parametrize("kind", QUESTIONS)
def test_qa_documents_hold_the_own_paragraphs_first_and_no_second_version(kind):
    by_id = {task.id: task for task in QUESTIONS[kind]}
    own = QUESTIONS[kind][0].pool
    copies = [f"Copy {k}" for k in range(len(own.texts))]
    titles = [*(title.upper() for title in own.titles), *copies, *FILLER.titles]
    more = Pool(titles, [*["Other words."] * len(own.titles), *own.texts, *FILLER.texts])
    tasks = make_tasks(kind, 5000, 12, codec("characters"), 0, questions=[*by_id.values()],
                       extra=more)  # fmt: skip
    for task in tasks:
        source = by_id[task.id]
        mine = [(own.titles[k], own.texts[k]) for k in source.order]
        document = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        akin = [(a, b) for a, b in document if (a.title(), b) in mine or b in dict(mine).values()]
        assert {*akin} == {*mine} and len(document) == task.n_documents > 20
        assert not {a for a, _ in document} & {title.upper() for title, _ in mine}
        assert [document[k] for k in task.gold] == [mine[k] for k in source.gold]
        assert (task.question, task.answers) == (source.question, source.answers)
    assert len({task.gold for task in tasks}) > 3
    orders = [[t.id for t in made(kind, 4096, 12, "bpe", seed)] for seed in (0, 1)]
    assert orders[0] != orders[1] and [*by_id] not in orders


def test_sentences():
    text = (
        'It rains.  He said "Stop!" Then\n(quietly) he left. 7 came? "Yes." '
        "It cost 3.5 francs. the end"
    )
    assert sentences([text, "", " One.\n"]) == [
        "It rains.", 'He said "Stop!"', "Then (quietly) he left.", "7 came?", '"Yes."',
        "It cost 3.5 francs. the end", "One.",
    ]  # fmt: skip


def test_settings_that_cannot_be_built_are_refused():
    c, qa = codec("bpe"), {"questions": QUESTIONS["qa_1"]}
    whole = {"haystack": HAYSTACK, "extra": FILLER}
    for kind, tokens, given in (
        *((kind, 150, whole | {"questions": QUESTIONS.get(kind, ())}) for kind in KINDS),
        ("qa_2", 4096, {"questions": [Task("x", "Q?", ("A",), text="C")]}),
        ("qa_2", 4096, {"questions": made("vt")}),
        ("qa_1", 9000, qa),  # too few passages
    ):
        with pytest.raises(UserError):
            make_tasks(kind, tokens, 1, c, **given)


def test_other_paragraphs_of_a_squad_article_come_first():
    titles = ["Bees"] * 4 + [f"Other {k}" for k in range(400)]
    pool = Pool(titles, [f"Bees, part {k}." if k < 4 else f"Text {k}." for k in range(404)])
    source = Task("s", "Which part?", ("part 0",), pool=pool, order=(0,), gold=(0,))
    for dataset, n in (("squad", 4), ("hotpotqa", 1)):
        given = [replace(source, dataset=dataset)]
        (task,) = make_tasks("qa_1", 1024, 1, codec("embedded"), questions=given, extra=pool)
        titles = [task.pool.titles[k] for k in task.order]
        assert titles.count("Bees") == n and len(titles) < 200
        assert task.evidence == "Document 1:\nBees\nBees, part 0."


@real
@pytest.mark.parametrize(
    ("kind", "file"), [("qa_1", "xquad_en.json.gz"), ("qa_2", "hotpotqa_dev.jsonl.gz")]
)
def test_real_questions(kind, file):
    source, extra = read(SHARED / file), read_passages(SHARED / "passages_extra.jsonl.gz")
    by_id = {task.id: task for task in source}
    for task in make_tasks(kind, 8192, 3, codec("bpe"), 0, questions=source, extra=extra):
        check_length(task, codec("bpe"))
        own = by_id[task.id]
        evidence = [own.pool.texts[own.order[k]] for k in own.gold]
        assert [passages(task)[k] for k in task.gold] == evidence
        titles = [task.pool.titles[k].casefold() for k in task.order]
        if kind == "qa_1":
            article = {own.pool.titles[k].casefold() for k in own.order}
            assert sum(title in article for title in titles) > 1
            assert any(answer in evidence[0] for answer in task.answers)
        else:
            assert all(titles.count(titles[k]) == 1 for k in task.gold)
